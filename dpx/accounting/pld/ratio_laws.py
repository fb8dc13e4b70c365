"""The law of a sum of independent likelihood ratios on a geometric grid, from above in the convex order.

A likelihood ratio S = dP/dQ has the mean 1 under Q, and E (S - a)+ and E (1 - a S)+, the hockey-stick divergences in
both directions, are convex in S. So a law that is larger in the convex order (the same mean, and a larger expectation
of every convex function) dominates in both directions. That order survives independent sums. It also survives this
rounding: a number between two grid points becomes one of the two, with the probabilities that keep its mean.

Three ends of the grid keep the mean too. A small number becomes 0 or the first point. A large one becomes the last
point or infinity, which has no Q-probability, but the part `lost` of the mean: P-probability. Nothing is renormalized.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from dpx.accounting.pld.losses import SampledGaussian

# Any of these numbers gives upper bounds. benchmarks of them: tests/test_accounting_allocation.py.
_SPACING = 0.04  # of the grid, in relative standard deviations of the sum
_COARSEST = 0.02  # of the grid of one ratio, times max(1, 1 / its noise multiplier)
_CUTS = 64  # tails are cut so often at most, between the first law and the last


class SumLaw(NamedTuple):
    """The law of a sum of ratios: e^(k / 2^finer) has the probability masses[k - first].

    finer, first: ints. masses: float64 (n,). zero: the probability of 0. lost: the part of the mean at infinity.
    mean: how many ratios are summed. variance: of the sum. coarsest: the largest useful spacing.
    """

    finer: int
    first: int
    masses: np.ndarray
    zero: float
    lost: float
    mean: int
    variance: float
    coarsest: float

    @property
    def values(self) -> np.ndarray:
        """The grid points, float64 (n,)."""
        return np.exp((self.first + np.arange(len(self.masses))) * 2.0**-self.finer)

    def refined(self, finer: int) -> "SumLaw":
        """The same law on a grid that has this one's points, and more."""
        step = 2 ** (finer - self.finer)
        masses = np.zeros((len(self.masses) - 1) * step + 1)
        masses[::step] = self.masses
        return self._replace(finer=finer, first=self.first * step, masses=masses)

    def cut(self, tail: float) -> "SumLaw":
        """The law without its ends, of Q-probability `tail` below and of the share `tail` of the mean above."""
        values, masses = self.values, self.masses
        low = min(int(np.searchsorted(np.cumsum(masses), tail)), len(masses) - 1)
        share = np.cumsum((masses * values)[::-1]) / self.mean
        high = max(len(masses) - int(np.searchsorted(share, tail)), low + 1)
        kept, zero, lost = masses[low:high].copy(), self.zero, self.lost
        moved = float(np.sum(masses[:low] * values[:low]) / values[low])
        kept[0] += moved
        zero += max(0.0, float(masses[:low].sum()) - moved)
        above = masses[high:]
        kept[-1] += above.sum()
        lost += max(0.0, float(np.sum(above * (values[high:] - values[high - 1]))))
        return self._replace(first=self.first + low, masses=kept, zero=zero, lost=lost)


def likelihood_ratio_law(noise_multiplier: float, tail: float) -> SumLaw:
    """The law under N(0, s^2) of u = exp((2 x - 1) / (2 s^2)), the likelihood ratio of N(1, s^2)."""
    s, farthest = noise_multiplier, -float(special.ndtri(tail / _CUTS))
    variance, coarsest = math.expm1(min(s**-2, 700.0)), _COARSEST * max(1.0, 1 / s)
    finer = _halvings(1, variance, coarsest)
    first = math.floor((-farthest / s - 0.5 / s**2) * 2**finer)
    last = math.ceil((farthest / s + 0.5 / s**2) * 2**finer)
    logs = np.arange(first, last + 1) * 2.0**-finer
    under_p, under_q = SampledGaussian(s, 1.0).masses(logs)
    values = np.exp(logs)
    upwards = np.clip((under_p[1:-1] - under_q[1:-1] * values[:-1]) / np.diff(values), 0, under_q[1:-1])
    masses = np.zeros(len(values))
    masses[1:] = upwards
    masses[:-1] += under_q[1:-1] - upwards
    from_below = min(under_p[0] / values[0], under_q[0])
    masses[0] += from_below
    masses[-1] += under_q[-1]
    lost = max(0.0, float(under_p[-1] - under_q[-1] * values[-1]))
    return SumLaw(finer, first, masses, float(under_q[0] - from_below), lost, 1, variance, coarsest)


def law_of_copies(law: SumLaw, count: int, tail: float) -> SumLaw:
    """The law of the sum of `count` independent numbers of this law, by doubling."""
    total = None
    while True:
        if count & 1:
            total = law if total is None else law_of_sum(total, law, tail)
        count >>= 1
        if not count:
            assert total is not None
            return total
        law = law_of_sum(law, law, tail)


def law_of_sum(one: SumLaw, other: SumLaw, tail: float) -> SumLaw:
    """The law of the sum of two independent numbers.

    On a geometric grid, e^(i h) + e^(j h) is e^(i h) times a function of j - i, so all pairs with the same difference
    are rounded alike: one product of two slices.
    """
    mean, variance = one.mean + other.mean, one.variance + other.variance
    coarsest = min(one.coarsest, other.coarsest)
    finer = max(_halvings(mean, variance, coarsest), one.finer, other.finer)
    same = one is other
    one = one.refined(finer)
    other = one if same else other.refined(finer)
    spacing, first = 2.0**-finer, min(one.first, other.first)
    end = max(one.first + len(one.masses), other.first + len(other.masses)) + math.ceil(math.log(2) / spacing) + 2
    masses = np.zeros(end - first)
    for law, zero in ((one, other.zero), (other, one.zero)):
        masses[law.first - first : law.first - first + len(law.masses)] += zero * law.masses
    smallest = 0 if same else other.first - one.first - len(one.masses) + 1
    differences = np.arange(smallest, other.first + len(other.masses) - one.first)
    steps = np.logaddexp(0, spacing * differences) / spacing
    below = np.floor(steps)
    upper_shares = np.clip(np.expm1(spacing * (steps - below)) / math.expm1(spacing), 0, 1)
    columns = zip(differences.tolist(), below.astype(int).tolist(), upper_shares.tolist(), strict=True)
    for difference, step, upper in columns:
        offset = one.first + difference - other.first  # other's place is one's place plus this
        start, stop = max(0, -offset), min(len(one.masses), len(other.masses) - offset)
        pairs = one.masses[start:stop] * other.masses[start + offset : stop + offset]
        if same and difference:
            pairs *= 2
        place, above = one.first - first + start + step, pairs * upper
        masses[place + 1 : place + 1 + len(pairs)] += above
        masses[place : place + len(pairs)] += pairs - above
    total = SumLaw(finer, first, masses, one.zero * other.zero, one.lost + other.lost, mean, variance, coarsest)
    return total.cut(tail / _CUTS)


def _halvings(mean: int, variance: float, coarsest: float) -> int:
    """The number of halvings of a spacing of 1 that is fine enough for a sum."""
    return max(0, math.ceil(-math.log2(min(coarsest, _SPACING * math.sqrt(variance) / mean))))
