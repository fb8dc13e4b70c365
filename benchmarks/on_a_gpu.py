"""What only a GPU can say of a private step: times, memory, the bits of its noise, and how far rounding moves its sums.

    python -m benchmarks.on_a_gpu

Steps: without privacy, by hand (`jax.vmap`, clipping and a sum, with `jax.random.normal`), dpx, and jax_privacy where
it is installed; all rows of a model take turns. Memory is what XLA has planned for temporaries.
Noise: `dpx.keys.release` on the GPU beside the CPU's, for the same key; what differs is where float64 rounds
differently within 2^-45 deviations of a border.
Sums: the rows that `benchmarks.sum_rounding` has found to be the worst, and a search from there; below 1 is what dpx
proves.
Without a GPU, the command says so and measures nothing. Writes benchmarks/results/on_a_gpu.md.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import accelerators, report, timing

NUMBERS = 2**24  # of a release
MODELS = ("mlp", "vit_small", *accelerators.LAYERS, "gpt2_small, scanned")
WORST = Path(__file__).parents[1] / "tests" / "data" / "worst_sum.npz"


def found_gpu() -> Any:
    """The first GPU. Raises SystemExit, with words, if JAX has found none."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(
            f"No GPU is here: JAX has found {device.platform!r}. Nothing was measured. With a GPU, install "
            "jax[cuda12]; without one, python -m benchmarks.accelerators says what its compiler makes of a step."
        )
    return device


def noise_that_differs(one: Any, other: Any, numbers: int) -> tuple[int, float]:
    """How many numbers of a release differ between two devices, and the most, in standard deviations of the noise."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dpx import keys
    from dpx.xla.place import traced_for

    found = []
    for device in (one, other):
        with jax.default_device(device), traced_for(platform=device.platform, devices=1):
            key, sums = jax.random.key(2**40 + 3), jnp.zeros(numbers)
            found.append(np.asarray(jax.jit(lambda k, x: keys.release(k, 7, x, 1.0))(key, sums)))
    return int((found[0] != found[1]).sum()), float(np.abs(found[0] - found[1]).max())


def moved_sums(searches: int, most: int = 1024) -> list[list[str]]:
    """For each path, and batches of at most `most`: how far an example has moved the sum beyond the clip norm, divided
    by what is proved."""
    from benchmarks import sum_rounding

    lines = []
    for one in sum_rounding.load(WORST):
        if one.path not in ("stacked gradients", "ghost norms", "chunks") or len(one.column) > most:
            continue
        sums = sum_rounding.PATHS[one.path](len(one.column))
        again = sum_rounding.excess(sums, one.rows, 1)
        searched, _, _ = sum_rounding.worst(sums, len(one.column), searches)
        lines.append([one.path, str(len(one.column)), *(f"{x:.3f}" for x in (one.found, again, searched))])
    return lines


def steps_of(model: str, rounds: int) -> list[list[str]]:
    """The lines of a model: seconds, and MiB of temporaries, with their ratios to those of the step without privacy."""
    import jax

    programs = {}
    for row in (accelerators.PLAIN, accelerators.BY_HAND, accelerators.PRIVATE):
        function, inputs = accelerators.step(model, row, jax.default_backend())
        programs[row] = jax.jit(function).lower(*inputs).compile(), inputs
    if report.installed("jax-privacy"):
        programs["jax_privacy"] = with_jax_privacy(model)
    timers = {
        row: timing.Timer(lambda run=run, inputs=inputs: jax.block_until_ready(run(*inputs)), time.perf_counter)
        for row, (run, inputs) in programs.items()
    }
    seconds = {row: min(times) for row, times in timing.interleaved(timers, rounds).items()}
    plain, lines = accelerators.PLAIN, []
    for row, (program, _) in programs.items():
        planned = program.memory_analysis()
        memory = planned.temp_size_in_bytes / 2**20 if planned else math.nan
        figures = f"{1e3 * seconds[row]:.3g}", f"{seconds[row] / seconds[plain]:.2f}", f"{memory:.0f}"
        lines.append([f"{model}, {row}", *figures])
    return lines


def with_jax_privacy(model: str) -> tuple[Any, tuple]:
    """Its compiled step, and the inputs."""
    import jax
    import jax_privacy

    params, loss, batch, *_ = accelerators.problem(model)
    clipped = jax_privacy.clipped_grad(
        loss, l2_clip_norm=1.0, normalize_by=len(jax.tree.leaves(batch)[0]), keep_batch_dim=False
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=clipped.sensitivity(), prng_key=jax.random.key(2)
    )
    inputs = params, batch, privatizer.init(params)
    return jax.jit(lambda p, b, s: privatizer.update(clipped(p, b), s)).lower(*inputs).compile(), inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="models", action="append", choices=MODELS, help="a model; several times")
    parser.add_argument("--rounds", type=int, default=20, help="of the rows of a model, in turns")
    parser.add_argument("--searches", type=int, default=200, help="changes of rows to try for each sum")
    options = parser.parse_args()
    device = found_gpu()
    import jax

    differ, most = noise_that_differs(device, jax.devices("cpu")[0], NUMBERS)
    lines = [line for model in options.models or MODELS for line in steps_of(model, options.rounds)]
    tables = {
        "Steps": report.grid(["model, batch", "ms", "of not private", "MiB temporary"], lines),
        "Sums, in units of what rounding may add": report.grid(
            ["path", "batch", "on a CPU", "the same rows here", "a search here"], moved_sums(options.searches)
        ),
    }
    note = f"Of {NUMBERS} released numbers, {differ} differ from a CPU's, by at most {most:.3g} deviations."
    libraries = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-privacy", "flax", "optax")
    head = report.heading("benchmarks.on_a_gpu", libraries, devices=[device.device_kind])
    print(report.write("on_a_gpu", head, tables, notes=[note]), file=sys.stdout)


if __name__ == "__main__":
    main()
