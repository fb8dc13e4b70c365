"""A release of pure differential privacy, such as one with Laplace noise or of the exponential mechanism.

No set of outputs is more than e^epsilon times as likely with an example as without. Of all such pairs of laws, coins
that show a secret bit with probability p = e^epsilon / (1 + e^epsilon), and the other bit otherwise, dominate (Kairouz,
Oh and Viswanath 2015, https://arxiv.org/abs/1311.0776, theorem 3.4). So the privacy loss is epsilon with probability p,
and -epsilon otherwise. Against the loss of Laplace noise itself, that costs up to 2 % of epsilon in a composition of
100 releases, and nothing for one. It needs no more than the largest ratio of two probabilities, which programs compute.
"""

import functools
import math
from dataclasses import dataclass

import attrs
import numpy as np
from dp_accounting import DpEvent
from scipy import special

from dpx.accounting.checks import Relation, require_nonnegative
from dpx.accounting.loss import PrivacyLoss, ReleaseCount
from dpx.accounting.pld.losses import Pmf, StepLoss, dominating_pmf

_LARGEST = 600.0  # of epsilon; more counts as no noise, because e^epsilon must be a float64


@attrs.frozen
class PureDpEvent(DpEvent, PrivacyLoss):
    """One release that is epsilon-differentially private with delta 0, for nulls in place of one example.

    epsilon: float, at least 0, because twice a small integer of numpy, or one with a minus, would be another number.
        dp-accounting's accountants refuse this event.
    """

    epsilon: float = attrs.field(converter=functools.partial(require_nonnegative, "epsilon of a release"))
    fresh = True

    @property
    def released(self) -> ReleaseCount:
        return ReleaseCount(0, 0.0)  # its bits have this epsilon: there are no normals whose arithmetic would add to it

    def largest_shift(self, relation: Relation) -> float:
        return 0.0

    def pure(self, relation: Relation) -> float:
        return self.epsilon * (2 if relation == "replace_one" else 1)

    def step_loss(self, relation: Relation) -> "PureLoss":
        return PureLoss(self.pure(relation))

    def in_words(self) -> str:
        return f"release of epsilon {self.epsilon:.6g} and delta 0"


@dataclass(frozen=True)
class PureLoss(StepLoss):
    """The loss of one such release, which is symmetric."""

    epsilon: float

    @property
    def unbounded(self) -> bool:
        return self.epsilon > _LARGEST

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """ln(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), float64 (orders,)."""
        p, rest = special.log_expit(self.epsilon), special.log_expit(-self.epsilon)
        moments = np.logaddexp(orders * p + (1 - orders) * rest, orders * rest + (1 - orders) * p)
        return np.minimum(np.maximum(moments, 0.0) / (orders - 1), self.epsilon)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        last = math.floor(self.epsilon / grid) + 1
        upper = np.zeros(2 * last + 2)
        upper[1], upper[-2] = special.expit(-self.epsilon), special.expit(self.epsilon)
        return (dominating_pmf(upper, upper[::-1], -last, grid),)
