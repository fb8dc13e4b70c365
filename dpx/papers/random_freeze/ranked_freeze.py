"""Ranked freeze: the coordinates whose released gradient was smallest over the last period are not trained."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx.masks import complement, count, largest, masked
from dpx.mechanism import Coordinates, Tree
from dpx.scalars import ScalarOrSchedule, require_fraction
from dpx.stages import describe_period, describe_share
from dpx.validation import require_whole


class RankedFreezeState(NamedTuple):
    """The mask, and the sums that rank the coordinates for the next mask; both depend on released values only.

    step: int32 (), the number of releases.
    total: float32, like the parameters, the sum of the values released in this period.
    mask: bool, like the parameters; True where the coordinate is trained.
    """

    step: jax.Array
    total: Tree
    mask: Tree


def ranked_freeze(*, freeze_rate: ScalarOrSchedule, every: int) -> Coordinates:
    """The coordinates that moved most in the last `every` steps; the other coordinates are frozen.

    g -> m g, where m has ones at the floor((1 - freeze_rate) d) coordinates of largest |sum of released values|, at
    least 1. Frozen coordinates add up their noise, so they can be trained again later. One noisy release is used for
    the update and for the ranking, so nothing else is billed. In the first period nothing is frozen.

    freeze_rate: in [0, 1); a schedule of the step is read (in float32) at the first step of every period.
    every: int, at least 1, the number of steps of a period.

    Raises ValueError for numbers outside their domains; for a schedule, when the step is billed.
    Source: Zhu and Blaschko 2021, Appendix C, https://arxiv.org/abs/2112.00845v1.
    """
    require_fraction("freeze_rate", freeze_rate, "[0, 1)")
    every = require_whole("every", every)
    share, period = complement(freeze_rate), describe_period(every)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, bool), zeros)
        return RankedFreezeState(jnp.zeros((), jnp.int32), zeros, ones)

    def decode(released, state, like):
        step, total = state.step + 1, jax.tree.map(jnp.add, state.total, released)

        def begin():
            mask = largest(jax.tree.map(jnp.abs, total), count(share, step, like))
            return RankedFreezeState(step, jax.tree.map(jnp.zeros_like, total), mask)

        following = lax.cond(step % every == 0, begin, lambda: RankedFreezeState(step, total, state.mask))
        return masked(released, state.mask), following

    return Coordinates(
        init=init,
        encode=lambda grad, state: masked(grad, state.mask),
        decode=decode,
        name=f"freeze {describe_share(freeze_rate)} of the coordinates, those that moved least, ranked {period}",
        undo="mask the released gradient",
        supports_ghost_norms=True,
        check=lambda steps: require_fraction("freeze_rate", freeze_rate, "[0, 1)", steps),
    )
