"""Random freeze: only some coordinates are trained, by a random mask that depends on a key alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpx import keys
from dpx.masks import complement, count, masked, random_mask
from dpx.mechanism import Coordinates, Tree
from dpx.scalars import ScalarOrSchedule, require_fraction
from dpx.stages import describe_period, describe_share
from dpx.validation import require_whole


class RandomFreezeState(NamedTuple):
    """The mask of the next step, and the seed that it is drawn from.

    step: int32 (), the number of releases.
    seed: uint32 (2,), which reveals nothing about the noise.
    kept: int32 (), the number of ones in the mask.
    mask: bool, like the parameters; True where the coordinate is trained.
    """

    step: jax.Array
    seed: jax.Array
    kept: jax.Array
    mask: Tree


def random_freeze(*, freeze_rate: ScalarOrSchedule, every: int, posterior: bool = False, key: jax.Array) -> Coordinates:
    """A random subset of the coordinates, drawn again every `every` steps; the other coordinates are frozen.

    g -> m g for a mask m with exactly floor((1 - freeze_rate) d) ones, but at least 1. It depends on the key and the
    step alone. Frozen coordinates get neither gradient nor noise, and do not count in the norm.

    freeze_rate: in [0, 1). A schedule of the step is read (in float32) at the first step of every period; gradual
        cooling is `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    every: int, at least 1, the number of steps that a mask is kept; an epoch in the paper.
    posterior: clip first and mask only the release, so that frozen coordinates count in the norm.
    key: a secret PRNG key, (); its "random_freeze" stream is used, with the number of the period folded in.

    Raises ValueError for numbers outside their domains; for a schedule, when the step is billed.
    Source: Zhu and Blaschko 2021, https://arxiv.org/abs/2112.00845.
    """
    require_fraction("freeze_rate", freeze_rate, "[0, 1)")
    every = require_whole("every", every)
    share = complement(freeze_rate)
    stream = keys.stream(key, "random_freeze")

    def begin(step, like) -> RandomFreezeState:
        seed = jax.random.key_data(keys.public(keys.fold_in(stream, step // every)))
        kept = count(share, step, like)
        return RandomFreezeState(step, seed, kept, random_mask(seed, kept, like))

    def decode(released, state, like):
        step = state.step + 1
        following = lax.cond(step % every == 0, lambda: begin(step, like), lambda: state._replace(step=step))
        return masked(released, state.mask), following

    frozen = f"{describe_share(freeze_rate)} of the coordinates, drawn at random {describe_period(every)}"
    return Coordinates(
        init=lambda params: begin(jnp.zeros((), jnp.int32), params),
        encode=lambda grad, state: grad if posterior else masked(grad, state.mask),
        decode=decode,
        name=f"draw a mask for after the clip: freeze {frozen}" if posterior else f"freeze {frozen}",
        undo="mask the released gradient",
        supports_ghost_norms=True,
        check=lambda steps: require_fraction("freeze_rate", freeze_rate, "[0, 1)", steps),
    )
