"""The public part of a state: everything but its `unreleased` and `unreleased_*` fields."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import numpy as np

Tree = Any  # a pytree of arrays


def public_state(state: Tree) -> Tree:
    """`state` with None for its `unreleased` and `unreleased_*` fields, so that it may be shown or shared.

    state: any pytree, or dataclasses and mappings of pytrees. The other fields depend on released values only.

    A value becomes None if the name of its field, or its key, contains "unreleased", also in flattened states, whose
    keys are tuples or strings such as ".unreleased_error['w']". So does a `dpx.Unreleased`. Functions become None,
    because their closures may hold a key. Raises ValueError for a container of an unknown type.
    """
    if type(state).__name__.startswith("Unreleased"):
        return None
    if hasattr(state, "_fields"):
        names = state._fields
        return type(state)(*[None if _unreleased(name) else public_state(getattr(state, name)) for name in names])
    if is_dataclass(state) and not isinstance(state, type):
        parts = {field.name: getattr(state, field.name) for field in fields(state)}
        return replace(state, **_public_items(parts))
    if isinstance(state, dict):
        return _public_items(state)
    if isinstance(state, list | tuple):
        return type(state)(public_state(part) for part in state)
    parts, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda part: part is not state)
    if any(path for path, _ in parts):  # another container that jax knows
        return treedef.unflatten([None if _unreleased(path[0]) else public_state(part) for path, part in parts])
    if isinstance(state, Mapping):
        return _public_items(state)
    if callable(state):
        return None
    if state is None or isinstance(state, jax.Array | np.ndarray | np.generic | int | float | complex | str):
        return state
    raise ValueError(f"state must be NamedTuples, dataclasses, mappings, lists, tuples and arrays, got {type(state)}")


def _public_items(items: Mapping) -> dict:
    return {name: None if _unreleased(name) else public_state(part) for name, part in items.items()}


def _unreleased(name: Any) -> bool:
    """Whether a field, a key, or a flattened path in any notation names an unreleased value."""
    return "unreleased" in str(name)
