"""How often `dpx.audit.check_contract` fails for a sound mechanism: many keys and seeds, none of which should fail.

`python -m benchmarks.false_alarms` writes results/contract_false_alarms.md.
"""

import argparse
import time
from typing import Any

from benchmarks import report

# Batch size, examples and clip norm. Small derivatives are small differences, and these decide how small they are.
SETTINGS = ((8, 1_000, 0.7), (100, 1_500, 1.0), (250, 5_000, 0.05))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--draws", type=int, default=4000)
    options = parser.parse_args()

    import jax
    import numpy as np
    import optax

    import dpx

    behind = {"SGD": optax.sgd(1.0), "Adam": optax.adam(1e-2), "AdamW": optax.adamw(1e-2)}
    multipliers = np.random.default_rng(20261124).uniform(np.log(0.5), np.log(8), options.runs)
    failures, start = [], time.perf_counter()
    # Runs, runs that fail, and the lines that were not checked.
    counts: dict[str, list[Any]] = {name: [0, 0, set()] for name in behind}
    for run, noise_multiplier in enumerate(np.exp(multipliers)):
        name, (batch_size, examples, clip_norm) = list(behind)[run % 3], SETTINGS[run // 3 % 3]
        sampling = dpx.PoissonSampling(examples=examples, batch_size=batch_size)
        key = jax.random.fold_in(jax.random.key(20261122), run)
        mechanism = dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
        found = dpx.audit.check_contract(dpx.chain(mechanism, behind[name]), draws=options.draws, seed=run)
        failures += [(f"{name}, run {run}", line) for line in found.failures]
        counts[name][0] += 1
        counts[name][1] += bool(found.failures)
        counts[name][2] |= {line.name for line in found.unchecked}
        jax.clear_caches()
    write(options, failures, counts, (time.perf_counter() - start) / options.runs)


def write(options: argparse.Namespace, failures: list, counts: dict, seconds: float) -> None:
    rows = [[name, runs, failed, ", ".join(sorted(lines))] for name, (runs, failed, lines) in counts.items()]
    sizes = ", ".join(f"{batch} of {examples:,} with {norm:g}" for batch, examples, norm in SETTINGS)
    report.write(
        "contract_false_alarms",
        "# False alarms of check_contract",
        report.heading("benchmarks.false_alarms", ("jax", "jaxlib", "numpy", "scipy")),
        f"`dpx.audit.check_contract` with all lines, {options.draws} draws of the noise, on DP-SGD with an optax "
        f"optimizer behind it (Poisson batches and clip norms: {sizes}). Each run has another noise "
        "multiplier between 0.5 and 8, another key of the mechanism and another seed of the check. A run took "
        f"{seconds:.1f} s, compilation included, with other work on the machine.",
        report.grid(["optimizer", "runs", "runs with a line that fails", "lines not checked"], rows),
        f"No failure in n runs says, at 95% confidence, that the rate is below 3 / n, here {3 / options.runs:.2g}. "
        "The rate that the check states, at most 1e-4 a call, follows from the thresholds of its tests.",
        notes=[f"{run}: {line.name}: {line.words}" for run, line in failures],
    )


if __name__ == "__main__":
    main()
