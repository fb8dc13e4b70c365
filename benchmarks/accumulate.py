"""The memory of a step in chunks: a batch ten times larger than the largest that fits into a given memory.

    python -m benchmarks.accumulate --model adadpigu_cnn --limit 64

Looks for the largest batch whose step XLA compiles into at most `limit` MiB of temporary memory, then takes ten such
batches as the chunks of one. Runs some steps of it, and prints by how much the resident size of the process grew.
"""

import argparse
import resource
import sys
import time
from typing import Any

import jax
import optax

import dpx
from benchmarks import report
from benchmarks.models import PROBLEMS

CHUNKS = 10


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="adadpigu_cnn", choices=sorted(PROBLEMS))
    parser.add_argument("--limit", type=float, default=64.0, help="MiB of temporary memory")
    parser.add_argument("--grain", type=int, default=64, help="batches are multiples of it")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def temporary(program) -> float:
    """MiB that a compiled program allocates beside its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes / 2**20


def resident() -> float:
    """The largest resident size of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def optimizer_of(size: int) -> dpx.Mechanism:
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=size)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(0))
    return dpx.chain(mechanism, optax.sgd(0.1))


def whole_step(problem, size: int):
    """`private_updates` of a batch of this size, compiled."""
    optimizer = optimizer_of(size)
    shapes = jax.eval_shape(lambda: (problem.params, dpx.Batch(problem.batch(size), None)))
    step: Any = dpx.private_updates(problem.loss, optimizer)
    return jax.jit(lambda *inputs: step(*inputs)[:2]).lower(*shapes, optimizer.init(problem.params)).compile()


def largest_batch(problem, limit: float, grain: int) -> int:
    """The largest batch, a multiple of `grain`, whose step needs at most `limit` MiB."""
    least, most = 0, 1
    while temporary(whole_step(problem, most * grain)) <= limit:
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        fits = temporary(whole_step(problem, middle * grain)) <= limit
        least, most = (middle, most) if fits else (least, middle)
    return least * grain


def in_chunks(problem, size: int, steps: int) -> dict[str, float]:
    """Steps of CHUNKS chunks of this size: temporary MiB of each program, MiB of growth, seconds a step."""
    optimizer, chunk = optimizer_of(CHUNKS * size), dpx.Batch(problem.batch(size), None)
    accumulated = dpx.private_updates_in_chunks(problem.loss, optimizer)
    params, state = problem.params, optimizer.init(problem.params)
    first = jax.jit(accumulated.add).lower(params, chunk, state).compile()
    sums = jax.eval_shape(accumulated.add, params, chunk, state)
    add = jax.jit(accumulated.add, donate_argnums=3).lower(params, chunk, state, sums).compile()
    release = jax.jit(accumulated.release).lower(params, sums, state).compile()
    before, start = resident(), time.perf_counter()
    for _ in range(steps):
        sums = first(params, chunk, state)
        for _ in range(CHUNKS - 1):
            sums = add(params, chunk, state, sums)
        updates, state = release(params, sums, state)
        params = jax.block_until_ready(optax.apply_updates(params, updates))
    seconds = (time.perf_counter() - start) / steps
    assert dpx.accounting.steps_taken(state) == steps and dpx.epsilon(optimizer, state, delta=1e-5) > 0
    return {
        "add": temporary(add),
        "release": temporary(release),
        "sums": sum(leaf.nbytes for leaf in jax.tree.leaves(sums.unreleased_sums)) / 2**20,
        "growth": resident() - before,
        "seconds": seconds,
    }


def main():
    options = arguments()
    problem = PROBLEMS[options.model]()
    size = largest_batch(problem, options.limit, options.grain)
    if not size:
        sys.exit(f"a batch of {options.grain} does not fit into {options.limit} MiB")
    found = in_chunks(problem, size, options.steps)
    whole = temporary(whole_step(problem, CHUNKS * size))
    rows = {
        f"temporary memory of one step over the whole batch of {CHUNKS * size}": f"{whole:.0f}",
        f"temporary memory of one `add` of {size}": f"{found['add']:.0f}",
        "temporary memory of `release`": f"{found['release']:.0f}",
        "the sums between the chunks": f"{found['sums']:.1f}",
        f"growth of the process over {options.steps} steps in chunks, at its peak": f"{found['growth']:.0f}",
    }
    page = report.write(
        "accumulate",
        report.heading("benchmarks.accumulate", ("jax", "jaxlib", "optax")),
        f"{options.model}: the largest batch whose step needs at most {options.limit:g} MiB has {size} examples. "
        f"{options.steps} steps over a batch of {CHUNKS * size}, in {CHUNKS} chunks, count in the cost as "
        f"{options.steps}; each took {found['seconds']:.1f} s.",
        report.grid(("", "MiB"), rows.items()),
    )
    print(page)


if __name__ == "__main__":
    main()
