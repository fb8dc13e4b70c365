"""Adaptive clipping: a clip norm that follows a privately estimated quantile of the gradient norms.

Besides its clipped gradient, every example contributes an indicator: 1/2 if its norm is at most the clip norm, and -1/2
otherwise. One inner Gaussian mechanism of clip norm 1 releases both. Let z be its noise multiplier, and s the standard
deviation of the noise on the sum of the indicators. Inside the mechanism, the indicator has norm z / (2 s), and the
gradient has norm at most sqrt(1 - (z / (2 s))^2).

Proof of the cost: let z_g = (z^-2 - (2 s)^-2)^(-1/2) be the noise multiplier of the gradient. In units of their noise,
an example moves the sum of gradients by at most 1/z_g, and the sum of indicators by 1/(2 s). Together that is
(1/z_g^2 + 1/(2 s)^2)^(1/2) = 1/z, as in one Gaussian release of noise multiplier z.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx.accounting.budget import accepts_budget
from dpx.mechanism.base import SUM, Mechanism, describe_number_or_schedule
from dpx.mechanism.dp_sgd import SMALLEST_CLIP_NORM, dp_sgd, tree_norm
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule, value_at, values_over
from dpx.sums.rounding import as_pair
from dpx.values import Tree, float32_like, require_number, require_open_fraction

SMALLEST, LARGEST = SMALLEST_CLIP_NORM, 1 / SMALLEST_CLIP_NORM  # bounds on the moving clip norm


class AdaptiveClippingState(NamedTuple):
    """The clip norm, which depends on released values only, and the state of the inner mechanism.

    inner: ReleaseState of the inner Gaussian mechanism.
    clip_norm: float32 (), the clip norm of the next step.
    """

    inner: Tree
    clip_norm: jax.Array


@accepts_budget
def adaptive_clipping(
    *,
    initial_clip_norm: float,
    quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    indicator_noise: float,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD with a clip norm C that tracks the `quantile` of the norms (Andrew et al. 2021, arXiv:1905.03871).

    C <- C exp(-clip_learning_rate (b - quantile)),  b = 1/2 + (sum_i (1[|g_i| <= C] - 1/2) + N(0, s^2)) / B

    Guarantee: a step costs as much as one Gaussian release of `noise_multiplier` z (the module docstring proves it).

    initial_clip_norm: C at step 0, in [2^-40, 2^40], the range that C never leaves.
    quantile: in (0, 1), the share of norms that should be at most C. clip_learning_rate: at least 0, how fast C moves.
    indicator_noise: s > 0, the standard deviation of the noise on the sum of indicators 1[...]; B / 20 in the paper.
    noise_multiplier: z, or the `dpx.Budget` to which it is calibrated. It must be above 0 and below 2 s at every step,
        because otherwise the indicator alone would cost more.
    sampling: draws batches of expected size B, such as `dpx.PoissonSampling`. key: a secret scalar key for one run.
    Raises ValueError for an argument outside its domain; a schedule is checked at step 0, and again when its cost is
    computed.
    """
    initial_clip_norm = require_number("initial_clip_norm", initial_clip_norm, minimum=SMALLEST, maximum=LARGEST)
    # Floats, because negating or doubling a small numpy integer can overflow.
    clip_learning_rate = require_number("clip_learning_rate", clip_learning_rate, minimum=0)
    indicator_noise = require_number("indicator_noise", indicator_noise, minimum=0, exclusive=True)
    quantile = require_open_fraction("quantile", quantile)
    inner = dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    _require_gradient_share(values_over(inner.noise_multiplier, 1), indicator_noise)
    shares = functools.partial(_clip_norm_shares, inner.noise_multiplier, indicator_noise)

    def encoded_gradient(grad):
        return {"gradient": grad, "indicator": jnp.ones(())}

    def clip_factors(norms, state):
        gradient, indicator = shares(state.inner.step)
        norm, clip_norm = norms["gradient"], state.clip_norm
        below = jnp.where(norm <= clip_norm, indicator, -indicator)
        return ({"gradient": gradient / jnp.maximum(norm, clip_norm), "indicator": below},)

    def release(sums, state, params):
        released, inner_state = inner.release(sums, state.inner, float32_like(as_pair(sums[0]).high))
        gradient, indicator = shares(state.inner.step)
        updates = jax.tree.map(lambda r: r * (state.clip_norm / gradient), released["gradient"])
        below = 0.5 + released["indicator"] / (2 * indicator)
        clip_norm = jnp.clip(state.clip_norm * jnp.exp(-clip_learning_rate * (below - quantile)), SMALLEST, LARGEST)
        return optax.tree.cast_like(updates, params), AdaptiveClippingState(inner_state, clip_norm)

    def event(steps):
        _require_gradient_share(values_over(inner.noise_multiplier, steps), indicator_noise)
        return inner.event(steps)

    def bound(state):
        return dict(zip(("gradient", "indicator"), shares(state.inner.step), strict=True))

    return inner.replace(
        begin=lambda params: AdaptiveClippingState(
            inner.begin(encoded_gradient(params)), jnp.float32(initial_clip_norm)
        ),
        encode=lambda grad, state: encoded_gradient(grad),
        norm=lambda encoded_gradient: {
            "gradient": tree_norm(encoded_gradient["gradient"]),
            "indicator": encoded_gradient["indicator"],
        },
        clip_factors=clip_factors,
        bound=bound,
        release=release,
        event=event,
        supports_ghost_norms=False,
        stages=_stages_of_pipeline(initial_clip_norm, quantile, inner, indicator_noise),
    )


def _clip_norm_shares(
    noise_multiplier: ScalarOrSchedule, indicator_noise: float, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Splits the inner clip norm of 1: returns the gradient's share and the indicator's, as float32 scalars."""
    indicator = value_at(noise_multiplier, step) / (2 * indicator_noise)
    return jnp.sqrt(1 - indicator**2), indicator


def _require_gradient_share(multipliers: np.ndarray, indicator_noise: float):
    """Raises ValueError if, at some noise multiplier, the gradient's share of the norm is 0 in float32."""
    wrong = np.flatnonzero(~((multipliers > 0) & (multipliers < 2 * indicator_noise * (1 - 2**-20))))
    for step in wrong[:1]:
        domain = f"above 0 and below 2 indicator_noise = {2 * indicator_noise:g}"
        raise ValueError(f"noise_multiplier must be {domain}, got {multipliers[step]:g} at step {step}")


def _stages_of_pipeline(clip_norm: float, quantile: float, inner: Mechanism, indicator_noise: float) -> tuple[str, ...]:
    def gradient_noise_multiplier(step):
        share, _ = _clip_norm_shares(inner.noise_multiplier, indicator_noise, step)
        return value_at(inner.noise_multiplier, step) / share

    scheduled = callable(inner.noise_multiplier)
    multiplier = describe_number_or_schedule(
        gradient_noise_multiplier if scheduled else float(values_over(gradient_noise_multiplier, 1)[0])
    )
    return (
        f"clip to a norm that follows the {quantile:g} quantile of the norms, {clip_norm:.6g} at step 0",
        SUM,
        f"add noise of standard deviation {multiplier} x clip norm",
        "release the noisy count of examples below the clip norm, "
        f"with noise of standard deviation {indicator_noise:.6g}",
        f"divide by the expected batch size {inner.sampling.divisor}",
        "move the clip norm by the noisy count",
    )
