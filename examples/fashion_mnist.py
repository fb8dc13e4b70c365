"""The table of examples/README.md: two settings on Fashion-MNIST at epsilon 2, three seeds each.

`python -m examples.fashion_mnist` runs the trainings that are missing, continues those that were interrupted, and
rewrites the table. The seeds are public here, because the data are public.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from examples.config import Config
from examples.loop import CACHE
from examples.runs import Runs
from examples.train import command

SEEDS = (0, 1, 2)
COMMON: dict[str, Any] = dict(
    dataset="fashion_mnist", method="dp_sgd", epsilon=2.0, delta=1e-5, clip_norm=0.1, momentum=0.9
)
SETTINGS: dict[str, dict[str, Any]] = {
    "CNN": dict(
        model="adadpigu_cnn_printed",
        activation="tanh",
        epochs=25.0,
        batch_size=2048,
        microbatch_size=128,
        learning_rate=4.0,
    ),
    "scattering + linear": dict(
        features="scattering",
        model="linear",
        epochs=40.0,
        batch_size=8192,
        microbatch_size=4400,
        learning_rate=16.0,
    ),
}
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def config_of(setting: str, seed: int) -> Config:
    return Config(seed=seed, **(COMMON | SETTINGS[setting]))


def table(runs: Runs) -> str:
    """The finished runs in Markdown."""
    lines = [
        "| setting | runs | test accuracy, mean (each) | epsilon | noise multiplier | steps | seconds a run |",
        "|---|---|---|---|---|---|---|",
    ]
    versions = {}
    for setting in SETTINGS:
        documents = runs.documents(f"{setting}-seed{seed}" for seed in SEEDS)
        if not documents:
            continue
        results, versions = [document["result"] for document in documents], documents[-1]["versions"]
        accuracies = [result["accuracy"] for result in results]
        each = ", ".join(f"{accuracy:.2%}" for accuracy in accuracies)
        seconds = statistics.mean(result["seconds"] for result in results)
        last = results[-1]
        lines.append(
            f"| {setting} | {len(results)} | **{statistics.mean(accuracies):.2%}** ({each}) | {last['epsilon']:.4f} | "
            f"{last['noise_multiplier']:.4f} | {last['steps']} | {seconds:.0f} |"
        )
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    commands = "\n".join(command(config_of(setting, 0)) for setting in SETTINGS)
    return (
        "\n".join(lines)
        + f"\n\nDelta 1e-5, neighbors by nulling one example, PLD. Seeds {', '.join(map(str, SEEDS))}; "
        + f"{time.strftime('%Y-%m-%d')}; {said}. With `--seed 0` the runs are\n\n```\n{commands}\n```\n"
    )


def update(readme: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between the marks."""
    before, rest = readme.read_text().split(begin)
    _, after = rest.split(end)
    readme.write_text(f"{before}{begin}\n{text}{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.fashion_mnist", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/fashion_mnist"))
    parser.add_argument("--setting", choices=list(SETTINGS), action="append", help="default: all")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args()
    runs = Runs(given.runs, evaluate_every=None, data_dir=given.data_dir, cache_dir=given.cache_dir)
    for setting in given.setting or SETTINGS:
        for seed in SEEDS:
            runs.result(f"{setting}-seed{seed}", config_of(setting, seed))
            update(README, table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
