"""Strategies: lower triangular Toeplitz matrices C with ones on the diagonal, and families that need no optimization.

Such matrices multiply like power series, so C is the series c(x) = sum_j c_j x^j, and C^-1 is 1 / c(x). A recurrence
gives the coefficients of a quotient of polynomials of degree below b, in O(b) for each one (`scipy.signal.lfilter`).

All families come from the square root of the matrix of prefix sums, whose series is 1 / (1 - x). The root has the
series (1 - x)^(-1/2), with coefficients f_j = binom(2 j, j) / 4^j, and its inverse has (1 - x)^(1/2) (Fichtenberger,
Henzinger and Upadhyay 2023, arXiv:2202.11205).

# The sensitivity of a strategy: how far one example moves C G, in clip norms

An example that takes part in the steps S moves row s of G by a vector g_s with |g_s| <= 1 if s is in S, and by 0
otherwise. So the distance that C G moves is at most the square root of

    sum_(s, t in S) <c_s, c_t> <g_s, g_t>  <=  sum_(s, t in S) |<c_s, c_t>|,                                        (1)

where c_s is column s of C. In a fixed order, two steps of S are at least `separation` apart, and S has at most k steps,
and thus at most K = min(k, ceil(steps / separation)).

* Bound by the envelope. Let e_j = max over i >= j of |c_i|, and E its matrix. |<c_s, c_t>| <= <e_s, e_t>, because the
  inner product sums |c_i c_j| <= e_i e_j. E is >= 0 and non-increasing, and for such a matrix the worst S is 0, b, 2
  b, ..., (K - 1) b with b = separation: shifting all later steps of S to earlier ones never reduces an inner product
  of two columns, because it sums over more rows and a smaller distance (Kalinin and Lampert 2024, arXiv:2405.13763,
  theorem 2). If c = e, (1) is an equality for equal g_s, so the bound is exact.
* Bound by the distances, for a banded C. Let w_l = max over s of |<c_s, c_(s + l)>|. The K - i or fewer pairs of S that
  are i steps of S apart are at least i b apart. So (1) is at most K w_0 + 2 sum_(0 < i < K) (K - i) max over l >= i b
  of w_l. With at most b bands it is K times the squared norm of a column, because such columns are orthogonal.

`sensitivity` is the smaller of the two. With a banded inverse, C is full, so only the envelope bounds it.

* Shuffled epochs: an example is in one step of every epoch of b steps, possibly the last of one and the first of the
  next. Two of its steps that are i epochs apart, K - i pairs in K epochs, are at least (i - 1) b + 1 steps apart.
  |<c_s, c_(s + l)>| <= r_l = sum_j e_j e_(j + l), which falls with l. So (1) is at most K r_0 + 2 sum_(0 < i < K) (K -
  i) r_((i - 1) b + 1). The bound by the envelope for a separation of 1 holds too.

# The error that correlated noise leaves in a workload, its mean and maximum over the steps, and the best banded C

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import linalg, optimize, signal, special

from dpx.values import described, explain_misuse, require_number, require_whole


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A lower triangular Toeplitz matrix C, whose inverse correlates the noise over the steps of a run.

    coefficients: the first coefficients of C, floats with c_0 = 1; all later ones are 0: a banded C.
    inverse_coefficients: the first coefficients of C^-1, floats with d_0 = 1; all later ones are 0: a banded inverse,
        whose C is dense.

    Give one of the two; the other stays (1,). Without either, C = I, the independent noise of DP-SGD. Raises ValueError
    for coefficients that are not finite, do not begin with 1, or end with 0, and if both are given.
    """

    coefficients: tuple[float, ...] = (1.0,)
    inverse_coefficients: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        for name in ("coefficients", "inverse_coefficients"):
            object.__setattr__(self, name, _require_coefficients(name, getattr(self, name)))
        if len(self.coefficients) > 1 and len(self.inverse_coefficients) > 1:
            words = "a strategy must have coefficients or inverse_coefficients, not both"
            raise ValueError(f"{words}, got {len(self.coefficients)} and {len(self.inverse_coefficients)} of them")

    @property
    def bands(self) -> int | None:
        """The number of coefficients of C that may be nonzero; None if C is dense, as when its inverse is banded."""
        return len(self.coefficients) if len(self.inverse_coefficients) == 1 else None

    def column(self, steps: int) -> np.ndarray:
        """Returns the first column of C for this many steps, float64 (steps,). Raises ValueError if it overflows."""
        return self.quotient_series(self.coefficients, self.inverse_coefficients, steps)

    def inverse_column(self, steps: int) -> np.ndarray:
        """Returns the first column of C^-1 for this many steps, float64 (steps,). Raises ValueError if it overflows."""
        return self.quotient_series(self.inverse_coefficients, self.coefficients, steps)

    def covariance(self, steps: int) -> np.ndarray:
        """Returns C^-1 C^-T, float64 (steps, steps): the covariance of the noise over the steps, for z of variance 1.

        Takes O(steps^3) operations, so it is for tests and inspection only.
        """
        inverse = np.asarray(linalg.toeplitz(self.inverse_column(steps), np.zeros(steps)))
        return inverse @ inverse.T

    @staticmethod
    def quotient_series(numerator: Any, denominator: Any, steps: int) -> np.ndarray:
        """Returns the first coefficients of the power series of numerator / denominator, float64 (steps,).

        Both are coefficients of polynomials, the constant first. Raises ValueError if a result is not finite.
        """
        impulse = np.zeros(require_whole("steps", steps))
        impulse[0] = 1
        with np.errstate(all="ignore"):
            made = np.asarray(signal.lfilter(np.array(numerator), np.array(denominator), impulse))
        if not np.all(np.isfinite(made)):
            first = int(np.flatnonzero(~np.isfinite(made))[0])
            words = f"the coefficients of C and of its inverse must be finite for {steps} steps"
            raise ValueError(f"{words}, but number {first} overflows: roots of the given series are too small")
        return made


def _require_coefficients(name: str, value: Any) -> tuple[float, ...]:
    """Returns `value` as floats. Raises ValueError unless all are finite, the first is 1, and the last is not 0."""
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, got {described(value)}") from None
    if numbers.ndim != 1 or not len(numbers) or numbers[0] != 1 or not np.all(np.isfinite(numbers)):
        raise ValueError(f"{name} must be finite numbers that begin with 1, got {described(value)}")
    if len(numbers) > 1 and numbers[-1] == 0:
        raise ValueError(f"{name} must not end with 0, got {len(numbers)} numbers with 0 at the end")
    return tuple(numbers.tolist())


def identity() -> Strategy:
    """Returns the strategy of DP-SGD: C = I, independent noise."""
    return Strategy()


@explain_misuse
def lambda_cgd(*, correlation: float) -> Strategy:
    """Subtracts part of the previous step's noise: C^-1 has the coefficients 1, -correlation (arXiv:2601.22334).

    C has the coefficients correlation^j, so its sensitivity is exact. correlation: lambda, in [0, 1); otherwise raises
    ValueError. At 1, a prefix sum would have the noise of one step, but C would have the sensitivity of all steps.
    """
    value = require_number("correlation", correlation, minimum=0, maximum=1)
    if value == 1:
        raise ValueError("correlation must be below 1, got 1.0")
    return Strategy(inverse_coefficients=(1.0, -value) if value else (1.0,))


@explain_misuse
def banded_inverse_square_root(*, coefficients: int) -> Strategy:
    """BISR: the first coefficients of the inverse square root of prefix sums as a banded C^-1 (arXiv:2505.12128).

    coefficients: p, int, at least 1; 1 is the identity, and 2 is `lambda_cgd(correlation=1/2)`.
    """
    count = require_whole("coefficients", coefficients)
    # (1 - x)^(1/2): each coefficient is the one before times (j - 3/2) / j.
    places = np.arange(1, count)
    return Strategy(inverse_coefficients=tuple(np.concatenate([[1.0], np.cumprod((places - 1.5) / places)])))


def square_root_coefficients(count: int) -> np.ndarray:
    """Returns the coefficients of (1 - x)^(-1/2): binom(2 j, j) / 4^j, float64 (count,): 1, 1/2, 3/8 and so on."""
    places = np.arange(require_whole("count", count))
    return np.exp(special.gammaln(places + 0.5) - special.gammaln(places + 1.0)) / np.sqrt(np.pi)


@explain_misuse
def banded_square_root(*, bands: int, momentum: float = 0.0) -> Strategy:
    """BSR: the first coefficients of the square root of the workload as a banded C (arXiv:2405.13763).

    Without momentum it is called banded FHU, after Fichtenberger, Henzinger and Upadhyay (arXiv:2202.11205), and its
    sensitivity is exact, because the coefficients fall.

    bands: int, at least 1. momentum: in [0, 1), that of the workload, whose series is 1 / ((1 - x) (1 - momentum x)),
        with the square root (1 - x)^(-1/2) (1 - momentum x)^(-1/2).
    """
    half = square_root_coefficients(require_whole("bands", bands))
    momentum = require_number("momentum", momentum, minimum=0, maximum=1)
    if momentum == 1:
        raise ValueError("momentum must be below 1, got 1.0")
    return Strategy(coefficients=tuple(np.convolve(half, half * momentum ** np.arange(bands))[:bands] / half[0] ** 2))


def _require_instance(name: str, value: Any, kind: type):
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a dpx.strategies.{kind.__name__}, got {described(value)}")


def sensitivity(strategy: Strategy, *, steps: int, participations: int = 1, separation: int = 1) -> float:
    """Returns how far one example can move C G, in clip norms, where row t of G is the sum of gradients at step t.

    strategy: the matrix C. steps: int, in the run. participations: int, the most steps in which an example takes part.
    separation: int, the smallest distance between two steps with the same example; 1 allows neighboring steps.

    The result is exact if `sensitivity_is_exact`, otherwise an upper bound. Its relative rounding error is below 1e-10.
    Raises ValueError for numbers outside their domains, and if a coefficient of C overflows.
    """
    _require_instance("strategy", strategy, Strategy)
    steps, separation = require_whole("steps", steps), require_whole("separation", separation)
    most = min(require_whole("participations", participations), -(-steps // separation))
    column = strategy.column(steps)
    bounds = [_sensitivity_if_decreasing(_largest_magnitude_onward(column), most, separation)]
    if strategy.bands is not None:
        bounds.append(_sensitivity_by_distance(column[: strategy.bands], most, separation))
    return math.sqrt(min(bounds))


def shuffled_sensitivity(strategy: Strategy, *, steps: int, steps_per_epoch: int) -> float:
    """Bounds how far one example moves C G (see `sensitivity`), if it takes part in any one step of every epoch.

    strategy: the matrix C. steps: int, in the run; the last epoch may be incomplete. steps_per_epoch: int. Takes
        O(steps * epochs). Raises ValueError for numbers outside their domains, and if a coefficient of C overflows.
    """
    steps, length = require_whole("steps", steps), require_whole("steps_per_epoch", steps_per_epoch)
    bound, epochs = _largest_magnitude_onward(strategy.column(steps)), -(-steps // length)
    distances = ((i - 1) * length + 1 for i in range(1, epochs))
    pairs = sum((epochs - i) * (bound[: steps - d] @ bound[d:]) for i, d in enumerate(distances, start=1))
    neighbors = sensitivity(strategy, steps=steps, participations=epochs, separation=1)
    return min(math.sqrt(epochs * (bound @ bound) + 2 * pairs), neighbors)


def sensitivity_is_exact(strategy: Strategy, *, steps: int) -> bool:
    """Whether `sensitivity(strategy)` is exact: the first `steps` coefficients of C are >= 0 and never rise."""
    column = strategy.column(steps)
    return bool(np.all(column >= 0) and np.all(np.diff(column) <= 0))


def column_norm(strategy: Strategy, *, steps: int) -> float:
    """Returns the norm of the first column of C (`strategy`) over `steps` steps, which is the largest of all columns.

    It is the sensitivity to one participation, as in cyclic Poisson sampling with a banded C (`cyclic_poisson_event`).
    """
    return float(np.linalg.norm(strategy.column(steps)))


def _largest_magnitude_onward(column: np.ndarray) -> np.ndarray:
    """Returns the largest absolute value at or after each position, float64 (steps,)."""
    return np.maximum.accumulate(np.abs(column)[::-1])[::-1]


def _sensitivity_if_decreasing(column: np.ndarray, most: int, separation: int) -> float:
    """Returns sum_t (sum_(i < most) c_(t - i separation))^2, for a c that is >= 0 and never rises, in O(steps)."""
    rows = -(-len(column) // separation)
    moved = np.concatenate([column, np.zeros(rows * separation - len(column))]).reshape(rows, separation)
    moved = np.cumsum(moved, axis=0)  # by all participations
    moved[most:] -= moved[: rows - most].copy()  # by the last `most`
    return float(np.sum(np.square(moved.reshape(-1)[: len(column)])))


def _sensitivity_by_distance(column: np.ndarray, most: int, separation: int) -> float:
    """Returns the square of the bound by the distances. column: the coefficients that may differ from 0."""
    bands = len(column)
    distances = [np.abs(np.cumsum(column[: bands - lag] * column[lag:])).max() for lag in range(bands)]
    largest = np.maximum.accumulate(distances[::-1])[::-1]
    pairs = sum((most - i) * largest[i * separation] for i in range(1, most) if i * separation < bands)
    return float(most * distances[0] + 2 * pairs)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run computes from its gradients; by default their prefix sums.

    momentum: in [0, 1), that of SGD. learning_rates: one non-negative float per step; () for 1 at every step.
    Raises ValueError for other numbers.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self):
        momentum = require_number("momentum", self.momentum, minimum=0, maximum=1)
        if momentum == 1:
            raise ValueError("momentum must be below 1, got 1.0")
        object.__setattr__(self, "momentum", momentum)
        if isinstance(self.learning_rates, int | float):
            raise ValueError(f"learning_rates must be one number for each step, got {self.learning_rates}")
        rates = tuple(require_number("learning_rates", rate, minimum=0) for rate in self.learning_rates)
        object.__setattr__(self, "learning_rates", rates)

    @property
    def inverse_momentum_series(self) -> np.ndarray:
        """Returns 1 - momentum x, the inverse of the series of the momentum, float64 (1 or 2,)."""
        return np.array([1.0, -self.momentum] if self.momentum else [1.0])

    def rates(self, steps: int) -> np.ndarray:
        """Returns a run's learning rates, float64 (steps,). Raises ValueError unless there is one for every step."""
        if not self.learning_rates:
            return np.ones(steps)
        if len(self.learning_rates) != steps:
            raise ValueError(f"learning_rates must be {steps} numbers, one per step, got {len(self.learning_rates)}")
        return np.array(self.learning_rates)


class WorkloadLoss(NamedTuple):
    """The error that a strategy's noise leaves in a workload, at clip norm 1 and noise multiplier 1, in floats.

    sensitivity: that of the strategy. mean: the root mean square error over all steps. largest: that of the worst step.
    """

    sensitivity: float
    mean: float
    largest: float


PREFIX_SUMS = Workload()


def loss(
    strategy: Strategy, *, steps: int, workload: Workload = PREFIX_SUMS, participations: int = 1, separation: int = 1
) -> WorkloadLoss:
    """Computes the error of `workload` over `steps` steps, for noise proportional to the sensitivity of C.

    strategy: the matrix C. steps, participations, separation: as in `sensitivity`. Takes O(steps * coefficients), and
        for learning rates O(steps * coefficients^2). Raises ValueError for invalid numbers, and on overflow.
    """
    _require_instance("workload", workload, Workload)
    found = sensitivity(strategy, steps=steps, participations=participations, separation=separation)
    squares = squared_errors(strategy, workload, steps)
    return WorkloadLoss(found, found * float(np.sqrt(np.mean(squares))), found * float(np.sqrt(np.max(squares))))


def squared_errors(strategy: Strategy, workload: Workload, steps: int) -> np.ndarray:
    """Returns the squared norm of each row of A C^-1, float64 (steps,)."""
    rates = workload.rates(steps)
    numerator = np.array(strategy.inverse_coefficients)
    denominator = np.convolve(strategy.coefficients, workload.inverse_momentum_series)
    if np.all(rates == rates[0]):
        column = rates[0] * np.cumsum(Strategy.quotient_series(numerator, denominator, steps))
        return np.cumsum(np.square(column))
    return _variances_by_recurrence(numerator, denominator, rates)


def _variances_by_recurrence(numerator: np.ndarray, denominator: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Returns the variances of sum_(s <= t) h_s y_s, float64 (steps,), where y has the series numerator / denominator.

    y_t = sum_j n_j w_(t-j) with w_t = z_t - sum_(j > 0) d_j w_(t-j). The covariances of the last w, with each other and
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


def mean_loss_lower_bound(steps: int) -> float:
    """A lower bound on the mean error of prefix sums for any C, if an example takes part once: |P|_nuclear / steps.

    P is the lower triangular matrix of ones. Its singular values are 1 / (2 sin((2 i - 1) pi / (4 steps + 2))),
    i = 1, ..., steps (arXiv:2202.11205).
    """
    places = 2 * np.arange(1, require_whole("steps", steps) + 1) - 1
    return float(np.mean(0.5 / np.sin(places * np.pi / (4 * steps + 2))))


LONGEST_SCHEDULE = 4096  # steps, because q is then a matrix of steps^2 numbers
_OVERFLOW = 1e3  # stands for the logarithm of a loss that overflows; that of a float64 is at most 710

Quadratic = Callable[[np.ndarray], tuple[float, np.ndarray]]  # u -> q(u) and half of its gradient


@explain_misuse
def optimized(
    *, bands: int, steps: int, workload: Workload = PREFIX_SUMS, error: Literal["mean", "largest"] = "mean"
) -> Strategy:
    """Finds the strategy with `bands` bands and the least loss, if no example recurs within `bands` steps.

    bands: int, at least 1; 1 is the identity. steps: int, in the run, at least `bands`.
    workload: the momentum and the learning rates whose error is minimized.
    error: the loss: "mean" (the root of the mean squared error over the steps) or "largest" (over the steps; for
        constant learning rates only).

    Returns a local optimum, starting from `banded_square_root`. The number of participations only scales the loss, so
    it does not matter. An evaluation takes O(steps * bands), or O(steps^2) with learning rates. Raises ValueError for
    numbers outside their domains, and for learning rates over more than 4,096 steps.
    """
    bands = require_whole("bands", bands)
    steps = require_whole("steps", steps, minimum=bands)
    _require_instance("workload", workload, Workload)
    if bands == 1:
        return Strategy()
    denominator, quadratic = workload_objective(workload, steps, error)

    def value_and_gradient(rest: np.ndarray) -> tuple[float, np.ndarray]:
        return log_workload_loss(np.concatenate([[1.0], rest]), denominator, quadratic, steps)

    start = square_root_coefficients(bands)[1:]
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30}
    found = optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return Strategy(coefficients=(1.0, *found.x))


def workload_objective(workload: Workload, steps: int, error: str) -> tuple[np.ndarray, Quadratic]:
    """Returns the denominator of the series a(x) and the quadratic form of u. Raises ValueError as `optimized` does."""
    rates = workload.rates(steps)
    if error not in ("mean", "largest"):
        raise ValueError(f'error must be "mean" or "largest", got {error!r}')
    if np.all(rates == rates[0]):
        weights = np.arange(steps, 0, -1) / steps if error == "mean" else np.ones(steps)
        denominator = np.convolve([1.0, -1.0], workload.inverse_momentum_series)
        return denominator, lambda u: (float(weights @ np.square(u)), weights * u)
    if error == "largest":
        raise ValueError('error must be "mean" if learning rates change, got "largest"')
    if steps > LONGEST_SCHEDULE:
        raise ValueError(f"steps must be at most {LONGEST_SCHEDULE} if learning rates change, got {steps}")
    matrix = _workload_with_rates(rates) / steps

    def quadratic_form(u: np.ndarray) -> tuple[float, np.ndarray]:
        product = matrix @ u
        return float(u @ product), product

    return workload.inverse_momentum_series, quadratic_form


def _workload_with_rates(rates: np.ndarray) -> np.ndarray:
    """Returns H, (steps, steps), with u' H u = |P diag(h) U|^2 for the lower triangular Toeplitz matrix U of u.

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
    """Returns log |c|^2 + log q(u), and its gradient by c_1, ..., c_(b-1).

    If u overflows, because a root of c is small, the value is _OVERFLOW, so that the line search takes a shorter step;
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
