"""The public part of a state: everything but its `unreleased` and `unreleased_*` fields."""

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx.values import Tree


def publishable_state(state: Tree) -> Tree:
    """`state` with None for its `unreleased` and `unreleased_*` fields, so that it may be shown or shared.

    state: any pytree, or dataclasses and mappings of pytrees. The other fields depend on released values only.

    A value becomes None if the name of its field, key or type contains "unreleased" in any case, also in flattened
    states, whose keys are tuples or strings such as ".unreleased_error['w']". So does an `Unreleased`. Functions and
    optimizers become None, because their closures may hold a key, and so do PRNG keys: typed ones, and raw ones, uint32
    (..., 2) or (..., 4), where a name contains "key" or "rng" in any case. Raises ValueError for a container of an
    unknown type, a pytree registered without the names of its parts, and an array of objects.

        >>> norms = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.1}
        >>> feedback = dpx.methods.dice_sgd(noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(), **norms)
        >>> dpx.publishable_state(feedback.init(params)).unreleased_error is None
        True
    """
    functions = functools.partial | optax.GradientTransformation
    if any(_is_unreleased(kind.__name__) for kind in type(state).__mro__) or isinstance(state, functions):
        return None
    if hasattr(state, "_fields"):
        names = state._fields
        return type(state)(*[_public_part(name, getattr(state, name)) for name in names])
    if is_dataclass(state) and not isinstance(state, type):
        parts = {field.name: getattr(state, field.name) for field in fields(state)}
        return replace(state, **_public_items(parts))
    if isinstance(state, dict):
        return _public_items(state)
    if isinstance(state, list | tuple):
        return type(state)(publishable_state(part) for part in state)
    parts, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda part: part is not state)
    if any(path for path, _ in parts):  # another container that jax knows
        return treedef.unflatten([_public_part_of_container(path[0], part, type(state)) for path, part in parts])
    if isinstance(state, Mapping):
        return _public_items(state)
    if callable(state):
        return None
    return _public_leaf(state)


def _public_part_of_container(key: Any, part: Tree, kind: type) -> Tree:
    """A part of a container that jax knows. If it has no name, its key is a number from jax."""
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        raise ValueError(f"state must name its parts: register {kind} with jax.tree_util.register_pytree_with_keys")
    return _public_part(key, part)


def _public_part(name: Any, part: Tree) -> Tree:
    """The public part of what has a name."""
    if _is_unreleased(name):
        return None
    if any(word in str(name).lower() for word in ("key", "rng")):
        part = jax.tree.map(lambda leaf: None if _may_be_raw_keys(leaf) else leaf, part)
    return publishable_state(part)


def _may_be_raw_keys(leaf: Any) -> bool:
    """Whether a leaf has the dtype and the shape of the words of PRNG keys."""
    return getattr(leaf, "dtype", None) == np.uint32 and jnp.shape(leaf)[-1:] in ((2,), (4,))


def _public_leaf(state: Any) -> Any:
    """An array or a number; None for typed PRNG keys."""
    if isinstance(state, jax.Array) and jnp.issubdtype(state.dtype, jax.dtypes.prng_key):
        return None
    if isinstance(state, np.ndarray | np.generic) and (state.dtype.hasobject or state.dtype.names):
        raise ValueError(f"state must hold arrays of numbers, got one whose elements are {state.dtype.type}")
    if state is None or isinstance(state, jax.Array | np.ndarray | np.generic | int | float | complex | str):
        return state
    raise ValueError(f"state must be NamedTuples, dataclasses, mappings, lists, tuples and arrays, got {type(state)}")


def _public_items(items: Mapping) -> dict:
    return {name: _public_part(name, part) for name, part in items.items()}


def _is_unreleased(name: Any) -> bool:
    """Whether a field, a key, or a flattened path in any notation names an unreleased value."""
    return "unreleased" in str(name).lower()
