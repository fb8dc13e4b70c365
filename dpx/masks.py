"""Masks of coordinates: exactly so many of the whole tree, and random freeze, which draws them from a key."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpx import keys, schedules
from dpx.mechanism import Coordinates, Tree
from dpx.schedules import ScalarOrSchedule, require_whole
from dpx.selection import largest


class RandomFreezeState(NamedTuple):
    """The mask of the next step and what it is drawn from.

    step: int32. seed: uint32 (2,), of the mask alone. kept: int32. mask: like the parameters, bool; True moves.
    """

    step: jax.Array
    seed: jax.Array
    kept: jax.Array
    mask: Tree


def random_freeze(
    freeze_rate: ScalarOrSchedule, *, period: int, posterior: bool = False, key: jax.Array
) -> Coordinates:
    """g -> m g for a mask m with exactly floor((1 - freeze_rate) d) ones, drawn anew every `period` steps.

    The mask is a function of the key and the step alone. Frozen coordinates get neither gradient nor noise, and count
    nothing in the norm.

    freeze_rate: in [0, 1). A schedule of the step is read (in float32) at the first step of every period; gradual
        cooling is `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    period: how many steps a mask is kept; an epoch in the paper.
    posterior: clip, then mask: frozen coordinates do count in the norm.
    key: its "random_freeze" stream is used, with the number of the period folded in.

    Random freeze, Zhu and Blaschko 2021, https://arxiv.org/abs/2112.00845.
    """
    require_fraction("freeze_rate", freeze_rate, "[0, 1)")
    period = require_whole("period", period)
    share = complement(freeze_rate)
    stream = keys.stream(key, "random_freeze")

    def begin(step, like) -> RandomFreezeState:
        seed = jax.random.bits(jax.random.fold_in(stream, step // period), (2,), jnp.uint32)
        kept = count(share, step, like)
        return RandomFreezeState(step, seed, kept, random_mask(seed, kept, like))

    def decode(released, state, like):
        step = state.step + 1
        following = lax.cond(step % period == 0, lambda: begin(step, like), lambda: state._replace(step=step))
        return masked(released, state.mask), following

    return Coordinates(
        init=lambda params: begin(jnp.zeros((), jnp.int32), params),
        encode=lambda grad, state: grad if posterior else masked(grad, state.mask),
        decode=decode,
        name=f"freeze {describe(freeze_rate)} at random{' after the clip' if posterior else ''}",
        elementwise=True,
        check=lambda steps: require_fraction("freeze_rate", freeze_rate, "[0, 1)", steps),
    )


def random_mask(seed: jax.Array, kept: jax.Array, like: Tree) -> Tree:
    """A uniformly drawn mask with `kept` ones, bool, in the shapes of `like`."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return largest(optax.tree.random_like(key, like, jax.random.bits, jnp.uint32), kept)


def masked(tree: Tree, mask: Tree) -> Tree:
    """`tree` times `mask`: what is not finite stays so, and its example counts as nothing."""
    return jax.tree.map(lambda x, m: x * m.astype(x.dtype), tree, mask)


def count(share: ScalarOrSchedule, step: jax.Array, like: Tree) -> jax.Array:
    """floor(share d) of the d coordinates, at least 1, int32; not one less because a share like 0.1 is rounded."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    if callable(share):
        number = jnp.floor((schedules.at(share, step) + 1e-7) * size).astype(jnp.int32)
    else:
        number = jnp.int32(math.floor((share + 1e-12) * size))
    return jnp.clip(number, 1, size)


def complement(rate: ScalarOrSchedule) -> ScalarOrSchedule:
    return (lambda step: 1 - schedules.at(rate, step)) if callable(rate) else 1 - rate


def describe(share: ScalarOrSchedule) -> str:
    return "a scheduled share" if callable(share) else f"{share:.4g}"


def require_fraction(name: str, value: ScalarOrSchedule, interval: Literal["(0, 1]", "[0, 1)"], steps: int = 0):
    """ValueError if the number, or a schedule at one of the first `steps`, is not in the interval."""
    if callable(value):
        numbers = schedules.over(value, steps)
    else:
        numbers = np.asarray([schedules.require_number(name, value, minimum=0)])
    inside = (numbers > 0) & (numbers <= 1) if interval == "(0, 1]" else (numbers >= 0) & (numbers < 1)
    for step in np.flatnonzero(~inside)[:1]:
        raise ValueError(
            f"{name} must be in {interval}, got {numbers[step]:g}{f' at step {step}' if callable(value) else ''}"
        )
