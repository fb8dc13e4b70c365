"""The sum of the gradients times their factors at one site, sum_i f_i A_i^T B_i, without the gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpx.contributions import times
from dpx.gradients.ghost import norms
from dpx.gradients.ghost.rules import Site


def at_site(site: Site, shape: tuple[int, ...], record, factors: jax.Array) -> jax.Array:
    """The sum, float32, of the parameter's shape. record: the inputs and cotangents of B examples.

    factors: float32 (B,).
    """
    inputs, cotangents = record
    if site.sizes[1] > 1 and not (site.lookup or site.expands):
        a, b = jax.vmap(site.matrices)(inputs, cotangents)
        return _of_matrices(site, shape, a, b, factors)
    cotangents = times(factors, cotangents)
    return transpose(lambda w: jax.vmap(site.apply, (0, None))(inputs, w), shape, cotangents)


def _of_matrices(site: Site, shape: tuple[int, ...], a: jax.Array, b: jax.Array, factors: jax.Array) -> jax.Array:
    """The same from A and B, (B, K, T, I) and (B, K, T, O).

    The smaller of them is multiplied by the factors. The product has the order of the parameter's elements, because XLA
    would otherwise transpose it.
    """
    a, b = (times(factors, a), b) if a.size < b.size else (a, times(factors, b))
    if _reorders(site.arrange, shape):
        total = jnp.einsum("bkto,bkti->koi", b, a, precision=norms.EXACT).swapaxes(1, 2)
    else:
        total = jnp.einsum("bkti,bkto->kio", a, b, precision=norms.EXACT)
    return transpose(site.arrange, shape, total)


def _reorders(function: Callable, shape: tuple[int, ...]) -> bool:
    """Whether a function of an array of this shape changes the order of its elements."""
    equations = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32)).eqns
    orders = [list(one.params["permutation"]) for one in equations if one.primitive.name == "transpose"]
    return any(order != sorted(order) for order in orders)


def transpose(linear: Callable, shape: tuple[int, ...], cotangent: jax.Array) -> jax.Array:
    """The transpose of a linear function of float32 arrays of this shape."""
    (transposed,) = jax.linear_transpose(linear, jax.ShapeDtypeStruct(shape, jnp.float32))(cotangent)
    return transposed
