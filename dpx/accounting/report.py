"""The privacy report to publish beside a private model: the bill, all its assumptions, and its limits."""

import contextlib
import importlib.metadata
import json
import math
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dp_accounting import DpEvent

from dpx.accounting import checks
from dpx.accounting.arithmetic import Answer
from dpx.accounting.attacks import AttackBounds, bounds_and_curve, owner_of
from dpx.accounting.best_of import Selection
from dpx.accounting.bill import (
    batches_of,
    billed_steps,
    event_of,
    made_steps,
    numbers_of,
    records_of,
    require_billable,
)
from dpx.accounting.budget import Budget
from dpx.accounting.checks import Relation
from dpx.accounting.events import billed, explanation
from dpx.accounting.pages import as_html, as_markdown, as_text
from dpx.accounting.statement import caveats, sections_of, summary, title_of, tuning_words
from dpx.states.record import unit_mark
from dpx.trees import described
from dpx.xla.totals import ETA

_PACKAGES = ("dpx-jax", "jax", "optax", "dp-accounting", "numpy", "scipy")  # whose versions a report states


@dataclass(frozen=True, kw_only=True, repr=False)
class PrivacyReport:
    """A privacy statement, with all its assumptions; `str` is a page of it, first in plain words for a data owner.

    mechanism: the printed pipeline. steps: how many are billed; made: how many of them were made; ending: what epsilon
        covers, in words, if a run did not end where it planned to.
    unit: what epsilon protects, in words: one record of the data set, or a person with up to `records` of them.
    relation: how neighboring data sets differ. sampling: the printed sampling record. delta: in (0, 1).
    epsilon: an upper bound by each accountant, so the smallest is the guarantee; None if an accountant does not apply.
    arithmetic: the parts of the least epsilon and of delta that are for the arithmetic of the noise, whose numbers are
        finitely many; and the share of the clip norm that is for the rounding of sums; floats, by "epsilon", "delta"
        and "eta". Where it leaves no epsilon at this delta, "least delta" is about the least that has one.
    budget: the `dpx.Budget` that the noise was calibrated to, the target; None without one, and for a search.
    attacks: what that means for an attacker. attack_curve: pairs of floats, the largest true positive rate of any
        attack at each of 41 false positive rates: (false, true). tuning: whether the choice of hyper-parameters is
        billed, in words.
    events: the releases, one sentence each. versions: by package. caveats: what lies outside of the guarantee.
    date: of the report, in UTC, such as "2026-01-31". name: of the run, in one line, or None.

    `dataclasses.replace(report, name="...")` names the run afterwards. Raises ValueError for a name of several lines.
    """

    mechanism: str
    steps: int
    made: int
    ending: str
    unit: str
    relation: str
    sampling: str
    delta: float
    epsilon: dict[str, float | None]
    arithmetic: dict[str, float]
    attacks: AttackBounds
    attack_curve: tuple[tuple[float, float], ...]
    tuning: str
    events: tuple[str, ...]
    versions: dict[str, str]
    caveats: tuple[str, ...]
    date: str
    records: int = 1
    budget: Budget | None = None
    name: str | None = None

    def __post_init__(self):
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip() and self.name.isprintable()):
            raise ValueError(f"name must be printable words in one line, got {described(self.name)}")

    @property
    def spent(self) -> float:
        """The epsilon that counts: the least of the bounds."""
        return min(value for value in self.epsilon.values() if value is not None)

    def __repr__(self) -> str:
        name = f"name={self.name!r}, " if self.name else ""
        numbers = f"epsilon={self.spent}, delta={self.delta}, steps={self.steps}"
        ending = f", ending={self.ending!r}" if self.ending else ""
        return f"PrivacyReport({name}unit={self.unit!r}, {numbers}{ending})"

    def to_json(self) -> str:
        """The report as valid JSON; an infinite epsilon is the string "inf"."""

        def finite(value: float | None) -> float | str | None:
            return "inf" if value is not None and math.isinf(value) else value

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["epsilon"] = {name: finite(value) for name, value in self.epsilon.items()}
        fields["arithmetic"] = {name: finite(value) for name, value in self.arithmetic.items()}
        fields["budget"] = self.budget and asdict(self.budget)
        fields["attacks"] = self.attacks._asdict() | {"mu": finite(self.attacks.mu)}
        return json.dumps(fields, indent=2, allow_nan=False)

    def __str__(self) -> str:
        return as_text(title_of(self), sections_of(self))

    def to_markdown(self) -> str:
        """The report as a Markdown page; a notebook shows it."""
        return as_markdown(title_of(self), sections_of(self))

    def to_html(self) -> str:
        """The report as a whole page of HTML with the attack curve, to hand to someone without tools."""
        return as_html(title_of(self), sections_of(self))

    _repr_markdown_ = to_markdown

    def save(self, path: str | Path) -> Path:
        """Writes the report as one page, and returns the path; its folder is created if missing.

        path: one that ends in ".html", with the attack curve as a picture, which needs no other library; in ".md", with
            the curve as a table; or in ".json". Raises ValueError for another ending.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".md": self.to_markdown, ".json": lambda: self.to_json() + "\n"}
        if path.suffix not in forms:
            raise ValueError(f"path must end in one of {list(forms)}, got {str(path)!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path

    def write(self, folder: str | Path, *, name: str = "privacy_report") -> tuple[Path, Path]:
        """Writes `name`.json and `name`.md into a folder, which is created if missing, and returns their paths."""
        return self.save(Path(folder) / f"{name}.json"), self.save(Path(folder) / f"{name}.md")


def privacy_report(
    mechanism: Any,
    steps_or_state: Any,
    *,
    delta: float,
    unit: str | None = None,
    records: int | None = None,
    numbers: int | None = None,
    tuning: Selection | Literal["public"] | None = None,
    name: str | None = None,
) -> PrivacyReport:
    """The report of a mechanism after some steps: epsilon by "pld" and by "rdp", and all assumptions.

    steps_or_state: a number of steps (int, at least 0), or an optimizer state, as for `dpx.epsilon`.
    delta: in (0, 1), best far below 1 divided by the number of examples. A larger one warns.
    unit: what the sampling draws and epsilon protects, in words: "user" if it draws users. None: as the state records
        it, which knows "example" and "user" (`dpx.UserData`); "example" for a number of steps.
    records: int, at least 1, how many of them one person owns at most; None is that of the mechanism's `dpx.Budget`,
        and 1 without one. Above 1, the report is about a person with up to so many, as `dpx.epsilon` bills.
    numbers: int, how many numbers a step releases at most, as for `dpx.epsilon`.
    tuning: how hyper-parameters were chosen. "public": without any run on the private data. A `Selection` (of
        `dpx.accounting.best_of` or `dpx.tuning.search`): this run is the winner, and the report states the cost of the
        search. None: the report says that the choice is not billed.
    name: of the run, such as "cancer model, May", in one line. None: the report has none.

    Raises ValueError as `dpx.epsilon` does, for another unit than the state records, where neither accountant can bill
    the event, for another tuning or name, and for a run that costs more than a trial of the search.

        >>> dpx.privacy_report(mechanism, 200, delta=1e-5, name="a trial")
        PrivacyReport(name='a trial', unit='one example', epsilon=4.765..., delta=1e-05, steps=200)
    """
    require_billable(mechanism)
    checks.warn_of_large_delta(delta, mechanism.sampling)
    steps, (made, planned) = billed_steps(steps_or_state), made_steps(steps_or_state)
    records = records_of(mechanism, records)
    event, relation = event_of(mechanism, steps_or_state, None, records=records)
    drawn = _unit_of(batches_of(steps_or_state)[1], unit)
    event, words = _with_tuning(event, relation, records, tuning, subject := owner_of(records, drawn))
    numbers = tuning.numbers if isinstance(tuning, Selection) else numbers_of(mechanism, steps_or_state, numbers)
    answers: dict[str, Answer] = {}
    refusals = []
    for accountant in ("pld", "rdp"):
        try:
            profile = billed(event, accountant=accountant, relation=relation, numbers=numbers)
            answers[accountant] = profile.answer(delta)
        except ValueError as error:
            refusals.append(error)
    if not answers:
        raise refusals[0]
    least, possible = min(answers.values()), {}
    if math.isinf(least.epsilon) and (of_run := billed(event, relation=relation, numbers=numbers).least_delta(delta)):
        possible = {"least delta": of_run}
    attacks, curve = bounds_and_curve(billed(event, relation=relation, curve=True, numbers=numbers), delta)
    return PrivacyReport(
        mechanism=str(mechanism),
        steps=steps,
        made=made,
        ending=_ending(made, steps, planned, subject),
        unit=f"one {subject}",
        relation=relation,
        sampling=str(mechanism.sampling),
        delta=delta,
        epsilon={name: answers[name].epsilon if name in answers else None for name in ("pld", "rdp")},
        arithmetic={"epsilon": least.of_epsilon, "delta": least.of_delta, "eta": ETA, **possible},
        attacks=attacks._replace(records=records),
        attack_curve=curve,
        tuning=words,
        events=summary(event),
        versions={"python": platform.python_version()}
        | {name.removesuffix("-jax"): version_of(name) for name in _PACKAGES},
        caveats=(
            *caveats(drawn, relation, records),
            *explanation(event, delta=delta, relation=relation),
        ),
        date=datetime.now(UTC).date().isoformat(),
        records=records,
        budget=None if isinstance(tuning, Selection) else getattr(mechanism, "budget", None),
        name=name,
    )


def _unit_of(recorded: int, unit: str | None) -> str:
    """The unit in words. recorded: its mark, or 0 if it is not known. Raises ValueError if they do not agree."""
    known = {0: "example"} | {unit_mark(name): name for name in ("example", "user")}
    if unit is not None:
        unit_mark(unit)  # raises ValueError unless it is a name
    subject = known.get(recorded, "") if unit is None else unit.removeprefix("one ")
    if not subject or recorded not in (0, unit_mark(subject)):
        raise ValueError(
            f"unit must be that of the batches, {known.get(recorded, 'the `unit` that dpx.UserData was given')!r}, got "
            f"{unit!r}: epsilon protects what the sampling draws. Draw from dpx.UserData(..., "
            f"unit={subject or 'user'!r}), or from data with the name in `privacy_unit`"
        )
    return subject


def _ending(made: int, steps: int, planned: bool, unit: str) -> str:
    """Which steps epsilon covers, in words, if the run ended before its plan or had no plan."""
    if made < steps:
        words = f"{made} of {steps} planned steps were made, and epsilon covers all {steps}, because what the run"
        return f"{words} showed of one {unit} may have decided where it ended"
    words = f"Epsilon covers the {made} steps that were made and no others, because it holds only if public information"
    return "" if planned else f"{words} alone decided where the run ended, and nothing that depends on one {unit}"


def _with_tuning(event: DpEvent, relation: Relation, records: int, tuning: Any, unit: str) -> tuple[DpEvent, str]:
    """The event that is billed, and how the choice of hyper-parameters is, in words."""
    if isinstance(tuning, Selection):
        if (tuning.relation, tuning.records) != (relation, records) or not tuning.covers(event):
            raise ValueError(f"the run must be one that the search billed, got {event}; {tuning}")
        return tuning.event, str(tuning)
    if not (tuning is None or isinstance(tuning, str)) or tuning not in (None, "public"):
        raise ValueError(f'tuning must be "public", a dpx.accounting.Selection or None, got {described(tuning)}')
    return event, tuning_words(unit, tuning)


def version_of(package: str) -> str:
    """The version of an installed package, in words."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "not installed as a package"
