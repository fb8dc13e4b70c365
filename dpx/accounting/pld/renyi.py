"""Renyi divergences of the Poisson-sampled Gaussian for whole schedules at once.

The formulas and orders are those of dp-accounting's RdpAccountant (Mironov, Talwar and Zhang 2019,
https://arxiv.org/abs/1908.10530), evaluated for arrays of (noise multiplier, order). `add_or_remove_rdp` covers both
directions of add-or-remove; `schedule_rdp` covers replacing one example too; `fixed_size_rdp` covers samples of a fixed
size.

Arrays: noise multipliers `sigmas` and sampling rates `rates` are float64 (T,), `counts` is int64 (T,), divergences are
float64 (T, orders) or (orders,).
"""

import functools
from typing import NamedTuple

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from dpx.accounting.checks import Relation

ORDERS = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, np.float64)

# More orders, because the best order is near 1 for a large epsilon, and large for a tiny one.
WIDE_ORDERS = np.concatenate(
    [[1.002, 1.005, 1.01, 1.02, 1.035, 1.05, 1.075], ORDERS, [1.15, 1.25, 1.35], 2.0 ** np.arange(11, 15)]
)
WIDE_ORDERS.sort()

SMALLEST_NOISE = 1e-6  # a smaller noise multiplier counts as none, because its epsilon would be above 1e11
LARGEST_NOISE = 1e150  # a larger one counts as this, because its square would be above the range of float64

# Chunks of these sizes stay in the cache: 10,000 steps take 0.7 s (benchmarks/accounting.py, rdp).
_CHUNK_STEPS = 512  # steps at once
_CHUNK_TERMS = 2**20  # terms of one order at once, float64: 8 MiB
_MOST_TERMS = 1000  # of a series; if it has not converged by then, the cost is infinite
# The next two constants only round up, so that no cost is below the truth.
_SMALLEST_DIVERGENCE = 1e-15  # a smaller positive one is raised to it, for dp-accounting's log(1 - e^-divergence)
MOMENT_ROUNDING = 1e-14  # rounding error of a moment near 1, added to its ln, because a tiny cost would round to 0


def gaussian_rdp(sigmas: np.ndarray, rates: np.ndarray, orders: np.ndarray = ORDERS) -> np.ndarray:
    """The RDP of each step, float64 (T, orders); inf where the series of a fractional order does not converge.

    At fractional orders, sums the absolute values of an alternating series, which gives upper bounds.
    """
    sigmas, rates = np.broadcast_arrays(np.asarray(sigmas, np.float64), np.asarray(rates, np.float64))
    result = np.empty((len(sigmas), len(orders)))
    whole = orders == np.round(orders)
    sorted_rows = np.lexsort((sigmas, rates))  # neighbors need similar numbers of terms
    for start in range(0, len(sigmas), _CHUNK_STEPS):
        rows = sorted_rows[start : start + _CHUNK_STEPS]
        s, q = sigmas[rows], rates[rows]
        plain, sampled = rows[q == 1], rows[q < 1]
        with np.errstate(divide="ignore", over="ignore"):
            result[plain] = orders / (2 * sigmas[plain, None] ** 2)
        if len(sampled):
            s, q = sigmas[sampled, None], rates[sampled, None]
            for column in np.flatnonzero(whole):
                result[sampled, column] = _log_moment_whole(s, q, int(orders[column]))
            result[np.ix_(sampled, ~whole)] = _log_moments_fractional(s, q, orders[~whole])
            result[sampled] = (np.maximum(result[sampled], 0) + MOMENT_ROUNDING) / (orders - 1)
    return result


def add_or_remove_rdp(
    sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray = ORDERS
) -> np.ndarray:
    """The RDP of a whole schedule for adding or removing one example, float64 (orders,)."""
    repeats, steps = _distinct_steps(sigmas, rates, counts)
    return repeats @ _cached_gaussian_rdp(steps.tobytes(), orders.tobytes())


def fixed_size_rdp(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Upper bounds on the RDP of steps on samples of a fixed size, float64 (orders,); inf without noise.

    Noise is relative to the effect of replacing one example. Proof for the pair of `limited_samples.py`: let r be the
    likelihood ratio of the Poisson-sampled Gaussian, under the second distribution. The moment of the pair is
    1 + E (r^a - r + r^(1-a) - 1) over r > 1 only. This integrand is at least 0 at every r. Over all r the moment is
    E r^a + E r^(1-a) - 1, and the second moment is at most the first (Mironov et al., Theorem 5). So the bound is ln(2
    E r^a - 1) / (a - 1), or that of the unsampled Gaussian if that is less.
    """
    if np.any(sigmas[counts > 0] < SMALLEST_NOISE):
        return np.full(len(orders), np.inf)
    repeats, steps = _distinct_steps(sigmas, rates, counts)
    return repeats @ _fixed_size_rdp_of_steps(steps, orders)


def _fixed_size_rdp_of_steps(steps: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """The bounds of `fixed_size_rdp` for each step, float64 (n, orders). steps: from `_distinct_steps`, (2, n)."""
    log_moments = (orders - 1) * _cached_gaussian_rdp(steps.tobytes(), orders.tobytes())
    sampled = (log_moments + np.log1p(-np.expm1(-log_moments))) / (orders - 1)
    return np.minimum(sampled, orders / (2 * steps[0][:, None] ** 2))


class FullTruncatedSample(NamedTuple):
    """The probability that a truncated sample is full without the example, and the example's rate if it is full."""

    probability: float
    rate: float


def truncated_poisson_rdp(
    sigmas: np.ndarray,
    rates: np.ndarray,
    counts: np.ndarray,
    full: FullTruncatedSample,
    relation: Relation,
    orders: np.ndarray,
) -> np.ndarray:
    """Upper bounds on the RDP of steps on truncated Poisson samples, float64 (orders,); inf without noise.

    Mixes the bounds for Poisson sampling and for a sample of fixed size at half the noise multiplier, because
    exp((a - 1) D_a) is jointly convex: see `dpx/accounting/limited_samples.py`.
    """
    if np.any(sigmas[counts > 0] < 2 * SMALLEST_NOISE):
        return np.full(len(orders), np.inf)
    repeats, steps = _distinct_steps(sigmas, rates, counts)
    exchanged = _fixed_size_rdp_of_steps(np.stack([steps[0] / 2, np.full(len(repeats), full.rate)]), orders)
    if relation == "replace_one":
        removed, added = (_cached_gaussian_rdp(steps.tobytes(), a.tobytes()) for a in (2 * orders, 2 * orders - 1))
        share = (orders - 0.5) / (orders - 1)  # as in `schedule_rdp`
        sampled = np.minimum(share * removed + added, 2 * orders / steps[0][:, None] ** 2)
    else:
        sampled = _cached_gaussian_rdp(steps.tobytes(), orders.tobytes())
    with np.errstate(divide="ignore"):  # the logarithm of 0, if the sample is always full
        shares = np.log1p(-full.probability), np.log(full.probability)
    cases = shares[0] + (orders - 1) * sampled, shares[1] + (orders - 1) * exchanged
    return repeats @ (np.logaddexp(*cases) / (orders - 1))


def _distinct_steps(sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the counts of the distinct steps, float64 (n,), and their noise multipliers and rates, float64 (2, n)."""
    steps, inverse = np.unique(np.stack([sigmas, rates]), axis=1, return_inverse=True)
    repeats = np.bincount(inverse.reshape(-1), counts, steps.shape[1])
    return repeats[repeats > 0], steps[:, repeats > 0]


@functools.lru_cache(maxsize=8)
def _cached_gaussian_rdp(steps: bytes, orders: bytes) -> np.ndarray:
    """Caches `gaussian_rdp` for further queries of the same steps, at another delta or with other counts."""
    sigmas, rates = np.frombuffer(steps).reshape(2, -1)
    return gaussian_rdp(sigmas, rates, np.frombuffer(orders))


def schedule_rdp(
    sigmas: np.ndarray, rates: np.ndarray, counts: np.ndarray, relation: Relation, orders: np.ndarray
) -> np.ndarray:
    """Upper bounds on the RDP of a whole schedule under any relation, float64 (orders,); inf without noise.

    Replacing one example means removing one and adding another. So its bound is the weak triangle inequality
    D_a(P|R) <= (a - 1/2)/(a - 1) D_2a(P|Q) + D_(2a-1)(Q|R) (Mironov 2017, https://arxiv.org/abs/1702.07476,
    Proposition 11), or the bound of the unsampled Gaussian of sensitivity 2 if that is less.
    """
    if np.any(sigmas[counts > 0] < SMALLEST_NOISE):
        return np.full(len(orders), np.inf)
    if relation != "replace_one":
        return add_or_remove_rdp(sigmas, rates, counts, orders)
    removed = add_or_remove_rdp(sigmas, rates, counts, 2 * orders)
    added = add_or_remove_rdp(sigmas, rates, counts, 2 * orders - 1)
    with np.errstate(divide="ignore", over="ignore"):
        unsampled = 2 * orders * np.sum(counts / sigmas**2)
    return np.minimum((orders - 0.5) / (orders - 1) * removed + added, unsampled)


def epsilon(rdp: np.ndarray, delta: float, orders: np.ndarray = ORDERS) -> float:
    """An upper bound on epsilon at `delta`, which is in (0, 1), from divergences, float64 (orders,)."""
    return float(rdp_privacy_accountant.compute_epsilon(orders.tolist(), rdp.tolist(), delta)[0])


def delta(rdp: np.ndarray, epsilon: float, orders: np.ndarray = ORDERS) -> float:
    """An upper bound on delta at `epsilon`, which is at least 0, from divergences, float64 (orders,)."""
    rdp = np.where(rdp <= 0, 0.0, np.maximum(rdp, _SMALLEST_DIVERGENCE))
    return float(rdp_privacy_accountant.compute_delta(orders.tolist(), rdp.tolist(), epsilon)[0])


def log_binomial(n, k):
    """Returns ln |C(n, k)| of the generalized binomial coefficient; n and k broadcast."""
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _log_moment_whole(s: np.ndarray, q: np.ndarray, order: int) -> np.ndarray:
    """Returns ln sum_k C(order, k) (1-q)^(order-k) q^k exp((k^2 - k) / 2 s^2), for columns s and q, (T, 1); (T,)."""
    k = np.arange(order + 1)
    binomial = log_binomial(order, k)
    log_moments, chunk = np.empty(len(s)), max(1, _CHUNK_TERMS // (order + 1))
    for start in range(0, len(s), chunk):
        rows = slice(start, start + chunk)
        terms = binomial + k * np.log(q[rows]) + (order - k) * np.log1p(-q[rows]) + (k * k - k) / (2 * s[rows] ** 2)
        largest = terms.max(axis=1)
        log_moments[rows] = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return log_moments


def _log_moments_fractional(s: np.ndarray, q: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Section 3.3 of Mironov et al.: two series, split where the mixture's densities cross; float64 (T, orders)."""
    log_q, log_p = np.log(q), np.log1p(-q)
    crossing = s**2 * (log_p - log_q) + 0.5
    # Terms are scaled by the midpoint of a lower and an upper bound on the moment.
    full = orders * (orders - 1) / (2 * s**2)
    scale = (np.maximum(0, orders * log_q + full) + np.logaddexp(log_p, log_q + full)) / 2
    tails = special.log_ndtr((orders - crossing) / s)  # ln P(N(orders - i, s^2) > crossing), float64 (T, orders)
    one_less = np.abs(orders[:, None] - 1 - orders) < 1e-6  # (order, order that is less by 1)
    last_tail, fresh = one_less.argmax(axis=1), ~one_less.any(axis=1)

    sums = np.zeros(scale.shape)
    last, small = np.full((2, *scale.shape), -np.inf), np.zeros(scale.shape, bool)
    for i in range(_MOST_TERMS):
        j = orders - i
        if i:  # most tails are those that the order below had in the last round
            tails = tails[:, last_tail]
            tails[:, fresh] = special.log_ndtr((j[fresh] - crossing) / s)
        binomial = log_binomial(orders, i)
        heads = i * log_q + (i * i - i) / (2 * s**2) + special.log_ndtr((crossing - i) / s)
        terms = np.stack(
            [
                binomial + j * log_p + heads - scale,
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
