"""The public grid of a release: a sum plus noise, rounded to a multiple of gamma (see `noise.py` for what is proved).

gamma comes from the bits of the deviation, because a logarithm may be wrong at powers of two. y and y - floor(y) are
exact, because S has at most 53 bits and gamma is a power of two. k may be rounded where it has more than 53 bits: that
is a function of k. It is never -0., whose sign could show that of S, because a sum is -0. only if both of its terms
are, and neither y - floor(y) nor 1/2 is.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

GRID = 4  # the deviation is 2^4 to 2^5 times gamma


def rounded(high: jax.Array, low: jax.Array | None, normals: ArrayLike, deviation: jax.Array) -> jax.Array:
    """gamma k of `noise.py`'s docstring, float32 in the shape of `high`. normals: g, float64. deviation: float32 ()."""
    bits = jax.lax.bitcast_convert_type(deviation, jnp.int32)
    exponent = jax.lax.shift_right_logical(bits, np.int32(23)) - np.int32(127 + GRID)
    with jax.enable_x64(True):
        gamma, grid = (_power_of_two(sign * exponent) for sign in (1, -1))
        total = high.astype(jnp.float64)
        total = total if low is None else total + low.astype(jnp.float64)
        y = total * grid
        whole = jnp.floor(y)
        noise = jnp.floor((y - whole) + (deviation.astype(jnp.float64) * grid) * normals + 0.5)  # +0. and never -0.
        return ((whole + noise) * gamma).astype(jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent, float64 (), exactly. exponent: int32 (), of at least -1022."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
