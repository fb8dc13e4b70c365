"""Texts with their units of privacy: text files, JSON lines, Hugging Face data sets on disk, and what packages ship.

A unit is a document or a user, with one or more texts. A fixed tenth of the units, chosen by a hash of their names, is
for testing. They are public: their loss is shown without noise, and no cost covers them.
"""

import ast
import functools
import hashlib
import importlib
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST_SHARE = 0.1
LEAST = 200  # characters that the documentation of a module must have


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts in the order of their units' names. units: the owner of each text. unit: what an owner is, in words."""

    name: str
    texts: tuple[str, ...]
    units: tuple[str, ...]
    unit: str = "document"

    def __post_init__(self):
        if not self.texts or len(self.texts) != len(self.units):
            raise ValueError(f"{self.name}: needs a unit for each text, got {len(self.texts)} and {len(self.units)}")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all texts and units."""
        words = json.dumps([self.texts, self.units]).encode()
        return hashlib.sha256(words).hexdigest()

    def split(self) -> tuple["Corpus", "Corpus"]:
        """(private, test): no unit is in both, and where a unit goes depends on its name alone."""
        parts = []
        for tested in (False, True):
            kept = [place for place, unit in enumerate(self.units) if is_test(unit) == tested]
            texts, units = ([of[place] for place in kept] for of in (self.texts, self.units))
            parts.append(Corpus(name=self.name, texts=tuple(texts), units=tuple(units), unit=self.unit))
        return parts[0], parts[1]

    def some(self, count: int) -> "Corpus":
        """The texts of `count` units, chosen by the hashes of all names, which are public then."""
        kept = set(sorted(set(self.units), key=lambda unit: hashlib.sha256(unit.encode()).digest())[:count])
        found = [pair for pair in zip(self.texts, self.units, strict=True) if pair[1] in kept]
        texts, units = zip(*found, strict=True)
        return Corpus(name=self.name, texts=texts, units=units, unit=self.unit)


def is_test(unit: str) -> bool:
    number = int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8])
    return number < TEST_SHARE * 2**64


def load(source: str, *, text: str = "text", user: str | None = None) -> Corpus:
    """The corpus called `source`.

    source: "docs", the documentation in the modules of installed packages, a module a unit; a .jsonl file; a folder
        that `datasets.save_to_disk` wrote; or a folder of text files, where a file is a unit.
    text, user: the fields of the text and of its owner. Without `user`, each record is a unit. For a folder of text
        files, a `user` of any name makes each of its first folders a unit.
    Raises FileNotFoundError, and ValueError for records without those fields.
    """
    if source == "docs":
        return installed()
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".jsonl":
        records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        return of_records(path.name, records, text, user)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return of_records(path.name, saved(path), text, user)
    if path.is_dir():
        return of_files(path, users=user is not None)
    raise FileNotFoundError(f"{source} must be 'docs', a .jsonl file, or a folder of texts or of a saved data set")


def of_records(name: str, records: Iterable[Any], text: str, user: str | None) -> Corpus:
    """Of records with named fields. A record without an owner is refused, because it would be a unit with others."""
    found = []
    for number, record in enumerate(records):
        if not isinstance(record.get(text), str):
            raise ValueError(f"{name}: record {number} has no text in the field {text!r}; its fields: {sorted(record)}")
        owner = number if user is None else record.get(user)
        if owner is None or owner == "":
            raise ValueError(f"{name}: record {number} has no owner in the field {user!r}")
        found.append((f"{owner:09d}" if user is None else str(owner), record[text]))
    return _sorted(name, found, "document" if user is None else "user")


def of_files(folder: Path, *, users: bool) -> Corpus:
    """The files that end in .txt or .md, under their paths; or each first folder as one user."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".txt", ".md") and file.is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} has no file that ends in .txt or .md")
    found = []
    for file in files:
        inside = file.relative_to(folder)
        if users and len(inside.parts) == 1:
            raise ValueError(f"{file} must be in the folder of its user")
        found.append(
            (inside.parts[0] if users else inside.as_posix(), file.read_text(encoding="utf-8", errors="replace"))
        )
    return _sorted(folder.name, found, "user" if users else "document")


def saved(path: Path) -> Any:
    """The records of a data set of the package `datasets`; of one with splits, those of "train"."""
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError("to read a saved data set: pip install datasets") from error
    found = library.load_from_disk(str(path))
    return found["train"] if isinstance(found, dict) else found


# ------------------------------------------------------------------ what packages ship


@functools.cache  # because thousands of files are parsed
def installed() -> Corpus:
    """The docstrings of every module of the installed packages: the module is the unit. Tests are left out."""
    return _modules("docs", Path(sysconfig.get_paths()["purelib"]), 2000)


@functools.cache
def standard_library() -> Corpus:
    """The docstrings of Python's own modules: the public texts, on which a small base model is trained."""
    return _modules("the standard library", Path(sysconfig.get_paths()["stdlib"]), 4000)


def _modules(name: str, root: Path, largest: int) -> Corpus:
    """A text of at most `largest` characters for each module."""
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if any("test" in part for part in parts) or "site-packages" in parts:
            continue
        words = "\n\n".join(docstrings(file))[:largest]
        if len(words) >= LEAST:
            found.append(("/".join(parts), words))
    return _sorted(name, found, "module")


def docstrings(file: Path) -> Iterator[str]:
    """Those of a module, its classes and its functions; none of a file that is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escapes
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = ast.get_docstring(node)
            if words:
                yield words


def _sorted(name: str, found: list[tuple[str, str]], unit: str) -> Corpus:
    found = sorted(found, key=lambda one: one[0])  # stable: a user's texts stay in their order
    return Corpus(
        name=name, texts=tuple(words for _, words in found), units=tuple(owner for owner, _ in found), unit=unit
    )
