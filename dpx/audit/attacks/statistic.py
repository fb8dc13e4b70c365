"""The score of a run: how much likelier its releases are with the canary than without, if they are Gaussian.

Any score of released values that is fixed before the runs that are counted gives a valid bound; this one is near the
best for the methods of dpx. Pilot runs, which are not counted, give means and covariances. An observation divided by
the move of one canary (`lower_bound_runs`) counts the canaries in a release, because one canary adds 1 to it. Without
the canary, these counts are whitened in the order of the steps, so that the part of a release that earlier releases
explain is removed. Then z_t ~ N(0, 1) without, and N(mu_t, 1) with the canary in the batch, so that the logarithm of
the ratio of likelihoods is

    sum_t ln(1 - q_t + q_t exp(a_t)),  a_t = mu_t z_t - mu_t^2 / 2,

where q_t is the probability that the canary takes part. Where it takes part once an epoch, as in batches of a
permutation and with random allocation, the sum is over epochs: ln mean_t exp(a_t).

Where a release is not linear, the move depends on the noise, which the adversary does not know. There the mean move of
the pilot runs has its place: the attack is weaker, and as valid.
"""

from typing import NamedTuple

import numpy as np
from scipy import special

from dpx.audit.attacks.simulation import Observed

_SAME_MOVES = 1e-3  # relative; moves that differ less are the same
_REGULAR = 1e-6  # of the variance, so that features that are constant or the same do no harm


class Counts(NamedTuple):
    """Of many runs, float32 (runs, steps, features) each: the canaries that each release seems to hold, and the size of
    the move of one canary; 0 both where it does not move what is observed.
    """

    counts: np.ndarray
    moves: np.ndarray


class Moves(NamedTuple):
    """How far one canary moves what is observed of a release. Pilot runs say it.

    mean: float64 (steps, features). known: bool (steps, features), False where the mean is taken in every run, because
        the noise changes the move, or because all runs have the same. noisy: bool (steps, features), the former.
    """

    mean: np.ndarray
    known: np.ndarray
    noisy: np.ndarray

    def counts(self, found: Observed) -> Counts:
        """`Counts` of the runs. found.moves must hold the moves under one noise, if any are `known`."""
        moves = np.where(self.known, found.moves[:, 0], self.mean) if self.known.any() else self.mean
        moves = np.broadcast_to(moves, found.observed.shape)
        counts = np.divide(found.observed, moves, out=np.zeros(moves.shape), where=moves != 0)
        return Counts(counts, np.abs(moves))


def moves_of(pilot: Observed) -> Moves:
    """The moves in pilot runs, which hold those under two noises of the adversary."""
    one, other = pilot.moves[:, 0].astype(np.float64), pilot.moves[:, 1]
    size = _SAME_MOVES * _root_mean_square(one)
    noisy = _root_mean_square(one - other) > size
    mean = pilot.moves.mean(axis=(0, 1), dtype=np.float64)
    return Moves(mean, ~noisy & (_root_mean_square(one - mean) > size), noisy)


def _root_mean_square(values: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(values**2, axis=0))


class Statistic(NamedTuple):
    """What the pilot runs say of `Counts`.

    center: float64 (steps * features,), the mean count without the canary.
    whitening: float64 (steps * features,) squared, lower triangular.
    signal: float64 (steps, features), mu_t.
    moves: float64 (steps, features), the mean move. gain: float, the precision of a count grows as move^(2 gain).
    rates: float64 (steps,), q_t. period: int, steps of an epoch; 0 where the steps are independent.
    """

    center: np.ndarray
    whitening: np.ndarray
    signal: np.ndarray
    moves: np.ndarray
    gain: float
    rates: np.ndarray
    period: int

    def scores(self, found: Counts) -> np.ndarray:
        """The score of each run, float64 (runs,)."""
        weights = _weights(found.moves, self.moves, self.gain)
        residuals = ((_flat(found.counts) - self.center) * _flat(weights)) @ self.whitening.T
        signal = self.signal * weights
        exponents = (residuals.reshape(signal.shape) * signal - signal**2 / 2).sum(axis=2)
        if self.period:
            missing = -exponents.shape[1] % self.period
            epochs = np.pad(exponents, ((0, 0), (0, missing)))  # in the rest of an epoch, nothing is released
            grouped = epochs.reshape(len(epochs), -1, self.period)
            return (special.logsumexp(grouped, axis=2) - np.log(self.period)).sum(axis=1)
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-self.rates), np.log(self.rates) + exponents).sum(axis=1)


def fit(without: Counts, with_: Counts, rates: np.ndarray, period: int) -> Statistic:
    """The statistic for pilot runs without the canary, and with the canary in every batch.

    rates: float64 (steps,). period: int, as in `Statistic`.
    """
    moves = without.moves.astype(np.float64).mean(axis=0)
    center = _flat(without.counts).mean(axis=0)
    residuals = _flat(without.counts) - center
    gain = _gain(residuals, _flat(_weights(without.moves, moves, 1.0)))
    residuals *= _flat(_weights(without.moves, moves, gain))
    covariance = residuals.T @ residuals / len(residuals)
    scale = np.maximum(np.diag(covariance), 1e-30)
    whitening = np.linalg.inv(np.linalg.cholesky(covariance + _REGULAR * np.diag(scale)))
    if (rates < 1).any():  # each batch is a guess of its own, and the canary adds 1 to the counts of its batch alone
        own = whitening.reshape(*moves.shape, *moves.shape)
        signal = np.einsum("tftg,tg->tf", own, (moves > 0).astype(np.float64))
    else:
        shifts = (_flat(with_.counts) - center) * _flat(_weights(with_.moves, moves, gain))
        signal = (whitening @ shifts.mean(axis=0)).reshape(moves.shape)
    return Statistic(center, whitening, signal, moves, gain, rates, period)


def _flat(counts: np.ndarray) -> np.ndarray:
    return counts.reshape(len(counts), -1).astype(np.float64)


def _weights(moves: np.ndarray, mean: np.ndarray, gain: float) -> np.ndarray:
    """How precise the counts are, relative to the mean move; 0 where the canary moves nothing."""
    moved = (moves > 0) & (mean > 0)
    return np.where(moved, np.divide(moves, mean, out=np.ones(moves.shape), where=moved) ** gain, 0.0)


def _gain(residuals: np.ndarray, relative_moves: np.ndarray) -> float:
    """How fast the residuals shrink as the moves grow: the slope of -ln |residual| against ln move between runs.

    It is 0 if the moves hardly differ between runs. Columns are compared with themselves, because their scales differ.
    It is at most 1, the gain where the noise does not depend on the move.
    """
    with np.errstate(divide="ignore"):
        sizes, moves = (np.ma.masked_invalid(np.log(np.abs(part))) for part in (residuals, relative_moves))
    moves = moves - moves.mean(axis=0)
    spread = float(np.mean(moves**2))
    if np.ma.count(moves) == 0 or spread < _SAME_MOVES**2:
        return 0.0
    return float(np.clip(-np.mean(moves * (sizes - sizes.mean(axis=0))) / spread, 0.0, 1.0))
