"""What a trained model leaks: exposure of random secrets, and membership inference.

Exposure measures, from the ranks of canaries, whether a model knows a random secret from its training data. A canary
holds a secret drawn at random from a public set of candidates, such as all numbers of six digits. The trained model
assigns a loss to the true secret and to other candidates. If it does not know the secret, the secret's rank among the
candidates is uniformly random. Exposure is that surprise in bits: log2 of the number of candidates, minus log2 of the
rank. Source: Carlini et al. 2019, "The Secret Sharer", https://arxiv.org/abs/1802.08232.

Proof of the bound on epsilon. Replace the unit of one canary by a null. Then the released values do not depend on its
secret, which has the same distribution as the n references. So all orders of the n + 1 losses are equally likely, and
the rank, with ties counted against the attacker, is at most k with probability at most k / (n + 1). With the unit, if
the run is (epsilon, delta)-private for it, this probability is at most e^epsilon k / (n + 1) + delta. By the union
bound, one of m canaries has a rank of at most k with probability at most m times that. It is 1 - confidence if
epsilon = ln(((1 - confidence) / m - delta) (n + 1) / k). A smaller epsilon makes a rank of k less likely. The union
bound covers the choice of the best rank, and the m canaries may depend on each other through the run.

Membership inference measures how often an attack identifies members, at a low rate of false claims. An average, such
as accuracy, hides an attack that is certain about a few members, so look at the true-positive rate at a false-positive
rate of 1% or 0.1%. Source: Carlini et al. 2022, "Membership inference attacks from first principles",
https://arxiv.org/abs/2112.03570.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.audit.attacks.scores import Bound, Roc, clopper_pearson, error_rates, require_enough_scores
from dpx.reports.attacks import FALSE_POSITIVE_RATES, AttackBounds
from dpx.values import described, explain_misuse, repr_with_shapes, require_floats, require_open_fraction, rounded_up


@dataclass(frozen=True, kw_only=True)
class Exposure(Bound):
    """How well a model has memorized the secrets of some canaries, alongside the run's stated epsilon.

    exposures: float64 (canaries,), bits, in [0, largest]: log2(references + 1) - log2(rank). Their mean is about
        log2(e) = 1.44 for a model that knows nothing.
    ranks: int (canaries,), 1 if the true secret has the lowest loss; ties count against the attacker.
    references: int, number of other candidates per canary. largest: float, log2(references + 1), the maximum exposure.
    epsilon: float, at least 0, a lower bound on the run's epsilon at `delta` for one canary's unit. Proved to hold with
        probability at least `confidence` if secrets and references are as `exposure` requires.
    cost: float, the run's stated epsilon at `delta`; None if unknown.
    """

    exposures: np.ndarray
    ranks: np.ndarray
    references: int

    __repr__ = repr_with_shapes

    @property
    def largest(self) -> float:
        return math.log2(self.references + 1)

    def limit(self, *, epsilon: float, probability: float = 0.05) -> float:
        """The number of bits that one canary's exposure exceeds with at most this probability, given epsilon.

        It is log2(e^epsilon / (probability - delta)), for any model and any attack on released values, or inf if the
        probability is at most delta. Raises ValueError unless epsilon is at least 0 and probability in (0, 1).
        """
        epsilon, probability = checks.require_epsilon(epsilon), require_open_fraction("probability", probability)
        if probability <= self.delta:
            return math.inf
        return epsilon / math.log(2) - math.log2(probability - self.delta)

    def _lines(self) -> list[str]:
        mean, most = float(self.exposures.mean()), float(self.exposures.max())
        return [
            f"exposure of {len(self.ranks)} canaries: mean {mean:.2f} bits, largest {most:.2f} of {self.largest:.2f}; "
            "a model that knows nothing has a mean of about 1.44",
            self._proved,
        ]


@explain_misuse
def exposure(
    losses: Any, references: Any, *, delta: float, confidence: float = 0.95, cost: float | None = None
) -> Exposure:
    """Computes the exposure of canaries in a training run from the losses of their true secrets and of other ones.

    losses: float (canaries,), the loss of the trained model on the true secret of each canary, which is lower for
        secrets that it knows better.
    references: float (canaries, n), its losses on n other secrets in the same place. For the bound on epsilon, draw
        these and the true secret independently from one distribution, and let the run depend on the true one only
        through the canary's unit, so no secret may be in two units. All losses must be functions of released values.
    delta: in (0, 1), at which epsilon is bounded. confidence: in (0, 1). cost: the stated epsilon of one unit, or None.

    `epsilon` is proved for such losses, but low: with m canaries and n references it is at most
    ln((1 - confidence) (n + 1) / m), and `dpx.audit.one_run` gives larger bounds with many canaries. Raises ValueError
    for invalid values or shapes, and for NaN. Source: Carlini et al. 2019, https://arxiv.org/abs/1802.08232.
    """
    delta = checks.require_delta(delta)
    confidence = require_open_fraction("confidence", confidence)
    cost = None if cost is None else checks.require_epsilon(cost)
    true, others = require_floats("losses", losses), require_floats("references", references)
    if true.ndim != 1 or not len(true):
        raise ValueError(f"losses must hold one loss for each canary, (canaries,), at least one; got {true.shape}")
    if others.ndim != 2 or len(others) != len(true) or not others.shape[1]:
        raise ValueError(f"references must have shape ({len(true)}, n) with n of at least 1, got {others.shape}")
    if np.isnan(true).any() or np.isnan(others).any():
        raise ValueError("losses and references must hold no NaN; give inf for a loss that is not a number")
    count = others.shape[1]
    ranks = 1 + (others <= true[:, None]).sum(axis=1)
    miss = (1 - confidence) / len(true) - delta
    best = int(ranks.min())
    return Exposure(
        exposures=math.log2(count + 1) - np.log2(ranks),
        ranks=ranks,
        references=count,
        epsilon=max(0.0, math.log(miss * (count + 1) / best)) if miss > 0 else 0.0,
        delta=delta,
        confidence=confidence,
        cost=cost,
    )


_LEAST = 2  # smallest number of members, and of nonmembers
_ROUNDING = 1e-12  # relative, so that 1% of 300 others is 3, not 2


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well scores tell the members of one run from nonmembers, alongside the run's stated cost.

    false_positive_rates: n floats, as requested. true_positive_rates: n floats, the share of members above a
        threshold that is set so that at most the requested share of nonmembers is above it.
    lower, upper: n floats each, Clopper and Pearson's bounds on the true-positive rates, each with `confidence`. They
        assume a fixed threshold and independent scores. The threshold depends on nonmembers, so they are approximate.
    advantage: float, the largest difference between true-positive and false-positive rate. area: float, the area under
        the curve: the probability that a member's score exceeds a nonmember's, counting ties as one half.
    members, others: int, how many members and nonmembers were scored.
    limits: n floats, the largest true-positive rates that the stated cost allows for one unit, on average over runs;
        None if the cost is unknown.
    roc: all error rates: type_one are those of the nonmembers, type_two those of the members.
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
    def exceeds_cost(self) -> bool:
        """Whether a lower bound exceeds what the stated cost allows: a reason to look for a fault, not a proof."""
        return self.limits is not None and any(low > most for low, most in zip(self.lower, self.limits, strict=True))

    def __str__(self) -> str:
        lines = []
        for number, wrong in enumerate(self.false_positive_rates):
            said = f"at most {100 * wrong:.4g}% false positives: {100 * self.true_positive_rates[number]:.4g}% of the "
            said += f"members are found ({100 * self.lower[number]:.4g} to {100 * self.upper[number]:.4g}%)"
            if self.limits is not None:
                said += f"; the stated cost allows {rounded_up(100 * self.limits[number], 4)}%"
            lines.append(said)
        lines.append(
            f"advantage {self.advantage:.4g}, area {self.area:.4g}; {self.members} members, {self.others} others"
        )
        return "\n".join(lines)


@explain_misuse
def membership(
    members: Any,
    others: Any,
    *,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
    cost: AttackBounds | None = None,
) -> Membership:
    """Computes the true-positive rates of a membership attack on one training run.

    members: float (n,), n at least 2, the scores of units that took part. others: float (m,), m at least 2, those of
        similar units that did not. A larger score, such as the loss before training minus the loss after it, suggests
        membership. Scores must be functions of released values. For a rate below 1 / m, the threshold is the largest
        score of the nonmembers.
    false_positive_rates: floats in (0, 1). confidence: in (0, 1), of each bound separately.
    cost: `dpx.reports.attack_bounds` of the run, with the same false-positive rates.

    The rates describe this run and these units. The cost bounds their expectation over the randomness of the run, for
    units that took part by a coin, and units of one run are not independent. So these rates cannot refute the cost:
    `dpx.audit.one_run` and `lower_bound` can. Raises ValueError for invalid values, shapes or rates, and for NaN.
    """
    rates = require_floats("false_positive_rates", false_positive_rates)
    if rates.ndim != 1 or not len(rates) or not np.all((rates > 0) & (rates < 1)):
        raise ValueError(f"false_positive_rates must be numbers in (0, 1), got {described(false_positive_rates)}")
    confidence = require_open_fraction("confidence", confidence)
    if cost is not None and not np.array_equal(rates, cost.false_positive_rates):
        stated = described(cost.false_positive_rates)
        raise ValueError(f"cost must have the false_positive_rates {described(false_positive_rates)}, got {stated}")
    present = np.sort(require_enough_scores("members", members, _LEAST, "members"))
    absent = np.sort(require_enough_scores("others", others, _LEAST, "others"))
    allowed = np.minimum(np.floor(rates * len(absent) * (1 + _ROUNDING)).astype(int), len(absent) - 1)
    thresholds = absent[len(absent) - 1 - allowed]
    found = len(present) - np.searchsorted(present, thresholds, "right")
    low, high = clopper_pearson(found, len(present), 1 - confidence)
    roc = error_rates(present, absent, np.unique(np.concatenate([present, absent])))
    below = np.searchsorted(absent, present, "left") + np.searchsorted(absent, present, "right")
    return Membership(
        false_positive_rates=tuple(rates.tolist()),
        true_positive_rates=tuple((found / len(present)).tolist()),
        lower=tuple(low.tolist()),
        upper=tuple(high.tolist()),
        advantage=float(np.max(1 - roc.type_two - roc.type_one)),
        area=float(below.mean() / (2 * len(absent))),
        members=len(present),
        others=len(absent),
        confidence=confidence,
        limits=None if cost is None else cost.true_positive_rates,
        roc=roc,
    )
