"""What a careful colleague would notice before a long run: `dpx.check_setup`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.accounting.checks import require_delta
from dpx.audit.setup import batch_findings, static_findings
from dpx.audit.setup.static_findings import Finding, SetupReport
from dpx.gradients.one_example import adding_note
from dpx.mechanism import Mechanism, require_mechanism
from dpx.mechanism.guards import require_no_nan, require_numbers, trained_mask
from dpx.sampling.batch import Batch, require_batch
from dpx.sampling.data import batch_size
from dpx.values import Tree, described, explain_misuse, require_function, require_whole, warn_user

__all__ = ["Finding", "SetupReport", "check_setup"]

NO_GRADIENT = (
    "{usable} a usable gradient: {each} holds NaN or infinity, or has a norm above 2^63 ({finite} of their losses "
    "are finite). Such examples contribute nothing and cost as much as others{so}. {cause}. This is known from the "
    "private data: do not publish it. (From dpx.check_setup, which looks at more.)"
)


@explain_misuse
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
) -> SetupReport:
    """Reports what a careful colleague would notice before a long run:
    `print(dpx.check_setup(loss, optimizer, params, batch))`.

    It checks the loss (closures, randomness, mixing of rows, parameters without gradient), the batch (clipping,
    noise-to-signal ratio, values that are not finite), and the plan (key, delta, data, privacy, time, memory). It
    compiles three times. Starred lines are computed from raw data or secret noise and are not private, and a clip norm
    chosen from them leaks too. The step that is timed includes no row, so it releases no data and does not affect a
    later run.

    loss: (params, example) -> scalar float loss of one example, which has no batch axis. optimizer: a `dpx.Mechanism`.
    params: a pytree of arrays. batch: a `dpx.Batch` of the data.
    steps, delta: those of the planned run; None takes them from the optimizer's budget.
    data: all examples, in the form that `sampling.take` accepts, if available.
    with_key: whether the loss takes a PRNG key: loss(params, example, key). has_aux: whether it returns (value, aux).
    Raises ValueError if `optimizer` is not a `dpx.Mechanism`, `batch` is not a `dpx.Batch`, `params` is empty, the loss
    does not return one real number, or a number is out of range.

        >>> print(dpx.check_setup(loss, optimizer, params, batch, steps=100, delta=1e-5))
        ok ...
        * computed from raw data or secret noise: do not publish
    """
    batch, steps, delta = _require_args(loss, optimizer, params, batch, steps, delta)
    value = static_findings.example_loss_function(loss, with_key=with_key, has_aux=has_aux)
    params, examples = jax.tree.map(jnp.asarray, (params, batch.examples))
    example = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), examples)
    sampling = optimizer.sampling
    included, rows = static_findings.rows_that_count(batch, sampling)
    public = [
        static_findings.find_batch_not_drawn(batch, sampling),
        static_findings.find_delta_size(delta, sampling),
        static_findings.find_epsilon_of_run(optimizer, steps, delta),
    ]
    public += static_findings.find_truncation_cost(optimizer, steps, delta)
    public += [] if data is None else [static_findings.find_length_mismatch(data, sampling)]
    flags = trained_mask(optimizer, params)
    public += [
        static_findings.find_guessable_key(optimizer.key),
        real := static_findings.find_untrainable_dtypes(params, flags),
    ]
    with adding_note("loss", lambda: example):
        closed = static_findings.trace_or_finding(value, params, example)
    if isinstance(closed, Finding):
        return SetupReport((*public, closed), (rows,))
    public += [
        static_findings.find_closed_over_arrays(closed, example, len(included), sampling.examples),
        static_findings.find_batch_dependence(closed),
        *static_findings.find_lost_averages(closed, params),
    ]
    public += [static_findings.find_constant_keys(loss, params, example, with_key=with_key)]
    if real.severity == "error" or rows.severity == "error":
        return SetupReport(tuple(public), (rows,))  # gradients or a step cannot be computed
    public += [static_findings.find_unused(closed, params, flags), static_findings.find_trained_share(flags, params)]
    with adding_note("loss", lambda: example):
        found = batch_findings.measure_row_gradients(value, optimizer, params, flags, examples, included)
    once = batch_findings.run_empty_step(value, optimizer, params, batch._replace(examples=examples))
    alone = batch_findings.loss_and_leaves_by_row(value, flags, examples)
    some_rows = np.flatnonzero(included)[: batch_findings.COMPARED]
    unreleased = (
        rows,
        batch_findings.find_mixed_rows(found, params, alone, some_rows),
        batch_findings.find_spreading_nan(found, closed),
        batch_findings.find_zero_gradients(found, params, flags, alone, some_rows),
        batch_findings.find_nonfinite_rows(found, included, batch_findings.nonfinite_rows(examples)),
        batch_findings.find_clipped_rows(found),
        batch_findings.find_noise_to_signal(found, optimizer, steps),
        batch_findings.find_low_precision_parameters(once, params, flags, found.losses),
    )
    return SetupReport(
        (*public, batch_findings.find_duration(once, steps), batch_findings.find_step_memory(once)), unreleased
    )


def _require_args(loss, optimizer, params, batch, steps, delta) -> tuple[Batch, int | None, float | None]:
    """Returns the batch, the steps and delta. Raises ValueError for arguments that no finding could describe."""
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
    require_no_nan(params)
    return (
        batch._replace(included=None if batch.included is None else np.asarray(batch.included)),
        None if steps is None else require_whole("steps", steps),
        None if delta is None else require_delta(delta),
    )


def warn_of_loss(optimizer: Mechanism, closed: core.ClosedJaxpr, params: Tree, row: tuple) -> None:
    """Warns about what `check_setup` finds in the equations of a loss, which are at hand when a step is traced.

    closed: the jaxpr of the loss. params: arrays. row: the shapes of one example, and of its key.
    """
    sampling = optimizer.sampling
    for found in (
        static_findings.find_closed_over_arrays(closed, row[0], sampling.usual_rows, sampling.examples),
        static_findings.find_batch_dependence(closed),
        *static_findings.find_lost_averages(closed, params),
        static_findings.find_unused(closed, params, trained_mask(optimizer, params)),
        static_findings.find_constant_keys_in(closed, len(jax.tree.leaves(params))),
    ):
        if found.severity in ("error", "warning"):
            warn_user(f"{found.words}. (From dpx.check_setup, which looks at more.)")


def warn_of_unusable_gradients(rows: int, finite: int, usable: int, some: Tree, *, trained: bool) -> None:
    """Warns that few or none of `rows` examples of a run have a usable gradient, and why. Only the user may see this.

    finite, usable: how many have a finite loss, and a usable gradient. some: arrays of some rows of the data on axis 0.
    trained: whether earlier examples had a usable gradient.
    """
    holes = batch_findings.nonfinite_rows(some)
    if trained and not usable:
        cause = (
            "Earlier ones had one, so the parameters have probably grown too large: lower the learning rate (or, for "
            "float16 parameters, raise Adam's eps: the usual 1e-8 is 0 in float16)"
        )
    elif holes.any() if usable else holes.all():
        which = "Some rows hold" if usable else "Each row that was looked at holds"
        cause = f"{which} NaN or infinity: {batch_findings.MISSING_VALUES}"
    else:
        cause = f"Not all rows hold NaN or infinity: {batch_findings.MADE_BY_LOSS}"
    seen = f"of {rows} examples in the last batches"
    words = (
        {"usable": f"only {usable} {seen} have", "each": "every other one", "so": ""}
        if usable
        else {"usable": f"none {seen} has", "each": "each", "so": ", so these steps released nothing but noise"}
    )
    warn_user(NO_GRADIENT.format(finite=finite, cause=cause, **words))
