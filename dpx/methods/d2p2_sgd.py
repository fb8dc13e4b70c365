"""The D2P2-SGD family: automatic clipping, noise that falls over the epochs, random projections."""

import jax

from dpx import schedules
from dpx.gaussian import gaussian_mechanism
from dpx.mechanism import Mechanism
from dpx.methods.budget import noise_within
from dpx.normalization import normalized
from dpx.sampling import Sampling


def d2p_sgd(
    *,
    power: float = 0.25,
    every: int = 1,
    gamma: float = 0.01,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    steps: int | None = None,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """D2P-SGD, the dynamic half of D2P2-SGD: automatic clipping and noise that falls as an inverse power.

    noise multiplier_k = noise_multiplier / k^power,  k = 1, 2, ... counting blocks of `every` steps (an epoch)

    power: 1/2 in the paper's theorems, 1/4 per epoch in its experiments. gamma: of `normalized`, which makes the
    sensitivity 1. Say `noise_multiplier`, or `epsilon`, `delta` and `steps`, for which it is calibrated.
    """

    def make(noise_multiplier: float) -> Mechanism:
        falling = schedules.hold(schedules.inverse_power(noise_multiplier, power=power), every=every)
        return normalized(
            gaussian_mechanism(clip_norm=1.0, noise_multiplier=falling, sampling=sampling, key=key), gamma=gamma
        )

    return make(noise_within(make, noise_multiplier, epsilon=epsilon, delta=delta, steps=steps))
