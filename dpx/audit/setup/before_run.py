"""One call before a long run."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.accounting.checks import require_delta
from dpx.audit.setup import measured, plan, program
from dpx.audit.setup.report import Finding, Report
from dpx.gradients.rows import noted
from dpx.guards import require_numbers, trained
from dpx.mechanism import Mechanism, require_mechanism
from dpx.sampling.batch import Batch, require_batch
from dpx.trees import Tree, batch_size, described
from dpx.validation import require_function, require_whole


def check_setup(
    loss: Callable,
    optimizer: Mechanism,
    params: Tree,
    batch: Batch,
    *,
    steps: int | None = None,
    data: Any = None,
    delta: float | None = None,
    with_key: bool = False,
    has_aux: bool = False,
) -> Report:
    """What a careful colleague would notice before a long run:
    `print(dpx.check_setup(loss, optimizer, params, batch))`.

    It looks at the loss (closures, randomness, mixing of rows, parameters without gradient), the batch (clipping, noise
    against signal, numbers that are not finite), and the plan (key, delta, data, privacy, time, memory). It compiles
    three times. Starred lines are computed from raw data or secret noise and are not private, and a clip norm chosen
    from them leaks too. No row counts in the step that is timed, so nothing is released, and a later run stays the
    same.

    loss: (params, example) -> float (), of one example without a batch axis. optimizer: a `dpx.Mechanism`.
    params: a pytree of arrays. batch: a `dpx.Batch` of the data.
    steps, delta: of the run; by default from the optimizer's budget.
    data: all examples, as `sampling.take` gets them, if known.
    with_key: the loss takes a PRNG key, loss(params, example, key). has_aux: it returns (value, aux).
    Raises ValueError if `optimizer` is not a `dpx.Mechanism`, `batch` not a `dpx.Batch`, `params` empty, the loss not
    one real number, or a number outside its range.

        >>> print(dpx.check_setup(loss, optimizer, params, batch, steps=100, delta=1e-5))
        ok ...
        * computed from raw data or secret noise: NOT private, for your eyes only
    """
    batch, steps, delta = _require(loss, optimizer, params, batch, steps, delta)
    value = program.of_one_example(loss, with_key=with_key, has_aux=has_aux)
    params, examples = jax.tree.map(jnp.asarray, (params, batch.examples))
    example = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), examples)
    sampling = optimizer.sampling
    included, rows = plan.rows_that_count(batch, sampling)
    public = [plan.drawn(batch, sampling), plan.delta_size(delta, sampling), plan.privacy(optimizer, steps, delta)]
    public += plan.truncation(optimizer, steps, delta)
    public += [] if data is None else [plan.data_length(data, sampling)]
    flags = trained(optimizer, params)
    public += [plan.secret(optimizer.key), real := program.dtypes(params, flags)]
    with noted("loss", lambda: example):
        closed = program.trace(value, params, example)
    if isinstance(closed, Finding):
        return Report((*public, closed), (rows,))
    public += [program.constants(closed, example, len(included), sampling.examples), program.batching(closed)]
    public += [program.constant_keys(loss, params, example, with_key=with_key)]
    if real.severity == "error" or rows.severity == "error":
        return Report(tuple(public), (rows,))  # no gradient, or no step, can be computed
    public += [program.unused(closed, params, flags), plan.frozen(flags, params)]
    with noted("loss", lambda: example):
        found = measured.measure(value, optimizer, params, flags, examples, included)
    once = measured.run_step(value, optimizer, params, batch._replace(examples=examples))
    alone, some_rows = measured.one_row(value, flags, examples), np.flatnonzero(included)[: measured.COMPARED]
    unreleased = (
        rows,
        measured.mixing(found, params, alone, some_rows),
        measured.apart(found, closed),
        measured.without_gradient(found, params, flags, alone, some_rows),
        measured.finite(found, included),
        measured.clipping(found),
        measured.noise(found, optimizer, steps),
        measured.precision(once, params, flags, found.losses),
    )
    return Report((*public, measured.duration(once, steps), measured.memory(once)), unreleased)


def _require(loss, optimizer, params, batch, steps, delta) -> tuple[Batch, int | None, float | None]:
    """The batch, the steps and delta. Raises ValueError for arguments that no finding could describe."""
    require_function("loss", loss)
    require_mechanism(optimizer)
    require_numbers(params)
    if not jax.tree.leaves(params):
        raise ValueError(f"params must hold at least one array, got {described(params)}")
    if batch_size(require_batch(batch).examples) == 0:
        raise ValueError("batch must have at least one row, got 0")
    budget = optimizer.budget
    steps = steps if steps is not None or budget is None else budget.steps
    delta = delta if delta is not None or budget is None else budget.delta
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, batch))):
        raise ValueError("params and batch must be known: call check_setup outside of jit")
    return (
        batch._replace(included=None if batch.included is None else np.asarray(batch.included)),
        None if steps is None else require_whole("steps", steps),
        None if delta is None else require_delta(delta),
    )


def warn_of_loss(optimizer: Mechanism, closed: core.ClosedJaxpr, params: Tree, row: tuple) -> None:
    """Warns of what `check_setup` finds in the equations of a loss, which cost nothing when a step is traced.

    closed: the jaxpr of the loss. params: arrays. row: the shapes of one example, and of its key.
    """
    sampling = optimizer.sampling
    for found in (
        program.constants(closed, row[0], sampling.usual_rows, sampling.examples),
        program.batching(closed),
        program.unused(closed, params, trained(optimizer, params)),
        program.of_program(closed, len(jax.tree.leaves(params))),
    ):
        if found.severity in ("error", "warning"):
            warnings.warn(f"{found.words}. (From dpx.check_setup, which looks at more.)", stacklevel=2)
