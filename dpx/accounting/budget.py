"""Budgets, which state (epsilon, delta) for a number of steps or epochs in place of a noise multiplier; and
calibration, which finds the least noise, rounded up, or the most steps that stay within a budget.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.cost import cost_of_run, require_event_and_sampling, require_reachable_epsilon
from dpx.accounting.flat_event import DISTINCT, FEW
from dpx.accounting.loss import require_noise_to_matter
from dpx.accounting.pld.losses import BUCKETS, StepBuckets, bucketed_gaussians
from dpx.accounting.schedule import Interval, implemented_profile, lower_profile, upper_profile
from dpx.keys.noise import LARGEST_RELEASE
from dpx.sampling.schemes import Sampling
from dpx.values import (
    bind_arguments,
    described,
    explain_misuse,
    require_bool,
    require_function,
    require_number,
    require_whole,
    warn_user,
)

M = TypeVar("M", bound=Any)
_COARSE_BUCKETS = 24  # for a rough first search, which starts the second one (benchmarks/accounting.py, calibration)
_COARSE_TOLERANCE = 0.02  # relative, for the first search
_LARGEST_MULTIPLIER = 1e6  # if this much noise does not meet a budget, the budget counts as impossible
_MOST_STEPS = 10_000_000  # more than any run takes: if these are within the budget, it does not bound the steps
_FAR = 10.0  # longest step of a secant, in ln noise
_NEARLY = 0.9  # share of a budget; a calibration that ends below it has met a cost that jumps to infinity
_NEAR = 4  # evaluations of a slow cost in a search that starts near the answer
_SMALLEST_MULTIPLIER = 1e-3  # the search stops here, because so large a budget is not a constraint


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The (epsilon, delta) of a run. Pass it as the noise multiplier of any function that accepts a budget.

        >>> budget = dpx.Budget(epsilon=2.0, delta=1e-5, epochs=5)
        >>> dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key).noise_multiplier
        1.344...

    The mechanism remembers its budget: `sampling.take` and `sampling.batches` refuse any step after the last, and a run
    that ends earlier still costs the whole budget, because the releases may have decided when it ends.

    epsilon: float, positive and finite. delta: float in (0, 1), required, ideally far below 1 / the number of examples.
    steps: int, at least 1, the steps of the whole run. epochs: float, positive, in place of steps. The mechanism
        converts epochs by `sampling.steps(epochs=epochs)`, because the sampling decides how long an epoch is.
    accountant: the accountant that must find a cost of at most epsilon, as for `dpx.epsilon`.
    records: int, at least 1. Above 1, epsilon protects a person who owns up to this many examples, for Poisson samples
        and full batches only. All later costs and reports of the mechanism do the same. You must ensure that nobody
        owns more, for example with `dpx.sampling.records_to_keep`. With `dpx.UserData`, the sampling draws persons, so
        leave it at 1.
    public_stop: bool. True promises that only public information decides when a run ends: no release, no
        metric of the parameters and no private data. A run that ends early then costs only the steps that it took.
    numbers: int, at most 2^32, the most elements that a step releases: one per trained parameter, and one more with
        adaptive clipping. Every cost is for this many, and `init` refuses more parameters. With None, the noise is
        calibrated for 2^32, and a state's cost counts its own number. It matters for small deltas (`docs/exact.md`).

    Raises ValueError if a field is outside its range, if not exactly one of steps and epochs is given, and if you
    calculate with the budget.
    """

    epsilon: float
    delta: float = None  # pyrefly: ignore[bad-assignment]  # so that the message says what it is
    steps: int = None  # pyrefly: ignore[bad-assignment]  # an int in every mechanism, because it takes `for_sampling`
    epochs: float | None = None
    accountant: Accountant = "tightest"
    records: int = 1
    public_stop: bool = False
    numbers: int | None = None

    def __post_init__(self):
        epsilon, delta = checks.require_positive_epsilon(self.epsilon), checks.require_delta(self.delta)
        checks.require_accountant(self.accountant)
        records, numbers = require_whole("records", self.records), self.numbers
        require_bool("public_stop", self.public_stop)
        numbers = None if numbers is None else checks.numbers_per_release(numbers)
        # NumPy would round a cost to float16 to compare it with an epsilon in float16.
        vars(self).update(epsilon=epsilon, delta=delta, records=records, numbers=numbers)
        if (self.steps is None) == (self.epochs is None):
            given = f"such as steps=1 for one release; got {described(self.steps)} and {described(self.epochs)}"
            raise ValueError(f"a dpx.Budget must have exactly one of steps and epochs, {given}")
        if self.epochs is None:
            require_whole("steps", self.steps)
        else:
            require_number("epochs", self.epochs, minimum=0, exclusive=True)

    def for_sampling(self, sampling: Sampling) -> "Budget":
        """Returns this budget with its epochs converted to steps of `sampling`."""
        if self.epochs is None:
            return self
        return replace(self, steps=sampling.steps(epochs=self.epochs), epochs=None)

    def _refuse_arithmetic(self, *_: Any) -> NoReturn:
        raise ValueError(
            "a Budget is not a number: give it as the noise_multiplier itself, which is then constant. For a schedule "
            "that meets a budget, decorate a function of noise_multiplier with dpx.accounting.accepts_budget, and "
            "multiply the schedule by that number inside"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_arithmetic


def accepts_budget(build: Callable[..., M]) -> Callable[..., M]:
    """Decorates a function that builds a mechanism, so that its `noise_multiplier` may also be a `Budget`.

    Given a Budget, it finds the least noise multiplier that stays within it. Decorate the function that builds the
    OUTERMOST mechanism, because a wrapper around a mechanism may raise its cost:

        @dpx.accounting.accepts_budget
        def mine(*, noise_multiplier, **rest):
            return dpx.mechanisms.clip_then_project(dpx.dp_sgd(noise_multiplier=noise_multiplier, **rest), rank=12, ...)

    build: takes an argument `noise_multiplier`; the noise of every step must grow with that number.

    Raises ValueError if `build` is not a function of such an argument; the decorated function raises as `calibrate`
    does.
    """
    if not callable(build):
        raise ValueError(f"build must be a function, got {described(build)}")
    signature = inspect.signature(build)
    if "noise_multiplier" not in signature.parameters:
        raise ValueError(f"build must take an argument noise_multiplier, got {build.__qualname__}{signature}")

    @functools.wraps(build)
    def builder(*args, **kwargs):
        arguments = bind_arguments(build.__name__, signature, args, kwargs)
        budget = arguments.arguments.get("noise_multiplier")
        if not isinstance(budget, Budget):
            return build(*args, **kwargs)

        def make_with_noise(noise_multiplier: float):
            arguments.arguments["noise_multiplier"] = noise_multiplier
            return build(*arguments.args, **arguments.kwargs)

        budget = budget.for_sampling(make_with_noise(1.0).sampling)
        options = {"accountant": budget.accountant, "records": budget.records, "numbers": budget.numbers}
        noise_multiplier = calibrate(
            make_with_noise, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta, **options
        )
        return make_with_noise(noise_multiplier).replace(budget=budget)

    parameters = [p if p.name != "noise_multiplier" else _annotate_budget(p) for p in signature.parameters.values()]
    vars(builder)["__signature__"] = signature.replace(parameters=parameters)
    return builder


def _annotate_budget(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation: Any = parameter.annotation
    return parameter.replace(annotation=Budget if annotation is parameter.empty else annotation | Budget)


@explain_misuse
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
    """Finds the least noise multiplier with which `steps` steps of `make(noise)` cost at most epsilon at delta.

    make: noise multiplier -> mechanism, whose noise, constant or a schedule, must grow with the multiplier.
    steps: int, at least 1. epsilon: positive and finite. delta: in (0, 1).
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation of the sampling.
    records, numbers: ints, as for `dpx.epsilon`.
    tolerance: in [1e-9, 1]; the cost is in [epsilon (1 - tolerance), epsilon] if it is a continuous function of noise.

    Guarantee: `dpx.epsilon` of the mechanism built with the returned multiplier is at most epsilon.

    Raises ValueError for arguments outside these ranges, if the cost does not depend on the multiplier, if no noise
    multiplier up to 1e6 meets the budget, and as `dpx.epsilon` does.

        >>> def make(last):
        ...     noise = optax.linear_schedule(2 * last, last, 100)  # for constant noise, a dpx.Budget is enough
        ...     return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)
        >>> dpx.accounting.calibrate(make, steps=100, epsilon=2.0, delta=1e-5)
        1.017...
    """
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    checks.require_accountant(accountant)
    tolerance = _require_tolerance(tolerance)
    require_whole("steps", steps)
    require_function("make", make, "noise_multiplier")
    if not hasattr(made := make(1.0), "sampling"):
        raise ValueError(f"make must return a mechanism for a noise multiplier, got {described(made)}")
    checks.warn_of_large_delta(delta, made.sampling)
    require_noise_to_matter("make", lambda noise: make(noise).event(steps))
    costs: dict[float, float] = {}

    def cost(noise_multiplier: float, distinct: int = DISTINCT, **options: Any) -> float:
        given: Any = {"records": records, "numbers": numbers, "distinct": distinct}
        profile = cost_of_run(make(noise_multiplier), steps, relation, **given).profile(accountant, **options)
        costs[noise_multiplier] = require_reachable_epsilon(profile, epsilon, delta)
        return costs[noise_multiplier]

    def rough_cost(noise_multiplier: float) -> float:
        return cost(noise_multiplier, distinct=FEW, buckets=_COARSE_BUCKETS)

    if records in (None, 1):
        start = 1.0 if accountant == "rdp" else least_noise_within(rough_cost, epsilon, _COARSE_TOLERANCE, 1.0)
        found = least_noise_within(cost, epsilon, tolerance, start)
    else:
        start = least_noise_within(rough_cost, epsilon, _COARSE_TOLERANCE, math.sqrt(records))
        near, far = rough_cost(start), rough_cost(1.05 * start)
        power = math.log(near / far) / math.log(1.05) if 0 < far < near < math.inf else 1.0
        found = _least_noise_in_few_calls(cost, epsilon, tolerance, start, power)
    _warn_of_unused_budget(epsilon, found, costs)
    return found


def _warn_of_unused_budget(budget: float, found: float, costs: Mapping[float, float]) -> None:
    """Warns the user if even the least noise multiplier with a finite cost leaves much of the budget.

    costs: noise multiplier -> cost, as computed so far.
    """
    below = [noise for noise in costs if noise < found]
    if below and costs[found] < _NEARLY * budget and costs[max(below)] == math.inf:
        warn_user(
            f"epsilon={budget} cannot be used up: the least noise with a known cost is noise_multiplier={found:.6g}, "
            f"which costs epsilon={costs[found]:.6g}, and that is what the run costs. With less, an example could move "
            "a release farther than the noise reaches. Fewer `numbers` or a larger delta may allow less noise"
        )


@dataclass(frozen=True)
class CalibratedSchedule:
    """A scale for which the noise multipliers `scale * shape` meet a budget.

    scale: float, positive. interval: bounds on their epsilon; the upper one is at most the budget.
    """

    scale: float
    interval: Interval


@explain_misuse
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
    """Finds the least scale for which the noise multipliers `scale * shape` cost at most epsilon at delta.

    shape: float (T,), positive. epsilon: positive and finite. delta: in (0, 1). tolerance: relative error of epsilon.
    The other arguments are those of `schedule_epsilon`, for one record; steps are bucketed once, near the answer.

    Raises ValueError for arguments outside these ranges, and if no scale meets the budget.

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
    numbers, tolerance = checks.numbers_per_release(numbers, exact_noise), _require_tolerance(tolerance)
    median = float(np.median(sigmas[repeats > 0]))

    def cost_at(scale: float, steps: StepBuckets) -> float:
        exact = upper_profile(steps.with_scaled_noise(scale), accountant=accountant, relation=relation)
        return require_reachable_epsilon(
            implemented_profile(exact, sigmas * (scale / median), repeats, relation, numbers), epsilon, delta
        )

    coarse = bucketed_gaussians(sigmas / median, rates, repeats, _COARSE_BUCKETS)
    scale = least_noise_within(lambda scale: cost_at(scale, coarse), epsilon, _COARSE_TOLERANCE, 1.0)
    if accountant == "rdp":
        steps = StepBuckets(sigmas / median, sigmas / median, rates, rates, repeats)
    else:
        near = sigmas * (scale / median)
        steps = bucketed_gaussians(near, rates, repeats, require_whole("buckets", buckets)).with_scaled_noise(1 / scale)
    scale = least_noise_within(lambda scale: cost_at(scale, steps), epsilon, tolerance, scale)
    upper = cost_at(scale, steps)
    if accountant == "rdp":
        return CalibratedSchedule(scale / median, Interval(0.0, upper))
    lower = lower_profile(steps.with_scaled_noise(scale), relation=relation).epsilon(delta)
    return CalibratedSchedule(float(scale / median), Interval(min(upper, lower), upper))


def _require_tolerance(value: Any) -> float:
    """Returns `value` as a float. Raises ValueError for a tolerance below what a search in float64 can reach."""
    return require_number("tolerance", value, minimum=1e-9, maximum=1)


def least_noise_within(cost_at: Callable[[float], float], budget: float, tolerance: float, start: float) -> float:
    """Finds the least noise with cost_at(noise) <= budget, to the tolerance, for a cost that decreases with noise.

    Brackets the answer, then narrows the bracket by secants in log-log coordinates, or by bisection if a secant leaves
    the bracket. Returns the upper end, whose cost is within the budget.
    """
    low = high = start
    cost_low = cost_high = cost_at(start)
    while not cost_high <= budget:  # nor for NaN, which no cost should be
        low, cost_low = high, cost_high
        high *= min(4.0, 1.05 * max(cost_high / budget, 1.05))
        if high > _LARGEST_MULTIPLIER:
            raise ValueError(
                f"epsilon={budget} cannot be met: noise_multiplier={low:.6g} still costs {cost_low}; it must be able "
                "to lower the cost of every step, and at a tiny delta only a larger delta or fewer `numbers` help"
            )
        cost_high = cost_at(high)
    while cost_low <= budget:
        high, cost_high = low, cost_low
        if cost_high >= budget * (1 - tolerance) or high < _SMALLEST_MULTIPLIER:
            return high
        low *= max(0.25, 0.97 * min(cost_low / budget, 0.97))
        cost_low = cost_at(low)
    log_target = math.log(budget * (1 - tolerance / 3))
    points = [(low, cost_low), (high, cost_high)]  # the two latest evaluations
    while cost_high < budget * (1 - tolerance) and high > low * (1 + tolerance * (1e-3 if cost_low < math.inf else 1)):
        middle = _secant(points, log_target)
        if middle is None or not low * (high / low) ** 1e-3 < middle < high * (low / high) ** 1e-3:
            middle = math.sqrt(low * high)
        cost = cost_at(middle)
        points = [points[-1], (middle, cost)]
        if not cost <= budget:
            low, cost_low = middle, cost
        else:
            high, cost_high = middle, cost
    return high


def _least_noise_in_few_calls(
    cost_at: Callable[[float], float], budget: float, tolerance: float, start: float, power: float
) -> float:
    """`least_noise_within` for a slow cost, about noise^-power near the start. Evaluates the cost about three times."""
    noise, last = start, None
    for _ in range(_NEAR):
        cost = cost_at(noise)
        if budget * (1 - tolerance) <= cost <= budget:
            return noise
        if not 0 < cost < math.inf:
            break
        if last is not None and (last[0] - noise) * (cost - last[1]) > 0:
            power = math.log(cost / last[1]) / math.log(last[0] / noise)
        last = noise, cost
        if abs(math.log(cost / budget)) > _FAR * power:
            break  # the last two differ only by rounding
        noise *= (cost / (budget * (1 - tolerance / 3))) ** (1 / power)
    return least_noise_within(cost_at, budget, tolerance, noise)


def _secant(points: list[tuple[float, float]], log_target: float) -> float | None:
    """The noise at which ln cost is `log_target` on the line through two points in log-log coordinates, or None."""
    (noise, cost), (last_noise, last_cost) = points
    if not (0 < cost < math.inf and 0 < last_cost < math.inf) or cost == last_cost:
        return None
    log_cost, log_last = math.log(cost), math.log(last_cost)
    exponent = (log_target - log_last) / (log_cost - log_last) * math.log(noise / last_noise)
    return last_noise * math.exp(exponent) if abs(exponent) < _FAR else None  # the costs differ only by rounding


@explain_misuse
def max_steps(
    optimizer: Any,
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
) -> int:
    """Finds the largest number of steps, an int, whose cost at delta is at most epsilon; 0 if one step costs more.

    optimizer: a `dpx.Mechanism`. epsilon: positive and finite. delta: in (0, 1).
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation of the sampling.
    records: int, the most examples that the protected person owns, as for `dpx.epsilon`.

    If the cost is known only up to some step, because a schedule ends there, the result is at most that step. The cost
    grows with the steps, so the search doubles, then bisects, in about 2 log2(steps) evaluations.

    Guarantee: `dpx.epsilon(optimizer, max_steps(...), delta=delta)` is at most epsilon.

    Raises ValueError for arguments outside these ranges, and if 10,000,000 steps still cost at most epsilon.

        >>> dpx.accounting.max_steps(mechanism, epsilon=2.0, delta=1e-5)
        20
    """
    epsilon = checks.require_positive_epsilon(epsilon)
    require_event_and_sampling(optimizer)
    checks.warn_of_large_delta(delta, optimizer.sampling)

    def is_affordable(steps: int) -> bool:
        try:
            spent = cost_of_run(optimizer, steps, relation, records=records)
        except ValueError:
            if steps == 1:
                raise
            return False  # beyond the schedule
        return spent.profile(accountant).epsilon(delta) <= epsilon

    low, high = 0, 1
    while is_affordable(high):
        if high == _MOST_STEPS:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} must limit the steps, but {_MOST_STEPS} steps cost no more"
            )
        low, high = high, min(2 * high, _MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_affordable(middle) else (low, middle)
    return low
