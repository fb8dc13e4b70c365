"""A table to choose the sampling from, before any run: the noise that a budget needs, and the rows of the batches."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpx.accounting import checks
from dpx.accounting.attacks import upper, whose
from dpx.accounting.bill import of_records
from dpx.accounting.calibration import least_within
from dpx.accounting.checks import Accountant
from dpx.accounting.events import billed
from dpx.keys.counts import LARGEST_RELEASE
from dpx.sampling.allocation import RandomAllocation
from dpx.sampling.base import Sampling
from dpx.sampling.cyclic import CyclicPoissonSampling
from dpx.sampling.poisson import PoissonSampling
from dpx.sampling.schemes import FixedOrder, FixedSizeSampling, FullBatch, ShuffledEpochs
from dpx.validation import require_number, require_whole

_TOLERANCE = 1e-3  # relative, of epsilon
_ALIKE = 0.01  # a share of the noise that decides nothing
_DEVIATIONS = (0, 2, 3, 5)  # most_rows above the batch size, in standard deviations of a Poisson batch's size
_BANDS = 8

WORDS: dict[type[Sampling], str] = {
    PoissonSampling: "a coin for each example",
    RandomAllocation: "every example once an epoch",
    FixedSizeSampling: "a random subset; replacing an example",
    CyclicPoissonSampling: "for BandMF; here with plain noise",
    ShuffledEpochs: "the usual loader, no amplification",
    FixedOrder: "where one cannot sample",
    FullBatch: "all examples at every step",
}
REFUSED = (
    "PoissonSampling with both most_rows and weights",
    "DiceSGD with most_rows, weights, RandomAllocation, CyclicPoissonSampling or FixedOrder",
    "correlated noise with batches that are drawn by chance; CyclicPoissonSampling is for banded ones (BandMF)",
    "RandomAllocation for replacing an example",
)
OF_SEVERAL = (
    "several records with other samplings than PoissonSampling without most_rows and FullBatch",
    "several records with DiceSGD or correlated noise",
)


class PlannedSampling(NamedTuple):
    """One row of the plan.

    sampling: the record. steps: int, of the epochs. noise_multiplier: float, the least for the budget. epsilon: float,
    with the noise multiplier of Poisson sampling. rows: int, the rows of a batch that are computed, padding included.
    """

    sampling: Sampling
    steps: int
    noise_multiplier: float
    epsilon: float
    rows: int

    @property
    def run_noise(self) -> float:
        """The noise in the mean gradient of the whole run, in clip norms."""
        return self.noise_multiplier / self.sampling.divisor / math.sqrt(self.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingPlan:
    """What a budget needs with each sampling; `str` is a table, a recommendation, and what has no bill.

    runs: Poisson sampling first. epochs: float. epsilon, delta: floats, the budget of each single run.
    records: int, how many of the examples the person owns at most whom the budget is for.
    """

    epochs: float
    epsilon: float
    delta: float
    runs: tuple[PlannedSampling, ...]
    records: int = 1

    @property
    def recommended(self) -> PlannedSampling:
        """The least noise of the run among neighbors that differ by a null; Poisson sampling if it is almost least."""
        first = self.runs[0]
        least = min((run for run in self.runs if run.sampling.relation == "zero_out"), key=lambda run: run.run_noise)
        return first if least.run_noise > (1 - _ALIKE) * first.run_noise else least

    @property
    def _budget(self) -> str:
        sampling = self.runs[0].sampling
        sizes = f"batch size {sampling.divisor:g} of {sampling.examples} for {self.epochs:g} epochs"
        return f"{sizes}, epsilon {self.epsilon:g} at delta {upper(self.delta, 6)}{whose(self.records)}"

    def __repr__(self) -> str:
        best = self.recommended.sampling
        return f"SamplingPlan({self._budget}; {len(self.runs)} samplings, recommended: {best}; print it for the table)"

    def __str__(self) -> str:
        head = f"Samplings at {self._budget}:"
        noise = f"epsilon at {_up(self.runs[0].noise_multiplier):.4f}"
        titles = f"{'sampling':36} {'noise multiplier':>16} {noise:>17} {'rows':>6}"
        return "\n".join([head, titles, *map(_line, self.runs), "", *self.sentences()])

    def sentences(self) -> list[str]:
        """The recommendation, what fixed shapes cost, and the combinations that are refused."""
        best, first = self.recommended, self.runs[0]
        words = f"Take {_name(best)}: "
        if self.records > 1:
            words += "no other one of this batch size has a bill for several records."
        elif best is first:
            words += "no other sampling needs noticeably less noise."
        else:
            words += f"the run has {1 - best.run_noise / first.run_noise:.1%} less noise than with {_name(first)}."
        found = [words]
        cut = [run for run in self.runs if getattr(run.sampling, "truncates", False)]
        if cut:
            more = cut[-1].noise_multiplier / first.noise_multiplier - 1
            words = f"Batches of one shape, {cut[-1].rows} rows: {_name(cut[-1])}, for {max(more, 0):.1%} more noise."
            found.append(words)
        if self.records == 1:
            found.append("Where one cannot sample: FixedOrder, with noise that is correlated over the steps.")
        refused = REFUSED if self.records == 1 else (*OF_SEVERAL, *REFUSED)
        return [*found, "Refused, because no bill is known:", *(f"  {words}" for words in refused)]


def _up(noise: float) -> float:
    return math.ceil(1e4 * noise) / 1e4


def _name(run: PlannedSampling) -> str:
    """The record and what tells it from others of its class."""
    words = type(run.sampling).__name__
    if getattr(run.sampling, "truncates", False):
        return f"{words}(most_rows={run.sampling.most_rows})"
    if isinstance(run.sampling, RandomAllocation):
        return f"{words}(steps_per_epoch={run.sampling.steps_per_epoch})"
    if isinstance(run.sampling, CyclicPoissonSampling):
        return f"{words}(bands={run.sampling.bands})"
    return words


def _line(run: PlannedSampling) -> str:
    words = "" if getattr(run.sampling, "truncates", False) else WORDS[type(run.sampling)]
    numbers = f"{_up(run.noise_multiplier):16.4f} {upper(run.epsilon, 4):>17} {run.rows:6}"
    return f"{_name(run):36} {numbers}  {words}".rstrip()


def samplings(examples: int, batch_size: int) -> tuple[Sampling, ...]:
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
    """Which sampling: the least noise for a budget, the epsilon at equal noise, and the rows of a batch, for each.

        print(dpx.accounting.plan_samplings(examples=60_000, batch_size=256, epochs=10, epsilon=2.0, delta=1e-5))

    examples: int, of the data set. batch_size: int, expected, in [1, examples]. epochs: float, positive.
    epsilon, delta: the budget. accountant: as for `dpx.epsilon`.
    records: int, at least 1, how many of the examples one person owns at most whom the budget is for, as for
        `dpx.Budget`. Above 1, Poisson sampling is alone in the table: it says that no other one has a bill.
    numbers: int, how many numbers a step releases at most, as for `dpx.Budget`.

    It reads no data. Noise multipliers are for independent noise of one size. Sizes differ a little where a sampling
    has a whole number of steps in an epoch, and so do the steps. Raises ValueError for arguments outside these ranges.
    """
    require_whole("examples", examples)
    if require_whole("batch_size", batch_size) > examples:
        raise ValueError(f"batch_size must be in [1, {examples}], got {batch_size}")
    require_number("epochs", epochs, minimum=0, exclusive=True)
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    checks.require_accountant(accountant)
    checks.require_numbers(numbers)
    choices = samplings(examples, batch_size)
    if require_whole("records", records) > 1:
        choices = choices[:1]
    runs: list[PlannedSampling] = []
    for sampling in choices:
        steps, relation = sampling.steps(epochs=epochs), checks.require_relation(sampling.relation)

        def bill(noise: float, sampling: Any = sampling, steps: int = steps, relation: Any = relation) -> float:
            event = of_records(sampling.event(np.full(steps, noise)), sampling, relation, records)
            return billed(event, relation=relation, accountant=accountant, numbers=numbers).epsilon(delta)

        start = runs[0].noise_multiplier if runs else math.sqrt(records)
        noise = least_within(bill, epsilon, _TOLERANCE, start)
        runs.append(PlannedSampling(sampling, steps, noise, bill(start if runs else noise), sampling.usual_rows))
    return SamplingPlan(epochs=epochs, epsilon=epsilon, delta=delta, runs=tuple(runs), records=records)
