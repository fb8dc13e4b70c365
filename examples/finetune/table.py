"""Loss, and what leaks, against epsilon: `python -m examples.finetune.table`, which makes the page and the figure.

Every run is appended to a file of JSON lines when it ends, so the command continues where it was stopped. `--page`
writes benchmarks/results/finetune.md and .svg from the rows that are there, and trains nothing. The seeds are public
here, because the data are public.
"""

import argparse
import functools
import json
import math
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples import records
from examples.finetune.base import small_base
from examples.finetune.leakage import REFERENCES, UNRELEASED
from examples.finetune.training import Settings, run
from examples.loop import CACHE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SEEDS, EPSILONS = (0, 1, 2), (1.0, 3.0, 8.0, math.inf)  # DP-SGD has no run without noise
RATES = {  # learning rates by optimizer, LoRA rank, and how many units there are (0: all)
    ("adam", 4, 0): 1e-2,
    ("adam", 0, 0): 1e-3,
    ("sgd", 4, 0): 0.3,
    ("sgd", 0, 0): 0.1,
    ("adam", 0, 300): 1e-3,
}
SHARED: dict[str, Any] = dict(length=64, most=2, batch_size=128, steps=25, clip_norm=0.5, canaries=40, delta=1e-5)
FEW: dict[str, Any] = dict(batch_size=100, steps=60)  # with few units, so that the model sees each many times


def settings_of(base: str, optimizer: str, rank: int, few: int, epsilon: float, seed: int, **change: Any) -> Settings:
    """One run. Every run has a seed of its own, because two runs with one key would share their noise."""
    numbers = [seed, rank, int(min(epsilon, 1e6) * 10), len(optimizer)]
    mixed = np.random.SeedSequence([*numbers, few] if few else numbers)
    own = int(mixed.generate_state(1, np.uint64)[0])
    rate = RATES[optimizer, rank, few]
    options: dict[str, Any] = (
        SHARED
        | (FEW if few else {})
        | dict(optimizer=optimizer, lora_rank=rank, epsilon=epsilon, learning_rate=rate, seed=own, units=few)
    )
    return Settings(base=base, **(options | change))


def words_of(optimizer: str, rank: int, few: int) -> str:
    return f"{optimizer}, {f'LoRA {rank}' if rank else 'full'}{f', {few} units' if few else ''}"


def of_kind(rows: list[dict[str, Any]], kind: tuple[str, int, int], epsilon: float) -> list[dict[str, Any]]:
    found = [row for row in rows if (row["optimizer"], row["rank"], row.get("few", 0)) == kind]
    return [row for row in found if row["asked"] == str(epsilon)]


def planned(kind: tuple[str, int, int]) -> tuple[float, ...]:
    """The epsilons of a kind of run."""
    return EPSILONS[:3] if kind[0] == "sgd" else EPSILONS


def rows_in(file: Path) -> dict[str, dict[str, Any]]:
    """The runs that are finished, by name."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m examples.finetune.table", description=__doc__)
    made.add_argument("--rows", type=Path, default=RESULTS / "finetune.jsonl", help="the finished runs")
    made.add_argument("--minutes", type=float, default=math.inf, help="start no run after these")
    made.add_argument("--only", default="", help="make the runs whose names contain these words")
    made.add_argument("--page", action="store_true", help="write the page and the figure only")
    made.add_argument("--cache-dir", type=Path, default=CACHE)
    given = made.parse_args(arguments)
    if not given.page:
        train(given)
    found = list(rows_in(given.rows).values())
    records.replace_file(given.rows.with_suffix(".md"), page(found))
    figure(found, given.rows.with_suffix(".svg"))
    return 0


def train(given: argparse.Namespace) -> None:
    """The runs that are not there yet, seed by seed, so that what is there can be compared."""
    base, end = str(small_base(given.cache_dir, progress=True)), time.monotonic() + 60 * given.minutes
    for seed in SEEDS:
        for kind in RATES:
            for epsilon in planned(kind):
                name = f"{words_of(*kind)}, epsilon {epsilon:g}, seed {seed}"
                if name in rows_in(given.rows) or given.only not in name:
                    continue
                if time.monotonic() > end:
                    return
                started, settings = time.process_time(), settings_of(base, *kind, epsilon, seed)
                with tempfile.TemporaryDirectory() as folder:
                    result = run(settings, output_dir=Path(folder) / "run", checkpoint_every=10**6)
                row = dict(zip(("optimizer", "rank", "few"), kind, strict=True)) | result
                row |= {"name": name, "asked": str(epsilon), "seed": seed, "date": time.strftime("%Y-%m-%d")}
                row |= {"cpu_seconds": round(time.process_time() - started, 1), "versions": records.versions()}
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name}: loss {result['test_loss']:.4f}, {row['cpu_seconds']} s", flush=True)


# ------------------------------------------------------------------ the page

HEAD = """# Fine-tuning a language model

`python -m examples.finetune.table`, {date}, seeds {seeds}; {versions}. {count} of {total} runs.

A decoder of {parameters} parameters reads bytes. It was trained without privacy on the docstrings of Python's standard
library, which are public. Then it is fine-tuned on the docstrings of the installed packages: {units} modules, one of
which is the unit of privacy, with at most {most} rows of {length} bytes each. Another tenth of the modules is for
testing, and is public. There are {canaries} more units, the canaries, which were made up: each repeats a random number
of six digits. Each run has {steps} steps with {batch} units on average, clip norm {clip}, and delta
{delta:g}. The runs with 300 units take these few modules, {few_batch} of them on average in each of {few_steps} steps,
so that the model sees a module {few_times:.0f} times, and not once.

The numbers are means over the seeds so far (the smallest and the largest). Loss is in nats a byte on the test
modules, and
{before:.4f} before fine-tuning. Epsilon "inf" has the same clip norm and no noise. Learning rates (the same for every
epsilon) were chosen by a few trials with another seed on the same test modules, which the cost does not cover. Noise is
the noise multiplier.
"""
TABLE = """
| | trained | epsilon | noise | test loss | exposure, mean | membership: found at 1% false | at 0.1% | area |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
Exposure is how many bits of a canary's number the model gives away, by its rank among {references} other numbers, of at
most {largest:.0f}; a model that knows nothing has {blind:.2f} on average
([docs/auditing.md](../../docs/auditing.md#what-a-trained-model-leaks)). Membership: the attack ranks modules by how far
fine-tuning moved their loss, {members} that took part and {others} that did not. Guessing finds 1%, 0.1%, and has an
area of 0.5 under the curve. With so few modules, the rate at 0.1% counts the scores above the largest one of the
others.

![loss, exposure and membership against epsilon](finetune.svg)
"""


def filled(text: str) -> str:
    """Every paragraph in lines of at most 120 characters."""
    fill = functools.partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(fill(paragraph) for paragraph in text.strip().split("\n\n")) + "\n"


def page(rows: list[dict[str, Any]]) -> str:
    """The table, from the rows that are there."""
    if not rows:
        raise ValueError("no run is finished")
    for few in {row.get("few", 0) for row in rows}:
        corpora = {(row["base_test_loss"], row["units"]) for row in rows if row.get("few", 0) == few}
        if len(corpora) > 1:
            raise ValueError(
                f"all rows must be of one base model and one corpus, got {len(corpora)}: other packages were installed "
                "between the runs. Remove the older rows, and run the command again"
            )
    first, versions = (
        next((row for row in rows if not row.get("few")), rows[0]),
        ", ".join(f"{name} {number}" for name, number in rows[0]["versions"].items()),
    )
    text = (
        filled(
            HEAD.format(
                date=max(row["date"] for row in rows),
                seeds=", ".join(map(str, sorted({row["seed"] for row in rows}))),
                versions=versions,
                count=len(rows),
                total=len(SEEDS) * sum(len(planned(kind)) for kind in RATES),
                parameters=f"{min(row['parameters'] for row in rows):,}",
                units=f"{first['units'] - SHARED['canaries']:,}",
                before=first["base_test_loss"],
                batch=SHARED["batch_size"],
                few_batch=FEW["batch_size"],
                few_steps=FEW["steps"],
                few_times=FEW["batch_size"] * FEW["steps"] / (300 + SHARED["canaries"]),
                clip=SHARED["clip_norm"],
                **{name: SHARED[name] for name in ("most", "length", "canaries", "steps", "delta")},
            )
        )
        + TABLE
    )
    for kind in RATES:
        for epsilon in planned(kind):
            if of := of_kind(rows, kind, epsilon):
                text += line(kind, epsilon, of)
    tail = TAIL.format(
        largest=math.log2(REFERENCES + 1),
        references=REFERENCES,
        blind=np.mean(math.log2(REFERENCES + 1) - np.log2(np.arange(1, REFERENCES + 2))),
        members=first["members"],
        others=first["others"],
    )
    return text + "\n" + filled(tail)


def line(kind: tuple[str, int, int], epsilon: float, rows: list[dict[str, Any]]) -> str:
    def spread(name: str, form: str, scale: float = 1.0) -> str:
        values = [scale * row[name] for row in rows]
        mean = f"{np.mean(values):{form}}"
        return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"

    spent = f"{records.rounded_up(max(row['epsilon'] for row in rows))}" if epsilon < math.inf else "inf"
    cells = [
        words_of(*kind).replace("sgd", "DP-SGD").replace("adam", "DP-Adam"),
        f"{rows[0]['trained']:,}",
        spent,
        f"{rows[0]['noise_multiplier']:.3f}",
        spread("test_loss", ".4f"),
        spread("exposure", ".2f"),
        spread(UNRELEASED + "tpr_at_0.01", ".1f", 100) + "%",
        spread(UNRELEASED + "tpr_at_0.001", ".2f", 100) + "%",
        spread(UNRELEASED + "area", ".3f"),
    ]
    return "| " + " | ".join(cells) + " |\n"


def figure(rows: list[dict[str, Any]], file: Path) -> None:
    """The attacks against epsilon: exposure, the area of the membership attack, and the loss beside them."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 3.4), layout="constrained")
    names = {
        "test_loss": "test loss (nats a byte)",
        "exposure": "exposure (bits)",
        UNRELEASED + "area": "membership, area",
    }
    blind = {"test_loss": rows[0]["base_test_loss"], "exposure": 1.44, UNRELEASED + "area": 0.5}
    for number, (name, label) in enumerate(names.items(), 1):
        axes = drawn.add_subplot(1, 3, number, xlabel="epsilon", ylabel=label)
        for color, kind in enumerate(RATES):
            found = [[row[name] for row in of_kind(rows, kind, epsilon)] for epsilon in EPSILONS]
            means = [np.mean(of) if of else math.nan for of in found]
            axes.plot(range(len(EPSILONS)), means, f"C{color}.-", label=words_of(*kind))
        axes.axhline(blind[name], color="gray", linestyle=":", label="before" if name == "test_loss" else "guessing")
        axes.set_xticks(range(len(EPSILONS)), ["no noise" if e == math.inf else f"{e:g}" for e in EPSILONS])
        axes.grid(alpha=0.3)
    drawn.axes[0].legend(fontsize=8)
    drawn.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
