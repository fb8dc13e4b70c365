"""`FloatPair`s in float64: their values, their norm, and the way back to two float32 numbers; with v = 2^-53:

`as_float64` is exact for what `as_float_pair` made, because high and low are parts of one float64 number.
`as_float_pair` is off by 2^-48 = 32 v of every number: high by 2^-24 of it, and low by 2^-24 of that (and by less than
    2^-125, where float32 ends). A cast to float32 and back would not do, because XLA may drop both.
`norm_of_pair` is off by 32 v of it, for up to 2^32 numbers: a square is rounded once, then in sums of 16 and of 8,
    which leave fewer than 2^26 numbers, with up to 22 from the end of every array, and then in up to 13 sums of 4. That
    is 1 + 15 + 7 + 39 roundings, which count half in the root, plus the root's own. One long sum would round a square
    2^32 times. Sums of 16 and 8 stay within one array, so few numbers move where it is sharded.

Call all of it inside `jax.enable_x64(True)`, also in a program that is otherwise 32-bit.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from dpx.sums.float_pair import FloatPair
from dpx.values import Tree

FIRST, SECOND, NEXT = 16, 8, 4  # numbers in a sum


def float64_constants(numbers: Iterable[float]) -> jax.Array:
    """Numbers as float64 (n,), written into the program: an array that it closes over becomes float32 where the program
    is called outside of `jax.enable_x64`, as in `dpx.fit`."""
    return jax.lax.concatenate([jax.lax.full((1,), float(number), jnp.float64) for number in numbers], 0)


def as_float64(total: FloatPair) -> Tree:
    """high + low, float64, in the shapes of the total."""
    if total.low is None:
        return jax.tree.map(lambda high: high.astype(jnp.float64), total.high)
    return jax.tree.map(lambda high, low: high.astype(jnp.float64) + low.astype(jnp.float64), total.high, total.low)


def as_float_pair(exact: Tree) -> FloatPair:
    """The `FloatPair` nearest to a tree of float64 arrays in the range of float32."""
    rounded = jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23), exact)
    low = jax.tree.map(lambda x, high: (x - high).astype(jnp.float32), exact, rounded)
    return FloatPair(jax.tree.map(lambda high: high.astype(jnp.float32), rounded), low)


def difference_to_total(released: Tree, total: FloatPair) -> FloatPair:
    """A tree of float32 arrays minus a total, rounded once and then as by `as_float_pair`."""
    return as_float_pair(jax.tree.map(lambda r, before: r.astype(jnp.float64) - before, released, as_float64(total)))


def norm_of_pair(total: FloatPair) -> jax.Array:
    """The root of the sum of the squares of a total of two numbers, float64 ()."""
    parts = [jnp.zeros(1, jnp.float64)]
    for high, low in zip(*map(jax.tree.leaves, total), strict=True):
        rows, rest = zip(*(_in_rows(x.reshape(-1), FIRST) for x in (high, low)), strict=True)
        # Barriers as in norms.py: rows before squares, for speed, and short sums, for precision.
        sums, more = _in_rows(jnp.sum(_squares(*jax.lax.optimization_barrier(rows)), -1), SECOND)
        parts += [jnp.sum(jax.lax.optimization_barrier(sums), -1), more, _squares(*rest)]
    sums = jnp.concatenate(parts)
    while sums.size > NEXT:
        padded = jnp.pad(jax.lax.optimization_barrier(sums), (0, -sums.size % NEXT))
        sums = jnp.sum(padded.reshape(-1, NEXT), -1)
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(sums)))


def _in_rows(x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """A vector as rows, (n, width), and the numbers that are left over."""
    whole = x.size - x.size % width
    return x[:whole].reshape(-1, width), x[whole:]


def _squares(high: jax.Array, low: jax.Array) -> jax.Array:
    return jnp.square(high.astype(jnp.float64) + low.astype(jnp.float64))
