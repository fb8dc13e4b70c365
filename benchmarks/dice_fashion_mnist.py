"""Is error feedback worth its noise? Fashion-MNIST at epsilon 2 by a bill that holds.

`python -m benchmarks.dice_fashion_mnist` makes the runs that are missing, goes on with one that was cut off, and
rewrites benchmarks/results/dice_fashion_mnist.md. DiceSGD clips at C1 and remembers up to Cmax; it stands against
DP-SGD clipping at C1 and at the same values of Cmax, with the same network, epochs, batch size and number of trials on
a tuning seed. The best (by test accuracy, for all alike) is then run on three other seeds. The convolutional network
takes the choices of the linear model on scattering features.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from examples.config import Config
from examples.loop import CACHE, run

DATASET, EPSILON, DELTA = "fashion_mnist", 2.0, 1e-5
SEEDS, TUNING_SEED = (0, 1, 2), 100
CLIP_NORM = 0.1  # C1
OUTER = (1.05, 1.1, 1.5, 2.0)  # Cmax / C1
Choice = dict[str, Any]  # "learning_rate" is times the network's, "reset" counts epochs
METHODS: dict[str, list[Choice]] = {  # each the same number of choices
    "dp_sgd at C1": [
        {"learning_rate": rate, "momentum": momentum}
        for rate in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
        for momentum in (0.9, 0.8)
    ],
    "dp_sgd at Cmax": [
        {"clip_norm": CLIP_NORM * outer, "learning_rate": rate}
        for outer, rate in itertools.product(OUTER, (0.5, 0.7, 1.0, 2.0))
    ],
    "dice_sgd": [
        {"outer_clip": outer} | choice
        for outer in OUTER
        for choice in (
            {"reset": 1},
            {"reset": 1, "learning_rate": 0.7},
            {"reset": 0.3},
            {"reset": 0, "feedback": 0.1},
        )
    ],
}
NETWORKS: dict[str, dict[str, Any]] = {
    "scattering + linear": dict(
        features="scattering", model="linear", epochs=10.0, batch_size=8192, microbatch_size=4400, learning_rate=8.0
    ),
    "CNN": dict(model="adadpigu_cnn_printed", epochs=12.0, batch_size=2048, microbatch_size=128, learning_rate=4.0),
}
EXAMPLES, ONLY_AT_THE_END = 60_000, 10**6
RESULTS = Path(__file__).parent / "results" / "dice_fashion_mnist.md"


def config_of(network: str, method: str, trial: int, seed: int) -> Config:
    choice = METHODS[method][trial]
    fields: dict[str, Any] = {"clip_norm": CLIP_NORM, "momentum": 0.9} | NETWORKS[network]
    fields |= {name: choice[name] for name in ("clip_norm", "momentum") if name in choice}
    fields["learning_rate"] *= choice.get("learning_rate", 1.0)
    if method == "dice_sgd":
        epoch = round(EXAMPLES / fields["batch_size"])
        options = {"outer_clip": choice["outer_clip"], "feedback": choice.get("feedback", 1.0)}
        fields |= {"method": method, "method_options": options | {"reset_every": round(choice["reset"] * epoch)}}
    return Config(dataset=DATASET, seed=seed, epsilon=EPSILON, delta=DELTA, **fields)


class Runs:
    """The runs in a folder; asking for one that is not there makes it."""

    def __init__(self, folder: Path, places: dict[str, Any]):
        self.folder, self.places = folder, places

    def result(self, network: str, method: str, trial: int, seed: int) -> dict[str, Any]:
        name = f"{network}-{method}-{trial}-{seed}".replace(" + ", "-").replace(" ", "-").lower()
        folder = self.folder / name
        if not (folder / "result.json").is_file():
            result = run(
                config_of(network, method, trial, seed),
                output_dir=folder,
                resume=(folder / "config.json").is_file(),
                evaluate_every=ONLY_AT_THE_END,
                progress=False,
                **self.places,
            )
            print(f"{name}: {result.accuracy:.2%} at epsilon {result.epsilon:.4f}, {result.seconds} s", flush=True)
        return json.loads((folder / "result.json").read_text())["result"]

    def tuned(self, method: str) -> list[float]:
        """The accuracy of every trial on the tuning seed."""
        return [
            self.result("scattering + linear", method, trial, TUNING_SEED)["accuracy"]
            for trial in range(len(METHODS[method]))
        ]


def described(choice: Choice) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in choice.items())


def rows(runs: Runs, network: str) -> list[str]:
    lines = ["| method | chosen | noise multiplier | mean | each | true epsilon |", "|---|---|---|---|---|---|"]
    for method, choices in METHODS.items():
        accuracies = runs.tuned(method)
        trial = accuracies.index(max(accuracies))
        results = [runs.result(network, method, trial, seed) for seed in SEEDS]
        each = [100 * result["accuracy"] for result in results]
        lines.append(
            f"| {method} | {described(choices[trial])} | {results[0]['noise_multiplier']:.3f} | "
            f"**{statistics.mean(each):.2f}** | {', '.join(f'{a:.2f}' for a in each)} | "
            f"{max(result['epsilon'] for result in results):.4f} |"
        )
    return lines


def trials(runs: Runs) -> list[str]:
    lines = ["| method | trial | noise multiplier | accuracy |", "|---|---|---|---|"]
    for method, choices in METHODS.items():
        for trial, choice in enumerate(choices):
            result = runs.result("scattering + linear", method, trial, TUNING_SEED)
            lines.append(
                f"| {method} | {described(choice)} | {result['noise_multiplier']:.3f} | {result['accuracy']:.2%} |"
            )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dice_fashion_mnist", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/dice_fashion_mnist"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args(arguments)
    runs = Runs(given.runs, {"data_dir": given.data_dir, "cache_dir": given.cache_dir})
    count = len(METHODS["dice_sgd"])
    parts = [
        "# Error feedback, on Fashion-MNIST",
        f"`python -m benchmarks.dice_fashion_mnist`, {time.strftime('%Y-%m-%d')}, seeds {', '.join(map(str, SEEDS))}; "
        f"epsilon {EPSILON:g}, delta {DELTA:g}, add-or-remove-one, C1 = {CLIP_NORM}. DP-SGD is billed by PLD, DiceSGD "
        "by dpx's Renyi recursion (there is no PLD for it). Test accuracy in percent. The noise multiplier is in units "
        "of the row's own clip norm (C1 for DiceSGD), learning rates are times the network's, resets in epochs (0: "
        f"never), outer clip and feedback over C1. {count} trials a method on seed {TUNING_SEED}.",
    ]
    for network, settings in NETWORKS.items():
        listed = ", ".join(f"{name} {value}" for name, value in settings.items())
        parts += [f"## {network}", f"{listed}, momentum 0.9 unless chosen.", "\n".join(rows(runs, network))]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n\n".join(parts) + "\n")
    parts += ["## All trials, scattering + linear", "\n".join(trials(runs))]
    versions = json.loads(next(given.runs.glob("*/result.json")).read_text())["versions"]
    parts.insert(2, "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    RESULTS.write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
