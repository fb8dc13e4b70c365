"""Error feedback: remembers the error that clipping leaves, and adds it, clipped, to later releases.

With `stability`, normalizing replaces clipping as in automatic DiceSGD: C1 g / (|g| + stability) and C2 e / (|e| + C2).
The paper's e / |e| jumps near 0, so only the trivial cost would hold; this form is non-expansive, as clipping is.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent, NoOpDpEvent

from dpx import keys
from dpx.accounting import checks
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism
from dpx.mechanism.base import SUM, describe_period
from dpx.mechanism.dp_sgd import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, require_noise_in_range, tree_norm
from dpx.papers.dice_sgd.cost import ERROR, SAMPLINGS, ErrorFeedbackDpEvent
from dpx.sampling.schemes import Sampling
from dpx.states.record import ReleaseState
from dpx.sums.rounding import ETA, FloatPair, as_float64, as_pair, norm_of_pair, split_float64
from dpx.values import Tree, described, require_number, require_whole
from dpx.xla.ordering import compute_after
from dpx.xla.place import enabling_float64, require_ieee_float64

SMALLEST_DIVISOR = 1e-30  # in the units of the gradient; a norm of 0 is divided by this, in float32's normal range


class ErrorFeedbackState(NamedTuple):
    """The error, which depends on raw data, and the record of the releases.

    release: ReleaseState, public.
    unreleased_error: e, two float32 numbers for each element of the encoded gradient. It depends on raw data: never
        share it.
    """

    release: ReleaseState
    unreleased_error: FloatPair


@accepts_budget
def dice_sgd(
    *,
    clip_norm: float,
    feedback_norm: float,
    outer_clip_norm: float,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
    reset_every: int | None = None,
    stability: float | None = None,
) -> Mechanism:
    """DiceSGD: clip, and feed the clipping error back (Zhang et al. 2023, https://arxiv.org/abs/2311.14632).

        private gradient = v + N(0, (nu C1 / B)^2 I),  v = (1/B) sum_i clip(g_i, C1) + clip(e, C2)
        next e = e + (1/B) sum_i clip(g_i, Cmax) - v,  with the v before noise;
                 e starts at 0 and is never released

    The paper claims that noise as large as DP-SGD's suffices, however large the gradients are. That does not hold
    (`dpx.papers.dice_sgd.dice_theorem_noise`): the error depends on all earlier raw batches, and may move the release
    at every step, even if the example is not sampled. dpx charges the whole run as one event (`dpx.papers.dice_sgd`):
    given the released values, an example that takes part moves v by at most C1 / B and e by (Cmax - C1) / B, and then e
    moves later v. e is two float32 numbers. The noise covers their rounding for about 2^27 / B steps between
    resets if C2 is at least 2 or 3 times Cmax - C1, and otherwise for 2^14 / sqrt(B). The report says whether it does,
    and `dpx.papers.dice_sgd.cost` says why.

    clip_norm: C1, in [2^-40, 1e15], clips each gradient. outer_clip_norm: Cmax, in [C1, 1e15]; inf is DiceSGD as
        published, with only a trivial bound: clip(e, C2) may move by 2 C2 at every step, never amplified.
    feedback_norm: C2, in [2^-40, 1e15], clips e, a MEAN: one example moves it by C1 / B. C2 >= C1 removes bias.
    noise_multiplier: nu >= 0, the standard deviation of the noise on the sum, divided by C1; a number, or the
        `dpx.Budget` to which it is calibrated. 0 costs infinity.
    reset_every: set e to 0 after this many steps, which lowers the cost; None never does.
    stability: at least 1e-6, in the units of the gradient: normalize instead of clipping; None clips.
    sampling: Poisson (without `most_rows` or `weights`), fixed-size, shuffled epochs or full batches.
    key: a secret scalar jax PRNG key for one run, whose "noise" stream is used.
    Raises ValueError for a number outside its domain, and for a sampling or a key of another type.
    `dpx.chain(dice_sgd(...), optax.scale_by_adam(), ...)` is the Adam form. The table shows the noise multiplier, in
    units of C1, for epsilon 2 at delta 1e-5, with 50,000 examples, batches of 1,000 and 150 steps. DP-SGD that clips at
    C1 needs 0.93 with Poisson batches.

        outer / clip - 1             0.1    0.5    1      3
        Poisson                      1.47   4.91   9.5    28
        Poisson, reset_every=10      1.12   2.46   4.5    13
        shuffled, reset_every=50     3.47   3.86   4.9    11       (50 steps are an epoch)
        DP-SGD clipping at outer     1.02   1.39   1.85   3.7      (Poisson)
        the same, shuffled           3.80   5.18   6.9    13.8

    So with Poisson batches, error feedback needs MORE noise than clipping at outer_clip_norm, which has less bias than
    clipping at C1. It can help only if the outer norm is within a few percent of C1 and resets are frequent. With
    shuffled epochs and a reset in every epoch it needs LESS.
    """
    if not isinstance(sampling, SAMPLINGS):
        raise ValueError(f"sampling must be one of {[s.__name__ for s in SAMPLINGS]}, got {described(sampling)}")
    if not sampling.unweighted_and_unlimited:
        words = "because error feedback has no known cost for them"
        raise ValueError(f"sampling must have no most_rows and no weights, {words}; got {sampling}")
    noise_key = keys.stream(keys.warn_if_guessable(key), "noise")
    clip_norm = _round_to_checked_float32("clip_norm", clip_norm, SMALLEST_CLIP_NORM)
    if not (isinstance(outer_clip_norm, float) and outer_clip_norm == math.inf):
        outer_clip_norm = _round_to_checked_float32("outer_clip_norm", outer_clip_norm, clip_norm)
    feedback_norm = _round_to_checked_float32("feedback_norm", feedback_norm, SMALLEST_CLIP_NORM)
    noise_multiplier = _round_to_checked_float32("noise_multiplier", noise_multiplier, 0)
    require_noise_in_range(np.array([noise_multiplier]))
    reset_every = None if reset_every is None else require_whole("reset_every", reset_every)
    stability = None if stability is None else _round_to_checked_float32("stability", stability, 1e-6)
    norms = clip_norm, feedback_norm, outer_clip_norm
    run = _ErrorFeedbackRun(*norms, noise_multiplier, sampling, reset_every, stability, noise_key)
    return Mechanism(
        begin=_initial_state,
        encode=lambda grad, state: grad,
        norm=tree_norm,
        clip_factors=lambda norm, state: run.released_and_withheld_factors(norm),
        bound=lambda state: jnp.float32(clip_norm),
        release=run.release,
        event=run.event,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        key=key,
        supports_ghost_norms=True,
        stages=run.stages(),
    )


def _initial_state(params: Tree) -> ErrorFeedbackState:
    require_ieee_float64("error feedback")
    high, low = (optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2))
    return ErrorFeedbackState(ReleaseState.empty_record(params), FloatPair(high, low))


class _ErrorFeedbackRun(NamedTuple):
    """The settings of a run, in the float32 values that its steps and its cost both use, and the steps themselves.

    clip_norm: C1. feedback_norm: C2. outer_clip_norm: Cmax, or inf. noise_key: the noise stream. See `dice_sgd`.
    """

    clip_norm: float
    feedback_norm: float
    outer_clip_norm: float
    noise_multiplier: float
    sampling: Sampling
    reset_every: int | None
    stability: float | None
    noise_key: jax.Array

    @property
    def outer_norm(self) -> float:
        return min(self.outer_clip_norm, LARGEST_CLIP_NORM)

    def bounded_gradient_norm(self, norm: jax.Array) -> jax.Array:
        """Returns the norm, at most C1, with which a gradient of norm `norm`, a float32 scalar, is released."""
        if self.stability is None:
            return jnp.minimum(norm, self.clip_norm)
        return self.clip_norm * norm / (norm + self.stability)

    def bounded_error_norm(self, norm: jax.Array) -> jax.Array:
        """Returns the norm, at most C2, with which an error of norm `norm` is released."""
        if self.stability is None:
            return jnp.minimum(norm, self.feedback_norm)
        return self.feedback_norm * (norm / (norm + self.feedback_norm))

    def error_sensitivity(self) -> float:
        """Returns how far one example can move the sum of what the release withholds."""
        if self.stability is None:
            return self.outer_norm - self.clip_norm
        # An example of norm n moves what is withheld by |min(n, Cmax) - C1 n / (n + stability)|. That is largest at n =
        # Cmax or at n = sqrt(C1 stability) - stability, where a small gradient is lengthened most.
        lengthening = (self.clip_norm**0.5 - min(self.stability, self.clip_norm) ** 0.5) ** 2
        return max(self.outer_norm - self.clip_norm * self.outer_norm / (self.outer_norm + self.stability), lengthening)

    def released_and_withheld_factors(self, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns two float32 scalars, the factors of the released and withheld parts of a gradient of this norm."""
        norm = jnp.maximum(norm, SMALLEST_DIVISOR)
        released = self.bounded_gradient_norm(norm)
        return released / norm, (jnp.minimum(norm, self.outer_norm) - released) / norm

    def release(self, sums: tuple[Tree, ...], state: ErrorFeedbackState, params: Tree):
        step, divisor = state.release.step, self.sampling.divisor
        total, withheld = map(as_pair, sums)
        remembered, fed_back = self.error_feedback_factors(step, state.unreleased_error)
        with enabling_float64("error feedback"):
            exact = as_float64(state.unreleased_error)
            # The error is added before the noise, because the release rounds the sum to which it adds noise.
            added = jax.tree.map(lambda t, e: t + (fed_back * e) * divisor, as_float64(total), exact)
            total = split_float64(added)
        deviation = self.noise_multiplier * self.clip_norm * (1 + ETA + ERROR)
        updates = jax.tree.map(lambda r: r / divisor, keys.release(self.noise_key, step, total, deviation))
        error = compute_after(updates, state.unreleased_error)  # in its memory
        with enabling_float64("error feedback"):
            kept = jax.tree.map(lambda e: (remembered - fed_back) * e, as_float64(error))
            error = split_float64(jax.tree.map(lambda e, w: e + w / divisor, kept, as_float64(withheld)))
        state = ErrorFeedbackState(state.release.after_release(self.noise_multiplier), error)
        return optax.tree.cast_like(updates, params), state

    def error_feedback_factors(self, step: jax.Array, error: FloatPair) -> tuple[jax.Array, jax.Array]:
        """Returns two float64 scalars: the factor of the remembered error (1 up to LARGEST_CLIP_NORM, 0 after a reset),
        and that of the part of the error that is fed back."""
        forgotten = jnp.zeros((), bool) if self.reset_every is None else step % self.reset_every == 0
        with enabling_float64("error feedback"):
            norm = jnp.maximum(norm_of_pair(error), SMALLEST_DIVISOR)
            remembered = jnp.minimum(norm, LARGEST_CLIP_NORM)
            both = remembered / norm, self.bounded_error_norm(remembered) / norm
            # The barrier makes XLA compute these scalars once, not for every element of the error.
            return jax.lax.optimization_barrier(tuple(jnp.where(forgotten, 0.0, scale) for scale in both))

    def event(self, steps: int) -> DpEvent:
        if steps == 0:
            return NoOpDpEvent()
        return ErrorFeedbackDpEvent(
            noise_multiplier=self.noise_multiplier,
            error_shift=self.error_sensitivity() / self.clip_norm if math.isfinite(self.outer_clip_norm) else math.inf,
            feedback_shift=2 * self.feedback_norm * float(self.sampling.divisor) / self.clip_norm,
            steps=int(steps),
            reset_every=self.reset_every,
            sampling=self.sampling,
        )

    def stages(self) -> tuple[str, ...]:
        bound, feed_back = f"clip to norm {self.clip_norm:.6g}", f"clipped to norm {self.feedback_norm:.6g}"
        if self.stability is not None:
            bound = f"normalize to {self.clip_norm:.6g} g / (|g| + {self.stability:.6g})"
            feed_back = f"normalized to {self.feedback_norm:.6g} e / (|e| + {self.feedback_norm:.6g})"
        reset = "" if self.reset_every is None else f"; forget it {describe_period(self.reset_every)}"
        return (
            f"{bound}; keep the rest of every gradient, up to norm {self.outer_clip_norm:.6g}, as the error",
            SUM,
            f"add noise of standard deviation {self.noise_multiplier:.6g} x clip norm",
            f"divide by the expected batch size {self.sampling.divisor}",
            f"add the error of the steps before, {feed_back}{reset}",
        )


def _round_to_checked_float32(name: str, value: float, minimum: float) -> float:
    """Rounds `value` to float32, as both steps and cost use it. Raises ValueError outside [minimum, 1e15]."""
    rounded = float(np.float32(require_number(name, value, minimum=0)))
    return require_number(name, rounded, minimum=minimum, maximum=LARGEST_CLIP_NORM)


def dice_theorem_noise(
    *, clip_norm: float, examples: int, steps: int, epsilon: float, delta: float, residual: float = math.inf
) -> float:
    """Returns the noise of DiceSGD's privacy theorem, a CLAIM that does not hold: compare with it, never train with it.

    sigma_1 = sqrt(32 T (C^2 + 2 min(C, G')^2) ln(1/delta)) / (N epsilon)

    This is the noise on the MEAN gradient for which Theorem 3.8 of https://arxiv.org/abs/2311.14632 claims (epsilon,
    delta). The proof uses a lower bound on a clip factor where it needs an upper one. Counterexample: all gradients are
    zero except one constant gradient of norm 150 C, with N 50000, B 1000, T 150, C1 = C2 = C / B. Then delta at epsilon
    2 is at least 0.408, but the theorem claims 1e-5.

    clip_norm: C, with C1 <= C2 <= C / B. examples: N, how many there are. steps: T, int, at least 0.
    epsilon: positive and finite. delta: in (0, 1). residual: G' = max(0, largest gradient + its deviation - C1).
    Raises ValueError for steps, epsilon or delta outside these ranges.
    """
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    steps = require_whole("steps", steps, minimum=0)
    squares = clip_norm**2 + 2 * min(clip_norm, residual) ** 2
    return math.sqrt(32 * steps * squares * math.log(1 / delta)) / (examples * epsilon)
