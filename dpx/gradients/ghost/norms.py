"""The norm of G = A^T B without, or by way of, G; for one example, in float32.

A is (K, T, I), what went into a layer, and B is (K, T, O), the gradient of what came out: K groups, T positions.
`scale`, (K, I, O), multiplies G.

No norm may be underestimated, but for its last digits. Squares of A and of B alone vanish or overflow where those of G
do not, so every position is measured by its own size (`balanced`). To sums that can cancel, a bound on their rounding
error is added, less a small share of the sum itself (`SLACK`): so it counts where they did cancel, and nowhere else.

Sizes have a range. A cotangent above LARGEST = 2^63, an input above it whose cotangent is not 0, or a product above it
makes the norm infinite, so that the example contributes zero. There are two reasons. XLA divides by a broadcast size by
multiplying with 1 / size; above 2^126 that is denormal and flushed to 0, and so was the norm. And a clip factor times a
cotangent is flushed to 0 below 2^-126; times an input, that is an error of at most 2^-63.
"""

import math

import jax
import jax.numpy as jnp

from dpx._contributions import LARGEST

EXACT = jax.lax.Precision.HIGHEST
EPS, TINY = float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(jnp.float32).tiny)
SLACK = 1e-3  # of a norm, by which its rounding may lower it
LONGEST_SUM = 1024  # terms of a sum; longer ones are made in parts


def outer(a: jax.Array, b: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """One position: |a b^T| = |a| |b|, and |scale * a b^T|^2 = (a a)^T (scale scale) (b b)."""
    if scale is None:
        a, b, size = balanced(a, b)
        return size * jnp.sqrt(jnp.sum(jnp.sum(a * a, -1) * jnp.sum(b * b, -1)))
    # What is frozen may be huge: it must not hide the rest. What vanishes is replaced by the largest that does.
    a, size_a = unit(_trained(a[:, 0], scale, axis=2))
    b, size_b = unit(_trained(b[:, 0], scale, axis=1))
    squares_scale = jnp.where(scale == 0, 0, jnp.maximum(scale * scale, TINY))
    squares = jnp.einsum("kio,ko->ki", squares_scale, b * b + TINY, precision=EXACT)  # of the rows of the scaled B
    rows, size = unit((a * (jnp.sqrt(squares) * in_range(size_a, size_b))).reshape(-1))
    return in_range(frobenius(rows), size[0])


def _trained(x: jax.Array, scale: jax.Array, *, axis: int) -> jax.Array:
    """`x`, (K, n), but 0 where it is finite and `scale`, (K, I, O), is 0 along all of `axis`."""
    return jnp.where(jnp.any(scale != 0, axis=axis) | ~jnp.isfinite(x), x, 0)


def gram(a: jax.Array, b: jax.Array) -> jax.Array:
    """|G|^2 = sum_st (a_s . a_t)(b_s . b_t)."""
    a, b, size = balanced(a, b)
    grams_a, grams_b = inner(a, a), inner(b, b)
    diagonals = jnp.diagonal(grams_a, 0, 1, 2) * jnp.diagonal(grams_b, 0, 1, 2)
    largest = jnp.sum(jnp.sum(jnp.sqrt(diagonals), -1) ** 2)
    squared = jnp.sum(jnp.sum(grams_a * grams_b, -1))
    return size * uncancelled(squared, largest, terms=terms(a.shape[2]) + terms(b.shape[2]) + 2 * a.shape[1])


def inner(left: jax.Array, right: jax.Array) -> jax.Array:
    """The inner products (K, S, T) of the rows of (K, S, n) and (K, T, n)."""
    count = _segments(left.shape[-1])
    if count == 1:
        return jnp.einsum("ksi,kti->kst", left, right, precision=EXACT)

    def in_segments(x):
        width = math.ceil(x.shape[-1] / count)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, count * width - x.shape[-1])))
        return padded.reshape(*x.shape[:-1], count, width)

    return jnp.sum(jnp.einsum("kspi,ktpi->kpst", in_segments(left), in_segments(right), precision=EXACT), axis=1)


def terms(size: int) -> int:
    """How often a term of `inner` over `size` is rounded at most."""
    return math.ceil(size / _segments(size)) + _segments(size)


def _segments(size: int) -> int:
    return max(1, math.ceil(size / LONGEST_SUM))


def uncancelled(squared: jax.Array, largest: jax.Array, *, terms: int) -> jax.Array:
    """The root of a sum that rounds by at most `terms` eps / 2 of `largest`, what it is if nothing cancels."""
    squared = jnp.maximum(squared, 0)
    bounded = (1 - 2 * SLACK) * squared + terms * EPS / 2 * largest
    return jnp.sqrt(jnp.maximum(squared + EPS * largest, bounded))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """G itself, (K, I, O)."""
    return jnp.einsum("kti,kto->kio", a, b, precision=EXACT)


def rows(indices: jax.Array, b: jax.Array) -> jax.Array:
    """G adds b_t, (T, O), to row `indices[t]`, and nothing where that is negative.

    |G|^2 = sum_t |sum of the b_s in the row of t|^2 / how many t are in that row.
    """
    same = (indices[:, None] == indices[None, :]) & (indices >= 0)[:, None]
    same = same.astype(jnp.float32)
    b = jnp.where((indices >= 0)[:, None], b, 0)
    count = jnp.maximum(jnp.sum(same, -1), 1)
    size = frobenius(jnp.matmul(same, b, precision=EXACT) / jnp.sqrt(count)[:, None])
    unit_b, sizes = unit(b)
    sizes = in_range(jnp.ones_like(sizes), sizes)
    lengths = jnp.matmul(same, jnp.sqrt(jnp.sum(unit_b * unit_b, -1)) * sizes[:, 0], precision=EXACT)
    rounding = frobenius((count + 1) * lengths / jnp.sqrt(count)) * EPS  # of this sum and of the weighted one
    return jnp.maximum(size, (1 - SLACK) * size + rounding)


def frobenius(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = unit * size, (..., n) and (..., 1), with entries of at most 1: squares neither vanish nor overflow."""
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0)
    return x / jnp.maximum(size, TINY), jnp.where(size > 0, jnp.maximum(size, TINY), size)


def balanced(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A and B with the same A^T B over `size`, and the largest |a_t| |b_t| of a position about 1, of no other more.

    What vanishes from a square then is less than 1e-18 of the norm, wherever the sizes of A and of B lie.
    """
    (a, size_a), (b, size_b) = unit(a), unit(b)
    sizes = in_range(size_a, size_b)
    size = jnp.maximum(jnp.max(sizes, initial=0), TINY)
    return a, b * (sizes / size), size


def in_range(size_a: jax.Array, size_b: jax.Array) -> jax.Array:
    """The product of the sizes of inputs and their cotangents, of one shape; infinite where one of the three leaves the
    range. A finite input whose cotangent is 0 may have any size, because it is in no sum.
    """
    sizes = size_a * size_b
    inside = (size_b <= LARGEST) & (sizes <= LARGEST) & ((size_a <= LARGEST) | (sizes == 0))
    return jnp.where(inside, sizes, jnp.inf)
