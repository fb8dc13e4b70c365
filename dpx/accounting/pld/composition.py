"""The composition of many steps by one Fourier transform, read as epsilon or delta.

The pmf of the summed loss is computed under the tilt e^(theta loss) that puts its bulk where delta is decided, so that
deltas far below the rounding error of a plain transform keep their digits. Everything dropped is counted: losses beyond
the window are bounded by Chernoff and added to delta, as is the rounding error of the transform; what wraps around only
adds.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import fft, signal

from dpx.accounting import renyi
from dpx.accounting.pld.losses import Losses, Pmf

Side = Literal["above", "below"]

_EPS = float(np.finfo(np.float64).eps)
_RELATIVE_TAIL = 1e-7  # the share of delta that truncations may add
_RELATIVE_WRAP = 1e-7
_ROUNDING = 1e7  # a tilted probability may be this much smaller than delta's share
_TILTS = 200
_LARGEST_SIZE = 2**20
_GRID = 4e-4  # for an epsilon up to 10
_COARSEST_GRID = 0.5
_STEPS_PER_EPSILON = 250  # grid points per epsilon are this times sqrt(T)


@dataclass(frozen=True)
class Plan:
    """Where to look: the grid, the window of losses (a quarter of it below 0), the tilt, the mass to drop."""

    grid: float
    size: int
    tilt: float
    tail: float
    wrap: float  # a larger tilt, and ln of the moment of the loss there
    wrap_moment: float

    @property
    def first(self) -> int:
        return -(self.size // 4)

    @property
    def largest(self) -> float:
        return (self.first + self.size - 1) * self.grid

    def wrapped(self, losses: np.ndarray) -> np.ndarray:
        """At most this much of delta at `losses` came around the window, from above (Chernoff) and from below."""
        span = self.size * self.grid
        above = self.tilt * span + self.wrap_moment - self.wrap * (losses + span)
        return np.exp(np.minimum(above, 700)) + math.exp(-self.tilt * span)


def plan(
    rdp: np.ndarray,
    steps: int,
    *,
    delta: float,
    epsilon: float,
    grid: float | None,
    orders: np.ndarray = renyi.ORDERS,
    truth: float | None = None,
    deviations: float = 0.5,
) -> Plan | None:
    """A plan from the RDP bill (orders,): epsilon and delta a pair that holds, truth a closer epsilon at that delta.

    deviations: below so many standard deviations of the loss, a smaller epsilon asks for no finer grid.

    By Chernoff, the tilt t = order - 1 needs a window up to R + ln(1/tail) / t; what wraps around from above weighs
    e^(t span) times too much, and stays small if a larger tilt says so; rounding at the true epsilon is
    e^(t (R - epsilon)) times that of the transform. Of the tilts that round well enough the one with the shortest
    span is taken. t R(t) is convex in t, so chords bound it between the orders. None if epsilon is too large
    (thousands) for any sensible grid.
    """
    delta = max(delta, 1e-290)
    tail = _RELATIVE_TAIL * delta
    rdp = np.minimum.accumulate(rdp[::-1])[::-1]  # it grows with the order, and its series near 1 may not converge
    usable = np.isfinite(rdp)
    if not usable.any():
        return None
    tilts, renyis = _between(orders[usable] - 1, rdp[usable])
    if truth is None:  # a guess: RDP is tighter at small deltas
        truth = epsilon * max(0.5, 1 - 6 / -math.log(delta)) if delta < 0.5 else 0.0
    moments = tilts * (renyis - truth)
    with np.errstate(divide="ignore", invalid="ignore"):
        reaches = (moments - math.log(_RELATIVE_WRAP * delta)) / (tilts - tilts[:, None])
    reaches = np.where(tilts > tilts[:, None], reaches, np.inf)  # (tilt, larger tilt)
    windows = renyis - math.log(tail) / tilts
    spans = np.maximum(1.4 * np.maximum(windows, 1.05 * epsilon), reaches.min(axis=1))
    spans[-1] = 2.8 * windows[-1]  # the largest has no larger one
    rounds_well = moments <= max(math.log(_ROUNDING * delta), float(moments.min()) + 2)
    best = int(np.argmin(np.where(rounds_well, spans, np.inf)))
    second = int(reaches[best].argmin()) if best < len(tilts) - 1 else best
    span = float(spans[best])
    if grid is None:
        scale = max(epsilon, 1e-3 * span, deviations * math.sqrt(2 * renyis[0]))
        fine = scale / (_STEPS_PER_EPSILON * math.sqrt(steps))
        grid = min(_GRID * max(1.0, epsilon / 10), fine)
        grid = max(grid, span / _LARGEST_SIZE)
    if span / grid > 64 * _LARGEST_SIZE or grid > _COARSEST_GRID:
        return None
    size = int(fft.next_fast_len(math.ceil(span / grid) + 8, real=True) or 0)
    wrap = float(tilts[second])
    return Plan(
        grid=grid, size=size, tilt=float(tilts[best]), tail=tail, wrap=wrap, wrap_moment=wrap * float(renyis[second])
    )


def _between(tilts: np.ndarray, renyis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tilts and `_TILTS` more between them, with bounds of the Renyi divergences there, by chords of t R."""
    more = np.unique(np.concatenate([tilts, np.geomspace(tilts[0], tilts[-1], _TILTS)]))
    return more, np.interp(more, tilts, tilts * renyis) / more


class Composed:
    """The summed privacy loss in one direction, from above or from below, over the grid points from 0 up.

    delta at a point is `missing + upper - lower`: what was dropped and may have been rounded (from below: minus the
    latter), and the probabilities of larger losses under either distribution, the second times e^(loss at the point).
    """

    def __init__(self, total: "_Sum", plan: Plan, *, side: Side):
        spectrum = total.spectrum()
        tilted = np.asarray(fft.irfft(spectrum, plan.size))
        self._losses = plan.grid * np.arange(plan.first + plan.size)
        weight = np.exp(np.minimum(total.log_moment - plan.tilt * self._losses, 700))
        tilted = np.maximum(np.roll(tilted, -plan.first)[-plan.first :], 0)
        falling = np.minimum(tilted * weight, 1)[:0:-1]
        ratio = math.exp(-plan.grid)
        self._upper = np.append(np.cumsum(falling)[::-1], 0.0)
        self._lower = np.append(np.asarray(signal.lfilter([ratio], [1, -ratio], falling))[::-1], 0.0)
        # Rounding, in the 2-norm relative to the spectrum's; a repeated step repeats its own. By Cauchy-Schwarz the sum
        # of errors times falling weights is at most the product of their norms.
        norm = math.sqrt(2 * float(np.sum(np.abs(spectrum) ** 2)) / plan.size)
        error = _EPS * (4 * math.log2(plan.size) + 2 * total.steps) * norm
        rounding = error * weight / math.sqrt(-math.expm1(-2 * plan.tilt * plan.grid))
        if side == "above":
            beyond = math.exp(min(0.0, total.log_moment - plan.tilt * plan.largest))
            self._missing = -math.expm1(total.log_finite) + beyond + rounding
        else:
            self._missing = -(rounding + plan.wrapped(self._losses))

    def _deltas(self) -> np.ndarray:
        return np.clip(np.maximum(self._upper - self._lower, 0) + self._missing, 0, 1)

    def share(self, epsilon: float) -> float:
        """How much of delta at epsilon was not computed but bounded: dropped, or perhaps rounded."""
        k = self._index(epsilon)
        return float(self._missing[k]) / max(self.delta(epsilon), 1e-300)

    def _index(self, epsilon: float) -> int:
        return min(int(np.searchsorted(self._losses, epsilon, side="right")) - 1, len(self._losses) - 1)

    def delta(self, epsilon: float) -> float:
        k = self._index(epsilon)
        lower = math.exp(epsilon - self._losses[k]) * self._lower[k] if self._lower[k] > 0 else 0.0
        return float(np.clip(max(0.0, self._upper[k] - lower) + self._missing[k], 0, 1))

    def epsilon(self, delta: float) -> float:
        above = np.flatnonzero(self._deltas() > delta)
        if len(above) == 0:
            return 0.0
        k = int(above[-1])
        if k == len(self._losses) - 1:
            return math.inf
        excess = self._upper[k] + self._missing[k] - delta
        between = math.log(excess) - math.log(self._lower[k]) if self._lower[k] > 0 else math.inf
        return float(self._losses[k] + min(max(between, 0.0), self._losses[1]))


def compose(losses: Losses, plan: Plan, *, side: Side = "above") -> list[Composed]:
    """The composition in each direction of the relation; "below" is of `SampledGaussian`s only."""
    total = sum(losses.values())
    size = plan.size // 2 + 1
    sums = [_Sum(np.zeros(size), np.zeros(size)) for _ in range(2)]
    for loss, count in losses.items():
        discretize = loss.pmfs if side == "above" else loss.dominated
        pmfs = discretize(plan.grid, tail=plan.tail / total, largest=plan.largest)
        for one, pmf in zip(sums, (*pmfs, *pmfs), strict=False):  # a symmetric step counts in both directions
            one.add(pmf, count, plan)
    return [Composed(one, plan, side=side) for one in sums]


@dataclass
class _Sum:
    """The transform of the composition so far: ln of its modulus, its angle, and ln of its moment and finite mass."""

    log_modulus: np.ndarray
    angle: np.ndarray
    log_moment: float = 0.0
    log_finite: float = 0.0
    steps: int = 0

    def add(self, pmf: Pmf, count: int, plan: Plan) -> None:
        spectrum, log_moment = _tilted_spectrum(pmf, plan)
        with np.errstate(divide="ignore"):
            self.log_modulus += count * np.log(np.abs(spectrum))
        self.angle += count * np.angle(spectrum)
        self.log_moment += count * log_moment
        self.log_finite += count * math.log1p(-pmf.infinity)
        self.steps += count

    def spectrum(self) -> np.ndarray:
        modulus = np.exp(self.log_modulus)
        return modulus * np.cos(self.angle) + 1j * (modulus * np.sin(self.angle))


def _tilted_spectrum(pmf: Pmf, plan: Plan) -> tuple[np.ndarray, float]:
    """The transform of the normalized pmf e^(tilt loss) p(loss) around the window, and its ln normalizer."""
    losses = plan.grid * np.arange(pmf.first, pmf.first + len(pmf.probabilities))
    exponent = plan.tilt * losses
    with np.errstate(divide="ignore"):
        shift = float(np.max(exponent + np.log(pmf.probabilities)))
    tilted = np.exp(np.minimum(exponent - shift, 700)) * pmf.probabilities
    mass = tilted.sum()
    buffer = np.zeros(plan.size)
    _wrap(tilted / mass, pmf.first, buffer)
    return np.asarray(fft.rfft(buffer)), shift + math.log(mass)


def _wrap(values: np.ndarray, first: int, buffer: np.ndarray) -> None:
    """Adds values[i] to buffer[(first + i) mod size]."""
    size, position, done = len(buffer), first % len(buffer), 0
    while done < len(values):
        take = min(size - position, len(values) - done)
        buffer[position : position + take] += values[done : done + take]
        done, position = done + take, 0
