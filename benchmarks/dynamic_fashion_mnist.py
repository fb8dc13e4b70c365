"""Does noise that changes over time help? Fashion-MNIST at a TRUE epsilon, as in Dynamic DP-SGD's Table 1.

`python -m benchmarks.dynamic_fashion_mnist` makes the runs that are missing, goes on with one that was cut off, and
rewrites benchmarks/results/dynamic_fashion_mnist.md. Every method gets the same network, epochs, batch size and number
of trials: six configurations on a tuning seed, the best of which (by test accuracy, for all methods alike) is then run
on three other seeds. The convolutional network takes the choices of the linear model on scattering features.
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

EPSILONS = (0.4, 1.2, 2.0)
SEEDS, TUNING_SEED = (0, 1, 2), 100
DELTA = 1 / 600_000
RHOS = (1 / 0.7, 1 / 0.4)
LEARNING_RATES = (0.5, 1.0, 2.0)  # times the network's
METHODS: dict[str, list[dict[str, Any]]] = {  # each the same number of choices
    "static": [{}, {"clip_norm": 0.05}],
    "growing mu": [{"rho_mu": rho, "rho_c": 1.0} for rho in RHOS],
    "sensitivity decay": [{"rho_mu": 1.0, "rho_c": rho} for rho in RHOS],
    "both": [{"rho_mu": rho, "rho_c": rho} for rho in RHOS],
}
PAPER = {  # Table 1, CNN, epsilon by its central limit theorem
    "static": (76.77, 80.45, 82.55),
    "growing mu": (77.81, 80.95, 83.10),
    "sensitivity decay": (78.11, 82.83, 83.64),
    "both": (78.50, 83.22, 83.81),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "scattering + linear": dict(
        features="scattering", model="linear", epochs=10.0, batch_size=8192, microbatch_size=4400, learning_rate=8.0
    ),
    "CNN": dict(model="adadpigu_cnn_printed", epochs=12.0, batch_size=2048, microbatch_size=128, learning_rate=4.0),
}
ONLY_AT_THE_END = 10**6
RESULTS = Path(__file__).parent / "results" / "dynamic_fashion_mnist.md"


def config_of(network: str, method: str, epsilon: float, trial: int, seed: int) -> Config:
    """Trial i is the i-th pair of a learning rate and a choice of the method."""
    factor, choice = list(itertools.product(LEARNING_RATES, METHODS[method]))[trial]
    fields: dict[str, Any] = (
        {"clip_norm": 0.1} | NETWORKS[network] | {k: v for k, v in choice.items() if k == "clip_norm"}
    )
    fields["learning_rate"] *= factor
    return Config(
        dataset="fashion_mnist",
        seed=seed,
        method="dp_sgd" if method == "static" else "dynamic_dp_sgd",
        method_options={k: v for k, v in choice.items() if k != "clip_norm"},
        epsilon=epsilon,
        delta=DELTA,
        momentum=0.9,
        **fields,
    )


class Runs:
    """The runs in a folder; asking for one that is not there makes it."""

    def __init__(self, folder: Path, places: dict[str, Any]):
        self.folder, self.places = folder, places

    def accuracy(self, network: str, method: str, epsilon: float, trial: int, seed: int) -> float:
        return self.result(network, method, epsilon, trial, seed)["accuracy"]

    def result(self, network: str, method: str, epsilon: float, trial: int, seed: int) -> dict[str, Any]:
        name = f"{network}-{method}-{epsilon}-{trial}-{seed}".replace(" + ", "-").replace(" ", "-").lower()
        folder = self.folder / name
        if not (folder / "result.json").is_file():
            config = config_of(network, method, epsilon, trial, seed)
            resume = (folder / "config.json").is_file()
            places = {"output_dir": folder, "evaluate_every": ONLY_AT_THE_END} | self.places
            result = run(config, resume=resume, progress=False, **places)
            print(f"{name}: {result.accuracy:.2%} at epsilon {result.epsilon:.4f}, {result.seconds} s", flush=True)
        return json.loads((folder / "result.json").read_text())["result"]

    def chosen(self, method: str, epsilon: float) -> int:
        """The trial that did best on the tuning seed."""
        trials = range(len(LEARNING_RATES) * len(METHODS[method]))
        return max(trials, key=lambda t: self.accuracy("scattering + linear", method, epsilon, t, TUNING_SEED))


def rows(runs: Runs, network: str, epsilons) -> list[str]:
    lines = [
        "| epsilon | method | chosen | mean | each | true epsilon | paper's mean (its epsilon is less than true) |",
        "|---|---|---|---|---|---|---|",
    ]
    for epsilon in epsilons:
        for method in METHODS:
            trial = runs.chosen(method, epsilon)
            config = config_of(network, method, epsilon, trial, 0)
            results = [runs.result(network, method, epsilon, trial, seed) for seed in SEEDS]
            accuracies = [100 * result["accuracy"] for result in results]
            options = {"learning_rate": config.learning_rate, "clip_norm": config.clip_norm} | config.method_options
            chosen = ", ".join(f"{k} {v:.3g}" for k, v in options.items() if not isinstance(v, str))
            lines.append(
                f"| {epsilon} | {method} | {chosen} | **{statistics.mean(accuracies):.2f}** | "
                f"{', '.join(f'{a:.2f}' for a in accuracies)} | {max(r['epsilon'] for r in results):.4f} | "
                f"{PAPER[method][EPSILONS.index(epsilon)]} |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamic_fashion_mnist", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/dynamic_fashion_mnist"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args()
    runs = Runs(given.runs, {"data_dir": given.data_dir, "cache_dir": given.cache_dir})
    parts = [
        "# Noise that changes over time, on Fashion-MNIST",
        f"`python -m benchmarks.dynamic_fashion_mnist`, {time.strftime('%Y-%m-%d')}, "
        f"seeds {', '.join(map(str, SEEDS))}; "
        f"delta 1/600000, add-or-remove-one, PLD. Test accuracy in percent. Six trials a method on seed {TUNING_SEED}: "
        "learning rates x 0.5, 1, 2, and two values of rho (static: two clip norms).",
    ]
    for network, epsilons in (("scattering + linear", EPSILONS), ("CNN", (2.0,))):
        settings = ", ".join(f"{name} {value}" for name, value in NETWORKS[network].items())
        parts += [f"## {network}", f"{settings}, momentum 0.9.", "\n".join(rows(runs, network, epsilons))]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n\n".join(parts) + "\n")
    versions = json.loads(next(given.runs.glob("*/result.json")).read_text())["versions"]
    parts.insert(2, "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    RESULTS.write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
