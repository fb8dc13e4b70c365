"""The lines of the privacy contract, and what was found about each."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Outcome = Literal["pass", "fail", "not checked"]


class BrokenLine(AssertionError):
    """A line of the contract does not hold; the words say where."""


class NotChecked(Exception):
    """A line of the contract cannot be checked; the words say why."""


class Line(NamedTuple):
    """One line of the contract. outcome: "pass", "fail" or "not checked". words: what was found, or why nothing was."""

    name: str
    outcome: Outcome
    words: str


class ContractReport(NamedTuple):
    """The result of `check_contract`; `str` is a table with a row for each line.

    lines: of the contract, in the order in which they were checked. false_alarm_rate: an upper bound on the probability
        that a sound mechanism fails, over the choice of the seed.
    """

    lines: tuple[Line, ...]
    false_alarm_rate: float

    @property
    def passed(self) -> bool:
        """Whether no line fails. Lines that were not checked do not count: see `unchecked`."""
        return not self.failures

    @property
    def failures(self) -> tuple[Line, ...]:
        """The lines that fail."""
        return tuple(line for line in self.lines if line.outcome == "fail")

    @property
    def unchecked(self) -> tuple[Line, ...]:
        """The lines that could not be checked, or only in part."""
        return tuple(line for line in self.lines if line.outcome == "not checked")

    def line(self, name: str) -> Line:
        """The line of this name. Raises ValueError if it was not asked for."""
        for line in self.lines:
            if line.name == name:
                return line
        raise ValueError(f"name must be one of {[line.name for line in self.lines]}, got {name!r}")

    def require(self) -> "ContractReport":
        """This report, for tests of your own mechanism. Raises AssertionError, with the table, if a line fails."""
        if not self.passed:
            raise AssertionError(f"the mechanism breaks the privacy contract:\n{self}")
        return self

    def __repr__(self) -> str:
        found = [line.outcome for line in self.lines]
        return f"ContractReport({', '.join(f'{words}: {found.count(words)}' for words in get_args(Outcome))})"

    def __str__(self) -> str:
        width = max((len(line.name) for line in self.lines), default=0)
        rows = [f"{line.outcome:11}  {line.name:{width}}  {line.words}" for line in self.lines]
        rows.append(f"A sound mechanism fails with a probability of at most {self.false_alarm_rate:g}.")
        return "\n".join(rows)


def numbers_as_text(values: Sequence[float]) -> str:
    """The numbers in words; equal ones once, if all are equal."""
    words = [f"{value:.4g}" for value in values]
    return words[0] if len(set(words)) == 1 else ", ".join(words)
