"""Automatic clipping: normalize every example's gradient instead of choosing a clip norm."""

import jax

from dpx._numbers import require_number
from dpx.mechanism import Mechanism


def normalized(mechanism: Mechanism, *, stability: float = 0.01) -> Mechanism:
    """`mechanism` on g / (|g| + stability), whose norm is below 1 (per group where the mechanism has groups).

    The inner clip still bounds the result, so the bill is the inner mechanism's for every clip norm; a clip norm of 1
    never binds. stability: the stability constant, at least 1e-6.
    Automatic clipping, Bu et al. 2023, https://arxiv.org/abs/2206.07136.
    """
    stability = require_number("stability", stability, minimum=1e-6)

    def weigh(norms, state):
        weights = mechanism.weigh(jax.tree.map(lambda n: n / (n + stability), norms), state)
        return tuple(jax.tree.map(lambda n, w: w / (n + stability), norms, weight) for weight in weights)

    return mechanism.replace(weigh=weigh, stages=(f"normalize to g / (|g| + {stability:g})", *mechanism.stages))
