"""The privacy report to publish beside a private model: its cost, every assumption behind it, and its limits."""

import contextlib
import importlib.metadata
import json
import math
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from dpx.accounting import checks
from dpx.accounting.arithmetic import EpsilonWithRounding
from dpx.accounting.budget import Budget
from dpx.accounting.compose import Selection
from dpx.accounting.cost import RunCost, cost_of_run, require_event_and_sampling
from dpx.accounting.flat_event import from_event
from dpx.reports.attacks import AttackBounds, attack_bounds_and_curve
from dpx.reports.rendering import Section, attack_svg, page_as_html, page_as_markdown, page_as_text
from dpx.states.record import unit_fingerprint
from dpx.sums.rounding import ETA
from dpx.values import (
    described,
    explain_misuse,
    for_whom,
    number_for_json,
    require_text,
    rounded_up,
    unit_in_words,
)

_PACKAGES = ("dpx-jax", "jax", "optax", "dp-accounting", "numpy", "scipy")  # a report lists their versions


def _require_no_path(given: tuple) -> None:
    if given:
        raise ValueError(f"path must be given to report.save, because this returns the text, got {described(given[0])}")


@dataclass(frozen=True, kw_only=True, repr=False)
class PrivacyReport:
    """A privacy statement with all its assumptions; `str` is a page that begins with plain words for a data owner.

    mechanism: the printed pipeline. steps: how many steps epsilon covers; made: how many were taken; ending: which
        steps epsilon covers, in words, if a run did not end as planned.
    unit: what epsilon protects, in words: one record of the data set, or a person with up to `records` of them.
    relation: how neighboring data sets differ. sampling: the sampling, as printed. delta: in (0, 1).
    epsilon: an upper bound from each accountant, None if one does not apply. The smallest is the guarantee.
    arithmetic: dict of floats. "epsilon" and "delta": what is added because the noise has finitely many values. "eta":
        how much rounding adds to an example's effect on a sum, as a share of the clip norm. If no epsilon holds at
        this delta, "least delta" is about the smallest at which one does.
    budget: the target, the `dpx.Budget` to which the noise or the search was calibrated; None without one.
    attacks: what epsilon means for an attacker. attack_curve: pairs (false positive rate, largest true positive rate of
        any attack) of floats, at 41 rates. tuning: whether epsilon covers the choice of hyperparameters, in words.
    events: the releases, one sentence each. versions: by package name. conditions: what the guarantee requires and the
        run could not check. caveats: what the guarantee does not cover.
    date: the day of the report in UTC, such as "2026-01-31". name: the run's name, in one line, or None.
    dataset: the name of the data, in one line, or None. rows: int, how many units the sampling draws from.

    `dataclasses.replace(report, name="...")` names the run afterwards. Raises ValueError for names of several lines.
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
    conditions: tuple[str, ...]
    caveats: tuple[str, ...]
    date: str
    records: int = 1
    budget: Budget | None = None
    name: str | None = None
    dataset: str | None = None
    rows: int | None = None

    def __post_init__(self):
        require_one_line_names(self.name, self.dataset)

    def __getattr__(self, name: str) -> NoReturn:
        writes = 'report.save("report.html") writes it, and report.to_html() returns the page'
        raise AttributeError(f"a PrivacyReport has no {name!r}: {writes}")

    @property
    def spent(self) -> float:
        """The epsilon that counts: the smallest bound."""
        return min(value for value in self.epsilon.values() if value is not None)

    @property
    def title(self) -> str:
        return f"Privacy report of {self.name}" if self.name else "Privacy report"

    def __repr__(self) -> str:
        name = f"name={self.name!r}, " if self.name else ""
        numbers = f"epsilon={self.spent}, delta={self.delta}, steps={self.steps}"
        ending = f", ending={self.ending!r}" if self.ending else ""
        return f"PrivacyReport({name}unit={self.unit!r}, {numbers}{ending})"

    def __str__(self) -> str:
        return page_as_text(self.title, report_sections(self))

    def to_json(self, *path: Any) -> str:
        """Returns the report as valid JSON; an infinite epsilon is the string "inf"."""
        _require_no_path(path)

        def with_infinity(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: with_infinity(inner) for name, inner in value.items()}
            return "inf" if value == math.inf else value

        fields = asdict(self) | {"attacks": self.attacks._asdict()}
        return json.dumps(with_infinity(fields), indent=2, allow_nan=False, default=number_for_json)

    def to_markdown(self, *path: Any) -> str:
        """Returns the report as a Markdown page, which notebooks display."""
        _require_no_path(path)
        return page_as_markdown(self.title, report_sections(self))

    def to_html(self, *path: Any) -> str:
        """Returns the report as a complete HTML page with the attack curve, which anyone can open in a browser."""
        _require_no_path(path)
        return page_as_html(self.title, report_sections(self))

    _repr_markdown_ = to_markdown

    def save(self, path: str | Path) -> Path:
        """Writes the report as one page, creates its folder if needed, and returns the path.

        path: ends in ".html" (draws the attack curve, without any other library), ".md" (has the curve as a table) or
            ".json". Raises ValueError for another ending.
        """
        path = Path(path).expanduser()
        forms = {".html": self.to_html, ".md": self.to_markdown, ".json": lambda: self.to_json() + "\n"}
        if path.suffix not in forms:
            raise ValueError(f"path must end in one of {list(forms)}, got {str(path)!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path

    def write(self, folder: str | Path, *, name: str = "privacy_report") -> tuple[Path, Path]:
        """Writes `name`.json and `name`.md into a folder, which it creates if needed, and returns both paths."""
        if Path(folder).suffix in (".html", ".json", ".md"):
            raise ValueError(f"folder must not be a file, which report.save(path) writes; got {str(folder)!r}")
        return self.save(Path(folder) / f"{name}.json"), self.save(Path(folder) / f"{name}.md")


@explain_misuse
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
    dataset: str | None = None,
) -> PrivacyReport:
    """Reports on a mechanism after some steps: epsilon by "pld" and by "rdp", and every assumption behind them.

    steps_or_state: a number of steps (int, at least 0), or an optimizer state, as for `dpx.epsilon`.
    delta: in (0, 1), ideally far below 1 divided by the number of examples. Warns if it is larger than that.
    unit: what the sampling draws and epsilon protects, in words: "user" if it draws users. None reads it from the
        state, which knows "example" and "user" (`dpx.UserData`); for a number of steps, it is "example".
    records: int, at least 1, the most units that one person owns. None takes it from the mechanism's `dpx.Budget`, or
        is 1 without one. Above 1, epsilon protects all units of a person, as for `dpx.epsilon`.
    numbers: int, the most numbers that a step releases, as for `dpx.epsilon`.
    tuning: how hyperparameters were chosen. "public": without any run on the private data. A `Selection` (from
        `dpx.accounting.best_of` or `dpx.tuning.search`): this run is the winner, and the report shows the cost of the
        search. None: the report says that the cost of the choice is not included.
    name: one line, such as "cancer model, May", or None for no name. dataset: the name of the data, in one line, such
        as "patients of 2024".

    Raises ValueError as `dpx.epsilon` does, if the unit differs from the state's, if neither accountant knows the cost
    of the event, for any other `tuning` or name, and if the run costs more than a trial of the search.

        >>> dpx.privacy_report(mechanism, 200, delta=1e-5, name="a trial")
        PrivacyReport(name='a trial', unit='one example', epsilon=4.765..., delta=1e-05, steps=200)
    """
    require_event_and_sampling(mechanism)
    delta = checks.require_delta(delta)
    checks.warn_of_large_delta(delta, mechanism.sampling)
    cost = cost_of_run(mechanism, steps_or_state, records=records, numbers=numbers)
    drawn = _checked_unit(cost.record.unit, unit)
    cost, words = _cost_with_tuning(cost, tuning, subject := unit_in_words(cost.records, drawn))
    event, relation, records, _, (steps, made, planned, *_) = cost
    answers: dict[str, EpsilonWithRounding] = {}
    refusals = []
    for accountant in ("pld", "rdp"):
        try:
            answers[accountant] = cost.profile(accountant).epsilon_with_rounding(delta)
        except ValueError as error:
            refusals.append(error)
    if not answers:
        raise refusals[0]
    least, possible = min(answers.values()), {}
    if math.isinf(least.epsilon) and (of_run := cost.profile().least_reachable_delta(delta)):
        possible = {"least delta": of_run}
    attacks, curve = attack_bounds_and_curve(cost.profile(curve=True), delta)
    return PrivacyReport(
        mechanism=str(mechanism),
        steps=steps,
        made=made,
        ending=_covered_steps_in_words(made, steps, planned or isinstance(tuning, Selection), subject),
        unit=f"one {subject}",
        relation=relation,
        sampling=str(mechanism.sampling),
        delta=delta,
        epsilon={name: answers[name].epsilon if name in answers else None for name in ("pld", "rdp")},
        arithmetic={"epsilon": least.of_epsilon, "delta": least.of_delta, "eta": ETA, **possible},
        attacks=attacks._replace(records=records),
        attack_curve=curve,
        tuning=words,
        events=from_event(event).words(),
        versions={"python": platform.python_version()} | {p.removesuffix("-jax"): version_of(p) for p in _PACKAGES},
        conditions=conditions(drawn, records),
        caveats=(
            *caveats(drawn, relation, records, on_a_tpu=cost.normal_sampler_error.slope > 0),
            *((run.explain(delta, relation),) if (run := from_event(event).whole_run_release) else ()),
        ),
        date=datetime.now(UTC).date().isoformat(),
        records=records,
        budget=None if isinstance(tuning, Selection) else getattr(mechanism, "budget", None),
        name=name,
        dataset=dataset,
        rows=getattr(mechanism.sampling, "examples", None),
    )


def require_one_line_names(name: str | None, dataset: str | None):
    """Raises ValueError unless each name is None or a single line of text."""
    for argument, words in (("name", name), ("dataset", dataset)):
        require_text(argument, "none" if words is None else words)


def _checked_unit(recorded: int, unit: str | None) -> str:
    """Returns the unit in words. recorded: its fingerprint; 0 if unknown. Raises ValueError if they differ."""
    known = {0: "example"} | {unit_fingerprint(name): name for name in ("example", "user")}
    if unit is not None:
        unit_fingerprint(unit)  # raises ValueError unless it is a name
    subject = known.get(recorded, "") if unit is None else unit.removeprefix("one ")
    if not subject or recorded not in (0, unit_fingerprint(subject)):
        raise ValueError(
            f"unit must be that of the batches, {known.get(recorded, 'the `unit` that dpx.UserData was given')!r}, got "
            f"{unit!r}: epsilon protects what the sampling draws. Draw from dpx.UserData(..., "
            f"unit={subject or 'user'!r}), or from data with the name in `privacy_unit`"
        )
    return subject


def _covered_steps_in_words(made: int, steps: int, planned: bool, unit: str) -> str:
    """Says which steps epsilon covers, if the run ended early or had no plan."""
    if made < steps:
        words = f"{made} of {steps} planned steps were taken, and epsilon covers all {steps}, because what the run"
        return f"{words} showed of one {unit} may have decided where it ended"
    words = f"Epsilon covers the {made} steps taken and no others, because it holds only if public information"
    return "" if planned else f"{words} alone decided where the run ended, and nothing that depends on one {unit}"


def _cost_with_tuning(cost: RunCost, tuning: Any, unit: str) -> tuple[RunCost, str]:
    """Returns the cost to state, and a sentence on whether it includes the choice of hyperparameters."""
    if isinstance(tuning, Selection):
        if (tuning.relation, tuning.records) != (cost.relation, cost.records) or not tuning.allows_trial(cost.event):
            raise ValueError(f"the run must be one that the search counted, got {cost.event}; {tuning}")
        return cost._replace(event=tuning.event, numbers=tuning.numbers), str(tuning)
    if not (tuning is None or isinstance(tuning, str)) or tuning not in (None, "public"):
        raise ValueError(f'tuning must be "public", a dpx.accounting.Selection or None, got {described(tuning)}')
    return cost, _TUNING[tuning].format(unit=unit)


def version_of(package: str) -> str:
    """Returns the version of an installed package, in words."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "not installed as a package"


# The text of the report. The sections before "How much is spent" are for a data owner, who does not read code.


_RELATIONS = {  # how neighboring data sets differ: as a question, as "with one unit or ...", and in full
    "add_or_remove": ("whether or not one {unit} is in the data", "without it", "by the presence of one {unit}"),
    "zero_out": (
        "whether or not one {unit} contributes to the run",
        "without this contribution",
        "by nulling one {unit}: a null keeps its row and counts nowhere, because deleting the row would move all later "
        "rows and so change how their sums are rounded",
    ),
    "replace_one": (
        "whether one {unit} is in the data, or another {unit} in its place",
        "with another {unit} in its place",
        "by exchanging one {unit} for another",
    ),
}
_OF_ONE = (
    "The size of the data set, counted by {unit}, is public. For specialists: neighboring data sets differ {differ}."
)
_OF_PERSONS = (
    "The size of the data set, counted by record, is public. For specialists: neighboring data sets differ by nulling "
    "all records of one {unit}; nulls keep their rows and count nowhere."
)
_ALL_OF_A_PERSON = (
    "The records of one {unit} are all that this person owns, which the run did not check. If records were left out "
    "so that nobody owns more, who owns which record counts as public."
)
_CONDITIONS = (
    "No other release was made from the same data, such as another run or a statistic. Each one adds to what is spent "
    "for one {unit} (dpx.compose_runs adds up runs, and a dpx.PrivacyLedger all releases).",
    "The keys of the noise and of the sampling are secret, and served no other run.",
    "The batches of all steps were drawn by the sampling that is named below, in the words of the code.",
    "Losses, gradients and clipping statistics stay inside, and so do logs and checkpoints that hold them: what is "
    "computed from one {unit} is not private, unless noise was added and epsilon includes it.",
    "The machine that ran the training is trusted: whoever reads its memory reads the data as they are.",
)
_OUTSIDE = (
    "What the data of others reveal may also be true of one {unit}, and is not hidden.",
    "The time of each step and the sizes of the batches must not be published: whoever sees them may learn in which "
    "steps one {unit} takes part.",
    "The noise comes from a cipher with the secret key, and counts as random: whoever breaks the cipher can subtract "
    "it.",
)
_NOT_EXAMPLES = (
    "The sampling and the clipping must have treated one {drawn} as one record: where the pipeline and the sampling "
    "say example, they mean {drawn}, and the size of the data set counts each {drawn} once."
)
_ON_A_TPU = (
    "Steps of this run were taken on a TPU. How its matrix unit adds is not published: what one {unit} can move the "
    "sum of a batch is proved if the unit multiplies bfloat16 numbers exactly, and rounds at most four times as much "
    "as float32 additions do."
)
_TUNING = {
    None: "Settings such as the learning rate (hyperparameters) were chosen without any run on these data. If not, "
    "each of those runs weakens the protection of one {unit} further than this page says.",
    "public": "Settings such as the learning rate (hyperparameters) were chosen on public data, without any run on "
    "the private data of one {unit}.",
}


def conditions(drawn: str, records: int) -> tuple[str, ...]:
    """States what the guarantee requires and the run could not check, one sentence each. Arguments as in `caveats`."""
    unit = unit_in_words(records, drawn)
    of_persons = () if records == 1 else (_ALL_OF_A_PERSON,)
    of_units = () if drawn == "example" else (_NOT_EXAMPLES,)
    return tuple(words.format(unit=unit, drawn=drawn) for words in (*of_persons, *_CONDITIONS, *of_units))


def caveats(drawn: str, relation: str, records: int, *, on_a_tpu: bool = False) -> tuple[str, ...]:
    """States what the guarantee does not cover, one sentence each, and how neighboring data sets differ.

    drawn: what the sampling draws, in words. records: the most of these that one person owns. on_a_tpu: whether the run
    took a step on a TPU.
    """
    unit = unit_in_words(records, drawn)
    differ = _RELATIONS[relation][2].format(unit=unit)
    of_place = (_ON_A_TPU,) if on_a_tpu else ()
    sentences = (*_OUTSIDE, *of_place, _OF_ONE if records == 1 else _OF_PERSONS)
    return tuple(words.format(unit=unit, differ=differ) for words in sentences)


def report_sections(report: PrivacyReport) -> tuple[Section, ...]:
    """Arranges all facts of a report in reading order. Printed bounds are rounded up."""
    unit = report.unit.removeprefix("one ")
    if report.records > 1:
        whole, others = ": all of these records together, whichever they are", "all other records"
    else:
        whole, others = ", with all of their records together", f"every other {unit}"
        whole = ", which is one record of the data set" if unit == "example" else whole
    question = _RELATIONS[report.relation][0].format(unit=unit)
    meaning = (
        f"From all that the run released, nobody can tell well {question}: the first lines say how well. This covers "
        f"what the data say of it too: whatever anyone can conclude about one {unit}, they could conclude nearly as "
        "well from the other data alone."
    )
    published = (
        "The trained parameters, those of earlier steps too, and what dpx calls the public part of the optimizer's "
        f"state. The guarantee for one {unit} holds against everyone who sees them, whatever they know about {others}, "
        "and however long they compute."
    )
    return (
        Section("In short", _guarantee_as_bet(report, unit), _report_numbers(report, unit), form="box"),
        Section("What is protected", (f"The guarantee is for one {unit}{whole}.", meaning, *_how_strong(report, unit))),
        Section("What may be published", (published,)),
        Section("What to confirm before you publish", (*report.conditions, report.tuning)),
        Section("What is not protected", report.caveats),
        _attack_section(report, unit),
        Section("How much is spent", (*_cost_in_words(report, unit), *report.attacks.sentences(unit)), form="folded"),
        Section("In the words of the code", rows=_code_versions_in_words(report), form="folded"),
        Section("Mechanism", code=report.mechanism, form="folded"),
    )


def _guarantee_as_bet(report: PrivacyReport, unit: str) -> tuple[str, ...]:
    """States the guarantee as a bet on a coin: of 100 guesses, at most 50 (1 + advantage), rounded up, are right.

    The advantage is a distance between the releases with and without one unit, so for two units it at most doubles.
    """
    right, of_two = (math.ceil(50 * (1 + min(1.0, times * report.attacks.advantage))) for times in (1, 2))
    if right >= 100:
        return (f"An attacker may be certain whether one {unit} took part: this run does NOT protect against that.",)
    most = f"right at most {of_two} times in 100" if of_two < 100 else "perhaps certain"
    more = math.ceil(50 * report.attacks.advantage)
    if report.records == 1:
        less = (
            f"If one {unit} and a second one belong together, an attacker who asks whether both took part is {most}. "
            f"Each further {unit} adds up to {more}."
        )
    else:
        less = f"If a person has up to twice the records of one {unit}, the attacker is {most}."
    return (
        f"An attacker who asks whether one {unit} took part, and would guess right 50 times in 100 without the results "
        f"of this run, is right at most {right} times in 100 with them, whatever the attacker knows about others.",
        less,
    )


def _how_strong(report: PrivacyReport, unit: str) -> tuple[str, ...]:
    """Explains epsilon and delta, and says whether this epsilon is called strong, reasonable or weak."""
    if math.isinf(report.spent):
        return ()
    grades = ((1, "strong"), (10, "reasonable"), (math.inf, "weak"))
    called = next(grade for most, grade in grades if report.spent <= most)
    return (
        "Epsilon measures this, and smaller is better. Up to 1 is called strong, up to 10 reasonable, and more weak "
        f"(Ponomareva et al. 2023, arXiv:2303.00654), so {rounded_up(report.spent, 3)} for one {unit} is {called}. "
        f"With a probability of about delta, here one in {math.floor((1 + 1e-9) / report.delta):,}, the promise of "
        "epsilon fails; the first lines count that in.",
    )


def _attack_section(report: PrivacyReport, unit: str) -> Section:
    meaning = (
        "An attack names those who it believes took part. For each share of outsiders that it names wrongly, the table "
        f"says which share of those who did take part it finds at most. Guessing about one {unit} finds the same share."
    )
    rows = (
        (f"wrongly names {100 * wrong:.4g}% of outsiders", f"finds at most {rounded_up(100 * right, 4)}%")
        for wrong, right in report.attack_curve[:-1:10]
    )
    return Section("What an attacker can learn", (meaning,), (*rows,), picture=attack_svg(report.attack_curve, unit))


def _cost_in_words(report: PrivacyReport, unit: str) -> tuple[str, ...]:
    spent, delta, added = report.spent, rounded_up(report.delta, 6), report.arithmetic
    if math.isinf(spent) and "least delta" in added:
        return (
            f"There is NO guarantee for one {unit} at delta {delta}, because epsilon = inf: the noise has finitely "
            "many values, and that alone costs more than this delta. There is one at a delta of about "
            f"{rounded_up(added['least delta'], 1)}.",
        )
    if math.isinf(spent):
        return (f"There is NO guarantee for one {unit}, because epsilon = inf: a release has no noise, or too little.",)
    factor = rounded_up(math.exp(spent), 3) if spent < 700 else "e^epsilon"
    other = _RELATIONS[report.relation][1].format(unit=unit)
    return (
        f"The epsilon that counts for one {unit} is {rounded_up(spent, 6)} at delta {delta}, for {report.steps} steps. "
        "It is the least of the upper bounds below.",
        f"Twice the data of one {unit} cost twice this epsilon, and 1 + e^epsilon times this delta.",
        f"For one {unit}, this epsilon includes {rounded_up(added['epsilon'], 2)}, and delta includes "
        f"{rounded_up(added['delta'], 2)}, because computer noise takes finitely many values.",
        f"Rounding can lengthen what one {unit} adds to a sum, by at most {rounded_up(ETA, 3)} of the clip norm (eta)"
        f"{'' if report.records == 1 else ' for each record'}. The noise is larger by this share, so the epsilon for "
        f"one {unit} contains it.",
        *([f"{report.ending}."] if report.ending else []),
        _target_in_words(report, unit),
        f"Any result of the run is at most {factor} times as likely with one {unit} as {other}, and vice versa, "
        f"except with a probability of {delta}. That is the most for a single result; the first lines count all.",
    )


def _target_in_words(report: PrivacyReport, unit: str) -> str:
    budget, spent = report.budget, report.spent
    if budget is None:
        return f"No epsilon was set as the target for one {unit}."
    numbers = f"epsilon {rounded_up(budget.epsilon, 6)} at delta {rounded_up(budget.delta, 6)}"
    if budget.records != report.records:
        other = "one record" if budget.records == 1 else f"a {unit_in_words(budget.records)}"
        return f"The target was {numbers} for {other}, not for one {unit}."
    words = f"The target for one {unit} was {numbers}"
    if spent <= budget.epsilon and report.delta <= budget.delta:
        return f"{words}, and the run kept it."
    if spent > budget.epsilon and report.delta >= budget.delta:
        return f"{words}, and the run spent MORE."
    return f"{words}, which cannot be compared with an epsilon at delta {rounded_up(report.delta, 6)}."


def _report_numbers(report: PrivacyReport, unit: str) -> tuple[tuple[str, str], ...]:
    budget = report.budget
    each = unit if report.records == 1 else "record"
    kind = "records" if each in ("example", "record") else f"records, each of one {each}"
    rows = f"{report.rows:,} {kind}" if report.rows else ""
    data = ", ".join(filter(None, [report.dataset, rows]))
    target = rounded_up(budget.epsilon, 6) if budget is not None and budget.records == report.records else "none"
    return (
        *((("run", report.name),) if report.name else ()),
        *((("data", data),) if data else ()),
        ("date", report.date),
        ("who is protected", f"one {unit}" + (" (a record of the data set)" if unit == "example" else "")),
        (f"epsilon of one {unit}, spent", rounded_up(report.spent, 6)),
        (f"epsilon of one {unit}, target", target),
        (f"delta of one {unit}", rounded_up(report.delta, 6)),
        ("steps", str(report.steps) if report.made == report.steps else f"{report.made} taken, {report.steps} covered"),
    )


def _code_versions_in_words(report: PrivacyReport) -> tuple[tuple[str, str], ...]:
    costs, whom = report.epsilon.items(), for_whom(report.records)
    return (
        ("relation", report.relation),
        ("sampling", report.sampling),
        *(
            (f"epsilon by {name}{whom}", "does not apply" if cost is None else rounded_up(cost, 6))
            for name, cost in costs
        ),
        *((f"release{whom}", event) for event in report.events),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    )
