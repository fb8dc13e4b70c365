"""The bill of a unit that owns several records, where the sampling draws records and not units.

A unit owns at most k records. All of them are nulled in their places ("zero_out"). At one step, each record has a coin
of its own, of a rate of at most q, and moves the sum by at most 1 in units of the clip norm; the noise has the standard
deviation s. The pair that dominates the step, in both directions, is

    sum_j P(Bin(k, q) = j) N(j, s^2)   against   N(0, s^2)

(Charles et al. 2024, https://arxiv.org/abs/2407.07737; corollary 4.7 of https://arxiv.org/abs/2310.15526).

Proof. Let the coins of all other records be public, as joint convexity allows. The coins of the unit choose the subset
S with probability p_S, and the sum moves by c_S, |c_S| <= |S|, because records are nulled one after the other. With x
from Q = N(0, s^2 I), the density of the step relative to Q is L(x) = sum_S p_S G_S(x),
G_S(x) = exp(<c_S, x> / s^2 - |c_S|^2 / (2 s^2)). The divergence at e^epsilon = a is E max(L - a, 0), convex in L.
1. The law of G_S depends on |c_S| alone, and a sum of given laws is largest in convex order where its terms are
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

Where Bin(k, q) exceeds j with a probability below 1e-40, numbers above j are rounded up, in steps of a quarter. More
than 32 distinct noise multipliers are rounded down to 32.
"""

import functools
import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import special, stats

from dpx.accounting import renyi
from dpx.accounting.checks import Relation
from dpx.accounting.log_moments import log_moments
from dpx.accounting.pld.buckets import bucketed
from dpx.accounting.pld.losses import Pmf, dominating_pmf, normal_masses
from dpx.accounting.releases import Released, count_releases, register, released
from dpx.sampling.events import GroupGaussianDpEvent, composition

LARGEST_NOISE = 1e9  # more is billed as this, because float64 loses the squares of larger numbers
_TAIL, _STAIR = 1e-40, 1.25
_SMALLEST, _UNSURE = 1e-280, 1e-270  # scipy's tails are 0 from 1e-286 on; smaller probabilities have a logarithm
_ROUNDING = 1e-9  # relative, of binomial probabilities and of moments: they are rounded up by it
DISTINCT, FEW = 32, 6  # noise multipliers of a bill, and of the rough bills with which a calibration begins
_CELLS = 4096  # of the line, for the Renyi divergences
_FARTHEST = 12.0  # deviations: the first cell begins there, and the last one ends so far above the largest shift
_COARSE = 16  # tangents, or outputs, of which one is enough at first
_CHUNK = 2**15  # outputs at once
_FREE = 1e9  # a Gaussian of so much more noise than another costs nothing beside it, in float64


def of_unit(event: DpEvent, *, records: int, distinct: int = DISTINCT) -> DpEvent:
    """The event of the same releases for a unit that owns up to `records` records, each with coins of its own.

    event: of Gaussians, on all data or on Poisson samples. records: k, int, at least 1. distinct: int, how many noise
    multipliers it has at most, because more of them are rounded down to so many.

    Raises ValueError for an event with other releases.
    """
    if records == 1:
        return event
    releases = count_releases(event)
    if not releases.private:
        return dp_accounting.NonPrivateDpEvent()
    if not releases.gaussian:
        words = "must have releases of Gaussians on all data or on Poisson samples only, for more than one record"
        raise ValueError(f"the event {words}; got {event}")
    losses = releases.losses("add_or_remove")
    # Several releases on one sample are one loss here, and the first below, so that none moves farther. But each has
    # noise whose arithmetic is billed.
    together = math.ceil(released(event).most / max(sum(losses.values()), 1))
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in losses]).reshape(-1, 2).T
    counts = np.array(list(losses.values()), np.int64)
    steps = bucketed(sigmas, rates, counts, distinct)
    columns = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)

    def step(sigma: float, rate: float) -> DpEvent:
        if rate < 1:
            return GroupGaussianDpEvent(sigma, rate, records, together)
        one = GaussianDpEvent(sigma / records)
        if together == 1:
            return one
        others = SelfComposedDpEvent(GaussianDpEvent(_FREE * sigma / records), together - 1)
        return PoissonSampledDpEvent(1.0, ComposedDpEvent([one, others]))

    return composition((step(sigma, rate), count) for sigma, rate, count in columns)


def require_nulled(records: int, relation: Relation) -> None:
    """Raises ValueError for several records under a relation that they have no bill for."""
    if records > 1 and relation == "replace_one":
        raise ValueError(f'records must be 1 for relation "replace_one", got {records}: they are nulled, not replaced')


@dataclass(frozen=True)
class GroupGaussian:
    """The privacy loss of one such step. noise_multiplier: s. rate: q, below 1. records: k."""

    noise_multiplier: float
    rate: float
    records: int

    @property
    def unbounded(self) -> bool:
        return self.noise_multiplier / self.records < renyi.SMALLEST_NOISE

    @functools.cached_property
    def shifts(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers j that are billed, rising from 0, and their probabilities, float64 (numbers,) each."""
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
        """The logarithms of the probabilities, float64 (numbers,), where they are below float64 too.

        There, the Renyi divergences still need them: a moment weighs a large shift by a large factor. A tail is
        P(K >= m) <= exp(-k KL(m/k, q)) (Chernoff), and the logarithm of one number has an error below 1e-3.
        """
        (numbers, probabilities), k, q = self.shifts, self.records, self.rate
        with np.errstate(divide="ignore"):
            logs = np.log(probabilities)
        tiny = np.flatnonzero((probabilities < _UNSURE) & (numbers > 0))
        least = numbers[tiny - 1] + 1  # each stands for the numbers from here on
        tails = -k * (special.rel_entr(least / k, q) + special.rel_entr(1 - least / k, 1 - q))
        logs[tiny] = np.where(least == numbers[tiny], stats.binom.logpmf(least, k, q) + 1e-3, tails)
        return logs

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """By bounds of the log density l(x), which is convex: chords above it and tangents below it, in many cells.

        Most orders need few of the tangents: with a sixteenth of them, the second moment is still below the first.
        """
        s, k = self.noise_multiplier, self.records
        top = k + _FARTHEST * s + s**2 * (math.log(k / self.rate) + 5)
        x = np.linspace(-_FARTHEST * s, top, _CELLS + 1)
        values, slopes = self._log_density(x)

        def added(rows: np.ndarray, step: int) -> np.ndarray:
            ends, at, falls = x[::step], values[::step], slopes[::step]
            lines = at[1:] - falls[1:] * np.diff(ends), at[1:]
            return log_moments(1 - orders[rows], ends, lines, (falls[0], falls[-1]), s)

        worst = log_moments(orders, x, (values[:-1], values[1:]), (0.0, k / s**2), s)  # the slope is in [0, k / s^2]
        rows = np.flatnonzero(~(added(np.arange(len(orders)), _COARSE) <= worst))
        worst[rows] = np.maximum(worst[rows], added(rows, 1))
        worst = (worst + _ROUNDING) / (orders - 1)
        return np.where(np.isfinite(worst), np.maximum(worst, 0), np.inf)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        s, (numbers, probabilities) = self.noise_multiplier, self.shifts
        farthest = -float(special.ndtri(tail / 8)) * s
        beyond = np.append(np.cumsum(probabilities[:0:-1])[::-1], 0.0)  # P(more than the number)
        most = float(numbers[beyond <= tail / 4][0])
        ends, _ = self._log_density(np.array([-farthest, most + farthest]))
        first, last = np.clip(ends, -largest, largest) / grid
        first, last = math.floor(first), math.ceil(last)
        x = self._outputs(np.arange(first, last + 1) * grid)
        lower = normal_masses(x / s)
        upper = np.zeros(len(lower))
        for number, probability in zip(numbers, probabilities, strict=True):
            upper += probability * normal_masses((x - number) / s)
        remove = dominating_pmf(upper, lower, first, grid)
        return remove, dominating_pmf(lower[::-1], upper[::-1], -last, grid)

    def _log_density(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The privacy loss at outputs x, and its slope, float64 (n,) each: both rise."""
        return _log_sum(x, self.shifts[0], self.log_probabilities, self.noise_multiplier)

    def _outputs(self, losses: np.ndarray) -> np.ndarray:
        """The outputs x, float64 (n,), rising, at which the privacy loss has these values; -inf below its infimum."""
        none = self.shifts[1][0]
        with np.errstate(divide="ignore", invalid="ignore"):
            small = np.log(np.maximum(np.expm1(np.minimum(losses, 30)) + (1 - none), 0))
            wanted = np.where(losses > 30, losses + np.log1p(-none * np.exp(-np.maximum(losses, 30))), small)
        x, found = np.full(len(wanted), -np.inf), np.flatnonzero(np.isfinite(wanted))
        if len(found):
            few = np.append(found[::_COARSE], found[-1])
            first = np.interp(wanted[found], wanted[few], self._solved(wanted[few], math.inf))
            x[found] = self._solved(wanted[found], first)
        return np.maximum.accumulate(x)

    def _solved(self, wanted: np.ndarray, first: np.ndarray | float) -> np.ndarray:
        """The outputs at which the part of all j > 0 in the privacy loss has these values, from a first guess.

        By Newton's method. That part is convex in x, so no step ends on the left, and where one term alone has the
        value is on the right. A step e leaves at most e^2 / 2 times the ratio of the derivatives, which is below k/s^2.
        """
        s, numbers, logs = self.noise_multiplier, self.shifts[0][1:], self.log_probabilities[1:]
        x = np.minimum(((wanted[:, None] - logs) * s**2 / numbers + numbers / 2).min(axis=1), first)
        for begin in range(0, len(x), _CHUNK):
            rows = np.arange(begin, min(begin + _CHUNK, len(x)))
            for _ in range(100):
                values, slopes = _log_sum(x[rows], numbers, logs, s)
                steps = (values - wanted[rows]) / slopes
                x[rows] -= steps
                rows = rows[steps**2 * numbers[-1] > 1e-13 * s**2 * (s + np.abs(x[rows]))]
                if not len(rows):
                    break
        return x


def _log_sum(x: np.ndarray, numbers: np.ndarray, logs: np.ndarray, sigma: float):
    """ln sum_j p_j exp((j x - j^2 / 2) / s^2), and its derivative, float64 (n,) each. logs: ln p_j."""
    terms = logs + (np.outer(x, numbers) - numbers**2 / 2) / sigma**2
    largest = terms.max(axis=1, keepdims=True)
    weights = np.exp(terms - largest)
    total = weights.sum(axis=1)
    return largest[:, 0] + np.log(total), weights @ numbers / total / sigma**2


def _read(event: GroupGaussianDpEvent, relation: Relation) -> GroupGaussian:
    sigma, rate = min(float(event.noise_multiplier), LARGEST_NOISE), float(event.sampling_probability)
    if relation == "replace_one":
        raise ValueError('relation "replace_one" does not fit several records, which are nulled or not there')
    if not (0 <= event.noise_multiplier < math.inf and 0 < rate < 1 and event.records >= 1 and event.releases >= 1):
        raise ValueError(f"noise must be finite and at least 0, at a rate in (0, 1), for a record; got {event}")
    return GroupGaussian(sigma, rate, event.records)


register(GroupGaussianDpEvent, _read, released=lambda event: Released(event.releases, float(event.releases)))
