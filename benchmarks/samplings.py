"""The time of a step on batches of each sampling: its draw on the host, and all of it.

`python -m benchmarks.samplings` writes results/samplings_step.md, in two minutes. 60,000 images of 784 float32 numbers,
an expected batch size of 256, a perceptron with 128 hidden units, one core. Samplings take turns, by the clock of the
CPU. A draw is the mean over an epoch, because some samplings make a list once an epoch. A step is the mean of ten steps
that load their batches without a thread: draw, read, gradients, clip, noise, update.
"""

import argparse
import statistics
from typing import Any

from benchmarks import report, timing

EXAMPLES, BATCH, HIDDEN, STEPS = 60_000, 256, 128, 10


def samplings() -> dict[str, Any]:
    import numpy as np

    import dpx

    sizes: dict[str, Any] = {"examples": EXAMPLES, "batch_size": BATCH}
    weights = 1.0 + np.arange(EXAMPLES) % 3
    return {
        "PoissonSampling": dpx.PoissonSampling(**sizes),
        "RandomAllocation": dpx.sampling.RandomAllocation(examples=EXAMPLES, steps_per_epoch=EXAMPLES // BATCH),
        "PoissonSampling, most_rows=336": dpx.PoissonSampling(**sizes, most_rows=336),
        "PoissonSampling, most_rows=256": dpx.PoissonSampling(**sizes, most_rows=256),
        "PoissonSampling, weights": dpx.PoissonSampling(**sizes, weights=weights),
        "CyclicPoissonSampling, 8 bands": dpx.sampling.CyclicPoissonSampling(**sizes, bands=8),
        "FixedSizeSampling": dpx.FixedSizeSampling(**sizes),
        "ShuffledEpochs": dpx.ShuffledEpochs(**sizes),
        "FixedOrder": dpx.sampling.FixedOrder(**sizes),
    }


def draws(sampling: Any, key: Any) -> Any:
    """A function that draws the batches of the next epoch."""
    step, length = iter(range(10**9)), int(sampling.steps(epochs=1))
    return lambda: [sampling.draw(key, next(step)) for _ in range(length)]


def steps(sampling: Any, key: Any) -> Any:
    """A function that makes the next STEPS steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dpx

    rng = np.random.default_rng(0)
    data = rng.normal(size=(EXAMPLES, 784)).astype(np.float32), rng.integers(10, size=EXAMPLES)
    params = {"w": jnp.asarray(rng.normal(size=(784, HIDDEN)) / 28, jnp.float32), "v": jnp.zeros((HIDDEN, 10))}

    def loss(params, example):
        image, label = example
        logits = jnp.tanh(image @ params["w"]) @ params["v"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=key)
    step = jax.jit(dpx.private_updates(loss, mechanism))
    run: dict[str, Any] = {"params": params, "state": mechanism.init(params)}

    def more():
        for batch in sampling.batches(data, key, run["state"], steps=STEPS, prefetch=0):
            updates, run["state"], _ = step(run["params"], batch, run["state"])
            run["params"] = optax.apply_updates(run["params"], updates)
        jax.block_until_ready(run["params"])

    return more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    timing.pin(options.core)
    from dpx import keys

    key, clock = keys.secret_key(2**100), timing.CLOCKS["cpu"]  # protects nobody
    found = samplings()
    medians = []
    for make in (draws, steps):
        timers = {name: timing.Timer(make(sampling, key), clock) for name, sampling in found.items()}
        measured = timing.interleaved(timers, options.rounds)
        medians.append({name: statistics.median(times) for name, times in measured.items()})
    first = medians[1]["PoissonSampling"]
    rows = [
        (
            name,
            sampling.usual_rows,
            f"{1e3 * medians[0][name] / sampling.steps(epochs=1):.2f} ms",
            f"{1e3 * medians[1][name] / STEPS:.1f} ms",
            f"{medians[1][name] / first:.2f}",
        )
        for name, sampling in found.items()
    ]
    columns = ("sampling", "rows of a batch", "draw", "step", "over Poisson sampling")
    heading = report.heading("benchmarks.samplings", ("jax", "numpy"), clock="cpu", **report.load(options.core))
    notes = ["Rows count padding. Medians; see the docstring of benchmarks/samplings.py for what is timed."]
    report.write("samplings_step", heading, {"One step": report.grid(columns, rows)}, notes=notes)


if __name__ == "__main__":
    main()
