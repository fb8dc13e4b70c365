"""Masks of coordinates: exactly so many of the whole tree."""

import math

import jax
import jax.numpy as jnp
import optax

from dpx._numbers import ScalarOrSchedule, at
from dpx.coordinates._selection import largest
from dpx.mechanism import Tree


def random_mask(seed: jax.Array, kept: jax.Array, like: Tree) -> Tree:
    """A uniformly drawn mask with `kept` ones, bool, in the shapes of `like`."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return largest(optax.tree.random_like(key, like, jax.random.bits, jnp.uint32), kept)


def masked(tree: Tree, mask: Tree) -> Tree:
    """`tree` times `mask`: what is not finite stays so, and its example counts as nothing."""
    return jax.tree.map(lambda x, m: x * m.astype(x.dtype), tree, mask)


def count(share: ScalarOrSchedule, step: jax.Array, like: Tree) -> jax.Array:
    """floor(share d) of the d coordinates, at least 1, int32; not one less because a share like 0.1 is rounded."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    if callable(share):
        number = jnp.floor((at(share, step) + 1e-7) * size).astype(jnp.int32)
    else:
        number = jnp.int32(math.floor((share + 1e-12) * size))
    return jnp.clip(number, 1, size)


def complement(rate: ScalarOrSchedule) -> ScalarOrSchedule:
    return (lambda step: 1 - at(rate, step)) if callable(rate) else 1 - rate


def describe(share: ScalarOrSchedule) -> str:
    return "a scheduled share" if callable(share) else f"{share:.4g}"
