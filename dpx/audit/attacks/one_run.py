"""Lower bounds on epsilon from one training run with many canaries, where each took part with probability 1/2.

    members = dpx.audit.draw_members(key, canaries=1000)  # who takes part
    ... train on the data and canaries[members], and score every canary on the result ...
    print(dpx.audit.one_run(scores, members, delta=1e-5))

The attack guesses that the canaries with the highest scores are members, and that equally many with the lowest scores
are not. It makes no guess about the rest. The number of right guesses bounds epsilon.

Of m canaries, k are guessed, and v guesses are right. Each bound rejects a hypothesis about the mechanism if v right
guesses would be too rare under it. Because the coins are independent, the canaries may influence each other in any way.

`steinke_p_value` (Steinke, Nasr and Jagielski 2023, https://arxiv.org/abs/2305.08846): for any (epsilon, delta).

`trade_off_rejected` (Mahloujifar, Melis and Chaudhuri 2024, https://arxiv.org/abs/2410.22235): for any symmetric
trade-off function f, here that of two Gaussians. Proof: let p_i be the probability of i right guesses, and choose one
of the m canaries at random. With probability r_i = sum_{l>=i} (l/m) p_l, it is guessed right and i or more guesses are
right. If we flip its coin but keep the guesses, its guess is wrong and one guess fewer is right. This event has
probability h_{i-1}, where h_i = sum_{l>=i} ((k-l)/m) p_l. Flipping a coin changes the probability of an event as f
allows, so r_i <= 1 - f(h_{i-1}), by Jensen's inequality also on average over canaries and coins. From P(v or more are
right) = s, the recursion

    r_v = s v/m,  h_v = s (k-v)/m,  h_{i-1} = max(h_i, g(r_i)),  r_{i-1} = r_i + (i-1)/(k-i+1) (h_{i-1} - h_i),

where g is the inverse of 1 - f, gives the smallest r_0 + h_0 that the inequalities allow. But r_0 + h_0 = k/m. So if
the recursion ends above k/m, then v or more right guesses have probability below s. (It is the smallest: by induction,
no p that the inequalities allow has a smaller r_i, a smaller r_i + h_i or a smaller r_i - i/(k-i) h_i.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from dpx import keys
from dpx.accounting import checks, gdp
from dpx.audit.attacks.scores import Bound, lower_bound_from_scores, require_enough_scores
from dpx.values import (
    Tree,
    described,
    explain_misuse,
    require_number,
    require_open_fraction,
    require_whole,
    rounded_down,
)

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # shares of the canaries that `guesses` tries by default
_LEAST_CANARIES = 16
_LARGEST_EPSILON, _LARGEST_MU = 50.0, 12.0
_MUS, _REFINEMENTS = 24, 3


@dataclass(frozen=True, kw_only=True)
class OneRun(Bound):
    """Lower bounds on epsilon at one delta from one run, alongside its stated epsilon.

    epsilon: float, at least 0. Proved (Steinke et al. 2023), provided the scores are computed from released values: if
        the true epsilon at `delta` were smaller, a bound this large would have probability at most 1 - confidence.
    trade_off_epsilon: float, at least 0. Not proved (Mahloujifar et al. 2024): assumes a mechanism with the trade-off
        function of two Gaussians.
    gaussian_epsilon: float, at least 0. Not proved: also assumes that the canaries' scores are independent.
    guesses, right: int, the number of guesses that gave `epsilon`, and how many were right.
    cost: float, the mechanism's stated epsilon at `delta`; None if unknown.
    """

    trade_off_epsilon: float
    gaussian_epsilon: float
    canaries: int
    guesses: int
    right: int

    def _lines(self) -> list[str]:
        trade_off, gaussian = (rounded_down(one, 4) for one in (self.trade_off_epsilon, self.gaussian_epsilon))
        return [
            f"{self._proved} ({self.right} of {self.guesses} guesses are right, {self.canaries} canaries)",
            f"hypothesis: at least {trade_off}, if the trade-off function is a Gaussian's",
            f"hypothesis: at least {gaussian}, if the canaries' scores are independent, too",
        ]


def draw_members(key: jax.Array, *, canaries: int) -> np.ndarray:
    """Draws which canaries take part, bool (canaries,): each independently, with probability 1/2.

    key: a scalar PRNG key that nothing else uses. canaries: int, at least 16. Raises ValueError for fewer, or if `key`
    is not a key.
    """
    canaries = require_whole("canaries", canaries, minimum=_LEAST_CANARIES)
    return np.asarray(jax.random.bernoulli(keys.stream(key, "members"), shape=(canaries,)))


@explain_misuse
def one_run(
    scores: Any, members: Any, *, delta: float, confidence: float = 0.95, guesses: Any = None, cost: float | None = None
) -> OneRun:
    """Computes lower bounds on the epsilon of a training run from one score per canary.

    scores: float (canaries,), for at least 16 canaries, larger for likely members; any functions of released values.
        Scores that also use the noise, or other secrets (such as a second run with the same key), prove nothing.
    members: bool (canaries,), the coins of `draw_members`. The run must depend on them only through who takes part, and
        the scores only through the run.
    delta: in (0, 1), at which epsilon is bounded. confidence: in (0, 1), of each of the three bounds in `OneRun`
        separately. cost: the run's stated epsilon at `delta`, to compare with, or None.
    guesses: int, or several, in [2, canaries]: how many canaries to guess, rounded down to even numbers; by default
        1/32, 1/16, 1/8, 1/4, 1/2 and all of them. Choose before you see the scores. Each of n numbers is tested at
        confidence 1 - (1 - confidence) / n, so the largest of the n bounds holds with `confidence`.

    `epsilon` is proved for such scores and members, but `trade_off_epsilon` and `gaussian_epsilon` are not. Raises
    ValueError for invalid values, shapes or dtypes, and for NaN.
    """
    delta = checks.require_delta(delta)
    confidence = require_open_fraction("confidence", confidence)
    cost = None if cost is None else checks.require_epsilon(cost)
    scores, members = require_enough_scores("scores", scores, _LEAST_CANARIES, "canaries"), np.asarray(members)
    if members.shape != scores.shape or members.dtype != np.bool_:
        raise ValueError(f"members must be bool {scores.shape}, like the scores; got {members.dtype}{members.shape}")
    size = len(scores)
    counts = _guess_counts(guesses, size)
    order = np.argsort(scores, kind="stable")
    right = np.array([members[order[size - k // 2 :]].sum() + (~members[order[: k // 2]]).sum() for k in counts])
    miss = (1 - confidence) / len(counts)
    proofs = [_largest_rejected(int(v), int(k), size, delta, miss) for v, k in zip(right, counts, strict=True)]
    best = int(np.argmax(proofs))
    return OneRun(
        epsilon=proofs[best],
        trade_off_epsilon=gdp.epsilon(_largest_rejected_mu(right, counts, size, miss), delta=delta),
        gaussian_epsilon=_gaussian_lower_bound(scores, members, delta, confidence),
        delta=delta,
        confidence=confidence,
        canaries=size,
        guesses=int(counts[best]),
        right=int(right[best]),
        cost=cost,
    )


def canary_loss(
    loss: Callable[[Tree, Any], Any], leaf: Callable[[Tree], jax.Array], *, scale: float = 1e3
) -> Callable[[Tree, Any], Any]:
    """Extends `loss` to pairs (example, coordinate), some of them canaries whose gradient is on one coordinate.

    leaf: (params) -> the array whose coordinates the canaries use. Give each canary its own, so they never interfere.
    coordinate: scalar int, the canary's index in the flat array, or -1 for an ordinary example, which `loss` gets.
    scale: above 0, the norm of a canary's gradient. Make it large, so that clipping leaves the full clip norm.

    With SGD, a good score is how far the coordinate fell in training. Raises ValueError for an invalid scale.
    """
    scale = require_number("scale", scale, minimum=0, exclusive=True)

    def loss_with_canaries(params, example):
        inner, coordinate = example
        place = scale * leaf(params).reshape(-1)[jnp.maximum(coordinate, 0)]
        usual = loss(params, inner)
        return jnp.where(coordinate < 0, usual, place.astype(jnp.result_type(usual)))

    return loss_with_canaries


def _guess_counts(guesses: Any, canaries: int) -> np.ndarray:
    """The numbers of guesses to try, int64 (n,); even, because half of the guesses say "member"."""
    given = [share * canaries for share in SHARES] if guesses is None else np.atleast_1d(guesses).tolist()
    counts = [int(number) // 2 * 2 for number in given] if guesses is None else given
    counts = [require_whole("guesses", number, minimum=2, maximum=canaries) // 2 * 2 for number in counts if number]
    if not counts:
        raise ValueError(f"guesses must hold at least one number, got {described(guesses)}")
    return np.unique(counts)


def _largest_rejected(right: int, guesses: int, canaries: int, delta: float, miss: float) -> float:
    """The largest epsilon that this many right guesses reject, to within 1e-6; 0 if they reject none."""
    low, high = 0.0, _LARGEST_EPSILON
    if steinke_p_value(right, guesses, canaries, low, delta) > miss:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        rejected = steinke_p_value(right, guesses, canaries, middle, delta) <= miss
        low, high = (middle, high) if rejected else (low, middle)
    return low


def _largest_rejected_mu(right: np.ndarray, guesses: np.ndarray, canaries: int, miss: float) -> float:
    """The largest mu that any of the tests rejects, rounded down; 0 if none does."""
    low, high = 0.0, _LARGEST_MU
    for _ in range(_REFINEMENTS):
        mus = np.linspace(low, high, _MUS + 1)[1:]
        tests = np.repeat(right, _MUS), np.repeat(guesses, _MUS), canaries, np.tile(mus, len(right))
        rejected = trade_off_rejected(*tests, np.full(len(right) * _MUS, miss))
        found = np.flatnonzero(rejected.reshape(-1, _MUS).any(axis=0))
        width = (high - low) / _MUS
        low = float(mus[found[-1]]) if len(found) else low
        high = low + width
    return low


def _gaussian_lower_bound(scores: np.ndarray, members: np.ndarray, delta: float, confidence: float) -> float:
    """Treats the canaries as runs and computes the Gaussian bound of many runs; 0 if either world has too few."""
    order = np.random.default_rng(0).permutation(len(scores))  # a canary's position may predict how well it is guessed
    present, absent = scores[order][members[order]], scores[order][~members[order]]
    if min(len(present), len(absent)) < _LEAST_CANARIES // 4:
        return 0.0
    return lower_bound_from_scores(present, absent, delta=delta, confidence=confidence).gaussian_epsilon


def steinke_p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of `right` or more right guesses under (epsilon, delta)-differential privacy.

    P(Binomial(k, p) >= v) + 2 m delta max_{i>=1} P(v - i <= Binomial(k, p) < v) / i,  p = e^epsilon / (1 + e^epsilon)
    """
    probability = float(special.expit(epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, probability))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, probability))
    likely = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * likely)


def trade_off_rejected(
    right: np.ndarray, guesses: np.ndarray, canaries: int, mus: np.ndarray, miss: np.ndarray
) -> np.ndarray:
    """Whether `right` or more right guesses have a probability below `miss` under mu-GDP, bool (tests,).

    right, guesses: int (tests,). mus, miss: float (tests,). All tests are vectorized.
    """
    wrong_share = (guesses - right) / canaries
    r, h = miss * right / canaries, miss * wrong_share
    for i in range(int(right.max(initial=0)), 0, -1):
        started = i <= right
        # g is the inverse of 1 - f, for f(a) = Phi(Phi^-1(1 - a) - mu): g(r) = Phi(Phi^-1(r) - mu)
        least = special.ndtr(special.ndtri(np.minimum(r, 1.0)) - mus)
        longer = np.where(started, np.maximum(h, least), h)
        r, h = r + (i - 1) / np.maximum(guesses - i + 1, 1) * (longer - h), longer
    return r + h > guesses / canaries
