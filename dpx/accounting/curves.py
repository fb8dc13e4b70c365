"""Privacy curves of any mechanism, through its event: epsilon over the steps, delta(epsilon), and the trade-off
function.

Arrays from `epsilon_over_steps`, `delta_over_epsilon` and `trade_off`; the same drawn by matplotlib (imported when
used) from `plot_epsilon_over_steps`, `plot_delta_over_epsilon` and `plot_trade_off`.
"""

from typing import Any, NamedTuple

import numpy as np

from dpx.accounting import checks
from dpx.accounting.bill import billed
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import event_epsilon, event_profile

_BUCKETS = 64  # distinct releases in each point of a curve
_NEGLIGIBLE = 1e-10  # a delta that no trade-off shows


class EpsilonOverSteps(NamedTuple):
    """int64 (points,), float64 (points,)."""

    steps: np.ndarray
    epsilon: np.ndarray


class DeltaOverEpsilon(NamedTuple):
    """float64 (points,) each."""

    epsilon: np.ndarray
    delta: np.ndarray


class TradeOff(NamedTuple):
    """Error rates of the best test for whether one example took part: float64 (points,) each."""

    type_one: np.ndarray
    type_two: np.ndarray


def epsilon_over_steps(
    mechanism: Any,
    steps: int,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    points: int = 40,
) -> EpsilonOverSteps:
    """Epsilon spent so far, an upper bound at each of at most `points` steps spread over 1 .. steps.

    Every point composes its own event, a long schedule in 64 buckets (a second at 10,000 distinct multipliers):
    keep `points` small.
    """
    if checks.steps(steps) == 0:
        raise ValueError("steps must be at least 1, got 0")
    at = np.unique(np.linspace(1, steps, _points(points)).round().astype(np.int64))
    spent = []
    for step in at:
        event, asked = billed(mechanism, int(step), relation)
        spent.append(event_epsilon(event, delta=delta, accountant=accountant, relation=asked, buckets=_BUCKETS))
    return EpsilonOverSteps(at, np.array(spent))


def delta_over_epsilon(
    mechanism: Any,
    steps_or_state: Any,
    *,
    epsilons: Any,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
) -> DeltaOverEpsilon:
    """delta at each of `epsilons` (points,), upper bounds within 0.1 % of `dpx.delta`.

    A composition serves all larger epsilons that it resolves, so a smooth curve takes few.
    """
    values = np.array([checks.epsilon(value) for value in np.atleast_1d(np.asarray(epsilons, np.float64))])
    event, relation = billed(mechanism, steps_or_state, relation)
    profile = event_profile(event, accountant=accountant, relation=relation, curve=True)
    found = {value: profile.delta(value) for value in sorted(values.tolist())}
    return DeltaOverEpsilon(values, np.array([found[value] for value in values.tolist()]))


def trade_off(
    mechanism: Any,
    steps_or_state: Any,
    *,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    points: int = 101,
) -> TradeOff:
    """The least type II error of a test at each type I error in 0 .. 1 (points,), from below: no test does better.

    f(a) = max over epsilon of (1 - delta(epsilon) - e^epsilon a, e^-epsilon (1 - delta(epsilon) - a)), with delta an
    upper bound (Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383). 1 - a everywhere is perfect privacy.
    """
    type_one = np.linspace(0, 1, _points(points))
    event, relation = billed(mechanism, steps_or_state, relation)
    profile = event_profile(event, accountant=accountant, relation=relation, curve=True)
    epsilons, deltas = [], []
    for value in (0.0, *np.geomspace(1e-3, 50, 160).tolist()):
        epsilons.append(value)
        deltas.append(profile.delta(value))
        if deltas[-1] < _NEGLIGIBLE:
            break
    delta, grow = np.array(deltas), np.exp(epsilons)
    lines = [1 - delta - grow * type_one[:, None], (1 - delta - type_one[:, None]) / grow]
    return TradeOff(type_one, np.maximum(0, np.maximum(*lines).max(axis=1)))


def plot_epsilon_over_steps(curve: EpsilonOverSteps, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve; gives the matplotlib axes."""
    axes = _axes(axes, "step", "epsilon spent")
    axes.plot(curve.steps, curve.epsilon, label=label)
    return axes


def plot_delta_over_epsilon(curve: DeltaOverEpsilon, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve, delta on a logarithmic axis; gives the matplotlib axes."""
    axes = _axes(axes, "epsilon", "delta")
    axes.semilogy(curve.epsilon, np.maximum(curve.delta, 1e-300), label=label)
    return axes


def plot_trade_off(curve: TradeOff, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve; gives the matplotlib axes."""
    axes = _axes(axes, "type I error", "type II error")
    axes.plot(curve.type_one, curve.type_two, label=label)
    return axes


def _axes(axes: Any, x: str, y: str) -> Any:
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots()
    axes.set(xlabel=x, ylabel=y)
    return axes


def _points(points: int) -> int:
    if isinstance(points, bool) or not isinstance(points, int | np.integer) or points < 2:
        raise ValueError(f"points must be an integer of at least 2, got {points!r}")
    return int(points)
