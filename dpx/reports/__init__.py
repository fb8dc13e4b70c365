"""What people read about a privacy cost: a report to publish, bounds on attacks, curves, and plans for a run.

* A report to publish beside a model: `privacy_report`.
* What the cost means for an attacker: `attack_bounds`, `plot_attack_bounds`.
* Epsilon after each step, delta at each epsilon, and the trade-off function, as arrays and plots: `curves`.
* The noise that a budget needs for many batch sizes and epochs, as a table and a plot: `plan_noise`; for each sampling:
  `plan_samplings`. The model size, batch size and number of steps to choose, from your own small runs: `fit_scale_law`.

`dpx.accounting` computes the numbers. Nothing here changes them, and every printed bound is rounded up.
"""

from dpx.reports import curves
from dpx.reports.attacks import AttackBounds, attack_bounds, plot_attack_bounds
from dpx.reports.plan import NoisePlan, PlannedRun, PlannedSampling, SamplingPlan, plan_noise, plan_samplings
from dpx.reports.report import PrivacyReport, privacy_report
from dpx.reports.scale_law import MeasuredRun, PredictedRun, ScaleLaw, ScalePlan, fit_scale_law

__all__ = [
    "AttackBounds",
    "MeasuredRun",
    "NoisePlan",
    "PlannedRun",
    "PlannedSampling",
    "PredictedRun",
    "PrivacyReport",
    "SamplingPlan",
    "ScaleLaw",
    "ScalePlan",
    "attack_bounds",
    "curves",
    "fit_scale_law",
    "plan_noise",
    "plan_samplings",
    "plot_attack_bounds",
    "privacy_report",
]


def __dir__() -> list[str]:
    """Lists the public names, without the files that define them."""
    return __all__
