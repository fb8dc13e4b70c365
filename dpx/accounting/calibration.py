"""The least noise that meets a budget, from the safe side."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.accounting.bill import billed
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import event_epsilon
from dpx.accounting.pld.buckets import Buckets
from dpx.accounting.schedule import Interval, lower_end, merged, upper_end

_COARSE = 24  # buckets of the bills that only say where to look
_LARGEST = 1e6
_LEAST = 1e-3  # with less noise the budget is no constraint worth the name


def calibrate(
    make: Callable[[float], Any],
    *,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    tolerance: float = 1e-4,
) -> float:
    """The least noise multiplier for which `steps` steps of `make(noise_multiplier)` cost at most epsilon at delta.

    make: noise multiplier -> mechanism; its noise, constant or a schedule, must grow with the number.
    tolerance: relative; the mechanism's bill lies in [epsilon (1 - tolerance), epsilon] where it is continuous.

    Guarantee: `dpx.epsilon` of the mechanism made with the returned number is at most epsilon.
    """
    checks.epsilon(epsilon, positive=True)
    checks.delta(delta)
    checks.accountant(accountant)
    if checks.steps(steps) == 0:
        raise ValueError("steps must be at least 1, got 0")
    checks.warn_of_delta(delta, make(1.0).sampling)

    def bill(noise_multiplier: float, by: Accountant, **options: int) -> float:
        event, asked = billed(make(noise_multiplier), steps, relation)
        return event_epsilon(event, delta=delta, accountant=by, relation=asked, **options)

    if accountant == "rdp":
        return _search(lambda x: bill(x, "rdp"), epsilon, tolerance, 1.0)
    start = _search(lambda x: bill(x, accountant, buckets=_COARSE), epsilon, 0.02, 1.0)
    return _search(lambda x: bill(x, accountant), epsilon, tolerance, start)


@dataclass(frozen=True)
class CalibratedSchedule:
    """The noise multipliers `scale * shape` have an epsilon in `interval`, whose upper end is at most the budget."""

    scale: float
    interval: Interval


def calibrate_schedule(
    shape: Any,
    sampling_rate: Any,
    *,
    epsilon: float,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    tolerance: float = 1e-4,
    buckets: int = 64,
) -> CalibratedSchedule:
    """The least scale for which the noise multipliers `scale * shape` cost at most epsilon at delta.

    shape: (T,), positive; the other arguments as in `schedule_epsilon`. The buckets are chosen once, near the
        answer.
    """
    checks.epsilon(epsilon, positive=True)
    checks.delta(delta)
    sigmas, rates, repeats = checks.schedule(shape, sampling_rate, counts)
    if not np.any(repeats > 0):
        raise ValueError("shape must hold at least one step")
    if not np.all(sigmas[repeats > 0] > 0):
        raise ValueError(f"shape must be positive, got {sigmas[repeats > 0].min()}: no scale of it meets a budget")
    size = float(np.median(sigmas[repeats > 0]))
    few = merged(sigmas / size, rates, repeats, _COARSE)

    def bill(steps: Buckets, by: Accountant) -> Callable[[float], float]:
        return lambda scale: upper_end(steps.scaled(scale), accountant=by, relation=relation).epsilon(delta)

    checks.relation(relation)
    scale = _search(bill(few, checks.accountant(accountant)), epsilon, 0.02, 1.0)
    if accountant == "rdp":
        steps = Buckets(sigmas / size, sigmas / size, rates, rates, repeats)
        scale = _search(bill(steps, "rdp"), epsilon, tolerance, scale)
        return CalibratedSchedule(scale / size, Interval(0.0, bill(steps, "rdp")(scale)))
    steps = merged(sigmas * (scale / size), rates, repeats, checks.buckets(buckets)).scaled(1 / scale)
    scale = _search(bill(steps, accountant), epsilon, tolerance, scale)
    upper = bill(steps, accountant)(scale)
    lower = lower_end(steps.scaled(scale), relation=relation).epsilon(delta)
    return CalibratedSchedule(float(scale / size), Interval(min(upper, lower), upper))


def _search(bill: Callable[[float], float], budget: float, tolerance: float, start: float) -> float:
    """The least x, to the tolerance, with bill(x) <= budget, for a decreasing bill: secants in log-log, safe end."""
    low = high = start
    cost_low = cost_high = bill(start)
    while cost_high > budget:
        low, cost_low = high, cost_high
        high *= min(4.0, 1.05 * max(cost_high / budget, 1.05))
        if high > _LARGEST:
            raise ValueError(
                f"epsilon={budget} cannot be met: noise_multiplier={low:.6g} still costs {cost_low}; "
                "it must be able to lower the cost of every step"
            )
        cost_high = bill(high)
    while cost_low <= budget:
        high, cost_high = low, cost_low
        if cost_high >= budget * (1 - tolerance) or high < _LEAST:
            return high
        low *= max(0.25, 0.97 * min(cost_low / budget, 0.97))
        cost_low = bill(low)
    aim = math.log(budget * (1 - tolerance / 3))
    points = [(low, cost_low), (high, cost_high)]  # the last two evaluated
    while cost_high < budget * (1 - tolerance) and high > low * (1 + tolerance * 1e-3):
        middle = _secant(points, aim)
        if middle is None or not low * (high / low) ** 1e-3 < middle < high * (low / high) ** 1e-3:
            middle = math.sqrt(low * high)
        cost = bill(middle)
        points = [points[-1], (middle, cost)]
        if cost > budget:
            low, cost_low = middle, cost
        else:
            high, cost_high = middle, cost
    return high


def _secant(points: list[tuple[float, float]], aim: float) -> float | None:
    """Where ln cost reaches `aim` on the line through two points in log-log, if they have one."""
    (x, a), (y, b) = points
    if not (0 < a < math.inf and 0 < b < math.inf) or a == b:
        return None
    return y * math.exp((aim - math.log(b)) / (math.log(a) - math.log(b)) * math.log(x / y))
