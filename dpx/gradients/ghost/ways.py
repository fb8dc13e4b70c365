"""The ways to compute the norms of one parameter's per-example gradients, and their clipped sum: one record for each.

To add one: a record here and its name in `GHOST`, a model that takes it in tests/test_ghost_zoo.py, and a case in
tests/test_ghost_hostile.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.contributions import weighted_sum
from dpx.gradients.ghost import norms, shared, weighted
from dpx.gradients.ghost.rules import Site
from dpx.xla.devices import device_count

# The unit of cost is one floating-point operation of a large matrix product, on one CPU core (benchmarks/step.py).
OPERATIONS_PER_BYTE = 12.0  # the cost to move one byte of fresh memory
CACHED_BYTES = 2**20  # a larger per-example gradient leaves the cache before it is read (benchmarks/transformers.py)
GRAM_SLOWDOWN = 2.5  # the cost of an operation of a Gram matrix, because these are small (benchmarks/transformers.py)
PATCH_GRAM_SLOWDOWN = 4.0  # the same for the patches of a convolution
TOO_LARGE = 1e6  # the cost of a byte of such a gradient: another way is chosen, if there is one
DENSE_GRADIENT_SLOWDOWN = 1.1  # the cost of an operation of a dense layer's per-example gradient
KEPT_ON_DEVICES = 2.0  # on several devices, numbers of a gradient for each of its records, from which it costs too much
CONVOLUTION_GRADIENT_SLOWDOWN = 4.0  # the same for a convolution, because `jax.vmap` turns it into a grouped one


class Uses(NamedTuple):
    """Where the loss uses a parameter.

    sites: one for each use; none where the parameter is not followed
    sharing: how several sites see the elements of the parameter; None for one site
    slices: int, how many parameters alike are computed one after another
    """

    sites: tuple[Site, ...] = ()
    sharing: shared.Sharing | None = None
    slices: int = 1


# [(inputs, cotangents) at each site], or the gradients, float32, if there are no sites; with the B examples on axis 0.
Records = Any


class Way(NamedTuple):
    """How to compute, for one parameter, the norms of its per-example gradients and their sum with clip factors.

    words: for `explain`
    cost: (uses, scaled) -> operations for one example, norm and sum; None where the way would be wrong. scaled: bool,
        whether the mechanism scales the coordinates of the parameter
    norm: (uses, scale, records) -> (gradients, norms) of B examples. scale: float32, of the parameter's shape, or None.
        gradients: kept for the sum, without `scale`, or None. norms: float32 (B,), with `scale`, and never below the
        norm of what the sum computes for an example with factor 1
    weighted_sum: (uses, shape, records, factors) -> float32, of the parameter's shape, without `scale`. records: the
        gradients that `norm` kept, else the records. factors: float32 (B,). B is at most `xla.totals.few_rows`. It
        adds whole contributions of examples, in blocks: see the proof in `dpx.xla.totals`
    keeps_gradients: bool, True if the gradients of all examples of a microbatch are in memory
    """

    words: str
    cost: Callable[[Uses, bool], float | None]
    norm: Callable[[Uses, jax.Array | None, Records], tuple[Any, jax.Array]]
    weighted_sum: Callable[[Uses, tuple[int, ...], Records, jax.Array], jax.Array]
    keeps_gradients: bool = False


def _outer_cost(uses: Uses, scaled: bool) -> float | None:
    site = _only_site(uses, lookup=False)
    if site is None or site.sizes[1] != 1:
        return None
    groups, _, fan_in, fan_out = site.sizes
    return _sum_cost(site) + (_parameter_size(site) if scaled else groups * (fan_in + fan_out)) * 2.0


def _outer_norm(uses: Uses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records
    scale = None if scale is None else site.arrange(scale)
    return None, jax.vmap(lambda inputs, dy: norms.outer(*site.matrices(inputs, dy), scale=scale))(*record)


def _gram_cost(uses: Uses, scaled: bool) -> float | None:
    site = _only_site(uses, lookup=False)
    if site is None or scaled:
        return None
    groups, positions, fan_in, fan_out = site.sizes
    squares = groups * positions * positions
    bytes_written = 4 * (2 * squares + site.expands)
    operations = (PATCH_GRAM_SLOWDOWN if site.expands else GRAM_SLOWDOWN) * 2.0 * squares * (fan_in + fan_out)
    return operations + OPERATIONS_PER_BYTE * bytes_written + _sum_cost(site)


def _gram_norm(uses: Uses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records  # without a scale, see the cost
    return None, jax.vmap(lambda inputs, dy: norms.gram(*site.matrices(inputs, dy)))(*record)


def _product_cost(uses: Uses, scaled: bool) -> float | None:
    site = _only_site(uses, lookup=False)
    if site is None or not (site.expands or site.sizes[1] > 1):
        return None
    return _sum_cost(site) + _gradient_memory_cost(site, uses.slices)


def _product_norm(uses: Uses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records
    grads = jax.lax.optimization_barrier(site.products(*record))  # norm and sum must read the same numbers
    # Because of the barrier, the elements are moved once, instead of once for every example.
    return grads, _sizes(grads, None if scale is None else jax.lax.optimization_barrier(site.arrange(scale)))


def _product_sum(uses: Uses, shape: tuple[int, ...], records: jax.Array, factors: jax.Array) -> jax.Array:
    total = weighted_sum(factors, records)
    return weighted.transpose(uses.sites[0].arrange, shape, total)


def _rows_cost(uses: Uses, scaled: bool) -> float | None:
    site = _only_site(uses, lookup=True)
    if site is None:
        return None
    _, positions, _, fan_out = site.sizes
    numbers = positions * fan_out
    return 2.0 * positions * numbers + OPERATIONS_PER_BYTE * 4 * 2 * numbers


def _rows_norm(uses: Uses, scale: jax.Array | None, records: Records):
    (site,), (record,) = uses.sites, records

    def of_one_example(inputs, dy):
        indices, b = site.matrices(inputs, dy)
        rows, inside = norms.rows(indices, b)
        return rows.reshape(dy.shape), inside

    inputs, dy = record
    rows, inside = jax.vmap(of_one_example)(inputs, dy)
    rows = jax.lax.optimization_barrier(rows)
    scaled = rows if scale is None else rows * jax.vmap(lambda x: site.apply(x, scale).reshape(dy.shape[1:]))(inputs)
    return [(inputs, rows)], jnp.where(inside, _sizes(scaled, None), jnp.inf)


def _shared_cost(uses: Uses, scaled: bool) -> float | None:
    if uses.sharing is None or scaled:
        return None
    sums = sum(2.0 * site.sizes[1] * site.sizes[3] if site.lookup else _sum_cost(site) for site in uses.sites)
    return shared.gram_operations(uses.sharing) * GRAM_SLOWDOWN + sums


def _shared_norm(uses: Uses, scale: jax.Array | None, records: Records):
    def of_one_example(record):
        assert uses.sharing is not None  # and there is no scale, see the cost
        return shared.norm(uses.sharing, [site.matrices(*row) for site, row in zip(uses.sites, record, strict=True)])

    return None, jax.vmap(of_one_example)(records)


def _site_sum(uses: Uses, shape: tuple[int, ...], records: list, factors: jax.Array) -> jax.Array:
    (site,), (record,) = uses.sites, records
    return weighted.at_site(site, shape, record, factors)


def _sum_of_examples(uses: Uses, shape: tuple[int, ...], records: list, factors: jax.Array) -> jax.Array:
    return weighted.one_by_one(uses.sites, shape, records, factors)


def gradient_cost(uses: Uses) -> float:
    """The cost of the way `GRADIENT`."""

    def at(site):
        if site.lookup:
            return _gradient_memory_cost(site, uses.slices)
        slowdown = CONVOLUTION_GRADIENT_SLOWDOWN if site.expands else DENSE_GRADIENT_SLOWDOWN
        return slowdown * _sum_cost(site) + _gradient_memory_cost(site, uses.slices)

    return sum(map(at, uses.sites))


def _only_site(uses: Uses, *, lookup: bool) -> Site | None:
    """The site of a parameter that is used once; None if there are several, or it is a lookup where none is wanted."""
    site = uses.sites[0]
    return site if len(uses.sites) == 1 and site.lookup == lookup else None


def _parameter_size(site: Site) -> int:
    groups, _, fan_in, fan_out = site.sizes
    return groups * fan_in * fan_out


def _sum_cost(site: Site) -> float:
    """Operations of A^T B, for one gradient, or for one example's share of the sum."""
    return 2.0 * site.sizes[1] * _parameter_size(site)


def _gradient_memory_cost(site: Site, slices: int) -> float:
    """The cost of writing a per-example gradient, reading it for the norm, and reading it for the sum; of one slice,
    between whose norm and sum come those of the others.

    A model that needs several devices has no memory for gradients that are larger than what they are computed from: a
    decoder of 16 layers had 4.5 times the memory of a step that is not private (benchmarks/results/sharded.md).
    """
    size = 4 * _parameter_size(site)
    groups, positions, fan_in, fan_out = site.sizes
    if device_count() > 1 and fan_in * fan_out >= KEPT_ON_DEVICES * positions * (fan_in + fan_out):
        return TOO_LARGE * size
    return (3 if slices * size <= CACHED_BYTES else 5) * OPERATIONS_PER_BYTE * size


def _sizes(grads: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The norms, float32 (B,), of gradients scaled coordinate by coordinate."""
    return jax.vmap(lambda grad: norms.frobenius(grad if scale is None else grad * scale))(grads)


OUTER = Way("norm from |input| |cotangent|", _outer_cost, _outer_norm, _site_sum)
GRAM = Way("norm from Gram matrices", _gram_cost, _gram_norm, _sum_of_examples)
PRODUCT = Way(
    "per-example gradients from inputs and cotangents", _product_cost, _product_norm, _product_sum, keeps_gradients=True
)
ROWS = Way("norm from the rows looked up", _rows_cost, _rows_norm, _site_sum)
SHARED = Way("norm from Gram matrices of all uses", _shared_cost, _shared_norm, _sum_of_examples)
GRADIENT = Way(
    "per-example gradients",
    lambda uses, scaled: gradient_cost(uses),
    norm=lambda uses, scale, grads: (grads, _sizes(grads, scale)),
    weighted_sum=lambda uses, shape, grads, factors: weighted_sum(factors, grads),
    keeps_gradients=True,
)
UNUSED = Way(
    "no gradient",
    cost=lambda uses, scaled: 0.0,
    norm=lambda uses, scale, records: (None, jnp.zeros(len(jax.tree.leaves(records)[0]), jnp.float32)),
    weighted_sum=lambda uses, shape, records, factors: jnp.zeros(shape, jnp.float32),
)
NOT_TRAINED = UNUSED._replace(words="not trained")

GHOST = (OUTER, GRAM, PRODUCT, ROWS, SHARED)  # those that need no gradient from the backward pass
