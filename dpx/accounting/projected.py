"""Gaussian releases of a clipped sum that a fresh random Gaussian matrix projects first: a mixture over its stretch.

A clipped v becomes A^T v / sqrt(p), A a public d x p matrix of standard normals drawn afresh, independently of v. Its
length is |v| S with S^2 ~ chi^2_p / p, so, the matrix given, the release is a Gaussian of sensitivity S C. The pair of
outputs that dominates all neighbors is S beside the (sampled) Gaussian of noise multiplier sigma / S, and its privacy
loss is the mixture of theirs. The mean of S^2 is 1, but S has no bound: billing sensitivity C would be too little.
"""

import math
from dataclasses import dataclass
from typing import Any

import attrs
import dp_accounting
import numpy as np
from scipy import special

from dpx.accounting import renyi
from dpx.accounting.checks import Relation
from dpx.accounting.events import flatten, register
from dpx.accounting.pld.buckets import bucketed
from dpx.accounting.pld.losses import Pmf, SampledGaussian

_DISTINCT = 64  # noise multipliers; of more, some are rounded down
_STRETCHES = 160  # bins at most,
_RATIO = 1.004  # and their width where fewer suffice
_LOWEST = 0.1  # the quantile below which all stretches are one bin
_RENYI_TAIL = 1e-18


@attrs.frozen
class ProjectedGaussianDpEvent(dp_accounting.DpEvent):
    """One release of noise multiplier sigma, on a Poisson sample, after a fresh Gaussian projection of the clipped sum.

    rank: p; of `blocks` blocks of coordinates projected apart, the smallest. dp-accounting's accountants refuse it.
    """

    noise_multiplier: float
    sampling_probability: float
    rank: int
    blocks: int = 1


def projected(event: dp_accounting.DpEvent, *, rank: int, blocks: int = 1) -> dp_accounting.DpEvent:
    """`event` with a fresh projection before each of its releases, which must be (Poisson-sampled) Gaussian.

    More than 64 distinct noise multipliers are rounded down to as many.
    """
    flat = flatten(event)
    if not flat.private:
        return dp_accounting.NonPrivateDpEvent()
    if not flat.gaussian:
        raise ValueError(
            f"a fresh projection is billed before Gaussian and Poisson-sampled Gaussian events, got {event}"
        )
    losses = flat.losses("add_or_remove")
    if not losses:
        return dp_accounting.NoOpDpEvent()
    sigmas, rates = np.array([(loss.noise_multiplier, loss.rate) for loss in losses]).T
    steps = bucketed(sigmas, rates, np.array(list(losses.values())), _DISTINCT)
    rows = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)
    events = [(ProjectedGaussianDpEvent(s, q, rank, blocks), n) for s, q, n in rows]
    repeated: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(one, n) if n > 1 else one for one, n in events
    ]
    return repeated[0] if len(repeated) == 1 else dp_accounting.ComposedDpEvent(repeated)


@dataclass(frozen=True)
class ProjectedGaussian:
    """The privacy loss of one such release.

    Of one block the mixture is exact, up to binning the stretches upwards. Of several, an example may lie in any mix
    of them: what is billed is the Chernoff bound on the stretch in the smallest, which holds for every mix. (The exact
    mixture of the smallest does not: where delta is large, a stretch that varies less costs more.)
    """

    noise_multiplier: float
    rate: float
    rank: int
    blocks: int

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """ln E exp((a - 1) D_a(S)) / (a - 1), the largest stretches by Chernoff; inf where that has no bound."""
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return np.full(len(orders), np.inf)
        stretches, shares, _ = self._stretches(_RENYI_TAIL)
        parts = renyi.sampled_gaussian(
            self.noise_multiplier / stretches, np.full(len(stretches), self.rate), orders
        )  # (stretches, orders)
        growth = orders * (orders - 1) / (2 * self.noise_multiplier**2)  # (a - 1) D_a = growth S^2 at most
        square = stretches[-1] ** 2
        beyond = np.where(
            growth < self.rank / 2 * (1 - 1 / square), growth * square + self._log_chernoff(stretches[-1]), np.inf
        )
        with np.errstate(divide="ignore", over="ignore"):  # scipy before 1.16 says "overflow" beside an inf
            logs = np.vstack([np.log(shares)[:, None] + (orders - 1) * parts, beyond])
            return special.logsumexp(logs, axis=0) / (orders - 1)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        stretches, shares, beyond = self._stretches(tail / 2)
        found = [
            SampledGaussian(self.noise_multiplier / stretch, self.rate).pmfs(grid, tail=tail / 2, largest=largest)
            for stretch in stretches.tolist()
        ]
        return tuple(_mixture(pmfs, shares, beyond) for pmfs in zip(*found, strict=True))

    def _stretches(self, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Increasing stretches S, each the upper end of a bin, their shares, and the probability of larger ones.

        The largest is where Laurent and Massart's bound is `tail`.
        """
        excess = -2 * math.log(tail) / self.rank
        most = math.sqrt(1 + math.sqrt(2 * excess) + excess)
        least = 1.0
        if self.blocks == 1:
            least = math.sqrt(2 / self.rank * float(special.gammaincinv(self.rank / 2, _LOWEST)))
        count = min(_STRETCHES, math.ceil(math.log(most / least) / math.log(_RATIO)))
        ends = np.geomspace(least, most, count + 1)
        larger = self._larger(ends)
        return ends, -np.diff(larger, prepend=1.0), float(larger[-1])

    def _larger(self, stretches: np.ndarray) -> np.ndarray:
        """P(S > stretch)."""
        if self.blocks == 1:
            return special.gammaincc(self.rank / 2, self.rank / 2 * stretches**2)
        return np.exp(self._log_chernoff(stretches))

    def _log_chernoff(self, stretches):
        """ln of the bound on P(S > stretch) for stretches of at least 1, for every mix of blocks."""
        return -self.rank / 2 * (stretches**2 - 1 - 2 * np.log(stretches))


def _mixture(pmfs: tuple[Pmf, ...], shares: np.ndarray, infinity: float) -> Pmf:
    first = min(pmf.first for pmf in pmfs)
    total = np.zeros(max(pmf.first + len(pmf.probabilities) for pmf in pmfs) - first)
    for pmf, share in zip(pmfs, shares.tolist(), strict=True):
        start = pmf.first - first
        total[start : start + len(pmf.probabilities)] += share * pmf.probabilities
        infinity += share * pmf.infinity
    return Pmf(first, total, infinity)


def _read(event: Any, relation: Relation) -> ProjectedGaussian:
    if relation == "replace_one":
        raise ValueError(f'{event} is billed under "add_or_remove" and "zero_out" only, got relation {relation!r}')
    return ProjectedGaussian(event.noise_multiplier, event.sampling_probability, event.rank, event.blocks)


register(ProjectedGaussianDpEvent, _read)
