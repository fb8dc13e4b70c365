"""What a sampling, and correlated noise, buy in accuracy: Fashion-MNIST at one epsilon, with one trainer for all.

`python -m examples.samplings` makes the runs that are missing, and writes benchmarks/results/samplings.md when all are
there. Each finished run is a line of `--runs`, so a command that was killed continues. `--table` prints the runs so
far. A linear run takes 11 to 50 s of CPU, a CNN run about 50 s.

Every cell (model, method, batch size, epsilon) has its own learning rate: that of the best trial on the last sixth of
the training images, with a seed of its own. Trials climb by a factor of 2 until the accuracy falls, for all methods
from the same start. Their cost is not counted. The seeds are public here, because the data are public.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import optax

import dpx
from dpx import strategies
from dpx.strategies import Workload
from examples import data, records, whitening
from examples.config import Config
from examples.loop import CACHE
from examples.papers.page import measured
from examples.tasks import images

RESULTS = Path("benchmarks/results/samplings.md")
SEEDS, TUNING_SEED = (0, 1, 2), 100
EPSILONS, BATCHES, DELTA = (1.0, 2.0, 8.0), (256, 2048), 1e-5
BANDS = (2, 4, 8, 16, 24, 32)
CORRELATIONS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99)
UNKNOWN_KEY = 2**100  # protects nobody: the data are public, and the seeds too


class Setting(NamedTuple):
    """A model and its training, for all methods alike.

    start: the learning rate of the first trial at epsilon 2 and a batch size of 2048; powers: of its growth with
    epsilon and with the batch size. tune_at: the epsilon at which the factor of the learning rate is chosen; None: each
    epsilon has its own; most_trials: for a factor.
    """

    fields: dict[str, Any]
    epochs: float
    clip_norm: float
    start: float
    powers: tuple[float, float]
    microbatch_size: int
    momentum: float = 0.7
    tune_at: float | None = None
    most_trials: int = 5

    def learning_rate(self, batch_size: int, epsilon: float, factor: float) -> float:
        by_epsilon, by_batch = self.powers
        return factor * self.start * (epsilon / 2) ** by_epsilon * (batch_size / 2048) ** by_batch


MODELS = {
    "linear": Setting({"model": "linear_from_zero", "features": "whitened"}, 10.0, 0.1, 10.0, (0.8, 1.0), 512),
    "cnn": Setting({"model": "adadpigu_cnn"}, 4.0, 1.0, 1.0, (0.5, 0.5), 256, tune_at=2.0, most_trials=3),
}


class Sizes(NamedTuple):
    """Of a run: the examples, the expected batch size, the planned epochs, and the momentum of its SGD."""

    examples: int
    batch_size: int
    epochs: float
    momentum: float

    def steps(self, sampling: Any) -> int:
        return sampling.steps(epochs=self.epochs)


Build = Callable[..., tuple[dpx.Mechanism, str]]  # (sizes, epsilon, **of DP-SGD) -> the mechanism, and its own numbers


def budget_of(sizes: Sizes, epsilon: float) -> dpx.Budget:
    return dpx.Budget(epsilon=epsilon, delta=DELTA, epochs=sizes.epochs)


def noise_of(mechanism: dpx.Mechanism) -> float:
    """The noise multiplier, which a budget made constant."""
    noise = mechanism.noise_multiplier
    assert not callable(noise)
    return float(noise)


def plain(sampling_of: Callable[[Sizes], dpx.sampling.Sampling]) -> Build:
    """DP-SGD on batches of a sampling."""

    def build(sizes: Sizes, epsilon: float, **rest):
        sampling = sampling_of(sizes)
        return dpx.dp_sgd(noise_multiplier=budget_of(sizes, epsilon), sampling=sampling, **rest), ""

    return build


def truncated(sizes: Sizes) -> dpx.PoissonSampling:
    rows = 8 * -(-int(sizes.batch_size + 5 * sizes.batch_size**0.5) // 8)
    return dpx.PoissonSampling(examples=sizes.examples, batch_size=sizes.batch_size, most_rows=rows)


def fixed_order(sizes: Sizes) -> dpx.sampling.FixedOrder:
    return dpx.sampling.FixedOrder(examples=sizes.examples, batch_size=sizes.batch_size)


def lambda_cgd(sizes: Sizes, epsilon: float, **rest) -> tuple[dpx.Mechanism, str]:
    """The lambda with the least mean error of the parameters, which depends on no data."""
    sampling = fixed_order(sizes)
    steps, apart = sizes.steps(sampling), int(sampling.steps_per_epoch)
    places = {"steps": steps, "participations": -(-steps // apart), "separation": apart}
    workload = Workload(momentum=sizes.momentum)
    best = min(
        (strategies.loss(strategies.lambda_cgd(correlation=c), workload=workload, **places).mean, c)
        for c in CORRELATIONS
    )[1]
    mechanism = dpx.mechanisms.correlated_noise(
        strategy=strategies.lambda_cgd(correlation=best),
        noise_multiplier=budget_of(sizes, epsilon),
        sampling=sampling,
        **rest,
    )
    return mechanism, f"lambda {best:g}"


@functools.cache
def error_of(bands: int, steps: int, momentum: float) -> float:
    """The mean error of the parameters with the best banded C, for a noise multiplier of 1."""
    workload = Workload(momentum=momentum)
    best = strategies.optimized(bands=bands, steps=steps, workload=workload)
    return strategies.loss(best, steps=steps, workload=workload).mean


def band_mf(sizes: Sizes, epsilon: float, **rest) -> tuple[dpx.Mechanism, str]:
    """The number of bands with the least mean error of the parameters, which depends on no data."""

    def cyclic(bands: int) -> dpx.sampling.CyclicPoissonSampling:
        return dpx.sampling.CyclicPoissonSampling(examples=sizes.examples, batch_size=sizes.batch_size, bands=bands)

    def error(bands: int) -> float:
        sampling = cyclic(bands)
        independent = dpx.dp_sgd(noise_multiplier=budget_of(sizes, epsilon), sampling=sampling, **rest)
        return noise_of(independent) * error_of(bands, sizes.steps(sampling), sizes.momentum)

    most = min(sizes.examples // sizes.batch_size, sizes.steps(cyclic(1)))
    bands = min((bands for bands in BANDS if bands <= most), key=error)
    sampling = cyclic(bands)
    mechanism = dpx.methods.band_mf_sgd(
        bands=bands,
        steps=sizes.steps(sampling),
        momentum=sizes.momentum,
        noise_multiplier=budget_of(sizes, epsilon),
        sampling=sampling,
        **rest,
    )
    return mechanism, f"{bands} bands"


METHODS: dict[str, Build] = {
    "poisson": plain(lambda sizes: dpx.PoissonSampling(examples=sizes.examples, batch_size=sizes.batch_size)),
    "random-allocation": plain(
        lambda sizes: dpx.sampling.RandomAllocation(
            examples=sizes.examples, steps_per_epoch=round(sizes.examples / sizes.batch_size)
        )
    ),
    "truncated-poisson": plain(truncated),
    "fixed-order": plain(fixed_order),
    "lambda-cgd": lambda_cgd,
    "band-mf": band_mf,
}
TITLES = {
    "poisson": "Poisson sampling",
    "random-allocation": "random allocation",
    "truncated-poisson": "truncated Poisson sampling",
    "fixed-order": "a fixed order, independent noise",
    "lambda-cgd": "a fixed order, lambda-CGD",
    "band-mf": "cyclic Poisson sampling, BandMF",
}


class Cell(NamedTuple):
    """What the runs of one place in the table have in common."""

    model: str
    method: str
    batch_size: int
    epsilon: float


class Trainer:
    """Makes runs, and keeps each as a line of a file; asking for one that is there makes none.

    file: of the lines, JSON. dataset: a name that `examples.data` knows. places: data_dir and cache_dir.
    """

    def __init__(self, file: Path, *, dataset: str = "fashion_mnist", data_dir: Path | None, cache_dir: Path):
        self.file, self.dataset, self.data_dir, self.cache_dir = file, dataset, data_dir, cache_dir
        self.rows = records.whole_lines(file)

    @functools.cache  # noqa: B019  # there is one trainer
    def problem(self, model: str, tuning: bool) -> tuple[Any, Any, Any, Any]:
        """(the model, its loss, the accuracy, the training data); for trials, of the training images alone."""
        config = Config(dataset=self.dataset, seed=0, epsilon=1.0, **MODELS[model].fields)
        found = data.load(self.dataset, self.data_dir)
        if config.features == "whitened":
            found = whitening.with_whitening(found, config.whitening, self.cache_dir)
        if tuning:
            first = len(found.train_labels) * 5 // 6
            found = replace(
                found,
                train_images=found.train_images[:first],
                train_labels=found.train_labels[:first],
                test_images=found.train_images[first:],
                test_labels=found.train_labels[first:],
            )
        network = images.model_of(config, found)
        accuracy = images.accuracy_function(network, found)
        return network, images.loss_function(network), accuracy, (found.train_images, found.train_labels)

    def identity(self, cell: Cell, seed: int, factor: float) -> dict[str, Any]:
        """What two runs that are one have in common."""
        setting = MODELS[cell.model]
        facts = {"dataset": self.dataset, "seed": seed, "factor": factor, "epochs": setting.epochs}
        return cell._asdict() | facts | {"clip_norm": setting.clip_norm, "momentum": setting.momentum}

    def found(self, cell: Cell, seed: int, factor: float) -> dict[str, Any] | None:
        wanted = self.identity(cell, seed, factor)
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def run(self, cell: Cell, seed: int, factor: float) -> dict[str, Any]:
        """The row of a run: from the file, or made now. Trials have TUNING_SEED."""
        if row := self.found(cell, seed, factor):
            return row
        began, used = time.perf_counter(), time.process_time()
        setting = MODELS[cell.model]
        network, loss, accuracy, examples = self.problem(cell.model, seed == TUNING_SEED)
        sizes = Sizes(len(examples[1]), cell.batch_size, setting.epochs, setting.momentum)
        key = dpx.secret_key(UNKNOWN_KEY + seed)
        of_dp_sgd = {"clip_norm": setting.clip_norm, "key": dpx.keys.stream(key, "mechanism")}
        mechanism, own = METHODS[cell.method](sizes, cell.epsilon, **of_dp_sgd)
        rate = setting.learning_rate(cell.batch_size, cell.epsilon, factor)
        fitted = dpx.fit(
            loss,
            dpx.chain(mechanism, optax.sgd(rate, momentum=setting.momentum)),
            network.init(dpx.keys.stream(key, "init")),
            examples,
            key=dpx.keys.stream(key, "batches"),
            microbatch_size=min(setting.microbatch_size, cell.batch_size),
            progress=False,
        )
        row = self.identity(cell, seed, factor) | {
            "accuracy": accuracy(fitted.params),
            "spent": fitted.epsilon,
            "noise_multiplier": noise_of(mechanism),
            "own": own,
            "steps": fitted.steps,
            "rows": len(mechanism.sampling.draw(key, 0).indices),
            "learning_rate": rate,
            "cpu": round(time.process_time() - used, 1),
            "seconds": round(time.perf_counter() - began, 1),
            "date": time.strftime("%Y-%m-%d"),
            "versions": records.versions(),
        }
        self.rows.append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        words = f"{cell.model}, {TITLES[cell.method]}, batch {cell.batch_size}, epsilon {cell.epsilon:g}, seed {seed}"
        print(f"{words}, rate {rate:.3g}: {row['accuracy']:.4f}, {row['cpu']} s of CPU", flush=True)
        return row

    def factor(self, cell: Cell) -> float:
        """The factor of the learning rate, by trials on the last sixth of the training images."""
        setting = MODELS[cell.model]
        cell = cell._replace(epsilon=setting.tune_at or cell.epsilon)

        @functools.cache
        def score(power: int) -> float:
            return self.run(cell, TUNING_SEED, 2.0**power)["accuracy"]

        best, direction, trials = 0, 1, 2
        if score(1) <= score(0):
            direction, trials = -1, 3
        if score(direction) > score(0):
            best = direction
            while trials < setting.most_trials and score(best + direction) > score(best):
                best, trials = best + direction, trials + 1
        return 2.0**best

    def rows_of(self, cell: Cell, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The finished runs of a cell that is tuned; [] if none is there."""
        wanted = self.identity(cell, 0, 1.0)
        del wanted["factor"]
        return [row for seed in seeds for row in self.rows if (wanted | {"seed": seed}).items() <= row.items()]


HEAD = (
    "| method | batch size | {epsilons} | steps | rows of a batch | chosen | noise multiplier | learning rate | CPU |\n"
    "|---|---|{lines}---|---|---|---|---|---|"
)


NOTES = (
    "Neighbors differ by a null in place of one example. Each learning rate is the best of three to five trials with "
    "another seed, on the last sixth of the training images. They rise by factors of 2, from one start for all "
    "methods. Their cost is not counted. Bands and lambda are those whose noise leaves the least error in the "
    "parameters, which depends on no data. Rows of a batch are those that are computed, padding included."
)


def table(trainer: Trainer, model: str, seeds: Iterable[int]) -> str:
    """The finished runs of a model in Markdown; numbers that depend on epsilon are in its order."""
    epsilons = " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS)
    lines = [HEAD.format(epsilons=epsilons, lines="---|" * len(EPSILONS))]
    for batch_size, method in itertools.product(BATCHES, METHODS):
        cells = [trainer.rows_of(Cell(model, method, batch_size, epsilon), seeds) for epsilon in EPSILONS]
        if not any(cells):
            continue
        accuracies = [measured([100 * row["accuracy"] for row in rows]) if rows else "not run" for rows in cells]
        each = [rows[0] for rows in cells if rows]
        own = ", ".join(dict.fromkeys(row["own"] for row in each if row["own"]))
        noise, rates = (", ".join(f"{row[name]:.3g}" for row in each) for name in ("noise_multiplier", "learning_rate"))
        cpu = statistics.mean(row["cpu"] for rows in cells for row in rows)
        row = [TITLES[method], batch_size, *accuracies, each[0]["steps"], each[0]["rows"], own, noise, rates]
        lines.append("| " + " | ".join(map(str, row)) + f" | {cpu:.0f} s |")
    return "\n".join(lines)


def page(trainer: Trainer, seeds: Iterable[int]) -> str:
    """The tables of all models that have runs."""
    seeds, last = list(seeds), trainer.rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    text = ["# Samplings and correlated noise, in accuracy", ""]
    text += [f"`python -m examples.samplings`, {last['date']}, seeds {', '.join(map(str, seeds))}; {versions}.", ""]
    text += [f"Test accuracy on {trainer.dataset} in percent, mean (each seed). Delta {DELTA:g}. {NOTES}"]
    for model, setting in MODELS.items():
        if not any(row["model"] == model for row in trainer.rows):
            continue
        tuned = "" if setting.tune_at is None else f"; its rate is tuned at epsilon {setting.tune_at:g} alone"
        words = f"{setting.epochs:g} epochs, clip norm {setting.clip_norm:g}, momentum {setting.momentum:g}{tuned}"
        text += ["", f"## {setting.fields['model']}", "", f"{words[0].upper()}{words[1:]}.", ""]
        text += [table(trainer, model, seeds)]
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m examples.samplings", description=__doc__)
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=["linear", "cnn"])
    made.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    made.add_argument("--batch-sizes", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    made.add_argument("--epsilons", type=float, nargs="+", choices=EPSILONS, default=list(EPSILONS))
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    made.add_argument("--dataset", default="fashion_mnist")
    made.add_argument("--runs", type=Path, default=Path("runs/samplings/runs.jsonl"))
    made.add_argument("--results", type=Path, default=RESULTS, help="the page, when all runs are there")
    made.add_argument("--table", action="store_true", help="print the page of the runs that are there, and make none")
    made.add_argument("--data-dir", type=Path)
    made.add_argument("--cache-dir", type=Path, default=CACHE)
    given = made.parse_args(arguments)
    if TUNING_SEED in given.seeds:
        made.error(f"argument --seeds: {TUNING_SEED} is the seed of the trials")
    trainer = Trainer(given.runs, dataset=given.dataset, data_dir=given.data_dir, cache_dir=given.cache_dir)
    if not given.table:
        for model, seed in itertools.product(given.models, given.seeds):
            for cell in itertools.product([model], given.methods, given.batch_sizes, given.epsilons):
                trainer.run(Cell(*cell), seed, trainer.factor(Cell(*cell)))
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(page(trainer, given.seeds))
    print(page(trainer, given.seeds) if trainer.rows else "no run yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
