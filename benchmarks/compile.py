"""The time to trace and compile a private step, compared with a step by hand without noise.

    python -m benchmarks.compile

The models are those of benchmarks/transformers.py, and of benchmarks/step.py. By hand is `vmap`, clipping and a sum.
The noise is compiled alone too, because by hand there is none: the sum of both is what a private step takes by hand.
Each is the least CPU time of some runs on one core, after the caches of JAX are emptied. Python's garbage collector
sees only what a run makes. Writes benchmarks/results/compile.md.
"""

import argparse
import gc
import sys
import time

from benchmarks import report, timing, transformers
from benchmarks.problems import ON_A_CPU

ROWS = (transformers.BY_HAND, transformers.NOISE, "dpx auto")


def problem_of(name: str, size: int) -> transformers.Problem:
    from benchmarks import models

    if name in transformers.BATCH:
        return transformers.build(name)
    made = models.PROBLEMS[name]()
    return transformers.Problem(made.params, made.loss, made.batch(size))


def seconds_to_compile(step, inputs) -> float:
    import jax

    jax.clear_caches()
    gc.collect()
    gc.freeze()
    start = time.process_time()
    jax.jit(lambda *inputs: step(*inputs)).lower(*inputs).compile()
    return time.process_time() - start


def tables(results) -> dict[str, str]:
    hand, noise, auto = ROWS

    def column(value):
        return lambda rows: f"{value(rows):.2f}"

    return {
        "Seconds to trace and compile": report.table(
            results,
            [(name, column(lambda rows, name=name: rows[name])) for name in ROWS]
            + [
                ("dpx auto, divided by hand", column(lambda rows: rows[auto] / rows[hand])),
                ("and by hand with noise", column(lambda rows: rows[auto] / (rows[hand] + rows[noise]))),
            ],
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*transformers.BATCH, *ON_A_CPU])
    parser.add_argument("--batch", type=int, default=64, help="of the models of benchmarks/step.py")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none")
    options = parser.parse_args()
    timing.pin(options.core)
    heading = transformers.heading("benchmarks.compile", options.core)
    notes, results, page = [] if transformers.installed() else [transformers.OURS], {}, ""
    for name in options.models:
        size = transformers.BATCH.get(name, options.batch)
        steps = transformers.steps(problem_of(name, size), size)
        times = [{row: seconds_to_compile(*steps[row]) for row in ROWS} for _ in range(options.runs)]
        results[f"{name}, {size}"] = {row: min(run[row] for run in times) for row in ROWS}
        print(name, results[f"{name}, {size}"], file=sys.stderr, flush=True)
        page = report.write("compile", heading, tables(results), notes=notes)
    print(page)


if __name__ == "__main__":
    main()
