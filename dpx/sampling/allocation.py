"""Random allocation: every example exactly once an epoch, in a uniformly random step of it."""

import attrs
from dp_accounting import DpEvent


@attrs.frozen
class RandomAllocationDpEvent(DpEvent):
    """The Gaussian releases of the first steps of one epoch, of which one random step has the example.

    noise_multiplier: pairs (noise multiplier, number of steps), rising; of the released steps of the epoch.
    steps_per_epoch: t, int, the number of steps among which the step of an example is drawn. If fewer are released,
        the epoch ended early, after a number of steps that was fixed in advance.

    It is true for one example more or fewer, and for a null in its place, with independent steps of all examples.
    Epochs compose, if each draws new steps. The order inside of an epoch does not matter. dp-accounting's accountants
    refuse this event; the bill is in `dpx/accounting/pld/allocation.py`.
    """

    noise_multiplier: tuple[tuple[float, int], ...]
    steps_per_epoch: int
