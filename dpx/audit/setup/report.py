"""Findings, and the table of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note", "ok"]
ORDER = ("error", "warning", "note", "ok")
FOOTNOTE = "* computed from raw data or secret noise: do not publish"


@dataclass(frozen=True)
class Finding:
    """One thing that `dpx.check_setup` looked at.

    name: what. severity: "error" (the run fails, or no epsilon covers it), "warning" (probably a mistake), "note" or
        "ok". words: one line. numbers: by name, those in `words` and more.
    """

    name: str
    severity: Severity
    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class SetupReport:
    """The result of `dpx.check_setup`; `str` is a table, the worst first.

    public_findings: those that depend on public values only. unreleased_findings: those that depend on raw data or
        secret noise. NOT private; None in `dpx.publishable_state(report)`.
    """

    public_findings: tuple[Finding, ...]
    unreleased_findings: tuple[Finding, ...] | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, the worst first."""
        both = (*self.public_findings, *(self.unreleased_findings or ()))
        return tuple(sorted(both, key=lambda finding: ORDER.index(finding.severity)))

    def __getitem__(self, name: str) -> Finding:
        """The finding of this name. Raises KeyError if there is none."""
        return {finding.name: finding for finding in self.findings}[name]

    def __repr__(self) -> str:
        found = [finding.severity for finding in self.findings]
        return f"SetupReport({', '.join(f'{severity}: {found.count(severity)}' for severity in ORDER)})"

    def __str__(self) -> str:
        unreleased = {finding.name for finding in self.unreleased_findings or ()}
        rows = [(f.severity, f.name + " *" * (f.name in unreleased), f.words) for f in self.findings]
        width = max(len(name) for _, name, _ in rows)
        lines = [f"{severity:7}  {name:{width}}  {words}" for severity, name, words in rows]
        return "\n".join([*lines, FOOTNOTE] if unreleased else lines)
