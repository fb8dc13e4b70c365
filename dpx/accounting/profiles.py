"""Profiles: upper bounds on the privacy loss of a run, which answer for epsilon at a delta and for delta at an epsilon.

Whoever reads an event gives a profile; whoever wants a number asks it. `profile` is the one place that chooses among
the accountants of step losses.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dpx.accounting import gdp, renyi
from dpx.accounting.checks import Accountant
from dpx.accounting.pld import composition
from dpx.accounting.pld.composition import Composed, Side
from dpx.accounting.pld.losses import Losses, SampledGaussian, total_renyi

_LARGEST = 1e8  # an epsilon beyond it counts as infinite
_SHARE = 1e-5  # of delta, that may be bounded instead of computed,
_REUSED = 1e-3  # by a composition that was planned for another epsilon
_EXACT, _CURVE = 0.5, 4.0  # deviations of `composition.plan`: for one answer, and for a curve within 0.1 %
_SMALLER = 4  # a composition is fine enough for an epsilon so many times smaller than the one it was planned for
_MOST_KEPT = 4  # compositions, of up to 30 MiB
_ATTEMPTS = 5  # compositions for one question


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
    """Renyi divergences of at most `rdp` (orders,) at `orders`, but for events of probability `missing`."""

    rdp: np.ndarray
    missing: float = 0.0
    orders: np.ndarray = field(default_factory=lambda: renyi.ORDERS)

    def epsilon(self, delta: float) -> float:
        if self.missing >= delta:
            return math.inf
        return renyi.epsilon(self.rdp, delta - self.missing, self.orders)[0] - math.log1p(-self.missing)

    def delta(self, epsilon: float) -> float:
        return renyi.delta(self.rdp, max(0.0, epsilon + math.log1p(-self.missing)), self.orders)[0] + self.missing


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

    The first composition is planned around the RDP bill. Where too much of its answer was bounded instead of computed,
    or epsilon turns out much smaller, more are planned around the answer. Compositions are kept for later questions
    about delta: between neighboring epsilons one is as good as another.

    grid: spacing of privacy losses; default fine enough for four digits.
    side: "below" gives lower bounds instead, for which the losses must be `SampledGaussian`s.
    deviations: as for `composition.plan`.
    """

    def __init__(self, losses: Losses, *, grid: float | None = None, side: Side = "above", deviations: float = _EXACT):
        self._losses, self._grid, self._deviations = losses, grid, deviations
        self._side: Side = side
        self._renyi = RenyiProfile(total_renyi(losses))
        self._kept: list[tuple[float, list[Composed]]] = []  # (the epsilon it was planned for, both directions)

    def epsilon(self, delta: float) -> float:
        def read(composed: list[Composed]) -> tuple[float, float]:
            return max(one.epsilon(delta) for one in composed), delta

        bound = self._renyi.epsilon(delta)
        return self._asked(bound, delta, read)[0] if bound > 0 else 0.0

    def delta(self, epsilon: float) -> float:
        def read(composed: list[Composed]) -> tuple[float, float]:
            return epsilon, max(one.delta(epsilon) for one in composed)

        for planned, composed in reversed(self._kept):
            if planned <= epsilon and _share(composed, epsilon) <= _REUSED:
                return read(composed)[1]
        bound = self._renyi.delta(epsilon)
        return self._asked(epsilon, bound, read)[1] if bound > 0 else 0.0

    def _asked(
        self, epsilon: float, delta: float, read: Callable[[list[Composed]], tuple[float, float]]
    ) -> tuple[float, float]:
        """The pair that holds by compositions; epsilon and delta: one that holds by RDP."""
        if self._side == "below":
            composed = self._composed(epsilon, delta, self._renyi, None)
            return read(composed) if composed else (0.0, 0.0)
        bill, truth = self._renyi, None
        for attempt in range(_ATTEMPTS):
            composed = self._composed(epsilon, delta, bill, truth)
            if composed:
                planned = epsilon, delta
                epsilon, delta = (min(pair) for pair in zip(planned, read(composed), strict=True))
                self._kept = [*self._kept[-_MOST_KEPT + 1 :], (planned[0], composed)]
                close = epsilon >= planned[0] / _SMALLER or self._grid is not None
                better = epsilon < 0.999 * planned[0] or delta < 0.999 * planned[1]
                if epsilon == 0 or (close and _share(composed, epsilon) <= _SHARE) or (attempt > 1 and not better):
                    break
            elif attempt > 0:
                break
            bill, truth = self._wide, epsilon
        return epsilon, delta

    @functools.cached_property
    def _wide(self) -> RenyiProfile:
        return RenyiProfile(total_renyi(self._losses, renyi.WIDE_ORDERS), orders=renyi.WIDE_ORDERS)

    def _composed(self, epsilon: float, delta: float, bill: RenyiProfile, truth: float | None) -> list[Composed] | None:
        """The composition in each direction, resolved around (epsilon, delta); None if no sensible grid could be."""
        if not math.isfinite(epsilon):
            return None
        options: Any = dict(orders=bill.orders, grid=self._grid, truth=truth, deviations=self._deviations)
        steps = sum(self._losses.values())
        plan = composition.plan(bill.rdp, steps, delta=delta, epsilon=epsilon, **options)
        return None if plan is None else composition.compose(self._losses, plan, side=self._side)


def _share(composed: list[Composed], epsilon: float) -> float:
    """How much of delta was bounded, in the direction that decides."""
    return max(composed, key=lambda one: one.delta(epsilon)).share(epsilon)


def profile(
    losses: Losses, accountant: Accountant = "tightest", *, grid: float | None = None, curve: bool = False
) -> Profile:
    """The profile of a composition of steps by an accountant: the one place where accountants are chosen.

    "pld" is exact for unsampled Gaussians and else composes privacy loss distributions, and is then at most the RDP
    bill of the same steps (fewer, rounded ones where they are many). So "tightest" is "pld" where every step has a
    privacy loss distribution, else "rdp".

    curve: whether deltas are asked at many rising epsilons, each to 0.1 %.
    """
    without = [loss for loss in losses if not hasattr(loss, "pmfs")]
    if accountant == "rdp" or (accountant == "tightest" and without):
        return RenyiProfile(total_renyi(losses))
    if without:
        raise ValueError(f'{without[0]} has no privacy loss distribution: pass accountant="rdp" or "tightest"')
    return unsampled(losses) or ComposedProfile(losses, grid=grid, deviations=_CURVE if curve else _EXACT)


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
