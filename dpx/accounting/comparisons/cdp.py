"""Concentrated differential privacy of changing noise: guarantees, but loose ones, to compare published tables with.

Dynamic DP-SGD compares with zCDP and tCDP. Nothing here may be reported as spent: bill with `dpx.accounting`.
"""

import math
from typing import Any

import numpy as np

from dpx.accounting import checks


def zcdp_rho(noise_multipliers: Any, *, counts: Any = None) -> float:
    """rho = sum_t 1 / (2 sigma_t^2): zero-concentrated DP of Gaussian releases, sampling ignored; inf if one is 0.

    noise_multipliers: (T,), at least 0. counts: int (T,), how often each step is repeated; default once. ValueError if
    they are not. Source: Bun and Steinke 2016, https://arxiv.org/abs/1605.02065; for decaying noise Yu et al. 2019,
    https://arxiv.org/abs/1904.02200.
    """
    sigmas, _, repeats = checks.require_schedule(noise_multipliers, 1.0, counts)
    return float(np.sum(repeats * _rho(sigmas)))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """epsilon = rho + 2 sqrt(rho ln(1/delta)), an upper bound (Bun and Steinke 2016, Proposition 1.3).

    rho: at least 0. delta: in (0, 1). ValueError if they are not.
    """
    rho, delta = checks.require_nonnegative("rho", rho), checks.require_delta(delta)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def tcdp(noise_multipliers: Any, sampling_rate: Any, *, counts: Any = None) -> tuple[float, float]:
    """(rho, omega) of truncated concentrated DP: Renyi divergence at most rho alpha for every order alpha < omega.

    A step at rate s with rho_t = 1 / (2 sigma_t^2) costs 13 s^2 rho_t up to omega_t = ln(1/s) / (4 rho_t). This holds
    for a fixed-size sample without replacement, neighbors by replacement, and noise multipliers relative to the effect
    of replacing one example (Bun, Dwork, Rothblum and Steinke 2018, https://doi.org/10.1145/3188745.3188946). It needs
    s and rho_t at most 0.1, so sigma_t >= 2.24, and ln(1/s) >= max(6 rho_t, 3 rho_t (2 + log2(1/rho_t))). Other steps
    count without amplification. Composition adds rho and takes the least omega.

    noise_multipliers: (T,), at least 0. sampling_rate: in (0, 1], one number or (T,). counts: int (T,); default once.
    ValueError if they are not.
    """
    sigmas, rates, repeats = checks.require_schedule(noise_multipliers, sampling_rate, counts)
    sigmas, rates, repeats = sigmas[repeats > 0], rates[repeats > 0], repeats[repeats > 0]
    rho, log_inverse_rate = _rho(sigmas), -np.log(rates)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        amplified = (rates <= 0.1) & (rho <= 0.1) & (rho > 0)
        amplified &= (log_inverse_rate >= 6 * rho) & (log_inverse_rate >= 3 * rho * (2 - np.log2(rho)))
        omega = np.where(amplified, log_inverse_rate / (4 * rho), np.inf)
    total = float(np.sum(repeats * np.where(amplified, 13 * rates**2 * rho, rho)))
    return total, float(np.min(omega, initial=np.inf))


def tcdp_epsilon(rho: float, omega: float, delta: float) -> float:
    """min over alpha < omega of rho alpha + ln(1/delta) / (alpha - 1): as for zCDP while its order is below omega.

    rho: at least 0. omega: above 1, possibly inf. delta: in (0, 1). ValueError if they are not.
    """
    rho, delta = checks.require_nonnegative("rho", rho), checks.require_delta(delta)
    if not 1 < checks.require_concrete("omega", omega):
        raise ValueError(f"omega must be above 1, got {omega}")
    if rho == 0 and omega == math.inf:
        return 0.0
    if omega == math.inf or math.log(1 / delta) <= (omega - 1) ** 2 * rho:
        return zcdp_epsilon(rho, delta)
    return rho * omega + math.log(1 / delta) / (omega - 1)


def _rho(sigmas: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return 1 / (2 * sigmas**2)
