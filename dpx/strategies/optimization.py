"""The banded strategy with the least loss for a workload, by L-BFGS on its coefficients with exact gradients.

With at most `separation` bands, the columns of C at the steps of one example are orthogonal. So the sensitivity is
sqrt(k) times the norm of c, up to columns that the end of the run cuts off, and the loss is in proportion to

    |c|^2 * q(u),   u the first column of M C^-1, or of A C^-1 where A is a Toeplitz matrix, and q a quadratic form.

The series of u is a(x) / c(x), so the derivative of u by c_i has the series -x^i a(x) / c(x)^2: it is -e, moved by i
places, where e has the series u(x) / c(x). So all derivatives of q(u) cost as much as q'(u), one more recurrence, and
one inner product each.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy import optimize, signal

from dpx.strategies.families import half_coefficients
from dpx.strategies.losses import PREFIX_SUMS, Workload
from dpx.strategies.strategy import Strategy
from dpx.validation import require_whole

LONGEST_SCHEDULE = 4096  # steps, because q is then a matrix of steps^2 numbers
_OVERFLOW = 1e3  # the logarithm of a loss that is not a float64; of a float64 it is at most 710

Quadratic = Callable[[np.ndarray], tuple[float, np.ndarray]]  # u -> q(u) and half of its gradient


def optimized(
    *,
    bands: int,
    steps: int,
    workload: Workload = PREFIX_SUMS,
    error: Literal["mean", "largest"] = "mean",
) -> Strategy:
    """The strategy of `bands` bands with the least mean or largest loss, for examples at least `bands` steps apart.

    bands: int, at least 1; 1 is the identity. steps: of the run, at least `bands`.
    workload: the momentum and the learning rates whose error is made small.
    error: "mean" (the root of the mean squared error over the steps) or "largest" (over the steps; for constant
        learning rates only).

    The result is a local optimum, started at `banded_half`. It holds for any number of participations, because that is
    a factor of the loss. Time: O(steps * bands) an evaluation, and O(steps^2) with learning rates.
    Raises ValueError for other numbers, and for learning rates of more than LONGEST_SCHEDULE steps.
    """
    bands = require_whole("bands", bands)
    steps = require_whole("steps", steps, minimum=bands)
    if bands == 1:
        return Strategy()
    denominator, quadratic = objective(workload, steps, error)

    def value_and_gradient(rest: np.ndarray) -> tuple[float, np.ndarray]:
        return log_loss(np.concatenate([[1.0], rest]), denominator, quadratic, steps)

    start = half_coefficients(bands)[1:]
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30}
    found = optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return Strategy(coefficients=(1.0, *found.x))


def objective(workload: Workload, steps: int, error: str) -> tuple[np.ndarray, Quadratic]:
    """The series a(x) by its denominator, and the quadratic form of u. Raises ValueError as `optimized` does."""
    rates = workload.rates(steps)
    if error not in ("mean", "largest"):
        raise ValueError(f'error must be "mean" or "largest", got {error!r}')
    if np.all(rates == rates[0]):
        weights = np.arange(steps, 0, -1) / steps if error == "mean" else np.ones(steps)
        denominator = np.convolve([1.0, -1.0], workload.momentum_series)
        return denominator, lambda u: (float(weights @ np.square(u)), weights * u)
    if error == "largest":
        raise ValueError('error must be "mean" with learning rates that change, got "largest"')
    if steps > LONGEST_SCHEDULE:
        raise ValueError(f"steps must be at most {LONGEST_SCHEDULE} with learning rates that change, got {steps}")
    matrix = _scheduled(rates) / steps

    def quadratic(u: np.ndarray) -> tuple[float, np.ndarray]:
        product = matrix @ u
        return float(u @ product), product

    return workload.momentum_series, quadratic


def _scheduled(rates: np.ndarray) -> np.ndarray:
    """The matrix H with u' H u = |P diag(h) U|^2 for the lower triangular Toeplitz matrix U of u, (steps, steps).

    H_ij = sum_s h_(s+i) h_(s+j) (n - s - max(i, j)), so H_ij = H_(i+1, j+1) + h_i h_j (n - max(i, j)).
    """
    steps = len(rates)
    matrix, left = np.zeros((steps + 1, steps + 1)), np.arange(steps, 0, -1)
    for i in range(steps - 1, -1, -1):
        matrix[i, i:steps] = matrix[i + 1, i + 1 :] + rates[i] * rates[i:] * left[i:]
    upper = matrix[:steps, :steps]
    return upper + np.triu(upper, 1).T


def log_loss(
    coefficients: np.ndarray, denominator: np.ndarray, quadratic: Quadratic, steps: int
) -> tuple[float, np.ndarray]:
    """log |c|^2 + log q(u), and its gradient by c_1, ..., c_(b-1).

    Where u overflows, because a root of c is small, the value is _OVERFLOW: a line search then takes a shorter step. It
    is not inf, because L-BFGS would stop there.
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
