"""The time of one private training step, against JAX's own non-private step.

    python -m benchmarks.step --models mlp transformer --batches 64 256

All rows of a problem are timed in one process on one CPU core, in interleaved rounds, and the medians are compared.
A library that is not installed is named in the notes and skipped. Writes JSON and Markdown to benchmarks/results/.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import sys
import time

MODELS = ("mlp", "adadpigu_cnn", "end_to_end_cnn", "transformer", "resnet20")
RESULTS = pathlib.Path(__file__).parent / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ONE_CORE = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--rows", nargs="+", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none (as on a GPU)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu is fairer on a busy machine")
    parser.add_argument("--budget", type=float, default=40.0, help="GiB; rows expected to need more are skipped")
    parser.add_argument("--name", default="step", help="of the files written")
    return parser.parse_args()


def private_steps(problem, size):
    """name -> (compiled step, its arguments) for every row, slowest ones last."""
    import jax
    import jax.numpy as jnp
    import optax

    import dpx

    batch, key = problem.batch(size), jax.random.key(2)
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=size)
    mechanism = dpx.gaussian_mechanism(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=key)
    # for the cost of the clipped sum alone
    silent = mechanism.replace(
        release=lambda sums, state, params: (jax.tree.map(lambda s: s / size, sums[0]), state),
    )
    state = mechanism.init(problem.params)

    def non_private(params, batch):
        return jax.grad(lambda p: jax.vmap(problem.loss, (None, 0))(p, batch).mean())(params)

    def hand_written(params, batch):
        grads = jax.vmap(jax.grad(problem.loss), (None, 0))(params, batch)
        weights = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads))
        sums = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), grads)
        noise = optax.tree.random_like(key, sums, jax.random.normal)
        return jax.tree.map(lambda s, n: (s + n) / size, sums, noise)

    def with_dpx(mechanism, clipping):
        step = dpx.private_grad(problem.loss, mechanism, clipping=clipping)
        return lambda params, batch: step(params, batch, state).updates

    def with_optax(params, batch):
        grads = jax.vmap(jax.grad(problem.loss), (None, 0))(params, batch)
        aggregate = optax.contrib.differentially_private_aggregate(1.0, 1.0, key)
        return aggregate.update(grads, aggregate.init(params), params)[0]

    rows = {
        "JAX, not private": non_private,
        "JAX, by hand": hand_written,
        "dpx auto, without noise": with_dpx(silent, "auto"),
        "dpx auto": with_dpx(mechanism, "auto"),
        "dpx ghost": with_dpx(mechanism, "ghost"),
        "dpx vmap": with_dpx(mechanism, "vmap"),
        "optax.contrib": with_optax,
    }
    return {name: (jax.jit(step), (problem.params, batch)) for name, step in rows.items()}


def measure(steps, rounds, clock):
    """name -> {"seconds": median, "compile": seconds}, in interleaved rounds; slow rows take part in fewer of them."""
    import jax

    found = {}
    compiled = {}
    for name, (step, inputs) in steps.items():
        start = time.perf_counter()
        compiled[name] = step.lower(*inputs).compile()
        seconds = time.perf_counter() - start
        jax.block_until_ready(compiled[name](*inputs))
        found[name] = {"compile": seconds, "times": []}
        print(f"    {name}: compiled in {seconds:.1f} s", file=sys.stderr, flush=True)
    for turn in range(rounds):
        for name, (_, inputs) in steps.items():
            if turn >= 3 and sum(found[name]["times"]) > 20:
                continue
            # once untimed: the memory that the row before gives back late is not this row's cost
            jax.block_until_ready(compiled[name](*inputs))
            time.sleep(0.01)
            start = clock()
            jax.block_until_ready(compiled[name](*inputs))
            found[name]["times"].append(clock() - start)
    for row in found.values():
        row["seconds"] = statistics.median(row["times"])
    return found


def too_large(name, problem, size, budget):
    """Whether a row holds `size` gradients (twice, in the plain forms) beyond the budget."""
    from benchmarks.models import parameter_count

    stacked = name in ("JAX, by hand", "dpx vmap", "optax.contrib")
    return stacked and 2 * 4 * size * parameter_count(problem) > budget * 2**30


def table(results):
    """Markdown: the median time of every row over the non-private one."""
    names = list(dict.fromkeys(name for rows in results.values() for name in rows))
    lines = ["| model, batch | not private (ms) | " + " | ".join(names[1:]) + " |", "|---" * (len(names) + 1) + "|"]
    for case, rows in results.items():
        floor = rows[names[0]]["seconds"]
        cells = [f"{rows[name]['seconds'] / floor:.2f}" if name in rows else "-" for name in names[1:]]
        lines.append(f"| {case} | {floor * 1e3:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    options = arguments()
    if options.core >= 0:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_CORE}"
        os.sched_setaffinity(0, {options.core})
    import jax

    from benchmarks.models import PROBLEMS

    notes = []
    for library in ("jax_privacy", "opacus"):
        if importlib.util.find_spec(library) is None:
            notes.append(f"{library} is not installed: no rows for it")
    results = {}
    for model in options.models:
        problem = PROBLEMS[model]()
        for size in options.batches:
            steps = private_steps(problem, size)
            wanted = {
                name: step
                for name, step in steps.items()
                if (not options.rows or name in options.rows) and not too_large(name, problem, size, options.budget)
            }
            print(f"{model}, {size}", file=sys.stderr, flush=True)
            results[f"{model}, {size}"] = measure(wanted, options.rounds, CLOCKS[options.clock])
            jax.clear_caches()
            print(table({f"{model}, {size}": results[f"{model}, {size}"]}), flush=True)
    device = jax.devices()[0].device_kind
    facts = {
        "device": device,
        "machine": platform.machine(),
        "pinned to one core": options.core >= 0,
        "clock": options.clock,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "flax")},
        "notes": notes,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    text = "\n".join([f"{key}: {value}  " for key, value in facts.items()])
    text += f"\n\nMedian time over the non-private step's:\n\n{table(results)}\n"
    (RESULTS / f"{options.name}.md").write_text(text)
    print(table(results))


if __name__ == "__main__":
    main()
