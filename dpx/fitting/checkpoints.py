"""The folder of a run: its facts, its programs, its checkpoints and its history.

Several processes share one folder. Process 0 reads and writes its small files; a checkpoint is the work of all.
Only their owner can read them: orbax gives its files the modes that the umask asks for, but the folder around them is
closed to others.
"""

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax

from dpx.fitting import moves, processes
from dpx.fitting.facts import MEMORY, PROGRAM, RECORD, bytes_of, facts_of, is_of_rounding, is_words
from dpx.fitting.files import SENSITIVE, make_folder, write
from dpx.fitting.programs import Programs
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.fitting.stored import Stored, require_orbax
from dpx.identity import fingerprint
from dpx.states.reading import steps_taken
from dpx.states.record import planned
from dpx.trees import Tree
from dpx.xla.place import here

# The files of a program that was killed before it had made run.json.
BEGUN = re.compile(r"(SENSITIVE|run\.json|program-\w+\.json)(\..*part)?")


class Checkpoints:
    """The folder of one run. run.json: its facts, and the program that has it. program-NAME.json: what each program may
    have made. history.json: its evaluations. The last two checkpoints.

    on_other_devices: whether it may continue where sums are rounded otherwise.
    Raises ValueError for the folder of another run, naming the facts that differ, and ImportError without orbax.
    """

    def __init__(self, folder: str | os.PathLike, facts: dict[str, Any], run: RunPlan, on_other_devices: bool):
        self._run, self._on_other_devices = run, on_other_devices
        self.path = Path(folder).expanduser().absolute()
        with processes.together():
            require_orbax()
        self._programs = Programs(self.path, facts, run.plan)
        self._changed = processes.of_first(self._begin)
        with processes.together():
            if not self._programs.file.is_file():
                raise ValueError(f"checkpoints must be one folder that all processes share, but {self.path} is not")
        self.memory = facts.get(MEMORY)
        self._stored = Stored(self.path, self._programs.name)
        self._last: int | None = None  # the step of the checkpoint that this program stored or read last
        self.continued = False  # whether there was a checkpoint

    def _begin(self) -> list[str]:
        """Makes the folder of a new run. The names of the facts that changed, all of them of its rounding."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"checkpoints must be a directory, got the file {self.path}")
        new = not self._programs.file.is_file()
        if new and self.path.exists():
            if others := sorted(path.name for path in self.path.iterdir() if not BEGUN.fullmatch(path.name)):
                raise ValueError(f"checkpoints must be a new folder or one of fit, but {self.path} holds {others}")
        changed = [] if new else self._require_same(self._programs.stored())
        make_folder(self.path)
        write(self.path / "SENSITIVE", SENSITIVE)
        return self._require_same(self._programs.begin()) if new else changed

    def _require_same(self, stored: dict[str, Any]) -> list[str]:
        facts = self._programs.facts
        if stored.get(RECORD) != facts[RECORD]:
            raise ValueError(
                f"checkpoints must be a new folder or one of this version of dpx, but {self.path} holds a run of "
                "another version, whose states keep another record of their releases. Finish and bill that run with "
                "its own version, or begin again in a new folder with a new key"
            )
        names = [name for name in stored | facts if stored.get(name) != facts.get(name)]
        if all(map(is_words, names)):
            names = []
        if MEMORY in stored and [name for name in names if is_of_rounding(name)] == [MEMORY]:
            facts[MEMORY] = stored[MEMORY]  # with the microbatches that it began with, a run rounds as before
            names.remove(MEMORY)
        if names and not (self._on_other_devices and all(map(is_of_rounding, names))):
            listing = "; ".join(f"{name} was {stored.get(name)}, now {facts.get(name)}" for name in names)
            if PROGRAM in names:
                listing += " (for example another learning rate, or another version of dpx)"
            if any(name.startswith("key") for name in names):
                listing += ". (A key of dpx.secret_key() without a seed cannot be made again: keep the seed)"
            if all(map(is_of_rounding, names)):
                listing += ". (on_other_devices=True continues it, and skips the steps that may have been made already)"
            raise ValueError(
                f"checkpoints must be a new folder or one of the same run, but {self.path} holds another one: {listing}"
            )
        return names

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        """Takes the run. The last checkpoint, and the history before it; `like`, which is stored as step 0, if there is
        none. On other devices, with the steps skipped that may have been made. Its plan is the longest of all programs.

        The first parameters are stored too, because a run that starts again from others would repeat its noise.
        """
        self._found(like)  # what is refused here changes nothing
        plan = self._programs.take()
        step, reach, names = self._found(like)  # again, because others may have gone on until now
        self.continued = step is not None
        carry, rows = self._first(planned(like, plan)) if step is None else self._read(step, like)
        carry = planned(carry, plan)
        if plan:
            rows = [row | {"epsilon": self._run.epsilon(carry.state)} for row in rows]
        if reach > steps_taken(carry.state):
            carry, rows = self._skipped(carry, rows, reach, names)
        return carry, rows

    def _found(self, like: Carry) -> tuple[int | None, int, list[str]]:
        """The step of the last checkpoint; up to which one steps are skipped; and the names of the facts that changed.

        Raises ValueError where it must not be continued.
        """
        furthest, step = self._programs.furthest(), self._stored.last()  # in this order: another may begin the run now
        if step is None and furthest:
            raise ValueError(
                f"{self.path} holds no checkpoint, but its run may have made steps up to {furthest}: to begin again "
                "would repeat the noise of the run. Take another folder and another key"
            )
        if step is not None and self._programs.furthest() is None:
            raise ValueError(
                f"{self.path} holds checkpoint {step}, but no file program-*.json, which would say which steps were "
                "made after it: to make them again could repeat their noise. Take another folder and another key"
            )
        reach, names = self._programs.ahead(step or 0)
        if reach > (step or 0):
            if not self._on_other_devices:
                raise ValueError(
                    f"on_other_devices must be True for {self.path}, because steps {(step or 0) + 1} to {reach} may "
                    "have been made on other devices: it skips them. (On a GPU, another program sums in another order, "
                    "unless XLA_FLAGS has --xla_gpu_deterministic_ops=true)"
                )
            moves.require_skippable(self._run, like.state, step or 0, reach)
        return step, reach, self._changed or names

    def _first(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        processes.of_first(lambda: self._keep([]))
        if not self._stored.save(0, _named(like)):
            return self._read(0, like)  # of a program that has lost the run just now
        self._last = 0
        return like, []

    def _read(self, step: int, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        tree = self._stored.restore(step, _named(like))
        carry = Carry(tree["params"], tree["optimizer_state"])
        if (paid := steps_taken(carry.state)) != step:
            raise ValueError(f"checkpoint {step} in {self.path} holds a state after {paid} steps")
        self._last = step
        return carry, [row for row in processes.of_first(self._history) if row["step"] <= step]

    def _skipped(
        self, carry: Carry, rows: list[dict[str, Any]], reach: int, names: list[str]
    ) -> tuple[Carry, list[dict[str, Any]]]:
        step = steps_taken(carry.state)
        warnings.warn(moves.in_words(names, step, reach), stacklevel=2)
        carry = moves.skipped(carry, self._run, reach)
        rows = [*rows, {"step": reach, "epsilon": self._run.epsilon(carry.state), "skipped": reach - step}]
        self._programs.skip(reach)
        self.save(carry, rows)
        return carry, rows

    def _history(self) -> list[dict[str, Any]]:
        file = self.path / "history.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []

    def reserve(self, step: int):
        """Before the steps after a checkpoint are made: up to which one they may be."""
        self._programs.reserve(step)

    def _keep(self, history: list[dict[str, Any]]):
        self._programs.require_own()
        write(self.path / "history.json", json.dumps(history) + "\n")

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        """A checkpoint of the steps that the state counts. False without one, because a step took the arrays."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(carry)):
            return False  # interrupted in the middle of a step; the last checkpoint stays
        step = steps_taken(carry.state)
        processes.of_first(lambda: self._keep(history))
        if self._last != step and not self._stored.save(step, _named(carry)):
            raise ValueError(
                f"{self.path} must belong to one program at a time, but another one has stored checkpoint {step}: end "
                "this one"
            )
        self._last = step
        return True

    def __str__(self) -> str:
        return f"step {self._last} of {self._run.steps} is saved in {self.path}, where the same call continues the run"

    def close(self):
        self._stored.close()


class _Nowhere:
    """In place of `Checkpoints` for a run that keeps none."""

    path, continued = None, False

    def __init__(self, run: RunPlan):
        self._plan, self.memory = run.plan, here().most_memory

    def restore(self, like: Carry) -> tuple[Carry, list[dict[str, Any]]]:
        return planned(like, self._plan), []

    def __str__(self) -> str:
        return "no step of the run is saved: dpx.fit(..., checkpoints=folder) saves them"

    def reserve(self, step: int):
        pass

    def save(self, carry: Carry, history: list[dict[str, Any]]) -> bool:
        return False

    def close(self):
        pass


def open_folder(
    folder: str | os.PathLike | None,
    run: RunPlan,
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
        return _Nowhere(run)
    facts = facts_of(run, carry, options)
    if jax.process_count() > 1:
        copies = [bytes_of(leaf) for leaf in jax.tree.leaves(carry.params) if leaf.is_fully_replicated]
        path = None if folder is None else str(Path(folder).expanduser().absolute())
        own = {"params (their fingerprint)": fingerprint(copies), "steps": run.steps, "checkpoints": path}
        own |= {"steps that are billed if it ends before (its plan)": run.plan}
        processes.require_same(facts | own | rhythm | {"on_other_devices": on_other_devices})
    return _Nowhere(run) if folder is None else Checkpoints(folder, facts, run, on_other_devices)


def _named(carry: Carry) -> dict[str, Tree]:
    return {"params": carry.params, "optimizer_state": carry.state}
