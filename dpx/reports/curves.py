"""Privacy curves of a mechanism: epsilon over the steps, delta over epsilon, and the trade-off function.

The three functions return arrays. `plot_epsilon_over_steps`, `plot_delta_over_epsilon` and `plot_trade_off` draw them
with matplotlib, which they import when called.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from dpx.accounting import checks
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.cost import cost_of_run, records_per_unit_of_run
from dpx.accounting.pld.losses import BUCKETS
from dpx.reports.attacks import attack_bounds_of_profile
from dpx.reports.rendering import draw_guessing_line, labeled_axes
from dpx.values import for_whom, repr_with_shapes, require_floats, require_whole, rounded_up

_BUCKETS = 64  # distinct releases in each point of a curve over steps: about a second per point for 10,000 releases
_NEGLIGIBLE_DELTA = 1e-6  # a smaller delta cannot be seen in a trade-off curve


class EpsilonOverSteps(NamedTuple):
    """Epsilon as a function of the number of steps.

    steps: int64 (points,), increasing. epsilon: float64 (points,), upper bounds on epsilon after that many steps.
    delta: float, the delta of these epsilons. by_epoch: bool, whether the first step of an epoch costs as much as the
        whole epoch; then the steps are the first one and the ends of epochs, and between two, the later epsilon holds.
    records: int, the most records of the person whom epsilon protects; 1 is one unit that the sampling draws.
    """

    steps: np.ndarray
    epsilon: np.ndarray
    delta: float
    by_epoch: bool
    records: int = 1

    __repr__ = repr_with_shapes


class DeltaOverEpsilon(NamedTuple):
    """Delta as a function of epsilon.

    epsilon: float64 (points,), as given. delta: float64 (points,), an upper bound at each epsilon.
    records: int, the most records of the person whom epsilon protects; 1 is one unit that the sampling draws.
    """

    epsilon: np.ndarray
    delta: np.ndarray
    records: int = 1

    __repr__ = repr_with_shapes


class TradeOff(NamedTuple):
    """The error rates of the best test for whether one example, or all records of one person, took part.

    type_one: float64 (points,), how often the test says yes although the example did not take part.
    type_two: float64 (points,), a lower bound on how often it says no although the example did.
    records: int, the most records that the person owns; 1 is one unit that the sampling draws.
    """

    type_one: np.ndarray
    type_two: np.ndarray
    records: int = 1

    __repr__ = repr_with_shapes


def epsilon_over_steps(
    mechanism: Any,
    steps: int,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
    points: int = 40,
) -> EpsilonOverSteps:
    """Computes upper bounds on the epsilon spent at `delta`, at up to `points` numbers of steps from 1 to `steps`.

    If the first step of an epoch costs as much as the whole epoch, as with `dpx.ShuffledEpochs`, the points are at the
    ends of epochs (with `CyclicPoissonSampling`, of rounds in which each group has one turn).

    mechanism: a `dpx.Mechanism`. steps: int, at least 1. delta: in (0, 1).
    points: int, at least 2; keep it small, because every point composes its own event. The last point equals
        `dpx.epsilon`; earlier points use at most 64 distinct releases.
    accountant: "tightest", "pld" or "rdp". relation: None takes the sampling's. records: the most examples that one
        person owns, as for `dpx.epsilon`.
    Raises ValueError for too few steps or points, and as `dpx.epsilon` does.
    """
    steps, points = require_whole("steps", steps), require_whole("points", points, minimum=2)
    sampling = mechanism.sampling
    epoch = max(sampling.group_count, sampling.steps_per_exact_epoch)  # steps of an epoch or of a round of groups
    epoch = epoch if epoch > 1 and sampling.event(np.ones(1)) == sampling.event(np.ones(epoch)) else 1
    ends = np.linspace(1, steps, points) if epoch == 1 else np.linspace(math.ceil(steps / epoch), 1, points - 1)
    steps_shown = np.unique(np.append(1, np.minimum(ends.round().astype(np.int64) * epoch, steps)))
    spent = []
    for step in steps_shown.tolist():
        cost = cost_of_run(mechanism, step, relation, records=records)
        profile = cost.profile(accountant, buckets=BUCKETS if step == steps else _BUCKETS)
        spent.append(profile.epsilon(delta))
    spent = np.minimum.accumulate(spent[::-1])[::-1]  # fewer steps cannot cost more
    return EpsilonOverSteps(
        steps_shown, spent, checks.require_delta(delta), epoch > 1, records_per_unit_of_run(mechanism, records)
    )


def delta_over_epsilon(
    mechanism: Any,
    steps_or_state: Any,
    *,
    epsilons: Any,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
) -> DeltaOverEpsilon:
    """Computes upper bounds on delta at each of `epsilons`, within 0.1% of `dpx.accounting.delta`.

    epsilons: float (points,), at least 0. Many points cost little, because nearby epsilons share one composition.
    The other arguments are as for `dpx.accounting.delta`. Raises ValueError for a negative epsilon, and as
    `dpx.accounting.delta` does.
    """
    given = np.atleast_1d(require_floats("epsilons", epsilons))
    values = np.array([checks.require_epsilon(value) for value in given])
    cost = cost_of_run(mechanism, steps_or_state, relation, records=records)
    profile = cost.profile(accountant, curve=True)
    deltas = {value: profile.delta(value) for value in sorted(values.tolist())}
    of_values = np.array([deltas[value] for value in values.tolist()])
    return DeltaOverEpsilon(values, of_values, cost.records)


def trade_off(
    mechanism: Any,
    steps_or_state: Any,
    *,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    records: int | None = None,
    points: int = 101,
) -> TradeOff:
    """Computes a lower bound on the type II error of every test, at type I errors from 0 to 1.

    f(a) = max over epsilon of (1 - delta(epsilon) - e^epsilon a, e^-epsilon (1 - delta(epsilon) - a)), where delta is
    an upper bound (Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383). Perfect privacy is f(a) = 1 - a.

    points: int, at least 2. The other arguments are as for `dpx.accounting.delta`.
    Raises ValueError for fewer points, and as `dpx.accounting.delta` does.
    """
    type_one = np.linspace(0, 1, require_whole("points", points, minimum=2))
    cost = cost_of_run(mechanism, steps_or_state, relation, records=records)
    profile = cost.profile(accountant, curve=True)
    most = np.array(attack_bounds_of_profile(profile, _NEGLIGIBLE_DELTA, type_one.tolist()).true_positive_rates)
    return TradeOff(type_one, 1 - most, cost.records)


def plot_epsilon_over_steps(curve: EpsilonOverSteps, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve on matplotlib `axes`, new ones by default, and returns them.

    The curve is a staircase if the first step of an epoch costs the whole epoch. label: the curve's label in a legend.
    """
    axes = labeled_axes(
        axes, "steps of the run", f"epsilon spent at delta {rounded_up(curve.delta, 6)}{for_whom(curve.records)}"
    )
    axes.plot(curve.steps, curve.epsilon, label=label, drawstyle="steps-pre" if curve.by_epoch else "default")
    axes.update_datalim([(0, 0)])
    axes.autoscale_view()
    return axes


def plot_delta_over_epsilon(curve: DeltaOverEpsilon, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve on matplotlib `axes`, new ones by default, with a logarithmic delta axis, and returns them.

    label: the curve's label in a legend.
    """
    axes = labeled_axes(axes, f"epsilon{for_whom(curve.records)}", "delta (upper bound)")
    axes.semilogy(curve.epsilon, np.maximum(curve.delta, 1e-300), label=label)
    return axes


def plot_trade_off(curve: TradeOff, *, axes: Any = None, label: str | None = None) -> Any:
    """Draws the curve, and guessing (1 - type I error), on matplotlib `axes`, new by default, and returns them.

    label: the curve's label in a legend.
    """
    of_type_one = f"type I error (false positive rate){for_whom(curve.records)}"
    axes = labeled_axes(axes, of_type_one, "type II error (false negative rate)")
    axes.plot(curve.type_one, curve.type_two, label=label)
    draw_guessing_line(axes, [0, 1], [1, 0])
    return axes
