"""Scale laws: predict from the losses of small runs which model size, batch size and steps suit a privacy budget."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from dpx.reports.plan import NoisePlan, PlannedRun
from dpx.values import require_number, require_whole

_NAMES = ("parameters", "steps", "step_noise")


class MeasuredRun(NamedTuple):
    """A run whose loss is known.

    parameters: int, how many are trained. steps: int. step_noise: float, the noise multiplier divided by the expected
    batch size, as in `PlannedRun.step_noise`. loss: float.
    """

    parameters: int
    steps: int
    step_noise: float
    loss: float


class PredictedRun(NamedTuple):
    """One row of a `ScalePlan`. parameters: int. run: from the `NoisePlan`. loss: float, predicted by the law."""

    parameters: int
    run: PlannedRun
    loss: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleLaw:
    """Predicts a run's loss from its numbers of parameters and steps and its step noise, within the measured range.

    levels: three rising tuples, the measured parameters, steps and step noises. losses: float, with one axis for each.
    Between the levels, the loss is linear in the logarithms.
    """

    levels: tuple[tuple[float, ...], ...]
    losses: np.ndarray

    def loss(self, *, parameters: float, steps: float, step_noise: float) -> float:
        """Returns the predicted loss. Raises ValueError for a number outside the measured range."""
        numbers = parameters, steps, step_noise
        if outside := self._extrapolation_in_words(numbers):
            raise ValueError(outside)
        return _interpolated_training_loss(self.levels, self.losses, numbers)

    def _extrapolation_in_words(self, numbers: Sequence[float]) -> str:
        """Names the first number that is outside its measured range; "" if there is none."""
        for name, number, levels in zip(_NAMES, numbers, self.levels, strict=True):
            if not levels[0] <= number <= levels[-1]:
                return f"{name} must be in the measured [{levels[0]:g}, {levels[-1]:g}], got {number:g}"
        return ""

    @property
    def held_out_error(self) -> float:
        """The root mean square error of `loss` at inner levels left out in turn; NaN if each has only two levels."""
        missed = []
        for axis, levels in enumerate(self.levels):
            for place in range(1, len(levels) - 1):
                others = tuple(np.delete(one, place) if axis == at else one for at, one in enumerate(self.levels))
                kept = np.delete(self.losses, place, axis)
                for at in itertools.product(*map(range, self.losses.shape)):
                    if at[axis] == place:
                        numbers = [one[number] for one, number in zip(self.levels, at, strict=True)]
                        missed.append(_interpolated_training_loss(others, kept, numbers) - self.losses[at])
        return float(np.sqrt(np.mean(np.square(missed)))) if missed else math.nan

    def plan(
        self, noise: NoisePlan, *, parameters: Sequence[int] | None = None, compute: float = math.inf
    ) -> "ScalePlan":
        """Predicts the loss of models of several sizes, for each batch size and number of epochs of `noise`.

        noise: from `dpx.plan_noise`. parameters: model sizes; None takes the measured ones. compute: the largest
        allowed parameters x batch size x steps of a run, without limit by default. Raises ValueError for sizes below 1,
        and if no run is both within `compute` and within the measured range.
        """
        sizes = self.levels[0] if parameters is None else [require_whole("parameters", size) for size in parameters]
        within = [
            (run, (int(size), run.steps, run.step_noise))
            for size in sizes
            for run in noise.runs
            if size * run.batch_size * run.steps <= compute
        ]
        runs = [
            PredictedRun(numbers[0], run, _interpolated_training_loss(self.levels, self.losses, numbers))
            for run, numbers in within
            if not self._extrapolation_in_words(numbers)
        ]
        if not runs:
            words = f"; {self._extrapolation_in_words(within[0][1])}" if within else ""
            raise ValueError(f"a run must be within compute {compute:g} and the measured numbers{words}")
        runs.sort(key=lambda one: one.loss)
        return ScalePlan(law=self, noise=noise, runs=tuple(runs), beyond=len(within) - len(runs))


@dataclass(frozen=True, kw_only=True, repr=False)
class ScalePlan:
    """The runs that a budget allows, the least predicted loss first; `str` is a table.

    law, noise: the inputs. runs: tuple of `PredictedRun`. beyond: int, how many runs are outside the measured range.
    """

    law: ScaleLaw
    noise: NoisePlan
    runs: tuple[PredictedRun, ...]
    beyond: int

    @property
    def best(self) -> PredictedRun:
        """The run with the least predicted loss. Runs within `law.held_out_error` of it are as good."""
        return self.runs[0]

    def __repr__(self) -> str:
        size, run, loss = self.best
        words = f"{size} parameters, batch size {run.batch_size}, {run.steps} steps, expected loss {loss:.4g}"
        return f"ScalePlan({len(self.runs)} runs; best: {words}; print it for the table)"

    def __str__(self) -> str:
        titles = f"{'parameters':>11} {'batch size':>10} {'steps':>7} {'noise multiplier':>16} {'expected loss':>13}"
        rows = [
            f"{size:11} {run.batch_size:10} {run.steps:7} {run.noise_multiplier:16.4f} {loss:13.4f}"
            for size, run, loss in self.runs
        ]
        error, beyond = self.law.held_out_error, self.beyond
        words = f"Expect differences of {error:.2g}. Runs beyond the measured ones, left out: {beyond}."
        return "\n".join([repr(self.noise), titles, *rows, words])


def fit_scale_law(runs: Iterable[MeasuredRun]) -> ScaleLaw:
    """Fits a law to small runs, so that you can choose the model size, batch size and steps for a budget.

        law = dpx.reports.fit_scale_law(runs)
        print(law.plan(dpx.plan_noise(examples=10**6, epsilon=2.0, delta=1e-7)))

    runs: one loss for every combination of at least two parameter counts, two step counts and two values of step noise
        (the noise multiplier divided by the batch size). If several runs have the same three values, perhaps with
        different learning rates, the least loss counts. One training run can give losses at several numbers of steps.

    Batch size affects a private run mostly through its noise. So a small run needs no large batch: give it the step
    noise of the large run, as the noise multiplier `step_noise * batch_size`. Use public data of the same kind, or
    count the cost of these runs, because their losses read the data. Raises ValueError if one of the three values is
    not positive, and for missing combinations.
    Source: McKenna et al. 2025, "Scaling Laws for Differentially Private Language Models",
    https://arxiv.org/abs/2501.18914, whose law has the same three inputs and, like this one, interpolates measurements.
    """
    found: dict[tuple[float, ...], float] = {}
    for run in runs:
        numbers: Any = [
            require_number(name, one, minimum=0, exclusive=True) for name, one in zip(_NAMES, run[:3], strict=True)
        ]
        loss = require_number("loss", run[3], minimum=-math.inf)
        found[tuple(numbers)] = min(loss, found.get(tuple(numbers), math.inf))
    levels = tuple(tuple(sorted(set(column))) for column in zip(*found, strict=True))
    for name, one in zip(_NAMES, levels or ((),) * 3, strict=True):
        if len(one) < 2:
            raise ValueError(f"runs must have at least two different {name}, got {len(one)}")
    combinations = list(itertools.product(*levels))
    if len(found) < len(combinations):
        raise ValueError(
            f"runs must have a loss for each of the {len(combinations)} combinations of their parameters, steps and "
            f"step_noise, got {len(found)}"
        )
    losses = np.array([found[numbers] for numbers in combinations]).reshape([len(one) for one in levels])
    return ScaleLaw(levels=levels, losses=losses)


def _interpolated_training_loss(levels: Sequence[Any], losses: np.ndarray, numbers: Sequence[float]) -> float:
    return float(RegularGridInterpolator([np.log(one) for one in levels], losses)(np.log(numbers)).item())
