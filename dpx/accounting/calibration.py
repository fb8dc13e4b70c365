"""Calibration: the least noise, rounded up, or the most steps for which the cost is within a budget."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import require_reachable_epsilon
from dpx.accounting.ledger import DISTINCT, FEW
from dpx.accounting.pld.buckets import BUCKETS, Buckets, bucketed_gaussians
from dpx.accounting.run_cost import cost_of_run, require_billable
from dpx.accounting.schedule import Interval, implemented_profile, lower_profile, upper_profile
from dpx.keys.noise import LARGEST_RELEASE
from dpx.values import require_whole

_COARSE_BUCKETS = 24  # of a first, rough search, where the second one starts (benchmarks/accounting.py, calibration)
_COARSE_TOLERANCE = 0.02  # of the first search, relative
_LARGEST_MULTIPLIER = 1e6  # if this much noise does not meet a budget, the budget counts as impossible
_MOST_STEPS = 10_000_000  # more than any run takes: a bill within the budget here does not bound the steps
_NEARLY = 0.9  # of a budget: a calibration that ends below has met a cost that jumps to infinity
_NEAR = 4  # slow bills of a search that begins near the answer
_SMALLEST_MULTIPLIER = 1e-3  # the search stops here, because so large a budget is not a constraint


def calibrate(
    make: Callable[[float], Any],
    *,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
    numbers: int | None = None,
    tolerance: float = 1e-4,
) -> float:
    """The least noise multiplier for which `steps` steps of `make(noise_multiplier)` cost at most epsilon at delta.

    make: noise multiplier -> mechanism; its noise, constant or a schedule, must grow with the number.
    steps: int, at least 1. epsilon: positive and finite. delta: in (0, 1).
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation that the sampling states.
    records, numbers: ints, as for `dpx.epsilon`.
    tolerance: relative; the cost is in [epsilon (1 - tolerance), epsilon] if it is a continuous function of the noise.

    Guarantee: `dpx.epsilon` of the mechanism that is built with the returned number is at most epsilon.

    Raises ValueError for arguments outside these ranges, for a budget that no noise multiplier up to 1e6 meets, and
    where `dpx.epsilon` does.

        >>> def make(noise_multiplier):
        ...     return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
        >>> dpx.accounting.calibrate(make, steps=100, epsilon=2.0, delta=1e-5)
        1.344...
    """
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    checks.require_accountant(accountant)
    require_whole("steps", steps)
    checks.warn_of_large_delta(delta, make(1.0).sampling)
    costs: dict[float, float] = {}

    def cost(noise_multiplier: float, distinct: int = DISTINCT, **options: Any) -> float:
        given: Any = {"records": records, "numbers": numbers, "distinct": distinct}
        profile = cost_of_run(make(noise_multiplier), steps, relation, **given).profile(accountant, **options)
        costs[noise_multiplier] = require_reachable_epsilon(profile, epsilon, delta)
        return costs[noise_multiplier]

    def rough(noise_multiplier: float) -> float:
        return cost(noise_multiplier, distinct=FEW, buckets=_COARSE_BUCKETS)

    if records in (None, 1):
        start = 1.0 if accountant == "rdp" else least_noise_within(rough, epsilon, _COARSE_TOLERANCE, 1.0)
        found = least_noise_within(cost, epsilon, tolerance, start)
    else:
        start = least_noise_within(rough, epsilon, _COARSE_TOLERANCE, math.sqrt(records))
        near, far = rough(start), rough(1.05 * start)
        power = math.log(near / far) / math.log(1.05) if 0 < far < near < math.inf else 1.0
        found = _least_noise_near(cost, epsilon, tolerance, start, power)
    _warn_of_unused_budget(epsilon, found, costs)
    return found


def _warn_of_unused_budget(budget: float, found: float, costs: Mapping[float, float]) -> None:
    """Warns the user, two calls up, if the least noise multiplier of a finite cost leaves much of the budget.

    costs: those that were computed, by noise multiplier.
    """
    below = [noise for noise in costs if noise < found]
    if below and costs[found] < _NEARLY * budget and costs[max(below)] == math.inf:
        warnings.warn(
            f"epsilon={budget} cannot be used up: the least noise with a known cost is noise_multiplier={found:.6g}, "
            f"which costs epsilon={costs[found]:.6g}, and that is what the run costs. With less, an example could move "
            "a release to where the noise of a program ends. Fewer `numbers` or a larger delta may allow less noise",
            stacklevel=3,
        )


@dataclass(frozen=True)
class CalibratedSchedule:
    """The noise multipliers `scale * shape` have an epsilon in `interval`, whose upper end is at most the budget.

    scale: float, positive. interval: the ends, floats.
    """

    scale: float
    interval: Interval


def calibrate_schedule(
    shape: Any,
    *,
    sampling_rate: Any,
    epsilon: float,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "tightest",
    relation: Relation = "zero_out",
    tolerance: float = 1e-4,
    buckets: int = BUCKETS,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> CalibratedSchedule:
    """The least scale for which the noise multipliers `scale * shape` cost at most epsilon at delta.

    shape: float (T,), positive. epsilon: positive and finite. delta: in (0, 1). tolerance: relative, of epsilon.
    The other arguments are those of `schedule_epsilon`, for one record; the buckets are chosen once, near the answer.

    Raises ValueError for arguments outside these ranges, and for a budget that no scale meets.

        >>> noise = {"counts": [9, 9, 9], "sampling_rate": 0.01}
        >>> dpx.accounting.calibrate_schedule([1.2, 1.0, 0.8], epsilon=1.0, delta=1e-5, **noise)
        CalibratedSchedule(scale=0.970..., interval=Interval(lower=0.9998..., upper=0.9999...))
    """
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    checks.require_accountant(accountant)
    checks.require_relation(relation)
    sigmas, rates, repeats = checks.require_schedule(shape, sampling_rate, counts)
    if not np.any(repeats > 0):
        raise ValueError("shape must hold at least one step")
    if not np.all(sigmas[repeats > 0] > 0):
        raise ValueError(f"shape must be positive, got {sigmas[repeats > 0].min()}: no scale of it meets a budget")
    numbers = checks.numbers_per_release(numbers, exact_noise)
    median = float(np.median(sigmas[repeats > 0]))

    def bill(scale: float, steps: Buckets) -> float:
        exact = upper_profile(steps.scaled(scale), accountant=accountant, relation=relation)
        return require_reachable_epsilon(
            implemented_profile(exact, sigmas * (scale / median), repeats, relation, numbers), epsilon, delta
        )

    coarse = bucketed_gaussians(sigmas / median, rates, repeats, _COARSE_BUCKETS)
    scale = least_noise_within(lambda scale: bill(scale, coarse), epsilon, _COARSE_TOLERANCE, 1.0)
    if accountant == "rdp":
        steps = Buckets(sigmas / median, sigmas / median, rates, rates, repeats)
    else:
        near = sigmas * (scale / median)
        steps = bucketed_gaussians(near, rates, repeats, require_whole("buckets", buckets)).scaled(1 / scale)
    scale = least_noise_within(lambda scale: bill(scale, steps), epsilon, tolerance, scale)
    upper = bill(scale, steps)
    if accountant == "rdp":
        return CalibratedSchedule(scale / median, Interval(0.0, upper))
    lower = lower_profile(steps.scaled(scale), relation=relation).epsilon(delta)
    return CalibratedSchedule(float(scale / median), Interval(min(upper, lower), upper))


def least_noise_within(bill: Callable[[float], float], budget: float, tolerance: float, start: float) -> float:
    """The least noise with bill(noise) <= budget, to the tolerance, for a cost that decreases.

    First the answer is bracketed. Then the bracket is narrowed by secants in log-log coordinates, or by bisection if a
    secant leaves the bracket. Returns the upper end of the bracket, whose cost is within the budget.
    """
    low = high = start
    cost_low = cost_high = bill(start)
    while cost_high > budget:
        low, cost_low = high, cost_high
        high *= min(4.0, 1.05 * max(cost_high / budget, 1.05))
        if high > _LARGEST_MULTIPLIER:
            raise ValueError(
                f"epsilon={budget} cannot be met: noise_multiplier={low:.6g} still costs {cost_low}; it must be able "
                "to lower the cost of every step, and at a tiny delta only a larger delta or fewer `numbers` help"
            )
        cost_high = bill(high)
    while cost_low <= budget:
        high, cost_high = low, cost_low
        if cost_high >= budget * (1 - tolerance) or high < _SMALLEST_MULTIPLIER:
            return high
        low *= max(0.25, 0.97 * min(cost_low / budget, 0.97))
        cost_low = bill(low)
    log_target = math.log(budget * (1 - tolerance / 3))
    points = [(low, cost_low), (high, cost_high)]  # the last two evaluated
    while cost_high < budget * (1 - tolerance) and high > low * (1 + tolerance * (1e-3 if cost_low < math.inf else 1)):
        middle = _secant(points, log_target)
        if middle is None or not low * (high / low) ** 1e-3 < middle < high * (low / high) ** 1e-3:
            middle = math.sqrt(low * high)
        cost = bill(middle)
        points = [points[-1], (middle, cost)]
        if cost > budget:
            low, cost_low = middle, cost
        else:
            high, cost_high = middle, cost
    return high


def _least_noise_near(
    bill: Callable[[float], float], budget: float, tolerance: float, start: float, power: float
) -> float:
    """`least_noise_within` for slow costs, about noise^-power near the start: it asks for three of them or so."""
    noise, last = start, None
    for _ in range(_NEAR):
        cost = bill(noise)
        if budget * (1 - tolerance) <= cost <= budget:
            return noise
        if not 0 < cost < math.inf:
            break
        if last is not None and (last[0] - noise) * (cost - last[1]) > 0:
            power = math.log(cost / last[1]) / math.log(last[0] / noise)
        last = noise, cost
        noise *= (cost / (budget * (1 - tolerance / 3))) ** (1 / power)
    return least_noise_within(bill, budget, tolerance, noise)


def _secant(points: list[tuple[float, float]], log_target: float) -> float | None:
    """The noise at which ln cost is `log_target` on the line through two points in log-log coordinates, or None."""
    (noise, cost), (last_noise, last_cost) = points
    if not (0 < cost < math.inf and 0 < last_cost < math.inf) or cost == last_cost:
        return None
    log_cost, log_last = math.log(cost), math.log(last_cost)
    return last_noise * math.exp((log_target - log_last) / (log_cost - log_last) * math.log(noise / last_noise))


def max_steps(
    optimizer: Any,
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
) -> int:
    """The largest number of steps whose cost is at most epsilon at delta, an int; 0 if one step costs more.

    optimizer: a `dpx.Mechanism`. epsilon: positive and finite. delta: in (0, 1).
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation that the sampling states.
    records: int, the most examples that the protected person owns, as for `dpx.epsilon`.

    A schedule may be defined for some steps only, and its event raises ValueError beyond them. The result is then at
    most that number of steps. A cost grows with the steps, so the search doubles, then bisects, in about
    2 log2(steps) evaluations.

    Guarantee: `dpx.epsilon(optimizer, max_steps(...), delta=delta)` is at most epsilon.

    Raises ValueError for arguments outside these ranges, and if 10,000,000 steps still cost at most epsilon.

        >>> dpx.accounting.max_steps(mechanism, epsilon=2.0, delta=1e-5)
        20
    """
    epsilon = checks.require_positive_epsilon(epsilon)
    require_billable(optimizer)
    checks.warn_of_large_delta(delta, optimizer.sampling)

    def affordable(steps: int) -> bool:
        try:
            spent = cost_of_run(optimizer, steps, relation, records=records)
        except ValueError:
            if steps == 1:
                raise
            return False  # beyond the schedule
        return spent.profile(accountant).epsilon(delta) <= epsilon

    low, high = 0, 1
    while affordable(high):
        if high == _MOST_STEPS:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} must limit the steps, but {_MOST_STEPS} steps cost no more"
            )
        low, high = high, min(2 * high, _MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low
