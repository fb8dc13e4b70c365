"""DiceSGD: what clipping takes away is fed back, with a bill that is true."""

import jax

from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism
from dpx.mechanisms.error_feedback import error_feedback_mechanism
from dpx.sampling import Sampling


@calibrated
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
    """DiceSGD: clip, and feed back what clipping took away (Zhang et al. 2023, https://arxiv.org/abs/2311.14632).

    `dpx.chain(dice_sgd(...), optax.scale_by_adam(), ...)` is its Adam form, `stability` its automatic form; the
    arguments are those of `error_feedback_mechanism`.

    Its privacy theorem does not hold (`dpx.accounting.comparisons.dice_theorem_noise`). What holds depends on how much
    may enter the error: the published outer_clip_norm=inf has a trivial bill only. Noise multiplier in units of C1 for
    (2, 1e-5), 50000 examples, batches of 1000, 150 steps, where DP-SGD clipping at C1 needs 0.93:

        outer / clip - 1             0.1    0.5    1      3
        Poisson                      1.47   4.91   9.5    28
        Poisson, reset_every=10      1.12   2.46   4.5    13
        shuffled, reset_every=50     3.47   3.86   4.9    11       (50 steps are an epoch)
        DP-SGD clipping at outer     1.02   1.39   1.85   3.7      (Poisson)
        the same, shuffled           3.80   5.18   6.9    13.8

    So with Poisson batches feedback needs MORE noise than clipping at outer_clip_norm, which has less bias to begin
    with: worth it, if at all, for an outer norm within a few percent and frequent resets. With shuffled epochs and a
    reset every epoch it needs LESS.
    """
    return error_feedback_mechanism(
        clip_norm=clip_norm,
        feedback_norm=feedback_norm,
        outer_clip_norm=outer_clip_norm,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        key=key,
        reset_every=reset_every,
        stability=stability,
    )
