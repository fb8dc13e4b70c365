"""Correlated noise: later noise cancels part of earlier noise, so that prefix sums of the updates have less noise.

`cost.py` proves the cost, even for the bits. An example enters each sum as in `dp_sgd.py`, so it moves a sum by at
most C (1 + ETA), and it takes part in the steps that the sampling determines. `normalized`, fixed coordinates, and
transforms behind the mechanism change neither.

The memory holds the last releases minus their sums. It depends on raw data, so it is never released. Each element is
two float32 numbers, because rounding to one would move a sum by up to 2^-23 sqrt(numbers) deviations.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent, NoOpDpEvent, SelfComposedDpEvent

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism
from dpx.mechanism.dp_sgd import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, dp_sgd
from dpx.papers.correlated_noise.cost import (
    CorrelatedGaussianDpEvent,
    CyclicBandedDpEvent,
    require_bands_fit_groups,
    rounding_shift_bound,
)
from dpx.papers.correlated_noise.strategy import Strategy, Workload, optimized, sensitivity, shuffled_sensitivity
from dpx.papers.correlated_noise.strategy import lambda_cgd as strategy_of
from dpx.sampling.schemes import FixedOrder, FullBatch, Sampling, ShuffledEpochs
from dpx.sampling.varying import CyclicPoissonSampling
from dpx.states.record import ReleaseState
from dpx.sums.rounding import (
    ETA,
    FloatPair,
    as_float64,
    as_pair,
    float64_constants,
    released_minus_total,
    split_float64,
)
from dpx.values import Tree, described, require_number, require_whole
from dpx.xla.place import enabling_float64, require_ieee_float64


@accepts_budget
def correlated_noise(
    *, strategy: Strategy, clip_norm: float, noise_multiplier: float, sampling: Sampling, key: jax.Array
) -> Mechanism:
    """DP-SGD whose noise is C^-1 z over the steps: BandMF, lambda-CGD, BISR (arXiv:2306.08153, 2601.22334, 2505.12128).

    private gradient = (sum_i min(1, c / |g_i|) g_i + x_t) / B,  x = C^-1 z,  z_t ~ N(0, (noise_multiplier c)^2 I)

    The papers claim that a run in a fixed order costs one Gaussian release with noise multiplier noise_multiplier /
    sensitivity, and cyclic Poisson sampling one Poisson-sampled Gaussian for each round of the groups. Both hold, also
    for the floating-point numbers that are released, because each step adds the fresh z_t to a sum that depends only on
    data and earlier releases. This is the cost that dpx states. With C = I it is `dp_sgd`.

    strategy: C, such as `dpx.strategies.optimized(bands=8, steps=1000)` or `lambda_cgd(correlation=0.9)`.
    clip_norm: c, the norm to which each example's gradient is clipped; a number in the units of the gradient.
    noise_multiplier: the standard deviation of z over the clip norm, a number above 0; or the `dpx.Budget` to which it
        is calibrated. The longer the run and the more often an example takes part, the more noise a budget needs.
    sampling: `dpx.sampling.CyclicPoissonSampling` with at least as many groups as C has bands; or `FixedOrder`,
        `dpx.ShuffledEpochs` or `dpx.FullBatch`. Other random samplings are refused.
    key: a secret scalar key for this run alone. With another strategy, it gives independent noise.

    The state keeps the past noise: 8 bytes for each parameter and each of the last bands - 1 steps. dpx refuses what
    the proof does not cover, or what would keep noise from canceling: schedules of the noise or the clip norm, adaptive
    clip norms, error feedback, coordinates that change during the run, and a projection after the clip.

    Raises ValueError for another sampling, and for numbers outside their domains.
    """
    if not isinstance(strategy, Strategy):
        words = "strategy must be a dpx.strategies.Strategy, such as lambda_cgd(correlation=0.9)"
        raise ValueError(f"{words}, got {described(strategy)}")
    common = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "sampling": sampling, "key": key}
    if strategy == Strategy():
        return dp_sgd(**common)
    for name, value in (("clip_norm", clip_norm), ("noise_multiplier", noise_multiplier)):
        if callable(value):
            raise ValueError(f"{name} must be a number with correlated noise, got a schedule: its cost is not known")
    clip_norm = require_number("clip_norm", clip_norm, minimum=SMALLEST_CLIP_NORM, maximum=LARGEST_CLIP_NORM)
    noise_multiplier = require_number("noise_multiplier", noise_multiplier, minimum=0, exclusive=True)
    _require_sampling(sampling, strategy)
    inner, noise_key = dp_sgd(**common), _noise_key_of_strategy(keys.warn_if_guessable(key), strategy)
    weights = _weights_of_past(strategy)
    return inner.wrap(
        begin=lambda params: _initial_state(params, len(weights)),
        release=_make_correlated_release(inner, strategy, noise_key, noise_multiplier * clip_norm * (1 + ETA)),
        event=functools.partial(_event_of_run, strategy, noise_multiplier, sampling),
        correlated=strategy,
        stages=_stages_of_pipeline(inner.stages, strategy),
    )


def sensitivity_under_sampling(strategy: Strategy, sampling: Sampling, steps: int) -> float:
    """Returns how far one example can move C G in the first steps, in clip norms: see `dpx.strategies`.

    For cyclic sampling, the result is for one coin. Raises ValueError for a sampling that does not say how often, and
    how many steps apart, an example takes part.
    """
    if isinstance(sampling, CyclicPoissonSampling):
        return float(np.linalg.norm(strategy.coefficients))
    if isinstance(sampling, ShuffledEpochs):
        return shuffled_sensitivity(strategy, steps=steps, steps_per_epoch=sampling.steps_per_epoch)
    apart = sampling.steps_per_epoch if isinstance(sampling, FixedOrder) else 1
    return sensitivity(strategy, steps=steps, participations=math.ceil(steps / apart), separation=apart)


def _event_of_run(strategy: Strategy, noise_multiplier: float, sampling: Sampling, steps: int) -> DpEvent:
    if steps == 0:
        return NoOpDpEvent()
    shift = sensitivity_under_sampling(strategy, sampling, steps)
    cyclic = sampling if isinstance(sampling, CyclicPoissonSampling) else None
    more = rounding_shift_bound(
        strategy.column(steps),
        strategy.inverse_column(steps),
        banded=strategy.bands is not None,
        terms=len(_weights_of_past(strategy)),
        steps=len(strategy.coefficients) if cyclic else steps,
        noise_multiplier=noise_multiplier,
    )
    if cyclic:
        noise = 1 / (shift / noise_multiplier + more)
        turn = CyclicBandedDpEvent(noise, cyclic.probability, cyclic.bands, strategy.coefficients)
        turns = math.ceil(steps / cyclic.bands)
        return SelfComposedDpEvent(turn, turns) if turns > 1 else turn
    noise = shift / (shift / noise_multiplier + more)
    return CorrelatedGaussianDpEvent(noise, shift, steps, strategy.coefficients, strategy.inverse_coefficients)


def _make_correlated_release(inner: Mechanism, strategy: Strategy, noise_key: jax.Array, deviation: float) -> Callable:
    """Returns a release that keeps and uses past noise. inner: dp_sgd. deviation: that of the fresh noise."""
    weights, banded = _weights_of_past(strategy), strategy.bands is not None

    def with_past(parts) -> FloatPair:
        sums, state = parts
        with enabling_float64("correlated noise"):
            exact, past = as_float64(as_pair(sums)), _weighted_past_noise(state, weights)
            return split_float64(jax.tree.map(jnp.add, exact, past))

    def release(sums, state, params):
        given = sums[0], state
        if banded:
            released = keys.release(noise_key, state.inner.step, with_past(given), deviation)
            with enabling_float64("correlated noise"):
                noise = released_minus_total(released, as_pair(sums[0]))
        else:
            released, noise = keys.release_and_noise(noise_key, state.inner.step, with_past, given, deviation)
        state = _store_step_noise(state, noise, state.inner.after_release(inner.noise_multiplier))
        updates = jax.tree.map(lambda r: r / inner.sampling.divisor, released)
        return optax.tree.cast_like(updates, params), state

    return release


def _weights_of_past(strategy: Strategy) -> np.ndarray:
    """Returns the weights of past noise: -c_1, -c_2, ... for a banded C, or d_1, d_2, ... for a banded inverse."""
    if strategy.bands is None:
        return np.array(strategy.inverse_coefficients[1:])
    return -np.array(strategy.coefficients[1:])


def _noise_key_of_strategy(key: jax.Array, strategy: Strategy) -> jax.Array:
    """Returns the scalar noise key, which depends on C. Otherwise the releases of one batch under two Cs would differ
    by less noise than their cost assumes, and by none at step 0, where both have z_0."""
    stream = keys.stream(key, "noise")
    digest = hashlib.sha256(repr((strategy.coefficients, strategy.inverse_coefficients)).encode()).digest()
    for word in np.frombuffer(digest, "<u4"):
        stream = keys.fold_in(stream, word)
    return stream


def _require_sampling(sampling: Sampling, strategy: Strategy) -> None:
    if isinstance(sampling, CyclicPoissonSampling):
        require_bands_fit_groups(strategy, sampling)
    elif not isinstance(sampling, FixedOrder | ShuffledEpochs | FullBatch):
        words = "CyclicPoissonSampling, " * bool(strategy.bands) + "FixedOrder, ShuffledEpochs or FullBatch"
        raise ValueError(f"sampling must be {words}, got {described(sampling)}")


def _stages_of_pipeline(stages: tuple[str, ...], strategy: Strategy) -> tuple[str, ...]:
    *before, noise, divide = stages
    if strategy.bands is None:
        weights = strategy.inverse_coefficients
        words = f"correlated over steps by the weights ({_weights_in_words(weights)}) of the last {len(weights)}"
    else:
        words = f"correlated over steps by the inverse of the bands ({_weights_in_words(strategy.coefficients)})"
    return (*before, f"{noise}, {words}", divide)


def _weights_in_words(weights: tuple[float, ...]) -> str:
    return ", ".join(f"{weight:.6g}" for weight in weights[:6]) + (", ..." if len(weights) > 6 else "")


class CorrelatedNoiseState(NamedTuple):
    """The record of the releases, and the noise of the last ones.

    inner: ReleaseState, public.
    unreleased_noise: the noise of the last w releases, two float32 (w, ...) arrays for each array of the encoded
        gradients. Never share it: a release minus its noise is the sum of raw gradients.
    """

    inner: ReleaseState
    unreleased_noise: FloatPair


def _initial_state(params: Tree, steps: int) -> CorrelatedNoiseState:
    """Returns the state before the first release, sharded like the parameters. steps: w, int, at least 1."""
    require_ieee_float64("correlated noise")
    zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
    rings = (jax.tree.map(lambda zero: jnp.stack([zero] * steps), zeros) for _ in range(2))
    return CorrelatedNoiseState(ReleaseState.empty_record(params), FloatPair(*rings))


def _weighted_past_noise(state: CorrelatedNoiseState, weights: np.ndarray) -> Tree:
    """Returns sum_j weights_j noise_(t-1-j), float64, like the gradients. weights: float64 (w,). Needs `enable_x64`."""
    count = len(weights)
    ages = (state.inner.step - 1 - jnp.arange(count, dtype=jnp.int32)) % count
    of_rows = float64_constants(weights)[ages]

    def add(high: jax.Array, low: jax.Array) -> jax.Array:
        # Adds row after row in one loop over the elements: a sum over axis 0 takes seven times as long on a CPU.
        rows = (high[row].astype(jnp.float64) + low[row].astype(jnp.float64) for row in range(count))
        return sum((weight * row for weight, row in zip(of_rows, rows, strict=True)), start=jnp.float64(0))

    return jax.tree.map(add, *state.unreleased_noise)


def _store_step_noise(state: CorrelatedNoiseState, noise: FloatPair, release: ReleaseState) -> CorrelatedNoiseState:
    """Returns the next state. noise: this step's noise, like the gradients. release: the next record."""
    rows = state.unreleased_noise

    def write(row: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(rows, row, state.inner.step % len(rows), 0)

    return CorrelatedNoiseState(
        release, FloatPair(*(jax.tree.map(write, *parts) for parts in zip(noise, rows, strict=True)))
    )


_optimized = functools.lru_cache(64)(optimized)  # a budget builds the mechanism for many noise multipliers


@accepts_budget
def band_mf_sgd(
    *,
    bands: int,
    steps: int,
    momentum: float = 0.0,
    learning_rates: tuple[float, ...] = (),
    clip_norm: float,
    noise_multiplier: float,
    sampling: CyclicPoissonSampling | FixedOrder | ShuffledEpochs | FullBatch,
    key: jax.Array,
) -> Mechanism:
    """BandMF: DP-SGD with the best banded noise, on cyclic Poisson samples (arXiv:2306.08153).

    clip -> sum -> add noise C^-1 z -> divide, for the banded Toeplitz C whose noise moves the parameters least.

    Let z have standard deviation clip_norm * sigma times the norm of a column of C. For cyclic Poisson sampling with b
    groups, the paper claims that every b steps cost one Poisson-sampled Gaussian with noise multiplier sigma. That
    holds, also for the floating-point numbers that are released, and is the cost that dpx states
    (`dpx.mechanisms.correlated_noise`). The paper's C need not be Toeplitz.

    bands: the number of bands of C, from 1 to the sampling's number of groups; at most `steps` are used.
    steps: the length of the run for which C is optimal. The cost includes any further steps too.
    momentum: in [0, 1), that of the optimizer for which C is optimal.
    learning_rates: those for which C is optimal, one non-negative float per step; () if they are constant.
    clip_norm: a number, in the units of the gradient.
    noise_multiplier: the standard deviation of z over the clip norm, above 0, or a `dpx.Budget`. The cost is that of
        noise_multiplier divided by the norm of a column of C.
    sampling: `dpx.sampling.CyclicPoissonSampling` with at least `bands` groups. Or a fixed order, shuffled epochs or
        full batches: the run then costs one Gaussian release, with the sensitivity to all steps of an example.
    key: a secret scalar key for this run alone.

    The state keeps 8 bytes for each parameter and each of the last bands - 1 steps. Raises ValueError for numbers
    outside their domains, and for another sampling.
    """
    workload = Workload(momentum=momentum, learning_rates=tuple(learning_rates))
    steps, bands = require_whole("steps", steps), require_whole("bands", bands)
    strategy = _optimized(bands=min(bands, steps), steps=steps, workload=workload)
    return correlated_noise(
        strategy=strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key
    )


@accepts_budget
def lambda_cgd(
    *, correlation: float, clip_norm: float, noise_multiplier: float, sampling: Sampling, key: jax.Array
) -> Mechanism:
    """lambda-CGD: DP-SGD with noise z_t - correlation * z_(t-1), for a fixed order of examples (arXiv:2601.22334).

    clip -> sum -> add noise -> divide. The noise of a step cancels part of the previous step's noise.

    The paper claims that the whole run costs one Gaussian release with noise multiplier noise_multiplier / s, where s
    is the sensitivity of the strategy matrix over the run. That holds, also for the floating-point numbers that are
    released, and is the cost that dpx states (`dpx.mechanisms.correlated_noise`).

    correlation: lambda, in [0, 1). 0 is DP-SGD. A larger one cancels more noise, but needs a larger noise multiplier.
    clip_norm: a number, in the units of the gradient.
    noise_multiplier: the standard deviation of z over the clip norm, above 0, or a `dpx.Budget`.
    sampling: `dpx.sampling.FixedOrder`, `dpx.ShuffledEpochs` or `dpx.FullBatch`. Random samples are refused, because
        sampling is known to lower the cost only with a banded strategy.
    key: a secret scalar key for this run alone.

    The state keeps 8 bytes for each parameter. Raises ValueError for numbers outside their domains, and for
    another sampling.
    """
    return correlated_noise(
        strategy=strategy_of(correlation=correlation),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        key=key,
    )
