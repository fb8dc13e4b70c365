"""`python -m docs._site.pictures`: the pictures of the pages, in docs/_static, as SVG.

The colors are Okabe and Ito's, which differ for the color-blind, and line styles differ too, for print.
"""

import math
import re
from pathlib import Path

import dpx
import matplotlib
import numpy as np
from dpx import strategies
from dpx.reports import curves

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).parents[2]
STYLES = ("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", ":")
EXAMPLES, STEPS = 24, 24


def save(figure, name: str):
    figure.savefig(ROOT / "docs" / "_static" / f"{name}.svg", facecolor="white", metadata={"Date": None})
    pyplot.close(figure)


def samplings():
    """Who takes part in which step, for batches of 6 of 24 examples."""
    sized = {"examples": EXAMPLES, "batch_size": 6}
    shown = [
        dpx.PoissonSampling(**sized),
        dpx.sampling.RandomAllocation(examples=EXAMPLES, steps_per_epoch=4),
        dpx.sampling.FixedSizeSampling(**sized),
        dpx.sampling.CyclicPoissonSampling(**sized, bands=2),
        dpx.ShuffledEpochs(**sized),
        dpx.sampling.FixedOrder(**sized),
    ]
    figure, panels = pyplot.subplots(2, 3, figsize=(7.2, 5.2), layout="constrained", sharex=True, sharey=True)
    for axes, sampling in zip(panels.flat, shown, strict=True):
        drawn = [sampling.draw(dpx.secret_key(3), step) for step in range(STEPS)]
        places = [(step, row) for step, of in enumerate(drawn) for row in of.indices[np.asarray(of.included)].tolist()]
        steps, rows = np.array(places, float).T
        ends = np.stack([rows - 0.4, rows + 0.4, np.full_like(rows, np.nan)], 1).ravel()  # one path for all marks
        axes.plot(np.repeat(steps, 3), ends, color=STYLES[0][0], linewidth=4, solid_capstyle="butt")
        axes.set_title(type(sampling).__name__, fontsize=10)
        axes.set(xlim=(-1, STEPS), ylim=(-1, EXAMPLES))
        axes.vlines(np.arange(3.5, STEPS, 4), -1, EXAMPLES, color="#ccc", linewidth=0.6, zorder=0)
    figure.supxlabel("step (a line after each epoch)", fontsize=10)
    figure.supylabel("example", fontsize=10)
    save(figure, "samplings")


def bets():
    """How often an attacker errs, for DP-SGD at some epsilons: the trade-off curves, and the bet at a fair coin."""
    figure, axes = pyplot.subplots(figsize=(5.2, 4.6), layout="constrained")
    sampling = dpx.PoissonSampling(examples=10_000, batch_size=100)
    for epsilon, (color, style) in zip((0.5, 2, 8), STYLES, strict=False):
        budget = dpx.Budget(epsilon=epsilon, delta=1e-5, steps=1000)
        run = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=dpx.secret_key())
        curve = curves.trade_off(run, 1000)
        right = math.ceil(50 + 50 * dpx.reports.attack_bounds(run, 1000, delta=1e-5).advantage)
        best = int(np.argmin(curve.type_one + curve.type_two))
        axes.plot(*curve[:2], style, color=color, label=f"epsilon {epsilon}: right at most {right} times in 100")
        axes.plot(curve.type_one[best], curve.type_two[best], "o", color=color)
    axes.plot([0, 1], [1, 0], "k:", linewidth=1, label="guessing: right 50 times in 100")
    axes.set(xlabel="how often the attacker accuses an absent example", ylabel="how often a present one is missed")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(fontsize=9)
    save(figure, "bets")


def frontier():
    """Accuracy against epsilon on Fashion-MNIST: the first such table of the README."""
    rows = re.findall(
        r"^\| (epsilon|linear model|the best published)[^|]*\|(.*)\|$", (ROOT / "README.md").read_text(), re.M
    )
    numbers = {name: [float(cell) if cell.strip() else np.nan for cell in of.split("|")] for name, of in rows[:3]}
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    labels = {"linear model": "dpx, a linear model on public features"}
    labels["the best published"] = "the best published, at a disputed epsilon"
    for (name, label), (color, style), mark in zip(labels.items(), STYLES, "os", strict=False):
        pairs = [pair for pair in zip(numbers["epsilon"], numbers[name], strict=True) if pair[1] == pair[1]]
        axes.plot(*zip(*pairs, strict=True), mark + style, color=color, label=label)
    axes.set(xscale="log", xlabel="epsilon at delta 1e-5", ylabel="test accuracy in percent")
    axes.set_xticks(numbers["epsilon"], [f"{epsilon:g}" for epsilon in numbers["epsilon"]])
    axes.minorticks_off()
    axes.grid(color="#ddd")
    axes.legend()
    save(figure, "frontier")


def cells(page: str, label: str, table: int = 0) -> list[str]:
    """The row of a page of results that begins with a label, of the table of this number among those that have it."""
    rows = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", (ROOT / "benchmarks/results" / page).read_text(), re.M)
    return [cell.strip() for cell in rows[table].split("|")]


def speed():
    """The time of a step beside per-example gradients, divided by a step without privacy: pages of results."""
    shown: dict[str, tuple[float, float]] = {}
    for name, model in {
        "MLP, 256": "mlp, 256",
        "CNN, 256": "adadpigu_cnn, 256",
        "ResNet-20, 256": "resnet20, 256",
    }.items():
        row = cells("step.md", model)
        shown[f"{name}, CPU"] = float(row[4]), min(map(float, row[8:10]))
    for name, model in {"MLP, 2,048": "mlp, 2048", "CNN, 2,048": "adadpigu_cnn, 2048"}.items():
        shown[f"{name}, GPU"] = tuple(
            float(cells("on_a_gpu.md", f"{model}, {who}", -1)[1]) for who in ("dpx", "jax_privacy")
        )
    model = "gpt2_small, scanned, 8"
    shown["GPT-2 small, 8, GPU"] = tuple(
        float(cells("on_a_gpu.md", f"{model}, {who}")[1]) for who in ("dpx", "jax_privacy")
    )
    on_tpu = {
        "CNN, 256": "adadpigu_cnn",
        "GPT-2 layer, 16": "a layer of GPT-2, 16 of 128",
        "small GPT, 8": "gpt of 4 layers",
    }
    for name, model in on_tpu.items():
        found = [re.search(r"\((.*)\)", cells("accelerators.md", f"{model}, {who}")[0]) for who in ("dpx", "by hand")]
        shown[f"{name}, TPU*"] = tuple(float(ratio[1]) for ratio in found if ratio)
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    places = np.arange(len(shown))[::-1]
    ours, theirs = np.array(list(shown.values())).T
    axes.hlines(places, ours, theirs, color="#bbb", zorder=0)
    axes.plot(ours, places, "o", color=STYLES[0][0], label="dpx")
    axes.plot(theirs, places, "s", color=STYLES[1][0], label="jax_privacy; jax.vmap on a TPU")
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set(xscale="log", xlabel="time of a step, divided by one without privacy")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_yticks(places, list(shown))
    axes.grid(axis="x", color="#ddd")
    figure.legend(loc="outside upper right", ncols=2, fontsize=9)
    save(figure, "speed")


def floats():
    """The share of a release's numbers that an attacker finds possible, with float32 noise and with dpx's."""
    with_32, without_32, with_dpx, without_dpx = (100 * float(cell) for cell in cells("exact.md", "5 | 64 | 1,000,000"))
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    places = np.arange(2)
    for shift, values, (color, _), hatch, label in (
        (-0.2, (with_32, with_dpx), STYLES[1], "", "the example took part"),
        (0.2, (without_32, without_dpx), STYLES[0], "//", "it did not"),
    ):
        bars = axes.bar(places + shift, values, 0.38, color=color, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, fmt="{:.1f}%", padding=2, fontsize=9)
    axes.set_xticks(places, ["before: float32 noise", "after: dpx's noise"])
    axes.set(ylabel="released numbers that are possible, in %", ylim=(0, 110))
    axes.legend(title="if", fontsize=9)
    save(figure, "floats")


def noise():
    """The noise of a run over the batch size: `plan.plot()`."""
    sizes = [2**power for power in range(6, 15)]
    plan = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=[10, 20, 40], batch_sizes=sizes)
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    plan.plot(axes=axes)
    save(figure, "noise")


def correlated():
    """The noise in a parameter after each step, for three strategies in a fixed order at one cost."""
    steps, epochs = 2344, 10  # batches of 256 of 60,000 examples
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    shown = {
        "independent": strategies.identity(),
        "lambda-CGD, 0.97": strategies.lambda_cgd(correlation=0.97),
        "BISR, 64 coefficients": strategies.banded_inverse_square_root(coefficients=64),
    }
    for (label, strategy), (color, style) in zip(shown.items(), STYLES, strict=False):
        moved = strategies.sensitivity(strategy, steps=steps, participations=epochs, separation=steps // epochs)
        numerator, denominator = np.array(strategy.inverse_coefficients), np.array(strategy.coefficients)
        sums = np.cumsum(strategies.Strategy.quotient_series(numerator, denominator, steps))  # of a column of C^-1
        axes.plot(np.arange(1, steps + 1), moved * np.sqrt(np.cumsum(sums**2)), style, color=color, label=label)
    axes.set(xlabel="step", ylabel="noise in the sum of all steps", xlim=(0, steps), ylim=(0, None))
    axes.grid(color="#ddd")
    axes.legend()
    save(figure, "correlated")


def layers():
    """What a step keeps of each kind of layer of GPT-2 small, for 8 sequences of 64 tokens, in float32."""
    rows, width, words, blocks = 8 * 64, 768, 50_257, 12
    shapes = {  # inputs, outputs, how many
        "tied embedding": (width, words, 1),
        "MLP, down": (4 * width, width, blocks),
        "MLP, up": (width, 4 * width, blocks),
        "attention, out": (width, width, blocks),
        "attention, in": (width, 3 * width, blocks),
    }
    sizes = np.array(list(shapes.values()), float)
    gradients = 8 * sizes.prod(1) * 4 / 2**20
    kept = rows * sizes[:, :2].sum(1) * sizes[:, 2] * 4 / 2**20
    figure, axes = pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
    places = np.arange(len(shapes))
    ways = {"a gradient of each example": gradients, "inputs and cotangents, for ghost norms": kept}
    looks = (STYLES[1][0], 0.2, "//"), (STYLES[0][0], -0.2, "")
    for (label, values), (color, shift, hatch) in zip(ways.items(), looks, strict=True):
        bars = axes.barh(places + shift, values, 0.38, color=color, hatch=hatch, edgecolor="white")
        bars.set_label(f"{label}: {values.sum():,.0f} MiB")
        axes.bar_label(bars, fmt="{:.0f}", padding=3, fontsize=9)
    axes.set_yticks(places, list(shapes))
    axes.set(xlabel="MiB", xlim=(0, 1.12 * gradients.max()))
    figure.legend(loc="outside upper left", fontsize=9)
    save(figure, "layers")


if __name__ == "__main__":
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dpx", "font.family": "sans-serif"}
    samplings()
    bets()
    frontier()
    speed()
    floats()
    noise()
    correlated()
    layers()
