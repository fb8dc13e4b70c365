"""A long schedule replaced by few distinct steps, each rounded to one side.

A step with less noise, or a higher sampling rate, dominates: noise can be added and examples dropped afterwards, and
domination survives adaptive composition. So rounding every noise multiplier DOWN to one present in its bucket (and
rates UP) bills at least the truth, and rounding the other way at most.
"""

import math
from typing import NamedTuple

import numpy as np


class Buckets(NamedTuple):
    """Arrays (buckets,): the smallest and largest noise multiplier and rate in each, and how many steps it holds."""

    smallest_noise: np.ndarray
    largest_noise: np.ndarray
    smallest_rate: np.ndarray
    largest_rate: np.ndarray
    counts: np.ndarray

    def scaled(self, factor: float) -> "Buckets":
        """The same buckets of the schedule times `factor`."""
        return self._replace(smallest_noise=self.smallest_noise * factor, largest_noise=self.largest_noise * factor)


def bucketed(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """At most `buckets` groups of the steps, of about equal rounding cost; exact if no more steps are distinct.

    Rates come first: with more than sqrt(buckets) distinct ones they are grouped too.
    """
    steps, inverse = np.unique(np.stack([rates, sigmas]), axis=1, return_inverse=True)
    repeats = np.bincount(inverse.reshape(-1), counts, steps.shape[1]).astype(np.int64)
    (rates, sigmas), repeats = steps[:, repeats > 0], repeats[repeats > 0]
    if len(repeats) <= buckets:
        return Buckets(sigmas, sigmas, rates, rates, repeats)
    levels = np.unique(rates)
    groups = np.searchsorted(levels, rates)
    most = math.isqrt(buckets)
    if len(levels) > most:
        groups = _cut(np.log(levels), np.ones(len(levels)), most)[groups]
    numbers = np.unique(groups)
    share = max(1, buckets // len(numbers))
    labels = np.empty(len(repeats), np.int64)
    for number in numbers:
        rows = np.flatnonzero(groups == number)
        rows = rows[np.argsort(sigmas[rows], kind="stable")]
        cost = repeats[rows] * _cost(sigmas[rows], rates[rows])
        labels[rows] = number * buckets + _cut(np.log(sigmas[rows]), cost, share)
    names, labels = np.unique(labels, return_inverse=True)
    small, large = np.full(len(names), np.inf), np.zeros(len(names))
    slow, fast = small.copy(), large.copy()
    np.minimum.at(small, labels, sigmas)
    np.maximum.at(large, labels, sigmas)
    np.minimum.at(slow, labels, rates)
    np.maximum.at(fast, labels, rates)
    return Buckets(small, large, slow, fast, np.bincount(labels, repeats).astype(np.int64))


def _cost(sigmas: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """What a relative change of the noise multiplier changes in one step's bill, up to a constant factor."""
    precision = np.minimum(sigmas**-2.0, 1e6)
    return precision * np.exp(np.minimum(precision, -2 * np.log(rates)))


def _cut(logs: np.ndarray, cost: np.ndarray, groups: int) -> np.ndarray:
    """A label in [0, groups) for each of the increasing `logs`.

    Total rounding cost sum_t cost_t (width of t's group) is least when widths go like cost density^(-1/2).
    """
    gaps = np.diff(logs, append=logs[-1])
    gaps[-1] = gaps[-2] if len(gaps) > 1 else 1.0
    position = np.cumsum(np.sqrt(cost * np.maximum(gaps, 1e-12)))
    return np.minimum(
        (groups * (position - position[0]) / (position[-1] - position[0] + 1e-300)).astype(int), groups - 1
    )
