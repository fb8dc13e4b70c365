"""Random freeze: a mask of the coordinates that is drawn from a key alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx import keys
from dpx._numbers import ScalarOrSchedule, require_fraction, require_whole
from dpx.coordinates._masks import complement, count, describe, masked, random_mask
from dpx.mechanism import Coordinates, Tree


class RandomFreezeState(NamedTuple):
    """The mask of the next step and what it is drawn from.

    step: int32. seed: uint32 (2,), of the mask alone. kept: int32. mask: like the parameters, bool; True moves.
    """

    step: jax.Array
    seed: jax.Array
    kept: jax.Array
    mask: Tree


def random_freeze(freeze_rate: ScalarOrSchedule, *, every: int, posterior: bool = False, key: jax.Array) -> Coordinates:
    """g -> m g for a mask m with exactly floor((1 - freeze_rate) d) ones, drawn anew every `every` steps.

    The mask is a function of the key and the step alone. Frozen coordinates get neither gradient nor noise, and count
    nothing in the norm.

    freeze_rate: in [0, 1). A schedule of the step is read (in float32) at the first step of every period; gradual
        cooling is `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    every: how many steps a mask is kept; an epoch in the paper.
    posterior: clip, then mask: frozen coordinates do count in the norm.
    key: its "random_freeze" stream is used, with the number of the period folded in.

    Random freeze, Zhu and Blaschko 2021, https://arxiv.org/abs/2112.00845.
    """
    require_fraction("freeze_rate", freeze_rate, "[0, 1)")
    every = require_whole("every", every)
    share = complement(freeze_rate)
    stream = keys.stream(key, "random_freeze")

    def begin(step, like) -> RandomFreezeState:
        seed = jax.random.bits(jax.random.fold_in(stream, step // every), (2,), jnp.uint32)
        kept = count(share, step, like)
        return RandomFreezeState(step, seed, kept, random_mask(seed, kept, like))

    def decode(released, state, like):
        step = state.step + 1
        following = lax.cond(step % every == 0, lambda: begin(step, like), lambda: state._replace(step=step))
        return masked(released, state.mask), following

    return Coordinates(
        init=lambda params: begin(jnp.zeros((), jnp.int32), params),
        encode=lambda grad, state: grad if posterior else masked(grad, state.mask),
        decode=decode,
        name=f"freeze {describe(freeze_rate)} at random{' after the clip' if posterior else ''}",
        supports_ghost_norms=True,
        check=lambda steps: require_fraction("freeze_rate", freeze_rate, "[0, 1)", steps),
    )
