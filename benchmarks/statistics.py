"""Which noise is smaller for a statistic within a budget, and how far released quantiles are from the exact ones.

`python -m benchmarks.statistics` writes results/statistics.md.
"""

import math

import numpy as np

import dpx
from benchmarks import report
from dpx import statistics

DELTA, ROWS, SEEDS, POINTS, BRANCHES = 1e-6, 20_000, 20, 2**12, 16
COLUMNS = (1, 2, 8, 64)
RELEASES = (1, 3, 10, 100)


def deviation(noise: str, columns: int, releases: int) -> float:
    """Of the noise on one count of `columns` counts that one example moves all, in examples, at epsilon 0.5."""
    budget = dpx.Budget(epsilon=0.5, delta=DELTA, steps=releases)
    data = np.ones((10, columns))
    multiplier = statistics.release_count(
        data, noise_multiplier=budget, noise=noise, key=dpx.secret_key()
    ).noise_multiplier
    return multiplier * (math.sqrt(columns) if noise == "gaussian" else math.sqrt(2) * columns)


def by_tree(values: np.ndarray, share: float, multiplier: float) -> int:
    """A quantile of whole numbers, by noisy histograms of a tree from the root down, each with this noise."""
    low, width, below, total = 0, POINTS, 0.0, 0.0
    while width > 1:
        width //= BRANCHES
        edges = low + width * np.arange(BRANCHES + 1) - 0.5
        found = statistics.release_histogram(values, edges=edges, noise_multiplier=multiplier, key=dpx.secret_key())
        total = total or found.value.sum()
        place = min(int((below + np.cumsum(found.value) < share * total).sum()), BRANCHES - 1)
        below, low = below + found.value[:place].sum(), low + width * place
    return low


def rank_errors(epsilon: float) -> dict[str, str]:
    """The mean distance of the released quartiles from the exact ranks, in rows."""
    rng = np.random.default_rng(0)
    values = np.minimum(rng.gamma(2.0, 300.0, size=ROWS).round(), POINTS - 1)
    ranks, shares = np.sort(values), np.array([0.25, 0.5, 0.75])
    budget = dpx.Budget(epsilon=epsilon, delta=DELTA, steps=1)
    levels = round(math.log(POINTS, BRANCHES))
    of_level = dpx.Budget(epsilon=epsilon, delta=DELTA, steps=levels * len(shares))
    multiplier = statistics.release_count(
        values, noise_multiplier=of_level, noise="gaussian", key=dpx.secret_key()
    ).noise_multiplier

    def off(found: np.ndarray) -> np.ndarray:
        first, last = np.searchsorted(ranks, found, "left"), np.searchsorted(ranks, found, "right")
        return np.maximum(np.maximum(first - shares * ROWS, shares * ROWS - last), 0)

    errors: dict[str, list[np.ndarray]] = {"exponential mechanism": [], "histograms of a tree": []}
    for _ in range(SEEDS):
        found = statistics.release_quantiles(
            values, shares, low=0, high=POINTS - 1, points=POINTS, noise_multiplier=budget, key=dpx.secret_key()
        )
        errors["exponential mechanism"].append(off(found.value))
        errors["histograms of a tree"].append(off(np.array([by_tree(values, s, multiplier) for s in shares])))
    return {name: f"{np.mean(each):.1f}, at most {np.max(each):.0f}" for name, each in errors.items()}


def main() -> None:
    rows = []
    for columns in COLUMNS:
        for releases in RELEASES if columns == 1 else (1,):
            found = [deviation(noise, columns, releases) for noise in ("laplace", "gaussian")]
            rows.append((columns, releases, *(f"{each:.2f}" for each in found)))
    quartiles = [(f"{epsilon:g}", *rank_errors(epsilon).values()) for epsilon in (0.1, 1.0)]
    tables = {
        "Standard deviation of the noise on a count, in examples": report.grid(
            ("numbers of a release", "releases", "Laplace", "Gaussian"), rows
        ),
        "Rank error of the quartiles, in rows": report.grid(
            ("epsilon", "exponential mechanism", "histograms of a tree"), quartiles
        ),
    }
    notes = [
        f"Epsilon 0.5 for the first table, delta {DELTA:g}. An example moves all numbers of a release; the budget is "
        "for all releases together.",
        f"The second table has {ROWS:,} rows of whole numbers below {POINTS:,}, {SEEDS} keys, and one budget for the "
        f"three quartiles. A tree has {BRANCHES} branches at each node; each quartile descends by noisy counts of its "
        "own, as a binary search does, with Gaussian noise.",
    ]
    heading = report.heading("benchmarks.statistics", ("jax", "dp-accounting", "numpy"))
    report.write("statistics", heading, tables, notes=notes)


if __name__ == "__main__":
    main()
