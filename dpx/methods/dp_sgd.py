"""DP-SGD, the common ground of all methods."""

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

    Chain any optax optimizer behind it. noise_multiplier: a number, a schedule of the step, or
    `dpx.Budget(epsilon=, delta=, steps=)`, for which the least one is found. See `gaussian_mechanism` for the rest.
    """
    return gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
