"""The page of an experiment: the table with the paper's figures beside ours, and the plot where the paper has one."""

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
    """The headline metric against epsilon, against epochs with the paper's noise, or with a place for each label.

    Bands and bars: from the least to the most of the seeds. Dotted: the paper's figures at the epsilon that it claims.
    """
    import matplotlib
    from matplotlib.figure import Figure

    finished = [one.at_epsilon or one.at_noise for one in outcomes if one.at_epsilon or one.at_noise]
    headline = finished[0][0]["headline"] if finished else "not run"
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes, run = figure.add_subplot(), [one for one in outcomes if one.at_epsilon]
    metric = headline.replace("_", " ") + (" (%)" if "accuracy" in headline else "")
    if experiment.figure == "rows":
        draw_rows(axes, run)
        axes.set_xlabel(metric)
    elif experiment.figure == "grid":
        draw_grid(axes, run, metric)
    else:
        draw_lines(axes, outcomes, headline, over_epsilon=experiment.figure == "epsilon")
        axes.set_ylabel(metric)
    if experiment.figure != "grid":
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):  # so that the same figures make the same file
        figure.savefig(file, metadata={"Date": None})


def draw_rows(axes, outcomes: Sequence[Outcome]) -> None:
    several = len({one.row.claimed for one in outcomes}) > 1
    names = [one.row.label + (f", epsilon {one.row.claimed:g}" if several else "") for one in outcomes]
    values = [scores(one.at_epsilon) for one in outcomes]
    means = [statistics.mean(each) for each in values]
    low = [mean - min(each) for mean, each in zip(means, values, strict=True)]
    high = [max(each) - mean for mean, each in zip(means, values, strict=True)]
    axes.errorbar(means, names, xerr=(low, high), fmt="o", markersize=4, linewidth=1.3, capsize=2)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()


def draw_grid(axes, outcomes: Sequence[Outcome], metric: str) -> None:
    """A heat map; methods without a column are in its title."""
    means = {tuple(one.row.label.split(", ")): statistics.mean(scores(one.at_epsilon)) for one in outcomes}
    cells = {place: mean for place, mean in means.items() if len(place) == 2}
    rows, columns = list(dict.fromkeys(row for row, _ in cells)), list(dict.fromkeys(column for _, column in cells))
    for (row, column), mean in cells.items():
        axes.text(columns.index(column), rows.index(row), f"{mean:.1f}", ha="center", va="center", fontsize=7)
    if cells:
        shown = [[cells.get((row, column), math.nan) for column in columns] for row in rows]
        axes.imshow(shown, aspect="auto", alpha=0.6)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    beside = [f"{', '.join(place)}: {mean:.1f}" for place, mean in means.items() if len(place) == 1]
    axes.set_title("; ".join([metric, *beside]), fontsize=8)


def draw_lines(axes, outcomes: Sequence[Outcome], headline: str, *, over_epsilon: bool) -> None:
    """Accuracy over epsilon, a line for each method; or over the epochs, one for each method and epsilon."""
    for number, label in enumerate(dict.fromkeys(line_of(one, over_epsilon) for one in outcomes)):
        mine, color = [one for one in outcomes if line_of(one, over_epsilon) == label], f"C{number % 10}"
        x, middle, low, high = by_epsilon(mine) if over_epsilon else by_epoch(mine[0], headline)
        if x:
            marker = "o" if over_epsilon else ""
            axes.plot(x, middle, color=color, marker=marker, markersize=3, linewidth=1.3, label=label)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        published = sorted((one.row.claimed, one.row.published) for one in mine if one.row.published is not None)
        if over_epsilon and published:
            axes.plot(*zip(*published, strict=True), color=color, linestyle=":", linewidth=1)
    axes.set_xlabel("epsilon" if over_epsilon else "epoch")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)


def line_of(one: Outcome, over_epsilon: bool) -> str:
    return one.row.label if over_epsilon else f"{one.row.label}, epsilon {one.row.claimed:g}"


def by_epsilon(outcomes: Sequence[Outcome]):
    """Epsilons with the mean, the least and the most of the seeds."""
    points = sorted((one.row.claimed, scores(one.at_epsilon)) for one in outcomes if one.at_epsilon)
    x, values = [one for one, _ in points], [all_of for _, all_of in points]
    return x, [statistics.mean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def by_epoch(outcome: Outcome, headline: str):
    """Epochs with the mean, the least and the most of the seeds, from the runs at the claimed epsilon."""
    scale = 100 if "accuracy" in headline else 1
    runs: dict[float, list[float]] = {}
    for result in outcome.at_epsilon:
        for line in (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            runs.setdefault(row["epoch"], []).append(scale * row[headline])
    x = sorted(runs)
    return x, [statistics.mean(runs[e]) for e in x], [min(runs[e]) for e in x], [max(runs[e]) for e in x]
