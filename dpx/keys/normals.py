"""Two standard normals from one block of the cipher, in float64, with a bound on their error.

Box and Muller 1958 (https://doi.org/10.1214/aoms/1177706645): for uniform p and theta, r = sqrt(-2 log p) and the angle
theta give two independent normals, r sin(2 pi theta) and r cos(2 pi theta). A block has the words a, b, c and d:

    a > 0:      p = (a 2^32 + b + 1/2) 2^-64                          theta = (c 2^32 + d + 1/2) 2^-64
    a = 0:      p = (b 2^28 + floor(d / 16) + 1/2) 2^-92              theta = (c 2^4 + d mod 16 + 1/2) 2^-36
    a = b = 0:  p = (floor(d / 16) 2^32 + e + 1/2) 2^-124             theta = as for a = 0

So a p with a = 0, which has probability 2^-32, has 28 more bits. A p below 2^-64 has another 32, from a word e that the
whole release shares, and the normals reach 13.16. Two pairs of one release that both have a = b = 0 would share e, and
would not be independent. With n pairs, the probability of that is at most n^2 2^-129, which the cost includes
(`dpx.accounting.arithmetic`). No other pair depends on e, so without such an event all pairs are independent.

The error. Let U and Theta be uniform real numbers that start with the digits of p and theta. (U is below 2^-32 if and
only if a = 0, and below 2^-64 if and only if a = b = 0. In each of the three cases, the digits of both numbers are
different bits, so U and Theta are uniform and independent in each case, and altogether.) With r = sqrt(-2 log p), the
computed normals g~ differ from the exact normals g of U and Theta by at most

    p >= 2^-32   EVALUATION + 2^-65 / (p r)
    p >= 2^-64   EVALUATION + 2^-93 / (p r) + 2 pi r 2^-37
    p < 2^-64    EVALUATION + 2^-125 / (p r) + 2 pi r 2^-37

because U is within half a digit of p, dr/dp = -1 / (p r), and Theta is within half a digit of theta. (Where a > 0, half
a digit of theta moves g by at most 2^-58, which EVALUATION includes.) EVALUATION, 2^-45, covers the errors of float64,
with products and sums fused or not. In units of 2^-53, these are:

    log p      its two terms have relative errors of 2 and 7.2, and the second is at most half of the first, or alone;
               p has one of 1, but where the exponent is 0, p - 1 has it instead
    r          so 8 r, and 3.4 r for r > 2, the root included
    sine       8: the polynomial 5.3, its product 1, and theta 1.6, because theta has an absolute error of 2^-55
    r sine     r (8 + 3.4 + 1) for r > 2, at most 164; and 2 (8 + 8 + 1) = 34 for r <= 2
    `noise.py` 40: R g + 1/2 has at most 3 roundings, of 2^-45 cells where it is above 256, so that a deviation has
               19.4 cells or more; otherwise of 2^-46 cells, where a deviation has 16 or more

The sum is 204, below 256. tests/test_noise.py compares 100,000 blocks with extended precision, and finds errors below
2^-46. There is no branch on a value and no rejection, because their time would reveal the noise (Jin et al. 2021,
https://arxiv.org/abs/2112.05307).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax  # `jnp` takes longer to trace

EVALUATION = 2.0**-45  # in deviations
# -4 atanh(s) / s for s^2 in [0, 0.02944], and sin(2 pi u) / u for u^2 in [0, 1/16], as polynomials of the square,
# highest power first. Exchange (Remez) minimized their largest relative errors, 1.7e-16 and 1.4e-16.
LOGARITHM = (
    -0.3367710908897167, -0.3624371094047564, -0.4444687432167284, -0.5714283196249861,
    -0.8000000012403269, -1.3333333333310444, -4.000000000000001,
)  # fmt: skip
SINE = (
    -0.6921569227487744, 3.817288638616514, -15.094499474810789, 42.058689667355345,
    -76.70585968329085, 81.60524927551285, -41.34170224039802, 6.283185307179585,
)  # fmt: skip
ROOT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # its bits


def radius_and_angle(words: Sequence[jax.Array], rare: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes r and theta (or theta - 1, if that is nearer to 0), float64, from the four words of a block, uint32 of
    one shape. rare: the release's word e, uint32 (). Call this inside `jax.enable_x64`."""
    a, b, c, d = words
    small = lax.eq(a, _constant_like(a, 0, jnp.uint32))

    def choose(if_small, otherwise) -> jax.Array:
        return lax.select(small, if_small, otherwise)

    def constant(if_small: float, otherwise: float) -> jax.Array:
        return choose(_constant_like(a, if_small, jnp.float64), _constant_like(a, otherwise, jnp.float64))

    first = choose(b, a)
    high = lax.mul(_to_float64(first), constant(2.0**-64, 2.0**-32))
    within = lax.broadcast((_to_float64(rare) + 0.5) * 2.0**-32, a.shape)
    within = lax.select(lax.eq(first, _constant_like(a, 0, jnp.uint32)), within, _constant_like(a, 0.5, jnp.float64))
    low = _to_float64(choose(lax.shift_right_logical(d, _constant_like(d, 4, jnp.uint32)), b)) + within
    low = lax.mul(low, constant(2.0**-92, 2.0**-64))
    # log p = exponent log 2 + log m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh((m - 1) / (m + 1)).
    bits = lax.bitcast_convert_type(high + low, jnp.int64)
    exponent = lax.shift_right_arithmetic(bits - ROOT_HALF, _constant_like(bits, 52, jnp.int64))
    m = lax.bitcast_convert_type(bits - lax.shift_left(exponent, _constant_like(bits, 52, jnp.int64)), jnp.float64)
    less_one = lax.select(exponent == 0, (high - 1.0) + low, m - 1.0)  # near 1, p has lost digits that p - 1 still has
    s = lax.div(less_one, m + 1.0)
    squared = s * _polynomial(LOGARITHM, s * s) - exponent.astype(jnp.int32).astype(jnp.float64) * (2 * math.log(2))
    rest = choose(lax.shift_left(d, _constant_like(d, 28, jnp.uint32)) + np.uint32(2**27), d)
    theta = _to_float64(lax.bitcast_convert_type(c, jnp.int32)) * 2.0**-32 + (_to_float64(rest) + 0.5) * 2.0**-64
    return lax.sqrt(squared), theta  # above 0, because p - 1 is below 0


def normal_from_polar(radius: jax.Array, theta: jax.Array, second: jax.Array) -> jax.Array:
    """Returns r sin(2 pi theta), or r cos(2 pi theta) where `second`, bool, is True, as float64. radius, theta: from
    `radius_and_angle`. All have one shape. Call this inside `jax.enable_x64`."""
    turns = lax.abs(theta)  # in [0, 1/2]
    folded = lax.min(turns, 0.5 - turns)  # sin(pi - x) = sin x
    turns = lax.select(second, 0.25 - turns, lax.select(theta < 0, -folded, folded))  # cos x = sin(pi / 2 - x)
    return radius * (turns * _polynomial(SINE, turns * turns))


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    value = _constant_like(x, coefficients[0], jnp.float64)
    for coefficient in coefficients[1:]:
        value = lax.add(lax.mul(value, x), _constant_like(x, coefficient, jnp.float64))
    return value


def _to_float64(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float64)


def _constant_like(like: jax.Array, value: float, dtype) -> jax.Array:
    return lax.full(like.shape, value, dtype)
