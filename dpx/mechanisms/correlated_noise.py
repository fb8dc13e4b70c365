"""Correlated noise: later noise cancels a part of earlier noise, so that prefix sums of the updates have less of it.

Proof of the bill: `dpx/accounting/correlated.py`, for noise of real numbers. An example enters each sum as in
`dp_sgd.py`, so it moves a sum by at most C (1 + ETA), and it takes part in the steps that the sampling states.
`normalized`, `dpx.coordinates.trainable` and transforms behind the mechanism change neither.

The bits. `keys.release` rounds sum + noise to a public grid after the noise, and what is correlated are the normals
before it. For real normals that is post-processing. But the theorem for the program's normals
(`dpx/accounting/arithmetic.py`) needs fresh normals at every step, and past normals are used here again. So correlated
noise has NO proof for the bits of its releases, unlike all other mechanisms of dpx, and the printed pipeline says so.
"""

import math
from typing import Any

import jax
import optax

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.accounting.correlated import CorrelatedGaussianDpEvent
from dpx.mechanism import Mechanism
from dpx.mechanisms.dp_sgd import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, dp_sgd
from dpx.sampling.schemes import FixedOrder, FullBatch, Sampling, ShuffledEpochs
from dpx.strategies.sensitivities import sensitivity, shuffled_sensitivity
from dpx.strategies.strategy import Strategy
from dpx.trees import described
from dpx.validation import require_number
from dpx.xla.totals import ETA

NO_BITS = "the bits of a release: no proof, because past noise is used again; the cost is for noise of real numbers"


@accepts_budget
def correlated_noise(
    *,
    strategy: Strategy,
    clip_norm: float,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD whose noise at step t is sum_j d_j z_(t-j): lambda-CGD, BISR (arXiv:2601.22334, 2505.12128).

    private gradient = (sum_i min(1, C / |g_i|) g_i + noise_multiplier C sum_j d_j z_(t-j)) / B,  z_t ~ N(0, I)

    The papers claim the cost of one Gaussian release of noise multiplier noise_multiplier / sensitivity for the whole
    run, which holds for noise of real numbers, and which dpx bills. It has NO proof for the bits of the releases. Past
    noise is drawn again from the key, so the state has nothing more than that of `dp_sgd`. With C = I it is `dp_sgd`.

    strategy: C, with a banded inverse, such as `dpx.strategies.lambda_cgd(correlation=0.9)`.
    clip_norm: C, the norm to which each example's gradient is clipped; a number in the units of the gradient.
    noise_multiplier: the standard deviation of z over the clip norm, a number above 0; or the `dpx.Budget` that it is
        calibrated to. The longer the run and the more often an example takes part, the more noise a budget needs.
    sampling: `dpx.sampling.FixedOrder`, `dpx.ShuffledEpochs` or `dpx.FullBatch`. Samples that are drawn by chance are
        refused, because no amplification is known for a full C.
    key: a secret PRNG key, (), of this run alone.

    Refused with it, because the proof does not cover them: schedules of the noise and of the clip norm, adaptive clip
    norms, error feedback, coordinates that change during the run, and a projection after the clip.

    Raises ValueError for a strategy without a banded inverse, another sampling, and numbers outside their domain.
    """
    if not isinstance(strategy, Strategy) or strategy.noise_weights is None:
        words = "a dpx.strategies.Strategy with a banded inverse, such as lambda_cgd or inverse_square_root"
        raise ValueError(f"strategy must be {words}, got {described(strategy)}")
    common = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "sampling": sampling, "key": key}
    if strategy == Strategy():
        return dp_sgd(**common)
    for name, value in (("clip_norm", clip_norm), ("noise_multiplier", noise_multiplier)):
        if callable(value):
            raise ValueError(f"{name} must be a number with correlated noise, got a schedule: its bill is not known")
    clip_norm = require_number("clip_norm", clip_norm, minimum=SMALLEST_CLIP_NORM, maximum=LARGEST_CLIP_NORM)
    noise_multiplier = require_number("noise_multiplier", noise_multiplier, minimum=0, exclusive=True)
    moved(strategy, sampling, 1)
    inner = dp_sgd(**common)
    noise_key, weights = keys.stream(keys.secret(key), "noise"), strategy.inverse_coefficients

    def release(sums, state, params):
        deviation = noise_multiplier * clip_norm * (1 + ETA)
        released = keys.release(noise_key, state.step, sums[0], deviation, weights=weights)
        updates = jax.tree.map(lambda r: r / sampling.divisor, released)
        return optax.tree.cast_like(updates, params), state.after(noise_multiplier)

    def event(steps):
        return CorrelatedGaussianDpEvent(noise_multiplier, moved(strategy, sampling, steps), steps, weights)

    return inner.replace(release=release, event=event, correlated=True, stages=_stages(inner.stages, weights))


def moved(strategy: Strategy, sampling: Any, steps: int) -> float:
    """By how much one example moves C G in the first steps, in units of the clip norm: see `dpx.strategies`.

    Raises ValueError for a sampling of which it is not known how often and how many steps apart an example takes part.
    """
    if isinstance(sampling, ShuffledEpochs):
        return shuffled_sensitivity(strategy, steps=steps, steps_per_epoch=sampling.steps_per_epoch)
    if not isinstance(sampling, FixedOrder | FullBatch):
        raise ValueError(f"sampling must be FixedOrder, ShuffledEpochs or FullBatch, got {described(sampling)}")
    apart = sampling.steps_per_epoch if isinstance(sampling, FixedOrder) else 1
    return sensitivity(strategy, steps=steps, participations=math.ceil(steps / apart), separation=apart)


def _stages(stages: tuple[str, ...], weights: tuple[float, ...]) -> tuple[str, ...]:
    shown = ", ".join(f"{weight:.6g}" for weight in weights[:6]) + (", ..." if len(weights) > 6 else "")
    *before, noise, divide = stages
    return (
        *before,
        f"{noise}, correlated over steps by the weights ({shown}) of the last {len(weights)}",
        divide,
        NO_BITS,
    )
