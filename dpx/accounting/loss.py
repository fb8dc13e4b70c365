"""A `PrivacyLoss`: all that dpx knows of one kind of release. A new cost is one file, with one subclass.

Two are here: `DpAccountingRelease`, whose cost dp-accounting's own accountants compute, and `PureDpEvent`.

A release of pure differential privacy is, for example, one with Laplace noise or of the exponential mechanism. No set
of outputs is more than e^epsilon times as likely with an example as without. Of all such pairs of laws, coins that show
a secret bit with probability p = e^epsilon / (1 + e^epsilon), and the other bit otherwise, dominate (Kairouz, Oh and
Viswanath 2015, https://arxiv.org/abs/1311.0776, theorem 3.4). So the privacy loss is epsilon with probability p, and
-epsilon otherwise. Against the loss of Laplace noise itself, that costs up to 2 % of epsilon in a composition of 100
releases, and nothing for one. It needs no more than the largest ratio of two probabilities, which programs compute.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import special

from dpx.accounting.checks import Accountant, Profile, Relation, require_nonnegative
from dpx.accounting.pld.losses import Pmf, StepLoss, dominating_pmf

NEIGHBORS = {
    "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_GRID = 1e-4  # spacing of privacy losses in dp-accounting's PLD; at 1e-3 some long runs are billed 1.5 times too much


class ReleaseCount(NamedTuple):
    """How many releases of noisy numbers an event stands for: at most (int), and on average (float)."""

    most: int
    mean: float


class PrivacyLoss:
    """One kind of release, hashable. An event of dpx is a kind itself; others have a field `event`, of dp-accounting.

    fresh: whether its noise is independent of that of other releases, so that a run may skip it.
    gaussian: whether it is a Gaussian, on all data or on a Poisson sample.
    readable: whether dpx computes its cost, and leaves it to none of dp-accounting's accountants.
    private: whether it adds noise.
    whole_run: whether it is the cost of a whole run (`profile`, `explain`), which composes with nothing.
    """

    fresh = False
    gaussian = False
    readable = True
    private = True
    whole_run = False

    @property
    def released(self) -> ReleaseCount:
        """How many releases of noisy numbers it stands for."""
        return ReleaseCount(1, 1.0)

    @property
    def independent(self) -> bool:
        """Whether chance decides about each example of its batch alone, so that another one changes no other's part."""
        return False

    @property
    def rate(self) -> float | None:
        """The rate of the coins of a Poisson sample; None for other releases."""
        return None

    @property
    def name(self) -> str:
        """The name of Gaussian releases that a report lists by their `noise_multiplier`; "" for others."""
        return ""

    def step_loss(self, relation: Relation) -> StepLoss:
        """Its privacy loss. Raises ValueError for a relation under which it is not known."""
        raise NotImplementedError

    def profile(self, accountant: Accountant, relation: Relation) -> Profile:
        """The bound of a whole run."""
        raise NotImplementedError

    def pure(self, relation: Relation) -> float:
        """Its epsilon at delta 0; inf if it has none."""
        return math.inf

    def explain(self, delta: float, relation: Relation) -> str:
        """How the cost of a whole run is computed, in one sentence for the privacy report."""
        raise NotImplementedError

    def largest_shift(self, relation: Relation) -> float:
        """The most that one example, or all records of a unit, move a release, in standard deviations of its noise.

        It is inf where no proof of `arithmetic` says better: see `far` there.
        """
        return math.inf

    def at_rate(self, rate: float) -> DpEvent:
        """The event of the same release for an example that takes part at a lower rate."""
        raise ValueError(
            f"the cost of one weight is known only for releases on Poisson samples, got {event_of_release(self)}"
        )

    def in_words(self) -> str:
        """The release, as a report lists it."""
        return str(event_of_release(self))


def event_of_release(loss: Any) -> Any:
    """The event that a release stands for: the release itself, or the one of dp-accounting that it is of."""
    return loss if isinstance(loss, DpEvent) else loss.event


def in_deviations(effect: float, noise_multiplier: float) -> float:
    """How far an effect, in clip norms, moves a release, in deviations of its noise; inf without noise."""
    return effect / noise_multiplier if noise_multiplier > 0 else math.inf


def as_hashable(value: Any) -> Any:
    """An event with tuples in place of the lists and arrays in it, and in the events in it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(as_hashable(item) for item in value)
    if not isinstance(value, DpEvent) or not attrs.has(type(value)):
        return value
    try:
        hash(value)
        return value
    except TypeError:
        return attrs.evolve(value, **{a.alias: as_hashable(getattr(value, a.name)) for a in attrs.fields(type(value))})


@dataclass(frozen=True)
class DpAccountingRelease(PrivacyLoss):
    """A release whose kind dpx does not know. inner: where it is a Poisson sample, the `Ledger` of what is on it."""

    event: DpEvent
    inner: Any = None
    readable = False

    @property
    def released(self) -> ReleaseCount:
        return self.inner.released if self.inner else ReleaseCount(1, 1.0)

    def largest_shift(self, relation: Relation) -> float:
        return self.inner.largest_shift(relation) if self.inner else super().largest_shift(relation)

    def step_loss(self, relation: Relation) -> StepLoss:
        if relation == "replace_one":
            raise ValueError(f'{self.event} has no known Renyi divergence under relation "replace_one"')
        return DpAccountingStep(self.event, relation)


@dataclass(frozen=True)
class DpAccountingStep(StepLoss):
    """A release of which dp-accounting knows the Renyi divergences, such as a Laplace one."""

    event: DpEvent
    relation: Relation

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(RdpAccountant(orders.tolist(), NEIGHBORS[self.relation]).compose(self.event).rdp)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(f'{self.event} has no known Renyi divergence under relation "{self.relation}"') from error


@dataclass(frozen=True)
class DelegatedProfile:
    """The answers of one of dp-accounting's accountants, which has composed the event."""

    accountant: Any

    def epsilon(self, delta: float) -> float:
        return float(self.accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.accountant.get_delta(epsilon))


def delegated_profile(event: DpEvent, accountant: Accountant, relation: Relation) -> DelegatedProfile:
    """The profile by dp-accounting; "tightest" is its PLD, or its RDP where its PLD refuses the event."""
    refusals = []
    for name in ("pld", "rdp") if accountant == "tightest" else (accountant,):
        if name == "pld":
            delegate = PLDAccountant(neighboring_relation=NEIGHBORS[relation], value_discretization_interval=_GRID)
        elif relation == "replace_one":
            refusals.append("its Renyi divergences would be those of adding or removing one example")
            continue
        else:
            delegate = RdpAccountant(neighboring_relation=NEIGHBORS[relation])
        try:
            return DelegatedProfile(delegate.compose(event))
        except dp_accounting.UnsupportedEventError as error:
            refusals.append(str(error))
    raise ValueError(f'accountant "{accountant}" knows no cost of {event} under relation "{relation}": {refusals}')


_LARGEST = 600.0  # of epsilon; more counts as no noise, because e^epsilon must be a float64


@attrs.frozen
class PureDpEvent(DpEvent, PrivacyLoss):
    """One release that is epsilon-differentially private with delta 0, for nulls in place of one example.

    epsilon: float, at least 0, because twice a small integer of numpy, or one with a minus, would be another number.
        dp-accounting's accountants refuse this event.
    """

    epsilon: float = attrs.field(converter=functools.partial(require_nonnegative, "epsilon of a release"))
    fresh = True

    @property
    def released(self) -> ReleaseCount:
        return ReleaseCount(0, 0.0)  # its bits have this epsilon: there are no normals whose arithmetic would add to it

    def largest_shift(self, relation: Relation) -> float:
        return 0.0

    def pure(self, relation: Relation) -> float:
        return self.epsilon * (2 if relation == "replace_one" else 1)

    def step_loss(self, relation: Relation) -> "PureLoss":
        return PureLoss(self.pure(relation))

    def in_words(self) -> str:
        return f"release of epsilon {self.epsilon:.6g} and delta 0"


@dataclass(frozen=True)
class PureLoss(StepLoss):
    """The loss of one such release, which is symmetric."""

    epsilon: float

    @property
    def unbounded(self) -> bool:
        return self.epsilon > _LARGEST

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """ln(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), float64 (orders,)."""
        p, rest = special.log_expit(self.epsilon), special.log_expit(-self.epsilon)
        moments = np.logaddexp(orders * p + (1 - orders) * rest, orders * rest + (1 - orders) * p)
        return np.minimum(np.maximum(moments, 0.0) / (orders - 1), self.epsilon)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        last = math.floor(self.epsilon / grid) + 1
        upper = np.zeros(2 * last + 2)
        upper[1], upper[-2] = special.expit(-self.epsilon), special.expit(self.epsilon)
        return (dominating_pmf(upper, upper[::-1], -last, grid),)
