"""Importance mask: coordinates are ranked once by their released gradients, and the first are trained (AdaDPIGU)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.masks import count, largest, masked
from dpx.mechanism import Coordinates, Tree
from dpx.scalars import ScalarOrSchedule, at, over, require_fraction, require_scalar_or_schedule
from dpx.stages import describe_share
from dpx.trees import find_state
from dpx.validation import require_whole


class ImportanceState(NamedTuple):
    """The scores and the mask, which are functions of released values.

    step: int32 (), the number of releases.
    score: float32, like the parameters; complete after the warm-up.
    mask: bool, like the parameters; True where the coordinate is trained.
    inner: state of the wrapped coordinates; () without any.
    """

    step: jax.Array
    score: Tree
    mask: Tree
    inner: Tree


def importance_mask(
    *, keep: ScalarOrSchedule, warmup: int, inner: Coordinates | None = None, noise_floor: ScalarOrSchedule = 0.0
) -> Coordinates:
    """The whole gradient for `warmup` steps; then only its coordinates of highest score, after `inner`.

    g -> m inner(m g) after the warm-up, for a mask m with the floor(keep d) highest scores
    score_j = mean over the warm-up of |released_j| - sqrt(2/pi) noise_floor.  Frozen coordinates are released as 0.

    The ranking costs nothing beyond the steps of the warm-up, which are billed like all others, because it reads
    released gradients. The second mask is needed because `inner` may move frozen coordinates away from 0, where they
    would count in the norm.

    keep: in (0, 1], the share of coordinates that are trained; a schedule of the step unfreezes the next coordinates
        of the ranking, so it must not fall after the warm-up.
    warmup: int, at least 1, the number of steps before the ranking.
    inner: coordinates of the same shapes as the gradient, such as `standardized`; they start after the warm-up.
    noise_floor: at least 0, the standard deviation of the noise on a coordinate. It shifts all scores alike.

    Raises ValueError for numbers outside their domains; for a schedule, when the step is billed.
    Source: AdaDPIGU, Zhang and Xie 2025, https://arxiv.org/abs/2507.06525, which scores gradients without noise.
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

    name, undo = _words(keep, warmup, inner)
    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=name,
        undo=undo,
        supports_ghost_norms=inner is None,
        check=lambda steps: _check(keep, warmup, inner, steps),
    )


def _check(keep: ScalarOrSchedule, warmup: int, inner: Coordinates | None, steps: int):
    """Raises ValueError if `keep` leaves (0, 1] or falls after the warm-up in the first `steps`, or as `inner` does."""
    require_fraction("keep", keep, "(0, 1]", steps)
    kept = over(keep, steps)[warmup:]
    for fallen in np.flatnonzero(np.diff(kept) < 0)[:1]:
        found = f"{kept[fallen + 1]:g} after {kept[fallen]:g} at step {warmup + fallen + 1}"
        raise ValueError(f"keep must not fall after the warm-up, got {found}")
    if inner is not None:
        inner.check(steps)


def _words(keep: ScalarOrSchedule, warmup: int, inner: Coordinates | None) -> tuple[str, str]:
    """`encode` and `decode` in words, for the printed pipeline."""
    name = f"after {warmup} steps keep the most important coordinates: {describe_share(keep)}"
    if inner is None:
        return name, "mask the released gradient"
    undo = f"; {inner.undo}; mask again" if inner.undo else ""
    return f"{name}; {inner.name}; mask again", f"after {warmup} steps mask the released gradient{undo}"


def masked_params(params: Tree, state: Tree) -> Tree:
    """`params` with 0 in the coordinates that `importance_mask` has frozen. AdaDPIGU computes its loss at these.

    state: of the mechanism or of a `dpx.chain` of it. Give the result to `private_updates`'s function in place of the
        parameters, and add the updates to the parameters themselves.

    Raises ValueError for a state without exactly one importance mask.
    """
    return masked(params, find_state(state, ImportanceState, "importance mask").mask)
