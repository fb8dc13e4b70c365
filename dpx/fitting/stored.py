"""The last two checkpoints of a run. Each appears at once, complete, and nothing replaces it.

orbax writes to a folder with a name of this program's own, because its save replaces a checkpoint that another program
has stored in the meantime. Steps that were made from that one would be made again from other parameters, with the same
noise. What is stored is what `orbax.checkpoint.CheckpointManager` would store, and reads.
"""

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from dpx.fitting import processes
from dpx.fitting.files import keep_names
from dpx.trees import Tree

KEPT = 2


class Stored:
    """The checkpoints in a folder, by steps. program: a name that no other program has.

    Raises ImportError without orbax.
    """

    def __init__(self, folder: Path, program: str):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder, self.program, self._orbax = folder, program, require_orbax()
        self._files = self._orbax.Checkpointer(self._orbax.CompositeCheckpointHandler())

    def last(self) -> int | None:
        """The step of the last checkpoint. Raises ValueError if the processes see different ones."""
        steps = processes.everyone(max(self._steps(), default=None))
        if len(set(steps)) > 1:
            raise ValueError(
                f"checkpoints must be one folder that all processes share, but the last checkpoints that they see in "
                f"{self.folder} are of steps {steps}"
            )
        return steps[0]

    def restore(self, step: int, like: Tree) -> Tree:
        args = self._orbax.args
        abstract = args.StandardRestore(jax.tree.map(self._orbax.utils.to_shape_dtype_struct, like))
        try:
            return self._files.restore(self.folder / str(step), args=args.Composite(default=abstract))["default"]
        except Exception as error:
            raise ValueError(
                f"{self.folder / str(step)} must be a whole checkpoint, but cannot be read ({type(error).__name__}). "
                "If a loss of power or a copy has damaged it, remove this folder alone: the run continues at the "
                "checkpoint before it, and repeats the same steps or skips them"
            ) from error

    def save(self, step: int, tree: Tree) -> bool:
        """False, and nothing changes, if another program has stored a checkpoint of the step."""
        saving, args = self.folder / f"saving-{self.program}-{step}", self._orbax.args
        self._files.save(saving, args=args.Composite(default=args.StandardSave(tree)))
        return processes.of_first(lambda: self._publish(saving, self.folder / str(step)))

    def close(self):
        self._files.close()

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _publish(self, saving: Path, checkpoint: Path) -> bool:
        try:
            os.rename(saving, checkpoint)  # fails where there is one, because no folder replaces one that has files
        except OSError:
            if not checkpoint.exists():
                raise
            return False
        keep_names(self.folder)
        if old := self._steps()[:-KEPT]:
            for path in [*(self.folder / str(step) for step in old), *self.folder.glob("removed-*")]:
                shutil.rmtree(path, ignore_errors=True)
            self._clear()
        return True

    def _clear(self):
        """Removes what other programs have not stored, most of which were killed."""
        for saving in self.folder.glob("saving-*"):
            removed = saving.with_name(f"removed-{saving.name}")
            with contextlib.suppress(OSError):
                saving.rename(removed)  # else one that still runs could store half of it
                shutil.rmtree(removed, ignore_errors=True)


def require_orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax-checkpoint: pip install orbax-checkpoint") from error
    return orbax.checkpoint
