"""One epoch of random allocation: a pair of distributions that dominates all neighbors, and its privacy loss.

t steps; one of them, uniformly random, has the example; the first j are released. In units of the clip norm, let v_i be
the contribution of the example at step i (|v_i| <= 1), s_i the noise multiplier, and g_i the sum without the example.

**Theorem.** P = (1/t) sum_{i <= t} N(e_i, diag(s^2)) and Q = N(0, diag(s^2)), on the first j coordinates, dominate the
epoch: P is with the example, Q is with a null in its place, or without it. (For one known order of the steps:
https://arxiv.org/abs/2602.17284, https://arxiv.org/abs/2605.07072.)

Proof: let I be the step of the example, and w_i ~ N(1[I = i], s_i^2), independent given I. So w has the law P, and with
a null the law Q. Given w, a run can be made without the example's steps: y_i = g_i + v_i w_i + s_i z_i, with
z_i ~ N(0, 1 - v_i v_i^T). Here v_i and g_i may depend on y_1 .. y_(i-1), and on the steps of all others, because these
are independent of I. Given I, y_i is g_i + 1[I = i] v_i and noise s_i N(0, 1), as in the run. So the run is
post-processing of w, in both directions. It is not true for replacing an example, because then two mixtures are
compared, or where the steps of the others depend on I, as in a permutation.

S = dP/dQ = (t - j) / t + (1/t) sum_{i <= j} u_i with independent u_i = exp((2 x_i - 1) / (2 s_i^2)) under Q. Its law
does not depend on the order of the steps. `ratio_laws` computes a law that is larger in the convex order, and so
dominates in both directions. Epochs with new steps compose, direction by direction. Less noise dominates, because noise
can be added to each w_i.

At a noise multiplier below 0.05, the example's step counts as known: that is the bill of one Gaussian release, because
divergences are jointly convex. It is more by less than ln t in an epsilon of 200.

The bill may be above that of Poisson sampling at the rate 1/t, at a small epsilon, so neither bounds the other.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dpx.accounting.checks import Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount, in_deviations
from dpx.accounting.pld import moments, ratio_laws, renyi
from dpx.accounting.pld.losses import Losses, Pmf, SampledGaussian, StepLoss, dominating_pmf
from dpx.accounting.pld.moments import Noise
from dpx.sampling.events import RandomAllocationDpEvent, count_multipliers

_KNOWN_BELOW = 0.05  # noise multiplier
_MOST_DISTINCT, _LEAST_RATIO = 4, 1.004  # noise multipliers of one epoch, and the ratio of those that count as one
_MOST_EPOCHS, _BUCKETS_EACH = 24, 4  # distinct epochs of a run, and of how many buckets one takes the place
_TAIL_DECADES = 20  # a law is computed for a tail of 1e-20, 1e-40, ..., and kept


class RatioLaw(NamedTuple):
    """The law of S: `values`, rising, with Q-probabilities `masses`, float64 (n,) each.

    zero: the Q-probability of 0. infinity: the P-probability of infinity.
    """

    values: np.ndarray
    masses: np.ndarray
    zero: float
    infinity: float


@dataclass(frozen=True)
class AllocatedGaussians(StepLoss):
    """The privacy loss of one epoch. noise: pairs (noise multiplier, number of steps), rising, of the released steps.

    steps_per_epoch: t, int, at least the number of released steps.
    """

    noise: Noise
    steps_per_epoch: int

    @property
    def unbounded(self) -> bool:
        return self.noise[0][0] < renyi.SMALLEST_NOISE

    @property
    def released(self) -> int:
        return sum(count for _, count in self.noise)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return moments.allocation_renyi(self.noise, self.steps_per_epoch, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        decades = min(280, _TAIL_DECADES * math.ceil(-math.log10(max(tail, 1e-300)) / _TAIL_DECADES))
        law = _ratio_law(self.noise, self.steps_per_epoch, decades)
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
def _ratio_law(noise: Noise, steps_per_epoch: int, decades: int) -> RatioLaw:
    """A law of S that is at least the true one in the convex order, with tails of 10^-decades."""
    tail = 10.0**-decades
    law = None
    for noise_multiplier, count in noise:
        group = ratio_laws.law_of_copies(ratio_laws.likelihood_ratio_law(noise_multiplier, tail), count, tail)
        law = group if law is None else ratio_laws.law_of_sum(law, group, tail)
    assert law is not None
    others = steps_per_epoch - law.mean
    values, masses, zero = (others + law.values) / steps_per_epoch, law.masses, law.zero
    if others:
        values, masses, zero = np.append(others / steps_per_epoch, values), np.append(zero, masses), 0.0
    return RatioLaw(values, masses, zero, law.lost / steps_per_epoch)


def few_multipliers(noise: Noise) -> Noise:
    """At most 4 noise multipliers, each rounded down by as little as that allows."""
    values, counts = (np.array(column) for column in zip(*noise, strict=True))
    ratio = max(_LEAST_RATIO, (values[-1] / values[0]) ** (1 / _MOST_DISTINCT) * (1 + 1e-9))
    bins = np.floor(np.log(values / values[0]) / math.log(ratio))
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    return tuple(zip(values[starts].tolist(), np.add.reduceat(counts, starts).tolist(), strict=True))


def round_to_few_epochs(losses: Losses, buckets: int) -> Losses:
    """`losses`, but of epochs with the same numbers of steps few are distinct: the others are billed with less noise.

    They are at most 24, and at most a quarter of `buckets`, because each takes the time of many sampled Gaussians.
    """
    most = min(_MOST_EPOCHS, -(-buckets // _BUCKETS_EACH))
    kinds = defaultdict(list)
    for loss in losses:
        if isinstance(loss, AllocatedGaussians):
            kinds[loss.steps_per_epoch, loss.released].append(loss)
    few: dict[StepLoss, int] = defaultdict(int, losses)
    for epochs in kinds.values():
        if len(epochs) <= most:
            continue
        costs = np.log([sum(count / s**2 for s, count in loss.noise) for loss in epochs])
        bins = np.floor((costs - costs.min()) / (np.ptp(costs) + 1e-300) * (most - 1e-9))
        for number in np.unique(bins):
            group = [epochs[place] for place in np.flatnonzero(bins == number)]
            count = sum(few.pop(loss) for loss in group)
            few[replace(group[0], noise=_least_noise(loss.noise for loss in group))] += count
    return few


def _least_noise(noises: Iterable[Noise]) -> Noise:
    """The least of the noise multipliers of epochs of equal length, one by one in rising order."""
    least = np.inf
    for noise in noises:
        values, counts = zip(*noise, strict=True)
        least = np.minimum(least, np.repeat(values, counts))
    return few_multipliers(count_multipliers(np.asarray(least)))


@dataclass(frozen=True)
class Allocation(PrivacyLoss):
    """One epoch of random allocation. event: a `RandomAllocationDpEvent`."""

    event: RandomAllocationDpEvent
    fresh = True

    @property
    def independent(self) -> bool:
        return True

    @property
    def released(self) -> ReleaseCount:
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
        released = self.released.most
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
        part = "" if self.released.most == steps else f"the first {self.released.most} steps of "
        which = f"{part}an epoch of {steps} Gaussians, of which a random one has the example"
        return f"{which}, noise multiplier {noise}"
