"""Ranked freeze: the coordinates whose released gradient was smallest over the last period stand still."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx._numbers import ScalarOrSchedule, require_fraction, require_whole
from dpx.coordinates._masks import complement, count, describe, masked
from dpx.coordinates._selection import largest
from dpx.mechanism import Coordinates, Tree


class RankedFreezeState(NamedTuple):
    """step: int32. total: the released values of this period added up, float32. mask: bool; True moves."""

    step: jax.Array
    total: Tree
    mask: Tree


def ranked_freeze(freeze_rate: ScalarOrSchedule, *, every: int) -> Coordinates:
    """g -> m g, where m keeps the floor((1 - freeze_rate) d) coordinates that moved most in the last `every` steps.

    Ranked by |sum of released values|; frozen coordinates add up their noise, and so come back. The one noisy release
    serves the update and the ranking, so nothing else is billed. Nothing is frozen in the first period.

    freeze_rate: in [0, 1); a schedule of the step is read (in float32) at the first step of every period.

    Zhu and Blaschko 2021, Appendix C, https://arxiv.org/abs/2112.00845v1.
    """
    require_fraction("freeze_rate", freeze_rate, "[0, 1)")
    every = require_whole("every", every)
    share = complement(freeze_rate)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return RankedFreezeState(
            jnp.zeros((), jnp.int32), zeros, jax.tree.map(lambda p: jnp.ones(p.shape, bool), zeros)
        )

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
        name=f"freeze {describe(freeze_rate)} by rank",
        supports_ghost_norms=True,
        check=lambda steps: require_fraction("freeze_rate", freeze_rate, "[0, 1)", steps),
    )
