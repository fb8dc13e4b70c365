"""DP-SGD, which the other methods change."""

import jax

from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism, Tree
from dpx.mechanisms.gaussian import gaussian_mechanism
from dpx.sampling.records import Sampling
from dpx.scalars import ScalarOrSchedule


@calibrated
def dp_sgd(
    *,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD: clip each example's gradient, sum, add noise, divide (Abadi et al. 2016, arXiv:1607.00133).

    The paper claims the epsilon of its moments accountant, which holds. dpx bills the composition of all steps, by
    privacy loss distributions, for the sampling that draws the batches.

    clip_norm: in the units of the gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the noise's standard deviation on the sum, divided by the clip norm; a number, a schedule, or
        `dpx.Budget(epsilon=, delta=, steps=)`, for which the least number is found.
    sampling, key: as in `dpx.gaussian_mechanism`. Raises ValueError as that does.

    Use `dpx.chain` to put any optax optimizer behind it.
    """
    return gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
