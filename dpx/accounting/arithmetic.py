"""What the arithmetic of the noise adds to a cost: a program's normals have finitely many values, and are rounded.

A cost is proved for real normals G. A program has g~ instead, and releases the integers k = floor(y + R g~ + 1/2) on a
public grid, where R in [16, 32) is one standard deviation. A pair of normals is G = r (cos u, sin u) with
r = sqrt(-2 ln p), where p and u are uniform. The sampler's proof (`dpx/keys`) gives

(1) coins such that |g~ - G| <= error(p) (`NormalSamplerError`) in both coordinates, rounding of R g~ + 1/2 included,
(2) no g~ with r below 12 where p is so small that error(p) exceeds 1e-3,
(3) independent pairs, unless two pairs of one release have a p below 2^-64, which does not depend on the data.

**The number of pairs.** m is the number of pairs that the run's releases draw, or any upper bound. It must be public
and the same for both data sets, and it is: a model's shapes, which are fixed before the first batch, determine how many
numbers it trains, and every reader of the releases can count them. If m is bounded by a number stated before the run
(`dpx.Budget.numbers`), `init` refuses parameters with more; and a step that draws more than its state's cost counts is
refused too, or raises the state's number (`dpx.mechanism`). The proof adds up one pair after another, so the theorem
for a smaller m needs no other proof.

Notation: the run has m pairs, a release at most n. P and P~ are the laws of a pair of integers in exact arithmetic and
in the program's, given all coins and all earlier numbers. phi(v) = e^v - 1 - v. A cell is the set that rounds to one
pair of integers: a square of side w = 1/R. It is bad if p < p0 on all of it, and good otherwise.

**Lemma 1.** |P~/P - 1| <= h(p) := 136 error(p/3) at any point of a good cell with p >= p0, if h <= 0.14. Proof: let e
be the largest error(p) within e of the cell. Then P~ is at most P of the cell with a frame of width e added, and at
least P of the cell with such a frame removed. For an interval of width w at z, the two strips have at most the share
(e/w) v coth(v/2) e^(z e + w^2/2) with v = z w; this grows with R, and is at most 2.05 * 32 e at R = 32, z <= 12. Two
coordinates give 4.1 * 32 e, up to squares: 136 e. In a cell and its frame, r varies by at most 0.092, so p varies by
less than a factor of 3, because p0 is at least 2^-102, where r is 11.89. (error(p) is made to fall with p.) Near p = 1,
the lattice moves r by 2^-65 / r, which averages to less than 2^-54 = evaluation / 512 over a border, and a strip needs
only the average. A bad cell has P <= p0, and P~ <= 1.01 p0.

**Lemma 2.** Let s(x) = x h / (1 - h) and psi = E phi(s(x)) over the good cells, for a number x > 1. Except in bad cells
and with probability d, the product of P~/P over the run is below e^a under the program, and that of P/P~ is below e^a
under exact arithmetic, with a = (m (psi + 1.01 x p0) + ln(1/d)) / (x - 1). Proof: let c = P~/P - 1. Apply Markov's
inequality to one pair after another. For the first product, it needs E_P (1 + c)^x over good cells, and (1 + c)^x <=
e^(x c) <= 1 + x c + phi(x h). For the second, it needs E_P (1 + c)^(1-x), and the binomial series gives at most
1 + (1-x) c + phi(s(x)). The mean of c over the good cells is at most 1.01 p0 in magnitude.

**Theorem.** Let t = 1.02 p0 times the expected m, plus n^2 2^-129 times the expected number of releases, and let the
exact run be (epsilon, delta)-private. Let far bound the probability that exact arithmetic draws a pair that is bad for
the OTHER data set, or two pairs of one release that are rare for it. (A cell is rare if a g~ with p < 2^-64 can fall
into it.) Then the program's run is (epsilon + a1 + a2, t + d1 + e^a1 (delta + far + e^epsilon d2))-private. Proof: the
program is one with independent pairs except with the probability of (3), at most the second part of t, because two of n
pairs have p < 2^-64 with probability at most n^2 / 2 times 2^-128. So let P~ be that of independent pairs. Let S be a
set of outputs, and A the outputs that are good for the other data set and have no two rare pairs of one release for it;
on A, both programs are the same. Primes mark the laws of the other data set. Then P~(S) <= t + d1 + e^a1 P(S),
P(S) <= far + delta + e^epsilon P'(S and A), and P'(S and A) <= d2 + e^a2 P~'(S). The first and the last step include
the coins in the outputs, because they claim no privacy, so this covers sampling, adaptive runs and searches. Here
d1 = d and d2 = d e^-epsilon with d = t / 8.

**far.** far = e^(epsilon + a2) t always holds: drop A, and charge t in the last step; e^a2 is for the second part of t.
A better bound holds for releases of Gaussians in which chance decides about each example separately (Poisson coins,
random allocation) or about none. Let all coins except the one example's be public, and let A be the outputs that are
good both with and without it at every step, hence the factor of 2 in the code. Given its coins, the example moves the
m1 pairs of a release by 0 or by v_i, in deviations, with sum |v_i|^2 <= shift^2, and P(|G + v| > r0) <=
exp(-(r0 - |v|)^2 / 2), where r0 is the radius for p0 (Marcum's Q). If |v| r0 <= 2.6, this is at most
p0 (1 + 4.8 |v| r0), so all pairs together have p0 (m1 + 4.8 r0 shift sqrt(m1)). For larger |v|, up to r0 - 0.75, it
grows faster than |v|^2, so all together have at most exp(-(r0 - shift)^2 / 2). A rare cell has p <= 3 2^-64, so the
expected number of rare pairs of a release is bounded in the same way, with 9.3 for r0, and the probability of two is at
most half of its square, because the pairs are independent. A truncated sample has the law of such coins too, except
that the example displaces another: `limited_samples` has its shift. Correlated releases prove theirs with their cost.

Only the releases of the event count. At all other steps, such as those of a `ShuffledEpochs` epoch in which the example
takes no part, the two sums are equal, and so are the two laws of the PROGRAM.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dpx.accounting.checks import Profile
from dpx.keys import integer_normals
from dpx.keys.noise import LARGEST_RELEASE, count_normal_pairs
from dpx.keys.normals import EVALUATION
from dpx.xla.place import current_place

_SHARE_OF_FRAME, _VARIATION_OF_P, _LARGEST_CHANGE = 136.0, 3.0, 0.14  # from Lemma 1
_MEAN_OF_CHANGES, _BAD_PAIRS = 1.01, 1.02  # from Lemma 2 and t; covers a search's 1e-20 chance of more trials too
_SMALLEST_SHARE = 8  # t / d
_ASKED_DELTAS = 1e-14, 1e-10, 1e-6  # when a delta is asked for, p0 is chosen as the best for each of these
_ALMOST = 0.99  # a share of delta
_MOST_BITS = 102  # p0 is at least 2^-102
_RARE, _RARE_RADIUS = 3 * 2.0**-64, 9.3  # the largest p and the least r of a rare cell
_SMALLEST_DELTA = 1e-200  # far below the least t, so no smaller delta has a finite cost either
_FARTHEST = 0.75  # the largest shift is at most r0 minus this
_ABOUT = 0.3  # tolerance for the logarithm of a printed delta
# Bounds on epsilon: the first is used if `far` does not depend on epsilon, and the second is tried first if it does.
_LARGEST_EPSILON, _USUAL_EPSILON, _LARGEST_UNKNOWN = 1e9, 4.0, 600.0


@dataclass(frozen=True)
class NormalSamplerError:
    """Bounds the error of a sampler of pairs of normals, in standard deviations.

    evaluation, slope: evaluating a pair moves it by at most evaluation + slope r, floats; with 64 bits, `evaluation` is
    at least 2^-45 (Lemma 1). digits: triples (l, x, y), with l rising: if p < 2^-l, p is off by at most x, and theta by
    at most y. pairs: the most pairs of one release; 0 for exact noise.
    """

    evaluation: float = EVALUATION
    slope: float = 0.0
    digits: tuple[tuple[int, float, float], ...] = (
        (0, 2.0**-65, 2.0**-65),
        (32, 2.0**-93, 2.0**-37),
        (64, 2.0**-125, 2.0**-37),
    )
    pairs: int = count_normal_pairs(LARGEST_RELEASE)

    def error(self, p: np.ndarray) -> np.ndarray:
        """The largest distance of a normal from the exact one, for p < e^(-1/2); float64, shaped like p."""
        r, of_p, of_angle = np.sqrt(-2 * np.log(p)), np.empty(p.shape), np.empty(p.shape)
        for level, *most in self.digits:
            of_p[p < 2.0**-level], of_angle[p < 2.0**-level] = most
        return self.evaluation * (1 + 1 / 512) + self.slope * r + of_p / (p * r) + 2 * np.pi * r * of_angle

    def largest_probability_changes(self) -> np.ndarray:
        """Returns h for p in (2^-(j+1), 2^-j], float64 (_MOST_BITS,): the largest at or above p, so it falls with p.

        Just above a p below which there are more digits, the error has a local maximum.
        """
        points = 2.0 ** -np.arange(1.0, _MOST_BITS + 1) / _VARIATION_OF_P
        errors = self.error(points)
        for level, *_ in self.digits[1:]:
            below = np.argmax(points < 2.0**-level)
            errors[below] = max(errors[below], self.error(np.array([2.0**-level]))[0])
        return _SHARE_OF_FRAME * np.maximum.accumulate(errors)


NORMALS = NormalSamplerError()
# The sampler of a TPU, which rounds p down if p has 64 digits.
INTEGERS = NormalSamplerError(
    integer_normals.EVALUATION, integer_normals.SLOPE, ((0, 2.0**-64, 2.0**-65), *NORMALS.digits[1:])
)


def normal_sampler_error(numbers: int | NormalSamplerError, in_integers: bool = False) -> NormalSamplerError:
    """The sampler's error for a release of `numbers` numbers. A `NormalSamplerError` is returned unchanged.

    in_integers: whether a TPU draws the noise. If programs are traced for a TPU (`dpx.xla.place.current_place`), this
    is always so.
    """
    if isinstance(numbers, NormalSamplerError):
        return numbers
    return replace(
        INTEGERS if in_integers or current_place().platform == "tpu" else NORMALS, pairs=count_normal_pairs(numbers)
    )


def worst_sampler_error(each: Iterable[int | NormalSamplerError]) -> NormalSamplerError:
    """Returns a `NormalSamplerError` that costs at least as much as each of these."""
    found = [normal_sampler_error(one) for one in each]
    return replace(max(found, key=lambda one: one.evaluation), pairs=max(one.pairs for one in found))


class FinitePrecisionCost(NamedTuple):
    """What the noise's arithmetic adds to the cost of some releases, floats.

    tail: t of the theorem. loss: a1, which is also a2 at epsilon 0. slope: the slope of a2 in epsilon. radius: r0.
    releases: the expected number of releases. pairs: the most pairs of one release.
    """

    tail: float
    loss: float
    slope: float
    radius: float
    releases: float
    pairs: int

    def epsilon(self, exact: float) -> float:
        """Returns a1 + a2 if `exact` is the epsilon of exact arithmetic."""
        return 2 * self.loss + self.slope * exact

    def delta(self, exact: float, delta: float, shift: float) -> float:
        """Returns the delta of the theorem, for a run that is (`exact`, `delta`)-private in exact arithmetic.

        shift: as in `RunProfile`.
        """
        own = self.tail / _SMALLEST_SHARE
        far = self.tail * math.exp(min(exact + self.loss + self.slope * exact, 700.0))
        if shift <= min(self.radius, _RARE_RADIUS) - _FARTHEST:
            moved = math.exp(-((self.radius - shift) ** 2) / 2)
            rare = _RARE * self.pairs * self._tail_growth_factor(_RARE_RADIUS, shift) + math.exp(
                -((_RARE_RADIUS - shift) ** 2) / 2
            )
            of_releases = self.releases * (moved + rare**2 / 2)
            far = min(far, 2 * (self.tail * self._tail_growth_factor(self.radius, shift) + of_releases))
        return min(1.0, self.tail + own + math.exp(self.loss) * (delta + far + own))

    def _tail_growth_factor(self, radius: float, shift: float) -> float:
        """The factor by which a shift, divided among all pairs of normals, raises their probability beyond `radius`."""
        return 1 + 4.8 * radius * shift / math.sqrt(self.pairs)


def finite_precision_cost(
    releases: int, mean: float, delta: float = _ASKED_DELTAS[-1], normals: NormalSamplerError = NORMALS
) -> FinitePrecisionCost:
    """The cost that arithmetic adds to this many releases. It holds at any delta, and is lowest near the given one.

    releases, mean: the largest and the expected number of releases.
    """
    return _best_lemma_2(releases, mean, round(-math.log2(max(delta, _SMALLEST_DELTA))), normals)


@functools.lru_cache(4096)
def _best_lemma_2(releases: int, mean: float, bits: int, normals: NormalSamplerError) -> FinitePrecisionCost:
    """The cost at the best p0 and x of Lemma 2, if a delta of t is worth an epsilon of t 2^bits."""
    if not releases or not normals.pairs:
        return FinitePrecisionCost(0.0, 0.0, 0.0, 0.0, 0.0, 1)
    pairs = float(releases) * normals.pairs
    change = normals.largest_probability_changes()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        exponents = np.geomspace(2.0, 2.0**32, 256)[:, None]
        scaled = exponents * np.where(change <= _LARGEST_CHANGE, change / (1 - change), np.inf)  # (256, _MOST_BITS)
        small = scaled < 1e-3
        grown = np.where(small, scaled**2 / 2 * (1 + scaled), np.expm1(scaled) - scaled)  # at least phi
        grown = np.where(np.isfinite(grown), grown, np.inf)
        least = 2.0 ** -np.arange(1.0, _MOST_BITS + 1)  # p0; points of good cells below p0 use the last h
        psi = np.cumsum(least * grown, axis=1) + least * grown
        tail = mean * normals.pairs * (_BAD_PAIRS * least + normals.pairs * 2.0**-129)
        loss = (pairs * (psi + _MEAN_OF_CHANGES * exponents * least) + np.log(_SMALLEST_SHARE / tail)) / (exponents - 1)
    worth = np.where((tail < 1) & (loss < 350), loss + 2.0**bits * tail, np.inf)  # exp(2 loss) is a float64
    column = np.flatnonzero(worth.min(axis=0) <= 1.1 * worth.min())[-1]  # a smaller p0 bounds larger shifts
    row = np.argmin(worth[:, column])
    radius = math.sqrt(2 * math.log(2) * (int(column) + 1))
    slope = 1 / (float(exponents[row, 0]) - 1)
    if not math.isfinite(worth[row, column]):
        return FinitePrecisionCost(1.0, math.inf, slope, radius, mean, normals.pairs)
    return FinitePrecisionCost(float(tail[column]), float(loss[row, column]), slope, radius, mean, normals.pairs)


class EpsilonWithRounding(NamedTuple):
    """An epsilon at some delta, and how much arithmetic added to epsilon and to delta, floats."""

    epsilon: float
    of_epsilon: float
    of_delta: float


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run as the program computes it, from the profile of exact arithmetic.

    exact: the latter. releases, mean: the largest, int, and the expected number of releases. shift: the most that one
    example moves a release, in standard deviations of its noise, as in `PrivacyLoss.largest_shift`.
    """

    exact: Profile
    releases: int
    mean: float
    shift: float = math.inf
    normals: NormalSamplerError = NORMALS

    def epsilon(self, delta: float) -> float:
        return self.epsilon_with_rounding(delta).epsilon

    def epsilon_with_rounding(self, delta: float) -> EpsilonWithRounding:
        """Returns epsilon at `delta`, and how much of it and of delta arithmetic added."""
        delta = float(delta)  # in float32 or float16, the shares of delta would round up
        return min(
            (self._epsilon_for_sampler(delta, normals) for normals in self._samplers_to_try()),
            key=lambda answer: answer.epsilon,
        )

    def _samplers_to_try(self) -> tuple[NormalSamplerError, ...]:
        """The sampler for the run's numbers, and the one for the most numbers, whose bound holds for fewer too.

        So the lower of both bounds never exceeds that for the most numbers, which a budget's noise is calibrated for.
        """
        most = replace(self.normals, pairs=count_normal_pairs(LARGEST_RELEASE))
        return (self.normals, most) if 0 < self.normals.pairs < most.pairs else (self.normals,)

    def _epsilon_for_sampler(self, delta: float, normals: NormalSamplerError) -> EpsilonWithRounding:
        """Tries bounds on epsilon, because `far` may depend on epsilon, and so may the best p0. The first one that
        leaves almost all of delta to exact arithmetic is enough; otherwise, the least result holds."""
        least = EpsilonWithRounding(math.inf, math.inf, 1.0)
        for bound in self._epsilon_bounds(delta):
            worth = delta * math.exp(-bound) if bound < _LARGEST_EPSILON else delta
            added = finite_precision_cost(self.releases, self.mean, worth, normals)
            spare = delta - added.delta(bound, 0.0, self.shift)
            exact = self.exact.epsilon(spare * math.exp(-added.loss)) if spare > 0 else math.inf
            if exact == 0 and self.delta(0.0) <= delta:
                return EpsilonWithRounding(0.0, 0.0, 0.0)
            if exact <= bound:
                more = added.epsilon(exact)
                least = min(least, EpsilonWithRounding(exact + more, more, added.delta(exact, 0.0, self.shift)))
                if spare > _ALMOST * delta:
                    break
        return least

    def least_reachable_delta(self, delta: float) -> float | None:
        """Approximates the least delta with a finite epsilon, if only arithmetic makes epsilon at `delta` infinite.

        None if epsilon is finite, or if it is infinite even for exact noise. The true value is at most a third less.
        """
        if math.isfinite(self.epsilon(delta)) or math.isinf(self.exact.epsilon(delta)):
            return None
        low, high = math.log(max(delta, _SMALLEST_DELTA)), 0.0
        while high - low > _ABOUT:
            middle = (low + high) / 2
            low, high = (low, middle) if math.isfinite(self.epsilon(math.exp(middle))) else (middle, high)
        return math.exp(high) if high < 0 else None

    def _epsilon_bounds(self, delta: float) -> Iterator[float]:
        yield from (_LARGEST_EPSILON, _USUAL_EPSILON)
        yield min(self.exact.epsilon(delta / 2), _LARGEST_UNKNOWN)

    def delta(self, epsilon: float) -> float:
        return min(self._delta_for_sampler(epsilon, normals) for normals in self._samplers_to_try())

    def _delta_for_sampler(self, epsilon: float, normals: NormalSamplerError) -> float:
        """The least of several bounds, one for each p0. All are tried, so that it grows with the releases."""
        grown = min(epsilon, _LARGEST_UNKNOWN) if math.isinf(self.shift) else 0.0
        least = 1.0
        for worth in _ASKED_DELTAS:
            added = finite_precision_cost(self.releases, self.mean, worth * math.exp(-grown), normals)
            exact = max(0.0, (epsilon - 2 * added.loss) / (1 + added.slope))
            loss = 2 * added.loss
            beyond = math.exp(loss) - math.exp(min(epsilon, loss, 700.0))  # trades the excess of epsilon for delta
            least = min(least, added.delta(exact, self.exact.delta(exact), self.shift) + beyond)
        return least
