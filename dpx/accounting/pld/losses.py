"""The privacy loss of one step as a probability mass function (pmf) on a grid, rounded up or down; and the rounding of
long schedules to few distinct steps.

Proof that this rounding goes to one side: a step with less noise or a higher sampling rate dominates, because noise can
be added and examples can be dropped afterwards. Domination also holds for adaptive compositions. So the cost is at
least the truth if every noise multiplier is rounded DOWN to the smallest in its bucket, and every rate UP to the
largest. It is at most the truth if they are rounded the other way.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpx.accounting.checks import Relation
from dpx.accounting.pld import renyi


class Pmf(NamedTuple):
    """The loss `(first + i) * grid` has probability `probabilities[i]`, float64 (n,), and inf has `infinity`, float."""

    first: int
    probabilities: np.ndarray
    infinity: float


def mix_pmfs(pmfs: Sequence[Pmf], shares: Sequence[float], infinity: float = 0.0) -> Pmf:
    """Mixes pmfs on one grid, and adds `infinity` to the probability of an infinite loss."""
    first = min(pmf.first for pmf in pmfs)
    total = np.zeros(max(pmf.first + len(pmf.probabilities) for pmf in pmfs) - first)
    for pmf, share in zip(pmfs, shares, strict=True):
        start = pmf.first - first
        total[start : start + len(pmf.probabilities)] += share * pmf.probabilities
        infinity += share * pmf.infinity
    return Pmf(first, total, infinity)


class StepLoss:
    """The privacy loss of one step under a relation; hashable."""

    @property
    def is_noiseless(self) -> bool:
        """Whether the noise is so small that it counts as none."""
        return False

    @property
    def orders(self) -> np.ndarray:
        """The Renyi orders that an accountant searches, rising, float64 (orders,)."""
        return renyi.ORDERS

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergences at `orders` in both directions, float64 (orders,); inf if unknown."""
        raise NotImplementedError

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        """A dominating pmf for each direction of the relation (one if symmetric), on multiples of `grid`.

        Losses above `largest`, and further ones of total probability `tail`, may count as infinite. A subclass without
        this method has no known privacy loss distribution.
        """
        raise NotImplementedError

    def has_pmfs(self) -> bool:
        return type(self).pmfs is not StepLoss.pmfs


@dataclass(frozen=True)
class GaussianStep(StepLoss):
    """A step with a noise multiplier and a rate. For speed, the divergences of many steps are computed at once."""

    noise_multiplier: float
    rate: float

    def __post_init__(self):
        object.__setattr__(self, "noise_multiplier", min(self.noise_multiplier, renyi.LARGEST_NOISE))

    @property
    def is_noiseless(self) -> bool:
        return self.noise_multiplier < renyi.SMALLEST_NOISE

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return self.schedule_renyi(np.array([self.noise_multiplier]), np.array([self.rate]), np.ones(1), orders)

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        """Composes the Renyi divergences of many steps, float64 (orders,). sigmas, rates, counts: (T,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class SampledGaussian(GaussianStep):
    """One step of the Gaussian mechanism on a Poisson sample: a pair of distributions that dominates all neighbors.

    With s the noise multiplier and q the sampling rate:
    remove: (1-q) N(0, s^2) + q N(1, s^2)  against  N(0, s^2);   add: the same, exchanged
    replace_one: (1-q) N(0, s^2) + q N(1, s^2)  against  (1-q) N(0, s^2) + q N(-1, s^2)
    (Zhu, Dong and Wang 2022, https://arxiv.org/abs/2106.08567; replace_one as in dp-accounting.)
    """

    relation: Relation = "add_or_remove"

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        return renyi.schedule_rdp(sigmas, rates, counts, self.relation, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        return self._discretize(dominating_pmf, grid, tail, largest)

    def dominated_pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        """Like `pmfs`, but dominated by the true pair of distributions, for lower bounds."""
        return self._discretize(dominated_pmf, grid, tail, largest)

    def _discretize(self, make_pmf: Callable[..., Pmf], grid: float, tail: float, largest: float) -> tuple[Pmf, ...]:
        first, losses = self.grid_points(grid, tail, largest)
        upper, lower = self.masses(losses)
        remove = make_pmf(upper, lower, first, grid)
        if self.relation == "replace_one":
            return (remove,)
        return remove, make_pmf(lower[::-1], upper[::-1], -(first + len(losses) - 1), grid)

    def masses(self, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mass of both distributions below, between and above n increasing losses; float64 (n + 1,) each."""
        x, s, q = self._outputs_at_losses(losses), self.noise_multiplier, self.rate
        without, taken = normal_masses(x / s), normal_masses((x - 1) / s)
        upper = (1 - q) * without + q * taken
        if self.relation == "replace_one":
            return upper, (1 - q) * without + q * normal_masses((x + 1) / s)
        return upper, without

    def grid_points(self, grid: float, tail: float, largest: float) -> tuple[int, np.ndarray]:
        """The first index and the grid points, float64 (n,); the probability outside them is at most `tail`."""
        farthest = -float(special.ndtri(tail / 4)) * self.noise_multiplier
        ends = self._losses_at_outputs(np.array([-farthest - 1, farthest + 1]))
        first, last = np.clip(ends, -largest, largest) / grid
        first, last = math.floor(first), math.ceil(last)
        return first, np.arange(first, last + 1) * grid

    def _losses_at_outputs(self, x: np.ndarray) -> np.ndarray:
        """The privacy loss ln(upper / lower) at outputs x, float64 (n,); it increases with x."""
        s2, log_q = self.noise_multiplier**2, math.log(self.rate)
        log_p = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        loss = np.logaddexp(log_p, log_q + (x - 0.5) / s2)
        if self.relation == "replace_one":
            loss = loss - np.logaddexp(log_p, log_q + (-x - 0.5) / s2)
        return loss

    def _outputs_at_losses(self, losses: np.ndarray) -> np.ndarray:
        """The outputs x, float64 (n,), at which the privacy loss has these values; -inf below its infimum."""
        s2, q = self.noise_multiplier**2, self.rate
        if self.relation == "replace_one":
            # c y^2 + (1-q)(1 - e^L) y - c e^L = 0 for y = exp(x/s^2), c = q exp(-1/(2 s^2)), L the loss:
            # x/s^2 = L/2 + asinh((1-q)/c sinh(L/2))
            with np.errstate(divide="ignore"):
                log_ratio = (math.log1p(-q) if q < 1 else -math.inf) - math.log(q) + 0.5 / s2
                half = np.abs(losses) / 2
                log_sinh = log_ratio + half + np.log(-np.expm1(-2 * half) / 2)
            asinh = np.where(log_sinh > 20, log_sinh + math.log(2), np.arcsinh(np.exp(np.minimum(log_sinh, 20))))
            return s2 * (losses / 2 + np.sign(losses) * asinh)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(
                losses > 30,
                losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(losses, 30))),
                np.log1p(np.maximum(np.expm1(np.minimum(losses, 30)) / q, -1)),
            )
        return s2 * ratio + 0.5


Losses = Mapping[Any, int]  # StepLoss -> number of such steps


def total_renyi(losses: Losses, orders: np.ndarray = renyi.ORDERS) -> np.ndarray:
    """Upper bounds on the Renyi divergences of all steps composed, float64 (orders,).

    All `GaussianStep`s of one kind are computed at once, for speed.
    """
    total = np.zeros(len(orders))
    gaussians: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
    for loss, count in losses.items():
        if isinstance(loss, GaussianStep):
            kind = replace(loss, noise_multiplier=1.0, rate=1.0)
            gaussians[kind].append((loss.noise_multiplier, loss.rate, count))
        else:
            total = total + count * loss.renyi(orders)
    for kind, rows in gaussians.items():
        total = total + kind.schedule_renyi(*np.array(rows, np.float64).T, orders)
    return total


def dominating_pmf(upper: np.ndarray, lower: np.ndarray, first: int, grid: float) -> Pmf:
    """Connect-the-dots: the pmf on the grid that keeps both masses of every cell, so it dominates the true pair.

    upper, lower: the masses below, between and above n grid points, float64 (n + 1,).

    Proof for any grid: the mass of a cell is shared between its two ends so that the mass of `lower` is kept as well
    (Doroshenko et al. 2022, https://arxiv.org/abs/2207.04380). This form uses the masses of the cells instead of
    differences of hockey-stick divergences, because masses conserve probability to the last bit.
    """
    ends = _exp_of_grid(first, len(upper) - 1, grid)
    cells = upper[1:-1]
    left = np.clip((lower[1:-1] * ends[1:] - cells) / math.expm1(grid), 0, cells)
    probabilities = np.zeros(len(upper) - 1)
    probabilities[:-1] = left
    probabilities[1:] += cells - left
    probabilities[0] += upper[0]
    top = min(float(upper[-1]), float(lower[-1] * ends[-1]))
    probabilities[-1] += top
    return Pmf(first, probabilities, float(upper[-1]) - top)


def dominated_pmf(upper: np.ndarray, lower: np.ndarray, first: int, grid: float) -> Pmf:
    """The opposite of `dominating_pmf`: cells are merged around the grid points. The true pair dominates this pmf.

    upper, lower: as for `dominating_pmf`.

    Proof for any grid: each grid point takes a share of the cell below it and a share of the cell above it, such that
    their merged likelihood ratio is at least that of the point. Merging is post-processing. Rounding the merged loss
    down to the point gives a lower bound too. The rounding is small, because the shares balance except for the
    curvature of the density.
    """
    points = _exp_of_grid(first, len(upper) - 1, grid)
    cells, others = upper[1:-1], lower[1:-1]
    lacking = np.maximum(others * points[1:] - cells, 0)[:-1]  # of the cell below, at points 1 .. n-2
    spare = np.maximum(cells - others * points[:-1], 0)[1:]  # of the cell above
    upwards = np.zeros(len(cells))  # the share of each cell that goes to its upper end
    with np.errstate(divide="ignore", invalid="ignore"):
        upwards[:-1] = np.nan_to_num(spare / (spare + lacking))
        most = np.nan_to_num((1 - upwards[1:]) * spare / lacking, nan=0.0, posinf=1.0)
    upwards[:-1] = np.minimum(upwards[:-1], most * (1 - 1e-12))
    probabilities = np.zeros(len(points))
    probabilities[:-1] = (1 - upwards) * cells
    probabilities[1:] += upwards * cells
    probabilities[-1] += upper[-1]
    return Pmf(first, probabilities, 0.0)


def _exp_of_grid(first: int, count: int, grid: float) -> np.ndarray:
    return np.exp(np.minimum(grid * np.arange(first, first + count), 700))


def normal_masses(z: np.ndarray) -> np.ndarray:
    """The mass of N(0, 1) below, between and above n increasing points, float64 (n + 1,), to a small relative error."""
    tails = special.ndtr(-np.abs(z))
    left, right = z[:-1] <= 0, z[1:] <= 0
    between = np.where(
        right, tails[1:] - tails[:-1], np.where(left, 1 - tails[1:] - tails[:-1], tails[:-1] - tails[1:])
    )
    below = tails[0] if z[0] <= 0 else 1 - tails[0]
    above = 1 - tails[-1] if z[-1] <= 0 else tails[-1]
    return np.concatenate([[below], between, [above]])


# Distinct steps in a composition by PLD, the same for every cost. A schedule of 10,000 takes about a second, and its
# epsilon is at most 1.4% above the truth (benchmarks/accounting.py: mechanism_epsilon, against the lower end of
# interval).
BUCKETS = 512

_LARGEST_PRECISION = 1e6  # of sigma^-2 in the cost of a step, so that noise near 0 does not take all buckets
_SMALLEST_GAP = 1e-12  # between neighboring values of ln sigma, so that every step has a positive cost


class StepBuckets(NamedTuple):
    """The range of noise multipliers and rates in each bucket, float64 (buckets,), and its number of steps, int64."""

    smallest_noise: np.ndarray
    largest_noise: np.ndarray
    smallest_rate: np.ndarray
    largest_rate: np.ndarray
    counts: np.ndarray

    def with_scaled_noise(self, factor: float) -> "StepBuckets":
        """The buckets of the schedule whose noise multipliers are `factor` times as large."""
        return self._replace(smallest_noise=self.smallest_noise * factor, largest_noise=self.largest_noise * factor)


def round_losses_to_buckets(losses: Losses, gaussian: type, buckets: int) -> Losses:
    """Rounds the losses of one Gaussian type up in cost to at most `buckets` distinct ones; keeps the rest."""
    chosen = [loss for loss in losses if isinstance(loss, gaussian)]
    if not chosen:
        return losses
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in chosen]).T
    steps = bucketed_gaussians(sigmas, rates, np.array([losses[loss] for loss in chosen]), buckets)
    rounded = defaultdict(int, {loss: count for loss, count in losses.items() if not isinstance(loss, gaussian)})
    rows = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)
    for sigma, rate, count in rows:
        rounded[replace(chosen[0], noise_multiplier=sigma, rate=rate)] += count
    return rounded


def bucketed_gaussians(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> StepBuckets:
    """Buckets sampled Gaussians. All unsampled ones become one of precision sum 1 / sigma^2, which is exact."""
    used = counts > 0
    sigmas, rates, counts = sigmas[used], rates[used], counts[used]
    plain = (rates == 1) & (sigmas > 0)
    if plain.sum() > 1 or np.any(counts[plain] > 1):
        smallest = sigmas[plain].min()
        merged = smallest / math.sqrt(np.sum(counts[plain] * (smallest / sigmas[plain]) ** 2))
        sigmas, rates = np.append(sigmas[~plain], merged), np.append(rates[~plain], 1.0)
        counts = np.append(counts[~plain], 1)
    return bucketed_steps(sigmas, rates, counts, buckets)


def bucketed_steps(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> StepBuckets:
    """Groups steps into at most `buckets` of about equal rounding cost; exact for up to `buckets` distinct steps.

    sigmas, rates: float64 (T,). counts: int64 (T,). Rates are grouped first, because more than sqrt(buckets) distinct
    rates would leave too few buckets for the noise.
    """
    steps, inverse = np.unique(np.stack([rates, sigmas]), axis=1, return_inverse=True)
    repeats = np.bincount(inverse.reshape(-1), counts, steps.shape[1]).astype(np.int64)
    (rates, sigmas), repeats = steps[:, repeats > 0], repeats[repeats > 0]
    if len(repeats) <= buckets:
        return StepBuckets(sigmas, sigmas, rates, rates, repeats)
    distinct_rates = np.unique(rates)
    rate_groups = np.searchsorted(distinct_rates, rates)
    most_rates = math.isqrt(buckets)
    if len(distinct_rates) > most_rates:
        labels = _label_rounding_groups(np.log(distinct_rates), np.ones(len(distinct_rates)), most_rates)
        rate_groups = labels[rate_groups]
    numbers = np.unique(rate_groups)
    buckets_each = max(1, buckets // len(numbers))
    labels = np.empty(len(repeats), np.int64)
    for number in numbers:
        rows = np.flatnonzero(rate_groups == number)
        rows = rows[np.argsort(sigmas[rows], kind="stable")]
        cost = repeats[rows] * _noise_cost_slope(sigmas[rows], rates[rows])
        labels[rows] = number * buckets + _label_rounding_groups(np.log(sigmas[rows]), cost, buckets_each)
    distinct, labels = np.unique(labels, return_inverse=True)
    low_noise, high_noise = np.full(len(distinct), np.inf), np.zeros(len(distinct))
    low_rate, high_rate = low_noise.copy(), high_noise.copy()
    np.minimum.at(low_noise, labels, sigmas)
    np.maximum.at(high_noise, labels, sigmas)
    np.minimum.at(low_rate, labels, rates)
    np.maximum.at(high_rate, labels, rates)
    return StepBuckets(low_noise, high_noise, low_rate, high_rate, np.bincount(labels, repeats).astype(np.int64))


def _noise_cost_slope(sigmas: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """How fast each step's cost changes with the log of its noise, up to a constant factor; float64 (T,)."""
    precision = np.minimum(sigmas**-2.0, _LARGEST_PRECISION)
    return precision * np.exp(np.minimum(precision, -2 * np.log(rates)))


def _label_rounding_groups(logs: np.ndarray, cost: np.ndarray, groups: int) -> np.ndarray:
    """Assigns each of the increasing `logs` to a group in [0, groups), int64 (n,).

    The total rounding cost, the sum over t of cost_t (width of t's group), is least if the widths are proportional to
    (cost density)^(-1/2).
    """
    gaps = np.diff(logs, append=logs[-1])
    gaps[-1] = gaps[-2] if len(gaps) > 1 else 1.0
    position = np.cumsum(np.sqrt(cost * np.maximum(gaps, _SMALLEST_GAP)))
    return np.minimum(
        (groups * (position - position[0]) / (position[-1] - position[0] + 1e-300)).astype(int), groups - 1
    )
