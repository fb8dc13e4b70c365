"""What the five papers claim of their own settings, and what holds: the figures of docs/papers.md and docs/papers/.

`python -m benchmarks.claims` writes results/claims.md. Nothing is trained.
"""

import argparse
import functools
import math
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

import dpx
from benchmarks import report
from dpx.accounting import gdp
from dpx.papers.dice_sgd import dice_theorem_noise
from dpx.papers.dynamic_dp_sgd import claims
from examples.papers import random_freeze

KEY = dpx.secret_key(0)  # draws nothing
DELTA = 1e-5


def dp_sgd(noise_multiplier: float, *, examples: int, batch_size: float) -> dpx.Mechanism:
    sampling = dpx.PoissonSampling(examples=examples, batch_size=batch_size)
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=KEY)


def poisson(noise: Any, steps: int, *, examples: int, batch_size: float, delta: float = DELTA) -> float:
    """The epsilon of `steps` Poisson batches. noise: a noise multiplier, or those of the steps."""
    if np.ndim(noise):
        return dpx.accounting.schedule_epsilon(
            np.asarray(noise), sampling_rate=batch_size / examples, delta=delta
        ).upper
    return dpx.epsilon(dp_sgd(noise, examples=examples, batch_size=batch_size), steps, delta=delta)


def noise_for(epsilon: float, steps: int, *, examples: int, batch_size: float, delta: float = DELTA) -> float:
    make = functools.partial(dp_sgd, examples=examples, batch_size=batch_size)
    return dpx.accounting.calibrate(make, steps=steps, epsilon=epsilon, delta=delta)


def dynamic() -> dict[str, tuple[str, str]]:
    """The noise of the central limit theorem, constant or growing by 1 / 0.7."""
    rows = {}
    for rate, steps in ((2048 / 60_000, 352), (512 / 60_000, 117)):
        delta = 1 / 600_000
        for growth in (1.0, 1 / 0.7):
            claimed, true = (0.4, 1.2, 2.0), []
            for epsilon in claimed:
                first = 1 / claims.first_mu(
                    epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, growth=growth
                )
                noise = first * growth ** (-np.arange(1, steps + 1) / steps)
                true.append(poisson(noise, steps, examples=60_000, batch_size=60_000 * rate, delta=delta))
            name = f"Dynamic DP-SGD: noise for {steps} steps at rate {rate:.4f}, falling by {growth:.2f}"
            rows[name] = listed(claimed), listed(true)
    return rows


def d2p2() -> dict[str, tuple[str, str]]:
    """Its noise multipliers for 40 epochs of 1,024, constant and falling by the fourth root of the epoch."""
    rows = {}
    for data, examples, noise, delta, claimed in (
        ("SVHN", 73_257, 3.05, 1e-5, "2.45, 0.95"),
        ("Fashion-MNIST", 60_000, 3.05, 1e-5, "1.06, 2.75"),
        ("CIFAR-10", 50_000, 2.0, 1e-5, ""),
        ("CIFAR-10", 50_000, 1.0, 1e-5, ""),
        ("MNIST, KMNIST", 60_000, 1.0, 1e-5, ""),
        ("EMNIST", 112_800, 1.0, 1e-6, ""),
    ):
        steps = round(40 * examples / 1024)
        falling = noise * (np.arange(steps) * 1024 // examples + 1) ** -0.25
        setting = {"examples": examples, "batch_size": 1024, "delta": delta}
        true = [poisson(each, steps, **setting) for each in (noise, falling)]
        rows[f"D2P2-SGD: noise multiplier {noise}, {data}, constant and falling"] = claimed, listed(true)
    return rows


def ada_dpigu() -> dict[str, tuple[str, str]]:
    rows, claimed = {}, (2, 4, 6, 8, 10, 12)
    for data, noise, examples, batch_size, steps in (
        ("MNIST", (4.64, 2.49, 1.79, 1.45, 1.25, 1.12), 60_000, 1000, 12_000),
        ("CIFAR-10", (3.62, 1.98, 1.45, 1.2, 1.05, 0.95), 50_000, 1000, 4900),
    ):
        true = [poisson(each, steps, examples=examples, batch_size=batch_size) for each in noise]
        rows[f"AdaDPIGU, Table 3, {data}: noise multipliers {listed(noise)}"] = listed(claimed), listed(true)
    return rows


def dpsur() -> dict[str, tuple[str, str]]:
    """Every attempt is a gradient (8,192 of 50,000, 5.67) and a test of the loss (128, 1.1)."""

    def cost(attempts: int) -> float:
        gradient = dp_sgd(5.67, examples=50_000, batch_size=8192)
        test = dpx.dp_sgd(
            clip_norm=1.0,
            noise_multiplier=1.1,
            sampling=dpx.PoissonSampling(examples=50_000, batch_size=128),
            key=dpx.secret_key(1),
        )
        return dpx.compose_runs((gradient, attempts), (test, attempts), shared_batches=False).epsilon(delta=DELTA)

    shares = {"all": 1.0, "50%, if every step helped": 0.5, "30%": 0.3, "18%, if none did": 511 / 2813}
    return {
        f"DPSUR: 511 accepted steps, {words}: {round(511 / share):,} attempts": ("3", f"{cost(round(511 / share)):.2f}")
        for words, share in shares.items()
    }


def dice() -> dict[str, tuple[str, str]]:
    rows = {}
    for data, examples, steps, epsilon, delta, reset in (
        ("CIFAR-10", 50_000, 150, 2.0, 1e-5, 10),
        ("E2E", 42_000, 420, 8.0, 8e-6, 42),
    ):
        batch = 1000
        sampling = dpx.PoissonSampling(examples=examples, batch_size=batch)
        noise = batch * dice_theorem_noise(clip_norm=1.0, examples=examples, steps=steps, epsilon=epsilon, delta=delta)

        def made(noise_multiplier, outer, reset_every=None, sampling=sampling):
            return dpx.methods.dice_sgd(
                clip_norm=1.0,
                feedback_norm=1.0,
                outer_clip_norm=outer,
                reset_every=reset_every,
                noise_multiplier=noise_multiplier,
                sampling=sampling,
                key=KEY,
            )

        setting = {"examples": examples, "batch_size": batch, "delta": delta}
        bounded = dpx.accounting.calibrate(
            lambda noise, made=made, reset=reset: made(noise, 1.1, reset), steps=steps, epsilon=epsilon, delta=delta
        )
        unbounded = dpx.epsilon(made(noise, math.inf), steps, delta=delta)
        rows |= {
            f"DiceSGD, {data}: the theorem's noise multiplier {noise:.2f}, as published": (
                f"{epsilon:g}",
                f"{unbounded:.2g}, the least that is proven",
            ),
            f"DiceSGD, {data}: the same noise, DP-SGD": ("", f"{poisson(noise, steps, **setting):.2f}"),
            f"DiceSGD, {data}: noise multiplier that epsilon {epsilon:g} needs, error clipped at 1.1 and reset every "
            f"{reset} steps, and DP-SGD": (
                f"{noise:.2f}",
                f"{bounded:.2f}, {noise_for(epsilon, steps, **setting):.2f}",
            ),
        }
    return rows


def freeze() -> dict[str, tuple[str, str]]:
    rows = {}
    for part, noise, epochs, batch, claimed in (
        ("CNN", 1.54, 40, 1000, 3),
        ("CNN", 1.10, 80, 1000, 7.53),
        ("scattering", 5.65, 80, 8000, 3),
        ("linear layer", 2.30, 50, 1000, 2),
    ):
        true = poisson(noise, epochs * 50_000 // batch, examples=50_000, batch_size=batch)
        shuffled = gdp.epsilon(epochs**0.5 / noise, delta=DELTA)
        least = shuffled_at_least(noise, epochs, 50_000 // batch)
        rows[
            f"random freeze, {part}: noise multiplier {noise}, {epochs} epochs; Poisson, shuffled, shuffled at least"
        ] = (
            f"{claimed}",
            listed((true, shuffled, least)),
        )
    rates = ((0.7, 80), (0.6, 80), (0.4, 200), (0.7, 50))
    return rows | {
        f"random freeze, Table 2: share communicated, rate {rate}, {epochs} epochs": (
            "",
            f"{random_freeze.density(rate, epochs, epochs):.3f}",
        )
        for rate, epochs in rates
    }


def shuffled_at_least(noise: float, epochs: int, batches: int) -> float:
    """A lower bound of the epsilon of shuffled epochs, by an attack that observes one direction.

    In this direction, all gradients are -1, but one is 1, or is left out. So the noisy sum of its batch is, relative to
    those of the others, larger by 2 or by 1. The attack sees the sum over the batches of an epoch of exp(1.5 x /
    noise^2), each term rounded and at most 60, where x is a batch's sum. The example is from Chua et al. 2024,
    https://arxiv.org/abs/2403.17673.
    """
    grid, largest = 0.05, 60.0
    edges = noise**2 / 1.5 * np.log(grid * np.arange(0.5, largest / grid))
    length = 2 ** math.ceil(math.log2(batches * (len(edges) + 1)))
    others, with_it, without = (
        np.fft.rfft(np.diff(stats.norm.cdf((edges - shift) / noise), prepend=0, append=1), length)
        for shift in (0, 2, 1)
    )
    sums = [np.fft.irfft(others ** (batches - 1) * one, length) for one in (with_it, without)]
    seen = np.flatnonzero(np.minimum(*sums) > 1e-13)  # the others are errors of rounding
    logs = [{int(number): float(np.log(each[number])) for number in seen} for each in sums]
    found = (
        privacy_loss_distribution.from_two_probability_mass_functions(
            *pair, pessimistic_estimate=False, value_discretization_interval=1e-3
        )
        for pair in (logs, logs[::-1])
    )
    return max(each.self_compose(epochs).get_epsilon_for_delta(DELTA) for each in found)


def listed(numbers) -> str:
    return ", ".join(f"{number:.3g}" if number < 10 else f"{number:.4g}" for number in numbers)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = dynamic() | d2p2() | ada_dpigu() | dpsur() | dice() | freeze()
    heading = report.heading("benchmarks.claims", ("numpy", "scipy", "jax", "jaxlib", "dp-accounting"))
    table = report.grid(("setting", "claimed", "true"), [(name, *pair) for name, pair in found.items()])
    notes = [
        "Epsilons, unless the row says otherwise. delta is 1e-5, but 1 / 600,000 for Dynamic DP-SGD, 1e-6 for EMNIST "
        "and 8e-6 for E2E. True epsilons of Poisson batches are by PLD. Those of shuffled epochs are by Gaussian "
        "differential privacy, without amplification; no attack that we know reaches them. The lower bound for "
        "scattering is that of 6 batches, which are 48,000 of the 50,000 examples."
    ]
    report.write("claims", heading, {"Claims": table}, notes=notes)


if __name__ == "__main__":
    main()
