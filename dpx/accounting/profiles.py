"""Profiles: upper bounds on the privacy loss of a run, which compute epsilon at a delta and delta at an epsilon.

Functions that need a number turn an event into a profile and ask it. `loss_profile` is the only place that chooses
among the accountants of step losses.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from dpx.accounting import gdp
from dpx.accounting.checks import Accountant, Profile
from dpx.accounting.pld import composition, renyi
from dpx.accounting.pld.composition import Side, SummedLoss
from dpx.accounting.pld.losses import Losses, SampledGaussian, total_renyi

# These constants trade time for digits; answers are upper bounds for any of them. The digits are tested in
# tests/test_accounting_soundness.py and tests/test_accounting_mechanisms.py, the time in benchmarks/accounting.py.
_INFINITE_EPSILON = 1e8  # a larger epsilon counts as infinite
_MOST_BOUNDED = 1e-5  # share of delta that may be bounded instead of computed
_MOST_BOUNDED_REUSED = 1e-3  # such a share if the composition was planned for another epsilon
# `deviations` for `composition.plan_composition`; the second keeps a curve within 0.1%.
_DEVIATIONS_ONE_ANSWER, _DEVIATIONS_CURVE = 0.5, 4.0
_PLANNED_RATIO = 4  # a composition is fine enough for an epsilon this many times smaller than the planned one
_LOWER_DELTAS = (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10)  # lower bounds are composed around these
_MOST_KEPT = 4  # compositions that a profile keeps, of up to 30 MiB each
_MOST_ATTEMPTS = 5  # compositions for one question


@dataclass(frozen=True)
class GaussianProfile:
    """The exact profile of mu-GDP. At mu = inf, there is no privacy."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return gdp.epsilon(self.mu, delta=delta)

    def delta(self, epsilon: float) -> float:
        return gdp.delta(self.mu, epsilon=epsilon)


UNBOUNDED = GaussianProfile(math.inf)


def least_satisfying(holds: Callable[[float], bool], *, most: float, fine: float, smallest: float = 0.0) -> float:
    """The least positive number for which `holds` is true, rounded up by a share of at most `fine`; inf above `most`.

    holds: if true for a number, it must be true for all larger ones. smallest: an error that is always small enough.
    """
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > most:
            return math.inf
    while high - low > fine * high > smallest:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, eq=False)
class RenyiProfile:
    """A profile from Renyi divergences of at most `rdp` at `orders`, except for outcomes of probability `missing`.

    rdp, orders: float64 (orders,). A NaN or a negative number counts as inf, because dp-accounting would
    return an epsilon of 0 for either, whatever the other orders say. missing: float, in [0, 1).
    """

    rdp: np.ndarray
    missing: float = 0.0
    orders: np.ndarray = field(default_factory=lambda: renyi.ORDERS)

    def __post_init__(self):
        object.__setattr__(self, "rdp", np.where(self.rdp >= 0, self.rdp, math.inf))

    def epsilon(self, delta: float) -> float:
        if self.missing >= delta:
            return math.inf
        return renyi.epsilon(self.rdp, delta - self.missing, self.orders) - math.log1p(-self.missing)

    def delta(self, epsilon: float) -> float:
        return renyi.delta(self.rdp, max(0.0, epsilon + math.log1p(-self.missing)), self.orders) + self.missing


@dataclass(frozen=True)
class PureProfile:
    """What pure differential privacy says: this epsilon at every delta, and delta 0 from there on."""

    pure: float

    def epsilon(self, delta: float) -> float:
        return self.pure

    def delta(self, epsilon: float) -> float:
        return 0.0 if epsilon >= self.pure else 1.0


@dataclass(frozen=True)
class DeltaProfile:
    """A decreasing upper bound on delta as a function of epsilon."""

    deltas: Callable[[float], float]

    def epsilon(self, delta: float) -> float:
        if self.deltas(0.0) <= delta:
            return 0.0
        return least_satisfying(lambda epsilon: self.deltas(epsilon) <= delta, most=_INFINITE_EPSILON, fine=1e-12)

    def delta(self, epsilon: float) -> float:
        return self.deltas(epsilon)


@dataclass(frozen=True)
class MinOrMaxProfile:
    """The lowest of several bounds on one run (`min`), or the highest of several profiles it may have (`max`)."""

    pick: Callable[[Iterable[float]], float]
    profiles: tuple[Profile, ...]

    def epsilon(self, delta: float) -> float:
        return self.pick(profile.epsilon(delta) for profile in self.profiles)

    def delta(self, epsilon: float) -> float:
        return self.pick(profile.delta(epsilon) for profile in self.profiles)


Directions = list[SummedLoss]  # one composition: its summed loss in each direction of the relation


class ComposedProfile:
    """Composes the step losses anew for each query, with the exponential tilt that is most precise there.

    Its epsilon is at most the RDP cost of these steps.

    The first composition is planned around the RDP cost. If too much of the answer was bounded instead of computed, or
    if epsilon is much smaller than planned, further compositions are planned around the answer. They are kept for later
    queries of delta, because one composition answers for all nearby epsilons.

    side: "below" gives lower bounds instead; the losses must then be `SampledGaussian`s.
    deviations: as for `composition.plan_composition`.
    """

    def __init__(self, losses: Losses, *, side: Side = "above", deviations: float = _DEVIATIONS_ONE_ANSWER):
        self._losses, self._deviations = losses, deviations
        self._side: Side = side
        self._renyi = RenyiProfile(total_renyi(losses))
        self._kept: list[tuple[float, Directions]] = []  # (planned epsilon, composition)

    def epsilon(self, delta: float) -> float:
        def epsilon_of(directions: Directions) -> tuple[float, float]:
            return max(direction.epsilon(delta) for direction in directions), delta

        bound = self._renyi.epsilon(delta)
        return self._tightest_epsilon_delta(bound, delta, epsilon_of)[0] if bound > 0 else 0.0

    def delta(self, epsilon: float) -> float:
        def read(directions: Directions) -> tuple[float, float]:
            return epsilon, max(direction.delta(epsilon) for direction in directions)

        for planned_epsilon, directions in reversed(self._kept):
            if planned_epsilon <= epsilon and _uncomputed_share(directions, epsilon) <= _MOST_BOUNDED_REUSED:
                return read(directions)[1]
        bound = self._renyi.delta(epsilon)
        return self._tightest_epsilon_delta(epsilon, bound, read)[1] if bound > 0 else 0.0

    def _tightest_epsilon_delta(
        self, epsilon: float, delta: float, read: Callable[[Directions], tuple[float, float]]
    ) -> tuple[float, float]:
        """The least (epsilon, delta) that compositions prove, starting from a pair that RDP proves."""
        if self._side == "below":
            directions = self._compose_near(epsilon, delta, self._renyi, None)
            return read(directions) if directions else (0.0, 0.0)
        rdp_profile, expected_epsilon = self._renyi, None
        for attempt in range(_MOST_ATTEMPTS):
            directions = self._compose_near(epsilon, delta, rdp_profile, expected_epsilon)
            if directions:
                planned = epsilon, delta
                epsilon, delta = (min(pair) for pair in zip(planned, read(directions), strict=True))
                self._kept = [*self._kept[-_MOST_KEPT + 1 :], (planned[0], directions)]
                fine = epsilon >= planned[0] / _PLANNED_RATIO
                better = epsilon < 0.999 * planned[0] or delta < 0.999 * planned[1]
                computed = fine and _uncomputed_share(directions, epsilon) <= _MOST_BOUNDED
                if epsilon == 0 or computed or (attempt > 1 and not better):
                    break
            elif attempt > 0:
                break
            rdp_profile, expected_epsilon = self._wide_renyi, epsilon
        return epsilon, delta

    @functools.cached_property
    def _wide_renyi(self) -> RenyiProfile:
        return RenyiProfile(total_renyi(self._losses, renyi.WIDE_ORDERS), orders=renyi.WIDE_ORDERS)

    def _compose_near(
        self, epsilon: float, delta: float, rdp_profile: RenyiProfile, expected_epsilon: float | None
    ) -> Directions | None:
        """A composition that is precise around (epsilon, delta); None if that needs too large a grid."""
        if not math.isfinite(epsilon):
            return None
        plan = composition.plan_composition(
            rdp_profile.rdp,
            sum(self._losses.values()),
            delta=delta,
            epsilon=epsilon,
            orders=rdp_profile.orders,
            expected_epsilon=expected_epsilon,
            deviations=self._deviations,
        )
        return None if plan is None else composition.compose_losses(self._losses, plan, side=self._side)


def lower_deltas(losses: Losses, epsilons: np.ndarray) -> np.ndarray:
    """Lower bounds on delta at epsilons rising from 0, in the direction of the smaller delta, float64 (epsilons,).

    losses: `SampledGaussian`s. They are composed several times, each time precisely around another delta.
    """
    upper, found = ComposedProfile(losses), np.zeros(len(epsilons))
    below = ComposedProfile(losses, side="below", deviations=_DEVIATIONS_CURVE)
    for delta in _LOWER_DELTAS:
        epsilon = max(upper.epsilon(delta), float(epsilons[1]))
        directions = below._compose_near(epsilon, delta, below._wide_renyi, epsilon) if epsilon < epsilons[-1] else None
        if directions:
            each = [[direction.delta(epsilon) for epsilon in epsilons.tolist()] for direction in directions]
            found = np.maximum(found, np.min(each, axis=0))
    return found


def _uncomputed_share(directions: Directions, epsilon: float) -> float:
    """The share of delta that was bounded instead of computed, in the direction with the larger delta."""
    return max(directions, key=lambda direction: direction.delta(epsilon)).uncomputed_share(epsilon)


def loss_profile(losses: Losses, accountant: Accountant = "tightest", *, curve: bool = False) -> Profile:
    """The profile of composed steps from an accountant. No other function chooses accountants.

    "pld" is exact for unsampled Gaussians. Otherwise it composes privacy loss distributions, and costs at most the RDP
    of the steps that it composes (after rounding many distinct ones to few). So "tightest" is "pld" if every step has a
    privacy loss distribution, and "rdp" otherwise.

    curve: True if deltas at many rising epsilons will be computed, each to 0.1%.

    Raises ValueError for "pld" if a step has no privacy loss distribution.
    """
    without_pmfs = [loss for loss in losses if not loss.has_pmfs()]
    if accountant == "rdp" or (accountant == "tightest" and without_pmfs):
        searched = [loss.orders for loss in losses] or [renyi.ORDERS]
        orders = functools.reduce(np.union1d, searched)
        orders = orders[orders <= min(each[-1] for each in searched)]  # orders that all losses can compute
        return RenyiProfile(total_renyi(losses, orders), orders=orders)
    if without_pmfs:
        raise ValueError(f'{without_pmfs[0]} has no privacy loss distribution: pass accountant="rdp" or "tightest"')
    deviations = _DEVIATIONS_CURVE if curve else _DEVIATIONS_ONE_ANSWER
    return unsampled_profile(losses) or ComposedProfile(losses, deviations=deviations)


def unsampled_profile(losses: Losses) -> GaussianProfile | None:
    """The exact profile if every step is a Gaussian without sampling, otherwise None."""
    squares = 0.0
    for loss, count in losses.items():
        if not isinstance(loss, SampledGaussian) or loss.rate < 1:
            return None
        if loss.is_noiseless:
            return UNBOUNDED
        squares += count * ((2 if loss.relation == "replace_one" else 1) / loss.noise_multiplier) ** 2
    return GaussianProfile(math.sqrt(squares))
