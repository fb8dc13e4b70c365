"""Tests of draws: whether they are independent standard normals, and whether a number is used twice."""

import math
from typing import Any

import numpy as np
from scipy import special

from dpx.audit.contract.draws import chi_square_over_freedom
from dpx.audit.contract.report import Broken

RATE = 4e-6  # of false alarms, of each of the first five tests of draws
PATTERN_RATE = 1e-6  # of the test of signs and sizes
MOST_COINS = 120  # of which all triples are compared
WIDTH = 1e-6  # of a bin of log |z|; two independent normals share one with probability below WIDTH
COLUMNS = 4  # in which two rows may not agree
PLACES = 5  # at which two columns may not agree, with one distance between the rows


def require_standard(draws: np.ndarray):
    """Raises Broken unless the columns of `draws`, float64 (count, columns), are independent standard normals."""
    if not np.isfinite(draws).all():
        raise Broken("a draw of the noise is not finite")
    count, columns = draws.shape
    means = np.abs(draws.mean(0)) * math.sqrt(count)
    if means.max() > -special.ndtri(RATE / (2 * columns)):
        raise Broken(f"the mean of the noise is {means.max() / math.sqrt(count):.3g} standard deviations away from 0")
    low, high = (chi_square_over_freedom(p, count - 1) for p in (RATE / (2 * columns), 1 - RATE / (2 * columns)))
    variances = draws.var(0, ddof=1)
    if variances.min() < low or variances.max() > high:
        worst = math.sqrt(variances.min() if variances.min() < low else variances.max())
        raise Broken(f"the noise is drawn at {worst:.4g} times its stated size in some direction")
    if columns > 1:
        correlations = np.corrcoef(draws, rowvar=False) - np.eye(columns)
        most = np.abs(np.arctanh(np.clip(correlations, -1 + 1e-12, 1 - 1e-12))).max() * math.sqrt(count - 3)
        if most > -special.ndtri(RATE / (columns * (columns - 1))):
            raise Broken(f"noise of two coordinates or steps has the correlation {np.abs(correlations).max():.3g}")
    ordered = np.sort(draws.ravel())
    distance = np.abs(special.ndtr(ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    if distance > math.sqrt(math.log(2 / RATE) / (2 * len(ordered))) + 0.5 / len(ordered):
        raise Broken(f"the noise is not normal: its distribution function is {distance:.2g} away")
    largest, expected = np.abs(ordered[[0, -1]]).max(), special.ndtri((1 + RATE ** (1 / len(ordered))) / 2)
    if largest < expected:
        raise Broken(f"the tail of the noise is cut: of {len(ordered)} draws, the largest is {largest:.3g}")


def require_no_pattern(draws: np.ndarray, *, triples: bool = False):
    """Raises Broken if the signs and sizes of two columns of `draws`, float64 (count, columns), are dependent.

    triples: whether to test three columns too, of MOST_COINS coins.

    A column of independent standard normals makes two independent fair coins: its sign, and whether |z| is above the
    median. A product of two or three coins is a fair coin too, so by Hoeffding's inequality its mean over n draws is
    above t with probability at most exp(-n t^2 / 2). The limit is a union bound over all products and both sides.
    Correlations do not see such patterns: z and z with a sign of its own have none.
    """
    count, columns = draws.shape
    coins = np.concatenate([draws > 0, np.abs(draws) > special.ndtri(0.75)], axis=1).astype(np.float32) * 2 - 1
    some = coins[:, np.linspace(0, 2 * columns - 1, min(2 * columns, MOST_COINS)).astype(int)]
    tested = math.comb(2 * columns, 2) + math.comb(some.shape[1], 3)
    limit = math.sqrt(2 * math.log(2 * max(tested, 1) / PATTERN_RATE) / count)
    pairs = np.abs(coins.T @ coins) / count
    np.fill_diagonal(pairs, 0)
    if pairs.max(initial=0) > limit:
        raise Broken(f"signs and sizes of noise at two places are dependent, at {pairs.max():.3g} of 1")
    for number, coin in enumerate(some.T) if triples else ():
        before = some[:, :number]
        products = np.abs((before * coin[:, None]).T @ before) / count
        np.fill_diagonal(products, 0)
        if products.max(initial=0) > limit:
            raise Broken(f"signs and sizes of noise at three places are dependent, at {products.max():.3g} of 1")


def require_no_repeats(noise: np.ndarray, words: str):
    """Raises Broken with these words if two rows of `noise`, float64 (rows, columns), repeat each other.

    Signs do not count. Two rows repeat each other if COLUMNS of their numbers are equal. Two columns do if PLACES of
    their numbers are, with one distance between the rows; a column may repeat itself. Numbers that are 0 do not count.

    The density of log |z| is below 1/2, so two independent normals share a bin of WIDTH with probability below WIDTH
    (given all others, and with the 2^22 sizes that float32 normals have). For 4,000 rows and 100 columns, the union
    bounds are 8e6 pairs of rows x 4e6 sets of columns x WIDTH^4 = 3e-11, and 8e7 pairs of columns at a distance x
    9e15 sets of places x WIDTH^5 = 7e-7. With 1,000 columns and 1,600 rows they are 5e-8 and 3e-7.
    """
    noise = np.where(np.isfinite(noise), noise, 0)
    rows, columns = noise.shape
    with np.errstate(divide="ignore"):
        bins = np.round(np.log(np.abs(noise)) / WIDTH)
    same: list[Any] = [_neighbors(column) for column in bins.T]
    pairs = np.concatenate([one * rows + other for one, other in same])
    if _most(pairs) >= COLUMNS:
        raise Broken(words)
    first, second = _neighbors(bins.ravel())
    distances, places = second // columns - first // columns, (first % columns) * columns + second % columns
    if _most(distances * columns**2 + places) >= PLACES:
        raise Broken(words)


def _neighbors(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places in `bins`, float64 (n,), of equal finite numbers that are next to each other in order."""
    order = np.argsort(bins, kind="stable")
    equal = (bins[order][1:] == bins[order][:-1]) & np.isfinite(bins[order][1:])
    return order[:-1][equal], order[1:][equal]


def _most(numbers: np.ndarray) -> int:
    """How often the most frequent number is there."""
    return int(np.unique(numbers, return_counts=True)[1].max(initial=0))
