"""Budgets: (epsilon, delta) for a number of steps or epochs, which is given in place of a noise multiplier."""

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from dpx.accounting import checks
from dpx.accounting.calibration import calibrate
from dpx.accounting.checks import Accountant
from dpx.sampling.base import Sampling
from dpx.values import described, require_bool, require_number, require_whole

M = TypeVar("M", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """(epsilon, delta) for a run. Pass it as the noise multiplier of any function that accepts a budget.

        >>> budget = dpx.Budget(epsilon=2.0, delta=1e-5, epochs=5)
        >>> dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key).noise_multiplier
        1.344...

    The mechanism remembers its budget: `sampling.take` and `sampling.batches` refuse the step after the last one, and
    a run that ends earlier still costs the whole budget, because the releases may have decided when it ends.

    epsilon: float, positive and finite. delta: float in (0, 1), ideally far below 1 divided by the number of examples.
    steps: int, at least 1, of the whole run. epochs: float, positive, in place of steps. A mechanism turns epochs into
        steps, by `sampling.steps(epochs=epochs)`, because the sampling decides how long an epoch is.
    accountant: which one keeps the cost at most epsilon, as for `dpx.epsilon`.
    records: int, at least 1. Above 1, epsilon protects a person who owns up to this many examples, for Poisson samples
        and full batches only. So does every later cost of the mechanism, and its report says so. You must ensure that
        nobody owns more, for example with `dpx.sampling.records_to_keep`. With `dpx.UserData`, the sampling draws
        persons, so leave it at 1.
    public_stop: bool. True promises that only public information decides when a run ends: no release, no
        metric of the parameters and no private data. A run that ends early then costs only the steps that it took.
    numbers: int, at most 2^32, the most numbers that a step releases: those that the model trains, and one more with
        adaptive clipping. Every cost is for this many, and `init` refuses more parameters. None:
        the noise is for 2^32, and the cost of a state for its own. It matters for small deltas (`docs/exact.md`).

    Raises ValueError for a field outside its range, unless exactly one of steps and epochs is given, and in arithmetic.
    """

    epsilon: float
    delta: float
    steps: int = None  # pyrefly: ignore[bad-assignment]  # an int in every mechanism, because it takes `for_sampling`
    epochs: float | None = None
    accountant: Accountant = "tightest"
    records: int = 1
    public_stop: bool = False
    numbers: int | None = None

    def __post_init__(self):
        checks.require_positive_epsilon(self.epsilon)
        checks.require_delta(self.delta)
        checks.require_accountant(self.accountant)
        require_whole("records", self.records)
        require_bool("public_stop", self.public_stop)
        checks.numbers_per_release(1 if self.numbers is None else self.numbers)
        if (self.steps is None) == (self.epochs is None):
            given = f"{described(self.steps)} and {described(self.epochs)}"
            raise ValueError(f"a dpx.Budget must have exactly one of steps and epochs, got {given}")
        if self.epochs is None:
            require_whole("steps", self.steps)
        else:
            require_number("epochs", self.epochs, minimum=0, exclusive=True)

    def for_sampling(self, sampling: Sampling) -> "Budget":
        """This budget with steps, those that its epochs are under `sampling`."""
        if self.epochs is None:
            return self
        return replace(self, steps=sampling.steps(epochs=self.epochs), epochs=None)

    def _no_number(self, *_: Any) -> NoReturn:
        raise ValueError(
            "a Budget is not a number: give it as the noise_multiplier itself, which is then constant. For a schedule "
            "that meets a budget, decorate a function of noise_multiplier with dpx.accounting.accepts_budget, and "
            "multiply the schedule by that number inside"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_number
    __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number


def accepts_budget(build: Callable[..., M]) -> Callable[..., M]:
    """Returns `build`, a function that builds a mechanism, so that its `noise_multiplier` may also be a `Budget`.

    Given a Budget, it finds the least noise multiplier that stays within it. Decorate the
    function that builds the OUTERMOST mechanism, because a wrapper around a mechanism may raise its cost:

        @dpx.accounting.accepts_budget
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
        arguments = _bound_args(build.__name__, signature, args, kwargs)
        budget = arguments.arguments.get("noise_multiplier")
        if not isinstance(budget, Budget):
            return build(*args, **kwargs)

        def make_with_noise(noise_multiplier: float):
            arguments.arguments["noise_multiplier"] = noise_multiplier
            return build(*arguments.args, **arguments.kwargs)

        budget = budget.for_sampling(make_with_noise(1.0).sampling)
        bill = {"accountant": budget.accountant, "records": budget.records, "numbers": budget.numbers}
        noise_multiplier = calibrate(
            make_with_noise, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta, **bill
        )
        return make_with_noise(noise_multiplier).replace(budget=budget)

    parameters = [p if p.name != "noise_multiplier" else _accepting_budget(p) for p in signature.parameters.values()]
    vars(builder)["__signature__"] = signature.replace(parameters=parameters)
    return builder


def _bound_args(name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments by their names. Raises TypeError, which names the function, and the nearest of its arguments."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        words, unknown = str(error), [given for given in kwargs if given not in signature.parameters]
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        near = difflib.get_close_matches(unknown[0], signature.parameters, n=1)
        words = f"got an unexpected argument {unknown[0]!r}{f', did you mean {near[0]!r}?' if near else ''}"
    raise TypeError(f"{name}() {words}; its arguments are {', '.join(signature.parameters)}")


def _accepting_budget(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation: Any = parameter.annotation
    return parameter.replace(annotation=Budget if annotation is parameter.empty else annotation | Budget)
