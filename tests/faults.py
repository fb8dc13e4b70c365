"""The deliberate faults of tests/faults.txt, which `tests/mutants.py` puts into a copy of the library one at a time.

Add a fault with every new guarantee: the smallest change of the code that breaks it.
"""

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".txt")


class Fault(NamedTuple):
    """old: text that occurs once in `file`, which becomes `new`. tests: pytest's arguments, which some test fails.

    harmful: whether someone's privacy, or the truth of a bill, depends on it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    harmful: bool = True


def read(table: str) -> list[Fault]:
    """The faults of a table, which is written like a diff:

    @ the file of the faults below
    ! the name of a harmful fault, or ? of another one | the tests
    - the old text, a line after another
    + the new text; without such a line, the old lines are dropped, otherwise the text of the line changes
    """
    faults, file = [], ""
    for line in filter(None, table.splitlines()):
        kind, text = line[0], line[2:]
        if kind == "@":
            file = text
        elif kind in "!?":
            name, tests = text.split(" | ")
            faults.append((name, file, [], [], tests, kind == "!"))
        else:
            faults[-1]["-+".index(kind) + 2].append(text)
    return [
        Fault(name, file, "\n".join(old) + ("" if new else "\n"), "\n".join(new), tests, harmful)
        for name, file, old, new, tests, harmful in faults
    ]


FAULTS = read(TABLE.read_text())
