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

Where the noise of a step is correlated with that of earlier ones, a canary in step t moves z in the later steps too, by
column t of the whitening. In a fixed order, one knows all its steps, and the score is that of the sum of these columns.
With cyclic sampling, the coins of one group move steps that do not overlap. So a_t is that of column t, the sum is over
the steps of a group, and the score is ln mean exp of these sums over the groups.

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
    groups: int, of cyclic sampling; 1 for others. columns: float64 (steps, steps, features), how a canary in one step
    moves the whitened counts; None without groups.
    """

    center: np.ndarray
    whitening: np.ndarray
    signal: np.ndarray
    moves: np.ndarray
    gain: float
    rates: np.ndarray
    period: int
    groups: int = 1
    columns: np.ndarray | None = None

    def scores(self, found: Counts) -> np.ndarray:
        """The score of each run, float64 (runs,)."""
        weights = _weights(found.moves, self.moves, self.gain)
        residuals = ((_flat(found.counts) - self.center) * _flat(weights)) @ self.whitening.T
        if self.columns is not None:
            return self._of_groups(residuals.reshape(found.counts.shape), self.columns)
        signal = self.signal * weights
        exponents = (residuals.reshape(signal.shape) * signal - signal**2 / 2).sum(axis=2)
        if self.period:
            missing = -exponents.shape[1] % self.period
            epochs = np.pad(exponents, ((0, 0), (0, missing)))  # in the rest of an epoch, nothing is released
            grouped = epochs.reshape(len(epochs), -1, self.period)
            return (special.logsumexp(grouped, axis=2) - np.log(self.period)).sum(axis=1)
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-self.rates), np.log(self.rates) + exponents).sum(axis=1)

    def _of_groups(self, residuals: np.ndarray, columns: np.ndarray) -> np.ndarray:
        exponents = np.einsum("nsf,tsf->nt", residuals, columns) - np.square(columns).sum(axis=(1, 2)) / 2
        coins = np.minimum(self.rates * self.groups, 1.0)
        with np.errstate(divide="ignore"):
            ratios = np.logaddexp(np.log1p(-coins), np.log(coins) + exponents)
        of_group = np.arange(len(coins)) % self.groups == np.arange(self.groups)[:, None]
        return special.logsumexp(ratios @ of_group.T, axis=1) - np.log(self.groups)


def fit(without: Counts, with_: Counts, rates: np.ndarray, period: int, groups: int = 1) -> Statistic:
    """The statistic for pilot runs without the canary, and with the canary in every batch.

    rates: float64 (steps,). period, groups: int, as in `Statistic`.
    """
    moves = without.moves.astype(np.float64).mean(axis=0)
    center = _flat(without.counts).mean(axis=0)
    residuals = _flat(without.counts) - center
    gain = _gain(residuals, _flat(_weights(without.moves, moves, 1.0)))
    residuals *= _flat(_weights(without.moves, moves, gain))
    covariance = residuals.T @ residuals / len(residuals)
    scale = np.maximum(np.diag(covariance), 1e-30)
    whitening = np.linalg.inv(np.linalg.cholesky(covariance + _REGULAR * np.diag(scale)))
    own, one = whitening.reshape(*moves.shape, *moves.shape), (moves > 0).astype(np.float64)
    columns = None
    if groups > 1:
        later = np.subtract.outer(np.arange(len(rates)), np.arange(len(rates)))
        columns = np.einsum("sftg,tg->tsf", own, one) * ((later >= 0) & (later < groups)).T[..., None]
        signal = one
    elif not ((rates > 0) & (rates < 1)).any() and (rates < 1).any():  # it is known when the canary takes part
        signal, rates = np.einsum("sftg,tg,t->sf", own, one, rates), np.ones(len(rates))
    elif (rates < 1).any():  # each batch is a guess of its own, and the canary adds 1 to the counts of its batch alone
        signal = np.einsum("tftg,tg->tf", own, one)
    else:
        shifts = (_flat(with_.counts) - center) * _flat(_weights(with_.moves, moves, gain))
        signal = (whitening @ shifts.mean(axis=0)).reshape(moves.shape)
    return Statistic(center, whitening, signal, moves, gain, rates, period, groups, columns)


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
