"""A `PrivacyLoss`: all that dpx knows of one kind of release. A new cost is one file, with one subclass.

The last one here is of releases whose cost dpx does not compute itself: dp-accounting's own accountants do.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting.checks import Accountant, Profile, Relation
from dpx.accounting.pld.losses import StepLoss

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
            f"the cost of one weight is known only for releases on Poisson samples, got {event_of_loss(self)}"
        )

    def in_words(self) -> str:
        """The release, as a report lists it."""
        return str(event_of_loss(self))


def event_of_loss(loss: Any) -> Any:
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
