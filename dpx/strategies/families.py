"""Families of strategies that need no optimization.

All come from the square root of the matrix of prefix sums, whose series is 1 / (1 - x): its own is (1 - x)^(-1/2), with
the coefficients f_j = binom(2 j, j) / 4^j, and its inverse is (1 - x)^(1/2) (Fichtenberger, Henzinger and Upadhyay
2023, arXiv:2202.11205).
"""

import numpy as np
from scipy import special

from dpx.strategies.strategy import Strategy
from dpx.validation import require_number, require_whole


def identity() -> Strategy:
    """C = I: independent noise, DP-SGD."""
    return Strategy()


def lambda_cgd(*, correlation: float) -> Strategy:
    """Noise minus a part of the noise of the step before: d = (1, -correlation) (arXiv:2601.22334).

    C has the coefficients correlation^j, so its sensitivity is exact. correlation: lambda, in [0, 1). Raises ValueError
    for other numbers: at 1, the noise of a prefix sum is that of one step, and the sensitivity that of all.
    """
    value = require_number("correlation", correlation, minimum=0, maximum=1)
    if value == 1:
        raise ValueError("correlation must be below 1, got 1.0")
    return Strategy(inverse_coefficients=(1.0, -value) if value else (1.0,))


def inverse_square_root(*, coefficients: int) -> Strategy:
    """BISR: the first coefficients of the inverse square root of prefix sums as a banded C^-1 (arXiv:2505.12128).

    coefficients: p, int, at least 1; 1 is the identity, and 2 is `lambda_cgd(correlation=1/2)`.
    """
    count = require_whole("coefficients", coefficients)
    # (1 - x)^(1/2): each coefficient is the one before times (j - 3/2) / j.
    places = np.arange(1, count)
    return Strategy(inverse_coefficients=tuple(np.concatenate([[1.0], np.cumprod((places - 1.5) / places)])))


def half_coefficients(count: int) -> np.ndarray:
    """f_j = binom(2 j, j) / 4^j for j < count, float64 (count,): 1, 1/2, 3/8, 5/16, ..."""
    places = np.arange(require_whole("count", count))
    return np.exp(special.gammaln(places + 0.5) - special.gammaln(places + 1.0)) / np.sqrt(np.pi)


def banded_half(*, bands: int) -> Strategy:
    """Banded FHU, also called BSR: the first coefficients of the square root of prefix sums as a banded C.

    bands: int, at least 1. The sensitivity is exact, because the coefficients fall (arXiv:2202.11205, 2405.13763).
    """
    return banded_square_root(bands=bands)


def banded_square_root(*, bands: int, momentum: float = 0.0) -> Strategy:
    """BSR: the first coefficients of the square root of the workload as a banded C (arXiv:2405.13763).

    bands: int, at least 1. momentum: of the workload, in [0, 1): its series is 1 / ((1 - x) (1 - momentum x)), whose
    square root has the series of (1 - x)^(-1/2) times that of (1 - momentum x)^(-1/2).
    """
    half = half_coefficients(require_whole("bands", bands))
    momentum = require_number("momentum", momentum, minimum=0, maximum=1)
    if momentum == 1:
        raise ValueError("momentum must be below 1, got 1.0")
    return Strategy(coefficients=tuple(np.convolve(half, half * momentum ** np.arange(bands))[:bands] / half[0] ** 2))
