"""What epsilon means for an attacker: how well anyone can tell whether one example took part."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Profile, Relation
from dpx.accounting.compose import Composition
from dpx.accounting.cost import cost_of_run
from dpx.reports.rendering import draw_guessing_line, labeled_axes
from dpx.values import described, for_whom, require_floats, rounded_up, unit_in_words

# Any set of epsilons gives valid bounds. With these, the rates and mu of a Gaussian are within 1% of the exact values.
_EPSILONS = 96
_SMALLEST_SHARE = 0.01  # the smallest positive epsilon, as a share of the largest
_NO_LESS = 1 + 1e-6  # a delta this close to the least that any epsilon reaches is the least
_LARGEST_EPSILON = 500.0  # a larger epsilon promises nothing, and its exponential may overflow
_ROUNDING = 1e-9  # how far mu is rounded up, relative to 1 + mu

FALSE_POSITIVE_RATES = (0.01, 0.001)  # a report shows the true positive rate at these
CURVE_RATES = tuple(10.0 ** (tenth / 10) for tenth in range(-40, 1))  # and draws it at these


class AttackBounds(NamedTuple):
    """How well any attacker who knows the release and all other examples can tell whether one example took part.

    With several `records`, the question is about all records of one person instead of one example.

    advantage: float, the largest true positive rate minus the false positive rate; 0 is guessing, 1 is certainty.
    false_positive_rates: n floats, how often the attacker says "took part" about an example that did not.
    true_positive_rates: n floats, upper bounds on how often the attacker then says so about an example that did.
    mu: float. The run satisfies mu-Gaussian differential privacy up to delta: at every false positive rate a, the true
        positive rate is at most Phi(mu - Phi^-1(1 - a)) + delta.
    delta: float, the slack of mu. records: int, the most records that the person owns; 1 is one unit of the sampling.
    """

    advantage: float
    false_positive_rates: tuple[float, ...]
    true_positive_rates: tuple[float, ...]
    mu: float
    delta: float
    records: int = 1

    def sentences(self, unit: str | None = None) -> tuple[str, ...]:
        """States the bounds in words, rounded up. unit: what is attacked, such as "user"; None uses `records`."""
        unit = unit_in_words(self.records) if unit is None else unit
        rates = zip(self.false_positive_rates, self.true_positive_rates, strict=True)
        return (
            *(
                f"At a false-positive rate of {100 * wrong:.4g}%, no membership-inference attack on one {unit} has a "
                f"true-positive rate above {rounded_up(100 * right, 4)}%."
                for wrong, right in rates
            ),
            f"The advantage of an attack on one {unit}, which is its true-positive rate minus its false-positive rate, "
            f"is at most {rounded_up(self.advantage, 4)}.",
            f"mu = {rounded_up(self.mu, 4)}: at every false-positive rate, the true-positive rate of an attack on one "
            f"{unit} is at most that of mu-Gaussian differential privacy plus {rounded_up(self.delta, 6)}.",
        )


def attack_bounds(
    run: Any,
    steps_or_state: Any = None,
    *,
    delta: float,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
) -> AttackBounds:
    """Bounds every attack that asks whether one example took part, from the privacy profile of a run.

    run: a mechanism, with `steps_or_state` as for `dpx.epsilon`; or a `Composition`, without it.
    delta: in (0, 1), the slack of the result's `mu`. Without slack, Poisson sampling would not lower mu, because
        sampling does not thin the farthest tail.
    false_positive_rates: floats in [0, 1]. accountant, relation, records: as for `dpx.epsilon`. With more than 1
        record, the attack is on a person who owns that many.

    Guarantee: let delta(e) be the run's delta at epsilon e. For every e >= 0, the true positive rate at a false
    positive rate a is at most delta(e) + exp(e) a, and at most 1 - exp(-e) (1 - delta(e) - a). The advantage is at most
    delta(0). The bounds are the least over a grid of e. mu is the smallest for which the convex hull of that grid is at
    most delta_mu(e) + delta for every e >= 0, where delta_mu is the profile of mu-GDP.
    Raises ValueError as `dpx.epsilon` does, and if a rate is outside [0, 1].
    Source: Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383.

        >>> bounds = dpx.reports.attack_bounds(mechanism, 200, delta=1e-5)
        >>> bounds.false_positive_rates, bounds.true_positive_rates
        ((0.01, 0.001), (0.0830..., 0.0173...))
    """
    rates = require_floats("false_positive_rates", false_positive_rates)
    if rates.ndim != 1 or not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(f"false_positive_rates must be numbers in [0, 1], got {described(false_positive_rates)}")
    delta = checks.require_delta(delta)
    if isinstance(run, Composition):
        if steps_or_state is not None or relation not in (None, run.relation) or records not in (None, run.records):
            raise ValueError(
                f"a Composition has its steps, its relation and its records, {run.relation!r} and {run.records}; do "
                "not pass them again"
            )
        profile, records = run.profile(accountant, curve=True), run.records
    else:
        cost = cost_of_run(run, steps_or_state, relation, records=records)
        profile, records = cost.profile(accountant, curve=True), cost.records
    return attack_bounds_of_profile(profile, delta, rates.tolist())._replace(records=records)


def attack_bounds_of_profile(profile: Profile, delta: float, false_positive_rates: Sequence[float]) -> AttackBounds:
    """Computes the bounds of a privacy profile; see `attack_bounds`."""
    epsilons, deltas = _epsilon_delta_grid(profile, delta)
    growth, rates = np.exp(epsilons), np.array(false_positive_rates, np.float64)[:, None]
    least = np.minimum(deltas + growth * rates, 1 - (1 - deltas - rates) / growth).min(axis=1)
    return AttackBounds(
        advantage=float(deltas[0]),
        false_positive_rates=tuple(rates[:, 0].tolist()),
        true_positive_rates=tuple(np.clip(least, rates[:, 0], 1.0).tolist()),
        mu=_mu(growth, deltas, delta),
        delta=delta,
    )


def attack_bounds_and_curve(profile: Profile, delta: float) -> tuple[AttackBounds, tuple[tuple[float, float], ...]]:
    """Returns the bounds that a report shows, and its curve: pairs (false positive rate, bound on the true one)."""
    bounds = attack_bounds_of_profile(profile, delta, (*FALSE_POSITIVE_RATES, *CURVE_RATES))
    stated = len(FALSE_POSITIVE_RATES)
    wrong, right = bounds.false_positive_rates, bounds.true_positive_rates
    shown = bounds._replace(false_positive_rates=wrong[:stated], true_positive_rates=right[:stated])
    return shown, tuple(zip(wrong[stated:], right[stated:], strict=True))


def plot_attack_bounds(bounds: AttackBounds, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws any attack's largest true positive rate at each false positive rate, and guessing, on logarithmic axes.

    bounds: with many rates, such as `numpy.geomspace(1e-4, 1, 50)`. axes: matplotlib axes, which are returned; None
        makes new ones. label: the curve's label in a legend.
    """
    right = f"true positive rate of any attack (upper bound){for_whom(bounds.records)}"
    axes = labeled_axes(axes, "false positive rate", right)
    axes.loglog(bounds.false_positive_rates, bounds.true_positive_rates, label=label)
    draw_guessing_line(axes, bounds.false_positive_rates, bounds.false_positive_rates)
    return axes


def _epsilon_delta_grid(profile: Profile, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns rising epsilons from 0, and bounds on delta at each, float64 (n,), which end at `delta` if possible."""
    top = profile.epsilon(delta)
    if top == 0:
        return np.zeros(1), np.array([min(delta, profile.delta(0.0))])
    largest = min(top, _LARGEST_EPSILON)
    epsilons = np.array([0.0, *np.geomspace(_SMALLEST_SHARE * largest, largest, _EPSILONS).tolist()])
    least, found = 0.0 if largest == top else profile.delta(largest), []
    for epsilon in epsilons.tolist():
        found.append(profile.delta(epsilon))
        if found[-1] <= _NO_LESS * least:  # larger epsilons prove nothing more, and each may take seconds
            break
    epsilons, deltas = epsilons[: len(found)], np.array(found)
    if largest == top:
        deltas[-1] = min(deltas[-1], delta)
    return epsilons, _tightened_deltas(np.exp(epsilons), np.minimum.accumulate(deltas).clip(0, 1))


def _tightened_deltas(growth: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """Tightens `deltas`, float64 (n,), to smaller upper bounds on the same profile. growth: e^epsilon, float64 (n,).

    Proof: (epsilon, delta) for both orders of the neighbors says that the true positive rate at a false positive rate
    a is at most delta + x a and 1 - (1 - delta - a) / x, with x = e^epsilon. The lines cross at
    a = (1 - delta) / (1 + x), where both are 1 - a. For every y in [1, x], the smaller of both, minus y a, is largest
    there. So the delta at the epsilon ln y is at most 1 - (1 + y) (1 - delta) / (1 + x).
    """
    crossings = np.maximum.accumulate(((1 - deltas) / (1 + growth))[::-1])[::-1]
    return np.minimum(deltas, 1 - (1 + growth) * crossings)


def _mu(growth: np.ndarray, deltas: np.ndarray, slack: float) -> float:
    """Returns the least mu, rounded up, for which the lines 1 - delta - e^epsilon a prove mu-GDP up to `slack`.

    growth: e^epsilon, float64 (n,), rising from 1. deltas: float64 (n,), falling.

    Proof: L(a), the largest of the lines, is a lower bound on the type II error at a type I error a. So the run's delta
    at any epsilon >= 0 is at most the largest 1 - L(a) - e^epsilon a. L is convex, its last slope is -1, and
    e^epsilon >= 1, so the maximum is at a corner of L or at a = 0. Let G(a) = Phi(Phi^-1(1 - a) - mu) be the
    trade-off function of mu-GDP. Where L(a) >= G(a) - slack, 1 - L(a) - e^epsilon a is at most
    1 - G(a) - e^epsilon a + slack, and thus at most delta_mu(epsilon) + slack. At a = 0 this holds because
    L(0) = 1 - deltas[-1]; mu is chosen so that it holds at the corners.
    """
    if deltas[0] <= slack:
        return 0.0
    if deltas[-1] > slack:
        return math.inf
    hull: list[int] = []  # lower convex hull of the points (growth, delta): no other line is the largest anywhere
    for point in range(len(growth)):
        while len(hull) > 1 and _slope(growth, deltas, *hull[-2:]) >= _slope(growth, deltas, hull[-1], point):
            hull.pop()
        hull.append(point)
    x, y = growth[hull], deltas[hull]
    type_one = -np.diff(y) / np.diff(x)
    type_two = 1 - y[:-1] - x[:-1] * type_one
    with np.errstate(invalid="ignore"):
        needed = -special.ndtri(type_one) - special.ndtri(np.clip(type_two + slack, 0, 1))
    worst = max(0.0, float(np.max(np.nan_to_num(needed, nan=0.0, posinf=math.inf))))  # nan: the corners (0, 1), (1, 0)
    return worst + _ROUNDING * (1 + worst)


def _slope(x: np.ndarray, y: np.ndarray, first: int, second: int) -> float:
    return (y[second] - y[first]) / (x[second] - x[first])
