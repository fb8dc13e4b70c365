"""`search`: makes the trials in turn, and returns only the best."""

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx import keys
from dpx.accounting.arithmetic import normal_sampler
from dpx.accounting.best_of import Distribution, Selection
from dpx.accounting.budget import Budget
from dpx.accounting.selection import SHAPES, draw_trial_count
from dpx.fitting import processes
from dpx.fitting.facts import bytes_of
from dpx.fitting.folder import SENSITIVE
from dpx.keys.noise import LARGEST_RELEASE
from dpx.ledgers import PrivacyLedger
from dpx.ledgers.files import acquire_lock, make_folder, read_json, replace_file
from dpx.mechanism import Mechanism
from dpx.reports.report import PrivacyReport, privacy_report, version_of
from dpx.states.reading import steps_taken
from dpx.states.record import fingerprint
from dpx.tuning.plan import ScoreOn, SearchPlan, SearchSettings, Trial
from dpx.values import Tree, names_arguments, path_of, repr_with_shapes, require_function


class SearchResult(NamedTuple):
    """The winner of a search, and what the search cost.

    configuration, params: the winner's; None if a Poisson number of trials was 0, which costs the same.
    score: float, the winner's; minus infinity if it was NaN. steps: int, of the winner.
    epsilon: float, an upper bound for the search at `delta`. cost: its cost, for `dpx.compose_runs` and
        `dpx.privacy_report`.
    report: the privacy report of the winner, with the cost of the search; None without a winner.
    """

    configuration: Any
    params: Tree
    score: float
    steps: int
    epsilon: float
    delta: float
    cost: Selection
    report: PrivacyReport | None

    __repr__ = repr_with_shapes


@names_arguments
def search(
    train: Callable[[Trial], Any],
    *,
    configurations: Sequence[Any],
    score: Callable,
    optimizer: Callable[..., Mechanism],
    key: jax.Array,
    trials: float,
    score_on: ScoreOn,
    distribution: Distribution = "logarithmic",
    budget: Budget | None = None,
    steps: int | None = None,
    delta: float | None = None,
    unit: str | None = None,
    checkpoints: str | Path | None = None,
    ledger: PrivacyLedger | None = None,
    words: str = "a search of dpx.tuning",
) -> SearchResult:
    """The best of a random number of trials, each of a random configuration, and its true cost.

    train: (Trial) -> the result of `dpx.fit`, or (params, optimizer state), of `trial.optimizer`.
    configurations: each trial draws one, uniformly and with replacement. Every one counts in the cost, drawn or not.
    score: (params) -> float, larger is better; NaN loses against every score. Of equal scores the first wins.
    optimizer: (configuration, key) -> the mechanism with that key; always the same for the same arguments.
    key: of the search, (), secret and used for nothing else.
    trials: float, at least 1, the expected number. The number itself is secret: do not publish it.
    score_on: "public" if `score` reads its argument and public data only. `NoisySum(noise_multiplier)` if it reads
        private data. The event of the noise if `score(params, key)` adds it itself. Every trial pays the last two.
    distribution: of the number: as for `dpx.accounting.best_of`.
    budget: of the whole search, with the steps or epochs of one trial. The optimizer is then called as
        optimizer(configuration, key, noise_multiplier=...), with the least noise multiplier that keeps the search
        within the budget; the cost of every step must fall as that number grows.
    steps: int, the most steps of a trial; delta: in (0, 1); None takes them from the mechanisms' budgets. unit: as for
        `dpx.privacy_report`. checkpoints: a folder with a folder for each trial, as SENSITIVE as the data. It keeps the
        scores too, so that none is computed again.
    ledger: a `dpx.PrivacyLedger`, which the search charges before its first trial, once if it continues in its folder;
        the trials charge nothing. Reserve it before the first release of the data: what is chosen later must be bounded
        by a Gaussian, which costs a search several times its epsilon. words: what the ledger calls it.
    Raises ValueError for other arguments, a mechanism with another key or without a cost, a trial that makes more
    steps, a state of another mechanism, a score that is not a number, the checkpoints of another search, a trial whose
    parameters differ from the stored ones, and a budget that no noise meets.
    Source: Papernot and Steinke 2022, https://arxiv.org/abs/2110.03620; `accounting/selection.py`.
    """
    require_function("train", train)
    settings = SearchSettings(
        configurations=list(configurations),
        score=score,
        optimizer=optimizer,
        key=keys.warn_if_guessable(keys.require_key(key)),
        trials=trials,
        score_on=score_on,
        distribution=distribution,
        budget=budget,
        steps=steps,
        delta=delta,
    )
    plan = SearchPlan.from_settings(settings)
    cost, winner, best = plan.cost, None, -math.inf
    with _opened_folder(checkpoints, plan) as folder:
        if ledger is not None:
            processes.from_first_process(lambda: _pay_for_search(ledger, plan, unit or "example", words, folder))
        for number in range(draw_trial_count(keys.stream(key, "number of trials"), cost.trials, SHAPES[distribution])):
            trial, params, state = plan.run(train, number, folder)
            value = plan.scored(params, number) if folder is None else _stored_score(plan, params, number, folder)
            if winner is None or value > best:
                winner, best = (trial, params, state), value
    epsilon = cost.epsilon(delta=plan.delta)
    if winner is None:
        return SearchResult(None, None, -math.inf, 0, epsilon, plan.delta, cost, None)
    trial, params, state = winner
    report = privacy_report(trial.optimizer, state, delta=plan.delta, unit=unit, records=cost.records, tuning=cost)
    report = replace(report, budget=budget)
    return SearchResult(trial.configuration, params, best, steps_taken(state), epsilon, plan.delta, cost, report)


def _pay_for_search(ledger: PrivacyLedger, plan: SearchPlan, unit: str, words: str, folder: Path | None) -> None:
    """Raises ValueError for a ledger of other neighbors or records, and where it does not allow the search."""
    cost, terms = plan.cost, ledger.terms
    if (cost.relation, cost.records) != (terms.relation, terms.records):
        wanted = f"relation {terms.relation!r} and {terms.records} records"
        raise ValueError(f"the search must be for the ledger's {wanted}, got {cost.relation!r} and {cost.records}")
    pairs = normal_sampler(cost.numbers).pairs
    holder = "" if folder is None else read_json(folder / "search.json")["mark"]
    key, numbers = plan.settings.key, min(2 * pairs, LARGEST_RELEASE)
    ledger.spend(cost.event, key=key, words=words, numbers=numbers, unit=unit, holder=holder)


@contextlib.contextmanager
def _opened_folder(folder: str | Path | None, plan: SearchPlan) -> Iterator[Path | None]:
    """The folder of one search, which this program holds meanwhile. Raises ValueError for another search's folder."""
    if folder is None:
        yield None
        return
    path = Path(folder).expanduser().absolute()
    own = {
        "key of the search (its mark)": int(keys.mark_of_key(plan.settings.key)),
        "configurations": len(plan.settings.configurations),
        "cost (its fingerprint)": fingerprint(plan.cost.event),
        "version of dpx": version_of("dpx-jax"),
    }
    with contextlib.ExitStack() as stack:

        def begin():
            make_folder(path)
            stack.callback(acquire_lock(path).release)
            file = path / "search.json"
            if not file.is_file():
                replace_file(file, json.dumps(own | {"mark": secrets.token_hex(8)}, indent=2) + "\n")
            if (stored := read_json(file)) != own | {"mark": stored.get("mark")}:
                raise ValueError(f"checkpoints must be a new folder or one of the same search, got {path}: {stored}")
            replace_file(path / "SENSITIVE", SENSITIVE)

        processes.from_first_process(begin)
        yield path


def _stored_score(plan: SearchPlan, params: Tree, number: int, folder: Path) -> float:
    """The score of a trial, which is computed once.

    So the folder fixes the parameters and score of each trial, and a repeated search returns a function of them.
    Another machine would round sums differently under the same noise, and could find another winner.
    """
    file, digest = folder / f"score-{number}.json", hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{path_of(path)} {jnp.result_type(leaf)}{jnp.shape(leaf)}".encode() + bytes_of(leaf))
    stored = processes.from_first_process(lambda: read_json(file) if file.is_file() else None)
    if stored is None:
        found = {"params (their digest)": digest.hexdigest(), "score": plan.scored(params, number)}
        stored = processes.from_every_process(found)[0]
        processes.from_first_process(lambda: replace_file(file, json.dumps(stored) + "\n"))
    if stored["params (their digest)"] != digest.hexdigest():
        raise ValueError(
            "train must return the same parameters whenever a trial is repeated, because its steps have the same "
            f"noise, but {file} was written for others. Train with dpx.fit(..., checkpoints=trial.folder), in a search "
            "with another key and another folder, and add the costs of both searches"
        )
    return stored["score"]
