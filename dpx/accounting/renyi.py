"""Renyi divergences of the Poisson-sampled Gaussian for whole schedules at once.

The same formulas and orders as dp-accounting's RdpAccountant (Mironov, Talwar and Zhang 2019,
https://arxiv.org/abs/1908.10530), evaluated over (noise multiplier, order) arrays. Both directions of add-or-remove
are covered by `total`; `bill` covers replacing one example too.
"""

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from dpx.accounting.checks import Relation

ORDERS = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, np.float64)

# More, for questions that those leave loose: a large epsilon has its best order near 1, a tiny one a large order.
WIDE_ORDERS = np.concatenate(
    [[1.002, 1.005, 1.01, 1.02, 1.035, 1.05, 1.075], ORDERS, [1.15, 1.25, 1.35], 2.0 ** np.arange(11, 15)]
)
WIDE_ORDERS.sort()

SMALLEST_NOISE = 1e-6  # a smaller noise multiplier is billed as none: its epsilon would be beyond 1e11

_ROWS = 512  # schedules are walked in chunks of this many steps, to stay in the cache
_TERMS = 2**20  # of an order, at once: 8 MiB
_MAX_TERMS = 1000  # of a series
_SMALLEST = 1e-15  # a divergence below it is rounded up, for dp-accounting's log(1 - e^-divergence)
_ROUNDING = 1e-14  # of the ln of a moment near 1, which would bill 0 where a step costs less than that


def sampled_gaussian(sigmas: np.ndarray, rates: np.ndarray, orders: np.ndarray = ORDERS) -> np.ndarray:
    """RDP of one step each, shape (T, orders); inf where the series of a fractional order does not converge.

    Fractional orders sum absolute values of an alternating series: upper bounds, not equalities.
    """
    sigmas, rates = np.broadcast_arrays(np.asarray(sigmas, np.float64), np.asarray(rates, np.float64))
    result = np.empty((len(sigmas), len(orders)))
    whole = orders == np.round(orders)
    order = np.lexsort((sigmas, rates))  # neighbors need similar numbers of terms
    for start in range(0, len(sigmas), _ROWS):
        rows = order[start : start + _ROWS]
        s, q = sigmas[rows], rates[rows]
        plain, sampled = rows[q == 1], rows[q < 1]
        with np.errstate(divide="ignore", over="ignore"):
            result[plain] = orders / (2 * sigmas[plain, None] ** 2)
        if len(sampled):
            s, q = sigmas[sampled, None], rates[sampled, None]
            for column in np.flatnonzero(whole):
                result[sampled, column] = _log_moment_whole(s, q, int(orders[column]))
            result[np.ix_(sampled, ~whole)] = _log_moments_fractional(s, q, orders[~whole])
            result[sampled] = (np.maximum(result[sampled], 0) + _ROUNDING) / (orders - 1)
    return result


def total(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray = ORDERS) -> np.ndarray:
    """RDP of a whole schedule, shape (orders,)."""
    steps, inverse = np.unique(np.stack([sigmas, rates]), axis=1, return_inverse=True)
    repeats = np.bincount(inverse.reshape(-1), counts, steps.shape[1])
    sigmas, rates = steps[:, repeats > 0]
    return repeats[repeats > 0] @ sampled_gaussian(sigmas, rates, orders)


def bill(
    sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, relation: Relation, orders: np.ndarray = ORDERS
) -> np.ndarray:
    """Upper bounds of the RDP of a whole schedule under any relation, shape (orders,); inf without noise.

    Replacing one example is adding one after removing one: the weak triangle inequality
    D_a(P|R) <= (a - 1/2)/(a - 1) D_2a(P|Q) + D_(2a-1)(Q|R) (Mironov 2017, https://arxiv.org/abs/1702.07476,
    Proposition 11), or the unsampled Gaussian of sensitivity 2 where that is less.
    """
    if np.any(sigmas[counts > 0] < SMALLEST_NOISE):
        return np.full(len(orders), np.inf)
    if relation != "replace_one":
        return total(sigmas, rates, counts, orders)
    removed = total(sigmas, rates, counts, 2 * orders)
    added = total(sigmas, rates, counts, 2 * orders - 1)
    with np.errstate(divide="ignore", over="ignore"):
        unsampled = 2 * orders * np.sum(counts / sigmas**2)
    return np.minimum((orders - 0.5) / (orders - 1) * removed + added, unsampled)


def epsilon(rdp: np.ndarray, delta: float, orders: np.ndarray = ORDERS) -> tuple[float, float]:
    """(epsilon, the order it is reached at)."""
    value, order = rdp_privacy_accountant.compute_epsilon(orders.tolist(), rdp.tolist(), delta)
    return float(value), float(order)


def delta(rdp: np.ndarray, epsilon: float, orders: np.ndarray = ORDERS) -> tuple[float, float]:
    """(delta, the order it is reached at)."""
    rdp = np.where(rdp <= 0, 0.0, np.maximum(rdp, _SMALLEST))
    value, order = rdp_privacy_accountant.compute_delta(orders.tolist(), rdp.tolist(), epsilon)
    return float(value), float(order)


def _log_moment_whole(s: np.ndarray, q: np.ndarray, order: int) -> np.ndarray:
    """ln sum_k C(order, k) (1-q)^(order-k) q^k exp((k^2 - k) / 2 s^2), for columns s and q; shape (T,)."""
    k = np.arange(order + 1)
    binomial = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
    found, rows = np.empty(len(s)), max(1, _TERMS // (order + 1))
    for start in range(0, len(s), rows):
        at = slice(start, start + rows)
        terms = binomial + k * np.log(q[at]) + (order - k) * np.log1p(-q[at]) + (k * k - k) / (2 * s[at] ** 2)
        largest = terms.max(axis=1)
        found[at] = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return found


def _log_moments_fractional(s: np.ndarray, q: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Section 3.3 of the paper: two series, split where the two densities of the mixture cross; shape (T, orders)."""
    log_q, log_p = np.log(q), np.log1p(-q)
    crossing = s**2 * (log_p - log_q) + 0.5
    # The moment lies between these two; their middle is the scale the terms are summed at.
    full = orders * (orders - 1) / (2 * s**2)
    scale = (np.maximum(0, orders * log_q + full) + np.logaddexp(log_p, log_q + full)) / 2
    columns: dict[int, np.ndarray] = {}

    def upper_tail(j: float) -> np.ndarray:  # ln P(N(j, s^2) > crossing), shared by orders with equal fractions
        key = round(j * 1e6)
        if key not in columns:
            columns[key] = special.log_ndtr((j - crossing) / s)[:, 0]
        return columns[key]

    sums = np.zeros(scale.shape)
    last = np.full((2, *scale.shape), -np.inf)
    for i in range(_MAX_TERMS):
        j = orders - i
        binomial = special.gammaln(orders + 1) - special.gammaln(i + 1) - special.gammaln(j + 1)
        below = i * log_q + (i * i - i) / (2 * s**2) + special.log_ndtr((crossing - i) / s)
        tails = np.stack([upper_tail(value) for value in j], axis=1)
        terms = np.stack(
            [
                binomial + j * log_p + below - scale,
                binomial + i * log_p + j * log_q + (j * j - j) / (2 * s**2) + tails - scale,
            ]
        )
        sums += np.exp(terms).sum(axis=0)
        with np.errstate(divide="ignore"):
            small = np.all((terms < last) & (terms < np.log(sums) - 30), axis=0)
        if small.all():
            return scale + np.log(sums)
        last = terms
    with np.errstate(divide="ignore"):
        return np.where(small, scale + np.log(sums), np.inf)
