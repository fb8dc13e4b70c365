"""The time, memory and compile time of a private step of a language model whose layers are stacked.

    python -m benchmarks.scans

The same GPT-2 with its layers' parameters in three forms: arrays of their own for each layer, and stacked arrays that
`jax.lax.scan` slices, or that a loop in Python indexes. The embedding is tied. Each form has a row without privacy (the
gradient of the mean loss of the batch) and three with dpx, which takes the batch at once, in two microbatches, or with
two backward passes; all take turns in one process, on one CPU core. A step by hand (`vmap`, clipping, a sum, and the
noise of dpx) is only compiled.
Memory is what the compiled program says of its temporary buffers. Writes benchmarks/results/scans_MODEL.md.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import report, timing

PLAIN, PRIVATE, IN_PARTS, TWICE = "not private", "dpx", "dpx in two microbatches", "dpx with two backward passes"
BY_HAND = "by hand"
FORMS = ("own arrays", "scan", "scan with remat", "slices")


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int


SHAPES = {
    "width_256": Shape(layers=12, width=256, heads=4, vocabulary=1000, length=64, batch=8),
    "gpt2_small": Shape(layers=12, width=768, heads=12, vocabulary=50_257, length=64, batch=8),
}


def build(shape: Shape, form: str) -> tuple[Any, Callable, Any]:
    """The parameters, the loss of one example, and a batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    layers, width, heads, vocabulary, length, batch = shape
    rng = np.random.default_rng(0)

    def normal(*size):
        return jnp.asarray(0.02 * rng.standard_normal(size, np.float32))

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def block(x, p):
        q, k, v = jnp.split(dense(norm(x, p["norm1"]), p["qkv"]), 3, axis=-1)
        q, k, v = (y.reshape(length, heads, -1) for y in (q, k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) / (width // heads) ** 0.5
        shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
        x = x + dense(jnp.einsum("hts,shd->thd", shares, v).reshape(length, width), p["out"])
        return x + dense(jax.nn.gelu(dense(norm(x, p["norm2"]), p["up"])), p["down"])

    def of_layers(*size):
        return normal(layers, *size)

    wide = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks: Any = {name: {"kernel": of_layers(*size), "bias": of_layers(size[1])} for name, size in wide.items()}
    blocks |= {name: {"scale": 1 + of_layers(width), "bias": of_layers(width)} for name in ("norm1", "norm2")}
    if form == "own arrays":
        blocks = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(layers)]
    params = {"blocks": blocks, "tokens": normal(vocabulary, width), "places": normal(length, width)}
    params["norm"] = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def loss(params, tokens):
        x = params["tokens"][tokens[:-1]] + params["places"]
        if form.startswith("scan"):
            one = jax.checkpoint(block, prevent_cse=False) if "remat" in form else block
            x = jax.lax.scan(lambda x, p: (one(x, p), None), x, params["blocks"])[0]
        else:
            for i in range(layers):
                own = form == "own arrays"
                p = params["blocks"][i] if own else jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
                x = block(x, p)
        logits = jax.nn.log_softmax(norm(x, params["norm"]) @ params["tokens"].T)
        return -jnp.take_along_axis(logits, tokens[1:, None], 1).mean()

    return params, loss, jnp.asarray(rng.integers(0, vocabulary, (batch, length + 1)).astype(np.int32))


def steps(shape: Shape, form: str) -> dict[str, tuple[Callable, tuple]]:
    """name -> (step, its inputs)."""
    import jax
    import jax.numpy as jnp
    import optax

    import dpx
    from dpx import keys

    params, loss, batch = build(shape, form)
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=shape.batch)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(2))

    def not_private(params, batch):
        return jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, batch).mean())(params)

    def by_hand(params, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        factors = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads))
        sums = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)
        return keys.release(jax.random.key(2), jnp.int32(0), sums, 1.0)

    def private(size=None, passes=1):
        step = dpx.private_updates(loss, mechanism, microbatch_size=size, backward_passes=passes)
        return lambda params, batch, state: step(params, dpx.Batch(batch, None), state)[:2]

    state = mechanism.init(params)
    return {
        BY_HAND: (by_hand, (params, batch)),
        PLAIN: (not_private, (params, batch)),
        PRIVATE: (private(), (params, batch, state)),
        IN_PARTS: (private(shape.batch // 2), (params, batch, state)),
        TWICE: (private(passes=2), (params, batch, state)),
    }


def compiled(step: Callable, inputs: tuple) -> tuple[Any, float]:
    """The program, and the seconds of CPU time that it takes to trace and compile."""
    import jax

    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    program = jax.jit(lambda *inputs: step(*inputs)).lower(*inputs).compile()
    return program, time.process_time() - start


def measured(shape: Shape, forms: list[str], rounds: int, clock: str) -> dict[str, Any]:
    """By form and row: (seconds to compile, MiB, seconds of a step)."""
    import jax

    found: dict[tuple[str, str], list[float]] = {}
    timers = {}
    for form in forms:
        for row, (step, inputs) in steps(shape, form).items():
            program, seconds = compiled(step, inputs)
            found[form, row] = [seconds, program.memory_analysis().temp_size_in_bytes / 2**20]
            if row == BY_HAND:
                continue
            run = functools.partial(lambda program, inputs: jax.block_until_ready(program(*inputs)), program, inputs)
            timers[form, row] = timing.Timer(run, timing.CLOCKS[clock])
            print(form, row, found[form, row], file=sys.stderr, flush=True)
    for key, times in timing.interleaved(timers, rounds).items():
        found[key].append(statistics.median(times))
    return {form: {row: found[form, row] for row in (BY_HAND, PLAIN, PRIVATE, IN_PARTS, TWICE)} for form in forms}


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    def of(number, text="{:.2f}", row=PRIVATE):
        return lambda rows: f"{text.format(rows[row][number])} ({rows[row][number] / rows[PLAIN][number]:.2f})"

    columns = [("seconds of a step", of(2, "{:.3f}")), ("MiB", of(1, "{:.0f}")), ("seconds to compile", of(0))]
    columns.append(("and divided by a step by hand", lambda rows: f"{rows[PRIVATE][0] / rows[BY_HAND][0]:.2f}"))
    columns.append(("seconds in two microbatches", of(2, "{:.3f}", IN_PARTS)))
    columns.append(("MiB in two microbatches", of(1, "{:.0f}", IN_PARTS)))
    columns.append(("seconds with two passes", of(2, "{:.3f}", TWICE)))
    columns.append(("MiB with two passes", of(1, "{:.0f}", TWICE)))
    rows = {f"{name}, {form}": rows for name, forms in results.items() for form, rows in forms.items()}
    return {"A step with dpx, and divided by the same without privacy": report.table(rows, columns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=timing.CLOCKS, default="cpu")
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none")
    options = parser.parse_args()
    timing.pin(options.core)
    heading = report.heading("benchmarks.scans", ("jax", "jaxlib"), clock=options.clock, **report.load(options.core))
    for name in options.models:
        results = {name: measured(SHAPES[name], options.forms, options.rounds, options.clock)}
        print(report.write(f"scans_{name}", heading, tables(results)))


if __name__ == "__main__":
    main()
