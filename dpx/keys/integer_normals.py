"""The noise and the grid of a release in 32-bit integers, for devices without IEEE float64, such as TPUs.

The law is that of `normals.py`: the same words of the cipher give the same p and theta, so the released integer differs
from that of float64 only if the exact number is closer to a border between two integers than the errors stated below.
Integer operations cannot be contracted, reassociated or flushed, so every device computes the same bits, and a test on
a CPU covers a TPU. Only the exact split of the sum, and the product of the released integer and gamma, use float32.

A 45-bit fraction x in [0, 1) is a word of 30 bits and one of 15. As a factor, it is three limbs of 15 bits, highest
first, so that a product of limbs has 30 bits, and a sum of three has 32. In units u = 2^-45, `fraction_product` is at
most 1.0001 u below x y; `fraction_square` and `two_limb_product`, whose second factor has 30 bits, are off by at most
3.0001 u. In units v = 2^-30, `high_word_product`, of 30 bits by 30 bits, is at most 2 v below x y.

Logarithm. p = m 2^-z with m in [1/2, 1), and y = 1 - m, all exact in 64 bits. For j = 1, ..., 6, m is multiplied by
1 + 2^-j if the product is at most 1, so that y < 2^-6.02 at the end. Then H = -log p is the sum of z log 2, the
logarithms of the factors, y, and S = y^2 (1/2 + y/3 + ... + y^5/7), in units of 2^-57. Its error is at most 2^-46:
7 v 2^-19 in S, 2^-51.1 for the terms that S omits, and 2^-49 for all constants and floors. With no factor, so that
r < 0.18, it is at most 2^-47 (64 y)^2 + 2^-55.

Root. H 2^-7 = X 4^-k with X in [1/4, 1), 64 bits, and r = sqrt(2 H) = 2^(4-k) sqrt(X). Two Newton steps from a cubic
give 1 / sqrt(X) with a relative error of 2^-24 (tests/test_integers.py tries all 2^16 leading parts of X, with both
extremes of the rest), and one Heron step gives the root with an error of at most 2^-44.3, because the residual
X - root^2 is exact in integers up to 2 units of 2^-48.

Sine. The sine or cosine of the angle is an odd or even polynomial in w in [0, 1), the position within an eighth of a
turn: w P(w^2) or P(w^2), found by the Remez algorithm with errors of 2^-48 (sine) and 2^-54 (cosine), and evaluated to
at most 4 u. Altogether, with r (3.25 + 4 + 4 + 4) u for root, sine and two products, the error of a normal is at most

    |g~ - g| <= EVALUATION + r SLOPE + what the digits of p and theta leave open

because 2^-46 / r is below 2^-43 for r >= 0.18, and 2^-37 r^3 below 2^-44 for smaller r. The remainder, 2^-55 / r, is
below 2^-44 on average over the border of a cell, and a strip of Lemma 1 needs only this (`dpx.accounting.arithmetic`).
If p is at least 2^-32, it is rounded down to a multiple of 2^-64, so that its error is up to a whole digit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Limbs = tuple[jax.Array, ...]  # uint32 arrays of one shape, below 2^15, highest first
Words = tuple[jax.Array, jax.Array]  # uint32 arrays; those of a fraction have 30 and 15 bits

EVALUATION, SLOPE = 2.0**-42, 2.0**-41  # in standard deviations

_LOW = np.uint32(0x7FFF)
_LOW_19 = np.uint32(0x7FFFF)
# log 2, and log(1 + 2^-j) for j = 1, ..., 6: integers, in units of 2^-57.
LOG_2 = 99893036290645747
LOGARITHMS = (
    58433680313205344, 32158374865561735, 16974324335764940, 8736928775103142, 4434663376165248, 2234388758593785,
)  # fmt: skip
# Coefficients of sin(pi w / 4) / w and cos(pi w / 4) in w^2, highest power last, with alternating signs.
SINE = (
    0.78539816339744495156, 0.080745512188038880482, 0.0024903945673690385809,
    0.000036576192126302274747, 3.1333841462167777093e-7, 1.7365192627169692735e-9, 0.0,
)  # fmt: skip
COSINE = (
    0.9999999999999999529, 0.30842513753403783955, 0.015854344243741595821, 0.00032599188648375483745,
    3.5908591802657182746e-6, 2.4609507464353882914e-8, 1.1365481579029901934e-10,
)  # fmt: skip
# Coefficients of 1 / sqrt(x) in x - 1/4, for x in [1/4, 1), with alternating signs: relative errors below 2^-6.5.
INVERSE_ROOT = 1.98956408454, 2.50358038718 / 0.75, 2.64381972891 / 0.75**2, 1.14023934173 / 0.75**3


def normal_from_polar(polar: tuple[Words, jax.Array], words: Sequence[jax.Array], second: jax.Array) -> Words:
    """Returns scale g 2^-19 as a signed 64-bit number with 53 fractional bits: two uint32 words, highest first.

    words: a block of the cipher, four uint32 arrays. polar: their `polar_radius`. second: bool, of their shape, whether
    to return the second normal of the pair. scale: that of `polar_radius`.
    """
    radius, exponent = polar
    part, negative = sine_or_cosine(words, second)
    high, low = fraction_product(limbs(radius), limbs(part))
    size = (high << 2) | (low >> 13), low << 19  # 64 bits, to be multiplied by 2^(9 - exponent)
    return _apply_sign(_shift_right_64_bits(size, exponent + 2), negative)


def round_to_grid(high: jax.Array, low: jax.Array | None, noise: Words | None, exponent: jax.Array) -> jax.Array:
    """Returns gamma k of `noise.py`, float32, shaped like `high`. gamma is 2^exponent.

    noise: R g from `normal_from_polar`, or None. exponent: int32 (), from -130 to 126. high, low: as in
    `noise.round_to_grid`, below 2^127 gamma, about 2^122 deviations.
    """
    scaled, more = _times_power_of_two(high, -exponent), jnp.zeros_like(high)
    whole = jnp.trunc(scaled)
    parts = [_float32_to_fixed_point(scaled - whole)] + ([] if noise is None else [noise])
    if low is not None:
        scaled = _times_power_of_two(low, -exponent)
        more = jnp.trunc(scaled)
        parts.append(_float32_to_fixed_point(scaled - more))
    total = jnp.full(high.shape, 2**20, jnp.uint32), jnp.zeros(high.shape, jnp.uint32)  # 1/2
    for part in parts:
        total = _add_64_bits(total, part)
    floor = lax.bitcast_convert_type(total[0], jnp.int32) >> 21
    return _times_power_of_two(whole + (more + floor.astype(jnp.float32)), exponent)  # never -0.: a floor is +0.


def polar_radius(words: Sequence[jax.Array], rare: jax.Array, scale: jax.Array) -> tuple[Words, jax.Array]:
    """Returns scale 2^-24 root, with root in [1/2, 1), and the exponent k, uint32; sqrt(-2 log p) = 2^(4 - k) root.

    words: a block of the cipher, four uint32 arrays. rare: e of `normals.py`, uint32 (). scale: uint32 (), at least
    2^23 and below 2^24.
    """
    (high, low), exponent = _uniform_from_words(words, rare)
    zeros = lax.clz(high)
    high, low = _shift_left_64_bits((high, low), zeros)
    low = ~low + np.uint32(1)  # y = 1 - m
    high = ~high + _bool_to_bit(low == 0)
    (high, low), logarithm = _reduce_log_argument((high, low), exponent + zeros)
    high, low = _add_log_series(logarithm, high, low)
    empty = high == 0  # for r below 2^-12
    high, low = jnp.where(empty, low, high), jnp.where(empty, np.uint32(0), low)
    shift = lax.clz(high) & np.uint32(0xFFFFFFFE)
    root, scale = _fixed_point_root(*_shift_left_64_bits((high, low), shift)), jnp.broadcast_to(scale, high.shape)
    radius = two_limb_product(limbs(root), (scale >> 9, (scale & 0x1FF) << 6))
    return radius, (shift >> 1) + jnp.where(empty, np.uint32(16), np.uint32(0))


def _uniform_from_words(words: Sequence[jax.Array], rare: jax.Array) -> tuple[Words, jax.Array]:
    """Returns p 2^exponent, 64 bits in two words of which the first is not 0, and the exponent, uint32."""
    a, b, _, d = words
    nothing, digits = np.uint32(0), d & np.uint32(0xFFFFFFF0)
    small = a == 0
    rarest = small & (b == 0)
    high, low = jnp.where(small, b, a), jnp.where(small, digits | 8, b)
    high, low = jnp.where(rarest, digits | (rare >> 28), high), jnp.where(rarest, (rare << 4) | 8, low)
    empty = high == 0  # a p below 2^-96
    high, low = jnp.where(empty, low, high), jnp.where(empty, nothing, low)
    small, rarest, empty = (_bool_to_bit(case) << 5 for case in (small, rarest, empty))
    return (high, low), small + rarest + empty


def _reduce_log_argument(y: Words, exponent: jax.Array) -> tuple[Words, list[jax.Array]]:
    """Multiplies 1 - y by factors 1 + 2^-j, and returns the new y, below 2^-6.02, and exponent log 2 plus the
    logarithms of the factors. This sum has three words of 19 bits, whose carries are not yet propagated.
    """
    high, low = y
    words = [exponent * word for word in _words_of_19_bits(LOG_2)]
    for j, logarithm in enumerate(LOGARITHMS, start=1):
        one = np.uint32(2 ** (32 - j))
        above, below = _add_64_bits((high, low), _shift_right_64_bits((high, low), np.uint32(j)))
        fits = above >= one
        high, low = jnp.where(fits, above - one, high), jnp.where(fits, below, low)
        words = [a + jnp.where(fits, b, np.uint32(0)) for a, b in zip(words, _words_of_19_bits(logarithm), strict=True)]
    return (high, low), words


def _words_of_19_bits(number: int) -> tuple[np.uint32, ...]:
    return tuple(np.uint32((number >> shift) & 0x7FFFF) for shift in (38, 19, 0))


def _add_log_series(logarithm: list[jax.Array], high: jax.Array, low: jax.Array) -> Words:
    """Returns logarithm - log(1 - y), with 57 fractional bits, as two words."""
    top, rest = (high << 6) | (low >> 26), low << 6  # Y = 64 y
    y = top >> 17, (top >> 2) & _LOW, ((top << 13) | (rest >> 19)) & _LOW
    # Q = (2/3 + (1/2 + (2/5 + (1/3 + 2/7 Y / 64) Y / 64) ...) Y / 64) Y, v; then S = 2^-13 (Y^2 + 2^-6 Y^2 Q).
    series = _fraction_word(1 / 3) + ((y[0] * np.uint32(round(2 / 7 * 2**15))) >> 6)
    series = _fraction_word(2 / 5) + ((y[0] * (series >> 15)) >> 6)
    for coefficient in (1 / 2, 2 / 3):
        series = _fraction_word(coefficient) + (high_word_product(y, _two_limbs(series)) >> 6)
    squared = fraction_square(y)  # Y^2, the first term of S: its high word has units of 2^-43
    more = two_limb_product(limbs(squared), _two_limbs(high_word_product(y, _two_limbs(series))))  # Y^2 Q, in 2^-49
    last = logarithm[2] + ((low >> 7) & _LOW_19) + ((squared[0] & 0x1F) << 14) + (squared[1] >> 1)
    last += ((more[0] & 0x7FF) << 8) + (more[1] >> 7)
    middle = logarithm[1] + (((high << 6) | (low >> 26)) & _LOW_19) + (squared[0] >> 5) + (last >> 19)
    middle += more[0] >> 11
    first = logarithm[0] + (high >> 13) + (middle >> 19)
    middle, last = middle & _LOW_19, last & _LOW_19
    return (first << 6) | (middle >> 13), (middle << 19) | last


def fixed_point_inverse_root(high: jax.Array) -> jax.Array:
    """Returns 1 / sqrt(x) in units of 2^-29, uint32, for x = high 2^-32 in [1/4, 1)."""
    x = high >> 16
    beyond, (c0, c1, c2, c3) = x - np.uint32(2**14), INVERSE_ROOT
    g = np.uint32(round(c2 * 2**13)) - ((beyond * np.uint32(round(c3 * 2**13))) >> 16)
    g = np.uint32(round(c1 * 2**13)) - ((beyond * g) >> 16)
    g = (np.uint32(round(c0 * 2**14)) - ((beyond * g) >> 15)).astype(jnp.int32)  # 2^-14
    off = np.int32(2**14) - ((x * (((g * g) >> 14).astype(jnp.uint32))) >> 16).astype(jnp.int32)  # 1 - x g^2
    g = jnp.minimum(2 * g + ((g * off) >> 14), np.int32(2**16 - 1)).astype(jnp.uint32)  # 2^-15
    squared = g * g  # 2^-30
    near = x * (squared >> 16) + ((x * (squared & 0xFFFF)) >> 16) + (((high & 0xFFFF) * (squared >> 16)) >> 16)
    off = lax.bitcast_convert_type(np.uint32(2**30) - near, jnp.int32)
    g = lax.bitcast_convert_type(g, jnp.int32)
    return jnp.minimum((g << 14) + (((g >> 1) * (off >> 4)) >> 12), np.int32(2**30)).astype(jnp.uint32)


def _fixed_point_root(high: jax.Array, low: jax.Array) -> Words:
    """Returns sqrt((high, low) 2^-64), in [1/2, 1). With three limbs, a TPU would need two kernels."""
    inverse = fixed_point_inverse_root(high)
    head, body = high >> 17, (high >> 2) & _LOW
    near = head * (inverse >> 15) + ((head * (inverse & _LOW) + body * (inverse >> 15)) >> 15)
    near = jnp.minimum(near << 1, np.uint32(2**30 - 1))  # the root in units of v, off by less than 2^-24
    first, second = near >> 15, near & _LOW
    squared = (first * first << 18) + (first * second << 4) + (second * second >> 12)  # 2^-48, modulo 2^-16
    rest = lax.bitcast_convert_type(((high << 16) | (low >> 16)) - squared, jnp.int32)  # the residual
    coarse, fine = (inverse >> 18).astype(jnp.int32), ((inverse >> 7) & 0x7FF).astype(jnp.int32)
    more = (rest >> 12) * coarse + (((rest >> 12) * fine + (((rest & 0xFFF) * coarse) >> 1)) >> 11)  # rest / (2 root)
    more = (more + 4) >> 3  # in units of u
    return (near.astype(jnp.int32) + (more >> 15)).astype(jnp.uint32), (more & 0x7FFF).astype(jnp.uint32)


def sine_or_cosine(words: Sequence[jax.Array], second: jax.Array) -> tuple[Words, jax.Array]:
    """Returns |sin(2 pi theta)|, or |cos(2 pi theta)| where `second` is True, and whether it was negative, bool."""
    a, _, c, d = words
    low = jnp.where(a == 0, (d << 28) | np.uint32(2**27), d)
    c = c + jnp.where(second, np.uint32(2**30), np.uint32(0))  # cos x = sin(x + a quarter turn)
    eighth = c >> 29
    back = np.uint32(0) - (eighth & 1)  # all bits are 1 where w is counted from the end of its eighth
    high, low = ((c << 3) | (low >> 29)) ^ back, (low << 3) ^ back
    w = high >> 17, (high >> 2) & _LOW, ((high << 13) | (low >> 19)) & _LOW
    even = ((eighth + 1) & 2) != 0
    value = _polynomial(limbs(fraction_product(w, w)), even)
    return fraction_product(tuple(jnp.where(even, _LOW, limb) for limb in w), limbs(value)), eighth >= 4


def _polynomial(squared: Limbs, even: jax.Array) -> Words:
    """Returns the sum of (-1)^k c_k squared^k, with the coefficients COSINE where `even` is True, else SINE."""

    def chosen(number: int, words: Callable) -> Any:
        of_cosine, of_sine = (words(each[number] * 2.0 ** shifts[number]) for each in (COSINE, SINE))
        return jax.tree.map(lambda *both: jnp.where(even, *both), of_cosine, of_sine)

    # Each coefficient times 2^shift is below 1.
    shifts = [0] + [math.floor(-math.log2(max(both))) for both in zip(COSINE[1:], SINE[1:], strict=True)]
    first: Any = chosen(6, _fraction_word)
    value: Any = None
    for number in (5, 4, 3, 2, 1, 0):
        shift = shifts[number + 1] - shifts[number]
        if number >= 4:
            first = chosen(number, _fraction_word) - (high_word_product(squared, _two_limbs(first)) >> shift)
            continue
        high, low = fraction_product(squared, limbs(value)) if value else two_limb_product(squared, _two_limbs(first))
        first, second = chosen(number, _words_of_fraction)
        second -= ((high << (15 - shift)) & _LOW) | (low >> shift)
        value = first - (high >> shift) - (second >> 31), second & _LOW
    return value


def fraction_product(x: Limbs, y: Limbs) -> Words:
    """Returns x y, rounded down by at most 1.0001 u."""
    low = x[2] * y[0] + x[1] * y[1] + x[0] * y[2] + ((x[1] * y[2] + x[2] * y[1]) >> 15)
    return _propagate_carries(x[0] * y[0], x[0] * y[1] + x[1] * y[0], low)


def two_limb_product(x: Limbs, y: Limbs) -> Words:
    """Returns x y for a y of two limbs, rounded down by at most 2.0001 u."""
    return _propagate_carries(x[0] * y[0], x[0] * y[1] + x[1] * y[0], x[1] * y[1] + x[2] * y[0])


def fraction_square(x: Limbs) -> Words:
    """Returns x^2, rounded down by at most 3.0001 u."""
    return _propagate_carries(x[0] * x[0], 2 * x[0] * x[1], 2 * x[2] * x[0] + x[1] * x[1])


def high_word_product(x: Limbs, y: Limbs) -> jax.Array:
    """Returns x y for two limbs each, as one word in units of v, rounded down by at most 2 v."""
    return x[0] * y[0] + ((x[0] * y[1] + x[1] * y[0]) >> 15)


def _propagate_carries(high: jax.Array, middle: jax.Array, low: jax.Array) -> Words:
    middle = middle + (low >> 15)
    return high + (middle >> 15), middle & _LOW


def limbs(x: Words) -> Limbs:
    return *_two_limbs(x[0]), x[1]


def _two_limbs(word: jax.Array) -> Limbs:
    return word >> 15, word & _LOW


def _fraction_word(x: float) -> np.uint32:
    return np.uint32(round(x * 2**30))


def _words_of_fraction(x: float) -> tuple[np.uint32, np.uint32]:
    number = min(round(x * 2**45), 2**45 - 1)
    return np.uint32(number >> 15), np.uint32(number & 0x7FFF)


def _add_64_bits(x: Words, y: Words) -> Words:
    """Returns the 64-bit sum x + y modulo 2^64."""
    low = x[1] + y[1]
    return x[0] + y[0] + _bool_to_bit(low < y[1]), low


def _apply_sign(x: Words, negative: jax.Array) -> Words:
    flipped = jnp.where(negative, np.uint32(0xFFFFFFFF), np.uint32(0))
    low = (x[1] ^ flipped) - flipped
    return (x[0] ^ flipped) + _bool_to_bit(negative & (low == 0)), low


def _bool_to_bit(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.uint32)


def _shift_left_64_bits(x: Words, count: jax.Array) -> Words:
    """Shifts a 64-bit number left by fewer than 32 places."""
    left, right = lax.shift_left, lax.shift_right_logical
    return left(x[0], count) | right(x[1], np.uint32(32) - count), left(x[1], count)


def _shift_right_64_bits(x: Words, count: jax.Array | np.uint32) -> Words:
    """Shifts a 64-bit number right by 1 to 64 places."""
    left, right = lax.shift_left, lax.shift_right_logical
    count = jnp.broadcast_to(count, x[0].shape)
    crossing = jnp.where(count < 32, left(x[0], np.uint32(32) - count), right(x[0], count - np.uint32(32)))
    return right(x[0], count), right(x[1], count) | crossing


def _float32_to_fixed_point(x: jax.Array) -> Words:
    """Converts float32 in (-1, 1) to a signed number with 53 fractional bits, and keeps 45 bits of its magnitude."""
    size = jnp.abs(x) * np.float32(2**21)
    high = jnp.floor(size)
    low = jnp.floor((size - high) * np.float32(2**24))
    words = high.astype(jnp.int32).astype(jnp.uint32), low.astype(jnp.int32).astype(jnp.uint32) << 8
    return _apply_sign(words, x < 0)


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x 2^exponent, which is exact except below 2^-126, in two steps because 2^exponent may be too large."""
    half = exponent >> 1
    for part in (half, exponent - half):
        x = x * lax.bitcast_convert_type((part + np.int32(127)) << np.int32(23), jnp.float32)
    return x
