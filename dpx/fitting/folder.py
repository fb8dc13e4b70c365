"""The folder of a run: what the run is, how far it may have gone, its evaluations, and its last two checkpoints.

One program at a time holds the folder, by a lock that the operating system frees however the program ends. If several
processes make one run, process 0 holds the lock and writes the small files, and all processes write the checkpoints.
Only the owner can read these files: orbax sets modes according to the umask, but the folder itself is closed to others.

Proof that no step is released twice, that is, with the same noise on different sums. Before a step is made, the number
`reach` in run.json is at least that step. A killed program leaves a checkpoint of a step s <= reach, and the next
program starts from it. If it rounds sums like every program that may have made a step after s, it repeats their steps
bit for bit, because parameters, batches and noise are the same. This holds if its facts are those in run.json and s is
at least `moved`, the value of `reach` when those facts last changed. Otherwise, it skips all steps up to `reach`: they
count as made but change no parameters, and their batches and noise are never used again.

Proof that the cost of the whole run covers a skip. The run continues with step r + 1 for r = reach, on the parameters
of step s. Apart from repetitions with the same bits, each step was made at most once, with its own batch and noise. The
parameters of step t are a function of earlier releases: of 1 .. t - 1 before the skip, and of 1 .. s for the first t >
r. So this is one run that chooses its functions adaptively, which composition allows, and that does not show all of its
releases. Settings and libraries may change too. Then a step t > r computes another function of the same data, perhaps
with other random values in its loss, items or projection. That is allowed, because the function of a step may be chosen
freely. But its noise and batch must be those of the run, because the batches of an epoch share one order. Noise and
batches come from dpx's own integer cipher, which no jax setting changes (tests/test_moves.py).

A skip requires a state that is a function of releases, and noise that is independent between steps. So error feedback,
correlated noise, and projections whose draw enters the cost are refused. Such projections are numbered by the steps
that trained, so a skip would draw them twice.
"""

import json
import logging
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
from filelock import FileLock

from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import event_of_release
from dpx.fitting import processes
from dpx.fitting.facts import (
    KERNELS,
    MEMORY,
    PROGRAM,
    RECORD,
    SOME_EXAMPLES,
    VERSION,
    autotunes_kernels,
    bytes_of,
    differences_in_words,
    facts_identifying_run,
    is_changeable_fact,
    is_descriptive_fact,
)
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.ledgers.files import acquire_lock, fsync_folder, make_folder, read_json, replace_file
from dpx.schedules import values_over
from dpx.states.record import ReleaseState, fingerprint, set_run_plan
from dpx.values import Tree, leaf_path, map_nodes_of_type, number_for_json, require_path, warn_user
from dpx.xla.place import current_place

SENSITIVE = """This folder is as sensitive as the training data. history.json holds losses of the training data. The
checkpoints hold the whole optimizer state, whose `unreleased_*` fields are functions of the training data that were
never released. No privacy guarantee covers them. Share the parameters, or dpx.publishable_state(state), instead.
"""
KEPT = 2  # how many checkpoints are kept
UNFINISHED = "*.orbax-checkpoint-tmp*"  # unfinished checkpoints that a killed program left


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """The contents of run.json. facts: what identifies the run. planned: the most steps that any program planned.
    reach: the last step that may have been made. moved: the last step that may have been made with other facts. mark: a
    random name of the run for a ledger. paid: the number of steps charged to a ledger. ended: the step after which the
    run ended and a ledger returned the cost of the remaining steps, or None. measured: the names of the private metrics
    that may have been released. looks: the most evaluations planned for these metrics."""

    facts: dict[str, Any] = field(default_factory=dict)
    planned: int = 0
    reach: int = 0
    moved: int = 0
    mark: str = ""
    paid: int = 0
    ended: int | None = None
    measured: list[str] = field(default_factory=list)
    looks: int = 0


class Folder:
    """The folder of one run, locked by this program until `close`.

    known: what run.json holds. history.json: the evaluations. A checkpoint is named by its step, created atomically.

    on_other_devices: whether the run may continue where sums are rounded differently. Raises ValueError if the folder
        holds another run, naming the facts that differ, or if another program holds it; ImportError without orbax.
    """

    def __init__(self, path: str | os.PathLike, facts: dict[str, Any], run: RunPlan, on_other_devices: bool):
        self.path = require_path("checkpoints", path).absolute()
        self._file, self._run, self._on_other_devices = self.path / "run.json", run, on_other_devices
        self._lock: FileLock | None = None  # process 0 holds it
        with processes.raising_together():
            self._orbax = _require_orbax()
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._files = self._orbax.Checkpointer(self._orbax.CompositeCheckpointHandler())
        if autotunes_kernels():  # another program may round differently
            facts |= {KERNELS: processes.from_first_process(lambda: secrets.token_hex(8))}
        try:
            self.known = RunFile(**processes.from_first_process(lambda: self._lock_folder(facts)))
            with processes.raising_together():
                if not (self.path / "lock").exists():
                    raise ValueError(f"checkpoints must be one folder that all processes share, but {self.path} is not")
            self._changed = self._changed_facts(facts)
        except BaseException:
            self.close()
            raise
        self._facts, self.memory, self._reached = facts, facts.get(MEMORY), self.known.reach
        self._last: int | None = None  # the step of the checkpoint that this program stored or read last
        self.continued = False  # whether there was a checkpoint

    def _lock_folder(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Locks the folder, creating it if needed, and returns its run.json, old or new. Called only in process 0."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"checkpoints must be a directory, got the file {self.path}")
        if not self._file.is_file():
            names = sorted(path.name for path in self.path.iterdir()) if self.path.exists() else []
            if others := [name for name in names if name not in ("lock", "SENSITIVE") and not name.endswith(".part")]:
                raise ValueError(f"checkpoints must be a new folder or one from fit, but {self.path} holds {others}")
            make_folder(self.path)
        self._lock = acquire_lock(self.path)
        if self._file.is_file():
            stored = read_json(self._file)
            return stored if "facts" in stored else {}  # of a version that kept no record, which is refused
        return {"facts": facts, "mark": secrets.token_hex(8)}

    def _changed_facts(self, facts: dict[str, Any]) -> list[str]:
        """Returns the names of the facts that have changed. Raises ValueError if one of them must not change."""
        stored = self.known.facts
        if stored.get(RECORD) != facts[RECORD]:
            raise ValueError(
                f"checkpoints must be a new folder or one of dpx {facts[VERSION]}, but {self.path} holds a run of dpx "
                f"{stored.get(VERSION, 'of an unknown version')}, whose states record their releases differently. "
                "Finish that run with its own version, or begin again in a new folder with a new key"
            )
        differ = [name for name in stored | facts if stored.get(name) != facts.get(name)]
        names = [name for name in differ if name != KERNELS and not is_descriptive_fact(name)]
        if MEMORY in stored and [name for name in names if is_changeable_fact(name)] == [MEMORY]:
            facts[MEMORY] = stored[MEMORY]  # a run that keeps its microbatches rounds as before
            names.remove(MEMORY)
            differ.remove(MEMORY)
        of_keys = [name for name in names if name.startswith("key")]
        if of_keys:  # another key changes these two as well, so do not list them
            differ = [name for name in differ if name not in (PROGRAM, SOME_EXAMPLES)]
        if names and not (self._on_other_devices and all(map(is_changeable_fact, names))):
            advice = "To continue this run, pass what it was made with"
            if of_keys:
                advice = "To continue it, make its key again: dpx.secret_key(seed), with the seed of its first program"
            elif all(map(is_changeable_fact, names)):
                advice += ", or on_other_devices=True, which skips the steps that may have been taken already"
            listing = differences_in_words(differ, stored, facts)
            raise ValueError(
                f"checkpoints must be a new folder or one of the same run, but {self.path} holds another one: "
                f"{listing}. {advice}; for another run, take another folder and another key"
            )
        return [name for name in differ if not is_descriptive_fact(name)]

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        """Returns the last checkpoint and the history up to it. If there is none, stores and returns `like` as step 0.

        If the devices changed, skips the steps that may have been made. The plan becomes the longest so far. Step 0 is
        stored because a restart from other initial parameters would repeat the run's noise.
        """
        last, reach = self._last_step(), self.known.reach
        if last is None and reach:
            raise ValueError(
                f"{self.path} holds no checkpoint, but its run may have taken steps up to {reach}: starting again "
                "would repeat the noise of the run. Take another folder and another key"
            )
        skips = reach > (last or 0) and bool(self._changed or self.known.moved > (last or 0))
        if skips:
            self._require_skippable_steps(like.state, last or 0, reach)
        plan = max(self.known.planned, self._run.plan)
        processes.from_first_process(self._prepare_locked_folder)
        moved = reach if self._changed or skips else self.known.moved
        self._write_run_file(facts=self._facts, moved=moved)
        self._plan = plan
        self.continued = last is not None
        carry, rows = (like, []) if last is None else self._read_checkpoint(last, like)
        carry = set_run_plan(carry, plan)
        if plan:
            rows = [row | {"epsilon": self._run.epsilon(carry.state)} for row in rows]
        if skips:
            _warn_of_skipped(self._changed, carry.steps_made, reach)
            first, carry = carry.steps_made, count_as_skipped(carry, self._run, reach)
            rows = [*rows, {"step": reach, "epsilon": self._run.epsilon(carry.state), "skipped": reach - first}]
        if skips or last is None:
            self.save(carry, rows)
        return carry, rows

    def _require_skippable_steps(self, state: Tree, last: int, reach: int):
        if not self._on_other_devices:
            raise ValueError(
                f"on_other_devices must be True for {self.path}, because steps {last + 1} to {reach} may have been "
                "taken on other devices: it skips them. (On a GPU, another program sums in another order, unless "
                "XLA_FLAGS has --xla_gpu_deterministic_ops=true)"
            )
        require_skippable_steps(self._run, state, last, reach)

    def _prepare_locked_folder(self):
        """Only in process 0: closes the folder to others, writes its warning and removes unfinished checkpoints."""
        make_folder(self.path)
        replace_file(self.path / "SENSITIVE", SENSITIVE)
        self._delete_older_checkpoints()

    def _write_run_file(self, **changes: Any):
        before, self.known = self.known, replace(self.known, **changes)

        def replace_run_json():
            if self._file.is_file():
                self._require_unchanged_run_file(before)
            replace_file(self._file, json.dumps(asdict(self.known), indent=2, default=number_for_json) + "\n")

        processes.from_first_process(replace_run_json)

    def _require_unchanged_run_file(self, known: RunFile):
        """Raises ValueError if another program has changed run.json. Called only in process 0.

        The lock prevents such a change, except on some cluster disks, where it works only within one host.
        """
        if RunFile(**read_json(self._file)) != known:
            raise ValueError(
                f"{self.path} must belong to one program at a time, but another one has continued the run: end this one"
            )

    def record_planned_steps(self):
        """Records how many steps are planned, once a ledger has allowed them. A refused call plans and makes none."""
        self._write_run_file(planned=self._plan)

    def record_possible_steps(self, step: int):
        """Records, ahead of time, the last step that may be made before the next checkpoint."""
        self._write_run_file(reach=max(self._reached, step))

    def record_paid_steps(self, steps: int):
        if self.known.paid != steps:
            self._write_run_file(paid=steps)

    def record_metric_release(self, name: str, looks: int):
        """Records a release of a private metric before anybody sees it. looks: number of planned releases."""
        before, most = self.known.measured, self.known.looks
        if name not in before or looks > most:
            self._write_run_file(measured=[*dict.fromkeys([*before, name])], looks=max(most, looks))

    def end(self, step: int) -> int:
        """Ends the run, for all programs. Returns the last step that may have been made."""
        if self.known.ended is None:
            self._write_run_file(ended=max(self.known.reach, step))
        return cast(int, self.known.ended)

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        """Stores a checkpoint, named by the state's step. Returns False if an unfinished step donated the arrays."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(carry)):
            return False  # interrupted in the middle of a step, so keep the last checkpoint
        step = carry.steps_made

        def write_history():
            self._require_unchanged_run_file(self.known)
            replace_file(self.path / "history.json", json.dumps(history) + "\n")

        processes.from_first_process(write_history)
        if self._last != step:
            self._store_checkpoint(step, carry)
            processes.from_first_process(self._delete_older_checkpoints)
        self._last = step
        return True

    def _store_checkpoint(self, step: int, carry: Carry):
        args = self._orbax.args
        whole = args.Composite(default=args.StandardSave(_checkpoint_items(carry)))
        self._files.save(self.path / str(step), args=whole)  # raises if this checkpoint exists

    def _delete_older_checkpoints(self):
        """Deletes all but the last KEPT checkpoints. Called only in process 0."""
        fsync_folder(self.path)
        older = [self.path / str(step) for step in self._checkpoint_steps()[:-KEPT]]
        for path in (*older, *self.path.glob(UNFINISHED)):
            shutil.rmtree(path, ignore_errors=True)

    def _checkpoint_steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.path.iterdir() if path.name.isdigit())

    def _last_step(self) -> int | None:
        """The step of the last checkpoint. Raises ValueError if the processes see different steps."""
        steps = processes.from_every_process(max(self._checkpoint_steps(), default=None))
        if len(set(steps)) > 1:
            raise ValueError(
                f"checkpoints must be one folder that all processes share, but the last ones that they see in "
                f"{self.path} differ: steps {steps}"
            )
        return steps[0]

    def _read_checkpoint(self, step: int, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        """Returns the checkpoint of a step, and the history up to it."""
        carry, history = self._load_checkpoint(step, like), self.path / "history.json"
        if (made := carry.steps_made) != step:
            raise ValueError(f"checkpoint {step} in {self.path} holds a state after {made} steps: rename it back")
        rows = processes.from_first_process(lambda: read_json(history) if history.is_file() else [])
        self._last = step
        return carry, [row for row in rows if row["step"] <= step]

    def _load_checkpoint(self, step: int, like: Carry) -> Carry:
        args, path = self._orbax.args, self.path / str(step)
        abstract = args.StandardRestore(jax.tree.map(self._orbax.utils.to_shape_dtype_struct, _checkpoint_items(like)))
        try:
            tree = self._files.restore(path, args=args.Composite(default=abstract))["default"]
        except Exception as error:
            raise ValueError(
                f"{path} must be a whole checkpoint, but cannot be read ({type(error).__name__}). If a loss of power "
                "or a copy has damaged it, remove only this folder: the run continues at the checkpoint before it, "
                "and repeats the same steps or skips them"
            ) from error
        return Carry(tree["params"], tree["optimizer_state"])

    def __str__(self) -> str:
        saved = f"step {self._last} of {self._run.steps} is saved in {self.path}"
        return f"{saved}, where the same call continues the run, with the key of the same seed"

    def close(self):
        self._files.close()
        if self._lock is not None:
            self._lock.release()


class _NoFolder:
    """Stands in for `Folder` in a run that keeps no checkpoints."""

    path, continued, known = None, False, RunFile()

    def __init__(self, run: RunPlan):
        self._plan, self.memory = run.plan, current_place().device_memory_bytes

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        return set_run_plan(like, self._plan), []

    def __str__(self) -> str:
        return "no step of the run is saved: dpx.fit(..., checkpoints=folder) saves them"

    def _keep_nothing(self, *facts: Any):
        pass

    record_possible_steps = record_planned_steps = record_metric_release = record_paid_steps = close = _keep_nothing

    def end(self, step: int) -> int:
        return step

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        return False


def open_folder(
    folder: str | os.PathLike | None,
    run: RunPlan,
    carry: Carry,
    options: dict[str, Any],
    rhythm: dict[str, Any],
    on_other_devices: bool,
) -> "Folder | _NoFolder":
    """Opens the folder of a run; if `folder` is None, the run keeps no checkpoints.

    rhythm: other settings that must be the same in all processes, so that none waits for the others forever. Raises
        ValueError if the processes differ.
    """
    if folder is None and jax.process_count() == 1:
        return _NoFolder(run)
    facts = facts_identifying_run(run, carry, options)
    if jax.process_count() > 1:
        copies = [bytes_of(leaf) for leaf in jax.tree.leaves(carry.params) if leaf.is_fully_replicated]
        path = None if folder is None else str(Path(folder).expanduser().absolute())
        own = {"params (their fingerprint)": fingerprint(copies), "steps": run.steps, "checkpoints": path}
        own |= {"steps that count if it ends before (its plan)": run.plan}
        processes.require_same_in_processes(facts | own | rhythm | {"on_other_devices": on_other_devices})
    return _NoFolder(run) if folder is None else Folder(folder, facts, run, on_other_devices)


def require_skippable_steps(run: RunPlan, state: Tree, first: int, reach: int):
    """Raises ValueError unless the steps after `first`, up to `reach`, may be skipped and at least one step remains.
    state: the optimizer state of any step."""
    unproved = [event_of_release(loss) for loss in from_event(run.optimizer.event(1)).counts if not loss.fresh]
    private = [p for path, _ in jax.tree_util.tree_leaves_with_path(state) if "unreleased" in (p := leaf_path(path))]
    if run.optimizer.correlated is not None:
        problem = "the mechanism's noise is correlated: later noise has parts of that of skipped steps"
    elif private:
        problem = f"the state is not a function of releases alone: it has {private[0]}"
    elif unproved:
        problem = f"the cost of the mechanism is that of {unproved[0]}, for which skipped steps have no proof"
    elif reach >= run.steps:
        problem = f"no step is left to train, because all {run.steps} may have been taken"
    else:
        return
    raise ValueError(
        f"on_other_devices must be False for this run, whose checkpoint is of step {first}, and which may have taken "
        f"steps up to {reach}: {problem}. Continue it with the devices that it had; or begin a new run at the stored "
        "parameters, with a new key, and compose both with dpx.compose_runs, this one for all steps it may have taken"
    )


def count_as_skipped(carry: Carry, run: RunPlan, reach: int) -> Carry:
    """Returns `carry` with a state that counts the steps up to `reach` and their noise. Nothing else changes."""
    steps = values_over(run.optimizer.noise_multiplier, reach)[carry.steps_made :].astype("float32")

    def count_skipped(record: ReleaseState) -> ReleaseState:
        layout = jax.tree.map(lambda leaf: leaf.sharding, record)
        counted = jax.jit(
            lambda record: jax.lax.scan(lambda kept, sigma: (kept.after_release(sigma), None), record, steps)[0],
            out_shardings=layout,
        )
        return counted(record)

    return carry._replace(state=map_nodes_of_type(count_skipped, carry.state, ReleaseState))


def _warn_of_skipped(changed: list[str], first: int, reach: int):
    others = f"with another value of {', '.join(changed)}" if changed else "where other devices may have been before"
    warn_user(
        f"the run continues {others}. Its steps {first + 1} to {reach} may have been taken before. So they count as "
        "taken, and change no parameters"
    )


def _require_orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax-checkpoint: pip install orbax-checkpoint") from error
    return orbax.checkpoint


def _checkpoint_items(carry: Carry) -> dict[str, Tree]:
    return {"params": carry.params, "optimizer_state": carry.state}
