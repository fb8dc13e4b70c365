"""The privacy report to publish beside a private model: the bill, all its assumptions, and its limits."""

import importlib.metadata
import json
import math
import platform
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting

from dpx.accounting import checks
from dpx.accounting.bill import billed_steps, event_of, require_billable
from dpx.accounting.events import event_epsilon, explanation
from dpx.accounting.releases import count_releases

_CAVEATS = (
    "Holds if batches were drawn as `sampling` says, and while the keys of the noise and of the sampling are secret.",
    "Gaussian noise is drawn in float32: its tail ends near 5.4 standard deviations, so a delta below about 1e-7 is "
    "not meaningful, and attacks on floating-point noise are not excluded.",
    "Choosing hyper-parameters by runs on the same data is not billed.",
    "Per-{unit} losses, gradients and clipping statistics of training data are not private unless noised and billed.",
)
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
    events: the releases, one sentence each. versions: by package. caveats: one sentence each.
    """

    mechanism: str
    steps: int
    unit: str
    relation: str
    sampling: str
    delta: float
    epsilon: dict[str, float | None]
    events: tuple[str, ...]
    versions: dict[str, str]
    caveats: tuple[str, ...]

    def to_json(self) -> str:
        """The report as valid JSON; an infinite epsilon is the string "inf"."""

        def finite(value: float | None) -> float | str | None:
            return "inf" if value is not None and math.isinf(value) else value

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["epsilon"] = {name: finite(value) for name, value in self.epsilon.items()}
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
    unit: str = "example",
) -> PrivacyReport:
    """The report of a mechanism after some steps: epsilon by "pld" and by "rdp", and all assumptions.

    steps_or_state: a number of steps (int, at least 0), or an optimizer state, whose billed steps are read.
    delta: in (0, 1), best far below 1 divided by the number of examples. A larger one warns.
    unit: what the sampling draws and epsilon protects, in words: "user" if it draws users (`dpx.UserData`).

    Raises ValueError as `dpx.epsilon` does, and where neither accountant can bill the event.
    """
    require_billable(mechanism)
    checks.warn_of_large_delta(delta, mechanism.sampling)
    steps = billed_steps(steps_or_state)
    event, relation = event_of(mechanism, steps_or_state, None)
    bills: dict[str, float | None] = {"pld": None, "rdp": None}
    refusals = []
    for accountant in ("pld", "rdp"):
        try:
            bills[accountant] = event_epsilon(event, delta=delta, accountant=accountant, relation=relation)
        except ValueError as error:
            refusals.append(error)
    if len(refusals) == len(bills):
        raise refusals[0]
    subject = unit.removeprefix("one ")
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
        events=_summary(event),
        versions=_versions(),
        caveats=caveats,
    )


def _summary(event: dp_accounting.DpEvent) -> tuple[str, ...]:
    """The releases in words: up to 8 noise multipliers one by one, more of them by their range."""
    releases = count_releases(event)
    if not releases.readable:
        return (str(event),)
    gaussians: dict[str, Counter[float]] = defaultdict(Counter)  # by name, how often each noise multiplier was used
    others = []
    for release, count in releases.counts.items():
        inner: Any = getattr(release, "event", release)
        if isinstance(inner, dp_accounting.GaussianDpEvent):
            gaussians[_name(release)][inner.noise_multiplier] += count
        elif not isinstance(release, dp_accounting.NonPrivateDpEvent):
            others.append(f"{count} x {release}")
    lines = []
    for name, sigmas in sorted(gaussians.items()):
        if len(sigmas) <= 8:
            lines += [f"{count} x {name}, noise multiplier {sigma:.6g}" for sigma, count in sorted(sigmas.items())]
        else:
            lines.append(
                f"{sum(sigmas.values())} x {name}, {len(sigmas)} distinct noise multipliers "
                f"from {min(sigmas):.6g} to {max(sigmas):.6g}"
            )
    return (*lines, *others) if releases.private else (*lines, *others, "a release without noise")


def _name(gaussian: Any) -> str:
    """The name of a Gaussian release, with its sampling rate."""
    if isinstance(gaussian, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = gaussian.sample_size / gaussian.source_dataset_size
        return f"Gaussian on a sample without replacement of rate {rate:.6g}"
    if isinstance(gaussian, dp_accounting.PoissonSampledDpEvent) and gaussian.sampling_probability < 1:
        return f"Gaussian on a Poisson sample of rate {gaussian.sampling_probability:.6g}"
    return "Gaussian"


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
