"""The joint cost of several runs on the same data; and the cost of a search, the best of a random number of trials."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import dp_accounting
import jax
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpx import keys
from dpx.accounting import checks
from dpx.accounting.arithmetic import NormalSamplerError, worst_sampler_error
from dpx.accounting.checks import Accountant, Profile, Relation, require_relation
from dpx.accounting.cost import RunCost, cost_of_run, event_for_unit, profile_of_run, records_per_unit_of_run
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import as_hashable
from dpx.accounting.pld import renyi
from dpx.accounting.profiles import MinOrMaxProfile
from dpx.accounting.selection import SEARCH_ORDERS, SHAPES, OneOfDpEvent, trial_loss
from dpx.keys.noise import LARGEST_RELEASE
from dpx.schedules import values_over
from dpx.states.reading import read_run_facts
from dpx.states.record import SEVERAL_KEYS, fingerprint, identity_of
from dpx.values import described, explain_misuse, require_bool, require_number, require_whole, warn_user

Distribution = Literal["logarithmic", "geometric", "poisson"]
MOST_RUNS = 4  # which can share their batches in 14 ways


@dataclass(frozen=True)
class Composition:
    """The joint cost of several runs: upper bounds, like `dpx.epsilon` and `dpx.accounting.delta`.

    event: the event of all runs. relation: how neighboring data sets differ, the same for all runs.
    together: int, how many noisy releases each release of the event stands for.
    keys: the scalar noise keys of the runs. batch_keys: int fingerprints of the batches' keys, where known.
    units: for each run, an int fingerprint of what its batches hold, 0 if unknown. examples: its `sampling.examples`.
    records: int, the most records that the protected person owns; 1 means the unit that the sampling draws.
    others: alternative events of the same runs; the cost is the largest over these and `event`.
    numbers: int, the most elements in one release of a run; or the error of its normals, a `NormalSamplerError`.
    """

    event: dp_accounting.DpEvent
    relation: Relation
    together: int = field(default=1, kw_only=True)
    keys: tuple[jax.Array, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    batch_keys: tuple[int, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    units: tuple[int, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    examples: tuple[int, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    records: int = field(default=1, kw_only=True)
    others: tuple[dp_accounting.DpEvent, ...] = field(default=(), kw_only=True, repr=False)
    numbers: int | NormalSamplerError = field(default=LARGEST_RELEASE, kw_only=True, repr=False)

    def epsilon(self, *, delta: float, accountant: Accountant = "tightest") -> float:
        """Returns an upper bound on epsilon at `delta`, which is in (0, 1); see `dpx.epsilon`."""
        return self.profile(accountant).epsilon(checks.require_delta(delta))

    def delta(self, *, epsilon: float, accountant: Accountant = "tightest") -> float:
        """Returns an upper bound on delta at `epsilon`, which is at least 0; see `dpx.accounting.delta`."""
        return self.profile(accountant).delta(checks.require_epsilon(epsilon))

    def profile(self, accountant: Accountant = "tightest", *, curve: bool = False) -> Profile:
        """The profile that answers `epsilon` and `delta`. curve: as for `event_profile`."""
        of: Any = {"accountant": accountant, "relation": self.relation, "curve": curve}
        of |= {"runs": self.together, "numbers": self.numbers}
        found = tuple(profile_of_run(event, **of) for event in (self.event, *self.others))
        return MinOrMaxProfile(max, found) if self.others else found[0]


@explain_misuse
def compose_runs(*runs: Any, shared_batches: bool | None = None, records: int | None = None) -> Composition:
    """Computes the joint cost of `runs`, each a (mechanism, optimizer state) or a (mechanism, number of steps).

    If every run drew its own batches, a run may also be a `Composition`, from an earlier call or from
    `dpx.accounting.best_of`.

        >>> again = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key())
        >>> dpx.compose_runs((mechanism, 200), (again, 200), shared_batches=False).epsilon(delta=1e-5)
        6.700...

    shared_batches: False if every run drew its own batches, with its own key. Then all their events compose.
        True if step t of every run used the same batch. Sampling amplifies the releases of one batch as if they were
        one: a step costs one Gaussian of noise multiplier (sum_i sigma_i^-2)^(-1/2) on the sampled batch. At small
        deltas that is more than the cost of independent batches (two runs at Poisson rate 0.01, noise multipliers 1,
        1,000 steps, delta 1e-5: epsilon 4.48 instead of 2.58). None reads it from the states. If they do not show it,
        the cost is the largest over all ways in which up to four runs can share their batches.
    records: int, the most examples that one person owns, as for `dpx.epsilon`. None takes it from the runs' budgets,
        which must then agree.

    Pass states rather than numbers of steps, because a state records the key of its batches, and what they hold.

    Raises ValueError for no runs; for two runs with one key, because they share their noise; for states whose batch
    keys contradict `shared_batches`, or that used several batch keys; for states of different units, such as examples
    and users (`dpx.UserData`), because a run that protects single examples costs more for a user with many; for
    different neighboring relations; if the runs' records disagree; and, if batches are shared or unknown, for different
    samplings and for mechanisms that do not count as one Gaussian release per step. Warns if a unit is unknown and the
    samplings differ in size.
    """
    if shared_batches is not None:
        require_bool("shared_batches", shared_batches)
    if not runs:
        raise ValueError("compose_runs needs at least one (mechanism, steps or state), got none")
    records = records_per_common_unit(runs, records)
    composed = [_composition_of_run(run, 1 if shared_batches else records) for run in runs]
    if any(run.others for run in composed):
        raise ValueError("a Composition inside another must have known batches: pass its shared_batches, True or False")
    noise_keys = [key for run in composed for key in run.keys]
    for first, second in itertools.combinations(noise_keys, 2):
        if is_same_key(first, second):
            raise ValueError(
                "every run must have a key of its own: two of these mechanisms share one, so their noise is the same "
                "and subtracting one release from the other removes it"
            )
    batch_keys = [key for run in composed for key in run.batch_keys]
    if shared_batches is None and (
        len(runs) == 1 or all(len(run.batch_keys) == len(run.keys) == 1 for run in composed)
    ):
        shared_batches = len(runs) > 1 and len(set(batch_keys)) == 1
        composed = [_composition_of_run(run, 1 if shared_batches else records) for run in runs]
    _require_consistent_batch_keys(batch_keys, several_runs=len(runs) > 1, shared_batches=shared_batches)
    units, examples = (tuple(n for run in composed for n in getattr(run, name)) for name in ("units", "examples"))
    require_one_unit(units, examples)
    relations = {run.relation for run in composed}
    if len(relations) > 1:
        raise ValueError(f"runs must have the same neighboring relation, got {sorted(relations)}")
    others = []
    if shared_batches:
        event = _event_on_shared_batches(runs, [run.event for run in composed], records)
    else:
        event = dp_accounting.ComposedDpEvent([run.event for run in composed])
    if shared_batches is None:
        alone = [_composition_of_run(run, 1).event for run in runs]

        def of_group(group: list[int]) -> dp_accounting.DpEvent:
            return _event_on_shared_batches([runs[n] for n in group], [alone[n] for n in group], records)

        others = events_of_shared_batches([run.event for run in composed], of_group)
    return Composition(
        event,
        composed[0].relation,
        together=len(runs) if shared_batches or others else max(run.together for run in composed),
        others=tuple(others),
        keys=tuple(noise_keys),
        batch_keys=tuple(set(batch_keys)),
        units=units,
        examples=examples,
        records=records,
        numbers=worst_sampler_error(run.numbers for run in composed),
    )


def records_per_common_unit(runs: Iterable[Any], records: int | None) -> int:
    """The number of records that the protected unit owns: `records`, or what the runs' budgets state.

    Raises ValueError if the runs and Compositions disagree.
    """
    found = {run.records for run in runs if isinstance(run, Composition)}
    found |= {
        records_per_unit_of_run(run[0], records) for run in runs if isinstance(run, tuple | list) and len(run) == 2
    }
    if records is not None:
        found.add(require_whole("records", records))
    if len(found) > 1:
        raise ValueError(
            f"every run must be for the same number of records, got {sorted(found)}, because the cost for fewer does "
            "not hold for more: give `records`, and compose runs rather than Compositions"
        )
    return found.pop() if found else 1


def _composition_of_run(run: Any, records: int) -> Composition:
    if isinstance(run, Composition):
        return run
    pairs = isinstance(run, list) and any(type(one) is tuple for one in run)
    if not isinstance(run, tuple | list) or len(run) != 2 or hasattr(run, "event") or pairs:
        advice = ": give the runs of a list one after another, as *runs" * pairs
        raise ValueError(
            f"a run must be a pair (mechanism, steps or state) or a Composition, got {described(run)}{advice}"
        )
    mechanism, spent = run
    cost = cost_of_run(mechanism, spent, records=records)
    return Composition(
        cost.event,
        cost.relation,
        keys=(mechanism.key,),
        batch_keys=(cost.record.batch_key,) if cost.record.batch_key else (),
        units=(cost.record.unit,),
        examples=(mechanism.sampling.examples,),
        numbers=cost.normal_sampler_error,
    )


def _require_consistent_batch_keys(batch_keys: list[int], *, several_runs: bool, shared_batches: bool | None) -> None:
    """Raises ValueError if the fingerprints of the batch keys contradict `shared_batches`."""
    if SEVERAL_KEYS in batch_keys and several_runs:
        raise ValueError(
            "one of these runs drew its batches with several keys, so its state does not show whether it saw the "
            "batches of another run: pass numbers of steps, and shared_batches=False only if no two runs drew with one "
            "key"
        )
    if shared_batches is False and len(set(batch_keys)) < len(batch_keys):
        raise ValueError("two runs drew with one key, so their batches are the same: pass shared_batches=True")
    if shared_batches and len(set(batch_keys)) > 1:
        raise ValueError("the runs drew with several keys, so their batches differ: pass shared_batches=False")


def require_one_unit(units: tuple[int, ...], examples: tuple[int, ...]) -> None:
    """Raises ValueError if known units differ; warns if a unit is unknown and the numbers of examples differ."""
    if len(set(units) - {0}) > 1:
        raise ValueError(
            "every run must protect the same unit, but the batches of these runs hold units of different kinds, such "
            "as examples and users: a run on examples costs more for a user with many examples than for one example. "
            "Compute the cost of each run by itself"
        )
    if 0 in units and len(set(examples)) > 1:
        warn_user(
            f"these runs sample from {sorted(set(examples))} units. If these are of different kinds, such as examples "
            "and users, the sum of their costs holds for neither. Pass states, which show the unit"
        )


def _event_on_shared_batches(runs, events, records: int) -> dp_accounting.DpEvent:
    """The event of several runs that use the same batch at every step.

    Proof: given the batch, the releases of a step are Gaussians, and each may depend on the earlier ones. One Gaussian
    with the sum of their precisions sigma^-2 dominates them together, because Gaussian differential privacy composes
    like this (Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383). This Gaussian also dominates their mixture
    over whether the example is in the batch.

    For a unit of several records: given which records are in the batch, all releases together cost at most this one
    Gaussian, moved by their number. The proof in `groups` asks no more of a release.
    """
    if any(isinstance(run, Composition) for run in runs):
        raise ValueError("a Composition did not share its batches with another run: pass shared_batches=False")
    sampling = runs[0][0].sampling
    steps_of_runs = [read_run_facts(spent).steps for _, spent in runs]
    precision = np.zeros(max(steps_of_runs))
    for (mechanism, _), steps, event in zip(runs, steps_of_runs, events, strict=True):
        if identity_of(mechanism.sampling) != identity_of(sampling):
            raise ValueError(f"runs with shared batches must share a sampling, got {sampling}, {mechanism.sampling}")
        multipliers = values_over(mechanism.noise_multiplier, steps)
        if event != sampling.event(multipliers):
            raise ValueError(f"runs with shared batches must release one Gaussian a step, got {mechanism}")
        with np.errstate(divide="ignore"):
            precision[:steps] += multipliers**-2.0
    with np.errstate(divide="ignore"):
        event = sampling.event(precision**-0.5)
    return event_for_unit(event, sampling, sampling.relation, records)


def is_same_key(first: jax.Array, second: jax.Array) -> bool:
    """Whether two scalar PRNG keys are equal."""
    one, other = (np.asarray(keys.key_words(keys.require_key(key))) for key in (first, second))
    return np.array_equal(one, other)


def events_of_shared_batches(
    apart: Sequence[dp_accounting.DpEvent], of_group: Callable[[list[int]], dp_accounting.DpEvent]
) -> list[dp_accounting.DpEvent]:
    """One event for each way in which at least two runs may share batches, because none of these bounds the others.

    apart: the event of each run with its own batches. of_group: indices of runs -> their event on shared batches.
    Raises ValueError for too many runs, or if their cost on shared batches is unknown.
    """
    if len(apart) > MOST_RUNS:
        words = f"for more than {MOST_RUNS} runs whose states do not show the keys of their batches"
        raise ValueError(f"shared_batches must be True or False {words}, got None")
    found: list[dp_accounting.DpEvent] = []
    for groups in _partitions(range(len(apart))):
        try:
            parts = [apart[group[0]] if len(group) == 1 else of_group(group) for group in groups]
        except ValueError as error:
            words = "shared_batches must be False if every run drew its batches with a key of its own, as dpx.fit does"
            raise ValueError(f"{words}; otherwise these runs have no known cost: {error}") from error
        event = dp_accounting.ComposedDpEvent(sorted(parts, key=fingerprint))
        if len(groups) < len(apart) and event not in found:
            found.append(event)
    return found


def _partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yields every partition of the items into groups."""
    if not items:
        yield []
        return
    for groups in _partitions(items[1:]):
        yield [[items[0]], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [items[0], *group], *groups[place + 1 :]]


@dataclass(frozen=True)
class Selection(Composition):
    """The cost of the best of a random and secret number of trials, if nothing else about them is released.

    trial: the event of one trial without its score. trials: float, the expected number. distribution: its name.
    configurations: int, how many the cost covers. score: its cost, in words. Other fields: as for `Composition`.
    """

    trial: DpEvent
    trials: float
    distribution: Distribution
    configurations: int
    score: str

    def allows_trial(self, event: DpEvent) -> bool:
        """Whether a run of this event could be a trial: it costs at most as much, at all orders of a search."""
        bound, one = (trial_loss(from_event(each), self.relation).renyi(SEARCH_ORDERS) for each in (self.trial, event))
        return bool((one <= bound * (1 + 1e-9)).all())

    def __str__(self) -> str:
        return (
            f"Included: the run is the best of a random number of trials ({self.distribution}, {self.trials:g} "
            f"expected), each of one of {self.configurations} configurations, drawn at random and scored {self.score}, "
            "so epsilon is larger than that of one trial. This holds while the number of trials and all other results "
            "are secret."
        )


@explain_misuse
def best_of(
    *candidates: Any,
    trials: float,
    score_on: Any,
    distribution: Distribution = "logarithmic",
    relation: Relation | None = None,
    records: int | None = None,
) -> Selection:
    """Computes the cost of a search that releases the best of a random number of trials, and nothing else.

        >>> dpx.accounting.best_of((mechanism, 200), trials=10, score_on="public").epsilon(delta=1e-5)
        8.231...

    candidates: what a trial may run, each a (mechanism, steps or state) or an event. A trial costs as much as the worst
        of them, even if that one is never drawn.
    trials: float, at least 1, the expected number. The number itself must be drawn from the distribution and stay
        secret, as in `dpx.tuning.search`; for the best of a fixed number of runs, use `dpx.compose_runs`.
    score_on: "public" if the score sees only a trial's release and public data; otherwise the event of the noise in the
        score, which adds to the cost of every trial.
    distribution: "logarithmic", "geometric" or "poisson"; the later ones cost more for many trials, but the number
        varies less.
    relation: for events, "zero_out" by default; None for mechanisms, whose samplings state it.
    records: int, the most examples that one person owns, as for `dpx.compose_runs`; also applies to the score.

    The cost uses Renyi divergences ("rdp"), because dp-accounting knows no tighter one.

    Raises ValueError for no candidates, several relations, arguments out of range, and unknown Renyi divergences.
    Source: Papernot and Steinke 2022, https://arxiv.org/abs/2110.03620; `accounting/selection.py`.
    """
    trials = require_number("trials", trials, minimum=1)
    if distribution not in tuple(SHAPES):  # which takes a list, too
        raise ValueError(f"distribution must be one of {tuple(SHAPES)}, got {described(distribution)}")
    records = records_per_common_unit(candidates, records)
    score = _event_of_score(score_on, records)
    if not candidates:
        raise ValueError("best_of needs at least one (mechanism, steps or state) or event, got none")
    runs = [_cost_of_candidate(candidate, relation, records) for candidate in candidates]
    units = tuple(run.record.unit for run in runs)
    examples = tuple(candidate[0].sampling.examples for candidate in candidates if isinstance(candidate, tuple))
    require_one_unit(units, examples)
    stated = runs[0].relation
    if len(relations := {run.relation for run in runs}) > 1:
        raise ValueError(f"candidates must have the same neighboring relation, got {sorted(relations)}")
    events = tuple(as_hashable(run.event) for run in runs)
    trial = events[0] if all(event == events[0] for event in events) else OneOfDpEvent(events)
    scored = trial if score is None else dp_accounting.ComposedDpEvent((trial, score))  # pyrefly: ignore
    trial_loss(from_event(scored), stated).renyi(renyi.ORDERS)  # raises if the cost is unknown
    return Selection(
        event=RepeatAndSelectDpEvent(scored, trials, SHAPES[distribution]),
        relation=stated,
        units=units,
        examples=examples,
        records=records,
        numbers=worst_sampler_error(run.normal_sampler_error for run in runs),
        trial=trial,
        trials=trials,
        distribution=distribution,
        configurations=len(candidates),
        score="from public data" if score is None else f"from private data, at the cost of {score} in every trial",
    )


def _cost_of_candidate(candidate: Any, relation: Relation | None, records: int) -> RunCost:
    if isinstance(candidate, DpEvent):
        event, stated = from_event(candidate).of_records(records), require_relation(relation or "zero_out")
        return RunCost(event, stated, records, LARGEST_RELEASE, read_run_facts(0))
    if isinstance(candidate, tuple) and len(candidate) == 2:
        return cost_of_run(*candidate, relation, records=records)
    raise ValueError(f"a candidate must be a (mechanism, steps or state) or an event, got {described(candidate)}")


def _event_of_score(score_on: Any, records: int) -> DpEvent | None:
    """The event of a private score, None for a public one."""
    if isinstance(score_on, str) and score_on == "public":
        return None
    if not isinstance(score_on, DpEvent):
        words = f"a score on private data without noise has no known cost. Got {described(score_on)}"
        noise = "or the event of the noise in the score, in a search also dpx.tuning.NoisySum(noise_multiplier=...)"
        raise ValueError(f'score_on must be "public", {noise}: {words}')
    event = from_event(score_on)
    if not event.counts or not event.all_noisy:
        raise ValueError(f"a score on private data must have noise, got the event {score_on}")
    return event.of_records(records)
