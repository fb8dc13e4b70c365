"""The releases of an event in words, for the privacy report."""

from collections import Counter, defaultdict
from typing import Any

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpx.accounting.releases import count_releases
from dpx.accounting.selection import OneOfDpEvent


def summary(event: dp_accounting.DpEvent) -> tuple[str, ...]:
    """The releases in words: up to 8 noise multipliers one by one, more of them by their range."""
    releases = count_releases(event)
    if not releases.readable:
        return (str(event),)
    gaussians: dict[str, Counter[float]] = defaultdict(Counter)  # by name, how often each noise multiplier was used
    others = []
    for release, count in releases.counts.items():
        inner: Any = getattr(release, "event", release)
        if isinstance(release, RepeatAndSelectDpEvent):
            others.append(f"{count} x the best of {release.mean:g} expected trials, each: {_joined(inner)}")
        elif isinstance(release, OneOfDpEvent):
            distinct = dict.fromkeys(_joined(alternative) for alternative in release.events)
            others.append(f"{count} x one of ({' | '.join(distinct)})")
        elif isinstance(inner, dp_accounting.GaussianDpEvent):
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


def _joined(event: dp_accounting.DpEvent) -> str:
    return ", ".join(summary(event)) or "nothing"


def _name(gaussian: Any) -> str:
    """The name of a Gaussian release, with its sampling rate."""
    if isinstance(gaussian, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = gaussian.sample_size / gaussian.source_dataset_size
        return f"Gaussian on a sample without replacement of rate {rate:.6g}"
    if isinstance(gaussian, dp_accounting.PoissonSampledDpEvent) and gaussian.sampling_probability < 1:
        return f"Gaussian on a Poisson sample of rate {gaussian.sampling_probability:.6g}"
    return "Gaussian"
