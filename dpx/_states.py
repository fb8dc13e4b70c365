"""Finds a state inside another one, because optimizers and wrappers nest their states."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Tree = Any  # a pytree of arrays
State = TypeVar("State")


def find_state(tree: Tree, kind: type[State], called: str) -> State:
    """The one node of type `kind` in `tree`. Raises ValueError, which names it as `called`, for none or several."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    states = [node for node in nodes if isinstance(node, kind)]
    if len(states) != 1:
        raise ValueError(f"state must hold exactly one {called}, found {len(states)}")
    return states[0]


def map_states(function: Callable[[State], Any], tree: Tree, kind: type[State]) -> Tree:
    """`tree` with `function` applied to every node of type `kind`, and everything else unchanged."""

    def apply(node):
        return function(node) if isinstance(node, kind) else node

    return jax.tree.map(apply, tree, is_leaf=lambda node: isinstance(node, kind))
