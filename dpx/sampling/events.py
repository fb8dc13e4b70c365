"""The events of samplings that dp-accounting lacks, and compositions of events."""

from collections.abc import Callable, Iterable

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent


@attrs.frozen
class RandomAllocationDpEvent(DpEvent):
    """The Gaussian releases of the first steps of one epoch, of which one random step has the example.

    noise_multiplier: pairs (noise multiplier, number of steps), rising; of the released steps of the epoch.
    steps_per_epoch: t, int, the number of steps among which the step of an example is drawn. If fewer are released,
        the epoch ended early, after a number of steps that was fixed in advance.

    It is true for one example more or fewer, and for a null in its place, with independent steps of all examples.
    Epochs compose, if each draws new steps. The order inside of an epoch does not matter. dp-accounting's accountants
    refuse this event; the cost is in `dpx/accounting/allocation.py`.
    """

    noise_multiplier: tuple[tuple[float, int], ...]
    steps_per_epoch: int


def is_constant(noise_multipliers: np.ndarray) -> bool:
    """Whether it is one number that numpy repeats, as `values_over` makes it: 10^9 steps need no time or memory."""
    return len(noise_multipliers) > 0 and noise_multipliers.strides == (0,)


def count_multipliers(noise_multipliers: np.ndarray) -> tuple[tuple[float, int], ...]:
    """Noise multipliers, float64 (steps,), as rising pairs (noise multiplier, number of steps)."""
    if is_constant(noise_multipliers):
        return ((float(noise_multipliers[0]), len(noise_multipliers)),)
    values, counts = np.unique(noise_multipliers, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def compose_events(parts: Iterable[tuple[DpEvent, int]]) -> DpEvent:
    """The composition of events, each repeated so often."""
    events = [dp_accounting.SelfComposedDpEvent(event, count) if count > 1 else event for event, count in parts]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def compose_releases(multipliers: np.ndarray, event_of: Callable[[float], DpEvent]) -> DpEvent:
    """The composition of releases, grouped by their noise multipliers, because their order does not change the cost.

    multipliers: float64 (steps,). event_of: (noise multiplier) -> DpEvent.
    """
    return compose_events((event_of(value), count) for value, count in count_multipliers(multipliers))
