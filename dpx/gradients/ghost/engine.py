"""The clipped sum of a batch by a plan: one forward and one backward pass, whatever the number of weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dpx._contributions import in_range
from dpx._ordering import compute_after
from dpx.gradients.ghost import norms, shared, trace
from dpx.gradients.ghost.plan import Plan
from dpx.gradients.ghost.segments import map_segments
from dpx.mechanism import Mechanism

Tree = Any

LARGEST_PATCHES, LOOPED_PATCHES = 2**21, 2**14  # numbers held at once without a loop, and in one


def sum_contributions(
    plan: Plan, mechanism: Mechanism, params: Tree, examples: Tree, state: Tree, included: jax.Array
) -> tuple[tuple[Tree, ...], jax.Array]:
    """sum_i w(|z_i|) z_i for each weight, as `dpx.mechanism.sum_contributions` gives it, and the losses."""
    weights, treedef = jax.tree.flatten(params)
    followed = {leaf: choice.sites for leaf, choice in enumerate(plan.choices) if choice.sites}
    stacked = {leaf: weights[leaf] for leaf, choice in enumerate(plan.choices) if choice.method == "gradient"}
    outputs = {site.use.equation: _output(plan, site) for sites in followed.values() for site in sites}
    scales = _scales(plan, mechanism, params, state)

    def one(example):
        def value(differentiated, added):
            inputs = [differentiated.get(leaf, weight) for leaf, weight in enumerate(weights)]
            return trace.evaluate(plan.program, inputs + jax.tree.leaves(example), added)

        zeros = {number: jnp.zeros(aval.shape, aval.dtype) for number, aval in outputs.items()}
        loss, pullback, inputs = jax.vjp(value, stacked, zeros, has_aux=True)
        grads, cotangents = pullback(jnp.ones_like(loss))
        return loss, {leaf: _float32(grad) for leaf, grad in grads.items()}, inputs, cotangents

    losses, *rows = jax.vmap(one)(examples)
    # Norms and sums must read the same numbers: XLA may leave out a rounding to bfloat16 for one of two readers.
    grads, inputs, cotangents = jax.tree.map(jax.lax.optimization_barrier, rows)
    sizes = {}
    for leaf, sites in followed.items():
        choice = plan.choices[leaf]
        rows = [(inputs[site.use.equation], cotangents[site.use.equation]) for site in sites]
        if choice.method == "product":
            grads[leaf], sizes[leaf] = _map(_product(sites[0], scales.get(leaf)), rows, sites, weights[leaf])
        else:
            sizes[leaf] = _map(_norm(choice, scales.get(leaf)), rows, sites, weights[leaf])
    for leaf in stacked:
        sizes[leaf] = jax.vmap(_scaled_norm(scales.get(leaf)))(grads[leaf])

    def weigh(sizes):
        parts = [sizes.get(part.leaf, jnp.float32(0)) for part in plan.encoded]
        found = mechanism.norm(jax.tree.unflatten(plan.structure, parts))
        return found, mechanism.weigh(found, state)

    found, factors = jax.vmap(weigh, axis_size=included.shape[0])(sizes)
    included &= in_range(found)

    def select(rows):
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            return rows
        return jnp.where(included.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    grads = jax.tree.map(select, grads)
    inputs, cotangents = jax.tree.map(select, inputs), jax.tree.map(select, cotangents)

    def weighted_sum(leaf, factor):
        shape = jax.ShapeDtypeStruct(weights[leaf].shape, jnp.float32)
        sites = followed.get(leaf, ())
        if leaf in grads:
            rows = grads[leaf]
            if rows.ndim == 2:  # most often a bias, whose weighted rows are made for the weights beside it anyway
                factor, rows = jnp.ones_like(factor), factor[:, None] * rows
            total = jnp.tensordot(factor, rows, 1, precision=norms.EXACT)
            return _transpose(sites[0].arrange, shape, total) if sites else total
        if not sites:
            return jnp.zeros(shape.shape, jnp.float32)

        def at(site):
            rows, cotangent = inputs[site.use.equation], _float32(cotangents[site.use.equation])
            cotangent = cotangent * factor.reshape(-1, *[1] * (cotangent.ndim - 1))
            return _transpose(lambda w: jax.vmap(site.apply, (0, None))(rows, w), shape, cotangent)

        return functools.reduce(jnp.add, map(at, sites))

    def total(factor):
        prefix = jax.tree.unflatten(plan.structure, list(range(len(plan.encoded))))
        spread = jax.tree.map(lambda f, group: jax.tree.map(lambda _: select(f), group), factor, prefix)
        sums = []
        for part, f in zip(plan.encoded, jax.tree.leaves(spread), strict=True):
            summed = weighted_sum(part.leaf, f)
            sums.append(_scaled(summed, scales.get(part.leaf)))
        return jax.tree.unflatten(plan.structure, sums)

    sums = ()
    for factor in factors:
        sums += (total(compute_after(sums, factor)),)  # one set of weighted cotangents at a time
    return sums, losses


def _scaled(total, scale):
    """Frozen coordinates, which no norm counts, may have overflowed."""
    return total if scale is None else jnp.where(scale == 0, 0, total * scale)


def _scaled_norm(scale):
    """gradient -> its norm, scaled coordinate by coordinate."""
    return lambda grad: norms.frobenius(grad if scale is None else grad * scale)


def _product(site, scale):
    """(inputs and cotangents at the one site) -> the gradient of one example, arranged, and its norm."""
    # the barrier moves the elements once, not for every example
    size = _scaled_norm(None if scale is None else jax.lax.optimization_barrier(site.arrange(scale)))

    def both(rows):
        grad = norms.product(*site.factors(*rows[0]))
        return grad, size(grad)

    return both


def _norm(choice, scale):
    """(inputs and cotangents at every site) -> the norm of one example's gradient."""

    def size(rows):
        if choice.method == "shared":
            factors = [site.factors(*row) for site, row in zip(choice.sites, rows, strict=True)]
            return shared.norm(choice.sharing, factors)
        (site,), (row,) = choice.sites, rows
        a, b = site.factors(*row)
        if choice.method == "rows":
            return norms.rows(a, b if scale is None else b * site.apply(row[0], scale).reshape(b.shape))
        if choice.method == "outer":
            return norms.outer(a, b, None if scale is None else site.arrange(scale))
        return norms.gram(a, b)

    return size


def _map(function, rows, sites, weight):
    """`function` over the examples; in a loop where the patches of the whole batch would not stay in a CPU's cache."""
    size, expands = jax.tree.leaves(rows)[0].shape[0], sum(site.expands for site in sites)
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1  # else perhaps over the axis that would be cut
    if alone and size * expands > LARGEST_PATCHES:
        return map_segments(function, rows, max(1, LOOPED_PATCHES // expands), weight)
    return jax.vmap(function)(rows)


def _scales(plan, mechanism, params, state):
    """The scale of each coordinate, for every leaf that has one."""
    if not any(part.scaled for part in plan.encoded):
        return {}
    ones = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
    scales = jax.tree.leaves(mechanism.encode(ones, state))
    return {part.leaf: scale for part, scale in zip(plan.encoded, scales, strict=True) if part.scaled}


def _output(plan, site) -> Any:
    return plan.program.equations[site.use.equation].jaxpr.outvars[0].aval


def _transpose(linear, shape, cotangent):
    (transposed,) = jax.linear_transpose(linear, shape)(cotangent)
    return transposed


def _float32(x):
    return x.astype(jnp.float32)
