"""Standard normals in the shapes of a tree, from one key: the noise of every mechanism.

The numbers of the tree, leaf after leaf, are the numbers of one stream. Number n of the stream is a function of the
key, of n, and of how many numbers the tree has, if these are fewer than 2^14. So its value does not depend on how the
arrays are computed or sharded. Compiling one random number generator for each leaf took most of the time of compiling a
step.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from dpx._ordering import opaque_false

Tree = Any  # a pytree of arrays

# 64 KiB; from 2^12 to 2^18 numbers, a CPU is about equally fast (benchmarks/results/noise.md).
CHUNK_NUMBERS = 2**14
LARGE_LEAF = 2**16  # numbers; smaller arrays are not waited for, because each costs time to compile
LARGEST_LEAF = 2**32 - CHUNK_NUMBERS  # numbers, because places in a leaf are uint32

# Of the inverse error function, highest power first (Giles 2010, table 5): for w < 5, and beyond.
CENTRAL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
CENTRAL += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
TAIL += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


def standard_normals(key: jax.Array, tree: Tree) -> Tree:
    """Independent standard normals, float32, in the shapes of `tree`. key: a threefry2x32 key, ().

    On a CPU, a loop draws one chunk after another, which stays in the cache. It runs after the large arrays of `tree`
    are computed, because its memory may then be that of what they were computed from (benchmarks/transformers.py).
    Elsewhere, and on several devices, every leaf is computed from the places of its numbers, because XLA can fuse that,
    and shard it like the leaf.

    Raises ValueError for a leaf of more than LARGEST_LEAF numbers.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    if (largest := max((math.prod(shape) for shape in shapes), default=0)) > LARGEST_LEAF:
        raise ValueError(f"a leaf must have at most {LARGEST_LEAF} numbers, got {largest}")
    words = jax.random.key_data(key)
    large = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.size >= LARGE_LEAF]
    return structure.unflatten(_leaves(words, opaque_false(large or words), shapes, jax.device_count() > 1))


@jax.jit
def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """The key, (), that `jax.random.fold_in` makes of a threefry2x32 key, (), and an int (). It has no loop, so XLA
    compiles it faster for a CPU.
    """
    words, number = jax.random.key_data(key), jnp.full(1, number, jnp.uint32)
    folded = _at_once(_threefry(words, jnp.zeros_like(number), number))
    return jax.random.wrap_key_data(jnp.concatenate(folded), impl="threefry2x32")


@jax.jit(static_argnums=(2, 3))
def _leaves(words: jax.Array, never: jax.Array, shapes: tuple[tuple[int, ...], ...], sharded: bool) -> list[jax.Array]:
    """The leaves of these shapes, float32. words: of the key, uint32 (2,). never: False, bool (), which a loop on a CPU
    waits for."""
    starts = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    half = max(1, min(CHUNK_NUMBERS, starts[-1] + 1) // 2)

    def by_chunks(words, never) -> list[jax.Array]:
        flat = _chunks(words, never, math.ceil(starts[-1] / (2 * half)), half).reshape(-1)
        # As constants, the starts would make one program for each leaf; as values, one for each shape.
        at = jax.lax.cond(opaque_false(words), lambda: [0] * len(shapes), lambda: starts[:-1])
        return [
            jax.lax.dynamic_slice(flat, (start,), (math.prod(shape),), allow_negative_indices=False).reshape(shape)
            for start, shape in zip(at, shapes, strict=True)
        ]

    def by_leaves(words, never) -> list[jax.Array]:
        del never
        firsts = [np.array(divmod(start, 2 * half), np.uint32) for start in starts[:-1]]
        return [_leaf(words, first, shape, half) for first, shape in zip(firsts, shapes, strict=True)]

    if sharded or not 0 < starts[-1] < 2**31:  # an index of an array is an int32
        return by_leaves(words, never)
    return jax.lax.platform_dependent(words, never, cpu=by_chunks, default=by_leaves)


def _chunks(words: jax.Array, never: jax.Array, count: int, half: int) -> jax.Array:
    """The first `count` chunks of the stream, float32 (2 * count, half), computed after `never`, which is False."""

    def draw(number, chunks):
        first = jnp.full(half, number, jnp.uint32)
        # Without the barrier, XLA moves what depends on `words` alone out of the loop, into kernels of their own.
        here, first = jax.lax.optimization_barrier((words, first))
        bits = _at_once(_threefry(here, first, jnp.arange(half, dtype=jnp.uint32)))
        for word in range(2):
            normals = _normal(bits[word])[None]
            chunks = jax.lax.dynamic_update_slice(chunks, normals, (2 * number + word, 0), allow_negative_indices=False)
        return chunks

    zero = never.astype(jnp.float32)  # with a constant, the memory would be taken when the program starts
    return jax.lax.fori_loop(0, count, draw, jnp.full((2 * count, half), zero))


def _threefry(words: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cipher Threefry-2x32 of 20 rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): uint32.

    The values of `threefry2x32_p`, which is a loop of five groups of rounds on a CPU, and computes each group twice.
    """
    keys = (*words, words[0] ^ words[1] ^ np.uint32(0x1BD11BDA))
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            first += second
            second = first ^ ((second << np.uint32(turn)) | (second >> np.uint32(32 - turn)))
        first, second = first + keys[(group + 1) % 3], second + keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def _at_once(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The uint32 (n,) arrays, computed in one program on a CPU: the results of one reduction, of every number with
    itself. Else what they have in common is computed for each, which was a quarter of the time.
    """
    doubled = [jnp.broadcast_to(x[:, None], (len(x), 2)) for x in arrays]
    zeros = [np.uint32(0)] * len(doubled)
    return jax.lax.reduce(doubled, zeros, lambda a, b: jax.tree.map(jnp.bitwise_or, a, b), (1,))


@jax.jit(static_argnums=(2, 3))
def _leaf(words: jax.Array, start: jax.Array, shape: tuple[int, ...], half: int) -> jax.Array:
    """The numbers of the stream from `start` on, float32 `shape`. start: uint32 (2,), the chunk and the place in it."""
    lax = jax.lax

    def every(value) -> jax.Array:
        return lax.full(shape, value, jnp.uint32)

    place = every(start[1])
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :])
        place = lax.add(place, lax.mul(every(stride), lax.broadcasted_iota(jnp.uint32, shape, axis)))
    number, place = lax.add(every(start[0]), lax.div(place, every(2 * half))), lax.rem(place, every(2 * half))
    in_first = lax.lt(place, every(half))
    first, second = threefry2x32_p.bind(*words, number, lax.rem(place, every(half)))
    return _normal(lax.select(in_first, first, second))


def _normal(bits: jax.Array) -> jax.Array:
    """A standard normal, float32, from the uniform number in (-1, 1) that `jax.random.normal` makes of uint32 `bits`.

    It is within 3e-7 of the exact one, relatively, for all 2^23 uniform numbers; with `jax.lax.erf_inv`, within 6e-6,
    and slower. Both are the polynomial of Giles 2010 (https://people.maths.ox.ac.uk/gilesm/files/gems_erfinv.pdf) in
    w = -log(1 - u^2) of the uniform number u, but here 1 - u^2 is (1 - u) (1 + u), which loses no digits near 1.
    """
    lax, lowest = jax.lax, np.nextafter(np.float32(-1), np.float32(0))  # `jnp` takes longer to trace

    def every(value) -> jax.Array:
        return lax.full(bits.shape, value, jnp.float32)

    mantissa = lax.bitwise_or(lax.shift_right_logical(bits, lax.full_like(bits, 9)), lax.full_like(bits, 0x3F800000))
    in_unit = lax.sub(lax.bitcast_convert_type(mantissa, jnp.float32), every(1))  # in [0, 1)
    uniform = lax.max(every(lowest), lax.add(lax.mul(in_unit, every(1 - lowest)), every(lowest)))
    w = lax.neg(lax.log(lax.mul(lax.sub(every(1), uniform), lax.add(every(1), uniform))))
    central = lax.lt(w, every(5))
    place = lax.select(central, lax.sub(w, every(2.5)), lax.sub(lax.sqrt(w), every(3)))
    inverse_erf = every(0)
    for near, far in zip(CENTRAL, TAIL, strict=True):
        inverse_erf = lax.add(lax.mul(inverse_erf, place), lax.select(central, every(near), every(far)))
    return lax.mul(lax.mul(every(math.sqrt(2)), uniform), inverse_erf)
