"""The error that correlated noise leaves in a workload: its mean and its maximum over the steps.

Step t of SGD with momentum m moves the parameters by -h_t (g_t + m g_(t-1) + m^2 g_(t-2) + ...), for the learning rate
h_t. So the parameters after step t are A g for the workload A = P diag(h) M, where P is the matrix of prefix sums and M
has the series 1 / (1 - m x). Their noise is A C^-1 z. With h = 1, A is a Toeplitz matrix too. Then one column of A C^-1
is enough: row t of it has the squared norm sum_(j <= t) b_j^2, which grows with t. Otherwise M C^-1 z is a process of
moving averages and autoregression, whose covariance with its own prefix sums has a recurrence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpx.strategies.sensitivities import sensitivity
from dpx.strategies.strategy import Strategy
from dpx.validation import require_number, require_whole


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run wants of its gradients; by default their prefix sums.

    momentum: of SGD, in [0, 1). learning_rates: of each step, floats, not negative; () for 1 at every step.
    Raises ValueError for other numbers.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self):
        momentum = require_number("momentum", self.momentum, minimum=0, maximum=1)
        if momentum == 1:
            raise ValueError("momentum must be below 1, got 1.0")
        object.__setattr__(self, "momentum", momentum)
        rates = tuple(require_number("learning_rates", rate, minimum=0) for rate in self.learning_rates)
        object.__setattr__(self, "learning_rates", rates)

    @property
    def momentum_series(self) -> np.ndarray:
        """1 - momentum x, the series of the inverse of M, float64 (1 or 2,)."""
        return np.array([1.0, -self.momentum] if self.momentum else [1.0])

    def rates(self, steps: int) -> np.ndarray:
        """The learning rates of a run, float64 (steps,). Raises ValueError if there is another number of them."""
        if not self.learning_rates:
            return np.ones(steps)
        if len(self.learning_rates) != steps:
            raise ValueError(f"learning_rates must be {steps} numbers, one a step, got {len(self.learning_rates)}")
        return np.array(self.learning_rates)


class Loss(NamedTuple):
    """The error of a workload for one clip norm and a noise multiplier of 1; floats.

    sensitivity: of C. mean: the root of the mean squared error over the steps. largest: the largest root mean square.
    """

    sensitivity: float
    mean: float
    largest: float


PREFIX_SUMS = Workload()


def loss(
    strategy: Strategy,
    *,
    steps: int,
    workload: Workload = PREFIX_SUMS,
    participations: int = 1,
    separation: int = 1,
) -> Loss:
    """The error of `workload` after `steps` steps, for noise in proportion to the sensitivity of C.

    strategy: the matrix C. steps, participations, separation: as in `sensitivity`.

    Time: O(steps * coefficients), and for learning rates O(steps * coefficients^2).
    Raises ValueError for other numbers and if a coefficient overflows.
    """
    found = sensitivity(strategy, steps=steps, participations=participations, separation=separation)
    squares = squared_errors(strategy, workload, steps)
    return Loss(found, found * float(np.sqrt(np.mean(squares))), found * float(np.sqrt(np.max(squares))))


def squared_errors(strategy: Strategy, workload: Workload, steps: int) -> np.ndarray:
    """The squared norm of each row of A C^-1, float64 (steps,)."""
    rates = workload.rates(steps)
    numerator = np.array(strategy.inverse_coefficients)
    denominator = np.convolve(strategy.coefficients, workload.momentum_series)
    if np.all(rates == rates[0]):
        column = rates[0] * np.cumsum(Strategy.series(numerator, denominator, steps))
        return np.cumsum(np.square(column))
    return _by_recurrence(numerator, denominator, rates)


def _by_recurrence(numerator: np.ndarray, denominator: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """The variances of sum_(s <= t) h_s y_s, where y has the series numerator / denominator, float64 (steps,).

    y_t = sum_j n_j w_(t-j) with w_t = z_t - sum_(j > 0) d_j w_(t-j). The covariance of the last w, and that of them
    with the sum, follow from those of the step before.
    """
    size = max(len(numerator), len(denominator))
    ahead, back = np.zeros(size), np.zeros(size)
    ahead[: len(numerator)], back[: len(denominator) - 1] = numerator, -denominator[1:]
    recent, with_sum, variance = np.zeros((size, size)), np.zeros(size), 0.0
    found = np.empty(len(rates))
    for step, rate in enumerate(rates):
        row = recent @ back
        moved = np.empty((size, size))
        moved[1:, 1:] = recent[:-1, :-1]
        moved[0, 1:] = moved[1:, 0] = row[:-1]
        moved[0, 0] = 1 + row @ back
        with_sum = np.concatenate([[with_sum @ back], with_sum[:-1]])
        recent, gained = moved, moved @ ahead
        variance += rate * (2 * (ahead @ with_sum) + rate * (ahead @ gained))
        with_sum += rate * gained
        found[step] = variance
    return found


def least_mean_loss(steps: int) -> float:
    """A lower bound of the mean loss of prefix sums for any C and one participation: the nuclear norm of P over steps.

    The singular values of P are 1 / (2 sin((2 i - 1) pi / (4 steps + 2))), i = 1, ..., steps (arXiv:2202.11205).
    """
    places = 2 * np.arange(1, require_whole("steps", steps) + 1) - 1
    return float(np.mean(0.5 / np.sin(places * np.pi / (4 * steps + 2))))
