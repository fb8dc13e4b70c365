"""Searches for hyperparameters on private data at a known cost: returns the best of a secret random number of trials.

    def optimizer(configuration, key):
        mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key)
        return dpx.chain(mechanism, optax.adam(configuration["learning_rate"]))

    def train(trial):
        return dpx.fit(loss, trial.optimizer, params, data)

    configurations = [{"learning_rate": rate} for rate in (1e-3, 1e-2, 1e-1)]
    found = dpx.tuning.search(
        train, configurations=configurations, score=accuracy, optimizer=optimizer, key=key, trials=10, score_on="public"
    )
    found.params, found.configuration, found.report
    found.epsilon  # more than that of `budget`, which is for one trial

The cost covers only the winner. The number of trials, all other results, and anything that reveals them (logs, files,
how long the search took) are as secret as the data. Everything random comes from the key. So the same program with the
same key continues an interrupted search: it has the same number of trials, with the same configurations and keys. A
second search, with another key, costs as much again (`dpx.compose_runs`).

`budget=` calibrates the noise of the trials so that the whole search costs at most the budget's epsilon.
"""

import contextlib
import functools
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.accounting.arithmetic import normal_sampler_error
from dpx.accounting.budget import Budget, least_noise_within
from dpx.accounting.checks import require_delta
from dpx.accounting.compose import Distribution, Selection, best_of, is_same_key
from dpx.accounting.cost import cost_of_run
from dpx.accounting.loss import as_hashable, require_noise_to_matter
from dpx.accounting.selection import SHAPES, draw_trial_count
from dpx.fitting import processes
from dpx.fitting.facts import bytes_of
from dpx.fitting.folder import SENSITIVE
from dpx.keys.noise import LARGEST_RELEASE
from dpx.ledgers import PrivacyLedger
from dpx.ledgers.files import acquire_lock, make_folder, read_json, replace_file
from dpx.mechanism import Mechanism, require_mechanism
from dpx.reports.report import PrivacyReport, privacy_report, version_of
from dpx.states.reading import release_state, steps_taken
from dpx.states.record import fingerprint
from dpx.statistics.metrics import PrivateMetric
from dpx.sums.rounding import ETA, FloatPair
from dpx.values import (
    Tree,
    described,
    explain_misuse,
    leaf_path,
    repr_with_shapes,
    require_floats,
    require_function,
    require_number,
    require_path,
    require_whole,
)

__all__ = ["NoisySum", "SearchResult", "Trial", "search"]
_TOLERANCE = 1e-4  # relative tolerance of a budget's epsilon


class Trial(NamedTuple):
    """One trial of a search.

    configuration: one of those searched. optimizer: the mechanism built for it, with its own key. key: scalar key for
        other randomness, such as initial parameters. folder: for checkpoints, or None; as sensitive as the data.
    """

    configuration: Any
    optimizer: Mechanism
    key: jax.Array
    folder: Path | None

    __repr__ = repr_with_shapes


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A score on private data: the sum of one value in [0, 1] per example, with Gaussian noise whose cost is counted.

    With this as `score_on`, `score(params)` returns the values, float (n,), such as whether each prediction is right.
    dpx clips them to [0, 1], and counts NaN as 0. Each value must depend on only one example (or user), and each
    example may affect only one value, so n is at most the sampling's number of examples.

    noise_multiplier: float, positive, the standard deviation of the noise on the sum.
    """

    noise_multiplier: float

    def __post_init__(self):
        noise = require_number("noise_multiplier", self.noise_multiplier, minimum=0, exclusive=True)
        vars(self).update(noise_multiplier=noise)  # a float16 would lose a part of the factor for rounding


ScoreOn = Literal["public"] | NoisySum | DpEvent


@dataclass(frozen=True, kw_only=True)
class CheckedSearchArguments:
    """The checked arguments of `search` that determine its cost."""

    configurations: Sequence[Any]
    score: Callable
    optimizer: Callable[..., Mechanism]
    key: jax.Array = field(repr=False)
    trials: float
    score_on: ScoreOn
    distribution: Distribution
    budget: Budget | None
    steps: int | None
    delta: float | None

    def __post_init__(self):
        if isinstance(self.score, PrivateMetric):
            raise ValueError(
                "score must not be a dpx.statistics.PrivateMetric, whose cost the search would not include: return the "
                "values of the examples, with score_on=dpx.tuning.NoisySum(...), and evaluate the winner"
            )
        require_function("score", self.score, "params", *["key"] * isinstance(self.score_on, DpEvent))
        if isinstance(self.optimizer, Mechanism):
            raise ValueError(
                "optimizer must be a function of (configuration, key) that builds the mechanism of a trial, such as "
                "lambda rate, key: dpx.chain(dpx.dp_sgd(..., key=key), optax.sgd(rate)); got one mechanism"
            )
        noise = {} if self.budget is None else {"noise_multiplier": 1.0}
        require_function("optimizer", self.optimizer, "configuration", "key", **noise)
        keys.require_key(self.key)
        if not self.configurations:
            raise ValueError('configurations must be a list of at least one, such as [{"rate": 0.1}, {"rate": 0.3}]')
        if self.budget is None:
            return
        if not isinstance(self.budget, Budget):
            raise ValueError(f"budget must be a dpx.Budget, got {described(self.budget)}")
        if self.steps is not None or self.delta is not None:
            raise ValueError("steps and delta must not be given with a budget, which already has them")

    def build_mechanism(self, configuration: Any, key: jax.Array, noise: float | None) -> Mechanism:
        """Builds a trial's mechanism, with the search's budget, which sets the steps. noise: None without a budget."""
        given = {} if self.budget is None else {"noise_multiplier": noise}
        mechanism = self.optimizer(configuration, key, **given)
        require_mechanism(mechanism)
        if not is_same_key(mechanism.key, key):
            raise ValueError("optimizer must build its mechanism with the key it is given: trials need fresh noise")
        return mechanism if self.budget is None else mechanism.replace(budget=self.budget)

    def cost_of_search(self, mechanisms: list[Mechanism], steps: list[int]) -> Selection:
        """Returns the cost of a search of these configurations."""
        noise = self.score_on
        if isinstance(noise, NoisySum):
            noise = GaussianDpEvent(noise.noise_multiplier)
        runs = zip(mechanisms, steps, strict=True)
        return best_of(*runs, trials=self.trials, score_on=noise, distribution=self.distribution)

    def trial_noise_multipliers(self) -> list[float | None]:
        """Finds noise multipliers, one per configuration, that keep the search within its budget; all None without one.

        First, each configuration gets the noise that a search over it alone needs, because small batches need less
        than large ones. At every Renyi order, a trial costs as much as the most expensive configuration there, so it
        may cost more than any single one. So one factor then scales all noise up until the search is within its budget.

        Raises ValueError if no noise meets the budget, and for mechanisms without a cost.
        """
        budget, own = self.budget, _trial_key(self.key, 0)
        if budget is None:
            return [None] * len(self.configurations)

        def built(configurations: Sequence[Any], noises: Sequence[float]) -> list[Mechanism]:
            return [self.build_mechanism(each, own, noise) for each, noise in zip(configurations, noises, strict=True)]

        def event(mechanism: Mechanism) -> DpEvent:
            return mechanism.event(_budget_steps(mechanism))

        def cost(mechanisms: list[Mechanism]) -> float:
            cost = self.cost_of_search(mechanisms, [_budget_steps(mechanism) for mechanism in mechanisms])
            return cost.epsilon(delta=budget.delta, accountant=budget.accountant)

        def least(make: Callable[[float], list[Mechanism]]) -> float:
            try:
                return least_noise_within(lambda noise: cost(make(noise)), budget.epsilon, _TOLERANCE, 1.0)
            except ValueError as error:
                raise ValueError(
                    f"the search cannot stay within epsilon={budget.epsilon:g} at delta={budget.delta:g}. Expect fewer "
                    f"trials, allow a larger epsilon, or add more noise to a private score: {error}"
                ) from error

        at_one = built(self.configurations, [1.0] * len(self.configurations))
        cost(at_one)  # raises ValueError if a mechanism has no cost
        found: dict[Any, float] = {}  # computed once for equal costs, as with several learning rates
        noises = []
        for each, mechanism in zip(self.configurations, at_one, strict=True):
            alike = as_hashable(event(mechanism))
            if alike not in found:
                make = functools.partial(self.build_mechanism, each, own)
                require_noise_to_matter("optimizer", lambda noise, make=make: event(make(noise)))
                found[alike] = least(lambda noise, make=make: [make(noise)])
            noises.append(found[alike])
        scale = least(lambda scale: built(self.configurations, [scale * noise for noise in noises]))
        return [scale * noise for noise in noises]


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What all trials share, and their cost. noises, mechanisms, steps: one per configuration, as the cost assumes."""

    arguments: CheckedSearchArguments
    noises: list[float | None]
    mechanisms: list[Mechanism]
    steps: list[int]
    delta: float
    cost: Selection

    @classmethod
    def from_arguments(cls, arguments: CheckedSearchArguments) -> "SearchPlan":
        """Builds the plan. Raises ValueError if the arguments have no cost, or no noise meets their budget."""
        noises, own, delta = arguments.trial_noise_multipliers(), _trial_key(arguments.key, 0), arguments.delta
        pairs = zip(arguments.configurations, noises, strict=True)
        mechanisms = [arguments.build_mechanism(each, own, noise) for each, noise in pairs]
        if arguments.steps is not None:
            steps = [require_whole("steps", arguments.steps)] * len(mechanisms)
        elif any(mechanism.budget is None for mechanism in mechanisms):
            raise ValueError("steps must be given, because a mechanism has no dpx.Budget")
        else:
            steps = [_budget_steps(mechanism) for mechanism in mechanisms]
        if delta is None:
            deltas = {mechanism.budget and mechanism.budget.delta for mechanism in mechanisms}
            if None in deltas or len(deltas) > 1:
                raise ValueError(f"delta must be given, because the mechanisms' budgets do not agree on one: {deltas}")
            (delta,) = deltas
        cost = replace(arguments.cost_of_search(mechanisms, steps), keys=(arguments.key,))
        delta = require_delta(delta)
        return cls(arguments=arguments, noises=noises, mechanisms=mechanisms, steps=steps, delta=delta, cost=cost)

    def trial(self, number: int, folder: Path | None) -> tuple[Trial, int]:
        """Returns the trial with this index, and the most steps that it may take."""
        key, configurations = self.arguments.key, self.arguments.configurations
        chosen = _uniform_below(len(configurations), keys.stream(key, "configuration", number))
        configuration = _copied_containers(configurations[chosen])
        mechanism = self.arguments.build_mechanism(configuration, _trial_key(key, number), self.noises[chosen])
        most = self.steps[chosen]
        if mechanism.event(most) != self.mechanisms[chosen].event(most):
            raise ValueError("optimizer must return the mechanism that is paid for at every call, got another one")
        own = keys.stream(key, "of a trial's own", number)
        return Trial(configuration, mechanism, own, None if folder is None else folder / str(number)), most

    def run(self, train: Callable[[Trial], Any], number: int, folder: Path | None) -> tuple[Trial, Tree, Tree]:
        """Runs the trial with this index; returns it, its parameters and its state, or raises if the cost is wrong."""
        trial, most = self.trial(number, folder)
        result = train(trial)
        if not isinstance(result, tuple) or len(result) < 2:
            raise ValueError(f"train must return the result of dpx.fit, or (params, state), got {type(result)}")
        try:
            steps = cost_of_run(trial.optimizer, result[1]).record.steps
        except ValueError as error:
            raise ValueError(f"a trial must train trial.optimizer, and not another mechanism: {error}") from error
        if steps > most:
            raise ValueError(f"a trial must plan and take at most the {most} steps that are paid for, got {steps}")
        if int(stream := release_state(result[1]).batch_key) not in (0, int(keys.mark_of_key(trial.optimizer.key))):
            raise ValueError(
                "a trial must train its own optimizer, and draw its batches with the key of that optimizer, as dpx.fit "
                f"does, because trials must be independent; its batches come from the key with mark {stream}"
            )
        return trial, result[0], result[1]

    def score_trial(self, params: Tree, number: int) -> float:
        """Returns a trial's score, or -inf for NaN."""
        score, score_on = self.arguments.score, self.arguments.score_on
        key = keys.stream(self.arguments.key, "score", number)
        if isinstance(score_on, NoisySum):
            return self._noisy_sum(require_floats("the values of score", score(params)), key, score_on.noise_multiplier)
        found = score(params, key) if isinstance(score_on, DpEvent) else score(params)
        if np.shape(found) != ():
            raise ValueError(f"score must return one number, got shape {np.shape(found)}")
        return -math.inf if math.isnan(value := float(found)) else value

    def _noisy_sum(self, values: np.ndarray, key: jax.Array, noise_multiplier: float) -> float:
        """Returns the noisy sum of the examples' values."""
        if values.ndim != 1:
            raise ValueError(f"score must return the values of the examples, of shape (n,), got {values.shape}")
        if values.size > (most := self.mechanisms[0].sampling.examples):
            raise ValueError(f"score must return at most one value for each of {most} examples, got {values.size}")
        exact = math.fsum(np.nan_to_num(values, nan=0.0).clip(0, 1).tolist())
        # The noise depends on the sum. If another machine rounds or trains differently, the trial's new sum gets
        # different noise; with the same noise, two scores would reveal by how much the sums differ.
        key = functools.reduce(keys.fold_in, np.frombuffer(np.float64(exact).tobytes(), np.uint32), key)
        high = np.asarray([exact], np.float32)
        # A Python float minus a float32 array would be float32, and so 0 (NEP 50).
        total = FloatPair(high, np.asarray(exact - high.astype(np.float64), np.float32))
        return float(keys.release(key, 0, total, noise_multiplier * (1 + ETA))[0])


def _copied_containers(value: Any) -> Any:
    """Returns a configuration with dicts and lists of its own: what a trial changes in it must not reach another one,
    because trials are independent and identically distributed."""
    if type(value) is dict:
        return {name: _copied_containers(part) for name, part in value.items()}
    return [_copied_containers(part) for part in value] if type(value) is list else value


def _trial_key(key: jax.Array, number: int) -> jax.Array:
    return keys.stream(key, "trial", number)


def _budget_steps(mechanism: Mechanism) -> int:
    """Returns the steps of the mechanism's budget, or 1 without a budget."""
    return mechanism.budget.steps if mechanism.budget else 1


def _uniform_below(end: int, key: jax.Array) -> int:
    """Draws a uniform int in [0, end)."""
    high, low = np.asarray(jax.random.bits(key, (2,), np.uint32)).tolist()
    return (high << 32 | low) * end >> 64


class SearchResult(NamedTuple):
    """The winner of a search, and what the search cost.

    configuration, params: the winner's; None if a Poisson number of trials was 0, which costs the same.
    score: float, the winner's score; minus infinity if it was NaN. steps: int, the steps that the winner took.
    epsilon: float, an upper bound for the search at `delta`, above that of one trial. cost: the search's cost, for
        `dpx.compose_runs` and `dpx.privacy_report`.
    report: the winner's privacy report, with the cost of the search; None without a winner.
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


@explain_misuse
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
    """Returns the best of a random number of trials, each with a random configuration, and the search's true cost.

    train: (Trial) -> what `dpx.fit` returns, or (params, optimizer state), trained by `trial.optimizer`.
    configurations: each trial draws one, uniformly and with replacement. The cost counts all of them, drawn or not.
    score: (params) -> float; larger is better, and NaN loses to every score. The first of equal scores wins.
    optimizer: (configuration, key) -> the mechanism with that key; equal arguments must give equal mechanisms.
    key: a secret scalar key for this search, used for nothing else.
    trials: float, at least 1, the expected number. The actual number is secret: do not publish it.
    score_on: "public" if `score` reads only its argument and public data. If it reads private data, every trial costs
        more: give `NoisySum(noise_multiplier)`, or the event of the noise that `score(params, key)` itself adds.
    distribution: the distribution of the number of trials, as for `dpx.accounting.best_of`.
    budget: for the whole search, with the steps or epochs of one trial. The optimizer is then called as
        optimizer(configuration, key, noise_multiplier=...), with the least noise multiplier that keeps the search
        within the budget; a larger noise multiplier must lower the cost of every step.
    steps: int, the most steps of a trial. delta: in (0, 1). None takes either from the mechanisms' budgets. unit: as
        for `dpx.privacy_report`. checkpoints: a folder with one for each trial, as SENSITIVE as the data. It keeps the
        scores too, so that none is computed again.
    ledger: a `dpx.PrivacyLedger`, which the search charges before its first trial, and only once if it continues in its
        folder; the trials charge nothing. Reserve a search before the first release of the data: one that is chosen
        later must be bounded by a Gaussian, which multiplies its epsilon. words: the ledger's name for it.
    Raises ValueError for other arguments, a mechanism with another key or without a cost, a trial that takes more
    steps, a state of another mechanism, a score that is not a number, checkpoints of another search, a trial whose
    parameters differ from the stored ones, and a budget that no noise meets.
    Source: Papernot and Steinke 2022, https://arxiv.org/abs/2110.03620; `accounting/selection.py`.
    """
    require_function("train", train, "trial")
    named = isinstance(configurations, dict | str)  # a list of its keys or letters would be searched
    arguments = CheckedSearchArguments(
        configurations=list(configurations) if np.iterable(configurations) and not named else [],
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
    plan = SearchPlan.from_arguments(arguments)
    cost, winner, best = plan.cost, None, -math.inf
    with _locked_search_folder(checkpoints, plan) as folder:
        if ledger is not None:
            processes.from_first_process(lambda: _pay_for_search(ledger, plan, unit or "example", words, folder))
        for number in range(draw_trial_count(keys.stream(key, "number of trials"), cost.trials, SHAPES[distribution])):
            trial, params, state = plan.run(train, number, folder)
            value = plan.score_trial(params, number) if folder is None else _score_once(plan, params, number, folder)
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
    """Charges the ledger. Raises ValueError if it has other neighbors or records, or does not allow the search."""
    cost, terms = plan.cost, ledger.terms
    if (cost.relation, cost.records) != (terms.relation, terms.records):
        wanted = f"relation {terms.relation!r} and {terms.records} records"
        raise ValueError(f"the search must be for the ledger's {wanted}, got {cost.relation!r} and {cost.records}")
    pairs = normal_sampler_error(cost.numbers).pairs
    holder = "" if folder is None else read_json(folder / "search.json")["mark"]
    key, numbers = plan.arguments.key, min(2 * pairs, LARGEST_RELEASE)
    ledger.spend(cost.event, key=key, words=words, numbers=numbers, unit=unit, holder=holder)


@contextlib.contextmanager
def _locked_search_folder(folder: str | Path | None, plan: SearchPlan) -> Iterator[Path | None]:
    """Locks and yields the folder of one search. Raises ValueError if it belongs to another search."""
    if folder is None:
        yield None
        return
    path = require_path("checkpoints", folder).absolute()
    own = {
        "key of the search (its mark)": int(keys.mark_of_key(plan.arguments.key)),
        "configurations": len(plan.arguments.configurations),
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


def _score_once(plan: SearchPlan, params: Tree, number: int, folder: Path) -> float:
    """Returns a trial's score, which is computed only once.

    So the folder fixes the parameters and score of each trial, and a repeated search depends only on these. Otherwise,
    another machine, which rounds sums differently under the same noise, could find another winner.
    """
    file, digest = folder / f"score-{number}.json", hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{leaf_path(path)} {jnp.result_type(leaf)}{jnp.shape(leaf)}".encode() + bytes_of(leaf))
    stored = processes.from_first_process(lambda: read_json(file) if file.is_file() else None)
    if stored is None:
        found = {"params (their digest)": digest.hexdigest(), "score": plan.score_trial(params, number)}
        stored = processes.from_every_process(found)[0]
        processes.from_first_process(lambda: replace_file(file, json.dumps(stored) + "\n"))
    if stored["params (their digest)"] != digest.hexdigest():
        raise ValueError(
            "train must return the same parameters whenever a trial is repeated, because its steps have the same "
            f"noise, but {file} was written for others. Train with dpx.fit(..., checkpoints=trial.folder), in a search "
            "with another key and another folder, and add the costs of both searches"
        )
    return stored["score"]
