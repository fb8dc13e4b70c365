"""How far error feedback lets one example move all releases of a run: sum_t |shift_t|^2, in units of C1 / B.

Leaving an example out moves the error by D and a release by S = the move of what is fed back (and by 1 more where the
example takes part); F moves on with what is not fed back. What is fed back is a firmly non-expansive map of the error
(the projection onto a ball, or its smooth form), so S^2 + F^2 <= D^2, and the next D is F, plus at most rho at a
participation. Given the steps at which the example takes part:

1. k participations have energy at most c_k^2, c_k = sqrt(1 + (rho + c_(k-1))^2), c_0 = 0, over however many steps:
   V_j(d) = (d + c_j)^2 is the most from a move d with j to come, as V_0(d) = d^2, waiting gains nothing, and the max of
   (s + 1)^2 + (F + rho + c_(j-1))^2 over s^2 + F^2 <= d^2 is (d + c_j)^2 by Cauchy-Schwarz. c_k <= sqrt k + k rho.
2. An energy E, bounding every run, is mu-GDP with mu = sqrt(E) / nu although the shifts depend on past releases: one
   more release pads it to exactly E; then the log-likelihood ratio is a martingale of Gaussian increments whose
   variances add up to E / nu^2 whatever happens, so it is N(-+ E / 2 nu^2, E / nu^2).
3. Whatever the error holds, S <= 2 C2, and S = 0 at the first step and after each reset: the trivial energy.
4. At random steps: delta is jointly convex, so it is at most its mean over the participations, as if they were known;
   nothing is amplified. c_k^2 is convex in k, so k participations do most in as few stretches between resets as can be.

Replacing an example instead doubles every shift.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

TAIL = 1e-14  # probability of more participations than are looked at; added to delta


def accumulated(most: int, error_shift: float) -> np.ndarray:
    """c_k^2 of k = 0 .. most participations without a reset between them, (most + 1,); error_shift = rho."""
    energies = np.zeros(most + 1)
    for k in range(1, most + 1):
        energies[k] = 1 + (error_shift + math.sqrt(energies[k - 1])) ** 2
    return energies


def trivial(participations: np.ndarray, steps: int, reset_every: int, feedback_shift: float) -> np.ndarray:
    """The energy when all that is known of the error is that 2 C2 bounds S; feedback_shift = 2 C2 B / C1."""
    fed = steps - -(-steps // reset_every)  # releases after the first of a stretch
    energies = participations + 2 * feedback_shift * np.minimum(participations, fed) + feedback_shift**2 * fed
    return np.where(participations > 0, energies, 0.0)


def fixed(steps: int, steps_per_epoch: int, reset_every: int, error_shift: float, feedback_shift: float) -> float:
    """The energy of one participation in every epoch begun, each where it does most.

    Epochs i .. j can have theirs in one stretch between resets if the last step of i is not before the stretch that j
    begins in.
    """
    epochs = -(-steps // steps_per_epoch)
    bound = float(trivial(np.array(epochs), steps, reset_every, feedback_shift))
    if math.isinf(error_shift):
        return bound
    energies, worst = accumulated(epochs, error_shift), np.zeros(epochs + 1)
    for j in range(epochs):
        stretch = j * steps_per_epoch // reset_every
        i = stretch * reset_every // steps_per_epoch
        worst[j + 1] = np.max(worst[i : j + 1] + energies[j + 1 - i : 0 : -1])
    return min(bound, float(worst[-1]))


def random(most: int, steps: int, reset_every: int, error_shift: float, feedback_shift: float) -> np.ndarray:
    """The energy of k = 0 .. most participations, each where it does most."""
    participations = np.arange(most + 1)
    bound = trivial(participations, steps, reset_every, feedback_shift)
    if math.isinf(error_shift):
        return bound
    energies = accumulated(reset_every if most > reset_every else most, error_shift)
    stretches, rest = np.divmod(participations, len(energies) - 1)
    return np.minimum(bound, stretches * energies[-1] + energies[rest])


def most_participations(steps: int, rate: float, tail: float) -> int:
    """The least number that is exceeded with probability at most `tail`."""
    return int(np.argmax(stats.binom.sf(np.arange(steps + 1), steps, rate) <= tail))


def deltas_at_random(
    *, steps: int, rate: float, reset_every: int, error_shift: float, feedback_shift: float, noise_multiplier: float
) -> Callable[[float], float]:
    """delta as a function of epsilon for participations by a coin of probability `rate` at every step, as if known."""
    most = most_participations(steps, rate, TAIL)
    probabilities = stats.binom.pmf(np.arange(1, most + 1), steps, rate)
    mus = np.sqrt(random(most, steps, reset_every, error_shift, feedback_shift)[1:]) / noise_multiplier
    missing = float(stats.binom.sf(most, steps, rate))

    def delta(epsilon: float) -> float:
        first = special.log_ndtr(mus / 2 - epsilon / mus)
        second = epsilon + special.log_ndtr(-mus / 2 - epsilon / mus)
        deltas = np.exp(first) * -np.expm1(np.minimum(second - first, 0))
        return min(1.0, float(probabilities @ deltas) + missing)

    return delta
