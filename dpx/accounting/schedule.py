"""Epsilon and delta of a schedule of noise multipliers, as intervals that contain the truth."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from dpx.accounting import checks
from dpx.accounting.arithmetic import Implemented, Normals
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import billed
from dpx.accounting.groups import require_nulled
from dpx.accounting.ledger import DISTINCT, from_event
from dpx.accounting.pld.buckets import BUCKETS, Buckets, bucketed_gaussians
from dpx.accounting.pld.losses import Losses, SampledGaussian
from dpx.accounting.profiles import UNBOUNDED, ComposedProfile, GaussianProfile, Profile, profile, unsampled
from dpx.keys.noise import LARGEST_RELEASE, pairs_of
from dpx.sampling.events import composition
from dpx.validation import require_number, require_whole


@dataclass(frozen=True)
class Interval:
    """A lower and an upper bound, floats. `float()` gives the upper one, which is the number to report as spent."""

    lower: float
    upper: float

    def __float__(self) -> float:
        return self.upper


def schedule_epsilon(
    noise_multipliers: Any,
    *,
    sampling_rate: Any,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "zero_out",
    buckets: int = BUCKETS,
    grid: float | None = None,
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> Interval:
    """Epsilon at `delta` of T Gaussian releases on Poisson samples, whose noise changes from step to step.

    noise_multipliers: float (T,), standard deviations of the noise on the sum, in clip norms; a 0 bills infinity.
    sampling_rate: in (0, 1], one float or (T,); 1 is without amplification.
    counts: int (T,), how often each step is repeated; default once. relation: as for `event_epsilon`.
    accountant: "pld", which "tightest" means here, composes privacy loss distributions. "rdp" adds the Renyi
        divergences of every distinct step at dp-accounting's orders; the lower end of its interval is 0.
    buckets: the most distinct steps in the composition. The width of the interval is about proportional to 1 / buckets;
        if no more steps are distinct, only the error of the grid is left. With the default, the upper end is what
        `dpx.epsilon` says of the same run. Fewer are faster, and their upper end is larger.
    grid: spacing of privacy losses; the default is fine enough for four digits. The upper end is a bound for any grid.
    records: int, at least 1, how many records one person owns at most whom epsilon is for, as for `dpx.epsilon`. Above
        1, at most 32 distinct steps are composed, and the lower end counts one of the records at sampled steps.
    numbers: int, at most 2^32, how many numbers a step releases at most. exact_noise: as for `dp_sgd_epsilon`.

    Guarantee: the upper end is an upper bound for a run of dpx, whose noise is not exact, or for noise of real numbers
    with `exact_noise`; the lower end is a lower
    bound for exact noise. Both are up to floating-point errors of the accountant (relative 1e-6).

    Raises ValueError for arguments outside these ranges, for functions or traced values in a schedule, and for several
    records with relation "replace_one".

    Source: connect-the-dots (Doroshenko et al. 2022, https://arxiv.org/abs/2207.04380) and one Fourier transform
    (Koskela, Jalko and Honkela 2020, https://arxiv.org/abs/1906.03049); the proofs are in `pld`.

        >>> dpx.accounting.schedule_epsilon([1.2, 1.0, 0.8], counts=[100, 100, 100], sampling_rate=0.01, delta=1e-5)
        Interval(lower=1.599..., upper=1.600...)
    """
    delta = checks.require_delta(delta)
    numbers = checks.require_numbers(numbers, exact_noise)
    run = noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid, records, numbers
    upper, lower = _profiles(*run)
    return _interval(upper, lower, lambda profile: profile.epsilon(delta))


def schedule_delta(
    noise_multipliers: Any,
    *,
    sampling_rate: Any,
    epsilon: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "zero_out",
    buckets: int = BUCKETS,
    grid: float | None = None,
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> Interval:
    """delta at `epsilon` (at least 0) of such a schedule.

    The arguments, guarantee and errors are as for `schedule_epsilon`.

        >>> dpx.accounting.schedule_delta([1.2, 1.0, 0.8], counts=[100, 100, 100], sampling_rate=0.01, epsilon=2.0)
        Interval(lower=1.55...e-06, upper=1.55...e-06)
    """
    epsilon = checks.require_epsilon(epsilon)
    numbers = checks.require_numbers(numbers, exact_noise)
    run = noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid, records, numbers
    upper, lower = _profiles(*run)
    return _interval(upper, lower, lambda profile: profile.delta(epsilon))


def _profiles(
    noise, sampling_rate, counts, accountant, relation, buckets, grid, records, numbers
) -> tuple[Profile, Profile | None]:
    """The upper profile, and the lower one, or None if the accountant has no lower one."""
    sigmas, rates, repeats = checks.require_schedule(noise, sampling_rate, counts)
    relation, buckets = checks.require_relation(relation), require_whole("buckets", buckets)
    if grid is not None:
        grid = require_number("grid", grid, minimum=0, exclusive=True)
    checks.require_accountant(accountant)
    options: Any = dict(relation=relation, grid=grid)
    if require_whole("records", records) > 1:
        of_several = dict(accountant=accountant, numbers=numbers, **options)
        upper = _of_records(sigmas, rates, repeats, records, buckets, of_several)
        sigmas = np.where(rates == 1, sigmas / records, sigmas)  # one record is less than all of them
    elif accountant == "rdp":
        steps = Buckets(sigmas, sigmas, rates, rates, repeats)
        exact = upper_profile(steps, accountant="rdp", relation=relation)
        upper = implemented(exact, sigmas, repeats, relation, numbers)
    else:
        steps = bucketed_gaussians(sigmas, rates, repeats, buckets)
        exact = upper_profile(steps, accountant=accountant, **options)
        upper = implemented(exact, sigmas, repeats, relation, numbers)
    if accountant == "rdp":
        return upper, None
    return upper, lower_profile(bucketed_gaussians(sigmas, rates, repeats, buckets), **options)


def _of_records(
    sigmas: np.ndarray, rates: np.ndarray, repeats: np.ndarray, records: int, buckets: int, options: Any
) -> Profile:
    """The profile of a run of dpx with these steps, arrays (T,), for a person who owns so many records."""
    require_nulled(records, options["relation"])
    rows = zip(sigmas.tolist(), rates.tolist(), repeats.tolist(), strict=True)
    steps = [(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count) for sigma, rate, count in rows if count]
    return billed(from_event(composition(steps)).of_records(records, distinct=min(buckets, DISTINCT)), **options)


def _interval(upper: Profile, lower: Profile | None, ask: Callable[[Profile], float]) -> Interval:
    most = float(ask(upper))
    return Interval(0.0 if lower is None else min(most, float(ask(lower))), most)


def gaussian_losses(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, relation: Relation) -> Losses:
    """The steps of a schedule, arrays (T,), as step losses; steps of count 0 are left out."""
    losses: dict[SampledGaussian, int] = defaultdict(int)
    for sigma, rate, count in zip(sigmas.tolist(), rates.tolist(), counts.tolist(), strict=True):
        if count:
            losses[SampledGaussian(sigma, rate, relation)] += count
    return losses


def upper_profile(steps: Buckets, *, accountant: Accountant, relation: Relation, grid: float | None = None) -> Profile:
    """An upper bound for exact arithmetic: noise is rounded down, and rates are rounded up."""
    losses = gaussian_losses(steps.smallest_noise, steps.largest_rate, steps.counts, relation)
    return profile(losses, accountant, grid=grid)


def implemented(
    exact: Profile, sigmas: np.ndarray, counts: np.ndarray, relation: Relation, numbers: int
) -> Implemented:
    """The profile of a run of dpx with these steps, as `events.billed` has it; exact: that of exact arithmetic."""
    least, effect = float(sigmas[counts > 0].min(initial=math.inf)), 2 if relation == "replace_one" else 1
    shift, normals = effect / least if least > 0 else math.inf, Normals(pairs=pairs_of(numbers))
    return Implemented(exact, int(counts.sum()), float(counts.sum()), shift, normals)


def lower_profile(steps: Buckets, *, relation: Relation, grid: float | None = None) -> Profile:
    """A lower bound, which is never a bill: noise is rounded up, and rates are rounded down.

    The bound is 0 if a noise multiplier is below 1e-6, but not 0.
    """
    losses = gaussian_losses(steps.largest_noise, steps.smallest_rate, steps.counts, relation)
    if any(loss.noise_multiplier == 0 for loss in losses):
        return UNBOUNDED
    if any(loss.unbounded for loss in losses):
        return GaussianProfile(0.0)
    return unsampled(losses) or ComposedProfile(losses, grid=grid, side="below")
