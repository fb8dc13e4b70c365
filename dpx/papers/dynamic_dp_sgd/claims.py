"""Claims of the Dynamic DP-SGD paper, for comparison only. Do not report them as a cost: use `dpx.epsilon`.

`mu_total` and `first_mu` rely on a central limit theorem (CLT) for many steps at small sampling rates (Bu et al. 2020,
https://arxiv.org/abs/1911.11607, extended to changing noise by Dynamic DP-SGD, Du et al. 2021,
https://arxiv.org/abs/2111.00173). Their epsilon is too small. The true epsilon, by privacy loss distributions, is 1.0
to 1.05 times theirs at sampling rate 0.01 and 5,000 steps with all noise multipliers above 1, 1.5 to 3 times at 500
steps with a final multiplier near 0.5, and up to 11 times at rate 0.001.

The paper compares with zCDP and tCDP, `zcdp_epsilon` and `tcdp_epsilon`, whose guarantees hold but are loose.
"""

import math
from typing import Any

import numpy as np
from scipy import optimize

from dpx.accounting import checks, gdp
from dpx.values import require_number, require_whole


def zcdp_rho(noise_multipliers: Any, *, counts: Any = None) -> float:
    """Returns zCDP's rho for Gaussian releases without sampling: sum_t 1 / (2 sigma_t^2); inf if any sigma_t is 0.

    noise_multipliers: sigma_t, float (T,), at least 0. counts: int (T,), how often each step is repeated; default once.
    Raises ValueError for numbers outside these domains.
    Source: Bun and Steinke 2016, https://arxiv.org/abs/1605.02065; for decaying noise Yu et al. 2019,
    https://arxiv.org/abs/1904.02200.
    """
    sigmas, _, repeats = checks.require_schedule(noise_multipliers, 1.0, counts)
    return float(np.sum(repeats * _zcdp_rho_per_step(sigmas)))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns an upper bound on epsilon, rho + 2 sqrt(rho ln(1/delta)) (Bun and Steinke 2016, Proposition 1.3).

    rho: at least 0. delta: in (0, 1). Raises ValueError for numbers outside these domains.
    """
    rho, delta = checks.require_nonnegative("rho", rho), checks.require_delta(delta)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def tcdp(noise_multipliers: Any, sampling_rate: Any, *, counts: Any = None) -> tuple[float, float]:
    """Returns (rho, omega) of truncated CDP: the Renyi divergence is at most rho alpha for all orders alpha < omega.

    A step at rate s with rho_t = 1 / (2 sigma_t^2) costs 13 s^2 rho_t up to omega_t = ln(1/s) / (4 rho_t). This holds
    for fixed-size samples without replacement, neighbors by replacement, and noise multipliers relative to the effect
    of replacing one example (Bun, Dwork, Rothblum and Steinke 2018, https://doi.org/10.1145/3188745.3188946). It
    requires s and rho_t at most 0.1 (so sigma_t >= 2.24) and ln(1/s) >= max(6 rho_t, 3 rho_t (2 + log2(1/rho_t))).
    Other steps count without amplification. Composition adds rho and takes the smallest omega.

    noise_multipliers: float (T,), at least 0. sampling_rate: in (0, 1], one float or (T,). counts: int (T,), how often
    each step is repeated; default once. Raises ValueError for numbers outside these domains.
    """
    sigmas, rates, repeats = checks.require_schedule(noise_multipliers, sampling_rate, counts)
    sigmas, rates, repeats = sigmas[repeats > 0], rates[repeats > 0], repeats[repeats > 0]
    rho, log_inverse_rate = _zcdp_rho_per_step(sigmas), -np.log(rates)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        amplified = (rates <= 0.1) & (rho <= 0.1) & (rho > 0)
        amplified &= (log_inverse_rate >= 6 * rho) & (log_inverse_rate >= 3 * rho * (2 - np.log2(rho)))
        omega = np.where(amplified, log_inverse_rate / (4 * rho), np.inf)
    total = float(np.sum(repeats * np.where(amplified, 13 * rates**2 * rho, rho)))
    return total, float(np.min(omega, initial=np.inf))


def tcdp_epsilon(rho: float, omega: float, delta: float) -> float:
    """Returns an upper bound on epsilon for tCDP: min over alpha < omega of rho alpha + ln(1/delta) / (alpha - 1).

    It equals the zCDP bound if the best alpha is below omega. rho: at least 0. omega: above 1, possibly inf. delta: in
    (0, 1). Raises ValueError for numbers outside these domains.
    """
    rho, delta = checks.require_nonnegative("rho", rho), checks.require_delta(delta)
    if not 1 < checks.require_concrete("omega", omega):
        raise ValueError(f"omega must be above 1, got {omega}")
    if rho == 0 and omega == math.inf:
        return 0.0
    if omega == math.inf or math.log(1 / delta) <= (omega - 1) ** 2 * rho:
        return zcdp_epsilon(rho, delta)
    return rho * omega + math.log(1 / delta) / (omega - 1)


def _zcdp_rho_per_step(sigmas: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return 1 / (2 * sigmas**2)


def mu_total(noise_multipliers: Any, *, sampling_rate: Any, counts: Any = None) -> float:
    """Returns the CLT's mu of a schedule, an approximation that may be below the true mu, so it is never a cost.

    mu = sqrt(sum_t q_t^2 (exp(1 / sigma_t^2) - 1)); inf if a noise multiplier is 0. At rate 1 it is above the exact
    sqrt(sum_t 1 / sigma_t^2).

    noise_multipliers: float (T,), at least 0. sampling_rate: in (0, 1], one float or (T,). counts: int (T,), how often
        each step is repeated; default once. Raises ValueError outside these domains. Source: see the module.
    """
    sigmas, rates, repeats = checks.require_schedule(noise_multipliers, sampling_rate, counts)
    with np.errstate(divide="ignore", over="ignore"):
        return math.sqrt(float(np.sum(repeats * rates**2 * np.expm1(sigmas**-2.0))))


def first_mu(*, epsilon: float, delta: float, sampling_rate: float, steps: int, growth: float = 1.0) -> float:
    """Returns Dynamic DP-SGD's first mu, mu_0, an approximation whose noise may be too small for (epsilon, delta).

    By the CLT, sigma_t = growth^(-t/steps) / mu_0, t = 1 .. steps, costs epsilon at delta. In truth, it costs more.

    growth: rho_mu, finite and at least 1; 1 has the closed form sqrt(ln(mu_total^2 / (q^2 steps) + 1)).
    epsilon: positive and finite. delta: in (0, 1). sampling_rate: in (0, 1]. steps: int, at least 1. Raises ValueError
    for numbers outside these domains. Source: see the module.
    """
    steps = require_whole("steps", steps)
    epsilon = checks.require_positive_epsilon(epsilon)
    growth = require_number("growth", growth, minimum=1)
    _, (rate,), _ = checks.require_schedule([1.0], sampling_rate, None)
    log_target = math.log(gdp.mu(epsilon=epsilon, delta=delta))
    powers = growth ** (np.arange(1, steps + 1) / steps)
    largest = math.sqrt(math.log1p(math.exp(2 * log_target) / (rate**2 * steps)))
    if growth == 1:
        return largest

    def exceeds_budget(first: float) -> float:
        return math.log(mu_total(1 / (first * powers), sampling_rate=rate)) - log_target

    found: Any = optimize.brentq(exceeds_budget, largest / growth, largest, xtol=1e-14, rtol=np.float64(1e-14))
    return float(found)
