"""What a trained model leaks: exposure of random secrets, and membership inference.

Exposure says, from the ranks of canaries, whether a model knows a random secret that was in its training data. A canary
holds a secret drawn at random from a public set of candidates, such as all numbers of six digits. After training, the
model gives a loss to the true secret and to other candidates. If it does not know the secret, then its rank among the
candidates is uniformly random. Exposure counts the bits of that surprise: log2 of the number of candidates, minus log2
of the rank. Source: Carlini et al. 2019, "The Secret Sharer", https://arxiv.org/abs/1802.08232.

Proof of the bound on epsilon. Replace the unit of one canary by a null. Then the released values do not depend on its
secret, which was drawn as the n references were. So all orders of the n + 1 losses are equally likely, and the rank,
with ties counted against the attacker, is at most k with probability at most k / (n + 1). With the unit, if the run is
(epsilon, delta)-private for it, this probability is at most e^epsilon k / (n + 1) + delta. By the union bound, one of m
canaries has a rank of at most k with probability at most m times that. It is 1 - confidence if epsilon = ln(((1 -
confidence) / m - delta) (n + 1) / k). A smaller epsilon makes a rank of k less likely. The best rank of the m canaries
is a number of the whole experiment, so no choice is made, and the m canaries may depend on each other through the run.

Membership inference says how often an attack finds those who took part, at a low rate of false claims. An average, such
as accuracy, hides an attack that is certain about a few, so look at the true-positive rate at a false-positive rate of
1 % or 0.1 %. Source: Carlini et al. 2022, "Membership inference attacks from first principles",
https://arxiv.org/abs/2112.03570.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.audit.attacks.scores import Bound, Roc, clopper_pearson, error_rates, require_scores
from dpx.reports.attacks import FALSE_POSITIVE_RATES, AttackBounds
from dpx.values import described, names_arguments, repr_with_shapes, require_floats, require_open_fraction, rounded_up


@dataclass(frozen=True, kw_only=True)
class Exposure(Bound):
    """How well a model knows the secrets of some canaries, next to the cost that the run states.

    exposures: float64 (canaries,), bits, in [0, largest]: log2(references + 1) - log2(rank). Their mean is about
        log2(e) = 1.44 for a model that knows nothing.
    ranks: int (canaries,), 1 for a true secret that has the least loss; ties count against the attacker.
    references: int, other candidates of each canary. largest: float, log2(references + 1), the most that can be seen.
    epsilon: float, at least 0. Proved, for secrets and references as `exposure` asks: if a run's epsilon for one
        canary's unit is smaller at `delta`, a bound this large has a probability of at most 1 - confidence.
    cost: float, the epsilon that the run states at `delta`; None if it is not known.
    """

    exposures: np.ndarray
    ranks: np.ndarray
    references: int

    __repr__ = repr_with_shapes

    @property
    def largest(self) -> float:
        return math.log2(self.references + 1)

    def limit(self, *, epsilon: float, probability: float = 0.05) -> float:
        """An upper bound in bits of one canary's exposure, except with this probability, if the run is epsilon-private.

        It is log2(e^epsilon / (probability - delta)), for any model and any attack on released values; inf if the
        probability is at most delta. epsilon: at least 0. probability: in (0, 1). Raises ValueError for others.
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
            f"epsilon is at least {self.epsilon:.4g} at delta {self.delta:g}, with confidence {self.confidence:g}",
        ]


@names_arguments
def exposure(
    losses: Any, references: Any, *, delta: float, confidence: float = 0.95, cost: float | None = None
) -> Exposure:
    """The exposure of canaries that took part in a training run, from the losses of true and of other secrets.

    losses: float (canaries,), the loss of the trained model on the true secret of each canary, which is lower for
        secrets that it knows better.
    references: float (canaries, n), its losses on n other secrets in the same place. For the bound on epsilon, draw
        these and the true secret independently from one distribution, and let the run depend on the true one only
        through the canary's unit, so no secret may be in two units. All losses must be functions of released values.
    delta: in (0, 1), of the cost. confidence: in (0, 1). cost: at least 0, the epsilon of one unit.

    `epsilon` is proved for such losses, but low: with m canaries and n references it is at most
    ln((1 - confidence) (n + 1) / m), and `dpx.audit.one_run` finds more with many canaries. Raises ValueError for other
    numbers and shapes, and for NaN. Source: Carlini et al. 2019, https://arxiv.org/abs/1802.08232.
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


_LEAST = 2  # of members, and of others
_ROUNDING = 1e-12  # relative: a hundredth of 300 others are 3, not 2


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well scores tell the members of one run from others, next to the cost that the run states.

    false_positive_rates: n floats, as asked for. true_positive_rates: n floats, the share of the members whose scores
        exceed a threshold that at most this share of the others exceeds.
    lower, upper: n floats each, Clopper and Pearson's bounds on the true-positive rates, each with `confidence`, as if
        the threshold were given and the scores independent. It comes from the same others, so they are approximate.
    advantage: float, the largest true-positive rate minus the false-positive rate. area: float, the area under the
        curve, the probability that a member has a larger score than another, where a tie counts one half.
    members, others: int, how many scores.
    limits: n floats, the largest true-positive rates that the stated cost allows, for one unit over the coins of the
        run; None if the cost is not known.
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
    def above_cost(self) -> bool:
        """Whether a lower bound is above what the stated cost allows. A reason to search for a fault, not a proof."""
        return self.limits is not None and any(low > most for low, most in zip(self.lower, self.limits, strict=True))

    def __str__(self) -> str:
        lines = []
        for number, wrong in enumerate(self.false_positive_rates):
            said = (
                f"at most {100 * wrong:.4g} % false positives: {100 * self.true_positive_rates[number]:.4g} % of the "
            )
            said += f"members are found ({100 * self.lower[number]:.4g} to {100 * self.upper[number]:.4g} %)"
            if self.limits is not None:
                said += f"; the stated cost allows {rounded_up(100 * self.limits[number], 4)} %"
            lines.append(said)
        lines.append(
            f"advantage {self.advantage:.4g}, area {self.area:.4g}; {self.members} members, {self.others} others"
        )
        return "\n".join(lines)


@names_arguments
def membership(
    members: Any,
    others: Any,
    *,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    confidence: float = 0.95,
    cost: AttackBounds | None = None,
) -> Membership:
    """The true-positive rates of a membership attack on one training run.

    members: float (n,), at least 2, the scores of units that took part; others: float (m,), of units that did not but
        are otherwise alike. A larger score says "took part", such as the loss before training minus the loss after. The
        scores must be functions of what the run released. For a rate below 1 / m, the threshold is the largest of the
        others.
    false_positive_rates: floats in (0, 1). confidence: in (0, 1), of each bound by itself.
    cost: `dpx.reports.attack_bounds` of the run, with the same false-positive rates.

    What is counted describes this run and these units. The cost bounds the expectation over the coins of the run, for
    units that took part by a coin, and units of one run are not independent. So no count here refutes it:
    `dpx.audit.one_run` and `lower_bound` do that. Raises ValueError for other numbers, shapes and rates, and for NaN.
    """
    rates = require_floats("false_positive_rates", false_positive_rates)
    if rates.ndim != 1 or not len(rates) or not np.all((rates > 0) & (rates < 1)):
        raise ValueError(f"false_positive_rates must be numbers in (0, 1), got {described(false_positive_rates)}")
    confidence = require_open_fraction("confidence", confidence)
    if cost is not None and not np.array_equal(rates, cost.false_positive_rates):
        stated = described(cost.false_positive_rates)
        raise ValueError(f"cost must have the false_positive_rates {described(false_positive_rates)}, got {stated}")
    present = np.sort(require_scores("members", members, _LEAST, "members"))
    absent = np.sort(require_scores("others", others, _LEAST, "others"))
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
