"""Time and memory of a private step, and the updates that low precision loses.

The step that is run has no row that counts. So its release is pure noise: no data are released with the noise of a run.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx.checking.program import is_low_precision
from dpx.checking.report import Finding
from dpx.gradients import private_updates
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch
from dpx.trees import Tree, batch_size, path_of, some

REPETITIONS = 3


class Step(NamedTuple):
    """One step of pure noise.

    unreleased_updates: like the parameters; the noise of a run, so never to be shown.
    compile_seconds, seconds: of the compilation, and the median of a few runs. temporary, arguments: bytes, or None.
    """

    unreleased_updates: Tree
    compile_seconds: float
    seconds: float
    temporary: int | None
    arguments: int | None


@jax.disable_jit(False)  # which has no programs to measure
def run(loss: Callable, optimizer: Mechanism, params: Tree, batch: Batch) -> Step:
    """Compiles and runs the private step on a batch of which no row counts."""
    gradient, state = private_updates(loss, optimizer), jax.jit(optimizer.init)(params)
    empty = Batch(batch.examples, np.zeros(batch_size(batch.examples), bool))
    start = time.perf_counter()
    compiled = jax.jit(lambda *arguments: gradient(*arguments)[:2]).lower(params, empty, state).compile()
    compile_seconds, seconds, updates = time.perf_counter() - start, [], None
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        updates, _ = jax.block_until_ready(compiled(params, empty, state))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    sizes = (memory.temp_size_in_bytes, memory.argument_size_in_bytes) if memory is not None else (None, None)
    return Step(updates, compile_seconds, float(np.median(seconds)), *sizes)


def duration(step: Step, steps: int | None) -> Finding:
    numbers = {"compile_seconds": step.compile_seconds, "seconds": step.seconds}
    words = f"compiling takes {step.compile_seconds:.2g} s, and a step {1e3 * step.seconds:.3g} ms"
    if steps is None:
        return Finding("time", "ok", words, numbers)
    whole = step.compile_seconds + steps * step.seconds
    minutes = f"{whole:.3g} s" if whole < 120 else f"{whole / 60:.3g} min"
    return Finding("time", "ok", f"{words}: {minutes} for {steps} steps", numbers | {"run_seconds": whole})


def memory(step: Step) -> Finding:
    if step.temporary is None or step.arguments is None:
        return Finding("memory", "note", "the backend does not say how much memory a step takes")
    numbers = {"temporary_bytes": step.temporary, "argument_bytes": step.arguments}
    words = f"a step takes {step.temporary / 2**20:.3g} MiB beside {step.arguments / 2**20:.3g} MiB of arguments"
    return Finding("memory", "ok", words, numbers)


def precision(step: Step, params: Tree, flags: Tree, losses: jax.Array) -> Finding:
    """Low-precision parameters that are trained, and the share of them that a step of pure noise leaves as they are.

    flags: bools like the parameters, True where trained.
    """
    leaves, updates = jax.tree.leaves(params), jax.tree.leaves(step.unreleased_updates)
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    low = [n for n, flag in enumerate(jax.tree.leaves(flags)) if flag and is_low_precision(leaves[n])]
    if not low:
        if is_low_precision(losses):
            words = f"losses are {losses.dtype}: sum and average them in float32 in the loss"
            return Finding("precision", "note", words)
        return Finding("precision", "ok", "trained parameters and losses have at least 32 bits", {"parameters": 0})
    moved = [optax.apply_updates(jnp.asarray(leaves[n]), updates[n]) != leaves[n] for n in low]
    meant = sum(int(jnp.sum(updates[n] != 0)) for n in low)
    lost = 1 - sum(int(jnp.sum(m)) for m in moved) / meant if meant else 0.0
    words = some([f"{paths[n]} ({leaves[n].dtype})" for n in low])
    words += f": {lost:.0%} of the updates of a first step of pure noise are below the parameter's spacing, and lost"
    if lost > 0.1:
        return Finding("precision", "warning", f"{words}: keep float32 parameters, cast in the loss", {"lost": lost})
    return Finding("precision", "note", words, {"lost": lost})
