"""What may be spent, in the place of a noise multiplier."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dpx.accounting import checks
from dpx.accounting.calibration import calibrate
from dpx.accounting.checks import Accountant

M = TypeVar("M", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """(epsilon, delta) for `steps` steps: stands wherever a function `calibrated` takes a noise multiplier.

    The mechanism remembers it: `sampling.take` refuses the step after the last one.
    epsilon: above 0. delta: in (0, 1), best far below 1 / examples. steps: at least 1.
    accountant: by which the bill is at most epsilon.
    """

    epsilon: float
    delta: float
    steps: int
    accountant: Accountant = "tightest"

    def __post_init__(self):
        checks.epsilon(self.epsilon, positive=True)
        checks.delta(self.delta)
        checks.accountant(self.accountant)
        if checks.steps(self.steps) == 0:
            raise ValueError("steps must be at least 1, got 0")


def calibrated(build: Callable[..., M]) -> Callable[..., M]:
    """`build`, which makes a mechanism, with `noise_multiplier` either a number (or schedule) or a `Budget`.

    For a Budget, the least noise multiplier is found with which what `build` makes, as a whole, spends at most that.
    Decorate the function that makes the OUTERMOST mechanism, because what is put around a mechanism may raise its cost:

        @dpx.calibrated
        def mine(*, noise_multiplier, **rest):
            return dpx.clip_then_project(dpx.dp_sgd(noise_multiplier=noise_multiplier, **rest), rank=12, ...)

    build: takes `noise_multiplier`, in which the noise must grow. Raises ValueError if it does not take it.
    """
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

        found = calibrate(
            make, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta, accountant=budget.accountant
        )
        return make(found).replace(budget=budget)

    taken = [p if p.name != "noise_multiplier" else _or_budget(p) for p in signature.parameters.values()]
    builder.__signature__ = signature.replace(parameters=taken)  # pyright: ignore[reportAttributeAccessIssue]
    return builder


def _or_budget(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation: Any = parameter.annotation
    return parameter.replace(annotation=Budget if annotation is parameter.empty else annotation | Budget)
