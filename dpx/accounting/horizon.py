"""How long a mechanism may run: the most steps that a budget pays for."""

from typing import Any

from dpx.accounting import checks
from dpx.accounting.bill import billed, require_billable
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import event_epsilon

MOST_STEPS = 10_000_000


def max_steps(
    mechanism: Any,
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
) -> int:
    """The most steps whose bill is at most epsilon at delta; 0 if one step costs more.

    By doubling and bisection, as a bill grows with the steps: about 2 log2(steps) bills. A schedule that is defined for
    some steps only (its event raises ValueError beyond) is never run beyond them: all its steps are then the most. At a
    bill that stops growing there is no most: ValueError if 10,000,000 steps still cost at most epsilon.

    Guarantee: `dpx.epsilon(mechanism, max_steps(...), delta=delta)` is at most epsilon.
    """
    checks.epsilon(epsilon, positive=True)
    require_billable(mechanism)
    checks.warn_of_delta(delta, mechanism.sampling)

    def affordable(steps: int) -> bool:
        try:
            event, asked = billed(mechanism, steps, relation)
        except ValueError:
            if steps == 1:
                raise
            return False  # beyond the schedule
        return event_epsilon(event, delta=delta, accountant=accountant, relation=asked) <= epsilon

    low, high = 0, 1
    while affordable(high):
        if high == MOST_STEPS:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} must bound the steps, but {MOST_STEPS} steps cost no more"
            )
        low, high = high, min(2 * high, MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low
