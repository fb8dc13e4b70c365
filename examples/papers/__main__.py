"""Experiments of the five papers, at their noise and at their true epsilon: `python -m examples.papers`."""

import argparse
import contextlib
import math
import sys
import tempfile
from pathlib import Path

from examples.loop import CACHE
from examples.papers import experiments, page, rows
from examples.papers.experiment import Experiment
from examples.runs import ONLY_AT_THE_END, Runs

RESULTS, RUNS, SEEDS = Path("benchmarks/results/papers"), Path("runs/papers"), 3


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m examples.papers", description=__doc__)
    made.add_argument("names", nargs="*", metavar="NAME", help="without a name, all are listed")
    made.add_argument("--all", action="store_true", help="all of them")
    made.add_argument(
        "--seeds", type=int, default=SEEDS, help="how many, from 0 (default %(default)s); they are public here"
    )
    made.add_argument("--smoke", action="store_true", help="one tiny run of every kind, to try the program")
    made.add_argument("--real", action="store_true", help="the paper's own data, where the default is a stand-in")
    made.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="start no run after them; 0 writes the page of the runs there are",
    )
    made.add_argument("--runs", type=Path, help="folder of the runs (default runs/papers; with --smoke, none is kept)")
    made.add_argument(
        "--results",
        type=Path,
        help=f"folder of the pages (default {RESULTS}; that of the runs, if one is missing or there are fewer seeds)",
    )
    made.add_argument("--data-dir", type=Path)
    made.add_argument("--cache-dir", type=Path, default=CACHE)
    return made


def make(experiment: Experiment, given: argparse.Namespace) -> Path:
    """Makes the runs and the page, which is returned."""
    owner = experiments().get(experiment.same_runs_as, experiment)  # of the runs
    if given.real and experiment.real:
        owner = owner if owner.real == experiment.real else experiment
        experiment, owner = experiment.on_real_data, owner.on_real_data
    every = None if owner.over_epochs else ONLY_AT_THE_END
    places = {"data_dir": given.data_dir, "cache_dir": given.cache_dir}
    runs = Runs((given.runs or RUNS) / owner.name, evaluate_every=every, minutes=given.minutes, **places)
    outcomes = rows.run(experiment, runs, range(given.seeds))
    missing = any(len(one.at_epsilon) < given.seeds for one in outcomes)
    folder = given.results or (runs.folder if missing or given.seeds < SEEDS else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return write(experiment, outcomes, runs, given.seeds, folder)


def smoke(experiment: Experiment, given: argparse.Namespace) -> Path:
    """As `make`, but with tiny data, without trials, and with one seed; the page is thrown away.

    Experiments that differ in their data alone share their runs, if --runs says where.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = Runs((given.runs or folder) / "smoke", data_dir=given.data_dir, cache_dir=folder)
        outcomes = rows.run(experiment, runs, range(1), experiment.smoke)
        return write(experiment, outcomes, runs, 1, folder)


def write(experiment: Experiment, outcomes: list[rows.Outcome], runs: Runs, seeds: int, folder: Path) -> Path:
    plot = f"{experiment.name}.svg" if experiment.over_epochs else None
    if plot:
        page.draw(experiment, outcomes, folder / plot)
    name, real = experiment.name.removesuffix("-real"), " --real" if experiment.name.endswith("-real") else ""
    words = f"examples.papers {name} --seeds {seeds}{real}"
    heading = runs.heading(words, range(seeds))
    file = folder / f"{experiment.name}.md"
    file.write_text(page.page(experiment, outcomes, heading=heading, plot=plot))
    return file


def main(arguments: list[str] | None = None) -> int:
    given, known = parser().parse_args(arguments), experiments()
    names = list(known) if given.all else given.names
    try:
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown experiment {', '.join(unknown)}; known: {', '.join(known)}")
        if given.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {given.seeds}")
        for name in names:
            if given.smoke:
                smoke(known[name], given)
                print(f"{name}: its program works")
            else:
                print(make(known[name], given).read_text())
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in known if not names else ():
        real = known[name].real
        more = f" (--real: {real.get('dataset', 'the length of its runs')})" if real else ""
        print(f"{name:26} {known[name].title}; {known[name].common['dataset']}{more}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
