"""Samplings with random batch sizes: Poisson sampling tosses a coin for each example at every step, optionally with
public weights or a limit on the rows; random allocation draws a step of every epoch for it; cyclic Poisson sampling
puts it into one of several groups, which take turns.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from dpx import keys
from dpx.keys import streams
from dpx.sampling.batch import (
    Draw,
    check_and_store_sizes,
    draw_bits,
    draw_step_per_epoch,
    key_of_words,
    padded_row_count,
    random_order,
    require_enough_rows,
    require_step,
    scatter_examples,
    step_key,
    toss_coin_per_step,
    toss_coins,
    usual_row_count,
)
from dpx.sampling.schemes import Sampling, compose_events, compose_releases, is_constant, steps_by_multiplier
from dpx.values import described, explain_misuse, require_floats, require_number, require_whole, warn_user

_ROWS, _KEPT = 1, 2  # fold-in numbers for the keys of a step: which rows its examples get, which examples are kept
_TOGETHER = 2**20  # how many examples' steps are drawn at once: 16 MiB. The steps depend on this number.
_PARTS = 2**32 - 1  # fold-in number for the key of the parts; numbers below 2^31 are for the rows of each step


@dataclass(frozen=True, kw_only=True)
class RandomSizeSampling(Sampling):
    """A sampling with random batch sizes: batches are not cut, and their examples are in random rows."""

    pads, most_rows = True, math.inf

    @property
    def usual_rows(self) -> int:
        return usual_row_count(self.examples, self.divisor / self.examples)

    def place_in_random_rows(self, drawn: np.ndarray, size: int | None, key: jax.Array) -> Draw:
        """Puts the drawn examples into random rows of `size` rows; None takes the usual size, or more if needed.

        key: scalar key for choosing the rows.
        """
        if size is None:
            size = padded_row_count(len(drawn), self.usual_rows)
        require_enough_rows(drawn, size)
        return scatter_examples(drawn, size, key)


class PublicWeights:
    """A public weight for each example. Objects with the same weights are equal and print alike.

    values: float64 (examples,). Raises ValueError unless they are finite and at least 0, with a positive sum.
    """

    def __init__(self, values: Any, examples: int):
        if isinstance(values, PublicWeights):
            values = values.values
        weights = np.array(require_floats("weights", values), np.float64)
        if weights.shape != (examples,):
            raise ValueError(f"weights must be one number for each of the {examples} examples, got {weights.shape}")
        if wrong := int((~(np.isfinite(weights) & (weights >= 0))).sum()):
            raise ValueError(f"weights must be finite and at least 0, got {wrong} others")  # shows no weight
        if not 0 < weights.sum() < np.inf:
            raise ValueError(f"weights must have a positive sum, got {weights.sum()}")
        weights.flags.writeable = False
        self.values = weights

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.values.tobytes()).hexdigest()[:16]

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, PublicWeights) and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash(self.digest)

    def identity(self) -> tuple:
        return "weights", len(self.values), self.digest

    def __repr__(self) -> str:
        return f"<{len(self.values)} from {self.values.min():.6g} to {self.values.max():.6g}, {self.digest}>"

    def rate_of_weight(self, weight: Any, batch_size: float) -> Any:
        """Returns the rate of a weight, min(1, batch_size * weight / sum of weights); float64, shaped like `weight`."""
        return np.minimum(1.0, batch_size * weight / self.values.sum())


class CoinThresholds(NamedTuple):
    """Coins are heads if their 64 bits are below these words, uint32 (examples,), or if `always`, bool (examples,)."""

    high: np.ndarray
    low: np.ndarray
    always: np.ndarray


def coin_thresholds(rates: np.ndarray) -> CoinThresholds:
    """Returns the thresholds of coins with these rates, float64 (examples,), rounded down to multiples of 2^-64."""
    always = rates >= 1
    limits = np.where(always, 0.0, rates * 2.0**64).astype(np.uint64)  # an exact product, rounded down
    return CoinThresholds((limits >> np.uint64(32)).astype(np.uint32), limits.astype(np.uint32), always)


@jax.jit
def toss_weighted_coins(key: jax.Array, heads: CoinThresholds) -> jax.Array:
    """Draws which examples take part, bool (examples,). If all rates are equal, the coins are those of `toss_coins`."""
    high, low, _, _ = streams.draw_bits(keys.key_words(key), len(heads.high))
    return (high < heads.high) | (high == heads.high) & (low < heads.low) | heads.always


@explain_misuse
@dataclass(frozen=True, kw_only=True, repr=False)
class PoissonSampling(RandomSizeSampling):
    """At every step, each example takes part with probability batch_size / examples, independently of the others.

    examples:   size of the data set; a public number.
    batch_size: the EXPECTED batch size, in (0, examples]; the divisor.
    most_rows:  int in [batch_size, examples]. If more examples are chosen, a uniformly random subset of this size takes
                part. All batches are then arrays of exactly `most_rows` rows: one shape, one compilation.
                One example may displace another, so a run costs more, and much more if `most_rows` is near batch_size;
                from about batch_size + 5 sqrt(batch_size) on, it costs the same (`dpx.check_setup` says how much). The
                divisor stays batch_size. The default, inf, never cuts a batch.
    weights:    PUBLIC numbers of at least 0, (examples,). Example i then takes part with probability
                q_i = min(1, batch_size w_i / sum w), and the divisor is sum q_i, which is below batch_size if some
                rates are capped at 1. The cost holds for every example, at the largest rate;
                `dpx.epsilon(..., weight=w)` is the cost for examples with weight at most w. Weights that were computed
                from labels or other private data are private, and no cost covers them. Do not divide clipped gradients
                by q_i: an example could then move the sum by clip_norm / q_i, which no cost covers either.

    Without `most_rows`, a drawn batch has the smallest multiple of 8 rows that a batch exceeds with probability below
    1e-9. A larger batch is not cut: its size is rounded up to a multiple of 1/8 of that (docs/exact.md).

    Neighbors differ by a null in place of one example, which keeps its place and does not count. The cost equals that
    of adding or removing an example, but a deleted row would move all later ones, and change the rounding of their sum.
    The cost does not cover the size of a batch: whoever sees it, perhaps by timing a step, learns about the coins.

    Raises ValueError for sizes outside these domains. The event is that of Abadi et al. 2016,
    https://arxiv.org/abs/1607.00133; with `most_rows`, it is dp-accounting's `TruncatedSubsampledGaussianDpEvent`,
    proved in `dpx/accounting/limited_samples.py`.

        >>> sampling = dpx.PoissonSampling(examples=1_000, batch_size=50)
        >>> batch = sampling.take(data, key, state)  # 50 rows are expected to count, of 96
        >>> batch.included.shape, sampling.steps(epochs=5)
        ((96,), 100)
    """

    batch_size: float
    most_rows: float = math.inf  # pyrefly: ignore[bad-override]
    weights: Any = None
    relation: ClassVar[str] = "zero_out"

    def __post_init__(self):
        check_and_store_sizes(self)
        if self.weights is not None:
            object.__setattr__(self, "weights", PublicWeights(self.weights, self.examples))
            if (count := int((self.rates == 1).sum())) and self.batch_size < self.examples:
                words = "an example takes part in every step, so epsilon has no amplification"
                warn_user(f"{count} weights give a rate of 1: such {words}. Cap the weights")
        if self.most_rows == math.inf:
            return
        most = require_whole("most_rows", self.most_rows)
        if not self.batch_size <= most <= self.examples:
            limits = f"[batch_size = {self.batch_size}, examples = {self.examples}]"
            raise ValueError(f"most_rows must be in {limits}, got {described(self.most_rows)}")
        if self.weights is not None:
            raise ValueError(f"weights must be left out with most_rows, because no cost is known for both; got {self}")
        object.__setattr__(self, "most_rows", most)

    def __repr__(self) -> str:
        limit = f", most_rows={self.most_rows}" if self.truncates else ""
        weights = "" if self.weights is None else f", weights={self.weights}"
        return f"PoissonSampling(examples={self.examples}, batch_size={self.batch_size}{limit}{weights})"

    @property
    def probability(self) -> float:
        """The largest sampling rate of any example."""
        return self.batch_size / self.examples if self.weights is None else float(self.rates.max())

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """The sampling rate of each example, float64 (examples,)."""
        if self.weights is None:
            return np.full(self.examples, self.probability)
        rates = self.weights.rate_of_weight(self.weights.values, self.batch_size)
        rates.flags.writeable = False  # the coins, the divisor and the cost read this array
        return rates

    def rate_of_weight(self, weight: float) -> float:
        """Returns the rate of this weight. Raises ValueError if there are no weights, or only smaller ones."""
        if self.weights is None:
            words = f"because the examples of {self} have no weights"
            raise ValueError(f"weight must be left out, {words}; got {described(weight)}")
        most = float(self.weights.values.max())
        if (weight := require_number("weight", weight, minimum=0)) > most:  # an int8 would wrap around below
            raise ValueError(f"weight must be at most the largest one, {most}, got {weight}")
        return float(self.weights.rate_of_weight(weight, self.batch_size))

    @property
    def unweighted_and_unlimited(self) -> bool:
        """Whether there are no weights and no limit on the rows, so that one rate decides who takes part."""
        return self.weights is None and not self.truncates

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    @property
    def draws_examples_independently(self) -> bool:
        return not self.truncates

    @functools.cached_property
    def _coin_thresholds(self) -> CoinThresholds:
        return coin_thresholds(self.rates)

    @property
    def truncates(self) -> bool:
        """Whether the rows of a batch are limited. The event is then not that of Poisson sampling."""
        return self.most_rows != math.inf

    @property
    def participation_probability(self) -> float:
        """The largest probability that an example takes part, which is below its coin's rate if batches are cut."""
        if not self.truncates:
            return self.probability
        sizes = np.arange(self.most_rows)
        short = scipy.special.bdtr(sizes, self.examples, self.probability).sum()  # most_rows - E[min(size, most_rows)]
        return float(self.most_rows - short) / self.examples

    @functools.cached_property
    def divisor(self) -> float:
        return self.batch_size if self.weights is None else float(self.rates.sum())

    @property
    def usual_rows(self) -> int:
        if self.truncates:
            return int(self.most_rows)
        # Different rates do not make large batches more likely than one rate with the same mean (Hoeffding 1956).
        return usual_row_count(self.examples, self.divisor / self.examples)

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        own = step_key(key, require_step(key, step))
        if self.weights is None:
            drawn = np.flatnonzero(toss_coins(own, self.examples, self.probability))
        else:
            drawn = np.flatnonzero(toss_weighted_coins(own, self._coin_thresholds))
        if len(drawn) > self.most_rows:
            fitting = padded_row_count(len(drawn), usual_row_count(self.examples, self.probability))
            drawn = _random_subset(drawn, int(self.most_rows), keys.fold_in(own, _KEPT), fitting)
        return self.place_in_random_rows(drawn, size, keys.fold_in(own, _ROWS))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return toss_coin_per_step(key, steps, self.participation_probability)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        if self.truncates:
            event = TruncatedSubsampledGaussianDpEvent
            sizes = self.examples, self.probability, int(self.most_rows)
            return compose_releases(multipliers, lambda sigma: event(*sizes, sigma))
        return compose_releases(
            multipliers, lambda sigma: PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma))
        )


def _random_subset(drawn: np.ndarray, count: int, key: jax.Array, fitting: int) -> np.ndarray:
    """Draws a uniformly random subset of the drawn examples, int (count,), sorted.

    Keeping the first `count` instead would always favor the lowest indices, for which no cost is known.
    fitting: at least the number of drawn examples, rounded up so that few values occur, as each compiles a program.
    """
    places = random_order(key, fitting, fitting)  # a random order of more places also orders the first ones randomly
    return np.sort(drawn[places[places < len(drawn)][:count]])


@attrs.frozen
class RandomAllocationDpEvent(DpEvent):
    """Gaussian releases of the first steps of one epoch, in which an example takes part in one random step.

    noise_multiplier: rising pairs (noise multiplier, number of steps), for the released steps of the epoch.
    steps_per_epoch: t, int, the number of steps from which each example's step is drawn. If fewer are released, the
        epoch ended early, after a number of steps that was fixed in advance.

    The event holds for one example more or fewer and for a null in its place, if the examples' steps are independent.
    Epochs compose if each draws new steps. The order within an epoch does not matter. dp-accounting's accountants
    refuse this event; its cost is in `dpx/accounting/allocation.py`.
    """

    # Small integers of numpy would wrap where they are added.
    noise_multiplier: tuple[tuple[float, int], ...] = attrs.field(
        converter=lambda pairs: tuple((float(multiplier), operator.index(count)) for multiplier, count in pairs)
    )
    steps_per_epoch: int = attrs.field(converter=operator.index)


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class RandomAllocation(RandomSizeSampling):
    """Every example takes part exactly once per epoch, in a uniformly random step, independently of all others.

    examples:        size of the data set, below 2^31; a public number.
    steps_per_epoch: t, in [1, examples]. The divisor is examples / t, the expected batch size. Batch sizes vary as much
                     as with `PoissonSampling`.

    The step of an example is 64 cipher bits of (key, epoch, example), modulo t. No step has a probability above
    (1 + t 2^-64) / t. The excess adds less than t 2^-64 to an epoch's epsilon, and costs leave this out. An epoch is
    drawn once, as a list of the examples of each step, from parts of 2^20 examples. The list takes 4 bytes of host
    memory for each example (4 GB for 10^9).

    Neighbors differ by a null in place of one example, as for `PoissonSampling`. The cost of replacing an example is
    not known. All batches of a run must be drawn with one key, because several keys would give several allocations. An
    epoch that ends early costs less if its last step was fixed in advance; if releases decide when to stop, the run
    costs its planned number of steps. The cost does not cover the size of a batch. The event is
    `RandomAllocationDpEvent`, proved in `dpx/accounting/allocation.py`. Raises ValueError for sizes outside these
    domains.
    """

    steps_per_epoch: int = field()  # pyrefly: ignore[bad-override]
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True
    steps_per_public_epoch = 0

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
    def steps_per_exact_epoch(self) -> int:
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
        return self.place_in_random_rows(drawn, size, keys.fold_in(own, place))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return draw_step_per_epoch(key, steps, self.steps_per_epoch, self.steps_per_epoch)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        steps = self.steps_per_epoch
        whole = len(multipliers) // steps * steps
        if is_constant(multipliers):
            distinct, counts = [multipliers[:steps]][:whole], np.array([whole // steps])[:whole]
        else:
            epochs = np.sort(multipliers[:whole].reshape(-1, steps), axis=1)
            distinct, counts = np.unique(epochs, axis=0, return_counts=True) if whole else (epochs, np.zeros(0, int))
        parts = [(*pair,) for pair in zip(map(steps_by_multiplier, distinct), counts.tolist(), strict=True)]
        if len(multipliers) > whole:
            parts.append((steps_by_multiplier(multipliers[whole:]), 1))
        return compose_events((RandomAllocationDpEvent(noise, steps), count) for noise, count in parts)


@functools.lru_cache(maxsize=1)
def allocate_examples(words: bytes, examples: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples in the order of their steps, int32 (examples,), and the starts of steps, int64 (steps + 1,).

    The result stays in memory, because every step of an epoch needs it.
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
    lists.flags.writeable = False  # callers get views of what the cache holds
    return lists, starts


def _steps_of_examples(words: bytes, examples: int, steps: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields, for each part of 2^20 examples, its first example, int, and its examples' steps, int64 (examples,).

    Each part has its own key, derived from its index.
    """
    parts, together = keys.fold_in(key_of_words(words), _PARTS), min(examples, _TOGETHER)
    for number in range(-(-examples // together)):
        high, low, _, _ = map(np.asarray, draw_bits(keys.key_words(keys.fold_in(parts, number)), together))
        bits = high.astype(np.uint64) << np.uint64(32) | low
        first = number * together
        yield first, (bits % np.uint64(steps)).astype(np.int64)[: examples - first]


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(RandomSizeSampling):
    """Each example is in one of `bands` groups, which take turns; in its group's steps, a coin decides if it joins.

    examples:   size of the data set, below 2^31; a public number.
    batch_size: the EXPECTED batch size, the divisor. The coins have the rate bands * batch_size / examples.
    bands:      b, int, at least 1, with b * batch_size <= examples. 1 is Poisson sampling.

    Step t uses group t mod b. The group of an example is drawn once for the run, by 64 cipher bits that depend only on
    the key and the example. So an example takes part at most once in b steps, as noise that is correlated over b steps
    requires (https://arxiv.org/abs/2306.08153, theorem 4). All batches of a run must be drawn with one key.

    With independent noise, T steps cost ceil(T / b) Poisson-sampled Gaussians of this rate, each at the least noise
    multiplier of its b steps. Proof: let all groups be public. Neighbors differ by a null in place of one example, so
    their sums differ only in the steps of its group, at most one in b, where its coin is independent of everything
    released before. The other steps are post-processing. The groups are independent of each other, so the cost also
    holds for one example more or fewer. It is higher than that of Poisson sampling: use plain noise here only to
    compare.

    Raises ValueError for sizes outside these domains.
    """

    batch_size: float
    bands: int = field()
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        check_and_store_sizes(self)
        bands = require_whole("bands", self.bands)
        if self.examples >= 2**31:
            raise ValueError(f"examples must be below 2^31, because an index is an int32; got {self.examples}")
        if bands * self.batch_size > self.examples:
            limit = f"examples / batch_size = {self.examples / self.batch_size:g}"
            raise ValueError(f"bands must be at most {limit}, because the rate of the coins is at most 1; got {bands}")
        object.__setattr__(self, "bands", bands)

    @property
    def probability(self) -> float:
        """The rate of an example's coins, in the steps of its group."""
        return min(1.0, self.bands * self.batch_size / self.examples)

    @property
    def group_count(self) -> int:
        return self.bands

    @property
    def divisor(self) -> float:
        return self.batch_size

    def examples_of_group(self, key: jax.Array, number: int) -> np.ndarray:
        """Returns one group's examples, int32 (members,), sorted. key: scalar key of the run. number: int < `bands`."""
        words = np.asarray(keys.key_words(step_key(key, 0))).tobytes()
        members, starts = allocate_examples(words, self.examples, self.bands)
        return members[starts[number] : starts[number + 1]]

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        step = require_step(key, step)
        own, members = step_key(key, step), self.examples_of_group(key, step % self.bands)
        drawn = members[np.asarray(toss_coins(own, self.examples, self.probability))[members]]
        return self.place_in_random_rows(drawn, size, keys.fold_in(own, _ROWS))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        group = jax.random.randint(keys.public_key(key), (), 0, self.bands)
        return toss_coin_per_step(key, steps, self.probability) & (jnp.arange(steps) % self.bands == group)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        least = np.minimum.reduceat(multipliers, np.arange(0, len(multipliers), self.bands))
        return compose_releases(least, lambda sigma: PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)))
