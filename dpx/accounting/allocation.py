"""One epoch of random allocation: a pair of distributions that dominates all neighbors, and its privacy loss.

An epoch has t steps, of which the first j are released, and the example takes part in one step, chosen uniformly. In
units of the clip norm, let v_i be the contribution of the example at step i (|v_i| <= 1), s_i the noise multiplier, and
g_i the sum without the example.

**Theorem.** P = (1/t) sum_{i <= t} N(e_i, diag(s^2)) and Q = N(0, diag(s^2)), on the first j coordinates, dominate the
epoch: P with the example, Q with a null in its place or without it. (For one known order of the steps, see
https://arxiv.org/abs/2602.17284 and https://arxiv.org/abs/2605.07072.)

Proof: let I be the step of the example, and w_i ~ N(1[I = i], s_i^2), independent given I. So w has the law P, and with
a null the law Q. Given w, a run can be simulated without knowing I: y_i = g_i + v_i w_i + s_i z_i, with
z_i ~ N(0, 1 - v_i v_i^T). Here v_i and g_i may depend on y_1 .. y_(i-1), and on the steps of all others, because these
are independent of I. Given I, y_i is g_i + 1[I = i] v_i plus noise s_i N(0, 1), as in the run. So the run is
post-processing of w, in both directions. This fails if an example is replaced, because two mixtures are then compared,
and if the steps of the others depend on I, as in a permutation.

S = dP/dQ = (t - j) / t + (1/t) sum_{i <= j} u_i with independent u_i = exp((2 x_i - 1) / (2 s_i^2)) under Q. Its law
does not depend on the order of the steps. `_dominating_ratio_law` computes a law that is larger in the convex order,
and so dominates in both directions. Epochs with new steps compose, direction by direction. Less noise dominates,
because noise can be added to each w_i.

At a noise multiplier below 0.05, the cost is that of one Gaussian release, as if the example's step were known. This is
an upper bound, because divergences are jointly convex. At an epsilon of 200, the excess is below ln t. At a small
epsilon, the cost of random allocation may exceed that of Poisson sampling at rate 1/t, so neither bounds the other.

**Laws** of sums of independent likelihood ratios are bounded from above in the convex order, on a geometric grid. A
likelihood ratio S = dP/dQ has mean 1 under Q, and E (S - a)+ and E (1 - a S)+, the hockey-stick divergences in both
directions, are convex in S. So a law that is larger in the convex order (the same mean, and a larger expectation of
every convex function) dominates in both directions. Independent sums preserve that order. So does this rounding: a
number between two grid points becomes one of them, with probabilities that preserve its mean.

The ends of the grid preserve the mean too. A small number becomes 0 or the first point. A large one becomes the last
point or infinity, which has only P-probability: the part `lost` of the mean. Nothing is renormalized.

**Moments** of S give the Renyi divergences in both directions.

**Removal.** E S^n = n! t^-n c_n, where c_n is the coefficient of x^n in f(x) = e^((t - j) x) prod_i f_i(x) and
f_i(x) = sum_k x^k e^(k (k-1) / (2 s_i^2)) / k!. Every f_i may be truncated after x^n. By Cauchy, the mean of f(z) z^-n
over M equidistant points of the circle |z| = r is c_n + c_(n+M) r^M + ..., with no negative terms: an upper bound for
any r and M. The radius is the best one for f(r) r^-n.

**Addition.** E S^-r = t^r / Gamma(r) int l^(r-1) e^(-(t-j) l) prod_i L_i(l) dl with L_i(l) = E e^(-l u_i). In v = ln l,
L_i is the probability that ln(a standard exponential variable) - ln u_i exceeds v. Both terms have log-concave
densities, so the integrand is log-concave in v. So beyond each end of the range, it falls at least as fast as a
geometric series that falls from the integrand's maximum to its value at this end.

(n - 1) D_n is convex in n, and 0 at n = 1, so chords bound it between whole orders. No D_n exceeds that of one Gaussian
release, n / (2 s^2) at the least s, because divergences are quasi-convex.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import special

from dpx.accounting.checks import Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount, in_deviations
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import Losses, Pmf, SampledGaussian, StepLoss, dominating_pmf
from dpx.sampling.schemes import steps_by_multiplier
from dpx.sampling.varying import RandomAllocationDpEvent

Noise = tuple[tuple[float, int], ...]  # pairs (noise multiplier, number of steps)

_KNOWN_BELOW = 0.05  # below this noise multiplier, the example's step counts as known
_MOST_DISTINCT, _LEAST_RATIO = 4, 1.004  # distinct noise multipliers of one epoch; those within this ratio count as one
_MOST_EPOCHS, _BUCKETS_EACH = 24, 4  # distinct epochs of a run; each takes the place of this many buckets
_TAIL_DECADES = 20  # laws are computed for tails of 1e-20, 1e-40, ..., and cached


class RatioLaw(NamedTuple):
    """The law of S: rising `values` with Q-probabilities `masses`, float64 (n,) each.

    zero: the Q-probability of 0. infinity: the P-probability of infinity.
    """

    values: np.ndarray
    masses: np.ndarray
    zero: float
    infinity: float


@dataclass(frozen=True)
class AllocatedGaussians(StepLoss):
    """The privacy loss of one epoch.

    noise: pairs (noise multiplier, number of released steps), rising. steps_per_epoch: t, int, no less than these.
    """

    noise: Noise
    steps_per_epoch: int

    @property
    def is_noiseless(self) -> bool:
        return self.noise[0][0] < renyi.SMALLEST_NOISE

    @property
    def released_steps(self) -> int:
        return sum(count for _, count in self.noise)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return allocation_renyi(self.noise, self.steps_per_epoch, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        decades = min(280, _TAIL_DECADES * math.ceil(-math.log10(max(tail, 1e-300)) / _TAIL_DECADES))
        law = _dominating_ratio_law(self.noise, self.steps_per_epoch, decades)
        losses = np.log(law.values)
        first, last = np.clip(losses[[0, -1]], -largest, largest) / grid
        first, last = math.floor(first), math.ceil(last)
        points = grid * np.arange(first, last + 1)
        cells = np.searchsorted(points, losses)
        upper = np.bincount(cells, law.masses * law.values, len(points) + 1)
        lower = np.bincount(cells, law.masses, len(points) + 1)
        upper[-1] += law.infinity
        lower[0] += law.zero
        removed = dominating_pmf(upper, lower, first, grid)
        return removed, dominating_pmf(lower[::-1], upper[::-1], -last, grid)


@functools.lru_cache(128)
def _dominating_ratio_law(noise: Noise, steps_per_epoch: int, decades: int) -> RatioLaw:
    """A distribution that is at least that of S in the convex order, with tails of 10^-decades."""
    tail = 10.0**-decades
    law = None
    for noise_multiplier, count in noise:
        group = law_of_copies(likelihood_ratio_law(noise_multiplier, tail), count, tail)
        law = group if law is None else law_of_sum(law, group, tail)
    assert law is not None
    others = steps_per_epoch - law.mean
    values, masses, zero = (others + law.values) / steps_per_epoch, law.masses, law.zero
    if others:
        values, masses, zero = np.append(others / steps_per_epoch, values), np.append(zero, masses), 0.0
    return RatioLaw(values, masses, zero, law.lost / steps_per_epoch)


def few_multipliers(noise: Noise) -> Noise:
    """Rounds noise multipliers down, by as little as possible, to at most 4 distinct ones."""
    values, counts = (np.array(column) for column in zip(*noise, strict=True))
    ratio = max(_LEAST_RATIO, (values[-1] / values[0]) ** (1 / _MOST_DISTINCT) * (1 + 1e-9))
    bins = np.floor(np.log(values / values[0]) / math.log(ratio))
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    return tuple(zip(values[starts].tolist(), np.add.reduceat(counts, starts).tolist(), strict=True))


def round_to_few_epochs(losses: Losses, buckets: int) -> Losses:
    """Rounds epochs with equally many steps to few distinct ones, by lowering their noise. Keeps all other losses.

    At most 24 remain, and at most a quarter of `buckets`, because each takes as long as many sampled Gaussians.
    """
    most = min(_MOST_EPOCHS, -(-buckets // _BUCKETS_EACH))
    kinds = defaultdict(list)
    for loss in losses:
        if isinstance(loss, AllocatedGaussians):
            kinds[loss.steps_per_epoch, loss.released_steps].append(loss)
    few: dict[StepLoss, int] = defaultdict(int, losses)
    for epochs in kinds.values():
        if len(epochs) <= most:
            continue
        costs = np.log([sum(count / s**2 for s, count in loss.noise) for loss in epochs])
        bins = np.floor((costs - costs.min()) / (np.ptp(costs) + 1e-300) * (most - 1e-9))
        for number in np.unique(bins):
            group = [epochs[place] for place in np.flatnonzero(bins == number)]
            count = sum(few.pop(loss) for loss in group)
            few[replace(group[0], noise=_elementwise_least_noise(loss.noise for loss in group))] += count
    return few


def _elementwise_least_noise(noises: Iterable[Noise]) -> Noise:
    """The elementwise minimum of several epochs' sorted noise multipliers, rounded to few distinct ones."""
    least = np.inf
    for noise in noises:
        values, counts = zip(*noise, strict=True)
        least = np.minimum(least, np.repeat(values, counts))
    return few_multipliers(steps_by_multiplier(np.asarray(least)))


@dataclass(frozen=True)
class Allocation(PrivacyLoss):
    """The cost of one epoch of random allocation. event: a `RandomAllocationDpEvent`."""

    event: RandomAllocationDpEvent
    fresh, draws_examples_independently = True, True

    @property
    def release_count(self) -> ReleaseCount:
        count = sum(count for _, count in self.event.noise_multiplier)
        return ReleaseCount(count, float(count))

    def step_loss(self, relation: Relation) -> StepLoss:
        event = self.event
        if relation == "replace_one":
            raise ValueError(
                'random allocation has a known cost under relation "zero_out" or "add_or_remove", got "replace_one": '
                "replacing an example compares two mixtures, for which no dominating pair is proved"
            )
        noise, steps = event.noise_multiplier, event.steps_per_epoch
        released = self.release_count.most
        if not (noise and all(0 <= s < math.inf and count >= 1 for s, count in noise) and released <= steps):
            raise ValueError(
                "noise must be finite and at least 0, in at least 1 and at most steps_per_epoch releases; got "
                f"{released} in {event}"
            )
        noise = tuple(sorted(noise))
        if noise[0][0] < _KNOWN_BELOW:
            return SampledGaussian(noise[0][0], 1.0, relation)
        if released == 1:  # the same pair
            return SampledGaussian(noise[0][0], 1 / steps, relation)
        return AllocatedGaussians(few_multipliers(noise), steps)

    def largest_shift(self, relation: Relation) -> float:
        return in_deviations(2 if relation == "replace_one" else 1, min(s for s, _ in self.event.noise_multiplier))

    def in_words(self) -> str:
        sigmas, steps = [sigma for sigma, _ in self.event.noise_multiplier], self.event.steps_per_epoch
        noise = f"{min(sigmas):.6g}" + (f" to {max(sigmas):.6g}" if len(sigmas) > 1 else "")
        part = "" if self.release_count.most == steps else f"the first {self.release_count.most} steps of "
        which = f"{part}an epoch of {steps} Gaussians, of which a random one has the example"
        return f"{which}, noise multiplier {noise}"


# All values of these constants give upper bounds. Their benchmarks are in tests/test_accounting_allocation.py.
_SPACING = 0.04  # spacing of the grid, in relative standard deviations of the sum
_COARSEST = 0.02  # largest spacing of the grid of one ratio, times max(1, 1 / its noise multiplier)
_CUTS = 64  # tails are cut at most 64 times between the first law and the last


class SumLaw(NamedTuple):
    """The law of a sum of ratios, in which e^(k / 2^finer) has probability masses[k - first].

    finer, first: ints. masses: float64 (n,). zero: the probability of 0. lost: the part of the mean at infinity.
    mean: the number of ratios. variance: the variance of the sum. coarsest: the largest useful spacing.
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
        """The same law on a finer grid that includes this one's points."""
        step = 2 ** (finer - self.finer)
        masses = np.zeros((len(self.masses) - 1) * step + 1)
        masses[::step] = self.masses
        return self._replace(finer=finer, first=self.first * step, masses=masses)

    def cut(self, tail: float) -> "SumLaw":
        """Cuts off the lower end, with Q-probability `tail`, and the upper end, with a share `tail` of the mean."""
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
    """The law of u = exp((2 x - 1) / (2 s^2)), the likelihood ratio of N(1, s^2), if x is from N(0, s^2)."""
    s, farthest = noise_multiplier, -float(special.ndtri(tail / _CUTS))
    variance, coarsest = math.expm1(min(s**-2, 700.0)), _COARSEST * max(1.0, 1 / s)
    finer = _halvings_of_spacing(1, variance, coarsest)
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
    """The law of the sum of `count` independent variables with this law, by doubling."""
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
    """The law of the sum of two independent variables.

    On a geometric grid, e^(i h) + e^(j h) is e^(i h) times a function of j - i, so all pairs with the same difference
    are rounded alike: one product of two slices.
    """
    mean, variance = one.mean + other.mean, one.variance + other.variance
    coarsest = min(one.coarsest, other.coarsest)
    finer = max(_halvings_of_spacing(mean, variance, coarsest), one.finer, other.finer)
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
        offset = one.first + difference - other.first  # index in `other` minus index in `one`
        start, stop = max(0, -offset), min(len(one.masses), len(other.masses) - offset)
        pairs = one.masses[start:stop] * other.masses[start + offset : stop + offset]
        if same and difference:
            pairs *= 2
        place, above = one.first - first + start + step, pairs * upper
        masses[place + 1 : place + 1 + len(pairs)] += above
        masses[place : place + len(pairs)] += pairs - above
    total = SumLaw(finer, first, masses, one.zero * other.zero, one.lost + other.lost, mean, variance, coarsest)
    return total.cut(tail / _CUTS)


def _halvings_of_spacing(mean: int, variance: float, coarsest: float) -> int:
    """How often a grid spacing of 1 must be halved to be fine enough for a sum."""
    return max(0, math.ceil(-math.log2(min(coarsest, _SPACING * math.sqrt(variance) / mean))))


_LARGEST_ORDER = 1024  # the largest order for the integral; above it, the bound is that of one Gaussian release
_LEAST_POINTS = 64  # the least number of points on the circle
_STEP, _FIRST, _LAST = 0.03, -60.0, 30.0  # the step and range of v in the integral
_FARTHEST, _LEAST_LOG = 37.0, -600.0  # x / s in L begins at -37, and ln L ends at -600, far above the tail beyond
_SMALL = 35.0  # the integrand must fall by e^-35 from its maximum to either end
_RADIUS = 0.1  # divided by the order: the tolerance for ln of the best radius
_ZERO = 1e-300  # replaces 0; far below _ROUNDING
_ROUNDING = 1e-13  # rounding error of ln of a moment, relative to its parts
_OF_A_LOG = 2.0**-50  # rounding error of the log of a number near 1, which is multiplied by its number of steps


def allocation_renyi(noise: Noise, steps_per_epoch: int, orders: np.ndarray) -> np.ndarray:
    """Upper bounds on the Renyi divergences in both directions, float64 (orders,)."""
    whole = np.unique(np.concatenate([np.floor(orders), np.ceil(orders)]))
    whole = whole[whole > 1]
    most = whole / (2 * noise[0][0] ** 2)
    arguments = noise, steps_per_epoch
    found = np.array([max(renyi_of_removal(*arguments, int(n)), renyi_of_addition(*arguments, n)) for n in whole])
    tilts = np.append(0.0, whole - 1)
    moments = np.append(0.0, np.minimum(found, most) * (whole - 1))
    return np.interp(orders - 1, tilts, moments) / (orders - 1)


def renyi_of_removal(noise: Noise, steps_per_epoch: int, order: int) -> float:
    """An upper bound on D_n(P|Q) at a whole order n of at least 2."""
    k = np.arange(order + 1)
    sigmas, counts = (np.array(column, np.float64)[:, None] for column in zip(*noise, strict=True))
    logs = k * (k - 1) / (2 * sigmas**2) - special.gammaln(k + 1)  # (distinct noise multipliers, order + 1)
    others = steps_per_epoch - float(counts.sum())

    def terms_of_series(log_radius: float) -> tuple[np.ndarray, np.ndarray]:
        """The terms of each f_i, divided so that the largest is 1, and ln of the divisors."""
        scaled = logs + k * log_radius
        largest = scaled.max(axis=1, keepdims=True)
        return np.exp(scaled - largest), largest

    low, high = -order / sigmas.min() ** 2 - math.log(steps_per_epoch) - 1.0, math.log(order) + 1.0
    while high - low > _RADIUS / order:  # at the best radius, the terms of f have mean degree n
        middle = (low + high) / 2
        shares, _ = terms_of_series(middle)
        degree = others * math.exp(middle) + np.sum(counts[:, 0] * (shares @ k) / shares.sum(axis=1))
        low, high = (middle, high) if degree < order else (low, middle)
    points = max(_LEAST_POINTS, 4 * 2 ** math.ceil(math.log2(order + 1)))
    shares, largest = terms_of_series(high)
    angles = 2j * math.pi * np.arange(points) / points
    on_circle = np.fft.ifft(shares, points, axis=1) * points
    means = on_circle / shares.sum(axis=1, keepdims=True)
    means = np.where(means == 0, _ZERO, means)  # a number times the complex ln 0 would be NaN
    log_f = others * math.exp(high) * np.expm1(angles) - order * angles
    log_f += np.sum(counts * np.log(means), axis=0)
    log_largest = others * math.exp(high) + float(np.sum(counts * (largest + np.log(shares.sum(axis=1)[:, None]))))
    rounding = _ROUNDING + _OF_A_LOG * (steps_per_epoch + float(counts.sum()))
    mean = float(np.mean(np.real(np.exp(log_f)))) + rounding
    parts = special.gammaln(order + 1), -order * math.log(steps_per_epoch), -order * high, log_largest
    log_moment = sum(parts) + (math.log(mean) if mean > 0 else math.inf)
    if not log_moment < math.inf:  # includes NaN, because max(0.0, nan) is 0.0
        return math.inf
    return (max(0.0, log_moment) + rounding + _ROUNDING * sum(map(abs, parts))) / (order - 1)


def renyi_of_addition(noise: Noise, steps_per_epoch: int, order: float) -> float:
    """An upper bound on D_n(Q|P), the Renyi divergence at an order n of at least 2; inf if the integral fails."""
    if order > _LARGEST_ORDER:
        return math.inf
    v, logs = _log_laplace_of_sum(noise, steps_per_epoch)
    r = order - 1
    exponent = r * v + logs
    peak = int(np.argmax(exponent))
    fallen = exponent[peak] - exponent[[0, -1]]
    if np.any(fallen < _SMALL):
        return math.inf
    distances = np.maximum(np.abs(v[[0, -1]] - v[peak]), _STEP)
    beyond = float(np.sum(np.exp(-fallen) * distances / fallen))
    integral = _STEP * float(np.sum(np.exp(exponent - exponent[peak]))) + beyond
    parts = r * math.log(steps_per_epoch), special.gammaln(r), float(exponent[peak])
    log_moment = parts[0] - parts[1] + parts[2] + math.log(integral)
    return (max(0.0, log_moment) + 10 * _ROUNDING * (1 + sum(map(abs, parts)))) / r


@functools.lru_cache(64)
def _log_laplace_of_sum(noise: Noise, steps_per_epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points v, and ln of the product of all Laplace transforms at l = e^v, float64 (points,) each."""
    s = noise[0][0]
    v = np.arange(_FIRST, _LAST + 0.5 / s**2 + 10 / s, _STEP) - math.log(steps_per_epoch)
    others = steps_per_epoch - sum(count for _, count in noise)
    total = -others * np.exp(np.minimum(v, 600))
    used = len(v)
    for s, count in noise:
        log = _log_laplace_transform(s, v)
        used = min(used, int(np.searchsorted(-log, -_LEAST_LOG)))
        total = total + count * log
    return v[:used], total[:used]


def _log_laplace_transform(s: float, v: np.ndarray) -> np.ndarray:
    """Returns ln E exp(-e^v u), float64 (points,), by the trapezoidal rule, whose error decays exponentially here.

    Beyond the range, the integrand is at most the density. The result falls with v.
    """
    step = min(0.25, s / 4)
    z = np.arange(-_FARTHEST, 12 + 1 / s, step)
    weights = np.exp(-z * z / 2) * (step / math.sqrt(2 * math.pi))
    result = np.empty(len(v))
    for start in range(0, len(v), 512):
        with np.errstate(over="ignore"):
            scaled = np.exp(v[start : start + 512, None] + z / s - 0.5 / s**2)
        lost = -(np.expm1(-scaled) @ weights)  # 1 - L, accurate where L is near 1
        kept = np.exp(-scaled) @ weights + special.ndtr(-_FARTHEST)
        result[start : start + 512] = np.where(lost < 0.5, np.log1p(-np.minimum(lost, 0.5)), np.log(kept))
    return result
