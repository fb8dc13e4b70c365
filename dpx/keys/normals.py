"""Two standard normals of one block of the cipher, in float64, with a bound on their error.

Box and Muller 1958 (https://doi.org/10.1214/aoms/1177706645): for uniform p and theta, r = sqrt(-2 log p) and the angle
theta give two independent normals, r sin(2 pi theta) and r cos(2 pi theta). A block has the words a, b, c and d:

    a > 0:  p = (a 2^32 + b + 1/2) 2^-64                 theta = (c 2^32 + d + 1/2) 2^-64
    a = 0:  p = (b 2^28 + floor(d / 16) + 1/2) 2^-92     theta = (c 2^4 + d mod 16 + 1/2) 2^-36

So a small p, of which a = 0 has a share of 2^-32, has 28 more bits, and the normals reach 11.35.

The error. Let U and Theta be uniform real numbers, whose digits are those of p and theta and then more of their own.
Their normals g are exact, and the computed ones g~ differ from them by at most, with r = sqrt(-2 log p),

    |g~ - g| <= EVALUATION + 2^-65 / (p r) for p >= 2^-32,  else EVALUATION + 2^-93 / (p r) + 2 pi r 2^-37

because U is within half a digit of p, dr/dp = -1 / (p r), and Theta is within half a digit of theta. (Where a > 0, half
a digit of theta moves g by at most 2^-58, which EVALUATION contains.) Computing in float64 adds: p - 1 and p have a
relative error of 2^-53; the polynomials are within 2^-52 of their functions, relatively; no sum cancels, because the
two terms of log p have one sign, or the second is at most half as large as the first; theta has an absolute error of
2^-54. Each of 30 roundings or fewer changes r or the sine by 2^-53 of it, so the sum is below 30 r 2^-53 + 2 pi r 2^-54
< 400 2^-53 < EVALUATION for r <= 11.36, whether products and sums are fused or not, and the sum with a fraction in
`noise.py` adds 2^-48. tests/test_noise.py compares 100,000 blocks with extended precision: the largest error is 2^-47.
There is no branch on a value and no rejection, because their time would show the noise (Jin et al. 2021,
https://arxiv.org/abs/2112.05307).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax  # `jnp` takes longer to trace

EVALUATION = 2.0**-44  # deviations
# -4 atanh(s) / s for s^2 in [0, 0.02944], and sin(2 pi u) / u for u^2 in [0, 1/16], as polynomials of the square,
# highest power first: the least largest relative errors, 1.7e-16 and 1.4e-16, found by exchange (Remez).
LOGARITHM = (
    -0.3367710908897167, -0.3624371094047564, -0.4444687432167284, -0.5714283196249861,
    -0.8000000012403269, -1.3333333333310444, -4.000000000000001,
)  # fmt: skip
SINE = (
    -0.6921569227487744, 3.817288638616514, -15.094499474810789, 42.058689667355345,
    -76.70585968329085, 81.60524927551285, -41.34170224039802, 6.283185307179585,
)  # fmt: skip
ROOT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # its bits


def radius_and_angle(words: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """r, float64, and theta as (high, low), uint32 each, of the four words of a block, uint32 of one shape.

    theta is (high 2^32 + low + 1/2) 2^-64. To be called inside `jax.enable_x64`.
    """
    a, b, c, d = words
    small = lax.eq(a, _every(a, 0, jnp.uint32))

    def either(if_small, otherwise) -> jax.Array:
        return lax.select(small, if_small, otherwise)

    def constant(if_small: float, otherwise: float) -> jax.Array:
        return either(_every(a, if_small, jnp.float64), _every(a, otherwise, jnp.float64))

    high = lax.mul(_float64(either(b, a)), constant(2.0**-64, 2.0**-32))
    low = _float64(either(lax.shift_right_logical(d, _every(d, 4, jnp.uint32)), b)) + 0.5
    low = lax.mul(low, constant(2.0**-92, 2.0**-64))
    # log p = exponent log 2 + log m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh((m - 1) / (m + 1)).
    bits = lax.bitcast_convert_type(high + low, jnp.int64)
    exponent = lax.shift_right_arithmetic(bits - ROOT_HALF, _every(bits, 52, jnp.int64))
    m = lax.bitcast_convert_type(bits - lax.shift_left(exponent, _every(bits, 52, jnp.int64)), jnp.float64)
    less_one = lax.select(exponent == 0, (high - 1.0) + low, m - 1.0)  # near 1, p has lost digits that p - 1 has not
    s = lax.div(less_one, m + 1.0)
    squared = s * _polynomial(LOGARITHM, s * s) - exponent.astype(jnp.int32).astype(jnp.float64) * (2 * math.log(2))
    rest = lax.shift_left(d, _every(d, 28, jnp.uint32)) + np.uint32(2**27)
    return lax.sqrt(lax.max(squared, _every(squared, 0, jnp.float64))), c, either(rest, d)


def normal(radius: jax.Array, high: jax.Array, low: jax.Array, second: jax.Array) -> jax.Array:
    """r sin(2 pi (theta + second / 4)), float64: of the results of `radius_and_angle`, and second, uint32 0 or 1.

    All of one shape. To be called inside `jax.enable_x64`.
    """
    turned = high + lax.shift_left(second, _every(second, 30, jnp.uint32))
    signed = lax.bitcast_convert_type(turned, jnp.int32)
    turns = lax.abs(_float64(signed) * 2.0**-32 + (_float64(low) + 0.5) * 2.0**-64)  # in [0, 1/2]
    turns = lax.min(turns, 0.5 - turns)  # sin(pi - x) = sin x
    sine = turns * _polynomial(SINE, turns * turns)
    return radius * lax.select(signed < 0, -sine, sine)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    value = _every(x, coefficients[0], jnp.float64)
    for coefficient in coefficients[1:]:
        value = lax.add(lax.mul(value, x), _every(x, coefficient, jnp.float64))
    return value


def _float64(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float64)


def _every(like: jax.Array, value: float, dtype) -> jax.Array:
    return lax.full(like.shape, value, dtype)
