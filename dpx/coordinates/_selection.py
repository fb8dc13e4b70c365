"""The largest of all numbers in a tree, exactly so many, without a sort: bisection on the bits, one count a bit."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.mechanism import Tree


def largest(numbers: Tree, kept: jax.Array) -> Tree:
    """Where the `kept` largest numbers of the whole tree stand, bool; of equal ones the first.

    numbers: uint32 or float32. kept: at least 1, may be traced.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(_ordered, numbers))
    starts = np.cumsum([0, *[leaf.size for leaf in leaves]])
    size = int(starts[-1])
    least = _least_of_largest(leaves, kept)
    wanted = kept - _count([leaf > least for leaf in leaves])
    places = [
        jnp.where(leaf == least, lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape) + int(start), size)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    last = _greatest(lambda bound: _count([place < bound for place in places]) < wanted, bits=size.bit_length())
    return treedef.unflatten([(leaf > least) | (place <= last) for leaf, place in zip(leaves, places, strict=True)])


def least_of_largest(numbers: Tree, kept: jax.Array) -> jax.Array:
    """The least of the `kept` largest numbers of the whole tree; the numbers are float32 and not negative."""
    return lax.bitcast_convert_type(
        _least_of_largest([_bits(leaf) for leaf in jax.tree.leaves(numbers)], kept), jnp.float32
    )


def _least_of_largest(words: list[jax.Array], kept: jax.Array) -> jax.Array:
    return _greatest(lambda bound: _count([word >= bound for word in words]) >= kept, bits=32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 in the order of the numbers."""
    if x.dtype == jnp.uint32:
        return x
    negative = _bits(x) >> 31 == 1
    return jnp.where(negative, ~_bits(x), _bits(x) | jnp.uint32(2**31))


def _greatest(fits, *, bits: int) -> jax.Array:
    """The greatest number of so many bits that fits, uint32; 0 does, and so do all below one that does."""

    def body(i, number):
        larger = number | (jnp.uint32(2 ** (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(fits(larger), larger, number)

    return lax.fori_loop(0, bits, body, jnp.uint32(0))


def _count(where: list[jax.Array]) -> jax.Array:
    """How many are True, int32; added up in float32 where that is exact, which is faster on CPU."""
    kinds = [jnp.float32 if w.size < 2**24 else jnp.int32 for w in where]
    return sum((jnp.sum(w, dtype=k).astype(jnp.int32) for w, k in zip(where, kinds, strict=True)), jnp.int32(0))
