"""Metrics, cost, callbacks and the progress bar, updated every few steps of a run; and the result of a run."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.setup import warn_of_unusable_gradients
from dpx.fitting import processes
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import BatchLosses, Carry, fresh_copy
from dpx.gradients import Unreleased
from dpx.reports.report import PrivacyReport
from dpx.sampling.data import CheckedData
from dpx.statistics.metrics import PrivateMetric
from dpx.values import (
    Tree,
    as_local_array,
    described,
    for_whom,
    repr_with_shapes,
    require_function,
    require_whole,
    rounded_up,
)

PRIVATE = "private_metric"
RESERVED = ("step", "epsilon", "unreleased_loss", "skipped", PRIVATE)  # names in the history that no metric may have
ENOUGH = 16  # rows from which a run warns that none has a gradient, or fewer than the share ALMOST_ALL
ALMOST_ALL = 0.9
MOST_EVALUATIONS = 40  # the default limit, because each evaluation waits for the step and computes epsilon


class Progress(NamedTuple):
    """The progress of a run so far. Epsilon covers every field except the `unreleased` ones.

    step: int, number of steps made. epsilon: float, the run's epsilon if it ended now, for the unit of its report. It
        covers all planned steps, or only those made if `public_stop=True`.
    params: a copy of the parameters, which a callback may keep. state: a copy of the optimizer state.
    metrics: floats by name: what `evaluate` returned, and as "private_metric" what `evaluate_private` released.
    unreleased_loss: float, the mean loss of the last batch. NOT private.
    unreleased: losses, norms and aux of the last batch, padding included. NOT private. None with `chunk_size`.
    unreleased_included: bool (B,), which rows of the last batch count. NOT private. None with `chunk_size`.
    """

    step: int
    epsilon: float
    params: Tree
    state: Tree
    metrics: dict[str, float]
    unreleased_loss: float
    unreleased: Unreleased | None
    unreleased_included: Any

    __repr__ = repr_with_shapes

    def __getattr__(self, name: str) -> NoReturn:
        fields = ", ".join(self._fields)
        raise AttributeError(f"a run's progress has {fields}, and no {name!r}; metrics: {list(self.metrics)}")


class Metrics(dict):
    """The measured numbers by name, in a dict whose KeyError lists the names."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"no metric is called {name!r}; there are {list(self)}")


class FitResult(NamedTuple):
    """A finished run.

    params: the trained parameters, private at (epsilon, delta). state: the optimizer state, of which you may share
        `dpx.publishable_state(state)`.
    steps: int, number of steps that the state counts. epsilon: float, an upper bound at `delta` for these and all
        planned steps, including any planned by an earlier call with these checkpoints; if `public_stop=True`, for these
        steps only. A refund from a `dpx.PrivacyLedger` does not change it, only the ledger's epsilon.
    report: the `dpx.privacy_report` of the state, which says whom epsilon protects. Its `spent` is the same number, or
        a smaller one if `fit` had `accountant="rdp"`, because a report also tries "pld".
    history: one dict per evaluation, with "step", "epsilon", the metrics by name, and "unreleased_loss", which is NOT
        private. If the run continued on other devices, a row has "step", "epsilon" and "skipped", the number of
        steps that cost epsilon but trained nothing, because their noise may have been used before.
    """

    params: Tree
    state: Tree
    steps: int
    epsilon: float
    delta: float
    report: PrivacyReport
    history: list[dict[str, Any]]

    __repr__ = repr_with_shapes

    def __getattr__(self, name: str) -> NoReturn:
        fields = ", ".join(self._fields)
        raise AttributeError(
            f"the result of a run has {fields}, and no {name!r}; each row of its history has the metrics"
        )

    @property
    def skipped(self) -> int:
        """The number of steps that cost epsilon but trained nothing, because the run resumed on other devices."""
        return sum(row.get("skipped", 0) for row in self.history)

    def plot(self, *, unreleased: bool = False, figure: Any = None) -> Any:
        """Plots epsilon and each metric over the steps, each in its own panel, and returns the matplotlib figure.

        You may share these panels: metrics are functions of the private parameters and of public data. Between two
        evaluations, the plot shows epsilon at the later one, an upper bound. unreleased: whether to plot the training
        loss of the batches too. It is NOT private, and its panel says so. figure: where to plot; None creates one.
        """
        metrics = dict.fromkeys(name for row in self.history for name in row if name == PRIVATE or name not in RESERVED)
        names = [*metrics, "epsilon", *(["unreleased_loss"] if unreleased else [])]
        if figure is None:
            from matplotlib import pyplot

            figure = pyplot.figure(figsize=(6.4, 2.4 * len(names)), layout="constrained")
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, names, strict=True):
            rows = [row for row in self.history if name in row]
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], ".-")
            axes.set_ylabel(name)
        spent, budget = panels[len(metrics)], self.report.budget
        spent.lines[0].set(drawstyle="steps-pre")
        spent.set_ylabel(f"epsilon at delta {rounded_up(self.delta, 6)}{for_whom(self.report.records)}")
        if budget is not None and (budget.delta, budget.records) == (self.delta, self.report.records):
            spent.axhline(budget.epsilon, color="k", linestyle="--", linewidth=1, label="target")
            spent.legend()
        if unreleased:
            panels[-1].set_ylabel("training loss")
            panels[-1].set_title("NOT private", color="red")
        panels[-1].set_xlabel("steps")
        return figure


@dataclass(kw_only=True)
class RunMonitor:
    """Evaluates a run and keeps its history.

    every: int, steps between evaluations. folder: the run's folder, which records releases of private metrics.
    looking: whether to check the rows of the next step. fruitless: how many rows were seen since the last row with a
        usable gradient, and how many of them have a finite loss. trained: whether any row had a usable gradient.
    """

    run: RunPlan
    examples: CheckedData
    evaluate: Callable[[Tree], Any] | None
    evaluate_private: PrivateMetric | None
    every: int
    callbacks: Sequence[Callable[[Progress], Any]]
    loss_at: Callable[[Tree, Tree], Tree]
    bar: Any
    history: list[dict[str, Any]] = field(default_factory=list)
    folder: Any = None
    looking: bool = True
    fruitless: tuple[int, int] = (0, 0)
    trained: bool = False
    warned: bool = False

    @classmethod
    def with_defaults(cls, run: RunPlan, every: Any, progress: bool, *, evaluate_private: Any, **users: Any) -> Self:
        """Fills in the defaults. users: `evaluate`, `callbacks`, `loss_at`, `examples`. Raises ValueError if one is not
        a function, if `every` is invalid, or if a private metric's budget has too few steps for all evaluations."""
        evaluate, callbacks = users["evaluate"], users["callbacks"]
        if evaluate is not None:
            require_function("evaluate", evaluate, "params")
            if isinstance(evaluate, PrivateMetric):
                raise ValueError("evaluate must read public data: pass a PrivateMetric as evaluate_private instead")
        if not isinstance(callbacks, list | tuple):
            raise ValueError(f"callbacks must be a list of functions, got {described(callbacks)}")
        for callback in callbacks:
            require_function("each of the callbacks", callback, "progress")
        if every is None:
            sampling = run.optimizer.sampling
            every = max(round(sampling.examples / sampling.divisor), math.ceil(run.steps / MOST_EVALUATIONS))
        every, bar = require_whole("evaluate_every", every), _progress_bar(run.steps, progress)
        if evaluate_private is not None:
            if not isinstance(evaluate_private, PrivateMetric):
                words = f"must be a dpx.statistics.PrivateMetric, got {described(evaluate_private)}"
                raise ValueError(f"evaluate_private {words}")
            evaluate_private.require_calls_in_budget(math.ceil(run.steps / every))
        return cls(run=run, every=every, bar=bar, evaluate_private=evaluate_private, **users)

    def continue_history(self, history: list[dict[str, Any]], folder: Any):
        """Continues the stored `history`. `folder` may name more private metrics than the rows show, because a killed
        program may have released some after its last checkpoint."""
        self.history, self.folder = history, folder
        if self.evaluate_private is not None:
            self.evaluate_private.count_earlier_releases(folder.known.measured)
            self.expect_metric_releases(self.evaluate_private, 0)

    def evaluations_after(self, step: int) -> int:
        """The number of evaluations planned after `step`, or 0 if public information decides when the run ends."""
        return math.ceil(self.run.steps / self.every) - math.ceil(step / self.every) if self.run.plan else 0

    def expect_metric_releases(self, metric: PrivateMetric, left: int):
        """Tells the private metric to expect `left` more releases, or more if another program planned more."""
        left = max(left, self.folder.known.looks - len(self.folder.known.measured))
        metric.expect_calls(int(self.run.optimizer.noise_key), left)

    def warn_without_gradients(self, counts: tuple, *, ended: bool = False):
        """Warns, once in a run, if no row has a usable gradient, or many have none.

        Checks the first steps, and those after each evaluation, until a row has one. counts: `BatchLosses.counts` of a
        step that the device has finished, or (). ended: whether this is the last step.
        """
        if not counts or not self.looking or self.warned:
            return
        rows, finite, usable = map(int, counts)
        self.looking, self.trained = not usable, self.trained or usable > 0
        self.fruitless = (0, 0) if usable else (self.fruitless[0] + rows, self.fruitless[1] + finite)
        seen = (rows, finite) if usable else self.fruitless
        if usable < ALMOST_ALL * seen[0] and seen[0] >= (1 if ended and not self.trained else ENOUGH):
            warn_of_unusable_gradients(*seen, usable, self.examples.some_rows, trained=self.trained)
            self.warned = True

    def add_history_row(self, step: int, carry: Carry, batch: BatchLosses) -> bool:
        """Evaluates the run, and adds a row to its history. Returns whether a callback asks to stop."""
        self.looking = True
        shown = self.evaluate is not None or self.evaluate_private is not None or self.callbacks
        params, loss = fresh_copy(carry.params) if shown else carry.params, float(batch.mean)
        epsilon = self.run.epsilon(carry.state)
        metrics = {}
        if self.evaluate is not None or self.evaluate_private is not None:
            with processes.raising_together():
                seen = self.loss_at(params, carry.state)
                metrics = {} if self.evaluate is None else metrics_by_name(self.evaluate(seen))
            if self.evaluate_private is not None:
                with processes.raising_together():
                    name = self.evaluate_private.release_and_name(seen)
                    metrics[PRIVATE] = self.evaluate_private(seen)
                measured = processes.from_every_process(name)[0]
                self.folder.record_metric_release(measured, self.evaluations_after(0))  # before anybody sees it
                self.expect_metric_releases(self.evaluate_private, self.evaluations_after(step))
            metrics = processes.from_every_process(metrics)[0]  # process 0's, if each measured on its own data
        self.history.append({"step": step, "epsilon": epsilon, **metrics, "unreleased_loss": loss})
        spent = f"epsilon {rounded_up(epsilon, 4)}{for_whom(self.run.records)}"
        words = [spent, *(f"{name} {value:.4g}" for name, value in metrics.items())]
        self.bar.set_postfix_str(", ".join([*words, f"loss {loss:.4g} (not private)"]))
        if not self.callbacks:
            return False
        unreleased, included = jax.tree.map(as_local_array, (batch.unreleased, batch.included))
        at_step = step, epsilon, params, fresh_copy(carry.state), Metrics(metrics)
        progress = Progress(*at_step, loss, unreleased, included)
        with processes.raising_together():
            asked = [_asks_to_stop(callback(progress)) for callback in self.callbacks]  # a list, so that all are called
        return any(processes.from_every_process(any(asked)))

    def settings_shared_by_processes(self) -> dict[str, Any]:
        """The settings that all processes must share, because every process takes part in each evaluation."""
        watched = {name: getattr(self, name) for name in ("evaluate", "evaluate_private", "callbacks")}
        return {"evaluate_every": self.every} | {name: "given" if of else "none" for name, of in watched.items()}


def metrics_by_name(found: Any) -> dict[str, float]:
    """The numbers that `evaluate` returned, by name. Raises ValueError for anything else."""
    named = found if isinstance(found, Mapping) else {"metric": found}
    for name, value in named.items():
        if not isinstance(name, str) or name in RESERVED:
            advice = ": give private metrics to evaluate_private" * (name == PRIVATE)
            words = f"names of evaluate must be strings other than {sorted(RESERVED)}, got"
            raise ValueError(f"{words} {described(name)}{advice}")
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or jnp.shape(value) != ():
            words = f"{described(value)} for {described(name)}"
            raise ValueError(f"evaluate must return a number, or a dict of numbers, got {words}")
    return {name: float(value) for name, value in named.items()}


def _asks_to_stop(answer: Any) -> bool:
    """Whether a callback returned True. Raises ValueError unless it returned a bool or None."""
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    if isinstance(answer, np.generic | np.ndarray | jax.Array) and answer.shape == () and answer.dtype == np.bool_:
        return bool(answer)
    raise ValueError(f"a callback must return None, or a bool (True ends the run); got {described(answer)}")


class _NoProgressBar:
    update = set_postfix_str = close = lambda self, *given: None


def _progress_bar(steps: int, progress: bool) -> Any:
    with contextlib.suppress(ImportError):
        if progress and jax.process_index() == 0:
            from tqdm import tqdm

            return tqdm(total=steps)
    return _NoProgressBar()
