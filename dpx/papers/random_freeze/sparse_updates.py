"""Sparse updates: updates under a random freeze, packed for sending as the trained values and the mask's seed."""

import math
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from dpx.masks import random_mask
from dpx.mechanism import Tree
from dpx.papers.random_freeze.random_freeze import RandomFreezeState
from dpx.trees import find_state, split


class SparseUpdates(NamedTuple):
    """Updates in which only `kept` coordinates are not 0.

    values: float32 (size,), the trained coordinates in the order of the parameters, then zeros.
    seed: uint32 (2,), from which the mask is drawn. kept: int32 (), the number of ones in the mask.
    """

    values: jax.Array
    seed: jax.Array
    kept: jax.Array


def sparse_pack(updates: Tree, state: Tree, *, size: int) -> SparseUpdates:
    """The values of `updates` that `random_freeze` does not freeze, and the seed of the mask.

    updates: like the parameters. state: the one that was given to the step, not the one that the step returned.
    size: int, the length of `values`; at least the number of kept coordinates (`sparse_density` times d).

    Raises ValueError for a smaller size; under jit, where that number is not known, values beyond `size` are lost.
    """
    freeze = find_state(state, RandomFreezeState, "random freeze")
    if not isinstance(freeze.kept, jax.core.Tracer) and size < int(freeze.kept):
        raise ValueError(f"size must be at least the {int(freeze.kept)} coordinates kept, got {size}")
    (places,) = jnp.nonzero(ravel_pytree(freeze.mask)[0], size=size, fill_value=-1)
    flat, _ = ravel_pytree(optax.tree.cast(updates, jnp.float32))
    return SparseUpdates(jnp.where(places < 0, 0, flat[places]), freeze.seed, freeze.kept)


def sparse_unpack(packed: SparseUpdates, like: Tree) -> Tree:
    """The updates that `sparse_pack` packed, in the shapes and dtypes of `like` (the parameters)."""
    mask, _ = ravel_pytree(random_mask(packed.seed, packed.kept, like))
    (places,) = jnp.nonzero(mask, size=packed.values.size, fill_value=mask.size)
    flat = jnp.zeros(mask.size, jnp.float32).at[places].set(packed.values, mode="drop")
    return optax.tree.cast_like(split(flat, like), like)


def sparse_density(state: Tree) -> jax.Array:
    """The share of coordinates that the next step under `random_freeze` updates, float32 () in (0, 1].

    Raises ValueError for a state without exactly one random freeze.
    """
    freeze = find_state(state, RandomFreezeState, "random freeze")
    return freeze.kept / sum(math.prod(m.shape) for m in jax.tree.leaves(freeze.mask))
