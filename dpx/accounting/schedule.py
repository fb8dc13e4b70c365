"""Epsilon and delta without a mechanism: intervals for a schedule of noise multipliers, and bounds for DP-SGD runs."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from dpx.accounting import checks
from dpx.accounting.arithmetic import NormalSamplerError, RunProfile, normal_sampler_error
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.cost import event_for_unit, profile_of_run
from dpx.accounting.flat_event import DISTINCT, from_event
from dpx.accounting.groups import require_zero_out
from dpx.accounting.loss import in_deviations
from dpx.accounting.pld.losses import BUCKETS, Losses, SampledGaussian, StepBuckets, bucketed_gaussians
from dpx.accounting.profiles import (
    UNBOUNDED,
    ComposedProfile,
    GaussianProfile,
    Profile,
    loss_profile,
    unsampled_profile,
)
from dpx.keys.noise import LARGEST_RELEASE
from dpx.sampling.schemes import FixedSizeSampling, FullBatch, Sampling, ShuffledEpochs, compose_events
from dpx.sampling.varying import PoissonSampling
from dpx.schedules import values_over
from dpx.values import described, explain_misuse, require_number, require_whole

SamplingName = Literal["poisson", "fixed", "shuffled"]
_RECORDS: dict[str, Any] = {"poisson": PoissonSampling, "fixed": FixedSizeSampling, "shuffled": ShuffledEpochs}


@dataclass(frozen=True)
class Interval:
    """A lower and an upper bound, floats. `float()` gives the upper one, which is the one to report as spent."""

    lower: float
    upper: float

    def __float__(self) -> float:
        return self.upper


@explain_misuse
def schedule_epsilon(
    noise_multipliers: Any,
    *,
    sampling_rate: Any,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "zero_out",
    buckets: int = BUCKETS,
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> Interval:
    """Bounds epsilon at `delta` for T Gaussian releases on Poisson samples, whose noise may change from step to step.

    noise_multipliers: float (T,), standard deviations of the noise on the sum, in clip norms; a 0 costs infinity.
    sampling_rate: in (0, 1], one float or (T,); at 1, sampling does not amplify privacy.
    counts: int (T,), how often each step is repeated; once by default. relation: as for `event_epsilon`.
    accountant: "pld", which is also "tightest" here, composes privacy loss distributions. "rdp" adds the Renyi
        divergences of every distinct step at dp-accounting's orders; the lower end of its interval is 0.
    buckets: the largest number of distinct steps that are composed. The width of the interval is about proportional to
        1 / buckets; if no more steps than buckets are distinct, only rounding in the fifth digit is left. With the
        default, the upper end equals `dpx.epsilon` of the same run. Fewer are faster, but raise the upper end.
    records: int, at least 1, the most records that the protected person owns, as for `dpx.epsilon`. Above 1, at most 32
        distinct steps are composed, and at a sampling rate below 1 the lower end is for one record.
    numbers: int, at most 2^32, the most elements that a step releases. exact_noise: as for `dp_sgd_epsilon`.

    Guarantee: the upper end is an upper bound for the noise that dpx adds, or with `exact_noise` for real-valued noise;
    the lower end is a lower bound for real-valued noise. Both hold up to floating-point errors of the accountant
    (relative 1e-6).

    Raises ValueError for arguments outside these ranges, for functions or traced values in a schedule, and for several
    records with relation "replace_one".

    Source: connect-the-dots (Doroshenko et al. 2022, https://arxiv.org/abs/2207.04380) and one Fourier transform
    (Koskela, Jalko and Honkela 2020, https://arxiv.org/abs/1906.03049); the proofs are in `pld`.

        >>> dpx.accounting.schedule_epsilon([1.2, 1.0, 0.8], counts=[100, 100, 100], sampling_rate=0.01, delta=1e-5)
        Interval(lower=1.599..., upper=1.600...)
    """
    delta = checks.require_delta(delta)
    numbers = checks.numbers_per_release(numbers, exact_noise)
    run = noise_multipliers, sampling_rate, counts, accountant, relation, buckets, records, numbers
    upper, lower = _upper_and_lower_profiles(*run)
    return _interval_of_profiles(upper, lower, lambda profile: profile.epsilon(delta))


@explain_misuse
def schedule_delta(
    noise_multipliers: Any,
    *,
    sampling_rate: Any,
    epsilon: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "zero_out",
    buckets: int = BUCKETS,
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> Interval:
    """Bounds delta at `epsilon` (at least 0) for a schedule of noise multipliers.

    The guarantee and the other arguments and errors are as for `schedule_epsilon`.

        >>> dpx.accounting.schedule_delta([1.2, 1.0, 0.8], counts=[100, 100, 100], sampling_rate=0.01, epsilon=2.0)
        Interval(lower=1.55...e-06, upper=1.55...e-06)
    """
    epsilon = checks.require_epsilon(epsilon)
    numbers = checks.numbers_per_release(numbers, exact_noise)
    run = noise_multipliers, sampling_rate, counts, accountant, relation, buckets, records, numbers
    upper, lower = _upper_and_lower_profiles(*run)
    return _interval_of_profiles(upper, lower, lambda profile: profile.delta(epsilon))


def _upper_and_lower_profiles(
    noise, sampling_rate, counts, accountant, relation, buckets, records, numbers
) -> tuple[Profile, Profile | None]:
    """The upper profile, and the lower one or None if the accountant has none."""
    sigmas, rates, repeats = checks.require_schedule(noise, sampling_rate, counts)
    relation, buckets = checks.require_relation(relation), require_whole("buckets", buckets)
    checks.require_accountant(accountant)
    if (records := require_whole("records", records)) > 1:
        of_several = dict(accountant=accountant, numbers=numbers, relation=relation)
        upper = _profile_for_several_records(sigmas, rates, repeats, records, buckets, of_several)
        sigmas = np.where(rates == 1, sigmas / records, sigmas)  # at sampled steps, one record costs less than all
    else:
        whole = StepBuckets(sigmas, sigmas, rates, rates, repeats)
        steps = whole if accountant == "rdp" else bucketed_gaussians(sigmas, rates, repeats, buckets)
        exact = upper_profile(steps, accountant=accountant, relation=relation)
        upper = implemented_profile(exact, sigmas, repeats, relation, numbers)
    if accountant == "rdp":
        return upper, None
    return upper, lower_profile(bucketed_gaussians(sigmas, rates, repeats, buckets), relation=relation)


def _profile_for_several_records(
    sigmas: np.ndarray, rates: np.ndarray, repeats: np.ndarray, records: int, buckets: int, options: Any
) -> Profile:
    """The profile of a run of dpx with these steps, arrays (T,), for a person who owns `records` records."""
    require_zero_out(records, options["relation"])
    rows = zip(sigmas.tolist(), rates.tolist(), repeats.tolist(), strict=True)
    steps = [(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count) for sigma, rate, count in rows if count]
    return profile_of_run(
        from_event(compose_events(steps)).of_records(records, distinct=min(buckets, DISTINCT)), **options
    )


def _interval_of_profiles(upper: Profile, lower: Profile | None, ask: Callable[[Profile], float]) -> Interval:
    most = float(ask(upper))
    return Interval(0.0 if lower is None else min(most, float(ask(lower))), most)


def schedule_losses(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, relation: Relation) -> Losses:
    """Converts the steps of a schedule, arrays (T,), to step losses; leaves out steps of count 0."""
    losses: dict[SampledGaussian, int] = defaultdict(int)
    for sigma, rate, count in zip(sigmas.tolist(), rates.tolist(), counts.tolist(), strict=True):
        if count:
            losses[SampledGaussian(sigma, rate, relation)] += count
    return losses


def upper_profile(steps: StepBuckets, *, accountant: Accountant, relation: Relation) -> Profile:
    """An upper bound for exact arithmetic: rounds noise down and rates up."""
    return loss_profile(schedule_losses(steps.smallest_noise, steps.largest_rate, steps.counts, relation), accountant)


def implemented_profile(
    exact: Profile, sigmas: np.ndarray, counts: np.ndarray, relation: Relation, numbers: int | NormalSamplerError
) -> RunProfile:
    """The profile of a run of dpx with these steps, as by `cost.profile_of_run`. exact: that of exact arithmetic."""
    shift = in_deviations(2 if relation == "replace_one" else 1, float(sigmas[counts > 0].min(initial=math.inf)))
    return RunProfile(exact, int(counts.sum()), float(counts.sum()), shift, normal_sampler_error(numbers))


def lower_profile(steps: StepBuckets, *, relation: Relation) -> Profile:
    """A lower bound, never to be reported as a cost: rounds noise up and rates down.

    The bound is 0 if a noise multiplier is below 1e-6, but not 0.
    """
    losses = schedule_losses(steps.largest_noise, steps.smallest_rate, steps.counts, relation)
    if any(loss.noise_multiplier == 0 for loss in losses):
        return UNBOUNDED
    if any(loss.is_noiseless for loss in losses):
        return GaussianProfile(0.0)
    return unsampled_profile(losses) or ComposedProfile(losses, side="below")


@explain_misuse
def dp_sgd_epsilon(
    *,
    examples: int,
    batch_size: float,
    noise_multiplier: Any,
    delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: SamplingName = "poisson",
    accountant: Accountant = "tightest",
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> float:
    """Returns an upper bound on epsilon at `delta` for a run of DP-SGD, planned or finished, in dpx or another library.

        >>> run = {"examples": 60_000, "batch_size": 256, "noise_multiplier": 1.1, "epochs": 15}
        >>> dpx.accounting.dp_sgd_epsilon(**run, delta=1e-5)
        1.134...
        >>> dpx.accounting.dp_sgd_epsilon(**run, delta=1e-5, sampling="shuffled")
        20.562...

    examples: int, the size of the data set. batch_size: the expected batch size, in (0, examples]; an integer unless
        sampling is "poisson".
    noise_multiplier: the standard deviation of the noise on the SUM of a batch's clipped gradients, divided by the clip
        norm: a float of at least 0, where 0 costs infinity; a function of the step; or one per step, float (steps,), in
        place of steps and epochs. With "shuffled", a number, or the smallest of each epoch, float (epochs,).
    delta: in (0, 1), ideally far below 1 / examples. A larger one warns.
    steps: int, at least 0; preferred if you know it. epochs: float, positive, in place of steps, which are then
        epochs * examples / batch_size, rounded up.
    sampling: how the batches were REALLY drawn, which also decides what epsilon protects against.
        "poisson": each example joins a step by an independent coin; protects against nulling one example.
        "fixed": a new random subset of `batch_size` examples at every step; protects against replacing one example.
        "shuffled": the usual data loader, where each example takes part at most once an epoch, in any order. No
        amplification is proved; protects against setting one example's contribution to zero. Needs epochs, because
        loaders differ in how many steps an epoch has.
    accountant: as for `dpx.epsilon`, which gives the same cost for a run of dpx (except that dpx rounds the noise
        multiplier to float32 when it adds noise).
    records: int, at least 1, the most examples that one person owns, as for `dpx.epsilon`; above 1, only "poisson".
    numbers: int, at most 2^32, the most elements that a step releases: the number of trained parameters.
    exact_noise: whether the noise is treated as real numbers. False adds the cost of the arithmetic of dpx's noise.
        Pass True for another library: no cost is proved for its floating-point noise, and dpx's does not apply.

    Raises ValueError for arguments outside these ranges, and for several records with another sampling.
    """
    if sampling not in tuple(_RECORDS):  # which takes a list, too
        raise ValueError(f"sampling must be one of {tuple(_RECORDS)}, got {described(sampling)}")
    record: Sampling = _RECORDS[sampling](examples=examples, batch_size=batch_size)
    drawn, records = record, require_whole("records", records)
    if sampling == "shuffled":
        if steps is not None or callable(noise_multiplier):
            raise ValueError(
                'sampling "shuffled" needs epochs, and a noise multiplier that is a number or the smallest of each '
                "epoch, because loaders differ in the steps of an epoch"
            )
        record = FullBatch(examples=record.examples)  # an epoch costs as much as one step on all examples
    multipliers = _noise_multipliers(noise_multiplier, record, steps, epochs)
    checks.warn_of_large_delta(delta, record)
    relation = checks.require_relation(record.relation)
    event = event_for_unit(record.event(multipliers), drawn, relation, records)
    numbers = checks.numbers_per_release(numbers, exact_noise)
    return profile_of_run(event, accountant=accountant, relation=relation, numbers=numbers).epsilon(delta)


def _noise_multipliers(noise: Any, record: Sampling, steps: Any, epochs: Any) -> np.ndarray:
    """The noise multiplier of each step, float64 (steps,)."""
    checks.require_concrete("noise_multiplier", noise)
    each = not callable(noise) and np.ndim(noise) > 0
    if (steps is not None) + (epochs is not None) + each != 1:
        given = f"steps {described(steps)}, epochs {described(epochs)} and {described(noise)}"
        raise ValueError(f"exactly one of steps, epochs and an array of noise multipliers must be given, got {given}")
    if each:
        return checks.require_schedule(noise, 1.0, None)[0]
    length = require_whole("steps", steps, minimum=0) if epochs is None else record.steps(epochs=epochs)
    if callable(noise):
        return checks.require_schedule(values_over(noise, length), 1.0, None)[0]
    return np.broadcast_to(require_number("noise_multiplier", noise, minimum=0), (length,))
