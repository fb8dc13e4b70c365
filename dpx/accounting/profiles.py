"""Profiles: upper bounds on the privacy loss of a run, which answer for epsilon at a delta and for delta at an epsilon.

Whoever reads an event gives a profile; whoever wants a number asks it. `profile` is the one place that chooses among
the accountants of step losses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpx.accounting import composition, gdp, renyi
from dpx.accounting.checks import Accountant
from dpx.accounting.composition import Composed, Side
from dpx.accounting.losses import Losses, SampledGaussian, total_renyi

_LARGEST = 1e8  # an epsilon beyond it counts as infinite


class Profile(Protocol):
    """An upper bound on the privacy loss of a run: at every epsilon it is (epsilon, delta(epsilon))-private."""

    def epsilon(self, delta: float) -> float:
        """The least epsilon for a delta in (0, 1), or an upper bound of it; inf if there is none."""
        ...

    def delta(self, epsilon: float) -> float:
        """The least delta for an epsilon of at least 0, or an upper bound of it."""
        ...


@dataclass(frozen=True)
class GaussianProfile:
    """mu-GDP, exactly; mu = inf is no privacy."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return gdp.epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return gdp.delta(self.mu, epsilon)


UNBOUNDED = GaussianProfile(math.inf)


@dataclass(frozen=True, eq=False)
class RenyiProfile:
    """Renyi divergences of at most `rdp` (orders,) at `renyi.ORDERS`, but for events of probability `missing`."""

    rdp: np.ndarray
    missing: float = 0.0

    def epsilon(self, delta: float) -> float:
        if self.missing >= delta:
            return math.inf
        return renyi.epsilon(self.rdp, delta - self.missing)[0] - math.log1p(-self.missing)

    def delta(self, epsilon: float) -> float:
        return renyi.delta(self.rdp, max(0.0, epsilon + math.log1p(-self.missing)))[0] + self.missing


@dataclass(frozen=True)
class DeltaProfile:
    """A decreasing upper bound of delta as a function of epsilon."""

    deltas: Callable[[float], float]

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, 1.0
        if self.deltas(low) <= delta:
            return low
        while self.deltas(high) > delta:
            low, high = high, 2 * high
            if high > _LARGEST:
                return math.inf
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.deltas(middle) <= delta else (middle, high)
        return high

    def delta(self, epsilon: float) -> float:
        return self.deltas(epsilon)


@dataclass(frozen=True)
class DelegatedProfile:
    """One of dp-accounting's accountants, to which the event was given."""

    accountant: Any

    def epsilon(self, delta: float) -> float:
        return float(self.accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.accountant.get_delta(epsilon))


class Least:
    """The least of several profiles of one run."""

    def __init__(self, *profiles: Profile):
        self._profiles = profiles

    def epsilon(self, delta: float) -> float:
        return min(profile.epsilon(delta) for profile in self._profiles)

    def delta(self, epsilon: float) -> float:
        return min(profile.delta(epsilon) for profile in self._profiles)


class ComposedProfile:
    """Step losses, composed when asked, at the tilt that the question needs; at most the RDP bill of the same steps.

    grid: spacing of privacy losses; default fine enough for four digits.
    side: "below" gives lower bounds instead, for which the losses must be `SampledGaussian`s.
    """

    def __init__(self, losses: Losses, *, grid: float | None = None, side: Side = "above"):
        self._losses, self._grid = losses, grid
        self._side: Side = side
        self._renyi = RenyiProfile(total_renyi(losses))

    def epsilon(self, delta: float) -> float:
        bound = self._renyi.epsilon(delta)
        return self._asked(bound, bound, delta, lambda composed: composed.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        bound = self._renyi.delta(epsilon)
        return self._asked(bound, epsilon, bound, lambda composed: composed.delta(epsilon))

    def _asked(self, bound: float, epsilon: float, delta: float, read: Callable[[Composed], float]) -> float:
        """What a composition around (epsilon, delta), a pair that holds by RDP, says in its worse direction."""
        above = self._side == "above"
        if bound == 0 or not math.isfinite(epsilon):
            return bound if above else 0.0
        plan = composition.plan(
            self._renyi.rdp, sum(self._losses.values()), delta=delta, epsilon=epsilon, grid=self._grid
        )
        if plan is None:
            return bound if above else 0.0
        found = max(read(composed) for composed in composition.compose(self._losses, plan, side=self._side))
        return min(bound, found) if above else found


def profile(losses: Losses, accountant: Accountant = "tightest", *, grid: float | None = None) -> Profile:
    """The profile of a composition of steps by an accountant: the one place where accountants are chosen.

    "pld" is exact for unsampled Gaussians and else composes privacy loss distributions, and is then at most the RDP
    bill of the same steps. So "tightest" is "pld" where every step has a privacy loss distribution, else "rdp".
    """
    without = [loss for loss in losses if not hasattr(loss, "pmfs")]
    if accountant == "rdp" or (accountant == "tightest" and without):
        return RenyiProfile(total_renyi(losses))
    if without:
        raise ValueError(f'{without[0]} has no privacy loss distribution: pass accountant="rdp" or "tightest"')
    return unsampled(losses) or ComposedProfile(losses, grid=grid)


def unsampled(losses: Losses) -> GaussianProfile | None:
    """The exact profile if every step is a Gaussian without sampling."""
    squares = 0.0
    for loss, count in losses.items():
        if not isinstance(loss, SampledGaussian) or loss.rate < 1:
            return None
        if loss.unbounded:
            return UNBOUNDED
        squares += count * ((2 if loss.relation == "replace_one" else 1) / loss.noise_multiplier) ** 2
    return GaussianProfile(math.sqrt(squares))
