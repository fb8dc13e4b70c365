"""Orthonormal: Q^T v in blocks of about 64 coordinates; each block has its own Haar-random Q, by QR of Gaussians."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpx.papers.d2p2_sgd.projections.sketch import DRAWN_AT_ONCE, DRAWS, EXACT, Segments, Sketch, split

BLOCK = 64  # coordinates of a block, at least; d / p if that is more, so that every block has a column


class Blocks(NamedTuple):
    """How d coordinates are cut into blocks, and the columns of each block's Q.

    count: the number of blocks. size: the number of coordinates in each.
    columns: the number of columns of the first `wide` blocks; the other blocks have one column fewer.
    together: the number of blocks in a chunk, which are drawn at once. chunks: their number; the last is filled up.
    """

    count: int
    size: int
    columns: int
    wide: int
    together: int
    chunks: int


def blocks_of(size: int, rank: int) -> Blocks:
    count = math.ceil(size / max(BLOCK, math.ceil(size / rank)))
    block, columns = math.ceil(size / count), math.ceil(rank / count)
    together = max(1, min(count, DRAWN_AT_ONCE // (block * columns)))
    return Blocks(count, block, columns, rank - (columns - 1) * count, together, math.ceil(count / together))


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    vector = jnp.concatenate(segments)
    blocks = blocks_of(vector.size, rank)
    padding = blocks.chunks * blocks.together * blocks.size - vector.size
    chunks = jnp.pad(vector, (0, padding)).reshape(blocks.chunks, blocks.together, blocks.size)
    return [_each_chunk("bsc,bs->bc", key, blocks, chunks)]


def lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
    blocks = blocks_of(sum(sizes), rank)
    chunks = coordinates[0].reshape(blocks.chunks, blocks.together, blocks.columns)
    return split(_each_chunk("bsc,bc->bs", key, blocks, chunks), sizes)


def stretch(sizes: Sequence[int], rank: int) -> float:
    """sqrt(size / columns) of the blocks with the fewest columns, where P is this factor times an orthonormal map."""
    blocks = blocks_of(sum(sizes), rank)
    return math.sqrt(blocks.size / (blocks.columns if blocks.wide == blocks.count else blocks.columns - 1))


def _each_chunk(product: str, key: jax.Array, blocks: Blocks, chunks: jax.Array) -> jax.Array:
    """The einsum `product` of the matrices of every chunk with `chunks`, float32 (chunks, together, n), as one array.

    Returns float32 (m,), the results of all blocks one after another.
    """

    def chunk(_, numbered):
        number, vectors = numbered
        return None, jnp.einsum(product, _matrices(key, blocks, number), vectors, precision=EXACT)

    return jax.lax.scan(chunk, None, (jnp.arange(blocks.chunks), chunks))[1].reshape(-1)


def _matrices(key: jax.Array, blocks: Blocks, chunk: jax.Array) -> jax.Array:
    """Q sqrt(size / columns) for each block of a chunk, float32 (together, size, columns); a missing column is 0."""
    shape = blocks.together, blocks.size, blocks.columns
    with DRAWS:
        q, _ = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, chunk), shape))
    fewer = blocks.columns - 1
    wide = jnp.full(blocks.columns, math.sqrt(blocks.size / blocks.columns))
    narrow = jnp.where(jnp.arange(blocks.columns) < fewer, math.sqrt(blocks.size / max(fewer, 1)), 0)
    numbers = chunk * blocks.together + jnp.arange(blocks.together)
    return q * jnp.where((numbers < blocks.wide)[:, None], wide[None], narrow[None])[:, None]


ORTHONORMAL = Sketch(project, lift, stretch, encode_whole_batch=True)
