"""The page of an experiment: the table with the paper's figures beside ours, and a plot where the epochs count."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.papers.experiment import TUNING_SEED, Experiment
from examples.papers.rows import Outcome
from examples.records import rounded_up
from examples.runs import described

HEAD = (
    "| method | claimed epsilon | paper | noise of the paper | its true epsilon | ours with this noise, mean "
    "(each seed) | noise for the claimed epsilon | ours at the claimed epsilon, mean (each seed) | minus {baseline} "
    "| chosen |\n|---|---|---|---|---|---|---|---|---|---|"
)


def scores(results: list[dict[str, Any]]) -> list[float]:
    """The headline metric of each run; accuracies in percent."""
    scale = 100 if results and "accuracy" in results[0]["headline"] else 1
    return [scale * result["metrics"][result["headline"]] for result in results]


NOT_RUN = "not run"


def table(experiment: Experiment, outcomes: Sequence[Outcome]) -> str:
    """A row of Markdown for each outcome."""
    lines = [HEAD.format(baseline=experiment.baseline)]
    base = {one.row.claimed: one.at_epsilon for one in outcomes if one.row.label == experiment.baseline}
    for one in outcomes:
        row, ours = one.row, scores(one.at_epsilon)
        noise, true, with_noise, own_noise, each, minus = "", "", "", "", NOT_RUN, ""
        if row.noise is not None:
            with_noise = NOT_RUN
        if one.at_noise:
            noise, true = f"{one.at_noise[0]['noise_multiplier']:.4g}", f"**{rounded_up(one.at_noise[0]['epsilon'])}**"
            with_noise = measured(scores(one.at_noise))
        if ours:
            own_noise, each = f"{one.at_epsilon[0]['noise_multiplier']:.4g}", measured(ours)
        if ours and row.label != experiment.baseline:
            minus = difference(ours, scores(base.get(row.claimed, [])))
        published = "" if row.published is None else f"{row.published:.2f}"
        choice = NOT_RUN if one.choice is None else described(flat(one.choice)) if one.choice else ""
        cells = [row.label, f"{row.claimed:g}", published, noise, true, with_noise, own_noise, each, minus, choice]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measured(values: Sequence[float]) -> str:
    """The mean, and the value of each seed."""
    return f"**{statistics.mean(values):.2f}** ({', '.join(f'{value:.2f}' for value in values)})"


def further(experiment: Experiment, outcomes: Sequence[Outcome]) -> str:
    """The other metrics, mean over the seeds, at the claimed epsilon and with the paper's noise."""
    head = ["method", "epsilon", *(name.replace("_", " ") for name in experiment.also)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in outcomes:
        for results in (one.at_epsilon, one.at_noise):
            if results:
                means = [statistics.mean(result["metrics"][name] for result in results) for name in experiment.also]
                cells = [one.row.label, f"{results[0]['epsilon']:.4g}", *(f"{mean:.2f}" for mean in means)]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(ours: list[float], base: list[float]) -> str:
    """The mean of the differences at equal seeds, and its standard error."""
    differences = [one - other for one, other in zip(ours, base, strict=False)]
    if not differences:
        return ""
    mean = f"{statistics.mean(differences):+.2f}"
    if len(differences) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(differences) / math.sqrt(len(differences)):.2f}"


def flat(choice) -> dict[str, Any]:
    """The choice with the options of the method and of the task beside the other fields."""
    own = [choice.get(name, {}) for name in ("method_options", "task_options")]
    rest = {name: value for name, value in choice.items() if name not in ("method_options", "task_options")}
    return rest | own[0] | own[1]


def page(experiment: Experiment, outcomes: Sequence[Outcome], *, heading: str, plot: str | None) -> str:
    """The whole page in Markdown. plot: the name of the file with the plot."""
    settings = f"All rows: {described(flat(dict(experiment.common)))}."
    tried = len(outcomes[0].row.grid)
    where = "each claimed epsilon" if experiment.tune_at is None else f"epsilon {experiment.tune_at:g}"
    if tried > 1:
        settings += (
            f" Each method had {tried} trials on seed {TUNING_SEED} at {where}; the best is run on the other seeds."
        )
    parts = [f"# {experiment.name}: {experiment.title}", heading, experiment.truth]
    parts += [f"Data: {experiment.stand_in}"] if experiment.stand_in else []
    parts += [settings, table(experiment, outcomes)]
    parts += [further(experiment, outcomes)] if experiment.also else []
    parts += [f"![{experiment.title}]({plot})"] if plot else []
    return "\n\n".join(parts) + "\n"


def draw(experiment: Experiment, outcomes: Sequence[Outcome], file: Path) -> None:
    """The headline metric over the epochs at the claimed epsilon, a line for each row. Bands: from least to most."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for one in outcomes:
        if one.at_epsilon:
            x, middle, low, high = by_epoch(one.at_epsilon)
            (line,) = axes.plot(x, middle, linewidth=1.3, label=f"{one.row.label}, epsilon {one.row.claimed:g}")
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            headline = one.at_epsilon[0]["headline"]
            axes.set_ylabel(headline.replace("_", " ") + (" (%)" if "accuracy" in headline else ""))
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)
    # The hash makes the file a function of the numbers; text as text makes it short.
    with matplotlib.rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


def by_epoch(results: Sequence[dict[str, Any]]):
    """Epochs with the mean, the least and the most of the headline metric over the seeds; accuracies in percent."""
    runs: dict[float, list[float]] = {}
    for result in results:
        headline = result["headline"]
        for line in (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            runs.setdefault(row["epoch"], []).append((100 if "accuracy" in headline else 1) * row[headline])
    x = sorted(runs)
    return x, *([measure(runs[epoch]) for epoch in x] for measure in (statistics.mean, min, max))
