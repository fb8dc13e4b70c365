"""The weighted sum of the gradients at one site, sum_i f_i A_i^T B_i.

Positions can cancel, so a partial sum over the positions of an example may be much longer than its gradient, and its
rounding error much larger. So if a site has several positions, whole gradients are added, one example after another:
the norm then includes the rounding of that example's gradient (`norms.sum_error`), and `dpx.sums.rounding` bounds the
rounding of the sum over examples. At most one gradient of a microbatch is in memory.

A matrix unit multiplies bfloat16 or TF32 numbers exactly (`dpx.xla.matrix_units`), but times a factor they have more
digits. With one position, this product is truncated: |a| |truncated(f b)| <= f |a| |b|, so the norm still bounds it.
With several positions, the factor multiplies the finished product of its example. There, products below 2^-126 may
become 0 before the factor is applied: with factors of up to 2^20, a sum of 2^36 products loses less than 2^-70.

The sum for the kernel of a convolution is a product of patches, except on a CPU. On a GPU, XLA passes convolutions to
cuDNN, which may use Winograd's algorithm or Fourier transforms, whose rounding no proof here bounds.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.gradients.ghost.norms import count_segments, einsum_by_segments
from dpx.gradients.ghost.rules import Site
from dpx.sums.clipped_sum import (
    add_behind_barrier,
    add_part_by_part,
    count_devices_of_rows,
    norms_in_range,
    repeat_to_shape,
    rows_with_excluded_zeroed,
    scaled_rows,
    sum_in_blocks,
)
from dpx.sums.rounding import count_blocks, sizes_of_blocks
from dpx.xla.place import current_place

SOME_NUMBERS = 2**21  # elements of gradients, 8 MiB, that a matrix unit finishes at once; a kernel costs 1,800 cycles
# The most elements of a block's gradients that a TPU adds in turn without a loop, which would keep the sum in slower
# memory between turns. It takes at most half the time, but each gradient is a kernel to compile, slower if it is large.
MOST_IN_TURN = 2**24
FEW_ROWS = 4  # a block that reads less than 1 / FEW_ROWS of a table makes no sum of the table's size


def sum_at_site(site: Site, shape: tuple[int, ...], record, factors: jax.Array) -> jax.Array:
    """The weighted sum, float32, of the parameter's shape, if each example adds at most one product to an element.
    record: the inputs and cotangents of B examples. factors: float32 (B,)."""

    unit = current_place().matrix_unit

    def sum_block(rows):
        record, factors = rows
        inputs, cotangents = rows_with_excluded_zeroed(factors, record)
        if current_place().platform == "cpu":
            cotangents = scaled_rows(factors, cotangents)
            apply: Any = site.apply
            return apply_transpose(
                lambda w: jax.vmap(apply, (0, None), axis_size=len(cotangents))(inputs, w), shape, cotangents
            )
        a, b = jax.vmap(site.matrices)(inputs, cotangents)
        rows = (x[:, :, 0].swapaxes(0, 1) for x in (a, unit.truncate_operand(scaled_rows(factors, b))))
        return _product_in_parameter_order(site, shape, *rows)

    return sum_in_blocks(sum_block, (record, factors), math.prod(shape), unit)


def sum_of_table_rows(site: Site, shape: tuple[int, ...], record, factors: jax.Array) -> jax.Array:
    """The weighted sum of rows of a table, float32, of the parameter's shape. record: the indices, int32 (B, T), and
    the rows of `norms.gradient_rows_of_lookup`, float32 (B, T, O), of B examples. factors: float32 (B,).

    If a block reads few rows of the table, only these are summed, and added to the total in place. The result is the
    same as with a sum of the table's size for each block, which would have to be written and read.
    """
    _, positions, count, _ = site.sizes
    blocks = count_blocks(len(factors), 1)

    def weighted(some):
        (indices, rows), factors = rows_with_excluded_zeroed(some[1], some[0]), some[1]
        return indices.reshape(-1), scaled_rows(factors, rows).reshape(-1, rows.shape[-1])

    if current_place().devices > 1 or blocks == 1 or FEW_ROWS * positions * len(factors) > blocks * count:
        return sum_in_blocks(
            lambda some: _scatter_rows(site, shape, *weighted(some)), (record, factors), math.prod(shape)
        )

    def add(table, block):
        indices, rows = jax.lax.optimization_barrier(block)
        return _plus_rows(table, indices, rows)

    first, width = sizes_of_blocks(len(factors), blocks)
    begin = functools.partial(add, jnp.zeros(site.sizes[2:], jnp.float32))
    total = add_part_by_part(
        lambda some: _sum_rows_by_index(*weighted(some)), (record, factors), first, width, add, begin=begin
    )
    return apply_transpose(site.arrange, shape, total[None])


def _sum_rows_by_index(indices: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums rows, float32 (n, O), of equal indices, int32 (n,). Returns distinct indices, padded with -1, and sums."""
    order = jnp.argsort(indices)
    ordered = indices[order]
    place = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]]), dtype=jnp.int32)
    return jnp.full_like(indices, -1).at[place].set(ordered), _plus_rows(jnp.zeros_like(rows), place, rows[order])


def _rows_of_segments(indices: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums the rows, float32 (T, O), of equal indices, int32 (T,), in each of the segments for which `norms.sum_error`
    holds. Otherwise a row of the table that is read often would be one long sum, which rounds more."""
    width = math.ceil(len(indices) / count_segments(len(indices)))
    if width == len(indices):
        return indices, rows
    missing = -len(indices) % width
    indices = jnp.pad(indices, (0, missing), constant_values=-1).reshape(-1, width)
    rows = jnp.pad(rows, ((0, missing), (0, 0))).reshape(-1, width, rows.shape[-1])
    indices, rows = jax.vmap(_sum_rows_by_index)(indices, rows)
    return indices.reshape(-1), rows.reshape(-1, rows.shape[-1])


def _scatter_rows(site: Site, shape: tuple[int, ...], indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the parameter's gradient, float32, which is 0 except in some rows. rows: float32 (n, O). indices: int32
    (n,), where they belong; a row with a negative index is skipped."""
    table = _plus_rows(jnp.zeros(site.sizes[2:], jnp.float32), indices, rows)
    return apply_transpose(site.arrange, shape, table[None])


def _plus_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Adds rows, float32 (n, O), to `table`, float32 (V, O), at indices, int32 (n,); skips indices out of range."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(table, indices[:, None], rows, numbers, mode="drop")


def take_row(arrays: Any, number: jax.Array, axis: int = 0) -> Any:
    """Takes row `number`, at least 0, of arrays along an axis."""
    how = {"keepdims": False, "allow_negative_indices": False}  # saves three operations for each array
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, axis, **how), arrays)


def sum_gradients_one_by_one(
    sites: tuple[Site, ...], groups: list[tuple[int, ...]], shape: tuple[int, ...], records: list, factors: jax.Array
) -> jax.Array:
    """The weighted sum over all sites, float32, of the parameter's shape. groups: the indices of sites that see its
    elements in the same order; in each group, all are lookups or none is. records: the inputs and cotangents of B
    examples at each site. factors: float32 (B,)."""

    def sum_block(rows):
        def add(number, total):
            of_one, factor = take_row(rows, number)
            return add_behind_barrier(
                total, example_gradient(sites, groups, shape, rows_with_excluded_zeroed(factor, of_one), factor)
            )

        return jax.lax.fori_loop(0, len(rows[1]), add, jnp.zeros(shape, jnp.float32))

    def scaled_products(records, factors):
        of_each = jax.vmap(lambda records: example_gradient(sites, groups, shape, records, jnp.float32(1)))
        return repeat_to_shape(factors, (len(factors), *shape)) * of_each(rows_with_excluded_zeroed(factors, records))

    def sum_finished(rows):
        """Sums finished products times their factors, so no matrix product can accumulate onto the sum of others."""
        return jnp.sum(scaled_products(*rows), 0)

    def sum_in_turn(rows):
        each = [jax.tree.map(lambda x, i=i: x[i : i + 1], rows) for i in range(len(rows[1]))]
        return functools.reduce(jnp.add, [scaled_products(*row)[0] for row in each])

    if current_place().matrix_unit.rounds_operands:
        numbers = math.prod(shape)
        some = min(len(factors), max(1, SOME_NUMBERS // numbers))
        in_turn = current_place().platform == "tpu" and some < len(factors) <= MOST_IN_TURN // numbers
        in_parts = functools.partial(add_part_by_part, sum_finished, first=some, width=some, add=jnp.add)
        sum_block = sum_in_turn if in_turn else in_parts
    return sum_in_blocks(sum_block, (records, factors), math.prod(shape))


SLACK = 1 - 2.0**-21  # covers the rounding of a quotient of two norms, and of its product with a factor


def shortening_factors(found: jax.Array, norms: jax.Array) -> jax.Array:
    """Factors, float32, that shorten gradients with norms `found` to at most `norms`; 0 if out of range."""
    shorter = jnp.where(found > norms, norms / found * SLACK, 1)
    return jnp.where(norms_in_range(found), shorter, 0)


def map_sequentially(function: Callable, rows: Any) -> Any:
    """Maps `function` over the rows of B examples, (B, ...), one example at a time on each device."""
    size = len(jax.tree.leaves(rows)[0])
    devices = count_devices_of_rows(size)
    if devices == 1:
        return jax.lax.map(function, rows)
    by_device = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows)

    def of_each_device(number):
        return jax.vmap(function)(take_row(by_device, number, axis=1))

    found = jax.lax.map(of_each_device, jnp.arange(size // devices))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size, *x.shape[2:]), found)


def example_gradient(
    sites: tuple[Site, ...], groups: list[tuple[int, ...]], shape: tuple[int, ...], records: list, factor: jax.Array
) -> jax.Array:
    """The gradient of one example times `factor`, or without it on a matrix unit. See `sum_gradients_one_by_one`."""

    def of_group(numbers: tuple[int, ...]) -> list[jax.Array]:
        some = [(sites[number], *records[number]) for number in numbers]
        if not sites[numbers[0]].lookup:
            return [_gradient_at_site(site, shape, *record, factor=factor) for site, *record in some]
        read = [site.matrices(*record) for site, *record in some]
        indices, b = (jnp.concatenate(each) for each in zip(*read, strict=True))
        return [_scatter_rows(some[0][0], shape, *_rows_of_segments(indices, scaled_rows(factor, b)))]

    return functools.reduce(jnp.add, [grad for numbers in groups for grad in of_group(numbers)])


def _gradient_at_site(site: Site, shape: tuple[int, ...], inputs, dy: jax.Array, *, factor: jax.Array) -> jax.Array:
    """The gradient of one example at one site, times `factor` except on a matrix unit. The factor multiplies the
    smaller of A and B."""
    a, b = site.matrices(inputs, dy)
    if not current_place().matrix_unit.rounds_operands:
        a, b = (scaled_rows(factor, a), b) if a.size < b.size else (a, scaled_rows(factor, b))
    return _product_in_parameter_order(site, shape, a, b)


def _product_in_parameter_order(site: Site, shape: tuple[int, ...], a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes A^T B for A, (K, T, I), and B, (K, T, O), in the parameter's order, so that XLA need not transpose it.
    Returns it in the parameter's shape."""
    if _reorders_axes(site.arrange, shape):
        total = einsum_by_segments("kto,kti->koi", b, a)
        if len(total) == 1:  # XLA would write both transposes to memory if an axis of length 1 stood between them
            return apply_transpose(lambda w: site.arrange(w)[0].T, shape, total[0])
        total = total.swapaxes(1, 2)
    else:
        total = einsum_by_segments("kti,kto->kio", a, b)
    return apply_transpose(site.arrange, shape, total)


def _reorders_axes(function: Callable, shape: tuple[int, ...]) -> bool:
    equations = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32)).eqns
    orders = [list(one.params["permutation"]) for one in equations if one.primitive.name == "transpose"]
    return any(order != sorted(order) for order in orders)


def apply_transpose(linear: Callable, shape: tuple[int, ...], cotangent: jax.Array) -> jax.Array:
    """Applies the transpose of `linear`, a linear function of float32 arrays of this shape."""
    (transposed,) = jax.linear_transpose(linear, jax.ShapeDtypeStruct(shape, jnp.float32))(cotangent)
    return transposed
