"""Subsampled randomized Hadamard transform: random signs, H / sqrt(b) in blocks of b coordinates, p of the results."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpx.coordinates.projections.kind import EXACT, Kind, Parts, random_signs, sizes_of, split, transposed
from dpx.coordinates.projections.subset import chosen

BLOCK = 2**12  # coordinates at most, a power of 2


def transform(blocks: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of every row of (n, 2^k), not scaled, as products of two factors of half the order.

    H = H_a (x) H_c with a c = 2^k: two products are faster than k passes of additions over memory.
    """
    rows, size = blocks.shape
    order = size.bit_length() - 1
    left, right = (jnp.asarray(_hadamard(part), blocks.dtype) for part in (order // 2, order - order // 2))
    grid = blocks.reshape(rows, len(left), len(right))
    grid = jnp.einsum("nac,cd->nad", grid, right, precision=EXACT)
    return jnp.einsum("nad,ab->nbd", grid, left, precision=EXACT).reshape(rows, size)


def project(key: jax.Array, parts: Parts, rank: int) -> Parts:
    sizes = sizes_of(parts)
    padded = [_padded(size) for size in sizes]
    sign_key, row_key = jax.random.split(key)
    signs = split(random_signs(sign_key, sum(sizes)), sizes)
    kept = chosen(row_key, padded, rank)
    return [_mixed(*each, rows=math.sqrt(sum(padded) / rank)) for each in zip(parts, signs, kept, strict=True)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(map(_padded, sizes)) / rank)


def _mixed(part: jax.Array, signs: jax.Array, kept: jax.Array, *, rows: float) -> jax.Array:
    block = _block(part.size)
    signed = jnp.pad(part * signs, (0, kept.size - part.size)).reshape(-1, block)
    return transform(signed).reshape(-1) * jnp.where(kept, rows / math.sqrt(block), 0)


def _block(size: int) -> int:
    return min(BLOCK, 1 << (size - 1).bit_length())


def _padded(size: int) -> int:
    return _block(size) * math.ceil(size / _block(size))


def _hadamard(order: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    for _ in range(order):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


HADAMARD = Kind(project, transposed(project), stretch)
