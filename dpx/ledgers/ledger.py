"""`PrivacyLedger`: keeps what all programs release about a data set within one budget, and prints its page."""

import json
import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import dp_accounting
import jax
from dp_accounting import DpEvent, GaussianDpEvent
from filelock import FileLock

from dpx import keys
from dpx.accounting import checks
from dpx.accounting.arithmetic import normal_sampler_error, worst_sampler_error
from dpx.accounting.checks import Profile, Relation
from dpx.accounting.cost import profile_of_run
from dpx.accounting.filters import NOTHING, PrivacyFilter, Spent, credit_for_untaken_steps
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import as_hashable, event_of_release, require_noise_to_matter
from dpx.accounting.profiles import least_satisfying
from dpx.keys.noise import LARGEST_RELEASE
from dpx.ledgers.entries import LedgerEntry, decode_value, encode_value, read_entries
from dpx.ledgers.files import replace_file
from dpx.reports.rendering import Section, page_as_markdown, page_as_text
from dpx.sampling.schemes import compose_events
from dpx.states.record import unit_fingerprint
from dpx.values import (
    described,
    explain_misuse,
    number_for_json,
    require_path,
    require_text,
    require_whole,
    rounded_up,
    unit_in_words,
)
from dpx.xla.place import current_place

_MOST_NOISE, _FINE = 1e4, 1e-3  # largest noise multiplier and relative precision of `least_noise`
_PATIENCE = 300.0  # seconds to wait for other programs to write their lines


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """The first line of a ledger, which never changes. `PrivacyLedger` explains the fields."""

    epsilon: float
    delta: float
    unit: str = "example"
    records: int = 1
    relation: Relation = "zero_out"

    def __post_init__(self):
        checks.require_positive_epsilon(self.epsilon)
        checks.require_delta(self.delta)
        unit_fingerprint(self.unit)
        require_whole("records", self.records)
        checks.require_relation(self.relation)

    @property
    def filter(self) -> PrivacyFilter:
        return PrivacyFilter(self.epsilon, self.delta)

    @property
    def protected_unit(self) -> str:
        """Whom epsilon protects, in words."""
        return unit_in_words(self.records, self.unit)


@explain_misuse
class PrivacyLedger:
    """The ledger of a data set: a shared file that keeps all that programs release about the data within one budget.

        >>> from dp_accounting import GaussianDpEvent
        >>> ledger = dpx.PrivacyLedger(f"{tempfile.mkdtemp()}/ledger.jsonl", epsilon=2.0, delta=1e-5)
        >>> entry = ledger.spend(GaussianDpEvent(20.0), key=dpx.secret_key(), words="mean of the age")
        >>> ledger.epsilon
        0.16...

    `spend` writes a line before a release is made, and refuses what the budget does not allow. A release stays charged
    if its program is killed after that line. What to release next, with how much noise, and when to stop may depend on
    everything released before: all of it together is (epsilon, delta)-private (`dpx/accounting/filters.py`).
    `reserve` plans a release. Releases that are all reserved before the first one is made are composed exactly; for
    others, the composition uses up a fifth of delta, and about 1% of epsilon for a long run.

    path: the file, which only its owner can read, and which is created if missing. It holds no data and no key.
    epsilon, delta: the budget for all programs; None takes the file's.
    unit: what epsilon protects, in words, such as "user" for `dpx.UserData`.
    records: int, at least 1, the most units that the protected person owns.
    relation: how neighboring data sets differ, for every release.

    Raises ValueError for arguments outside these ranges, a new file without a budget, and a file with another budget.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        unit: str | None = None,
        records: int | None = None,
        relation: Relation | None = None,
    ):
        self.path = require_path("path", path).resolve()  # a link would be replaced by a second ledger
        given: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "unit": unit, "records": records}
        given = {name: value for name, value in (given | {"relation": relation}).items() if value is not None}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=_PATIENCE, mode=0o600)
        with self._lock:
            if not self.path.exists():
                if "epsilon" not in given or "delta" not in given:
                    raise ValueError(f"epsilon and delta must be given for a new ledger, but there is no {self.path}")
                terms = {name: encode_value(value) for name, value in asdict(LedgerTerms(**given)).items()}
                replace_file(self.path, json.dumps({"ledger": terms}) + "\n")
        self.terms = LedgerTerms(**{name: decode_value(one) for name, one in self._read_lines()[0]["ledger"].items()})
        for name, value in given.items():
            if value != (stored := getattr(self.terms, name)):
                words = f"{name} is {stored}, got {described(value)}"
                raise ValueError(
                    f"the budget of a ledger must not change, but in {self.path} {words}: leave it out to open this "
                    "ledger; for a larger budget, begin another one: docs/ledger.md#a-larger-budget"
                )

    def reserve(
        self,
        event: DpEvent,
        *,
        key: jax.Array | Sequence[jax.Array],
        words: str,
        numbers: int = LARGEST_RELEASE,
        part: str | None = None,
        unit: str | None = None,
    ) -> LedgerEntry:
        """Records a future release and charges the budget for it. Arguments and errors are as for `spend`."""
        return self._add_entry(event, key, words, numbers, part, unit, made=False, holder="")

    def spend(
        self,
        event: DpEvent,
        *,
        key: jax.Array | Sequence[jax.Array],
        words: str,
        numbers: int = LARGEST_RELEASE,
        part: str | None = None,
        unit: str | None = None,
        holder: str = "",
    ) -> LedgerEntry:
        """Records a release just before it is made, and charges the budget for it unless it was reserved.

        event: its cost, an event of dp-accounting or of dpx that holds for the ledger's unit, records and relation.
        key: scalar key of its noise, used for no other release; or a list of keys, such as those of noise and batches.
        words: one line that says what it is, for the report.
        numbers: int, at most 2^32, the most elements in one release of the event.
        part: name of the part of the data that it reads. The partition must be public, with each unit in one part only.
            Releases about other parts cost its members nothing.
        unit: what the data hold, in words, to compare with the ledger's unit; None skips the check.
        holder: random name of its run's folder. The run may continue there without being charged again.

        Raises ValueError for an event that the budget does not allow or that has no bound; for a key that was used
            before; for another unit; for a part if neighbors differ by replacement, because a replacement may be in
            another part; and for a part if persons own several records, because these may be in two parts.
        """
        return self._add_entry(event, key, words, numbers, part, unit, made=True, holder=holder)

    def end(self, entry: LedgerEntry, event: DpEvent, *, steps: int) -> LedgerEntry:
        """Ends a run early and gives back the cost of its remaining steps, if these are Gaussians on all data or on
        Poisson samples. Gives nothing back if `records` is above 1: noise multipliers are then rounded to a few.

        Anything may decide where it ends, such as a private evaluation that the ledger paid for; no step may follow.

        entry: the run's entry, already made. event: the event of the steps taken. steps: int, how many were taken. Does
        nothing if the run already ended there. Raises ValueError if it ended elsewhere, or for unplanned releases.
        """
        with self._lock:
            stored = self.entries[entry.number]
            if stored.steps == require_whole("steps", steps, minimum=0):
                return stored
            if stored.steps is not None or not stored.made or stored.event != entry.event:
                raise ValueError(f"entry must be a run that has not ended, got entry {entry.number} ({stored.words})")
            gained = NOTHING
            if from_event(stored.event).all_gaussian and self.terms.records == 1:
                rest = from_event(_remaining_event(stored.event, as_hashable(event))).losses(self.terms.relation)
                spent = max(_net_cost(group).delta for group in _entries_by_part(self.entries) if stored in group)
                gained = credit_for_untaken_steps(rest, max(0.0, self.terms.filter.limits.delta - spent) / 8)
            self._append_lines([{"ended": entry.number, "steps": steps, "credit": encode_value(gained)}])
            return replace(stored, steps=steps, credit=gained)

    @property
    def odometer(self) -> float:
        """The epsilon, at the ledger's delta, of everything reserved or made so far, valid at all times simultaneously.

        It holds even for a reader who decides by what was released when to read it. It is at most the budget, and above
        `epsilon`, which is for a time chosen in advance and subtracts refunds.
        """
        return min(self.terms.epsilon, max(self._odometer_of_group(group) for group in _entries_by_part(self.entries)))

    def _odometer_of_group(self, group: Sequence[LedgerEntry]) -> float:
        spent = _net_cost(_without_refunds(group))
        if fixed := [entry for entry in group if entry.planned]:
            more = self.terms.filter.charge(self._joint_profile(fixed, curve=True), _net_cost(group))
            spent = Spent(spent.precision + more.precision, spent.delta + more.delta)
        return self.terms.filter.odometer(spent)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries, in the order of their reservation."""
        return tuple(read_entries(self._read_lines()[1:]))

    @property
    def epsilon(self) -> float:
        """The epsilon, at the ledger's delta, of everything reserved or made, as if it had all been chosen in advance.

        If earlier releases decided later ones, rely on the budget or on `odometer` instead.
        """
        return self._epsilon_of_entries(self.entries)

    def _epsilon_of_entries(self, entries: Sequence[LedgerEntry]) -> float:
        # The coins of a credit take a share of delta. Until other releases use it, that may cost more than it saves.
        ways = ((group, _without_refunds(group)) for group in _entries_by_part(entries))
        return max(min(map(self._epsilon_of_group, both if both[0] != both[1] else both[:1])) for both in ways)

    def affords(self, event: DpEvent, *, numbers: int = LARGEST_RELEASE, part: str | None = None) -> bool:
        """Whether the budget still allows a release. The arguments are as for `spend`.

        Raises ValueError for arguments that `spend` would refuse under any budget.
        """
        event = self._hashable_event(event, "asked", numbers, part, None)
        try:
            self._new_entry(self.entries, event=event, words="asked", numbers=numbers, part=part, marks=())
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        """A page for the data owner: the budget, what was spent, and every release."""
        return page_as_text(f"Privacy ledger {self.path.name}", ledger_sections(self))

    def _repr_markdown_(self) -> str:
        return page_as_markdown(f"Privacy ledger {self.path.name}", ledger_sections(self))

    def least_noise(
        self, event: Callable[[float], DpEvent], *, numbers: int = LARGEST_RELEASE, part: str | None = None
    ) -> float:
        """Finds the least noise multiplier whose event the ledger affords, to 1e-3 relative, rounded up.

        event: such as `lambda noise: sampling.event(np.full(steps, noise))`; the noise of every release must grow with
        the multiplier. numbers, part: as for `spend`. Raises ValueError if noise does not help or 1e4 is too little.
        """
        if not callable(event) or not isinstance(event(1.0), DpEvent):
            raise ValueError(
                "event must be a function from a noise multiplier to an event, such as lambda noise: sampling.event("
                f"np.full(steps, noise)), got {described(event(1.0) if callable(event) else event)}"
            )
        require_noise_to_matter("event", event)
        given: Any = {"numbers": numbers, "part": part}
        found = least_satisfying(lambda noise: self.affords(event(noise), **given), most=_MOST_NOISE, fine=_FINE)
        if found == math.inf:
            raise ValueError(f"the budget of {self.path} must allow some noise multiplier up to {_MOST_NOISE:g}")
        return found

    def _add_entry(self, event, key, words, numbers, part, unit, *, made: bool, holder: str) -> LedgerEntry:
        event = self._hashable_event(event, words, numbers, part, unit)
        given = key if isinstance(key, list | tuple) else [key]
        marks = tuple(sorted({int(keys.mark_of_key(keys.require_key(one))) for one in given}))
        if not marks:
            raise ValueError("key must be the key of the noise, or a list of at least one key, got an empty one")
        with self._lock:
            entries, lines = self.entries, []
            used = [entry for entry in entries if {*entry.marks} & {*marks}]
            if used:
                entry = _existing_entry(used[0], event, marks, part, holder, numbers)
            else:
                entry = self._new_entry(entries, event=event, words=words, numbers=numbers, part=part, marks=marks)
                lines.append(entry.reservation_line())
            if made and not entry.made:
                entry = replace(entry, made=True, holder=holder)
                lines.append({"made": entry.number, "holder": holder})
            self._append_lines(lines)
        return entry

    def _hashable_event(self, event: Any, words: Any, numbers: Any, part: Any, unit: Any) -> DpEvent:
        """Returns `event` in hashable form. Raises ValueError for arguments that the ledger's terms do not allow."""
        if not isinstance(event, DpEvent):
            raise ValueError(f"event must be a DpEvent, such as optimizer.event(steps), got {described(event)}")
        event = as_hashable(event)
        checks.numbers_per_release(numbers)
        require_text("words", words)
        require_text("part", "all" if part is None else part)
        if unit is not None and unit_fingerprint(unit) != unit_fingerprint(self.terms.unit):
            advice = ": give the data as dpx.UserData" if unit == "example" else ""
            raise ValueError(
                f"the release must protect the unit of the ledger, {self.terms.unit!r}, got {unit!r}{advice}"
            )
        if part is not None and self.terms.relation == "replace_one":
            raise ValueError(
                'part must be None in a ledger of relation "replace_one": a member of one part may be replaced by one '
                f"of another, and both parts would change; got {part!r}"
            )
        if part is not None and self.terms.records > 1:
            raise ValueError(
                f"part must be None in a ledger for persons with {self.terms.records} records, because the releases of "
                f"two parts add up for those who have records in both; got {part!r}. Draw persons with dpx.UserData, "
                "in a ledger of that unit"
            )
        before = {entry.part for entry in self.entries if part and entry.part and _plain(entry.part) == _plain(part)}
        if before and part not in before:
            raise ValueError(
                f"part must be written as before, {min(before)!r}, got {part!r}: as another part, it would have a "
                "budget of its own"
            )
        return event

    def _new_entry(self, entries: Sequence[LedgerEntry], **given: Any) -> LedgerEntry:
        """Creates the entry for one more release. Raises ValueError if the budget does not allow it."""
        facts = {"in_integers": current_place().platform == "tpu", "date": datetime.now(UTC).date().isoformat()}
        fixed = LedgerEntry(number=len(entries), planned=True, charge=NOTHING, **facts, **given)
        planned = not any(entry.made for entry in entries) and self._can_compose([*entries, fixed])
        if planned and self._budget_allows([*entries, fixed]):
            return fixed
        coins = max(_net_cost(group).delta for group in _entries_by_part([*entries, fixed]) if fixed in group)
        charge = self.terms.filter.charge(self._joint_profile([fixed], curve=True), Spent(0.0, coins))
        chosen = replace(fixed, planned=False, charge=charge)
        if not self._budget_allows([*entries, chosen]):
            budget = f"epsilon={self.terms.epsilon} at delta={self.terms.delta}"
            cost = self._epsilon_of_entries([*entries, fixed if planned else chosen])
            more = f"with it, epsilon is {cost:.4g}; " * (cost > self.terms.epsilon)
            of = why = ""
            if from_event(given["event"]).pure(self.terms.relation) < math.inf:
                of = "(lambda noise: dpx.accounting.PureDpEvent(1 / noise))"
                why = "" if planned else "A quantile, or Laplace noise, counts as the Gaussian that bounds it here. "
            raise ValueError(
                f"every release must stay within the budget of {self.path}, {budget}, got {given['words']!r}, "
                f"{from_event(given['event']).in_one_line()}, which would exceed it: {more}"
                f"without it, {self.epsilon:.4g}. {why}`ledger.least_noise{of}` finds the noise that fits. Releases "
                "cost less if all are reserved before the first one is made: docs/ledger.md#reserve-first"
            )
        return chosen

    def _budget_allows(self, entries: Sequence[LedgerEntry]) -> bool:
        """Whether the budget allows these entries. Unless all were planned, the coins take a share of delta."""
        most = self.terms.filter.limits
        for group in _entries_by_part(entries):
            spent, coins = _net_cost(group), 0.0 if all(entry.planned for entry in group) else most.delta
            if spent.delta > most.delta or spent.precision > most.precision:
                return False
            if any(entry.planned for entry in group) and self._epsilon_of_group(group, coins) > self.terms.epsilon:
                return False
        return True

    def _can_compose(self, entries: Sequence[LedgerEntry]) -> bool:
        """Whether dpx knows the joint cost of the planned entries, and their cost composed with a Gaussian."""
        fixed = [entry for entry in entries if entry.planned]
        try:
            self._joint_profile(fixed, self.terms.filter.limits.precision)
        except ValueError:
            return False
        return all(from_event(entry.event).all_costed_by_dpx for entry in fixed)

    def _epsilon_of_group(self, group: Sequence[LedgerEntry], coins: float | None = None) -> float:
        """The epsilon of the entries that count for one part. coins: their delta; None takes that of the entries."""
        fixed, spent = [entry for entry in group if entry.planned], _net_cost(group)
        spent = spent if coins is None else spent._replace(delta=coins)
        if not fixed:
            return self.terms.filter.epsilon_of(spent)
        return self._joint_profile(fixed, spent.precision).epsilon(self.terms.delta - spent.delta)

    def _joint_profile(self, entries: Sequence[LedgerEntry], precision: float = 0.0, *, curve: bool = False) -> Profile:
        """The joint privacy profile of the entries, and of a Gaussian of precision mu^2 if that is not 0."""
        events = [entry.event for entry in entries]
        events += [GaussianDpEvent(precision**-0.5)] if precision > 0 else []
        event = events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
        numbers = worst_sampler_error(normal_sampler_error(entry.numbers, entry.in_integers) for entry in entries)
        return profile_of_run(event, relation=self.terms.relation, numbers=numbers, curve=curve)

    def _read_lines(self) -> list[dict[str, Any]]:
        """Reads all lines. Raises ValueError if the file is not a ledger."""
        try:
            lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
            lines[0]["ledger"].keys()  # not an `assert`, which `python -O` leaves out
        except (ValueError, LookupError, TypeError, AttributeError, IsADirectoryError) as error:
            raise ValueError(f"path must be a dpx ledger, or not exist, got {self.path}") from error
        return lines

    def _append_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        """Appends lines atomically and durably. The caller holds the lock. Raises ValueError for a hard link."""
        if self.path.stat().st_nlink > 1:
            raise ValueError(
                f"the file of a ledger must have one name, but {self.path} has another one, a hard link, which would "
                "become a second ledger with the old lines: delete that name, or make it a symbolic link"
            )
        text = self.path.read_text(encoding="utf-8").rstrip() + "\n"  # an editor may have changed its end
        replace_file(self.path, text + "".join(json.dumps(line, default=number_for_json) + "\n" for line in lines))


def _plain(part: str) -> str:
    """The name of a part without what people confuse: letter case, spaces and the forms of one character."""
    return "".join(unicodedata.normalize("NFKC", part).casefold().split())


def _entries_by_part(entries: Sequence[LedgerEntry]) -> list[list[LedgerEntry]]:
    """Groups the entries by part: for each part of the data, those that count for its members."""
    parts = {entry.part for entry in entries} - {None} or {None}
    return [[entry for entry in entries if entry.part in (None, part)] for part in parts]


def _without_refunds(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Returns the entries without their refunds, whose cost is also an upper bound."""
    return [replace(entry, credit=NOTHING) for entry in entries]


def _net_cost(entries: Sequence[LedgerEntry]) -> Spent:
    """Returns what the entries cost, in the unit of the filter, less their refunds; rounded up."""
    charged = math.fsum(entry.charge.precision for entry in entries) * (1 + 1e-12)
    precision = charged - math.fsum(entry.credit.precision for entry in entries) * (1 - 1e-12)
    coins = math.fsum(entry.charge.delta + entry.credit.delta for entry in entries)
    return Spent(max(0.0, precision), coins * (1 + 1e-12))


def _remaining_event(event: DpEvent, made: DpEvent) -> DpEvent:
    """The event of the releases in `event` but not in `made`. Raises ValueError if `made` has any other release."""
    planned, left = from_event(event), dict(from_event(event).counts)
    for loss, count in from_event(made).counts.items():
        left[loss] = left.get(loss, 0) - count
    if min(left.values(), default=0) < 0:
        raise ValueError(f"the event of a run that ends early must hold its own steps, {planned.event}, got {made}")
    return compose_events((event_of_release(loss), count) for loss, count in left.items() if count)


def _existing_entry(
    entry: LedgerEntry, event: DpEvent, marks: tuple[int, ...], part: str | None, holder: str, numbers: int
) -> LedgerEntry:
    """Returns the existing entry for a key: a matching reservation, or a run that continues in its own folder.

    Raises ValueError for anything else, because it would repeat the noise of an earlier release; and for more numbers,
    or noise drawn in integers, if that was not paid for.
    """
    dearer = numbers > entry.numbers or (current_place().platform == "tpu" and not entry.in_integers)
    if dearer or (entry.event, entry.marks, entry.part) != (event, marks, part):
        raise ValueError(
            f"every release must have a key of its own, but entry {entry.number} ({entry.words}) has this one: take a "
            f"new dpx.secret_key(). A release that was reserved must be as it was reserved, {entry.event} of up to "
            f"{entry.numbers} numbers{' in integers' if entry.in_integers else ''}, got {event} of {numbers}"
        )
    if entry.made and (not holder or holder != entry.holder):
        raise ValueError(
            f"entry {entry.number} ({entry.words}) was made with this key on {entry.date}, and counts even if a "
            "program was killed before it showed anything. Take a new dpx.secret_key(); a run continues in its folder"
        )
    return entry


_OUTSIDE = (
    "The ledger knows what programs told it. A release that was made without it, with the same data, is not counted.",
    "Do not decide what is released next by looking at the data, or at losses and gradients that were not released: "
    "epsilon covers decisions by what was released.",
    "Each release is as private as its line says only if the program that made it bounds what one {owner} adds, and "
    "adds the noise of that line. The report of a run says how dpx does that.",
)


def ledger_sections(ledger: Any) -> tuple[Section, ...]:
    """The sections of a `PrivacyLedger`'s page."""
    terms, entries = ledger.terms, ledger.entries
    delta, pending = rounded_up(terms.delta, 6), [entry for entry in entries if not entry.made]
    sentences = (
        f"All releases below, together, are (epsilon, delta)-private for one {terms.protected_unit}, with epsilon "
        f"{rounded_up(terms.epsilon, 6)} and delta {delta}. This is the budget. It holds whatever was released first, "
        "and whoever decided by it what was released next, with how much noise, and when to stop.",
        f"Releases: {len(entries) - len(pending)} made, {len(pending)} reserved. A line is written before its release "
        "is made, so it counts even if a program was killed in between.",
    )
    rows = (
        ("budget", f"epsilon {rounded_up(terms.epsilon, 6)} at delta {delta}"),
        ("spent", f"epsilon {rounded_up(ledger.epsilon, 4)}, for a reader who did not choose when to read"),
        ("at every moment", f"epsilon {rounded_up(ledger.odometer, 4)}, for a reader who may stop at any moment"),
        ("neighbors", f"data sets that differ in one {terms.protected_unit} (relation {terms.relation!r})"),
    )
    releases = tuple((f"{entry.number}, {entry.date}", _describe_entry(entry)) for entry in entries)
    outside = tuple(sentence.format(owner=terms.protected_unit) for sentence in _OUTSIDE)
    return (
        Section("What was promised", sentences, rows),
        Section("What was released", rows=releases or (("", "nothing"),)),
        Section("What this does not cover", outside),
    )


def _describe_entry(entry: LedgerEntry) -> str:
    """Describes an entry in one sentence."""
    charged, returned = (f"{spent.precision**0.5:.3g}" for spent in (entry.charge, entry.credit))
    parts = [entry.words, *([f"of part {entry.part!r}"] if entry.part is not None else [])]
    parts += [from_event(entry.event).in_one_line(), *([] if entry.made else ["reserved, not made"])]
    parts.append("composed exactly" if entry.planned else f"counted as a Gaussian of mu {charged}")
    if entry.steps is not None:
        parts.append(f"ended after step {entry.steps}, which gave a Gaussian of mu {returned} back")
    return "; ".join(parts)
