"""The cost of each method's coordinates: time and memory of a step, divided by those of dp_sgd on the same path.

    python -m benchmarks.coordinates --model end_to_end_cnn --batch 256

All rows are timed in one process on one CPU core, in interleaved rounds, and the medians are compared. Writes
benchmarks/results/coordinates.md.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import dpx
from benchmarks import report
from benchmarks.problems import ON_A_CPU
from benchmarks.timing import CLOCKS, Timer, interleaved, pin
from dpx import catalog

KINDS = ("subset", "countsketch", "hadamard", "orthonormal")  # a Gaussian one takes hours


class Row(NamedTuple):
    """make: (**base) -> Mechanism, of clip_norm, noise_multiplier, sampling, key. steps: made before the timed one."""

    name: str
    make: Callable[..., Any]
    clipping: Any = "vmap"
    steps: int = 0


def of_method(entry: catalog.CatalogEntry, **changed: Any) -> Callable[..., Any]:
    def make(**base):
        base |= {"steps": 1000}
        if entry.samplings:
            record, usual = base["sampling"], catalog.SAMPLINGS[entry.samplings[0]]
            sizes = {"examples": record.examples, "batch_size": record.batch_size}
            base["sampling"] = usual.build(**usual.arguments | sizes)
        chosen = entry.arguments | {name: base[name] for name in base if name in entry.build_parameters}
        return entry.build(**chosen | changed)

    return make


def of_coordinates(entry: catalog.CatalogEntry, **changed: Any) -> Callable[..., Any]:
    def make(**base):
        key = {"key": base["key"]} if "key" in entry.build_parameters else {}
        return dpx.in_coordinates(dpx.dp_sgd(**base), entry.build(**entry.arguments | key | changed))

    return make


def clipped_first(kind: Any) -> Callable[..., Any]:
    def make(**base):
        return dpx.mechanisms.clip_then_project(dpx.dp_sgd(**base), reduction_rate=0.3, kind=kind)

    return make


PATHS = ("auto", "vmap")
METHODS = {entry.name: entry for entry in catalog.METHODS if "basis" not in entry.build_parameters}
COORDINATES = {entry.name: entry for entry in catalog.COORDINATES if "basis" not in entry.build_parameters}
PROJECTION, ADA = COORDINATES.pop("random_projection"), METHODS.pop("ada_dpigu")
ROWS = [
    *[Row(name, of_method(entry), path) for name, entry in METHODS.items() for path in PATHS],
    *[Row(name, of_coordinates(entry), path) for name, entry in COORDINATES.items() for path in PATHS],
    Row("random_freeze_sgd, a mask a step", of_method(METHODS["random_freeze_sgd"], every=1), "auto"),
    Row("ada_dpigu, main phase", of_method(ADA, warmup=1), steps=1),
    Row("ada_dpigu, main phase, top half of each example", of_method(ADA, warmup=1, example_keep=0.5), steps=1),
    *[Row(f"{kind} projection", of_coordinates(PROJECTION, kind=kind), path) for kind in KINDS for path in PATHS],
    *[
        Row(f"{kind} projection of the clipped sum", clipped_first(kind), "auto")
        for kind in ("countsketch", "hadamard")
    ],
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ON_A_CPU, default="end_to_end_cnn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", nargs="+", help="parts of their names; default: all")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none (as on a GPU)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu is fairer on a busy machine")
    parser.add_argument("--name", default="coordinates", help="of the files written")
    return parser.parse_args()


def step_of(row: Row, problem, size: int):
    """(() -> one step, compiled), the MiB of the mechanism's "state" and of what XLA allocates beside, "temporary".

    None for the path "auto" where ghost norms cannot follow the mechanism, because it is then the path "vmap".
    """
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=size)
    mechanism = row.make(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(2))
    if row.clipping == "auto" and not mechanism.supports_ghost_norms:
        return None
    gradient: Any = dpx.private_updates(problem.loss, mechanism, norms=row.clipping)
    state = mechanism.init(problem.params)
    for _ in range(row.steps):
        zeros = jax.tree.map(jax.numpy.zeros_like, problem.params)
        _, state = jax.jit(lambda state, zeros=zeros: mechanism.release((zeros,), state, problem.params))(state)
    inputs = problem.params, dpx.Batch(problem.batch(size), None)

    @functools.partial(jax.jit, donate_argnums=2)  # as in training
    def step(params, batch, state):
        updates, state, _ = gradient(params, batch, state)
        return state, updates  # the state first: a donated array becomes the first output that it fits

    program = step.lower(*inputs, state).compile()
    print(f"    compiled {row.name}, {row.clipping}", file=sys.stderr, flush=True)
    sizes: Any = program.memory_analysis()
    memory = {
        "state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20,
        "temporary": sizes.temp_size_in_bytes / 2**20,
    }

    def run():
        nonlocal state
        state, _ = jax.block_until_ready(program(*inputs, state))

    return run, memory


def table(results, model: float) -> str:
    """model: MiB of one copy of its parameters."""
    lines = []
    for row in results:
        base = next(other for other in results if other["name"] == "dp_sgd" and other["path"] == row["path"])
        grown = (row["temporary"] - base["temporary"]) / model
        times = f"{row['seconds'] * 1e3:.1f}", f"{row['seconds'] / base['seconds']:.3f}"
        lines.append((row["name"], row["path"], *times, f"{row['state'] / model:.2f}", f"{grown:+.2f}"))
    columns = "method", "path", "ms", "over dp_sgd", "state, copies of the model", "temporary over dp_sgd, copies"
    return report.grid(columns, lines)


def main():
    options = arguments()
    pin(options.core)
    from benchmarks.models import PROBLEMS

    problem = PROBLEMS[options.model]()
    wanted = [
        row
        for row in ROWS
        if row.clipping in options.paths
        and (row.name == "dp_sgd" or not options.rows or any(part in row.name for part in options.rows))
    ]
    steps = {(row.name, row.clipping): step_of(row, problem, options.batch) for row in wanted}
    made = {name: step for name, step in steps.items() if step is not None}
    timers = {name: Timer(run, CLOCKS[options.clock]) for name, (run, _) in made.items()}
    results = [
        {"name": name[0], "path": name[1], "seconds": statistics.median(times), **made[name][1]}
        for name, times in interleaved(timers, options.rounds).items()
    ]
    model = ON_A_CPU[options.model].parameters * 4 / 2**20
    heading = report.heading("benchmarks.coordinates", ("jax", "jaxlib", "optax", "flax"))
    setting = f"{options.model}, batch {options.batch}, {options.clock} clock. One copy of the model: {model:.2f} MiB."
    print(report.write(options.name, heading, setting, table(results, model)))


if __name__ == "__main__":
    main()
