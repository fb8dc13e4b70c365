"""Bills of dp-accounting's events: an event tree becomes releases, releases step losses, and these a profile.

Gaussian, Poisson-sampled and fixed-size-sampled Gaussian events are read here. Other events of this library register
how one of them is read: as one step of a composition (`register`), or as a whole, alone (`register_whole`). Anything
else is left to dp-accounting's own accountants.
"""

import dp_accounting
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.fixed_size import FixedSizeGaussian
from dpx.accounting.pld.losses import SampledGaussian
from dpx.accounting.profiles import UNBOUNDED, DelegatedProfile, Profile, profile
from dpx.accounting.releases import WHOLES, flatten
from dpx.accounting.releases import register as register
from dpx.accounting.releases import register_whole as register_whole
from dpx.accounting.schedule import rounded

_BUCKETS = 512
_BUCKETS_FIXED_SIZE = 32  # each costs a tenth of a second
_GRID = 1e-4


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
    relation: what neighbors are. Gaussian events mean noise relative to the effect of adding or removing one
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
        return WHOLES[type(whole)][0](whole, accountant, relation)
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
    return () if whole is None else (WHOLES[type(whole)][1](whole, delta, relation),)


def _delegated(event: DpEvent, accountant: Accountant, relation: Relation) -> Profile:
    """By dp-accounting; "tightest" is PLD, or RDP where that is refused."""
    neighbors = {
        "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]
    refusals = []
    for name in ("pld", "rdp") if accountant == "tightest" else (accountant,):
        if name == "pld":
            delegate = PLDAccountant(neighboring_relation=neighbors, value_discretization_interval=_GRID)
        elif relation == "replace_one":
            refusals.append("its Renyi divergences would be those of adding or removing one example")
            continue
        else:
            delegate = RdpAccountant(neighboring_relation=neighbors)
        try:
            return DelegatedProfile(delegate.compose(event))
        except dp_accounting.UnsupportedEventError as error:
            refusals.append(str(error))
    raise ValueError(f'accountant "{accountant}" cannot bill {event} under relation "{relation}": {refusals}')
