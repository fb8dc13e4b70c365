"""Subsampled randomized Hadamard transform: random signs, then H / sqrt(b) in blocks of b, then p of the results."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from scipy.linalg import hadamard

from dpx.papers.d2p2_sgd.projections.sketch import EXACT, Segments, Sketch, random_signs, split, transposed
from dpx.papers.d2p2_sgd.projections.subset import chosen

BLOCK = 2**12  # coordinates of a block at most, a power of 2, so that the transform's two factors are 64 x 64


def transform(blocks: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of every row of float32 (n, 2^k), not scaled, as two matrix products.

    H = H_a (x) H_c, a Kronecker product with a c = 2^k. Two products are faster than k passes of additions.
    """
    rows, size = blocks.shape
    order = size.bit_length() - 1
    left, right = (jnp.asarray(hadamard(2**half), blocks.dtype) for half in (order // 2, order - order // 2))
    grid = blocks.reshape(rows, len(left), len(right))
    grid = jnp.einsum("nac,cd->nad", grid, right, precision=EXACT)
    return jnp.einsum("nad,ab->nbd", grid, left, precision=EXACT).reshape(rows, size)


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    sizes = [segment.size for segment in segments]
    padded = [_padded(size) for size in sizes]
    sign_key, row_key = jax.random.split(key)
    signs = split(random_signs(sign_key, sum(sizes)), sizes)
    kept = chosen(row_key, padded, rank)
    return [_mixed(*each, scale=math.sqrt(sum(padded) / rank)) for each in zip(segments, signs, kept, strict=True)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(map(_padded, sizes)) / rank)


def _mixed(segment: jax.Array, signs: jax.Array, kept: jax.Array, *, scale: float) -> jax.Array:
    """The transform of one segment, float32 (padded size,), times `scale`, with zeros at results that are not kept.

    segment, signs: float32 (size,). kept: bool (padded size,).
    """
    block = _block(segment.size)
    signed = jnp.pad(segment * signs, (0, kept.size - segment.size)).reshape(-1, block)
    return transform(signed).reshape(-1) * jnp.where(kept, scale / math.sqrt(block), 0)


def _block(size: int) -> int:
    """The block size for a segment: the least power of 2 that is at least its size, but at most BLOCK."""
    return min(BLOCK, 1 << (size - 1).bit_length())


def _padded(size: int) -> int:
    return _block(size) * math.ceil(size / _block(size))


HADAMARD = Sketch(project, transposed(project), stretch)
