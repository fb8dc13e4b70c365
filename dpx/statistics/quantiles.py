"""Quantiles by the exponential mechanism, in integer arithmetic.

The possible answers are public points, and each value counts at its nearest point. For the quantile a / 2^20 of n
values, let the interval of a point go from 2^20 times the number of values below it to 2^20 times the number up to and
including it. The integer u is the distance from a n to this interval. Adding or removing one value changes u by at most
D = max(a, 2^20 - a), because each end of the interval moves by a or 2^20 - a relative to a n. So drawing a point with
probability proportional to exp(-epsilon u / (2 D)) has privacy epsilon at delta 0 (McSherry and Talwar 2007,
https://doi.org/10.1109/FOCS.2007.66; for quantiles Smith 2011, https://arxiv.org/abs/0807.1277).

In the program, distances are cut at 88 ln 2 D / epsilon, which does not increase the change. So the weights, integers
near 2^108 exp(-epsilon u / (2 D)), are at least 2^64, and off by a factor of at most 1 +- 2^-65. A random number of 256
bits chooses among them, which changes each probability by less than a factor of 1 +- 2^-140. So a ratio of two
probabilities is off by a factor below e^(2^-62), and epsilon is lowered by 2^-50 in advance to cover it.

With a probability of at least 1 - error, u is at most 2 D / epsilon times ln(points / error), because some point has
u = 0.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

import jax
import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike

from dpx import keys
from dpx.accounting.budget import Budget
from dpx.accounting.loss import PureDpEvent
from dpx.statistics.noise import random_words
from dpx.statistics.released import Release, StatisticRequest, bounds_per_column, records_of
from dpx.values import described, explain_misuse, require_floats, require_open_fraction, require_whole

SHARES = 2**20
_BITS, _FALL = 108, 44  # of the largest weight, and how many fewer the smallest has
_SPARE = 2.0**-50  # of epsilon


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantiles(Release):
    """A `Release` of quantiles: `value` is float64 (quantiles,), ascending.

    scale: float64 (quantiles,): the rank error is scale * ln(points / (1 - confidence)). points: int, possible answers.
    """

    scale: np.ndarray = field(repr=False)
    points: int

    def rank_error(self, confidence: float = 0.95) -> np.ndarray:
        """Bounds how many ranks each answer is off, with this confidence for each answer; float64 (quantiles,).

        The bound covers the noise, but neither sampling error nor the rounding of values to points.
        confidence: in (0, 1). Raises ValueError outside this range.
        """
        error = 1 - require_open_fraction("confidence", confidence)
        return self.scale * math.log(self.points / error)


@explain_misuse
def release_quantiles(
    data: Any,
    quantiles: ArrayLike = (0.25, 0.5, 0.75),
    *,
    low: float,
    high: float,
    points: int = 2**12 + 1,
    noise_multiplier: float | Budget,
    key: jax.Array,
    words: str = "quantiles",
    ledger: Any = None,
    part: str | None = None,
) -> "Quantiles":
    """Releases quantiles of the values, each clipped to [low, high], at delta 0. Missing values (NaN) are left out.

    data: (N,), or a `dpx.UserData` of such an array.
    quantiles: float (quantiles,), in [0, 1], ascending. Each is a separate release.
    low, high: public and finite. points: int, the number of possible answers, evenly spaced from low to high; for
        integer data, high - low + 1.
    noise_multiplier: 1 / epsilon of each quantile; or a `dpx.Budget`, each of whose steps covers all of them.
    The other arguments and errors are described in `dpx.statistics`; the noise is that of the exponential mechanism.
    `rank_error` bounds how many ranks each answer is off by. A bound in the unit of the values would need further
    releases: ask here also for the quantiles at both ends of that range of ranks.
    """
    asked = StatisticRequest(words, key, noise_multiplier, "laplace", ledger, part)
    records = records_of(data)
    if records.vector:
        raise ValueError(f"data for quantiles must have shape (N,), got {described(records.values)}")
    (low,), (high,) = bounds_per_column(low, high, records)
    shares = np.atleast_1d(require_floats("quantiles", quantiles))
    if shares.ndim != 1 or not len(shares) or not ((shares >= 0) & (shares <= 1)).all() or (np.diff(shares) <= 0).any():
        raise ValueError(f"quantiles must be ascending numbers in [0, 1], got {described(quantiles)}")
    points = require_whole("points", points, minimum=2, maximum=2**20)
    whole = np.rint(shares * SHARES).astype(int).tolist()
    multiplier = asked.resolve_multiplier(records, lambda each: _event_of_quantiles(each, len(shares)), 1)
    epsilon = min(1 / multiplier - _SPARE, math.nextafter(1 / multiplier, 0))  # float64 loses the former from 8 on
    if epsilon < _SPARE:
        raise ValueError(f"noise_multiplier must be at most {1 / _SPARE / 2:.3g}, got {multiplier}")
    counts = nearest_point_counts(records.values[:, 0], low, high, points)
    query = f"quantiles {whole} {low} {high} {points} {multiplier} {records.most}"
    event, own = asked.charge(records, lambda m: _event_of_quantiles(m, len(shares)), multiplier, 1, query, counts)
    drawn = [
        _draw_by_weight(keys.fold_in(own, a), exponential_weights(rank_distances(counts, a), a, epsilon, records.most))
        for a in whole
    ]
    value = np.sort(low + (high - low) * (np.asarray(drawn) / (points - 1)))
    scale = np.array([2 * max(a, SHARES - a) / SHARES * records.most / epsilon for a in whole])
    facts = {"noise": "exponential", "noise_multiplier": multiplier, "event": event, "numbers": 1}
    return Quantiles(value=value, words=words, unit=records.unit, scale=scale, points=points, **facts)


def _event_of_quantiles(multiplier: float, quantiles: int) -> DpEvent:
    one = PureDpEvent(1 / multiplier)
    return one if quantiles == 1 else SelfComposedDpEvent(one, quantiles)


def nearest_point_counts(values: np.ndarray, low: float, high: float, points: int) -> np.ndarray:
    """Counts the values nearest to each point, int64 (points,)."""
    there = np.clip(values[~np.isnan(values)], low, high)
    places = np.rint((there - low) / (high - low) * (points - 1)).astype(np.int64)
    return np.bincount(np.clip(places, 0, points - 1), minlength=points)


def rank_distances(counts: np.ndarray, share: int) -> np.ndarray:
    """Returns the distance u of every point for the quantile share / SHARES, int64 (points,), at least 0."""
    above = SHARES * np.cumsum(counts)
    wanted = share * counts.sum()
    return np.maximum(np.maximum(above - SHARES * counts - wanted, wanted - above), 0)


def exponential_weights(far: np.ndarray, share: int, epsilon: float, most: int) -> list[int]:
    """Returns the integer weights of the points. far: from `rank_distances`. most: the most values of one unit."""
    with localcontext(prec=60) as context:
        rate = Decimal(epsilon) / (2 * max(share, SHARES - share) * most)
        last = min(int(_FALL * context.ln(Decimal(2)) / rate), 2**62)  # farther than 2^36 values of 2^20 shares
        largest = Decimal(2) ** _BITS
        known = {
            u: int((largest * context.exp(-rate * u)).to_integral_value()) for u in {*np.minimum(far, last).tolist()}
        }
    return [known[u] for u in np.minimum(far, last).tolist()]


def _draw_by_weight(key: jax.Array, weights: list[int]) -> int:
    """Draws the index of a weight with probability proportional to it."""
    ends = list(itertools.accumulate(weights))
    (a, b), (c, d) = random_words(key, 2).tolist()
    bits = a << 192 | b << 128 | c << 64 | d
    return bisect.bisect_right(ends, bits * ends[-1] >> 256)
