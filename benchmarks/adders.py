"""How far one example can move a sum of an emulated tensor core, on data that are searched for it.

    python -m benchmarks.adders --minutes 60

The emulator adds as the proof in dpx/xla/matrix_units.py says. The first of some rows is replaced by zeros in its
place; the page has how much farther the sum moves than by that row, as a share of what is proved for this core and this
number of rows: below 1 for all data. A search changes some numbers at a time and keeps what moves the sum farther;
searches from other random starts take turns until the process has used the minutes. Rounding errors have random signs,
and the proof takes the worst of each, so a search comes to a part of it. A hostile adder, in tests/test_units.py, comes
near to it. Writes benchmarks/results/adders.md, and continues from benchmarks/results/adders.json, so a search that was
stopped loses nothing.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import report
from dpx.sums import rounding as bounds
from dpx.sums.rounding import MOST_ROWS, UNIT
from dpx.xla.matrix_units import MatrixUnit, tensor_core_adder

# (k, e) of the proof: the products of an instruction, and the bits that it keeps of each beyond float32's.
CORES = {"A100, TF32": (4, 1), "H100, TF32": (8, 2), "A100, bfloat16": (8, 1), "H100, bfloat16": (16, 2)}
Adder = Callable[[np.ndarray], np.ndarray]
ROWS, TURNS = (8, 24, 48, MOST_ROWS), 4000
KEPT = Path(__file__).parent / "results" / "adders.json"  # the seeds that were searched, the minutes, what was found


def emulated(name: str, terms: np.ndarray, exponents: np.ndarray | None = None) -> np.ndarray:
    """The sums of `terms`, float64 (..., n), by a tensor core: everything is cut towards 0, as the proof says.

    exponents: of the terms, int (..., n), if a term is a product, which has the sum of its operands'."""
    products, extra = CORES[name]
    exponents = np.frexp(terms)[1] - 1 if exponents is None else exponents
    exponents = np.where(terms == 0, -500, exponents)
    total = np.zeros(terms.shape[:-1])
    for start in range(0, terms.shape[-1], products):
        some = np.concatenate([total[..., None], terms[..., start : start + products]], -1)
        own = np.where(total == 0, -500, np.frexp(total)[1] - 1)
        exponent = np.maximum(own, exponents[..., start : start + products].max(-1))
        grid = np.ldexp(1.0, exponent - 23 - extra)
        exact = (np.trunc(some / grid[..., None]) * grid[..., None]).sum(-1)
        last = np.ldexp(1.0, np.frexp(exact)[1] - 24)
        total = np.trunc(exact / last) * last
    return total


def searched(
    name: str, rows: int, turns: int, seed: int = 0, add: Adder | None = None, factors: np.ndarray | None = None
) -> float:
    """The most that a search makes the first row move an emulated sum beyond itself, relative to what is proved.

    add: of operands, float64 (coordinates, rows), and factors: (rows,), of the same precision, that it multiplies
    them with. They take the place of the emulator, which adds products."""
    bits = (16 if "bfloat16" in name else 22) // (2 if add else 1)
    add, factors = add or functools.partial(emulated, name), np.ones(rows) if factors is None else factors
    rng = np.random.default_rng(seed)

    def moved(data):
        """data: (coordinates, rows). The product of two numbers has as many bits as both together."""
        fraction, exponent = np.frexp(data / np.linalg.norm(data * factors, axis=0).max())
        data = np.ldexp(np.round(fraction * 2.0**bits), exponent - bits)
        without = data * (np.arange(rows) > 0)
        excess = add(data) - add(without) - data[:, 0] * factors[0]
        return np.linalg.norm(excess) / np.linalg.norm(data * factors, axis=0).max()

    proved = 2 * UNIT * bounds.rounding_error_of_block(rows, MatrixUnit(7, None, (tensor_core_adder(*CORES[name]),)))
    best = np.ceil(np.arange(rows, 0, -1) / CORES[name][0]) * rng.uniform(0.5, 1, (rows, rows))
    best *= 2.0 ** rng.integers(-6, 1, best.shape)
    found = moved(best)
    for _ in range(turns):
        trial = np.where(rng.random(best.shape) < 0.05, best * 2.0 ** rng.integers(-3, 4, best.shape), best)
        trial = np.where(rng.random(best.shape) < 0.02, rng.standard_normal(best.shape), trial)
        if (value := moved(trial)) > found:
            best, found = trial, value
    return found / proved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of one CPU core, with those of stopped searches")
    options = parser.parse_args()
    first, before, most = json.loads(KEPT.read_text()) if KEPT.exists() else (0, 0.0, {})
    for seed in itertools.count(first):  # `itertools.product` would keep all seeds, without an end
        for name, rows in itertools.product(CORES, ROWS):
            most[f"{name}, {rows}"] = max(most.get(f"{name}, {rows}", 0.0), searched(name, rows, TURNS, seed))
        minutes = before + time.process_time() / 60
        KEPT.write_text(json.dumps([seed + 1, minutes, most], indent=1) + "\n")
        lines = [[core, *(f"{most[f'{core}, {n}']:.3f}" for n in ROWS)] for core in CORES]
        done = {"searches": (seed + 1) * len(most), "turns_of_each": TURNS, "CPU_minutes": round(minutes, 1)}
        head = report.heading("benchmarks.adders", ("numpy",), **done)
        title = "The farthest that was found, by the number of rows of a block; 1 is what is proved"
        report.write("adders", head, {title: report.grid(["adder", *map(str, ROWS)], lines)})
        if minutes > options.minutes:
            break


if __name__ == "__main__":
    main()
