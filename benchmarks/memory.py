"""The memory of one private training step: how far the resident size of a process grows over its first steps.

    python -m benchmarks.memory --models mlp --batches 1024

Every row runs in a process of its own, on the CPU. The step is compiled and its inputs are in memory before the
measurement. The rows are those of `benchmarks.step`. Writes benchmarks/results/memory.md.
"""

import argparse
import os
import sys

from benchmarks import report
from benchmarks.problems import ON_A_CPU
from benchmarks.step import heading_of, started, wanted
from benchmarks.timing import pin
from benchmarks.worker import Worker


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=ON_A_CPU, default=["mlp", "adadpigu_cnn", "end_to_end_cnn", "resnet20"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--rows", nargs="+", help="parts of their names; default: all")
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none")
    parser.add_argument("--budget", type=float, default=16.0, help="GiB; rows expected to need more are skipped")
    parser.add_argument("--name", default="memory", help="of the page")
    return parser.parse_args()


def grown(framework: str, name: str, model: str, size: int, budget: float) -> float:
    worker = Worker(framework)
    worker("names", model, size, budget)
    worker("make", name, "wall")
    mebibytes = worker("memory", name)
    worker.close()
    return mebibytes


def main():
    options = arguments()
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pin(options.core)
    workers, notes = started()
    said = {framework: worker("facts") for framework, worker in workers.items()}
    heading, results, page = heading_of("benchmarks.memory", said, options.core), {}, ""
    for model in options.models:
        for size in options.batches:
            rows = results[f"{model}, {size}"] = {}
            for framework, worker in workers.items():
                for name in worker("names", model, size, options.budget):
                    if not wanted(name, options):
                        continue
                    try:
                        rows[name] = grown(framework, name, model, size, options.budget)
                    except (RuntimeError, EOFError) as error:
                        notes.append(f"{model}, {size}: {name} failed: {error}")
                        continue
                    print(f"{model}, {size}, {name}: {rows[name]:.0f}", file=sys.stderr, flush=True)
            names = dict.fromkeys(name for found in results.values() for name in found)
            columns = [(n, lambda rows, n=n: f"{rows[n]:.0f}" if n in rows else None) for n in names]
            tables = {"Growth of the resident size at its peak, MiB": report.table(results, columns)}
            page = report.write(options.name, heading, tables, notes=notes)
    for worker in workers.values():
        worker.close()
    print(page)


if __name__ == "__main__":
    main()
