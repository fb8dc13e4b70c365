"""Counts, sums, means, histograms and scales: integer sums with noise.

A record is rounded to a public grid before it is summed, and spreads its quanta over the cells of the release:

    count        one cell, 2^10 quanta for a value that is present
    sum          one cell, up to 2^24 quanta
    mean         two cells, k and 2^24 - k quanta, which add up to the count
    scale        three cells, about (1 - a)^2, 2 a (1 - a) and a^2 of 2^24 quanta, for count, mean and variance
    histogram    one cell per bin, 2^10 quanta in the value's bin

So a record's effect has a 1-norm, and therefore a 2-norm, of at most its quanta, although a mean needs two cells and a
variance three. A missing value (NaN) has no quanta: it changes nothing and is not counted. Values beyond the bounds,
including infinite ones, are clipped to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dpx.accounting.budget import Budget
from dpx.statistics.noise import Noise, UnitSensitivity
from dpx.statistics.released import (
    Statistic,
    StatisticRecords,
    StatisticRequest,
    bounds_per_column,
    records_of,
    safe_ratio,
    weighted_mean_bounds,
)
from dpx.values import described, explain_misuse, require_bool

WHOLE, QUANTA = 2**10, 2**24  # quanta of a value that is counted, and the most of one that is summed
_LARGEST_VARIANCE = 0.25  # of values in [0, 1]


@explain_misuse
def release_count(
    data: Any,
    *,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "count",
    ledger: Any = None,
    part: str | None = None,
) -> Statistic:
    """Releases the number of values that are not missing (NaN), or the number of True values in a bool array.

    data: an array, (N,), or (N, columns) for a count per column; or a `dpx.UserData` of such an array.
    The other arguments and errors are described in `dpx.statistics`. The count is unbiased, so it may be negative.

        >>> tall = dpx.statistics.release_count(data[1] > 0.5, noise_multiplier=10.0, key=dpx.secret_key())
        >>> tall.epsilon(delta=1e-5)
        0.340...
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    records = records_of(data, numbers=False)
    if records.values.dtype.kind in "US":
        raise ValueError(f"data for a count must be numbers or bools, got {described(records.values)}")
    there = records.values if records.values.dtype.kind == "b" else ~np.isnan(records.values)
    columns = there.shape[1]
    effect = UnitSensitivity(WHOLE * columns, WHOLE * math.sqrt(columns), columns)
    return _release_noisy_counts(
        asked, records, WHOLE * there.sum(axis=0, dtype=np.int64), effect, "count", records.without_values.restore_shape
    )


@explain_misuse
def release_histogram(
    data: Any,
    *,
    edges: Any = None,
    categories: Sequence[Any] | None = None,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "histogram",
    ledger: Any = None,
    part: str | None = None,
) -> Statistic:
    """Releases the number of values in each bin, float64 (bins,).

    data: an array, (N,), of numbers, or of words for `categories`; or a `dpx.UserData` of such an array. Missing values
        (NaN) and values outside all bins are not counted.
    edges: float (bins + 1,), ascending and public, possibly infinite. Bin i holds edges[i] <= value < edges[i + 1]; the
        last bin includes its upper edge.
    categories: (bins,), one distinct value per bin, all numbers or all words, in place of edges. They must be public: a
        list of the values that occur in the data is not.
    The other arguments and errors are described in `dpx.statistics`. Counts are unbiased, so they may be negative.
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    if (edges is None) == (categories is None):
        raise ValueError(
            f"exactly one of edges and categories must be given, got {'neither' if edges is None else 'both'}"
        )
    records = records_of(data, numbers=categories is None)
    if records.vector:
        raise ValueError(f"data for a histogram must have shape (N,), got {described(records.values)}")
    values = records.values[:, 0]
    if categories is None:
        public = np.asarray(edges, np.float64) if np.shape(edges)[:1] > (1,) else np.zeros(0)
        if public.ndim != 1 or len(public) < 2 or not (np.diff(public) > 0).all():
            raise ValueError(f"edges must be ascending, (bins + 1,) with at least one bin, got {described(edges)}")
        places, bins = np.searchsorted(public, values, side="right") - 1, len(public) - 1
        places = np.where(values == public[-1], bins - 1, places)
        inside = (places >= 0) & (places < bins)  # NaN is beyond all edges
    else:
        public, bins = np.asarray(categories), np.size(categories)
        kinds = {public.dtype.kind, values.dtype.kind}  # NumPy finds no word equal to bytes, so every count would be 0
        alike = len(kinds) == 1 or kinds.isdisjoint("US")
        distinct = public.ndim == 1 and 0 < bins == len({*public.tolist()})
        if not distinct or not alike or public.dtype.kind not in "fiubUS":
            raise ValueError(f"categories must be distinct, of the kind of data, (bins,); got {described(categories)}")
        order = np.argsort(public)
        places = order[np.minimum(np.searchsorted(public[order], values), bins - 1)]
        inside = public[places] == values
    sums = WHOLE * np.bincount(places[inside], minlength=bins).astype(np.int64)
    query = f"histogram {public.dtype} {public.tolist()}"
    return _release_noisy_counts(asked, records, sums, UnitSensitivity(WHOLE, WHOLE, 1), query, lambda found: found)


def _release_noisy_counts(
    asked: StatisticRequest,
    records: StatisticRecords,
    sums: np.ndarray,
    effect: UnitSensitivity,
    query: str,
    shaped: Any,
) -> Statistic:
    """Releases counts, given as sums of WHOLE quanta per counted value."""
    most = WHOLE * records.most_rows
    noisy, added, facts = asked.release_noisy_sums(records, sums, effect, 0, most, query=query)
    value = noisy / WHOLE

    def interval_at(error: float) -> tuple[Any, Any]:
        half = (added.half_width(error) + added.largest_rounding(0, most)) / WHOLE
        return shaped(value - half), shaped(value + half)

    return Statistic(value=shaped(value), interval_at=interval_at, **facts)


@explain_misuse
def release_sum(
    data: Any,
    *,
    low: ArrayLike,
    high: ArrayLike,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "sum",
    ledger: Any = None,
    part: str | None = None,
) -> Statistic:
    """Releases the sum of the values, each clipped to [low, high]; missing values (NaN) add 0.

    data: (N,), or (N, columns) for a sum per column; or a `dpx.UserData` of such an array.
    low, high: public and finite, one number or one per column. The noise is proportional to max(|low|, |high|).
    The other arguments and errors are described in `dpx.statistics`.
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    records = records_of(data)
    low, high = bounds_per_column(low, high, records)
    unit = np.maximum(np.abs(low), np.abs(high))
    quanta = _in_quanta(np.clip(records.values, low, high) / unit)
    return _release_quanta_sums(asked, records, quanta, unit / QUANTA, 0.0, f"sum {low.tolist()} {high.tolist()}")


def _release_quanta_sums(
    asked: StatisticRequest,
    records: StatisticRecords,
    quanta: np.ndarray,
    size: np.ndarray,
    offset: ArrayLike,
    query: str,
) -> Statistic:
    """Releases offset + size * (column sums of quanta). quanta: int64 (rows, columns), each in [-QUANTA, QUANTA]."""
    columns, most = quanta.shape[1], QUANTA * records.most_rows
    effect = UnitSensitivity(QUANTA * columns, QUANTA * math.sqrt(columns), columns)
    records = records.without_values
    noisy, added, facts = asked.release_noisy_sums(records, quanta.sum(axis=0), effect, -most, most, query=query)
    value: np.ndarray = offset + noisy * size

    def interval_at(error: float) -> tuple[Any, Any]:
        half = size * (added.half_width(error) + added.largest_rounding(-most, most) + records.most_rows / 2)
        return records.restore_shape(value - half), records.restore_shape(value + half)

    return Statistic(value=records.restore_shape(value), interval_at=interval_at, **facts)


def _in_quanta(shares: np.ndarray) -> np.ndarray:
    """Converts shares in [-1, 1] to quanta, int64; NaN becomes 0."""
    return np.clip(np.rint(np.nan_to_num(shares) * QUANTA), -QUANTA, QUANTA).astype(np.int64)


@explain_misuse
def release_mean(
    data: Any,
    *,
    low: ArrayLike,
    high: ArrayLike,
    complete: bool = False,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "mean",
    ledger: Any = None,
    part: str | None = None,
) -> Statistic:
    """Releases the mean of the values that are not missing (NaN), each clipped to [low, high].

    For values v scaled to [0, 1], one release gives the sums of v and of 1 - v, each with about the noise of a count.
    The mean is the first sum over their total; if that is not positive, it is the middle of the bounds.

    data: (N,), or (N, columns) for a mean per column; or a `dpx.UserData` of such an array, for the mean over all
        records. low, high: public and finite, one number or one per column.
    complete: True promises that no value is missing. The divisor is then N, and the noise is smaller by a factor of 1.4
        to 2. A missing value would count as the middle of the bounds. Must be False for `dpx.UserData`, whose number of
        records is private.
    The other arguments and errors are described in `dpx.statistics`.

        >>> mean = dpx.statistics.release_mean(data[1], low=0, high=3, noise_multiplier=5.0, key=dpx.secret_key())
        >>> low, high = mean.interval(0.95)
        >>> low < mean.value < high
        True
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    records = records_of(data)
    low, high = bounds_per_column(low, high, records)
    query = f"mean {require_bool('complete', complete)} {low.tolist()} {high.tolist()}"
    if complete:
        if records.most > 1 or records.unit != "example":
            raise ValueError("complete must be False for dpx.UserData, because the number of records is private")
        half, rows = (high - low) / 2, len(records.values)
        middle = low + half
        quanta = _in_quanta((np.clip(records.values, low, high) - middle) / half)
        found = _release_quanta_sums(asked, records, quanta, half / (QUANTA * rows), middle, query)
        return _cut_to_bounds(found, records.without_values, low, high)
    noisy, added, facts = release_bernstein_sums(asked, records, low, high, 1, query)
    records, most = records.without_values, QUANTA * records.most_rows
    value = low + (high - low) * safe_ratio(noisy[1], noisy.sum(axis=0), 0.5)

    def interval_at(error: float) -> tuple[Any, Any]:
        off = records.most_rows / 2 + added.largest_rounding(0, most)
        found = weighted_mean_bounds(noisy, (0.0, 1.0), added, error, off)
        return tuple(records.restore_shape(low + (high - low) * share) for share in found)

    return Statistic(value=records.restore_shape(value), interval_at=interval_at, **facts)


def _cut_to_bounds(found: Statistic, records: StatisticRecords, low: np.ndarray, high: np.ndarray) -> Statistic:
    """Clips a mean and its intervals to the bounds of the values."""

    def cut(value: Any) -> Any:
        return records.restore_shape(np.clip(np.reshape(value, low.shape), low, high))

    def interval_at(error: float) -> tuple[Any, Any]:
        low, high = found.interval_at(error)
        return cut(low), cut(high)

    return Statistic(**vars(found) | {"value": cut(found.value), "interval_at": interval_at})


def release_bernstein_sums(
    asked: StatisticRequest, records: StatisticRecords, low: np.ndarray, high: np.ndarray, degree: int, query: str
) -> tuple[np.ndarray, Noise, dict[str, Any]]:
    """Spreads each record's quanta over `degree + 1` cells, and releases the noisy sums, (degree + 1, columns). The
    shares are Bernstein polynomials, which are not negative and add up to 1, so a value's quanta add up to QUANTA."""
    there = ~np.isnan(records.values)
    share = (np.clip(np.where(there, records.values, low), low, high) - low) / (high - low)
    last = _in_quanta(share**degree)
    first = np.minimum(_in_quanta((1 - share) ** degree), QUANTA - last) if degree > 1 else QUANTA - last
    spread = np.stack([first, QUANTA - first - last, last] if degree > 1 else [first, last])
    cells, columns = np.where(there, spread, 0).sum(axis=1), len(low)
    effect = UnitSensitivity(QUANTA * columns, QUANTA * math.sqrt(columns), len(cells) * columns)
    return asked.release_noisy_sums(records.without_values, cells, effect, 0, QUANTA * records.most_rows, query=query)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Released means and scales. Call it on the features of one example or many before a model reads them.

    low, high (the bounds), mean, scale: float64 (columns,), or floats for one column. released: the `Statistic` of mean
    and scale, float64 (2, ...). Everything here is public.
    """

    low: Any
    high: Any
    mean: Any
    scale: Any
    released: Statistic

    def __call__(self, features: Any) -> jax.Array:
        """Returns (clip(features) - mean) / scale, float32 (..., columns), with 0 for missing values (NaN)."""
        features = jnp.asarray(features, jnp.float32)
        parts = (self.low, self.high, self.mean, self.scale)
        low, high, mean, scale = (jnp.broadcast_to(np.asarray(x, np.float32), features.shape) for x in parts)
        scaled = (jnp.clip(features, low, high) - mean) / scale
        return jnp.where(jnp.isnan(scaled), jnp.zeros_like(scaled), scaled)


@explain_misuse
def standardize(
    data: Any,
    *,
    low: ArrayLike,
    high: ArrayLike,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "mean and scale of the features",
    ledger: Any = None,
    part: str | None = None,
) -> Scaling:
    """Releases the mean and standard deviation of each feature at once, and returns the `Scaling` that applies them.

    data: (N, columns) or (N,), or a `dpx.UserData` of such an array. Missing values (NaN) are left out.
    low, high: public and finite, one number or one per column. Values are clipped to this range, here and by `Scaling`.
    The other arguments and errors are described in `dpx.statistics`. A scale is never below what noise alone would
    give, so no feature is divided by almost nothing.

        >>> scaling = dpx.statistics.standardize(data[0], low=0, high=2, noise_multiplier=5.0, key=dpx.secret_key())
        >>> scaling(data[0]).shape
        (1000, 3)
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    records = records_of(data)
    low, high = bounds_per_column(low, high, records)
    noisy, added, facts = release_bernstein_sums(
        asked, records, low, high, 2, f"standardize {low.tolist()} {high.tolist()}"
    )
    records, most = records.without_values, QUANTA * records.most_rows
    total, size = noisy.sum(axis=0), high - low
    mean = safe_ratio(noisy[1] / 2 + noisy[2], total, 0.5)
    variance = safe_ratio(noisy[2], total, 1.0) - mean**2
    least = safe_ratio(np.full(len(low), 2 * added.deviation), total, 1.0)
    scale = np.sqrt(np.clip(np.maximum(variance, least), 0, _LARGEST_VARIANCE))
    value = np.stack([low + size * mean, size * scale])

    def interval_at(error: float) -> tuple[Any, Any]:
        off = records.most_rows / 2 + 2 * added.largest_rounding(0, most)
        mean_low, mean_high = weighted_mean_bounds(noisy, (0.0, 0.5, 1.0), added, error, off)
        (low_1, high_1), (low_2, high_2) = (
            weighted_mean_bounds(noisy, weights, added, error / 2, off)
            for weights in ((0.0, 0.5, 1.0), (0.0, 0.0, 1.0))
        )
        variances = low_2 - high_1**2, high_2 - low_1**2
        scales = (size * np.sqrt(np.clip(one, 0, _LARGEST_VARIANCE)) for one in variances)
        ends = zip((low + size * mean_low, low + size * mean_high), scales, strict=True)
        return tuple(records.restore_shape(np.stack(pair)) for pair in ends)

    released = Statistic(value=records.restore_shape(value), interval_at=interval_at, **facts)
    low, high, mean, scale = (records.restore_shape(x) for x in (low, high, *value))
    return Scaling(low, high, mean, scale, released)
