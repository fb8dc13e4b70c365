"""The Gaussian mechanism on samples whose size is fixed or limited.

# A sample of a fixed size, drawn without replacement: one pair that dominates all neighbors

D and D' differ in one example, which is in the sample with probability q. A is the output given that it is not in the
sample, B and B' are the outputs under D and D' given that it is. So M(D) = (1-q) A + q B and M(D') = (1-q) A + q B'.
The noise multiplier s is relative to the effect of replacing one example. H_a(P|Q) = sup_E (P(E) - a Q(E)) is the
hockey-stick divergence, and G(a) = H_a(N(1, s^2) | N(0, s^2)).

Theorem: H_a(M(D) | M(D')) <= f(a) for every a > 0, with

    f(a) = q G(1 + (a-1) / q)  for a >= 1,    f(a) = 1 - a + a f(1/a)  for a < 1.

Proof:
1. Take B, and exchange the example for one that is drawn from outside the sample. The result has the distribution of
   A. An exchange moves the sum by at most 1 (in units in which the noise is s), and so does the change from B to B'.
   Therefore H_a(B|A) and H_a(B|B') are at most G(a) for a >= 1, because H_a is jointly convex.
2. Let a >= 1 and c = 1 + q (a-1). By advanced joint convexity (Balle, Barthe and Gaboardi 2018, Theorem 2,
   https://arxiv.org/abs/1807.01647), H_c(M(D) | M(D')) = q H_a(B | (1-b) A + b B') with b = c/a. By joint convexity and
   step 1, this is at most q G(a).
3. For a < 1, H_a(P|Q) = 1 - a + a H_{1/a}(Q|P), and D' and D are neighbors too.

f is the profile of a pair of distributions. For a >= 1 it is that of (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2),
which is Poisson sampling with an example removed. For a < 1 it is that of the exchanged pair. It is convex, because the
slope at 1 rises by (1-q) (2 Phi(1/(2s)) - 1) >= 0. So there is a pair of this profile. It dominates every step, and
adaptive compositions of such pairs dominate those of the steps (Zhu, Dong and Wang 2022,
https://arxiv.org/abs/2106.08567). The pair's privacy loss has

    above 0:  the distribution of the loss of the removed example;
    below 0:  its mirror image, with the probabilities under the second distribution;
    at 0:     the probability (1-q) (2 Phi(1/(2s)) - 1).

The proof does not assume that the worst data sets for one step are the worst for many, which is false (Lebeda, Regehr,
Kamath and Steinke 2024, https://arxiv.org/abs/2405.20769): f bounds all neighbors at every a, in both orders.

f is attained at a >= 1: if one example contributes C and all others -C, and it is replaced by one that contributes -C,
then the outputs are the pair of the removed example. So no cost may be below that of these two data sets, which is the
cost of Poisson sampling at HALF the noise multiplier on the sum.

**Public coins.** `arithmetic` needs a cost that holds if all coins but those of the example are public. A batch has
the law of these coins: a uniform subset U of the others, in random rows; a uniform j in U; and a coin of rate q,
independent of both, by which the example takes the row of j. Given U and j, A is the sum over U, and in B and B' the
example, or the one that replaces it, has the place of j. Any two of them differ by at most 1, so the proof holds given
U and j too: what step 1 draws is j. The shift of a release is 1 / s.

# A truncated Poisson sample: coins, then a random subset if they choose too many

N examples, coins of rate q, at most n rows, noise multiplier s. K is the number of the other examples that a coin
chooses. The example takes part with probability q if K < n, and with q n / (K + 1) if K >= n ("full"), where it
displaces another one. So tau = P(K >= n) is the probability of "full", and given "full" the example takes part with

    p = (n / N) P(Bin(N, q) > n) / tau.

**Theorem.** Let h be the profile of Poisson sampling at rate q and noise multiplier s, in one direction of the
relation, and f that of a sample of a fixed size at rate p and noise multiplier s / 2. Then (1 - tau) h + tau f bounds
the step in this direction: if an example is nulled in its place, where its coin stays; if it is not there; and with the
h of replacing an example, if it is replaced.

Proof: "full" does not depend on the example. So H_a, which is jointly convex, is at most the mean of both cases.
1. Not full: no batch is cut, with or without the example. Given the coins of the others, this is one Poisson step.
2. Full: n examples take part. Let A be the output if the example is not among them: they are then a uniform n-subset of
   the others, at any K. B is the output if it is, with a uniform (n-1)-subset of the others, at any K. So the
   outputs are (1-p) A + p B and (1-p) A + p B', where B' has a null in place of the example, or another example. (If
   the example is not there, the second one is A.) Exchange the example in B for one that is drawn from outside the
   sample: this gives A, and moves the sum by at most 2, as does the exchange of B for B'. That is what the proof of
   a sample of a fixed size needs, with s / 2 for its noise multiplier.
The steps of a run are adaptive: each has this pair, whatever was released before. The pair of a mixture is that of a
public coin of probability tau, so its privacy loss is the mixture of both. exp((a - 1) D_a) is jointly convex too, and
gives the Renyi divergences. (dp-accounting, after https://arxiv.org/abs/2508.15089, has the pair of a replaced example
in place of f, which costs a little more.)

The cost of Poisson sampling would be too low: if all others contribute -1 and the example +1, a full batch moves by 2.

**Public coins.** `arithmetic` needs a cost that holds if all coins but those of the example are public. The coins of
the others here are not public, because K decides about p. But a full batch has the law of these coins: a uniform
n-subset U of the others, in random rows; a uniform j in U; and a coin of rate p, independent of both, by which the
example takes the row of j. Given U and j, A is the sum over U; in B the example has the place of j, and in B' the null.
Two of them differ by at most 2 (and the rounding of one exchanged row), so the proof above holds, and the shift of a
release is 2 / s. Both sums of the OTHER data set are among A and B, or A and B'.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from scipy import special

from dpx.accounting.checks import Relation
from dpx.accounting.loss import PrivacyLoss, in_deviations
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import (
    GaussianStep,
    Losses,
    Pmf,
    SampledGaussian,
    StepLoss,
    dominating_pmf,
    mix_pmfs,
    round_losses_to_buckets,
)

_ROUNDING = 1e-9  # relative, of the probabilities of binomials: they are rounded up by it
_NEVER = 1e-300  # a smaller probability may have rounded to 0, and changes no delta


def gaussian_loss(event: Any, relation: Relation, rate: float = 1.0) -> SampledGaussian:
    """The loss of a Gaussian event on a Poisson sample. Raises ValueError if its noise or the rate is out of range."""
    sigma = float(event.noise_multiplier)
    if not (0 <= sigma < math.inf and 0 < rate <= 1):
        raise ValueError(f"noise must be finite and at least 0, at a rate in (0, 1]; got {event} at rate {rate}")
    return SampledGaussian(sigma, rate, relation)


@dataclass(frozen=True)
class FixedSizeRelease(PrivacyLoss):
    """A Gaussian on a sample of a fixed size. event: dp-accounting's `SampledWithoutReplacementDpEvent`."""

    event: Any
    fresh = True

    @property
    def noise_multiplier(self) -> float:
        return self.event.event.noise_multiplier

    def step_loss(self, relation: Relation) -> StepLoss:
        if relation != "replace_one":
            raise ValueError(
                f'sampling without replacement has a known cost only under relation "replace_one", got {relation!r}: '
                "its batches have a fixed size, so an example cannot be added or removed"
            )
        step = gaussian_loss(self.event.event, relation, self.event.sample_size / self.event.source_dataset_size)
        if step.rate == 1:  # a Gaussian, whose noise multiplier is relative to the effect of adding an example
            return SampledGaussian(2 * step.noise_multiplier, 1.0, relation)
        return FixedSizeGaussian(step.noise_multiplier, step.rate)

    def largest_shift(self, relation: Relation) -> float:
        return in_deviations(1, self.noise_multiplier)  # the noise is relative to an exchange already

    @property
    def name(self) -> str:
        rate = self.event.sample_size / self.event.source_dataset_size
        return f"Gaussian on a sample without replacement of rate {rate:.6g}"


@dataclass(frozen=True)
class FixedSizeGaussian(GaussianStep):
    """The privacy loss of one step on a sample of a fixed size. It holds only for the relation "replace_one".

    noise_multiplier: s, relative to the effect of replacing one example. rate: q, the sample size divided by the data
    size. Less noise and a higher rate cost more: f falls with s and rises with q.
    """

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        return renyi.fixed_size_rdp(sigmas, rates, counts, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        removed = SampledGaussian(self.noise_multiplier, self.rate)
        first, losses = removed.grid_points(grid, tail, largest)
        last = first + len(losses) - 1
        upper, lower = (masses[1:] for masses in removed.masses(np.arange(last + 1) * grid))  # of losses above 0
        pmf = dominating_pmf(np.append(lower[::-1], upper), np.append(upper[::-1], lower), -last, grid)
        pmf.probabilities[last] += (1 - self.rate) * special.erf(1 / (np.sqrt(8) * self.noise_multiplier))
        return (pmf,)


@dataclass(frozen=True)
class TruncatedSampleGaussian(GaussianStep):
    """The privacy loss of one step on a truncated Poisson sample.

    noise_multiplier: s. rate: q, below 1. full: tau, in (0, 1]. rate_if_full: p.
    """

    full: float
    rate_if_full: float
    relation: Relation

    @property
    def is_noiseless(self) -> bool:
        return self.noise_multiplier / 2 < renyi.SMALLEST_NOISE

    @property
    def losses_by_fullness(self) -> tuple[SampledGaussian, FixedSizeGaussian]:
        """The privacy losses if the batch is not full without the example, and if it is full."""
        sampled = SampledGaussian(self.noise_multiplier, self.rate, self.relation)
        return sampled, FixedSizeGaussian(self.noise_multiplier / 2, self.rate_if_full)

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        full = renyi.FullTruncatedSample(self.full, self.rate_if_full)
        return renyi.truncated_poisson_rdp(sigmas, rates, counts, full, self.relation, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        sampled, full = self.losses_by_fullness
        (exchanged,) = full.pmfs(grid, tail=min(0.01, tail / self.full), largest=largest)
        each, shares = sampled.pmfs(grid, tail=tail, largest=largest), (1 - self.full, self.full)
        return tuple(mix_pmfs((pmf, exchanged), shares) for pmf in each)


def bucketed_truncated_losses(losses: Losses, buckets: int) -> Losses:
    """Merges the steps of each sampling into at most `buckets` distinct ones by rounding their noise down.

    A step with less noise dominates one with more, because noise can be added afterwards.
    """
    kinds = defaultdict(dict)
    for loss, count in losses.items():
        kind = replace(loss, noise_multiplier=1.0) if isinstance(loss, TruncatedSampleGaussian) else None
        kinds[kind][loss] = count
    rounded: dict[StepLoss, int] = {}
    for kind, steps in kinds.items():
        rounded |= steps if kind is None else round_losses_to_buckets(steps, TruncatedSampleGaussian, buckets)
    return rounded


@dataclass(frozen=True)
class TruncatedRelease(PrivacyLoss):
    """A Gaussian on a truncated Poisson sample. event: dp-accounting's `TruncatedSubsampledGaussianDpEvent`."""

    event: Any
    fresh = True

    @property
    def noise_multiplier(self) -> float:
        return self.event.noise_multiplier

    def step_loss(self, relation: Relation) -> StepLoss:
        event = self.event
        examples, most, rate = event.dataset_size, event.truncated_batch_size, float(event.sampling_probability)
        sigma = float(event.noise_multiplier)
        if not (1 <= most <= examples and 0 <= sigma < math.inf and 0 < rate <= 1):
            raise ValueError(
                "noise must be finite and at least 0, at a rate in (0, 1], on 1 to dataset_size rows; got " + str(event)
            )
        # P(Bin(n, q) >= k) by the incomplete beta function: bdtrc is wrong by a third where n and n q are above 10^7.
        k, n = np.array([most, most + 1.0]), np.array([examples - 1.0, examples])
        full, cut = np.where(k > n, 0.0, special.betainc(k, np.maximum(n - k + 1, 1), rate)) * (1 + _ROUNDING)
        if cut < _NEVER:  # no batch is cut
            return SampledGaussian(sigma, rate, relation)
        if rate == 1:  # a sample of fixed size
            return FixedSizeGaussian(sigma / 2, most / examples)
        if_full = min(rate, cut / full * most / examples * (1 + 3 * _ROUNDING))
        return TruncatedSampleGaussian(sigma, rate, min(1.0, full), if_full, relation)

    def largest_shift(self, relation: Relation) -> float:
        return in_deviations(2, self.noise_multiplier)  # an example may displace another one

    @property
    def name(self) -> str:
        rate, most = self.event.sampling_probability, self.event.truncated_batch_size
        return f"Gaussian on a Poisson sample of rate {rate:.6g}, cut at random to {most} rows"

    @property
    def untruncated(self) -> DpEvent:
        """The event of the same release on a Poisson sample that is not cut."""
        return PoissonSampledDpEvent(self.event.sampling_probability, GaussianDpEvent(self.noise_multiplier))
