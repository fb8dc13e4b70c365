"""Gaussian: A^T v / sqrt(p), where A is a d x p matrix of standard normals, drawn in blocks of the rows of A^T."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.papers.d2p2_sgd.projections.sketch import DRAWN_AT_ONCE, DRAWS, EXACT, Segments, Sketch, split


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    vector = jnp.concatenate(segments)

    def block(_, number):
        return None, jnp.dot(_rows(key, number, vector.size, rank), vector, precision=EXACT)

    _, coordinates = jax.lax.scan(block, None, jnp.arange(_blocks(vector.size, rank)))
    return [coordinates.reshape(-1)[:rank] / math.sqrt(rank)]


def lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
    size = sum(sizes)

    def block(total, numbered):
        number, chunk = numbered
        return total + jnp.dot(chunk, _rows(key, number, size, rank), precision=EXACT), None

    blocks, height = _blocks(size, rank), _height(size, rank)
    chunks = jnp.pad(coordinates[0], (0, blocks * height - rank)).reshape(blocks, height)
    total, _ = jax.lax.scan(block, jnp.zeros(size), (jnp.arange(blocks), chunks))
    return split(total / math.sqrt(rank), sizes)


def _height(size: int, rank: int) -> int:
    """How many rows of A^T, of d = `size` numbers each, are drawn at once."""
    return max(1, min(rank, DRAWN_AT_ONCE // size))


def _blocks(size: int, rank: int) -> int:
    return -(-rank // _height(size, rank))


def _rows(key: jax.Array, block: jax.Array, size: int, rank: int) -> jax.Array:
    """One block of rows of A^T, float32 (height, size)."""
    with DRAWS:
        return jax.random.normal(jax.random.fold_in(key, block), (_height(size, rank), size))


GAUSSIAN = Sketch(project, lift, stretch=None, encode_whole_batch=True)
