"""Gaussian differential privacy: exact conversion between mu and (epsilon, delta).

mu-GDP means that telling two neighboring data sets apart is at least as hard as telling N(0, 1) from N(mu, 1).

`epsilon`, `delta`, `log_delta` and `mu` convert between mu and (epsilon, delta) (Dong, Roth and Su 2022,
https://arxiv.org/abs/1905.02383). The cost of unsampled Gaussians uses them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, special

from dpx.accounting import checks

_ROUNDING = 2.0**-50  # relative rounding error of a logarithm and of epsilon
_LARGE = 1e6  # above this mu, the tail bound is exact to 1e-5, and float64 cannot tell the two deltas apart


def delta(mu: float, *, epsilon: float) -> float:
    """Returns the least delta for which mu-GDP implies (epsilon, delta), exactly.

    delta = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)

    mu, epsilon: at least 0, may be inf. Raises ValueError otherwise.
    Source: Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383.
    """
    mu, epsilon = checks.require_nonnegative("mu", mu), checks.require_epsilon(epsilon)
    if mu == math.inf:
        return 1.0
    if mu == 0 or epsilon == math.inf:
        return 0.0
    mu = max(mu, 1e-300)  # products with a smaller one round to 0, which has no logarithm
    return math.exp(min(0.0, log_delta(mu, epsilon=epsilon)))


def log_delta(mu: float, *, epsilon: float) -> float:
    """Returns ln `delta(mu, epsilon=epsilon)`, rounded up, even where delta underflows. mu: positive and finite."""
    upper = float(special.log_ndtr(mu / 2 - epsilon / mu))
    if upper == -math.inf:
        return upper
    lower = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    # At a small mu both are nearly equal, and rounding could turn a positive delta into 0.
    difference = upper + math.log(-math.expm1(min(lower - upper, 0.0) - _ROUNDING * (1 - upper + epsilon)))
    # With x = epsilon/mu - mu/2 and the density phi, delta = phi(x) (R(x) - R(x + mu)), where R is Mills' ratio,
    # because e^epsilon phi(x + mu) = phi(x). R(x) = int_0^inf e^(-x t - t^2/2) dt, so -R'(x) = 1 - x R(x) is convex,
    # and the trapezoidal rule is an upper bound on its integral from x to x + mu. It is exact at a small mu.
    x = np.array([epsilon / mu - mu / 2, epsilon / mu + mu / 2])
    slopes = 1 - x * math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))
    rounded = slopes.mean() + 4 * _ROUNDING * (1 + np.abs(slopes).max())
    trapezoid = -(x[0] ** 2) / 2 + math.log(mu * rounded / math.sqrt(2 * math.pi)) + _ROUNDING * (1 + x[0] ** 2)
    return min(difference, float(trapezoid))


def epsilon(mu: float, *, delta: float) -> float:
    """Returns the least epsilon >= 0 for which mu-GDP implies (epsilon, delta); exact, rounded up.

    mu: at least 0, may be inf. delta: in (0, 1). Raises ValueError for numbers outside these domains.
    """
    mu, delta = checks.require_nonnegative("mu", mu), checks.require_delta(delta)
    if mu == math.inf:
        return math.inf
    if mu == 0 or special.erf(mu / math.sqrt(8)) <= delta:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1e-9  # the Gaussian tail bound
    if mu > _LARGE:
        return top * (1 + _ROUNDING)
    return _root_from_above(lambda value: log_delta(mu, epsilon=value) - math.log(delta), 0.0, top)


def mu(*, epsilon: float, delta: float) -> float:
    """Returns the largest mu for which mu-GDP implies (epsilon, delta); exact, rounded down.

    epsilon: at least 0, may be inf. delta: in (0, 1). Raises ValueError for numbers outside these domains.
    """
    epsilon, delta = checks.require_epsilon(epsilon), checks.require_delta(delta)
    if epsilon == math.inf:
        return math.inf
    top, log_target = 1.0, math.log(delta) * (1 + _ROUNDING)
    while log_delta(top, epsilon=epsilon) < log_target:
        top *= 2
    low = top
    while log_delta(low, epsilon=epsilon) > log_target:
        low /= 16
    # In logarithms, because mu may be far smaller than the absolute error of a root.
    root = _root_from_above(
        lambda log: log_delta(math.exp(-log), epsilon=epsilon) - log_target, -math.log(top), -math.log(low)
    )
    return math.exp(-root)


def _root_from_above(function: Callable[[float], float], low: float, high: float) -> float:
    """Finds a root of a decreasing function, rounded up to where the function is not positive."""
    root: Any = optimize.brentq(function, low, high, xtol=1e-14, rtol=np.float64(1e-14))
    step = 1e-14 * max(1.0, abs(root))
    while function(root) > 0:
        root, step = min(high, root + step), 2 * step
    return root
