"""Error feedback on Poisson samples, amplified: Renyi divergences by a backward recursion over the steps.

Let X be the likelihood ratio of a run with the example over one without, and W_t(d) a bound of the L^a norm, over the
releases from t on, of its part from t on, where the error has been moved by d (`energy` for S, F and rho; nu
is the noise in units of C1 / B, q the rate, l_s the likelihood ratio of N(s, nu^2) over N(0, nu^2)). By Minkowski

    W_t(d) = max over s^2 + F^2 <= d^2 of |(1-q) W_(t+1)(F) l_s + q W_(t+1)(F + rho) l_(s+1)|_a,      W_(T+1) = 1

as the norm grows with <S, participation> and with the participation's length; D_a(with|without) <= a/(a-1) ln W_1(0).

The same number bounds D_a(without|with). By the reverse of Minkowski's inequality for the exponent 1 - a, the recursion
for w_t with min and |.|_(1-a) gives D_a(without|with) <= -ln w_1(0). Backwards, w_t >= W_t^-b, b = a/(a-1), goes on: by
a change of measure it says E (1-q + q r^-b e^h)^(1-a) <= E (1-q + q r e^h)^a for h ~ N(-1/2nu^2, 1/nu^2) and
r = e^((a-1)s/nu^2) W_(t+1)(F + rho) / W_(t+1)(F) >= 1. Let X = 1-q + q e^h, p = q e^h / X. By the inequality of the
means the two sides are at most E X^(1-a) r^(a p) and at least E X^a r^(a p). Now X^a - X^(1-a) has the sign of h,
r^(a p) grows with h, and E X^a >= E X^(1-a) (Theorem 5 of Mironov, Talwar and Zhang 2019,
https://arxiv.org/abs/1908.10530), so E (X^a - X^(1-a)) r^(a p) >= 0.

Participations above `most`: given that there are fewer, a coin is at most as likely as q, in which W grows; they cost
their probability once in delta and, the other way round, once in epsilon. A move above (most - 1) rho means `most`
participations and hence no more, U = 1, for which any convex continuation from below is an upper bound.

Numerically W_t(d) = e^(G d^2) U_t(d), G = (a-1) / 2 nu^2, where ln U_t is convex and grows (sums, products, norms and
suprema of such functions are such). So chords lie above it between grid points, and its maximum over a quarter disc is
below that at the corners of a polygon around it: both are upper bounds.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from dpx.accounting import renyi
from dpx.accounting.error_feedback.energy import most_participations
from dpx.accounting.profiles import RenyiProfile

_ORDERS = (*range(2, 17), 18, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_PATIENCE = 3  # orders in a row that may not lower the bill
_TAILS = tuple(10.0**-i for i in range(4, 19))
_SHARE = 1e-3  # of delta, that the participations left out may take
_TRACKED = 36  # participations; beyond, they are not counted along the way
_ANGLES = np.concatenate([[0.0], np.geomspace(0.01, math.pi / 2, 32)])


@dataclass(frozen=True, kw_only=True)
class AmplifiedProfile:
    """The least over orders, and over how many participations are left out.

    error_shift: rho, finite. rate: in (0, 1).
    """

    steps: int
    rate: float
    reset_every: int
    error_shift: float
    noise_multiplier: float

    def epsilon(self, delta: float) -> float:
        tail = next((tail for tail in _TAILS if tail <= _SHARE * delta), None)
        return math.inf if tail is None else self._least(tail, lambda bound: bound.epsilon(delta), math.inf)

    def delta(self, epsilon: float) -> float:
        best = 1.0
        for tail in _TAILS:
            best = min(best, self._least(tail, lambda bound: bound.delta(epsilon), 1.0))
            if tail <= _SHARE * best:
                break
        return best

    def _least(self, tail: float, ask: Callable[[RenyiProfile], float], best: float) -> float:
        """Orders upwards until the bill stops falling. A run is independent stretches between resets.

        ln E X^a is convex in a, so chords between whole orders bound the ones between.
        """
        stretches, rest = divmod(self.steps, self.reset_every)
        orders, moments, idle = [1], [0.0], 0
        for order in _ORDERS:
            orders.append(order)
            whole, last = (self._log_moment(order, steps, tail) for steps in (self.reset_every, rest))
            moments.append(stretches * whole + last)
            divergences = np.interp(renyi.ORDERS, orders, moments, right=math.inf) / (renyi.ORDERS - 1)
            value = min(best, ask(RenyiProfile(divergences, tail)))
            idle = 0 if value < best else idle + 1
            best = value
            if idle == _PATIENCE or math.isinf(moments[-1]):
                break
        return best

    def _log_moment(self, order: int, steps: int, tail: float) -> float:
        return log_moment(
            order,
            steps=steps,
            rate=self.rate,
            error_shift=self.error_shift,
            noise_multiplier=self.noise_multiplier,
            tail=tail / -(-self.steps // self.reset_every),
        )


@functools.lru_cache(maxsize=4096)
def log_moment(
    order: int, *, steps: int, rate: float, error_shift: float, noise_multiplier: float, tail: float = 0.0
) -> float:
    """A bound of a ln W_1(0) >= ln E X^a for a stretch of steps, but for participations of probability `tail`."""
    if steps == 0:
        return 0.0
    grid = _grid(max(2, most_participations(steps, rate, tail)))
    moves = error_shift * grid.moves
    gain = (order - 1) / (2 * noise_multiplier**2)
    shifts = gain * (2 * moves * (grid.fed + error_shift * grid.kept) + error_shift**2)
    log_norm = _log_norm(order, rate, noise_multiplier)
    with np.errstate(over="ignore", invalid="ignore"):
        values = log_norm(2 * gain * moves[:, 0])  # ln U at the last step, after which nothing is released
        for _ in range(steps - 1):
            values = grid.continued(values)
            stay = values[grid.left] + grid.share * (values[grid.left + 1] - values[grid.left])
            moved = values[grid.moved] + grid.share * (values[grid.moved + 1] - values[grid.moved])
            values = (stay + log_norm(shifts + moved - stay)).max(axis=1)
    return float(order * values[0]) if np.isfinite(values[0]) else math.inf


class _Grid(NamedTuple):
    """Moves of the error in units of rho, (points, 1): one grid, or one for each number of participations so far.

    fed, kept: S and F over d at the corners of the polygon, (corners,)
    left, moved, share: where F and F + rho lie between two points, (points, corners)
    tracked: how many points there are after the last participation, where U = 1; or 0
    cells: of a grid, in one rho
    """

    moves: np.ndarray
    fed: np.ndarray
    kept: np.ndarray
    left: np.ndarray
    moved: np.ndarray
    share: np.ndarray
    tracked: int
    cells: int

    def continued(self, values: np.ndarray) -> np.ndarray:
        """ln U also where there are no more participations."""
        if self.tracked:
            return np.append(values, np.zeros(self.tracked))
        return np.append(values, values[-1] + np.arange(1, self.cells + 1) * (values[-1] - values[-2]))


@functools.lru_cache(maxsize=16)
def _grid(most: int) -> _Grid:
    middles, halves = (_ANGLES[1:] + _ANGLES[:-1]) / 2, (_ANGLES[1:] - _ANGLES[:-1]) / 2
    fed, kept = np.sin(middles) / np.cos(halves), np.cos(middles) / np.cos(halves)

    tracked = most <= _TRACKED
    cells = int(np.clip((1400 // (most * (most + 1)) if tracked else 200 // most), 1, 8))
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


def _log_norm(order: int, rate: float, noise_multiplier: float):
    """shift -> ln |(1-q) + q e^shift l_1|_a, by the binomial formula."""
    k = np.arange(order + 1)
    binomial = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
    powers = (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise_multiplier**2)
    with np.errstate(over="ignore"):
        coefficients = np.exp(binomial + powers)

    def log_norm(shift: np.ndarray) -> np.ndarray:
        x = np.exp(shift)
        total = np.full_like(x, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total *= x
            total += coefficient
        return np.log(total) / order

    return log_norm
