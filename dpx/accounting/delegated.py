"""Releases whose cost dpx does not compute itself: dp-accounting's own accountants do."""

from dataclasses import dataclass
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount
from dpx.accounting.pld.losses import StepLoss

NEIGHBORS = {
    "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_GRID = 1e-4  # spacing of privacy losses in dp-accounting's PLD; at 1e-3 some long runs are billed 1.5 times too much


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
