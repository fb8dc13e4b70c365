"""Selects an exact number of the largest numbers in a whole tree, by bisection on their bits instead of a sort.

Each of 32 passes counts the numbers above a bound, which fixes one bit of the smallest number that is selected.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.mechanism import Tree


def largest(numbers: Tree, kept: jax.Array) -> Tree:
    """Where the `kept` largest numbers of the whole tree stand, bool, like `numbers`; of equal numbers the first.

    numbers: uint32 or float32. kept: int32 (), at least 1, may be traced.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(_in_order, numbers))
    starts = np.cumsum([0, *[leaf.size for leaf in leaves]])
    size = int(starts[-1])
    threshold = _threshold(leaves, kept)
    wanted = kept - _count([leaf > threshold for leaf in leaves])  # of the numbers that equal the threshold
    places = [
        jnp.where(leaf == threshold, lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape) + int(start), size)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    last = _greatest(lambda bound: _count([place < bound for place in places]) < wanted, bits=size.bit_length())
    return treedef.unflatten([(leaf > threshold) | (place <= last) for leaf, place in zip(leaves, places, strict=True)])


def least_of_largest(numbers: Tree, kept: jax.Array) -> jax.Array:
    """The least of the `kept` largest numbers of the whole tree, float32 ().

    numbers: float32, not negative. kept: int32 (), at least 1, may be traced.
    """
    words = [_bits(leaf) for leaf in jax.tree.leaves(numbers)]
    return lax.bitcast_convert_type(_threshold(words, kept), jnp.float32)


def _threshold(words: list[jax.Array], kept: jax.Array) -> jax.Array:
    """The least of the `kept` largest words, uint32 ()."""
    return _greatest(lambda bound: _count([word >= bound for word in words]) >= kept, bits=32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _in_order(x: jax.Array) -> jax.Array:
    """uint32 words that compare as the numbers in `x` do."""
    if x.dtype == jnp.uint32:
        return x
    negative = _bits(x) >> 31 == 1
    return jnp.where(negative, ~_bits(x), _bits(x) | jnp.uint32(2**31))


def _greatest(fits: Callable[[jax.Array], jax.Array], *, bits: int) -> jax.Array:
    """The greatest number below 2^bits that fits, uint32 (). 0 fits, and with a number all smaller ones do."""

    def body(i, number):
        larger = number | (jnp.uint32(2 ** (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(fits(larger), larger, number)

    return lax.fori_loop(0, bits, body, jnp.uint32(0))


def _count(where: list[jax.Array]) -> jax.Array:
    """How many are True, int32 (). Float32 adds leaves below 2^24 exactly, and faster than int32 on a CPU."""
    dtypes = [jnp.float32 if w.size < 2**24 else jnp.int32 for w in where]
    return sum((jnp.sum(w, dtype=d).astype(jnp.int32) for w, d in zip(where, dtypes, strict=True)), jnp.int32(0))
