"""The Gaussian mechanism on a truncated Poisson sample: coins, then a random subset where they choose too many.

N examples, coins of rate q, at most n rows, noise multiplier s. K is the number of the other examples that a coin
chooses. The example takes part with probability q if K < n, and with q n / (K + 1) if K >= n ("full"), where it
displaces another one. So tau = P(K >= n) is the probability of "full", and given "full" the example takes part with

    p = (n / N) P(Bin(N, q) > n) / tau.

**Theorem.** Let h be the profile of Poisson sampling at rate q and noise multiplier s, in one direction of the
relation, and f that of `fixed_size` at rate p and noise multiplier s / 2. Then (1 - tau) h + tau f bounds the step in
this direction: if an example is nulled in its place, where its coin stays; if it is not there; and with the h of
replacing an example, if it is replaced.

Proof: "full" does not depend on the example. So H_a, which is jointly convex, is at most the mean of both cases.
1. Not full: no batch is cut, with or without the example. Given the coins of the others, this is one Poisson step.
2. Full: n examples take part. Let A be the output if the example is not among them, which then are a uniform n-subset
   of the others, at any K. B is the output if it is, beside a uniform (n-1)-subset of the others, at any K. So the
   outputs are (1-p) A + p B and (1-p) A + p B', where B' has a null in place of the example, or another example. (If
   the example is not there, the second one is A.) Exchange the example in B for one that is drawn from outside the
   sample: this gives A, and moves the sum by at most 2, as does the exchange of B for B'. That is what the proof of
   `fixed_size` needs, with s / 2 for its noise multiplier.
The steps of a run are adaptive: each has this pair, whatever was released before. The pair of a mixture is that of a
public coin of probability tau, so its privacy loss is the mixture of both. exp((a - 1) D_a) is jointly convex too, and
gives the Renyi divergences. (dp-accounting, after https://arxiv.org/abs/2508.15089, has the pair of a replaced example
in place of f, which costs a little more.)

Poisson's bill would be below the truth: where all others contribute -1 and the example +1, a full batch moves by 2.

**Public coins.** `arithmetic` needs a bill that holds if all coins but those of the example are public. The coins of
the others here are not such ones, because K decides about p. But a full batch has the law of these coins: a uniform
n-subset U of the others, in random rows; a uniform j in U; and a coin of rate p, independent of both, by which the
example takes the row of j. Given U and j, A is the sum over U; in B the example has the place of j, and in B' the null.
Two of them differ by at most 2 (and the rounding of one exchanged row), so the proof above holds, and the shift of a
release is 2 / s. Both sums of the OTHER data set are among A and B, or A and B'.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from scipy import special

from dpx.accounting import renyi
from dpx.accounting.checks import Relation
from dpx.accounting.fixed_size import FixedSizeGaussian
from dpx.accounting.pld.buckets import round_to_few
from dpx.accounting.pld.losses import Losses, Pmf, SampledGaussian, StepLoss
from dpx.accounting.releases import count_releases, register
from dpx.sampling.events import composition

_ROUNDING = 1e-9  # relative, of the probabilities of binomials: they are rounded up by it


@dataclass(frozen=True)
class TruncatedGaussian:
    """The privacy loss of one such step.

    noise_multiplier: s. rate: q, below 1. full: tau, in (0, 1]. rate_if_full: p.
    """

    noise_multiplier: float
    rate: float
    full: float
    rate_if_full: float
    relation: Relation

    @property
    def unbounded(self) -> bool:
        return self.noise_multiplier / 2 < renyi.SMALLEST_NOISE

    @property
    def cases(self) -> tuple[SampledGaussian, FixedSizeGaussian]:
        """The privacy loss if the batch is not full without the example, and if it is."""
        sampled = SampledGaussian(self.noise_multiplier, self.rate, self.relation)
        return sampled, FixedSizeGaussian(self.noise_multiplier / 2, self.rate_if_full)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return self.schedule_renyi(np.array([self.noise_multiplier]), np.array([self.rate]), np.ones(1), orders)

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        """The divergences of many such steps together, float64 (orders,); the other arrays are (T,)."""
        full = renyi.Full(self.full, self.rate_if_full)
        return renyi.truncated_rdp(sigmas, rates, counts, full, self.relation, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        sampled, full = self.cases
        (exchanged,) = full.pmfs(grid, tail=min(0.01, tail / self.full), largest=largest)
        return tuple(_mixed(pmf, exchanged, self.full) for pmf in sampled.pmfs(grid, tail=tail, largest=largest))


def _mixed(one: Pmf, other: Pmf, share: float) -> Pmf:
    """The pmf of a loss that is that of `other` with the probability `share`."""
    first = min(one.first, other.first)
    last = max(pmf.first + len(pmf.probabilities) for pmf in (one, other))
    probabilities = np.zeros(last - first)
    for pmf, weight in ((one, 1 - share), (other, share)):
        start = pmf.first - first
        probabilities[start : start + len(pmf.probabilities)] += weight * pmf.probabilities
    return Pmf(first, probabilities, (1 - share) * one.infinity + share * other.infinity)


def round_to_few_truncated(losses: Losses, buckets: int) -> Losses:
    """`losses`, but of the steps of one sampling at most `buckets` are distinct; the others are billed with less noise.

    A step with less noise dominates, because noise can be added afterwards.
    """
    kinds = defaultdict(dict)
    for loss, count in losses.items():
        kind = replace(loss, noise_multiplier=1.0) if isinstance(loss, TruncatedGaussian) else None
        kinds[kind][loss] = count
    rounded: dict[StepLoss, int] = {}
    for kind, steps in kinds.items():
        rounded |= steps if kind is None else round_to_few(steps, TruncatedGaussian, buckets)
    return rounded


def without_truncation(event: DpEvent) -> DpEvent:
    """The event of the same releases on Poisson samples that are not cut: to say what the truncation costs."""

    def poisson(release):
        if not isinstance(release, TruncatedSubsampledGaussianDpEvent):
            return release
        return PoissonSampledDpEvent(release.sampling_probability, GaussianDpEvent(release.noise_multiplier))

    return composition((poisson(release), count) for release, count in count_releases(event).counts.items())


def _read(event: TruncatedSubsampledGaussianDpEvent, relation: Relation) -> StepLoss:
    examples, most, rate = event.dataset_size, event.truncated_batch_size, float(event.sampling_probability)
    sigma = float(event.noise_multiplier)
    if not (1 <= most <= examples and 0 <= sigma < math.inf and 0 < rate <= 1):
        raise ValueError(
            "noise must be finite and at least 0, at a rate in (0, 1], on 1 to dataset_size rows; got " + str(event)
        )
    # P(Bin(n, q) >= k) by the incomplete beta function: bdtrc is wrong by up to a third where n and n q are above 10^7.
    k, n = np.array([most, most + 1.0]), np.array([examples - 1.0, examples])
    full, cut = np.where(k > n, 0.0, special.betainc(k, np.maximum(n - k + 1, 1), rate)) * (1 + _ROUNDING)
    if full <= 0:  # the probability of a batch that is cut is below 1e-300
        return SampledGaussian(sigma, rate, relation)
    if rate == 1:  # a sample of fixed size
        return FixedSizeGaussian(sigma / 2, most / examples)
    if_full = min(rate, cut / full * most / examples * (1 + 3 * _ROUNDING))
    return TruncatedGaussian(sigma, rate, min(1.0, full), if_full, relation)


register(TruncatedSubsampledGaussianDpEvent, _read)
