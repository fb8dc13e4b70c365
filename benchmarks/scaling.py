"""Does a law of small runs say which size, batch and number of steps a budget pays for? A GPT at three sizes.

    python -m benchmarks.scaling

Trains a GPT on pieces of 64 letters of 20 Newsgroups (`examples.text_data`). Small runs, with batches of 256 and noise
of three sizes, give the points of a `dpx.reports.fit_scale_law`. Then runs with other batches are made at true
epsilons, and the page says how well the law tells their losses, and which of them it would have chosen. The texts are
public: epsilon covers neither the small runs nor the learning rates, of which the best is taken. Each run is kept in
runs/scaling, and a later call makes only those that are missing. Writes benchmarks/results/scaling.md.

`--encoder` makes no run: it reads the rows of film reviews of benchmarks/results/encoder.md, and asks what the form of
the law tells of epsilon 1 and 2 from those at 0.5 and 8. Writes benchmarks/results/scaling_encoder.md.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from benchmarks import report
from dpx.reports import MeasuredRun, ScaleLaw, fit_scale_law
from examples import language_models, models, records, text_data

LENGTH, TESTS, DELTA, SEED = 64, 2048, 1e-6, 0  # letters of a piece; pieces to test
SIZES = {"small": (32, 2), "middle": (64, 3), "large": (128, 4)}  # width and layers; heads of 32 numbers
RATES = (5e-4, 2e-3, 8e-3)  # of Adam
NOISES, BATCH, STEPS = (7.5e-5, 3e-4, 1.2e-3), 256, (75, 150, 300, 600)  # of the small runs: noise over batch size
EPSILONS, SHAPES = (2.0, 8.0), ((2048, 300), (1024, 600), (8192, 75))  # of the checks: batch and steps
MICROBATCH = 1024
PLANS, BATCHES = (0.5, 1.0, 2.0, 8.0), (512, 1024, 2048, 4096, 8192)
ENCODER = {"BitFit": 26_114, "LoRA": 37_634, "full": 10_647_554}  # trained parameters of six blocks and the head


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


SMALL = [Run(size, BATCH, STEPS[-1], noise=noise) for size in SIZES for noise in NOISES]
CHECKS = [Run(size, *shape, epsilon=epsilon) for shape in SHAPES for epsilon in EPSILONS for size in SIZES]


@functools.cache
def pieces(data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Letters of the posts to train on and of later ones to test on, int32 (N, LENGTH + 1)."""
    posts, found = text_data.newsgroups(data_dir), []
    for texts, most in ((posts.train_texts, None), (posts.test_texts, TESTS)):
        ids = text_data.letters([" ".join(texts)], sum(len(text) + 1 for text in texts))[0]
        count = len(ids) // (LENGTH + 1)
        found.append(ids[: count * (LENGTH + 1)].reshape(count, LENGTH + 1)[:most])
    return found[0], found[1]


def model_of(size: str) -> models.Model:
    width, layers = SIZES[size]
    shape = language_models.GPT2Sizes(len(text_data.LETTERS) + 1, LENGTH, width, layers, width // 32)
    return language_models.gpt2(shape)


def parameters(size: str) -> int:
    shapes = jax.eval_shape(model_of(size).init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def losses(run: Run, data_dir: Path | None) -> Iterator[dict[str, Any]]:
    """What a learning rate gives, after each number of steps: the test loss of a letter.

    The rates share one key, so that they are compared with the same noise; the texts are public.
    """
    train, tests = pieces(data_dir)
    model, sampling = model_of(run.size), dpx.PoissonSampling(examples=len(train), batch_size=run.batch)
    noise: Any = dpx.Budget(epsilon=run.epsilon or 1.0, delta=DELTA, steps=run.steps, numbers=parameters(run.size))
    if run.noise is not None:
        noise = run.noise * run.batch
    key = dpx.keys.stream(dpx.secret_key(SEED), "mechanism")
    private = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)
    spread: Any = private.noise_multiplier
    optimizer = dpx.chain(private, optax.scale_by_adam())

    def loss(params, letters):
        logits = model.apply(params, letters[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, letters[1:]).mean()

    size = MICROBATCH if run.batch > MICROBATCH else None
    step = dpx.private_updates(loss, optimizer, microbatch_size=size)

    @jax.jit
    def stretch(params, state, rows, data, rate):
        def body(carry, row):
            updates, state, _ = step(carry[0], row.batch(data), carry[1])
            return (jax.tree.map(lambda p, u: p - rate * u, carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), rows)[0]

    tested = jax.jit(lambda params: jax.lax.map(lambda row: loss(params, row), tests, batch_size=256).mean())
    ends = STEPS if run.epsilon is None else (run.steps,)
    start = model.init(jax.random.key(SEED))
    rows = sampling.draw_ahead(key, optimizer.init(start), run.steps)
    data = jnp.asarray(train)
    for rate in RATES:
        params, state, done, began = start, optimizer.init(start), 0, time.perf_counter()
        for end in ends:
            part = jax.tree.map(lambda x, done=done, end=end: x[done:end], rows)
            params, state = stretch(params, state, part, data, rate)
            done = end
            found = {"parameters": models.parameter_count(params), "steps": end, "rate": rate}
            found |= {"noise": spread / run.batch, "loss": float(tested(params))}
            found |= {"device": jax.devices()[0].device_kind, "versions": records.versions()}
            yield run._asdict() | found | {"seconds": round(time.perf_counter() - began, 1)}


def measured(run: Run, folder: Path, data_dir: Path | None) -> list[dict[str, Any]]:
    """The lines of a run, from its file if it is there."""
    file = folder / f"{run.name}.jsonl"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        waiting = file.with_suffix(".part")
        with waiting.open("w") as lines:
            for found in losses(run, data_dir):
                print(json.dumps(found), file=lines, flush=True)
        waiting.replace(file)
    return [json.loads(line) for line in file.read_text().splitlines()]


def points(lines: list[dict[str, Any]]) -> list[MeasuredRun]:
    """Every learning rate; of each number of steps, the least loss counts."""
    return [MeasuredRun(line["parameters"], line["steps"], line["noise"], line["loss"]) for line in lines]


def losses_of(law: ScaleLaw) -> str:
    sizes, steps, noises = law.levels
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


def planned(law: ScaleLaw, examples: int) -> str:
    """What the law takes for each epsilon, with the least loss that it expects of each size."""
    rows = []
    for epsilon in PLANS:
        budget: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "numbers": int(law.levels[0][-1])}
        plan = law.plan(dpx.plan_noise(examples=examples, epochs=[1, 2, 4], batch_sizes=BATCHES, **budget))
        sizes = [min(one.loss for one in plan.runs if one.parameters == size) for size in law.levels[0]]
        run = plan.best.run
        rows.append([f"{epsilon:g}", plan.best.parameters, run.batch_size, run.steps, *(f"{one:.3f}" for one in sizes)])
    names = (f"least loss with {size:.0f}" for size in law.levels[0])
    return report.grid(["epsilon", "parameters", "batch size", "steps", *names], rows)


def page(found: dict[Run, list[dict[str, Any]]], examples: int) -> str:
    law = fit_scale_law(one for run in SMALL for one in points(found[run]))
    least = {run: min(points(found[run]), key=lambda one: one.loss) for run in CHECKS if run in found}
    lines, chosen, missed = checked(law, least) if least else ("", "", "")
    tables = {
        "Test loss of a letter of the small runs, at the best learning rate": losses_of(law),
        "What the law takes for an epsilon, of batches of 512 to 8,192 and 1, 2 and 4 epochs": planned(law, examples),
        "What the law takes of the runs at an epsilon, and its loss": chosen,
        "Runs at a true epsilon": lines,
    }
    first = found[SMALL[0]][0]
    made = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    heading = f"`python -m benchmarks.scaling`, {time.strftime('%Y-%m-%d')}, seed {SEED}; {made}; {first['device']}."
    words = (
        f"A GPT of three sizes on {examples:,} pieces of 64 letters of 20 Newsgroups; Adam at learning "
        f"rates {', '.join(map(str, RATES))}, batches of {BATCH}, clip norm 1. Between the measured numbers, the law "
        "is linear in their logarithms: it misses a size, number of steps or noise that is left out by "
        f"{law.error:.3f} (root mean square). Epsilons are at delta {DELTA:g}. "
        f"{len(least)} of {len(CHECKS)} runs at a true epsilon check the law{missed}."
    )
    return report.write("scaling", heading, words, tables)


def of_the_encoder() -> str:
    """The rows of MiniLM at epsilon 1 and 2 beside what the law tells from 0.5 and 8; the loss is the error rate.

    All runs have equally many steps, so the law gets their losses again at twice as many.
    """
    lines = (report.RESULTS / "encoder.md").read_text().split("## Newsgroups")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    found: dict[tuple[str, str], MeasuredRun] = {}
    for trained, epsilon, _, accuracy, _, noise, steps, *_ in (row for row in rows if row[0] in ENCODER):
        error = 100 - float(accuracy.split("**")[1])
        found[trained, epsilon] = MeasuredRun(ENCODER[trained], int(steps), float(noise) / 512, error)
    ends = [run for (_, epsilon), run in found.items() if epsilon in ("0.5", "8")]
    law = fit_scale_law(run._replace(steps=steps) for run in ends for steps in (run.steps, 2 * run.steps))
    told = {
        at: law.loss(parameters=r.parameters, steps=r.steps, step_noise=r.step_noise)
        for at, r in found.items()
        if at[1] in ("1", "2")
    }
    measured = {at: found[at].loss for at in told}

    def order(losses: dict[tuple[str, str], float], epsilon: str) -> str:
        return ", ".join(sorted(ENCODER, key=lambda trained: losses[trained, epsilon]))

    table = [
        [epsilon, trained, ENCODER[trained], f"{100 - measured[trained, epsilon]:.2f}"]
        + [f"{100 - one:.2f}", f"{measured[trained, epsilon] - one:+.2f}"]
        for (trained, epsilon), one in told.items()
    ]
    orders = [[epsilon, order(measured, epsilon), order(told, epsilon)] for epsilon in ("1", "2")]
    off = math.sqrt(np.mean([(measured[at] - one) ** 2 for at, one in told.items()]))
    words = (
        f"Film reviews, accuracy in percent. The law misses these six by {off:.2f} (root mean square). It reads the "
        "noise alone here, because all runs have 99 steps, and what is trained is the same at every epsilon."
    )
    tables = {
        "At epsilon 1 and 2, by the runs at 0.5 and 8": report.grid(
            ["epsilon", "trained", "parameters", "measured", "expected", "difference"], sorted(table)
        ),
        "From the best to the worst": report.grid(["epsilon", "measured", "expected"], orders),
    }
    heading = f"`python -m benchmarks.scaling --encoder`, {time.strftime('%Y-%m-%d')}, of [encoder.md](encoder.md)."
    return report.write("scaling_encoder", heading, words, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="make no others than these; the page has the runs there are")
    parser.add_argument("--runs", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--encoder", action="store_true", help="read encoder.md in place of making runs")
    given = parser.parse_args()
    if given.encoder:
        return print(of_the_encoder())
    found = {}
    for run in SMALL + CHECKS:
        if given.only is None or run.name in given.only or (given.runs / f"{run.name}.jsonl").is_file():
            found[run] = measured(run, given.runs, given.data_dir)
    if found.keys() >= set(SMALL):
        print(page(found, len(pieces(given.data_dir)[0])))


if __name__ == "__main__":
    main()
