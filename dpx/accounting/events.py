"""Reading dp-accounting's events: which ones take the fast path, and which relation they are true for.

Trees of Gaussian and Poisson-sampled Gaussian events become arrays and are composed as a schedule. Other events of this
library register how one of them is billed: as one step of a composition (`register`), or as a whole, alone
(`register_whole`). Anything else is left to dp-accounting's own accountants.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting import checks, renyi
from dpx.accounting.buckets import bucketed
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.losses import StepLoss
from dpx.accounting.schedule import SMALLEST_NOISE, composed, merged, pairs, upper_end
from dpx.accounting.targets import DeltaAt, DeltasAt, EpsilonAt, Target

ReadEvent = Callable[[dp_accounting.DpEvent, Relation], StepLoss]
BillEvent = Callable[[Any, Target, Accountant, Relation], Any]
ExplainEvent = Callable[[Any, Target, Relation], str]

_REGISTRY: dict[type, ReadEvent] = {}
_WHOLES: dict[type, tuple[BillEvent, ExplainEvent]] = {}
_BUCKETS = 512
_BUCKETS_WITHOUT_REPLACEMENT = 32
_GRID = 1e-4


def register(event_type: type, read: ReadEvent) -> None:
    """Bill events of `event_type` by `read(event, relation) -> StepLoss`; `read` refuses a relation by ValueError."""
    _REGISTRY[event_type] = read


def register_whole(event_type: type, bill: BillEvent, explain: ExplainEvent) -> None:
    """Bill an event that is not a composition of steps by `bill(event, target, accountant, relation)`.

    It composes with nothing: beside another event it is refused. `explain(event, target, relation)` is a sentence for
    the privacy report.
    """
    _WHOLES[event_type] = bill, explain


@dataclass
class Flat:
    """An event tree as counts: (noise multiplier, rate) of Gaussians, registered events, and what is left."""

    gaussians: dict[tuple[float, float], int] = field(default_factory=lambda: defaultdict(int))
    without_replacement: dict[tuple[float, float], int] = field(default_factory=lambda: defaultdict(int))
    registered: dict[dp_accounting.DpEvent, int] = field(default_factory=lambda: defaultdict(int))
    wholes: dict[dp_accounting.DpEvent, int] = field(default_factory=lambda: defaultdict(int))
    private: bool = True
    known: bool = True
    amplified: bool = True  # every release was made on a Poisson sample

    def add(self, event: dp_accounting.DpEvent, count: int) -> None:
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            self.add(event.event, count * event.count)
        elif isinstance(event, dp_accounting.ComposedDpEvent):
            for part in event.events:
                self.add(part, count)
        elif isinstance(event, dp_accounting.NoOpDpEvent) or count == 0:
            pass
        elif type(event) in _REGISTRY:
            self.registered[event] += count
            self.amplified = False
        elif type(event) in _WHOLES:
            self.wholes[event] += count
            self.amplified = False
        elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent) and isinstance(
            event.event, dp_accounting.GaussianDpEvent
        ):
            rate = event.sample_size / event.source_dataset_size
            self.without_replacement[float(event.event.noise_multiplier), rate] += count
            self.amplified = False
        elif isinstance(event, dp_accounting.NonPrivateDpEvent):
            self.private = False
        elif isinstance(event, dp_accounting.GaussianDpEvent):
            self.gaussians[float(event.noise_multiplier), 1.0] += count
            self.amplified = False
        elif isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
            event.event, dp_accounting.GaussianDpEvent
        ):
            if event.sampling_probability != 0:
                self.gaussians[float(event.event.noise_multiplier), float(event.sampling_probability)] += count
        else:
            self.known = False
            self.amplified = False

    @property
    def whole(self) -> Any:
        """The event that is billed as a whole, or None."""
        if not self.wholes:
            return None
        event, *others = self.wholes
        if others or self.wholes[event] > 1 or self.gaussians or self.without_replacement or self.registered:
            raise ValueError(f"{event} is billed as a whole: it composes with nothing, not even with itself")
        if not self.known:
            raise ValueError(f"{event} is billed as a whole: it composes with nothing, got it beside an unknown event")
        return event


def _arrays(steps: dict[tuple[float, float], int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(noise multipliers, rates, counts)."""
    keys = np.array(list(steps), np.float64).reshape(-1, 2)
    return checks.schedule(keys[:, 0], keys[:, 1], np.array(list(steps.values()), np.int64))


def flatten(event: dp_accounting.DpEvent) -> Flat:
    flat = Flat()
    flat.add(event, 1)
    return flat


def event_epsilon(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
    buckets: int = _BUCKETS,
) -> float:
    """An upper bound of epsilon at `delta` for an event.

    accountant: "pld" composes privacy loss distributions, "rdp" Renyi divergences. Both are guarantees; PLD is
        the smaller.
    relation: what neighbours are. Gaussian events mean noise relative to the effect of adding or removing one
        example (the same as nulling one); replacing one has twice the effect, which "pld" bills and "rdp" refuses.
        Events of sampling without replacement state the effect of replacing one, and only "rdp" bills them.
    buckets: distinct releases composed by PLD exactly; more are rounded to this many (`schedule_epsilon`).

    Raises ValueError for an event that is not true for the relation, or unknown to the accountant.
    """
    return float(_bill(event, EpsilonAt(checks.delta(delta)), accountant, relation, checks.buckets(buckets)))


def event_delta(
    event: dp_accounting.DpEvent,
    *,
    epsilon: float,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
    buckets: int = _BUCKETS,
) -> float:
    """An upper bound of delta at `epsilon` for an event; see `event_epsilon`."""
    return float(_bill(event, DeltaAt(checks.epsilon(epsilon)), accountant, relation, checks.buckets(buckets)))


def event_deltas(
    event: dp_accounting.DpEvent,
    epsilons: np.ndarray,
    *,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
) -> np.ndarray:
    """`event_delta` at many epsilons (points,) by one composition, which resolves deltas down to about 1e-16."""
    target = DeltasAt(tuple(checks.epsilon(value) for value in epsilons))
    return np.asarray(_bill(event, target, accountant, relation, _BUCKETS))


def explanation(event: dp_accounting.DpEvent, *, delta: float, relation: Relation) -> tuple[str, ...]:
    """How an event that is billed as a whole is billed; nothing for others."""
    whole = flatten(event).whole
    return () if whole is None else (_WHOLES[type(whole)][1](whole, EpsilonAt(delta), relation),)


def _bill(event, target: Target, accountant: Accountant, relation: Relation, buckets: int) -> Any:
    checks.accountant(accountant)
    checks.relation(relation)
    flat = flatten(event)
    if not flat.private:
        return target.unbounded
    if (whole := flat.whole) is not None:
        return _WHOLES[type(whole)][0](whole, target, accountant, relation)
    if not flat.known:
        return _delegated(event, target, accountant, relation)
    if flat.without_replacement:
        _check_without_replacement(accountant, relation)
    sigmas, rates, counts = _arrays(flat.gaussians)
    if accountant == "rdp" and relation == "replace_one" and len(sigmas):
        raise ValueError(
            'relation "replace_one" is not billed by accountant "rdp" for a GaussianDpEvent: its Renyi divergence is '
            "that of adding or removing one example, and would under-report. "
            'Pass accountant="pld", which doubles the sensitivity'
        )
    if np.any(sigmas < SMALLEST_NOISE):
        return target.unbounded
    if accountant == "rdp":
        rdp = renyi.total(sigmas, rates, counts) if len(sigmas) else np.zeros(len(renyi.ORDERS))
        return target.renyi(rdp + _renyi_without_replacement(flat) + _renyi_registered(flat, relation))
    steps = merged(sigmas, rates, counts, buckets)
    if not flat.registered:
        return upper_end(steps, target, relation=relation)
    losses = pairs(steps, relation)
    losses += [(_REGISTRY[type(one)](one, relation), count) for one, count in flat.registered.items()]
    rdp = sum(count * loss.renyi(renyi.ORDERS) for loss, count in losses)
    return composed(losses, np.asarray(rdp), target)


def _check_without_replacement(accountant: Accountant, relation: Relation) -> None:
    if relation != "replace_one":
        raise ValueError(
            f'sampling without replacement is billed under relation "replace_one" only, got {relation!r}: '
            "its batches have a fixed size, so an example cannot be added or removed"
        )
    if accountant != "rdp":
        raise ValueError(
            f"sampling without replacement has no tight privacy loss distribution, got accountant={accountant!r}; "
            'pass accountant="rdp"'
        )


def _renyi_without_replacement(flat: Flat) -> np.ndarray:
    """By dp-accounting (Wang et al. 2019), a tenth of a second a step: few distinct steps, noise rounded down."""
    rdp = np.zeros(len(renyi.ORDERS))
    if flat.without_replacement:
        steps = bucketed(*_arrays(flat.without_replacement), _BUCKETS_WITHOUT_REPLACEMENT)
        for sigma, rate, count in zip(
            steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True
        ):
            accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
            if sigma < SMALLEST_NOISE:
                return np.full(len(renyi.ORDERS), np.inf)
            gaussian = dp_accounting.GaussianDpEvent(sigma)
            accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, rate, gaussian), count)
            rdp = rdp + accountant.rdp
    return rdp


def _renyi_registered(flat: Flat, relation: Relation) -> np.ndarray:
    rdp = np.zeros(len(renyi.ORDERS))
    for one, count in flat.registered.items():
        rdp = rdp + count * _REGISTRY[type(one)](one, relation).renyi(renyi.ORDERS)
    return rdp


def _delegated(event, target: Target, accountant: Accountant, relation: Relation) -> Any:
    if accountant == "rdp" and relation == "replace_one":
        raise ValueError(
            f'accountant "rdp" under relation "replace_one" bills sampling without replacement only, got {event}'
        )
    relations = dp_accounting.NeighboringRelation
    neighbours = {
        "add_or_remove": relations.ADD_OR_REMOVE_ONE,
        "zero_out": relations.REPLACE_SPECIAL,
        "replace_one": relations.REPLACE_ONE,
    }[relation]
    if accountant == "rdp":
        delegate = RdpAccountant(neighboring_relation=neighbours)
    else:
        delegate = PLDAccountant(neighboring_relation=neighbours, value_discretization_interval=_GRID)
    try:
        delegate.compose(event)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f'accountant "{accountant}" cannot bill {event} under relation "{relation}": {error}'
        ) from error
    return target.delegated(delegate)
