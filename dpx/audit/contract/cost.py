"""The line of the contract about the bill: what the releases cost."""

import math
from typing import Any

import attrs
import numpy as np
from dp_accounting import DpEvent

from dpx.accounting.releases import count_releases
from dpx.audit.contract.correlation import require_sensitivity
from dpx.audit.contract.report import Broken, NotChecked
from dpx.audit.contract.trial import Trial, own_event
from dpx.states.reading import release_state

BILLED = (0, 1, 2, 5, 12, 100, 1_001, 10_007, 50_021)  # numbers of steps
BILLED_WITHOUT_SCHEDULE = 1_000_003  # the event of a schedule has as many parts as steps
MUST = 12  # steps; a longer run may be refused
TAKEN = 4  # steps of the state whose record is read


def cost(trial: Trial) -> str:
    """The event bills every release with the noise multiplier that the mechanism used, and the state counts them."""
    mechanism = trial.mechanism
    release = release_state(trial.state(TAKEN))
    if int(release.step) != TAKEN:
        raise Broken(f"the state counts {int(release.step)} releases after {TAKEN}")
    used = trial.multipliers[:TAKEN]
    precision = float(release.precision[0]) - float(release.precision[1])
    if (used > 0).all() and not math.isclose(precision, float(np.sum(used**-2.0)), rel_tol=1e-5):
        raise Broken(f"the state records other noise multipliers than {used.tolist()}, which are billed")
    name = own_event(trial.event(1), mechanism.sampling)
    if name and mechanism.correlated is not None:
        return require_sensitivity(trial)
    if name:
        raise NotChecked(f"{name} is not an event of the sampling, so its own proof and tests must say that it is true")
    more, last = False, 0
    all_steps = BILLED if callable(mechanism.noise_multiplier) else (*BILLED, BILLED_WITHOUT_SCHEDULE)
    for steps in all_steps:
        expected = count_releases(mechanism.sampling.event(trial.multipliers[:steps])).counts
        try:
            billed = count_releases(trial.event(steps)).counts
        except ValueError as error:
            if steps > MUST:
                break
            raise NotChecked(f"{steps} steps have no event: {error}") from None
        missing = _missing(expected, billed)
        if missing:
            raise Broken(f"{steps} steps do not bill {missing}, of noise multiplier and sampling of the mechanism")
        more, last = more | (sum(billed.values()) > sum(expected.values())), steps
    extra = "; more releases are billed" if more else ""
    tried = ", ".join(str(steps) for steps in all_steps if steps <= last)
    return f"{tried} steps bill the multipliers and the sampling that the mechanism states{extra}"


def _missing(expected: dict[DpEvent, int], billed: dict[DpEvent, int]) -> DpEvent | None:
    """A release that is expected more often than it is billed, or None; numbers may differ by 1e-6.

    Equal events are counted together. Those that are left over are compared in the order of their numbers.
    """
    wanted = _in_order({event: count - billed.get(event, 0) for event, count in expected.items()})
    offered = _in_order({event: count - expected.get(event, 0) for event, count in billed.items()})
    place, left = 0, offered[0][1] if offered else 0
    for event, count in wanted:
        while count > 0:
            while place < len(offered) and (left == 0 or not same_event(event, offered[place][0])):
                place += 1
                left = offered[place][1] if place < len(offered) else 0
            if place == len(offered):
                return event
            used = min(count, left)
            count, left = count - used, left - used
    return None


def _in_order(counts: dict[DpEvent, int]) -> list[tuple[DpEvent, int]]:
    """The events of positive counts, by their types and then by their numbers."""

    def order(event):
        parts = [getattr(event, field.name) for field in attrs.fields(type(event))]
        inner = [order(part) for part in parts if isinstance(part, DpEvent)]
        return type(event).__name__, [part for part in parts if isinstance(part, int | float | tuple)], inner

    return sorted(((event, count) for event, count in counts.items() if count > 0), key=lambda item: order(item[0]))


def same_event(one: Any, other: Any) -> bool:
    """Whether two events, or parts of them, are equal up to 1e-6 in their numbers."""
    if isinstance(one, DpEvent):
        names = [field.name for field in attrs.fields(type(one))]
        return type(one) is type(other) and all(same_event(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_event, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
