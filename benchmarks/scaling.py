"""Does a law of small runs say which size, batch and number of steps a budget pays for? Two models at three sizes.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --model encoder

Trains a GPT on pieces of 64 letters of 20 Newsgroups, or the last one, three or six blocks of all-MiniLM-L6-v2 on film
reviews (`examples.text_data`). Small runs with three levels of noise give the points of a `dpx.reports.fit_scale_law`.
Then runs with other batches are made at true epsilons, and the page says how well the law predicts their losses, and
which of them it would have chosen. The texts are public: epsilon covers neither the small runs nor the learning rates,
of which the best counts. Each run is kept in runs/scaling, and a later call makes only those that are missing. Writes
benchmarks/results/scaling.md, or scaling_encoder.md.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from benchmarks import report
from dpx.reports import MeasuredRun, ScaleLaw, fit_scale_law
from examples import encoder, language_models, models, records, text_data
from examples.loop import CACHE
from examples.tasks.text import OPTIONS

LENGTH, TESTS, SEED = 64, 2048, 0  # letters of a piece; pieces to test
EPSILONS = (2.0, 8.0)  # of the checks
MICROBATCH = 1024
PLANS, EPOCHS = (0.5, 1.0, 2.0, 8.0), (1, 2, 4)


class Problem(NamedTuple):
    """loss: (parameters, example) -> number; an example is a row of each array of `train` and `tests`."""

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    train: Any
    tests: Any


class Family(NamedTuple):
    """rates: of Adam. fitted: batch, noise of a step over it, and epsilon in place of None, of the runs that the law is
    fitted to, after each of `steps`. shapes: batch and steps of the checks. batches: to plan with."""

    page: str
    words: str
    sizes: tuple[str, ...]
    build: Callable[[str, Path | None], Problem]
    rates: tuple[float, ...]
    fitted: tuple[tuple[int, float | None, float | None], ...]
    steps: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    delta: float

    @property
    def small(self) -> list["Run"]:
        return [Run(size, batch, self.steps[-1], *noise) for size in self.sizes for batch, *noise in self.fitted]

    @property
    def checks(self) -> list["Run"]:
        runs = [(shape, epsilon) for shape in self.shapes for epsilon in EPSILONS]
        return [Run(size, *shape, epsilon=epsilon) for shape, epsilon in runs for size in self.sizes]


class Run(NamedTuple):
    """noise: the standard deviation of a step's noise over the batch size, in clip norms; None is that of epsilon."""

    size: str
    batch: int
    steps: int
    noise: float | None = None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        budget = f"noise{self.noise:g}" if self.epsilon is None else f"epsilon{self.epsilon:g}"
        return f"{self.size}-batch{self.batch}-{budget}"


@functools.cache
def pieces(data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Letters of the posts to train on and of later ones to test on, int32 (N, LENGTH + 1)."""
    posts, found = text_data.newsgroups(data_dir), []
    for texts, most in ((posts.train_texts, None), (posts.test_texts, TESTS)):
        ids = text_data.letters([" ".join(texts)], sum(len(text) + 1 for text in texts))[0]
        count = len(ids) // (LENGTH + 1)
        found.append(ids[: count * (LENGTH + 1)].reshape(count, LENGTH + 1)[:most])
    return found[0], found[1]


def gpt(size: str, data_dir: Path | None) -> Problem:
    """Heads have 32 numbers."""
    width, layers = {"small": (32, 2), "middle": (64, 3), "large": (128, 4)}[size]
    shape = language_models.GPT2Sizes(len(text_data.LETTERS) + 1, LENGTH, width, layers, width // 32)
    model, (train, tests) = language_models.gpt2(shape), pieces(data_dir)

    def loss(params, letters):
        logits = model.apply(params, letters[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, letters[1:]).mean()

    return Problem(model.init, loss, train, tests)


def minilm(size: str, data_dir: Path | None) -> Problem:
    """The states that enter the trained blocks are computed once, and kept."""
    texts = text_data.movie_snippets(data_dir)
    options = OPTIONS | {"length": 32, "blocks": int(size)}
    encode, model, _ = encoder.adapted(options, len(texts.classes), texts.name, CACHE)
    train, tests = encode(texts.train_texts), encode(texts.test_texts)
    return Problem(model.init, models.loss_of(model), (train, texts.train_labels), (tests, texts.test_labels))


FAMILIES = {
    "gpt": Family(
        "scaling",
        "A GPT of three sizes on pieces of 64 letters of 20 Newsgroups; test losses are those of a letter.",
        ("small", "middle", "large"),
        gpt,
        rates=(5e-4, 2e-3, 8e-3),
        fitted=((256, 7.5e-5, None), (256, 3e-4, None), (256, 1.2e-3, None)),
        steps=(75, 150, 300, 600),
        shapes=((2048, 300), (1024, 600), (8192, 75)),
        batches=(512, 1024, 2048, 4096, 8192),
        delta=1e-6,
    ),
    "encoder": Family(
        "scaling_encoder",
        "The last one, three or six blocks of all-MiniLM-L6-v2 with a linear layer on film reviews.",
        ("1", "3", "6"),
        minilm,
        rates=(1e-4, 3e-4, 1e-3),
        fitted=((256, 5e-4, None), (512, None, 8.0), (512, None, 2.0)),
        steps=(100,),
        shapes=((1024, 100),),
        batches=(),
        delta=1e-5,
    ),
}


def losses(family: Family, run: Run, data_dir: Path | None) -> Iterator[dict[str, Any]]:
    """What a learning rate gives, after each number of steps: the test loss.

    The rates share one key, so that they are compared with the same noise; the texts are public.
    """
    problem = family.build(run.size, data_dir)
    examples = len(jax.tree.leaves(problem.train)[0])
    sampling = dpx.PoissonSampling(examples=examples, batch_size=run.batch)
    start = problem.init(jax.random.key(SEED))
    parameters = models.parameter_count(start)
    noise: Any = dpx.Budget(epsilon=run.epsilon or 1.0, delta=family.delta, steps=run.steps, numbers=parameters)
    if run.noise is not None:
        noise = run.noise * run.batch
    key = dpx.keys.stream(dpx.secret_key(SEED), "mechanism")
    private = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)
    spread: Any = private.noise_multiplier
    optimizer = dpx.chain(private, optax.scale_by_adam())

    size = MICROBATCH if run.batch > MICROBATCH else None
    step = dpx.private_updates(problem.loss, optimizer, microbatch_size=size)

    @jax.jit
    def stretch(params, state, rows, data, rate):
        def body(carry, row):
            updates, state, _ = step(carry[0], row.batch(data), carry[1])
            return (jax.tree.map(lambda p, u: p - rate * u, carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), rows)[0]

    @jax.jit
    def tested(params, tests):
        return jax.lax.map(lambda row: problem.loss(params, row), tests, batch_size=256).mean()

    ends = family.steps if run.epsilon is None else (run.steps,)
    rows = sampling.draw_ahead(key, optimizer.init(start), run.steps)
    data = jax.tree.map(jnp.asarray, problem.train)
    for rate in family.rates:
        params, state, done, began = start, optimizer.init(start), 0, time.perf_counter()
        for end in ends:
            part = jax.tree.map(lambda x, done=done, end=end: x[done:end], rows)
            params, state = stretch(params, state, part, data, rate)
            done = end
            found = {"examples": examples, "parameters": parameters, "steps": end, "rate": rate}
            found |= {"noise": spread / run.batch, "loss": float(tested(params, problem.tests))}
            found |= {"device": jax.devices()[0].device_kind, "versions": records.versions()}
            yield run._asdict() | found | {"seconds": round(time.perf_counter() - began, 1)}


def measured(family: Family, run: Run, folder: Path, data_dir: Path | None) -> list[dict[str, Any]]:
    """The lines of a run, from its file if it is there."""
    file = folder / f"{run.name}.jsonl"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        waiting = file.with_suffix(".part")
        with waiting.open("w") as lines:
            for found in losses(family, run, data_dir):
                print(json.dumps(found), file=lines, flush=True)
        waiting.replace(file)
    return [json.loads(line) for line in file.read_text().splitlines()]


def points(lines: list[dict[str, Any]]) -> list[MeasuredRun]:
    """For every learning rate; the least loss counts. The noises of one epsilon differ in their sixth digit."""
    return [
        MeasuredRun(line["parameters"], line["steps"], float(f"{line['noise']:.4g}"), line["loss"]) for line in lines
    ]


def losses_of(law: ScaleLaw, steps: tuple[int, ...]) -> str:
    sizes, _, noises = law.levels
    rows = [
        [f"{size:.0f}", f"{noise:g}", *(f"{law.losses[i, j, k]:.3f}" for j in range(len(steps)))]
        for i, size in enumerate(sizes)
        for k, noise in enumerate(noises)
    ]
    return report.grid(["parameters", "noise of a step", *(f"{one:.0f} steps" for one in steps)], rows)


def checked(law: ScaleLaw, checks: dict[Run, MeasuredRun]) -> tuple[str, str, str]:
    """A line for each check, for each epsilon what the law chooses of them, and how far the law is off, in words."""
    told = {
        run: law.loss(parameters=one.parameters, steps=one.steps, step_noise=one.step_noise)
        for run, one in checks.items()
    }
    rows = [
        [f"{run.epsilon:g}", run.batch, run.steps, f"{one.step_noise:.3g}", one.parameters]
        + [f"{one.loss:.3f}", f"{told[run]:.3f}", f"{told[run] - one.loss:+.3f}"]
        for run, one in checks.items()
    ]
    columns = ["epsilon", "batch size", "steps", "noise of a step", "parameters", "measured", "expected", "difference"]
    chosen = []
    for epsilon in sorted({run.epsilon or 0 for run in checks}):
        runs = [run for run in checks if run.epsilon == epsilon]
        by_law, by_loss = sorted(runs, key=told.__getitem__), sorted(runs, key=lambda run: checks[run].loss)
        ends = [by_law[0], by_loss[0], by_loss[-1]]
        names = (f"{checks[run].parameters} parameters, batch {run.batch}: {checks[run].loss:.3f}" for run in ends)
        chosen.append([f"{epsilon:g}", len(runs), *names])
    names = ["epsilon", "runs", "the law takes", "the best", "the worst"]
    off = [told[run] - one.loss for run, one in checks.items()]
    words = f", which misses them by {math.sqrt(np.mean(np.square(off))):.3f}, with a mean of {np.mean(off):+.3f}"
    return report.grid(columns, rows), report.grid(names, chosen), words


def planned(family: Family, law: ScaleLaw, examples: int) -> str:
    """What the law takes for each epsilon, with the least loss that it expects of each size."""
    rows = []
    for epsilon in PLANS:
        budget: dict[str, Any] = {"epsilon": epsilon, "delta": family.delta, "numbers": int(law.levels[0][-1])}
        plan = law.plan(dpx.plan_noise(examples=examples, epochs=EPOCHS, batch_sizes=family.batches, **budget))
        sizes = [min(one.loss for one in plan.runs if one.parameters == size) for size in law.levels[0]]
        run = plan.best.run
        rows.append([f"{epsilon:g}", plan.best.parameters, run.batch_size, run.steps, *(f"{one:.3f}" for one in sizes)])
    names = (f"least loss with {size:.0f}" for size in law.levels[0])
    return report.grid(["epsilon", "parameters", "batch size", "steps", *names], rows)


def page(family: Family, found: dict[Run, list[dict[str, Any]]]) -> str:
    fitted = [one for run in family.small for one in points(found[run])]
    if len(family.steps) == 1:  # a law has two: the same losses at twice as many
        fitted += [one._replace(steps=2 * one.steps) for one in fitted]
    law = fit_scale_law(fitted)
    least = {run: min(points(found[run]), key=lambda one: one.loss) for run in family.checks if run in found}
    lines, chosen, missed = checked(law, least) if least else ("", "", "")
    first, batches = found[family.small[0]][0], sorted({batch for batch, *_ in family.fitted})
    tables = {
        "Test loss of the runs that the law is fitted to, at the best learning rate": losses_of(law, family.steps)
    }
    if family.batches:
        within = f"batches of {min(family.batches):,} to {max(family.batches):,} and 1, 2 and 4 epochs"
        tables[f"What the law takes for an epsilon, of {within}"] = planned(family, law, first["examples"])
    tables["What the law takes of the runs at an epsilon, and its loss"] = chosen
    tables["Runs at a true epsilon"] = lines
    made = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    option = f" --model {family.page.removeprefix('scaling_')}" if family.page != "scaling" else ""
    heading = f"`python -m benchmarks.scaling{option}`, {time.strftime('%Y-%m-%d')}, seed {SEED}; {made}; "
    words = (
        f"{family.words} {first['examples']:,} to train on; Adam at learning rates "
        f"{', '.join(map(str, family.rates))}, batches of {' and '.join(map(str, batches))}, clip norm 1. Between the "
        "measured numbers, the law is linear in their logarithms: it misses a size, number of steps or noise that is "
        f"left out by {law.held_out_error:.3f} (root mean square). Epsilons are at delta {family.delta:g}. "
        f"{len(least)} of {len(family.checks)} other runs at a true epsilon check the law{missed}."
    )
    return report.write(family.page, heading + f"{first['device']}.", words, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, default="gpt")
    parser.add_argument("--only", nargs="*", help="make no others than these; the page has the runs there are")
    parser.add_argument("--runs", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    family, found = FAMILIES[given.model], {}
    for run in family.small + family.checks:
        if given.only is None or run.name in given.only or (given.runs / f"{run.name}.jsonl").is_file():
            found[run] = measured(family, run, given.runs, given.data_dir)
    if found.keys() >= set(family.small):
        print(page(family, found))


if __name__ == "__main__":
    main()
