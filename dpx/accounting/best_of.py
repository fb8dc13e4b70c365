"""The cost of a search: what the best of a random number of trials costs."""

from dataclasses import dataclass
from typing import Any, Literal

import dp_accounting
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpx.accounting.arithmetic import worst_sampler
from dpx.accounting.checks import Relation, require_relation
from dpx.accounting.compose import Composition, records_per_common_unit, require_one_unit
from dpx.accounting.cost import RunCost, cost_of_run
from dpx.accounting.ledger import from_event
from dpx.accounting.loss import as_hashable
from dpx.accounting.pld import renyi
from dpx.accounting.selection import SHAPES, OneOfDpEvent, trial_loss
from dpx.keys.noise import LARGEST_RELEASE
from dpx.states.reading import read_run
from dpx.values import described, names_arguments, require_number

Distribution = Literal["logarithmic", "geometric", "poisson"]


@dataclass(frozen=True)
class Selection(Composition):
    """The cost of the best of a random and secret number of trials, if nothing else of them is released.

    trial: the event of one trial without its score. trials: the expected number of them. distribution: of that number.
    configurations: int, how many different ones are paid for. score: how the score is paid for, in words.
    """

    trial: DpEvent
    trials: float
    distribution: Distribution
    configurations: int
    score: str

    def allows_trial(self, event: DpEvent) -> bool:
        """Whether a run of this event could be one of the trials: it costs at most as much, at every Renyi order."""
        bound, one = (trial_loss(from_event(each), self.relation).renyi(renyi.ORDERS) for each in (self.trial, event))
        return bool((one <= bound * (1 + 1e-9)).all())

    def __str__(self) -> str:
        return (
            f"Included: the run is the best of a random number of trials ({self.distribution}, {self.trials:g} "
            f"expected), each of one of {self.configurations} configurations, drawn at random and scored {self.score}. "
            "This holds while the number of trials and all other results are secret."
        )


@names_arguments
def best_of(
    *candidates: Any,
    trials: float,
    score_on: Any,
    distribution: Distribution = "logarithmic",
    relation: Relation | None = None,
    records: int | None = None,
) -> Selection:
    """The cost of a search that releases the best of a random number of trials, and nothing else.

        >>> dpx.accounting.best_of((mechanism, 200), trials=10, score_on="public").epsilon(delta=1e-5)
        8.231...

    candidates: each a (mechanism, steps or state), or an event, as `dpx.compose_runs` takes them; what a trial may
        run. A trial costs as much as the worst of them, even if it is never drawn.
    trials: float, at least 1, the expected number. The number itself must be drawn from the distribution and stay
        secret, as `dpx.tuning.search` does; the best of a fixed number of runs is paid for by `dpx.compose_runs`.
    score_on: "public" if the score sees a trial's release and public data only; else the event of the noise in the
        score, which every trial pays too.
    distribution: "logarithmic", "geometric" or "poisson"; in this order, many trials cost more, and their number varies
        less.
    relation: of events, "zero_out" by default; None for mechanisms, whose samplings state it.
    records: int, the most examples that one person owns, as for `dpx.compose_runs`; the score is paid for by
        as many.

    The cost is by Renyi divergences ("rdp"), because no tighter one is known to dp-accounting.

    Raises ValueError for no candidates, several relations, other arguments, and events of unknown Renyi divergences.
    Source: Papernot and Steinke 2022, https://arxiv.org/abs/2110.03620; `accounting/selection.py`.
    """
    trials = require_number("trials", trials, minimum=1)
    if distribution not in SHAPES:
        raise ValueError(f"distribution must be one of {tuple(SHAPES)}, got {described(distribution)}")
    records = records_per_common_unit(candidates, records)
    score = _score_event(score_on, records)
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
    trial_loss(from_event(scored), stated).renyi(renyi.ORDERS)  # refuses what has no bill
    return Selection(
        event=RepeatAndSelectDpEvent(scored, trials, SHAPES[distribution]),
        relation=stated,
        units=units,
        examples=examples,
        records=records,
        numbers=worst_sampler(run.normal_sampler for run in runs),
        trial=trial,
        trials=trials,
        distribution=distribution,
        configurations=len(candidates),
        score="from public data" if score is None else f"from private data, at the cost of {score} in every trial",
    )


def _cost_of_candidate(candidate: Any, relation: Relation | None, records: int) -> RunCost:
    if isinstance(candidate, DpEvent):
        event, stated = from_event(candidate).of_records(records), require_relation(relation or "zero_out")
        return RunCost(event, stated, records, LARGEST_RELEASE, read_run(0))
    if isinstance(candidate, tuple) and len(candidate) == 2:
        return cost_of_run(*candidate, relation, records=records)
    raise ValueError(f"a candidate must be a (mechanism, steps or state) or an event, got {described(candidate)}")


def _score_event(score_on: Any, records: int) -> DpEvent | None:
    """The event of a private score, None for a public one."""
    if isinstance(score_on, str) and score_on == "public":
        return None
    if not isinstance(score_on, DpEvent):
        words = f"a score on private data without noise has no known cost. Got {described(score_on)}"
        raise ValueError(f'score_on must be "public", or the event of the noise in the score: {words}')
    ledger = from_event(score_on)
    if not ledger.counts or not ledger.private:
        raise ValueError(f"a score on private data must have noise, got the event {score_on}")
    return ledger.of_records(records)
