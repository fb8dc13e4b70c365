"""Subsampled randomized Hadamard transform: random signs, H / sqrt(b) in blocks of b coordinates, p of the results."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpx.coordinates.projections.sketch import EXACT, Segments, Sketch, random_signs, sizes_of, split, transposed
from dpx.coordinates.projections.subset import chosen

BLOCK = 2**12  # coordinates of a block at most, a power of 2, so that the transform's two factors are 64 x 64


def transform(blocks: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of every row of (n, 2^k), not scaled, as two matrix products.

    H = H_a (x) H_c, a Kronecker product with a c = 2^k. Two products are faster than k passes of additions.
    """
    rows, size = blocks.shape
    order = size.bit_length() - 1
    left, right = (jnp.asarray(_hadamard(half), blocks.dtype) for half in (order // 2, order - order // 2))
    grid = blocks.reshape(rows, len(left), len(right))
    grid = jnp.einsum("nac,cd->nad", grid, right, precision=EXACT)
    return jnp.einsum("nad,ab->nbd", grid, left, precision=EXACT).reshape(rows, size)


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    sizes = sizes_of(segments)
    padded = [_padded(size) for size in sizes]
    sign_key, row_key = jax.random.split(key)
    signs = split(random_signs(sign_key, sum(sizes)), sizes)
    kept = chosen(row_key, padded, rank)
    return [_mixed(*each, scale=math.sqrt(sum(padded) / rank)) for each in zip(segments, signs, kept, strict=True)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(map(_padded, sizes)) / rank)


def _mixed(segment: jax.Array, signs: jax.Array, kept: jax.Array, *, scale: float) -> jax.Array:
    """The transform of one segment, padded to blocks, times `scale`, with zeros where it is not kept."""
    block = _block(segment.size)
    signed = jnp.pad(segment * signs, (0, kept.size - segment.size)).reshape(-1, block)
    return transform(signed).reshape(-1) * jnp.where(kept, scale / math.sqrt(block), 0)


def _block(size: int) -> int:
    """The block of a segment: the power of 2 that holds it, or the largest block."""
    return min(BLOCK, 1 << (size - 1).bit_length())


def _padded(size: int) -> int:
    return _block(size) * math.ceil(size / _block(size))


def _hadamard(order: int) -> np.ndarray:
    """The Hadamard matrix of 2^order rows, float64, of 1 and -1."""
    matrix = np.ones((1, 1))
    for _ in range(order):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


HADAMARD = Sketch(project, transposed(project), stretch)
