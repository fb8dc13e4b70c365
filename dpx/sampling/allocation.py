"""Samplings that give each example a place: a random step of every epoch, or one of the groups that take turns."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent

from dpx import keys
from dpx.sampling.batch import (
    Draw,
    draw_bits,
    draw_epoch_steps,
    key_of_words,
    normalize_sizes,
    require_step,
    step_key,
    toss_coins,
    toss_every_step,
)
from dpx.sampling.schemes import VaryingSize, compose_events, compose_releases, count_multipliers, is_constant
from dpx.values import names_arguments, require_whole

_TOGETHER = 2**20  # examples whose steps are drawn at once: 16 MiB. The steps depend on this number.
_PARTS = 2**32 - 1  # the number of the key of the parts; those below 2^31 are of the rows of each step


@names_arguments
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


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(VaryingSize):
    """Every example exactly once an epoch, in a uniformly random step of it, independently of all others.

    examples:        size of the data set, below 2^31; a public number.
    steps_per_epoch: t, in [1, examples]. The divisor is examples / t, the expected batch size. The sizes of batches
                     vary as much as those of `PoissonSampling`.

    The step of an example is 64 bits of a cipher of (key, epoch, example), modulo t. No step has a probability above
    1/t by more than the factor 1 + t 2^-64, which adds less than t 2^-64 to the epsilon of an epoch; no
    cost counts it. An epoch is made once, as a list of the examples of each step. It takes 4 bytes of the host for each
    example (4 GB for 10^9), and is made from parts of 2^20 examples.

    Neighbors differ by a null in place of one example, as for `PoissonSampling`. No cost of replacing an example is
    known. All batches of a run must be drawn with one key, because several keys would give several allocations. An
    epoch that ends early costs less, if its last step was fixed in advance; a stop that looks at releases costs the
    planned number of steps. The cost does not cover the size of a batch. Its event is `RandomAllocationDpEvent`, and
    the proof is in `dpx/accounting/allocation.py`. Raises ValueError for other sizes.
    """

    steps_per_epoch: int = field()  # pyrefly: ignore[bad-override]
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        examples = require_whole("examples", self.examples)
        steps = require_whole("steps_per_epoch", self.steps_per_epoch)
        if examples >= 2**31:
            raise ValueError(f"examples must be below 2^31, because an index is an int32; got {examples}")
        if steps > examples:
            raise ValueError(f"steps_per_epoch must be in [1, examples = {examples}], got {steps}")
        object.__setattr__(self, "examples", examples)
        object.__setattr__(self, "steps_per_epoch", steps)

    @property
    def epoch(self) -> int:
        return self.steps_per_epoch

    @property
    def divisor(self) -> float:
        return self.examples / self.steps_per_epoch

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        epoch, place = divmod(require_step(key, step), self.steps_per_epoch)
        own = step_key(key, epoch)
        lists, starts = allocate_examples(
            np.asarray(keys.key_words(own)).tobytes(), self.examples, self.steps_per_epoch
        )
        drawn = lists[starts[place] : starts[place + 1]]
        return self.scattered(drawn, size, keys.fold_in(own, place))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return draw_epoch_steps(key, steps, self.steps_per_epoch, self.steps_per_epoch)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        steps = self.steps_per_epoch
        whole = len(multipliers) // steps * steps
        if is_constant(multipliers):
            distinct, counts = [multipliers[:steps]][:whole], np.array([whole // steps])[:whole]
        else:
            epochs = np.sort(multipliers[:whole].reshape(-1, steps), axis=1)
            distinct, counts = np.unique(epochs, axis=0, return_counts=True) if whole else (epochs, np.zeros(0, int))
        parts = [(*pair,) for pair in zip(map(count_multipliers, distinct), counts.tolist(), strict=True)]
        if len(multipliers) > whole:
            parts.append((count_multipliers(multipliers[whole:]), 1))
        return compose_events((RandomAllocationDpEvent(noise, steps), count) for noise, count in parts)


@functools.lru_cache(maxsize=1)
def allocate_examples(words: bytes, examples: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples in the order of their steps, int32 (examples,), and where each step begins, int64 (steps + 1,).

    It is kept in memory, because every step of an epoch needs the same one.
    """
    counts = np.zeros(steps, np.int64)
    for _, own in _steps_of_examples(words, examples, steps):
        counts += np.bincount(own, minlength=steps)
    starts = np.concatenate([[0], np.cumsum(counts)])
    lists, filled = np.empty(examples, np.int32), starts[:-1].copy()
    for first, own in _steps_of_examples(words, examples, steps):
        order = np.argsort(own, kind="stable")
        sorted_steps, counts = own[order], np.bincount(own, minlength=steps)
        within = np.arange(len(own)) - (np.cumsum(counts) - counts)[sorted_steps]
        lists[filled[sorted_steps] + within] = first + order
        filled += counts
    return lists, starts


def _steps_of_examples(words: bytes, examples: int, steps: int) -> Iterator[tuple[int, np.ndarray]]:
    """The first example of each part of 2^20, int, and the steps of the examples in it, int64 (examples of the part,).

    Each part has a key of its own, that of its number.
    """
    parts, together = keys.fold_in(key_of_words(words), _PARTS), min(examples, _TOGETHER)
    for number in range(-(-examples // together)):
        high, low, _, _ = map(np.asarray, draw_bits(keys.key_words(keys.fold_in(parts, number)), together))
        bits = high.astype(np.uint64) << np.uint64(32) | low
        first = number * together
        yield first, (bits % np.uint64(steps)).astype(np.int64)[: examples - first]


_ROWS = 1  # the number of the key of the rows of a step


@names_arguments
@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(VaryingSize):
    """Each example is in one of `bands` groups, which take turns; in its group's steps, a coin decides if it joins.

    examples:   size of the data set, below 2^31; a public number.
    batch_size: the EXPECTED batch size, the divisor. The coins have the rate bands * batch_size / examples.
    bands:      b, int of at least 1, with b * batch_size <= examples. 1 is Poisson sampling.

    Step t uses group t mod b. The group of an example is drawn once for the run, by 64 bits of a cipher of the key and
    of the example alone. So an example takes part at most every b steps, which noise that is correlated over b steps
    needs (https://arxiv.org/abs/2306.08153, theorem 4). All batches of a run must be drawn with one key.

    The cost of T steps with independent noise is that of ceil(T / b) Poisson-sampled Gaussians of this rate, of each b
    steps the one with the least noise. Proof: let the groups of all examples be public. Neighbors differ by a null in
    place of one example, and their sums differ in the steps of its group alone, at most one of each b; there, its coin
    is independent of all that was released. The other steps are post-processing. The groups are independent of each
    other, so it is true for one example more or fewer as well. It costs more than Poisson sampling: use it with plain
    noise to compare.

    Raises ValueError for other sizes.
    """

    batch_size: float
    bands: int = field()
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        normalize_sizes(self)
        bands = require_whole("bands", self.bands)
        if self.examples >= 2**31:
            raise ValueError(f"examples must be below 2^31, because an index is an int32; got {self.examples}")
        if bands * self.batch_size > self.examples:
            limit = f"examples / batch_size = {self.examples / self.batch_size:g}"
            raise ValueError(f"bands must be at most {limit}, because the rate of the coins is at most 1; got {bands}")
        object.__setattr__(self, "bands", bands)

    @property
    def probability(self) -> float:
        """The rate of the coins, in the steps of an example's group."""
        return min(1.0, self.bands * self.batch_size / self.examples)

    @property
    def groups(self) -> int:
        return self.bands

    @property
    def divisor(self) -> float:
        return self.batch_size

    def group(self, key: jax.Array, number: int) -> np.ndarray:
        """The examples of one group, int32 (of the group,), rising. key: of the run, (). number: int, below `bands`."""
        words = np.asarray(keys.key_words(step_key(key, 0))).tobytes()
        members, starts = allocate_examples(words, self.examples, self.bands)
        return members[starts[number] : starts[number + 1]]

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        step = require_step(key, step)
        own, members = step_key(key, step), self.group(key, step % self.bands)
        drawn = members[np.asarray(toss_coins(own, self.examples, self.probability))[members]]
        return self.scattered(drawn, size, keys.fold_in(own, _ROWS))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        group = jax.random.randint(keys.public_key(key), (), 0, self.bands)
        return toss_every_step(key, steps, self.probability) & (jnp.arange(steps) % self.bands == group)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        least = np.minimum.reduceat(multipliers, np.arange(0, len(multipliers), self.bands))
        return compose_releases(least, lambda sigma: PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)))
