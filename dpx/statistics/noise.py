"""Noise on integer sums, whose stated privacy holds for every bit.

Every statistic is a sum S of integers, so neither the order of summation nor float rounding affects it. The effect of
one unit is known exactly: its 1-norm is at most `one`, its 2-norm at most `two`, and it touches at most `moves`
elements.

**Gaussian.** Write S = gamma a + r, with 0 <= r < gamma, for the grid gamma of `dpx.keys.release`. What that function
releases for r, plus gamma a, is what it would release for S, so the cost is that of a training step. Only r passes
through float32, so a large sum loses no digits.

**Laplace.** The release is S + round(L) for Laplace noise L of scale t, cut to a public range and rounded to a public
grid, which is post-processing. With probability 2^-40 it is instead a uniform point of that grid, whatever the data.
N = round(L) has P(N = 0) = 1 - e^(-1/(2t)); otherwise its sign is fair and |N| - 1 is geometric: P(|N| - 1 = g) is
proportional to e^(-g/t), a product over the binary digits of g. So digit j is an independent coin, which shows 1 with
probability 1 / (1 + e^(2^j / t)). There are no logarithms of random numbers, no rejection and no branch on a value.

PROOF of epsilon at delta 0. Each probability is computed in 60-digit decimal arithmetic and rounded to 2^-128. There
are fewer than 64 digits, and those left out have a total probability below 2^-128. So the program's law is within
2^-121 of the exact one, for every set of outputs. The grid has at most 2^40 values, so the uniform part gives each a
probability of at least 2^-80.1, and the program's probabilities are the exact ones up to a factor of 1 +- 2^-40.9. The
exact laws of two neighbors differ by a factor of at most e^(one / t). A unit changes at most `moves` elements; the rest
have equal laws for both neighbors. So the release has an epsilon of one / t + moves 2^-39, and t is chosen to make this
the stated epsilon.
"""

import functools
import hashlib
import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Literal, NamedTuple

import jax
import numpy as np
from scipy import special

from dpx import keys
from dpx.keys import streams
from dpx.keys.noise import GRID
from dpx.sums.rounding import FloatPair

Kind = Literal["gaussian", "laplace"]

LARGEST_SUM = 2**60  # in size, so that no addition of int64 overflows
_SHARE = 24  # a release is uniform with probability 2^24 / 2^64
_FINEST = 40  # the uniform part has at most 2^40 values
_PER_NUMBER = 2.0**-39  # of epsilon, for each element that a unit changes
_TAIL = 89  # scales beyond which Laplace noise has a probability below 2^-128
_WIDER = 64  # scales by which the range of a release exceeds that of the sums at each end
_PRECISION = 60  # decimal digits
_BLOCKS = 4096  # cipher blocks at once
_LEAST_SIZE = 16  # the fewest numbers drawn; larger draws round up to a power of two, so that few programs are compiled


class UnitSensitivity(NamedTuple):
    """Bounds on the effect of one unit: its 1-norm, float; its 2-norm, float; and how many elements it touches, int."""

    one: float
    two: float
    moves: int


@dataclass(frozen=True)
class Noise:
    """Noise of one kind for integers. scale: the standard deviation of Gaussian noise, or t of Laplace noise."""

    kind: Kind
    scale: float

    @classmethod
    def from_multiplier(cls, kind: Kind, noise_multiplier: float, effect: UnitSensitivity) -> "Noise":
        """Returns the noise for a multiplier relative to `effect`. Raises ValueError outside the proofs' range."""
        if kind == "gaussian":
            scale = float(np.nextafter(np.float32(noise_multiplier * effect.two), np.float32(math.inf)))
        else:
            own = 1 / noise_multiplier - effect.moves * _PER_NUMBER
            if own < _PER_NUMBER:
                words = f"below {1 / ((effect.moves + 1) * _PER_NUMBER):.3g} for Laplace noise"
                raise ValueError(f"noise_multiplier must be {words}, got {noise_multiplier}")
            scale = effect.one / own * (1 + 2.0**-50)
        if not 2**GRID <= scale <= LARGEST_SUM / (2 * _TAIL):
            least, most = (bound / scale * noise_multiplier for bound in (2**GRID, LARGEST_SUM / (2 * _TAIL)))
            raise ValueError(f"noise_multiplier must be in [{least:.3g}, {most:.3g}] here, got {noise_multiplier}")
        return cls(kind, scale)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise, including its rounding."""
        if self.kind == "gaussian":
            return self.scale * math.sqrt(1 + 1 / (12 * 4.0**GRID))
        return self.scale * math.sqrt(2)

    def half_width(self, error: float) -> float:
        """A bound that the noise's absolute value exceeds with a probability of at most `error`."""
        if self.kind == "gaussian":
            return -float(special.ndtri(error / 2)) * self.deviation
        return self.scale * math.log(1 / error) + 0.5

    def largest_rounding(self, low: int, high: int) -> float:
        """The most that a release is rounded, beyond the rounding that `half_width` includes."""
        return 0.0 if self.kind == "gaussian" else 2.0 ** (_laplace_grid(self.scale, low, high)[2] - 1)

    def noisy_sums(self, key: jax.Array, sums: np.ndarray, low: int, high: int) -> np.ndarray:
        """The noisy sums, float64 (n,). key: used for this release alone. sums: int64 (n,), all in [low, high]."""
        if self.kind == "gaussian":
            return _add_gaussian_noise(key, sums, self.scale)
        return _add_laplace_noise(key, sums, self.scale, low, high)


def key_of_query(key: jax.Array, query: str, sums: np.ndarray) -> jax.Array:
    """Derives the scalar key of the noise from a key, the words that describe a question, and its sums.

    Repeating a question on the same data repeats its noise, so it reveals nothing. Different sums under the same key
    get different noise, so subtracting two releases does not remove it.
    """
    digest = hashlib.sha256(query.encode() + b"\0" + sums.tobytes()).digest()
    return functools.reduce(keys.fold_in, np.frombuffer(digest, np.uint32), keys.stream(key, "statistic"))


def padded_noise_count(numbers: int) -> int:
    """The number of noise values drawn for a release of `numbers` elements."""
    return max(_LEAST_SIZE, 1 << (numbers - 1).bit_length())


def _add_gaussian_noise(key: jax.Array, sums: np.ndarray, deviation: float) -> np.ndarray:
    gamma = 1 << (math.frexp(deviation)[1] - 1 - GRID)  # as `dpx.keys.release` has it
    rest = np.zeros(padded_noise_count(len(sums)), np.int64)
    rest[: len(sums)] = sums % gamma
    high = rest.astype(np.float32)
    low = (rest.astype(np.float64) - high).astype(np.float32)  # exact, because rest is below 2^48
    noisy = np.asarray(keys.release(key, 0, FloatPair(high, low), deviation)).astype(np.int64)
    return (sums + (noisy - rest)[: len(sums)]).astype(np.float64)  # rounded after the addition of whole numbers


def _add_laplace_noise(key: jax.Array, sums: np.ndarray, scale: float, low: int, high: int) -> np.ndarray:
    center, digits = laplace_coin_probabilities(scale)
    *coins, of_center, signs, free = random_words(key, (len(digits) + 3) * len(sums)).reshape(-1, len(sums), 2)
    shown = [_coin_results(coin, digit).astype(np.int64) for coin, digit in zip(coins, digits, strict=True)]
    size = 1 + sum(digit << j for j, digit in enumerate(shown))
    noise = np.where(_coin_results(of_center, center), np.where(signs[:, 0] % 2 == 1, size, -size), 0)
    return laplace_releases(sums, noise, free, scale, low, high)


def laplace_releases(
    sums: np.ndarray, noise: np.ndarray, free: np.ndarray, scale: float, low: int, high: int
) -> np.ndarray:
    """The releases, float64 (n,), from sums and their noise, int64 (n,). free: uint64 (n, 2), the bits of the uniform
    part. scale, low, high: as for `Noise.noisy_sums`."""
    first, span, coarse = _laplace_grid(scale, low, high)
    place = (np.clip(sums + noise, first, first + span) - first) >> coarse
    uniform = (free[:, 1] % np.uint64((span >> coarse) + 1)).astype(np.int64)
    place = np.where(free[:, 0] < np.uint64(1 << _SHARE), uniform, place)
    return first + (place << coarse) + ((1 << coarse) - 1) / 2


def _laplace_grid(scale: float, low: int, high: int) -> tuple[int, int, int]:
    """The smallest release, the largest minus the smallest, and log2 of the cell size, as ints."""
    more = math.ceil(_WIDER * scale)
    span = high - low + 2 * more
    return low - more, span, max(0, span.bit_length() - _FINEST)


def laplace_coin_probabilities(scale: float) -> tuple[int, list[int]]:
    """The coins of N = round(L) for Laplace noise of this scale: one for N != 0, and one per digit of |N| - 1, lowest
    first. Each is a 128-bit integer x; the coin shows 1 with probability x 2^-128."""
    digits = max(1, math.ceil(math.log2(_TAIL * scale)) + 1)
    with localcontext(prec=_PRECISION) as context:
        t, one = Decimal(scale), Decimal(2) ** 128
        center = int(one * context.exp(-1 / (2 * t)))
        return center, [int(one / (1 + context.exp(Decimal(2) ** j / t))) for j in range(digits)]


def random_words(key: jax.Array, count: int) -> np.ndarray:
    """Draws 128 random bits for each of `count` positions: uint64 (count, 2), high half first."""
    parts = []
    for number in range(-(-count // _BLOCKS)):
        a, b, c, d = (
            np.asarray(word).astype(np.uint64) for word in _draw_bits(keys.key_words(keys.fold_in(key, number)))
        )
        parts.append(np.stack([a << 32 | b, c << 32 | d], axis=-1))
    return np.concatenate(parts)[:count]


@jax.jit
def _draw_bits(words: jax.Array) -> list[jax.Array]:
    return streams.draw_bits(words, _BLOCKS)


def _coin_results(bits: np.ndarray, coin: int) -> np.ndarray:
    """Whether each coin shows 1, bool (n,). bits: uint64 (n, 2)."""
    high, low = np.uint64(coin >> 64), np.uint64(coin % 2**64)
    return (bits[:, 0] < high) | ((bits[:, 0] == high) & (bits[:, 1] < low))
