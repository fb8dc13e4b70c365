"""The line of the contract about the bill: what the releases cost."""

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from dp_accounting import (
    DpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SampledWithReplacementDpEvent,
)
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from dpx.accounting.releases import count_releases, is_readable, released
from dpx.audit.contract.correlation import require_sensitivity
from dpx.audit.contract.report import Broken, NotChecked
from dpx.audit.contract.trial import Trial, own_event
from dpx.sampling.events import GroupGaussianDpEvent, RandomAllocationDpEvent
from dpx.states.reading import release_state

BILLED = (0, 1, 2, 5, 12, 100, 1_001, 10_007, 50_021)  # numbers of steps
BILLED_WITHOUT_SCHEDULE = 1_000_003  # the event of a schedule has as many parts as steps
MUST = 12  # steps; a longer run may be refused
TAKEN = 4  # steps of the state whose record is read
OF_SAMPLINGS = (  # events of batches that are drawn in one way
    GroupGaussianDpEvent,
    PoissonSampledDpEvent,
    RandomAllocationDpEvent,
    SampledWithReplacementDpEvent,
    SampledWithoutReplacementDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
_RATE = "sampling_probability"


def cost(trial: Trial) -> str:
    """The event bills every release with the noise multiplier that the mechanism used, and the state counts them."""
    release = release_state(trial.state(TAKEN))
    if int(release.step) != TAKEN:
        raise Broken(f"the state counts {int(release.step)} releases after {TAKEN}")
    used = trial.multipliers[:TAKEN]
    precision = float(release.precision[0]) - float(release.precision[1])
    if (used > 0).all() and not math.isclose(precision, float(np.sum(used**-2.0)), rel_tol=1e-5):
        raise Broken(f"the state records other noise multipliers than {used.tolist()}, which are billed")
    return billed(trial)


def billed(trial: Trial) -> str:
    """What the events of runs of many lengths bill, in words. Raises Broken where that is less than what is drawn."""
    mechanism = trial.mechanism
    own, more, last = "", False, 0
    all_steps = BILLED if callable(mechanism.noise_multiplier) else (*BILLED, BILLED_WITHOUT_SCHEDULE)
    for steps in all_steps:
        expected = mechanism.sampling.event(trial.multipliers[:steps])
        try:
            event = trial.event(steps)
        except ValueError as error:
            if steps > MUST:
                break
            raise NotChecked(f"{steps} steps have no event: {error}") from None
        name, last = own_event(event, mechanism.sampling), steps
        if name or mechanism.correlated is not None:
            _require_plausible(event, trial.multipliers[:steps], mechanism.sampling)
            own = own or name
        else:
            more |= _require_billed(expected, event, steps)
    if mechanism.correlated is not None:
        return require_sensitivity(trial)
    if own:
        raise NotChecked(f"{own} is not an event of the sampling, so its own proof and tests must say that it is true")
    extra = "; more releases are billed" if more else ""
    tried = ", ".join(str(steps) for steps in all_steps if steps <= last)
    return f"{tried} steps bill the multipliers and the sampling that the mechanism states{extra}"


def _require_billed(expected: DpEvent, event: DpEvent, steps: int) -> bool:
    """Whether the event has more releases than those that are expected. Raises Broken if it lacks one."""
    wanted, offered = count_releases(expected).counts, count_releases(event).counts
    if missing := _missing(wanted, offered):
        raise Broken(f"{steps} steps do not bill {missing}, of noise multiplier and sampling of the mechanism")
    return sum(offered.values()) > sum(wanted.values())


def _require_plausible(event: DpEvent, multipliers: np.ndarray, sampling: Any) -> None:
    """Raises Broken for an event of another sampling than the one that draws, or of a kind of its own that bills less.

    An event of its own kind, such as that of error feedback, must have a proof, which cannot be checked here. But it
    must be of the record that draws and at least of its rate, have all releases, and noise of at most the multiplier.
    """
    steps, parts = len(multipliers), list(_parts(event))
    if foreign := sorted({type(part).__name__ for part in parts if isinstance(part, OF_SAMPLINGS)} - _kinds(sampling)):
        raise Broken(f"{steps} steps bill {', '.join(foreign)}, which is not of the sampling that draws, {sampling}")
    rates = [part.sampling_probability for part in _parts(sampling.event(np.ones(1))) if hasattr(part, _RATE)]
    for part in parts:
        if getattr(part, _RATE, 1.0) < max(rates, default=1.0) * (1 - 1e-6):
            raise Broken(f"{steps} steps bill {part}, of a lower rate than that of the sampling that draws, {sampling}")
        if repr(getattr(part, "sampling", sampling)) != repr(sampling):
            raise Broken(f"{steps} steps bill {part}, of another sampling than the one that draws, {sampling}")
        noise = getattr(part, "noise_multiplier", 0.0)
        if isinstance(noise, int | float) and noise > multipliers.max(initial=0) * (1 + 1e-6):
            raise Broken(f"{steps} steps bill {part}, of more noise than the largest multiplier of the mechanism")
    if all(is_readable(part) for part in parts) and (most := released(event).most) < steps:
        raise Broken(f"{steps} steps are billed as {most} releases of noisy numbers")


def _kinds(sampling: Any) -> set[str]:
    return {type(part).__name__ for part in _parts(sampling.event(np.ones(1)))}


def _parts(event: Any) -> Iterator[Any]:
    """The releases of an event, and what is inside of their sampling."""
    for release in count_releases(event).counts:
        while release is not None:
            yield release
            release = getattr(release, "event", None)


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
