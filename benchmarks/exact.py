"""What the bits of a release show: the law of the released integers, and the attack on noise in floating point.

`python -m benchmarks.exact` writes results/exact.md and exact.svg: chi-square of 10^7 released integers at each of
eight fractions of a cell, the support attack (Mironov 2012) on float32 noise and on `dpx.keys.release`, and what the
arithmetic adds to a cost.
"""

import argparse
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

import dpx
from benchmarks import report
from dpx import keys
from dpx.accounting.cost import profile_of_run
from dpx.keys.noise import GRID

FRACTIONS = (0.0, 1e-4, 0.2, 0.25, 0.4999, 0.5, 0.75, 0.9999)  # of a cell of the grid
PART = 10**6  # numbers of one release
MULTIPLIERS, BATCHES, SIZES = (0.5, 5.0, 50.0), (1, 64, 8192), (1000, 1_000_000)


def cell(deviation: float) -> float:
    """gamma, the cell of the grid of this deviation."""
    return 2.0 ** (math.frexp(float(np.float32(deviation)))[1] - 1 - GRID)


def law(deviations: float, fraction: float, reach: int) -> np.ndarray:
    """The probabilities of -reach .. reach for round(fraction + deviations * g); the ends have the tails."""
    borders = (np.arange(-reach, reach) + 0.5 - fraction) / deviations
    return np.diff(np.r_[0, special.ndtr(borders), 1])


def chi_square(fraction: float, draws: int, key: jax.Array, *, of: float | None = None) -> float:
    """The p-value of `draws` released integers against the law at this fraction of a cell, or at the fraction `of`."""
    deviation, reach, counts = 1.3, 100, np.zeros(201, int)
    gamma = cell(deviation)
    release = jax.jit(keys.release)
    for step in range(math.ceil(draws / PART)):
        size = min(PART, draws - step * PART)
        made = release(key, step, jnp.full(size, fraction * gamma, jnp.float32), deviation)
        integers = np.round(np.asarray(made, np.float64) / gamma).astype(int)
        counts += np.bincount(np.clip(integers + reach, 0, 2 * reach), minlength=2 * reach + 1)
    expected = law(float(np.float32(deviation)) / gamma, fraction if of is None else of, reach) * draws
    kept = expected > 5
    counts, expected = (np.r_[x[kept], x[~kept].sum()] for x in (counts, expected))
    return float(stats.chisquare(counts, expected, sum_check=False).pvalue)


def float32_normals() -> np.ndarray:
    """All numbers that `jax.random.normal` can be, sorted, float32 (2^23,)."""
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    unit = np.arange(2**23, dtype=np.float32) * np.float32(2.0**-23)
    uniform = np.maximum(lowest, unit * (np.float32(1) - lowest) + lowest)
    return np.asarray(np.float32(math.sqrt(2)) * jax.lax.erf_inv(jnp.asarray(uniform)))


def possible(released: np.ndarray, total: np.ndarray, deviation: float, numbers: np.ndarray) -> float:
    """The share of the released float32 numbers that are total + deviation * z for a z of the sorted `numbers`."""
    scale = np.float32(deviation)
    wanted = np.searchsorted(numbers, (released - total) / scale)
    near = np.clip(wanted[:, None] + np.arange(-2, 3), 0, len(numbers) - 1)
    return float((total[:, None] + scale * numbers[near] == released[:, None]).any(1).mean())


def shares(multiplier: float, batch: int, size: int, numbers: np.ndarray, key: jax.Array) -> tuple[list, list]:
    """What the support attack finds possible with the example that was there, and without it: on float32 noise, and on
    `keys.release`. The clip norm is 1."""
    random = np.random.default_rng(batch)
    others = (random.normal(size=size) * math.sqrt(batch / size)).astype(np.float32)
    total = others + (random.normal(size=size) / math.sqrt(size)).astype(np.float32)
    before = total + np.float32(multiplier) * numbers[random.integers(0, 2**23, size)]
    after = np.asarray(keys.release(key, 0, jnp.asarray(total), multiplier))
    of_before, of_after = (
        [possible(made, given, multiplier, numbers) for given in (total, others)] for made in (before, after)
    )
    return of_before, of_after


def additions() -> list[tuple]:
    """What the cost of Poisson batches at rate .001 and noise multiplier 1 contains, for 2^32 numbers a release."""
    sampling, rows = dpx.PoissonSampling(examples=10**6, batch_size=1000), []
    for steps, delta in itertools.product((100, 1000, 10_000), (1e-5, 1e-6)):
        answer = profile_of_run(sampling.event(np.ones(steps)), relation="zero_out").epsilon_with_rounding(delta)
        parts = f"{answer.epsilon:.6g}", f"{answer.of_epsilon:.2g}", f"{answer.of_delta:.2g}"
        rows.append((steps, f"{delta:g}", *parts))
    return rows


def plot(found: dict, path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for place, (axis, words) in enumerate(zip(axes, ("noise in float32", "dpx.keys.release"), strict=True)):
        rows = [both[place] for both in found.values()]
        axis.plot([row[0] for row in rows], "o", label="with the example (true)")
        axis.plot([row[1] for row in rows], "x", label="without it")
        axis.set(title=words, xlabel="setting (batch, noise, size)", ylim=(-0.05, 1.05))
        axis.set_xticks([])
    axes[0].set_ylabel("share of released\nnumbers that is possible")
    axes[0].legend(loc="center left")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10**7)
    options = parser.parse_args()
    key = keys.secret_key(2**100)  # not secret: these releases protect nobody
    rows = [
        (f"{fraction:g}", f"{chi_square(fraction, options.draws, key):.3g}",
         f"{chi_square(fraction, options.draws, key, of=fraction + 0.1):.1g}")
        for fraction in FRACTIONS
    ]  # fmt: skip
    numbers = float32_normals()
    found = {case: shares(*case, numbers, key) for case in itertools.product(MULTIPLIERS, BATCHES, SIZES)}
    attacks = [
        (f"{noise:g}", batch, f"{size:,}", *(f"{value:.3f}" for value in (*before, *after)))
        for (noise, batch, size), (before, after) in found.items()
    ]
    plot(found, report.RESULTS / "exact.svg")
    tables = {
        "Chi-square of the released integers against the exact law": report.grid(
            ("fraction of a cell", "p-value", "p-value against the law a tenth of a cell away"), rows
        ),
        "Share of the released numbers that the attacker finds possible": report.grid(
            ("noise multiplier", "batch", "numbers", "float32, with", "without", "dpx, with", "without"), attacks
        ),
    }
    tables["What the arithmetic adds: noise multiplier 1, rate .001, 2^32 numbers a step"] = report.grid(
        ("steps", "delta", "epsilon", "of which the arithmetic", "of delta"), additions()
    )
    notes = [
        "The example took part. Where one column is 1 and the other is below, the attacker knows that, with certainty.",
        "![The support attack](exact.svg)",
    ]
    heading = report.heading("benchmarks.exact", ("jax", "jaxlib", "numpy", "scipy"), draws=options.draws)
    report.write("exact", heading, tables, notes=notes)


if __name__ == "__main__":
    main()
