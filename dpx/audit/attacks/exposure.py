"""Exposure: whether a model knows a random secret that was in its training data, from the ranks of canaries.

A canary holds a secret that was drawn at random from a public set of candidates, such as all numbers of six digits.
After training, the model gives a loss to the true secret and to other candidates. If the model does not know the
secret, then its rank among the candidates is uniformly random. Exposure counts the bits of that surprise: log2 of the
number of candidates, minus log2 of the rank. Source: Carlini et al. 2019, "The Secret Sharer",
https://arxiv.org/abs/1802.08232.

Proof of the bound on epsilon. Replace the unit of one canary by a null. Then the released values do not depend on its
secret, which was drawn as the n references were. So all orders of the n + 1 losses are equally likely, and the rank,
with ties counted against the attacker, is at most k with probability at most k / (n + 1). With the unit, if the run is
(epsilon, delta)-private for it, this probability is at most e^epsilon k / (n + 1) + delta. By the union bound, one of m
canaries has a rank of at most k with probability at most m times that. It is 1 - confidence where
epsilon = ln(((1 - confidence) / m - delta) (n + 1) / k). A smaller epsilon makes a rank of k less likely. The best rank
of the m canaries is a number of the whole experiment, so no choice is made, and the m canaries may depend on each other
through the run.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpx.accounting import checks
from dpx.audit.attacks.scores import verdict
from dpx.trees import outlined
from dpx.validation import require_floats, require_open_fraction


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """How well a model knows the secrets of some canaries, beside the bill.

    exposures: float64 (canaries,), bits, in [0, largest]: log2(references + 1) - log2(rank). Their mean is about
        log2(e) = 1.44 for a model that knows nothing.
    ranks: int (canaries,), 1 for a true secret that has the least loss; ties count against the attacker.
    references: int, other candidates of each canary. largest: float, log2(references + 1), the most that can be seen.
    epsilon: float, at least 0. A proof, for secrets and references as `exposure` asks: for a run whose epsilon of one
        canary's unit is smaller at `delta`, a bound this large has a probability of at most 1 - confidence.
    bill: float, the epsilon that the run states at `delta`; None if it is not known.
    """

    exposures: np.ndarray
    ranks: np.ndarray
    references: int
    epsilon: float
    delta: float
    confidence: float
    bill: float | None = None

    __repr__ = outlined

    @property
    def largest(self) -> float:
        return math.log2(self.references + 1)

    @property
    def exceeds_bill(self) -> bool:
        """Whether the bill is refuted, with the stated confidence."""
        return self.bill is not None and self.epsilon > self.bill

    def limit(self, *, epsilon: float, probability: float = 0.05) -> float:
        """Bits, below which the exposure of one canary is but for this probability, if the run is epsilon-private.

        It is log2(e^epsilon / (probability - delta)), for any model and any attack that sees released values; inf where
        the probability is at most delta. epsilon: at least 0. probability: in (0, 1). Raises ValueError for others.
        """
        epsilon, probability = checks.require_epsilon(epsilon), require_open_fraction("probability", probability)
        if probability <= self.delta:
            return math.inf
        return epsilon / math.log(2) - math.log2(probability - self.delta)

    def __str__(self) -> str:
        mean, most = float(self.exposures.mean()), float(self.exposures.max())
        lines = [
            f"exposure of {len(self.ranks)} canaries: mean {mean:.2f} bits, largest {most:.2f} of {self.largest:.2f}; "
            "a model that knows nothing has a mean of about 1.44",
            f"epsilon is at least {self.epsilon:.4g} at delta {self.delta:g}, with confidence {self.confidence:g}",
        ]
        return "\n".join([*lines, *verdict(self)])


def exposure(
    losses: Any, references: Any, *, delta: float, confidence: float = 0.95, bill: float | None = None
) -> Exposure:
    """The exposure of canaries that took part in a training run, from the losses of true and of other secrets.

    losses: float (canaries,), the loss of the trained model on the true secret of each canary; less is better known.
    references: float (canaries, n), its losses on n other secrets in the same place. For the bound on epsilon, these
        and the true secret are drawn independently, from one distribution, and the run depends on the true one only
        through the canary's unit. A secret that is in two units is not such a canary. All losses must be functions of
        released values.
    delta: in (0, 1), of the bill. confidence: in (0, 1). bill: at least 0, the epsilon of one unit.

    `epsilon` is a proof for such losses. It is low: with m canaries and n references it is at most
    ln((1 - confidence) (n + 1) / m), and `dpx.audit.one_run` finds more with many canaries. Raises ValueError for other
    numbers and shapes, and for NaN. Source: Carlini et al. 2019, https://arxiv.org/abs/1802.08232.
    """
    delta = checks.require_delta(delta)
    confidence = require_open_fraction("confidence", confidence)
    bill = None if bill is None else checks.require_epsilon(bill)
    true, others = require_floats("losses", losses), require_floats("references", references)
    if true.ndim != 1 or not len(true):
        raise ValueError(f"losses must hold one loss of each canary, (canaries,), at least one; got {true.shape}")
    if others.ndim != 2 or len(others) != len(true) or not others.shape[1]:
        raise ValueError(f"references must have shape ({len(true)}, n) with n of at least 1, got {others.shape}")
    if np.isnan(true).any() or np.isnan(others).any():
        raise ValueError("losses and references must hold no NaN; give inf in place of a loss that is not a number")
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
        bill=bill,
    )
