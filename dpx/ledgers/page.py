"""The ledger as one page, for a data owner."""

from typing import Any

from dpx.accounting.ledger import from_event
from dpx.ledgers.entries import Entry
from dpx.reports.pages import Section
from dpx.values import rounded_up

_OUTSIDE = (
    "The ledger knows what programs told it. A release that was made without it, with the same data, is not counted.",
    "Do not decide what is released next by looking at the data, or at losses and gradients that were not released: "
    "epsilon covers decisions by what was released.",
    "Each release is as private as its line says only if the program that made it bounds what one {owner} adds, and "
    "adds the noise of that line. The report of a run says how dpx does that.",
)


def sections_of(ledger: Any) -> tuple[Section, ...]:
    """The sections of the page of a `PrivacyLedger`."""
    terms, entries = ledger.terms, ledger.entries
    delta, pending = rounded_up(terms.delta, 6), [entry for entry in entries if not entry.made]
    sentences = (
        f"All releases below, together, are (epsilon, delta)-private for one {terms.owner}, with epsilon "
        f"{rounded_up(terms.epsilon, 6)} and delta {delta}. This is the budget. It holds whatever was released first, "
        "and whoever decided by it what was released next, with how much noise, and when to stop.",
        f"Releases: {len(entries) - len(pending)} made, {len(pending)} reserved. A line is written before its release "
        "is made, so it counts even if a program was killed in between.",
    )
    rows = (
        ("budget", f"epsilon {rounded_up(terms.epsilon, 6)} at delta {delta}"),
        ("spent", f"epsilon {rounded_up(ledger.epsilon, 4)}, for a reader who did not choose when to read"),
        ("at every moment", f"epsilon {rounded_up(ledger.odometer, 4)}, for a reader who may stop at any moment"),
        ("neighbors", f"data sets that differ in one {terms.owner} (relation {terms.relation!r})"),
    )
    releases = tuple((f"{entry.number}, {entry.date}", _words(entry)) for entry in entries)
    outside = tuple(sentence.format(owner=terms.owner) for sentence in _OUTSIDE)
    return (
        Section("What was promised", sentences, rows),
        Section("What was released", rows=releases or (("", "nothing"),)),
        Section("What this does not cover", outside),
    )


def _words(entry: Entry) -> str:
    """An entry, in one sentence."""
    charged, returned = (f"{spent.precision**0.5:.3g}" for spent in (entry.charge, entry.credit))
    parts = [entry.words, *([f"of part {entry.part!r}"] if entry.part is not None else [])]
    parts += [from_event(entry.event).in_one_line(), *([] if entry.made else ["reserved, not made"])]
    parts.append("composed exactly" if entry.planned else f"counted as a Gaussian of mu {charged}")
    if entry.steps is not None:
        parts.append(f"ended after step {entry.steps}, which gave a Gaussian of mu {returned} back")
    return "; ".join(parts)
