"""Reading dp-accounting's events: an event tree becomes releases, releases step losses, and these a profile.

Gaussian, Poisson-sampled and fixed-size-sampled Gaussian events are read here. Other events of this library register
how one of them is read: as one step of a composition (`register`), or as a whole, alone (`register_whole`). Anything
else is left to dp-accounting's own accountants.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.fixed_size import FixedSizeGaussian
from dpx.accounting.losses import Losses, SampledGaussian, StepLoss
from dpx.accounting.profiles import UNBOUNDED, DelegatedProfile, Profile, profile
from dpx.accounting.schedule import rounded

ReadEvent = Callable[[Any, Relation], StepLoss]
ReadWhole = Callable[[Any, Accountant, Relation], Profile]
ExplainWhole = Callable[[Any, float, Relation], str]

_READERS: dict[type, ReadEvent] = {}
_WHOLES: dict[type, tuple[ReadWhole, ExplainWhole]] = {}
_BUCKETS = 512
_BUCKETS_FIXED_SIZE = 32  # each costs a tenth of a second
_GRID = 1e-4


def register(event_type: type, read: ReadEvent) -> None:
    """Bill events of `event_type` by `read(event, relation) -> StepLoss`; `read` refuses a relation by ValueError."""
    _READERS[event_type] = read


def register_whole(event_type: type, read: ReadWhole, explain: ExplainWhole) -> None:
    """Bill an event that is not a composition of steps by `read(event, accountant, relation) -> Profile`.

    It composes with nothing: beside another event it is refused. `explain(event, delta, relation)` is a sentence for
    the privacy report.
    """
    _WHOLES[event_type] = read, explain


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
    def without_replacement(self) -> bool:
        """Whether a release was made on a sample of fixed size."""
        return any(isinstance(event, SampledWithoutReplacementDpEvent) for event in self.counts)

    @property
    def wholes(self) -> list[DpEvent]:
        return [event for event in self.counts if type(event) in _WHOLES]

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
    return type(event) in _READERS or type(event) in _WHOLES or isinstance(event, dp_accounting.NonPrivateDpEvent)


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


def event_epsilon(
    event: DpEvent,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = _BUCKETS,
) -> float:
    """An upper bound of epsilon at `delta` for an event.

    accountant: "pld" composes privacy loss distributions, "rdp" Renyi divergences; "tightest" is the smaller of those
        that are known for the event: PLD, which is at most RDP, or RDP for samples of fixed size. All are guarantees.
    relation: what neighbours are. Gaussian events mean noise relative to the effect of adding or removing one
        example (the same as nulling one); replacing one has twice the effect, which is billed. Events of sampling
        without replacement state the effect of replacing one, and no other relation is true for them.
    buckets: distinct releases composed by PLD exactly; more are rounded to this many (`schedule_epsilon`).

    Raises ValueError for an event that is not true for the relation, or unknown to the accountant.
    """
    delta = checks.delta(delta)
    return event_profile(event, accountant=accountant, relation=relation, buckets=buckets).epsilon(delta)


def event_delta(
    event: DpEvent,
    *,
    epsilon: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = _BUCKETS,
) -> float:
    """An upper bound of delta at `epsilon` for an event; see `event_epsilon`."""
    epsilon = checks.epsilon(epsilon)
    return event_profile(event, accountant=accountant, relation=relation, buckets=buckets).delta(epsilon)


def event_profile(
    event: DpEvent,
    *,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = _BUCKETS,
    curve: bool = False,
) -> Profile:
    """The profile of an event, to be asked for epsilon and delta; see `event_epsilon`.

    curve: whether it will be asked for many deltas, to 0.1 %; ask in the order of rising epsilons.
    """
    checks.accountant(accountant)
    checks.relation(relation)
    checks.buckets(buckets)
    flat = flatten(event)
    if not flat.private:
        return UNBOUNDED
    if (whole := flat.whole) is not None:
        return _WHOLES[type(whole)][0](whole, accountant, relation)
    if not flat.known:
        return _delegated(event, accountant, relation)
    losses = flat.losses(relation)
    if any(getattr(loss, "unbounded", False) for loss in losses):
        return UNBOUNDED
    if accountant != "rdp":
        losses = rounded(losses, SampledGaussian, buckets)
    return profile(rounded(losses, FixedSizeGaussian, _BUCKETS_FIXED_SIZE), accountant, curve=curve)


def explanation(event: DpEvent, *, delta: float, relation: Relation) -> tuple[str, ...]:
    """How an event that is billed as a whole is billed; nothing for others."""
    whole = flatten(event).whole
    return () if whole is None else (_WHOLES[type(whole)][1](whole, delta, relation),)


def _delegated(event: DpEvent, accountant: Accountant, relation: Relation) -> Profile:
    """By dp-accounting; "tightest" is PLD, or RDP where that is refused."""
    neighbours = {
        "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]
    refusals = []
    for name in ("pld", "rdp") if accountant == "tightest" else (accountant,):
        if name == "pld":
            delegate = PLDAccountant(neighboring_relation=neighbours, value_discretization_interval=_GRID)
        elif relation == "replace_one":
            refusals.append("its Renyi divergences would be those of adding or removing one example")
            continue
        else:
            delegate = RdpAccountant(neighboring_relation=neighbours)
        try:
            return DelegatedProfile(delegate.compose(event))
        except dp_accounting.UnsupportedEventError as error:
            refusals.append(str(error))
    raise ValueError(f'accountant "{accountant}" cannot bill {event} under relation "{relation}": {refusals}')


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
