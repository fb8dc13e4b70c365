"""Poisson sampling: a coin for each example at every step; on request with public weights, or a limit of the rows."""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
import scipy.special
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from dpx import keys
from dpx.keys import cipher
from dpx.sampling.batch import (
    Draw,
    normalize_sizes,
    padded_row_count,
    random_order,
    require_step,
    step_key,
    toss_coins,
    toss_every_step,
    usual_row_count,
)
from dpx.sampling.schemes import VaryingSize, compose_releases
from dpx.values import described, names_arguments, require_floats, require_number, require_whole, warn_user

_ROWS, _KEPT = 1, 2  # the numbers of the keys of a step: of the rows of its examples, and of those that are kept


class PublicWeights:
    """A public weight for each example, which records with equal numbers share: they are equal and print alike.

    values: float64 (examples,), finite, at least 0, of a positive sum. Raises ValueError for others.
    """

    def __init__(self, values: Any, examples: int):
        if isinstance(values, PublicWeights):
            values = values.values
        weights = np.array(require_floats("weights", values), np.float64)
        if weights.shape != (examples,):
            raise ValueError(f"weights must be one number for each of the {examples} examples, got {weights.shape}")
        if wrong := int((~(np.isfinite(weights) & (weights >= 0))).sum()):
            raise ValueError(f"weights must be finite and at least 0, got {wrong} others")  # and shows none of them
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

    def rate(self, weight: Any, batch_size: float) -> Any:
        """The sampling rate of a weight, min(1, batch_size weight / sum of weights); float64, as `weight`."""
        return np.minimum(1.0, batch_size * weight / self.values.sum())


class CoinThresholds(NamedTuple):
    """Below which number, of 64 bits, a coin is heads: two words, uint32 (examples,), and where it always is, bool."""

    high: np.ndarray
    low: np.ndarray
    always: np.ndarray


def coin_thresholds(rates: np.ndarray) -> CoinThresholds:
    """The largest multiples of 2^-64 that are at most the rates, float64 (examples,)."""
    always = rates >= 1
    limits = np.where(always, 0.0, rates * 2.0**64).astype(np.uint64)  # the product is exact, and rounded down
    return CoinThresholds((limits >> np.uint64(32)).astype(np.uint32), limits.astype(np.uint32), always)


def toss_weighted_coins(key: jax.Array, heads: CoinThresholds) -> np.ndarray:
    """Which examples take part, bool (examples,). At equal rates, these are the coins of `draws.toss_coins`."""
    return np.asarray(_coins_below(keys.key_words(key), heads))


@jax.jit
def _coins_below(words: jax.Array, heads: CoinThresholds) -> jax.Array:
    high, low, _, _ = cipher.draw_bits(words, len(heads.high))
    return (high < heads.high) | (high == heads.high) & (low < heads.low) | heads.always


@names_arguments
@dataclass(frozen=True, kw_only=True, repr=False)
class PoissonSampling(VaryingSize):
    """At every step, each example takes part with probability batch_size / examples, independently of the others.

    examples:   size of the data set; a public number.
    batch_size: the EXPECTED batch size, in (0, examples]; the divisor.
    most_rows:  int in [batch_size, examples]: if the coins choose more examples, a uniformly random subset of this many
                takes part. All batches are then arrays of exactly `most_rows` rows: one shape, one compilation.
                One example may displace another, so a run costs more, and much more for `most_rows` near batch_size;
                from about batch_size + 5 sqrt(batch_size) on, it costs the same (`dpx.check_setup` says how much). The
                divisor stays batch_size. By default, inf: a batch is never cut.
    weights:    PUBLIC numbers of at least 0, (examples,). Example i then takes part with probability
                q_i = min(1, batch_size w_i / sum w), and the divisor is sum q_i, which is below batch_size where rates
                are capped at 1. The cost is at the largest rate, for every example; `dpx.epsilon(..., weight=w)` is
                that of the examples of weight w and less. Weights that were computed from labels or other private data
                are private: no cost covers them. Dividing a clipped gradient by q_i lets an example move the sum by
                C / q_i, which no cost covers either.

    Without `most_rows`, the rows of a drawn batch are the least multiple of 8 that a batch exceeds with a probability
    below 1e-9. A larger batch is not cut: its rows are the next multiple of 1/8 of these (docs/exact.md).

    Neighbors differ by a null in place of one example, which keeps its place and does not count. The cost is that of
    adding or removing an example. But a deleted row would move all later ones, and so the rounding of their sum. The
    cost does not cover the size of a batch: whoever sees it, for example in the time of a step, learns about the coins.

    Raises ValueError for other sizes. Its event is that of Abadi et al. 2016, https://arxiv.org/abs/1607.00133; with
    `most_rows`, dp-accounting's `TruncatedSubsampledGaussianDpEvent`, and the proof is in
    `dpx/accounting/sampled_gaussians.py`.

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
        normalize_sizes(self)
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
        """The largest rate of an example."""
        return self.batch_size / self.examples if self.weights is None else float(self.rates.max())

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """The rate of each example, float64 (examples,)."""
        if self.weights is None:
            return np.full(self.examples, self.probability)
        return self.weights.rate(self.weights.values, self.batch_size)

    def rate_of(self, weight: float) -> float:
        """The rate of an example of this weight. Raises ValueError without weights, and for one above all of them."""
        if self.weights is None:
            words = f"because the examples of {self} have no weights"
            raise ValueError(f"weight must be left out, {words}; got {described(weight)}")
        most = float(self.weights.values.max())
        if require_number("weight", weight, minimum=0) > most:
            raise ValueError(f"weight must be at most the largest one, {most}, got {weight}")
        return float(self.weights.rate(weight, self.batch_size))

    @property
    def plain(self) -> bool:
        """Whether the coins, of one rate, decide alone."""
        return self.weights is None and not self.truncates

    @property
    def weighted(self) -> bool:
        return self.weights is not None

    @property
    def own_coins(self) -> bool:
        return not self.truncates

    @functools.cached_property
    def _coin_thresholds(self) -> CoinThresholds:
        return coin_thresholds(self.rates)

    @property
    def truncates(self) -> bool:
        """Whether batches have a limit of rows. The event is then not that of Poisson sampling."""
        return self.most_rows != math.inf

    @property
    def participation(self) -> float:
        """The largest probability of an example to take part: less than that of its coin, where batches are cut."""
        if not self.truncates:
            return self.probability
        sizes = np.arange(self.most_rows)
        short = scipy.special.bdtr(sizes, self.examples, self.probability).sum()  # of the mean of min(size, most_rows)
        return float(self.most_rows - short) / self.examples

    @functools.cached_property
    def divisor(self) -> float:
        return self.batch_size if self.weights is None else float(self.rates.sum())

    @property
    def usual_rows(self) -> int:
        if self.truncates:
            return int(self.most_rows)
        # With several rates, a batch is not larger than of one rate with the same mean (Hoeffding 1956).
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
        return self.scattered(drawn, size, keys.fold_in(own, _ROWS))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return toss_every_step(key, steps, self.participation)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        if self.truncates:
            event = TruncatedSubsampledGaussianDpEvent
            sizes = self.examples, self.probability, int(self.most_rows)
            return compose_releases(multipliers, lambda sigma: event(*sizes, sigma))
        return compose_releases(
            multipliers, lambda sigma: PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma))
        )


def _random_subset(drawn: np.ndarray, count: int, key: jax.Array, fitting: int) -> np.ndarray:
    """A uniformly random subset of the drawn examples, int (count,), rising.

    The first of the drawn would be those of the lowest numbers, for which no cost is known.
    fitting: at least as many as are drawn; of few values, because a program is compiled for each.
    """
    places = random_order(key, fitting, fitting)  # a random order of more places is one of the first of them
    return np.sort(drawn[places[places < len(drawn)][:count]])
