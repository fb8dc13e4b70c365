"""The horizon of a mechanism: the largest number of steps whose bill is within a budget."""

from typing import Any

from dpx.accounting import checks
from dpx.accounting.bill import event_of, require_billable
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import billed

_MOST_STEPS = 10_000_000  # more than any run takes: a bill within the budget here does not bound the steps


def max_steps(
    optimizer: Any,
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
) -> int:
    """The largest number of steps whose bill is at most epsilon at delta, an int; 0 if one step costs more.

    optimizer: a `dpx.Mechanism`. epsilon: positive and finite. delta: in (0, 1).
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation that the sampling states.

    A schedule may be defined for some steps only, and its event raises ValueError beyond them. The result is then at
    most that number of steps. The search doubles and then bisects, because a bill grows with the steps, so it computes
    about 2 log2(steps) bills.

    Guarantee: `dpx.epsilon(optimizer, max_steps(...), delta=delta)` is at most epsilon.

    Raises ValueError for arguments outside these ranges, and if 10,000,000 steps still cost at most epsilon.
    """
    epsilon = checks.require_positive_epsilon(epsilon)
    require_billable(optimizer)
    checks.warn_of_large_delta(delta, optimizer.sampling)

    def affordable(steps: int) -> bool:
        try:
            event, stated = event_of(optimizer, steps, relation)
        except ValueError:
            if steps == 1:
                raise
            return False  # beyond the schedule
        return billed(event, accountant=accountant, relation=stated).epsilon(delta) <= epsilon

    low, high = 0, 1
    while affordable(high):
        if high == _MOST_STEPS:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} must bound the steps, but {_MOST_STEPS} steps cost no more"
            )
        low, high = high, min(2 * high, _MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low
