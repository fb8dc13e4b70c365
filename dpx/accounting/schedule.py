"""Epsilon and delta of a schedule of noise multipliers, as intervals that hold the truth."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.accounting import checks, composition, renyi
from dpx.accounting.buckets import Buckets, bucketed
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.losses import SampledGaussian, StepLoss
from dpx.accounting.targets import DeltaAt, EpsilonAt, Target

SMALLEST_NOISE = 1e-6  # a smaller noise multiplier is billed as none: its epsilon would be beyond 1e11


@dataclass(frozen=True)
class Interval:
    """lower <= truth <= upper. `float()` of it is the upper end: what may be reported as spent."""

    lower: float
    upper: float

    def __float__(self) -> float:
        return self.upper


def schedule_epsilon(
    noise_multipliers: Any,
    sampling_rate: Any,
    *,
    delta: float,
    counts: Any = None,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
    buckets: int = 64,
    grid: float | None = None,
) -> Interval:
    """Epsilon at `delta` of T Gaussian releases on Poisson samples, whose noise changes from step to step.

    noise_multipliers: (T,), noise standard deviation on the sum over the clip norm; a 0 bills infinity.
    sampling_rate: in (0, 1], one or (T,); 1 is no amplification.
    counts: (T,), how often each step is repeated; default once.
    accountant: "pld" composes privacy loss distributions; "rdp" Renyi divergences at dp-accounting's orders, of every
        distinct step (its interval has no lower end: 0).
    buckets: distinct steps in the composition; more of them narrow the interval like 1/buckets. With no more
        distinct steps than buckets only the grid's error is left.
    grid: spacing of privacy losses; default fine enough for four digits. The upper end is one at any grid.

    Guarantee: the upper end is an upper bound, the lower end a lower bound, to floating point (relative 1e-6).
    """
    target = EpsilonAt(checks.delta(delta))
    return _interval(
        target, noise_multipliers, sampling_rate, counts, accountant, relation, checks.buckets(buckets), grid
    )


def schedule_delta(
    noise_multipliers: Any,
    sampling_rate: Any,
    *,
    epsilon: float,
    counts: Any = None,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
    buckets: int = 64,
    grid: float | None = None,
) -> Interval:
    """delta at `epsilon`; see `schedule_epsilon`."""
    target = DeltaAt(checks.epsilon(epsilon))
    return _interval(
        target, noise_multipliers, sampling_rate, counts, accountant, relation, checks.buckets(buckets), grid
    )


def _interval(target, noise_multipliers, sampling_rate, counts, accountant, relation, buckets, grid) -> Interval:
    sigmas, rates, repeats = checks.schedule(noise_multipliers, sampling_rate, counts)
    relation = checks.relation(relation)
    if grid is not None and not 0 < grid < math.inf:
        raise ValueError(f"grid must be positive and finite, got {grid}")
    steps = Buckets(sigmas, sigmas, rates, rates, repeats)
    if checks.accountant(accountant) == "rdp":
        return Interval(0.0, float(upper_end(steps, target, accountant="rdp", relation=relation)))
    steps = merged(sigmas, rates, repeats, buckets)
    upper = float(upper_end(steps, target, relation=relation, grid=grid))
    return Interval(min(upper, lower_end(steps, target, relation=relation, grid=grid)), upper)


def merged(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, buckets: int) -> Buckets:
    """Buckets of the steps; the unsampled ones are, exactly, one Gaussian of precision sum 1 / sigma^2."""
    used = counts > 0
    sigmas, rates, counts = sigmas[used], rates[used], counts[used]
    plain = (rates == 1) & (sigmas > 0)
    if plain.sum() > 1 or np.any(counts[plain] > 1):
        largest = sigmas[plain].min()
        one = largest / math.sqrt(np.sum(counts[plain] * (largest / sigmas[plain]) ** 2))
        sigmas, rates = np.append(sigmas[~plain], one), np.append(rates[~plain], 1.0)
        counts = np.append(counts[~plain], 1)
    return bucketed(sigmas, rates, counts, buckets)


def upper_end(
    steps: Buckets,
    target: Target,
    *,
    accountant: Accountant = "pld",
    relation: Relation = "add_or_remove",
    grid: float | None = None,
) -> Any:
    """An upper bound of what `target` asks for: noise rounded down, rates up."""
    sigmas, rates, counts = steps.smallest_noise, steps.largest_rate, steps.counts
    if np.any(sigmas[counts > 0] < SMALLEST_NOISE):
        return target.unbounded
    if accountant == "pld" and np.all(rates == 1):
        return target.gaussian(_mu(sigmas, counts, relation))
    rdp = renyi.bill(sigmas, rates, counts, relation)
    return target.renyi(rdp) if accountant == "rdp" else composed(pairs(steps, relation), rdp, target, grid=grid)


def lower_end(
    steps: Buckets, target: Target, *, relation: Relation = "add_or_remove", grid: float | None = None
) -> float:
    """A lower bound of what `target` asks for: noise rounded up, rates down. 0 where epsilon is beyond all measure."""
    sigmas, rates, counts = steps.largest_noise, steps.smallest_rate, steps.counts
    if np.any(sigmas[counts > 0] == 0):
        return target.unbounded
    if np.all(rates == 1):
        return target.gaussian(_mu(sigmas, counts, relation))
    if np.any(sigmas[counts > 0] < SMALLEST_NOISE):
        return 0.0
    rdp = renyi.bill(sigmas, rates, counts, relation)
    plan = _plan(int(counts.sum()), rdp, target, grid)
    if plan is None:
        return 0.0
    rows = zip(sigmas.tolist(), rates.tolist(), counts.tolist(), strict=True)
    losses = [(SampledGaussian(s, q, relation), n) for s, q, n in rows]
    return max(target.read(loss) for loss in composition.compose_dominated(losses, plan))


def composed(steps: composition.Steps, rdp: np.ndarray, target: Target, *, grid: float | None = None) -> Any:
    """An upper bound by composing privacy losses; rdp (orders,): the same steps' bill, which is never exceeded."""
    bill = target.renyi(rdp)
    plan = _plan(sum(count for _, count in steps), rdp, target, grid)
    if plan is None:
        return bill
    return np.minimum(bill, np.max([target.read(loss) for loss in composition.compose(steps, plan)], axis=0))


def pairs(steps: Buckets, relation: Relation) -> list[tuple[StepLoss, int]]:
    """The steps rounded up, for `composed`."""
    rows = zip(steps.smallest_noise.tolist(), steps.largest_rate.tolist(), steps.counts.tolist(), strict=True)
    return [(SampledGaussian(s, q, relation), n) for s, q, n in rows]


def _plan(steps: int, rdp: np.ndarray, target: Target, grid: float | None) -> composition.Plan | None:
    """Where to compose, if that can improve on RDP."""
    epsilon, delta = target.around(rdp)
    if not np.any(target.renyi(rdp)) or not math.isfinite(epsilon):
        return None
    return composition.plan(rdp, steps, delta=delta, epsilon=epsilon, grid=grid)


def _mu(sigmas: np.ndarray, counts: np.ndarray, relation: Relation) -> float:
    """The exact mu of unsampled Gaussians."""
    with np.errstate(divide="ignore", over="ignore"):
        return (2 if relation == "replace_one" else 1) * math.sqrt(np.sum(counts / sigmas**2))
