"""The norm of G = A^T B, the gradient of one example, mostly without computing G; in float32.

A, float32 (K, T, I), is the input of a layer, and B, float32 (K, T, O), the cotangent of its output, for K groups and T
positions. G is (K, I, O). `scale`, float32 (K, I, O), multiplies G element by element.

An underestimated norm would break the clip bound. So each position is rescaled first (`rescale_matrix_pair`), so
squares neither under- nor overflow (on matrix units, the bound includes these losses instead), and a sum that is long
or can cancel gets a bound on its rounding error.

Such a bound raises the norm, so clipping removes more signal. A bound in proportion to the square of the sum of all
|a_t| |b_t| would raise it by 1% at 100 positions and by 70% at 2,000. So Gram matrices use short sums, get a separate
bound for each product (`sum_upper_bound`), and serve up to MOST_POSITIONS. With more positions, the gradient is
computed, measured and discarded (`norm_of_computed_gradient`), because its rounding grows only with the root of the
sum of squares.

A norm is infinite, so that the example contributes zero, if any of these is above LARGEST = 2^63: a cotangent, the
product of an input and its cotangent, or an input whose cotangent is not 0. There are two reasons. First, XLA divides
by a broadcast value by multiplying by its reciprocal, which for values above 2^126 is denormal and flushed to 0, so the
norm would be 0 too. Second, a clip factor times a cotangent, or times an input, is flushed to 0 below 2^-126. If the
other array is at most 2^63, the resulting error is at most 2^-63.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax  # traces faster than `jnp`

from dpx.sums.clipped_sum import LARGEST, add_part_by_part, repeat_to_shape
from dpx.sums.norms import norm_of_arrays, norm_raised_for_rounding
from dpx.sums.rounding import PRODUCTS, UNIT, FloatPair, add_pairs, error_of_chained_sum, with_low_part
from dpx.xla.place import current_place
from dpx.xla.rewrites import sum_of_outer_products

EXACT = lax.Precision.HIGHEST  # float32 products, even if the hardware would round them
TINY = float(jnp.finfo(jnp.float32).tiny)
ROUNDING = UNIT * (1 + 2**-8)  # includes products of roundings
TERM = 24  # the number of roundings in each term of a squared norm
MOST_ERROR = 3.4e-4  # limit for the error of a sum over positions, at which a norm of two uses is raised by 0.1%
MOST_POSITIONS = 256  # the most for Gram matrices, whose rounding grows with the positions
# On a matrix unit, numbers below 2^-126 are lost. LOST_OF_LENGTH times the root of a row's size bounds what its length
# lacks, and LOST_OF_TERM times the number of terms what a squared norm lacks: see `bound_inner_products` and
# `sum_upper_bound`.
LOST_OF_LENGTH, LOST_OF_TERM = 2.0**-51, 2.0**-124
LONGEST_SUM, SHORTEST_SUM = 1024, 128  # terms; longer sums are cut, because rounding errors grow with the length
MOST_SUMS = 16  # the most sums of an inner product that are added at a time; more would compile too slowly
MOST_SEGMENTS = 8  # the most segments of an inner product on several devices

Matrices = list[tuple[jax.Array, jax.Array]]  # A and B of every use, or of every group of uses


def outer_norm(a: jax.Array, b: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """The norm |G|, float32 (), for T = 1: |a b^T| = |a| |b|, and |scale * a b^T|^2 = (a a)^T (scale scale) (b b)."""
    if scale is None:
        # Drops axes of length 1 as the sum does; XLA would compile the array with and without them separately.
        alone = [axis for axis in (0, 1) if a.shape[axis] == 1]
        a, b = lax.squeeze(a, alone), lax.squeeze(b, alone)
        if current_place().matrix_unit.rounds_operands:
            return _row_norms_from_above(_row_norms_from_above(a) * _row_norms_from_above(b))[0]
        if a.ndim == 1:  # there is only one position, so nothing to balance
            (a, size_a), (b, size_b) = split_off_scale(a), split_off_scale(b)
            return product_or_infinity(size_a, size_b) * (frobenius(a) * frobenius(b))
        a, b, size = rescale_matrix_pair(a, b)
        of_groups = [jax.vmap(frobenius)(x.reshape(-1, x.shape[-1])) for x in (a, b)]
        return size * frobenius(of_groups[0] * of_groups[1])
    # Elements that only frozen coordinates read may be huge. They become 0, because otherwise rescaling would round the
    # other elements to 0. Squares that would underflow become TINY, which is larger.
    a, size_a = split_off_scale(_trained_columns(a[:, 0], scale, axis=2))
    b, size_b = split_off_scale(_trained_columns(b[:, 0], scale, axis=1))
    squares_scale = jnp.where(scale == 0, 0, jnp.maximum(scale * scale, TINY))
    squares = jnp.einsum("kio,ko->ki", squares_scale, b * b + TINY, precision=EXACT)  # of the rows of the scaled B
    squares = norm_raised_for_rounding(jnp.sqrt(squares), b.shape[-1])
    rows, size = split_off_scale((a * (squares * product_or_infinity(size_a, size_b)[:, None])).reshape(-1))
    return product_or_infinity(frobenius(rows), size)


def _row_norms_from_above(x: jax.Array) -> jax.Array:
    """Bounds the lengths of the rows of x, (..., n), from above, float32 (rows,). Does not rescale, because that takes
    as long as the norm itself except on a CPU. A square below 2^-126 may be lost, and counts as 2^-126. If squares
    overflow, the length is infinite, or NaN if it is multiplied by 0, and the example contributes zero."""
    if x.ndim > 1:
        return jax.vmap(_row_norms_from_above)(x.reshape(-1, x.shape[-1])).reshape(-1)
    return frobenius(x)[None] + math.sqrt(x.shape[-1]) * 2.0**-63


def _trained_columns(x: jax.Array, scale: jax.Array, *, axis: int) -> jax.Array:
    """Returns `x`, float32 (K, n), with 0 where it is finite and `scale`, (K, I, O), is 0 along the whole `axis`."""
    return jnp.where(jnp.any(scale != 0, axis=axis) | ~jnp.isfinite(x), x, 0)


def gram_norm(a: jax.Array, b: jax.Array) -> jax.Array:
    """The norm |G|, float32 (), by |G|^2 = sum_st (a_s . a_t)(b_s . b_t), with bounds on the rounding of both factors.
    Except on a CPU, rows are not rescaled, because that takes as long as their products."""
    a, b, size = (a, b, jnp.float32(1)) if current_place().matrix_unit.rounds_operands else rescale_matrix_pair(a, b)
    groups, positions, _ = a.shape
    # If rows are sharded, they are usually the longer ones. The sum over their segments, for which devices must
    # communicate, comes last, when each segment is a scalar and not a matrix.
    short, long = (a, b) if a.shape[-1] <= b.shape[-1] else (b, a)
    first = bound_inner_products(pairwise_inner_products(short, short)[:, None], short)
    second = bound_inner_products(inner_products_of_segments(long, long), long)
    squared = sum_upper_bound(first, second)
    return size * norm_with_sum_error(squared, products_of_row_norms(first, second), positions)


class BoundedProducts(NamedTuple):
    """Computed inner products of rows, float32 (..., S, T).

    lengths: upper bounds on the lengths of the rows, float32 (..., S) and (..., T)
    error: float; no product is off by more than `error` times the lengths of both rows
    """

    values: jax.Array
    lengths: tuple[jax.Array, jax.Array]
    error: float

    @property
    def absolute_bounds(self) -> jax.Array:
        """Upper bounds on the absolute values of the true products."""
        left, right = self.lengths
        return jnp.abs(self.values) + self.error * left[..., :, None] * right[..., None, :]


def bound_inner_products(values: jax.Array, rows: jax.Array) -> BoundedProducts:
    """Bounds what `pairwise_inner_products` computes from `rows`, float32 (K, T, n): products, float32 (K, ..., T, T).

    Rows for a matrix unit are not rescaled, so terms below 2^-126, or with a factor below it, may be lost: in all up to
    n 2^-126 + 2^-126 sqrt(n) (|x| + |y|) of x . y. If |x| and |y| are increased by l = sqrt(n) 2^-51, the product of
    the lengths grows by l^2 + l (|x| + |y|), and this times `error`, at least 2^-21, exceeds the loss.
    """
    error = error_of_inner_products(rows, rows)
    lengths = jnp.sqrt(diagonal(values)) * (1 + error)
    if current_place().matrix_unit.rounds_operands:
        lengths += math.sqrt(rows.shape[-1]) * LOST_OF_LENGTH
    return BoundedProducts(values, (lengths, lengths), error)


def products_of_row_norms(first: BoundedProducts, second: BoundedProducts) -> jax.Array:
    """Upper bounds on |a_t| |b_t| of all positions, float32; on a matrix unit, infinite where one is out of range."""
    a, b = first.lengths[0], second.lengths[0]
    return product_or_infinity(*jnp.broadcast_arrays(a, b)) if current_place().matrix_unit.rounds_operands else a * b


def sum_upper_bound(first: BoundedProducts, second: BoundedProducts, more: int = 0) -> jax.Array:
    """An upper bound on the sum over all axes of x y, float32 (), for the true products x of `first` and y of `second`.

    x is within `first.error` of the computed p, and y within `second.error` of q. So x y is at most
    p q - |p q| + P Q, with P and Q the `absolute_bounds`, because x y - p q = p (y - q) + q (x - p) + (x - p) (y - q).
    No such term is larger than P Q, so 2^-24 P Q covers each of its roundings; the caller adds `more` of them. On a
    matrix unit, a term may lose three numbers below 2^-126.
    """
    terms = first.values * second.values
    lost = terms.size * LOST_OF_TERM if current_place().matrix_unit.rounds_operands else 0
    roundings = sum(terms.shape) + TERM + more + (lost > 0)
    terms = 2 * jnp.minimum(terms, 0) + first.absolute_bounds * second.absolute_bounds * (1 + roundings * ROUNDING)
    for _ in range(terms.ndim):  # one axis after another, because XLA would merge several into one long sum
        terms = jnp.sum(lax.optimization_barrier(terms), -1)
    return terms + lost if lost else terms


def norm_with_sum_error(squared: jax.Array, lengths: jax.Array, *positions: int) -> jax.Array:
    """Bounds the norm of a gradient as the weighted sum adds it, with its rounding error, float32 ().

    squared: the true norm squared, float32 (). lengths: bounds on |a_t| |b_t|, float32. positions: as for `sum_error`
    """
    return norm_raised_for_rounding(jnp.sqrt(jnp.maximum(squared, 0)) + sum_error(*positions) * frobenius(lengths), 0)


def norm_of_computed_gradient(gradient: jax.Array, records: Matrices, *positions: int) -> jax.Array:
    """Bounds the norm of a gradient as the weighted sum adds it, float32 (). gradient: the sum of all A^T B of an
    example, computed in the same way. Both may be off by `sum_error`. records: A and B, as in this file."""
    lengths = frobenius(jnp.stack([outer_norm(a, b) for a, b in records]))
    return norm_raised_for_rounding(frobenius(gradient) + 2 * sum_error(*positions) * lengths, 0)


def sum_error(*positions: int) -> float:
    """Bounds the error of a parameter's gradient, the sum over its uses of A^T B, relative to the root of the sum of
    all (|a_t| |b_t|)^2. positions: the number of positions of each use.

    If the term of a position is rounded D times in an element, this is off by at most 2^-24 sum D |a_t b_t|. By
    Cauchy-Schwarz, as in `dpx.sums.rounding`, that is at most 2^-24 sqrt(sum D^2) sqrt(sum a_t^2 b_t^2). Over all
    elements, the squares of the last root add up to those of |a_t| |b_t|. D counts roundings within a segment, in the
    sum of segments and in the sum of uses, and sqrt(sum D^2) is at most the sum of these three roots. On a matrix unit,
    sqrt(sum D^2) is up to `rounding_factor` times as large (`dpx.xla.matrix_units`).
    """
    roots = (
        _rounding_depth(count, count_segments(count)) + (len(positions) - 1) * math.sqrt(count) for count in positions
    )
    return math.hypot(*roots) * ROUNDING * current_place().matrix_unit.rounding_factor


def _rounding_depth(positions: int, segments: int) -> float:
    """An upper bound on sqrt(sum D^2) for a sum in segments, attained by chains; see `dpx.sums.rounding`."""
    width = math.ceil(positions / segments)
    within, across = error_of_chained_sum(width, PRODUCTS), error_of_chained_sum(segments, 0)
    return math.sqrt(segments / width) * within + math.sqrt(width / segments) * across


def count_segments(positions: int) -> int:
    """The least number of segments in which the positions of an example can be added accurately enough."""
    fine = (
        count for count in range(1, math.isqrt(positions)) if _rounding_depth(positions, count) * ROUNDING <= MOST_ERROR
    )
    return next(fine, max(1, math.isqrt(positions)))


def einsum_by_segments(by: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The `einsum` of A and B for one example, float32; it adds the positions in segments, one after another."""
    width = math.ceil(a.shape[1] / count_segments(a.shape[1]))

    def product(rows):
        # The barrier prevents a matrix product from being accumulated onto the previous sum.
        return lax.optimization_barrier(jnp.einsum(by, *rows, precision=current_place().matrix_unit.precision))

    if width == a.shape[1]:
        return jnp.einsum(by, a, b, precision=current_place().matrix_unit.precision)
    return add_part_by_part(product, (a, b), width, width, jnp.add, axis=1)


def pairwise_inner_products(left: jax.Array, right: jax.Array) -> jax.Array:
    """The inner products, float32 (K, S, T), of each row of float32 (K, S, n) and each row of (K, T, n)."""
    found = inner_products_of_segments(left, right)
    # The barrier prevents XLA from merging the sums of the segments into one long sum.
    return found[:, 0] if found.shape[1] == 1 else jnp.sum(lax.optimization_barrier(found), 1)


def inner_products_of_segments(left: jax.Array, right: jax.Array) -> jax.Array:
    """`pairwise_inner_products` of each of C segments of the rows, float32 (K, C, S, T), to be added over C.
    C is 1 on one device. On several, segments get an axis, because slices of a sharded axis would go to all devices.

    Up to MOST_SUMS short sums are added at a time, and their results are added as pairs of float32 numbers.
    """
    groups, positions, size = left.shape[0], max(left.shape[1], right.shape[1]), left.shape[-1]
    precision = current_place().matrix_unit.precision
    count, width, rows = _count_row_segments(size), terms_per_sum(positions), [left] if left is right else [left, right]
    if count > 1:
        rows, by = [jnp.pad(x, ((0, 0), (0, 0), (0, -size % count))) for x in rows], "ksci,ktci->kcst"
        rows = [x.reshape(*x.shape[:2], count, -1) for x in rows]
    else:  # without axes of length 1, because XLA moves these past one operation in each pass over the program
        rows, by = ([x[0] for x in rows], "si,ti->st") if groups == 1 else (rows, "ksi,kti->kst")

    def product(rows):
        parts = [[x[..., at : at + width] for x in rows] for at in range(0, rows[0].shape[-1], width)]
        return functools.reduce(jnp.add, [jnp.einsum(by, x[0], x[-1], precision=precision) for x in parts])

    if rows[0].shape[-1] <= MOST_SUMS * width:
        found = product(rows)
    else:
        begin, last = lambda first: with_low_part(FloatPair(first)), rows[0].ndim - 1
        found = add_part_by_part(
            product, rows, MOST_SUMS * width, MOST_SUMS * width, add_pairs, axis=last, begin=begin
        ).high
    return found.reshape(groups, count, left.shape[1], right.shape[1])


def diagonal(matrices: jax.Array) -> jax.Array:
    """The diagonals, float32 (..., T), of float32 (..., T, T), without a gather, which would compile slowly."""
    size = matrices.shape[-1]
    rows = matrices.reshape(*matrices.shape[:-2], size * size)
    return lax.slice_in_dim(rows, 0, size * size, size + 1, axis=rows.ndim - 1)


def terms_per_sum(positions: int) -> int:
    """The number of terms of an inner product that are added in one sum. More positions can cancel more, and call for
    shorter sums, whose rounding errors are smaller; but short sums are slow."""
    return min(LONGEST_SUM, max(SHORTEST_SUM, 2 ** int(math.log2(16 * LONGEST_SUM / positions))))


def share_raised_by_rounding(size: int, positions: int) -> float:
    """By what share rounding raises a norm from Gram matrices of rows with up to `size` elements, if the rows of one
    matrix are orthogonal. The share is less for most gradients, and more if positions cancel. It does not include
    `sum_error`."""
    return (_gram_rounding_error(size, positions) * positions + (2 * positions + TERM) * ROUNDING) / 2


def error_of_inner_products(left: jax.Array, right: jax.Array) -> float:
    """The `BoundedProducts.error` of their `pairwise_inner_products`. It includes four roundings of the lengths."""
    return _gram_rounding_error(left.shape[-1], max(left.shape[1], right.shape[1]))


def _gram_rounding_error(size: int, positions: int) -> float:
    count = _count_row_segments(size)
    size, width = math.ceil(size / count), terms_per_sum(positions)
    return (min(size, width + MOST_SUMS) + count + 5) * ROUNDING * current_place().matrix_unit.rounding_factor


def _count_row_segments(size: int) -> int:
    return min(MOST_SEGMENTS, math.ceil(size / SHORTEST_SUM)) if current_place().devices > 1 else 1


def gradient_matrices(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrices G of all examples, float32 (N, K, I, O). a: A, (N, K, T, I). b: B, (N, K, T, O). Rounding needs no
    bound, because the norm and the sum both read the rounded result."""
    return sum_of_outer_products(a, b, current_place().matrix_unit.precision)


def gradient_rows_of_lookup(indices: jax.Array, b: jax.Array, *, distinct: bool = False) -> tuple[jax.Array, jax.Array]:
    """Computes the nonzero rows of G, float32 (T, O), where row i of G is the sum of the b_t with indices[t] = i, as in
    an embedding; and whether all b_t that are added are in range, bool ().

    indices: int (T,); negative ones add nothing. b: float32 (T, O). distinct: bool, True if no index that adds occurs
    twice. The sum is placed where an index occurs first, with 0 where it occurs again, so the weighted sum adds at most
    one number of an example to an element.
    """
    b = jnp.where((indices >= 0)[:, None], b, 0)
    if distinct:
        return b, jnp.all(jnp.abs(b) <= LARGEST)
    same = (indices[:, None] == indices[None, :]) & (indices >= 0)[:, None]
    place = lax.broadcasted_iota(jnp.int32, same.shape, 1)
    repeated_before = jnp.any(same & (place < lax.broadcasted_iota(jnp.int32, same.shape, 0)), -1)
    precision = current_place().matrix_unit.precision
    sums = jnp.where(repeated_before[:, None], 0, jnp.matmul(same.astype(jnp.float32), b, precision=precision))
    return sums, jnp.all(jnp.abs(b) <= LARGEST)


def frobenius(x: jax.Array) -> jax.Array:
    """The root of the sum of the squares, float32 ()."""
    return norm_of_arrays([x])


def split_off_scale(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits x, float32 (..., n), into units, (..., n), of magnitude at most 1, and sizes, (...): x = units * sizes.
    If a matrix unit takes rounded numbers, sizes are powers of two, because other quotients have more digits."""
    size = _largest_along_axes(lax.abs(x), [x.ndim - 1])
    at_least = lax.max(size, lax.full_like(size, TINY))
    if current_place().matrix_unit.rounds_operands:
        at_least = 2 * round_to_power_of_two(at_least)  # the nearest power may be smaller
        units = x * repeat_to_shape(round_to_power_of_two(1 / at_least), x.shape)  # a GPU's quotient is not exact
    else:
        units = lax.div(x, repeat_to_shape(at_least, x.shape))
    return units, lax.select(lax.gt(size, lax.full_like(size, 0)), at_least, size)


def round_to_power_of_two(x: jax.Array) -> jax.Array:
    """Rounds x, float32 and at least 0, to the nearest power of two if a matrix unit takes rounded numbers."""
    return lax.reduce_precision(x, 8, 0) if current_place().matrix_unit.rounds_operands else x


def _largest_along_axes(x: jax.Array, axes) -> jax.Array:
    """The largest number along these axes; 0 if there is none above 0."""
    return lax.reduce(x, np.float32(0), lax.max, tuple(axes))


def rescale_matrix_pair(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns A', B' and `size` () with A^T B = size * A'^T B', such that the largest |a'_t| |b'_t| of a position t is
    about 1. Squares that still underflow are then below 1e-18 of the norm, whatever the sizes of A and B."""
    (a, size_a), (b, size_b) = split_off_scale(a), split_off_scale(b)
    sizes = product_or_infinity(size_a, size_b)
    size = jnp.maximum(_largest_along_axes(sizes, range(sizes.ndim)), TINY)
    return a, b * repeat_to_shape(sizes / size, b.shape), size


def product_or_infinity(size_a: jax.Array, size_b: jax.Array) -> jax.Array:
    """The product of the sizes of inputs and of their cotangents, float32 of one shape; infinite if a size or the
    product is out of range. A finite input whose cotangent is 0 may have any size, because no sum includes it."""
    sizes, largest = lax.mul(size_a, size_b), lax.full_like(size_a, LARGEST)
    without_cotangent = lax.eq(sizes, lax.full_like(sizes, 0))
    any_size = lax.bitwise_or(lax.le(size_a, largest), without_cotangent)
    inside = lax.bitwise_and(lax.le(lax.max(size_b, sizes), largest), any_size)
    return lax.select(inside, sizes, lax.full_like(sizes, np.inf))
