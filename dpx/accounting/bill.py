"""What a mechanism has spent, or will have spent: epsilon and delta from its event."""

from typing import Any

import dp_accounting
import numpy as np

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import event_delta, event_epsilon, flatten
from dpx.release_state import release_state, steps_taken


def epsilon(
    mechanism: Any,
    steps_or_state: Any,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
) -> float:
    """An upper bound of epsilon at `delta` for the first steps of a mechanism; inf if a step adds no noise.

    steps_or_state: a number of steps, or an optimizer state, whose billed steps are read.
    accountant: "tightest" bills by "pld" (privacy loss distributions) where that is known for every release, else by
        "rdp" (Renyi divergences).
    relation: what neighbors are; default the one the mechanism's sampling states. Another is used where the event is
        true for it, else ValueError: Poisson samples also stand for nulling an example ("zero_out") and for replacing
        one ("replace_one").

    A delta of at least one over the number of examples warns.
    """
    event, relation = billed(mechanism, steps_or_state, relation)
    checks.warn_of_delta(delta, mechanism.sampling)
    return event_epsilon(event, delta=delta, accountant=accountant, relation=relation)


def delta(
    mechanism: Any,
    steps_or_state: Any,
    *,
    epsilon: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
) -> float:
    """An upper bound of delta at `epsilon` for the first steps of a mechanism; see `epsilon`."""
    checks.epsilon(epsilon)
    event, relation = billed(mechanism, steps_or_state, relation)
    return event_delta(event, epsilon=epsilon, accountant=accountant, relation=relation)


def billed(mechanism: Any, steps_or_state: Any, relation: Relation | None) -> tuple[dp_accounting.DpEvent, Relation]:
    """The event of the steps taken, and the relation to bill it under; a state must be the mechanism's own."""
    require_billable(mechanism)
    steps = steps_in(steps_or_state)
    if _is_number(steps_or_state):
        event = mechanism.event(steps) if steps else dp_accounting.NoOpDpEvent()
    elif hasattr(mechanism, "event_paid_by"):
        event = mechanism.event_paid_by(steps_or_state, steps)
    else:
        raise ValueError(f"a state is billed by the dpx Mechanism that made its releases, got {type(mechanism)}")
    stated = checks.relation(mechanism.sampling.relation)
    if relation is None or checks.relation(relation) == stated:
        return event, stated
    if "replace_one" in (stated, relation):
        if stated == "replace_one":
            raise ValueError(
                f'relation {relation!r} does not fit {mechanism.sampling}, whose event is true for "replace_one" only'
            )
    elif relation == "add_or_remove" and not flatten(event).amplified:
        raise ValueError(
            f'relation "add_or_remove" does not fit {mechanism.sampling}: one example more or fewer would change '
            'the other batches; its event is true for "zero_out"'
        )
    return event, relation


def require_billable(mechanism: Any) -> None:
    if not (hasattr(mechanism, "event") and hasattr(mechanism, "sampling")):
        raise ValueError(
            "mechanism must be a dpx Mechanism, which has an event and a sampling; of an optax.chain, give the one in "
            f"it. Got {type(mechanism)}"
        )


def steps_in(steps_or_state: Any) -> int:
    """A number of steps as it is, or the steps an optimizer state has been billed for."""
    if _is_number(steps_or_state):
        return checks.steps(steps_or_state)
    return steps_taken(checks.concrete("state", steps_or_state))


def stream_of(steps_or_state: Any) -> int:
    """The mark of the key that a state's batches were drawn with; 0 where it is not known."""
    return 0 if _is_number(steps_or_state) else int(release_state(steps_or_state).stream)


def _is_number(steps_or_state: Any) -> bool:
    return isinstance(steps_or_state, bool | int | float | np.generic)
