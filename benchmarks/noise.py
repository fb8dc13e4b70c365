"""The time to compile and to make a noisy release, against float32 noise of one `jax.random.normal` for each parameter.

`python -m benchmarks.noise` writes results/noise.md: `dpx.keys.release` with several sizes of a chunk.
"""

import argparse
import functools
import statistics
import time
from unittest import mock

from benchmarks import report, timing

LAYER = {"qkv": (256, 768), "out": (256, 256), "up": (256, 1024), "down": (1024, 256)}
SHAPES = {
    "MLP, 6 arrays": [(784, 1024), (1024,), (1024, 1024), (1024,), (1024, 10), (10,)],
    "transformer of 4 layers, 50 arrays": [(5000, 256), (256,)]
    + 4 * [shape for matrix in LAYER.values() for shape in (matrix, (256,), (256,), matrix[1:])],
}
CHUNKS = (2**11, 2**13, 2**15, 2**17)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    timing.pin(options.core)
    import jax
    import jax.numpy as jnp
    import optax

    from dpx.keys import noise

    def step(release, key, number, sums):
        return jax.tree.map(lambda released: released / 64, release(key, number, sums, 0.3))

    def by_leaves(key, number, sums, deviation):
        drawn = optax.tree.random_like(jax.random.fold_in(key, number), sums, jax.random.normal, jnp.float32)
        return jax.tree.map(lambda total, normals: total + deviation * normals, sums, drawn)

    results = {}
    for name, shapes in SHAPES.items():
        sums, compile_seconds, programs = [jnp.ones(shape) for shape in shapes], {}, {}
        draws = {"a generator for each array": by_leaves} | dict.fromkeys(map(str, CHUNKS), noise.release)
        for row, draw in draws.items():
            jax.clear_caches()
            with mock.patch.object(noise, "CHUNK_NUMBERS", int(row) if row.isdigit() else 0):
                start = time.perf_counter()
                programs[row] = (
                    jax.jit(functools.partial(step, draw)).lower(jax.random.key(0), jnp.int32(0), sums).compile()
                )
                compile_seconds[row] = time.perf_counter() - start
        timers = {
            row: timing.Timer(
                lambda run=run, sums=sums: jax.block_until_ready(run(jax.random.key(1), jnp.int32(1), sums)),
                time.perf_counter,
            )
            for row, run in programs.items()
        }
        milliseconds = {row: 1e3 * statistics.median(ts) for row, ts in timing.interleaved(timers, 5).items()}
        memory = {row: program.memory_analysis().temp_size_in_bytes / 2**20 for row, program in programs.items()}
        results[name] = {row: (compile_seconds[row], milliseconds[row], memory[row]) for row in programs}

    heading = report.heading("benchmarks.noise", ("jax", "jaxlib", "optax"), **report.load(options.core))
    columns = [
        (row, lambda rows, row=row: "{:.2f} s, {:.1f} ms, {:.0f} MiB".format(*rows[row]))
        for row in next(iter(results.values()))
    ]
    notes = ["The columns with a number are `dpx.keys.release` with chunks of so many numbers."]
    tables = {"Compile time, time and temporary memory of sum + noise": report.table(results, columns)}
    report.write("noise", heading, tables, notes=notes)


if __name__ == "__main__":
    main()
