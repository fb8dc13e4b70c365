"""Events that dpx does not bill itself: dp-accounting's own accountants do."""

from dataclasses import dataclass
from typing import Any

import dp_accounting
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting.checks import Accountant, Relation

NEIGHBORS = {
    "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_GRID = 1e-4  # spacing of privacy losses in dp-accounting's PLD; at 1e-3 some long runs are billed 1.5 times too much


@dataclass(frozen=True)
class DelegatedProfile:
    """The answers of one of dp-accounting's accountants, which has composed the event."""

    accountant: Any

    def epsilon(self, delta: float) -> float:
        return float(self.accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.accountant.get_delta(epsilon))


def delegated(event: DpEvent, accountant: Accountant, relation: Relation) -> DelegatedProfile:
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
    raise ValueError(f'accountant "{accountant}" cannot bill {event} under relation "{relation}": {refusals}')
