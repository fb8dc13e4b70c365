"""Replaces a long schedule by few distinct steps, each rounded to one side.

Proof: a step with less noise, or with a higher sampling rate, dominates another one, because noise can be added and
examples can be dropped afterwards. Domination also holds for adaptive compositions. So the bill is at least the truth
if every noise multiplier is rounded DOWN to the smallest in its bucket, and every rate UP to the largest. It is at most
the truth if they are rounded in the other direction.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dpx.accounting.pld.losses import Losses

# Distinct steps in a composition by PLD, the same for every bill. A schedule of 10,000 takes about a second, and its
# epsilon is at most 1.4 % above the truth (benchmarks/accounting.py: mechanism_epsilon, against the lower end of
# interval).
BUCKETS = 512

_LARGEST_PRECISION = 1e6  # of sigma^-2 in the cost of a step, so that noise near 0 does not take all buckets
_SMALLEST_GAP = 1e-12  # between neighboring values of ln sigma, so that every step has a positive cost


class Buckets(NamedTuple):
    """Arrays (buckets,): float64, the ends of the noise multipliers and rates in each; int64, the number of steps."""

    smallest_noise: np.ndarray
    largest_noise: np.ndarray
    smallest_rate: np.ndarray
    largest_rate: np.ndarray
    counts: np.ndarray

    def scaled(self, factor: float) -> "Buckets":
        """The buckets of the schedule whose noise multipliers are `factor` times as large."""
        return self._replace(smallest_noise=self.smallest_noise * factor, largest_noise=self.largest_noise * factor)


def round_losses_to_buckets(losses: Losses, gaussian: type, buckets: int) -> Losses:
    """`losses`, but those of one Gaussian type are rounded up in cost to at most `buckets` distinct ones."""
    chosen = [loss for loss in losses if isinstance(loss, gaussian)]
    if not chosen:
        return losses
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in chosen]).T
    steps = bucketed_gaussians(sigmas, rates, np.array([losses[loss] for loss in chosen]), buckets)
    rounded = defaultdict(int, {loss: count for loss, count in losses.items() if not isinstance(loss, gaussian)})
    rows = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)
    for sigma, rate, count in rows:
        rounded[replace(chosen[0], noise_multiplier=sigma, rate=rate)] += count
    return rounded


def bucketed_gaussians(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """Buckets of sampled Gaussians. All unsampled Gaussians become one of precision sum 1 / sigma^2, which is exact."""
    used = counts > 0
    sigmas, rates, counts = sigmas[used], rates[used], counts[used]
    plain = (rates == 1) & (sigmas > 0)
    if plain.sum() > 1 or np.any(counts[plain] > 1):
        smallest = sigmas[plain].min()
        merged = smallest / math.sqrt(np.sum(counts[plain] * (smallest / sigmas[plain]) ** 2))
        sigmas, rates = np.append(sigmas[~plain], merged), np.append(rates[~plain], 1.0)
        counts = np.append(counts[~plain], 1)
    return bucketed_steps(sigmas, rates, counts, buckets)


def bucketed_steps(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """At most `buckets` groups of the steps, of about equal rounding cost; exact if there are no more distinct steps.

    sigmas, rates: float64 (T,). counts: int64 (T,). Rates are grouped first, because more than sqrt(buckets) distinct
    rates would leave too few buckets for the noise.
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
        rate_groups = _labels_of_groups(np.log(distinct_rates), np.ones(len(distinct_rates)), most_rates)[rate_groups]
    numbers = np.unique(rate_groups)
    buckets_each = max(1, buckets // len(numbers))
    labels = np.empty(len(repeats), np.int64)
    for number in numbers:
        rows = np.flatnonzero(rate_groups == number)
        rows = rows[np.argsort(sigmas[rows], kind="stable")]
        cost = repeats[rows] * _noise_cost_slope(sigmas[rows], rates[rows])
        labels[rows] = number * buckets + _labels_of_groups(np.log(sigmas[rows]), cost, buckets_each)
    distinct, labels = np.unique(labels, return_inverse=True)
    low_noise, high_noise = np.full(len(distinct), np.inf), np.zeros(len(distinct))
    low_rate, high_rate = low_noise.copy(), high_noise.copy()
    np.minimum.at(low_noise, labels, sigmas)
    np.maximum.at(high_noise, labels, sigmas)
    np.minimum.at(low_rate, labels, rates)
    np.maximum.at(high_rate, labels, rates)
    return Buckets(low_noise, high_noise, low_rate, high_rate, np.bincount(labels, repeats).astype(np.int64))


def _noise_cost_slope(sigmas: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """The change of each step's bill with a relative change of its noise, up to a constant factor; float64 (T,)."""
    precision = np.minimum(sigmas**-2.0, _LARGEST_PRECISION)
    return precision * np.exp(np.minimum(precision, -2 * np.log(rates)))


def _labels_of_groups(logs: np.ndarray, cost: np.ndarray, groups: int) -> np.ndarray:
    """A label in [0, groups) for each of the increasing `logs`, int64 (n,).

    The total rounding cost, the sum over t of cost_t (width of t's group), is least if the widths are proportional to
    (cost density)^(-1/2).
    """
    gaps = np.diff(logs, append=logs[-1])
    gaps[-1] = gaps[-2] if len(gaps) > 1 else 1.0
    position = np.cumsum(np.sqrt(cost * np.maximum(gaps, _SMALLEST_GAP)))
    return np.minimum(
        (groups * (position - position[0]) / (position[-1] - position[0] + 1e-300)).astype(int), groups - 1
    )
