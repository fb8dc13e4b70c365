"""Moments of the likelihood ratio of random allocation, for its Renyi divergences in both directions.

S = (t - j) / t + (u_1 + ... + u_j) / t, with independent u_i = exp((2 x - 1) / (2 s_i^2)), x from N(0, s_i^2).

**Removal.** E S^n = n! t^-n c_n, where c_n is the coefficient of x^n in f(x) = e^((t - j) x) prod_i f_i(x) and
f_i(x) = sum_k x^k e^(k (k-1) / (2 s_i^2)) / k!. Every f_i may be cut after x^n. By Cauchy, the mean of f(z) z^-n over M
equidistant points of the circle |z| = r is c_n + c_(n+M) r^M + ..., in which no term is negative: an upper bound for
any r and M. The radius is the one that is best for f(r) r^-n.

**Addition.** E S^-r = t^r / Gamma(r) int l^(r-1) e^(-(t-j) l) prod_i L_i(l) dl with L_i(l) = E e^(-l u_i). In v = ln l,
L_i is the probability that ln(a standard exponential number) - ln u_i exceeds v. Both terms have log-concave densities,
so the integrand is log-concave in v. Therefore it falls beyond an end of the range at least as fast as a geometric
series that falls from its largest value to the one at this end.

(n - 1) D_n is convex in n, and 0 at n = 1, so chords bound it between whole orders. No D_n exceeds that of one Gaussian
release, n / (2 s^2) at the least s, because divergences are quasi-convex.
"""

import functools
import math

import numpy as np
from scipy import special

Noise = tuple[tuple[float, int], ...]  # pairs (noise multiplier, number of steps)

_LARGEST_ORDER = 1024  # by the integral; the bound at larger ones is that of one Gaussian release
_LEAST_POINTS = 64  # of the circle
_STEP, _FIRST, _LAST = 0.03, -60.0, 30.0  # of v in the integral
_FARTHEST, _LEAST_LOG = 37.0, -600.0  # of x / s in L; and of ln L, so that it is far above the tail beyond
_SMALL = 35.0  # ln of the share of the largest value at which the integrand ends
_RADIUS = 0.1  # divided by the order, how near ln of the radius is to the best one
_ZERO = 1e-300  # in place of 0; far below _ROUNDING
_ROUNDING = 1e-13  # of ln of a moment, relative to its parts
_OF_A_LOG = 2.0**-50  # of the logarithm of a number near 1, which counts as often as its step


def allocation_renyi(noise: Noise, steps_per_epoch: int, orders: np.ndarray) -> np.ndarray:
    """Upper bounds of the Renyi divergences in either direction, float64 (orders,)."""
    whole = np.unique(np.concatenate([np.floor(orders), np.ceil(orders)]))
    whole = whole[whole > 1]
    most = whole / (2 * noise[0][0] ** 2)
    arguments = noise, steps_per_epoch
    found = np.array([max(renyi_of_removal(*arguments, int(n)), renyi_of_addition(*arguments, n)) for n in whole])
    tilts = np.append(0.0, whole - 1)
    moments = np.append(0.0, np.minimum(found, most) * (whole - 1))
    return np.interp(orders - 1, tilts, moments) / (orders - 1)


def renyi_of_removal(noise: Noise, steps_per_epoch: int, order: int) -> float:
    """An upper bound on D_n(P|Q) at a whole order n of at least 2."""
    k = np.arange(order + 1)
    sigmas, counts = (np.array(column, np.float64)[:, None] for column in zip(*noise, strict=True))
    logs = k * (k - 1) / (2 * sigmas**2) - special.gammaln(k + 1)  # (distinct noise multipliers, order + 1)
    others = steps_per_epoch - float(counts.sum())

    def terms_of_series(log_radius: float) -> tuple[np.ndarray, np.ndarray]:
        """The terms of each f_i, and ln of what they were divided by, so that the largest is 1."""
        scaled = logs + k * log_radius
        largest = scaled.max(axis=1, keepdims=True)
        return np.exp(scaled - largest), largest

    low, high = -order / sigmas.min() ** 2 - math.log(steps_per_epoch) - 1.0, math.log(order) + 1.0
    while high - low > _RADIUS / order:  # the degree of the terms of f at the best radius has the mean n
        middle = (low + high) / 2
        shares, _ = terms_of_series(middle)
        degree = others * math.exp(middle) + np.sum(counts[:, 0] * (shares @ k) / shares.sum(axis=1))
        low, high = (middle, high) if degree < order else (low, middle)
    points = max(_LEAST_POINTS, 4 * 2 ** math.ceil(math.log2(order + 1)))
    shares, largest = terms_of_series(high)
    angles = 2j * math.pi * np.arange(points) / points
    on_circle = np.fft.ifft(shares, points, axis=1) * points
    means = on_circle / shares.sum(axis=1, keepdims=True)
    means = np.where(means == 0, _ZERO, means)  # a number times the complex ln 0 would not be a number
    log_f = others * math.exp(high) * np.expm1(angles) - order * angles
    log_f += np.sum(counts * np.log(means), axis=0)
    log_largest = others * math.exp(high) + float(np.sum(counts * (largest + np.log(shares.sum(axis=1)[:, None]))))
    rounding = _ROUNDING + _OF_A_LOG * (steps_per_epoch + float(counts.sum()))
    mean = float(np.mean(np.real(np.exp(log_f)))) + rounding
    parts = special.gammaln(order + 1), -order * math.log(steps_per_epoch), -order * high, log_largest
    log_moment = sum(parts) + (math.log(mean) if mean > 0 else math.inf)
    if not log_moment < math.inf:  # also what is no number, because max(0.0, nan) is 0.0
        return math.inf
    return (max(0.0, log_moment) + rounding + _ROUNDING * sum(map(abs, parts))) / (order - 1)


def renyi_of_addition(noise: Noise, steps_per_epoch: int, order: float) -> float:
    """An upper bound on D_n(Q|P), the Renyi divergence at an order n of at least 2; inf if the integral cannot say."""
    if order > _LARGEST_ORDER:
        return math.inf
    v, logs = _log_transform(noise, steps_per_epoch)
    r = order - 1
    exponent = r * v + logs
    peak = int(np.argmax(exponent))
    fallen = exponent[peak] - exponent[[0, -1]]
    if np.any(fallen < _SMALL):
        return math.inf
    distances = np.maximum(np.abs(v[[0, -1]] - v[peak]), _STEP)
    beyond = float(np.sum(np.exp(-fallen) * distances / fallen))
    integral = _STEP * float(np.sum(np.exp(exponent - exponent[peak]))) + beyond
    parts = r * math.log(steps_per_epoch), special.gammaln(r), float(exponent[peak])
    log_moment = parts[0] - parts[1] + parts[2] + math.log(integral)
    return (max(0.0, log_moment) + 10 * _ROUNDING * (1 + sum(map(abs, parts)))) / r


@functools.lru_cache(64)
def _log_transform(noise: Noise, steps_per_epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The points v, and ln of the product of all transforms at l = e^v, float64 (points,) each."""
    s = noise[0][0]
    v = np.arange(_FIRST, _LAST + 0.5 / s**2 + 10 / s, _STEP) - math.log(steps_per_epoch)
    others = steps_per_epoch - sum(count for _, count in noise)
    total = -others * np.exp(np.minimum(v, 600))
    used = len(v)
    for s, count in noise:
        log = _log_laplace_transform(s, v)
        used = min(used, int(np.searchsorted(-log, -_LEAST_LOG)))
        total = total + count * log
    return v[:used], total[:used]


def _log_laplace_transform(s: float, v: np.ndarray) -> np.ndarray:
    """ln E exp(-e^v u), float64 (points,), by the trapezoidal rule, whose error falls exponentially for such functions.

    Beyond the range, the integrand is at most the density. It falls with v.
    """
    step = min(0.25, s / 4)
    z = np.arange(-_FARTHEST, 12 + 1 / s, step)
    weights = np.exp(-z * z / 2) * (step / math.sqrt(2 * math.pi))
    result = np.empty(len(v))
    for start in range(0, len(v), 512):
        with np.errstate(over="ignore"):
            scaled = np.exp(v[start : start + 512, None] + z / s - 0.5 / s**2)
        lost = -(np.expm1(-scaled) @ weights)  # 1 - L, precise where L is near 1
        kept = np.exp(-scaled) @ weights + special.ndtr(-_FARTHEST)
        result[start : start + 512] = np.where(lost < 0.5, np.log1p(-np.minimum(lost, 0.5)), np.log(kept))
    return result
