"""The cost of releasing a clipped sum after a fresh Gaussian projection: a mixture over the projection's stretch.

A clipped v becomes A^T v / sqrt(p). A is a public d x p matrix of standard normals, drawn afresh and independently of
v. The result has length |v| S with S^2 ~ chi^2_p / p. So, given the matrix, the release is a Gaussian of sensitivity S
C, where C is the clip norm. The pair that dominates all neighbors is S together with the (sampled) Gaussian of noise
multiplier sigma / S, so its privacy loss is the mixture of the losses of these Gaussians over S. The mean of S^2 is 1,
but S is unbounded, so a cost at sensitivity C would be too low.

**Pairs of normals that are bad for the other data set** (`far` in `arithmetic.py`). Let the matrix be public, and all
coins but the example's. Then a release has two possible values, S / sigma deviations apart. S exceeds a certain stretch
with probability at most 1e-50, and such releases count as bad too: the 1% by which the theorem's t exceeds the
probability of bad pairs is more than 1e-50 for each release. So `largest_shift` is that stretch / sigma.
"""

import math
from dataclasses import dataclass

import attrs
import dp_accounting
import numpy as np
from scipy import special

from dpx.accounting.checks import Relation
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import PrivacyLoss, in_deviations
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import Pmf, SampledGaussian, StepLoss, bucketed_steps, mix_pmfs
from dpx.sampling.schemes import compose_events

# Costs are upper bounds for any of these constants: noise is rounded down, stretches are rounded up, tails are counted.
_DISTINCT_NOISE_MULTIPLIERS = 64  # each is a mixture of up to _MOST_STRETCHES privacy loss distributions
_MOST_STRETCHES = 160  # bins of the stretch
_STRETCH_RATIO = 1.004  # between neighboring bins, if that needs fewer bins
_LOWEST_QUANTILE = 0.1  # all stretches below this quantile are one bin
_SHIFT_TAIL = 1e-50  # probability of a stretch beyond `largest_shift`
_RENYI_TAIL = 1e-18  # probability of the largest stretches, for which the Renyi divergences use a Chernoff bound


@attrs.frozen
class ProjectedGaussianDpEvent(dp_accounting.DpEvent, PrivacyLoss):
    """One Gaussian release on a Poisson sample, after a fresh Gaussian projection of the clipped sum.

    noise_multiplier: sigma. sampling_probability: in (0, 1]. rank: p, int, the smallest rank of any block. blocks: int,
        how many blocks of coordinates are projected separately. dp-accounting's accountants refuse this event.
    """

    noise_multiplier: float
    sampling_probability: float
    rank: int
    blocks: int = 1

    @property
    def rate(self) -> float:
        return self.sampling_probability

    def at_rate(self, rate: float) -> dp_accounting.DpEvent:
        return attrs.evolve(self, sampling_probability=rate)

    def largest_shift(self, relation: Relation) -> float:
        """The most that one example moves a release, in deviations of its noise, except with probability 1e-50."""
        effect = 2 if relation == "replace_one" else 1
        return in_deviations(effect * _stretch_quantile_bound(_SHIFT_TAIL, self.rank), self.noise_multiplier)

    def step_loss(self, relation: Relation) -> "ProjectedGaussian":
        if relation == "replace_one":
            raise ValueError(f'{self} has a cost only under "add_or_remove" and "zero_out", got relation {relation!r}')
        sigma = min(self.noise_multiplier, renyi.LARGEST_NOISE)
        return ProjectedGaussian(sigma, self.sampling_probability, self.rank, self.blocks)


def _stretch_quantile_bound(tail: float, rank: int) -> float:
    """Returns a stretch that is exceeded with probability at most `tail`, even with several blocks.

    The bound is by Laurent and Massart 2000 (https://doi.org/10.1214/aos/1015957395). `_log_chernoff` is tighter.
    """
    exponent = -2 * math.log(tail) / rank
    return math.sqrt(1 + math.sqrt(2 * exponent) + exponent)


def event_with_projection(event: dp_accounting.DpEvent, *, rank: int, blocks: int = 1) -> dp_accounting.DpEvent:
    """Adds to `event` a fresh Gaussian projection before each of its releases.

    rank: int, the smallest rank of any block. blocks: int, how many blocks are projected separately. If there are more
        than 64 distinct noise multipliers, rounds them down to 64. Raises ValueError unless every release is a
        Gaussian, on all data or on a Poisson sample.
    """
    flat = from_event(event)
    if not flat.all_noisy:
        return dp_accounting.NonPrivateDpEvent()
    if not flat.all_gaussian:
        raise ValueError(f"a fresh projection has a known cost before (Poisson-sampled) Gaussians only, got {event}")
    losses = flat.losses("add_or_remove")
    if not losses:
        return dp_accounting.NoOpDpEvent()
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in losses]).T
    steps = bucketed_steps(sigmas, rates, np.array(list(losses.values())), _DISTINCT_NOISE_MULTIPLIERS)
    columns = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)
    return compose_events(
        (ProjectedGaussianDpEvent(sigma, rate, rank, blocks), count) for sigma, rate, count in columns
    )


@dataclass(frozen=True)
class ProjectedGaussian(StepLoss):
    """The privacy loss of one projected Gaussian release.

    With one block, the mixture is exact, except that stretches are rounded up to the end of their bin. With several, an
    example's norm may be split among them in any proportion. The cost then uses a Chernoff bound on the stretch of the
    smallest block, which holds for every proportion. (The exact mixture of the smallest block does not: at large delta,
    a stretch that varies less costs more.)
    """

    noise_multiplier: float
    rate: float
    rank: int
    blocks: int

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Returns ln E exp((a - 1) D_a(S)) / (a - 1), float64 (orders,), with a Chernoff bound for large stretches.

        The result is inf at orders where that bound does not exist.
        """
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return np.full(len(orders), np.inf)
        stretches, shares, _ = self._binned_stretch_distribution(_RENYI_TAIL)
        rates = np.full(len(stretches), self.rate)
        divergences = renyi.gaussian_rdp(self.noise_multiplier / stretches, rates, orders)  # (stretches, orders)
        growth = orders * (orders - 1) / (2 * self.noise_multiplier**2)  # (a - 1) D_a = growth S^2 at most
        square = stretches[-1] ** 2
        exists = growth < self.rank / 2 * (1 - 1 / square)
        log_beyond = np.where(exists, growth * square + self._log_chernoff(stretches[-1]), np.inf)
        with np.errstate(divide="ignore", over="ignore"):  # scipy before 1.16 says "overflow" beside an inf
            shares = np.maximum(shares, 1e-300)  # 0 times an infinite divergence would be NaN
            logs = np.vstack([np.log(shares)[:, None] + (orders - 1) * divergences, log_beyond])
            return (np.maximum(special.logsumexp(logs, axis=0), 0) + renyi.MOMENT_ROUNDING) / (orders - 1)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        stretches, shares, beyond = self._binned_stretch_distribution(tail / 2)
        by_stretch = [
            SampledGaussian(self.noise_multiplier / stretch, self.rate).pmfs(grid, tail=tail / 2, largest=largest)
            for stretch in stretches.tolist()
        ]
        return tuple(mix_pmfs(pmfs, shares.tolist(), beyond) for pmfs in zip(*by_stretch, strict=True))

    def _binned_stretch_distribution(self, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns bins of stretches: their rising upper ends S, their probabilities, and that of larger stretches.

        Both arrays are float64 (bins + 1,). The probability of larger stretches is at most `tail`.
        """
        largest = _stretch_quantile_bound(tail, self.rank)
        smallest = 1.0
        if self.blocks == 1:
            smallest = math.sqrt(2 / self.rank * float(special.gammaincinv(self.rank / 2, _LOWEST_QUANTILE)))
        bins = min(_MOST_STRETCHES, math.ceil(math.log(largest / smallest) / math.log(_STRETCH_RATIO)))
        ends = np.geomspace(smallest, largest, bins + 1)
        larger = self._stretch_tail_probability(ends)
        return ends, -np.diff(larger, prepend=1.0), float(larger[-1])

    def _stretch_tail_probability(self, stretches: np.ndarray) -> np.ndarray:
        """Returns P(S > stretch) for each stretch, float64 (n,), or a bound on it if there are several blocks."""
        if self.blocks == 1:
            return special.gammaincc(self.rank / 2, self.rank / 2 * stretches**2)
        return np.exp(self._log_chernoff(stretches))

    def _log_chernoff(self, stretches):
        """Returns ln of a bound on P(S > stretch), for stretches of at least 1 and any split among the blocks."""
        return -self.rank / 2 * (stretches**2 - 1 - 2 * np.log(stretches))
