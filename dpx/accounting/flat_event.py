"""`FlatEvent` counts how often an event makes each kind of release, and computes the cost. `from_event` makes one.

Samplings and mechanisms state their cost as dp-accounting events, which `from_event` reads. All facts about a kind of
release are in its `PrivacyLoss`, so no other code inspects events.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent, TruncatedSubsampledGaussianDpEvent

from dpx.accounting.allocation import Allocation, round_to_few_epochs
from dpx.accounting.arithmetic import NormalSamplerError, RunProfile, normal_sampler_error
from dpx.accounting.checks import Accountant, Profile, Relation, require_countable
from dpx.accounting.groups import GaussianMixtureRelease, GroupGaussianDpEvent
from dpx.accounting.limited_samples import (
    FixedSizeGaussian,
    FixedSizeRelease,
    TruncatedRelease,
    bucketed_truncated_losses,
    gaussian_loss,
)
from dpx.accounting.loss import (
    DpAccountingRelease,
    PrivacyLoss,
    ReleaseCount,
    as_hashable,
    delegated_profile,
    event_of_release,
    in_deviations,
)
from dpx.accounting.pld.losses import (
    BUCKETS,
    Losses,
    SampledGaussian,
    StepLoss,
    bucketed_steps,
    round_losses_to_buckets,
)
from dpx.accounting.profiles import UNBOUNDED, MinOrMaxProfile, PureProfile, loss_profile
from dpx.accounting.selection import OneOfDpEvent, OneOfEventsLoss, SearchLoss
from dpx.sampling.schemes import compose_events
from dpx.sampling.varying import RandomAllocationDpEvent
from dpx.values import as_real, described, range_in_words, require_whole

_FREE = 1e9  # a Gaussian with this many times the noise of another adds nothing to its cost, in float64
DISTINCT, FEW = 32, 6  # the most noise multipliers in the cost of several records, and in a calibration's rough costs


@dataclass(frozen=True)
class FlatEvent:
    """The flattened releases of an event tree, except those that cost nothing. Adding two composes their runs.

    event: the tree. counts: release -> how often it was made.
    """

    event: DpEvent
    counts: Mapping[Any, int] = field(compare=False)

    def __add__(self, other: "FlatEvent") -> "FlatEvent":
        return from_event(dp_accounting.ComposedDpEvent([self.event, other.event]))

    def all_releases_satisfy(self, holds: Callable[[PrivacyLoss], bool]) -> bool:
        """Whether a predicate holds for every release."""
        return all(map(holds, self.counts))

    @property
    def event_counts(self) -> dict[DpEvent, int]:
        """Counts how often the event of each release occurs."""
        events: dict[DpEvent, int] = defaultdict(int)
        for loss, count in self.counts.items():
            events[event_of_release(loss)] += count
        return events

    @property
    def all_noisy(self) -> bool:
        """Whether every release adds noise."""
        return self.all_releases_satisfy(lambda loss: loss.private)

    @property
    def all_costed_by_dpx(self) -> bool:
        """Whether dpx computes the cost of every release, without dp-accounting's accountants."""
        return self.all_releases_satisfy(lambda loss: loss.costed_by_dpx)

    @property
    def all_drawn_independently(self) -> bool:
        """Whether every private release was made on a batch that each example joins independently."""
        return self.all_releases_satisfy(lambda loss: loss.draws_examples_independently or not loss.private)

    @property
    def all_gaussian(self) -> bool:
        """Whether every release is a Gaussian, on all data or on a Poisson sample."""
        return self.all_releases_satisfy(lambda loss: loss.gaussian)

    @property
    def release_count(self) -> ReleaseCount:
        """The number of noisy releases."""
        most, mean = 0, 0.0
        for loss, count in self.counts.items():
            most, mean = most + count * loss.release_count.most, mean + count * loss.release_count.mean
        return ReleaseCount(most, mean)

    def largest_shift(self, relation: Relation) -> float:
        """The largest `PrivacyLoss.largest_shift` of the releases."""
        return max((loss.largest_shift(relation) for loss in self.counts), default=0.0)

    def pure(self, relation: Relation) -> float:
        """Epsilon at delta 0, summed over all releases; inf if one has none."""
        return math.fsum(count * loss.pure(relation) for loss, count in self.counts.items())

    @property
    def whole_runs(self) -> list[Any]:
        return [loss for loss in self.counts if loss.whole_run]

    @property
    def whole_run_release(self) -> PrivacyLoss | None:
        """The release that covers a whole run, or None. Raises ValueError if there are other releases beside it."""
        if not self.whole_runs:
            return None
        loss = self.whole_runs[0]
        if len(self.counts) > 1 or self.counts[loss] > 1:
            words = "covers a whole run: it composes with nothing, got it with another event"
            raise ValueError(f"{event_of_release(loss)} {words}")
        return loss

    def losses(self, relation: Relation) -> Losses:
        """Counts the step losses of all releases. Raises ValueError where `PrivacyLoss.step_loss` does."""
        losses: dict[StepLoss, int] = defaultdict(int)
        for loss, count in self.counts.items():
            losses[loss.step_loss(relation)] += count
        return losses

    def map(self, event_of: Callable[[PrivacyLoss], DpEvent]) -> DpEvent:
        """Replaces each release in the event by the result of `event_of`."""
        return compose_events((event_of(loss), count) for loss, count in self.counts.items())

    def profile(
        self, accountant: Accountant, relation: Relation, *, buckets: int = BUCKETS, curve: bool = False
    ) -> Profile:
        """The profile for real-valued noise; see `cost.event_profile`."""
        if not self.all_noisy:
            return UNBOUNDED
        require_countable(sum(self.counts.values()))
        if (run := self.whole_run_release) is not None:
            return run.profile(accountant, relation)
        if not self.all_costed_by_dpx:
            return delegated_profile(as_hashable(self.event), accountant, relation)
        losses = self.losses(relation)
        if any(loss.is_noiseless for loss in losses):
            return UNBOUNDED
        losses = round_to_few_epochs(losses, buckets)
        if accountant != "rdp":
            for kind in (SampledGaussian, FixedSizeGaussian):
                losses = round_losses_to_buckets(losses, kind, buckets)
            losses = bucketed_truncated_losses(losses, buckets)
        composed, pure = loss_profile(losses, accountant, curve=curve), self.pure(relation)
        return composed if pure == math.inf else MinOrMaxProfile(min, (composed, PureProfile(pure)))

    def words(self) -> tuple[str, ...]:
        """The releases in words. Lists up to 8 noise multipliers one by one, and gives the range of more."""
        if not self.all_costed_by_dpx:
            return (str(self.event),)
        gaussians: dict[str, Counter[float]] = defaultdict(Counter)  # by name, how often each noise multiplier was used
        others, lines = [], []
        for loss, count in self.counts.items():
            if loss.name:
                gaussians[loss.name][loss.noise_multiplier] += count
            elif loss.private:
                others.append(f"{count} x {loss.in_words()}")
        for name, sigmas in sorted(gaussians.items()):
            if len(sigmas) <= 8:
                lines += [f"{count} x {name}, noise multiplier {sigma:.6g}" for sigma, count in sorted(sigmas.items())]
            else:
                lines.append(
                    f"{sum(sigmas.values())} x {name}, {len(sigmas)} distinct noise multipliers "
                    f"from {min(sigmas):.6g} to {max(sigmas):.6g}"
                )
        return (*lines, *others) if self.all_noisy else (*lines, *others, "a release without noise")

    def in_one_line(self) -> str:
        """Describes the releases in one line."""
        return ", ".join(self.words()) or "nothing"

    def implemented_profile(
        self, exact: Profile, relation: Relation, *, runs: int = 1, numbers: int | NormalSamplerError
    ) -> RunProfile:
        """Adds the cost of the noise's arithmetic to the profile `exact`; see `cost.profile_of_run`."""
        most, mean = self.release_count
        return RunProfile(exact, runs * most, runs * mean, self.largest_shift(relation), normal_sampler_error(numbers))

    def of_records(self, records: int, *, distinct: int = DISTINCT) -> DpEvent:
        """The event of the same releases for a unit that owns up to `records` records, each drawn independently.

        distinct: int, the most noise multipliers in the event; more are rounded down to this many.
        Raises ValueError unless all releases are Gaussians on all data or on Poisson samples.
        """
        if records == 1:
            return self.event
        if not self.all_noisy:
            return dp_accounting.NonPrivateDpEvent()
        if not self.all_gaussian:
            words = "must have only Gaussian releases, on all data or on Poisson samples, for more than one record"
            raise ValueError(f"the event {words}; got {self.event}")
        losses = self.losses("add_or_remove")
        # Several releases on one sample are one loss here, and the first of those below, so that none moves farther.
        # But each draws noise, whose arithmetic has a cost.
        together = math.ceil(self.release_count.most / max(sum(losses.values()), 1))
        sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in losses]).reshape(-1, 2).T
        steps = bucketed_steps(sigmas, rates, np.array(list(losses.values()), np.int64), distinct)
        columns = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)

        def step(sigma: float, rate: float) -> DpEvent:
            if rate < 1:
                return GroupGaussianDpEvent(sigma, rate, records, together)
            one = GaussianDpEvent(sigma / records)
            if together == 1:
                return one
            others = dp_accounting.SelfComposedDpEvent(GaussianDpEvent(_FREE * sigma / records), together - 1)
            return PoissonSampledDpEvent(1.0, dp_accounting.ComposedDpEvent([one, others]))

        return compose_events((step(sigma, rate), count) for sigma, rate, count in columns)


@dataclass(frozen=True)
class NoiselessRelease(PrivacyLoss):
    """A release without noise."""

    event: DpEvent = field(default_factory=dp_accounting.NonPrivateDpEvent)
    private, fresh = False, True

    def step_loss(self, relation: Relation) -> StepLoss:
        return SampledGaussian(0.0, 1.0, relation)


@dataclass(frozen=True)
class GaussianRelease(PrivacyLoss):
    """Gaussian releases on all data, or on one Poisson sample, treated as one.

    event: the event of the release, or of several merged. parts: pairs (noise multiplier, count) of these releases.
    """

    event: Any
    parts: tuple[tuple[float, int], ...]
    gaussian, fresh = True, True

    @property
    def noise_multiplier(self) -> float:
        return float(self.inner.noise_multiplier)  # in float16, a merged noise multiplier would round up

    @property
    def inner(self) -> Any:
        return getattr(self.event, "event", self.event)

    @property
    def rate(self) -> float:
        return getattr(self.event, "sampling_probability", 1.0)

    @property
    def draws_examples_independently(self) -> bool:
        return isinstance(self.event, PoissonSampledDpEvent)

    @property
    def release_count(self) -> ReleaseCount:
        count = sum(count for _, count in self.parts)
        return ReleaseCount(count, float(count))

    def step_loss(self, relation: Relation) -> StepLoss:
        return gaussian_loss(self.inner, relation, float(self.rate))

    def largest_shift(self, relation: Relation) -> float:
        return max(in_deviations(2 if relation == "replace_one" else 1, sigma) for sigma, _ in self.parts)

    def at_rate(self, rate: float) -> DpEvent:
        return PoissonSampledDpEvent(rate, self.inner) if self.draws_examples_independently else super().at_rate(rate)

    @property
    def name(self) -> str:
        return f"Gaussian on a Poisson sample of rate {self.rate:.6g}" if self.rate < 1 else "Gaussian"


KINDS: Mapping[type, Callable[[Any], PrivacyLoss]] = {
    GaussianDpEvent: lambda event: GaussianRelease(event, ((float(event.noise_multiplier), 1),)),
    dp_accounting.NonPrivateDpEvent: NoiselessRelease,
    TruncatedSubsampledGaussianDpEvent: TruncatedRelease,
    MixtureOfGaussiansDpEvent: GaussianMixtureRelease,
    RandomAllocationDpEvent: Allocation,
    RepeatAndSelectDpEvent: lambda event: SearchLoss(event, from_event(event.event)),
    OneOfDpEvent: lambda event: OneOfEventsLoss(event, tuple(map(from_event, _inner_events(event)))),
}


def from_event(event: DpEvent) -> FlatEvent:
    """Reads the releases of an event tree, whose events come from dp-accounting or are a `PrivacyLoss`.

    Raises ValueError for a repetition count that is not an integer of at least 0, and for composed events that are not
    in a list, a tuple or an array.
    """
    counts: dict[PrivacyLoss, int] = defaultdict(int)
    _count_releases(event, 1, counts)
    return FlatEvent(event, dict(counts))


def _count_releases(event: Any, count: int, counts: dict[PrivacyLoss, int]) -> None:
    if count == 0 or is_free(event):
        pass
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        # A fraction would undercount, and a negative count would subtract other releases.
        times = require_whole("count of a SelfComposedDpEvent", event.count, minimum=0)
        _count_releases(event.event, count * times, counts)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for inner in _inner_events(event):
            _count_releases(inner, count, counts)
    elif (loss := _privacy_loss_of(event)) is not None:
        counts[loss] += count


def _inner_events(event: Any) -> Iterable[DpEvent]:
    """The events in an event. Raises ValueError for a container that may lose some: a generator is empty when read
    again, and a set drops equal releases."""
    if isinstance(event.events, list | tuple | np.ndarray):
        return event.events
    kind = type(event).__name__
    raise ValueError(f"events of a {kind} must be in a list, a tuple or an array, got {described(event.events)}")


def _privacy_loss_of(event: Any) -> PrivacyLoss | None:
    if isinstance(event, PoissonSampledDpEvent):
        return _merge_on_one_sample(as_hashable(event))
    if isinstance(event, SampledWithoutReplacementDpEvent) and isinstance(event.event, GaussianDpEvent):
        return FixedSizeRelease(event)
    event = as_hashable(event)
    if attrs.has(type(event)) and not isinstance(event, GaussianDpEvent):  # whose noise is checked where it is used
        _require_numbers_in_range(event)
    return event if isinstance(event, PrivacyLoss) else KINDS.get(type(event), DpAccountingRelease)(event)


def _require_numbers_in_range(event: Any) -> None:
    """Raises ValueError for NaN, a number below 0 or a rate above 1, for which an accountant may find no cost."""
    for field_ in attrs.fields(type(event)):
        value, most = getattr(event, field_.name), 1.0 if field_.name == "sampling_probability" else math.inf
        if (number := as_real(value)) is not None and not 0 <= number <= most:
            name = f"{field_.name} of a {type(event).__name__}"
            raise ValueError(f"{name} must be a number {range_in_words(0, most)}, got {described(value)}")


def _merge_on_one_sample(event: PoissonSampledDpEvent) -> PrivacyLoss | None:
    """Merges Gaussian releases on one Poisson sample into one with sigma^-2 = sum_i sigma_i^-2; None if there are none.

    Proof: rotate the joint release so that the sampled example moves it along one axis only. The other axes then hold
    only noise. Other releases on a sample are left to dp-accounting.
    """
    inner = from_event(event.event)
    if not inner.counts:
        return None
    kinds = NoiselessRelease, GaussianRelease
    if not inner.all_releases_satisfy(lambda loss: isinstance(loss, kinds) and not loss.draws_examples_independently):
        return DpAccountingRelease(event, inner)
    sigmas = [getattr(loss, "noise_multiplier", 0.0) for loss in inner.counts]
    parts = tuple(zip(sigmas, inner.counts.values(), strict=True))
    if isinstance(event.event, GaussianDpEvent):
        return GaussianRelease(event, parts)
    merged = smallest = min(sigmas)
    if smallest > 0:
        merged /= math.sqrt(sum(count * (smallest / s) ** 2 for s, count in parts))
    return GaussianRelease(PoissonSampledDpEvent(event.sampling_probability, GaussianDpEvent(merged)), parts)


def is_free(event: Any) -> bool:
    """Whether nothing is released, or nobody takes part."""
    if isinstance(event, MixtureOfGaussiansDpEvent):
        shifts, chances = np.asarray(event.sensitivities), np.asarray(event.sampling_probs)
        return shifts.shape == chances.shape and not np.any((shifts != 0) & (chances != 0))  # a product may round to 0
    free = isinstance(event, PoissonSampledDpEvent) and event.sampling_probability == 0
    free |= isinstance(event, SampledWithoutReplacementDpEvent) and event.sample_size == 0
    return free or isinstance(event, dp_accounting.NoOpDpEvent)


def without_truncation(event: DpEvent) -> DpEvent:
    """The event of the same releases on Poisson samples that are not cut, which shows what truncation costs."""
    return from_event(event).map(
        lambda loss: loss.untruncated if isinstance(loss, TruncatedRelease) else event_of_release(loss)
    )
