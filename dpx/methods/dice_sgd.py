"""DiceSGD: what clipping takes away is fed back, with a bill that holds.

Its privacy theorem does not hold (`dpx.accounting.comparisons.dice_theorem_noise`). The bill that does hold depends on
how much may enter the error: the published outer_clip_norm=inf has a trivial bill only. Noise multiplier in units of
C1 for (2, 1e-5), 50000 examples, batches of 1000, 150 steps, where DP-SGD that clips at C1 needs 0.93:

    outer / clip - 1             0.1    0.5    1      3
    Poisson                      1.47   4.91   9.5    28
    Poisson, reset_every=10      1.12   2.46   4.5    13
    shuffled, reset_every=50     3.47   3.86   4.9    11       (50 steps are an epoch)
    DP-SGD clipping at outer     1.02   1.39   1.85   3.7      (Poisson)
    the same, shuffled           3.80   5.18   6.9    13.8

So with Poisson batches feedback needs MORE noise than clipping at outer_clip_norm, which has less bias to begin with:
it can pay only with an outer norm within a few percent and frequent resets. With shuffled epochs and a reset in every
epoch it needs LESS.
"""

import functools
from typing import Any

from dpx.mechanism import Mechanism
from dpx.mechanisms.error_feedback import error_feedback_mechanism


@functools.wraps(error_feedback_mechanism, assigned=())  # the signature is the mechanism's, also for help()
def dice_sgd(**arguments: Any) -> Mechanism:
    """DiceSGD: clip, and feed back what clipping took away (Zhang et al. 2023, https://arxiv.org/abs/2311.14632).

    What the paper claims: noise of the size of DP-SGD's, however large the gradients are. What holds: the error depends
    on all earlier raw batches, and may move the release at every step, sampled or not, so the claim does not hold. What
    dpx bills: how far one example moves the error, which outer_clip_norm bounds (the module has a table).

    The arguments are those of `dpx.mechanisms.error_feedback_mechanism`. `stability` gives the automatic form of the
    paper, and `dpx.chain(dice_sgd(...), optax.scale_by_adam(), ...)` its Adam form.
    """
    return error_feedback_mechanism(**arguments)
