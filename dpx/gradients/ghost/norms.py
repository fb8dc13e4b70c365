"""The norm of G = A^T B, the gradient of one example, mostly without computing G; in float32.

A, float32 (K, T, I), is the input of a layer, and B, float32 (K, T, O), the cotangent of its output, for K groups and T
positions. G is (K, I, O). `scale`, float32 (K, I, O), multiplies G element by element.

An underestimated norm would break the clip bound. So each position is rescaled first (`balanced`), which keeps squares
from under- and overflowing (on matrix units, `_lengths` counts what is lost), and a sum that is long or can cancel gets
a bound on its rounding error.

A norm is infinite, so that the example contributes zero, if one of these is above LARGEST = 2^63: a cotangent, the
product of an input and its cotangent, or an input whose cotangent is not 0. There are two reasons. First, XLA divides
by a broadcast value by multiplying with its reciprocal, which above 2^126 is denormal and flushed to 0, and then the
norm would be 0 too. Second, a clip factor times a cotangent, or times an input, is flushed to 0 below 2^-126. If the
other array is at most 2^63, that is an error of at most 2^-63.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax  # `jnp` takes longer to trace

from dpx.sums.norms import norm, raised
from dpx.sums.rows import LARGEST, repeated
from dpx.sums.total import PRODUCTS, UNIT
from dpx.xla.place import here

EXACT = lax.Precision.HIGHEST  # float32 products, even where the hardware would round them
TINY = float(jnp.finfo(jnp.float32).tiny)
ROUNDING = UNIT * (1 + 2**-8)  # with the products of roundings
LONGEST_SUM = 1024  # terms; a longer sum is cut into segments, because its rounding error grows with its length
MOST_SEGMENTS = 8  # more would compile for too long


def outer(a: jax.Array, b: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """|G|, float32 (), for T = 1: |a b^T| = |a| |b|, and |scale * a b^T|^2 = (a a)^T (scale scale) (b b)."""
    if scale is None:
        # XLA compiles an array with axes of length 1 beside the same array without them, which the sum reads.
        alone = [axis for axis in (0, 1) if a.shape[axis] == 1]
        a, b = lax.squeeze(a, alone), lax.squeeze(b, alone)
        if here().unit.rounds:
            return _lengths(_lengths(a) * _lengths(b))[0]
        if a.ndim == 1:  # there is nothing to balance
            (a, size_a), (b, size_b) = unit(a), unit(b)
            return in_range(size_a, size_b) * (frobenius(a) * frobenius(b))
        a, b, size = balanced(a, b)
        of_groups = [jax.vmap(frobenius)(x.reshape(-1, x.shape[-1])) for x in (a, b)]
        return size * frobenius(of_groups[0] * of_groups[1])
    # Elements that only frozen coordinates read may be huge. They become 0, because otherwise the rescaling would round
    # the other elements to 0. Squares that would underflow become TINY, which is larger.
    a, size_a = unit(_trained(a[:, 0], scale, axis=2))
    b, size_b = unit(_trained(b[:, 0], scale, axis=1))
    squares_scale = jnp.where(scale == 0, 0, jnp.maximum(scale * scale, TINY))
    squares = jnp.einsum("kio,ko->ki", squares_scale, b * b + TINY, precision=EXACT)  # of the rows of the scaled B
    squares = raised(jnp.sqrt(squares), b.shape[-1])
    rows, size = unit((a * (squares * in_range(size_a, size_b)[:, None])).reshape(-1))
    return in_range(frobenius(rows), size)


def _lengths(x: jax.Array) -> jax.Array:
    """At least the lengths of the rows of x, (..., n), as float32 (rows,), without a pass that rescales them, which
    takes as long as the norm outside of a CPU. A square below 2^-126 may be lost, and counts as 2^-126. If squares
    overflow, the length is infinite, or NaN if it is multiplied by 0, and the example contributes zero."""
    rows = x.reshape(-1, x.shape[-1])
    return jax.vmap(frobenius)(rows) + math.sqrt(x.shape[-1]) * 2.0**-63


def _trained(x: jax.Array, scale: jax.Array, *, axis: int) -> jax.Array:
    """`x`, float32 (K, n), but 0 where it is finite and `scale`, (K, I, O), is 0 along the whole `axis`."""
    return jnp.where(jnp.any(scale != 0, axis=axis) | ~jnp.isfinite(x), x, 0)


def gram(a: jax.Array, b: jax.Array) -> jax.Array:
    """|G|, float32 (), by |G|^2 = sum_st (a_s . a_t)(b_s . b_t), plus the rounding of G in the weighted sum."""
    a, b, size = balanced(a, b)
    groups, positions, _ = a.shape
    if here().devices > 1:
        # Sharded rows are mostly the longer ones here. The sum over their segments, for which devices exchange what
        # they have, comes last, where it is a number and not a matrix.
        short, long = (a, b) if a.shape[-1] <= b.shape[-1] else (b, a)
        products = inner(short, short)[:, None] * _inner_of_segments(long, long)
        squares = jnp.sum(lax.optimization_barrier(diagonal(products)), 1)
    else:
        products = inner(a, a) * inner(b, b)
        squares = diagonal(products)
    lengths = total(jnp.sqrt(squares), 1)
    found = uncancelled(
        total(products, products.ndim),
        jnp.sum(lengths**2),
        roundings=roundings(a.shape[2]) + roundings(b.shape[2]) + 2 * positions + groups,
        positions=positions,
    )
    return size * found


def total(x: jax.Array, axes: int) -> jax.Array:
    """The sum of float32 `x` along its last axes, one after another: XLA would make one long sum of several."""
    for _ in range(axes):
        x = jnp.sum(lax.optimization_barrier(x), -1)
    return x


def inner(left: jax.Array, right: jax.Array) -> jax.Array:
    """The inner products, float32 (K, S, T), of the rows of float32 (K, S, n) and (K, T, n)."""
    size, count = left.shape[-1], _segments(left.shape[-1])
    width = math.ceil(size / count)
    if count > 1 and here().devices > 1:
        # The barrier keeps XLA from making one long sum of the sums of the segments.
        return jnp.sum(jax.lax.optimization_barrier(_inner_of_segments(left, right)), 1)
    parts, precision = [slice(start, start + width) for start in range(0, size, width)], here().unit.precision

    def of_group(left, right):
        products = [jnp.einsum("si,ti->st", left[:, part], right[:, part], precision=precision) for part in parts]
        return functools.reduce(jnp.add, products)

    # Otherwise XLA moves an axis of length 1 over one addition after another, in a pass over the program for each.
    return of_group(left[0], right[0])[None] if len(left) == 1 else jax.vmap(of_group)(left, right)


def _inner_of_segments(left: jax.Array, right: jax.Array) -> jax.Array:
    """The same for each segment of the rows, float32 (K, C, S, T): their sum over C is `inner`. The segments are an
    axis, because a slice of a sharded axis would be sent to all devices."""
    size, count = left.shape[-1], _segments(left.shape[-1])
    width = math.ceil(size / count)
    parts = [jnp.pad(x, ((0, 0), (0, 0), (0, count * width - size))) for x in (left, right)]
    left, right = (x.reshape(*x.shape[:2], count, width) for x in parts)
    return jnp.einsum("ksci,ktci->kcst", left, right, precision=here().unit.precision)


def diagonal(matrices: jax.Array) -> jax.Array:
    """The diagonals, float32 (..., T), of float32 (..., T, T). `jnp.diagonal` is a gather, which compiles slowly."""
    row, column = (lax.broadcasted_iota(jnp.int32, matrices.shape, matrices.ndim - axis) for axis in (2, 1))
    return jnp.sum(lax.select(row == column, matrices, jnp.zeros_like(matrices)), -1)


def roundings(size: int) -> int:
    """How many times at most `inner` rounds a term, int, if the rows have `size` elements."""
    return math.ceil(size / _segments(size)) + _segments(size)


def _segments(size: int) -> int:
    return min(MOST_SEGMENTS, max(1, math.ceil(size / LONGEST_SUM)))


def uncancelled(squared: jax.Array, largest: jax.Array, *, roundings: int, positions: int) -> jax.Array:
    """The norm of a gradient from its square, plus bounds on the rounding of both; all float32 ().

    squared: a sum. largest: at least the sum of the absolute values of its terms, which is the square of the sum of the
    lengths of the `positions` products a_t b_t. roundings: how often a term of `squared` is rounded, so that its error
    is at most `roundings` eps / 2 times `largest`. The gradient in the weighted sum adds the products of all positions,
    each rounded at most positions + PRODUCTS times. So its norm is larger by at most that number times eps / 2 times
    the sum of the lengths, although the products may cancel.
    """
    rounding = ROUNDING * here().unit.within
    norm = jnp.sqrt(jnp.maximum(squared, 0) + (roundings + 4) * rounding * largest)
    return raised(norm + (positions + PRODUCTS) * rounding * jnp.sqrt(largest), 0)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """G itself, float32 (B, K, I, O), for each of B examples: A, (B, K, T, I), and B, (B, K, T, O). Its rounding is a
    part of the gradient, because norm and sum read the result."""
    return jnp.einsum("bkti,bkto->bkio", a, b, precision=here().unit.precision)


def rows(indices: jax.Array, b: jax.Array, *, distinct: bool = False) -> tuple[jax.Array, jax.Array]:
    """The rows of G that are not 0, float32 (T, O), where row `indices[t]` of G is the sum of the b_t with that index,
    as in an embedding; and whether all b_t that are added are in range, bool ().

    indices: int (T,); a negative one adds nothing. b: float32 (T, O). distinct: bool, True if no other index is there
    twice. The sum stands where an index comes first, and 0 where it is repeated, so the weighted sum adds at most one
    number of an example to an element.
    """
    b = jnp.where((indices >= 0)[:, None], b, 0)
    if distinct:
        return b, jnp.all(jnp.abs(b) <= LARGEST)
    same = (indices[:, None] == indices[None, :]) & (indices >= 0)[:, None]
    place = lax.broadcasted_iota(jnp.int32, same.shape, 1)
    repeated_before = jnp.any(same & (place < lax.broadcasted_iota(jnp.int32, same.shape, 0)), -1)
    precision = here().unit.precision
    sums = jnp.where(repeated_before[:, None], 0, jnp.matmul(same.astype(jnp.float32), b, precision=precision))
    return sums, jnp.all(jnp.abs(b) <= LARGEST)


def frobenius(x: jax.Array) -> jax.Array:
    """The root of the sum of the squares, float32 ()."""
    return norm([x])


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, float32 (..., n), as a product unit * size, (..., n) and (...). No |element| of `unit` is above 1. Sizes are
    powers of two where a matrix unit takes short numbers, because other quotients have more digits."""
    size = _largest(lax.abs(x), [x.ndim - 1])
    at_least = lax.max(size, lax.full_like(size, TINY))
    if here().unit.rounds:
        at_least = 2 * power_of_two(at_least)  # the nearest may be less
        units = x * repeated(power_of_two(1 / at_least), x.shape)  # a GPU's quotient is not exact
    else:
        units = lax.div(x, repeated(at_least, x.shape))
    return units, lax.select(lax.gt(size, lax.full_like(size, 0)), at_least, size)


def power_of_two(x: jax.Array) -> jax.Array:
    """The nearest power of two to float32 numbers of at least 0, if a matrix unit takes short numbers; otherwise x."""
    return lax.reduce_precision(x, 8, 0) if here().unit.rounds else x


def _largest(x: jax.Array, axes) -> jax.Array:
    """The largest number along these axes; 0 if there is none, or none above 0."""
    return lax.reduce(x, np.float32(0), lax.max, tuple(axes))


def balanced(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A', B' and `size` () with A^T B = size * A'^T B', where the largest |a'_t| |b'_t| of a position t is about 1.
    Squares that still underflow then are below 1e-18 of the norm, whatever the sizes of A and B."""
    (a, size_a), (b, size_b) = unit(a), unit(b)
    sizes = in_range(size_a, size_b)
    size = jnp.maximum(_largest(sizes, range(sizes.ndim)), TINY)
    return a, b * repeated(power_of_two(sizes / size), b.shape), size


def in_range(size_a: jax.Array, size_b: jax.Array) -> jax.Array:
    """size_a * size_b, the sizes of inputs and of their cotangents, float32 of one shape; infinite if any of the three
    is out of range. A finite input whose cotangent is 0 may have any size, because no sum includes it."""
    sizes, largest = lax.mul(size_a, size_b), lax.full_like(size_a, LARGEST)
    without_cotangent = lax.eq(sizes, lax.full_like(sizes, 0))
    any_size = lax.bitwise_or(lax.le(size_a, largest), without_cotangent)
    inside = lax.bitwise_and(lax.le(lax.max(size_b, sizes), largest), any_size)
    return lax.select(inside, sizes, lax.full_like(sizes, np.inf))
