"""Checks the arguments of `fit` before anything is computed or written, and charges a ledger for its run."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from dp_accounting import DpEvent

from dpx import keys
from dpx.accounting.arithmetic import RunProfile
from dpx.accounting.checks import Accountant, require_delta, warn_of_large_delta
from dpx.accounting.cost import cost_of_run, records_per_unit_of_run
from dpx.accounting.filters import NOTHING
from dpx.fitting import processes
from dpx.fitting.step import Carry
from dpx.ledgers import PrivacyLedger
from dpx.mechanism.base import ChainState, Mechanism
from dpx.mechanism.guards import FLAX, checked_params, require_no_nan
from dpx.reports.report import require_one_line_names
from dpx.sampling.data import CheckedData
from dpx.states.reading import read_run_facts
from dpx.values import Tree, described, require_bool, require_whole, rounded_up, warn_user


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long a run is, and what it may spend.

    key: draws the batches. steps: int, total number of steps. plan: int, the number of steps that count if the run ends
        early; 0 counts only those made. delta, accountant, records: used for every cost.
    """

    optimizer: Mechanism
    key: jax.Array = field(repr=False)
    steps: int
    plan: int
    delta: float
    accountant: Accountant
    records: int

    @classmethod
    def with_defaults(
        cls,
        optimizer: Mechanism,
        *,
        key: Any,
        steps: Any,
        epochs: Any,
        delta: Any,
        accountant: Any,
        records: Any,
        public_stop: Any,
    ) -> "RunPlan":
        """Fills in the defaults. Raises ValueError if steps or delta is missing, or for steps beyond a budget."""
        budget = optimizer.budget
        if epochs is not None:
            if steps is not None:
                given = f"{described(steps)} and {described(epochs)}"
                raise ValueError(f"steps and epochs must not both be given, got {given}")
            steps = optimizer.sampling.steps(epochs=epochs)
        if budget is not None:
            steps = budget.steps if steps is None else steps
            delta = budget.delta if delta is None else delta
            public_stop = budget.public_stop if public_stop is None else public_stop
        elif steps is None or delta is None:
            missing = "steps or epochs" if steps is None else "delta"
            raise ValueError(f"{missing} must be given, because the mechanism has no dpx.Budget")
        steps = require_whole("steps", steps)
        if budget is not None and steps > budget.steps:
            more = "for more, train on from the result's params with a new dpx.Budget and a new key"
            raise ValueError(f"steps must be at most the {budget.steps} of the mechanism's budget, got {steps}: {more}")
        planned = steps if budget is None else budget.steps
        run = cls(
            optimizer=optimizer,
            key=optimizer.key if key is None else keys.require_key(key),
            steps=steps,
            plan=0 if public_stop is not None and require_bool("public_stop", public_stop) else planned,
            delta=require_delta(delta),
            accountant=accountant or ("tightest" if budget is None else budget.accountant),
            records=records_per_unit_of_run(optimizer, records),
        )
        if budget is None or delta != budget.delta:  # the mechanism has warned about the budget's
            warn_of_large_delta(delta, optimizer.sampling)
        if math.isinf((profile := run.profile(steps)).epsilon(run.delta)):  # raises if the cost cannot be computed
            exact = profile.exact.epsilon(run.delta)
            small = f"with exact noise, it would be {exact:.4g}, but noise as small as this run's is not exact enough"
            why = small if math.isfinite(exact) else "a step adds no noise, or next to none"
            advice = "Raise the noise multiplier, or let a dpx.Budget choose it"
            warn_user(f"epsilon is inf at delta={run.delta:g}: {why}. Nothing of this run is private. {advice}")
        return run

    def profile(self, steps_or_state: Any) -> RunProfile:
        """Computes the privacy profile of the run's first steps, or of a state."""
        return cost_of_run(self.optimizer, steps_or_state, records=self.records).profile(self.accountant)

    def epsilon(self, steps_or_state: Any) -> float:
        """Computes `dpx.epsilon` without warning about a large delta, because a run has already warned."""
        return self.profile(steps_or_state).epsilon(self.delta)


def checked_run_inputs(params: Tree, data: Any, run: RunPlan) -> CheckedData:
    """Checks `params` and `data`, and returns the checked data. The ValueError says if they seem to be swapped."""
    number = run.optimizer.sampling.examples
    try:
        examples = CheckedData(data, number, run.key)
    except ValueError:
        rows = {getattr(leaf, "shape", ())[:1] for leaf in jax.tree.leaves(params)}
        if rows == {(number,)} and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(data)):
            raise ValueError(
                f"data must hold the {number} examples of the sampling, but params hold {number} rows: params come "
                "before data; are they swapped?"
            ) from None
        raise
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, data))):
        raise ValueError("params and data must be known: call fit outside of jit, because it compiles its own steps")
    checked_params(params, run.optimizer)
    if not jax.tree.leaves(params) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise ValueError(f"params must be a pytree of float arrays, got no array. {FLAX}")
    require_no_nan(params)
    return examples


def require_optax_transforms(state: Tree):
    """Raises ValueError if no optax transform follows the mechanism whose optimizer state is `state`."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ChainState))
    if not any(isinstance(node, ChainState) for node in nodes):
        raise ValueError(
            "optimizer must be a mechanism with optax transforms, such as dpx.chain(mechanism, optax.sgd(0.1)), got "
            "the mechanism alone: it returns a gradient, and fit would increase the loss along it"
        )


def require_report_facts(tuning: Any, name: str | None, dataset: str | None) -> Any:
    """Checks the facts of the report before the run, not when the report is written. Returns `tuning`.

    Refuses the cost of a search: it covers the run that the search made, not another run with the same settings.
    """
    require_one_line_names(name, dataset)
    if tuning is not None and not (isinstance(tuning, str) and tuning == "public"):
        raise ValueError(
            f'tuning must be "public" or None in fit, got {described(tuning)}: a search reports its winner, and a '
            "run that repeats it is one more release, which dpx.compose_runs adds to the cost of the search"
        )
    return tuning


_PAID = (
    "This run is entry {number} of the ledger {name}, which adds up all releases of the data: epsilon {epsilon} at "
    "delta {delta} for one {owner} when the run ended."
)
_RETURNED = (
    "The ledger gave back at most what the steps after step {steps} would have cost; the epsilon of this report is of "
    "the run alone, and contains them."
)


@dataclass
class Payment:
    """What a run charges to a ledger. ledger: the dataset's, or None. given: further arguments for `ledger.spend`.
    number: the index of the run's entry. planned: number of steps charged."""

    ledger: PrivacyLedger | None
    given: dict[str, Any]
    run: RunPlan
    number: int = -1
    planned: int = 0

    def __post_init__(self):
        if self.ledger is not None and not isinstance(self.ledger, PrivacyLedger):
            raise ValueError(f"ledger must be a dpx.PrivacyLedger, got {described(self.ledger)}")

    def _event_of_steps(self, steps: int) -> DpEvent:
        assert self.ledger is not None
        terms = self.ledger.terms
        return cost_of_run(self.run.optimizer, steps, terms.relation, records=terms.records).event

    def pay(self, carry: Carry, folder: Any):
        """Charges the ledger for all planned steps, once even if the run resumes in its folder. Runs in every process.

        Raises ValueError if the ledger refuses the run, or if none is given for more steps than a ledger has paid for.
        """
        self.planned = max(self.run.steps, read_run_facts(carry.state).steps)
        if self.ledger is not None:
            self.number = processes.from_first_process(lambda: self._charge_ledger(self.ledger, carry, folder))
            folder.record_paid_steps(self.planned)
        elif 0 < folder.known.paid < self.planned:
            raise ValueError(
                f"ledger must be given for a run of {self.planned} steps in {folder.path}, because a ledger has paid "
                f"for {folder.known.paid} of them, got None"
            )

    def _charge_ledger(self, ledger: Any, carry: Carry, folder: Any) -> int:
        run = self.run
        entry = ledger.spend(
            self._event_of_steps(self.planned),
            key=[run.optimizer.key, run.key],
            numbers=read_run_facts(carry.state).numbers,
            holder=folder.known.mark,
            **self.given,
        )
        if entry.steps is not None and folder.known.ended is None:
            raise ValueError(f"the run of {folder.path} has ended after step {entry.steps}: begin one with a new key")
        return entry.number

    def end(self, step: int, folder: Any):
        """Ends the run, and refunds what its remaining steps would have cost. Runs in every process."""
        if self.ledger is not None:
            made = folder.end(step)
            processes.from_first_process(lambda: self._charge_whole_epochs(self.ledger, made))

    def _charge_whole_epochs(self, ledger: Any, made: int):
        """Charges for whole epochs, or whole rounds of cyclic groups. One that has begun costs what its least noise
        costs, even if that is the noise of a step that was not made."""
        sampling = self.run.optimizer.sampling
        epoch = max(sampling.group_count, sampling.steps_per_exact_epoch)
        whole = min(math.ceil(made / epoch) * epoch, self.planned)
        ledger.end(ledger.entries[self.number], self._event_of_steps(whole), steps=made)

    def ledger_caveats(self) -> tuple[str, ...]:
        """The report's lines about the run's entry in the ledger, if a ledger was given. Runs in every process."""
        return () if self.ledger is None else tuple(processes.from_first_process(lambda: self._caveats(self.ledger)))

    def _caveats(self, ledger: Any) -> list[str]:
        entry, terms = ledger.entries[self.number], ledger.terms
        numbers = {"epsilon": rounded_up(ledger.epsilon, 4), "delta": rounded_up(terms.delta, 6)}
        paid = _PAID.format(number=entry.number, name=ledger.path.name, owner=terms.protected_unit, **numbers)
        return [paid, *([_RETURNED.format(steps=entry.steps)] if entry.credit != NOTHING else [])]
