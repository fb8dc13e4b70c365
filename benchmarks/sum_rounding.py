"""How far one example can move a float32 sum of clipped gradients, on data that are chosen against its rounding.

    python -m benchmarks.sum_rounding --batches 2 64 256 4096 65536 --searches 200
    python -m benchmarks.sum_rounding --keep tests/data/worst_sum.npz --batches 64 96 97 256 640 1024 --sweeps 2

The second command writes no page, but the worst rows, on which tests/test_sum_rounding.py tries every path.

One row is replaced by a null that keeps its place. The page has how much farther the computed sum moves than where all
other rows are null, in units of ETA, by the way to sum the batch: below 1 is what dpx proves. Some rows add up to a bit
more than a power of two. The others are smaller than half a unit in the last place of that sum, so they are rounded
away; without one of the large rows, every small one counts (Casacuberta et al. 2022,
https://arxiv.org/abs/2207.10635). A greedy search then tries other values for one row after another, and hill climbing
changes many at once. Writes benchmarks/results/sum_rounding.md.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from benchmarks import report
from dpx.sums.rounding import ETA, MOST_ROWS, as_pair

WIDTH, POSITIONS = 4, 3  # numbers of a gradient; positions of a sequence
LARGE = 31 / 32  # a row that is not clipped
FAR = 2.0**3  # positions that cancel are so many times longer than their sum

Sums = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mechanism(size: int, made: Callable[..., dpx.Mechanism] = dpx.dp_sgd) -> dpx.Mechanism:
    """Clip norm 1. Its updates are its sums, with high and low numbers."""
    sampling = dpx.PoissonSampling(examples=2 * size, batch_size=size)
    noisy = made(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(2**40))
    return noisy.replace(release=lambda sums, state, params: (as_pair(sums[0]), state), noise_multiplier=0.0)


def as_number(total) -> np.ndarray:
    """The value of a `FloatPair`, float64 (n,)."""
    parts = [jax.tree.leaves(part) for part in total if part is not None]
    values = [np.sum([np.asarray(x, np.float64) for x in leaf], axis=0) for leaf in zip(*parts, strict=True)]
    return np.concatenate([value.ravel() for value in values])


def stacked(size: int) -> Sums:
    made, params = mechanism(size), jnp.zeros(WIDTH)
    update = jax.jit(lambda rows, included: made.update(rows, made.init(params), params, included=included)[0])
    return lambda rows, included: as_number(update(rows, included))


def by_step(loss: Callable, params, examples_of: Callable, size: int, **options) -> Sums:
    """examples_of: from the gradients (B, WIDTH) to examples that have them."""
    made = mechanism(size)
    step, state = jax.jit(dpx.private_updates(loss, made, **options)), made.init(params)

    def sums(rows, included):
        return as_number(step(params, dpx.Batch(examples_of(rows), included), state).updates)

    return sums


def chunked(size: int) -> Sums:
    made, params = mechanism(size), jnp.zeros((WIDTH, 1))
    step = dpx.private_updates_in_chunks(dense, made)
    add, state = jax.jit(step.add), made.init(params)

    def sums(rows, included):
        found = None
        for start in range(0, size, max(1, size // 5)):
            some = slice(start, start + max(1, size // 5))
            found = add(params, dpx.Batch(rows[some], included[some]), state, found)
        assert found is not None
        return as_number(step.release(params, found, state)[0])

    return sums


def projected(kind: Any, size: int) -> Sums:
    """The sums of a clip-then-project mechanism, before its noise. A row is a sixteenth of a gradient."""
    params, seen = jnp.zeros(16 * WIDTH), []

    def release(sums, state, params):
        seen.append(sums[0])
        return sums[0].high, state

    inner = mechanism(size).replace(release=release)
    made = dpx.mechanisms.clip_then_project(inner, rank=16, kind=kind)

    @jax.jit
    def update(rows, included):
        seen.clear()
        made.update(jnp.tile(rows, (1, 16)) / 4, made.init(params), params, included=included)
        return seen[0]

    return lambda rows, included: as_number(update(rows, included))


def dense(params, row):
    return jnp.sum(row @ params)


def of_positions(params, example):
    inputs, cotangents = example
    return jnp.sum((inputs @ params) * cotangents)


def cancelling(rows: np.ndarray):
    """Positions whose products are FAR times longer than their sum, the row."""
    far = np.zeros_like(rows)
    far[:, 0] = FAR
    inputs = np.stack([rows, far, -far], 1)
    return inputs.astype(np.float32), np.ones((len(rows), POSITIONS, 1), np.float32)


def looked_up(table, example):
    places, cotangents = example
    return jnp.sum(table[places] * cotangents)


def lookups(rows: np.ndarray):
    """The same row of the table at all positions, whose cotangents cancel but for the row."""
    inputs, _ = cancelling(rows)
    return np.ones(inputs.shape[:2], np.int32), inputs


def tied(table, example):
    """A table that is looked up and multiplied."""
    (places, cotangents), (inputs, others) = example
    return looked_up(table, (places, cotangents)) + of_positions(table.T, (inputs, others))


def both(rows: np.ndarray):
    (places, cotangents), (inputs, others) = lookups(rows), cancelling(rows)
    return (places, -2 * cotangents), (3 * inputs, np.concatenate([0 * others, others], -1))


PATHS: dict[str, Callable[[int], Sums]] = {
    "stacked gradients": stacked,
    "per-example gradients of a loss": lambda size: by_step(
        dense, jnp.zeros((WIDTH, 1)), lambda rows: rows, size, norms="vmap"
    ),
    "ghost norms": lambda size: by_step(dense, jnp.zeros((WIDTH, 1)), lambda rows: rows, size, norms="ghost"),
    "ghost norms of positions": lambda size: by_step(
        of_positions, jnp.zeros((WIDTH, 1)), cancelling, size, norms="ghost"
    ),
    "an embedding": lambda size: by_step(looked_up, jnp.zeros((2, WIDTH)), lookups, size, norms="ghost"),
    "a tied embedding": lambda size: by_step(tied, jnp.zeros((2, WIDTH)), both, size, norms="ghost"),
    **{
        f"microbatches of {each}": lambda size, each=each: by_step(
            dense, jnp.zeros((WIDTH, 1)), lambda rows: rows, size, microbatch_size=each
        )
        for each in (16, 4, 1)
    },
    "chunks": chunked,
    "clip, then project by countsketch": functools.partial(projected, "countsketch"),
    "clip, then project by hadamard": functools.partial(projected, "hadamard"),
}


def hostile(size: int, block: int, *, share: float = 0.77, negative: bool = True, last: bool = False) -> np.ndarray:
    """Rows (size, WIDTH): in every `block` rows, some add up to a bit more than a power of two, and to less without one
    of them. The others are a `share` of half a unit of the sum above the power, which they change only below it.

    last: whether the small rows come last or first.
    """
    power = 2.0 ** max(0, (2 * block // 3).bit_length() - 1)
    large = int(np.ceil(power / LARGE)) - 1  # not 1, because a norm is raised by its rounding, and would be clipped
    small = share * np.spacing(np.float32(power)) / 2 * (-1 if negative else 1)
    one_block = np.full(block, small)
    one_block[: 1 + large] = [min(LARGE, power + LARGE / 2 - large * LARGE), *[LARGE] * large][:block]
    if last:
        one_block[2:] = one_block[2:][::-1]
    rows = np.zeros((size, WIDTH), np.float32)
    rows[:, 0] = np.resize(one_block, size)
    return rows


def move(sums: Sums, rows: np.ndarray, removed: int) -> float:
    """How far the sum moves if a row becomes a null in its place, in clip norms."""
    included = np.ones(len(rows), bool)
    without = included.copy()
    without[removed] = False
    changed = rows.copy()
    changed[removed] = 0
    return float(np.linalg.norm(sums(rows, included) - sums(changed, without)))


def excess(sums: Sums, rows: np.ndarray, removed: int) -> float:
    """How much farther it moves than where all other rows are null, in units of ETA."""
    return (move(sums, rows, removed) - _alone(sums, rows, removed)) / ETA


def _alone(sums: Sums, rows: np.ndarray, removed: int) -> float:
    """How far the sum moves where all other rows are null."""
    alone = np.zeros_like(rows)
    alone[removed] = rows[removed]
    return move(sums, alone, removed)


def families(size: int) -> list[np.ndarray]:
    blocks = sorted({min(size, block) for block in (size, MOST_ROWS, 64, 86, 92)})
    kinds = [
        (*kind, last) for kind in ((0.77, True), (0.999, True), (0.51, True), (0.999, False)) for last in (False, True)
    ]
    dense = [
        hostile(size, block, share=share, negative=bool(negative), last=last)
        for block in blocks
        for share, negative, last in kinds
    ]
    # Of the small rows, one in so many: each is then rounded away alone, also where the sum of a few rows is added.
    sparse = [
        np.where((np.abs(rows) > 0.01) | (np.arange(size)[:, None] % apart == 0), rows, 0)
        for rows in dense
        for apart in (4, 16)
        if size > apart
    ]
    # The same rows in every lane of a sum that has so many.
    in_lanes = [
        np.resize(np.repeat(hostile(size // lanes, size // lanes, share=share, last=last), lanes, 0), (size, WIDTH))
        for lanes in (2, 4, 8, 16, 32)
        for share, last in itertools.product((0.77, 0.999), (False, True))
        if size >= 4 * lanes
    ]
    return dense + sparse + in_lanes


def swept(sums: Sums, best: float, rows: np.ndarray, removed: int) -> tuple[float, np.ndarray]:
    """The greedy search: for one row after another, the best of some values."""
    small = np.spacing(np.float32(2.0 ** np.arange(0, np.log2(max(2, len(rows))) + 1))) / 2
    values = np.array([0, LARGE, -LARGE, *(0.999 * small[-3:]), *(-0.999 * small[-3:])], np.float32)
    alone = _alone(sums, rows, removed)
    for row in range(len(rows)):
        for value in values if row != removed else ():
            if rows[row, 0] == value:
                continue
            trial = rows.copy()
            trial[row, 0] = value
            if (moved := (move(sums, trial, removed) - alone) / ETA) > best:
                best, rows = moved, trial
    return best, rows


def worst(sums: Sums, size: int, searches: int, seed: int = 0, sweeps: int = 0) -> tuple[float, np.ndarray, int]:
    """The largest excess that was found, of which rows, and which of them was removed.

    sweeps: how many greedy searches to make after the families. searches: how many changes of rows to try after that;
    those that make the move larger are kept.
    """
    rng = np.random.default_rng(seed)
    removed = min(1, size - 2)
    kinds = families(size)
    moves = [excess(sums, rows, removed) for rows in kinds]
    best, rows = max(moves), kinds[int(np.argmax(moves))]
    for _ in range(sweeps):
        best, rows = swept(sums, best, rows, removed)
    alone = _alone(sums, rows, removed)
    for _ in range(searches):
        trial, at = rows.copy(), rng.integers(0, size, rng.integers(1, max(2, size // 8)))
        kind = rng.integers(5)
        if kind == 0:
            trial[at, 0] *= np.float32(2.0 ** rng.integers(-2, 3))
        elif kind == 1:
            trial[at, 0] *= -1
        elif kind == 2:
            trial[at, 0] = rng.uniform(-LARGE, LARGE)
        elif kind == 3:
            trial[at, 0] = rng.choice([-1, 1]) * np.float32(rng.uniform(0.5, 1) * 2.0 ** -rng.integers(14, 26))
        else:
            trial[at] = rows[rng.permutation(at)]
        trial[removed] = rows[removed]
        if (moved := (move(sums, trial, removed) - alone) / ETA) > best:
            best, rows = moved, trial
    return best, rows, removed


class Kept(NamedTuple):
    """The worst rows that were found for a path and a batch, of which row 1 is removed.

    column: the first numbers of the rows, float32 (B,); the others are 0. found: the excess, in units of ETA.
    """

    path: str
    column: np.ndarray
    found: float

    @property
    def rows(self) -> np.ndarray:
        return np.pad(self.column[:, None], ((0, 0), (0, WIDTH - 1)))


def keep(file: str, batches: list[int], searches: int, sweeps: int) -> None:
    """Writes the worst rows for every path and batch to a file."""
    kept = []
    for name, size in itertools.product(PATHS, batches):
        found, rows, removed = worst(PATHS[name](size), size, searches, sweeps=sweeps)
        assert removed == 1 and not rows[:, 1:].any()
        kept.append(Kept(name, rows[:, 0], found))
        print(name, size, f"{found:.4f}", f"{time.process_time():.0f} s", flush=True)
    store(file, kept)


def store(file: str, kept: list[Kept]) -> None:
    paths, columns, found = zip(*kept, strict=True)
    sizes, numbers = np.array([len(column) for column in columns]), np.concatenate(columns).astype(np.float32)
    np.savez_compressed(file, paths=np.array(paths), sizes=sizes, found=np.array(found, np.float32), numbers=numbers)


def load(file: str | Path) -> list[Kept]:
    with np.load(file) as stored:
        columns = np.split(stored["numbers"], np.cumsum(stored["sizes"])[:-1])
        return [Kept(*one) for one in zip(map(str, stored["paths"]), columns, stored["found"].tolist(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[2, 64, 256, 552, 4096, 65536])
    parser.add_argument("--searches", type=int, default=200, help="changes of rows to try at each batch")
    parser.add_argument("--sweeps", type=int, default=0, help="greedy searches at each batch")
    parser.add_argument("--keep", help="a file for the worst rows, in place of the page")
    options = parser.parse_args()
    if options.keep:
        return keep(options.keep, options.batches, options.searches, options.sweeps)
    rows = []
    for name, path in PATHS.items():
        cells = []
        for size in options.batches:
            found, *_ = worst(path(size), size, options.searches, sweeps=options.sweeps)
            cells.append(f"{found:.3f}")
            print(name, size, cells[-1], flush=True)
        rows.append([name, *cells])
    heading = report.heading("benchmarks.sum_rounding", ("jax", "jaxlib"))
    title = "How much farther the sum moves because of rounding, in units of ETA = 9.995e-4"
    print(report.write("sum_rounding", heading, {title: report.grid(["path, batch", *options.batches], rows)}))


if __name__ == "__main__":
    main()
