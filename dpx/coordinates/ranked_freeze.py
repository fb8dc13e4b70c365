"""Ranked freeze: the coordinates whose released gradient was smallest over the last period are not trained."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx._numbers import ScalarOrSchedule, require_fraction, require_whole
from dpx._stages import describe_period, describe_share
from dpx.coordinates._masks import complement, count, masked
from dpx.coordinates._selection import largest
from dpx.mechanism import Coordinates, Tree


class RankedFreezeState(NamedTuple):
    """The mask, and what the next one is ranked by; both are functions of released values.

    step: int32 (), the number of releases.
    total: float32, like the parameters, the sum of the values released in this period.
    mask: bool, like the parameters; True where the coordinate is trained.
    """

    step: jax.Array
    total: Tree
    mask: Tree


def ranked_freeze(freeze_rate: ScalarOrSchedule, *, every: int) -> Coordinates:
    """g -> m g, where m keeps the floor((1 - freeze_rate) d) coordinates that moved most in the last `every` steps.

    The rank is by |sum of released values|. Frozen coordinates add up their noise, so they can come back. The one
    noisy release serves the update and the ranking, so nothing else is billed. Nothing is frozen in the first period.

    freeze_rate: in [0, 1); a schedule of the step is read (in float32) at the first step of every period.
    every: the number of steps of a period, at least 1.

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
