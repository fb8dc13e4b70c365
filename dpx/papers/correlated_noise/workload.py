"""The error that correlated noise leaves in a workload, as its mean and its maximum over the steps; the best banded C.

Step t of SGD with momentum m moves the parameters by -h_t (g_t + m g_(t-1) + m^2 g_(t-2) + ...) at learning rate h_t.
So the parameters after step t are A g for the workload A = P diag(h) M, where P is the matrix of prefix sums and M has
the series 1 / (1 - m x). Their noise is A C^-1 z. With h = 1, A is a Toeplitz matrix too, and one column of A C^-1 is
enough: row t has the squared norm sum_(j <= t) b_j^2, which grows with t. Otherwise M C^-1 z is a process of moving
averages and autoregression, whose covariance with its own prefix sums has a recurrence.

The banded strategy of least loss comes from L-BFGS on its coefficients with exact gradients. With at most `separation`
bands, the columns of C at the steps of one example are orthogonal. So the sensitivity is sqrt(k) times the norm of c,
up to columns that the end of the run cuts off, and the loss is in proportion to

    |c|^2 * q(u),   u the first column of M C^-1, or of A C^-1 where A is a Toeplitz matrix, and q a quadratic form.

The series of u is a(x) / c(x), so the derivative of u by c_i has the series -x^i a(x) / c(x)^2: it is -e shifted by i
places, where e has the series u(x) / c(x). So all derivatives of q(u) cost q'(u), one more recurrence, and one inner
product each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, signal

from dpx.papers.correlated_noise.sensitivities import sensitivity
from dpx.papers.correlated_noise.strategy import Strategy, square_root_coefficients
from dpx.values import require_number, require_whole


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run computes from its gradients; by default their prefix sums.

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
        """The learning rates of a run, float64 (steps,). Raises ValueError unless there is one for every step."""
        if not self.learning_rates:
            return np.ones(steps)
        if len(self.learning_rates) != steps:
            raise ValueError(f"learning_rates must be {steps} numbers, one per step, got {len(self.learning_rates)}")
        return np.array(self.learning_rates)


class WorkloadLoss(NamedTuple):
    """The error of a workload for clip norm and noise multiplier 1; floats.

    sensitivity: of C. mean: the root of the mean squared error over the steps. largest: the largest root mean square.
    """

    sensitivity: float
    mean: float
    largest: float


PREFIX_SUMS = Workload()


def loss(
    strategy: Strategy, *, steps: int, workload: Workload = PREFIX_SUMS, participations: int = 1, separation: int = 1
) -> WorkloadLoss:
    """The error of `workload` after `steps` steps, for noise proportional to the sensitivity of C.

    strategy: the matrix C. steps, participations, separation: as in `sensitivity`. Takes O(steps * coefficients), and
        for learning rates O(steps * coefficients^2). Raises ValueError for other numbers and if a coefficient
        overflows.
    """
    found = sensitivity(strategy, steps=steps, participations=participations, separation=separation)
    squares = squared_errors(strategy, workload, steps)
    return WorkloadLoss(found, found * float(np.sqrt(np.mean(squares))), found * float(np.sqrt(np.max(squares))))


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

    y_t = sum_j n_j w_(t-j) with w_t = z_t - sum_(j > 0) d_j w_(t-j). The covariances of the last w, with each other and
    with the sum, follow from the step before.
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


def mean_loss_lower_bound(steps: int) -> float:
    """A lower bound on the mean loss of prefix sums for any C and one participation: the nuclear norm of P over steps.

    The singular values of P are 1 / (2 sin((2 i - 1) pi / (4 steps + 2))), i = 1, ..., steps (arXiv:2202.11205).
    """
    places = 2 * np.arange(1, require_whole("steps", steps) + 1) - 1
    return float(np.mean(0.5 / np.sin(places * np.pi / (4 * steps + 2))))


LONGEST_SCHEDULE = 4096  # steps, because q is then a matrix of steps^2 numbers
_OVERFLOW = 1e3  # the logarithm of a loss that is not a float64; of a float64 it is at most 710

Quadratic = Callable[[np.ndarray], tuple[float, np.ndarray]]  # u -> q(u) and half of its gradient


def optimized(
    *, bands: int, steps: int, workload: Workload = PREFIX_SUMS, error: Literal["mean", "largest"] = "mean"
) -> Strategy:
    """The strategy with `bands` bands and the least mean or largest loss, for examples at least `bands` steps apart.

    bands: int, at least 1; 1 is the identity. steps: of the run, at least `bands`.
    workload: the momentum and the learning rates whose error is minimized.
    error: "mean" (the root of the mean squared error over the steps) or "largest" (over the steps; for constant
        learning rates only).

    Returns a local optimum, started at `banded_square_root`. It fits any number of participations, because that is a
    factor of the loss. Time: O(steps * bands) an evaluation, and O(steps^2) with learning rates. Raises ValueError for
    other numbers, and for learning rates of more than LONGEST_SCHEDULE steps.
    """
    bands = require_whole("bands", bands)
    steps = require_whole("steps", steps, minimum=bands)
    if bands == 1:
        return Strategy()
    denominator, quadratic = objective(workload, steps, error)

    def value_and_gradient(rest: np.ndarray) -> tuple[float, np.ndarray]:
        return log_workload_loss(np.concatenate([[1.0], rest]), denominator, quadratic, steps)

    start = square_root_coefficients(bands)[1:]
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30}
    found = optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return Strategy(coefficients=(1.0, *found.x))


def objective(workload: Workload, steps: int, error: str) -> tuple[np.ndarray, Quadratic]:
    """The series a(x) by its denominator, and the quadratic form of u. Raises as `optimized` does."""
    rates = workload.rates(steps)
    if error not in ("mean", "largest"):
        raise ValueError(f'error must be "mean" or "largest", got {error!r}')
    if np.all(rates == rates[0]):
        weights = np.arange(steps, 0, -1) / steps if error == "mean" else np.ones(steps)
        denominator = np.convolve([1.0, -1.0], workload.momentum_series)
        return denominator, lambda u: (float(weights @ np.square(u)), weights * u)
    if error == "largest":
        raise ValueError('error must be "mean" if learning rates change, got "largest"')
    if steps > LONGEST_SCHEDULE:
        raise ValueError(f"steps must be at most {LONGEST_SCHEDULE} if learning rates change, got {steps}")
    matrix = _workload_with_rates(rates) / steps

    def quadratic_form(u: np.ndarray) -> tuple[float, np.ndarray]:
        product = matrix @ u
        return float(u @ product), product

    return workload.momentum_series, quadratic_form


def _workload_with_rates(rates: np.ndarray) -> np.ndarray:
    """The matrix H with u' H u = |P diag(h) U|^2 for the lower triangular Toeplitz matrix U of u, (steps, steps).

    H_ij = sum_s h_(s+i) h_(s+j) (n - s - max(i, j)), so H_ij = H_(i+1, j+1) + h_i h_j (n - max(i, j)).
    """
    steps = len(rates)
    matrix, left = np.zeros((steps + 1, steps + 1)), np.arange(steps, 0, -1)
    for i in range(steps - 1, -1, -1):
        matrix[i, i:steps] = matrix[i + 1, i + 1 :] + rates[i] * rates[i:] * left[i:]
    upper = matrix[:steps, :steps]
    return upper + np.triu(upper, 1).T


def log_workload_loss(
    coefficients: np.ndarray, denominator: np.ndarray, quadratic: Quadratic, steps: int
) -> tuple[float, np.ndarray]:
    """log |c|^2 + log q(u), and its gradient by c_1, ..., c_(b-1).

    Where u overflows, because a root of c is small, the value is _OVERFLOW, so that a line search takes a shorter step.
    inf would stop L-BFGS.
    """
    bands = len(coefficients)
    impulse = np.zeros(steps)
    impulse[0] = 1
    with np.errstate(all="ignore"):
        u = np.asarray(signal.lfilter([1.0], coefficients, signal.lfilter([1.0], denominator, impulse)))
        value, product = quadratic(u)
    if not np.isfinite(value):
        return _OVERFLOW, np.zeros(bands - 1)
    moved = np.asarray(signal.lfilter([1.0], coefficients, u))
    slopes = [-2 * (product[i:] @ moved[: steps - i]) / value for i in range(1, bands)]
    norm = float(coefficients @ coefficients)
    return np.log(norm) + np.log(value), 2 * coefficients[1:] / norm + np.array(slopes)
