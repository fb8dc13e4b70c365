"""The sum of the gradients times their factors at one site, sum_i f_i A_i^T B_i.

A partial sum over the positions of an example may be much longer than its gradient, because positions cancel, and so
may its rounding. So where a site has several positions, whole gradients are added, one example after another: the norm
then contains the rounding of that example's gradient (`norms.uncancelled`), and `dpx.sums.total` bounds the rounding of
the sum over examples. At most one gradient of a microbatch is in memory.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import norms
from dpx.gradients.ghost.rules import Site
from dpx.sums.rows import sum_in_blocks, times, weighted_rows


def at_site(site: Site, shape: tuple[int, ...], record, factors: jax.Array) -> jax.Array:
    """The sum, float32, of the parameter's shape, where an example adds at most one product to an element. record: the
    inputs and cotangents of B examples. factors: float32 (B,)."""

    def sum_block(rows):
        record, factors = rows
        inputs, cotangents = weighted_rows(factors, record)
        cotangents = times(factors, cotangents)
        return transpose(lambda w: jax.vmap(site.apply, (0, None))(inputs, w), shape, cotangents)

    return sum_in_blocks(sum_block, (record, factors), math.prod(shape))


def one_by_one(sites: tuple[Site, ...], shape: tuple[int, ...], records: list, factors: jax.Array) -> jax.Array:
    """The sum over all sites, float32, of the parameter's shape. records: the inputs and cotangents of B examples at
    each site. factors: float32 (B,)."""

    def of_example(rows):
        records, factor = rows
        records = weighted_rows(factor, records)
        grads = [_of_example(site, shape, *record, factor=factor) for site, record in zip(sites, records, strict=True)]
        # The barrier keeps matrix products from starting with the sum of the examples before.
        return jax.lax.optimization_barrier(functools.reduce(jnp.add, grads))

    def sum_block(rows):
        def add(number, total):
            return total + of_example(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, False), rows))

        return jax.lax.fori_loop(0, len(rows[1]), add, jnp.zeros(shape, jnp.float32))

    return sum_in_blocks(sum_block, (records, factors), math.prod(shape))


def _of_example(site: Site, shape: tuple[int, ...], inputs, dy: jax.Array, *, factor: jax.Array) -> jax.Array:
    """factor times the gradient of one example at one site. The factor multiplies the smaller of A and B, and the
    product has the order of the parameter, because XLA would transpose it otherwise."""
    if site.lookup:
        return transpose(lambda w: site.apply(inputs, w), shape, times(factor, dy))
    a, b = site.matrices(inputs, dy)
    a, b = (times(factor, a), b) if a.size < b.size else (a, times(factor, b))
    if _reorders(site.arrange, shape):
        total = jnp.einsum("kto,kti->koi", b, a, precision=norms.EXACT)
        if len(total) == 1:  # with an axis of length 1 between both transposes, XLA writes them
            return transpose(lambda w: site.arrange(w)[0].T, shape, total[0])
        total = total.swapaxes(1, 2)
    else:
        total = jnp.einsum("kti,kto->kio", a, b, precision=norms.EXACT)
    return transpose(site.arrange, shape, total)


def _reorders(function: Callable, shape: tuple[int, ...]) -> bool:
    equations = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32)).eqns
    orders = [list(one.params["permutation"]) for one in equations if one.primitive.name == "transpose"]
    return any(order != sorted(order) for order in orders)


def transpose(linear: Callable, shape: tuple[int, ...], cotangent: jax.Array) -> jax.Array:
    """The transpose of a linear function of float32 arrays of this shape."""
    (transposed,) = jax.linear_transpose(linear, jax.ShapeDtypeStruct(shape, jnp.float32))(cotangent)
    return transposed
