"""What the arithmetic of the noise adds to a bill: a program's normals have finitely many values, and are rounded.

A bill is proved for normals G of real numbers. A program has g~ instead, and releases the integers
k = floor(y + R g~ + 1/2) on a public grid, where R in [16, 32) is one standard deviation. A pair of normals is
G = r (cos u, sin u) with r = sqrt(-2 ln p), p and u uniform. The sampler's proof (`dpx/keys`) gives

(1) coins of which |g~ - G| <= error(p) (`NormalSamplerError`) in both coordinates, the rounding of R g~ + 1/2 included;
(2) no g~ with an r below 12 where p is so small that error(p) exceeds 1e-3,
(3) independent pairs, unless two pairs of one release have a p below 2^-64, which the data do not decide.

**How many pairs.** m is the number of pairs that the run's releases draw, or anything above it. It must be public and
the same for both data sets, and it is: how many numbers a model trains is a function of its shapes, which are fixed
before the first batch, and no reader of the releases could fail to count them. Where m is bounded by a number that was
stated before the run (`dpx.Budget.numbers`), `init` refuses parameters with more; and a step that draws more than its
state bills is refused, too, or raises the number of the state (`dpx.mechanism`). A smaller m is a theorem about a
smaller run, with nothing else to prove, because the proof adds up one pair after the other.

Notation: m pairs in the run, n at most in a release. P and P~ are the laws of a pair of integers in exact arithmetic
and in that of the program, given all coins and all earlier numbers. phi(v) = e^v - 1 - v. A cell is what rounds to one
pair of integers: a square of side w = 1/R. It is bad if p < p0 on all of it, and good otherwise.

**Lemma 1.** |P~/P - 1| <= h(p) := 136 error(p/3) at any point of a good cell with p >= p0, while h <= 0.14. Proof: let
e be the largest error(p) within e of the cell. Then P~ is at most P of the cell with a frame of width e, and at least P
of the cell without one. For an interval of width w at z, both strips have at most the share (e/w) v coth(v/2) e^(z e +
w^2/2) with v = z w; that grows with R, and is at most 2.05 * 32 e at R = 32, z <= 12. Two coordinates give 4.1 * 32 e,
up to squares: 136 e. In a cell and its frame r varies by at most 0.092, so p varies by less than a factor of 3, because
p0 is at least 2^-102, where r is 11.89. (error(p) is made to fall with p.) Near p = 1, where the lattice moves r by
2^-65 / r, this is below 2^-54 = evaluation / 512 on average over a border, which is what a strip needs. A bad cell has
P <= p0, and P~ <= 1.01 p0.

**Lemma 2.** Let s(x) = x h / (1 - h) and psi = E phi(s(x)) over the good cells, for a number x > 1. But for bad cells,
and for a probability d, the product of P~/P over the run is below e^a under the program, and that of P/P~ is below
e^a under exact arithmetic, with a = (m (psi + 1.01 x p0) + ln(1/d)) / (x - 1).
Proof: let c = P~/P - 1. By Markov's inequality, and one pair after the other, the first is E_P (1 + c)^x over good
cells, and (1 + c)^x <= e^(x c) <= 1 + x c + phi(x h). The second is E_P (1 + c)^(1-x), and the binomial series gives
at most 1 + (1-x) c + phi(s(x)). The mean of c over the good cells is at most 1.01 p0 in size.

**Theorem.** Let t = 1.02 p0 times the expected m, plus n^2 2^-129 times the expected number of releases, and let the
exact run be (epsilon, delta)-private. Then the program's run is (epsilon + a1 + a2, t + d1 + e^a1 (delta + far +
e^epsilon d2))-private, if exact arithmetic makes a pair that is bad for the OTHER data set, or two of one release that
are rare for it, with a probability of at most far. (A cell is rare if a g~ of p < 2^-64 can fall into it.) Proof: the
program is the one of independent pairs, but for (3), which has the second part of t for its probability, because two
pairs of n have p < 2^-64 with at most n^2 / 2 times 2^-128. So let P~ be that of independent pairs. Let S be a set of
outputs, and A those that are good for the other data set and have no two rare pairs of one release for it; there, both
programs are the same. The laws of the other data set have a dash. Then P~(S) <= t + d1 + e^a1 P(S), P(S) <= far + delta
+ e^epsilon P'(S and A), and P'(S and A) <= d2 + e^a2 P~'(S). The coins are in the outputs of the first and the last
step, where no privacy is claimed, so this covers sampling, adaptive runs and searches. Here d1 = d and d2 = d
e^-epsilon with d = t / 8.

**far.** far = e^(epsilon + a2) t always: drop A, and charge t in the last step, where e^a2 is for its second part.
Better, for releases of Gaussians in which chance decides about each example alone (Poisson's coins, random allocation)
or about none: let all coins but those of the one example be public, and A those outputs that are good both with and
without it at every step, which is the factor of 2 in the code. Given its coins, it moves the m1 pairs of a release by 0
or by v_i, in deviations, with sum |v_i|^2 <= shift^2, and P(|G + v| > r0) <= exp(-(r0 - |v|)^2 / 2), where r0 belongs
to p0 (Marcum's Q). Where |v| r0 <= 2.6, this is at most p0 (1 + 4.8 |v| r0), so all together have p0 (m1 + 4.8 r0 shift
sqrt(m1)). For larger |v|, up to r0 - 0.75, it grows faster than |v|^2, so all together have at most exp(-(r0 - shift)^2
/ 2). A rare cell has p <= 3 2^-64, so the expected number of rare pairs of a release is bounded in the same way, with
9.3 for r0, and two of them have at most half of its square for their probability, because the pairs are independent. A
truncated sample has the law of such coins too, and the example displaces another one: `truncated` has its shift. So
have correlated releases: `correlated` has the proof, and their shift.

Only the releases of the event count. At all other steps, such as those of an epoch of `ShuffledEpochs` in which the
example has no part, the two sums are equal, and so are the two laws of the PROGRAM.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dpx.accounting.checks import Profile
from dpx.keys import integer_normals
from dpx.keys.noise import LARGEST_RELEASE, count_pairs
from dpx.keys.normals import EVALUATION
from dpx.xla.place import current_place

_SHARE_OF_FRAME, _VARIATION_OF_P, _LARGEST_CHANGE = 136.0, 3.0, 0.14  # of Lemma 1
_MEAN_OF_CHANGES, _BAD_PAIRS = 1.01, 1.02  # of Lemma 2 and of t, which has the 1e-20 of a search with more trials, too
_SMALLEST_SHARE = 8  # t / d
_USUAL_DELTA = 1e-6  # p0 is the best for it where the delta is what is asked for
_MOST_BITS = 102  # of p0
_RARE, _RARE_RADIUS = 3 * 2.0**-64, 9.3  # the largest p of a rare cell, and the least r
_SMALLEST_DELTA = 1e-200  # far below the least t, so a smaller one has no bill either
_FARTHEST = 0.75  # the largest shift is at most r0 minus this
_ABOUT = 0.3  # of the logarithm of a delta that is printed
# Bounds of epsilon: the first serves where `far` does not depend on it, the second is tried first where it does.
_LARGEST_EPSILON, _USUAL_EPSILON, _LARGEST_UNKNOWN = 1e9, 4.0, 600.0


@dataclass(frozen=True)
class NormalSamplerError:
    """A sampler of pairs of normals, in standard deviations.

    evaluation, slope: the evaluation of a pair moves it by at most evaluation + slope r, floats; with 64 bits, the
    first is at least 2^-45 (Lemma 1). digits: triples (l, x, y), l rising: where p < 2^-l, p is off by at most x, and
    theta by at most y. pairs: the most pairs of one release; 0 is exact noise.
    """

    evaluation: float = EVALUATION
    slope: float = 0.0
    digits: tuple[tuple[int, float, float], ...] = (
        (0, 2.0**-65, 2.0**-65),
        (32, 2.0**-93, 2.0**-37),
        (64, 2.0**-125, 2.0**-37),
    )
    pairs: int = count_pairs(LARGEST_RELEASE)

    def error(self, p: np.ndarray) -> np.ndarray:
        """The most that a normal is from the exact one, for p < e^(-1/2); float64, as p."""
        r, of_p, of_angle = np.sqrt(-2 * np.log(p)), np.empty(p.shape), np.empty(p.shape)
        for level, *most in self.digits:
            of_p[p < 2.0**-level], of_angle[p < 2.0**-level] = most
        return self.evaluation * (1 + 1 / 512) + self.slope * r + of_p / (p * r) + 2 * np.pi * r * of_angle

    def changes(self) -> np.ndarray:
        """h for p in (2^-(j+1), 2^-j], float64 (_MOST_BITS,): the largest of all p from there on, which falls with p.

        Just above the p from which there are more digits, the error is larger than on both sides of it.
        """
        points = 2.0 ** -np.arange(1.0, _MOST_BITS + 1) / _VARIATION_OF_P
        errors = self.error(points)
        for level, *_ in self.digits[1:]:
            below = np.argmax(points < 2.0**-level)
            errors[below] = max(errors[below], self.error(np.array([2.0**-level]))[0])
        return _SHARE_OF_FRAME * np.maximum.accumulate(errors)


NORMALS = NormalSamplerError()
# Those of a TPU. Where p has 64 digits, they round it down.
INTEGERS = NormalSamplerError(
    integer_normals.EVALUATION, integer_normals.SLOPE, ((0, 2.0**-64, 2.0**-65), *NORMALS.digits[1:])
)


def normal_sampler(numbers: int | NormalSamplerError, in_integers: bool = False) -> NormalSamplerError:
    """The sampler whose cost a release of `numbers` numbers has. A `NormalSamplerError` is returned as it is.

    in_integers: whether a TPU drew them. Where programs are traced for a TPU (`dpx.xla.place.current_place`), one
    always does.
    """
    if isinstance(numbers, NormalSamplerError):
        return numbers
    return replace(
        INTEGERS if in_integers or current_place().platform == "tpu" else NORMALS, pairs=count_pairs(numbers)
    )


def worst_sampler(each: Iterable[int | NormalSamplerError]) -> NormalSamplerError:
    """A sampler that costs at least as much as each of these."""
    found = [normal_sampler(one) for one in each]
    return replace(max(found, key=lambda one: one.evaluation), pairs=max(one.pairs for one in found))


class FinitePrecisionCost(NamedTuple):
    """What the arithmetic of some releases adds, floats.

    tail: t of the theorem. loss: a1, and a2 at epsilon 0; slope: of a2 in epsilon. radius: r0. releases: their expected
    number. pairs: the most of one of them.
    """

    tail: float
    loss: float
    slope: float
    radius: float
    releases: float
    pairs: int

    def epsilon(self, exact: float) -> float:
        """a1 + a2, where exact arithmetic has the epsilon `exact`."""
        return 2 * self.loss + self.slope * exact

    def delta(self, exact: float, delta: float, shift: float) -> float:
        """The delta of the theorem, where exact arithmetic has `delta` at the epsilon `exact`.

        shift: that of `RunProfile`.
        """
        own = self.tail / _SMALLEST_SHARE
        far = self.tail * math.exp(min(exact + self.loss + self.slope * exact, 700.0))
        if shift <= min(self.radius, _RARE_RADIUS) - _FARTHEST:
            moved = math.exp(-((self.radius - shift) ** 2) / 2)
            rare = _RARE * self.pairs * self._delta_beyond_radius(_RARE_RADIUS, shift) + math.exp(
                -((_RARE_RADIUS - shift) ** 2) / 2
            )
            of_releases = self.releases * (moved + rare**2 / 2)
            far = min(far, 2 * (self.tail * self._delta_beyond_radius(self.radius, shift) + of_releases))
        return min(1.0, self.tail + own + math.exp(self.loss) * (delta + far + own))

    def _delta_beyond_radius(self, radius: float, shift: float) -> float:
        """By how much a shift makes pairs beyond a radius more likely, those whose part of it is small."""
        return 1 + 4.8 * radius * shift / math.sqrt(self.pairs)


def finite_precision_cost(
    releases: int, mean: float, delta: float = _USUAL_DELTA, normals: NormalSamplerError = NORMALS
) -> FinitePrecisionCost:
    """What the arithmetic of this many releases adds. It holds at any delta, and is the least near the given one.

    releases, mean: how many are made at most, and their expected number.
    """
    return _best_lemma_2(releases, mean, round(-math.log2(max(delta, _SMALLEST_DELTA))), normals)


@functools.lru_cache(4096)
def _best_lemma_2(releases: int, mean: float, bits: int, normals: NormalSamplerError) -> FinitePrecisionCost:
    """The best p0 and the best x of Lemma 2, if a delta of t is worth an epsilon of t 2^bits."""
    if not releases or not normals.pairs:
        return FinitePrecisionCost(0.0, 0.0, 0.0, 0.0, 0.0, 1)
    pairs = float(releases) * normals.pairs
    change = normals.changes()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        exponents = np.geomspace(2.0, 2.0**32, 256)[:, None]
        scaled = exponents * np.where(change <= _LARGEST_CHANGE, change / (1 - change), np.inf)  # (256, _MOST_BITS)
        small = scaled < 1e-3
        grown = np.where(small, scaled**2 / 2 * (1 + scaled), np.expm1(scaled) - scaled)  # at least phi
        grown = np.where(np.isfinite(grown), grown, np.inf)
        least = 2.0 ** -np.arange(1.0, _MOST_BITS + 1)  # p0; the points below it in good cells have the last h
        psi = np.cumsum(least * grown, axis=1) + least * grown
        tail = mean * normals.pairs * (_BAD_PAIRS * least + normals.pairs * 2.0**-129)
        loss = (pairs * (psi + _MEAN_OF_CHANGES * exponents * least) + np.log(_SMALLEST_SHARE / tail)) / (exponents - 1)
    worth = np.where(tail < 1, loss + 2.0**bits * tail, np.inf)
    column = np.flatnonzero(worth.min(axis=0) <= 1.1 * worth.min())[-1]  # a smaller p0 bounds larger shifts
    row = np.argmin(worth[:, column])
    radius = math.sqrt(2 * math.log(2) * (int(column) + 1))
    slope = 1 / (float(exponents[row, 0]) - 1)
    if not math.isfinite(worth[row, column]):
        return FinitePrecisionCost(1.0, math.inf, slope, radius, mean, normals.pairs)
    return FinitePrecisionCost(float(tail[column]), float(loss[row, column]), slope, radius, mean, normals.pairs)


class EpsilonWithRounding(NamedTuple):
    """An epsilon at some delta, and what the arithmetic has added to the epsilon and to the delta: floats."""

    epsilon: float
    of_epsilon: float
    of_delta: float


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run as the program makes it, from the profile of exact arithmetic.

    exact: the profile. releases, mean: how many at most, int, and their expected number. shift: the most that one
    example moves a release, in standard deviations of its noise, as `releases.largest_shift` has it.
    """

    exact: Profile
    releases: int
    mean: float
    shift: float = math.inf
    normal_sampler: NormalSamplerError = NORMALS

    def epsilon(self, delta: float) -> float:
        return self.answer(delta).epsilon

    def answer(self, delta: float) -> EpsilonWithRounding:
        """Epsilon at `delta`, and its parts."""
        return min(
            (self._answer_with_rounding(delta, normals) for normals in self._sufficient_numbers()),
            key=lambda answer: answer.epsilon,
        )

    def _sufficient_numbers(self) -> tuple[NormalSamplerError, ...]:
        """The numbers of a release, and the most, whose bound holds for fewer too.

        The least bound of both is never above that of the most, which is what a budget's noise is found for.
        """
        most = replace(self.normal_sampler, pairs=count_pairs(LARGEST_RELEASE))
        return (self.normal_sampler, most) if 0 < self.normal_sampler.pairs < most.pairs else (self.normal_sampler,)

    def _answer_with_rounding(self, delta: float, normals: NormalSamplerError) -> EpsilonWithRounding:
        """Where `far` depends on epsilon, bounds of it are tried."""
        for bound in self._bounds(delta):
            worth = delta * math.exp(-bound) if bound < _LARGEST_EPSILON else delta
            added = finite_precision_cost(self.releases, self.mean, worth, normals)
            spare = delta - added.delta(bound, 0.0, self.shift)
            exact = self.exact.epsilon(spare * math.exp(-added.loss)) if spare > 0 else math.inf
            if exact == 0 and self.delta(0.0) <= delta:
                return EpsilonWithRounding(0.0, 0.0, 0.0)
            if exact <= bound:
                more = added.epsilon(exact)
                return EpsilonWithRounding(exact + more, more, added.delta(exact, 0.0, self.shift))
        return EpsilonWithRounding(math.inf, math.inf, 1.0)

    def least_delta(self, delta: float) -> float | None:
        """About the least delta of which the run has an epsilon, if it has none at `delta` because of its arithmetic.

        None if it has one, and if exact noise has none at `delta` either. The true one is less by at most a third.
        """
        if math.isfinite(self.epsilon(delta)) or math.isinf(self.exact.epsilon(delta)):
            return None
        low, high = math.log(max(delta, _SMALLEST_DELTA)), 0.0
        while high - low > _ABOUT:
            middle = (low + high) / 2
            low, high = (low, middle) if math.isfinite(self.epsilon(math.exp(middle))) else (middle, high)
        return math.exp(high) if high < 0 else None

    def _bounds(self, delta: float) -> Iterator[float]:
        yield from (_LARGEST_EPSILON, _USUAL_EPSILON)
        yield min(self.exact.epsilon(delta / 2), _LARGEST_UNKNOWN)

    def delta(self, epsilon: float) -> float:
        return min(self._delta(epsilon, normals) for normals in self._sufficient_numbers())

    def _delta(self, epsilon: float, normals: NormalSamplerError) -> float:
        grown = min(epsilon, _LARGEST_UNKNOWN) if math.isinf(self.shift) else 0.0
        added = finite_precision_cost(self.releases, self.mean, _USUAL_DELTA * math.exp(-grown), normals)
        exact = (epsilon - 2 * added.loss) / (1 + added.slope)
        if exact >= 0:
            return added.delta(exact, self.exact.delta(exact), self.shift)
        beyond = math.exp(2 * added.loss) - math.exp(epsilon)  # an epsilon is exchanged for a delta
        return min(1.0, added.delta(0.0, self.exact.delta(0.0), self.shift) + beyond)
