"""The time of one private training step, compared with a step of the same framework without privacy.

    python -m benchmarks.step --models mlp transformer --batches 64 256
    python -m benchmarks.step --core -1 --models vit_small gpt2_small --batches 16 --name step_gpu    # on a GPU

All rows of a problem take turns: JAX's in one process, torch's in another, both on one CPU core, one step at a time.
A library that is not installed is named in the notes and skipped. Writes benchmarks/results/step.md.
"""

import argparse
import functools
import os
import statistics
import sys
from typing import Any

from benchmarks import report, summary
from benchmarks.problems import ON_A_CPU, PROBLEMS
from benchmarks.timing import CLOCKS, interleaved, pin
from benchmarks.worker import FRAMEWORKS, Worker


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(ON_A_CPU))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--problems", nargs="+", help="MODEL:BATCH, in place of all models and batches")
    parser.add_argument("--rows", nargs="+", help="parts of their names; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none (as on a GPU)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu is fairer on a busy machine")
    parser.add_argument("--budget", type=float, default=16.0, help="GiB; rows expected to need more are skipped")
    parser.add_argument("--name", default="step", help="of the page")
    return parser.parse_args()


def started() -> tuple[dict[str, Worker], list[str]]:
    """The workers of the frameworks that are installed, and a note on every library that is not."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU is shared by the frameworks
    missing = [name for name in ("jax-privacy", "torch", "opacus") if not report.installed(name)]
    workers = {framework: Worker(framework) for framework in FRAMEWORKS if framework not in missing}
    return workers, [f"{name} is not installed: no rows for it." for name in missing]


def heading_of(module: str, said: dict[str, dict[str, Any]], core: int, **facts: Any) -> str:
    """said: framework -> what its worker says of itself."""
    libraries = [library for one in said.values() for library in one["libraries"]]
    devices = [one["device"] for one in said.values()]
    return report.heading(module, libraries, devices=devices, **report.load(core), **facts)


def wanted(name: str, options) -> bool:
    return not options.rows or any(part in name for part in options.rows)


def problem_times(workers: dict[str, Worker], model: str, size: int, options, notes: list[str]):
    """name -> {"framework", "compile", "seconds": median, "times"}; a row that fails becomes a note."""
    found, timers = {}, {}
    for framework, worker in workers.items():
        for name in worker("names", model, size, options.budget):
            if not wanted(name, options):
                continue
            try:
                compiled = worker("make", name, options.clock)
                worker("start", name, options.clock)
            except RuntimeError as error:
                notes.append(f"{model}, {size}: {name} failed: {error}")
                continue
            found[name] = {"framework": framework, "compile": compiled}
            timers[name] = functools.partial(worker, "time", name)
            print(f"    {name}: compiled in {compiled:.1f} s", file=sys.stderr, flush=True)
    for name, times in interleaved(timers, options.rounds).items():
        found[name] |= {"seconds": statistics.median(times), "times": times}
    return found


def main():
    options = arguments()
    pin(options.core)
    workers, notes = started()
    said = {framework: worker("facts") for framework, worker in workers.items()}
    notes += [text for library, text in report.NOTES.items() if report.installed(library)]
    heading = heading_of("benchmarks.step", said, options.core, clock=options.clock)
    results, page = {}, ""
    problems = options.problems or [f"{model}:{size}" for model in options.models for size in options.batches]
    for model, size in (problem.split(":") for problem in problems):
        print(f"{model}, {size}", file=sys.stderr, flush=True)
        results[f"{model}, {size}"] = problem_times(workers, model, int(size), options, notes)
        floors = {framework: s["floor"] for framework, s in said.items()}
        page = report.write(options.name, heading, summary.tables(results, floors), notes=notes)
    for worker in workers.values():
        worker.close()
    print(page)


if __name__ == "__main__":
    main()
