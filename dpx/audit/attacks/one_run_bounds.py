"""Lower bounds from one run: m canaries, each a member with probability 1/2, and k guesses of which v are right.

Each function rejects a hypothesis about the mechanism if v right guesses would be too rare under it, or returns the
probability itself. All hold for canaries that depend on each other in any way, because the coins are independent.

`steinke_p_value` (Steinke, Nasr and Jagielski 2023, https://arxiv.org/abs/2305.08846): for any (epsilon, delta).

`trade_off_rejected` (Mahloujifar, Melis and Chaudhuri 2024, https://arxiv.org/abs/2410.22235): for any symmetric
trade-off function f, here that of two Gaussians. Proof: let p_i be the probability of i right guesses, and choose one
of the m canaries at random. With probability r_i = sum_{l>=i} (l/m) p_l, it is guessed right and i or more guesses are
right. If its coin is turned but the guesses stay, it is guessed wrong, and one guess fewer is right; this event has
probability h_{i-1}, where h_i = sum_{l>=i} ((k-l)/m) p_l. A turned coin changes the probability of an event as f
allows, so r_i <= 1 - f(h_{i-1}), by Jensen's inequality also on average over canaries and coins. From
P(v or more are right) = s, the recursion

    r_v = s v/m,  h_v = s (k-v)/m,  h_{i-1} = max(h_i, g(r_i)),  r_{i-1} = r_i + (i-1)/(k-i+1) (h_{i-1} - h_i),

with g the inverse of 1 - f, gives the smallest r_0 + h_0 that the inequalities allow. But r_0 + h_0 = k/m. So if the
recursion ends above k/m, then v or more right guesses have a probability below s. (It is the smallest: by induction,
no p that the inequalities allow has a smaller r_i, a smaller r_i + h_i or a smaller r_i - i/(k-i) h_i.)
"""

import numpy as np
from scipy import special, stats


def steinke_p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of `right` or more right guesses under (epsilon, delta)-differential privacy.

    P(Binomial(k, p) >= v) + 2 m delta max_{i>=1} P(v - i <= Binomial(k, p) < v) / i,  p = e^epsilon / (1 + e^epsilon)
    """
    probability = float(special.expit(epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, probability))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, probability))
    likely = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * likely)


def trade_off_rejected(
    right: np.ndarray, guesses: np.ndarray, canaries: int, mus: np.ndarray, miss: np.ndarray
) -> np.ndarray:
    """Whether `right` or more right guesses have a probability below `miss` under mu-GDP, bool (tests,).

    right, guesses: int (tests,). mus, miss: float (tests,). All tests run side by side.
    """
    wrong_share = (guesses - right) / canaries
    r, h = miss * right / canaries, miss * wrong_share
    for i in range(int(right.max(initial=0)), 0, -1):
        started = i <= right
        # g is the inverse of 1 - f, for f(a) = Phi(Phi^-1(1 - a) - mu): g(r) = Phi(Phi^-1(r) - mu)
        least = special.ndtr(special.ndtri(np.minimum(r, 1.0)) - mus)
        longer = np.where(started, np.maximum(h, least), h)
        r, h = r + (i - 1) / np.maximum(guesses - i + 1, 1) * (longer - h), longer
    return r + h > guesses / canaries
