"""How often `dpx.audit.check_contract` fails for a sound mechanism: many keys and seeds, none of which should fail.

`python -m benchmarks.false_alarms` writes results/contract_false_alarms.md.
"""

import argparse
import time

from benchmarks import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--draws", type=int, default=4000)
    options = parser.parse_args()

    import jax

    import dpx

    failures, unchecked, start = [], 0, time.perf_counter()
    for run in range(options.runs):
        sampling = dpx.PoissonSampling(examples=1000, batch_size=8)
        key = jax.random.fold_in(jax.random.key(20261122), run)
        mechanism = dpx.dp_sgd(clip_norm=0.7, noise_multiplier=1.3, sampling=sampling, key=key)
        found = dpx.audit.check_contract(mechanism, draws=options.draws, seed=run)
        failures += [(run, line) for line in found.failures]
        unchecked += len(found.unchecked)
        jax.clear_caches()
    seconds = (time.perf_counter() - start) / options.runs
    write(options, failures, unchecked, seconds)


def write(options: argparse.Namespace, failures: list, unchecked: int, seconds: float) -> None:
    report.write(
        "contract_false_alarms",
        "# False alarms of check_contract",
        report.heading("benchmarks.false_alarms", ("jax", "jaxlib", "numpy", "scipy")),
        f"`dpx.audit.check_contract` with all lines, {options.draws} draws of the noise, on DP-SGD (clip norm 0.7, "
        "noise multiplier 1.3, Poisson batches of 8 of 1,000 examples), each with another key of the mechanism and "
        f"another seed of the check. A run took {seconds:.1f} s, compilation included, with other work on the machine.",
        f"Runs with a line that fails: {len({run for run, _ in failures})} of {options.runs}. "
        f"Lines that were not checked: {unchecked}.",
        f"No failure in n runs says, at 95 % confidence, that the rate is below 3 / n, here {3 / options.runs:.2g}. "
        "The rate that the check states, at most 1e-4 a call, follows from the thresholds of its tests.",
        notes=[f"run {run}: {line.name}: {line.words}" for run, line in failures],
    )


if __name__ == "__main__":
    main()
