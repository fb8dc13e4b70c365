"""Epsilon and delta of a schedule of noise multipliers, as intervals that hold the truth."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.pld.buckets import Buckets, bucketed
from dpx.accounting.pld.losses import Losses, SampledGaussian
from dpx.accounting.profiles import UNBOUNDED, ComposedProfile, GaussianProfile, Profile, profile, unsampled


@dataclass(frozen=True)
class Interval:
    """lower <= truth <= upper. `float()` of it is the upper end: what may be reported as spent."""

    lower: float
    upper: float

    def __float__(self) -> float:
        return self.upper


def schedule_epsilon(
    noise_multipliers: Any,
    sampling_rate: Any,
    *,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = 64,
    grid: float | None = None,
) -> Interval:
    """Epsilon at `delta` of T Gaussian releases on Poisson samples, whose noise changes from step to step.

    noise_multipliers: (T,), noise standard deviation on the sum over the clip norm; a 0 bills infinity.
    sampling_rate: in (0, 1], one or (T,); 1 is no amplification.
    counts: (T,), how often each step is repeated; default once.
    accountant: "pld", which is the tightest, composes privacy loss distributions; "rdp" Renyi divergences at
        dp-accounting's orders, of every distinct step (its interval has no lower end: 0).
    buckets: distinct steps in the composition; more of them narrow the interval like 1/buckets. With no more
        distinct steps than buckets only the grid's error is left.
    grid: spacing of privacy losses; default fine enough for four digits. The upper end is one at any grid.

    Guarantee: the upper end is an upper bound, the lower end a lower bound, to floating point (relative 1e-6).
    """
    delta = checks.delta(delta)
    upper, lower = _ends(noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid)
    return _interval(upper, lower, lambda profile: profile.epsilon(delta))


def schedule_delta(
    noise_multipliers: Any,
    sampling_rate: Any,
    *,
    epsilon: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = 64,
    grid: float | None = None,
) -> Interval:
    """delta at `epsilon`; see `schedule_epsilon`."""
    epsilon = checks.epsilon(epsilon)
    upper, lower = _ends(noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid)
    return _interval(upper, lower, lambda profile: profile.delta(epsilon))


def _ends(
    noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid
) -> tuple[Profile, Profile | None]:
    """The profiles from above and, where there is one, from below."""
    sigmas, rates, repeats = checks.schedule(noise_multipliers, sampling_rate, counts)
    relation, buckets = checks.relation(relation), checks.buckets(buckets)
    if grid is not None and not 0 < grid < math.inf:
        raise ValueError(f"grid must be positive and finite, got {grid}")
    if checks.accountant(accountant) == "rdp":
        steps = Buckets(sigmas, sigmas, rates, rates, repeats)
        return upper_end(steps, accountant="rdp", relation=relation), None
    steps = merged(sigmas, rates, repeats, buckets)
    options: Any = dict(relation=relation, grid=grid)
    return upper_end(steps, accountant=accountant, **options), lower_end(steps, **options)


def _interval(upper: Profile, lower: Profile | None, ask: Callable[[Profile], float]) -> Interval:
    most = float(ask(upper))
    return Interval(0.0 if lower is None else min(most, float(ask(lower))), most)


def merged(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """Buckets of the steps; the unsampled ones are, exactly, one Gaussian of precision sum 1 / sigma^2."""
    used = counts > 0
    sigmas, rates, counts = sigmas[used], rates[used], counts[used]
    plain = (rates == 1) & (sigmas > 0)
    if plain.sum() > 1 or np.any(counts[plain] > 1):
        largest = sigmas[plain].min()
        one = largest / math.sqrt(np.sum(counts[plain] * (largest / sigmas[plain]) ** 2))
        sigmas, rates = np.append(sigmas[~plain], one), np.append(rates[~plain], 1.0)
        counts = np.append(counts[~plain], 1)
    return bucketed(sigmas, rates, counts, buckets)


def _rows(*columns: np.ndarray):
    return zip(*(column.tolist() for column in columns), strict=True)


def losses_of(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, relation: Relation) -> Losses:
    """The steps of a schedule, arrays (T,), as step losses; those that are never taken are left out."""
    found: dict[SampledGaussian, int] = defaultdict(int)
    for sigma, rate, count in _rows(sigmas, rates, counts):
        if count:
            found[SampledGaussian(sigma, rate, relation)] += count
    return found


def rounded(losses: Losses, kind: type, buckets: int) -> Losses:
    """`losses` with those of `kind`, one of the Gaussians, rounded up to at most `buckets` distinct ones."""
    chosen = [loss for loss in losses if isinstance(loss, kind)]
    if not chosen:
        return losses
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in chosen]).T
    group = merged if kind is SampledGaussian else bucketed
    steps = group(sigmas, rates, np.array([losses[loss] for loss in chosen]), buckets)
    found = defaultdict(int, {loss: count for loss, count in losses.items() if not isinstance(loss, kind)})
    for sigma, rate, count in _rows(steps.smallest_noise, steps.largest_rate, steps.counts):
        found[replace(chosen[0], noise_multiplier=sigma, rate=rate)] += count
    return found


def upper_end(
    steps: Buckets,
    *,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    grid: float | None = None,
) -> Profile:
    """An upper bound: noise rounded down, rates up."""
    return profile(losses_of(steps.smallest_noise, steps.largest_rate, steps.counts, relation), accountant, grid=grid)


def lower_end(steps: Buckets, *, relation: Relation = "add_or_remove", grid: float | None = None) -> Profile:
    """Not a bound from above but from below: noise rounded up, rates down. 0 where epsilon is beyond all measure."""
    losses = losses_of(steps.largest_noise, steps.smallest_rate, steps.counts, relation)
    if any(loss.noise_multiplier == 0 for loss in losses):
        return UNBOUNDED
    if any(loss.unbounded for loss in losses):
        return GaussianProfile(0.0)
    return unsampled(losses) or ComposedProfile(losses, grid=grid, side="below")
