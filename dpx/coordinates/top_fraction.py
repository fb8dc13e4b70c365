"""The largest coordinates of each example."""

from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpx._numbers import ScalarOrSchedule, require_fraction
from dpx.coordinates._masks import count, describe
from dpx.coordinates._selection import least_of_largest
from dpx.mechanism import Coordinates


class TopFractionState(NamedTuple):
    """step: int32."""

    step: jax.Array


def top_fraction(fraction: ScalarOrSchedule) -> Coordinates:
    """Of each example the floor(fraction d) coordinates of largest size, and those equal to the least of them.

    Which ones these are is the example's secret: the noise covers every coordinate all the same. Reads each example's
    gradient some 30 times; not supports_ghost_norms.

    fraction: in (0, 1]; a number or a schedule.
    """
    require_fraction("fraction", fraction, "(0, 1]")

    def encode(grad, state):
        sizes = jax.tree.map(jnp.abs, grad)
        least = least_of_largest(sizes, count(fraction, state.step, grad))
        return jax.tree.map(lambda g, size: jnp.where(size < least, 0.0, g), grad, sizes)

    return Coordinates(
        init=lambda params: TopFractionState(jnp.zeros((), jnp.int32)),
        encode=encode,
        decode=lambda released, state, like: (released, TopFractionState(state.step + 1)),
        name=f"keep the largest {describe(fraction)} of each example",
        check=lambda steps: require_fraction("fraction", fraction, "(0, 1]", steps),
    )
