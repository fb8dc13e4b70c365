"""Algorithms that compute the norms of one parameter's per-example gradients and their clipped sum.

A new algorithm needs a `NormAlgorithm` listed in `GHOST`, a model that selects it in tests/test_ghost_zoo.py, and a
case in tests/test_ghost_hostile.py.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.gradients.ghost import norms, weighted_sums
from dpx.gradients.ghost.norms import (
    TINY,
    BoundedProducts,
    Matrices,
    bound_inner_products,
    error_of_inner_products,
    norm_with_sum_error,
    pairwise_inner_products,
    product_or_infinity,
    split_off_scale,
    sum_upper_bound,
)
from dpx.gradients.ghost.rules import Site
from dpx.sums.clipped_sum import repeat_to_shape, weighted_sum
from dpx.xla.place import current_place


class ElementOverlap(enum.Enum):
    """How a second group of uses sees the elements that a first group sees."""

    SAME = enum.auto()
    TRANSPOSED = enum.auto()
    DISJOINT = enum.auto()


class UseGroup(NamedTuple):
    """Uses whose A^T B hold a parameter's elements in the same order, so they count as one use with more positions.

    sites: indices of `ParameterUses.sites`. sizes: (K, T, I, O), as in a `Site`, with the sum of their T
    lookup: bool, True if the uses look up rows of the parameter
    """

    sites: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    lookup: bool


class ElementSharing(NamedTuple):
    """How the uses of one parameter, such as a tied embedding, see its elements.

    Its gradient is sum_u G_u over the uses u, with G_u = A_u^T B_u, and its norm needs, for every pair of uses,

        <G_u, G_v> = sum_st (a_us . a_vt)(b_us . b_vt)

    if both see the elements in the same order. If one sees them transposed, A_v and B_v change places; if they see
    disjoint elements, the product is 0. Parameters with other pairs are not followed.

    use_groups: the groups of uses. relations: for each pair (i, j) of groups, i < j
    """

    use_groups: tuple[UseGroup, ...]
    relations: Mapping[tuple[int, int], ElementOverlap]


def find_element_sharing(sites: tuple[Site, ...], shape: tuple[int, ...]) -> ElementSharing | str:
    """How the uses of a parameter of this shape see its elements, or why it cannot be followed."""
    seen = _ElementsByUse(sites, shape)
    by_view: list[list[int]] = []
    for number, site in enumerate(sites):
        alike = (numbers for numbers in by_view if sites[numbers[0]].lookup == site.lookup)
        group = next((numbers for numbers in alike if seen.see_same_order(numbers[0], number)), None)
        if group is None:
            by_view.append(group := [])
        group.append(number)
    use_groups, relations = [], {}
    for numbers in by_view:
        kernels, _, fan_in, fan_out = sites[numbers[0]].sizes
        positions = sum(sites[number].sizes[1] for number in numbers)
        lookup = sites[numbers[0]].lookup
        use_groups.append(UseGroup(tuple(numbers), (kernels, positions, fan_in, fan_out), lookup))
    for i, j in itertools.combinations(range(len(use_groups)), 2):
        relation = seen.element_overlap(use_groups[i].sites[0], use_groups[j].sites[0])
        if relation is None:
            return f"used {len(sites)} times, by views that overlap in part"
        relations[i, j] = relation
    return ElementSharing(tuple(use_groups), relations)


class _ElementsByUse:
    """The elements of a parameter of this shape as its uses see them, in the order of A^T B."""

    def __init__(self, sites: tuple[Site, ...], shape: tuple[int, ...]):
        self.sites, self.shape = sites, shape
        self.views = self.elements_by_use(np.empty(shape, np.int8))  # never read, so even a large array takes no memory

    def elements_by_use(self, elements: Any) -> list[np.ndarray]:  # NumPy returns views, not copies
        with jax.ensure_compile_time_eval():
            return [np.asarray(site.arrange(elements)) for site in self.sites]

    @functools.cached_property
    def numbers(self) -> list[np.ndarray]:
        return self.elements_by_use(np.arange(math.prod(self.shape), dtype=np.int32).reshape(self.shape))

    def see_same_order(self, i: int, j: int, axes: tuple[int, ...] = (0, 1, 2)) -> bool:
        """Whether use i sees the elements in the same order as use j with its axes permuted to `axes`."""
        if self.views[i].__array_interface__ == self.views[j].transpose(axes).__array_interface__:
            return True
        return np.array_equal(self.numbers[i], self.numbers[j].transpose(axes))

    def element_overlap(self, i: int, j: int) -> ElementOverlap | None:
        if self.see_same_order(i, j):
            return ElementOverlap.SAME
        if self.see_same_order(i, j, (0, 2, 1)):
            return ElementOverlap.TRANSPOSED
        return ElementOverlap.DISJOINT if np.intersect1d(self.numbers[i], self.numbers[j]).size == 0 else None


def gram_flops(sharing: ElementSharing) -> float:
    """The floating-point operations of the Gram matrices for the norm of one example."""
    total = 0.0
    for i, j in itertools.combinations_with_replacement(range(len(sharing.use_groups)), 2):
        first, second = sharing.use_groups[i], sharing.use_groups[j]
        if sharing.relations.get((i, j)) is ElementOverlap.DISJOINT:
            continue
        kernels, positions, fan_in, fan_out = first.sizes
        # A lookup needs only the products of its B, because comparing or taking indices costs almost nothing.
        width = fan_out if first.lookup or second.lookup else fan_in + fan_out
        total += 2 * kernels * positions * second.sizes[1] * width
    return total


def _norm_of_uses(sharing: ElementSharing, matrices: Matrices, positions: list[int]) -> jax.Array:
    """The norm |sum_u A_u^T B_u| of one example, float32 (), with bounds on rounding as in `norms.gram_norm`. matrices:
    A_u and B_u of every use, from `Site.matrices`. positions: as in `ParameterUses`."""
    sides, size = _group_matrices(sharing, matrices), jnp.float32(1)
    if not current_place().matrix_unit.rounds_operands:
        sides, size = _rescaled_matrices(sharing, sides)
    add = functools.partial(sum_upper_bound, more=len(sides) ** 2)
    measured = [[(x, _products_among_rows(x)) for x in side] for side in sides]
    squared = functools.reduce(jnp.add, [add(a, b) for (_, a), (_, b) in measured])
    for (i, j), relation in sharing.relations.items():
        if relation is not ElementOverlap.DISJOINT:
            others = measured[j] if relation is ElementOverlap.SAME else measured[j][::-1]
            squared += 2 * add(
                *(_products_between_rows(*left, *right) for left, right in zip(measured[i], others, strict=True))
            )
    lengths = jnp.concatenate([norms.products_of_row_norms(a, b).reshape(-1) for (_, a), (_, b) in measured])
    return size * norm_with_sum_error(squared, lengths, *positions)


def _products_among_rows(x: jax.Array) -> BoundedProducts:
    """The inner products of rows with each other, exact if the rows are indices. `_gram` says what rows are."""
    if x.ndim > 1:
        return bound_inner_products(_gram(x, x), x)
    ones = jnp.ones((1, len(x)), jnp.float32)
    return BoundedProducts(_gram(x, x), (ones, ones), 0.0)


def _products_between_rows(
    left: jax.Array, of_left: BoundedProducts, right: jax.Array, of_right: BoundedProducts
) -> BoundedProducts:
    """The inner products of rows with other rows. A product with a one-hot row only picks a number, so it is exact."""
    error = error_of_inner_products(left, right) if left.ndim == right.ndim > 1 else 0.0
    return BoundedProducts(_gram(left, right), (of_left.lengths[0], of_right.lengths[0]), error)


def _group_matrices(sharing: ElementSharing, matrices: Matrices) -> Matrices:
    """A and B of every group."""
    sides = []
    for group in sharing.use_groups:
        a = jnp.concatenate([matrices[number][0] for number in group.sites], axis=0 if group.lookup else 1)
        bs = [matrices[number][1] for number in group.sites]
        b = jnp.concatenate(bs, axis=0)[None] if group.lookup else jnp.concatenate(bs, axis=1)
        sides.append((a, jnp.where((a >= 0)[None, :, None], b, 0) if group.lookup else b))
    return sides


def _rescaled_matrices(sharing: ElementSharing, sides: Matrices):
    """A and B of every group, divided by a common size as in `norms.rescale_matrix_pair`, and this size, float32 ()."""
    measured = []
    for group, (a, b) in zip(sharing.use_groups, sides, strict=True):
        b, size = split_off_scale(b)
        a, size_a = (a, jnp.ones_like(size)) if group.lookup else split_off_scale(a)
        measured.append((a, b, product_or_infinity(size_a, size)))
    largest = functools.reduce(jnp.maximum, (jnp.max(size, initial=0) for _, _, size in measured), TINY)
    return [(a, b * repeat_to_shape(size / largest, b.shape)) for a, b, size in measured], largest


def _gram(left: jax.Array, right: jax.Array) -> jax.Array:
    """The inner products, float32 (K, S, T), of the rows of (K, S, n) and (K, T, n). Indices, int32 (S,), represent
    one-hot rows, (1, S, n), and a negative index represents a row of zeros."""
    if left.ndim == right.ndim == 1:
        return ((left[:, None] == right[None, :]) & (left >= 0)[:, None]).astype(jnp.float32)[None]
    if left.ndim == 1:
        picked = jnp.take(right, left, axis=2, mode="fill", fill_value=0)
        return jnp.where(left >= 0, picked, 0).transpose(0, 2, 1)
    if right.ndim == 1:
        return _gram(right, left).transpose(0, 2, 1)
    return pairwise_inner_products(left, right)


# The unit of cost is one floating-point operation of a large matrix product on one CPU core (benchmarks/step.py).
OPERATIONS_PER_BYTE = 12.0  # the cost of moving one byte of fresh memory
CACHED_BYTES = 2**20  # a larger per-example gradient leaves the cache before it is read (benchmarks/transformers.py)
# Gradients this small stay in a core's cache for all examples, so their bytes cost less than the many small operations
# of a ghost norm, as in an LSTM of width 16 (benchmarks/results/zoo.md).
SMALL_BYTES, OPERATIONS_PER_SMALL_BYTE = 2**14, 2.0
# Costs on a CPU, whatever the sizes: one turn of the loop that adds the gradients of examples, and the product of one
# group among several, such as a channel of a depthwise convolution (benchmarks/results/zoo.md).
OPERATIONS_PER_TURN, OPERATIONS_PER_GROUP = 2.0**15, 2.0**10
GRAM_SLOWDOWN = 2.5  # the cost of an operation of a Gram matrix, because these are small (benchmarks/transformers.py)
PATCH_GRAM_SLOWDOWN = 4.0  # the same for the patches of a convolution
TOO_LARGE = 1e6  # the cost of each byte of a gradient that is too large, so that any other algorithm is cheaper
DENSE_GRADIENT_SLOWDOWN = 1.1  # the cost of an operation of a dense layer's per-example gradient
KEPT_ON_DEVICES = 2.0  # several devices keep no gradient larger than this times its inputs and cotangents
CONVOLUTION_GRADIENT_SLOWDOWN = 4.0  # as for a dense layer; higher because `jax.vmap` makes it a grouped convolution
TILE = 16  # rows of bfloat16 that a TPU stores together
MOST_UNROUNDED = 2**22  # elements, 16 MiB, that fit a TPU's fast memory, where reading twice is faster than rounding
SMALL_TABLE = 2**20  # bytes; for smaller tables, the kernels of `tied_gradients` are slower than the backward pass


class ParameterUses(NamedTuple):
    """Where the loss uses a parameter, or each of several equal slices of it.

    sites: one for each use; empty if the parameter is not followed. slices: int, the number of slices, which are
    computed one after another. sharing: how several sites see the parameter's elements; None for one site. shape: of
    the parameter, or of one slice
    """

    sites: tuple[Site, ...] = ()
    sharing: ElementSharing | None = None
    slices: int = 1
    shape: tuple[int, ...] = ()

    @property
    def site_groups(self) -> list[tuple[int, ...]]:
        """The indices of `sites`, grouped by the order in which A^T B holds the parameter's elements."""
        return [group.sites for group in self.sharing.use_groups] if self.sharing else [(0,)]

    @property
    def position_counts(self) -> list[int]:
        """The number of positions in each of the sums that add up to the gradient; a group's lookups form one sum."""
        found = []
        for numbers in self.site_groups:
            counts = [self.sites[number].sizes[1] for number in numbers]
            found += [sum(counts)] if self.sites[numbers[0]].lookup else counts
        return found

    @property
    def positions_compared(self) -> int:
        """How many positions Gram matrices compare. Lookups, whose rows are one-hot, count separately."""
        return max(sum(site.sizes[1] for site in self.sites if site.lookup == lookup) for lookup in (False, True))

    @property
    def has_few_positions(self) -> bool:
        """Whether there are so few positions that bounds on rounding hardly raise the norm from Gram matrices."""
        return self.positions_compared <= norms.MOST_POSITIONS

    @property
    def tied_table_sites(self) -> tuple[tuple[int, ...], int, bool] | None:
        """For a table with lookups and one product with data: the indices of the lookup sites, the index of the product
        site, and whether the operand B of the product has the table's rows. None for any other parameter."""
        if self.sharing is None or sorted(group.lookup for group in self.sharing.use_groups) != [False, True]:
            return None
        product, lookups = sorted(self.sharing.use_groups, key=lambda group: group.lookup)
        relation = self.sharing.relations[0, 1]
        if len(product.sites) > 1 or relation is ElementOverlap.DISJOINT:
            return None
        return lookups.sites, product.sites[0], relation is ElementOverlap.TRANSPOSED

    @property
    def are_one_lookup(self) -> bool:
        """Whether all uses read rows of one table."""
        same_rows = self.sharing is None or len(self.sharing.use_groups) == 1
        return same_rows and bool(self.sites) and all(site.lookup for site in self.sites)


# [(inputs, cotangents) for each site], or the gradients, float32, if there are no sites; the B examples are on axis 0.
Records = Any


class NormAlgorithm(NamedTuple):
    """How to compute, for one parameter, the norms of its per-example gradients and their sum with clip factors.

    words: for `explain_plan`
    cost: (uses, scaled) -> operations for one example, norm and sum; None if this algorithm does not apply. scaled:
        bool, whether the mechanism scales the coordinates of the parameter
    norm: (uses, scale, records) -> (gradients, norms) of B examples. scale: float32, of the parameter's shape, or None.
        gradients: kept for the sum, without `scale`, or None. norms: float32 (B,), with `scale`, and never below the
        norm of what the sum computes for an example with factor 1
    weighted_sum: (uses, shape, records, factors) -> float32, of the parameter's shape, without `scale`. records: the
        gradients that `norm` kept, or the records if it kept none. factors: float32 (B,), B at most
        `most_float32_rows`. It adds whole contributions of examples in blocks: see the proof in `dpx.sums.rounding`
    keeps_gradients: bool, whether the gradients of all examples of a microbatch are in memory
    increase: uses -> the largest relative increase of the norm by a bound on its rounding, if no positions cancel
    """

    words: str
    cost: Callable[[ParameterUses, bool], float | None]
    norm: Callable[[ParameterUses, jax.Array | None, Records], tuple[Any, jax.Array]]
    weighted_sum: Callable[[ParameterUses, tuple[int, ...], Records, jax.Array], jax.Array]
    keeps_gradients: bool = False
    increase: Callable[[ParameterUses], float] = lambda uses: 0.0


def _outer_cost(uses: ParameterUses, scaled: bool) -> float | None:
    site = _only_dense_site(uses)
    if site is None or site.sizes[1] != 1:
        return None
    groups, _, fan_in, fan_out = site.sizes
    return _product_flops(site) + (_parameter_size(site) if scaled else groups * (fan_in + fan_out)) * 2.0


def _outer_norm(uses: ParameterUses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records
    scale = None if scale is None else site.arrange(scale)
    return None, jax.vmap(lambda inputs, dy: norms.outer_norm(*site.matrices(inputs, dy), scale=scale))(*record)


def _gram_cost(uses: ParameterUses, scaled: bool) -> float | None:
    site = _only_dense_site(uses)
    if site is None or scaled or not uses.has_few_positions:
        return None
    groups, positions, fan_in, fan_out = site.sizes
    squares = groups * positions * positions
    bytes_written = 4 * (2 * squares + site.expands)
    operations = (PATCH_GRAM_SLOWDOWN if site.expands else GRAM_SLOWDOWN) * 2.0 * squares * (fan_in + fan_out)
    return operations + OPERATIONS_PER_BYTE * bytes_written + _product_flops(site) + _if_on_cpu(OPERATIONS_PER_TURN)


def _gram_norm(uses: ParameterUses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records  # no scale: see the cost
    return None, jax.vmap(lambda inputs, dy: norms.gram_norm(*site.matrices(inputs, dy)))(*record)


def _gram_increase(uses: ParameterUses) -> float:
    widest = max(size for site in uses.sites for size in site.sizes[3 if site.lookup else 2 :])
    return norms.share_raised_by_rounding(widest, uses.positions_compared) + norms.sum_error(*uses.position_counts)


def _product_cost(uses: ParameterUses, scaled: bool) -> float | None:
    site = _only_dense_site(uses)
    if site is None or not (site.expands or site.sizes[1] > 1):
        return None
    products = _if_on_cpu(OPERATIONS_PER_GROUP * site.sizes[0]) if site.sizes[0] > 1 else 0
    return _product_flops(site) + _gradient_memory_cost(site, uses.slices) + products


def kept_gradients(uses: ParameterUses, records: Records) -> jax.Array:
    """The gradients, (B, K, I, O), that norms and sums read."""
    (site,), (record,) = uses.sites, records
    products = site.products(*record)
    few = uses.slices == 1 and products.size <= MOST_UNROUNDED and current_place().platform == "tpu"
    return products if few else current_place().matrix_unit.round_gradient(products)


def _product_norm(uses: ParameterUses, scale: jax.Array | None, records: Records):
    taken = isinstance(records, jax.Array)  # whether a hook has taken the gradients
    grads = records if taken else jax.lax.optimization_barrier(kept_gradients(uses, records))  # norm and sum read these
    # The barrier makes XLA rearrange the scale once instead of once for every example.
    scale = None if scale is None else jax.lax.optimization_barrier(uses.sites[0].arrange(scale))
    return None if taken else grads, _scaled_gradient_norms(grads, scale)


def _product_sum(uses: ParameterUses, shape: tuple[int, ...], records: jax.Array, factors: jax.Array) -> jax.Array:
    total = weighted_sum(factors, records, apart=True)
    return weighted_sums.apply_transpose(uses.sites[0].arrange, shape, total)


def _norm_by_rows_cost(uses: ParameterUses, scaled: bool) -> float | None:
    if not uses.are_one_lookup:
        return None
    positions, numbers = (sum(site.sizes[1] * by for site in uses.sites) for by in (1, uses.sites[0].sizes[3]))
    compared = 0 if _rows_are_distinct(uses.sites) else positions
    return 2.0 * compared * numbers + OPERATIONS_PER_BYTE * 4 * 2 * numbers


def _rows_are_distinct(sites: tuple[Site, ...]) -> bool:
    return len(sites) == 1 and sites[0].distinct


def _gradient_rows_of_lookups(sites: tuple[Site, ...], records: Records) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The indices of one group of lookups, int32 (B, T), and the results of `norms.gradient_rows_of_lookup`."""

    def of_one_example(record):
        read = [site.matrices(*row) for site, row in zip(sites, record, strict=True)]
        indices, b = (jnp.concatenate(each) if len(each) > 1 else each[0] for each in zip(*read, strict=True))
        return indices, *norms.gradient_rows_of_lookup(indices, b, distinct=_rows_are_distinct(sites))

    return jax.vmap(of_one_example)(records)


def _norm_by_rows(uses: ParameterUses, scale: jax.Array | None, records: Records):
    indices, rows, inside = _gradient_rows_of_lookups(uses.sites, records)
    rows = jax.lax.optimization_barrier(rows)
    of_rows = 1 if scale is None else uses.sites[0].arrange(scale)[0][jnp.maximum(indices, 0)]
    return (indices, rows), jnp.where(inside, _scaled_gradient_norms(rows * of_rows, None), jnp.inf)


def _sum_of_looked_up_rows(uses: ParameterUses, shape: tuple[int, ...], records: Any, factors: jax.Array) -> jax.Array:
    return weighted_sums.sum_of_table_rows(uses.sites[0], shape, records, factors)


def _tied_cost(uses: ParameterUses, scaled: bool) -> float | None:
    if scaled or not uses.tied_table_sites or current_place().platform != "tpu":
        return None
    product = uses.sites[uses.tied_table_sites[1]]
    if 4 * _parameter_size(product) <= SMALL_TABLE:
        return None
    return sum(map(gradient_flops, uses.sites)) + _gradient_memory_cost(product, uses.slices)


def tied_gradients(uses: ParameterUses, records: Records) -> jax.Array:
    """The gradients, (B, V', D), of a table of V rows in a TPU's memory. Norm and sum read only these, so nothing else
    is rounded. Zeros after the rows make V' a multiple of TILE. So all examples form one array of rows without a copy,
    and each example's looked-up rows are added to its part of the array. On several devices, tables stay separate."""
    assert uses.tied_table_sites
    (lookups, number, transposed), unit = uses.tied_table_sites, current_place().matrix_unit
    of_product = jax.vmap(uses.sites[number].matrices)(*records[number])
    rows, columns = (x[:, 0] for x in (of_product[::-1] if transposed else of_product))
    count = -(-rows.shape[-1] // TILE) * TILE
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, count - rows.shape[-1])))
    several = current_place().devices > 1
    if several:  # XLA may split this product, and rounds only the parts to bfloat16
        tables = jnp.einsum("btv,btd->bvd", rows, columns, preferred_element_type=jnp.bfloat16)
    else:
        tables = unit.round_gradient(jnp.einsum("btv,btd->bvd", rows, columns, precision=unit.precision))
    sites = tuple(uses.sites[site] for site in lookups)
    indices, found, _ = _gradient_rows_of_lookups(sites, [records[site] for site in lookups])
    # Repeated and negative indices have rows that are 0, or not numbers. Only the first row of each index is written.
    written = (indices >= 0) & jnp.any(found != 0, -1).reshape(indices.shape)

    def with_lookups(table, place, rows):
        rows += table.at[place].get(mode="fill", fill_value=0).astype(jnp.float32)
        return table.at[place].set(unit.round_gradient(rows), mode="drop")

    if several:  # XLA would send every row of a single array to all devices
        return jax.vmap(with_lookups)(tables, jnp.where(written, indices, count), found)
    of_all, found = tables.reshape(-1, tables.shape[-1]), found.reshape(-1, tables.shape[-1])
    first = count * jnp.arange(len(tables), dtype=jnp.int32)[:, None]
    place = jnp.where(written, first + indices, len(of_all)).reshape(-1)
    return with_lookups(of_all, place, found).reshape(tables.shape)


def _tied_sum(uses: ParameterUses, shape: tuple[int, ...], records: jax.Array, factors: jax.Array) -> jax.Array:
    assert uses.tied_table_sites
    site = uses.sites[uses.tied_table_sites[0][0]]
    # Without the barrier, XLA drops the padding inside the sum, which then takes 3 kernels and 2.7 times the cycles.
    total = jax.lax.optimization_barrier(weighted_sum(factors, records, apart=True))[: site.sizes[2]]
    return weighted_sums.apply_transpose(site.arrange, shape, total[None])


def _shared_cost(uses: ParameterUses, scaled: bool) -> float | None:
    if uses.sharing is None or scaled or uses.are_one_lookup or not uses.has_few_positions:
        return None
    operations = gram_flops(uses.sharing) * GRAM_SLOWDOWN + sum(map(gradient_flops, uses.sites))
    return operations + _if_on_cpu(OPERATIONS_PER_TURN)


def _shared_norm(uses: ParameterUses, scale: jax.Array | None, records: Records):
    def of_one_example(record):
        assert uses.sharing is not None  # and no scale: see the cost
        matrices = [site.matrices(*row) for site, row in zip(uses.sites, record, strict=True)]
        return _norm_of_uses(uses.sharing, matrices, uses.position_counts)

    return None, jax.vmap(of_one_example)(records)


def _recomputation_cost(uses: ParameterUses, scaled: bool) -> float | None:
    if scaled or uses.are_one_lookup or uses.has_few_positions:
        return None
    return 2 * sum(map(gradient_flops, uses.sites)) + OPERATIONS_PER_BYTE * 4 * 2 * math.prod(uses.shape)


def _recomputed_norm(uses: ParameterUses, scale: jax.Array | None, records: Records):
    def of_one_example(record):  # no scale: see the cost
        gradient = weighted_sums.example_gradient(uses.sites, uses.site_groups, uses.shape, record, jnp.float32(1))
        matrices = [site.matrices(*row) for site, row in zip(uses.sites, record, strict=True)]
        columns = [_with_lookup_as_column(*each) for each in matrices]
        return norms.norm_of_computed_gradient(gradient, columns, *uses.position_counts)

    return None, weighted_sums.map_sequentially(of_one_example, records)


def _with_lookup_as_column(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns A and B. For a lookup, A becomes a column of the lengths of its one-hot rows, and B becomes one group."""
    if a.ndim > 1:
        return a, b
    taken = (a >= 0)[:, None]
    return taken.astype(jnp.float32)[None], jnp.where(taken, b, 0)[None]


def _sum_at_only_site(uses: ParameterUses, shape: tuple[int, ...], records: list, factors: jax.Array) -> jax.Array:
    (site,), (record,) = uses.sites, records
    return weighted_sums.sum_at_site(site, shape, record, factors)


def _sum_of_examples(uses: ParameterUses, shape: tuple[int, ...], records: list, factors: jax.Array) -> jax.Array:
    return weighted_sums.sum_gradients_one_by_one(uses.sites, uses.site_groups, shape, records, factors)


def gradient_cost(uses: ParameterUses) -> float:
    """The cost of the backward pass, the norm and the sum of one example's gradient."""

    def at(site):
        size = 4 * _parameter_size(site)
        memory = _gradient_memory_cost(site, uses.slices)
        if uses.slices * size <= SMALL_BYTES and not site.expands:
            memory = min(memory, 3 * OPERATIONS_PER_SMALL_BYTE * size)
        slowdown = CONVOLUTION_GRADIENT_SLOWDOWN if site.expands else DENSE_GRADIENT_SLOWDOWN
        return memory if site.lookup else slowdown * _product_flops(site) + memory

    return sum(map(at, uses.sites))


def gradient_flops(site: Site) -> float:
    """The floating-point operations of one example's gradient at a site."""
    return 2.0 * site.sizes[1] * site.sizes[3] if site.lookup else _product_flops(site)


def _only_dense_site(uses: ParameterUses) -> Site | None:
    """The site of a parameter that is used once and not in a lookup, or None."""
    site = uses.sites[0]
    return site if len(uses.sites) == 1 and not site.lookup else None


def _if_on_cpu(cost: float) -> float:
    return cost if current_place().platform == "cpu" else 0.0


def _parameter_size(site: Site) -> int:
    groups, _, fan_in, fan_out = site.sizes
    return groups * fan_in * fan_out


def _product_flops(site: Site) -> float:
    """The operations of A^T B, for one gradient or for one example's share of the sum."""
    return 2.0 * site.sizes[1] * _parameter_size(site)


def _gradient_memory_cost(site: Site, slices: int) -> float:
    """The cost of writing a per-example gradient, and reading it for the norm and for the sum. Between the norm and the
    sum of one slice come those of all other `slices`.

    A model that needs several devices lacks the memory for gradients larger than what they are computed from: with such
    gradients, a decoder of 16 layers took 4.5 times the memory of a nonprivate step (benchmarks/results/sharded.md).
    """
    size = 4 * _parameter_size(site)
    groups, positions, fan_in, fan_out = site.sizes
    if current_place().devices > 1 and fan_in * fan_out >= KEPT_ON_DEVICES * positions * (fan_in + fan_out):
        return TOO_LARGE * size
    return (3 if slices * size <= CACHED_BYTES else 5) * OPERATIONS_PER_BYTE * size


def _scaled_gradient_norms(grads: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The norms, float32 (B,), of gradients that are first scaled coordinate by coordinate."""
    return jax.vmap(lambda grad: norms.frobenius(grad if scale is None else grad * scale))(grads)


OUTER = NormAlgorithm("norm from |input| |cotangent|", _outer_cost, _outer_norm, _sum_at_only_site)
GRAM = NormAlgorithm("norm from Gram matrices", _gram_cost, _gram_norm, _sum_of_examples, increase=_gram_increase)
PRODUCT = NormAlgorithm(
    "per-example gradients from inputs and cotangents", _product_cost, _product_norm, _product_sum, keeps_gradients=True
)
ROWS = NormAlgorithm("norm from the rows looked up", _norm_by_rows_cost, _norm_by_rows, _sum_of_looked_up_rows)
TIED = NormAlgorithm(
    "per-example gradients of a table from all uses",
    _tied_cost,
    norm=lambda uses, scale, tables: (None, _scaled_gradient_norms(tables, None)),  # no scale: see the cost
    weighted_sum=_tied_sum,
    keeps_gradients=True,
)
SHARED = NormAlgorithm(
    "norm from Gram matrices of all uses", _shared_cost, _shared_norm, _sum_of_examples, increase=_gram_increase
)
RECOMPUTED = NormAlgorithm(
    "norm from a gradient that the sum computes again",
    _recomputation_cost,
    _recomputed_norm,
    _sum_of_examples,
    increase=lambda uses: 2 * norms.sum_error(*uses.position_counts),
)
GRADIENT = NormAlgorithm(
    "per-example gradients",
    lambda uses, scaled: gradient_cost(uses),
    norm=lambda uses, scale, grads: (grads, _scaled_gradient_norms(grads, scale)),
    weighted_sum=lambda uses, shape, grads, factors: weighted_sum(factors, grads),
    keeps_gradients=True,
)
SMALL = GRADIENT._replace(words="per-example gradients as small as cotangents")
UNUSED = NormAlgorithm(
    "no gradient",
    cost=lambda uses, scaled: 0.0,
    norm=lambda uses, scale, records: (None, jnp.zeros(len(jax.tree.leaves(records)[0]), jnp.float32)),
    weighted_sum=lambda uses, shape, records, factors: jnp.zeros(shape, jnp.float32),
)
FORWARD = UNUSED._replace(words="no gradient, but its derivatives along the mechanism's directions")
NOT_TRAINED = UNUSED._replace(words="not trained")

GHOST = (OUTER, GRAM, PRODUCT, ROWS, TIED, SHARED, RECOMPUTED)  # these need no gradient from the backward pass
