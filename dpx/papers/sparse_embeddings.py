"""DP-FEST and DP-AdaFEST: update only a few rows of large tables per step (Ghazi et al. 2023, arXiv:2311.08357).

DP-SGD adds noise to every row of a table. DP-FEST trains only the rows of a public list (`look_up_public_rows`). At
every step, DP-AdaFEST finds the rows that many examples of the batch read, by a noisy count (`ada_fest`).

Proof of the cost of `ada_fest`. An example contributes its gradient, clipped to C sqrt(1 - s), and the indicators of
the rows that it reads, clipped to C sqrt(s), which together have norm at most C. One Gaussian release with noise
multiplier sigma covers both sums. Choosing rows and dropping the others is a function of this release, so it costs
nothing. The counts alone have noise multiplier sigma / sqrt(s), and the gradient sigma / sqrt(1 - s). As two releases
of the same batch, they have precisions s / sigma^2 and (1 - s) / sigma^2, which add up to that of the one.

`row_updates` does not draw noise that would be dropped: it releases the counts first, and then the gradient of the
chosen rows. Its result has the same distribution as that of `ada_fest`, because the noise is independent over
coordinates. So its cost has the same proof.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.gradients.clipped_gradients import RowSum, sum_gradients
from dpx.gradients.private_updates import PrivateUpdates, Unreleased
from dpx.mechanism.base import Coordinates, InCoordinatesState, Mechanism, in_coordinates
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.sampling.batch import Batch, included_rows, require_batch
from dpx.sampling.data import batch_size
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule
from dpx.sums.rounding import FloatPair
from dpx.values import (
    Tree,
    described,
    explain_misuse,
    float32_like,
    leaf_path,
    require_function,
    require_number,
    require_open_fraction,
    require_whole,
)

TABLES = "tables"  # the name of the tables in the parameters of `row_updates`


@accepts_budget
def ada_fest(
    *,
    threshold: float,
    most_rows: int,
    reads_norm: float = 1.0,
    reads_share: float = 0.2,
    tables: Callable[[str], bool] | None = None,
    clip_norm: float,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-AdaFEST: a noisy count of reads chooses the rows that a step updates (Ghazi et al. 2023, arXiv:2311.08357).

        counts = sum_i min(1, reads_norm / |v_i|) v_i + N(0, (sigma reads_norm)^2 / s)
        update = (sum_i clipped g_i + N(0, (sigma C)^2)) / B  in the most_rows rows of largest counts >= threshold
                 0  elsewhere;  v_i = which rows example i reads

    The paper claims the cost of one Gaussian for both releases, which holds (proof: `dpx/papers/sparse_embeddings.py`).
    dpx accounts for it with the sampling that draws the batches. Outside the tables, the update is that of DP-SGD.

    threshold: tau, at least 0, the least noisy count at which a row is updated. most_rows: at least 1, the most rows of
        a table that a step updates. reads_norm: above 0, the clip norm of the v_i.
    reads_share: s in (0, 1), the counts' share of 1 / sigma^2; the gradient has 1 - s. tables: predicate on an array's
        path, such as `lambda path: "embedding" in path`; None: arrays with two or more axes. Rows are on axis 0.
    clip_norm: C, in the units of the gradient, which is clipped to C sqrt(1 - s).
    noise_multiplier: sigma, for both releases as one Gaussian; a number, a schedule of the step, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains; `init` raises it if no parameter is a table.

    Noise is drawn for whole tables, but only updated rows keep it. `dpx.coordinates.row_updates` spends time and memory
    only on the rows that are read.
    """
    clip_norm = require_number("clip_norm", clip_norm, minimum=0, exclusive=True)
    require_number("reads_norm", reads_norm, minimum=0, exclusive=True)
    groups = _split_clip_norm(clip_norm, require_open_fraction("reads_share", reads_share))
    gaussian = dp_sgd(clip_norm=groups, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return in_coordinates(
        gaussian,
        frequent_rows(
            threshold=require_number("threshold", threshold, minimum=0) / sampling.divisor,
            most_rows=most_rows,
            reads_scale=groups["reads"] / reads_norm,
            tables=tables,
        ),
    )


def _split_clip_norm(clip_norm: float, share: float) -> dict[str, float]:
    return {"gradient": clip_norm * math.sqrt(1 - share), "reads": clip_norm * math.sqrt(share)}


@explain_misuse
def frequent_rows(
    *, threshold: float, most_rows: int, reads_scale: float = 1.0, tables: Callable[[str], bool] | None = None
) -> Coordinates:
    """Adds to a gradient which table rows its example reads, and updates only the rows with high noisy counts.

    g -> {"gradient": g, "reads": v}, where v = reads_scale for each row of a table in which g is not 0. Decoding sets
    a row to 0 if its released v / reads_scale is below `threshold`, or not among the `most_rows` largest of its table.

    threshold: at least 0, a share of the expected batch size. most_rows: at least 1. reads_scale: above 0, in the units
        of the gradient.
    tables: predicate on an array's path; None treats every array with two or more axes as a table.
    Raises ValueError for numbers outside their domains; `init` raises it if no parameter is a table.
    Source: DP-AdaFEST, Ghazi et al. 2023, https://arxiv.org/abs/2311.08357.
    """
    require_number("threshold", threshold, minimum=0)
    require_whole("most_rows", most_rows)
    require_number("reads_scale", reads_scale, minimum=0, exclusive=True)
    if tables is not None:
        require_function("tables", tables, "path")

    def is_table(path, leaf) -> bool:
        return len(leaf.shape) >= 2 if tables is None else bool(tables(leaf_path(path)))

    def select_tables(tree: Tree) -> dict[str, Any]:
        found = jax.tree_util.tree_leaves_with_path(tree)
        return {leaf_path(path): leaf for path, leaf in found if is_table(path, leaf)}

    def init(params):
        if not select_tables(params) or any(not leaf.shape for leaf in select_tables(params).values()):
            paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
            raise ValueError(f"tables must accept the path of an array with rows, and of no scalar; got {paths}")
        return ()

    def encode(grad, state):
        def reads(table):
            return reads_scale * jnp.any(table.reshape(len(table), -1) != 0, 1).astype(jnp.float32)

        return {"gradient": grad, "reads": {path: reads(table) for path, table in select_tables(grad).items()}}

    def decode(released, state, like):
        counts = {path: reads / reads_scale for path, reads in released["reads"].items()}

        def masked(path, leaf):
            if not is_table(path, leaf):
                return leaf
            rows = most_read_rows(counts[leaf_path(path)], threshold, most_rows)
            return jnp.zeros_like(leaf).at[rows].set(leaf.at[rows].get(mode="clip"), mode="drop")

        return jax.tree_util.tree_map_with_path(masked, released["gradient"]), state

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name="count the rows of the tables that each example reads",
        undo=f"keep up to {most_rows} rows of a table, of noisy counts of at least {threshold:.6g} of the divisor",
        fixed=True,
    )


def most_read_rows(counts: jax.Array, threshold: float, most: int) -> jax.Array:
    """Returns the indices of the `most` largest counts, int32 (most,), with V in place of those whose count is below
    `threshold`. counts: float32 (V,)."""
    found, rows = jax.lax.top_k(counts, min(most, len(counts)))
    return jnp.where(found >= threshold, rows, len(counts)).astype(jnp.int32)


class RowUpdate(NamedTuple):
    """The update of a table of V rows.

    rows: int32 (K,), distinct, but V stands for "no row". values: float32 (K, ...), their updates, 0 for "no row".
    """

    rows: jax.Array
    values: jax.Array

    def added_to(self, table: jax.Array) -> jax.Array:
        """Adds the values to the rows of `table`, (V, ...), in place if a jit donates the table."""
        return table.at[self.rows].add(self.values.astype(table.dtype), mode="drop")


class RowsRead(NamedTuple):
    """The rows that a batch reads from a table of V rows. SECRET, because this is raw data.

    rows: int32 (n,), sorted, filled up with V at the end. places: int32 (B, ...), the position of each index in `rows`,
        or n for an index outside the table. weights: float32 (B, ...), 1 / how often the example reads that row.
    """

    rows: jax.Array
    places: jax.Array
    weights: jax.Array

    @classmethod
    def from_indices(cls, indices: jax.Array, count: int) -> "RowsRead":
        inside = (indices >= 0) & (indices < count)
        indices = jnp.where(inside, indices, count).astype(jnp.int32)
        rows = jnp.unique(indices, size=indices.size, fill_value=count)
        of_example = indices.reshape(len(indices), -1)
        times = jnp.sum(of_example[:, :, None] == of_example[:, None, :], 2)
        places = jnp.where(inside, jnp.searchsorted(rows, indices), indices.size)
        return cls(rows, places, (1 / times).reshape(indices.shape))

    def spread_over_table(self, sums: jax.Array, count: int) -> jax.Array:
        """Spreads `sums` of the read rows, float32 (n,), over the whole table, (V,)."""
        return jnp.zeros(count, jnp.float32).at[self.rows].add(sums, mode="drop")

    def take_row_sums(self, sums: jax.Array, chosen: jax.Array) -> jax.Array:
        """Returns the `sums`, float32 (n, ...), of the rows `chosen`, int32 (K,), with 0 for rows that are not read."""
        place = jnp.minimum(jnp.searchsorted(self.rows, chosen), len(self.rows) - 1)
        read = (self.rows[place] == chosen).reshape(-1, *[1] * (sums.ndim - 1))
        return jnp.where(read, sums[place], 0)


@dataclass(frozen=True, eq=False)
class PrivateRowStep:
    """A step, `(params, batch, state) -> PrivateUpdates`; see `row_updates`. optimizer: the mechanism. Its `init` makes
    the state, and reports and fits take it."""

    optimizer: Mechanism
    rows: Callable = field(repr=False)
    row_sum: RowSum = field(repr=False)
    count: Mechanism = field(repr=False)
    update: Mechanism = field(repr=False)
    choose: Callable[[Tree], Tree] = field(repr=False)

    def __call__(self, params: Tree, batch: Batch, state: Tree) -> PrivateUpdates:
        examples, included, drawn = require_batch(batch)
        included = included_rows(batch_size(examples), included, self.optimizer.sampling)
        tables = _require_tables(params)[TABLES]
        read = jax.tree.map(
            lambda table, indices: RowsRead.from_indices(indices, len(table)), tables, jax.vmap(self.rows)(examples)
        )
        few = jax.tree.map(lambda table, read: table.at[read.rows].get(mode="fill", fill_value=0), tables, read)
        reads = jax.tree.map(lambda table, read: jnp.zeros(read.rows.size, jnp.float32), tables, read)
        small = {"gradient": {**params, TABLES: few}, "reads": reads}
        places = jax.tree.map(lambda table, read: (read.places, read.weights), tables, read)
        given = small, state.inner, ((examples, places),)
        self._require_ghost_norms(*given)
        sums, of_each = self.row_sum(*given, included)

        def release(sums, state, params):
            return self._release_counts_then_rows(sums, state, tables, read)

        optimizer = self.optimizer.replace(release=release)
        with self.row_sum.tracing_context():  # the place decides how noise is drawn
            updates, state = optimizer.check_and_release(sums, state, params, jnp.sum(included), drawn)
        return PrivateUpdates(updates, state, Unreleased(*of_each))

    def _require_ghost_norms(self, *given: Tree):
        """Raises ValueError without ghost norms. One example more or less moves the rows that others read to other
        positions. Lookups add rows one after another, wherever they are, but the rounding of a matrix product may
        depend on the positions by more than `dpx.sums.rounding` proves."""
        with self.row_sum.tracing_context():
            plan, _ = self.row_sum.plan_and_cost(*given)
        if isinstance(plan, str):
            raise ValueError(f"loss must be one that ghost norms follow, got one where {plan}")

    def _release_counts_then_rows(self, sums, state: InCoordinatesState, tables: Tree, read: Tree) -> tuple[Tree, Tree]:
        """Releases the counts of all rows, and then the gradient with only the chosen rows."""
        (total,) = sums
        of_all = _map_high_and_low(
            lambda x: jax.tree.map(lambda t, r, s: r.spread_over_table(s, len(t)), tables, read, x["reads"]), total
        )
        counts, _ = self.count.release((of_all,), state.inner, float32_like(of_all.high))
        chosen = jax.tree.map(self.choose, counts)

        def with_chosen(sums):
            picked = jax.tree.map(
                lambda t, r, s, rows: r.take_row_sums(s, rows), tables, read, sums["gradient"][TABLES], chosen
            )
            return {**sums["gradient"], TABLES: picked}

        of_rows = _map_high_and_low(with_chosen, total)
        released, inner = self.update.release((of_rows,), state.inner, float32_like(of_rows.high))

        def update(table, rows, values):
            return RowUpdate(rows, jnp.where((rows < len(table)).reshape(-1, *[1] * (values.ndim - 1)), values, 0))

        updates = {**released, TABLES: jax.tree.map(update, tables, chosen, released[TABLES])}
        return updates, InCoordinatesState(inner, state.coordinates)


def _require_tables(params: Tree) -> dict[str, Tree]:
    if not isinstance(params, dict) or not jax.tree.leaves(params.get(TABLES)):
        raise ValueError(f'params must be a dict whose "{TABLES}" are arrays (V, ...), got {described(params)}')
    return params


def _map_high_and_low(function: Callable[[Tree], Tree], total: FloatPair) -> FloatPair:
    """Applies a function that moves elements to the high and the low parts of a total."""
    return FloatPair(function(total.high), None if total.low is None else function(total.low))


def row_updates(
    loss: Callable, *, rows: Callable[[Tree], Tree], microbatch_size: int | None = None, **settings: Any
) -> PrivateRowStep:
    """Returns a step of `dpx.methods.ada_fest` that computes only the rows that a batch reads, and all noisy counts.

    The parameters are a dict whose "tables" are a pytree of arrays (V, ...). `step(params, batch, state)` returns
    updates of this structure, with a `RowUpdate` for each table, which `update.added_to(table)` adds to it.

    loss: (params, vectors, example) -> the scalar loss of one example. params: without "tables". vectors: the rows that
        `rows` names, (..., *row) for each table; zeros for an index outside the table.
    rows: (example) -> the indices of the rows that one example reads, int (...), for each table. Whatever this returns,
        the counts of an example are clipped.
    microbatch_size: as for `dpx.private_updates`. settings: the arguments of `ada_fest`, without `tables`.
    Raises ValueError as `ada_fest` does, if `loss` or `rows` is not a function, and if `loss` has no ghost norms.

    The distribution differs from that of `ada_fest` only if an example reads a row with gradient 0: here, it counts.

        >>> step = dpx.coordinates.row_updates(
        ...     lambda params, vectors, example: jnp.sum((vectors @ params["w"]) ** 2), rows=lambda example: example,
        ...     threshold=3.0, most_rows=100, clip_norm=1.0, noise_multiplier=1.0, sampling=mechanism.sampling,
        ...     key=dpx.secret_key())
        >>> params = {"tables": jnp.zeros((1000, 2)), "w": jnp.ones(2)}
        >>> batch = dpx.Batch(jnp.zeros((8, 3), jnp.int32), jnp.ones(8, bool))
        >>> step(params, batch, step.optimizer.init(params)).updates["tables"].values.shape
        (100, 2)
    """
    require_function("loss", loss)
    require_function("rows", rows, "example")
    given = inspect.signature(ada_fest).bind(**settings, tables=lambda path: path.split("/")[0] == TABLES)
    given.apply_defaults()
    made, of = ada_fest(**given.arguments), given.arguments
    most_rows = of["most_rows"]
    groups = _split_clip_norm(of["clip_norm"], of["reads_share"])
    scale, threshold = groups["reads"] / of["reads_norm"], of["threshold"] / made.sampling.divisor
    same = {"noise_multiplier": made.noise_multiplier, "sampling": made.sampling}

    def gaussian(stream: str) -> Mechanism:
        return dp_sgd(clip_norm=groups, key=keys.stream(made.key, stream), **same)

    def begin(params):
        state = made.begin(_require_tables(params))  # only for what a release holds, less than the whole gradient

        def few(table):
            return jax.ShapeDtypeStruct((min(most_rows, len(table)), *table.shape[1:]), jnp.float32)

        reads = jax.tree.map(lambda table: jax.ShapeDtypeStruct(table.shape[:1], jnp.float32), params[TABLES])
        gradient = {**params, TABLES: jax.tree.map(few, params[TABLES])}
        return state._replace(inner=count.begin({"gradient": gradient, "reads": reads}))

    def loss_of_read_rows(params, example):
        example, places = example
        few = params["gradient"]

        def look_up(table, placed):
            return table.at[placed[0]].get(mode="fill", fill_value=0)

        vectors = jax.tree.map(look_up, few[TABLES], places)
        value = loss({name: each for name, each in few.items() if name != TABLES}, vectors, example)
        counts = jax.tree.map(lambda reads, at: jnp.sum(at[1] * look_up(reads, at)), params["reads"], places)
        return value + sum((scale * count).astype(value.dtype) for count in jax.tree.leaves(counts))

    count = gaussian("reads")
    return PrivateRowStep(
        made.replace(begin=begin),
        rows,
        sum_gradients(loss_of_read_rows, count, microbatch_size=microbatch_size, norms="ghost", has_aux=False),
        count,
        gaussian("rows"),
        lambda reads: most_read_rows(reads / scale, threshold, most_rows),
    )


def look_up_public_rows(rows: jax.Array, public: np.ndarray, indices: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Looks up table rows when only those of a public list are trained: DP-FEST. For use in a loss, with any mechanism.

    The parameter has only the rows of the list, so only its K rows take noise, time and memory. The other rows do not
    change; load those that an example needs together with it, as `otherwise`.

    rows: the parameter, (K, ...). public: the list, int (K,), sorted; choose it without the data, or by a release whose
        cost you add. indices: int (...), the rows of the table that an example reads.
    otherwise: (..., *row), the rows of the table for indices that are not in the list.
    Returns (..., *row). Raises ValueError unless the list is sorted, without repetitions, and as long as `rows`.
    Source: DP-FEST, Ghazi et al. 2023, https://arxiv.org/abs/2311.08357.
    """
    public = np.asarray(public)
    if public.shape != rows.shape[:1] or public.dtype.kind not in "iu" or (public[1:] <= public[:-1]).any():
        words = f"a sorted list of {len(rows)} different whole numbers, one for each row"
        raise ValueError(f"public must be {words}; got {described(public)}")
    place = jnp.minimum(jnp.searchsorted(public, indices), len(public) - 1)
    found = jnp.asarray(public)[place] == indices
    trained = rows.at[jnp.where(found, place, len(public))].get(mode="fill", fill_value=0)
    return jnp.where(found.reshape(*found.shape, *[1] * (rows.ndim - 1)), trained, otherwise)
