"""The folder of a run: its facts, its checkpoints and its history.

Several processes share one folder. Process 0 reads and writes its small files; a checkpoint is the work of all.
Only their owner can read them: orbax gives its files the modes that the umask asks for, but the folder around them is
closed to others.
"""

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import jax

from dpx.fitting import moves, processes
from dpx.fitting.facts import PROGRAM, RECORD, bytes_of, facts_of
from dpx.fitting.files import SENSITIVE, make_folder, write
from dpx.fitting.settings import Terms
from dpx.fitting.steps import Carry
from dpx.states.reading import steps_taken
from dpx.states.record import fingerprint
from dpx.trees import Tree


class Checkpoints:
    """The folder of one run. run.json: its facts. plan.json: the most steps that were planned. reach.json: the last
    step that may have been made. moves.json: how often it continued on other devices. history.json: its evaluations.
    The last two checkpoints.

    on_other_devices: whether it may continue where sums are rounded otherwise.
    Raises ValueError for the folder of another run, naming the facts that differ, and ImportError without orbax.
    """

    def __init__(self, folder: str | os.PathLike, facts: dict[str, Any], terms: Terms, on_other_devices: bool):
        self._facts, self._terms, self.path = facts, terms, Path(folder).expanduser().absolute()
        with processes.together():
            orbax = _orbax()
        self._moved = processes.of_first(lambda: self._claim(facts, on_other_devices))
        with processes.together():
            if not (self.path / "run.json").is_file():
                raise ValueError(f"checkpoints must be one folder that all processes share, but {self.path} is not")
        self._reach = moves.Reach(self.path)
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = orbax.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._orbax, self._manager = orbax, orbax.CheckpointManager(self.path, options=options)

    def _claim(self, facts: dict[str, Any], on_other_devices: bool) -> list[str]:
        """Takes a new folder, or one of this run. The names of the facts that changed, which `restore` replaces."""
        moved = self._require_same(facts, on_other_devices)
        make_folder(self.path)
        write(self.path / "SENSITIVE", SENSITIVE)
        if not (self.path / "run.json").is_file():
            moves.Reach.begin(self.path)
        if not moved:
            self._name()
        return moved

    def _name(self):
        write(self.path / "run.json", json.dumps(self._facts, indent=2) + "\n")

    def _require_same(self, facts: dict[str, Any], on_other_devices: bool) -> list[str]:
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise ValueError(f"checkpoints must be a directory, got the file {self.path}")
        if not (self.path / "run.json").is_file():
            names = "SENSITIVE", "reach.json", "run.json"
            known = {*names, *(f"{name}.part" for name in names)}  # of a process that was killed just then
            if others := sorted({path.name for path in self.path.iterdir()} - known):
                raise ValueError(f"checkpoints must be a new folder or one of fit, but {self.path} holds {others}")
            return []
        stored = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        if stored.get(RECORD) != facts[RECORD]:
            raise ValueError(
                f"checkpoints must be a new folder or one of this version of dpx, but {self.path} holds a run of "
                "another version, whose states keep another record of their releases. Finish and bill that run with "
                "its own version, or begin again in a new folder with a new key"
            )
        names = [name for name in stored | facts if stored.get(name) != facts.get(name)]
        if names and not (on_other_devices and set(names) <= set(moves.ROUNDING)):
            listing = "; ".join(f"{name} was {stored.get(name)}, now {facts.get(name)}" for name in names)
            if PROGRAM in names:
                listing += " (for example another learning rate, or another version of dpx)"
            if any(name.startswith("key") for name in names):
                listing += ". (A key of dpx.secret_key() without a seed cannot be made again: keep the seed)"
            if set(names) <= set(moves.ROUNDING):
                listing += ". (on_other_devices=True continues it, and skips the steps that may have been made already)"
            raise ValueError(
                f"checkpoints must be a new folder or one of the same run, but {self.path} holds another one: {listing}"
            )
        return names

    def planned(self, steps: int) -> int:
        """The most steps that a call of `fit` has planned for this run, this one's `steps` included."""

        def kept() -> int:
            file = self.path / "plan.json"
            most = max(steps, json.loads(file.read_text(encoding="utf-8"))["steps"] if file.is_file() else 0)
            write(file, json.dumps({"steps": most}) + "\n")
            return most

        return processes.of_first(kept)

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        """The last checkpoint, and the history before it; `like`, which is saved as step 0, if there is none.

        The first parameters are saved too, because a run that starts again from others would repeat its noise.
        """
        steps, rows = processes.everyone(self._manager.latest_step()), processes.of_first(self._history)
        if len(set(steps)) > 1:
            raise ValueError(
                f"checkpoints must be one folder that all processes share, but the last checkpoints that they see in "
                f"{self.path} are of steps {steps}"
            )
        if (step := steps[0]) is None:
            if rows:
                raise ValueError(
                    f"{self.path} holds a history of {len(rows)} rows, but no checkpoint: to begin again would repeat "
                    "the noise of the run. Take another folder and another key"
                )
            self.save(like, [])
            return self._continued(like, [])
        abstract = jax.tree.map(self._orbax.utils.to_shape_dtype_struct, _named(like))
        tree = self._manager.restore(step, args=self._orbax.args.StandardRestore(abstract))
        carry = Carry(tree["params"], tree["optimizer_state"])
        if (paid := steps_taken(carry.state)) != step:
            raise ValueError(f"checkpoint {step} in {self.path} holds a state after {paid} steps")
        return self._continued(carry, [row for row in rows if row["step"] <= step])

    def _continued(self, carry: Carry, rows: list[dict[str, Any]]) -> tuple[Carry, list[dict[str, Any]]]:
        """On other devices, with the steps skipped that may have been made; the folder then is of these devices."""
        if not self._moved:
            return carry, rows
        moves.require_skippable(self._terms, carry.state, self._reach.steps)
        step, reach = steps_taken(carry.state), self._reach.take_over()
        moves.require_skippable(self._terms, carry.state, reach)  # more, if the other program still ran
        if reach > step:
            warnings.warn(moves.in_words(self._moved, step, reach), stacklevel=2)
            carry = moves.skipped(carry, self._terms, reach)
            rows = [*rows, {"step": reach, "epsilon": self._terms.epsilon(carry.state), "skipped": reach - step}]
            self.save(carry, rows)  # before the name of these devices, with which the steps would be made again
        processes.of_first(self._name)
        return carry, rows

    def _history(self) -> list[dict[str, Any]]:
        file = self.path / "history.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []

    def reserve(self, step: int):
        """Before the steps after a checkpoint are made: up to which one they may be."""
        self._reach.reserve(step)

    def _keep(self, history: list[dict[str, Any]]):
        self._reach.require_own()
        write(self.path / "history.json", json.dumps(history) + "\n")

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        """A checkpoint of the steps that the state counts. False without one, because a step took the arrays."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(carry)):
            return False  # interrupted in the middle of a step; the last checkpoint stays
        step = steps_taken(carry.state)
        processes.of_first(lambda: self._keep(history))
        if self._manager.latest_step() != step:
            self._manager.save(step, args=self._orbax.args.StandardSave(_named(carry)), force=True)
        return True

    def close(self):
        self._manager.close()


class _Nowhere:
    """In place of `Checkpoints` for a run that keeps none."""

    def planned(self, steps: int) -> int:
        return steps

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        return like, []

    def reserve(self, step: int):
        pass

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        return False

    def close(self):
        pass


def open_folder(
    folder: str | os.PathLike | None,
    terms: Terms,
    carry: Carry,
    options: dict[str, Any],
    rhythm: dict[str, Any],
    on_other_devices: bool,
) -> "Checkpoints | _Nowhere":
    """The folder of a run; None keeps no checkpoints.

    rhythm: what else all processes must do alike, else one would wait for the others forever.
    Raises ValueError where the processes differ.
    """
    if folder is None and jax.process_count() == 1:
        return _Nowhere()
    facts = facts_of(terms, carry, options)
    if jax.process_count() > 1:
        copies = [bytes_of(leaf) for leaf in jax.tree.leaves(carry.params) if leaf.is_fully_replicated]
        path = None if folder is None else str(Path(folder).expanduser().absolute())
        run = {"params (their fingerprint)": fingerprint(repr(copies)), "steps": terms.steps, "checkpoints": path}
        processes.require_same(facts | run | rhythm | {"on_other_devices": on_other_devices})
    return _Nowhere() if folder is None else Checkpoints(folder, facts, terms, on_other_devices)


def _named(carry: Carry) -> dict[str, Tree]:
    return {"params": carry.params, "optimizer_state": carry.state}


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax-checkpoint: pip install orbax-checkpoint") from error
    return orbax.checkpoint
