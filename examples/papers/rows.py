"""The runs of an experiment: a choice for every method on the tuning seed, then every row on the other seeds."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.config import Config
from examples.loop import CACHE
from examples.papers.experiment import TUNING_SEED, Experiment, Fields, Row
from examples.runs import NotRun, Runs
from examples.tasks import TASKS

SMOKE_NOISE = 1.0  # a noise multiplier


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The finished runs of a row: contents of the "result" in each result.json, a seed each.

    choice: of the grid; None if a trial of it was not run. at_noise: with the paper's noise; [] if it has none.
    at_epsilon: at the noise whose true epsilon is `claimed`.
    """

    row: Row
    choice: Fields | None
    at_noise: list[dict[str, Any]]
    at_epsilon: list[dict[str, Any]]


def run(experiment: Experiment, runs: Runs, seeds: Sequence[int], smoke: Fields | None = None) -> list[Outcome]:
    """All outcomes, from runs that are there or are made now; runs of equal configurations are one run.

    The trials come first, then the rows at `tune_at`, then the others.
    smoke: changes of the configuration of one row, which is run once and without trials, with SMOKE_NOISE; runs are
        named by their configurations.
    """
    made, tried = _Made(experiment, runs, smoke), smoke is not None
    rows = [experiment.smoked] if tried else list(experiment.rows)
    outcomes = []
    for row in rows:
        choice = row.grid[0] if tried else made.choice(experiment.tuned_row(row))
        at_epsilon: list[dict[str, Any]] = []
        at_noise = at_epsilon if row.noise == "true" else []
        outcomes.append(Outcome(row=row, choice=choice, at_noise=at_noise, at_epsilon=at_epsilon))
    first, second = ("epsilon", "noise")
    own = [one for one in outcomes if one.row.noise not in (None, "true")]
    order = [(one, first) for one in outcomes] + [(one, second) for one in own]
    if tried:
        order = [(one, first) for one in outcomes]
    for one, kind in sorted(order, key=lambda pair: pair[0].row.claimed != experiment.tune_at):
        results = one.at_epsilon if kind == first else one.at_noise
        if one.choice is None:
            continue
        for seed in seeds:
            with contextlib.suppress(NotRun):
                results.append(made.result(one.row, one.choice, seed, kind))
    return outcomes


class _Made:
    """The runs of one experiment."""

    def __init__(self, experiment: Experiment, runs: Runs, smoke: Fields | None):
        self.experiment, self.runs, self.smoke = experiment, runs, smoke
        self.names: dict[str, str] = {}  # of the runs, by their configurations

    @functools.cached_property
    def examples(self) -> int:
        """How many; the rows share their data."""
        config = self.config(self.experiment.rows[0], {}, 0, epsilon=1.0)
        places = self.runs.places.get("data_dir"), self.runs.places.get("cache_dir", CACHE)
        return TASKS[config.task].build(config, *places, False).examples

    def config(self, row: Row, choice: Fields, seed: int, **budget: Any) -> Config:
        return self.experiment.config(row, choice, seed, self.smoke or {}, **budget)

    def noise(self, row: Row, choice: Fields) -> float:
        if not callable(row.noise):
            assert row.noise is not None and not isinstance(row.noise, str)
            return row.noise
        config = self.config(row, choice, 0, epsilon=row.claimed)
        sampling = config.sampling_of(self.examples)
        return row.noise(config, sampling.divisor / self.examples, config.steps_of(sampling, self.examples))

    def result(self, row: Row, choice: Fields, seed: int, kind: str) -> dict[str, Any]:
        if self.smoke is not None:
            budget = {"noise_multiplier": SMOKE_NOISE}
        else:
            budget = {"epsilon": row.claimed} if kind == "epsilon" else {"noise_multiplier": self.noise(row, choice)}
        config = self.config(row, choice, seed, **budget)
        content = json.dumps(config.as_dict(), sort_keys=True)
        words = f"{row.label}-{row.grid.index(choice)}-{kind}-{row.claimed:g}-{seed}"
        if self.smoke is not None:
            words = hashlib.sha256(content.encode()).hexdigest()[:16]
        return self.runs.result(self.names.setdefault(content, words), config)

    def choice(self, row: Row) -> Fields | None:
        """The best of the grid on the tuning seed, at the row's epsilon; None if a trial was not run."""
        if len(row.grid) == 1:
            return row.grid[0]
        try:
            found = [self.result(row, choice, TUNING_SEED, "epsilon") for choice in row.grid]
        except NotRun:
            return None
        values = [one["metrics"][one["headline"]] for one in found]
        best = min(values) if "loss" in found[0]["headline"] else max(values)
        return row.grid[values.index(best)]
