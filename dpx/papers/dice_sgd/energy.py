"""The energy of error feedback: how far one example moves all releases of a run, sum_t |shift_t|^2 in units of C1 / B.

Leaving an example out moves the error by D and a release by S. S is the move of what is fed back, plus 1 at a step
where the example takes part (a participation). F is the move of what is not fed back. Feeding back is a firmly
non-expansive map of the error (the projection onto a ball, or its smooth form), so S^2 + F^2 <= D^2. The next D is F,
plus at most rho (`error_sensitivity`) at a participation. For given participations:

1. k participations have energy at most c_k^2, c_k = sqrt(1 + (rho + c_(k-1))^2), c_0 = 0, in any number of steps.
   Proof: V_j(d) = (d + c_j)^2 is the largest energy from a move d with j participations left. V_0(d) = d^2, and a step
   without participation adds nothing. By Cauchy-Schwarz the maximum of (s + 1)^2 + (F + rho + c_(j-1))^2 for
   s^2 + F^2 <= d^2 is (d + c_j)^2. Also, c_k <= sqrt k + k rho.
2. If E bounds the energy of every run, the run is mu-GDP with mu = sqrt(E) / nu, although the shifts depend on past
   releases. Proof: one more release pads the energy to exactly E. Then the log-likelihood ratio is a martingale of
   Gaussian increments whose variances add up to E / nu^2 in every case, so it is N(-+ E / 2 nu^2, E / nu^2).
3. For any error, S <= 2 C2 (`feedback_shift`, in units of C1 / B), and S = 0 at the first step and after each reset.
   These shifts have the trivial energy.
4. If the participations are random, delta is at most its mean over them, as if they were known, because delta is
   jointly convex. This bound has no amplification. c_k^2 is convex in k, so the worst case puts k participations into
   as few stretches between resets as possible.

If an example is replaced instead of left out, every shift doubles.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

TAIL = 1e-14  # probability of more participations than are considered; it is added to delta


def accumulated_energies(most: int, error_shift: float) -> np.ndarray:
    """c_k^2 for k = 0 .. most participations without a reset between them, float64 (most + 1,)."""
    energies = np.zeros(most + 1)
    for k in range(1, most + 1):
        energies[k] = 1 + (error_shift + math.sqrt(energies[k - 1])) ** 2
    return energies


def trivial_energy_bounds(
    participations: np.ndarray, steps: int, reset_every: int, feedback_shift: float
) -> np.ndarray:
    """The trivial energy of each number of participations, which holds for any error. int64 (n,) -> float64 (n,)."""
    moved_by_error = steps - -(-steps // reset_every)  # the releases that are not the first of a stretch
    both = np.minimum(participations, moved_by_error)  # releases that the example moves twice
    energies = participations + 2 * feedback_shift * both + feedback_shift**2 * moved_by_error
    return np.where(participations > 0, energies, 0.0)


def energy_of_epochs(
    steps: int, steps_per_epoch: int, reset_every: int, error_shift: float, feedback_shift: float
) -> float:
    """The energy of one participation in every epoch, including an incomplete one, at the worst step of each.

    Epochs i .. j can take part in one stretch between resets if epoch i does not end before the stretch of epoch j
    begins.
    """
    epochs = -(-steps // steps_per_epoch)
    trivial = float(trivial_energy_bounds(np.array(epochs), steps, reset_every, feedback_shift))
    if math.isinf(error_shift):
        return trivial
    energies, worst = accumulated_energies(epochs, error_shift), np.zeros(epochs + 1)
    for j in range(epochs):
        stretch = j * steps_per_epoch // reset_every
        i = stretch * reset_every // steps_per_epoch
        worst[j + 1] = np.max(worst[i : j + 1] + energies[j + 1 - i : 0 : -1])
    return min(trivial, float(worst[-1]))


def energies_at_any_steps(
    most: int, steps: int, reset_every: int, error_shift: float, feedback_shift: float
) -> np.ndarray:
    """The energy of k = 0 .. most participations, at the worst steps, float64 (most + 1,)."""
    participations = np.arange(most + 1)
    trivial = trivial_energy_bounds(participations, steps, reset_every, feedback_shift)
    if math.isinf(error_shift):
        return trivial
    energies = accumulated_energies(reset_every if most > reset_every else most, error_shift)
    full_stretches, rest = np.divmod(participations, len(energies) - 1)
    return np.minimum(trivial, full_stretches * energies[-1] + energies[rest])


def participations_quantile(steps: int, rate: float, tail: float) -> int:
    """The least number that the participations exceed with probability at most `tail`."""
    return int(np.argmax(stats.binom.sf(np.arange(steps + 1), steps, rate) <= tail))


def delta_of_random_participations(
    *, steps: int, rate: float, reset_every: int, error_shift: float, feedback_shift: float, noise_multiplier: float
) -> Callable[[float], float]:
    """delta as a function of epsilon: its mean over random participations, as if these were known."""
    most = participations_quantile(steps, rate, TAIL)
    probabilities = stats.binom.pmf(np.arange(1, most + 1), steps, rate)
    energies = energies_at_any_steps(most, steps, reset_every, error_shift, feedback_shift)
    mus = np.sqrt(energies[1:]) / noise_multiplier
    missing = float(stats.binom.sf(most, steps, rate))

    def delta(epsilon: float) -> float:
        log_upper = special.log_ndtr(mus / 2 - epsilon / mus)
        log_lower = epsilon + special.log_ndtr(-mus / 2 - epsilon / mus)
        deltas = np.exp(log_upper) * -np.expm1(np.minimum(log_lower - log_upper, 0))
        return min(1.0, float(probabilities @ deltas) + missing)

    return delta
