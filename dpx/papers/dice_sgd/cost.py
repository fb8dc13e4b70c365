"""The cost of a run with error feedback: one event for all its steps, whose cost is the least of three bounds.

When an example takes part in a step, it changes every later release. So the steps do not compose, and dp-accounting's
accountants refuse the event.

# The energy: how far one example moves all releases of a run, sum_t |shift_t|^2 in units of C1 / B

Leaving an example out moves the error by D, its fed-back part by S, and the rest of the error by F. The release moves
by S, plus at most 1 at a step in which the example takes part (a participation). Feeding back is a firmly non-expansive
map of the error (the projection onto a ball, or its smooth form), so S^2 + F^2 <= D^2. The next D is F, plus at most
rho (`error_sensitivity`) at a participation. For given participations:

1. k participations have energy at most c_k^2, c_k = sqrt(1 + (rho + c_(k-1))^2), c_0 = 0, in any number of steps.
   Proof: V_j(d) = (d + c_j)^2 is the largest energy from a move d with j participations left. V_0(d) = d^2, and a step
   without participation adds nothing. By Cauchy-Schwarz, the maximum of (s + 1)^2 + (F + rho + c_(j-1))^2 for
   s^2 + F^2 <= d^2 is (d + c_j)^2. Also, c_k <= sqrt k + k rho.
2. If E bounds the energy of every run, the run is mu-GDP with mu = sqrt(E) / nu, although the shifts depend on past
   releases. Proof: one more release pads the energy to exactly E. Then the log-likelihood ratio is a martingale of
   Gaussian increments whose variances add up to E / nu^2 in every case, so it is N(-+ E / 2 nu^2, E / nu^2).
3. For any error, S <= 2 C2 (`feedback_shift`, in units of C1 / B), and S = 0 at the first step and after each reset.
   These shifts have the trivial energy.
4. If the participations are random, delta is at most the mean, over all of them, of delta for known ones, because
   delta is jointly convex. This bound has no amplification. c_k^2 is convex in k, so the worst case puts k
   participations into as few stretches between resets as possible.

If an example is replaced instead of left out, every shift doubles.

# On Poisson samples, amplified: Renyi divergences by a backward recursion over the steps

This bound is sound but not tight: at rate 0.02, noise multiplier 1, 1,000 steps and ten known participations, the cost
is 0.9% above the result of enumeration.

S, F and rho are as above, nu is the noise in units of C1 / B, q the sampling rate, and l_s the likelihood ratio of
N(s, nu^2) to N(0, nu^2). Let X be the likelihood ratio of a run with the example to a run without it. Let W_t(d) bound
the L^a norm of the part of X from the releases t, t + 1, ..., if the error has moved by d. By Minkowski's inequality,

    W_t(d) = max over s^2 + F^2 <= d^2 of |(1-q) W_(t+1)(F) l_s + q W_(t+1)(F + rho) l_(s+1)|_a,      W_(T+1) = 1

because the norm grows with <S, participation> and with the participation's length. So D_a(with|without) <=
a/(a-1) ln W_1(0).

The same number bounds D_a(without|with). By the reverse of Minkowski's inequality for the exponent 1 - a, the recursion
for w_t with min and |.|_(1-a) gives D_a(without|with) <= -ln w_1(0). By induction backwards, w_t >= W_t^-b with
b = a/(a-1). After a change of measure, its step is E (1-q + q r^-b e^h)^(1-a) <= E (1-q + q r e^h)^a for
h ~ N(-1/2nu^2, 1/nu^2) and r = e^((a-1)s/nu^2) W_(t+1)(F + rho) / W_(t+1)(F) >= 1. Let X = 1-q + q e^h, p = q e^h / X.
By the inequality of the means the left side is at most E X^(1-a) r^(a p), the right side at least E X^a r^(a p). Now
X^a - X^(1-a) has the sign of h, r^(a p) grows with h, and E X^a >= E X^(1-a) (Theorem 5 of Mironov, Talwar and Zhang
2019, https://arxiv.org/abs/1908.10530), so E (X^a - X^(1-a)) r^(a p) >= 0.

Runs with more than `most` participations are left out. Given at most `most`, a participation has probability at most q,
and W grows with that probability. The probability of more is added once to delta and, in the other direction, once to
epsilon. A move above (most - 1) rho means that there were `most` participations. No more can follow, so U = 1, and any
convex continuation from below is an upper bound.

Numerically W_t(d) = e^(G d^2) U_t(d), G = (a-1) / 2 nu^2, where ln U_t is convex and grows, because sums, products,
norms and suprema of such functions are such functions. So chords between grid points are above ln U_t, and its maximum
on a quarter disc is at most its maximum on the corners of a polygon around the disc: both are upper bounds.

# Why the costs hold for the computed releases, and for which runs

The unit is C1 / B, so what is fed back is multiplied by B / C1. The computed sums and withheld parts move by at most
1 + ETA times 1 and rho (`dpx.sums.rounding`), and the noise is 1 + ETA + ERROR times what the cost assumes. The bounds
scale: if nu, shifts and error moves are all multiplied by 1 + ETA + ERROR, the cost is the same. So the rounding of the
error may move a run by ERROR times the shift, and ERROR times rho, of its first participation.

A STEP, with v = 2^-53, from an error e with |e| <= M, which is two float32 numbers and exact in float64. The computed
norm is off by 32 v (`sums.rounding`), the scale of the part that is fed back by 36 v, that part by 37 v M, what is
remembered by 33 v M, and its difference, the division of the withheld part, their sum, and its two float32 numbers by
37 v M more: the next error by 107 v M in all. The released sum T + B fed is off by 72 v B M + 34 v |T|, |T| <= n for n
rows. The exact map is the projection onto a ball, where what is remembered has a largest norm, and then the firmly
non-expansive one of the energy. So two runs with errors at distance D have

    S^2 + F^2 <= D^2,   release: S + a,  a = 144 v B M + 68 v n;   next D: F + b,  b = 214 v B M,

plus their participation. Runs have equal bits until the first participation, and again after a reset.

A RUN of R steps between resets. Let x_T = 0 and x_t = sqrt(a^2 + (b + x_(t+1))^2), so x_1 <= R b + sqrt(R) a. For s^2 +
F^2 <= D^2, (s + a, F + b + x_(t+1)) has length at most D + x_t. So for every bound V_t(D) that follows from the maximum
over that disc and grows with s and F, as both bounds do, the computed run has V_t(D + x_t), by backward induction. The
first participation raises D, and with it x, from 0, and its cost covers rho ERROR more than D moves. So x_1 <=
rho ERROR is enough.

|e| <= M = m W with W = n rho / B: each step adds at most W to what is not fed back. m = R in general. m = 2 if C2 >=
2 W, because an error of at most 2 W then leaves at most W. So x_1 <= 316 v R m n rho + 68 v sqrt(R) n, and this is at
most 3/4 of rho ERROR if

    R m n <= 2^29   and   sqrt(R) n <= 2^29 min(1, rho).

The rest is for the participation's own step, the factors of what is withheld, and the float32 standard deviation of the
noise: 2^-20 in all. If rho = 0, nothing is ever fed back.

THE TRIVIAL COST, for an infinite outer norm, bounds each shift by 2 C2. The computed part has a norm of at most C2 (1 +
72 v), and the released sum is off by at most another 68 v n. By Minkowski's inequality, the root of the energy of a
stretch, which is at least 1, grows by sqrt(R) 68 v n. So only the second condition is needed, with 1 for rho.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import attrs
import numpy as np
from dp_accounting import DpEvent
from scipy import special, stats

from dpx.accounting.checks import Accountant, Profile, Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount
from dpx.accounting.pld import renyi
from dpx.accounting.profiles import UNBOUNDED, DeltaProfile, GaussianProfile, MinOrMaxProfile, RenyiProfile
from dpx.sampling.schemes import FixedSizeSampling, FullBatch, Sampling, ShuffledEpochs
from dpx.sampling.varying import PoissonSampling
from dpx.values import rounded_up

SAMPLINGS = (PoissonSampling, FixedSizeSampling, ShuffledEpochs, FullBatch)


@attrs.frozen
class ErrorFeedbackDpEvent(DpEvent, PrivacyLoss):
    """A run of `steps` releases of sum + fed-back error + noise. One example moves the sum by at most 1, which is C1.

    noise_multiplier: nu, the standard deviation of the noise.
    error_shift: rho, the most that one participation moves the error; inf if there is no bound.
    feedback_shift: 2 C2 B / C1, the most that the fed-back error moves, for any error.
    steps: the number of releases of the run.
    reset_every: the error is set to 0 after this many steps; None if never.
    sampling: the sampling record, which draws the batches.
    """

    noise_multiplier: float
    error_shift: float
    feedback_shift: float
    steps: int
    reset_every: int | None
    sampling: Sampling
    whole_run = True

    @property
    def release_count(self) -> ReleaseCount:
        return ReleaseCount(self.steps, self.steps)

    def profile(self, accountant: Accountant, relation: Relation) -> Profile:
        """Returns the least of the bounds. The accountant "rdp" uses only the amplified bound, or Gaussian privacy."""
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return UNBOUNDED
        return MinOrMaxProfile(min, tuple(profiles_by_bound(self, accountant, relation).values()))

    def explain(self, delta: float, relation: Relation) -> str:
        """Describes the bounds of the run, and which of them is its cost."""
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return "Error feedback without noise has no finite epsilon."
        epsilons = {name: bound.epsilon(delta) for name, bound in profiles_by_bound(self, "tightest", relation).items()}
        least = min(epsilons, key=lambda name: epsilons[name])
        listed = ", ".join(f"{name}: {rounded_up(value, 6)}" for name, value in epsilons.items())
        return (
            "Error feedback is one event of all its steps, by dpx's own bounds. No privacy loss distribution "
            f'is known, so "pld" gives the least of them. Used: {least}. All: {listed}. {_describe_rounding(self)}'
        )


def _describe_rounding(event: ErrorFeedbackDpEvent) -> str:
    covered = covers_rounding(
        steps=event.steps,
        reset_every=event.reset_every,
        error_shift=event.error_shift,
        feedback_shift=event.feedback_shift,
        batch_size=event.sampling.divisor,
        examples=event.sampling.examples,
    )
    if covered:
        return "The noise also covers the rounding of the error."
    return (
        "With this many steps between resets, the noise does not cover the rounding of the error, so this epsilon is "
        "for real numbers (docs/exact.md)."
    )


def profiles_by_bound(event: ErrorFeedbackDpEvent, accountant: Accountant, relation: Relation) -> dict[str, Profile]:
    """Returns every bound that holds for the sampling and the relation, by name. Raises ValueError if there is none."""
    sampling, stated = event.sampling, event.sampling.relation
    if not sampling.unweighted_and_unlimited:
        words = "its bounds are proved for coins of one rate"
        raise ValueError(f"error feedback has no known cost for Poisson sampling with most_rows or weights: {words}")
    moves_rows = relation == "add_or_remove" and not isinstance(sampling, PoissonSampling)
    if relation != stated and (stated == "replace_one" or moves_rows):
        raise ValueError(f'relation {relation!r} does not fit {sampling}, whose cost holds for "{stated}"')
    noise = min(event.noise_multiplier, renyi.LARGEST_NOISE) / (2 if relation == "replace_one" else 1)
    reset_every = min(event.steps, event.reset_every or event.steps)
    run: dict[str, Any] = dict(steps=event.steps, reset_every=reset_every, error_shift=event.error_shift)
    if epoch := sampling.steps_per_public_epoch:
        energy = squared_shift_over_epochs(steps_per_epoch=epoch, feedback_shift=event.feedback_shift, **run)
        mu = math.sqrt(energy) / noise
        if accountant == "rdp":
            return {"Gaussian privacy": RenyiProfile(renyi.ORDERS * mu**2 / 2)}
        return {"participations known, Gaussian privacy": GaussianProfile(mu)}
    if not isinstance(sampling, PoissonSampling | FixedSizeSampling):
        names = ", ".join(known.__name__ for known in SAMPLINGS)
        raise ValueError(f"error feedback has a known cost only for {names}, got {sampling}")
    rate = sampling.divisor / sampling.examples
    profiles: dict[str, Profile] = {}
    if accountant != "rdp":
        deltas = delta_of_random_participations(
            rate=rate, feedback_shift=event.feedback_shift, noise_multiplier=noise, **run
        )
        profiles["random participations as if known, not amplified"] = DeltaProfile(deltas)
    if relation != "replace_one" and rate < 1 and math.isfinite(event.error_shift):
        profiles["amplified by sampling, Renyi recursion"] = AmplifiedProfile(rate=rate, noise_multiplier=noise, **run)
    if not profiles:
        raise ValueError(
            f'accountant "rdp" knows the cost of error feedback on {sampling} only at a rate below 1, under relation '
            f'"add_or_remove" or "zero_out" and with a finite outer_clip_norm; got {event}, relation {relation!r}'
        )
    return profiles


TAIL = 1e-14  # the probability of more participations than the bound considers; it is added to delta


def squared_shifts_without_reset(most: int, error_shift: float) -> np.ndarray:
    """Returns the energy c_k^2 of k = 0 .. most participations with no reset in between, float64 (most + 1,)."""
    energies = np.zeros(most + 1)
    for k in range(1, most + 1):
        energies[k] = 1 + (error_shift + math.sqrt(energies[k - 1])) ** 2
    return energies


def trivial_squared_shifts(
    participations: np.ndarray, steps: int, reset_every: int, feedback_shift: float
) -> np.ndarray:
    """Returns the trivial energy, a bound for any error, for each number of participations, float64 (n,)."""
    moved_by_error = steps - -(-steps // reset_every)  # the releases that are not the first of a stretch
    both = np.minimum(participations, moved_by_error)  # releases that the example moves twice
    energies = participations + 2 * feedback_shift * both + feedback_shift**2 * moved_by_error
    return np.where(participations > 0, energies, 0.0)


def squared_shift_over_epochs(
    steps: int, steps_per_epoch: int, reset_every: int, error_shift: float, feedback_shift: float
) -> float:
    """Returns the energy of one participation in every epoch, even an incomplete one, at the worst step of each.

    The participations of epochs i .. j can be in one stretch between resets if epoch i does not end before the stretch
    of epoch j begins.
    """
    epochs = -(-steps // steps_per_epoch)
    trivial = float(trivial_squared_shifts(np.array(epochs), steps, reset_every, feedback_shift))
    if math.isinf(error_shift):
        return trivial
    energies, worst = squared_shifts_without_reset(epochs, error_shift), np.zeros(epochs + 1)
    for j in range(epochs):
        stretch = j * steps_per_epoch // reset_every
        i = stretch * reset_every // steps_per_epoch
        worst[j + 1] = np.max(worst[i : j + 1] + energies[j + 1 - i : 0 : -1])
    return min(trivial, float(worst[-1]))


def worst_case_squared_shifts(
    most: int, steps: int, reset_every: int, error_shift: float, feedback_shift: float
) -> np.ndarray:
    """Returns the energy of k = 0 .. most participations, at the worst steps, float64 (most + 1,)."""
    participations = np.arange(most + 1)
    trivial = trivial_squared_shifts(participations, steps, reset_every, feedback_shift)
    if math.isinf(error_shift):
        return trivial
    energies = squared_shifts_without_reset(reset_every if most > reset_every else most, error_shift)
    full_stretches, rest = np.divmod(participations, len(energies) - 1)
    return np.minimum(trivial, full_stretches * energies[-1] + energies[rest])


def participations_quantile(steps: int, rate: float, tail: float) -> int:
    """Returns the smallest number of participations that is exceeded with probability at most `tail`."""
    return int(np.argmax(stats.binom.sf(np.arange(steps + 1), steps, rate) <= tail))


def delta_of_random_participations(
    *, steps: int, rate: float, reset_every: int, error_shift: float, feedback_shift: float, noise_multiplier: float
) -> Callable[[float], float]:
    """Returns delta as a function of epsilon: the mean, over random participations, of delta if they are known."""
    most = participations_quantile(steps, rate, TAIL)
    probabilities = stats.binom.pmf(np.arange(1, most + 1), steps, rate)
    energies = worst_case_squared_shifts(most, steps, reset_every, error_shift, feedback_shift)
    mus = np.sqrt(energies[1:]) / noise_multiplier
    missing = float(stats.binom.sf(most, steps, rate))

    def delta(epsilon: float) -> float:
        log_upper = special.log_ndtr(mus / 2 - epsilon / mus)
        log_lower = epsilon + special.log_ndtr(-mus / 2 - epsilon / mus)
        deltas = np.exp(log_upper) * -np.expm1(np.minimum(log_lower - log_upper, 0))
        return min(1.0, float(probabilities @ deltas) + missing)

    return delta


# The cost is an upper bound for any choice of these, because every order, tail, grid and polygon gives one.
_ORDERS = (*range(2, 17), 18, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_LOG_ROUNDING = 1e-15  # rounding error of ln of a norm near 1, because a tiny cost would round to 0
_MOST_IDLE_ORDERS = 3  # the search stops after this many orders in a row that do not lower the cost
_TAILS = tuple(10.0**-i for i in range(4, 19))  # probabilities of the participations left out
_TAIL_SHARE = 1e-3  # the share of delta that the participations left out may take
_MOST_TRACKED = 36  # above this many participations, the recursion does not count how many there were so far
_GRID_POINTS, _TRACKED_GRID_POINTS = 200, 700  # about how many points one grid, and all counted grids together, have
_MOST_CELLS = 8  # grid cells in an interval of length rho
_ANGLES = np.concatenate([[0.0], np.geomspace(0.01, math.pi / 2, 32)])  # where the polygon touches the quarter disc


@dataclass(frozen=True, kw_only=True)
class AmplifiedProfile:
    """The least cost over all orders and over the probability of the participations that are left out.

    steps: the number of steps of the run. rate: the sampling rate, in (0, 1). reset_every: the number of steps between
    two resets (a stretch), at most `steps`. error_shift: rho, finite. noise_multiplier: nu.
    """

    steps: int
    rate: float
    reset_every: int
    error_shift: float
    noise_multiplier: float

    def epsilon(self, delta: float) -> float:
        tail = next((tail for tail in _TAILS if tail <= _TAIL_SHARE * delta), None)
        return math.inf if tail is None else self._least_over_orders(tail, lambda bound: bound.epsilon(delta), math.inf)

    def delta(self, epsilon: float) -> float:
        best = 1.0
        for tail in _TAILS:
            best = min(best, self._least_over_orders(tail, lambda bound: bound.delta(epsilon), 1.0))
            if tail <= _TAIL_SHARE * best:
                break
        return best

    def _least_over_orders(self, tail: float, ask: Callable[[RenyiProfile], float], best: float) -> float:
        """Returns the least result of `ask`, for increasing orders until the results stop falling.

        The stretches between resets are independent, so their log moments add up. ln E X^a is convex in a, so chords
        between whole orders bound the orders between them.
        """
        stretches, rest = divmod(self.steps, self.reset_every)
        log_moment_of = functools.partial(
            log_moment,
            rate=self.rate,
            error_shift=self.error_shift,
            noise_multiplier=self.noise_multiplier,
            tail=tail / -(-self.steps // self.reset_every),
        )
        orders, log_moments, idle = [1], [0.0], 0
        for order in _ORDERS:
            orders.append(order)
            whole, last = (log_moment_of(order, steps=steps) for steps in (self.reset_every, rest))
            log_moments.append(stretches * whole + last)
            divergences = np.interp(renyi.ORDERS, orders, log_moments, right=math.inf) / (renyi.ORDERS - 1)
            answer = min(best, ask(RenyiProfile(divergences, tail)))
            idle = 0 if answer < best else idle + 1
            best = answer
            if idle == _MOST_IDLE_ORDERS or math.isinf(log_moments[-1]):
                break
        return best


@functools.lru_cache(maxsize=4096)
def log_moment(
    order: int, *, steps: int, rate: float, error_shift: float, noise_multiplier: float, tail: float = 0.0
) -> float:
    """Bounds ln E X^a <= a ln W_1(0) for a stretch of `steps`, except for an event of probability `tail`.

    order: a, int, at least 2.
    """
    if steps == 0:
        return 0.0
    grid = _error_shift_grid(max(2, participations_quantile(steps, rate, tail)))
    moves = error_shift * grid.moves
    gain = (order - 1) / (2 * noise_multiplier**2)
    shifts = gain * (2 * moves * (grid.fed + error_shift * grid.kept) + error_shift**2)
    log_norm = _log_norm_of_likelihood_ratio(order, rate, noise_multiplier)
    with np.errstate(over="ignore", invalid="ignore"):
        values = log_norm(2 * gain * moves[:, 0])  # ln U at the last step, after which nothing is released
        for _ in range(steps - 1):
            values = grid.extend_values_beyond_grid(values)
            stay = values[grid.left] + grid.share * (values[grid.left + 1] - values[grid.left])
            moved = values[grid.moved] + grid.share * (values[grid.moved + 1] - values[grid.moved])
            values = (stay + log_norm(shifts + moved - stay)).max(axis=1)
    rounding = steps * order * _LOG_ROUNDING
    return float(order * max(values[0], 0.0)) + rounding if np.isfinite(values[0]) else math.inf


class _ErrorShiftGrid(NamedTuple):
    """Grid points for d, by which the error has moved: one grid, or one for each number of participations so far.

    moves:  float64 (points, 1), d in units of rho.
    fed:    float64 (corners,), S divided by d at the corners of the polygon.
    kept:   float64 (corners,), F divided by d at the corners of the polygon.
    left:   int64 (points, corners), the grid point below F.
    moved:  int64 (points, corners), the grid point below F + rho.
    share:  float64 (points, corners), the position of F, and so of F + rho, between that point and the next, in [0, 1].
    tracked: the number of points after the last participation, where U = 1; 0 if participations are not counted.
    cells:  the number of grid cells in an interval of length rho.
    """

    moves: np.ndarray
    fed: np.ndarray
    kept: np.ndarray
    left: np.ndarray
    moved: np.ndarray
    share: np.ndarray
    tracked: int
    cells: int

    def extend_values_beyond_grid(self, values: np.ndarray) -> np.ndarray:
        """Returns ln U at the grid points, and at the points after the last participation, float64 (more points,)."""
        if self.tracked:
            return np.append(values, np.zeros(self.tracked))
        return np.append(values, values[-1] + np.arange(1, self.cells + 1) * (values[-1] - values[-2]))


@functools.lru_cache(maxsize=16)
def _error_shift_grid(most: int) -> _ErrorShiftGrid:
    middles, halves = (_ANGLES[1:] + _ANGLES[:-1]) / 2, (_ANGLES[1:] - _ANGLES[:-1]) / 2
    fed, kept = np.sin(middles) / np.cos(halves), np.cos(middles) / np.cos(halves)

    tracked = most <= _MOST_TRACKED
    cells = 2 * _TRACKED_GRID_POINTS // (most * (most + 1)) if tracked else _GRID_POINTS // most
    cells = int(np.clip(cells, 1, _MOST_CELLS))
    counts = [n * cells + 1 for n in range(most)] if tracked else [(most - 1) * cells + 1]
    starts = np.cumsum([0, *counts])
    numbers = np.concatenate([np.arange(count) for count in counts])[:, None]
    start = np.repeat(starts[:-1], counts)[:, None]
    last = np.repeat(counts, counts)[:, None] - 1
    places = np.minimum(numbers * kept, last)
    left = np.clip(places.astype(int), 0, np.maximum(last - 1, 0))
    following = np.repeat(starts[1:], counts)[:, None] if tracked else start
    return _ErrorShiftGrid(
        moves=numbers / cells,
        fed=fed,
        kept=kept,
        left=start + left,
        moved=following + left + cells,
        share=places - left,
        tracked=most * cells + 1 if tracked else 0,
        cells=cells,
    )


def _log_norm_of_likelihood_ratio(order: int, rate: float, noise_multiplier: float):
    """Returns the function shift -> ln |(1-q) + q e^shift l_1|_a, by the binomial formula."""
    k = np.arange(order + 1)
    powers = (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise_multiplier**2)
    with np.errstate(over="ignore"):
        coefficients = np.exp(renyi.log_binomial(order, k) + powers)

    def log_norm(shift: np.ndarray) -> np.ndarray:
        x = np.exp(shift)
        total = np.full_like(x, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total *= x
            total += coefficient
        return np.log(total) / order

    return log_norm


ERROR = 2.0**-15
LARGEST = 2.0**29


def covers_rounding(
    *, steps: int, reset_every: int | None, error_shift: float, feedback_shift: float, batch_size: float, examples: int
) -> bool:
    """Whether the noise covers the rounding of the error (see the module). Arguments: as in `ErrorFeedbackDpEvent`.

    batch_size: B, the expected one. Fewer than one in 10^12 Poisson batches has more rows than this assumes.
    """
    rows = min(examples, batch_size + 8 * math.sqrt(batch_size) + 64)
    stretch = min(steps, reset_every or steps)
    if math.isinf(error_shift) or not error_shift:
        return not error_shift or math.sqrt(stretch) * rows <= LARGEST
    growth = 2 if feedback_shift >= 4 * rows * error_shift else stretch  # feedback_shift is 2 C2 in the unit
    return stretch * growth * rows <= LARGEST and math.sqrt(stretch) * rows <= LARGEST * min(1.0, error_shift)
