"""A privacy filter: a budget for releases that are chosen one after another, each based on the earlier ones.

A composed privacy loss distribution bounds releases whose events are fixed in advance. It is no bound if an event
depends on earlier releases: after a large privacy loss, one may choose releases that make it larger, and after a small
one, releases whose loss is rarely large but then huge. `tests/test_filters.py` has such a case. So a filter counts all
releases in one unit, in which such a choice gains nothing.

**The unit.** A release is counted by the mu and d for which its delta(epsilon) is at most d + (1 - d) delta_mu(epsilon)
at every epsilon >= 0, where delta_mu is that of N(0, 1) against N(mu, 1). A profile covers both directions, and a pair
of Gaussians is symmetric, so the same holds at every epsilon < 0. By Blackwell's theorem (Dong, Roth and Su 2022,
https://arxiv.org/abs/1905.02383, Theorem 2.10; Vadhan and Zhang 2023, https://arxiv.org/abs/2207.08335, for a run
whose steps alternate with other releases) the release is then a random function of two things: a coin that shows
everything with probability d, and one sample of N(0, 1) or of N(mu, 1). `dominating_mu` finds mu.

**The filter.** Releases are allowed while sum mu_i^2 <= B and sum d_i <= S. Then all of them together are
(epsilon, delta)-private if a Gaussian of mu = sqrt(B) is (epsilon, delta - S)-private. Proof: the sum of the samples,
each divided by its deviation, is a Brownian motion that is read at the times sum mu_i^2, each chosen from what was read
before. Reading the whole path up to B reveals no more than its end, which is one Gaussian of mu = sqrt(B). The coins
show something with a probability of at most S. (Smith and Thakurta 2022, https://arxiv.org/abs/2210.17520; Koskela,
Tobaben and Honkela 2023, https://arxiv.org/abs/2209.15596.)

**Pure releases.** One with epsilon e and delta 0 counts as mu = 2 Phi^-1(1 / (1 + exp(-e))), which costs several times
e. If a share E of epsilon were reserved for them in advance, their epsilons could simply add up to it: on every path,
the ratio of their probabilities is at most e^E, and the filter holds for the rest at epsilon - E. But if the output of
a Gaussian may decide whether the rest goes to Gaussians or to pure releases, delta is exceeded by 60%
(`tests/test_filters.py`). So the smaller of both costs is no bound.

**Parts.** If a partition of the data is public, a release about one part counts only for its members. So each part has
its own sums, which include the releases about all data.

**A run that ends early.** A run of T Gaussian steps on Poisson samples is paid for before it begins. If it ends after t
steps, for whatever reason, what the other steps would have released is independent of everything released, and can be
turned into a Gaussian of mu_c, with a coin of probability c, if delta_(mu_c)(epsilon) is at most c + (1 - c) times the
delta of those steps at every epsilon in both directions. So mu_c^2 was paid for and not used, and the filter may
subtract it (`credit_for_untaken_steps`). Its coin counts twice, because the arithmetic of the noise multiplies a delta
by less than 2.

**The odometer.** `PrivacyFilter.odometer` bounds what was released so far at all times, even at a time chosen by what
was released: P(E) <= E'[e^epsilon; E] + delta for its epsilon at that time. Proof: at the time v the motion
has lost L = v / 2 + w, and M = 2 sqrt(r / (v + r)) e^(w^2 / 2 (v + r)) Phi(w / sqrt(v + r)), a mixture of e^(t w - t^2
v / 2) over positive t, has a mean of at most 1 whenever one stops (Robbins 1970,
https://doi.org/10.1214/aoms/1177696786). The odometer's epsilon is the least for which 1 - e^(epsilon - L) <= (delta -
S) M for every w, so the mean of the left side, which is P(E) - E'[e^epsilon; E] for the worst E, is at most delta - S.
r is B / 16.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from dpx.accounting import gdp
from dpx.accounting.checks import Profile, require_delta, require_positive_epsilon
from dpx.accounting.pld.losses import Losses, SampledGaussian
from dpx.accounting.profiles import ComposedProfile, least_satisfying, lower_deltas, unsampled_profile

COINS = 0.2  # share of delta for coins; a tenth and a third give the same epsilons to 1%
_COARSE, _POINTS = 32, 512  # intervals of epsilon in which profiles are compared, at first and where it matters most
_NEAR = 1e-4  # relative excess of mu that this leaves
_RARER = 2.0**-16  # share of a release's coins that is enough for Gaussians
_NEARLY = 1.001  # rarer coins are used if they raise mu by no more than this factor
_ROUNDING = 1e-12  # far above that of float64
_FARTHEST = 500.0  # an epsilon, and a mu


class Spent(NamedTuple):
    """Sums over all releases, floats: of mu^2 (precision) and of the probabilities of their coins (delta)."""

    precision: float
    delta: float


NOTHING = Spent(0.0, 0.0)


@dataclass(frozen=True)
class PrivacyFilter:
    """A filter for a budget. epsilon: positive and finite. delta: in (0, 1). Raises ValueError otherwise."""

    epsilon: float
    delta: float

    def __post_init__(self):
        require_positive_epsilon(self.epsilon)
        require_delta(self.delta)

    @property
    def limits(self) -> Spent:
        """The limits B on precision and S on delta."""
        return Spent(gdp.mu(epsilon=self.epsilon, delta=(1 - COINS) * self.delta) ** 2, COINS * self.delta)

    def affords(self, spent: Spent) -> bool:
        return spent.precision <= self.limits.precision and spent.delta <= self.limits.delta

    def charge(self, profile: Profile, spent: Spent) -> Spent:
        """The cost of a release with this profile after `spent`; it uses at most a quarter of the remaining coins.

        The precision is inf if no Gaussian bounds the profile, because it has too little noise or delta is too small.
        """
        coins = max(0.0, self.limits.delta - spent.delta) / 4
        often, rarely = dominating_mu(profile, coins), dominating_mu(profile, coins * _RARER)
        if rarely <= _NEARLY * often:
            return Spent(rarely**2, coins * _RARER)
        return Spent(often**2, coins)

    def epsilon_of(self, spent: Spent) -> float:
        """Epsilon at the budget's delta, as if all releases had been fixed in advance."""
        return gdp.epsilon(math.sqrt(spent.precision), delta=self.delta - spent.delta)

    def odometer(self, spent: Spent) -> float:
        """Epsilon at the budget's delta, valid at all times at once. spent: before credits are subtracted."""
        time, rate, delta = spent.precision, self.limits.precision / 16, self.delta - self.limits.delta
        if not 0 < time < math.inf:
            return time
        scale = math.sqrt(time + rate)
        moves = np.linspace(0, scale * math.sqrt(2 * math.log(scale / (delta * math.sqrt(rate)))), 4 * _POINTS)
        mixture = (
            np.log(2 * delta * math.sqrt(rate) / scale) + (moves / scale) ** 2 / 2 + special.log_ndtr(moves / scale)
        )
        losses = moves + np.log1p(-np.exp(np.minimum(mixture, -_ROUNDING)))  # rises with a slope of at most 1
        return time / 2 + float(losses.max() + moves[1])


def dominating_mu(profile: Profile, delta: float) -> float:
    """The least mu for which `profile` is at most delta + (1 - delta) delta_mu at every epsilon, rounded up.

    Proof: as functions of e^epsilon, both sides are convex. So between two points the profile is below its chord, and
    delta_mu is above its tangent in the middle; both are lines, so comparing the ends is enough. Beyond the last point,
    delta is enough. Any set of points gives a bound, so points are added only where they decide the least mu.
    """
    top = profile.epsilon(delta) if delta > 0 else math.inf
    if not top < _FARTHEST:
        return math.inf
    points, mu = np.linspace(0, top, _COARSE + 1), math.inf
    search = {"most": _FARTHEST, "fine": 1e-5, "smallest": _ROUNDING}
    bounds = np.array([profile.delta(epsilon) for epsilon in points.tolist()])
    while True:
        needed = (bounds * (1 + _ROUNDING) - delta) / (1 - delta)
        bounded = functools.partial(_tangents_above_chords, points, needed)
        mu = min(mu, least_satisfying(lambda mu, of=bounded: bool(of(mu).all()), **search))
        decide = ~bounded(mu * (1 - _NEAR)) if mu < math.inf else np.ones(len(points) - 1, bool)
        split = decide & (np.diff(points) > 1.5 * top / _POINTS)
        if not split.any():
            return mu
        between = ((points[:-1] + points[1:]) / 2)[split]
        places = np.flatnonzero(split) + 1
        bounds = np.insert(bounds, places, [profile.delta(epsilon) for epsilon in between.tolist()])
        points = np.insert(points, places, between)


def _tangents_above_chords(points: np.ndarray, needed: np.ndarray, mu: float) -> np.ndarray:
    """Whether the midpoint tangents of delta_mu are above the chords of `needed`, bool (points - 1,)."""
    middles = (points[:-1] + points[1:]) / 2
    likely, slope = special.log_ndtr(mu / 2 - middles / mu), special.log_ndtr(-mu / 2 - middles / mu)
    height = -np.exp(likely) * (np.expm1(middles + slope - likely) + _ROUNDING)
    run = np.expm1(np.stack([points[:-1], points[1:]]) - middles)
    return (height - np.exp(middles + slope) * run >= np.stack([needed[:-1], needed[1:]])).all(axis=0)


def credit_for_untaken_steps(losses: Losses, coins: float) -> Spent:
    """What steps give back if they were paid for but not taken: the largest mu^2 of a Gaussian that they dominate, and
    its coins. Nothing if no lower bound on the steps is known. losses: Poisson-sampled Gaussians. Proof: both deltas
    fall with epsilon, so between two points the Gaussian's is at most its value at the first, and the steps' is at
    least their value at the second.
    """
    exact = unsampled_profile(losses)
    if exact is not None:
        return Spent(exact.mu**2, 0.0)
    if not coins > 0 or not all(isinstance(loss, SampledGaussian) and not loss.is_noiseless for loss in losses):
        return NOTHING
    top = ComposedProfile(losses).epsilon(coins)
    if not 0 < top < _FARTHEST:
        return NOTHING
    points = np.linspace(0, top, 4 * _POINTS)
    spare = (coins + (1 - coins) * lower_deltas(losses, points))[1:] * (1 - _ROUNDING)

    def is_bounded(mu: float) -> bool:
        likely = special.log_ndtr(mu / 2 - points / mu)
        deltas = np.exp(likely) * (-np.expm1(points + special.log_ndtr(-mu / 2 - points / mu) - likely) + _ROUNDING)
        return bool((deltas[:-1] <= spare).all() and deltas[-1] <= coins)

    low, high = 0.0, 1.0
    while is_bounded(high):
        low, high = high, 2 * high
    while high - low > 1e-4 * high > _ROUNDING:
        middle = (low + high) / 2
        low, high = (middle, high) if is_bounded(middle) else (low, middle)
    return Spent(low**2, 2 * coins) if low > 0 else NOTHING
