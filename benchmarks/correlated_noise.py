"""When correlated noise pays: the error of prefix sums over that of DP-SGD on Poisson batches, for one budget.

`python -m benchmarks.correlated_noise` writes results/correlated_noise.md and correlated_noise.svg, in a minute. Each
row calibrates its noise multiplier to epsilon at delta 1e-5 by dpx's accountants, for 60,000 examples:

* Banded C (BandMF): the best coefficients for prefix sums, cyclic Poisson sampling with as many groups as bands.
* lambda-CGD, BISR and banded C in a fixed order: one Gaussian release, times the sensitivity of all participations.
* Independent noise, on Poisson batches (the divisor of every ratio), and in the fixed order.
"""

import functools
import itertools
import math

from dp_accounting import DpEvent

from benchmarks import report
from dpx import strategies
from dpx.accounting import event_epsilon
from dpx.accounting.budget import least_noise_within

EXAMPLES, DELTA = 60_000, 1e-5
RUNS = ((256, 2344), (2048, 732), (8192, 293))  # batch size, steps
BATCHES = (256, 512, 1024, 2048, 4096, 8192)  # of the plot, for 10 epochs
EPSILONS = (1.0, 2.0, 8.0)
BANDS = (2, 4, 8, 16, 24, 32, 48)
CORRELATIONS = (0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99)
COEFFICIENTS = (2, 4, 8, 16, 32, 64)
# The ratios that were stated before, by (batch size, epsilon, bands; 0 for lambda .97 in a fixed order).
STATED = {
    **{(256, 8.0, bands): ratio for bands, ratio in zip(BANDS[2:], (0.505, 0.434, 0.408, 0.396, 0.387), strict=True)},
    **{(2048, 2.0, 4): 0.98, (2048, 8.0, 8): 0.77, (8192, 8.0, 4): 0.96},
    **{(256, epsilon, 0): ratio for epsilon, ratio in zip(EPSILONS, (1.93, 1.38, 0.625), strict=True)},
}  # fmt: skip


@functools.cache
def noise_multiplier(kind: str, batch: int, steps: int, groups: int, epsilon: float) -> float:
    """The least noise multiplier of a run. kind: "cyclic" (1 group is Poisson sampling) or "fixed order"."""

    def event(noise: float) -> DpEvent:
        if kind == "fixed order":
            return strategies.fixed_order_event(noise_multiplier=noise)
        return strategies.cyclic_poisson_event(
            strategies.identity(),
            examples=EXAMPLES,
            batch_size=batch,
            groups=groups,
            steps=steps,
            noise_multiplier=noise,
        )

    return least_noise_within(
        lambda noise: event_epsilon(event(noise), delta=DELTA, relation="zero_out"), epsilon, 1e-4, 1.0
    )


@functools.cache
def best(bands: int, steps: int) -> strategies.Strategy:
    return strategies.optimized(bands=bands, steps=steps)


def poisson(batch: int, steps: int, epsilon: float) -> float:
    """The mean error of independent noise on Poisson batches, for a clip norm of 1."""
    noise = noise_multiplier("cyclic", batch, steps, 1, epsilon)
    return noise * strategies.loss(strategies.identity(), steps=steps).mean


def banded(batch: int, steps: int, epsilon: float, bands: int) -> float | None:
    """The ratio of BandMF; None where groups of bands * batch examples would exceed the data."""
    if bands * batch > EXAMPLES:
        return None
    noise = noise_multiplier("cyclic", batch, steps, bands, epsilon)
    return noise * strategies.loss(best(bands, steps), steps=steps).mean / poisson(batch, steps, epsilon)


def fixed_order(batch: int, steps: int, epsilon: float, strategy: strategies.Strategy) -> float:
    """The ratio of a strategy in a fixed order, where an epoch is ceil(examples / batch) steps."""
    separation = math.ceil(EXAMPLES / batch)
    participations = math.ceil(steps / separation)
    found = strategies.loss(strategy, steps=steps, participations=participations, separation=separation)
    noise = noise_multiplier("fixed order", batch, steps, 1, epsilon)
    return noise * found.mean / poisson(batch, steps, epsilon)


def said(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def banded_rows() -> list[tuple]:
    return [
        (batch, steps, f"{epsilon:g}", f"{noise_multiplier('cyclic', batch, steps, 1, epsilon):.5f}")
        + tuple(said(banded(batch, steps, epsilon, bands)) for bands in BANDS)
        for (batch, steps), epsilon in itertools.product(RUNS, EPSILONS)
    ]


def fixed_rows() -> list[tuple]:
    rows = []
    for (batch, steps), epsilon in itertools.product(RUNS, EPSILONS):
        separation = math.ceil(EXAMPLES / batch)
        kinds = (
            {c: strategies.lambda_cgd(correlation=c) for c in CORRELATIONS},
            {p: strategies.banded_inverse_square_root(coefficients=p) for p in COEFFICIENTS},
            {bands: best(bands, steps) for bands in sorted({*BANDS, separation}) if bands <= separation},
        )
        plain = fixed_order(batch, steps, epsilon, strategies.identity())
        found = [min((fixed_order(batch, steps, epsilon, s), name) for name, s in kind.items()) for kind in kinds]
        cells = [f"{ratio:.3f} ({name:g})" for ratio, name in found]
        rows.append((batch, steps, f"{epsilon:g}", said(plain), *cells, f"{plain / min(found)[0]:.2f}"))
    return rows


def again(batch: int, epsilon: float, bands: int) -> float:
    """The ratio of a key of STATED, computed here."""
    steps = dict(RUNS)[batch]
    if not bands:
        return fixed_order(batch, steps, epsilon, strategies.lambda_cgd(correlation=0.97))
    return banded(batch, steps, epsilon, bands) or math.nan


def stated_rows() -> list[tuple]:
    rows = []
    for (batch, epsilon, bands), stated in STATED.items():
        found, name = again(batch, epsilon, bands), f"{bands} bands" if bands else "lambda .97, fixed order"
        run = f"{batch} x {dict(RUNS)[batch]}"
        rows.append((run, f"{epsilon:g}", name, stated, said(found), f"{found / stated - 1:+.2%}"))
    return rows


def plot(path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for (batch, steps), line in zip(RUNS, ("-", "--", ":"), strict=True):
        for number, epsilon in enumerate(EPSILONS):
            ratios = [(bands, banded(batch, steps, epsilon, bands)) for bands in (1, *BANDS)]
            points = [point for point in ratios if point[1] is not None]
            label = f"{batch} x {steps}, epsilon {epsilon:g}"
            left.plot(*zip(*points, strict=True), line, marker=".", color=f"C{number}", label=label)
    left.set_xscale("log", base=2)
    left.set(xlabel="bands", ylabel="error of prefix sums\nover DP-SGD on Poisson batches")
    left.legend(fontsize="x-small")
    for number, epsilon in enumerate(EPSILONS):
        runs = [(batch, math.ceil(10 * EXAMPLES / batch)) for batch in BATCHES]
        least = [min(r for bands in (1, *BANDS) if (r := banded(*run, epsilon, bands)) is not None) for run in runs]
        right.plot(BATCHES, least, marker=".", color=f"C{number}", label=f"epsilon {epsilon:g}")
    right.set_xscale("log", base=2)
    right.set(xlabel="batch size, 10 epochs, the best bands")
    right.legend(fontsize="x-small")
    for axis in (left, right):
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_ylim(0)
    figure.savefig(path)


def main() -> None:
    plot(report.RESULTS / "correlated_noise.svg")
    run = ("batch", "steps", "epsilon")
    tables = {
        "Banded C with cyclic Poisson sampling: the ratio by the number of bands": report.grid(
            (*run, "noise of DP-SGD", *(f"{bands}" for bands in BANDS)), banded_rows()
        ),
        "A fixed order: the ratio of independent noise, and the best of each family": report.grid(
            (*run, "independent", "lambda-CGD (lambda)", "BISR (coefficients)", "banded (bands)", "independent / best"),
            fixed_rows(),
        ),
        "Against numbers that were stated before": report.grid(
            ("batch x steps", "epsilon", "strategy", "stated", "here", "difference"), stated_rows()
        ),
    }
    notes = [
        "A ratio below 1 means that the prefix sums have less noise than those of DP-SGD with the same epsilon. The "
        "prefix error is not accuracy.",
        "`-`: there are no groups of this many examples, because bands * batch exceeds the 60,000 examples.",
        "All costs are for noise of real numbers (`event_epsilon`), to compare with those that were stated.",
        "![The error against the bands and the batch size](correlated_noise.svg)",
    ]
    heading = report.heading("benchmarks.correlated_noise", ("jax", "numpy", "scipy", "dp-accounting"), delta=DELTA)
    report.write("correlated_noise", heading, tables, notes=notes)


if __name__ == "__main__":
    main()
