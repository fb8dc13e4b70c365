"""Error feedback: what clipping takes away is remembered and fed back, bounded, into later releases."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent, NoOpDpEvent

from dpx import keys
from dpx._numbers import require_number, require_whole
from dpx._ordering import compute_after
from dpx.accounting.budget import calibrated
from dpx.accounting.error_feedback.event import SAMPLINGS, ErrorFeedbackDpEvent
from dpx.mechanism import Mechanism, Tree
from dpx.mechanisms.gaussian import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from dpx.release_state import ReleaseState
from dpx.sampling import Sampling

_TINY = 1e-30


class ErrorFeedbackState(NamedTuple):
    """unreleased_error: e, like the encoded gradients, float32. A function of raw data: never share it."""

    release: ReleaseState
    unreleased_error: Tree


@calibrated
def error_feedback_mechanism(
    *,
    clip_norm: float,
    feedback_norm: float,
    outer_clip_norm: float,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
    reset_every: int | None = None,
    stability: float | None = None,
) -> Mechanism:
    """private gradient = v + N(0, (nu C1 / B)^2 I),  v = (1/B) sum_i clip(g_i, C1) + clip(e, C2)
    next e = e + (1/B) sum_i clip(g_i, Cmax) - v,  with the v before noise; e starts at 0 and is never released.

    Guarantee: the whole run is one event (`dpx.accounting.error_feedback`): given the released values, a participation
    of one example moves v by at most C1 / B and e by (Cmax - C1) / B, and a moved e moves later v. The float32 rounding
    of e, 2^-24 of its norm a step while that exceeds C2 and none otherwise, is not billed.

    clip_norm: C1, on an example's gradient. outer_clip_norm: Cmax, in [C1, 1e15]; inf is DiceSGD as published, whose
        only bill is the trivial one: 2 C2 at every step, never amplified.
    feedback_norm: C2, on the scale of the MEAN gradient: C2 >= C1 removes the clipping bias, and C1 / B is the most
        that one example moves the mean.
    noise_multiplier: nu, the standard deviation of the noise on the sum, divided by C1, as in DP-SGD; a number, or the
        `dpx.Budget` that it is calibrated to. 0 bills infinity.
    reset_every: forget e after so many steps, which is billed less; None never does.
    stability: normalize instead of clipping, DiceSGD's automatic form: C1 g / (|g| + stability) and C2 e / (|e| + C2).
        (The paper's e / |e| leaps near 0 and has only the trivial bill; this one is non-expansive, as clipping is.)
    """
    clip_norm = _rounded("clip_norm", clip_norm, SMALLEST_CLIP_NORM)
    feedback_norm = _rounded("feedback_norm", feedback_norm, SMALLEST_CLIP_NORM)
    noise_multiplier = _rounded("noise_multiplier", noise_multiplier, 0)
    bounded = not (isinstance(outer_clip_norm, float) and outer_clip_norm == math.inf)
    outer = _rounded("outer_clip_norm", outer_clip_norm, clip_norm) if bounded else LARGEST_CLIP_NORM
    reset_every = None if reset_every is None else require_whole("reset_every", reset_every)
    if not isinstance(sampling, SAMPLINGS):
        raise ValueError(f"sampling must be one of {[s.__name__ for s in SAMPLINGS]}, got {sampling!r}")
    noise_key = keys.stream(key, "noise")
    error_shift = outer - clip_norm  # the most that one example moves the sum that is withheld
    if stability is not None:
        stability = _rounded("stability", stability, 1e-6)
        bend = (clip_norm**0.5 - min(stability, clip_norm) ** 0.5) ** 2
        error_shift = max(outer - clip_norm * outer / (outer + stability), bend)

    def released_norm(norm):
        """Of an example's gradient, what remains of its norm in the release."""
        return jnp.minimum(norm, clip_norm) if stability is None else clip_norm * norm / (norm + stability)

    def fed_back_norm(norm):
        if stability is None:
            return jnp.minimum(norm, feedback_norm)
        return feedback_norm * (norm / (norm + feedback_norm))

    def weigh(norm, state):
        del state
        norm = jnp.maximum(norm, _TINY)
        released = released_norm(norm)
        return released / norm, (jnp.minimum(norm, outer) - released) / norm

    def release(sums, state, params):
        step, error = state.release.step, state.unreleased_error
        norm = jnp.maximum(optax.tree.norm(error), _TINY)
        remembered = jnp.minimum(norm, LARGEST_CLIP_NORM)
        fed_back = fed_back_norm(remembered)
        scale = 1 / norm if reset_every is None else jnp.where(step % reset_every == 0, 0, 1 / norm)
        noise = keys.normal_like(jax.random.fold_in(noise_key, step), sums[0])

        def one(kept, error, noise):
            return (kept + noise_multiplier * clip_norm * noise) / sampling.divisor + (scale * fed_back) * error

        def remainder(withheld, error):
            return withheld / sampling.divisor + (scale * (remembered - fed_back)) * error

        updates = jax.tree.map(one, sums[0], error, noise)
        error = jax.tree.map(remainder, sums[1], compute_after(updates, error))  # in the place of the old one
        return optax.tree.cast_like(updates, params), ErrorFeedbackState(state.release.after(noise_multiplier), error)

    def event(steps) -> DpEvent:
        if steps == 0:
            return NoOpDpEvent()
        return ErrorFeedbackDpEvent(
            noise_multiplier=noise_multiplier,
            error_shift=error_shift / clip_norm if bounded else math.inf,
            feedback_shift=2 * feedback_norm * float(sampling.divisor) / clip_norm,
            steps=int(steps),
            reset_every=reset_every,
            sampling=sampling,
        )

    how = "clip" if stability is None else f"normalize (stability {stability:g})"
    return Mechanism(
        init=lambda params: ErrorFeedbackState(ReleaseState.empty(), optax.tree.zeros_like(params, dtype=jnp.float32)),
        encode=lambda grad, state: grad,
        norm=optax.tree.norm,
        weigh=weigh,
        release=release,
        event=event,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        key=key,
        supports_ghost_norms=True,
        stages=(
            f"{how} to norm {clip_norm:.6g}; keep what that takes away, up to norm {outer_clip_norm:.6g}, as the error",
            f"sum, divide by the expected batch size {sampling.divisor}",
            f"feed back the error, {how} to norm {feedback_norm:.6g}"
            + ("" if reset_every is None else f"; forget it every {reset_every} steps"),
            f"add noise of {noise_multiplier:.6g} x clip norm / batch size",
        ),
    )


def _rounded(name: str, value: float, minimum: float) -> float:
    """The float32 that the mechanism runs with, so that it is the one that is billed."""
    rounded = float(np.float32(require_number(name, value, minimum=0)))
    return require_number(name, rounded, minimum=minimum, maximum=LARGEST_CLIP_NORM)
