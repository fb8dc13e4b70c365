"""The time of a private step with several views of each example (`dpx.augmented`), divided by that of a plain step.

`python -m benchmarks.augmented` writes results/augmented.md. The views are shifted by up to two pixels. The views of a
large batch do not fit in the cache of a core, so steps in microbatches of 64 examples are measured too, the plain one
as well. Two columns say where the time goes: a plain step on four times the examples, and making the views alone.
"""

import argparse
import statistics
import time

from benchmarks import report, timing

COPIES, MICROBATCH = (1, 4), 64
PLAIN, IN_PARTS = "plain", f"in microbatches of {MICROBATCH}"
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
        start = (jax.random.bits(key, (2,)) % 5).astype(int)
        padded = jnp.pad(image, ((2, 2), (2, 2), (0, 0)))
        return jax.lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape), label

    def views_of(examples, key):
        keys = jax.random.split(key, (len(examples[1]), COPIES[-1]))
        return jax.vmap(jax.vmap(shifted, (None, 0)))(examples, keys)

    results = {}
    for name, size in CASES.items():
        model = models.build(name, input_shape=(28, 28, 1), classes=10)
        params, loss = model.init(jax.random.key(0)), models.loss_of(model)

        def step(copies, size, microbatch_size=None, params=params, loss=loss):
            """copies: 0 for the loss itself."""
            sampling = dpx.PoissonSampling(examples=60_000, batch_size=size)
            mechanism = dpx.dp_sgd(clip_norm=0.1, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(1))
            examples = jax.random.uniform(jax.random.key(2), (size, 28, 28, 1)), jnp.arange(size) % 10
            arguments = params, dpx.Batch(examples, jnp.ones(size, bool)), mechanism.init(params)
            mean_loss = dpx.augmented(loss, shifted, copies=copies) if copies else loss
            options = {"with_key": copies > 0, "microbatch_size": microbatch_size}
            run = jax.jit(dpx.private_updates(mean_loss, mechanism, **options))
            return lambda: jax.block_until_ready(run(*arguments).updates)

        examples = jax.random.uniform(jax.random.key(2), (size, 28, 28, 1)), jnp.arange(size) % 10
        alone, key = jax.jit(views_of), jax.random.key(3)
        rows = {
            PLAIN: step(0, size),
            f"{PLAIN}, {IN_PARTS}": step(0, size, MICROBATCH),
            f"{COPIES[-1]} times the examples": step(0, COPIES[-1] * size),
            "the views alone": lambda alone=alone, examples=examples, key=key: jax.block_until_ready(
                alone(examples, key)
            ),
        }
        rows |= {str(copies): step(copies, size) for copies in COPIES}
        rows |= {f"{copies}, {IN_PARTS}": step(copies, size, MICROBATCH) for copies in COPIES}
        timers = {row: timing.Timer(run, time.process_time) for row, run in rows.items()}
        medians = {row: statistics.median(times) for row, times in timing.interleaved(timers, 5).items()}
        results[f"{name}, {size}"] = {
            row: (1e3 * seconds, seconds / medians[PLAIN]) for row, seconds in medians.items()
        }

    heading = report.heading("benchmarks.augmented", ("jax", "jaxlib", "optax"), **report.load(options.core))
    columns = [
        (row, lambda found, row=row: f"{found[row][0]:.1f} ms, {found[row][1]:.2f}")
        for row in next(iter(results.values()))
    ]
    notes = ["In every cell: CPU time of a step, and that time divided by that of a plain step."]
    tables = {"Views of an example": report.table(results, columns)}
    report.write("augmented", heading, tables, notes=notes)


if __name__ == "__main__":
    main()
