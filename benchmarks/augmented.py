"""The time of a private step with several views of each example (`dpx.augmented`), divided by that with one.

`python -m benchmarks.augmented` writes results/augmented.md. The views are shifted by up to two pixels.
"""

import argparse
import importlib.metadata
import statistics
import time

from benchmarks import report, timing

COPIES = (1, 4)
CASES = {"linear": 1024, "mlp": 1024, "adadpigu_cnn": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    timing.pin(options.core)
    import jax
    import jax.numpy as jnp

    import dpx
    from examples import models

    def shifted(example, key):
        image, label = example
        start = jax.random.randint(key, (2,), 0, 5)
        padded = jnp.pad(image, ((2, 2), (2, 2), (0, 0)))
        return jax.lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape), label

    results = {}
    for name, size in CASES.items():
        model = models.build(name, input_shape=(28, 28, 1), classes=10)
        params, loss = model.init(jax.random.key(0)), models.loss_of(model)
        sampling = dpx.PoissonSampling(examples=60_000, batch_size=size)
        mechanism = dpx.dp_sgd(clip_norm=0.1, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(1))
        examples = jax.random.uniform(jax.random.key(2), (size, 28, 28, 1)), jnp.arange(size) % 10
        arguments = params, dpx.Batch(examples, jnp.ones(size, bool)), mechanism.init(params)
        rows = {"1, not augmented": jax.jit(dpx.private_grad(loss, mechanism))}
        for copies in COPIES:
            mean_loss = dpx.augmented(loss, shifted, copies)
            rows[str(copies)] = jax.jit(dpx.private_grad(mean_loss, mechanism, with_key=True))
        timers = {
            row: timing.Timer(
                lambda run=run, arguments=arguments: jax.block_until_ready(run(*arguments).updates),
                time.process_time,
            )
            for row, run in rows.items()
        }
        medians = {row: statistics.median(times) for row, times in timing.interleaved(timers, 5).items()}
        results[f"{name}, {size}"] = {row: (1e3 * seconds, seconds / medians["1"]) for row, seconds in medians.items()}

    said = {"versions": {lib: importlib.metadata.version(lib) for lib in ("jax", "jaxlib", "optax")}, "device": "cpu"}
    columns = [
        (row, lambda found, row=row: f"{found[row][0]:.0f} ms, {found[row][1]:.2f}")
        for row in ("1, not augmented", *map(str, COPIES))
    ]
    notes = ["In every cell: CPU time of a step, and that time divided by the one of a single view."]
    tables = {"Views of an example": report.table(results, columns)}
    report.write("augmented", report.facts("benchmarks.augmented", {"dpx": said}, options), results, notes, tables)


if __name__ == "__main__":
    main()
