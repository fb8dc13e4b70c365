"""Automatic clipping: normalise every example's gradient instead of choosing a clip norm."""

import jax

from dpx import schedules
from dpx.mechanism import Mechanism


def normalized(mechanism: Mechanism, *, gamma: float = 0.01) -> Mechanism:
    """`mechanism` on g / (|g| + gamma), whose norm is below 1 (per group where the mechanism has groups).

    The inner clip still bounds the result, so the bill is the inner mechanism's for every clip norm; a clip norm of 1
    never binds. gamma: the stability constant, at least 1e-6.
    Automatic clipping, Bu et al. 2023, https://arxiv.org/abs/2206.07136.
    """
    gamma = schedules.require_number("gamma", gamma, minimum=1e-6)

    def weigh(norms, state):
        weights = mechanism.weigh(jax.tree.map(lambda n: n / (n + gamma), norms), state)
        return tuple(jax.tree.map(lambda n, w: w / (n + gamma), norms, weight) for weight in weights)

    return mechanism.replace(weigh=weigh, stages=(f"normalise to g / (|g| + {gamma:g})", *mechanism.stages))
