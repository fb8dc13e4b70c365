"""What a run pays into the ledger of its data set before its first step, and what it gets back if it ends early."""

import math
from dataclasses import dataclass
from typing import Any

from dp_accounting import DpEvent

from dpx.accounting.cost import cost_of_run
from dpx.accounting.filters import NOTHING
from dpx.fitting import processes
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.ledgers import PrivacyLedger
from dpx.states.reading import read_run
from dpx.values import described, rounded_up

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
    """ledger: of the data set, or None. given: what it takes: words, unit and part. number: of the entry of the run.
    planned: the steps that it is for."""

    ledger: PrivacyLedger | None
    given: dict[str, Any]
    run: RunPlan
    number: int = -1
    planned: int = 0

    def __post_init__(self):
        if self.ledger is not None and not isinstance(self.ledger, PrivacyLedger):
            raise ValueError(f"ledger must be a dpx.PrivacyLedger, got {described(self.ledger)}")

    def _event(self, steps: int) -> DpEvent:
        assert self.ledger is not None
        terms = self.ledger.terms
        return cost_of_run(self.run.optimizer, steps, terms.relation, records=terms.records).event

    def pay(self, carry: Carry, folder: Any):
        """Pays for all steps that are planned; a run that continues in its folder has paid. In every process.

        Raises ValueError if the ledger does not allow the run, or if it is missing for steps beyond those that it has.
        """
        self.planned = max(self.run.steps, read_run(carry.state).steps)
        if self.ledger is not None:
            self.number = processes.from_first_process(lambda: self._pay(self.ledger, carry, folder))
            folder.note_paid(self.planned)
        elif 0 < folder.paid < self.planned:
            raise ValueError(
                f"ledger must be given for a run of {self.planned} steps in {folder.path}, because a ledger has paid "
                f"for {folder.paid} of them, got None"
            )

    def _pay(self, ledger: Any, carry: Carry, folder: Any) -> int:
        run = self.run
        entry = ledger.spend(
            self._event(self.planned),
            key=[run.optimizer.key, run.key],
            numbers=read_run(carry.state).numbers,
            holder=folder.mark,
            **self.given,
        )
        if entry.steps is not None and folder.ended is None:
            raise ValueError(f"the run of {folder.path} has ended after step {entry.steps}: begin one with a new key")
        return entry.number

    def end(self, step: int, folder: Any):
        """Ends the run, and gets back what its other steps would have cost. In every process."""
        if self.ledger is not None:
            made = folder.end(step)
            processes.from_first_process(lambda: self._end(self.ledger, made))

    def _end(self, ledger: Any, made: int):
        """An epoch, or a turn of cyclic groups, that has begun counts whole: it costs its least noise, which may be
        that of a step that was not made."""
        sampling = self.run.optimizer.sampling
        epoch = max(sampling.groups, sampling.epoch)
        whole = min(math.ceil(made / epoch) * epoch, self.planned)
        ledger.end(ledger.entries[self.number], self._event(whole), steps=made)

    def caveats(self) -> tuple[str, ...]:
        """Where the run stands in the ledger, for its report; nothing without one. In every process."""
        return () if self.ledger is None else tuple(processes.from_first_process(lambda: self._caveats(self.ledger)))

    def _caveats(self, ledger: Any) -> list[str]:
        entry, terms = ledger.entries[self.number], ledger.terms
        numbers = {"epsilon": rounded_up(ledger.epsilon, 4), "delta": rounded_up(terms.delta, 6), "owner": terms.owner}
        paid = _PAID.format(number=entry.number, name=ledger.path.name, **numbers)
        return [paid, *([_RETURNED.format(steps=entry.steps)] if entry.credit != NOTHING else [])]
