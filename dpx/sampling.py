"""Samplings: one frozen record draws the batches and states their cost, so a run is billed for the batches it draws.

`take(data, key, state)` gives the batch of the next step, whose number it reads from the optimizer state. It runs on
the host, and calls `draw(key, step)`. Both are pure functions of the key, the step and the record, so a resumed run
draws the same batches. The key must stay as secret as the noise key, because amplification by sampling holds
only for batches that nobody knows.

To add one: a frozen dataclass here with the fields of `Sampling`, and a line in `dpx/catalog.py`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import dp_accounting
import jax
import jax.core
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx._draws import Draw, coins, keep_sizes, pad, permutation, require_step, round_up, step_key
from dpx._numbers import require_whole
from dpx.batches import Batch, Tree, batch_size
from dpx.release_state import next_step


class Sampling(Protocol):
    """The fields of a sampling record that mechanisms, accountants and training loops read.

    examples: size of the data set; a public number.
    relation: the neighboring relation under which `event` is true: "add_or_remove" (one example more or fewer),
              "zero_out" (one example's contribution set to zero) or "replace_one" (one exchanged for another).
    divisor:  the expected batch size; the private gradient is the noisy sum divided by it. A public constant.
    pads:     whether a batch may hold padding; otherwise every batch has `divisor` rows.
    most_rows: the largest number of rows of a batch that may count; inf where chance decides it.
    one_key:  whether `event` is true only if all batches of a run are drawn with one key.
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
        """The examples that take part in one step, as arrays of a fixed shape for a jitted step.

        key: a PRNG key, (), secret. step: int, the number of steps before this one in the whole run. It never restarts,
            because a step that is drawn twice has the same batch but is billed as two independent ones.
        size: rows of the result, at least as many as take part; None takes the record's own size.
        Raises ValueError if step is not a whole number of at least 0, and if size is too small.
        """
        ...

    def take(
        self, data: Tree, key: jax.Array, state: Tree, *, size: int | None = None, beyond_budget: bool = False
    ) -> Batch:
        """The batch of the next step of a run, a `dpx.Batch` of arrays with `size` rows.

        data: pytree of arrays, with the `examples` examples on axis 0 of each.
        key: a PRNG key, (), secret, of one run. With `ShuffledEpochs` it must be the same at every step, because a run
            whose batches come from several permutations has no bill.
        state: of the optimizer. Its step count is read, so this call waits until the state is computed.
        size: rows of the batch, the last of which are padding; None takes the record's own size.
        beyond_budget: continue after the steps of the `dpx.Budget` that the mechanism was calibrated for.

        Raises ValueError if the data have another length, if the mechanism of the state bills another sampling, and at
        the first step beyond the budget.
        """
        step = next_step(state, self, beyond_budget=beyond_budget)
        if batch_size(data) != self.examples:
            raise ValueError(f"data must hold the {self.examples} examples of the sampling, got {batch_size(data)}")
        indices, included = self.draw(key, step, size=size)
        drawn = np.array([step, included.sum(), keys.mark(key), 0], np.uint32)
        return Batch(jax.tree.map(lambda rows: rows[indices], data), included, drawn)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Sampling):
    """At every step, each example takes part with probability batch_size / examples, independently of the others.

    examples:   size of the data set; a public number.
    batch_size: the EXPECTED batch size, in (0, examples]; the divisor.
    capacity:   rows of a drawn batch; by default the expected size plus five standard deviations, rounded up to a
                multiple of 8. A larger batch is never cut: its rows are the next multiple of 1/8 of the capacity.

    Raises ValueError for other sizes. Its event is that of Abadi et al. 2016, https://arxiv.org/abs/1607.00133.
    """

    examples: int
    batch_size: float
    capacity: int | None = field(default=None, repr=False)  # no part of what is drawn
    relation: ClassVar[str] = "add_or_remove"

    def __post_init__(self):
        keep_sizes(self)
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
            deviation = math.sqrt(self.batch_size * (1 - self.probability))
            size = self.capacity or min(self.examples, round_up(self.batch_size + 5 * deviation, 8))
            if len(drawn) > size:
                size = round_up(len(drawn), max(1, size // 8))
        return pad(drawn, size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(
            multipliers,
            lambda sigma: dp_accounting.PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)),
        )


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling(Sampling):
    """At every step, a new subset of `batch_size` examples, drawn uniformly without replacement.

    Replacing an example moves the sum by twice the clip norm, so the event has half the noise multiplier. It is billed
    by Renyi divergences (Wang, Balle and Kasiviswanathan 2019, https://arxiv.org/abs/1808.00087). Raises ValueError
    unless both sizes are whole numbers with 1 <= batch_size <= examples.
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "replace_one"

    def __post_init__(self):
        keep_sizes(self, whole=True)

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
    """A new permutation every epoch, cut into batches; the last batch of an epoch may be short.

    An example takes part once an epoch, in a batch that an adversary may know, so no amplification is claimed. An epoch
    is billed as one Gaussian release at its smallest noise multiplier (mu = sqrt(epochs) / sigma), even if it is not
    complete. Raises ValueError for the same sizes as `FixedSizeSampling`.
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        keep_sizes(self, whole=True)

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
    """Every example at every step: the event is that of the Gaussian releases, because nothing is left to chance.

    Raises ValueError unless `examples` is a whole number of at least 1.
    """

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


def _composed(multipliers: np.ndarray, event_of) -> DpEvent:
    """The composition of releases, grouped by their noise multipliers, because their order does not change the bill.

    multipliers: float64 (steps,). event_of: (noise multiplier) -> DpEvent.
    """
    values, counts = np.unique(multipliers, return_counts=True)
    events: list[DpEvent] = [
        dp_accounting.SelfComposedDpEvent(event_of(float(value)), int(count)) if count > 1 else event_of(float(value))
        for value, count in zip(values, counts, strict=True)
    ]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
