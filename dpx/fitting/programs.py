"""Which program has a stored run, and which steps each program may have made. Process 0 reads and writes these files.

run.json has the facts of the run, and the name of the program that took it last. program-NAME.json has what one program
planned, the facts by which its sums are rounded, its reach (the last step that it may make), and up to which step it
skipped steps; no other program writes it. A folder STEP is a checkpoint. It appears at once, and nothing replaces it
(`stored.py`).

Several programs may open one folder at the same moment, on several hosts. Each does this, in this order:

1. It makes run.json, which only one of them can; the others compare the facts in it.
2. It takes the run: it replaces run.json by one with its name.
3. It reads the files of all programs, and the last checkpoint, of step s. Without one, it stores its first parameters
   as checkpoint 0, or begins at those that another program has stored just now. If a reach of other rounding is above
   s, or steps after s were skipped, it skips all steps after s up to the largest reach (`moves.py`): it writes that,
   does 5, and stores the checkpoint of the last skipped step.
4. It writes its new reach.
5. It reads run.json, and ends if another program has taken the run.
6. It makes the steps, stores a checkpoint, and continues with 4.

Proof that two programs that make one step, which has one noise, make it with the same bits. Let A and then B take the
run, and let both make step t. A did 5 before B did 2, so B finds A's reach, at least t (A lowers it to the last step
that it made, at most), and the checkpoint a at which A began, or later ones. B did not skip, because it would have
skipped t. So B begins at a stored checkpoint s, a <= s < t, rounds like A, and found no skipped step after s. If s = a,
both have the same parameters. Else who stored s?

* A did, on its way. Then both have the same parameters.
* C did, as the last of skipped steps. If C took the run before A, then A found that they are skipped, and began at s
  or later. If after A, then C found A's reach, and skipped t too. Both contradict a < s < t.
* C did, after it made step s. If C rounds otherwise, these are the same two contradictions, with C's reach. Otherwise,
  both A and C made step s. With the same bits, by induction over the order in which programs take the run, because A
  and C took it before B.

It needs what the disk of a host has, and NFS: only one program can make a file or rename a folder to a new name, and
who has written into a folder and then opens or lists its files finds what others had finished before.
"""

import json
import secrets
from pathlib import Path
from typing import Any

from dpx.fitting import processes
from dpx.fitting.facts import KERNELS, is_of_rounding, times_kernels
from dpx.fitting.files import create, write

HOLDER = "program that has the run (a random name)"  # in run.json, beside the facts


class Programs:
    """The programs of one run, for one of them.

    facts: of the run. plan: int, the steps that this program plans; 0 if it promised to end by a public rule.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], plan: int):
        self.folder, self.file, self.facts = folder, folder / "run.json", facts
        self.name = processes.of_first(lambda: secrets.token_hex(8))
        self.own = {"planned": plan, "reach": 0, "skipped": 0}

    @property
    def rounding(self) -> dict[str, Any]:
        """The facts by which this program rounds. If kernels are chosen by their time, no other one rounds like it."""
        own = {name: fact for name, fact in self.facts.items() if is_of_rounding(name)}
        return own | {KERNELS: self.name} if times_kernels() else own

    def begin(self) -> dict[str, Any]:
        """Makes run.json, unless another program has made it. The facts that it has now. In process 0."""
        create(self.file, self._run())
        return self.stored()

    def stored(self) -> dict[str, Any]:
        """The facts in run.json. In process 0."""
        return {name: fact for name, fact in _read(self.file).items() if name != HOLDER}

    def take(self) -> int:
        """Takes the run from every other program. The most steps that any of them planned."""

        def keep() -> int:
            self._write()  # before the run is taken: a run that was taken has the file of its program
            write(self.file, self._run())
            return max(program["planned"] for program in self._all())

        return processes.of_first(keep)

    def ahead(self, step: int) -> tuple[int, list[str]]:
        """Up to which step all are skipped, if the last checkpoint is that of `step`, and by which facts others round
        otherwise; `step` and no names if none is skipped."""

        def find() -> list[Any]:
            programs = self._all()
            others = [program for program in programs if program["rounding"] != self.rounding]
            if all(p["reach"] <= step for p in others) and all(p["skipped"] <= step for p in programs):
                return [step, []]
            all_names = dict.fromkeys(name for p in (*others, {"rounding": self.rounding}) for name in p["rounding"])
            names = [n for n in all_names if any(p["rounding"].get(n) != self.rounding.get(n) for p in others)]
            return [max(max(program["reach"], program["skipped"]) for program in programs), names]

        reach, names = processes.of_first(find)
        return reach, names

    def furthest(self) -> int | None:
        """The last step that any program may have made. None if no program says so."""
        return processes.of_first(lambda: max((program["reach"] for program in self._all()), default=None))

    def reserve(self, step: int):
        """Before the steps up to `step` are made. Raises ValueError if another program has taken the run."""
        processes.of_first(lambda: self._claim(reach=step))

    def skip(self, step: int):
        """Before a checkpoint is stored that skips all steps up to `step`. Raises ValueError as `reserve` does."""
        processes.of_first(lambda: self._claim(skipped=step))

    def _claim(self, **changes: int):
        self._write(**changes)
        self.require_own()  # after the write: a program that takes the run later finds what is written

    def require_own(self):
        """Raises ValueError if another program has taken the run. In process 0."""
        if _read(self.file)[HOLDER] != self.name:
            raise ValueError(
                f"{self.folder} must belong to one program at a time, but another one has continued the run: end this "
                "one"
            )

    def _all(self) -> list[dict[str, Any]]:
        return [_read(path) for path in self.folder.glob("program-*.json")]

    def _run(self) -> str:
        return json.dumps(self.facts | {HOLDER: self.name}, indent=2) + "\n"

    def _write(self, **changes: int):
        self.own |= changes
        write(self.folder / f"program-{self.name}.json", json.dumps(self.own | {"rounding": self.rounding}) + "\n")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
