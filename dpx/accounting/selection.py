"""The privacy loss of the best of a random number of trials, and the distributions of that number.

A trial trains and scores the result. The number K of trials is random and secret, the trials are independent and
identically distributed, and only the best is released. Papernot and Steinke 2022 (https://arxiv.org/abs/2110.03620)
bound the Renyi divergences of the winner by those of one trial. Their theorems need the following, which holds here:

* K has one of their distributions, depends on nothing else, and is not released: `draw_trial_count`, `dpx.tuning`.
* The trials are identically distributed: each draws its configuration afresh, as part of the trial. So the divergence
  of a trial is at most the largest among all configurations (`OneOfLosses`), drawn or not.
* A trial's cost covers its result: the score uses only that and public data, or is part of the trial's cost.
* The results are totally ordered. Of equal scores the first wins; because the trials are independent and identically
  distributed, this winner has the same law as if random numbers broke the ties.
* If K = 0, which only the Poisson distribution allows, the output does not depend on the data.
"""

import math
from dataclasses import dataclass
from typing import Any

import attrs
import jax
import numpy as np
from dp_accounting import DpEvent
from scipy import optimize, special

from dpx.accounting.checks import Relation
from dpx.accounting.loss import DpAccountingStep, PrivacyLoss, ReleaseCount, event_of_release
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import SampledGaussian, StepLoss, total_renyi

SHAPES: dict[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}  # eta of the paper
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1e-9, 700.0  # of 1 / gamma; e^700 is a float
# The winner's bound adds a trial's bounds at two orders, and the best ones may be anywhere. A finer grid is not worth
# its time (2,000 orders lower epsilon by at most 0.1%). A pure loss has the same divergence at all large orders.
SEARCH_ORDERS = np.union1d(
    renyi.WIDE_ORDERS, np.concatenate([1 + np.geomspace(0.02, 20, 30), 2.0 ** (np.arange(15, 43) / 3)])
)
SEARCH_ORDERS = np.where(SEARCH_ORDERS > 20, np.round(SEARCH_ORDERS), SEARCH_ORDERS)
_PURE_ORDERS = np.append(SEARCH_ORDERS, 2.0 ** np.arange(15, 35))
_MORE_TRIALS = 1e-20  # probability of more trials than the cost of the noise's arithmetic covers (`arithmetic`)


@attrs.frozen
class OneOfDpEvent(DpEvent):
    """One of several events. The choice must not depend on the data, and may be released. events: a tuple."""

    events: tuple[DpEvent, ...]


@dataclass(frozen=True)
class SeveralSteps(StepLoss):
    """Several steps composed into one. steps: pairs (step loss, count)."""

    steps: tuple[tuple[StepLoss, int], ...]

    @property
    def is_noiseless(self) -> bool:
        return any(step.is_noiseless for step, _ in self.steps)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return total_renyi(dict(self.steps), orders)


@dataclass(frozen=True)
class OneOfLosses(StepLoss):
    """One of several losses. Its divergence is at most the largest, because e^((a - 1) D_a) is a mean."""

    alternatives: tuple[StepLoss, ...]

    @property
    def is_noiseless(self) -> bool:
        return any(step.is_noiseless for step in self.alternatives)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return np.max([step.renyi(orders) for step in self.alternatives], axis=0)


@dataclass(frozen=True)
class BestOf(StepLoss):
    """The best of K independent trials. mean: that of K, at least 1. shape: the paper's eta, inf for Poisson.

    The formulas are those of dp-accounting, at more orders. There are no `pmfs`, so "pld" refuses it.
    """

    trial: StepLoss
    mean: float
    shape: float

    @property
    def is_noiseless(self) -> bool:
        return bool(self.trial.is_noiseless)

    @property
    def orders(self) -> np.ndarray:
        """The orders at which to search the cost, rising, float64 (orders,)."""
        steps = self.trial.steps if isinstance(self.trial, SeveralSteps) else ()
        return _PURE_ORDERS if steps and all(isinstance(step, DpAccountingStep) for step, _ in steps) else SEARCH_ORDERS

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Bounds by the paper's Theorem 2 (truncated negative binomial) and Theorem 6 (Poisson), float64 (orders,)."""
        tried = np.union1d(orders, self.orders)
        one = self.trial.renyi(tried)
        total = one + math.log(self.mean) / (tried - 1)
        if self.shape == math.inf:
            failed = [renyi.delta(one, math.log1p(1 / (order - 1)), tried) for order in tried.tolist()]
            total += self.mean * np.array(failed)
        else:
            log_gamma = log_inverse_success_probability(self.mean, self.shape)
            constants = np.append((1 - 1 / tried) * one + log_gamma / tried, log_gamma)  # the last one is of order 1
            total += (1 + self.shape) * np.min(constants)
        least = np.minimum.accumulate(total[::-1])[::-1]  # a divergence grows with its order, so its bound may too
        return least[np.searchsorted(tried, orders)]


def log_inverse_success_probability(mean: float, shape: float) -> float:
    """Returns ln(1 / gamma) of the truncated negative binomial distribution with this mean, rounded up; Definition 1.

    mean: at least 1. shape: eta, at least 0, finite. E K = eta (1 / gamma - 1) / (1 - gamma^eta), or its limit at 0.
    """

    def log_mean(t: float) -> float:
        falling = -math.expm1(-shape * t) / shape if shape else t
        return math.log(math.expm1(t) / falling)

    if log_mean(_SMALLEST_EXPONENT) >= math.log(mean):
        return _SMALLEST_EXPONENT if mean > 1 else 0.0
    if log_mean(_LARGEST_EXPONENT) < math.log(mean):
        raise ValueError(f"the mean of the trials is beyond the range of floats, got {mean}")
    low, high = _SMALLEST_EXPONENT, _LARGEST_EXPONENT
    root: Any = optimize.brentq(lambda t: log_mean(t) - math.log(mean), low, high, xtol=1e-13)
    return float(root) * (1 + 1e-12) + 1e-12


def trials_quantile(mean: float, shape: float) -> int:
    """A number that K exceeds with probability at most `_MORE_TRIALS`. mean, shape: as for `draw_trial_count`.

    For a shape of at most 1, P(K = k + 1) <= (1 - gamma) P(K = k), so P(K > k) <= (1 - gamma)^k.
    """
    if mean == 1 and shape < math.inf:
        return 1
    if shape <= 1:
        return math.ceil(math.log(_MORE_TRIALS) / math.log(-math.expm1(-log_inverse_success_probability(mean, shape))))
    gamma = 0.0 if shape == math.inf else math.exp(-log_inverse_success_probability(mean, shape))
    count = math.ceil(mean)
    while _probability_of_more_trials(count, mean, shape, gamma) > _MORE_TRIALS:
        count += math.ceil(mean)
    return count


def _probability_of_more_trials(count: int, mean: float, shape: float, gamma: float) -> float:
    """Returns P(K > count)."""
    if shape == math.inf:
        return float(special.pdtrc(count, mean))
    return float(special.betainc(count + 1, shape, 1 - gamma)) / -math.expm1(shape * math.log(gamma))


def draw_trial_count(key: jax.Array, mean: float, shape: float) -> int:
    """Draws K from 53 bits of a secret scalar key. mean: at least 1. shape: one of the values of `SHAPES`."""
    high, low = np.asarray(jax.random.bits(key, (2,), np.uint32)).tolist()
    quantile = ((high << 32 | low) >> 11) / 2**53  # in [0, 1)
    if shape == math.inf:
        count = 0
        while quantile >= special.pdtr(count, mean):  # P(K <= count)
            count += 1
        return count
    if mean == 1:
        return 1
    gamma = math.exp(-log_inverse_success_probability(mean, shape))
    count, probability = 1, gamma if shape else (1 - gamma) / -math.log(gamma)
    below = probability  # P(K <= count)
    while quantile >= below and probability > 0:
        probability *= (1 - gamma) * (count + shape) / (count + 1)
        count, below = count + 1, below + probability
    return count


def trial_loss(trial: Any, relation: Relation) -> StepLoss:
    """The loss of one trial. Raises ValueError if the Renyi divergences of one of its events are unknown.

    trial: the `FlatEvent` of one trial.
    """
    if not trial.all_noisy:
        return SampledGaussian(0.0, 1.0, relation)  # no noise
    if trial.whole_runs:
        run = event_of_release(trial.whole_runs[0])
        raise ValueError(f"the whole run is one release, {run}: a search over such runs has no known cost")
    return SeveralSteps(tuple(trial.losses(relation).items()))


@dataclass(frozen=True)
class SearchLoss(PrivacyLoss):
    """The best of a random number of trials. event: dp-accounting's `RepeatAndSelectDpEvent`. trial: a `FlatEvent`."""

    event: Any
    trial: Any

    @property
    def release_count(self) -> ReleaseCount:
        most, mean = self.trial.release_count
        trials = trials_quantile(float(self.event.mean), float(self.event.shape))
        return ReleaseCount(most * trials, mean * float(self.event.mean))

    def step_loss(self, relation: Relation) -> StepLoss:
        mean, shape = float(self.event.mean), float(self.event.shape)
        if not (1 <= mean < math.inf and shape >= 0):
            raise ValueError(f"mean must be finite and at least 1, and shape at least 0; got {mean} and {shape}")
        return BestOf(trial_loss(self.trial, relation), mean, shape)

    def in_words(self) -> str:
        return f"the best of {self.event.mean:g} expected trials, each: {self.trial.in_one_line()}"


@dataclass(frozen=True)
class OneOfEventsLoss(PrivacyLoss):
    """The privacy loss of a `OneOfDpEvent`. alternatives: the `FlatEvent` of each of its events."""

    event: OneOfDpEvent
    alternatives: tuple[Any, ...]

    @property
    def release_count(self) -> ReleaseCount:
        return ReleaseCount(*map(max, zip(*(each.release_count for each in self.alternatives), strict=True)))

    def step_loss(self, relation: Relation) -> StepLoss:
        return OneOfLosses(tuple(trial_loss(each, relation) for each in self.alternatives))

    def in_words(self) -> str:
        return f"one of ({' | '.join(dict.fromkeys(each.in_one_line() for each in self.alternatives))})"
