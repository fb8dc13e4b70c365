"""DP-SGD, which all other methods build on."""

import jax

from dpx._numbers import ScalarOrSchedule
from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism, Tree
from dpx.mechanisms.gaussian import gaussian_mechanism
from dpx.sampling import Sampling


@calibrated
def dp_sgd(
    *,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD: clip each example's gradient, sum, add noise, divide (Abadi et al. 2016, arXiv:1607.00133).

    What the paper claims: the moments accountant's epsilon. What holds: that. What dpx bills: the composition of all
    steps, by privacy loss distributions, for the sampling that draws the batches.

    clip_norm: in the units of the gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the noise's standard deviation on the sum, divided by the clip norm; a number, a schedule, or
        `dpx.Budget(epsilon=, delta=, steps=)`, for which the least number is found.
    sampling, key: as in `dpx.gaussian_mechanism`, which also says what raises ValueError.

    Any optax optimizer can be chained behind it, with `dpx.chain`.
    """
    return gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
