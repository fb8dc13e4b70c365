"""Masks of a pytree of arrays, with an exact number of ones in the whole tree.

Instead of a sort, bisection on the bits finds the largest numbers: each of 32 passes counts the numbers above a bound,
which fixes one bit of the smallest selected number.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpx.schedules import ScalarOrSchedule, value_at
from dpx.values import Tree

# Added to a share before its product with d is rounded down, because 0.29 * 100 is 28.999... in floating point. Each
# exceeds the rounding error of a share of at most 1 in that precision.
FLOAT32_SLACK, FLOAT64_SLACK = 1e-7, 1e-12


def random_mask(seed: jax.Array, kept: jax.Array, like: Tree) -> Tree:
    """A uniformly random mask with `kept` ones, bool in the shapes of `like`. seed: uint32 (2,). kept: int32 ()."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return mask_of_largest(optax.tree.random_like(key, like, jax.random.bits, jnp.uint32), kept)


def masked(tree: Tree, mask: Tree) -> Tree:
    """`tree` times `mask`, bool, in the dtypes of `tree`. inf and NaN become NaN where the mask is False, so that the
    norm is not finite and the example contributes zero."""
    return jax.tree.map(lambda x, m: x * m.astype(x.dtype), tree, mask)


def number_of_share(share: ScalarOrSchedule, step: jax.Array, like: Tree) -> jax.Array:
    """The number of coordinates in a share of all d at one step: floor(share d), but at least 1; int32 ()."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    if callable(share):
        number = jnp.floor((value_at(share, step) + FLOAT32_SLACK) * size).astype(jnp.int32)
    else:
        number = jnp.int32(math.floor((share + FLOAT64_SLACK) * size))
    return jnp.clip(number, 1, size)


def complement_of_rate(rate: ScalarOrSchedule) -> ScalarOrSchedule:
    return (lambda step: 1 - value_at(rate, step)) if callable(rate) else 1 - rate


def mask_of_largest(numbers: Tree, kept: jax.Array) -> Tree:
    """A mask of the `kept` largest numbers of the whole tree: bool, like `numbers`. Of equal numbers the first count.
    numbers: uint32 or float32. kept: int32 (), at least 1, may be traced."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_order_preserving_bits, numbers))
    starts = np.cumsum([0, *[leaf.size for leaf in leaves]])
    size = int(starts[-1])
    threshold = _threshold(leaves, kept)
    wanted = kept - _count_true([leaf > threshold for leaf in leaves])  # how many of those equal to the threshold
    places = [
        jnp.where(leaf == threshold, lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape) + int(start), size)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    last = _bisect_greatest(
        lambda bound: _count_true([place < bound for place in places]) < wanted, bits=size.bit_length()
    )
    return treedef.unflatten([(leaf > threshold) | (place <= last) for leaf, place in zip(leaves, places, strict=True)])


def kth_largest(numbers: Tree, kept: jax.Array) -> jax.Array:
    """The least of the `kept`, int32 (), largest numbers of a tree of non-negative float32; float32 ()."""
    words = [_bit_pattern(leaf) for leaf in jax.tree.leaves(numbers)]
    return lax.bitcast_convert_type(_threshold(words, kept), jnp.float32)


def _threshold(words: list[jax.Array], kept: jax.Array) -> jax.Array:
    """The least of the `kept` largest words, uint32 ()."""
    return _bisect_greatest(lambda bound: _count_true([word >= bound for word in words]) >= kept, bits=32)


def _bit_pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _order_preserving_bits(x: jax.Array) -> jax.Array:
    """uint32 words in the order of the numbers in `x`."""
    if x.dtype == jnp.uint32:
        return x
    negative = _bit_pattern(x) >> 31 == 1
    return jnp.where(negative, ~_bit_pattern(x), _bit_pattern(x) | jnp.uint32(2**31))


def _bisect_greatest(fits: Callable[[jax.Array], jax.Array], *, bits: int) -> jax.Array:
    """The greatest number below 2^bits that fits, uint32 (). 0 must fit, and so must all below one that fits."""

    def body(i, number):
        larger = number | (jnp.uint32(2 ** (bits - 1)) >> jnp.uint32(i))
        return jnp.where(fits(larger), larger, number)

    return lax.fori_loop(0, bits, body, jnp.uint32(0))


def _count_true(where: list[jax.Array]) -> jax.Array:
    """The number of True elements, int32 (). Sums up to 2^24 are exact in float32, which is faster on a CPU."""
    dtypes = [jnp.float32 if w.size < 2**24 else jnp.int32 for w in where]
    return sum((jnp.sum(w, dtype=d).astype(jnp.int32) for w, d in zip(where, dtypes, strict=True)), jnp.int32(0))
