"""How far one example can move a float32 sum of clipped gradients, on data that are chosen against its rounding.

    python -m benchmarks.sum_rounding --batches 2 64 256 4096 65536 --searches 200

One row is replaced by a null that keeps its place. The page has how much farther the computed sum moves than where all
other rows are null, in units of ETA, by the way to sum the batch: below 1 is what dpx proves. Some rows add up to a bit
more than a power of two. The others are smaller than half a unit in the last place of that sum, so they are rounded
away; without one of the large rows, every small one counts (Casacuberta et al. 2022,
https://arxiv.org/abs/2207.10635). Then hill climbing looks for worse rows. Writes benchmarks/results/sum_rounding.md.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from benchmarks import report
from dpx.xla.totals import ETA, MOST_ROWS, as_total

WIDTH, POSITIONS = 4, 3  # numbers of a gradient; positions of a sequence
LARGE = 31 / 32  # a row that is not clipped
FAR = 2.0**3  # positions that cancel are so many times longer than their sum

Sums = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mechanism(size: int, made: Callable[..., dpx.Mechanism] = dpx.dp_sgd) -> dpx.Mechanism:
    """Clip norm 1. Its updates are its sums, with high and low numbers."""
    sampling = dpx.PoissonSampling(examples=2 * size, batch_size=size)
    noisy = made(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(2**40))
    return noisy.replace(release=lambda sums, state, params: (as_total(sums[0]), state))


def as_number(total) -> np.ndarray:
    """The value of a `Total`, float64 (n,)."""
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
    step = jax.jit(dpx.private_updates(loss, made, **options))

    def sums(rows, included):
        batch = dpx.Batch(examples_of(rows), included)
        return as_number(step(params, batch, made.init(params)).updates)

    return sums


def chunked(size: int) -> Sums:
    made, params = mechanism(size), jnp.zeros((WIDTH, 1))
    step = dpx.private_updates_in_chunks(dense, made)
    add = jax.jit(step.add)

    def sums(rows, included):
        found, state = None, made.init(params)
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
    made = dpx.mechanisms.clip_then_project(inner, rank=16, kind=kind, key=dpx.secret_key(2**41))

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
    "microbatches of 16": lambda size: by_step(
        dense, jnp.zeros((WIDTH, 1)), lambda rows: rows, size, microbatch_size=16
    ),
    "microbatches of 1": lambda size: by_step(dense, jnp.zeros((WIDTH, 1)), lambda rows: rows, size, microbatch_size=1),
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
    alone = np.zeros_like(rows)
    alone[removed] = rows[removed]
    return (move(sums, rows, removed) - move(sums, alone, removed)) / ETA


def families(size: int) -> list[np.ndarray]:
    blocks = sorted({min(size, block) for block in (size, MOST_ROWS, 64, 86, 92)})
    kinds = [
        (*kind, last) for kind in ((0.77, True), (0.999, True), (0.51, True), (0.999, False)) for last in (False, True)
    ]
    return [
        hostile(size, block, share=share, negative=bool(negative), last=last)
        for block in blocks
        for share, negative, last in kinds
    ]


def worst(sums: Sums, size: int, searches: int, seed: int = 0) -> tuple[float, np.ndarray, int]:
    """The largest excess that was found, of which rows, and which of them was removed.

    searches: how many changes of rows to try after the families; those that make the move larger are kept.
    """
    rng = np.random.default_rng(seed)
    removed = min(1, size - 2)
    kinds = families(size)
    moves = [excess(sums, rows, removed) for rows in kinds]
    best, rows = max(moves), kinds[int(np.argmax(moves))]
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
        if (moved := excess(sums, trial, removed)) > best:
            best, rows = moved, trial
    return best, rows, removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[2, 64, 256, 552, 4096, 65536])
    parser.add_argument("--searches", type=int, default=200, help="changes of rows to try at each batch")
    options = parser.parse_args()
    rows = []
    for name, path in PATHS.items():
        cells = []
        for size in options.batches:
            found, *_ = worst(path(size), size, options.searches)
            cells.append(f"{found:.3f}")
            print(name, size, cells[-1], flush=True)
        rows.append([name, *cells])
    heading = report.heading("benchmarks.sum_rounding", ("jax", "jaxlib"))
    title = "How much farther the sum moves because of rounding, in units of ETA = 2^-10"
    print(report.write("sum_rounding", heading, {title: report.grid(["path, batch", *options.batches], rows)}))


if __name__ == "__main__":
    main()
