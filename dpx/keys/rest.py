"""A noisy release together with its rest, what was released less the sum: the noise of this release, as it is.

A mechanism whose later noise cancels this one must know it, such as one of correlated noise. The release is that of
`noise.py`, bit for bit.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpx.keys.noise import (
    ONE_STREAM,
    Place,
    as_deviation,
    in_leaves,
    in_rows,
    is_drawn,
    made_in_chunks,
    places_of,
    release_leaves,
)
from dpx.keys.streams import words as secret_words
from dpx.trees import Tree
from dpx.xla import doubles
from dpx.xla.devices import device_count
from dpx.xla.flags import warn_of_fast_math
from dpx.xla.totals import Total


def release_and_rest(
    key: jax.Array,
    step: jax.Array | int,
    total: Callable[[Any], Total],
    parts: Tree,
    deviation: jax.Array | float,
) -> tuple[Tree, Total]:
    """`release` of the `Total` `total(parts)`, of two numbers, and its rest: what was released less that total.

    The released bits are those of `release`. The rest is in two float32 numbers, and SECRET, because it is noise.

    key: of the mechanism's "noise" stream, (). step: int (), below 2^31; two steps have independent noise.
    total: a function of `parts` alone, the same object at every call, because jax keeps its trace. parts: a tree of
        arrays.
    deviation: as for `release`.

    On a CPU, the total is written where the chunks are made, and the rest is computed from there. `release` of a total
    that is needed afterwards is slower: XLA computes it again, and copies its parts to have them until then. For one
    step of memory, that took 2.2 times independent noise in place of 1.7 (benchmarks/correlated_steps.py).
    """
    warn_of_fast_math()
    leaves, structure = jax.tree.flatten(jax.eval_shape(total, parts).high)
    how = total, places_of([leaf.shape for leaf in leaves]), device_count(), is_drawn(deviation)
    with jax.disable_jit(False):
        made = _release_and_rest(secret_words(key), jnp.asarray(step), as_deviation(deviation), parts, *how)
    released, high, low = map(structure.unflatten, made)
    return released, Total(high, low)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _release_and_rest(
    words, step, deviation, parts, total, places: tuple[Place, ...], devices: int, drawn: bool
) -> tuple:
    """The leaves of `release_and_rest`: three lists, of what is released, and of both numbers of the rest."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(total, parts).high)]

    def rest(released, highs, lows) -> tuple:
        with jax.enable_x64(True):
            return released, *doubles.less(released, Total(highs, lows))

    def by_chunks(parts) -> tuple:
        def made() -> tuple[jax.Array, jax.Array]:
            high, low = (in_rows(jax.tree.leaves(numbers), places) for numbers in total(parts))
            return high, low

        # The step is at least 0. XLA can compute nothing again that comes from a conditional.
        zeros = functools.partial(optax.tree.zeros_like, jax.eval_shape(made))
        high, low = jax.lax.cond(step >= 0, made, zeros)
        released = made_in_chunks(words, step, deviation, high, low, drawn)
        return rest(*(in_leaves(rows, step, places, shapes) for rows in (released, high, low)))

    def by_leaves(parts) -> tuple:
        highs, lows = (jax.tree.leaves(numbers) for numbers in total(parts))
        return rest(release_leaves(words, step, deviation, highs, lows, places, devices, drawn), highs, lows)

    if devices > 1 or not 0 < sum(map(math.prod, shapes)) < ONE_STREAM:
        return by_leaves(parts)
    return jax.lax.platform_dependent(parts, cpu=by_chunks, default=by_leaves)
