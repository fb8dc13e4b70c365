"""DiceSGD: the error that clipping leaves is added to later steps, with a bill that holds."""

import functools
from typing import Any

from dpx.mechanism import Mechanism
from dpx.mechanisms.error_feedback import error_feedback_mechanism


@functools.wraps(error_feedback_mechanism, assigned=())  # the signature is the mechanism's, also for help()
def dice_sgd(**arguments: Any) -> Mechanism:
    """DiceSGD: clip, and feed the clipping error back (Zhang et al. 2023, https://arxiv.org/abs/2311.14632).

    The paper claims noise of the size of DP-SGD's, however large the gradients are. That does not hold, because the
    error depends on all earlier raw batches, and may move the release at every step, whether the example is sampled or
    not. dpx bills how far one example moves the error, which outer_clip_norm bounds.

    clip_norm, feedback_norm, outer_clip_norm: C1, C2 and Cmax, above 0; outer_clip_norm=inf is the published method,
        which has only a trivial bill. reset_every: steps after which the error is set to 0, or None. stability: above 0
        for the paper's automatic form, or None. All are those of `dpx.mechanisms.error_feedback_mechanism`, which says
        more. `dpx.chain(dice_sgd(...), optax.scale_by_adam(), ...)` is the Adam form.

    The privacy theorem of the paper does not hold (`dpx.accounting.comparisons.dice_theorem_noise`). The table shows
    the noise multiplier, in units of C1, for epsilon 2 at delta 1e-5, 50,000 examples, batches of 1,000, 150 steps.
    DP-SGD that clips at C1 needs 0.93 with Poisson batches.

        outer / clip - 1             0.1    0.5    1      3
        Poisson                      1.47   4.91   9.5    28
        Poisson, reset_every=10      1.12   2.46   4.5    13
        shuffled, reset_every=50     3.47   3.86   4.9    11       (50 steps are an epoch)
        DP-SGD clipping at outer     1.02   1.39   1.85   3.7      (Poisson)
        the same, shuffled           3.80   5.18   6.9    13.8

    So with Poisson batches, error feedback needs MORE noise than clipping at outer_clip_norm, which has less bias than
    clipping at C1: it can help only with an outer norm within a few percent of C1, and frequent resets. With shuffled
    epochs and a reset in every epoch it needs LESS.
    """
    return error_feedback_mechanism(**arguments)
