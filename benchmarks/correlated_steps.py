"""The time of correlated noise: of a step, and of a noisy release alone.

`python -m benchmarks.correlated_steps` writes results/correlated_steps.md, in two minutes. All rows of a table take
turns on one core, with the clock of the processor, because other load then counts less.
"""

import argparse
import functools
import statistics
from typing import Any

from benchmarks import report, timing

EXAMPLES, STEPS = 50_000, 1000
MODELS = (("end_to_end_cnn", 256), ("mlp", 256))
WEIGHTS = (2, 8)
SHAPES = [(784, 1024), (1024,), (1024, 1024), (1024,), (1024, 10)]
CLOCK = "cpu"


def mechanisms(size: int, bands: int = 8) -> dict[str, Any]:
    """By name. size: of a batch."""
    import dpx
    from dpx import strategies
    from dpx.mechanisms import correlated_noise

    groups = dpx.sampling.CyclicPoissonSampling(examples=EXAMPLES, batch_size=size, bands=bands)
    order = dpx.sampling.FixedOrder(examples=EXAMPLES, batch_size=size)
    given: Any = {"clip_norm": 1.0, "noise_multiplier": 1.0, "key": dpx.secret_key(2**100)}  # protects nobody
    inverse = strategies.banded_inverse_square_root(coefficients=bands)
    inverses = {"lambda-CGD": strategies.lambda_cgd(correlation=0.9), f"BISR, {bands} weights": inverse}
    return {
        "dp_sgd": dpx.dp_sgd(sampling=groups, **given),
        f"BandMF, {bands} bands": dpx.methods.band_mf_sgd(bands=bands, steps=STEPS, sampling=groups, **given),
    } | {name: correlated_noise(strategy=strategy, sampling=order, **given) for name, strategy in inverses.items()}


def step_rows(model: str, size: int) -> list[tuple]:
    """One private training step of every mechanism."""
    import jax
    import numpy as np

    import dpx
    from benchmarks.models import PROBLEMS

    problem, timers, facts = PROBLEMS[model](), {}, {}
    batch = dpx.Batch(problem.batch(size), np.ones(size, bool))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    for name, mechanism in mechanisms(size).items():
        gradient: Any = dpx.private_updates(problem.loss, mechanism)

        @functools.partial(jax.jit, donate_argnums=1)
        def step(params, state, batch, gradient=gradient):
            updates, state, _ = gradient(params, batch, state)
            return state, updates

        state = mechanism.init(problem.params)
        program = step.lower(problem.params, state, batch).compile()
        sizes: Any = program.memory_analysis()
        held = {"state": state}
        facts[name] = (sum(leaf.nbytes for leaf in jax.tree.leaves(state)), sizes.temp_size_in_bytes)

        def run(program=program, held=held):
            held["state"], _ = jax.block_until_ready(program(problem.params, held["state"], batch))

        timers[name] = timing.Timer(run, timing.CLOCKS[CLOCK])
    seconds = {name: statistics.median(times) for name, times in timing.interleaved(timers, 4).items()}
    base, temporary = seconds["dp_sgd"], facts["dp_sgd"][1]
    return [
        (f"{model}, {size}", name, f"{1e3 * time:.1f} ms", f"{time / base:.3f}")
        + (f"{facts[name][0] / numbers:.1f}", f"{(facts[name][1] - temporary) / numbers:+.1f}")
        for name, time in seconds.items()
    ]


def release_rows() -> list[tuple]:
    """A noisy release of 1.9 million numbers at step 100, without gradients."""
    import jax
    import jax.numpy as jnp

    import dpx
    from dpx import keys, strategies
    from dpx.mechanisms import correlated_noise

    sums, timers = [jnp.ones(shape) for shape in SHAPES], {}
    order = dpx.sampling.FixedOrder(examples=EXAMPLES, batch_size=256)
    given: Any = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": order, "key": keys.secret_key(2**100)}
    rows: dict[tuple[Any, str], Any] = {(1, "independent"): dpx.dp_sgd(**given)}
    for count in WEIGHTS:
        inverse = strategies.banded_inverse_square_root(coefficients=count)
        banded = strategies.banded_square_root(bands=count)
        rows[count, "banded"] = correlated_noise(strategy=banded, **given)
        rows[count, "inverse"] = correlated_noise(strategy=inverse, **given)
    for name, mechanism in rows.items():
        state = mechanism.init(sums)
        state = jax.tree.map(lambda leaf: jnp.int32(100) if leaf.dtype == jnp.int32 and leaf.ndim == 0 else leaf, state)
        held = {"state": state}
        release = jax.jit(lambda state, sums, m=mechanism: m.release((sums,), state, sums)[::-1], donate_argnums=0)

        def run(release=release, held=held):
            held["state"], _ = jax.block_until_ready(release(held["state"], sums))

        timers[name] = timing.Timer(run, timing.CLOCKS[CLOCK])
    seconds = {name: statistics.median(times) for name, times in timing.interleaved(timers, 2).items()}
    base = seconds[1, "independent"]
    return [(count, name, f"{1e3 * time:.1f} ms", f"{time / base:.2f}") for (count, name), time in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    timing.pin(options.core)
    columns = (
        "model, batch",
        "mechanism",
        "step",
        "over dp_sgd",
        "state, bytes a parameter",
        "temporary, over dp_sgd's",
    )
    tables = {
        "A step": report.grid(columns, [row for problem in MODELS for row in step_rows(*problem)]),
        "A noisy release of 1.9 million numbers": report.grid(
            ("bands or weights", "noise", "time", "over independent noise"), release_rows()
        ),
    }
    heading = report.heading("benchmarks.correlated_steps", ("jax", "numpy"), clock=CLOCK)
    report.write("correlated_steps", heading, tables)


if __name__ == "__main__":
    main()
