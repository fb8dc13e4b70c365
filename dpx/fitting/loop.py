"""`fit`: private steps within a budget, with evaluations, checkpoints and a privacy report."""

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from dpx.accounting.checks import Accountant
from dpx.fitting.facts import LAYOUT, LOSS, SOME_EXAMPLES, fingerprint_of_loss, layout_fingerprint
from dpx.fitting.folder import open_folder
from dpx.fitting.processes import raising_together, require_rows_in_every_process
from dpx.fitting.progress import FitResult, Progress, RunMonitor
from dpx.fitting.settings import Payment, RunPlan, checked_run_inputs, require_optax_transforms, require_report_facts
from dpx.fitting.step import Carry, compiled_step, compiled_step_in_chunks, first_carry
from dpx.gradients.clipped_gradients import Norms
from dpx.ledgers import PrivacyLedger
from dpx.mechanism import Mechanism, require_mechanism
from dpx.reports.report import privacy_report
from dpx.statistics.metrics import PrivateMetric
from dpx.values import Tree, explain_misuse, require_bool, require_function, require_whole, warn_user
from dpx.xla.place import tracing_for_place

_TRAINED: dict[int, Path | None] = {}  # the folder of the last run of each key, by its fingerprint
SKIPPED = (
    "{} of the steps are in epsilon, but not in the parameters: the run was interrupted and continued on other "
    "devices, and these steps may have been taken before."
)
ENDED = (
    "this run was ended by a callback after step {}, and its ledger took back the cost of the other steps, so this "
    "call makes none: begin another run with a new key"
)
UNWATCHED = (
    "Nothing measured whether the run learned. An example whose loss or gradient is not finite contributes nothing and "
    "counts in epsilon like all others; how many there are is private. dpx.check_setup shows it to those who may see "
    "the data."
)

VALIDATED = (
    "Epsilon does not cover the examples of `evaluate_private`, whose cost its `epsilon` says. If the run was trained "
    "on some of them, both costs add up for these: a dpx.PrivacyLedger composes them."
)


@explain_misuse
def fit(
    loss: Callable,
    optimizer: Mechanism,
    params: Tree,
    data: Any,
    *,
    # the run
    key: jax.Array | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    delta: float | None = None,
    accountant: Accountant | None = None,
    records: int | None = None,
    public_stop: bool | None = None,
    ledger: PrivacyLedger | None = None,
    words: str | None = None,
    part: str | None = None,
    # what its report says
    name: str | None = None,
    dataset: str | None = None,
    tuning: Literal["public"] | None = None,
    # what is measured
    evaluate: Callable[[Tree], Any] | None = None,
    evaluate_private: PrivateMetric | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callable[[Progress], Any]] = (),
    progress: bool = False,
    # what is saved
    checkpoints: str | os.PathLike | None = None,
    checkpoint_every: int = 100,
    on_other_devices: bool = False,
    # what the loss takes and returns
    loss_at: Callable[[Tree, Tree], Tree] | None = None,
    with_key: bool = False,
    has_aux: bool = False,
    # where and how a step is computed
    sharding: jax.sharding.Sharding | None = None,
    chunk_size: int | None = None,
    microbatch_size: int | None = None,
    norms: Norms = "auto",
    backward_passes: int | None = None,
) -> FitResult:
    """Trains `params` on `data` for a budget's steps; returns a `FitResult`. `dpx.fitting` says how to continue a run.

    loss: (params, example) -> scalar float loss of one example, which has no batch axis.
    optimizer: a mechanism followed by optax transforms, from `dpx.chain`. Each run needs its own key.
    params: a pytree of float arrays, which are copied.
    data: arrays with the examples on axis 0, or a source with `__len__` and either `__getitem__(int)` or, if items are
        random, `random_item(int, rng)`; see `dpx.sampling.Sampling.take`.

    The run:
    key: scalar key that draws the batches. None uses the "sampling" stream of the optimizer's key.
    steps: int, total number of steps in the run. None takes the budget's. Continuing a run with fewer steps still
        costs as much as the longer plan. epochs: float, instead of steps: `sampling.steps(epochs=epochs)`.
    delta, accountant: None takes the budget's. records: the most examples that one person owns, as in `dpx.epsilon`,
        for every epsilon of the run. None takes the budget's, or 1 if there is no budget.
    public_stop: bool. True promises that only public information, such as the time, decides when the run ends: no
        release, no metric of the parameters and no private data. The result's epsilon then covers only the steps that
        the run took. Otherwise, it covers all planned ones. None takes the budget's, or False if there is no budget.
    ledger: a `dpx.PrivacyLedger`, charged for all planned steps before the first one, and only once for a run that
        continues from its `checkpoints`. If a callback ends the run, the ledger refunds part of the cost of the steps
        not taken (`PrivacyLedger.end` says when), and the run cannot be continued. `ledger.epsilon` is for all releases
        of the data, less refunds. The result's epsilon is for this run alone, without refunds. The report has both.
        words: a one-line name of the run in the ledger; None uses `name`. part: if `data` are one part of a public
        partition, the name of that part.

    What its report says:
    name: a one-line name of the run. dataset: a one-line name of the data.
    tuning: "public" if hyperparameters were chosen without any run on the private data. With None, the report says
        that the cost of choosing them is not included. (`dpx.tuning.search` writes the report of its winner. Repeating
        the winner with a new key is another release.)

    What is measured:
    evaluate: (params) -> number or dict of numbers, from PUBLIC data only: epsilon does not cover what it reads.
    evaluate_private: a `dpx.statistics.PrivateMetric`, which releases a noisy metric of private validation data at each
        evaluation. Its cost is for the validation data and is not included in the run's epsilon.
    evaluate_every: number of steps between evaluations. None is about an epoch, with at most 40 evaluations in the run.
        The last step is always evaluated.
    callbacks: functions of a `dpx.fitting.Progress`, called after each evaluation. Returning True ends the run. Without
        a ledger, another call of `fit` with its `checkpoints` continues it. Do not stop a run because of `unreleased`
        values or other private data: epsilon does not cover that decision.
    progress: whether to show a bar, if tqdm is installed.

    What is saved:
    checkpoints: a folder, as SENSITIVE as the data. If it holds this run, the run continues where it stopped. Only one
        program at a time may use it.
    checkpoint_every: number of steps between checkpoints. The run also saves one at the start and after the last
        step, and a run of a single process at a KeyboardInterrupt outside `evaluate` and the callbacks. After any
        exception, the run continues from the last checkpoint and repeats later steps bit for bit.
    on_other_devices: whether a stored run may continue although its sums may now be rounded differently: on other
        devices, processes, backend or machine (even another number of CPUs); with other XLA flags or jax settings, but
        not one that changes dtypes in the step, such as jax_enable_x64; with other versions of numpy, scipy or flax; or
        with another loss, `chunk_size`, `microbatch_size`, `norms` or `backward_passes`. A killed run on a GPU without
        `XLA_FLAGS=--xla_gpu_deterministic_ops=true` needs this too. Steps that may have been made since the last
        checkpoint then count as made but train nothing, because the same noise must not be used twice.

    What the loss takes and returns:
    loss_at: (params, state) -> the parameters that `loss` and `evaluate` see. They must depend only on released values.
        An example is `dpx.coordinates.zero_frozen_params`.
    with_key: whether the loss takes a PRNG key for each example: loss(params, example, key).
    has_aux: whether the loss returns (value, aux).

    Where and how a step is computed:
    sharding: how axis 0 of a batch lies over the devices, such as `NamedSharding(mesh, PartitionSpec("data"))`.
    chunk_size: int, number of examples loaded at once, if batches do not fit in memory. None loads whole batches.
    microbatch_size: int, number of examples computed at once. backward_passes: int, 2 for less memory. None chooses as
        in `dpx.private_updates`. A stored run keeps the memory limit of its first start, from which both are chosen,
        because they affect how sums are rounded.
    norms: how the norms are computed: "auto", "ghost" or "vmap", as in `dpx.private_updates`.

    Raises ValueError for arguments of the wrong type or range, data whose length differs from the sampling's, steps
    beyond the budget, and checkpoints of another run; ImportError for checkpoints without orbax-checkpoint.

        >>> budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=20)
        >>> private = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=dpx.secret_key())
        >>> run = dpx.fit(loss, dpx.chain(private, optax.sgd(0.1)), params, data)
        >>> run.epsilon, run.steps
        (1.99..., 20)
    """
    loss_at = (lambda params, state: params) if loss_at is None else loss_at
    options = {"microbatch_size": microbatch_size, "norms": norms, "with_key": with_key, "has_aux": has_aux}
    options["backward_passes"] = backward_passes
    with raising_together():
        require_rows_in_every_process(sharding)
        require_mechanism(optimizer)
        require_function("loss", loss)
        require_function("loss_at", loss_at, "params", "state")
        given = {"delta": delta, "accountant": accountant, "records": records, "public_stop": public_stop}
        run = RunPlan.with_defaults(optimizer, key=key, steps=steps, epochs=epochs, **given)
        examples = checked_run_inputs(params, data, run)
        said: dict[str, Any] = {"name": name, "dataset": dataset, "tuning": require_report_facts(tuning, name, dataset)}
        words = (name or "a run of dpx.fit") if words is None else words
        payment = Payment(ledger, {"words": words, "unit": examples.unit, "part": part}, run)
        users = {"evaluate": evaluate, "evaluate_private": evaluate_private, "callbacks": callbacks, "loss_at": loss_at}
        watcher = RunMonitor.with_defaults(run, evaluate_every, progress, examples=examples, **users)
        require_whole("checkpoint_every", checkpoint_every)
        require_bool("on_other_devices", on_other_devices)
        carry = first_carry(params, optimizer, sharding)
        require_optax_transforms(carry.state)
        at_once = functools.partial(compiled_step, whole=bool(callbacks))
        build = at_once if chunk_size is None else compiled_step_in_chunks
        step = build(loss, optimizer, loss_at, carry, sharding, options)
        layout = {"devices": getattr(sharding, "num_devices", None), LAYOUT: layout_fingerprint(carry, sharding)}
        rhythm = watcher.settings_shared_by_processes() | {"checkpoint_every": checkpoint_every}
        if jax.process_count() > 1 or checkpoints is not None:
            equations = fingerprint_of_loss(loss, optimizer, loss_at, carry, examples.some_rows, options)
            layout |= {SOME_EXAMPLES: examples.keyed_hash(), LOSS: equations}
    batches = functools.partial(optimizer.sampling.batches, data, run.key, chunk_size=chunk_size, sharding=sharding)
    rounding = {"chunk_size": chunk_size, **layout, **options}
    opened = open_folder(checkpoints, run, carry, rounding, rhythm, on_other_devices)
    with contextlib.closing(opened) as folder, tracing_for_place(memory=folder.memory):
        carry = _train_steps(carry, step, batches, run, watcher, folder, payment, checkpoint_every)
    said |= {"delta": run.delta, "unit": examples.unit, "records": run.records}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta = ")  # `run` has already warned
        report = privacy_report(optimizer, carry.state, **said)
    result = FitResult(
        params=carry.params,
        state=carry.state,
        steps=carry.steps_made,
        epsilon=run.epsilon(carry.state),
        delta=run.delta,
        report=report,
        history=watcher.history,
    )
    caveats = [*report.caveats, *([SKIPPED.format(result.skipped)] if result.skipped else [])]
    seen = () if evaluate_private is None else (VALIDATED,)
    unwatched = () if evaluate is not None or callbacks or seen else (UNWATCHED,)  # never depends on the data
    return result._replace(
        report=dataclasses.replace(report, caveats=(*caveats, *payment.ledger_caveats(), *seen, *unwatched))
    )


def _train_steps(
    carry: Carry,
    step: Callable,
    batches: Callable,
    run: RunPlan,
    watcher: RunMonitor,
    folder: Any,
    payment: Payment,
    checkpoint_every: int,
) -> Carry:
    """Returns the carry after all steps, or after the step where a callback ended the run."""
    carry, history = folder.restore(carry)
    watcher.continue_history(history, folder)
    first = carry.steps_made
    if first > run.steps:
        raise ValueError(f"steps must be at least the {first} that the stored run has taken, got {run.steps}")
    payment.pay(carry, folder)
    folder.record_planned_steps()
    if folder.known.ended is not None:
        payment.end(first, folder)
        if first < run.steps:
            warn_user(ENDED.format(first))
    if first == run.steps or folder.known.ended is not None:
        return carry
    mark, place = int(run.optimizer.noise_key), folder.path and folder.path.resolve()
    _warn_of_reused_key(mark, place, folder.continued)
    folder.record_possible_steps(_next_checkpoint(first, checkpoint_every, run))
    loaded, before, last, due = batches(carry.state, steps=run.steps - first), (), (), False
    consistent = True  # False while a step runs, when an interrupt must not save a checkpoint
    with contextlib.closing(loaded), contextlib.closing(watcher.bar):
        watcher.bar.update(first)
        try:
            for done, batch in enumerate(loaded, first + 1):
                jax.block_until_ready(before)  # otherwise batches would pile up on the device
                watcher.warn_without_gradients(before)
                consistent = False
                carry, unreleased = step(carry, batch)
                _TRAINED[mark] = place  # only now, because a loss that raises makes no step
                before, last = last, unreleased.counts
                due = done == run.steps or done % watcher.every == 0
                ended = due and watcher.add_history_row(done, carry, unreleased)
                consistent = True
                watcher.bar.update()
                finished = ended or done == run.steps
                if finished or done % checkpoint_every == 0:
                    folder.save(carry, watcher.history)
                    folder.record_possible_steps(done if finished else _next_checkpoint(done, checkpoint_every, run))
                if ended:
                    payment.end(done, folder)
                    break
            watcher.warn_without_gradients(before)
            watcher.warn_without_gradients(last, ended=True)
        except BaseException as stop:
            interrupted = isinstance(stop, KeyboardInterrupt)
            if interrupted and consistent and jax.process_count() == 1:  # several processes may be at different steps
                with contextlib.suppress(Exception):  # an interrupted save cannot be repeated, so keep the last one
                    if folder.save(carry, watcher.history):
                        folder.record_possible_steps(carry.steps_made)
            if interrupted or due:  # `evaluate` or a callback may have failed
                stop.add_note(f"dpx: {folder}")
            raise
    return carry


def _next_checkpoint(done: int, every: int, run: RunPlan) -> int:
    """The step after which the next checkpoint is written. Later steps wait for that checkpoint."""
    return min(run.steps, (done // every + 1) * every)


def _warn_of_reused_key(mark: int, place: Path | None, continued: bool):
    """Warns if a run that starts training has the key of an earlier run, unless it continues that run in its folder.

    Data, loss and parameters are not compared, so an identical run gets the warning too.
    """
    if mark in _TRAINED and not (continued and place == _TRAINED[mark]):
        warn_user(
            "the key of this optimizer was used before in this process, in a run that this one does not continue. "
            "Both have the same noise: if anything else differs, such as one example, their difference shows it "
            "without noise. Take a new dpx.secret_key() for every run, or continue the first one in its own folder"
        )
