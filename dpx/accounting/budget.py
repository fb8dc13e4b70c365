"""Budgets: (epsilon, delta) for a number of steps, which is given in place of a noise multiplier."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dpx.accounting import checks
from dpx.accounting.calibration import calibrate
from dpx.accounting.checks import Accountant
from dpx.scalars import require_whole
from dpx.trees import described

M = TypeVar("M", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """(epsilon, delta) for `steps` steps. Give it where a function that is `calibrated` takes a noise multiplier.

    The mechanism remembers its budget: `sampling.take` and `sampling.batches` refuse the step after the last one.

    epsilon: float, positive and finite. delta: float in (0, 1), best far below 1 divided by the number of examples.
    steps: int, at least 1. accountant: the one by which the bill is at most epsilon, as for `dpx.epsilon`.

    Raises ValueError for a field outside its range.
    """

    epsilon: float
    delta: float
    steps: int
    accountant: Accountant = "tightest"

    def __post_init__(self):
        checks.require_positive_epsilon(self.epsilon)
        checks.require_delta(self.delta)
        checks.require_accountant(self.accountant)
        require_whole("steps", self.steps)


def calibrated(build: Callable[..., M]) -> Callable[..., M]:
    """`build`, a function that builds a mechanism, but its `noise_multiplier` may also be a `Budget`.

    For a Budget, it takes the least noise multiplier with which the mechanism spends at most the budget. Decorate the
    function that builds the OUTERMOST mechanism, because a wrapper around a mechanism may raise its cost:

        @dpx.calibrated
        def mine(*, noise_multiplier, **rest):
            return dpx.mechanisms.clip_then_project(dpx.dp_sgd(noise_multiplier=noise_multiplier, **rest), rank=12, ...)

    build: takes an argument `noise_multiplier`; the noise of every step must grow with that number.

    Raises ValueError if `build` is not a function of such an argument; what it returns raises as `calibrate` does.
    """
    if not callable(build):
        raise ValueError(f"build must be a function, got {described(build)}")
    signature = inspect.signature(build)
    if "noise_multiplier" not in signature.parameters:
        raise ValueError(f"build must take an argument noise_multiplier, got {build.__qualname__}{signature}")

    @functools.wraps(build)
    def builder(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs)
        budget = arguments.arguments.get("noise_multiplier")
        if not isinstance(budget, Budget):
            return build(*args, **kwargs)

        def make(noise_multiplier: float):
            arguments.arguments["noise_multiplier"] = noise_multiplier
            return build(*arguments.args, **arguments.kwargs)

        noise_multiplier = calibrate(
            make, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta, accountant=budget.accountant
        )
        return make(noise_multiplier).replace(budget=budget)

    parameters = [p if p.name != "noise_multiplier" else _accepting_budget(p) for p in signature.parameters.values()]
    vars(builder)["__signature__"] = signature.replace(parameters=parameters)
    return builder


def _accepting_budget(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation: Any = parameter.annotation
    return parameter.replace(annotation=Budget if annotation is parameter.empty else annotation | Budget)
