"""Lower bounds on epsilon from the scores of many runs with and many runs without one example.

Proof of the bound. The scores must be computed from released values, so that a test of them is post-processing. A test
says "with" if a score is at least a threshold. Let a be the probability that it says so without the example, and b with
it. If the mechanism is (epsilon, delta)-private, then b <= e^epsilon a + delta, so epsilon >= ln((b - delta) / a). The
threshold is chosen on the first half of the runs. The second half is independent of it, so its counts are binomial, and
Clopper and Pearson's bounds hold for a (from above) and b (from below). Each fails with probability at most (1 -
confidence) / 2, so both hold with probability at least `confidence`. The test that says "without" below a threshold
gives the other direction. The first half also chooses between the two.

The Gaussian bound is a hypothesis. It assumes that the two worlds are as hard to tell apart as N(0, 1) and N(mu, 1).
Then the same two error rates bound mu from below, and delta at every epsilon is that of a Gaussian (Nasr et al. 2023,
https://arxiv.org/abs/2302.07956). No measurement proves it, because delta is about events that are too rare to count.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpx.accounting import checks, gdp
from dpx.reports.curves import TradeOff, plot_trade_off
from dpx.values import explain_misuse, repr_with_shapes, require_open_fraction, rounded_down, rounded_up, warn_user

_THRESHOLDS = 400  # candidates, mostly in the tails, where the bound at a small delta is best
_CHOICE_MISS = 0.01  # share of the allowed misses at which thresholds are chosen, so that luck in the tails counts less
_LEAST_RUNS = 4  # runs in each world, two in each half
_ROC_POINTS = 200
_SURE = 5.0  # standard deviations
SWAPPED = (
    "the scores without the canary are larger than those with it, so this bound is 0: a larger score must say that the "
    "canary took part. Are with_canary and without_canary swapped, or do the scores have the wrong sign?"
)


class Roc(NamedTuple):
    """The observed error rates of an attack, one point for each threshold, without confidence intervals.

    type_one: float64 (points,), how often the attack says "with" about a run without the example.
    type_two: float64 (points,), how often it says "without" about a run with the example. In a `LowerBound`, both are
        for the half of the runs that did not choose its threshold.
    """

    type_one: np.ndarray
    type_two: np.ndarray

    __repr__ = repr_with_shapes


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on epsilon at one delta, with a confidence, alongside the stated epsilon.

    epsilon: float, at least 0. cost: float, the stated epsilon at `delta`; None if unknown.
    """

    epsilon: float
    delta: float
    confidence: float
    cost: float | None = None

    @property
    def exceeds_cost(self) -> bool:
        """Whether the proved bound refutes the stated epsilon, up to its confidence. Unproved bounds refute nothing."""
        return self.cost is not None and self.epsilon > self.cost

    @property
    def _proved(self) -> str:
        bound = f"epsilon is at least {rounded_down(self.epsilon, 4)}"
        return f"{bound} at delta {self.delta:g}, with confidence {self.confidence:g}"

    def _lines(self) -> list[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        words = "the stated cost is WRONG" if self.exceeds_cost else "no contradiction"
        verdict = [] if self.cost is None else [f"the stated cost is {rounded_up(self.cost, 4)}: {words}"]
        return "\n".join(self._lines() + verdict)


@dataclass(frozen=True, kw_only=True)
class LowerBound(Bound):
    """A lower bound on epsilon at one delta, alongside the mechanism's stated epsilon.

    epsilon: float, at least 0. Proved, provided the scores are computed from released values: if the true epsilon at
        `delta` were smaller, a bound this large would occur with probability at most 1 - confidence.
    gaussian_epsilon: float, at least 0. Not proved: assumes a mechanism with the trade-off function of two Gaussians.
    runs: (with, without), how many runs gave both bounds: the half that did not choose the threshold.
    cost: float, the mechanism's stated epsilon at `delta`; None if unknown. roc: the error rates in these runs.
    """

    gaussian_epsilon: float
    runs: tuple[int, int]
    roc: Roc = field(repr=False)

    def _lines(self) -> list[str]:
        return [
            f"{self._proved} ({self.runs[0]} runs with the canary, {self.runs[1]} without, not counting those of the "
            "choices)",
            f"hypothesis: at least {rounded_down(self.gaussian_epsilon, 4)}, if the trade-off function is a Gaussian's",
        ]


@explain_misuse
def lower_bound_from_scores(
    with_canary: Any, without_canary: Any, *, delta: float, confidence: float = 0.95, cost: float | None = None
) -> LowerBound:
    """Computes a lower bound on epsilon from the scores of an attack, one score for each independent run.

    with_canary, without_canary: float (runs,), at least 4 each. Their order must carry no information, because the
        first half of each chooses the threshold and the second half gives the bound. A larger score suggests "with". A
        score is valid if it depends only on what its own run released and on values that are independent of all runs.
        A score that depends on the noise of its run, or on anything else that is secret, proves nothing.
    delta: in (0, 1). confidence: in (0, 1), of each bound separately. cost: the stated epsilon, or None.

    `epsilon` is proved for such scores, but `gaussian_epsilon` is not (`LowerBound`). Raises ValueError for invalid
    numbers, for scores of another shape, and for NaN.
    """
    delta = checks.require_delta(delta, zero=True)
    if delta == 0:  # its own message, because a claim may be of pure privacy
        raise ValueError("delta must be in (0, 1), got 0: a claim at 0 also holds at delta=1e-9, so test that")
    confidence = require_open_fraction("confidence", confidence)
    cost = None if cost is None else checks.require_epsilon(cost)
    present = _sorted_halves(require_enough_scores("with_canary", with_canary, _LEAST_RUNS, "runs"))
    absent = _sorted_halves(require_enough_scores("without_canary", without_canary, _LEAST_RUNS, "runs"))
    miss, bounds = (1 - confidence) / 2, []
    for bound_of in (functools.partial(epsilon_of_rates, delta=delta), gaussian_mu_of_rates):
        chosen_by = functools.partial(bound_of, miss=_CHOICE_MISS * miss)
        threshold, finds_with = _best_test(present[0], absent[0], chosen_by)
        counted = _count_detections(present[1], absent[1], np.array([threshold]), finds_with)
        bounds.append(float(bound_of(counted, miss=miss)[0]))
    if bounds[0] <= 0 and _scores_clearly_larger(absent[1], present[1]):
        warn_user(SWAPPED)
    shown = np.quantile(np.concatenate([present[1], absent[1]]), np.linspace(0, 1, _ROC_POINTS), method="higher")
    return LowerBound(
        epsilon=max(0.0, bounds[0]),
        gaussian_epsilon=gdp.epsilon(max(0.0, bounds[1]), delta=delta),
        delta=delta,
        confidence=confidence,
        runs=(len(present[1]), len(absent[1])),
        cost=cost,
        roc=error_rates(present[1], absent[1], np.unique(shown)),
    )


def _scores_clearly_larger(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the scores in `one` are larger beyond doubt, by the Mann-Whitney test. other: sorted."""
    below = sum(np.searchsorted(other, one, side).mean() for side in ("left", "right")) / 2 / len(other)
    return below - 0.5 > _SURE * math.sqrt((1 / len(one) + 1 / len(other)) / 12)


class GuessRates(NamedTuple):
    """How often a test says "with" or, for the other direction, "without".

    true, false: int (thresholds,), counts in the `true_runs` runs where that is right, and the `false_runs` others.
    """

    true: np.ndarray
    true_runs: int
    false: np.ndarray
    false_runs: int


def clopper_pearson(count: Any, runs: int, miss: float) -> tuple[np.ndarray, np.ndarray]:
    """Bounds a probability from below and above, float64 like `count`. Each is wrong with probability at most `miss`.

    count: int in [0, runs], how often the event occurred in `runs` independent runs. Source: Clopper and Pearson 1934,
    https://doi.org/10.1093/biomet/26.4.404.
    """
    count = np.asarray(count, np.float64)
    lower = np.where(count == 0, 0.0, special.betaincinv(np.maximum(count, 1), runs - count + 1, miss))
    upper = np.where(count == runs, 1.0, special.betaincinv(count + 1, np.maximum(runs - count, 1), 1 - miss))
    return lower, upper


def epsilon_of_rates(rates: GuessRates, *, delta: float, miss: float) -> np.ndarray:
    """Returns ln((b - delta) / a) for a lower bound b and an upper bound a, float64 (n,); -inf where b <= delta."""
    true, _ = clopper_pearson(rates.true, rates.true_runs, miss)
    _, false = clopper_pearson(rates.false, rates.false_runs, miss)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(0.0, true - delta)) - np.log(false)


def gaussian_mu_of_rates(rates: GuessRates, *, miss: float) -> np.ndarray:
    """The mu for which N(0, 1) and N(mu, 1) have these error rates, each bounded from above; float64 (n,)."""
    _, false = clopper_pearson(rates.false, rates.false_runs, miss)
    _, missed = clopper_pearson(rates.true_runs - rates.true, rates.true_runs, miss)
    return np.where((false < 1) & (missed < 1), -special.ndtri(false) - special.ndtri(missed), -math.inf)


def require_enough_scores(name: str, scores: Any, least: int, of: str) -> np.ndarray:
    """Returns the scores, float64 (n,). Raises ValueError unless there are at least `least`. of: names the items in the
    message."""
    scores = np.asarray(scores)
    if scores.ndim != 1 or len(scores) < least or scores.dtype.kind not in "biuf":
        found = f"{scores.dtype}{scores.shape}"
        raise ValueError(f"{name} must hold one score for each of at least {least} {of}, ({of},); got {found}")
    if np.isnan(scores).any():
        raise ValueError(f"{name} must hold no NaN, got {np.isnan(scores).sum()}; give -inf where there is no score")
    return scores.astype(np.float64)


def _sorted_halves(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted scores of the first half, which chooses the test, and of the second half, which counts."""
    middle = len(scores) // 2
    return np.sort(scores[:middle]), np.sort(scores[middle:])


def _count_detections(present: np.ndarray, absent: np.ndarray, thresholds: np.ndarray, finds_with: bool) -> GuessRates:
    """Counts the detections of one world. present, absent: sorted scores of the runs with and without the example."""
    below_with, below_without = (np.searchsorted(world, thresholds, "left") for world in (present, absent))
    if finds_with:
        return GuessRates(len(present) - below_with, len(present), len(absent) - below_without, len(absent))
    return GuessRates(below_without, len(absent), below_with, len(present))


def _best_test(
    present: np.ndarray, absent: np.ndarray, bound_of: Callable[[GuessRates], np.ndarray]
) -> tuple[float, bool]:
    """Returns the threshold with the largest bound on these runs, and whether its test says "with"."""
    thresholds, found = _candidate_thresholds(present, absent), []
    for finds_with in (True, False):
        bounds = bound_of(_count_detections(present, absent, thresholds, finds_with))
        best = int(np.argmax(bounds))
        found.append((bounds[best], float(thresholds[best]), finds_with))
    return max(found)[1:]


def _candidate_thresholds(present: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """Scores of both worlds at ranks that are logarithmically spaced from both ends."""
    thresholds = []
    for world in (present, absent):
        ranks = np.unique(np.geomspace(1, len(world), _THRESHOLDS // 4).astype(int)) - 1
        thresholds += [world[ranks], world[::-1][ranks]]
    return np.unique(np.concatenate(thresholds))


def error_rates(present: np.ndarray, absent: np.ndarray, thresholds: np.ndarray) -> Roc:
    """The error rates of "score >= threshold", for rising thresholds and one above all scores. present, absent: sorted
    scores."""
    thresholds = np.append(thresholds, np.inf)
    type_two = np.searchsorted(present, thresholds, "left") / len(present)
    return Roc(1 - np.searchsorted(absent, thresholds, "left") / len(absent), type_two)


def plot_lower_bound(bound: LowerBound, cost: TradeOff | None = None, *, axes: Any = None) -> Any:
    """Plots the attack's error rates and the trade-off function that the cost allows, and returns the matplotlib axes.

    bound: from `lower_bound` or `lower_bound_from_scores`. cost: from `dpx.reports.curves.trade_off`; no attack on a
        correct mechanism goes below it, except by chance. axes: where to plot; None creates new ones.
    """
    label = f"attack: epsilon at least {rounded_down(bound.epsilon, 3)} at delta {bound.delta:g}"
    axes = plot_trade_off(TradeOff(bound.roc.type_one, bound.roc.type_two), axes=axes, label=label)
    if cost is not None:
        plot_trade_off(cost, axes=axes, label="stated cost: no attack is below")
    return axes
