"""Standard normals in the shapes of a tree, from one key and the number of a step: the noise of every mechanism.

The numbers of the tree, leaf after leaf, are the numbers of one stream. Number n of the stream is a function of the
key, of the step, of n, and of how many numbers the tree has, if these are fewer than 2^14. So its value does not depend
on how the arrays are computed or sharded. Compiling one random number generator for each leaf took most of the time of
compiling a step. In a tree of 2^31 numbers or more, every leaf has a key, and so a stream, of its own.

The key enciphers a counter, (step + 1, number of a pair), into two numbers of the stream. No two steps share a counter,
and none has one of `jax.random.fold_in`, which begin with 0. The step is in the counter, because a key for each step
would need the cipher once more, and the cipher takes long to compile.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpx.keys.cipher import threefry4x32
from dpx.trees import Tree
from dpx.xla.ordering import opaque_false

# 64 KiB; from 2^12 to 2^18 numbers, a CPU is about equally fast (benchmarks/results/noise.md).
CHUNK_NUMBERS = 2**14
LARGE_LEAF = 2**16  # numbers; smaller arrays are not waited for, because each costs time to compile
LARGEST_LEAF = 2**32 - CHUNK_NUMBERS  # numbers, because places in a leaf are uint32
ONE_STREAM = 2**31  # numbers, because an index of an array is an int32
REPEATED = 4  # leaves with the shape of an earlier one; for fewer, sharing programs takes longer to compile

# sqrt(2) erf_inv(u) / u is this ratio of polynomials in w = -log(1 - u^2), highest power first, up to 3e-8, relatively,
# for 0 <= w <= 15.3. They were fitted by least squares at Chebyshev nodes, weighted until the largest error was least.
NUMERATOR = (3.5119945e-05, 0.0009081522, 0.010938076, 0.083928935, 0.43215206, 1.2533141)
DENOMINATOR = (1.3300248e-06, 0.000181579, 0.0018522635, 0.032200865, 0.083008327, 1.0)


def standard_normals(key: jax.Array, step: jax.Array | int, tree: Tree) -> Tree:
    """Independent standard normals, float32, in the shapes of `tree`. key: a threefry4x32 key, (). step: int32 ().

    On a CPU, a loop draws one chunk after another, which stays in the cache. It runs after the large arrays of `tree`
    are computed, because its memory may then be that of what they were computed from (benchmarks/transformers.py). On
    another device, all numbers are drawn at once. On several devices, every leaf is computed from the places of its
    numbers, because XLA can shard that like the leaf.

    Raises ValueError for a leaf of more than LARGEST_LEAF numbers.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    sizes = [math.prod(shape) for shape in shapes]
    if (largest := max(sizes, default=0)) > LARGEST_LEAF:
        raise ValueError(f"a leaf must have at most {LARGEST_LEAF} numbers, got {largest}")
    if len(leaves) > 1 and sum(sizes) >= ONE_STREAM:
        own = [jax.random.fold_in(key, number) for number in range(len(leaves))]
        return structure.unflatten(standard_normals(k, step, leaf) for k, leaf in zip(own, leaves, strict=True))
    words, step = jax.random.key_data(key), jnp.asarray(step)
    large = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.size >= LARGE_LEAF]
    return structure.unflatten(_leaves(words, step, opaque_false(large or step), shapes, jax.device_count() > 1))


@jax.jit(static_argnums=(3, 4))
def _leaves(words, step, never, shapes: tuple[tuple[int, ...], ...], sharded: bool) -> list[jax.Array]:
    """The leaves of these shapes, float32. words: of the key, uint32 (4,). step: int (). never: False, bool (), which a
    loop on a CPU waits for. sharded: bool, whether to compute each leaf by itself."""
    starts = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    half = max(1, min(CHUNK_NUMBERS, starts[-1] + 1) // 2)

    def split(flat: jax.Array) -> list[jax.Array]:
        ranges = itertools.pairwise(starts)
        return [jax.lax.slice(flat, (i,), (j,)).reshape(shape) for (i, j), shape in zip(ranges, shapes, strict=True)]

    def by_chunks(words, step, never) -> list[jax.Array]:
        flat = _chunks(words, step, never, math.ceil(starts[-1] / (2 * half)), half).reshape(-1)
        if len(shapes) - len(set(shapes)) < REPEATED:
            return split(flat)
        # XLA compiles equal kernels once. With starts that are constants, each leaf has a kernel of its own. With
        # starts that are values, all leaves of one shape share one.
        at = jax.lax.cond(opaque_false(step), lambda: [0] * len(shapes), lambda: starts[:-1])
        return [
            jax.lax.dynamic_slice(flat, (start,), (math.prod(shape),), allow_negative_indices=False).reshape(shape)
            for start, shape in zip(at, shapes, strict=True)
        ]

    def at_once(words, step, never) -> list[jax.Array]:
        del never
        return split(_part(words, step, 0, (starts[-1],), half))

    if sharded or not 0 < starts[-1] < ONE_STREAM:
        return [_part(words, step, start, shape, half) for start, shape in zip(starts[:-1], shapes, strict=True)]
    return jax.lax.platform_dependent(words, step, never, cpu=by_chunks, default=at_once)


def _chunks(words: jax.Array, step: jax.Array, never: jax.Array, count: int, half: int) -> jax.Array:
    """The first `count` chunks of the stream, float32 (2 * count, half), computed after `never`, which is False."""

    def draw(number, chunks):
        place = number.astype(jnp.uint32) * np.uint32(half) + jax.lax.iota(jnp.uint32, half)
        row = jax.lax.broadcasted_iota(jnp.int32, (2, half), 0)
        # Without the barrier, XLA moves what is the same in every turn out of the loop, into kernels of their own, and
        # each takes time to compile.
        here, place, row = jax.lax.optimization_barrier((step, place, row))
        bits = _at_once(_threefry(words, jnp.full(half, here.astype(jnp.uint32) + np.uint32(1)), place))
        first, second = (jax.lax.broadcast(word, (2,)) for word in bits)
        normals = _normal(jax.lax.select(jax.lax.eq(row, jax.lax.full_like(row, 0)), first, second))
        return jax.lax.dynamic_update_slice(chunks, normals, (2 * number, 0), allow_negative_indices=False)

    # A buffer that is filled with a constant is taken when the program starts. Filled with a value that depends on the
    # sums, it makes a step of GPT-2 small take 524 MiB of temporary memory instead of 997 (benchmarks/transformers.py).
    zero = never.astype(jnp.float32)
    return jax.lax.fori_loop(0, count, draw, jnp.full((2 * count, half), zero))


def _threefry(words: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, ...]:
    """Two of the four words of the blocks (first, second, 0, 0), enciphered: uint32 arrays."""
    return tuple(threefry4x32([*words], [first, second, zeros := jnp.zeros_like(first), zeros])[:2])


def _at_once(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The uint32 (n,) arrays, computed in one program on a CPU: the results of one reduction, of every number with
    itself. Else what they have in common is computed for each, which was a quarter of the time.
    """
    doubled = [jax.lax.broadcast_in_dim(x, (len(x), 2), (0,)) for x in arrays]
    zeros = [np.uint32(0)] * len(doubled)
    return jax.lax.reduce(doubled, zeros, lambda a, b: jax.tree.map(jax.lax.bitwise_or, a, b), (1,))


@jax.jit(static_argnums=(3, 4))
def _part(words: jax.Array, step: jax.Array, start: jax.Array, shape: tuple[int, ...], half: int) -> jax.Array:
    """The numbers of the stream from `start`, uint32 (), on: float32 `shape`."""
    lax = jax.lax

    def every(value) -> jax.Array:
        return lax.full(shape, value, jnp.uint32)

    place = every(jnp.uint32(start))
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :])
        place = lax.add(place, lax.mul(every(stride), lax.broadcasted_iota(jnp.uint32, shape, axis)))
    chunk, place = lax.div(place, every(2 * half)), lax.rem(place, every(2 * half))
    in_first = lax.lt(place, every(half))
    pair = lax.add(lax.mul(chunk, every(half)), lax.rem(place, every(half)))
    first, second = _threefry(words, every(step.astype(jnp.uint32) + np.uint32(1)), pair)
    return _normal(lax.select(in_first, first, second))


def _normal(bits: jax.Array) -> jax.Array:
    """A standard normal, float32, from the uniform number u in (-1, 1) that `jax.random.normal` makes of uint32 `bits`.

    It is within 3e-7 of sqrt(2) erf_inv(u), relatively, for all 2^23 uniform numbers; with `jax.lax.erf_inv`, within
    6e-6, and slower. Here 1 - u^2 is (1 - u) (1 + u), which loses no digits near 1.
    """
    lax, lowest = jax.lax, np.nextafter(np.float32(-1), np.float32(0))  # `jnp` takes longer to trace

    def every(value) -> jax.Array:
        return lax.full(bits.shape, value, jnp.float32)

    def polynomial(coefficients: tuple[float, ...]) -> jax.Array:
        value = every(coefficients[0])
        for coefficient in coefficients[1:]:
            value = lax.add(lax.mul(value, w), every(coefficient))
        return value

    mantissa = lax.bitwise_or(lax.shift_right_logical(bits, lax.full_like(bits, 9)), lax.full_like(bits, 0x3F800000))
    in_unit = lax.sub(lax.bitcast_convert_type(mantissa, jnp.float32), every(1))  # in [0, 1)
    uniform = lax.max(every(lowest), lax.add(lax.mul(in_unit, every(1 - lowest)), every(lowest)))
    w = lax.neg(lax.log(lax.mul(lax.sub(every(1), uniform), lax.add(every(1), uniform))))
    return lax.mul(uniform, lax.div(polynomial(NUMERATOR), polynomial(DENOMINATOR)))
