"""Public weights of the examples, and the sampling rates that are proportional to them."""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx import keys
from dpx.keys import cipher
from dpx.values import require_floats


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
