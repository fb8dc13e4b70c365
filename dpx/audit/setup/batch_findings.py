"""Findings about losses, gradients and clipping on one batch, and the time and memory of a private step.

Whatever depends on the batch is computed from raw data and is NOT private. The step that is run excludes every row, so
its release is pure noise, and no data are released with the noise of a run.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from dpx.audit.setup.static_findings import Finding, is_low_precision
from dpx.gradients import private_updates
from dpx.gradients.one_example import value_and_gradient
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch
from dpx.sampling.data import batch_size
from dpx.schedules import values_over
from dpx.sums.clipped_sum import LARGEST, norms_in_range, sum_contributions, sum_over_microbatches
from dpx.sums.rounding import as_pair
from dpx.values import Tree, leaf_path, list_first_few
from dpx.xla.jaxprs import walk_equations
from dpx.xla.rows_apart import loops_until_all_converge

MICROBATCH_NUMBERS = 2**26  # gradient values in memory at once: 256 MiB in float32
AT_THE_BOUND = 0.999  # share of the bound from which a contribution counts as clipped
COMPARED = 3  # rows that are computed again, each alone
TOLERANCE, LOW_TOLERANCE = 1e-2, 1e-1  # relative, for float32 (perhaps rounded to TensorFloat-32) and for fewer bits
TINY = 1e-6  # absolute; a smaller loss or gradient counts as 0, except for rounding
MISSING_VALUES = "give missing values a number first (docs/recipes.md)"
MADE_BY_LOSS = (
    "the loss or its derivative makes NaN or infinity, as log(0), sqrt at 0 and 0 / 0 do, also in the branch that "
    "jnp.where does not take. jax.grad(loss)(params, example) shows it"
)
LOUD = 100.0  # ratio of noise to signal above which the noise drowns the signal


class BatchDiagnostics(NamedTuple):
    """Losses, gradients and contributions of the B examples in one batch, for L leaves of the parameters.

    losses: float (B,). norms: float32 (B,), of the encoded gradients. counts: bool (B,), included and in range.
    shares: float32 (B,), the contribution divided by its bound, for the group of layers where that is largest.
    leaves: float32 (B, L), the largest absolute gradient value in each leaf; 0 for leaves that are not trained.
    signal: float32 scalar, norm of the summed contributions. bound: float32 scalar, largest norm of one contribution.
    size: int, the number of coordinates that get noise. reached: int, the number of other rows in which a bit changed
        when the floats of row 0 were NaN; None without floats or other rows.
    """

    losses: jax.Array
    norms: jax.Array
    counts: jax.Array
    shares: jax.Array
    leaves: jax.Array
    signal: jax.Array
    bound: jax.Array
    size: int
    reached: int | None


def measure_row_gradients(
    loss: Callable, mechanism: Mechanism, params: Tree, flags: Tree, examples: Tree, included: np.ndarray
) -> BatchDiagnostics:
    """Measures the gradients of the rows in one batch. loss: (params, example) -> number. flags: bools like the
    parameters, True where trained. examples: arrays with the B examples on axis 0. included: bool (B,)."""
    trained = sum(p.size for p, flag in zip(jax.tree.leaves(params), jax.tree.leaves(flags), strict=True) if flag)
    at_once = max(2, MICROBATCH_NUMBERS // max(1, trained))  # at least 2, because a single row cannot mix with others

    @jax.jit
    def run(params, state, rows):
        contributions = functools.partial(_contribution_norms, mechanism, state)
        bounds, some = _group_bounds(mechanism, state, contributions, params)

        def microbatch(ordered, rows):
            examples, included = rows
            losses, grads = jax.vmap(value_and_gradient(loss), (None, 0))(ordered(params), examples)
            sums, norms = sum_contributions(mechanism, grads, state, included)
            shares = jax.vmap(contributions)(grads) / jnp.where(some == 0, jnp.inf, some)[None]
            sizes = jax.vmap(lambda grad: _largest_of_leaves(grad, flags))(grads)
            counts = included & norms_in_range(norms)
            of_each = losses, jax.vmap(optax.tree.norm)(norms), counts, jnp.max(shares, axis=1, initial=0), sizes
            return sums[0], of_each

        total, of_each = sum_over_microbatches(microbatch, rows, at_once)
        return as_pair(total).high, of_each, optax.tree.norm(bounds)

    state = jax.jit(mechanism.init)(params)
    total, of_each, bound = run(params, state, (examples, included))
    reached, floats = None, [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(examples)]
    if len(included) > 1 and any(floats):
        of_hostile = run(params, state, (jax.tree.map(_first_is_nan, examples), included))[1]
        others = [(np.asarray(one)[1:], np.asarray(other)[1:]) for one, other in zip(of_each, of_hostile, strict=True)]
        same = [[one.tobytes() == other.tobytes() for one, other in zip(*pair, strict=True)] for pair in others]
        reached = len(included) - 1 - int(np.all(same, axis=0).sum())
    size = sum(leaf.size for leaf in jax.tree.leaves(total))
    return BatchDiagnostics(*of_each, signal=optax.tree.norm(total), bound=bound, size=size, reached=reached)


def _first_is_nan(leaf: jax.Array) -> jax.Array:
    return leaf.at[0].set(jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _group_bounds(mechanism: Mechanism, state: Tree, norms: Callable, params: Tree) -> tuple[jax.Array, jax.Array]:
    """The bound of each group of layers, float32 (G,), and a copy with 0 where all examples contribute equally."""
    largest = jnp.stack(jax.tree.leaves(mechanism.bound(state)))
    least = norms(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    return largest, jnp.where(least < AT_THE_BOUND * largest, largest, 0)


def _contribution_norms(mechanism: Mechanism, state: Tree, grad: Tree) -> jax.Array:
    """The norms of one example's contributions to the G groups, float32 (G,)."""
    _, norms, (factors, *_) = mechanism.contribute(grad, state)
    return jnp.abs(jnp.stack(jax.tree.leaves(norms)) * jnp.stack(jax.tree.leaves(factors)))


def _largest_of_leaves(grad: Tree, flags: Tree) -> jax.Array:
    """The largest absolute value in each leaf, float32 (L,); 0 for leaves that are not trained."""
    leaves = zip(jax.tree.leaves(grad), jax.tree.leaves(flags), strict=True)
    return jnp.stack([jnp.float32(jnp.max(jnp.abs(g), initial=0) if flag else 0) for g, flag in leaves])


def loss_and_leaves_by_row(
    loss: Callable, flags: Tree, examples: Tree
) -> Callable[[Tree, int], tuple[np.ndarray, np.ndarray]]:
    """Returns fn(params, row) -> (loss, leaves). row: int, an index into `examples`. loss: float64 scalar. leaves:
    float64 (L,), as in `BatchDiagnostics`."""

    @jax.jit
    def alone(params, example):
        value, grad = value_and_gradient(loss)(params, example)
        return value, _largest_of_leaves(grad, flags)

    def of_row(params, row):
        value, leaves = alone(params, jax.tree.map(lambda leaf: leaf[row], examples))
        return np.asarray(value, np.float64), np.asarray(leaves, np.float64)

    return of_row


def find_mixed_rows(measured: BatchDiagnostics, params: Tree, alone: Callable, rows: np.ndarray) -> Finding:
    """Checks that each row has the same loss and gradient in a batch and alone. rows: int (R,). alone: from
    `loss_and_leaves_by_row`."""
    low = any(map(is_low_precision, jax.tree.leaves(params))) or is_low_precision(measured.losses)
    tolerance, differ = LOW_TOLERANCE if low else TOLERANCE, 0
    for row in rows:
        value, leaves = alone(params, row)
        found = np.asarray(measured.leaves[row], np.float64)
        scale = tolerance * np.abs(leaves[np.isfinite(leaves)]).max(initial=0)
        same = np.allclose(found, leaves, rtol=0, atol=scale + TINY, equal_nan=True)
        near = np.allclose(float(measured.losses[row]), value, rtol=tolerance, atol=TINY, equal_nan=True)
        differ += not (same and near)
    numbers = {"compared": len(rows), "different": differ}
    if differ:
        words = f"{differ} of {len(rows)} rows have another loss or gradient in the batch than alone: the loss mixes "
        return Finding("mixing", "error", words + "examples, which epsilon does not cover", numbers)
    return Finding("mixing", "ok", f"{len(rows)} rows have the same loss and gradient in the batch and alone", numbers)


def find_spreading_nan(measured: BatchDiagnostics, closed: core.ClosedJaxpr) -> Finding:
    """Checks that NaN in one row does not spread to others under `jax.vmap`, and that the loss has no functions whose
    rounding in one row depends on other rows. closed: the jaxpr of the loss."""
    together = sorted({each.primitive.name for each in walk_equations(closed) if loops_until_all_converge(each)})
    numbers = {"reached": measured.reached or 0, "iterating": len(together)}
    if measured.reached:
        what = f"a row of NaN changes {measured.reached} other rows"
    elif together:
        what = f"a row changes the rounding of others: JAX computes {', '.join(together)} until all rows have converged"
    else:
        return Finding("hostile rows", "ok", "a row of NaN changes no other row", numbers)
    words = (
        f"under jax.vmap on this device, {what}. private_updates keeps these rows apart, but gradients of your own "
        "jax.vmap(jax.grad(loss)) may exceed the bound: do not give them to mechanism.update"
    )
    return Finding("hostile rows", "warning", words, numbers)


def find_zero_gradients(
    measured: BatchDiagnostics, params: Tree, flags: Tree, alone: Callable, rows: np.ndarray
) -> Finding:
    """Finds trained parameters whose gradient is zero for every example, here or also near these parameters.

    flags: bools like the parameters. alone: from `loss_and_leaves_by_row`. rows: int (R,), the rows to compute again.
    """
    if not np.asarray(measured.counts).any():
        return Finding("zero gradients", "note", "no row has a usable gradient")
    sizes = np.asarray(measured.leaves)[np.asarray(measured.counts)].max(axis=0)
    dead = np.asarray(jax.tree.leaves(flags)) & (sizes == 0)
    if not dead.any():
        return Finding("zero gradients", "ok", "every trained parameter has a gradient", {"parameters": 0})
    real = jax.tree.map(lambda leaf, flag: leaf if flag else jnp.zeros(leaf.shape), params, flags)
    moves = optax.tree.random_like(jax.random.key(0), real)
    near = jax.tree.map(lambda leaf, move, flag: leaf + move if flag else leaf, params, moves, flags)
    dead_near = dead & (np.max([alone(near, row)[1] for row in rows], axis=0) == 0)
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    words = "have no gradient in any row, but get noise"
    numbers = {"parameters": int(dead.sum()), "also_near": int(dead_near.sum())}
    shown = dead_near if dead_near.any() else dead
    named = list_first_few([path for path, is_dead in zip(paths, shown, strict=True) if is_dead])
    if dead_near.any():
        return Finding("zero gradients", "warning", f"{named} {words}: freeze them with coordinates.trainable", numbers)
    return Finding("zero gradients", "note", f"{named} {words}; at other parameters they have one", numbers)


def nonfinite_rows(rows: Tree) -> np.ndarray:
    """Which rows hold NaN or infinity, bool (B,). rows: arrays with the B rows on axis 0."""
    found = np.zeros(batch_size(rows), bool)
    for leaf in jax.tree.leaves(rows):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            found |= ~np.isfinite(np.asarray(leaf)).all(tuple(range(1, leaf.ndim)))
    return found


def find_nonfinite_rows(measured: BatchDiagnostics, included: np.ndarray, holes: np.ndarray) -> Finding:
    """Finds rows that contribute zero because a loss or a gradient is not finite or too large, and says whether the
    data or the loss caused it. holes: bool (B,), the rows that hold NaN or infinity."""
    bad_rows = included & ~np.isfinite(np.asarray(measured.norms))
    losses, norms = np.asarray(measured.losses, np.float64)[included], np.asarray(measured.norms)[included]
    bad_losses, bad_norms = int((~np.isfinite(losses)).sum()), int((~np.isfinite(norms)).sum())
    huge, rows = int((np.isfinite(norms) & (norms > LARGEST)).sum()), int(included.sum())
    numbers = {"rows": rows, "losses": bad_losses, "gradients": bad_norms, "huge": huge}
    if bad_losses or bad_norms or huge:
        words = (
            f"of {rows} rows, {bad_losses} have a loss and {bad_norms} a gradient that is not finite, "
            f"and {huge} a norm above 2^63; such gradients and norms contribute zero"
        )
        ill, sound = int((bad_rows & holes).sum()), int((bad_rows & ~holes).sum())
        words += f". {ill} of these rows hold NaN or infinity: {MISSING_VALUES}" * (ill > 0)
        words += f". The data of {sound} of these rows are finite: {MADE_BY_LOSS}" * (sound > 0)
        return Finding("finite", "error" if bad_norms + huge == rows else "warning", words, numbers)
    return Finding("finite", "ok", f"all {rows} rows have finite losses and gradients", numbers)


def find_clipped_rows(measured: BatchDiagnostics) -> Finding:
    """Reports the number of clipped examples and the quantiles of the norms."""
    counts, bound = np.asarray(measured.counts), float(measured.bound)
    norms, shares = np.asarray(measured.norms)[counts], np.asarray(measured.shares)[counts]
    if not len(norms):
        return Finding("clipping", "note", "no row has a usable gradient")
    low, median, high = (float(q) for q in np.quantile(norms, (0.1, 0.5, 0.9)))
    clipped = float((shares >= AT_THE_BOUND).mean())
    numbers = {"clipped": clipped, "bound": bound, "q10": low, "median": median, "q90": high}
    words = f"{clipped:.0%} of {len(norms)} rows reach the bound {bound:.3g}; norms: 10% below {low:.3g}"
    words += f", 50% below {median:.3g}, 90% below {high:.3g}"
    if shares.max() < 0.5:
        return Finding("clipping", "warning", f"{words}: a lower clip norm has less noise", numbers)
    return Finding("clipping", "ok", words, numbers)


def find_noise_to_signal(measured: BatchDiagnostics, mechanism: Mechanism, steps: int | None) -> Finding:
    """Compares the norm of the step-0 noise with that of the mean contribution. steps: number of steps, if known."""
    if not np.asarray(measured.counts).any():
        return Finding("noise", "note", "no row has a usable gradient")
    multiplier, divisor = float(values_over(mechanism.noise_multiplier, 1)[0]), float(mechanism.sampling.divisor)
    loudness = multiplier * float(measured.bound) * math.sqrt(measured.size) / divisor
    signal = float(measured.signal) / divisor
    numbers = {"noise": loudness, "signal": signal, "coordinates": measured.size}
    words = f"noise of norm {loudness:.3g} on {measured.size} coordinates, and a signal of norm {signal:.3g}"
    if loudness > LOUD * signal:
        words += ": larger batches, fewer trained parameters or more steps with less noise each help"
        return Finding("noise", "warning", words, numbers)
    if loudness > signal:
        ratio, least = loudness / signal, "by the square root of their number"
        if steps is not None:
            least = f"to about {ratio / math.sqrt(steps):.2g} times a steady signal over {steps} steps"
        words += f": it is {ratio:.2g} times the signal, which is usual below {LOUD:g} times, because the noise of "
        words += f"different steps is independent and averages out, {least}"
    return Finding("noise", "ok", words, numbers)


REPETITIONS = 3


class StepOfPureNoise(NamedTuple):
    """What one step of pure noise returned and took.

    unreleased_updates: like the parameters. They are the noise of a run, so never show them.
    compile_seconds: compilation time. seconds: median time of a few runs. temporary, arguments: bytes, or None.
    """

    unreleased_updates: Tree
    compile_seconds: float
    seconds: float
    temporary: int | None
    arguments: int | None


@jax.disable_jit(False)  # without jit, there is no program to measure
def run_empty_step(loss: Callable, optimizer: Mechanism, params: Tree, batch: Batch) -> StepOfPureNoise:
    """Compiles and runs the private step on a batch that includes no row."""
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
    return StepOfPureNoise(updates, compile_seconds, float(np.median(seconds)), *sizes)


def find_duration(step: StepOfPureNoise, steps: int | None) -> Finding:
    numbers = {"compile_seconds": step.compile_seconds, "seconds": step.seconds}
    words = f"compiling takes {step.compile_seconds:.2g} s, and a step {1e3 * step.seconds:.3g} ms"
    if steps is None:
        return Finding("time", "ok", words, numbers)
    whole = step.compile_seconds + steps * step.seconds
    minutes = f"{whole:.3g} s" if whole < 120 else f"{whole / 60:.3g} min"
    return Finding("time", "ok", f"{words}: {minutes} for {steps} steps", numbers | {"run_seconds": whole})


def find_step_memory(step: StepOfPureNoise) -> Finding:
    if step.temporary is None or step.arguments is None:
        return Finding("memory", "note", "the backend does not say how much memory a step takes")
    numbers = {"temporary_bytes": step.temporary, "argument_bytes": step.arguments}
    words = f"a step takes {step.temporary / 2**20:.3g} MiB beside {step.arguments / 2**20:.3g} MiB of arguments"
    return Finding("memory", "ok", words, numbers)


def find_low_precision_parameters(step: StepOfPureNoise, params: Tree, flags: Tree, losses: jax.Array) -> Finding:
    """Finds low-precision trained parameters, and the share of them that a step of pure noise does not change.

    flags: bools like the parameters, True where trained.
    """
    leaves, updates = jax.tree.leaves(params), jax.tree.leaves(step.unreleased_updates)
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    low = [n for n, flag in enumerate(jax.tree.leaves(flags)) if flag and is_low_precision(leaves[n])]
    if not low:
        if is_low_precision(losses):
            words = f"losses are {losses.dtype}: sum and average them in float32 in the loss"
            return Finding("precision", "note", words)
        return Finding("precision", "ok", "trained parameters and losses have at least 32 bits", {"parameters": 0})
    moved = [optax.apply_updates(jnp.asarray(leaves[n]), updates[n]) != leaves[n] for n in low]
    meant = sum(int(jnp.sum(updates[n] != 0)) for n in low)
    lost = 1 - sum(int(jnp.sum(m)) for m in moved) / meant if meant else 0.0
    words = list_first_few([f"{paths[n]} ({leaves[n].dtype})" for n in low])
    words += f": {lost:.0%} of the updates of a first step of pure noise are below the parameter's spacing, and lost"
    if lost > 0.1:
        return Finding("precision", "warning", f"{words}: keep float32 parameters, cast in the loss", {"lost": lost})
    return Finding("precision", "note", words, {"lost": lost})
