"""The Gaussian mechanism on a sample of fixed size, drawn without replacement: one pair that dominates all neighbors.

D and D' differ in one example, which is in the sample with probability q. A is the output given that it is not in the
sample, B and B' are the outputs under D and D' given that it is. So M(D) = (1-q) A + q B and M(D') = (1-q) A + q B'.
The noise multiplier s is relative to the effect of replacing one example. H_a(P|Q) = sup_E (P(E) - a Q(E)) is the
hockey-stick divergence, and G(a) = H_a(N(1, s^2) | N(0, s^2)).

Theorem: H_a(M(D) | M(D')) <= f(a) for every a > 0, with

    f(a) = q G(1 + (a-1) / q)  for a >= 1,    f(a) = 1 - a + a f(1/a)  for a < 1.

Proof:
1. Take B, and exchange the example for one that is drawn from outside the sample. The result has the distribution of
   A. An exchange moves the sum by at most 1 (in units in which the noise is s), and so it is from B to B'. Therefore
   H_a(B|A) and H_a(B|B') are at most G(a) for a >= 1, because H_a is jointly convex.
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

It is not assumed that the data sets which are worst for one step are worst for many, which is false (Lebeda, Regehr,
Kamath and Steinke 2024, https://arxiv.org/abs/2405.20769), because f bounds all neighbors at every a, in both orders.

f is attained at a >= 1: if one example contributes C and all others -C, and it is replaced by one of -C, then the
outputs are the pair of the removed example. So no bill may be below the one of these two data sets, which is the bill
of Poisson sampling at HALF the noise multiplier on the sum.

**Public coins.** `arithmetic` needs a bill that holds if all coins but those of the example are public. A batch has
the law of these coins: a uniform subset U of the others, in random rows; a uniform j in U; and a coin of rate q,
independent of both, by which the example takes the row of j. Given U and j, A is the sum over U, and in B and B' the
example, or the one that replaces it, has the place of j. Any two of them differ by at most 1, so the proof holds given
U and j too: what step 1 draws is j. The shift of a release is 1 / s.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from dpx.accounting import renyi
from dpx.accounting.pld.losses import Pmf, SampledGaussian, dominating_pmf


@dataclass(frozen=True)
class FixedSizeGaussian:
    """One such step, under the relation "replace_one"; no other relation is true for it.

    noise_multiplier: relative to the effect of replacing one example, s. rate: the sample size divided by the data
    size, q. Less noise and a higher rate cost more: f falls with s and rises with q.
    """

    noise_multiplier: float
    rate: float

    @property
    def unbounded(self) -> bool:
        return self.noise_multiplier < renyi.SMALLEST_NOISE

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        return self.schedule_renyi(np.array([self.noise_multiplier]), np.array([self.rate]), np.ones(1), orders)

    def schedule_renyi(
        self, sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray
    ) -> np.ndarray:
        """The divergences of many such steps together, float64 (orders,); the other arrays are (T,)."""
        return renyi.fixed_size_rdp(sigmas, rates, counts, orders)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        removed = SampledGaussian(self.noise_multiplier, self.rate)
        first, losses = removed.grid_points(grid, tail, largest)
        last = first + len(losses) - 1
        upper, lower = (masses[1:] for masses in removed.masses(np.arange(last + 1) * grid))  # of losses above 0
        pmf = dominating_pmf(np.append(lower[::-1], upper), np.append(upper[::-1], lower), -last, grid)
        pmf.probabilities[last] += (1 - self.rate) * special.erf(1 / (np.sqrt(8) * self.noise_multiplier))
        return (pmf,)
