"""The Gaussian mechanism on a sample of fixed size, drawn without replacement: by Renyi divergences alone."""

from dataclasses import dataclass
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant

from dpx.accounting import renyi


@dataclass(frozen=True)
class FixedSizeGaussian:
    """One such step, under the relation "replace_one", the only one that its divergences are known for.

    noise_multiplier: relative to the effect of replacing one example. rate: sample size divided by data set size.

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
        accountant = RdpAccountant(orders.tolist(), dp_accounting.NeighboringRelation.REPLACE_ONE)
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        size: Any = self.rate  # of a data set of size 1, because dp-accounting reads only their ratio
        accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, size, gaussian))
        return np.asarray(accountant.rdp)
