"""Importance: coordinates ranked once by their released gradients; the first of the ranking go on (AdaDPIGU)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx._numbers import ScalarOrSchedule, at, over, require_fraction, require_scalar_or_schedule, require_whole
from dpx._states import find_state
from dpx.coordinates._masks import count, describe, masked
from dpx.coordinates._selection import largest
from dpx.mechanism import Coordinates, Tree


class ImportanceState(NamedTuple):
    """step: int32. score: float32, complete after the warm-up. mask: bool; True moves. inner: of the wrapped."""

    step: jax.Array
    score: Tree
    mask: Tree
    inner: Tree


def importance_mask(
    keep: ScalarOrSchedule,
    *,
    warmup: int,
    inner: Coordinates | None = None,
    noise_floor: ScalarOrSchedule = 0.0,
) -> Coordinates:
    """The gradient as it is for `warmup` steps; then m inner(m g), where m has the floor(keep d) highest scores.

    score_j = mean over the warm-up of |released_j| - sqrt(2/pi) noise_floor.  What was frozen is released as 0.

    The scores are of released gradients: the ranking costs nothing beyond the steps of the warm-up, billed like all
    others. The second mask keeps what `inner` moves away from 0 out of the clip norm.

    keep: in (0, 1]; a schedule of the step unfreezes down the ranking, so it must not fall after the warm-up.
    inner: coordinates of the same shapes as the gradient, such as `standardized`; they start after the warm-up.
    noise_floor: standard deviation of the noise on a released coordinate; it sets the zero of the scores, not their
        order.

    AdaDPIGU, Zhang and Xie 2025, https://arxiv.org/abs/2507.06525. Published, it scores gradients before the noise: a
    release of data that it does not bill.
    """
    require_fraction("keep", keep, "(0, 1]")
    warmup = require_whole("warmup", warmup)
    require_scalar_or_schedule("noise_floor", noise_floor, minimum=0)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
        return ImportanceState(jnp.zeros((), jnp.int32), zeros, ones, inner.init(params) if inner is not None else ())

    def after_warmup(state, before, after):
        return jax.tree.map(lambda b, a: jnp.where(state.step < warmup, b, a), before, after)

    def encode(grad, state):
        if inner is None:
            return masked(grad, state.mask)
        encoded = masked(inner.encode(masked(grad, state.mask), state.inner), state.mask)
        return after_warmup(state, grad, encoded)

    def decode(released, state, like):
        updates, inner_state = masked(released, state.mask), state.inner
        if inner is not None:
            restored, following = inner.decode(updates, state.inner, like)
            updates = after_warmup(state, released, masked(restored, state.mask))
            inner_state = after_warmup(state, state.inner, following)
        floor = math.sqrt(2 / math.pi) * at(noise_floor, state.step)
        scored = jax.tree.map(lambda s, r: s + (jnp.abs(r) - floor) / warmup, state.score, released)
        score = after_warmup(state, scored, state.score)
        step = state.step + 1
        kept = count(keep, step, like)
        changes = (step == warmup) | ((step > warmup) & (kept != count(keep, state.step, like)))
        mask = lax.cond(changes, lambda: largest(score, kept), lambda: state.mask)
        return updates, ImportanceState(step, score, mask, inner_state)

    def check(steps):
        require_fraction("keep", keep, "(0, 1]", steps)
        kept = over(keep, steps)[warmup:]
        for fallen in np.flatnonzero(np.diff(kept) < 0)[:1]:
            raise ValueError(
                f"keep must not fall after the warm-up, got {kept[fallen + 1]:g} after {kept[fallen]:g} "
                f"at step {warmup + fallen + 1}"
            )
        if inner is not None:
            inner.check(steps)

    name = f"after {warmup} steps mask all but the most important {describe(keep)}"
    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=name if inner is None else f"{name}, {inner.name}, mask",
        supports_ghost_norms=inner is None,
        check=check,
    )


def masked_params(params: Tree, state: Tree) -> Tree:
    """`params` with the coordinates that `importance_mask` has frozen at 0: AdaDPIGU's loss is at these.

    state: of the mechanism or of a `dpx.chain` of it. Give the result to `private_grad`'s function in place of the
    parameters, and add the updates to the parameters themselves.
    """
    return masked(params, find_state(state, ImportanceState, "importance mask").mask)
