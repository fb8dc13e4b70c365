"""Whether error feedback is worth its noise: Fashion-MNIST at epsilon 2 by a bill that holds.

`python -m benchmarks.dice_fashion_mnist` runs the trainings that are missing, continues one that was interrupted, and
rewrites benchmarks/results/dice_fashion_mnist.md. DiceSGD clips at C1 and keeps an error up to Cmax. It is compared
with DP-SGD that clips at C1 and at the same values of Cmax, with the same network, epochs, batch size and number of
trials on a tuning seed. The trial with the best test accuracy is then run on three other seeds. The convolutional
network uses the settings that are best for the linear model on scattering features.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from examples.config import Config
from examples.runs import SEEDS, TUNING_SEED, Runs, described, from_arguments, summary

DATASET, EPSILON, DELTA = "fashion_mnist", 2.0, 1e-5
CLIP_NORM = 0.1  # C1
OUTER = (1.05, 1.1, 1.5, 2.0)  # Cmax / C1
Choice = dict[str, Any]  # "learning_rate" is times the network's, "reset" counts epochs
METHODS: dict[str, list[Choice]] = {  # each the same number of choices
    "dp_sgd at C1": [
        {"learning_rate": rate, "momentum": momentum}
        for rate in (1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0)
        for momentum in (0.9, 0.8)
    ],
    "dp_sgd at Cmax": [
        {"clip_norm": CLIP_NORM * outer, "learning_rate": rate}
        for outer, rate in itertools.product(OUTER, (1.0, 2.0, 4.0, 8.0))
    ],
    "dice_sgd": [
        {"outer_clip": outer, "reset": reset, "learning_rate": rate}
        for outer, reset, rate in itertools.product(OUTER, (1.0, 0.3), (2.0, 4.0))
    ],
}
NETWORKS: dict[str, dict[str, Any]] = {
    "scattering + linear": dict(
        features="scattering", model="linear", epochs=10.0, batch_size=8192, microbatch_size=4400, learning_rate=8.0
    ),
    "CNN": dict(model="adadpigu_cnn_printed", epochs=8.0, batch_size=2048, microbatch_size=256, learning_rate=2.0),
}
EXAMPLES = 60_000
RESULTS = Path(__file__).parent / "results" / "dice_fashion_mnist.md"


def config_of(network: str, method: str, choice: Choice, seed: int) -> Config:
    fields: dict[str, Any] = {"clip_norm": CLIP_NORM, "momentum": 0.9} | NETWORKS[network]
    fields |= {name: choice[name] for name in ("clip_norm", "momentum") if name in choice}
    fields["learning_rate"] *= choice["learning_rate"]
    if method == "dice_sgd":
        epoch = round(EXAMPLES / fields["batch_size"])
        options = {
            "feedback_norm": CLIP_NORM,
            "outer_clip_norm": CLIP_NORM * choice["outer_clip"],
            "reset_every": round(choice["reset"] * epoch),
        }
        fields |= {"method": method, "method_options": options}
    return Config(dataset=DATASET, seed=seed, epsilon=EPSILON, delta=DELTA, **fields)


def result(runs: Runs, network: str, method: str, choice: Choice, seed: int) -> dict[str, Any]:
    return runs.result(f"{network} {method} {described(choice)} {seed}", config_of(network, method, choice, seed))


def tuned(runs: Runs, method: str) -> list[float]:
    """The accuracy of every trial on the tuning seed."""
    results = [result(runs, "scattering + linear", method, choice, TUNING_SEED) for choice in METHODS[method]]
    return [one["accuracy"] for one in results]


def rows(runs: Runs, network: str) -> str:
    lines = ["| method | chosen | noise multiplier | mean | each | true epsilon |", "|---|---|---|---|---|---|"]
    for method, choices in METHODS.items():
        accuracies = tuned(runs, method)
        chosen = choices[accuracies.index(max(accuracies))]
        results = [result(runs, network, method, chosen, seed) for seed in SEEDS]
        noise = results[0]["noise_multiplier"]
        lines.append(f"| {method} | {described(chosen)} | {noise:.3f} | {summary(results)} |")
    return "\n".join(lines)


def trials(runs: Runs) -> str:
    lines = ["| method | trial | noise multiplier | accuracy |", "|---|---|---|---|"]
    for method, choices in METHODS.items():
        for choice in choices:
            one = result(runs, "scattering + linear", method, choice, TUNING_SEED)
            lines.append(
                f"| {method} | {described(choice)} | {one['noise_multiplier']:.3f} | {100 * one['accuracy']:.2f} |"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    module = "benchmarks.dice_fashion_mnist"
    runs = from_arguments(module, __doc__, arguments)
    count = len(METHODS["dice_sgd"])
    body = []
    for network, settings in NETWORKS.items():
        body += [f"## {network}", f"{described(settings)}, momentum 0.9 unless chosen.", rows(runs, network)]
    body += ["## All trials, scattering + linear", trials(runs)]
    head = [
        "# Error feedback, on Fashion-MNIST",
        runs.heading(module),
        f"Epsilon {EPSILON:g}, delta {DELTA:g}, add-or-remove-one, C1 = {CLIP_NORM}. DP-SGD is billed by PLD, DiceSGD "
        "by dpx's Renyi recursion (there is no PLD for it). Test accuracy in percent. The noise multiplier is in units "
        "of the row's own clip norm (C1 for DiceSGD), learning rates are times the network's, resets in epochs, outer "
        f"clip over C1. {count} trials a method on seed {TUNING_SEED}.",
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n\n".join(head + body) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
