"""Checks that refuse the inputs for which a mechanism's bill would not be true."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpx.trees import Tree, batch_size, require_arrays


def require_no_more(extra_args: dict[str, Any]):
    """Raises ValueError for extra arguments of an update."""
    if extra_args:
        raise ValueError(
            f"update takes no {sorted(extra_args)}, because transforms behind the mechanism would get them without "
            "noise. Call a transform that needs public values by itself, with the released updates"
        )


def require_real(tree: Tree):
    """Raises ValueError for complex numbers, PRNG keys, and arrays of anything else than numbers."""
    require_arrays(tree)
    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        raise ValueError("every array must hold numbers, got <class 'str'>")
    for dtype in map(jnp.result_type, leaves):
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise ValueError(f"parameters and gradients must be numbers, got PRNG keys of dtype {dtype}")
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"gradients must be real, got {dtype}: keep real and imaginary parts apart")


@jax.custom_jvp
def undifferentiated(sums: Tree) -> Tree:
    """`sums` unchanged. Raises ValueError if it is differentiated, because the derivative would have no noise."""
    return sums


@undifferentiated.defjvp
def _refuse(primals, tangents):
    words = "its derivative comes from the raw gradients and has no noise. Stop the gradient before the mechanism"
    raise ValueError(f"a private gradient must not be differentiated, because {words}")


def require_unmasked(tree: Tree):
    """Raises ValueError for optax's masked nodes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(leaf, optax.MaskedNode) for leaf in leaves):
        raise ValueError(
            "a mechanism must not stand inside optax.masked, multi_transform or partition, because raw gradients of "
            "masked leaves would pass by it. Use dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask))"
        )


def require_params(params: Tree):
    """Raises ValueError for masked nodes, complex numbers, Flax modules and batch statistics among the parameters."""
    require_unmasked(params)
    require_no_modules(params)
    require_real(params)


def require_no_modules(params: Tree):
    """Raises ValueError for Flax modules and batch statistics among the parameters."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: _is_flax(node, "Module", "BatchStat"))
    for path, node in nodes:
        if _is_flax(node, "Module"):
            raise ValueError(
                f"params must be a pytree of arrays, got the module {type(node).__name__}. Split it: graphdef, params, "
                "rest = nnx.split(model, nnx.Param, ...), and call nnx.merge(graphdef, params, rest) in the loss"
            )
        if _is_flax(node, "BatchStat") or "batch_stats" in [getattr(key, "key", None) for key in path]:
            raise ValueError(
                f"params must hold no batch statistics, got {jax.tree_util.keystr(path)}: BatchNorm mixes the examples "
                "of a batch, so no gradient belongs to one example alone. Use GroupNorm or LayerNorm"
            )


def _is_flax(node: Any, *names: str) -> bool:
    """Whether `node` is of one of these classes of Flax NNX, or of a class below it."""
    return any(kind.__name__ in names and kind.__module__.startswith("flax.nnx") for kind in type(node).__mro__)


def require_per_example(grads: Tree, params: Tree):
    """Raises ValueError unless every leaf of `grads` has the shape (B, *shape of its parameter)."""
    require_unmasked(grads)
    if params is None:
        raise ValueError("params must be given: update(grads, state, params); they tell the shape of one gradient")
    size = batch_size(grads)
    require_real(grads)
    expected = [(size, *jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    found = [jnp.shape(leaf) for leaf in jax.tree.leaves(grads)]
    if found != expected or jax.tree.structure(grads) != jax.tree.structure(params):
        words = "like params, with examples on an axis before each leaf"
        raise ValueError(
            f"grads must hold one gradient of each example, {words}, of shapes {expected}; got shapes {found}"
        )


def require_fitting(changes: dict[str, Any], budget: Any):
    """Raises ValueError if a mechanism of this budget would have fields that do not fit together after `changes`."""
    for part, needs in (("key", "release"), ("noise_multiplier", "release"), ("sampling", "event")):
        if part in changes and needs not in changes:
            raise ValueError(f"another {part} needs another {needs}, which depends on it: build the mechanism anew")
    if "event" in changes and budget is not None and "budget" not in changes:
        raise ValueError(
            f"the mechanism was calibrated to {budget} before its cost was changed; put dpx.accounting.accepts_budget "
            "on the function that builds the outermost mechanism, and give the budget to that"
        )


def require_fixed(mechanism: Any, coordinates: Any):
    """Raises ValueError for coordinates that change between steps, around a mechanism of correlated noise."""
    if mechanism.correlated is not None and not coordinates.fixed:
        words = "because what cancels later must be in the same places"
        raise ValueError(f"coordinates must be fixed with correlated noise, {words}; got those that {coordinates.name}")
