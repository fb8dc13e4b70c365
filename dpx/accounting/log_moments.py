"""Moments of a normal under a function that is a straight line in each of many cells, at many powers at once."""

import math

import numpy as np
from scipy import special

_GROUP, _POWERS = 16, 8  # cells that are left out together, and powers at once: for speed
_NEGLIGIBLE = 45.0  # thousands of cells that are e^-45 of the largest are less than its rounding error
_HALF = math.sqrt(0.5)


def log_moments(powers: np.ndarray, x: np.ndarray, lines: tuple, slopes: tuple, sigma: float) -> np.ndarray:
    """ln of the integrals of exp(power * line) under N(0, s^2), float64 (powers,), where the line is straight in cells.

    x: the ends of the cells, of one width, float64 (cells + 1,). lines: the line at the left and at the right end of
    each, float64 (cells,) each. slopes: of the line below the first and above the last cell.
    """
    (left, right), squares, width = lines, (x / sigma) ** 2 / 2, (x[1] - x[0]) / sigma
    first, last = powers * slopes[0] * sigma, powers * slopes[1] * sigma  # means of the normals beyond the cells
    low, high = x[0] / sigma, x[-1] / sigma
    below = powers * left[0] - first * low + first**2 / 2 + special.log_ndtr(low - first)
    above = powers * right[-1] - last * high + last**2 / 2 + special.log_ndtr(last - high)
    within = np.empty(len(powers))
    kept = _kept(powers[:, None], left, right, squares, width)
    for begin in range(0, len(powers), _POWERS):
        some = powers[begin : begin + _POWERS, None]
        groups = np.flatnonzero(kept[begin : begin + _POWERS].any(axis=0)) * _GROUP
        cells = slice(groups[0], groups[-1] + _GROUP)
        middles = (x[cells] / sigma + width / 2) - some * (right - left)[cells] / width  # from the mean of the normal
        near = np.abs(middles) - width / 2
        far, inner = near + width, near < 0
        base = np.where(middles > 0, some * left[cells] - squares[:-1][cells], some * right[cells] - squares[1:][cells])
        shares = special.erfcx(np.maximum(near, 0) * _HALF)
        shares -= np.exp(-width * np.abs(middles)) * special.erfcx(far * _HALF)
        base[inner] += near[inner] ** 2 / 2  # the largest of the integrand in the cell
        shares[inner] = 2 * (special.ndtr(far[inner]) - special.ndtr(near[inner]))
        largest = base.max(axis=1, keepdims=True)
        within[begin : begin + _POWERS] = largest[:, 0] + np.log(np.sum(np.exp(base - largest) * shares, axis=1) / 2)
    return np.logaddexp(within, np.logaddexp(below, above))


def _kept(powers: np.ndarray, left: np.ndarray, right: np.ndarray, squares: np.ndarray, width: float) -> np.ndarray:
    """Whether a group of cells counts for a power, bool (powers, groups): all others are e^-45 of the largest cell.

    The integrand within a cell is at most e^(w^2 / 8) times that at one of its ends, because the cell is w deviations.
    """
    highest, lowest = np.maximum(left, right).reshape(-1, _GROUP), np.minimum(left, right).reshape(-1, _GROUP)
    nearest = np.minimum(squares[:-1], squares[1:]).reshape(-1, _GROUP).min(axis=1)
    most = np.maximum(powers * highest.max(axis=1), powers * lowest.min(axis=1)) - nearest
    least = (powers * left[::_GROUP] - squares[:-1:_GROUP]).max(axis=1, keepdims=True)
    return most > least - _NEGLIGIBLE - width**2 / 8
