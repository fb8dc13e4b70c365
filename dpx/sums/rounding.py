"""Sums as two float32 numbers for each coordinate, and sums of rows in blocks, with a proved bound on their rounding.

A rounded sum depends on what it is added to. So rounding adds to what one example can change, and an attacker who
chooses the data can make it large (Casacuberta et al. 2022, arXiv:2207.10635). `ETA` bounds it, relative to the clip
norm C:

    if one row is replaced by zeros in its place, the computed sum moves by at most C (1 + ETA) in 2-norm.

A coin of Poisson sampling does exactly that when it leaves an example out, because the others stay in their rows
(`dpx.sampling.batch.scatter_examples`). Amplification by sampling needs both.

PROOF, for rows z_1 ... z_r whose computed contributions have norms of at most C, and u = 2^-24.

One block. Its sum is a binary tree of float32 additions in any order, which may differ between coordinates, with or
without fused multiply-adds. A rounding multiplies by 1 + e, |e| <= u. If the term of row i is rounded D_ik times in
coordinate k, the sum is off there by at most u sum_i D_ik |z_ik| (and a factor 1 + r u). By Cauchy-Schwarz this is at
most u sqrt(sum_i D_ik^2) sqrt(sum_i z_ik^2). So the 2-norm of the error is at most u C sqrt(r max_k sum_i D_ik^2). Of
all trees of r leaves a chain, of depths r - 1, r - 1, r - 2, ..., 1, has the largest sum of squared depths: by
induction, because the sum is convex in how many leaves are on each side of the root. The products with the clip factor
and with the input of a layer are `PRODUCTS` = 2 more roundings:

    chain(r, more) = sqrt(r ((r - 1 + more)^2 + sum_{j = 1 .. r - 1} (j + more)^2)),   error <= u C chain(r, PRODUCTS).

On a matrix unit, operands are rounded once as a part of the gradient, and their products are exact
(`dpx.xla.matrix_units`). An instruction adds up to k products, and moves by up to 2 c u M in place of 2 u M, with M as
defined there. So D_ik counts instructions, and is largest for ceil(r / k), ..., 1, each k times: between two runs, such
a block moves by at most

    2 c u C sqrt(r sum_{j = 1 .. r} ceil(j / k)^2).

The following sums are added in float32, behind a barrier or as a product with an opaque 1.

Blocks. The sums of g blocks of b rows have norms of at most b C, and are rounded to float32 before they are added (the
barrier). So their sum, in any order, adds at most u b C chain(g, 0), and its product with the scale of a mask at most u
g b C. Only the block of the row differs between the two runs, because the other blocks have equal inputs in one
program. So the sum moves by at most

    C + 2 u C (chain(b, PRODUCTS) + b chain(g, 0) + g b)

(with the matrix unit's bound for a block in place of 2 u C chain(b, PRODUCTS)). `rounding_share(b, g)` is the excess
over C. Adding zeros is exact, also in the other blocks and on other devices. `MOST_ROWS` bounds b, and
`most_float32_rows` bounds the rows that are added in float32, so that the excess is at most ETA - RESERVE.

Microbatches. A loop adds the sums of g microbatches of n rows, with norms of at most n C, one after another, so the
order is the same for all coordinates, and the first j add up to j n C or less. Their additions are off by at most

    u n C (2 + 3 + ... + g) = u n C ordered(g),   ordered(g) = g (g + 1) / 2 - 1,

and each sum was scaled by a mask before. A loop over h such loops adds u g n C ordered(h). `most_float32_turns` is the
largest g.

Sums of more rows, of more groups of microbatches, and of chunks are pairs of float32 numbers (`FloatPair`), high + low.
Adding a float32 sum to such a pair takes two_sum and a renormalization, which rounds once, by 2^-47 of the sum so far;
adding two pairs, by 2^-46. For m additions of N rows in all that is up to 2^-46 m N C. For N = 65,536 and m = 4,096 it
is RESERVE, 2^-18 C. With more additions, of b rows each, it is 2^-14 C / b, and `rounding_share` is below ETA by more
than that for b <= 16.

A contribution's norm is at most C because its computed norm is never below the true one (`dpx.sums.norms`), with a
margin for the rounding of the clip factor.

NOT covered: m N above 2^28, in batches of more than 65,536 rows; and more than 4,096 chunks in one step, if some have
more than 16 rows.

IN FLOAT64, a `FloatPair` has a value, a norm, and a way back to a pair; with v = 2^-53:

`as_float64` is exact for results of `split_float64`, because high and low are parts of one float64 number.
`split_float64` has a relative error of 2^-48 = 32 v for every element: high is off by 2^-24, and low by 2^-24 of that
    (and by less than 2^-125, where float32 ends). A cast to float32 and back would not do, because XLA may drop both.
`norm_of_pair` has a relative error of 32 v, for up to 2^32 elements: a square is rounded once, then in sums of 16 and
    of 8, which leave fewer than 2^26 sums, with up to 22 elements from the end of every array, and then in up to 13
    sums of 4. That is 1 + 15 + 7 + 39 roundings, which count half in the root, plus the root's own. One long sum would
    round a square 2^32 times. Sums of 16 and 8 stay within one array, so few elements move where it is sharded.

Call these inside `jax.enable_x64(True)`, also in a program that is otherwise 32-bit.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.values import Tree
from dpx.xla.matrix_units import FLOAT32, MatrixUnit

ETA = 131 * 2.0**-17  # 9.995e-4
RESERVE = 2.0**-18
UNIT = 2.0**-24  # the largest relative error of a float32 rounding
PRODUCTS = 2  # roundings of a term before it is added
MOST_ROWS = 96  # in a block
FIRST, SECOND, NEXT = 16, 8, 4  # elements in a sum of `norm_of_pair`


class FloatPair(NamedTuple):
    """A sum as two float32 numbers for each coordinate, whose value is high + low, with |low| <= 2^-24 |high|.

    high, low: pytrees of float32 arrays of the same shapes; `low` is None where one number is enough.
    """

    high: Tree
    low: Tree | None = None


def as_pair(sums: Any) -> FloatPair:
    """Returns a `FloatPair` as it is, and any other tree of float32 arrays as a pair without `low`."""
    return sums if isinstance(sums, FloatPair) else FloatPair(sums)


def is_float_pair(node: Any) -> bool:
    return isinstance(node, FloatPair)


def pair_of_trees(totals: Tree) -> FloatPair:
    """Combines a tree with a `FloatPair` for each array into one `FloatPair`."""
    high = jax.tree.map(lambda total: total.high, totals, is_leaf=is_float_pair)
    found = jax.tree.leaves(totals, is_leaf=is_float_pair)
    if all(total.low is None for total in found):
        return FloatPair(high)
    low = jax.tree.map(lambda t: jnp.zeros_like(t.high) if t.low is None else t.low, totals, is_leaf=is_float_pair)
    return FloatPair(high, low)


def add_pairs(total: FloatPair, more: FloatPair | Tree) -> FloatPair:
    """Adds two sums, as two float32 numbers that do not overlap."""
    total, more = as_pair(total), as_pair(more)
    # The barrier keeps a product in `more` from fusing into the additions, whose operands would differ.
    high, low = jax.lax.optimization_barrier((more.high, more.low))
    parts = [total.high, high, *(part for part in (total.low, low) if part is not None)]
    pairs = [_sum_with_error(*leaves) for leaves in zip(*map(jax.tree.leaves, parts), strict=True)]
    structure = jax.tree.structure(total.high)
    return FloatPair(*(structure.unflatten(pair[number] for pair in pairs) for number in range(2)))


def with_low_part(total: FloatPair) -> FloatPair:
    """Returns `total` with both numbers for each coordinate, so that it has the structure of a longer sum."""
    return total if total.low is not None else FloatPair(total.high, jax.tree.map(jnp.zeros_like, total.high))


def _sum_with_error(high: jax.Array, more: jax.Array, *lows: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole = high + more
    of_more = whole - high
    low = (high - (whole - of_more)) + (more - of_more)
    for part in lows:
        low = low + part
    total = whole + low
    return total, low - (total - whole)


@functools.cache
def error_of_chained_sum(terms: int, more: int) -> float:
    """The root of n sum of D^2 for a chain of n = `terms`, each already rounded `more` times, as in the proof."""
    squares = (terms - 1 + more) ** 2 + sum((depth + more) ** 2 for depth in range(1, terms))
    return math.sqrt(terms * squares)


@functools.cache
def rounding_error_of_block(rows: int, unit: MatrixUnit = FLOAT32) -> float:
    """How far rounding moves a block of `rows` rows, in units of 2 u C, with the worst adder that `unit` may have."""

    def rounding_of_adder(adder):
        if adder.products == 1:
            return error_of_chained_sum(rows, PRODUCTS)
        return math.sqrt(rows * sum(math.ceil(row / adder.products) ** 2 for row in range(1, rows + 1)))

    return max(adder.move * rounding_of_adder(adder) for adder in unit.adders)


def rounding_share(rows: int, blocks: int = 1, loops: tuple[int, ...] = (), unit: MatrixUnit = FLOAT32) -> float:
    """By how much more than C, relative to C, rounding lets one row move a sum of blocks of `rows` rows. loops: the
    number of turns of each loop over these sums, innermost first. unit: the unit that computes the blocks."""
    roundings = rounding_error_of_block(rows, unit) + rows * blocks
    if blocks > 1:
        roundings += rows * error_of_chained_sum(blocks, 0)
    rows *= blocks
    for turns in loops:
        roundings += rows * (turns * (turns + 1) / 2 - 1)
        rows *= turns
    return 2 * UNIT * roundings * (1 + 2**-14)


@functools.cache
def most_float32_rows(devices: int, unit: MatrixUnit = FLOAT32) -> int:
    """The most rows that are added in float32 alone, in blocks: a multiple of `devices`; 0 for too many devices."""
    fitting = [
        rows * blocks
        for blocks in range(devices, 6 * devices + 1, devices)
        for rows in range(1, MOST_ROWS + 1)
        if may_add_in_float32(rows, blocks, unit=unit)
    ]
    return max(fitting, default=0)


def count_blocks(rows: int, devices: int, unit: MatrixUnit = FLOAT32, more: float = 1.5) -> int:
    """The number of blocks for up to `most_float32_rows` rows, a multiple of `devices`: the fewest possible, or up to
    `more` times as many if that makes all blocks equal."""
    counts = range(devices, max(1, rows) + devices, devices)
    fitting = [blocks for blocks in counts if may_add_in_float32(max(1, math.ceil(rows / blocks)), blocks, unit=unit)]
    return next((blocks for blocks in fitting if blocks <= more * fitting[0] and rows % blocks == 0), fitting[0])


def sizes_of_blocks(rows: int, blocks: int, unit: MatrixUnit = FLOAT32) -> tuple[int, int]:
    """How many of `rows` rows the first block has, and how many each later one. The first also has the remainder,
    unless it is then too large. blocks: from `count_blocks`."""
    each = rows // blocks
    if not may_add_in_float32(rows - each * (blocks - 1), blocks, unit=unit):
        each = math.ceil(rows / blocks)
    return rows - each * (blocks - 1), each


@functools.cache
def most_float32_turns(rows: int, unit: MatrixUnit = FLOAT32) -> int:
    """How many float32 sums of `rows` rows each a loop may add in float32: at least 1."""
    fitting = [turns for turns in range(1, 513) if may_add_in_float32(rows, loops=(turns,), unit=unit)]
    return max(fitting, default=1)


def may_add_in_float32(rows: int, blocks: int = 1, loops: tuple[int, ...] = (), unit: MatrixUnit = FLOAT32) -> bool:
    """Whether a sum of such blocks keeps the bound `ETA`: see `rounding_share`."""
    return rows <= MOST_ROWS and rounding_share(rows, blocks, loops, unit) <= ETA - RESERVE


def float64_constants(numbers: Iterable[float]) -> jax.Array:
    """Writes numbers into the program as float64 (n,). An array that the program closes over would become float32 if
    the program is called outside of `jax.enable_x64`, as in `dpx.fit`."""
    return jax.lax.concatenate([jax.lax.full((1,), float(number), jnp.float64) for number in numbers], 0)


def as_float64(total: FloatPair) -> Tree:
    """Returns high + low as float64, in the shapes of the total."""
    if total.low is None:
        return jax.tree.map(lambda high: high.astype(jnp.float64), total.high)
    return jax.tree.map(lambda high, low: high.astype(jnp.float64) + low.astype(jnp.float64), total.high, total.low)


def split_float64(exact: Tree) -> FloatPair:
    """The nearest `FloatPair` to a tree of float64 arrays in the range of float32."""
    rounded = jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23), exact)
    low = jax.tree.map(lambda x, high: (x - high).astype(jnp.float32), exact, rounded)
    return FloatPair(jax.tree.map(lambda high: high.astype(jnp.float32), rounded), low)


def released_minus_total(released: Tree, total: FloatPair) -> FloatPair:
    """Subtracts a total from a tree of float32 arrays, rounding once in float64 and then as `split_float64` does."""
    return split_float64(jax.tree.map(lambda r, before: r.astype(jnp.float64) - before, released, as_float64(total)))


def norm_of_pair(total: FloatPair) -> jax.Array:
    """The 2-norm of a `FloatPair`, as a float64 scalar."""
    parts = [jnp.zeros(1, jnp.float64)]
    for high, low in zip(*map(jax.tree.leaves, total), strict=True):
        rows, rest = zip(*(_split_into_rows(x.reshape(-1), FIRST) for x in (high, low)), strict=True)
        # Barriers as in norms.py: rows before squares, for speed, and short sums, for precision.
        sums, more = _split_into_rows(jnp.sum(_squares_of_pairs(*jax.lax.optimization_barrier(rows)), -1), SECOND)
        parts += [jnp.sum(jax.lax.optimization_barrier(sums), -1), more, _squares_of_pairs(*rest)]
    sums = jnp.concatenate(parts)
    while sums.size > NEXT:
        padded = jnp.pad(jax.lax.optimization_barrier(sums), (0, -sums.size % NEXT))
        sums = jnp.sum(padded.reshape(-1, NEXT), -1)
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(sums)))


def _split_into_rows(x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Splits a vector into rows, (n, width), and the remaining elements."""
    whole = x.size - x.size % width
    return x[:whole].reshape(-1, width), x[whole:]


def _squares_of_pairs(high: jax.Array, low: jax.Array) -> jax.Array:
    return jnp.square(high.astype(jnp.float64) + low.astype(jnp.float64))
