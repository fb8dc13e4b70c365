"""Membership inference: how often an attack finds those who took part, at a low rate of false claims.

An average, such as accuracy, hides an attack that is certain about a few. So the number to look at is the true-positive
rate at a false-positive rate of 1 % or 0.1 %. Source: Carlini et al. 2022, "Membership inference attacks from first
principles", https://arxiv.org/abs/2112.03570.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpx.accounting.words import upper
from dpx.audit.attacks.scores import Roc, clopper_pearson, require_scores
from dpx.reports.attacks import FALSE_POSITIVE_RATES, AttackBounds
from dpx.trees import described
from dpx.validation import require_floats, require_open_fraction

_LEAST = 2  # of members, and of others
_ROUNDING = 1e-12  # relative: a hundredth of 300 others are 3, not 2


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well scores tell the members of a run from others, as counted in one run, beside the bill.

    false_positive_rates: n floats, as asked for. true_positive_rates: n floats, the share of the members whose scores
        are above a threshold that at most this share of the others is above.
    lower, upper: n floats each, Clopper and Pearson's bounds for a threshold that is given, each with `confidence`, as
        if the scores were independent. The threshold is of the same others, so they are approximate.
    advantage: float, the largest true-positive rate minus the false-positive rate. area: float, the area under the
        curve, the probability that a member has a larger score than another, ties as one half.
    members, others: int, how many scores.
    limits: n floats, the largest true-positive rates that the bill allows, for one unit over the coins of the run; None
        if it is not known.
    roc: all error rates; type_one of the others, type_two of the members.
    """

    false_positive_rates: tuple[float, ...]
    true_positive_rates: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    advantage: float
    area: float
    members: int
    others: int
    confidence: float
    limits: tuple[float, ...] | None = None
    roc: Roc = field(repr=False)

    @property
    def above_bill(self) -> bool:
        """Whether a lower bound is above what the bill allows. A reason to search for a fault, and not a proof."""
        return self.limits is not None and any(low > most for low, most in zip(self.lower, self.limits, strict=True))

    def __str__(self) -> str:
        lines = []
        for number, wrong in enumerate(self.false_positive_rates):
            said = (
                f"at most {100 * wrong:.4g} % false positives: {100 * self.true_positive_rates[number]:.4g} % of the "
            )
            said += f"members are found ({100 * self.lower[number]:.4g} to {100 * self.upper[number]:.4g} %)"
            if self.limits is not None:
                said += f"; the bill allows {upper(100 * self.limits[number], 4)} %"
            lines.append(said)
        lines.append(
            f"advantage {self.advantage:.4g}, area {self.area:.4g}; {self.members} members, {self.others} others"
        )
        return "\n".join(lines)


def membership(
    members: Any,
    others: Any,
    *,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
    bill: AttackBounds | None = None,
) -> Membership:
    """The true-positive rates of a membership attack on one training run.

    members: float (n,), at least 2, the scores of units that took part; others: float (m,), of units that did not, and
        that are alike otherwise. A larger score says "took part", such as the loss before training minus the loss
        after. The scores must be functions of what the run released. A rate below 1 / m is counted with the threshold
        at the largest of the others.
    false_positive_rates: floats in (0, 1). confidence: in (0, 1), of each bound by itself.
    bill: `dpx.reports.attack_bounds` of the run, with the same false-positive rates.

    What is counted describes this run and these units. The bill bounds the expectation over the coins of the run, for
    units that took part by a coin, and units of one run are not independent. So no count here refutes a bill:
    `dpx.audit.one_run` and `lower_bound` do that. Raises ValueError for other numbers, shapes and rates, and for NaN.
    """
    rates = require_floats("false_positive_rates", false_positive_rates)
    if rates.ndim != 1 or not len(rates) or not np.all((rates > 0) & (rates < 1)):
        raise ValueError(f"false_positive_rates must be numbers in (0, 1), got {described(false_positive_rates)}")
    confidence = require_open_fraction("confidence", confidence)
    if bill is not None and not np.array_equal(rates, bill.false_positive_rates):
        stated = described(bill.false_positive_rates)
        raise ValueError(f"bill must have the false_positive_rates {described(false_positive_rates)}, got {stated}")
    present = np.sort(require_scores("members", members, _LEAST, "members"))
    absent = np.sort(require_scores("others", others, _LEAST, "others"))
    allowed = np.minimum(np.floor(rates * len(absent) * (1 + _ROUNDING)).astype(int), len(absent) - 1)
    thresholds = absent[len(absent) - 1 - allowed]
    found = len(present) - np.searchsorted(present, thresholds, "right")
    low, high = clopper_pearson(found, len(present), 1 - confidence)
    roc = _all_errors(present, absent)
    return Membership(
        false_positive_rates=tuple(rates.tolist()),
        true_positive_rates=tuple((found / len(present)).tolist()),
        lower=tuple(low.tolist()),
        upper=tuple(high.tolist()),
        advantage=float(np.max(1 - roc.type_two - roc.type_one)),
        area=_area(present, absent),
        members=len(present),
        others=len(absent),
        confidence=confidence,
        limits=None if bill is None else bill.true_positive_rates,
        roc=roc,
    )


def _all_errors(present: np.ndarray, absent: np.ndarray) -> Roc:
    """The error rates at every threshold, "at least": float64 (distinct scores + 1,) each."""
    thresholds = np.append(np.unique(np.concatenate([present, absent])), math.inf)
    missed = np.searchsorted(present, thresholds, "left") / len(present)
    return Roc(1 - np.searchsorted(absent, thresholds, "left") / len(absent), missed)


def _area(present: np.ndarray, absent: np.ndarray) -> float:
    below = np.searchsorted(absent, present, "left") + np.searchsorted(absent, present, "right")
    return float(below.mean() / (2 * len(absent)))
