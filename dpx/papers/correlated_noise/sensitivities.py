"""How far one example moves C G, in clip norms: the sensitivity of a strategy.

An example that takes part at the steps S moves row s of G by a vector g_s with |g_s| <= 1 if s is in S, and by 0
otherwise. So C G moves by at most the root of

    sum_(s, t in S) <c_s, c_t> <g_s, g_t>  <=  sum_(s, t in S) |<c_s, c_t>|,                                        (1)

where c_s is column s of C. In a fixed order, two steps of S are at least `separation` apart, and S has at most k steps,
so at most K = min(k, ceil(steps / separation)).

* Bound by the envelope. Let e_j = max over i >= j of |c_i|, and E its matrix. |<c_s, c_t>| <= <e_s, e_t>, because the
  inner product sums |c_i c_j| <= e_i e_j. E is >= 0 and non-increasing, and for such a matrix the largest S is 0, b, 2
  b, ..., (K - 1) b with b = separation: moving all steps of S after some place earlier never reduces an inner product
  of two columns, because it sums over more rows and a smaller distance (Kalinin and Lampert 2024, arXiv:2405.13763,
  theorem 2). Where c = e, (1) is an equality with equal g_s: the bound is exact.
* Bound by the distances, for a banded C. Let w_l = max over s of |<c_s, c_(s + l)>|. The K - i or fewer pairs of S that
  are i steps of S apart are at least i b apart. So (1) is at most K w_0 + 2 sum_(0 < i < K) (K - i) max over l >= i b
  of w_l. With at most b bands it is K times the squared norm of a column, because such columns are orthogonal.

`sensitivity` is the smaller of the two. With a banded inverse, C is full, so only the envelope bounds it.

* Shuffled epochs: an example is in one step of every epoch of b steps, possibly the last of one and the first of the
  next. Two of its steps that are i epochs apart, K - i pairs in K epochs, are at least (i - 1) b + 1 steps apart.
  |<c_s, c_(s + l)>| <= r_l = sum_j e_j e_(j + l), which falls with l. So (1) is at most K r_0 + 2 sum_(0 < i < K) (K -
  i) r_((i - 1) b + 1). The bound by the envelope for a separation of 1 holds too.
"""

import math

import numpy as np

from dpx.papers.correlated_noise.strategy import Strategy
from dpx.values import require_whole


def sensitivity(strategy: Strategy, *, steps: int, participations: int = 1, separation: int = 1) -> float:
    """The most that one example moves C G, in units of the clip norm.

    strategy: the matrix C. steps: of the run, int. participations: at most how often an example takes part, int.
    separation: the fewest steps between two that hold the same example, int; 1 allows neighboring steps.

    Exact if `sensitivity_is_exact`, otherwise an upper bound. float64 sums, relative error below 1e-10. Raises
    ValueError for other numbers, and if a coefficient of C overflows.
    """
    steps, separation = require_whole("steps", steps), require_whole("separation", separation)
    most = min(require_whole("participations", participations), -(-steps // separation))
    column = strategy.column(steps)
    bounds = [_sensitivity_if_decreasing(_largest_from_here_on(column), most, separation)]
    if strategy.bands is not None:
        bounds.append(_sensitivity_by_distance(column[: strategy.bands], most, separation))
    return math.sqrt(min(bounds))


def shuffled_sensitivity(strategy: Strategy, *, steps: int, steps_per_epoch: int) -> float:
    """An upper bound on how far one example moves C G, in clip norms, if it takes part in any one step of every epoch.

    strategy: the matrix C. steps: of the run, int; the last epoch may be incomplete. steps_per_epoch: int. Takes
        O(steps * epochs). Raises ValueError for other numbers, and if a coefficient of C overflows.
    """
    steps, length = require_whole("steps", steps), require_whole("steps_per_epoch", steps_per_epoch)
    bound, epochs = _largest_from_here_on(strategy.column(steps)), -(-steps // length)
    distances = ((i - 1) * length + 1 for i in range(1, epochs))
    pairs = sum((epochs - i) * (bound[: steps - d] @ bound[d:]) for i, d in enumerate(distances, start=1))
    neighbors = sensitivity(strategy, steps=steps, participations=epochs, separation=1)
    return min(math.sqrt(epochs * (bound @ bound) + 2 * pairs), neighbors)


def sensitivity_is_exact(strategy: Strategy, *, steps: int) -> bool:
    """Whether `sensitivity` is exact: the first `steps` coefficients of C (`strategy`) are >= 0 and never rise."""
    column = strategy.column(steps)
    return bool(np.all(column >= 0) and np.all(np.diff(column) <= 0))


def column_norm(strategy: Strategy, *, steps: int) -> float:
    """The largest norm of a column of C (`strategy`), the first one's: the sensitivity to one participation in `steps`.

    It is the sensitivity of one release of cyclic Poisson sampling with a banded C (`cyclic_poisson_event`).
    """
    return float(np.linalg.norm(strategy.column(steps)))


def _largest_from_here_on(column: np.ndarray) -> np.ndarray:
    """The largest absolute value at or after each place, float64 (steps,)."""
    return np.maximum.accumulate(np.abs(column)[::-1])[::-1]


def _sensitivity_if_decreasing(column: np.ndarray, most: int, separation: int) -> float:
    """sum_t (sum_(i < most) c_(t - i separation))^2, for c >= 0 and non-increasing, in O(steps)."""
    rows = -(-len(column) // separation)
    moved = np.concatenate([column, np.zeros(rows * separation - len(column))]).reshape(rows, separation)
    moved = np.cumsum(moved, axis=0)  # of all participations
    moved[most:] -= moved[: rows - most].copy()  # of the last `most`
    return float(np.sum(np.square(moved.reshape(-1)[: len(column)])))


def _sensitivity_by_distance(column: np.ndarray, most: int, separation: int) -> float:
    """The bound by the distances. column: the coefficients that may differ from 0."""
    bands = len(column)
    distances = [np.abs(np.cumsum(column[: bands - lag] * column[lag:])).max() for lag in range(bands)]
    largest = np.maximum.accumulate(distances[::-1])[::-1]
    pairs = sum((most - i) * largest[i * separation] for i in range(1, most) if i * separation < bands)
    return float(most * distances[0] + 2 * pairs)
