"""The memory of one private training step: how far the peak resident size of a process grows over its first steps.

    python -m benchmarks.memory --models mlp --batches 1024

Every row runs in its own process, on the CPU. Writes JSON and a Markdown table to benchmarks/results/.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

from benchmarks.step import MODELS, ONE_CORE, RESULTS

ROWS = ("JAX, not private", "dpx auto", "dpx ghost", "dpx vmap", "JAX, by hand", "optax.contrib")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--budget", type=float, default=16.0, help="GiB; rows expected to need more are skipped")
    parser.add_argument("--name", default="memory", help="of the files written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def peak() -> float:
    """MiB; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def one(model: str, size: int, row: str, budget: float) -> float | None:
    """Growth in MiB over three steps. Compilation comes before, and the inputs are there."""
    import jax

    from benchmarks.models import PROBLEMS
    from benchmarks.step import private_steps, too_large

    problem = PROBLEMS[model]()
    if too_large(row, problem, size, budget):
        return None
    step, inputs = private_steps(problem, size)[row]
    compiled = step.lower(*inputs).compile()
    jax.block_until_ready(inputs)
    before = peak()
    for _ in range(3):
        jax.block_until_ready(compiled(*inputs))
    return peak() - before


def table(results) -> str:
    names = list(dict.fromkeys(name for rows in results.values() for name in rows))
    lines = ["| model, batch | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for case, rows in results.items():
        cells = ["-" if rows.get(name) is None else f"{rows[name]:.0f}" for name in names]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    options = arguments()
    if options.one:
        print(json.dumps(one(options.models[0], options.batches[0], options.rows[0], options.budget)))
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_CORE}"
    os.sched_setaffinity(0, {options.core})
    results = {}
    for model in options.models:
        for size in options.batches:
            rows = results[f"{model}, {size}"] = {}
            for row in options.rows:
                command = [sys.executable, "-m", "benchmarks.memory", "--one", "--models", model]
                command += ["--batches", str(size), "--rows", row, "--budget", str(options.budget)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rows[row] = json.loads(done.stdout.strip().splitlines()[-1])
                print(f"{model}, {size}, {row}: {rows[row]}", file=sys.stderr, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(results, indent=1))
    text = f"Growth of the peak resident size over a step, MiB:\n\n{table(results)}\n"
    (RESULTS / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
