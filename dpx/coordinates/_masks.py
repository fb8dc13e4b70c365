"""Masks of a pytree of arrays, with an exact number of ones in the whole tree."""

import math

import jax
import jax.numpy as jnp
import optax

from dpx.coordinates._selection import largest
from dpx.mechanism import Tree
from dpx.scalars import ScalarOrSchedule, at

# Added to a share before its product with d is rounded down, because 0.29 * 100 is 28.999... in floating point. Each is
# above the rounding error of a share of at most 1 in that precision.
FLOAT32_SLACK, FLOAT64_SLACK = 1e-7, 1e-12


def random_mask(seed: jax.Array, kept: jax.Array, like: Tree) -> Tree:
    """A uniformly random mask with `kept` ones in the whole tree: bool, in the shapes of `like`.

    seed: uint32 (2,). kept: int32 (), at least 1.
    """
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return largest(optax.tree.random_like(key, like, jax.random.bits, jnp.uint32), kept)


def masked(tree: Tree, mask: Tree) -> Tree:
    """`tree` times `mask`, in the dtypes of `tree`. mask: bool, like `tree`.

    inf and NaN become NaN where the mask is False, so that the norm of their example is not finite and the example
    contributes zero.
    """
    return jax.tree.map(lambda x, m: x * m.astype(x.dtype), tree, mask)


def count(share: ScalarOrSchedule, step: jax.Array, like: Tree) -> jax.Array:
    """The number of coordinates in a share of all d, at one step: floor(share d), but at least 1; int32 ()."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    if callable(share):
        number = jnp.floor((at(share, step) + FLOAT32_SLACK) * size).astype(jnp.int32)
    else:
        number = jnp.int32(math.floor((share + FLOAT64_SLACK) * size))
    return jnp.clip(number, 1, size)


def complement(rate: ScalarOrSchedule) -> ScalarOrSchedule:
    """1 - rate, for a number or a schedule."""
    return (lambda step: 1 - at(rate, step)) if callable(rate) else 1 - rate
