"""How batches are drawn, and what that costs: one frozen record, so that what is drawn is what is billed.

`take(data, key, state)` gives the batch of the next step, whose number it reads from the optimizer state. It runs on
the host, and calls `draw(key, step)`. Both are pure functions of the key, the step and the record, so a resumed run
draws the same batches. The key must stay as secret as the noise key, because amplification by sampling holds
for batches that nobody knows.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import dp_accounting
import jax
import jax.core
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx._draws import Draw, coins, pad, permutation, require_step, round_up, step_key
from dpx._numbers import require_whole
from dpx.batches import Batch, Tree, batch_size
from dpx.release_state import next_step


class Sampling(Protocol):
    """What a mechanism asks of its sampling.

    examples: size of the data set, public.

    relation: the neighboring relation under which `event` is true: "add_or_remove" (one example more or fewer),
              "zero_out" (one example's contribution nulled) or "replace_one" (one example exchanged for another).
    divisor:  the expected batch size; the private gradient is the noisy sum divided by it. A public constant.
    pads:     whether a batch may hold rows that do not count; else every batch has `divisor` rows.
    most_rows: how many rows of a batch may count at most; inf where that is a matter of chance.
    one_key:  whether all batches of a run must be drawn with one key for `event` to be true.
    event:    (multipliers) -> DpEvent of len(multipliers) releases with these noise multipliers, float64 (steps,).
    """

    examples: int
    relation: ClassVar[str]
    one_key: ClassVar[bool] = False

    @property
    def divisor(self) -> float: ...
    @property
    def pads(self) -> bool:
        return False

    @property
    def most_rows(self) -> float:
        return self.divisor

    def event(self, multipliers: np.ndarray) -> DpEvent: ...

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        """Which examples take part in a step: fixed shapes, for a jitted step.

        step: the whole number of steps that the whole run has made so far. It never restarts, also not at a new epoch:
            a step drawn twice has the same batch, which is billed as two independent ones.
        size: rows of the result, at least as many as take part; None leaves it to the record.
        Raises ValueError for a step that is no whole number of at least 0, and for too small a size.
        """
        ...

    def take(
        self, data: Tree, key: jax.Array, state: Tree, *, size: int | None = None, beyond_budget: bool = False
    ) -> Batch:
        """The batch of the next step that `state` has not paid for; arrays with `size` rows.

        data: a pytree of arrays with the `examples` examples on axis 0 of each.
        key: of one run, secret. With `ShuffledEpochs` the same at every step, else the run is not billed.
        state: of the optimizer, whose step count is read; waits until it is computed.
        size: rows of the batch, the rest is padding; None leaves it to the record.
        beyond_budget: go on after the steps of the `dpx.Budget` that the mechanism was calibrated for.

        Raises ValueError where data has another length, where the mechanism of the state bills another sampling, and at
        the first step beyond the budget.
        """
        step = next_step(state, self, beyond_budget=beyond_budget)
        if batch_size(data) != self.examples:
            raise ValueError(f"data must hold the {self.examples} examples of the sampling, got {batch_size(data)}")
        indices, included = self.draw(key, step, size=size)
        drawn = np.array([step, included.sum(), keys.mark(key)], np.uint32)
        return Batch(jax.tree.map(lambda rows: rows[indices], data), included, drawn)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Sampling):
    """Every example flips its own coin of probability `batch_size / examples` at every step.

    examples:   size of the data set, public.
    batch_size: the EXPECTED batch size, at most `examples`; the divisor.
    capacity:   rows of a drawn batch; default the expected size plus five standard deviations, rounded up to 8. A
                larger batch is never cut: it comes in the next multiple of 1/8 of the capacity.
    """

    examples: int
    batch_size: float
    capacity: int | None = field(default=None, repr=False)  # no part of what is drawn
    relation: ClassVar[str] = "add_or_remove"

    def __post_init__(self):
        _keep_sizes(self)
        if self.capacity is not None:
            require_whole("capacity", self.capacity)

    @property
    def probability(self) -> float:
        return self.batch_size / self.examples

    @property
    def divisor(self) -> float:
        return self.batch_size

    @property
    def pads(self) -> bool:
        return True

    @property
    def most_rows(self) -> float:
        return math.inf

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        drawn = np.flatnonzero(coins(step_key(key, require_step(step)), self.examples, self.probability))
        if size is None:
            size = self.capacity or min(self.examples, round_up(self.batch_size + 5 * self._deviation(), 8))
            if len(drawn) > size:
                size = round_up(len(drawn), max(1, size // 8))
        return pad(drawn, size)

    def _deviation(self) -> float:
        return math.sqrt(self.batch_size * (1 - self.probability))

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(
            multipliers,
            lambda sigma: dp_accounting.PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)),
        )


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling(Sampling):
    """`batch_size` of the examples, uniformly without replacement, afresh at every step.

    Replacing an example moves the sum by twice the clip norm; the event's noise multiplier is halved for it. Billed by
    RDP (Wang, Balle and Kasiviswanathan 2019, https://arxiv.org/abs/1808.00087).
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "replace_one"

    def __post_init__(self):
        _keep_sizes(self, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        drawn = jax.random.choice(step_key(key, require_step(step)), self.examples, (self.batch_size,), replace=False)
        return pad(np.asarray(drawn), size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(
            multipliers,
            lambda sigma: dp_accounting.SampledWithoutReplacementDpEvent(
                self.examples, self.batch_size, GaussianDpEvent(sigma / 2)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(Sampling):
    """A fresh permutation every epoch, cut into batches; the last batch of an epoch may be short.

    An example takes part once an epoch, in a batch an adversary may know: no amplification is claimed. An epoch is
    billed as one Gaussian release at its smallest noise multiplier (mu = sqrt(epochs) / sigma), a begun epoch in full.
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        _keep_sizes(self, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    @property
    def pads(self) -> bool:
        return self.examples % self.batch_size != 0

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        epoch, position = divmod(require_step(step), self.steps_per_epoch)
        order = permutation(step_key(key, epoch), self.examples)
        start = position * self.batch_size
        return pad(order[start : start + self.batch_size], size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        epochs = [
            multipliers[start : start + self.steps_per_epoch].min()
            for start in range(0, len(multipliers), self.steps_per_epoch)
        ]
        return _composed(np.asarray(epochs), GaussianDpEvent)


@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampling):
    """Every example at every step."""

    examples: int
    relation: ClassVar[str] = "zero_out"

    def __post_init__(self):
        object.__setattr__(self, "examples", require_whole("examples", self.examples))

    @property
    def divisor(self) -> float:
        return self.examples

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        require_step(step)
        del key
        return pad(np.arange(self.examples), size or self.examples)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(multipliers, GaussianDpEvent)


def _keep_sizes(sampling: Any, *, whole: bool = False):
    """Checks both sizes and stores them as Python numbers, so that equal records print alike."""
    examples, size = require_whole("examples", sampling.examples), sampling.batch_size
    number = int | np.integer if whole else int | float | np.integer | np.floating
    if isinstance(size, bool) or not isinstance(size, number):
        raise ValueError(f"batch_size must be a {'whole ' if whole else ''}number, got {size!r}")
    if not 0 < size <= examples:
        raise ValueError(f"batch_size must be in (0, examples = {examples}], got {size}")
    object.__setattr__(sampling, "examples", examples)
    object.__setattr__(sampling, "batch_size", int(size) if size == int(size) else float(size))


def _composed(multipliers: np.ndarray, event_of) -> DpEvent:
    """The releases grouped by their noise multiplier; their order does not matter to the bill."""
    values, counts = np.unique(multipliers, return_counts=True)
    events: list[DpEvent] = [
        dp_accounting.SelfComposedDpEvent(event_of(float(value)), int(count)) if count > 1 else event_of(float(value))
        for value, count in zip(values, counts, strict=True)
    ]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
