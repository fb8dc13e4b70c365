"""The cost of a unit that owns several records, when the sampling draws records and not units.

A unit owns at most k records. All of them are nulled in their places ("zero_out"). At each step, every record takes
part by its own coin, at a rate of at most q, and moves the sum by at most 1 in units of the clip norm; the noise has
standard deviation s. The pair that dominates the step, in both directions, is

    sum_j P(Bin(k, q) = j) N(j, s^2)   against   N(0, s^2)

(Charles et al. 2024, https://arxiv.org/abs/2407.07737; corollary 4.7 of https://arxiv.org/abs/2310.15526).

Proof. Let the coins of all other records be public, as joint convexity allows. The coins of the unit choose the subset
S with probability p_S, and the sum moves by c_S, |c_S| <= |S|, because records are nulled one after the other. With x
from Q = N(0, s^2 I), the density of the step relative to Q is L(x) = sum_S p_S G_S(x),
G_S(x) = exp(<c_S, x> / s^2 - |c_S|^2 / (2 s^2)). The divergence at e^epsilon = a is E max(L - a, 0), convex in L.
1. The law of G_S depends on |c_S| alone, and a sum of given laws is largest in convex order if its terms are
   comonotone. So all c_S may be |c_S| times one direction.
2. G grows in convex order with |c_S|, because it is lognormal with mean 1. So do comonotone sums with each of their
   terms. So |c_S| may be |S|, and a unit with fewer records costs less. A record of a lower rate costs less too: it
   takes part in fewer S, because one uniform number can decide the coins of both rates.
The other direction is the same pair exchanged. Steps compose, because each has this pair whatever was released before.

The shift that `arithmetic` needs is k / s. Given all coins but those of the unit, a sum has up to 2^k values, and A has
the outputs that are good for all of them. Record i moves a pair of numbers by v_i deviations, so two values of the pair
differ by at most D = sum_i |v_i|. For normals G around one value, the pair is bad for any of them only if |G| > r0 - D,
and the root of the sum of D^2 over the pairs is at most k / s (Minkowski). So `far` has the bound of one example of
that shift.

If Bin(k, q) exceeds j with a probability below 1e-40, numbers above j are rounded up, in steps of a quarter. More than
32 distinct noise multipliers are rounded down to 32.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import attrs
import numpy as np
from dp_accounting import DpEvent
from scipy import special, stats

from dpx.accounting.checks import Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount, in_deviations
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import Pmf, StepLoss, dominating_pmf, normal_masses

LARGEST_NOISE = 1e9  # more noise costs as much as this, because float64 loses the squares of larger numbers
_TAIL, _STAIR = 1e-40, 1.25
_RAREST = 1e-300  # a smaller rate counts as this, because scipy and ln(k / q) fail where 1/q is above float64
_SMALLEST, _UNSURE = 1e-280, 1e-270  # scipy's tails are 0 from 1e-286 on; smaller probabilities have a logarithm
_ROUNDING = 1e-9  # relative amount by which binomial probabilities and moments are rounded up
_CELLS = 4096  # cells of the line, for the Renyi divergences
_FARTHEST = 12.0  # deviations: the first cell begins this far below 0, and the last ends farther above the shifts
_COARSE = 16  # at first, only one in this many tangents or outputs is used
_CHUNK = 2**15  # outputs at once
_GROUP, _POWERS = 16, 8  # cells that are skipped together, and powers at once: for speed
_NEGLIGIBLE = 45.0  # thousands of cells that are e^-45 of the largest add less than its rounding error
_HALF = math.sqrt(0.5)


def require_zero_out(records: int, relation: Relation) -> None:
    """Raises ValueError for several records under a relation for which no cost is known."""
    if records > 1 and relation == "replace_one":
        raise ValueError(f'records must be 1 for relation "replace_one", got {records}: they are nulled, not replaced')


@attrs.frozen
class GroupGaussianDpEvent(DpEvent, PrivacyLoss):
    """A Gaussian release on a Poisson sample of records, for a unit that owns some of them.

    noise_multiplier: relative to the effect of one record. sampling_probability: in (0, 1), the largest rate of any of
    its records. records: int, the most that it owns. releases: int, how many noisy releases on this sample it merges.

    It holds for nulls in place of all records of the unit. dp-accounting's accountants refuse this event.
    """

    noise_multiplier: float
    sampling_probability: float
    records: int
    releases: int = 1
    fresh = True

    @property
    def release_count(self) -> ReleaseCount:
        return ReleaseCount(self.releases, float(self.releases))

    @property
    def name(self) -> str:
        return f"Gaussian on a Poisson sample of rate {self.sampling_probability:.6g} of each record"

    def largest_shift(self, relation: Relation) -> float:
        return in_deviations(self.records * (2 if relation == "replace_one" else 1), self.noise_multiplier)

    def step_loss(self, relation: Relation) -> StepLoss:
        sigma, rate = min(float(self.noise_multiplier), LARGEST_NOISE), float(self.sampling_probability)
        if relation == "replace_one":
            raise ValueError('relation "replace_one" does not fit several records, which are nulled or absent')
        if not (0 <= self.noise_multiplier < math.inf and 0 < rate < 1 and self.records >= 1 and self.releases >= 1):
            raise ValueError(f"noise must be finite and at least 0, at a rate in (0, 1), for a record; got {self}")
        return SeveralRecordsGaussian(sigma, max(rate, _RAREST), self.records)


@dataclass(frozen=True)
class SeveralRecordsGaussian(StepLoss):
    """The privacy loss of one step, for a unit of k records. noise_multiplier: s. rate: q, below 1. records: k."""

    noise_multiplier: float
    rate: float
    records: int

    @property
    def is_noiseless(self) -> bool:
        return self.noise_multiplier / self.records < renyi.SMALLEST_NOISE

    @functools.cached_property
    def shift_probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers j that the bound uses, rising from 0, and their probabilities, float64 (numbers,) each."""
        numbers, k, q = [0], self.records, self.rate
        while numbers[-1] < k:
            last = numbers[-1]
            rare = stats.binom.sf(last, k, q) <= _TAIL  # P(K > last)
            numbers.append(min(k, max(last + 1, math.ceil(_STAIR * last) if rare else 0)))
        below, numbers = np.array(numbers[:-1]), np.array(numbers[1:], np.float64)
        one = numbers == below + 1
        beyond = stats.binom.sf(below, k, q)
        probabilities = np.maximum(np.where(one, stats.binom.pmf(numbers, k, q), beyond), _SMALLEST)
        probabilities = probabilities * (1 + _ROUNDING)
        spare = max(1 - math.fsum(probabilities), 0.0)
        return np.append(0.0, numbers), np.append(spare, probabilities)

    @functools.cached_property
    def log_probabilities(self) -> np.ndarray:
        """The logarithms of the probabilities, float64 (numbers,), also of those that are too small for float64.

        The Renyi divergences need these too, because a moment weighs a large shift by a large factor. A tail is
        P(K >= m) <= exp(-k KL(m/k, q)) (Chernoff), and the logarithm of one number has an error below 1e-3.
        """
        (numbers, probabilities), k, q = self.shift_probabilities, self.records, self.rate
        with np.errstate(divide="ignore"):
            logs = np.log(probabilities)
        tiny = np.flatnonzero((probabilities < _UNSURE) & (numbers > 0))
        least = numbers[tiny - 1] + 1  # each stands for all numbers from here on
        tails = -k * (special.rel_entr(least / k, q) + special.rel_entr(1 - least / k, 1 - q))
        logs[tiny] = np.where(least == numbers[tiny], stats.binom.logpmf(least, k, q) + 1e-3, tails)
        return logs

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Bounds the convex log density l(x) in many cells, by chords from above and tangents from below.

        Most orders need few of the tangents: with a sixteenth of them, the second moment is still below the first.
        """
        s, k = self.noise_multiplier, self.records
        top = k + _FARTHEST * s + s**2 * (math.log(k / self.rate) + 5)
        x = np.linspace(-_FARTHEST * s, top, _CELLS + 1)
        values, slopes = self._privacy_loss_and_slope(x)

        def added(rows: np.ndarray, step: int) -> np.ndarray:
            ends, at, falls = x[::step], values[::step], slopes[::step]
            lines = at[1:] - falls[1:] * np.diff(ends), at[1:]
            return log_moments_of_piecewise_linear(1 - orders[rows], ends, lines, (falls[0], falls[-1]), s)

        # The slope is in [0, k / s^2].
        worst = log_moments_of_piecewise_linear(orders, x, (values[:-1], values[1:]), (0.0, k / s**2), s)
        rows = np.flatnonzero(~(added(np.arange(len(orders)), _COARSE) <= worst))
        worst[rows] = np.maximum(worst[rows], added(rows, 1))
        worst = (worst + _ROUNDING) / (orders - 1)
        return np.where(np.isfinite(worst), np.maximum(worst, 0), np.inf)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        s, (numbers, probabilities) = self.noise_multiplier, self.shift_probabilities
        farthest = -float(special.ndtri(tail / 8)) * s
        beyond = np.append(np.cumsum(probabilities[:0:-1])[::-1], 0.0)  # P(more than the number)
        most = float(numbers[beyond <= tail / 4][0])
        ends, _ = self._privacy_loss_and_slope(np.array([-farthest, most + farthest]))
        first, last = np.clip(ends, -largest, largest) / grid
        first, last = math.floor(first), math.ceil(last)
        x = self._outputs_at_losses(np.arange(first, last + 1) * grid)
        lower = normal_masses(x / s)
        upper = np.zeros(len(lower))
        for number, probability in zip(numbers, probabilities, strict=True):
            upper += probability * normal_masses((x - number) / s)
        remove = dominating_pmf(upper, lower, first, grid)
        return remove, dominating_pmf(lower[::-1], upper[::-1], -last, grid)

    def _privacy_loss_and_slope(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The privacy loss at outputs x, and its slope, float64 (n,) each. Both increase with x."""
        return _log_mixture(x, self.shift_probabilities[0], self.log_probabilities, self.noise_multiplier)

    def _outputs_at_losses(self, losses: np.ndarray) -> np.ndarray:
        """The outputs x, float64 (n,), rising, at which the privacy loss has these values; -inf below all losses."""
        none = self.shift_probabilities[1][0]
        with np.errstate(divide="ignore", invalid="ignore"):
            small = np.log(np.maximum(np.expm1(np.minimum(losses, 30)) + (1 - none), 0))
            wanted = np.where(losses > 30, losses + np.log1p(-none * np.exp(-np.maximum(losses, 30))), small)
        x, found = np.full(len(wanted), -np.inf), np.flatnonzero(np.isfinite(wanted))
        if len(found):
            few = np.append(found[::_COARSE], found[-1])
            first = np.interp(wanted[found], wanted[few], self._solve_for_outputs(wanted[few], math.inf))
            x[found] = self._solve_for_outputs(wanted[found], first)
        return np.maximum.accumulate(x)

    def _solve_for_outputs(self, wanted: np.ndarray, first: np.ndarray | float) -> np.ndarray:
        """Solves for the outputs at which the terms j > 0 of the privacy loss have these values, from a first guess.

        Uses Newton's method. These terms are convex in x, so no step ends left of the root; a point where a single term
        has the value is right of it. A step e leaves at most e^2 / 2 times the ratio of derivatives, which is below
        k/s^2.
        """
        s, numbers, logs = self.noise_multiplier, self.shift_probabilities[0][1:], self.log_probabilities[1:]
        x = np.minimum(((wanted[:, None] - logs) * s**2 / numbers + numbers / 2).min(axis=1), first)
        for begin in range(0, len(x), _CHUNK):
            rows = np.arange(begin, min(begin + _CHUNK, len(x)))
            for _ in range(100):
                values, slopes = _log_mixture(x[rows], numbers, logs, s)
                steps = (values - wanted[rows]) / slopes
                x[rows] -= steps
                rows = rows[steps**2 * numbers[-1] > 1e-13 * s**2 * (s + np.abs(x[rows]))]
                if not len(rows):
                    break
        return x


def _log_mixture(x: np.ndarray, numbers: np.ndarray, logs: np.ndarray, sigma: float):
    """Returns ln sum_j p_j exp((j x - j^2 / 2) / s^2) and its derivative, float64 (n,) each. logs: ln p_j."""
    terms = logs + (np.outer(x, numbers) - numbers**2 / 2) / sigma**2
    largest = terms.max(axis=1, keepdims=True)
    weights = np.exp(terms - largest)
    total = weights.sum(axis=1)
    return largest[:, 0] + np.log(total), weights @ numbers / total / sigma**2


@dataclass(frozen=True)
class MixtureOfGaussians(SeveralRecordsGaussian):
    """A mixture in units of its largest shift. noise_multiplier: s. rate: probability of a shift above 0. records: 1.

    numbers, weights: the shifts, rising from 0 to 1, and their probabilities.
    """

    numbers: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @functools.cached_property
    def shift_probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.numbers), np.array(self.weights)

    @functools.cached_property
    def log_probabilities(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(self.weights)


@dataclass(frozen=True)
class GaussianMixtureRelease(PrivacyLoss):
    """A mixture of Gaussians, sum_j p_j N(c_j, s^2) against N(0, s^2). event: dp-accounting's event.

    The pair is that of `SeveralRecordsGaussian` with other shifts and probabilities. dp-accounting's own PLD takes
    minutes on a fine enough grid, because it solves an equation separately for each point.
    """

    event: Any

    def step_loss(self, relation: Relation) -> StepLoss:
        event = self.event
        sigma, shifts, weights = map(np.asarray, (event.standard_deviation, event.sensitivities, event.sampling_probs))
        if relation == "replace_one":
            words = "does not fit a mixture of Gaussians, which is one against no shift"
            raise ValueError(f'relation "replace_one" {words}')
        total = float(weights.sum()) if weights.shape == shifts.shape else math.nan
        known = 0 <= sigma < math.inf and abs(total - 1) < 1e-9 and bool((weights >= 0).all() and (shifts >= 0).all())
        if not known or not np.isfinite(shifts).all():
            raise ValueError(f"noise and shifts must be at least 0, with probabilities that sum to 1; got {event}")
        numbers, places = np.unique(np.append(0.0, shifts), return_inverse=True)
        each = np.bincount(places.reshape(-1), np.append(0.0, weights / total))
        last = np.flatnonzero(each[1:])[-1] + 1
        largest, each = float(numbers[last]), each[: last + 1]
        scaled = (*(numbers[: last + 1] / largest).tolist(),)
        noise = min(float(sigma) / largest, LARGEST_NOISE)
        return MixtureOfGaussians(noise, max(float(each[1:].sum()), _RAREST), 1, scaled, (*each.tolist(),))


def log_moments_of_piecewise_linear(
    powers: np.ndarray, x: np.ndarray, lines: tuple, slopes: tuple, sigma: float
) -> np.ndarray:
    """Logs of the integrals of exp(power * line) under N(0, s^2), float64 (powers,). The line is straight in each cell.

    x: the ends of equally wide cells, float64 (cells + 1,). lines: the values of the line at the left and right end of
    each cell, float64 (cells,) each. slopes: the line's slopes below the first and above the last cell.
    """
    (left, right), squares, width = lines, (x / sigma) ** 2 / 2, (x[1] - x[0]) / sigma
    first, last = powers * slopes[0] * sigma, powers * slopes[1] * sigma  # means of the normals beyond the cells
    low, high = x[0] / sigma, x[-1] / sigma
    below = powers * left[0] - first * low + first**2 / 2 + special.log_ndtr(low - first)
    above = powers * right[-1] - last * high + last**2 / 2 + special.log_ndtr(last - high)
    within = np.empty(len(powers))
    kept = _significant_cells(powers[:, None], left, right, squares, width)
    for begin in range(0, len(powers), _POWERS):
        some = powers[begin : begin + _POWERS, None]
        groups = np.flatnonzero(kept[begin : begin + _POWERS].any(axis=0)) * _GROUP
        cells = slice(groups[0], groups[-1] + _GROUP)
        middles = (x[cells] / sigma + width / 2) - some * (right - left)[cells] / width  # from the mean of the normal
        near = np.abs(middles) - width / 2
        far, inner = near + width, near < 0
        base = np.where(middles > 0, some * left[cells] - squares[:-1][cells], some * right[cells] - squares[1:][cells])
        shares = special.erfcx(np.maximum(near, 0) * _HALF)
        shares -= np.exp(-width * np.abs(middles)) * special.erfcx(far * _HALF)
        base[inner] += near[inner] ** 2 / 2  # the largest of the integrand in the cell
        shares[inner] = 2 * (special.ndtr(far[inner]) - special.ndtr(near[inner]))
        largest = base.max(axis=1, keepdims=True)
        within[begin : begin + _POWERS] = largest[:, 0] + np.log(np.sum(np.exp(base - largest) * shares, axis=1) / 2)
    return np.logaddexp(within, np.logaddexp(below, above))


def _significant_cells(
    powers: np.ndarray, left: np.ndarray, right: np.ndarray, squares: np.ndarray, width: float
) -> np.ndarray:
    """Whether a group of cells matters for a power, bool (powers, groups). The rest are e^-45 of the largest cell.

    A cell is w deviations wide, so the integrand within it is at most e^(w^2 / 8) times that at one of its ends.
    """
    highest, lowest = np.maximum(left, right).reshape(-1, _GROUP), np.minimum(left, right).reshape(-1, _GROUP)
    nearest = np.minimum(squares[:-1], squares[1:]).reshape(-1, _GROUP).min(axis=1)
    most = np.maximum(powers * highest.max(axis=1), powers * lowest.min(axis=1)) - nearest
    least = (powers * left[::_GROUP] - squares[:-1:_GROUP]).max(axis=1, keepdims=True)
    return most > least - _NEGLIGIBLE - width**2 / 8
