"""The cost of dp-accounting's mixtures of Gaussians: sum_j p_j N(c_j, s^2) against N(0, s^2), in both directions.

It is the pair of `groups`, with other shifts and probabilities. dp-accounting's own PLD of it takes minutes at a grid
that is fine enough, because it solves an equation for each point alone.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

from dpx.accounting.checks import Relation
from dpx.accounting.groups import LARGEST_NOISE, GroupGaussian
from dpx.accounting.releases import register


@dataclass(frozen=True)
class MixtureOfGaussians(GroupGaussian):
    """In units of the largest shift. noise_multiplier: s. rate: the probability of all shifts above 0. records: 1.

    numbers, weights: the shifts, rising from 0 to 1, and their probabilities.
    """

    numbers: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @functools.cached_property
    def shifts(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.numbers), np.array(self.weights)

    @functools.cached_property
    def log_probabilities(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(self.weights)


def _read(event: Any, relation: Relation) -> MixtureOfGaussians:
    sigma, shifts, weights = map(np.asarray, (event.standard_deviation, event.sensitivities, event.sampling_probs))
    if relation == "replace_one":
        raise ValueError('relation "replace_one" does not fit a mixture of Gaussians, which is one against no shift')
    total = float(weights.sum()) if weights.shape == shifts.shape else math.nan
    known = 0 <= sigma < math.inf and abs(total - 1) < 1e-9 and bool((weights >= 0).all() and (shifts >= 0).all())
    if not known or not np.isfinite(shifts).all():
        raise ValueError(f"noise and shifts must be at least 0, with probabilities of sum 1; got {event}")
    numbers, places = np.unique(np.append(0.0, shifts), return_inverse=True)
    each = np.bincount(places.reshape(-1), np.append(0.0, weights / total))
    last = np.flatnonzero(each[1:])[-1] + 1
    largest, each = float(numbers[last]), each[: last + 1]
    scaled = (*(numbers[: last + 1] / largest).tolist(),)
    noise = min(float(sigma) / largest, LARGEST_NOISE)
    return MixtureOfGaussians(noise, float(each[1:].sum()), 1, scaled, (*each.tolist(),))


register(MixtureOfGaussiansDpEvent, _read)
