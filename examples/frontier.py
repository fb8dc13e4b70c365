"""Accuracy against epsilon: the tables of examples/README.md between the marks "frontier".

`python -m examples.frontier` runs the trainings that are missing, and writes the tables: `--recipe wide` on
Fashion-MNIST, the seeds of an epsilon at once, and `--recipe best` on all data sets. If it is interrupted, call it
again: it continues. `--dataset mnist cifar10` adds data sets that are on this machine. The seeds are public here,
because the data are public.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from examples import data
from examples.config import Config
from examples.fashion_mnist import update
from examples.loop import CACHE
from examples.recipes import RECIPES
from examples.runs import Runs
from examples.train import command
from examples.whitening import PUBLIC, RANDOM

SEEDS = (0, 1, 2, 3, 4)
EPSILONS = (0.4, 1.2, 2.0, 3.0, 4.0, 8.0)
FEW = (2.0, 8.0)
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- frontier: begin -->", "<!-- frontier: end -->"
PUBLISHED = {
    0.4: "78.50 Dynamic (a)",
    1.2: "83.22 Dynamic (a)",
    2.0: "89.34 DPSUR (b), 87.96 ScatterNet (c), 86.93 AdaDPIGU (d), 85.23 tempered sigmoid (c), 83.81 Dynamic (a)",
    4.0: "90.18 DPSUR (b), 89.92 AdaDPIGU (d), 89.06 ScatterNet (c), 86.92 tempered sigmoid (c)",
}
NOTES = """(a) [Dynamic DP-SGD](https://arxiv.org/abs/2111.00173), Table 1: epsilon by a central limit theorem, which is
too small. (b) [DPSUR](https://arxiv.org/abs/2311.14056), RDP: noisy losses decide which updates it accepts, and the
cost of that is disputed. (c) [ScatterNet](https://arxiv.org/abs/2011.11660) and
[tempered sigmoid](https://arxiv.org/abs/2007.14191), RDP. (d) [AdaDPIGU](https://arxiv.org/abs/2507.06525), RDP: its
mask comes from raw gradients, which no epsilon covers. (b) to (d) are as printed in Table 4 of AdaDPIGU."""


class Row(NamedTuple):
    """The runs of one row of the table: a data set, the public images of the whitening, epsilon, and a recipe."""

    dataset: str
    whitening: str
    epsilon: float
    recipe: str = "best"


def rows_of(datasets: list[str]) -> list[Row]:
    """Fashion-MNIST at every epsilon by both recipes, with real public images at 2, and the other data sets at few."""
    rows = [Row("fashion_mnist", RANDOM, epsilon, recipe) for recipe in ("wide", "best") for epsilon in EPSILONS]
    rows.append(Row("fashion_mnist", PUBLIC[1], 2.0))
    return rows + [Row(name, RANDOM, epsilon) for name in datasets for epsilon in FEW]


def config_of(row: Row, seed: int, examples: int) -> Config:
    chosen: dict[str, Any] = RECIPES[row.recipe](row.epsilon, examples) | {"whitening": row.whitening}
    return Config(dataset=row.dataset, seed=seed, epsilon=row.epsilon, **chosen)


def name_of(row: Row, seed: int) -> str:
    recipe = "" if row.recipe == "best" else f"{row.recipe}-"
    return f"{recipe}{row.dataset}-{row.whitening}-epsilon{row.epsilon:g}-seed{seed}"


def table(runs: Runs, rows: list[Row]) -> str:
    """The finished runs in Markdown."""
    lines = [
        "| data | recipe | used besides the private data | test accuracy, mean (each seed) | epsilon "
        "| noise multiplier | steps | seconds | published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    documents: list[dict] = []
    for row in rows:
        found = runs.documents(name_of(row, seed) for seed in SEEDS)
        if not found:
            continue
        documents, results = found, [document["result"] for document in found]
        accuracies = [result["accuracy"] for result in results]
        each = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
        used = "images of random processes" + (" and 4,000 real digits" if "+" in row.whitening else "")
        published = (
            PUBLISHED.get(row.epsilon, "") if row.dataset == "fashion_mnist" and "+" not in row.whitening else ""
        )
        last, seconds = results[-1], statistics.mean(result["seconds"] for result in results)
        lines.append(
            f"| {row.dataset} | {row.recipe} | {used} | **{100 * statistics.mean(accuracies):.2f}** ({each}) "
            f"| {last['epsilon']:.4f} | {last['noise_multiplier']:.4f} | {last['steps']} | {seconds:.0f} "
            f"| {published} |"
        )
    if not documents:
        return ""
    said = ", ".join(f"{name} {version}" for name, version in documents[-1]["versions"].items())
    example = command(config_of(Row("fashion_mnist", RANDOM, 2.0, "wide"), 0, 60_000))
    date = time.strftime("%Y-%m-%d")
    return (
        "\n".join(lines)
        + f"""

Percent. Delta 1e-5, neighbors by nulling one example, PLD; seeds {SEEDS[0]} to {SEEDS[-1]}, {date}; {said}. Seconds are
those of a run on a shared machine with two cores, without the features, which are computed once; the five runs of
`wide` are trained together, and their time is divided by five. {NOTES}

With `--recipe wide --epsilon 2 --seed 0` the run is

```
{example}
```
"""
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.frontier", description=__doc__)
    parser.add_argument("--dataset", nargs="*", default=[], help="data sets besides fashion_mnist, mnist5k and digits")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="run these only")
    parser.add_argument("--epsilon", type=float, nargs="*", default=list(EPSILONS), help="run these only")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args()
    rows = rows_of(["mnist5k", "digits", *given.dataset])
    runs = Runs(given.runs, data_dir=given.data_dir, cache_dir=given.cache_dir)
    for row in (row for row in rows if row.epsilon in given.epsilon):
        examples = len(data.load(row.dataset, given.data_dir).train_images)
        configs = {name_of(row, seed): config_of(row, seed, examples) for seed in given.seeds}
        if row.recipe == "wide":
            runs.make_together(configs)
        for name, config in configs.items():
            runs.result(name, config)
        update(README, table(runs, rows), BEGIN, END)
    update(README, table(runs, rows), BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
