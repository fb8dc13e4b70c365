"""Error feedback on Poisson samples, amplified: Renyi divergences by a backward recursion over the steps.

S, F and rho are as in `energy`, nu is the noise in units of C1 / B, q the sampling rate, and l_s the likelihood ratio
of N(s, nu^2) to N(0, nu^2). Let X be the likelihood ratio of a run with the example to a run without it. Let W_t(d)
bound the L^a norm of the part of X from the releases t, t + 1, ..., if the error has moved by d. By
Minkowski's inequality

    W_t(d) = max over s^2 + F^2 <= d^2 of |(1-q) W_(t+1)(F) l_s + q W_(t+1)(F + rho) l_(s+1)|_a,      W_(T+1) = 1

because the norm grows with <S, participation> and with the participation's length. So D_a(with|without) <=
a/(a-1) ln W_1(0).

The same number bounds D_a(without|with). By the reverse of Minkowski's inequality for the exponent 1 - a, the recursion
for w_t with min and |.|_(1-a) gives D_a(without|with) <= -ln w_1(0). By induction backwards, w_t >= W_t^-b with
b = a/(a-1). After a change of measure, its step is E (1-q + q r^-b e^h)^(1-a) <= E (1-q + q r e^h)^a for
h ~ N(-1/2nu^2, 1/nu^2) and r = e^((a-1)s/nu^2) W_(t+1)(F + rho) / W_(t+1)(F) >= 1. Let X = 1-q + q e^h, p = q e^h / X.
By the inequality of the means the left side is at most E X^(1-a) r^(a p), the right side at least E X^a r^(a p). Now
X^a - X^(1-a) has the sign of h, r^(a p) grows with h, and E X^a >= E X^(1-a) (Theorem 5 of Mironov, Talwar and Zhang
2019, https://arxiv.org/abs/1908.10530), so E (X^a - X^(1-a)) r^(a p) >= 0.

More than `most` participations are left out. Given at most `most`, a participation has probability at most q, and W
grows with that probability. The probability of more is added once to delta and, in the other direction, once to
epsilon. A move above (most - 1) rho means that there were `most` participations. No more can follow, so U = 1, and any
convex continuation from below is an upper bound.

Numerically W_t(d) = e^(G d^2) U_t(d), G = (a-1) / 2 nu^2, where ln U_t is convex and grows, because sums, products,
norms and suprema of such functions are such functions. So chords between grid points are above ln U_t, and its maximum
on a quarter disc is at most its maximum on the corners of a polygon around the disc: both are upper bounds.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpx.accounting.pld import renyi
from dpx.accounting.profiles import RenyiProfile
from dpx.papers.dice_sgd.energy import participations_quantile

# The cost is an upper bound for any of these numbers, because every order, tail, grid and polygon gives one.
_ORDERS = (*range(2, 17), 18, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_MOST_IDLE_ORDERS = 3  # orders in a row that do not lower the cost, after which the search stops
_TAILS = tuple(10.0**-i for i in range(4, 19))  # probabilities of the participations left out
_TAIL_SHARE = 1e-3  # share of delta that the participations left out may take
_MOST_TRACKED = 36  # participations; above this, the recursion does not count how many there were so far
_GRID_POINTS, _TRACKED_GRID_POINTS = 200, 700  # points, about, in one grid and in all counted grids together
_MOST_CELLS = 8  # grid cells in an interval of length rho
_ANGLES = np.concatenate([[0.0], np.geomspace(0.01, math.pi / 2, 32)])  # where the polygon touches the quarter disc


@dataclass(frozen=True, kw_only=True)
class AmplifiedProfile:
    """The least cost over the orders, and over the probability of the participations that are left out.

    steps: the number of steps of the run. rate: the sampling rate, in (0, 1). reset_every: the number of steps between
    two resets (a stretch), at most `steps`. error_shift: rho, finite. noise_multiplier: nu.
    """

    steps: int
    rate: float
    reset_every: int
    error_shift: float
    noise_multiplier: float

    def epsilon(self, delta: float) -> float:
        tail = next((tail for tail in _TAILS if tail <= _TAIL_SHARE * delta), None)
        return math.inf if tail is None else self._least_over_orders(tail, lambda bound: bound.epsilon(delta), math.inf)

    def delta(self, epsilon: float) -> float:
        best = 1.0
        for tail in _TAILS:
            best = min(best, self._least_over_orders(tail, lambda bound: bound.delta(epsilon), 1.0))
            if tail <= _TAIL_SHARE * best:
                break
        return best

    def _least_over_orders(self, tail: float, ask: Callable[[RenyiProfile], float], best: float) -> float:
        """The least answer of `ask`, for increasing orders until the answers stop falling.

        The stretches between resets are independent, so their log moments add up. ln E X^a is convex in a, so chords
        between whole orders bound the orders between them.
        """
        stretches, rest = divmod(self.steps, self.reset_every)
        log_moment_of = functools.partial(
            log_moment,
            rate=self.rate,
            error_shift=self.error_shift,
            noise_multiplier=self.noise_multiplier,
            tail=tail / -(-self.steps // self.reset_every),
        )
        orders, log_moments, idle = [1], [0.0], 0
        for order in _ORDERS:
            orders.append(order)
            whole, last = (log_moment_of(order, steps=steps) for steps in (self.reset_every, rest))
            log_moments.append(stretches * whole + last)
            divergences = np.interp(renyi.ORDERS, orders, log_moments, right=math.inf) / (renyi.ORDERS - 1)
            answer = min(best, ask(RenyiProfile(divergences, tail)))
            idle = 0 if answer < best else idle + 1
            best = answer
            if idle == _MOST_IDLE_ORDERS or math.isinf(log_moments[-1]):
                break
        return best


@functools.lru_cache(maxsize=4096)
def log_moment(
    order: int, *, steps: int, rate: float, error_shift: float, noise_multiplier: float, tail: float = 0.0
) -> float:
    """A bound on a ln W_1(0) >= ln E X^a for a stretch of `steps`, except for an event of probability `tail`.

    order: a, int, at least 2.
    """
    if steps == 0:
        return 0.0
    grid = _grid_of_moves(max(2, participations_quantile(steps, rate, tail)))
    moves = error_shift * grid.moves
    gain = (order - 1) / (2 * noise_multiplier**2)
    shifts = gain * (2 * moves * (grid.fed + error_shift * grid.kept) + error_shift**2)
    log_norm = _log_norm_of_likelihood_ratio(order, rate, noise_multiplier)
    with np.errstate(over="ignore", invalid="ignore"):
        values = log_norm(2 * gain * moves[:, 0])  # ln U at the last step, after which nothing is released
        for _ in range(steps - 1):
            values = grid.extended_values(values)
            stay = values[grid.left] + grid.share * (values[grid.left + 1] - values[grid.left])
            moved = values[grid.moved] + grid.share * (values[grid.moved + 1] - values[grid.moved])
            values = (stay + log_norm(shifts + moved - stay)).max(axis=1)
    return float(order * values[0]) if np.isfinite(values[0]) else math.inf


class _Grid(NamedTuple):
    """The points of one grid of the move d, or of one grid for each number of participations so far.

    moves:  float64 (points, 1), d in units of rho.
    fed:    float64 (corners,), S divided by d at the corners of the polygon.
    kept:   float64 (corners,), F divided by d at the corners of the polygon.
    left:   int64 (points, corners), the grid point below F.
    moved:  int64 (points, corners), the grid point below F + rho.
    share:  float64 (points, corners), the position of F, and so of F + rho, between that point and the next, in [0, 1].
    tracked: the number of points after the last participation, where U = 1; 0 if participations are not counted.
    cells:  the number of grid cells in an interval of length rho.
    """

    moves: np.ndarray
    fed: np.ndarray
    kept: np.ndarray
    left: np.ndarray
    moved: np.ndarray
    share: np.ndarray
    tracked: int
    cells: int

    def extended_values(self, values: np.ndarray) -> np.ndarray:
        """ln U at the grid points, and at the points after the last participation, float64 (more points,)."""
        if self.tracked:
            return np.append(values, np.zeros(self.tracked))
        return np.append(values, values[-1] + np.arange(1, self.cells + 1) * (values[-1] - values[-2]))


@functools.lru_cache(maxsize=16)
def _grid_of_moves(most: int) -> _Grid:
    middles, halves = (_ANGLES[1:] + _ANGLES[:-1]) / 2, (_ANGLES[1:] - _ANGLES[:-1]) / 2
    fed, kept = np.sin(middles) / np.cos(halves), np.cos(middles) / np.cos(halves)

    tracked = most <= _MOST_TRACKED
    cells = 2 * _TRACKED_GRID_POINTS // (most * (most + 1)) if tracked else _GRID_POINTS // most
    cells = int(np.clip(cells, 1, _MOST_CELLS))
    counts = [n * cells + 1 for n in range(most)] if tracked else [(most - 1) * cells + 1]
    starts = np.cumsum([0, *counts])
    numbers = np.concatenate([np.arange(count) for count in counts])[:, None]
    start = np.repeat(starts[:-1], counts)[:, None]
    last = np.repeat(counts, counts)[:, None] - 1
    places = np.minimum(numbers * kept, last)
    left = np.clip(places.astype(int), 0, np.maximum(last - 1, 0))
    following = np.repeat(starts[1:], counts)[:, None] if tracked else start
    return _Grid(
        moves=numbers / cells,
        fed=fed,
        kept=kept,
        left=start + left,
        moved=following + left + cells,
        share=places - left,
        tracked=most * cells + 1 if tracked else 0,
        cells=cells,
    )


def _log_norm_of_likelihood_ratio(order: int, rate: float, noise_multiplier: float):
    """The function shift -> ln |(1-q) + q e^shift l_1|_a, by the binomial formula."""
    k = np.arange(order + 1)
    powers = (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise_multiplier**2)
    with np.errstate(over="ignore"):
        coefficients = np.exp(renyi.log_binomial(order, k) + powers)

    def log_norm(shift: np.ndarray) -> np.ndarray:
        x = np.exp(shift)
        total = np.full_like(x, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total *= x
            total += coefficient
        return np.log(total) / order

    return log_norm
