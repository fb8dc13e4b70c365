"""Counts the releases in a tree of dp-accounting's events, and has the list of the reader of each event type.

Each is read as one step of a composition (`register`), or as a whole run, which stands alone (`register_whole_run`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.event_trees import hashable, is_free
from dpx.accounting.fixed_size import FixedSizeGaussian
from dpx.accounting.pld.losses import Losses, SampledGaussian, StepLoss
from dpx.accounting.profiles import Profile
from dpx.sampling.events import GroupGaussianDpEvent, RandomAllocationDpEvent

ReadStep = Callable[[Any, Relation], StepLoss]


class WholeRunReader(NamedTuple):
    """How an event of a whole run is billed.

    read: (event, accountant, relation) -> Profile.
    explain: (event, delta, relation) -> str, one sentence for the privacy report.
    released: (event) -> Released.
    """

    read: Callable[[Any, Accountant, Relation], Profile]
    explain: Callable[[Any, float, Relation], str]
    released: Callable[[Any], "Released"]


class Released(NamedTuple):
    """How many releases of noisy numbers an event stands for: at most (int), and on average (float)."""

    most: int
    mean: float


_STEP_READERS: dict[type, ReadStep] = {}
_RELEASED: dict[type, Callable[[Any], Released]] = {}
WHOLE_RUN_READERS: dict[type, WholeRunReader] = {}


def register(event_type: type, read: ReadStep, *, released: Callable[[Any], Released] | None = None) -> None:
    """From now on, dpx bills events of `event_type`, as steps that compose with all others.

    read: (event, relation) -> StepLoss. It must raise ValueError for a relation that the event is not true for.
    released: (event) -> Released; None is one release.
    """
    _STEP_READERS[event_type] = read
    if released is not None:
        _RELEASED[event_type] = released


def register_whole_run(event_type: type, reader: WholeRunReader) -> None:
    """From now on, dpx bills events of `event_type`, as whole runs. Such an event beside another one is refused."""
    WHOLE_RUN_READERS[event_type] = reader
    _RELEASED[event_type] = reader.released


@dataclass
class Releases:
    """The releases of an event tree, without compositions and free events.

    counts: how often each release was made, by event.
    """

    counts: dict[DpEvent, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, event: DpEvent, count: int) -> None:
        if count == 0 or is_free(event):
            pass
        elif isinstance(event, dp_accounting.SelfComposedDpEvent):
            self.add(event.event, count * event.count)
        elif isinstance(event, dp_accounting.ComposedDpEvent):
            for inner in event.events:
                self.add(inner, count)
        elif isinstance(event, PoissonSampledDpEvent) and not is_readable(event):
            merged = _as_one_gaussian(event)
            if merged is not None:
                self.counts[hashable(merged)] += count
        else:
            self.counts[hashable(event)] += count

    @property
    def private(self) -> bool:
        """Whether every release adds noise."""
        return not any(isinstance(event, dp_accounting.NonPrivateDpEvent) for event in self.counts)

    @property
    def readable(self) -> bool:
        """Whether dpx bills every release, so that none is left to dp-accounting."""
        return all(is_readable(event) for event in self.counts)

    @property
    def independent(self) -> bool:
        """Whether every release was made on a batch in which chance decides about each example alone."""
        return all(
            isinstance(event, PoissonSampledDpEvent | RandomAllocationDpEvent) and is_readable(event)
            for event in self.counts
            if not isinstance(event, dp_accounting.NonPrivateDpEvent)
        )

    @property
    def gaussian(self) -> bool:
        """Whether every release is a Gaussian, on all data or on a Poisson sample."""
        return all(
            is_readable(event) and isinstance(event, GaussianDpEvent | PoissonSampledDpEvent) for event in self.counts
        )

    @property
    def whole_runs(self) -> list[DpEvent]:
        """The events that are billed as a whole run."""
        return [event for event in self.counts if type(event) in WHOLE_RUN_READERS]

    @property
    def whole_run(self) -> Any:
        """The one event that is billed as a whole run, or None. Raises ValueError if it is not alone."""
        if not self.whole_runs:
            return None
        event = self.whole_runs[0]
        if len(self.counts) > 1 or self.counts[event] > 1:
            raise ValueError(f"{event} is billed as a whole: it composes with nothing, got it beside another event")
        return event

    def losses(self, relation: Relation) -> Losses:
        """The step loss of every release, and how often it was made. Raises ValueError as the readers do."""
        losses: dict[StepLoss, int] = defaultdict(int)
        for event, count in self.counts.items():
            losses[read_step(event, relation)] += count
        return losses


def count_releases(event: DpEvent) -> Releases:
    """The releases of an event tree."""
    releases = Releases()
    releases.add(event, 1)
    return releases


def released(event: DpEvent) -> Released:
    """How many releases of noisy numbers an event tree has."""
    most, mean = 0, 0.0
    for release, count in _leaves(event, 1):
        each = _RELEASED[type(release)](release) if type(release) in _RELEASED else Released(1, 1.0)
        most, mean = most + count * each.most, mean + count * each.mean
    return Released(most, mean)


def largest_shift(event: DpEvent, relation: Relation) -> float:
    """The most that one example, or all records of a unit, move a release, in standard deviations of its noise.

    It is inf if one release has no noise, or is not a Gaussian on all data, on a batch in which chance decides about
    each example alone, or on a sample whose size is fixed or truncated, where it may displace another one; or has a
    `largest_shift`.
    """
    largest = 0.0
    for release, _ in _leaves(event, 1):
        truncated = isinstance(release, TruncatedSubsampledGaussianDpEvent)
        effect = 2 if truncated or relation == "replace_one" else 1
        effect *= release.records if isinstance(release, GroupGaussianDpEvent) else 1
        if isinstance(release, SampledWithoutReplacementDpEvent):  # its noise is relative to an exchange already
            release, effect = release.event, 1
        gaussian = truncated or isinstance(release, GaussianDpEvent | GroupGaussianDpEvent)
        noise = release.noise_multiplier if gaussian else 0.0
        if isinstance(release, RandomAllocationDpEvent):
            noise = min(sigma for sigma, _ in release.noise_multiplier)
        largest = max(largest, effect / noise if noise > 0 else effect * getattr(release, "largest_shift", math.inf))
    return largest


def _leaves(event: Any, count: int) -> Iterator[tuple[Any, int]]:
    """The releases of an event tree, without compositions and Poisson sampling, and how often each was made."""
    if count == 0 or is_free(event):
        pass
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _leaves(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for inner in event.events:
            yield from _leaves(inner, count)
    elif isinstance(event, PoissonSampledDpEvent):
        yield from _leaves(event.event, count)
    else:
        yield event, count


def read_step(event: DpEvent, relation: Relation) -> StepLoss:
    """The step loss of one release. Raises ValueError as its reader does."""
    return _STEP_READERS[type(event)](event, relation)


def is_readable(event: DpEvent) -> bool:
    """Whether dpx bills a release itself."""
    if isinstance(event, PoissonSampledDpEvent | SampledWithoutReplacementDpEvent):
        return isinstance(event.event, GaussianDpEvent)
    return (
        type(event) in _STEP_READERS
        or type(event) in WHOLE_RUN_READERS
        or isinstance(event, dp_accounting.NonPrivateDpEvent)
    )


def _as_one_gaussian(event: PoissonSampledDpEvent) -> DpEvent | None:
    """Several Gaussian releases of one Poisson sample as one, with sigma^-2 = sum_i sigma_i^-2; None if there are none.

    Proof: rotate the joint release so that the sampled example moves it along one axis only. The other axes then have
    noise alone. An event that is not a composition of Gaussians is returned unchanged.
    """
    inner = count_releases(event.event)
    if not inner.counts:
        return None
    if not all(isinstance(release, GaussianDpEvent | dp_accounting.NonPrivateDpEvent) for release in inner.counts):
        return event
    sigmas = [getattr(release, "noise_multiplier", 0.0) for release in inner.counts]
    merged = smallest = min(sigmas)
    if smallest > 0:
        counts = inner.counts.values()
        merged /= math.sqrt(sum(count * (smallest / s) ** 2 for s, count in zip(sigmas, counts, strict=True)))
    return PoissonSampledDpEvent(event.sampling_probability, GaussianDpEvent(merged))


def _read_gaussian(event: GaussianDpEvent, relation: Relation, rate: float = 1.0) -> SampledGaussian:
    sigma = float(event.noise_multiplier)
    if not (0 <= sigma < math.inf and 0 < rate <= 1):
        raise ValueError(f"noise must be finite and at least 0, at a rate in (0, 1]; got {event} at rate {rate}")
    return SampledGaussian(sigma, rate, relation)


def _read_poisson_sampled(event: Any, relation: Relation) -> SampledGaussian:
    return _read_gaussian(event.event, relation, float(event.sampling_probability))


def _read_fixed_size(event: Any, relation: Relation) -> StepLoss:
    if relation != "replace_one":
        raise ValueError(
            f'sampling without replacement is billed under relation "replace_one" only, got {relation!r}: '
            "its batches have a fixed size, so an example cannot be added or removed"
        )
    step = _read_gaussian(event.event, relation, event.sample_size / event.source_dataset_size)
    if step.rate == 1:  # a Gaussian, whose noise multiplier is relative to the effect of adding an example
        return SampledGaussian(2 * step.noise_multiplier, 1.0, relation)
    return FixedSizeGaussian(step.noise_multiplier, step.rate)


register(GaussianDpEvent, _read_gaussian)
register(PoissonSampledDpEvent, _read_poisson_sampled)
register(SampledWithoutReplacementDpEvent, _read_fixed_size)
