"""Strategies: lower triangular Toeplitz matrices C with ones on the diagonal, and families that need no optimization.

Such matrices multiply like power series, so C is the series c(x) = sum_j c_j x^j, and C^-1 is 1 / c(x). Coefficients of
a quotient of polynomials of degree below b come from a recurrence, in O(b) a coefficient (`scipy.signal.lfilter`).

All families come from the square root of the matrix of prefix sums, whose series is 1 / (1 - x): the root has the
series (1 - x)^(-1/2), with coefficients f_j = binom(2 j, j) / 4^j, and its inverse (1 - x)^(1/2) (Fichtenberger,
Henzinger and Upadhyay 2023, arXiv:2202.11205).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg, signal, special

from dpx.values import described, require_number, require_whole


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A lower triangular Toeplitz matrix C, whose inverse correlates the noise of the steps of a run.

    coefficients: the first coefficients of C, floats with c_0 = 1; all later ones are 0: a banded C.
    inverse_coefficients: the first coefficients of C^-1, floats with d_0 = 1; all later ones are 0: a banded inverse,
        whose C is full.

    Give one of the two; the other stays (1,). Without either, C = I, the independent noise of DP-SGD. Raises ValueError
    for coefficients that are not finite, do not begin with 1, or end with 0, and if both are given.
    """

    coefficients: tuple[float, ...] = (1.0,)
    inverse_coefficients: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        for name in ("coefficients", "inverse_coefficients"):
            object.__setattr__(self, name, _require_coefficients(name, getattr(self, name)))
        if len(self.coefficients) > 1 and len(self.inverse_coefficients) > 1:
            words = "a strategy must have coefficients or inverse_coefficients, not both"
            raise ValueError(f"{words}, got {len(self.coefficients)} and {len(self.inverse_coefficients)} of them")

    @property
    def bands(self) -> int | None:
        """The number of coefficients of C that may differ from 0; None if C is full, as for a banded inverse."""
        return len(self.coefficients) if len(self.inverse_coefficients) == 1 else None

    def column(self, steps: int) -> np.ndarray:
        """The first column of C for this many steps, float64 (steps,). Raises ValueError if it overflows."""
        return self.series(self.coefficients, self.inverse_coefficients, steps)

    def inverse_column(self, steps: int) -> np.ndarray:
        """The first column of C^-1 for this many steps, float64 (steps,). Raises ValueError if it overflows."""
        return self.series(self.inverse_coefficients, self.coefficients, steps)

    def covariance(self, steps: int) -> np.ndarray:
        """C^-1 C^-T, float64 (steps, steps): the covariance of the noise over the steps, for z of variance 1.

        Takes O(steps^3) operations, so it is for tests and for looking at.
        """
        inverse = np.asarray(linalg.toeplitz(self.inverse_column(steps), np.zeros(steps)))
        return inverse @ inverse.T

    @staticmethod
    def series(numerator: Any, denominator: Any, steps: int) -> np.ndarray:
        """The first coefficients of a quotient of two polynomials, given by theirs, float64 (steps,).

        Raises ValueError if one of them is not a finite float64.
        """
        impulse = np.zeros(require_whole("steps", steps))
        impulse[0] = 1
        with np.errstate(all="ignore"):
            made = np.asarray(signal.lfilter(np.array(numerator), np.array(denominator), impulse))
        if not np.all(np.isfinite(made)):
            first = int(np.flatnonzero(~np.isfinite(made))[0])
            words = f"the coefficients of C and of its inverse must be finite for {steps} steps"
            raise ValueError(f"{words}, but number {first} overflows: roots of the given series are too small")
        return made


def _require_coefficients(name: str, value: Any) -> tuple[float, ...]:
    """`value` as floats. Raises ValueError unless the first is 1, all are finite, and the last of several is not 0."""
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, got {described(value)}") from None
    if numbers.ndim != 1 or not len(numbers) or numbers[0] != 1 or not np.all(np.isfinite(numbers)):
        raise ValueError(f"{name} must be finite numbers that begin with 1, got {described(value)}")
    if len(numbers) > 1 and numbers[-1] == 0:
        raise ValueError(f"{name} must not end with 0, got {len(numbers)} numbers with 0 at the end")
    return tuple(numbers.tolist())


def identity() -> Strategy:
    """C = I: independent noise, DP-SGD."""
    return Strategy()


def lambda_cgd(*, correlation: float) -> Strategy:
    """Subtracts a part of the last step's noise: d = (1, -correlation) (arXiv:2601.22334).

    C has the coefficients correlation^j, so its sensitivity is exact. correlation: lambda, in [0, 1). Raises ValueError
    for other numbers: at 1, a prefix sum has the noise of one step, and C the sensitivity of all.
    """
    value = require_number("correlation", correlation, minimum=0, maximum=1)
    if value == 1:
        raise ValueError("correlation must be below 1, got 1.0")
    return Strategy(inverse_coefficients=(1.0, -value) if value else (1.0,))


def banded_inverse_square_root(*, coefficients: int) -> Strategy:
    """BISR: the first coefficients of the inverse square root of prefix sums as a banded C^-1 (arXiv:2505.12128).

    coefficients: p, int, at least 1; 1 is the identity, and 2 is `lambda_cgd(correlation=1/2)`.
    """
    count = require_whole("coefficients", coefficients)
    # (1 - x)^(1/2): each coefficient is the one before times (j - 3/2) / j.
    places = np.arange(1, count)
    return Strategy(inverse_coefficients=tuple(np.concatenate([[1.0], np.cumprod((places - 1.5) / places)])))


def square_root_coefficients(count: int) -> np.ndarray:
    """Of (1 - x)^(-1/2), for j < count: binom(2 j, j) / 4^j, float64 (count,), which begin with 1, 1/2, 3/8, 5/16."""
    places = np.arange(require_whole("count", count))
    return np.exp(special.gammaln(places + 0.5) - special.gammaln(places + 1.0)) / np.sqrt(np.pi)


def banded_square_root(*, bands: int, momentum: float = 0.0) -> Strategy:
    """BSR: the first coefficients of the square root of the workload as a banded C (arXiv:2405.13763).

    Without momentum it is also called banded FHU, and its sensitivity is exact, because the coefficients fall
    (arXiv:2202.11205).

    bands: int, at least 1. momentum: of the workload, in [0, 1): its series is 1 / ((1 - x) (1 - momentum x)), whose
        square root has the series (1 - x)^(-1/2) (1 - momentum x)^(-1/2).
    """
    half = square_root_coefficients(require_whole("bands", bands))
    momentum = require_number("momentum", momentum, minimum=0, maximum=1)
    if momentum == 1:
        raise ValueError("momentum must be below 1, got 1.0")
    return Strategy(coefficients=tuple(np.convolve(half, half * momentum ** np.arange(bands))[:bands] / half[0] ** 2))
