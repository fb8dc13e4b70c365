"""The words of a privacy report: first those for a data owner, who reads no code, and then those of the code."""

import math
from collections import Counter, defaultdict
from typing import Any

import dp_accounting
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent, TruncatedSubsampledGaussianDpEvent

from dpx.accounting.attacks import owner_of, upper, whose
from dpx.accounting.pages import Section
from dpx.accounting.picture import attack_curve
from dpx.accounting.releases import count_releases
from dpx.accounting.selection import OneOfDpEvent
from dpx.sampling.events import GroupGaussianDpEvent, RandomAllocationDpEvent
from dpx.xla.totals import ETA

_QUESTION = {
    "add_or_remove": "whether or not one {unit} is in the data",
    "zero_out": "whether or not one {unit} contributes to the run",
    "replace_one": "whether one {unit} is in the data, or another {unit} in its place",
}
_ALTERNATIVE = {
    "add_or_remove": "without it",
    "zero_out": "without this contribution",
    "replace_one": "with another {unit} in its place",
}
_NEIGHBORS = {
    "add_or_remove": "Neighboring data sets differ by the presence of one {unit}, and the size of the data set, "
    "counted by {unit}, is treated as public.",
    "zero_out": "Neighboring data sets differ by nulling one {unit}: a null keeps its place among the rows and counts "
    "nowhere, because a deleted row would move all later rows, and with them the rounding of their sums. The size of "
    "the data set, counted by {unit}, is treated as public.",
    "replace_one": "Neighboring data sets differ by exchanging one {unit} for another, and the size of the data set, "
    "counted by {unit}, is treated as public.",
}
_TWO = (
    "Two of a kind, such as one {unit} and a second {unit} of the same person, are protected with twice this epsilon, "
    "and with 1 + e^epsilon times this delta."
)
_OF_PERSONS = (
    "Neighboring data sets differ by nulling all records of one {unit}: nulls keep their places among the rows and "
    "count nowhere. The size of the data set, counted by record, is treated as public.",
    "The run did not check that the records of one {unit} are all that this person owns. If records were left out so "
    "that nobody owns more, who owns which record counts as public.",
    "Whoever owns more records than one {unit} is protected less: with up to twice as many, with twice this epsilon, "
    "and with 1 + e^epsilon times this delta.",
)
_OUTSIDE = (
    "Losses, gradients and clipping statistics that are computed from the data of one {unit} are not private unless "
    "they are noised and billed; checkpoints and logs of the run may hold them.",
    "The guarantee for one {unit} holds only while the keys of the noise and of the sampling are secret, and only if "
    "the batches were drawn as the sampling below says.",
    "What the data of every other {unit} show may be true of one {unit}, too, and is not hidden.",
    "Any other release from the same data, such as another run or a statistic, adds to what is spent for one {unit}: "
    "dpx.compose_runs bills them together.",
    "The time that a step takes and the sizes of the batches are not released: who sees them may learn in which steps "
    "one {unit} takes part, and that is not billed.",
    "The machine that trains on the data of one {unit} is trusted: who reads its memory reads the data.",
    "The noise that protects one {unit} is made by a cipher from the secret key, and counts as random: who can break "
    "the cipher can subtract the noise.",
)
_TUNING = {
    None: "Not billed: if hyper-parameters were chosen by runs on the same data, that cost one {unit} more than is "
    "stated here.",
    "public": "Public data: hyper-parameters were chosen without any run on the private data of one {unit}.",
}


def caveats(drawn: str, relation: str, records: int) -> tuple[str, ...]:
    """What lies outside of the guarantee, one sentence each, and how neighboring data sets differ.

    drawn: what the sampling draws, in words. records: how many of them the unit owns at most.
    """
    unit = owner_of(records, drawn)
    several = (
        f"The sampling and the clipping must have treated one {drawn} as one record: where the pipeline and the "
        f"sampling say example, they mean {drawn}, and the size of the data set counts each {drawn} once.",
    )
    sentences = (*((_NEIGHBORS[relation], _TWO) if records == 1 else _OF_PERSONS), *_OUTSIDE)
    return (*(words.format(unit=unit) for words in sentences), *(several if drawn != "example" else ()))


def tuning_words(unit: str, tuning: str | None) -> str:
    """How hyper-parameters were chosen. tuning: "public" or None, see `dpx.privacy_report`."""
    return _TUNING[tuning].format(unit=unit)


def title_of(report: Any) -> str:
    return f"Privacy report of {report.name}" if report.name else "Privacy report"


def sections_of(report: Any) -> tuple[Section, ...]:
    """All facts of a `PrivacyReport`, in the order in which they are read. Printed bounds are rounded up."""
    unit = report.unit.removeprefix("one ")
    whole = "one record of the data set" if unit == "example" else "with all of its records together"
    whole = whole if report.records == 1 else "all of these records together, whichever they are"
    question = _QUESTION[report.relation].format(unit=unit)
    protected = f"The guarantee is for one {unit}: {whole}."
    meaning = f"From all that the run released, nobody can tell well {question}. Epsilon and delta say how well."
    others = f"every other {unit}" if report.records == 1 else "all other records"
    everyone = f"The guarantee for one {unit} holds against everyone who sees the parameters after every step and the "
    everyone += f"public state, whatever they know about {others}, and however long they compute."
    return (
        Section("What is protected", (protected, meaning)),
        Section("Against whom", (everyone,)),
        Section("How much is spent", _spent(report, unit), _numbers(report, unit)),
        _learnt(report, unit),
        Section("The choice of hyper-parameters", (report.tuning,)),
        Section("Outside of the guarantee", report.caveats),
        Section("In the words of the code", rows=_code_words(report)),
        Section("Mechanism", code=report.mechanism),
    )


def _learnt(report: Any, unit: str) -> Section:
    curve = report.attack_curve
    rows = tuple(
        (f"false-positive rate {100 * wrong:.4g} %", f"true-positive rate of at most {upper(100 * right, 4)} %")
        for wrong, right in curve[:-1:10]
    )
    meaning = f"A false-positive rate is how often an attack says that one {unit} took part where it did not, and a "
    meaning += f"true-positive rate is how often it says so where it did. Guessing about one {unit} makes both equal."
    sentences = (meaning, *report.attacks.sentences(unit))
    return Section("What an attacker can learn", sentences, rows, picture=attack_curve(curve, unit))


def _spent(report: Any, unit: str) -> tuple[str, ...]:
    spent = report.spent
    if math.isinf(spent) and "least delta" in report.arithmetic:
        return (
            f"There is NO guarantee for one {unit} at delta {upper(report.delta, 6)}, because epsilon = inf: the noise "
            "has finitely many values, and that alone costs more than this delta. There is one at a delta of about "
            f"{upper(report.arithmetic['least delta'], 1)}.",
        )
    if math.isinf(spent):
        return (f"There is NO guarantee for one {unit}, because epsilon = inf: a release has no noise, or too little.",)
    factor = upper(math.exp(spent), 3) if spent < 700 else "e^epsilon"
    other = _ALTERNATIVE[report.relation].format(unit=unit)
    return (
        f"The epsilon that counts for one {unit} is {upper(spent, 6)} at delta {upper(report.delta, 6)}, for "
        f"{report.steps} steps. It is an upper bound, the least of those below.",
        f"Of which {upper(report.arithmetic['epsilon'], 2)} of epsilon and {upper(report.arithmetic['delta'], 2)} of "
        f"delta are for the arithmetic of the noise that protects one {unit}, which has finitely many values.",
        f"Rounding can lengthen what one {unit} adds to a sum, by at most {upper(ETA, 3)} of the clip norm (eta)"
        f"{'' if report.records == 1 else ' for each record'}. The noise is larger by this share, so the epsilon for "
        f"one {unit} contains it.",
        *([f"{report.ending}."] if report.ending else []),
        _target(report, unit),
        f"Any result of the run is at most {factor} times as likely with one {unit} as {other}, and the other way "
        f"round, but for a probability of {upper(report.delta, 6)}.",
    )


def _target(report: Any, unit: str) -> str:
    budget, spent = report.budget, report.spent
    if budget is None:
        return f"No epsilon was set as the target for one {unit}."
    numbers = f"epsilon {upper(budget.epsilon, 6)} at delta {upper(budget.delta, 6)}"
    if budget.records != report.records:
        other = "one record" if budget.records == 1 else f"a {owner_of(budget.records)}"
        return f"The target was {numbers} for {other}, not for one {unit}."
    words = f"The target for one {unit} was {numbers}"
    if spent <= budget.epsilon and report.delta <= budget.delta:
        return f"{words}, and the run kept it."
    if spent > budget.epsilon and report.delta >= budget.delta:
        return f"{words}, and the run spent MORE."
    return f"{words}, which epsilons at delta {upper(report.delta, 6)} cannot be compared with."


def _numbers(report: Any, unit: str) -> tuple[tuple[str, str], ...]:
    of_unit = report.budget is not None and report.budget.records == report.records
    target = upper(report.budget.epsilon, 6) if of_unit else "none"
    return (
        *((("run", report.name),) if report.name else ()),
        ("date", report.date),
        ("unit of privacy", f"one {unit}"),
        (f"epsilon of one {unit}, spent", upper(report.spent, 6)),
        (f"epsilon of one {unit}, target", target),
        (f"delta of one {unit}", upper(report.delta, 6)),
        ("steps", str(report.steps) if report.made == report.steps else f"{report.made} made, {report.steps} billed"),
    )


def _code_words(report: Any) -> tuple[tuple[str, str], ...]:
    bills, whom = report.epsilon.items(), whose(report.records)
    return (
        ("relation", report.relation),
        ("sampling", report.sampling),
        *((f"epsilon by {name}{whom}", "does not apply" if bill is None else upper(bill, 6)) for name, bill in bills),
        *((f"release{whom}", event) for event in report.events),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    )


def summary(event: dp_accounting.DpEvent) -> tuple[str, ...]:
    """The releases of an event in words: up to 8 noise multipliers one by one, more of them by their range."""
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
        elif isinstance(release, RandomAllocationDpEvent):
            others.append(f"{count} x {_epoch(release)}")
        elif isinstance(inner, GaussianDpEvent | TruncatedSubsampledGaussianDpEvent | GroupGaussianDpEvent):
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


def _epoch(event: RandomAllocationDpEvent) -> str:
    """The releases of an epoch of random allocation."""
    sigmas = [sigma for sigma, _ in event.noise_multiplier]
    noise = f"{min(sigmas):.6g}" + (f" to {max(sigmas):.6g}" if len(sigmas) > 1 else "")
    released = sum(count for _, count in event.noise_multiplier)
    part = "" if released == event.steps_per_epoch else f"the first {released} steps of "
    return (
        f"{part}an epoch of {event.steps_per_epoch} Gaussians, of which a random one has the example, "
        f"noise multiplier {noise}"
    )


def _joined(event: dp_accounting.DpEvent) -> str:
    return ", ".join(summary(event)) or "nothing"


def _name(gaussian: Any) -> str:
    """The name of a Gaussian release, with its sampling rate."""
    if isinstance(gaussian, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = gaussian.sample_size / gaussian.source_dataset_size
        return f"Gaussian on a sample without replacement of rate {rate:.6g}"
    if isinstance(gaussian, GroupGaussianDpEvent):
        return f"Gaussian on a Poisson sample of rate {gaussian.sampling_probability:.6g} of each record"
    if isinstance(gaussian, TruncatedSubsampledGaussianDpEvent):
        rate, most = gaussian.sampling_probability, gaussian.truncated_batch_size
        return f"Gaussian on a Poisson sample of rate {rate:.6g}, cut at random to {most} rows"
    if isinstance(gaussian, dp_accounting.PoissonSampledDpEvent) and gaussian.sampling_probability < 1:
        return f"Gaussian on a Poisson sample of rate {gaussian.sampling_probability:.6g}"
    return "Gaussian"
