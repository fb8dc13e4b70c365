"""The Gaussian mechanism on a sample of fixed size, drawn without replacement, billed by Renyi divergences alone."""

import functools
from dataclasses import dataclass
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant

from dpx.accounting import renyi


@dataclass(frozen=True)
class FixedSizeGaussian:
    """One such step, under the relation "replace_one", the only one for which its divergences are known.

    noise_multiplier: relative to the effect of replacing one example. rate: the sample size divided by the data size.

    The divergences are dp-accounting's (Wang, Balle and Kasiviswanathan 2019, https://arxiv.org/abs/1808.00087), which
    take a tenth of a second a step. There are no `pmfs`, because no tight privacy loss distribution is known.
    """

    noise_multiplier: float
    rate: float

    @property
    def unbounded(self) -> bool:
        return self.noise_multiplier < renyi.SMALLEST_NOISE

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        if self.unbounded:
            return np.full(len(orders), np.inf)
        return _divergences(self.noise_multiplier, self.rate, tuple(orders.tolist()))


@functools.lru_cache(maxsize=64)
def _divergences(noise_multiplier: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Those of one step, kept for the next question about it: another delta, or another number of steps."""
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    size: Any = rate  # of a data set of size 1, because dp-accounting reads only their ratio
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, size, gaussian))
    divergences = np.array(accountant.rdp)
    divergences.flags.writeable = False
    return divergences
