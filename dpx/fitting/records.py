"""The results of `fit`, and what its callbacks are given."""

from typing import Any, NamedTuple

from dpx.accounting.words import upper, whose
from dpx.gradients import Unreleased
from dpx.reports.report import PrivacyReport
from dpx.trees import Tree, outlined

RESERVED = ("step", "epsilon", "unreleased_loss", "skipped")  # in the history, beside the metrics


class Progress(NamedTuple):
    """A run after some of its steps. All but the `unreleased` fields is covered by epsilon.

    step: int, how many steps were made. epsilon: float, of the run if it ended now, for the unit of the run's report:
        that of all planned steps, or of those that were made under `public_stop=True`.
    params: like the parameters, copies which a callback may keep. state: of the optimizer, copied too.
    metrics: what `evaluate` returned, floats by name; {} without `evaluate`.
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

    __repr__ = outlined


class FitResult(NamedTuple):
    """A finished run.

    params: like the parameters, private at (epsilon, delta). state: of the optimizer; share
        `dpx.publishable_state(state)`.
    steps: int, how many the state has made. epsilon: float, an upper bound at `delta` for these and all planned steps,
        also those that an earlier call with these checkpoints planned; under `public_stop=True`, for these alone.
    report: the `dpx.privacy_report` of the state, which says whom epsilon is for. Its `spent` is the same number.
    history: one dict for each evaluation, with "step", "epsilon", the metrics by their names, and "unreleased_loss",
        which is NOT private. Where the run continued on other devices, a row has "step", "epsilon" and "skipped", how
        many steps were counted without any training.
    """

    params: Tree
    state: Tree
    steps: int
    epsilon: float
    delta: float
    report: PrivacyReport
    history: list[dict[str, Any]]

    __repr__ = outlined

    @property
    def skipped(self) -> int:
        """How many of the steps were counted and not made, because the run continued on other devices."""
        return sum(row.get("skipped", 0) for row in self.history)

    def plot(self, *, unreleased: bool = False, figure: Any = None) -> Any:
        """Draws the metrics and epsilon over the steps, a panel for each, on a matplotlib figure, and returns it.

        Both may be shared: metrics are functions of the private parameters and of public data. Between two evaluations,
        epsilon is drawn as at the later one, which is an upper bound.

        unreleased: whether to draw the training loss of the batches, too. It is NOT private, and its panel says so.
        figure: a new one by default.
        """
        metrics = dict.fromkeys(name for row in self.history for name in row if name not in RESERVED)
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
        spent.set_ylabel(f"epsilon at delta {upper(self.delta, 6)}{whose(self.report.records)}")
        if budget is not None and (budget.delta, budget.records) == (self.delta, self.report.records):
            spent.axhline(budget.epsilon, color="k", linestyle="--", linewidth=1, label="target")
            spent.legend()
        if unreleased:
            panels[-1].set_ylabel("training loss")
            panels[-1].set_title("NOT private", color="red")
        panels[-1].set_xlabel("steps")
        return figure
