"""Event trees as releases: what is left of a tree of dp-accounting's events without compositions, and who reads it."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent

from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.fixed_size import FixedSizeGaussian
from dpx.accounting.pld.losses import Losses, SampledGaussian, StepLoss
from dpx.accounting.profiles import Profile

ReadEvent = Callable[[Any, Relation], StepLoss]
ReadWhole = Callable[[Any, Accountant, Relation], Profile]
ExplainWhole = Callable[[Any, float, Relation], str]

_READERS: dict[type, ReadEvent] = {}
WHOLES: dict[type, tuple[ReadWhole, ExplainWhole]] = {}


def register(event_type: type, read: ReadEvent) -> None:
    """Bill events of `event_type` by `read(event, relation) -> StepLoss`; `read` refuses a relation by ValueError."""
    _READERS[event_type] = read


def register_whole(event_type: type, read: ReadWhole, explain: ExplainWhole) -> None:
    """Bill an event that is not a composition of steps by `read(event, accountant, relation) -> Profile`.

    It composes with nothing: beside another event it is refused. `explain(event, delta, relation)` is a sentence for
    the privacy report.
    """
    WHOLES[event_type] = read, explain


@dataclass
class Flat:
    """An event tree as its releases and how often each was made, without compositions and events that cost nothing."""

    counts: dict[DpEvent, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, event: DpEvent, count: int) -> None:
        if count == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
            pass
        elif isinstance(event, dp_accounting.SelfComposedDpEvent):
            self.add(event.event, count * event.count)
        elif isinstance(event, dp_accounting.ComposedDpEvent):
            for part in event.events:
                self.add(part, count)
        elif isinstance(event, PoissonSampledDpEvent) and not _known(event):
            one = _one_gaussian(event)
            if one is not None:
                self.counts[one] += count
        elif not isinstance(event, PoissonSampledDpEvent) or event.sampling_probability != 0:
            self.counts[event] += count

    @property
    def private(self) -> bool:
        return not any(isinstance(event, dp_accounting.NonPrivateDpEvent) for event in self.counts)

    @property
    def known(self) -> bool:
        """Whether every release can be read here."""
        return all(_known(event) for event in self.counts)

    @property
    def amplified(self) -> bool:
        """Whether every release was made on a Poisson sample."""
        return all(
            isinstance(event, PoissonSampledDpEvent) and _known(event)
            for event in self.counts
            if not isinstance(event, dp_accounting.NonPrivateDpEvent)
        )

    @property
    def gaussian(self) -> bool:
        """Whether every release is a Gaussian, on all data or on a Poisson sample."""
        return all(
            _known(event) and isinstance(event, GaussianDpEvent | PoissonSampledDpEvent) for event in self.counts
        )

    @property
    def wholes(self) -> list[DpEvent]:
        return [event for event in self.counts if type(event) in WHOLES]

    @property
    def whole(self) -> Any:
        """The event that is billed as a whole, or None."""
        if not self.wholes:
            return None
        event = self.wholes[0]
        if len(self.counts) > 1 or self.counts[event] > 1:
            raise ValueError(f"{event} is billed as a whole: it composes with nothing, got it beside another event")
        return event

    def losses(self, relation: Relation) -> Losses:
        """Every release as a step loss."""
        found: dict[StepLoss, int] = defaultdict(int)
        for event, count in self.counts.items():
            found[_READERS[type(event)](event, relation)] += count
        return found


def _known(event: DpEvent) -> bool:
    if isinstance(event, PoissonSampledDpEvent | SampledWithoutReplacementDpEvent):
        return isinstance(event.event, GaussianDpEvent)
    return type(event) in _READERS or type(event) in WHOLES or isinstance(event, dp_accounting.NonPrivateDpEvent)


def _one_gaussian(event: PoissonSampledDpEvent) -> DpEvent | None:
    """Several Gaussian releases of one Poisson sample as one, of noise sigma^-2 = sum sigma_i^-2; None if free.

    Turned so that the effect of the sampled example lies along one axis, the other axes are noise alone. What is no
    composition of Gaussians stays as it is.
    """
    inner = flatten(event.event)
    if event.sampling_probability == 0 or not inner.counts:
        return None
    if not all(isinstance(one, GaussianDpEvent | dp_accounting.NonPrivateDpEvent) for one in inner.counts):
        return event
    sigmas = [getattr(one, "noise_multiplier", 0.0) for one in inner.counts]
    least = min(sigmas)
    if least > 0:
        least /= math.sqrt(sum(n * (least / s) ** 2 for s, n in zip(sigmas, inner.counts.values(), strict=True)))
    return PoissonSampledDpEvent(event.sampling_probability, GaussianDpEvent(least))


def flatten(event: DpEvent) -> Flat:
    flat = Flat()
    flat.add(event, 1)
    return flat


def _read_gaussian(event: GaussianDpEvent, relation: Relation, rate: float = 1.0) -> SampledGaussian:
    sigma = float(event.noise_multiplier)
    if not (0 <= sigma < math.inf and 0 < rate <= 1):
        raise ValueError(f"noise must be finite and at least 0, at a rate in (0, 1]; got {event} at rate {rate}")
    return SampledGaussian(sigma, rate, relation)


def _read_sampled(event: Any, relation: Relation) -> SampledGaussian:
    return _read_gaussian(event.event, relation, float(event.sampling_probability))


def _read_fixed_size(event: Any, relation: Relation) -> FixedSizeGaussian:
    if relation != "replace_one":
        raise ValueError(
            f'sampling without replacement is billed under relation "replace_one" only, got {relation!r}: '
            "its batches have a fixed size, so an example cannot be added or removed"
        )
    step = _read_gaussian(event.event, relation, event.sample_size / event.source_dataset_size)
    return FixedSizeGaussian(step.noise_multiplier, step.rate)


register(GaussianDpEvent, _read_gaussian)
register(PoissonSampledDpEvent, _read_sampled)
register(SampledWithoutReplacementDpEvent, _read_fixed_size)
