"""Privacy accounting: how much privacy a run costs, and how much noise a budget needs.

Which function answers which question:

* The cost of a run, from its mechanism and its state or number of steps: `epsilon`, `delta`. The cost of several runs
  on the same data: `compose_runs`.
* The noise that a budget needs: `calibrate`, or a `Budget` in place of a noise multiplier; `accepts_budget` lets your
  own function accept one. The most steps that a budget allows: `max_steps`.
* The cost of a search for hyperparameters on private data: `best_of`, for `dpx.tuning.search`.
* The cost of a run of DP-SGD, by any library, from its parameters: `dp_sgd_epsilon`.
* The cost without a mechanism: `schedule_epsilon`, `schedule_delta` and `calibrate_schedule` for noise multipliers,
  `event_epsilon` and `event_delta` for a dp-accounting event, `gdp` for Gaussian differential privacy.

Every epsilon and delta is an upper bound; an interval adds a lower bound. The proofs:

* Poisson-sampled Gaussians: `pld/losses.py` (one step, long schedules), `pld/composition.py` (many), `pld/renyi.py`
  ("rdp"). Several releases of one batch: `flat_event.py`. Unsampled Gaussians: `gdp.py`.
* Random allocation: `allocation.py`.
* Samples of a fixed or limited size: `limited_samples.py`. Runs on shared batches: `compose.py`.
* A unit of several records, and mixtures of Gaussians, whose pairs have the same form: `groups.py`.
* The best of a random number of trials: `selection.py`. Releases with delta 0: `loss.py`.
* Correlated noise, error feedback and fresh projections: with their papers, in `dpx/papers`.
* What the arithmetic of the noise adds to each of these: `arithmetic.py`. The cost of a run always includes it
  (`cost.profile_of_run`); the cost of an event (`event_epsilon`, `event_delta`) and the lower end of an interval are
  for exact noise.

To add one: write a new event in its own file, like `dpx/papers/d2p2_sgd/cost.py`; no other file changes. It holds

* an `attrs.frozen` subclass of `DpEvent` and `PrivacyLoss`, which overrides the defaults of `PrivacyLoss` that do not
  fit. Call its noise `noise_multiplier`, because a state's fingerprint leaves out the field of that name;
* the `StepLoss` that its `step_loss` returns, with `renyi` and, if a privacy loss distribution is known, `pmfs`
  (`pld/losses.py`); or, for a whole run, a `profile`, like `dpx/papers/dice_sgd/cost.py`.

It needs these tests: costs in `tests/record_bills.py` (run it to record them), a `tests/test_accounting_*.py` that
compares them with an independent computation, a case in `tests/mechanisms.py`, and a fault in `tests/faults.txt` for
each line that makes it a bound.
"""

from dpx.accounting import gdp
from dpx.accounting.budget import Budget, CalibratedSchedule, accepts_budget, calibrate, calibrate_schedule, max_steps
from dpx.accounting.compose import Composition, Selection, best_of, compose_runs
from dpx.accounting.cost import delta, epsilon, event_delta, event_epsilon
from dpx.accounting.loss import PrivacyLoss, PureDpEvent
from dpx.accounting.schedule import Interval, dp_sgd_epsilon, schedule_delta, schedule_epsilon
from dpx.states.reading import steps_taken

__all__ = [
    "Budget",
    "CalibratedSchedule",
    "Composition",
    "Interval",
    "PrivacyLoss",
    "PureDpEvent",
    "Selection",
    "best_of",
    "calibrate",
    "calibrate_schedule",
    "accepts_budget",
    "compose_runs",
    "delta",
    "dp_sgd_epsilon",
    "epsilon",
    "event_delta",
    "event_epsilon",
    "gdp",
    "max_steps",
    "schedule_delta",
    "schedule_epsilon",
    "steps_taken",
]


def __dir__() -> list[str]:
    """The public names, without the files that hold them."""
    return __all__
