"""`python -m tests.release [PART ...]`: all that a maintainer does before a tag; `make release-check`.

A part that this machine cannot do is skipped, with the reason. The exit status is 1 if a part failed. The environments
of other Pythons, and what each part printed, stay in runs/release.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import dpx

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST = ROOT / "tests" / "oldest.txt"


class Part(NamedTuple):
    """name: of the part. command: what it runs; or a function, whose answer says what is wrong, or "". lacks: why it
    cannot run here, or "". settings: of the environment."""

    name: str
    command: Sequence[str] | Callable[[], str]
    lacks: str = ""
    settings: Mapping[str, str] = {}


def find_python(version: str) -> str | None:
    """An interpreter of a version that can make environments: of the path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)]
    for path in filter(None, paths):
        found = subprocess.run([path, "-c", "import ensurepip, sys; print(*sys.version_info[:2], sep='.')"], **QUIET)
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


QUIET: dict = {"capture_output": True, "text": True}


def offline() -> str:
    try:
        socket.create_connection(("docs.jax.dev", 443), timeout=5).close()
    except OSError:
        return "no internet: no other site can be reached"
    return ""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, **QUIET).stdout.strip()


def unfinished() -> str:
    """What stands against a tag of this version: changed files, its entry in the changelog, a tag that exists."""
    if changed := git("status", "--porcelain"):
        return f"these files are not committed:\n{changed}"
    if git("tag", "--list", f"v{dpx.__version__}"):
        return f"v{dpx.__version__} is tagged already: raise the version in dpx/__init__.py"
    entry = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not entry or entry[1] != dpx.__version__ or not re.fullmatch(r"\d{4}-\d\d-\d\d", entry[2]):
        return (
            f"the first entry of CHANGELOG.md must be '## {dpx.__version__} (YYYY-MM-DD)', got {entry and entry[0]!r}"
        )
    return ""


def parts() -> list[Part]:
    names = ("test", "long", "nightly", "docs", "links", "wheel", "mutants")
    found = [Part(name, ["make", name], offline() if name == "links" else "") for name in names]
    for version in PYTHONS:
        python = find_python(version)
        lacks = "" if python else f"python{version} is not installed, on the path or under pyenv"
        for age in ("oldest", "newest"):
            name = f"{version}-{age}"
            without = "numpy 2.0 has no wheels for it" if (version, age) == ("3.14", "oldest") else lacks
            settings = {"PIP_CONSTRAINT": str(OLDEST)} if age == "oldest" else {}
            limits = ["--constraint", str(OLDEST)] if age == "oldest" else []
            quick = ["make", "quick", f"PYTHON={python}", f"VENV={(FOLDER / name).relative_to(ROOT)}"]
            found.append(Part(f"quick-{name}", quick, without, settings))
            found.append(Part(f"wheel-{name}", [str(python), "-m", "tests.wheel", *limits], without))
    return [*found, Part("tag", unfinished)]


def run(part: Part) -> tuple[str, str]:
    """ "passed", "failed" or "skipped", and more words on it."""
    if part.lacks:
        return "skipped", part.lacks
    if callable(part.command):
        wrong = part.command()
        return ("failed", wrong) if wrong else ("passed", "")
    log = FOLDER / f"{part.name}.log"
    with log.open("w") as output:
        ended = subprocess.run(
            part.command, cwd=ROOT, env=os.environ | dict(part.settings), stdout=output, stderr=subprocess.STDOUT
        )
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    where = f"see {log.relative_to(ROOT)}"
    return ("failed", where) if ended.returncode else ("passed", lines[-1].strip() if lines else "")


def main() -> int:
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in known)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"the beginning of a name of: {names}; all without one"
    )
    given = parser.parse_args().parts
    chosen = [part for part in known if not given or part.name.startswith(tuple(given))]
    if not chosen:
        parser.error(f"a part must be the beginning of one of {names}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for part in chosen:
        start = time.monotonic()
        outcome, words = run(part)
        outcomes.append(outcome)
        print(f"{outcome:8} {part.name:20} {time.monotonic() - start:6.0f} s  {words}", flush=True)
    counts = (f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(", ".join(counts))
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
