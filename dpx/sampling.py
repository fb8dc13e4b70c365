"""How batches are drawn, and what that costs: one frozen record, so that what is drawn is what is billed.

`draw(key, step)` runs on the host and gives fixed-shape `(indices, weights)` for a jitted step: int32 and float32, both
(size,), with weight 0 and index 0 on padded rows. It is a pure function of the key, the step and the record, so a
resumed run draws the same batches. The key must stay as secret as the noise key: amplification by sampling holds for
batches nobody knows.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.schedules import require_whole

Batch = tuple[np.ndarray, np.ndarray]


class Sampling(Protocol):
    """What a mechanism asks of its sampling.

    relation: the neighbouring relation under which `event` is true: "add_or_remove" (one example more or fewer),
              "zero_out" (one example's contribution nulled) or "replace_one" (one example exchanged for another).
    divisor:  the expected batch size; the private gradient is the noisy sum divided by it. A public constant.
    event:    (multipliers) -> DpEvent of len(multipliers) releases with these noise multipliers, float64 (steps,).
    """

    relation: ClassVar[str]

    @property
    def divisor(self) -> float: ...
    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Batch: ...
    def event(self, multipliers: np.ndarray) -> DpEvent: ...


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every example flips its own coin of probability `batch_size / examples` at every step.

    examples:   size of the data set, public.
    batch_size: the EXPECTED batch size, at most `examples`; the divisor.
    capacity:   rows of a drawn batch; default the expected size plus five standard deviations, rounded up to 8. A
                larger batch is never cut: it comes in the next multiple of 1/8 of the capacity.
    """

    examples: int
    batch_size: float
    capacity: int | None = None
    relation: ClassVar[str] = "add_or_remove"

    def __post_init__(self):
        _check_sizes(self.examples, self.batch_size)
        if self.capacity is not None:
            require_whole("capacity", self.capacity)

    @property
    def probability(self) -> float:
        return self.batch_size / self.examples

    @property
    def divisor(self) -> float:
        return self.batch_size

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Batch:
        drawn = np.flatnonzero(_coins(_step_key(key, step), self.examples, self.probability))
        if size is None:
            size = self.capacity or min(self.examples, _round_up(self.batch_size + 5 * self._deviation(), 8))
            if len(drawn) > size:
                size = _round_up(len(drawn), max(1, size // 8))
        return _pad(drawn, size)

    def _deviation(self) -> float:
        return math.sqrt(self.batch_size * (1 - self.probability))

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(
            multipliers,
            lambda sigma: dp_accounting.PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)),
        )


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """`batch_size` of the examples, uniformly without replacement, afresh at every step.

    Replacing an example moves the sum by twice the clip norm; the event's noise multiplier is halved for it. Billed by
    RDP (Wang, Balle and Kasiviswanathan 2019, https://arxiv.org/abs/1808.00087).
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "replace_one"

    def __post_init__(self):
        _check_sizes(self.examples, self.batch_size, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Batch:
        drawn = jax.random.choice(_step_key(key, step), self.examples, (self.batch_size,), replace=False)
        return _pad(np.asarray(drawn), size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(
            multipliers,
            lambda sigma: dp_accounting.SampledWithoutReplacementDpEvent(
                self.examples, self.batch_size, GaussianDpEvent(sigma / 2)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs:
    """A fresh permutation every epoch, cut into batches; the last batch of an epoch may be short.

    An example takes part once an epoch, in a batch an adversary may know: no amplification is claimed. An epoch is
    billed as one Gaussian release at its smallest noise multiplier (mu = sqrt(epochs) / sigma), a begun epoch in full.
    """

    examples: int
    batch_size: int
    relation: ClassVar[str] = "zero_out"

    def __post_init__(self):
        _check_sizes(self.examples, self.batch_size, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Batch:
        epoch, position = divmod(int(step), self.steps_per_epoch)
        order = _permutation(_key_bytes(_step_key(key, epoch)), self.examples)
        start = position * self.batch_size
        return _pad(order[start : start + self.batch_size], size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        epochs = [
            multipliers[start : start + self.steps_per_epoch].min()
            for start in range(0, len(multipliers), self.steps_per_epoch)
        ]
        return _composed(np.asarray(epochs), GaussianDpEvent)


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Every example at every step."""

    examples: int
    relation: ClassVar[str] = "zero_out"

    def __post_init__(self):
        _check_sizes(self.examples, self.examples)

    @property
    def divisor(self) -> float:
        return self.examples

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Batch:
        del key, step
        return _pad(np.arange(self.examples), size or self.examples)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return _composed(multipliers, GaussianDpEvent)


def _check_sizes(examples: int, batch_size: float, *, whole: bool = False):
    require_whole("examples", examples)
    number = int | np.integer if whole else int | float | np.integer | np.floating
    if isinstance(batch_size, bool) or not isinstance(batch_size, number):
        raise ValueError(f"batch_size must be a {'whole ' if whole else ''}number, got {batch_size!r}")
    if not 0 < batch_size <= examples:
        raise ValueError(f"batch_size must be in (0, examples = {examples}], got {batch_size}")


def _step_key(key: jax.Array, step: int) -> jax.Array:
    return keys.stream(key, "sampling", step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _coins(key: jax.Array, examples: int, probability: float) -> jax.Array:
    """One coin per example: 32 bits under a threshold rounded down, so no likelier than billed."""
    if probability == 1:
        return jnp.ones(examples, bool)
    return jax.random.bits(key, (examples,), jnp.uint32) < jnp.uint32(math.floor(probability * 2**32))


def _pad(drawn: np.ndarray, size: int) -> Batch:
    if len(drawn) > size:
        raise ValueError(
            f"size must hold the whole batch of {len(drawn)} examples, got {size}; a cut batch is not the billed one"
        )
    indices, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
    indices[: len(drawn)], weights[: len(drawn)] = drawn, 1
    return indices, weights


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


def _round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _key_bytes(key: jax.Array) -> tuple[str, bytes]:
    return str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key)).tobytes()


@functools.lru_cache(maxsize=2)
def _permutation(key: tuple[str, bytes], examples: int) -> np.ndarray:
    implementation, data = key
    wrapped = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, np.uint32)), impl=implementation)
    return np.asarray(jax.random.permutation(wrapped, examples))
