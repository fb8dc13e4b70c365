"""Every mechanism of dpx, for tests/test_contract.py. A new method joins by one line in MECHANISMS."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dpx

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3), "scale": jnp.ones(())}
POISSON = dpx.PoissonSampling(examples=1000, batch_size=8)
EPOCHS = dpx.ShuffledEpochs(examples=20, batch_size=8)


class Case(NamedTuple):
    """make: (key) -> Mechanism. clip, multiplier: (step) -> float, worked out by hand, not read from the mechanism.

    frozen: the leaves of PARAMS that get no update.
    """

    name: str
    make: Callable[[jax.Array], dpx.Mechanism]
    clip: Callable[[int], float] = lambda step: 0.7
    multiplier: Callable[[int], float] = lambda step: 1.3
    frozen: tuple[str, ...] = ()

    @property
    def mechanism(self) -> dpx.Mechanism:
        return _mechanism(self)


@functools.cache
def _mechanism(case: Case) -> dpx.Mechanism:
    return case.make(jax.random.key(7))


def _dp_sgd(key, sampling: Any = POISSON, clip_norm: Any = 0.7, noise_multiplier: Any = 1.3) -> dpx.Mechanism:
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def _scheduled(key, sampling: Any = POISSON) -> dpx.Mechanism:
    return _dp_sgd(
        key,
        sampling,
        optax.linear_schedule(1.0, 0.5, 10),
        optax.exponential_decay(2.0, transition_steps=1, decay_rate=0.9),
    )


PER_LAYER = {"kernel": 0.5, "bias": 0.2, "scale": 0.1}
TRAINABLE = dpx.trainable({"kernel": True, "bias": False, "scale": True})

MECHANISMS = [
    Case("dp_sgd", _dp_sgd),
    Case("scheduled", _scheduled, lambda t: 1 - 0.05 * min(t, 10), lambda t: 2 * 0.9**t),
    Case("full batch", lambda key: _dp_sgd(key, dpx.FullBatch(examples=8))),
    Case("fixed size", lambda key: _dp_sgd(key, dpx.FixedSizeSampling(examples=100, batch_size=8))),
    Case("shuffled", lambda key: _scheduled(key, EPOCHS), lambda t: 1 - 0.05 * min(t, 10), lambda t: 2 * 0.9**t),
    Case("per layer", lambda key: _dp_sgd(key, clip_norm=PER_LAYER), lambda t: math.sqrt(0.25 + 0.04 + 0.01)),
    Case("normalized", lambda key: dpx.normalized(_dp_sgd(key, clip_norm=1.0)), lambda t: 1.0),
    Case("normalized, small clip", lambda key: dpx.normalized(_dp_sgd(key), gamma=1e-6)),
    Case("trainable", lambda key: dpx.in_coordinates(_dp_sgd(key), TRAINABLE), frozen=("bias",)),
    Case(
        "normalized trainable per layer",
        lambda key: dpx.normalized(
            dpx.in_coordinates(_dp_sgd(key, clip_norm={"kernel": 0.5, "bias": 1.0, "scale": 0.1}), TRAINABLE), gamma=0.1
        ),
        lambda t: math.sqrt(0.25 + 1 + 0.01),
        frozen=("bias",),
    ),
    Case(
        "dynamic_dp_sgd",
        lambda key: dpx.dynamic_dp_sgd(
            clip_norm=1.1, noise_multiplier=2.5, rho_mu=3.0, rho_c=2.0, steps=8, sampling=POISSON, key=key
        ),
        lambda t: 1.1 * 2 ** (-(t + 1) / 8),
        lambda t: 2.5 * 3 ** (-(t + 1) / 8),
    ),
    Case(
        "dynamic_dp_sgd per epoch",
        lambda key: dpx.dynamic_dp_sgd(
            clip_norm=1.1, noise_multiplier=2.5, rho_mu=3.0, rho_c=2.0, steps=8, every=3, sampling=EPOCHS, key=key
        ),
        lambda t: 1.1 * 2 ** (-(t // 3 * 3 + 1) / 8),
        lambda t: 2.5 * 3 ** (-(t // 3 * 3 + 1) / 8),
    ),
    Case(
        "d2p_sgd",
        lambda key: dpx.d2p_sgd(noise_multiplier=2.0, power=0.5, every=2, sampling=POISSON, key=key),
        lambda t: 1.0,
        lambda t: 2 * (t // 2 + 1) ** -0.5,
    ),
    Case("chained", lambda key: dpx.chain(_dp_sgd(key), optax.identity())),
]
