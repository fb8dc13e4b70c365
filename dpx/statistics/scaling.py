"""The mean and the scale of features, as public numbers for a model."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dpx.accounting.budget import Budget
from dpx.statistics.released import Statistic, StatisticRequest, bounds_of, records_of, safe_ratio, weighted_mean_bounds
from dpx.statistics.sums import QUANTA, noisy_bernstein_cells
from dpx.values import names_arguments

_LARGEST_VARIANCE = 0.25  # of values in [0, 1]


@dataclass(frozen=True, eq=False)
class Scaling:
    """Means and scales that were released: call it on features, one example or many, before a model reads them.

    low, high, mean, scale: float64 (columns,), or floats for one column. released: the `Statistic` of mean and scale,
    float64 (2, ...). Everything here is public.
    """

    low: Any
    high: Any
    mean: Any
    scale: Any
    released: Statistic

    def __call__(self, features: Any) -> jax.Array:
        """(clip(features) - mean) / scale, float32 (..., columns), and 0 for a missing value (NaN)."""
        features = jnp.asarray(features, jnp.float32)
        parts = (self.low, self.high, self.mean, self.scale)
        low, high, mean, scale = (jnp.broadcast_to(np.asarray(x, np.float32), features.shape) for x in parts)
        scaled = (jnp.clip(features, low, high) - mean) / scale
        return jnp.where(jnp.isnan(scaled), jnp.zeros_like(scaled), scaled)


@names_arguments
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
    """The mean and the standard deviation of each feature, from one release, for a model that reads scaled features.

    data: (N, columns) or (N,), or a `dpx.UserData` of such an array. Missing values (NaN) are left out.
    low, high: public and finite; one number, or one for each column. Values are clipped to this range, here and in the
    model. The other arguments and errors are those of `dpx.statistics`. A scale is never below the one that noise alone
    would show, so no feature is divided by almost nothing.

        >>> scaling = dpx.statistics.standardize(data[0], low=0, high=2, noise_multiplier=5.0, key=dpx.secret_key())
        >>> scaling(data[0]).shape
        (1000, 3)
    """
    asked = StatisticRequest(words, key, noise_multiplier, noise, ledger, part)
    records = records_of(data)
    low, high = bounds_of(low, high, records)
    noisy, added, facts = noisy_bernstein_cells(
        asked, records, low, high, 2, f"standardize {low.tolist()} {high.tolist()}"
    )
    records, most = records.public, QUANTA * records.most_rows
    total, size = noisy.sum(axis=0), high - low
    mean = safe_ratio(noisy[1] / 2 + noisy[2], total, 0.5)
    variance = safe_ratio(noisy[2], total, 1.0) - mean**2
    least = safe_ratio(np.full(len(low), 2 * added.deviation), total, 1.0)
    scale = np.sqrt(np.clip(np.maximum(variance, least), 0, _LARGEST_VARIANCE))
    value = np.stack([low + size * mean, size * scale])

    def interval_at(error: float) -> tuple[Any, Any]:
        off = records.most_rows / 2 + 2 * added.rounding(0, most)
        mean_low, mean_high = weighted_mean_bounds(noisy, (0.0, 0.5, 1.0), added, error, off)
        (low_1, high_1), (low_2, high_2) = (
            weighted_mean_bounds(noisy, weights, added, error / 2, off)
            for weights in ((0.0, 0.5, 1.0), (0.0, 0.0, 1.0))
        )
        variances = low_2 - high_1**2, high_2 - low_1**2
        scales = (size * np.sqrt(np.clip(one, 0, _LARGEST_VARIANCE)) for one in variances)
        ends = zip((low + size * mean_low, low + size * mean_high), scales, strict=True)
        return tuple(records.shaped(np.stack(pair)) for pair in ends)

    released = Statistic(value=records.shaped(value), interval_at=interval_at, **facts)
    low, high, mean, scale = (records.shaped(x) for x in (low, high, *value))
    return Scaling(low, high, mean, scale, released)
