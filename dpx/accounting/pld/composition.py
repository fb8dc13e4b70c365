"""Composes many steps by one Fourier transform, and computes epsilon or delta from the result.

The probability mass function (pmf) of the summed loss is computed under a tilt e^(theta loss), which moves most of its
mass to the losses that decide delta. So deltas far below the rounding error of a plain transform are still precise.

Proof that delta is an upper bound: everything that is dropped is added to delta. A Chernoff bound on the losses beyond
the window is added, and so is the rounding error of the transform. Losses that wrap around the window only increase
delta.
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import fft, signal

from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import Losses, Pmf

Side = Literal["above", "below"]

_FLOAT64_EPSILON = float(np.finfo(np.float64).eps)
# A plan with other constants still gives upper bounds. These give four digits, in 0.3 s for 10,000 steps
# (benchmarks/accounting.py, interval).
_TAIL_SHARE = 1e-7  # share of delta that truncated losses may add
_WRAP_SHARE = 1e-7  # share of delta that losses may add by wrapping around the window
_LARGEST_ROUNDING = 1e7  # rounding error of the transform, divided by delta, in units of float64's 2e-16
_TILTS = 200  # candidates between the smallest and the largest order
_LARGEST_SIZE = 2**20  # grid points of a window, 8 MiB an array
_GRID = 4e-4  # coarsest spacing of privacy losses for an epsilon up to 10; it grows with epsilon
_COARSEST_GRID = 0.5  # a larger spacing of privacy losses gives no useful answer
_POINTS_PER_EPSILON = 250  # grid points per epsilon, times sqrt(T)


@dataclass(frozen=True)
class CompositionGrid:
    """The grid and the tilt of a composition.

    grid: spacing of privacy losses. size: grid points of the window, a quarter of them below 0.
    tilt: theta. tail: the probability that may be dropped. wrap_tilt: a larger tilt, which bounds the losses that wrap
    around the window. wrap_log_moment: ln of the moment of the summed loss at that tilt.
    """

    grid: float
    size: int
    tilt: float
    tail: float
    wrap_tilt: float
    wrap_log_moment: float

    @property
    def first_index(self) -> int:
        """The index of the smallest loss of the window."""
        return -(self.size // 4)

    @property
    def largest_loss(self) -> float:
        """The largest loss of the window."""
        return (self.first_index + self.size - 1) * self.grid

    def wraparound_delta(self, losses: np.ndarray) -> np.ndarray:
        """Bounds the part of delta at `losses`, float64 (n,), that wrapped around either end of the window."""
        span = self.size * self.grid
        above = self.tilt * span + self.wrap_log_moment - self.wrap_tilt * (losses + span)
        return np.exp(np.minimum(above, 700)) + math.exp(-self.tilt * span)


def plan_composition(
    rdp: np.ndarray,
    steps: int,
    *,
    delta: float,
    epsilon: float,
    orders: np.ndarray = renyi.ORDERS,
    expected_epsilon: float | None = None,
    deviations: float = 0.5,
) -> CompositionGrid | None:
    """Plans a composition from the RDP of `steps` steps; None if epsilon is too large for any grid (thousands).

    rdp, orders: float64 (orders,). epsilon, delta: a proved pair. expected_epsilon: an estimate closer to the truth at
    that delta. deviations: the grid is no finer for epsilons below this many standard deviations of the loss.

    With R the Renyi divergence at order t + 1, the tilt t needs, by Chernoff, a window up to R + ln(1/tail) / t. Losses
    that wrap around from above have e^(t span) times too much weight; a larger tilt bounds them. The rounding error at
    the true epsilon is e^(t (R - epsilon)) times that of the transform. The plan takes the tilt with the shortest span
    among those whose rounding error is small enough. t R(t) is convex in t, so chords bound it between the orders.
    """
    delta = max(delta, 1e-290)
    tail = _TAIL_SHARE * delta
    rdp = np.minimum.accumulate(rdp[::-1])[::-1]  # it grows with the order, but the series near 1 may not converge
    usable = np.isfinite(rdp)
    if not usable.any():
        return None
    tilts, renyis = _more_tilts(orders[usable] - 1, rdp[usable])
    if expected_epsilon is None:  # a guess, because RDP is tighter at small deltas
        expected_epsilon = epsilon * max(0.5, 1 - 6 / -math.log(delta)) if delta < 0.5 else 0.0
    log_moments = tilts * (renyis - expected_epsilon)
    with np.errstate(divide="ignore", invalid="ignore"):
        wrap_spans = (log_moments - math.log(_WRAP_SHARE * delta)) / (tilts - tilts[:, None])
    wrap_spans = np.where(tilts > tilts[:, None], wrap_spans, np.inf)  # (tilt, larger tilt)
    windows = renyis - math.log(tail) / tilts
    # 1.4 is above 4/3, because three quarters of the window are above 0.
    spans = np.maximum(1.4 * np.maximum(windows, 1.05 * epsilon), wrap_spans.min(axis=1))
    spans[-1] = 2.8 * windows[-1]  # the largest tilt has no larger one
    rounds_well = log_moments <= max(math.log(_LARGEST_ROUNDING * delta), float(log_moments.min()) + 2)
    best = int(np.argmin(np.where(rounds_well, spans, np.inf)))
    larger = int(wrap_spans[best].argmin()) if best < len(tilts) - 1 else best
    span = float(spans[best])
    scale = max(epsilon, 1e-3 * span, deviations * math.sqrt(2 * renyis[0]))
    finest = scale / (_POINTS_PER_EPSILON * math.sqrt(steps))
    grid = max(min(_GRID * max(1.0, epsilon / 10), finest), span / _LARGEST_SIZE)
    if grid > _COARSEST_GRID:
        return None
    size = int(fft.next_fast_len(math.ceil(span / grid) + 8, real=True) or 0)
    wrap_tilt, wrap_renyi = float(tilts[larger]), float(renyis[larger])
    return CompositionGrid(grid, size, float(tilts[best]), tail, wrap_tilt, wrap_log_moment=wrap_tilt * wrap_renyi)


def _more_tilts(tilts: np.ndarray, renyis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds `_TILTS` tilts between the given ones; float64 (n,), with upper bounds on the divergences at all tilts."""
    more = np.unique(np.concatenate([tilts, np.geomspace(tilts[0], tilts[-1], _TILTS)]))
    return more, np.interp(more, tilts, tilts * renyis) / more


class SummedLoss:
    """An upper or lower bound on the summed privacy loss in one direction of the relation, at grid points >= 0.

    delta at a point is `upper - lower + bounded`. upper and lower: the probability of larger losses under each
    distribution of the pair, the second times e^(loss at the point). bounded: for an upper bound, the probability that
    was dropped or may have been rounded to 0; for a lower bound, minus the most that rounding and wrapping can add.
    """

    def __init__(self, total: "_Spectrum", plan: CompositionGrid, *, side: Side):
        spectrum = total.values()
        tilted = np.asarray(fft.irfft(spectrum, plan.size))
        self._losses = plan.grid * np.arange(plan.first_index + plan.size)
        weight = np.exp(np.minimum(total.log_moment - plan.tilt * self._losses, 700))
        tilted = np.maximum(np.roll(tilted, -plan.first_index)[-plan.first_index :], 0)
        falling = np.minimum(tilted * weight, 1)[:0:-1]
        ratio = math.exp(-plan.grid)
        self._upper = np.append(np.cumsum(falling)[::-1], 0.0)
        self._lower = np.append(np.asarray(signal.lfilter([ratio], [1, -ratio], falling))[::-1], 0.0)
        # The rounding error is relative to the spectrum, in the 2-norm, and a repeated step repeats its own. By
        # Cauchy-Schwarz the sum of errors times falling weights is at most the product of their norms.
        norm = math.sqrt(2 * float(np.sum(np.abs(spectrum) ** 2)) / plan.size)
        error = _FLOAT64_EPSILON * (4 * math.log2(plan.size) + 2 * total.steps) * norm
        rounding = error * weight / math.sqrt(-math.expm1(-2 * plan.tilt * plan.grid))
        if side == "above":
            beyond = math.exp(min(0.0, total.log_moment - plan.tilt * plan.largest_loss))
            self._bounded = -math.expm1(total.log_finite) + beyond + rounding
        else:
            self._bounded = -(rounding + plan.wraparound_delta(self._losses))

    def _deltas(self) -> np.ndarray:
        deltas = np.clip(np.maximum(self._upper - self._lower, 0) + self._bounded, 0, 1)
        return np.where(np.isnan(deltas), 1.0, deltas)  # what cannot be computed is not private

    def uncomputed_share(self, epsilon: float) -> float:
        """The share of delta at epsilon that was bounded instead of computed, because it was dropped or rounded."""
        k = self._index_of_epsilon(epsilon)
        return float(self._bounded[k]) / max(self.delta(epsilon), 1e-300)

    def _index_of_epsilon(self, epsilon: float) -> int:
        return min(int(np.searchsorted(self._losses, epsilon, side="right")) - 1, len(self._losses) - 1)

    def delta(self, epsilon: float) -> float:
        k = self._index_of_epsilon(epsilon)
        lower = math.exp(epsilon - self._losses[k]) * self._lower[k] if self._lower[k] > 0 else 0.0
        found = float(np.clip(np.maximum(0.0, self._upper[k] - lower) + self._bounded[k], 0, 1))
        return 1.0 if math.isnan(found) else found

    def epsilon(self, delta: float) -> float:
        above = np.flatnonzero(self._deltas() > delta)
        if len(above) == 0:
            return 0.0
        k = int(above[-1])
        if k == len(self._losses) - 1:
            return math.inf
        too_much = self._upper[k] + self._bounded[k] - delta
        beyond_point = math.log(too_much) - math.log(self._lower[k]) if self._lower[k] > 0 else math.inf
        return float(self._losses[k] + min(max(beyond_point, 0.0), self._losses[1]))


def compose_losses(losses: Losses, plan: CompositionGrid, *, side: Side = "above") -> list[SummedLoss]:
    """Composes the losses in each direction of the relation, or in one if every step is symmetric.

    On the side "below", all losses must be `SampledGaussian`s.
    """
    total = sum(losses.values())
    size = plan.size // 2 + 1
    directions = [_Spectrum(np.zeros(size), np.zeros(size))]
    for loss, count in losses.items():
        discretize = loss.pmfs if side == "above" else loss.dominated_pmfs
        pmfs = discretize(plan.grid, tail=plan.tail / total, largest=plan.largest_loss)
        if len(pmfs) > len(directions):  # the steps so far were symmetric
            directions.append(copy.deepcopy(directions[0]))
        for direction, pmf in zip(directions, (*pmfs, *pmfs), strict=False):  # a symmetric step counts in both
            direction.add(pmf, count, plan)
    return [SummedLoss(direction, plan, side=side) for direction in directions]


@dataclass
class _Spectrum:
    """The transform of the tilted pmf of the steps so far, in one direction of the relation.

    log_modulus, angle: float64 (size // 2 + 1,). log_moment: ln E e^(tilt loss). log_finite: ln of the probability that
    the loss is finite. steps: the number of steps.
    """

    log_modulus: np.ndarray
    angle: np.ndarray
    log_moment: float = 0.0
    log_finite: float = 0.0
    steps: int = 0

    def add(self, pmf: Pmf, count: int, plan: CompositionGrid) -> None:
        spectrum, log_moment = _tilted_spectrum(pmf, plan)
        with np.errstate(divide="ignore"):
            self.log_modulus += count * np.log(np.abs(spectrum))
        self.angle += count * np.angle(spectrum)
        self.log_moment += count * log_moment
        self.log_finite += count * math.log1p(-pmf.infinity)
        self.steps += count

    def values(self) -> np.ndarray:
        modulus = np.exp(self.log_modulus)
        return modulus * np.cos(self.angle) + 1j * (modulus * np.sin(self.angle))


def _tilted_spectrum(pmf: Pmf, plan: CompositionGrid) -> tuple[np.ndarray, float]:
    """The transform of the normalized pmf e^(tilt loss) p(loss), wrapped into the window, and the ln of its sum."""
    losses = plan.grid * np.arange(pmf.first, pmf.first + len(pmf.probabilities))
    exponent = plan.tilt * losses
    with np.errstate(divide="ignore"):
        shift = float(np.max(exponent + np.log(pmf.probabilities)))
    tilted = np.exp(np.minimum(exponent - shift, 700)) * pmf.probabilities
    mass = tilted.sum()
    buffer = np.zeros(plan.size)
    _add_modulo_size(tilted / mass, pmf.first, buffer)
    return np.asarray(fft.rfft(buffer)), shift + math.log(mass)


def _add_modulo_size(values: np.ndarray, first: int, buffer: np.ndarray) -> None:
    """Adds values[i] to buffer[(first + i) mod size]."""
    size, position, done = len(buffer), first % len(buffer), 0
    while done < len(values):
        take = min(size - position, len(values) - done)
        buffer[position : position + take] += values[done : done + take]
        done, position = done + take, 0
