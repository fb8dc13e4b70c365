"""Noise-aware optimizers, behind DP-SGD: accuracy at one epsilon, with one mechanism, for two small tasks.

`python -m examples.optimizers` makes the runs that are missing, and writes benchmarks/results/optimizers.md when all
are there. Each finished run is a line of `--runs`, so a command that was killed continues. `--table` prints the runs so
far. A run takes 2 to 5 s of CPU. [transforms.py](transforms.py) has the formulas.

Each learning rate (and the number that an optimizer has of its own) is that of the best trial on a sixth of the
training data, with a seed of its own. Trials climb by a factor of 2 until the accuracy falls. Their cost is not
counted. The seeds are public here, because the data are public.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpx
from dpx.sums.rounding import ETA
from examples import records
from examples.optimizers.problems import TASKS, Problem, Task
from examples.optimizers.transforms import OPTIMIZERS, SUMMED, Optimizer, both_points
from examples.papers.page import difference, measured
from examples.tasks import images

RESULTS = Path("benchmarks/results/optimizers.md")
SEEDS, TUNING_SEED, UNKNOWN_KEY = (0, 1, 2), 100, 2**100  # the key protects nobody: data and seeds are public
EPSILONS, DELTA, MOST_TRIALS = (1.0, 3.0), 1e-5, 5


@functools.cache
def noise_for(epsilon: float, examples: int, batch_size: int, epochs: float) -> float:
    """The noise multiplier, the same for all optimizers."""
    sampling = dpx.PoissonSampling(examples=examples, batch_size=batch_size)
    budget = dpx.Budget(epsilon=epsilon, delta=DELTA, epochs=epochs)
    key = dpx.secret_key(UNKNOWN_KEY)
    noise = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key).noise_multiplier
    assert not callable(noise)
    return float(noise)


class Cell(NamedTuple):
    """What the runs of one place in the table have in common."""

    task: str
    optimizer: str
    epsilon: float

    def facts(self, seed: int) -> dict[str, Any]:
        """What two runs that differ in their trials alone have in common."""
        task = TASKS[self.task]
        places = {"epochs": task.epochs, "batch_size": task.batch_size, "clip_norm": task.clip_norm}
        return self._asdict() | places | {"start": list(task.start), "seed": seed}


class Trainer:
    """Makes runs, and keeps each as a line of a file of JSON; asking for one that is there makes none."""

    def __init__(self, file: Path):
        self.file, self.rows = file, records.whole_lines(file)

    @functools.cache  # noqa: B019  # there is one trainer
    def problem(self, task: str, trial: bool) -> Problem:
        return self.problem(task, False).for_trials() if trial else TASKS[task].problem()

    def run(self, cell: Cell, seed: int, factor: float, own: float) -> dict[str, Any]:
        """The row of a run: from the file, or made now. own: the optimizer's own number, or 0. seed: trials have
        TUNING_SEED.
        """
        task, chosen = TASKS[cell.task], OPTIMIZERS[cell.optimizer]
        wanted = cell.facts(seed) | {"factor": factor, "own": own}
        if row := next((row for row in self.rows if wanted.items() <= row.items()), None):
            return row
        used = time.process_time()
        problem = self.problem(cell.task, seed == TUNING_SEED)
        rate = factor * task.start[chosen.adaptive]
        fitted, noise = fit(problem, task, chosen, cell.epsilon, seed, rate, own)
        params = fitted.params["at"] if chosen.points else fitted.params
        made = {"accuracy": images.accuracy_of(problem.apply, *problem.test)(params), "spent": fitted.epsilon}
        made |= {"noise_multiplier": noise, "steps": fitted.steps, "learning_rate": rate}
        made |= {"cpu": round(time.process_time() - used, 1), "date": time.strftime("%Y-%m-%d")}
        row = wanted | made | {"versions": records.versions()}
        self.rows.append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        words = f"{cell.task}, {chosen.title}, epsilon {cell.epsilon:g}, seed {seed}, rate {rate:.3g}, own {own:g}"
        print(f"{words}: {row['accuracy']:.4f}, {row['cpu']} s of CPU", flush=True)
        return row

    def chosen(self, cell: Cell) -> tuple[float, float]:
        """(factor of the learning rate, own number) of the best trial; of two alike, the first."""
        score = functools.cache(lambda own, power: self.run(cell, TUNING_SEED, 2.0**power, own)["accuracy"])
        tops = []
        for own in OPTIMIZERS[cell.optimizer].own:
            best, step, trials = 0, 1, 2
            if score(own, 1) <= score(own, 0):
                step, trials = -1, 3
            if score(own, step) > score(own, 0):
                best = step
                while trials < MOST_TRIALS and score(own, best + step) > score(own, best):
                    best, trials = best + step, trials + 1
            tops.append((score(own, best), 2.0**best, own))
        return max(tops, key=lambda top: top[0])[1:]

    def finals(self, cell: Cell, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The finished runs of a cell that is tuned; [] if one is missing."""
        found = [[row for row in self.rows if cell.facts(seed).items() <= row.items()] for seed in seeds]
        return [rows[-1] for rows in found] if all(found) else []


def fit(problem: Problem, task: Task, chosen: Optimizer, epsilon: float, seed: int, rate: float, own: float):
    """(the FitResult, the noise multiplier) of one run."""
    examples = len(problem.train[1])
    sampling = dpx.PoissonSampling(examples=examples, batch_size=task.batch_size)
    noise = noise_for(epsilon, examples, task.batch_size, task.epochs)
    key, clip = dpx.secret_key(UNKNOWN_KEY + seed), task.clip_norm
    place = {"sampling": sampling, "key": dpx.keys.stream(key, "mechanism")}
    mechanism = dpx.dp_sgd(clip_norm=clip, noise_multiplier=noise, **place)
    deviation = noise * clip * (1 + ETA) / task.batch_size
    loss, params = problem.loss, problem.init(dpx.keys.stream(key, "init"))
    if chosen.before:
        mechanism = dpx.in_coordinates(mechanism, chosen.before(deviation, own))
    if chosen.points:
        mechanism, loss = dpx.in_coordinates(mechanism, SUMMED), both_points(loss)
        params = {"at": params, "ahead": jax.tree.map(jnp.copy, params)}
    optimizer = dpx.chain(mechanism, chosen.behind(rate, deviation, own))
    steps, batches = sampling.steps(epochs=task.epochs), dpx.keys.stream(key, "batches")
    return dpx.fit(loss, optimizer, params, problem.train, key=batches, steps=steps, delta=DELTA), noise


# ------------------------------------------------------------------ the page

HEAD = (
    "| optimizer | epsilon | accuracy | minus SGD | minus Adam | learning rate | own | CPU |\n"
    "|---|---|---|---|---|---|---|---|"
)


NOTES = (
    "The differences are means of pairs with one seed, with their standard error. All rows of a task have one "
    "mechanism: DP-SGD on Poisson samples, with the same clip norm, noise, first parameters and batches. "
    f"[The formulas](../../examples/optimizers/transforms.py). Each learning rate is the best of at most {MOST_TRIALS} "
    "trials with another seed, on a sixth of the training data. They rise by factors of 2, from one start for all "
    "rows like SGD and another for all like Adam. An optimizer with a further number was tried with two values of it, "
    "each with such trials."
)


def table(trainer: Trainer, task: str, epsilons: Iterable[float], seeds: list[int]) -> str:
    """The finished runs of a task in Markdown."""
    lines = [HEAD]
    for epsilon, (name, optimizer) in itertools.product(epsilons, OPTIMIZERS.items()):
        rows, *bases = [trainer.finals(Cell(task, each, epsilon), seeds) for each in (name, "sgd", "adam")]
        if rows:
            scores, *others = [[100 * row["accuracy"] for row in runs] for runs in (rows, *bases)]
            minus = [
                "" if rows == base else difference(scores, other) for base, other in zip(bases, others, strict=True)
            ]
            numbers = f"{rows[0]['learning_rate']:.3g} | {rows[0]['own'] or ''}", f"{rows[0]['cpu']:.0f} s"
            cells = [optimizer.title, f"{epsilon:g}", measured(scores), *minus, *numbers]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(trainer: Trainer, epsilons: Iterable[float], seeds: list[int]) -> str:
    last = trainer.rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    text = ["# Noise-aware optimizers", ""]
    text += [f"`python -m examples.optimizers`, {last['date']}, seeds {', '.join(map(str, seeds))}; {versions}.", ""]
    text += [f"Test accuracy in percent, mean (each seed), delta {DELTA:g}. {NOTES}"]
    for name, task in TASKS.items():
        if any(row["task"] == name for row in trainer.rows):
            facts = f"{task.epochs:g} epochs, expected batch size {task.batch_size}, clip norm {task.clip_norm:g}."
            text += ["", f"## {task.title}", "", facts, "", table(trainer, name, epsilons, seeds)]
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m examples.optimizers", description=__doc__)
    made.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    made.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    made.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    made.add_argument("--runs", type=Path, default=Path("runs/optimizers/runs.jsonl"))
    made.add_argument("--results", type=Path, default=RESULTS, help="the page, when all runs are there")
    made.add_argument("--table", action="store_true", help="print the page of the runs that are there, and make none")
    given = made.parse_args(arguments)
    if TUNING_SEED in given.seeds:
        made.error(f"argument --seeds: {TUNING_SEED} is the seed of the trials")
    trainer = Trainer(given.runs)
    if not given.table:
        for cell in itertools.starmap(Cell, itertools.product(given.tasks, given.optimizers, given.epsilons)):
            factor, own = trainer.chosen(cell)
            for seed in given.seeds:
                trainer.run(cell, seed, factor, own)
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(page(trainer, given.epsilons, given.seeds))
    print(page(trainer, given.epsilons, given.seeds) if trainer.rows else "no run yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
