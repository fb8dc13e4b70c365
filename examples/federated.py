"""Federated averaging with user-level privacy, on real digits that are split among users of unequal size and taste.

The users and their updates are those of examples/tasks/users.py; a change of the model is clipped to a norm that
adapts, and the noisy mean moves the model: McMahan et al. 2018 (https://arxiv.org/abs/1710.06963), Andrew et al. 2021
(https://arxiv.org/abs/1905.03871). Epsilon protects all images of one user together.

`python -m examples.federated --epsilon 2 4 8 1000 --seed 0 1 2 > benchmarks/results/federated.md` writes that page. The
seeds are public there, because the data are public. `python -m examples.train --task users` makes one such run with any
method.
"""

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples import data, models, records
from examples.config import Config
from examples.loop import CACHE, run
from examples.tasks.users import OPTIONS, labels_of, split

HEAD = """# Federated averaging

`python -m examples.federated {words}`, {date}.

The {images} images of {name} belong to {users} users, who have {least} to {largest} of them (median {median:g}); at
most {most} of each take part. The cost of each run is that of the run alone. The default settings were chosen by
sixteen trials with two other seeds, on the same test images.

| epsilon of one user | noise multiplier | test accuracy, mean (each seed) |
|---|---|---|"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.federated",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--dataset", default="mnist5k", help="a name that examples.train knows")
    add("--epsilon", type=float, nargs="+", default=[4.0], help="user-level budgets, one run each")
    add("--delta", type=float, default=1e-5)
    add("--seed", type=int, nargs="+", help="secret; drawn by the system if not given")
    add("--model", default="linear", choices=models.MODELS)
    add("--epochs", type=float, default=8.8, help="so often a user takes part, on average")
    add("--batch-size", type=int, default=150, help="expected number of users of a step")
    add("--clip-norm", type=float, default=0.5, help="at the first step")
    add("--quantile", type=float, default=0.5, help="the share of users whose update is not clipped")
    add("--learning-rate", type=float, default=0.5, help="of the server")
    add("--momentum", type=float, default=0.9, help="of the server")
    for name, default in OPTIONS.items():
        add("--" + name.replace("_", "-"), type=type(default), default=default, help="of the task users")
    add("--output-dir", type=Path, default=Path("runs/federated"), help="for the files of each run")
    add("--data-dir", type=Path)
    add("--cache-dir", type=Path, default=CACHE)
    return made


def config_of(given: argparse.Namespace, epsilon: float, seed: int) -> Config:
    """The run for one budget. Each needs a seed of its own, because two runs with one key would share their noise."""
    shared = ("dataset", "delta", "model", "epochs", "batch_size", "learning_rate", "momentum")
    options = dict(initial_clip_norm=given.clip_norm, quantile=given.quantile, indicator_noise=given.batch_size / 20)
    return Config(
        task="users",
        task_options={name: getattr(given, name) for name in OPTIONS},
        method="adaptive_clipping",
        method_options=options,
        epsilon=epsilon,
        seed=seed,
        **{name: getattr(given, name) for name in shared},
    )


def seed_of(number: int, seed: int | None) -> int:
    """The seed of the run with this number: secret, or a function of a seed that was given."""
    if seed is None:
        return secrets.randbits(128)
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


def sizes_of(given: argparse.Namespace) -> dict[str, Any]:
    """How many images and users there are, and how many images a user has."""
    options = {name: getattr(given, name) for name in OPTIONS}
    labels = labels_of(data.load(given.dataset, given.data_dir), options)
    counts = np.unique(split(labels, options), return_counts=True)[1]
    sizes = dict(least=min(counts), median=np.median(counts), largest=max(counts), most=given.most)
    return sizes | dict(images=len(labels), users=len(counts))


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(words)
    sizes = sizes_of(given)
    said = dict(words=" ".join(words), date=time.strftime("%Y-%m-%d"), name=given.dataset)
    print(HEAD.format(**sizes, **said), flush=True)
    result = None
    for number, epsilon in enumerate(given.epsilon):
        accuracies = []
        for seed in given.seed or [None]:
            config = config_of(given, epsilon, seed_of(number, seed))
            folder = given.output_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-epsilon-{epsilon:g}-{seed}"
            places = dict(data_dir=given.data_dir, cache_dir=given.cache_dir, progress=False)
            result = run(config, output_dir=folder, evaluate_every=10**6, **places)
            accuracies.append(result.accuracy)
        assert result is not None
        each, mean = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies), np.mean(accuracies)
        print(f"| {result.epsilon:.4f} | {result.noise_multiplier:.4f} | **{mean:.1%}** ({each}) |", flush=True)
    assert result is not None
    versions = ", ".join(f"{name} {version}" for name, version in records.versions().items())
    print(f"\nDelta {given.delta:g}, unit of privacy: one user, add or remove, {result.steps} steps. {versions}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
