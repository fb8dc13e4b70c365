"""Computes 2-norms that are never below the true ones, for arrays of any size.

A float32 sum of n squares, in an order that XLA chooses, may fall short of the true sum by a share n 2^-24, because
squares below half a unit in the last place of the sum so far are lost. So more than `SINGLE` squares are added in short
sums of `WIDTH` or a few more, those again in short sums, and so on; barriers keep XLA from joining them. The root is
multiplied by 1 + (roundings / 2 + MARGIN) 2^-24, where no square is rounded more than `roundings` times: this adds at
most 3e-5 for 10^3 elements, 8e-6 for 10^4, 2e-5 for 10^7. MARGIN covers the root, the factor computed from it, and
rescaled ghost norms.

Devices may take squares below 2^-126 for 0, so what a norm of n elements lacks may have a norm of sqrt(n) 2^-63. MARGIN
covers that at the least clip norm, 2^-40, for up to 2^26 elements, and at 2^-37 for up to 2^32.

A kernel on a TPU takes at least 1,800 cycles. So there, barriers stand only between two sums, and scalars, such as the
norms of all parameters, are squared and added one after another, in the kernel that computes them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax  # `jnp` takes longer to trace

from dpx.sums.rounding import UNIT
from dpx.xla.place import current_place

WIDTH = 128  # elements in a sum
SINGLE = 1024  # elements: up to this size one sum, because more sums take longer to compile
FEW, SHORTEST = 32, 8  # rows that a CPU adds elementwise, and elements in each
WIDEST = 512  # elements in a sum along rows that divide an array evenly, because other arrays must be padded
MOST_PARTS = 16  # parts of an array on a TPU; 8 take a tenth longer (estimated for a v5e)
SHORT = 64  # rows of a long array that a TPU adds; a multiple of its registers' 8
MARGIN = 16  # units in the last place


def norm_of_arrays(arrays: list[jax.Array], scales: list[jax.Array] | None = None) -> jax.Array:
    """The 2-norm of real arrays, computed in float32, as a float32 scalar. scales: arrays that multiply them, or
    None."""
    parts, roundings, devices, on_tpu = [], 0, current_place().devices, current_place().platform == "tpu"
    for number, x in enumerate(arrays):
        if x.size and devices == 1 and (count := _count_parts_on_tpu(x.shape)) > 1:
            squares, rounded = _sum_squares_in_parts(x if scales is None else x * scales[number], count)
            parts += squares
            roundings = max(roundings, rounded)
            continue
        if x.size and devices > 1:
            squares, rounded = _sum_squares_along_axes(x, None if scales is None else scales[number], devices)
            parts.append(squares)
            roundings = max(roundings, rounded)
        elif x.size:
            x = lax.convert_element_type(x, np.float32)
            width, axis = _row_width(x.size)
            # Without the barrier, XLA squares before it reshapes, and the sum is ten times slower on a CPU.
            rows = _padded_rows(x, width) if on_tpu else lax.optimization_barrier(_padded_rows(x, width))
            if scales is not None:
                rows = rows * _padded_rows(scales[number], width)
            parts.append(lax.reduce_sum(lax.square(rows), (axis,)))
            roundings = max(roundings, rows.shape[axis])
    if not parts:
        return jnp.float32(0)
    if on_tpu and len(parts) <= WIDTH and all(x.size <= 1 for x in arrays):
        parts, roundings = [functools.reduce(lax.add, parts)], roundings + len(parts)
    sums = lax.concatenate(parts, 0) if len(parts) > 1 else parts[0]
    while sums.size > WIDTH:
        sums = lax.reduce_sum(_padded_rows(lax.optimization_barrier(sums), WIDTH), (1,))
        roundings += WIDTH
    roundings += sums.size
    # The barrier also keeps XLA from joining the norms of all arrays, and what they are computed from, into one large
    # kernel, which takes long to compile (benchmarks/results/compile.md).
    sums = sums if on_tpu and sums.size == 1 else lax.optimization_barrier(sums)
    return norm_raised_for_rounding(lax.sqrt(lax.reduce_sum(sums, (0,))), roundings)


def norm_raised_for_rounding(norm: jax.Array, roundings: int) -> jax.Array:
    """Raises a float32 norm, whose squares were rounded up to `roundings` times, to at least the true norm."""
    return lax.mul(norm, lax.full_like(norm, 1 + (roundings / 2 + MARGIN) * UNIT))


def _sum_squares_along_axes(x: jax.Array, scale: jax.Array | None, devices: int) -> tuple[jax.Array, int]:
    """Adds the squares, float32 (1,), one axis after another; also returns how often a square is rounded at most. Axes
    are not merged, because XLA would gather an array that is sharded along the second one. A long axis is split into a
    multiple of `devices` parts, so that each device adds its own."""
    x = lax.convert_element_type(lax.optimization_barrier(x), np.float32)
    squares, roundings = lax.square(x if scale is None else x * scale), 0
    while squares.ndim:
        last, size = squares.ndim - 1, squares.shape[-1]
        if size > SINGLE:
            count = devices * math.ceil(size / (devices * SINGLE))
            missing = -size % count
            squares = lax.pad(squares, np.float32(0), [*[(0, 0, 0)] * last, (0, missing, 0)]) if missing else squares
            squares = lax.reshape(squares, (*squares.shape[:-1], count, squares.shape[-1] // count))
            last += 1
        roundings += squares.shape[-1]
        squares = lax.optimization_barrier(lax.reduce_sum(squares, (last,)))
    return lax.reshape(squares, (1,)), roundings


def _count_parts_on_tpu(shape: tuple[int, ...]) -> int:
    """Into how many parts a TPU splits the rows along the last axis, in multiples of 8 rows, as in its registers."""
    rows = math.prod(shape[:-1])
    if current_place().platform != "tpu":
        return 1
    count = 1 if rows % 8 else math.gcd(rows // 8, MOST_PARTS)
    if rows > WIDEST * count:
        return MOST_PARTS if rows >= MOST_PARTS * SHORT and shape[-1] >= WIDTH else 1
    return count


def _sum_squares_in_parts(x: jax.Array, count: int) -> tuple[list[jax.Array], int]:
    """Adds the squares along all axes but the last: first elementwise over the parts, and then along at most WIDEST
    rows, or SHORT rows of long parts; remaining rows are added separately. Also returns how often a square is rounded
    at most. A TPU reads several parts at a time. Sums along the last axis take it three times as long, and rows of
    another length, which it writes first, seven times as long for an array of 50,257 x 768."""
    rows = x.size // x.shape[-1]
    width = rows // count if rows <= WIDEST * count else SHORT
    whole = rows - rows % (count * width)
    x = lax.reshape(x, (rows, x.shape[-1]))
    first, left = lax.split(x, [whole, rows - whole]) if whole < rows else (x, None)
    squares = [
        lax.square(lax.convert_element_type(part, np.float32)) for part in lax.split(first, [whole // count] * count)
    ]
    sums = lax.reduce_sum(
        lax.reshape(functools.reduce(lax.add, squares), (whole // count // width, width, x.shape[-1])), (1,)
    )
    found = [lax.reshape(sums, (sums.size,))]
    if left is not None:
        found.append(lax.reduce_sum(lax.square(lax.convert_element_type(left, np.float32)), (0,)))
    return found, max(count + width, rows - whole)


def _row_width(size: int) -> tuple[int, int]:
    """How many elements a row has: all of a small array; otherwise a divisor of the size, if there is one. Also the
    axis along which rows are added: a CPU adds up to FEW short rows elementwise, in one kernel, where a sum along each
    row takes three."""
    if size <= SINGLE:
        rows = next((rows for rows in range(FEW, 1, -1) if size % rows == 0 and size >= SHORTEST * rows), 0)
        return (size // rows, 0) if rows and current_place().platform == "cpu" else (size, 1)
    widths = range(min(WIDEST, math.isqrt(size) + WIDTH), 31, -1)
    return next((width for width in widths if size % width == 0), WIDTH), 1


def _padded_rows(x: jax.Array, width: int) -> jax.Array:
    """Reshapes `x` into rows, (n, width), padded with zeros."""
    missing = -x.size % width
    flat = lax.reshape(x, (x.size,))
    flat = lax.pad(flat, np.float32(0), [(0, missing, 0)]) if missing else flat
    return lax.reshape(flat, (flat.size // width, width))
