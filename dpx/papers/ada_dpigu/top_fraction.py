"""Top fraction: only the largest coordinates of each example's gradient, which differ from example to example."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpx.masks import count, least_of_largest
from dpx.mechanism import Coordinates
from dpx.scalars import ScalarOrSchedule, require_fraction
from dpx.stages import describe_share


class TopFractionState(NamedTuple):
    """step: int32 (), the number of releases. A scheduled fraction is read at this step."""

    step: jax.Array


def top_fraction(*, fraction: ScalarOrSchedule) -> Coordinates:
    """The largest coordinates of each example; the other coordinates of the example become 0.

    Keeps the floor(fraction d) coordinates of largest absolute value, at least 1, and all that equal the least of them.
    The selection depends on the raw example, so the noise covers every coordinate. `encode` reads each example's
    gradient about 30 times, and `private_updates` computes per-example gradients instead of ghost norms.

    fraction: in (0, 1]; a number or a schedule of the step.
    Raises ValueError for a number outside (0, 1]; for a schedule, when the step is billed.
    `dpx.methods.ada_dpigu` uses it.
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
        name=f"keep the largest coordinates of each example: {describe_share(fraction)}",
        check=lambda steps: require_fraction("fraction", fraction, "(0, 1]", steps),
    )
