"""Automatic clipping: normalize every example's gradient instead of choosing a clip norm."""

import jax
import jax.numpy as jnp

from dpx.mechanism.base import Mechanism
from dpx.mechanism.stages import insert_around_sum
from dpx.values import require_number


def normalized(mechanism: Mechanism, *, stability: float = 0.01) -> Mechanism:
    """`mechanism` on normalized gradients, g / (|g| + stability), of norm below 1 (per group, if it has groups).

    Guarantee: the inner clip still bounds the result, so the cost is the inner mechanism's for every clip norm. A clip
    norm of 1 never clips, because the norms are below it.

    stability: at least 1e-6, in the units of the gradient. Raises ValueError for a smaller number.
    Source: automatic clipping, Bu et al. 2023, https://arxiv.org/abs/2206.07136.
    """
    stability = require_number("stability", stability, minimum=1e-6)

    def clip_factors(norms, state):
        factors = mechanism.clip_factors(jax.tree.map(lambda n: n / (n + stability), norms), state)
        return tuple(jax.tree.map(lambda n, f: f / (n + stability), norms, factor) for factor in factors)

    stages = insert_around_sum(mechanism.stages, before_bound=(f"normalize to g / (|g| + {stability:g})",))
    return mechanism.replace(
        clip_factors=clip_factors,
        bound=lambda state: jax.tree.map(lambda clip_norm: jnp.minimum(clip_norm, 1), mechanism.bound(state)),
        stages=stages,
    )
