"""The runs of an experiment: a choice for every method on the tuning seed, then every row on the other seeds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.config import Config
from examples.loop import CACHE
from examples.papers.experiment import TUNING_SEED, Experiment, Fields, Row
from examples.runs import Runs
from examples.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The finished runs of a row: contents of the "result" in each result.json, a seed each.

    choice: of the grid. at_noise: with the paper's noise; [] if it has none. at_epsilon: truly billed at `claimed`.
    """

    row: Row
    choice: Fields
    at_noise: list[dict[str, Any]]
    at_epsilon: list[dict[str, Any]]


def run(
    experiment: Experiment, runs: Runs, seeds: Sequence[int], changes: Fields, *, smoke: bool = False
) -> list[Outcome]:
    """All outcomes, from runs that are there or are made now. changes: of all configurations.

    smoke: no trials, two rows, and one run of each: with the paper's noise, if it has one, in place of its epsilon.
    """

    @functools.cache  # the rows share their data
    def examples() -> int:
        config = configured(experiment.rows[0], {}, 0, epsilon=1.0)
        places = runs.places.get("data_dir"), runs.places.get("cache_dir", CACHE)
        return TASKS[config.task].build(config, *places, False).examples

    def configured(row: Row, choice: Fields, seed: int, **budget: Any) -> Config:
        return experiment.config(row, choice, seed, changes, **budget)

    def noise_of(row: Row, choice: Fields) -> float:
        if not callable(row.noise):
            assert row.noise is not None
            return row.noise
        config = configured(row, choice, 0, epsilon=row.claimed)
        sampling = config.sampling_of(examples())
        return row.noise(config, sampling.divisor / examples(), config.steps_of(sampling, examples()))

    def result(row: Row, choice: Fields, seed: int, kind: str) -> dict[str, Any]:
        budget = {"epsilon": row.claimed} if kind == "epsilon" else {"noise_multiplier": noise_of(row, choice)}
        where = f"{row.label}-{row.grid.index(choice)}-{kind}-{row.claimed:g}-{seed}"
        return runs.result(where, configured(row, choice, seed, **budget))

    def score(row: Row, choice: Fields) -> float:
        found = result(row, choice, TUNING_SEED, "epsilon")
        value = found["metrics"][found["headline"]]
        return -value if "loss" in found["headline"] else value

    outcomes = []
    for row in experiment.rows if not smoke else experiment.smoked():
        tuned = experiment.tuned_row(row)
        trial = 0
        if not smoke and len(row.grid) > 1:
            scores = [score(tuned, choice) for choice in tuned.grid]
            trial = scores.index(max(scores))
        at_noise = [result(row, row.grid[trial], seed, "noise") for seed in seeds if row.noise is not None]
        at_epsilon = at_noise if smoke else []
        at_epsilon = at_epsilon or [result(row, row.grid[trial], seed, "epsilon") for seed in seeds]
        outcomes.append(Outcome(row=row, choice=row.grid[trial], at_noise=at_noise, at_epsilon=at_epsilon))
    return outcomes
