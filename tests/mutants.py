"""Deliberate faults, put into a copy of the library one at a time: which test notices?

    python -m tests.mutants [--list] [--only NAME ...] [--jobs N] [--report FILE]

A fault (tests/faults.txt) replaces one piece of text. The tests that should notice run on the copy until one of them is
red. At the end the tests that were red run without any fault, where they must be green. The exit status is 1 if a
harmful fault survives, or if a fault could not be judged.

Every pytest is a process of its own, forked from a server that has imported jax, because that takes as long as most of
the tests do.
"""

import argparse
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
COPIED = ("dpx", "tests", "examples", "docs", "benchmarks", "pyproject.toml", "README.md")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "dpx-mutants-compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "COLUMNS": "300",
}
LONGEST = 900  # seconds that the tests of one fault may take
PRELOADED = ["jax.numpy", "optax", "dp_accounting.pld", "dp_accounting.rdp", "scipy.stats", "scipy.signal"]
PACKAGES = ("jax", "jaxlib", "optax", "dp-accounting", "numpy", "scipy", "pytest")


class Result(NamedTuple):
    """outcome: "killed", "survived" or "error". by: the red test; said: the end of pytest's output."""

    fault: Fault
    outcome: str
    by: str
    seconds: float
    said: str


def source_of(fault: Fault, root: Path = ROOT) -> str:
    """The source with the fault in it. Raises ValueError unless its old text occurs exactly once in its file."""
    text = (root / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its old text must occur once in {fault.file}, found {text.count(fault.old)}")
    return text.replace(fault.old, fault.new)


def copy_tree(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)


def pytest_in(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status and the output of pytest in a copy; 124 if it took too long."""
    output = folder / "output.txt"
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(str(folder), arguments, str(output)))
    process.start()
    process.join(LONGEST)
    late = process.is_alive()
    process.kill()
    process.join()
    return 124 if late or process.exitcode is None else process.exitcode, output.read_text()


def _run(folder: str, arguments: Sequence[str], output: str) -> None:
    """In the new process, which has imported this module from ROOT: forget that, and run pytest in the copy."""
    import pytest

    for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).resolve() not in (ROOT, Path(folder)))]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(status)


def try_fault(fault: Fault) -> Result:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        try:
            (folder / fault.file).write_text(source_of(fault))
        except ValueError as error:
            return Result(fault, "error", "", 0.0, str(error))
        status, said = pytest_in(folder, ["-x", *shlex.split(fault.tests)])
    outcome, red = {0: "survived", 1: "killed"}.get(status, "error"), red_tests(said)
    if outcome == "killed" and not red:
        outcome = "error"
    return Result(fault, outcome, red[0] if outcome == "killed" else "", time.perf_counter() - start, said[-3000:])


def red_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.+?)(?: - .*)?$", output, re.MULTILINE)


def red_without_fault(results: Sequence[Result]) -> set[str]:
    """Those of the tests which noticed a fault that are red without one, and so notice nothing."""
    tests = sorted({result.by for result in results if result.outcome == "killed"})
    if not tests:
        return set()
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        status, said = pytest_in(Path(name), tests)
    if status not in (0, 1):
        raise RuntimeError(f"the tests cannot run without a fault:\n{said[-3000:]}")
    return set(red_tests(said))


def try_all(faults: Sequence[Fault], jobs: int) -> Iterator[Result]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(try_fault, faults)


def row_of(result: Result) -> str:
    fault, shown = result.fault, f"`{result.by.replace('|', '/')}`" if result.outcome == "killed" else result.outcome
    harmful = "" if fault.harmful else "no"
    return f"| {fault.name} | `{fault.file}` | {harmful} | {shown} | {result.seconds:.0f} |"


def report(results: Sequence[Result], before: str) -> str:
    """The table of all faults: of those that did not run now, the row in the report from before is kept."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
    known |= {result.fault.name: row_of(result) for result in results}
    rows = [known[fault.name] for fault in FAULTS if fault.name in known]
    cells = [row.removesuffix(" |").split(" | ") for row in rows]
    survived, errors = (sum(cell[3] == name for cell in cells) for name in ("survived", "error"))
    minutes = sum(int(cell[4]) for cell in cells) / 60
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"""# Deliberate faults, and the tests that notice them

`python -m tests.mutants --report FILE`, {datetime.date.today()}, python {platform.python_version()}, {versions}.

{len(rows)} faults: {len(rows) - survived - errors} killed, {survived} survived, {errors} errors; {minutes:.0f} minutes.
Every test named below is green without a fault. A row is of the last run of its fault.

| fault | file | harmful | killed by | seconds |
|---|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which deliberate faults survive?")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time")
    parser.add_argument("--report", type=Path, help="write a table here; with --only, into the one that is there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options, start = parsed(arguments), time.perf_counter()
    faults = [f for f in FAULTS if not options.only or any(part in f.name for part in options.only)]
    if options.list:
        for fault in faults:
            print(f"{fault.name:48} {fault.file:36} {fault.tests}")
        return 0
    os.environ.update(ENVIRONMENT)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    results = []
    for result in try_all(faults, options.jobs):
        results.append(result)
        shown = result.by if result.outcome == "killed" else result.said
        print(f"{result.outcome:9} {result.seconds:4.0f} s  {result.fault.name}: {shown}", flush=True)
    spoilt = red_without_fault(results)
    results = [r._replace(outcome="error", said="red without it") if r.by in spoilt else r for r in results]
    wrong = [r for r in results if r.outcome == "error" or (r.outcome == "survived" and r.fault.harmful)]
    for result in wrong:
        print(f"NOT KILLED  {result.fault.name} ({result.outcome}) {result.by}")
    if options.report:
        before = options.report.read_text() if options.report.exists() else ""
        options.report.write_text(report(results, before))
    print(f"{len(results)} faults, {len(wrong)} not killed, {(time.perf_counter() - start) / 60:.1f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
