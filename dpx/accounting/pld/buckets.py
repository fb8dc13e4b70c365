"""A long schedule replaced by few distinct steps, each rounded to one side.

Proof: a step with less noise, or with a higher sampling rate, dominates, because noise can be added and examples can be
dropped afterwards. Domination survives adaptive composition. So the bill is at least the truth if every noise
multiplier is rounded DOWN to one present in its bucket, and every rate UP. It is at most the truth if they are rounded
the other way.
"""

import math
from typing import NamedTuple

import numpy as np

_LARGEST_PRECISION = 1e6  # sigma^-2 in the cost of a step, so that noise near 0 does not take all buckets
_SMALLEST_GAP = 1e-12  # between ln sigma of neighbors, so that equal ones do not stop the cut


class Buckets(NamedTuple):
    """Arrays (buckets,): the ends of the noise multipliers and rates in each (float64), and its steps (int64)."""

    smallest_noise: np.ndarray
    largest_noise: np.ndarray
    smallest_rate: np.ndarray
    largest_rate: np.ndarray
    counts: np.ndarray

    def scaled(self, factor: float) -> "Buckets":
        """The buckets of the schedule whose noise multipliers are `factor` times as large."""
        return self._replace(smallest_noise=self.smallest_noise * factor, largest_noise=self.largest_noise * factor)


def bucketed(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """At most `buckets` groups of the steps (T,), of about equal rounding cost; exact if no more steps are distinct.

    Rates are grouped first, because more than sqrt(buckets) distinct ones would leave too few buckets for the noise.
    """
    steps, inverse = np.unique(np.stack([rates, sigmas]), axis=1, return_inverse=True)
    repeats = np.bincount(inverse.reshape(-1), counts, steps.shape[1]).astype(np.int64)
    (rates, sigmas), repeats = steps[:, repeats > 0], repeats[repeats > 0]
    if len(repeats) <= buckets:
        return Buckets(sigmas, sigmas, rates, rates, repeats)
    distinct_rates = np.unique(rates)
    rate_groups = np.searchsorted(distinct_rates, rates)
    most_rates = math.isqrt(buckets)
    if len(distinct_rates) > most_rates:
        rate_groups = _cut(np.log(distinct_rates), np.ones(len(distinct_rates)), most_rates)[rate_groups]
    numbers = np.unique(rate_groups)
    buckets_each = max(1, buckets // len(numbers))
    labels = np.empty(len(repeats), np.int64)
    for number in numbers:
        rows = np.flatnonzero(rate_groups == number)
        rows = rows[np.argsort(sigmas[rows], kind="stable")]
        cost = repeats[rows] * _cost(sigmas[rows], rates[rows])
        labels[rows] = number * buckets + _cut(np.log(sigmas[rows]), cost, buckets_each)
    distinct, labels = np.unique(labels, return_inverse=True)
    low_noise, high_noise = np.full(len(distinct), np.inf), np.zeros(len(distinct))
    low_rate, high_rate = low_noise.copy(), high_noise.copy()
    np.minimum.at(low_noise, labels, sigmas)
    np.maximum.at(high_noise, labels, sigmas)
    np.minimum.at(low_rate, labels, rates)
    np.maximum.at(high_rate, labels, rates)
    return Buckets(low_noise, high_noise, low_rate, high_rate, np.bincount(labels, repeats).astype(np.int64))


def _cost(sigmas: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """How much one step's bill changes with a relative change of its noise multiplier, up to a constant factor."""
    precision = np.minimum(sigmas**-2.0, _LARGEST_PRECISION)
    return precision * np.exp(np.minimum(precision, -2 * np.log(rates)))


def _cut(logs: np.ndarray, cost: np.ndarray, groups: int) -> np.ndarray:
    """A label in [0, groups) for each of the increasing `logs`.

    The total rounding cost sum_t cost_t (width of t's group) is least if widths are proportional to
    (cost density)^(-1/2).
    """
    gaps = np.diff(logs, append=logs[-1])
    gaps[-1] = gaps[-2] if len(gaps) > 1 else 1.0
    position = np.cumsum(np.sqrt(cost * np.maximum(gaps, _SMALLEST_GAP)))
    return np.minimum(
        (groups * (position - position[0]) / (position[-1] - position[0] + 1e-300)).astype(int), groups - 1
    )
