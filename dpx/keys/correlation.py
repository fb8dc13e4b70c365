"""Noise that is correlated over steps: a weighted sum of the normals of the last steps, which are drawn again.

A mechanism of correlated noise with a banded inverse C^-1 needs sum_j d_j z_(t-j) at step t, where z_t are standard
normals of step t. They are functions of the key and the step, so no state holds them: past noise is as secret as the
key. It costs the normals of len(d) steps in place of one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpx.xla.doubles import constants


def weighted(draw: Callable[[jax.Array], jax.Array], step: jax.Array, weights: tuple[float, ...]) -> jax.Array:
    """sum_j weights_j draw(step - j) over the steps from 0, float64; without weights 0, and nothing is drawn.

    draw: (step) -> normals, float64.
    """
    if len(weights) == 1:
        return draw(step)

    with jax.enable_x64(True):
        if not weights:
            return jnp.float64(0)
        table = constants(weights)

        def add(j, total):
            weight = jax.lax.select(j <= step, table[j], jnp.float64(0))
            return total + weight * draw(step - j)

        first, last = jnp.int32(1), jnp.int32(len(weights))
        return jax.lax.fori_loop(first, last, add, draw(step))
