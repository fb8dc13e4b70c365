"""Adaptive clipping: a clip norm that follows a quantile of the norms, itself released privately."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx._numbers import ScalarOrSchedule, at, over, require_number
from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism, Tree
from dpx.mechanisms.gaussian import SMALLEST_CLIP_NORM, gaussian_mechanism
from dpx.sampling import Sampling


class AdaptiveClippingState(NamedTuple):
    """clip_norm: float32, of the next step; a function of released values."""

    inner: Tree
    clip_norm: jax.Array


@calibrated
def adaptive_clipping(
    *,
    initial_clip_norm: float,
    quantile: float = 0.5,
    learning_rate: float = 0.2,
    indicator_noise: float,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD whose clip norm C goes after the `quantile` of the norms (Andrew et al. 2021, arXiv:1905.03871).

    C <- C exp(-learning_rate (b - quantile)),  b = 1/2 + (sum_i (1[|g_i| <= C] - 1/2) + N(0, indicator_noise^2)) / B

    Guarantee: a step costs what one Gaussian release of `noise_multiplier` z costs. The gradient has the multiplier
    z_g = (z^-2 - (2 s)^-2)^(-1/2), where s is `indicator_noise`. In units of its own noise, an example moves the
    gradient's sum by at most 1/z_g and the indicator's by 1/(2 s); both together, (1/z_g^2 + 1/(2 s)^2)^(1/2) = 1/z.

    quantile: in (0, 1).
    indicator_noise: s, on the sum of the indicators; the paper's is B / 20.
    noise_multiplier: z, or the `dpx.Budget` that it is calibrated to. Above 0 and below 2 s at every step, or
        ValueError, because the indicator alone would cost more.
    """
    initial_clip_norm = require_number(
        "initial_clip_norm", initial_clip_norm, minimum=SMALLEST_CLIP_NORM, maximum=1 / SMALLEST_CLIP_NORM
    )
    require_number("learning_rate", learning_rate, minimum=0)
    require_number("indicator_noise", indicator_noise, minimum=0, exclusive=True)
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be in (0, 1), got {quantile}")
    if not callable(noise_multiplier):
        _require_room(np.asarray([require_number("noise_multiplier", noise_multiplier, minimum=0)]), indicator_noise)
    inner = gaussian_mechanism(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)

    def shares(state):
        """How much of the inner clip norm of 1 the gradient and the indicator take."""
        indicator = at(noise_multiplier, state.inner.step) / (2 * indicator_noise)
        return jnp.sqrt(1 - indicator**2), indicator

    def weigh(norms, state):
        gradient, indicator = shares(state)
        norm, clip_norm = norms["gradient"], state.clip_norm
        below = jnp.where(norm <= clip_norm, indicator, -indicator)
        return ({"gradient": gradient / jnp.maximum(norm, clip_norm), "indicator": below},)

    def release(sums, state, params):
        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), sums[0])
        released, inner_state = inner.release(sums, state.inner, like)
        gradient, indicator = shares(state)
        updates = jax.tree.map(lambda r: r * (state.clip_norm / gradient), released["gradient"])
        below = 0.5 + released["indicator"] / (2 * indicator)
        clip_norm = state.clip_norm * jnp.exp(-learning_rate * (below - quantile))
        clip_norm = jnp.clip(clip_norm, SMALLEST_CLIP_NORM, 1 / SMALLEST_CLIP_NORM)
        return optax.tree.cast_like(updates, params), AdaptiveClippingState(inner_state, clip_norm)

    def event(steps):
        _require_room(over(noise_multiplier, steps), indicator_noise)
        return inner.event(steps)

    return Mechanism(
        init=lambda params: AdaptiveClippingState(inner.init(params), jnp.float32(initial_clip_norm)),
        encode=lambda grad, state: {"gradient": grad, "indicator": jnp.ones(())},
        norm=lambda encoded: {"gradient": optax.tree.norm(encoded["gradient"]), "indicator": encoded["indicator"]},
        weigh=weigh,
        release=release,
        event=event,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        key=key,
        supports_ghost_norms=False,
        stages=(
            f"clip to a norm that follows the {quantile:g} quantile, {initial_clip_norm:.6g} at step 0",
            f"beside it, count who is below, with noise of {indicator_noise:.6g}",
            *inner.stages[1:],
        ),
    )


def _require_room(multipliers: np.ndarray, indicator_noise: float):
    wrong = np.flatnonzero(~((multipliers > 0) & (multipliers < 2 * indicator_noise * (1 - 2**-20))))  # in float32
    for step in wrong[:1]:
        raise ValueError(
            f"noise_multiplier must be above 0 and below 2 indicator_noise = {2 * indicator_noise:g}, "
            f"got {multipliers[step]:g} at step {step}"
        )
