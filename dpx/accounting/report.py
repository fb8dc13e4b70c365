"""The privacy report to publish beside a private model: the bill, all its assumptions, and its limits."""

import importlib.metadata
import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dp_accounting import DpEvent

from dpx.accounting import checks
from dpx.accounting.attacks import FALSE_POSITIVE_RATES, AttackBounds, bounds_of
from dpx.accounting.best_of import Selection
from dpx.accounting.bill import batches_of, billed_steps, event_of, require_billable
from dpx.accounting.checks import Relation
from dpx.accounting.events import event_epsilon, event_profile, explanation
from dpx.accounting.summary import summary
from dpx.states.record import unit_mark
from dpx.trees import described

_CAVEATS = (
    "Holds if batches were drawn as `sampling` says, and while the keys of the noise and of the sampling are secret.",
    "Gaussian noise is drawn in float32: its tail ends near 5.4 standard deviations, so a delta below about 1e-7 is "
    "not meaningful, and attacks on floating-point noise are not excluded.",
    "Per-{unit} losses, gradients and clipping statistics of training data are not private unless noised and billed.",
)
_TUNING = {
    None: "Not billed: if hyper-parameters were chosen by runs on the same data, that cost more than is stated here.",
    "public": "Public data: hyper-parameters were chosen without any run on the private data.",
}
_RELATION_CAVEATS = {
    "add_or_remove": "Neighbors differ by the presence of one {unit}. The size of the data set is treated as public.",
    "zero_out": "Neighbors differ by nulling the contribution of one {unit}; who takes part is treated as public.",
    "replace_one": "Neighbors differ by exchanging one {unit} for another; the size of the data set is public.",
}


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """A privacy statement, with all its assumptions.

    mechanism: the printed pipeline. steps: how many are billed. unit: one record of the data set, in words.
    relation: how neighboring data sets differ. sampling: the printed sampling record. delta: in (0, 1).
    epsilon: an upper bound by each accountant, so the smallest is the guarantee; None if an accountant does not apply.
    attacks: what that means for an attacker. tuning: whether the choice of hyper-parameters is billed, in words.
    events: the releases, one sentence each. versions: by package. caveats: one sentence each.
    """

    mechanism: str
    steps: int
    unit: str
    relation: str
    sampling: str
    delta: float
    epsilon: dict[str, float | None]
    attacks: AttackBounds
    tuning: str
    events: tuple[str, ...]
    versions: dict[str, str]
    caveats: tuple[str, ...]

    def to_json(self) -> str:
        """The report as valid JSON; an infinite epsilon is the string "inf"."""

        def finite(value: float | None) -> float | str | None:
            return "inf" if value is not None and math.isinf(value) else value

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["epsilon"] = {name: finite(value) for name, value in self.epsilon.items()}
        fields["attacks"] = self.attacks._asdict() | {"mu": finite(self.attacks.mu)}
        return json.dumps(fields, indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        """The report as a Markdown page."""
        spent = [value for value in self.epsilon.values() if value is not None]
        bills = "\n".join(
            f"| {name} | {'does not apply' if value is None else f'{value:.6g}'} |"
            for name, value in self.epsilon.items()
        )
        return f"""# Privacy report

After {self.steps} steps the run is (epsilon, delta)-differentially private with **epsilon = {min(spent):.6g}** \
at **delta = {self.delta:g}**.

| | |
|---|---|
| unit of privacy | {self.unit} |
| neighboring relation | {self.relation} |
| sampling | `{self.sampling}` |
| steps | {self.steps} |
| delta | {self.delta:g} |

| accountant | epsilon (upper bound) |
|---|---|
{bills}

## What an attacker can learn

About the presence of one record, from the release and all other records, at most this:

{_lines(self.attacks.sentences())}

## Tuning

{self.tuning}

## Releases

{_lines(self.events)}

## Mechanism

```
{self.mechanism}
```

## Limits

{_lines(self.caveats)}

## Versions

{_lines(tuple(f"{name} {version}" for name, version in self.versions.items()))}
"""

    def write(self, folder: str | Path, *, name: str = "privacy_report") -> tuple[Path, Path]:
        """Writes `name`.json and `name`.md into a folder, which is created if missing, and returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / f"{name}.json", folder / f"{name}.md"
        paths[0].write_text(self.to_json() + "\n", encoding="utf-8")
        paths[1].write_text(self.to_markdown(), encoding="utf-8")
        return paths


def privacy_report(
    mechanism: Any,
    steps_or_state: Any,
    *,
    delta: float,
    unit: str | None = None,
    tuning: Selection | Literal["public"] | None = None,
) -> PrivacyReport:
    """The report of a mechanism after some steps: epsilon by "pld" and by "rdp", and all assumptions.

    steps_or_state: a number of steps (int, at least 0), or an optimizer state, whose billed steps are read.
    delta: in (0, 1), best far below 1 divided by the number of examples. A larger one warns.
    unit: what the sampling draws and epsilon protects, in words: "user" if it draws users. None: as the state records
        it, which knows "example" and "user" (`dpx.UserData`); "example" for a number of steps.
    tuning: how hyper-parameters were chosen. "public": without any run on the private data. A `Selection` (of
        `dpx.accounting.best_of` or `dpx.tuning.search`): this run is the winner, and the report states the cost of the
        search. None: the report says that the choice is not billed.

    Raises ValueError as `dpx.epsilon` does, for another unit than the state records, where neither accountant can bill
    the event, for another tuning, and for a run that costs more than a trial of the search.
    """
    require_billable(mechanism)
    checks.warn_of_large_delta(delta, mechanism.sampling)
    steps = billed_steps(steps_or_state)
    event, relation = event_of(mechanism, steps_or_state, None)
    event, words = _with_tuning(event, relation, tuning)
    bills: dict[str, float | None] = {"pld": None, "rdp": None}
    refusals = []
    for accountant in ("pld", "rdp"):
        try:
            bills[accountant] = event_epsilon(event, delta=delta, accountant=accountant, relation=relation)
        except ValueError as error:
            refusals.append(error)
    if len(refusals) == len(bills):
        raise refusals[0]
    subject = _unit_of(batches_of(steps_or_state)[1], unit)
    caveats = tuple(caveat.format(unit=subject) for caveat in (_RELATION_CAVEATS[relation], *_CAVEATS))
    caveats += explanation(event, delta=delta, relation=relation)
    if subject != "example":
        caveats += (
            f"The sampling and the clipping must have treated one {subject} as one record: where the pipeline and the "
            f"sampling say example, they mean {subject}, and the size of the data set counts each {subject} once.",
        )
    return PrivacyReport(
        mechanism=str(mechanism),
        steps=steps,
        unit=f"one {subject}",
        relation=relation,
        sampling=str(mechanism.sampling),
        delta=delta,
        epsilon=bills,
        attacks=bounds_of(event_profile(event, relation=relation, curve=True), delta, FALSE_POSITIVE_RATES),
        tuning=words,
        events=summary(event),
        versions=_versions(),
        caveats=caveats,
    )


def _unit_of(recorded: int, unit: str | None) -> str:
    """The unit in words. recorded: its mark, or 0 if it is not known. Raises ValueError if they do not agree."""
    known = {0: "example"} | {unit_mark(name): name for name in ("example", "user")}
    subject = known.get(recorded, "") if unit is None else unit.removeprefix("one ")
    if not subject or recorded not in (0, unit_mark(subject)):
        raise ValueError(
            f"unit must be that of the batches, {known.get(recorded, 'the `unit` that dpx.UserData was given')!r}, got "
            f"{unit!r}: epsilon protects what the sampling draws. Draw from dpx.UserData, or from data with the name "
            "in `privacy_unit`"
        )
    return subject


def _with_tuning(event: DpEvent, relation: Relation, tuning: Any) -> tuple[DpEvent, str]:
    """The event that is billed, and how the choice of hyper-parameters is, in words."""
    if isinstance(tuning, Selection):
        if tuning.relation != relation or not tuning.covers(event):
            raise ValueError(f"the run must be one that the search billed, got {event}; {tuning}")
        return tuning.event, str(tuning)
    if not (tuning is None or isinstance(tuning, str)) or tuning not in _TUNING:
        raise ValueError(f'tuning must be "public", a dpx.accounting.Selection or None, got {described(tuning)}')
    return event, _TUNING[tuning]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("dpx", "jax", "optax", "dp-accounting", "numpy", "scipy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def _lines(items: tuple[str, ...]) -> str:
    return "\n".join(f"* {item}" for item in items) if items else "* none"
