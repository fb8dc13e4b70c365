"""DP-SGD, the common ground of all methods."""

import jax

from dpx.gaussian import gaussian_mechanism
from dpx.mechanism import Mechanism, Tree
from dpx.methods.budget import noise_within
from dpx.sampling import Sampling
from dpx.schedules import ScalarOrSchedule


def dp_sgd(
    *,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    steps: int | None = None,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD: clip each example's gradient, sum, add noise, divide (Abadi et al. 2016, arXiv:1607.00133).

    Chain any optax optimizer behind it. Say either `noise_multiplier`, or what may be spent: `epsilon` and `delta` over
    `steps`, for which the least noise multiplier is calibrated by PLD. See `gaussian_mechanism` for the rest.
    """

    def make(noise_multiplier: ScalarOrSchedule) -> Mechanism:
        return gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)

    return make(noise_within(make, noise_multiplier, epsilon=epsilon, delta=delta, steps=steps))
