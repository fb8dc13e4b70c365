"""Checks that refuse inputs for which a mechanism's cost would not be true."""

import functools
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx.accounting.compose import is_same_key
from dpx.keys import secret_key
from dpx.keys.noise import STAND_INS
from dpx.sampling.data import batch_size, require_plain_arrays
from dpx.values import Tree, float32_like, leaf_path, list_first_few
from dpx.xla.jaxprs import inputs_read

HOLDING = ("MultiStepsState", "ApplyEvery")  # states of optax transforms that hold updates back
FEW = 3  # parameters that a message lists
FLAX = (
    'Of a result of fit, take its params; of Flax Linen, model.init(...)["params"]; of Flax NNX, split the model: '
    "graphdef, params, rest = nnx.split(model, nnx.Param, ...)"
)
# What to do with objects of other packages. None of these packages is imported here.
ADVICE = {
    "equinox": "Split the Equinox module: params, static = eqx.partition(model, eqx.is_inexact_array), and call "
    "eqx.combine(params, static) in the loss",
    "keras": "Of Keras, take [v.value for v in model.trainable_variables], and call model.stateless_call in the loss",
    "haiku": "Of Haiku, take params = transformed.init(key, inputs), and call transformed.apply in the loss",
    "torch": "Of PyTorch, take tensor.detach().numpy() of each tensor, and write the model in JAX",
    "tensorflow": "Of TensorFlow, take variable.numpy() of each variable, and write the model in JAX",
    "pandas": "Of pandas, take frame.to_numpy(numpy.float32)",
}


def require_no_extra_arguments(extra_args: dict[str, Any]):
    if extra_args:
        raise ValueError(
            f"update takes no {sorted(extra_args)}, because transforms behind the mechanism would get them without "
            "noise. Call a transform that needs public values by itself, with the released updates"
        )


def require_real_arrays(tree: Tree):
    """Raises ValueError for complex numbers, PRNG keys, and arrays that do not hold numbers."""
    require_plain_arrays(tree)
    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        raise ValueError("every array must hold numbers, got <class 'str'>")
    for dtype in map(jnp.result_type, leaves):
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise ValueError(f"parameters and gradients must be numbers, got PRNG keys of dtype {dtype}")
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"gradients must be real, got {dtype}: train the real and imaginary parts separately")


@jax.custom_jvp
def refuse_differentiation(sums: Tree) -> Tree:
    """Returns `sums` unchanged. Raises ValueError if differentiated, because the derivative would have no noise."""
    return sums


@refuse_differentiation.defjvp
def _refuse_derivative(primals, tangents):
    words = "its derivative comes from the raw gradients and has no noise. Stop the gradient before the mechanism"
    raise ValueError(f"a private gradient must not be differentiated, because {words}")


def refuse_shared_noise(mechanism: Any, sums: Tree) -> Tree:
    """Returns `sums` unchanged. Raises ValueError if `jax.vmap` maps them with one key, and so with the same noise."""
    sums = refuse_differentiation(sums)
    silent = mechanism.noise_multiplier == 0 or STAND_INS.value.release is not None  # or an audit, which releases none
    return sums if silent else _detect_shared_key(mechanism.key, sums)


@jax.custom_batching.custom_vmap
def _detect_shared_key(key, sums):
    return sums


@_detect_shared_key.def_vmap
def _refuse_shared_key(_, mapped, key, sums):
    if not mapped[0]:
        raise ValueError(
            "runs under jax.vmap must each build their optimizer with a key of their own, such as dpx.keys.fold_in("
            "key, run): with one key they have the same noise, and the difference of two of them has none"
        )
    return _detect_shared_key(key, sums), mapped[1]  # handles an outer `jax.vmap` too


def require_key_used(name: str, build: Any):
    """Raises ValueError if `build`, the argument `name`, makes mechanisms with the same key from two different keys."""
    one, other = (getattr(build(secret_key(seed << 64)), "key", None) for seed in (1, 2))
    if one is not None and other is not None and is_same_key(one, other):
        raise ValueError(f"{name} must build its mechanism with the key that it is given: each run needs fresh noise")


def require_unmasked(tree: Tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(leaf, optax.MaskedNode) for leaf in leaves):
        raise ValueError(
            "a mechanism must not be inside optax.masked, multi_transform or partition, because raw gradients of "
            "masked leaves would bypass it. Use dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask))"
        )


def checked_params(params: Tree, mechanism: Any) -> Tree:
    """Returns `params`, with arrays in place of Python numbers. Raises ValueError for masked nodes, models and other
    objects, integers whose gradient the mechanism reads, complex numbers, and batch statistics."""
    require_unmasked(params)
    require_no_modules(params)
    require_numbers(params)
    whole = [_leaf_kind(leaf) == "whole" for leaf in jax.tree.leaves(params)]
    if any(whole) and any(map(operator.and_, whole, jax.tree.leaves(trained_mask(mechanism, params)))):
        _refuse_params(params, " Freeze integers by dpx.coordinates.trainable.")
    require_real_arrays(params)
    return numbers_to_arrays(params)


def require_numbers(params: Tree):
    """Raises ValueError for leaves that are not arrays, such as the functions and variables of a model."""
    if any(_leaf_kind(leaf) == "other" for leaf in jax.tree.leaves(params)):
        _refuse_params(params)


def require_no_nan(params: Tree):
    """Raises ValueError for NaN in parameters, which no step can change, and which makes every gradient NaN."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if found := [leaf_path(at) or "params" for at, leaf in leaves if _leaf_kind(leaf) == "float" and _has_nan(leaf)]:
        raise ValueError(f"params must hold no NaN, which no step can change; got NaN in {list_first_few(found, FEW)}")


def _has_nan(leaf: Any) -> bool:
    """Whether this process holds a NaN of an array. A search in all processes would wait for one that has raised."""
    if not getattr(leaf, "is_fully_addressable", True):
        return any(_has_nan(shard.data) for shard in leaf.addressable_shards)
    on_cpu = jax.default_backend() == "cpu"
    return bool(np.isnan(np.asarray(leaf)).any() if on_cpu else jax.jit(lambda array: jnp.isnan(array).any())(leaf))


def _refuse_params(params: Tree, more: str = ""):
    named = jax.tree_util.tree_leaves_with_path(params)
    odd = [f"{leaf_path(path)} {_dtype_or_type(leaf)}".strip() for path, leaf in named if _leaf_kind(leaf) != "float"]
    packages = [
        _known_package_of(node) for node in jax.tree.leaves(params, is_leaf=lambda node: _known_package_of(node) != "")
    ]
    advice = next((ADVICE[package] for package in packages if package), FLAX)
    raise ValueError(f"params must be a pytree of float arrays, got {list_first_few(odd, FEW)}.{more} {advice}")


def numbers_to_arrays(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf, params)


def trained_mask(mechanism: Any, params: Tree) -> Tree:
    """Returns a tree of bools: whether the encoded gradient depends on the gradient of each parameter. This is read off
    the equations of the mechanism's `encode`, so it is the same at every step; with a mask that changes between steps,
    such as a random freeze, every parameter is True. params: arrays or shapes."""
    grad = float32_like(params)
    closed = jax.make_jaxpr(mechanism.encode)(grad, jax.eval_shape(mechanism.begin, grad))
    leaves, treedef = jax.tree.flatten(grad)
    return treedef.unflatten(inputs_read(closed.jaxpr)[: len(leaves)])


def _known_package_of(node: Any) -> str:
    """Returns the package that the class of `node` comes from, if `ADVICE` covers it; otherwise ""."""
    names = [kind.__module__.split(".")[0] for kind in type(node).__mro__]
    return next((name for name in names if name in ADVICE), "")


def _leaf_kind(leaf: Any) -> str:
    """Returns "float", "whole" (integers, bools), "other" (no array of numbers), or "odd" (complex numbers, keys)."""
    try:
        dtype = None if _known_package_of(leaf) or isinstance(leaf, str | bytes) else jnp.result_type(leaf)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None:
        return "other"
    if jnp.issubdtype(dtype, jnp.floating):
        return "float"
    return "whole" if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_ else "odd"


def _dtype_or_type(leaf: Any) -> str:
    return type(leaf).__name__ if _leaf_kind(leaf) == "other" else str(getattr(leaf, "dtype", type(leaf).__name__))


def require_no_modules(params: Tree):
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: _is_from_flax(node, "Module", "BatchStat"))
    for path, node in nodes:
        if _is_from_flax(node, "Module"):
            raise ValueError(
                f"params must be a pytree of arrays, got the module {type(node).__name__}. Split it: graphdef, params, "
                "rest = nnx.split(model, nnx.Param, ...), and call nnx.merge(graphdef, params, rest) in the loss"
            )
        if _is_from_flax(node, "BatchStat") or "batch_stats" in [getattr(key, "key", None) for key in path]:
            raise ValueError(
                f"params must hold no batch statistics, got {jax.tree_util.keystr(path)}: BatchNorm mixes the examples "
                "of a batch, so no gradient belongs to one example alone. Use GroupNorm or LayerNorm"
            )


def _is_from_flax(node: Any, *names: str) -> bool:
    """Whether the class of `node` is, or extends, one of these Flax NNX classes."""
    return any(kind.__name__ in names and kind.__module__.startswith("flax.nnx") for kind in type(node).__mro__)


def require_per_example_gradients(grads: Tree, params: Tree):
    """Raises ValueError unless each leaf of `grads` has shape (B, *shape of its params)."""
    require_unmasked(grads)
    if params is None:
        raise ValueError("params must be given: update(grads, state, params); they give the shape of one gradient")
    if jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params):
        raise ValueError(
            "grads must hold one gradient of each example, with the examples on axis 0 before each leaf; got the "
            "shapes of params. dpx.private_updates(loss, optimizer) computes them, and what it returns is finished: "
            "give it to optax.apply_updates. Do not average before the mechanism or wrap it, as optax.MultiSteps does"
        )
    size = batch_size(grads)
    require_real_arrays(grads)
    expected = [(size, *jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    found = [jnp.shape(leaf) for leaf in jax.tree.leaves(grads)]
    if found != expected or jax.tree.structure(grads) != jax.tree.structure(params):
        words = "like params, with examples on an axis before each leaf"
        raise ValueError(
            f"grads must hold one gradient of each example, {words}, of shapes {expected}; got shapes {found}"
        )


def require_changes_fit_budget(changes: dict[str, Any], budget: Any):
    """Raises ValueError if `changes` would make fields of the mechanism, budget included, contradict each other."""
    for part, needs in (("key", "release"), ("noise_multiplier", "release"), ("sampling", "event")):
        if part in changes and needs not in changes:
            raise ValueError(f"{part} must not change without {needs}, which depends on it: build a new mechanism")
    if "event" in changes and budget is not None and "budget" not in changes:
        raise ValueError(
            f"the mechanism was calibrated to {budget} before its cost was changed; put dpx.accounting.accepts_budget "
            "on the function that builds the outermost mechanism, and give the budget to that"
        )


def require_fixed_coordinates(mechanism: Any, coordinates: Any):
    """Raises ValueError if the mechanism has correlated noise and its coordinates change between steps."""
    if mechanism.correlated is not None and not coordinates.fixed:
        words = "because what cancels later must be in the same places"
        raise ValueError(f"coordinates must be fixed with correlated noise, {words}; got those that {coordinates.name}")


def require_no_held_updates(state: Tree) -> Tree:
    """Returns `state` unchanged. Raises ValueError if it belongs to a transform that holds updates back."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node).__name__ in HOLDING)
    if any(type(node).__name__ in HOLDING for node in nodes):
        raise ValueError(
            "transforms must not hold updates back, as optax.MultiSteps and apply_every do, because each step in "
            "between has noise and a cost of its own. Give the larger batch to the sampling instead, and say with "
            "microbatch_size or chunk_size how much of it fits in memory"
        )
    return state


def refuse_optax_transform(error: Exception) -> NoReturn:
    raise ValueError(
        "transforms must compute an update from the released gradient, their state and the parameters alone. Those "
        "that need the loss or its gradient (lbfgs, reduce_on_plateau, polyak_sgd, momo), or parameters in another "
        "form (lookahead), would get private values, or fail: call them yourself, with the released updates and public "
        f"values. Got {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    ) from error


def try_transform(transform: optax.GradientTransformation):
    """Raises ValueError early, before there are parameters, if `transform` holds updates back or needs the loss.

    The transform is tried on one parameter. Other failures are ignored, because it may work on a real model.
    """
    like = {"parameter": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    try:
        state = jax.eval_shape(transform.init, like)
    except Exception:
        return
    if (error := _exception_of_update(transform.update, like, state)) is None:
        require_no_held_updates(state)
    else:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), like)
        of_loss = {"value": 0.0, "grad": zeros, "value_fn": optax.tree.norm}
        if _exception_of_update(transform.update, like, state, **of_loss) is None:
            refuse_optax_transform(error)


def _exception_of_update(update: Any, params: Tree, state: Tree, **of_loss: Any) -> Exception | None:
    """Returns the exception that `update` raises for these shapes, or None."""
    try:
        jax.eval_shape(functools.partial(update, **of_loss), params, state, params)
    except Exception as error:
        return error
    return None
