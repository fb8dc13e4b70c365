"""Tables for choosing the batch size, the epochs and the sampling before any run; they read no data."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpx.accounting import checks
from dpx.accounting.budget import calibrate_schedule, least_noise_within
from dpx.accounting.checks import Accountant
from dpx.accounting.cost import event_for_unit, profile_of_run
from dpx.keys.noise import LARGEST_RELEASE
from dpx.reports.rendering import labeled_axes
from dpx.sampling.schemes import FixedOrder, FixedSizeSampling, FullBatch, Sampling, ShuffledEpochs
from dpx.sampling.varying import CyclicPoissonSampling, PoissonSampling, RandomAllocation
from dpx.values import described, explain_misuse, for_whom, require_number, require_whole, rounded_up

_TOLERANCE_OF_TABLE = 1e-3  # relative tolerance of epsilon
_ALIKE = 0.01  # noise multipliers that differ by at most this share are equally good
_DEVIATIONS = (0, 2, 3, 5)  # most_rows minus the batch size, in standard deviations of a Poisson batch's size
_BANDS = 8

WORDS: dict[type[Sampling], str] = {
    PoissonSampling: "a coin for each example",
    RandomAllocation: "every example once an epoch",
    FixedSizeSampling: "a subset; replacing an example",
    CyclicPoissonSampling: "for BandMF; plain noise here",
    ShuffledEpochs: "the usual loader, unamplified",
    FixedOrder: "where you cannot sample",
    FullBatch: "all examples at every step",
}
REFUSED = (
    "PoissonSampling with both most_rows and weights",
    "DiceSGD with most_rows, weights, RandomAllocation, CyclicPoissonSampling or FixedOrder",
    "correlated noise with batches drawn at random, except for BandMF with CyclicPoissonSampling",
    "RandomAllocation for replacing an example",
)
OF_SEVERAL = (
    "several records with other samplings than PoissonSampling without most_rows and FullBatch",
    "several records with DiceSGD or correlated noise",
)


class PlannedSampling(NamedTuple):
    """One row of a `SamplingPlan`.

    sampling: a `Sampling`. steps: int, in all epochs. noise_multiplier: float, the least for the budget. epsilon:
        float, at Poisson sampling's noise multiplier. rows: int, the rows computed for a batch, padding included.
    """

    sampling: Sampling
    steps: int
    noise_multiplier: float
    epsilon: float
    rows: int

    @property
    def noise_of_run(self) -> float:
        """The noise in the mean gradient over the whole run, in clip norms."""
        return self.noise_multiplier / self.sampling.divisor / math.sqrt(self.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingPlan:
    """The noise that a budget needs with each sampling; `str` gives a table, a recommendation and what dpx refuses.

    runs: one for each sampling, Poisson first. epochs: float. epsilon, delta: floats, the budget of each single run.
    records: int, the most examples that one person owns.
    """

    epochs: float
    epsilon: float
    delta: float
    runs: tuple[PlannedSampling, ...]
    records: int = 1

    @property
    def recommended(self) -> PlannedSampling:
        """The run with the least noise whose neighbors differ by a null; Poisson sampling if it is nearly as good."""
        first = self.runs[0]
        least = min((run for run in self.runs if run.sampling.relation == "zero_out"), key=lambda run: run.noise_of_run)
        return first if least.noise_of_run > (1 - _ALIKE) * first.noise_of_run else least

    @property
    def _budget(self) -> str:
        sampling = self.runs[0].sampling
        sizes = f"batch size {sampling.divisor:g} of {sampling.examples} for {self.epochs:g} epochs"
        return f"{sizes}, epsilon {self.epsilon:g} at delta {rounded_up(self.delta, 6)}{for_whom(self.records)}"

    def __repr__(self) -> str:
        best = self.recommended.sampling
        return f"SamplingPlan({self._budget}; {len(self.runs)} samplings, recommended: {best}; print it for the table)"

    def __str__(self) -> str:
        head = f"Samplings at {self._budget}:"
        noise = f"epsilon at {_round_up_noise(self.runs[0].noise_multiplier):.4f}"
        titles = f"{'sampling':36} {'noise multiplier':>16} {noise:>17} {'rows':>6}"
        return "\n".join([head, titles, *map(_line_of_run, self.runs), "", *self.sentences()])

    def sentences(self) -> list[str]:
        """States the recommendation, what fixed shapes cost, and which combinations dpx refuses."""
        best, first = self.recommended, self.runs[0]
        words = f"Take {_name_of_sampling(best)}: "
        if self.records > 1:
            words += "the cost of several records is known for no other sampling of this batch size."
        elif best is first:
            words += "no other sampling needs noticeably less noise."
        else:
            less = 1 - best.noise_of_run / first.noise_of_run
            words += f"the run has {less:.1%} less noise than with {_name_of_sampling(first)}."
        found = [words]
        cut = [run for run in self.runs if run.sampling.truncates]
        if cut:
            more = cut[-1].noise_multiplier / first.noise_multiplier - 1
            words = f"Batches of one shape, {cut[-1].rows} rows: {_name_of_sampling(cut[-1])}, "
            found.append(f"{words}for {max(more, 0):.1%} more noise.")
        if self.records == 1:
            found.append("Where you cannot sample: FixedOrder, with noise that is correlated over the steps.")
        refused = REFUSED if self.records == 1 else (*OF_SEVERAL, *REFUSED)
        return [*found, "Refused, because the cost is not known:", *(f"  {words}" for words in refused)]


def _round_up_noise(noise: float) -> float:
    """Rounds up to the four printed decimals."""
    return math.ceil(1e4 * noise) / 1e4


def _name_of_sampling(run: PlannedSampling) -> str:
    """Names the sampling, with what distinguishes it from others of its class."""
    words = type(run.sampling).__name__
    if run.sampling.truncates:
        return f"{words}(most_rows={run.sampling.most_rows})"
    if isinstance(run.sampling, RandomAllocation):
        return f"{words}(steps_per_epoch={run.sampling.steps_per_epoch})"
    if isinstance(run.sampling, CyclicPoissonSampling):
        return f"{words}(bands={run.sampling.bands})"
    return words


def _line_of_run(run: PlannedSampling) -> str:
    words = "" if run.sampling.truncates else WORDS[type(run.sampling)]
    numbers = f"{_round_up_noise(run.noise_multiplier):16.4f} {rounded_up(run.epsilon, 4):>17} {run.rows:6}"
    return f"{_name_of_sampling(run):36} {numbers}  {words}".rstrip()


def samplings_to_compare(examples: int, batch_size: int) -> tuple[Sampling, ...]:
    """The samplings of the table, Poisson sampling first."""
    sizes: dict[str, Any] = {"examples": examples, "batch_size": batch_size}
    if batch_size == examples:
        return (FullBatch(examples=examples),)
    rows = (8 * math.ceil((batch_size + count * math.sqrt(batch_size)) / 8) for count in _DEVIATIONS)
    cut = [PoissonSampling(**sizes, most_rows=most) for most in dict.fromkeys(min(most, examples) for most in rows)]
    bands = min(_BANDS, examples // batch_size)
    cyclic = [CyclicPoissonSampling(**sizes, bands=bands)] if bands > 1 else []
    allocated = RandomAllocation(examples=examples, steps_per_epoch=round(examples / batch_size))
    others = (allocated, *cut, FixedSizeSampling(**sizes), *cyclic, ShuffledEpochs(**sizes), FixedOrder(**sizes))
    return (PoissonSampling(**sizes), *others)


def plan_samplings(
    *,
    examples: int,
    batch_size: int,
    epochs: float,
    epsilon: float,
    delta: float,
    accountant: Accountant = "tightest",
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
) -> SamplingPlan:
    """Computes, for each sampling, the least noise for a budget, the epsilon at equal noise, and the rows of a batch.

        print(dpx.reports.plan_samplings(examples=60_000, batch_size=256, epochs=10, epsilon=2.0, delta=1e-5))

    examples: int, size of the data set. batch_size: int, the expected size, in [1, examples]. epochs: float, positive.
    epsilon, delta: the budget. accountant: as for `dpx.epsilon`.
    records: int, at least 1, the most examples that one person owns, as for `dpx.Budget`. Above 1, the table
        has only Poisson sampling, because the cost of the others is not known.
    numbers: int, the most numbers that a step releases, as for `dpx.Budget`.

    It reads no data. The noise is independent, with the same multiplier at every step. Samplings that need a whole
    number of steps in an epoch get slightly different sizes. Raises ValueError for arguments outside these ranges.
    """
    require_whole("examples", examples)
    if require_whole("batch_size", batch_size) > examples:
        raise ValueError(f"batch_size must be in [1, {examples}], got {batch_size}")
    require_number("epochs", epochs, minimum=0, exclusive=True)
    budget = _checked_budget(epsilon, delta, accountant, records, numbers)
    choices = samplings_to_compare(examples, batch_size)
    runs: list[PlannedSampling] = []
    for sampling in choices if records == 1 else choices[:1]:
        steps = sampling.steps(epochs=epochs)
        cost = _epsilon_of_noise(sampling, steps, **budget)
        start = runs[0].noise_multiplier if runs else math.sqrt(records)
        noise = least_noise_within(cost, budget["epsilon"], _TOLERANCE_OF_TABLE if runs else _TOLERANCE, start)
        runs.append(PlannedSampling(sampling, steps, noise, cost(start if runs else noise), sampling.usual_rows))
    return SamplingPlan(
        epochs=epochs, epsilon=budget["epsilon"], delta=budget["delta"], runs=tuple(runs), records=records
    )


def _checked_budget(epsilon: Any, delta: Any, accountant: Any, records: Any, numbers: Any) -> dict[str, Any]:
    """Checks and converts the arguments that both plans share. Raises ValueError for one outside its range."""
    checks.require_accountant(accountant)
    return {
        "epsilon": checks.require_positive_epsilon(epsilon),
        "delta": checks.require_delta(delta),
        "accountant": accountant,
        "records": require_whole("records", records),
        "numbers": checks.numbers_per_release(numbers),
    }


def _epsilon_of_noise(
    sampling: Sampling, steps: int, *, epsilon: float, delta: float, accountant: Accountant, records: int, numbers: int
) -> Callable[[float], float]:
    """Returns the function noise multiplier -> epsilon of this many steps, for a person with `records` records."""
    relation = checks.require_relation(sampling.relation)

    def spent(noise: float) -> float:
        event = event_for_unit(sampling.event(np.full(steps, noise)), sampling, relation, records)
        return profile_of_run(event, relation=relation, accountant=accountant, numbers=numbers).epsilon(delta)

    return spent


_SMALLEST_BATCH = 256  # default batch sizes are the powers of two from this to half of the examples, and all of them
_HARDLY = 1.25  # a noise of the run of at most this many times the least is good enough
_TOLERANCE = 1e-4  # relative tolerance of epsilon for several records, and for Poisson sampling in the table
_MOST_LABELS = 8  # batch sizes that label a plot; more would overlap


class PlannedRun(NamedTuple):
    """One row of a `NoisePlan`. Noise is its standard deviation on one coordinate, divided by the clip norm.

    batch_size: int, the expected one. epochs: float, as requested. steps: int, in these epochs. noise_multiplier:
        float, the least for the budget. step_noise, epoch_noise, noise_of_run: floats, the noise in the private
        gradient of one step, in its mean over the steps of one epoch, and in its mean over all steps.
    """

    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    step_noise: float
    epoch_noise: float
    noise_of_run: float


@dataclass(frozen=True, kw_only=True, repr=False)
class NoisePlan:
    """The noise that a budget needs, for several batch sizes and epochs; `str` shows it, and a table of samplings.

    runs: sorted by epochs, then by batch size. examples: int. epsilon, delta: floats, the budget of each single run.
    accountant: the accountant that found the noise. records: int, the most examples that one person owns.
    numbers: int, the most numbers in one release.
    """

    examples: int
    epsilon: float
    delta: float
    runs: tuple[PlannedRun, ...]
    accountant: Accountant = "tightest"
    records: int = 1
    numbers: int = LARGEST_RELEASE

    @property
    def suggested(self) -> PlannedRun:
        """The smallest batch, at the first number of epochs, whose run has at most 1.25 times the least noise.

        The whole data set is suggested only if no other size was requested.
        """
        first = [run for run in self.runs if run.epochs == self.runs[0].epochs]
        runs = [run for run in first if run.batch_size < self.examples] or first
        least = min(run.noise_of_run for run in runs)
        return min((run for run in runs if run.noise_of_run <= _HARDLY * least), key=lambda run: run.batch_size)

    @functools.cached_property
    def sampling_plan(self) -> SamplingPlan:
        """Compares the samplings at the suggested batch size; takes a second or two."""
        batch_size, epochs = self.suggested[:2]
        budget: Any = {"epsilon": self.epsilon, "delta": self.delta, "accountant": self.accountant}
        sizes: Any = {"examples": self.examples, "batch_size": batch_size, "epochs": epochs}
        return plan_samplings(**sizes, **budget, records=self.records, numbers=self.numbers)

    @property
    def _budget(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {rounded_up(self.delta, 6)}{for_whom(self.records)}"

    def __repr__(self) -> str:
        run = self.suggested
        return (
            f"NoisePlan({self._budget}, {self.examples} examples, {len(self.runs)} runs; suggested: batch size "
            f"{run.batch_size}, {run.steps} steps, noise multiplier {_round_up_noise(run.noise_multiplier):.4f}; "
            "print it for the table)"
        )

    def __str__(self) -> str:
        head = f"{self._budget}, {self.examples} examples, Poisson sampling\n"
        head += f"{'noise of the mean gradient, in clip norms':>80}"
        rows = [
            f"{run.batch_size:10} {run.epochs:8.4g} {run.steps:7} {_round_up_noise(run.noise_multiplier):16.4f} "
            f"{run.step_noise:11.3e} {run.epoch_noise:11.3e} {run.noise_of_run:11.3e}"
            for run in self.runs
        ]
        titles = f"{'batch size':>10} {'epochs':>8} {'steps':>7} {'noise multiplier':>16} "
        titles += f"{'of a step':>11} {'of an epoch':>11} {'of the run':>11}"
        return "\n".join([head, titles, *rows, "", str(self.sampling_plan)])

    def plot(self, *, axes: Any = None) -> Any:
        """Plots the noise of the run against the batch size, one line per number of epochs, on matplotlib `axes`.

        Makes new axes by default, and returns the axes. Omits axis labels that would overlap.
        """
        axes = labeled_axes(axes, "expected batch size", "noise of the run, in clip norms")
        groups: dict[float, list[PlannedRun]] = {}
        for run in self.runs:
            groups.setdefault(run.epochs, []).append(run)
        for epochs, runs in groups.items():
            points = [run.batch_size for run in runs], [run.noise_of_run for run in runs]
            axes.semilogx(*points, marker=".", label=f"{epochs:g} epochs")
        sizes = sorted({run.batch_size for run in self.runs}, reverse=True)
        ticks = sizes[:1]
        for size in sizes:
            if math.log(ticks[-1] / size) > math.log(sizes[0] / sizes[-1]) / _MOST_LABELS:
                ticks.append(size)
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.minorticks_off()
        axes.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
        axes.update_datalim([(sizes[0], 0)])
        axes.autoscale_view()
        axes.set_title(f"{self._budget}, {self.examples:,} examples")
        axes.legend()
        return axes


@explain_misuse
def plan_noise(
    *,
    examples: int,
    epsilon: float,
    delta: float = None,  # pyrefly: ignore[bad-function-definition]  # as for `dpx.Budget`
    epochs: float | Sequence[float] = (10, 40),
    batch_sizes: int | Sequence[int] | None = None,
    accountant: Accountant = "tightest",
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
) -> NoisePlan:
    """Computes the least noise that a budget needs for each batch size and number of epochs.

        >>> plan = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=10, batch_sizes=[256, 1024, 4096])
        >>> plan.suggested.batch_size  # and print(plan) shows a table of all of them
        1024

    examples: int, size of the data set. epsilon, delta: the budget. epochs: one number or several, positive.
    batch_sizes: one int or several, in [1, examples]; by default powers of two from 256 to examples / 2, and examples.
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    records: int, the most examples that one person owns, and numbers: int, the most numbers that a step releases, as
        for `dpx.Budget`.

    Every step is a Poisson-sampled Gaussian release, or a plain Gaussian one if the batch is the whole data set.

    As batches grow, the noise of the run falls, and so does the number of steps. A good choice is the smallest batch
    size beyond which the noise hardly falls. For this size, the printed plan also shows the noise that each sampling
    needs, and recommends a sampling; `dpx.reports.plan_samplings` does so for any size. The plan reads no data, so it
    costs no privacy.
    Raises ValueError for arguments outside these ranges.
    """
    examples = require_whole("examples", examples)
    budget = _checked_budget(epsilon, delta, accountant, records, numbers)
    each = epochs if isinstance(epochs, Iterable) else (epochs,)
    many = tuple(require_number("epochs", number, minimum=0, exclusive=True) for number in each)
    powers = [2**power for power in range(_SMALLEST_BATCH.bit_length() - 1, examples.bit_length())]
    usual = (*(size for size in powers if 2 * size <= examples), examples)
    given = usual if batch_sizes is None else batch_sizes
    sizes = tuple(given) if isinstance(given, Iterable) else (given,)
    if not many:
        raise ValueError(f"epochs must be at least one number, got {described(epochs)}")
    if not sizes or not all(require_whole("batch_size", size) <= examples for size in sizes):
        plain = isinstance(batch_sizes, list | tuple | int) and all(type(size) is int for size in sizes)  # no keys
        got = ", ".join(map(described, sizes[:3])) or "none" if plain else described(batch_sizes)
        raise ValueError(f"batch_sizes must be in [1, {examples}], because there are {examples} examples; got {got}")

    def run(epochs: float, size: int) -> PlannedRun:
        steps = PoissonSampling(examples=examples, batch_size=size).steps(epochs=epochs)  # as in a run
        noise = _least_noise(examples, size, steps, budget)
        step_noise = noise / size
        epoch_noise, noise_of_run = step_noise / math.sqrt(examples / size), step_noise / math.sqrt(steps)
        return PlannedRun(size, epochs, steps, noise, step_noise, epoch_noise, noise_of_run)

    return NoisePlan(examples=examples, runs=tuple(run(number, size) for number in many for size in sizes), **budget)


def _least_noise(examples: int, size: int, steps: int, budget: dict[str, Any]) -> float:
    """Returns the least noise multiplier for this many Gaussians on Poisson samples, or on all examples."""
    epsilon, records = budget["epsilon"], budget["records"]
    if records == 1:
        of_one = {name: value for name, value in budget.items() if name != "records"}
        return calibrate_schedule([1.0], sampling_rate=size / examples, counts=[steps], **of_one).scale
    sizes: Any = {"examples": examples}
    sampling = FullBatch(**sizes) if size == examples else PoissonSampling(**sizes, batch_size=size)
    return least_noise_within(_epsilon_of_noise(sampling, steps, **budget), epsilon, _TOLERANCE, 1.0)
