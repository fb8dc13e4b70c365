"""One private step over a batch that does not fit into memory: its chunks are added one by one, then released once.

The sums of the chunks add up to the clipped sum of the batch. So one example moves it by at most C, the noise is added
once, and the cost is that of one step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dpx.gradients.clipped_gradients import Norms, RowSum, sum_gradients
from dpx.gradients.one_example import rows_with_keys
from dpx.gradients.private_updates import Unreleased, call_with_auto_axes, sharding_along_examples
from dpx.mechanism import Mechanism
from dpx.mechanism.guards import checked_params
from dpx.sampling.batch import Batch, included_rows, require_batch
from dpx.states.record import DrawRecord, ReleaseState, fingerprint
from dpx.sums.float_pair import FloatPair, add_pairs, with_low
from dpx.values import Tree, batch_size, find_state, float32_like, names_arguments, repr_with_shapes
from dpx.xla.jaxprs import identity_of_program

_ROUNDING = 1e-6  # relative, of a schedule compiled in two programs


class AccumulatedSums(NamedTuple):
    """The sums of the chunks of one batch so far. They have no noise: never share them.

    unreleased_sums:  one `FloatPair` for each factor of the mechanism: two float32 sums like the encoded gradient of
                      one example, so that neither the order nor the number of chunks matters.
    unreleased_count: int32 (), how many rows of the chunks count.
    unreleased_drawn: `Batch.drawn` of the first chunk; None for chunks without it.
    unreleased:       losses, norms and aux of the examples in the last chunk. NOT private.
    unreleased_rows:  int32 (), how many rows the chunks have, padding included.
    step:             int32 (), the step of the state that the chunks were added with.
    mechanism:        uint32 (), a fingerprint of the mechanism that added them.
    clipping:         float32 (n,), the mechanism's bounds on one example at that step.
    ordered:          bool (), whether they are chunks of one batch, each added once and in order, at that step.
    """

    unreleased_sums: tuple[FloatPair, ...]
    unreleased_count: jax.Array
    unreleased_drawn: DrawRecord | None
    unreleased: Unreleased | None
    unreleased_rows: jax.Array
    step: jax.Array
    mechanism: jax.Array
    clipping: jax.Array
    ordered: jax.Array

    __repr__ = repr_with_shapes


@dataclass(frozen=True, eq=False)
class PrivateChunks:
    """The two functions that `private_updates_in_chunks` describes. row_sum: the clipped sum of a chunk."""

    row_sum: RowSum = field(repr=False)
    optimizer: Mechanism
    with_key: bool

    def add(self, params: Tree, chunk: Batch, state: Tree, sums: AccumulatedSums | None = None) -> AccumulatedSums:
        """`sums` with one more chunk of the batch; None for the first."""
        require_batch(chunk)
        params = checked_params(params, self.optimizer)
        _step_of(state)
        if sums is not None:
            _require_sums(sums)
            if (sums.unreleased_drawn is None) != (chunk.drawn is None):
                raise ValueError("all chunks of a batch must have `drawn`, or none of them; got some of each")
            sums = sums._replace(unreleased=None)  # left by the chunk before

        def place(params_on, chunk_on, state_on, sums_on):
            """Shards the sums as the parameters if the encoded gradient is like them, and replicates them otherwise."""
            rows = sharding_along_examples(chunk_on.examples)
            one: Any = NamedSharding(rows.mesh, PartitionSpec())
            like, of_state = _shapes_of_sums(params, state)
            encoded, _, factors = jax.eval_shape(self.optimizer.contribute, like, of_state)
            shapes, expected = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (encoded, like)]
            sums = (FloatPair(params_on, params_on),) * len(factors) if shapes == expected else one
            return AccumulatedSums(sums, one, one, rows, one, one, one, one, one)

        return call_with_auto_axes(self._add, (params, chunk, state, sums), place)

    def release(self, params: Tree, sums: AccumulatedSums, state: Tree) -> tuple[Tree, Tree]:
        """(updates, state) of the whole batch: the private updates, like `params`, and the next state."""
        _require_sums(sums)
        params = checked_params(params, self.optimizer)
        arguments = params, sums._replace(unreleased=None), state
        return call_with_auto_axes(self._release, arguments, lambda params, sums, state: (params, state))

    def _add(self, params, chunk, state, sums):
        size = batch_size(chunk.examples)
        counts = jnp.ones(size, bool) if chunk.included is None else chunk.included
        included = included_rows(size, counts, self.optimizer.sampling)
        first = jnp.int32(0) if sums is None else sums.unreleased_rows
        rows = rows_with_keys(self.optimizer, state, chunk.examples, with_key=self.with_key, first=first)
        total, of_each = self.row_sum(params, state, rows, included)
        drawn = jax.tree.map(lambda number: jnp.asarray(number).astype(jnp.uint32), chunk.drawn)
        one = AccumulatedSums(
            unreleased_sums=tuple(map(with_low, total)),
            unreleased_count=jnp.sum(included, dtype=jnp.int32),
            unreleased_drawn=drawn,
            unreleased=Unreleased(*of_each),
            unreleased_rows=jnp.int32(size),
            step=_step_of(state),
            mechanism=_fingerprint(self.optimizer, params, state),
            clipping=_clip_bounds(self.optimizer, state),
            ordered=jnp.bool_(True) if drawn is None else drawn.first_row == first.astype(jnp.uint32),
        )
        return one if sums is None else _plus_chunk(sums, one)

    def _release(self, params, sums, state):
        ordered = sums.ordered & (sums.step == _step_of(state))
        ordered &= sums.mechanism == _fingerprint(self.optimizer, params, state)
        ordered &= _equal_up_to_rounding(sums.clipping, _clip_bounds(self.optimizer, state))
        total, count, drawn = sums.unreleased_sums, sums.unreleased_count, sums.unreleased_drawn
        with self.row_sum.placed():  # which decides how noise is drawn
            return self.optimizer.release_once(total, state, params, count, drawn, ordered=ordered)


@names_arguments
def private_updates_in_chunks(
    loss: Callable,
    optimizer: Mechanism,
    *,
    microbatch_size: int | None = None,
    norms: Norms = "auto",
    with_key: bool = False,
    has_aux: bool = False,
    platform: str | None = None,
    sharding: jax.sharding.Sharding | None = None,
    backward_passes: int | None = None,
) -> PrivateChunks:
    """Builds `private_updates` in two functions, for a batch that does not fit into memory and comes in chunks.

        >>> step = dpx.private_updates_in_chunks(loss, optimizer)
        >>> add, release = jax.jit(step.add), jax.jit(step.release)
        >>> for chunks in sampling.batches(data, key, state, steps=1, chunk_size=32):  # of ONE batch
        ...     sums = None
        ...     for chunk in chunks:
        ...         sums = add(params, chunk, state, sums)
        ...     updates, state = release(params, sums, state)  # one noise, the cost of one step

    The updates equal one call of `private_updates` with the whole batch, up to float32 rounding. The keys of the
    examples are the same too, because they count the rows of earlier chunks. Both functions can be jitted, `add` also
    with donated sums. `sums` is an `AccumulatedSums`, as sensitive as the data.

    loss: (params, example) -> float (), of one example without a batch axis. optimizer: a `dpx.Mechanism`.
    microbatch_size: int, how many examples of a chunk are computed at once; None chooses.
    norms, with_key, has_aux, platform, backward_passes: as for `private_updates`. sharding: how chunks are sharded.
    chunk: a `dpx.Batch`. With `drawn`, the chunks must be all chunks of one batch, from the step of the state, each
        once and in order. Otherwise the state has no epsilon, as after a batch that was used twice. Your own chunks,
        without `drawn`, are taken as they are. Add and release all chunks of a batch with one state.

    Raises ValueError as `private_updates` does, if only some chunks have `drawn`, and for `sums` not made by `add`.
    """
    options: Any = {"microbatch_size": microbatch_size, "has_aux": has_aux, "platform": platform, "sharding": sharding}
    row_sum = sum_gradients(loss, optimizer, norms=norms, backward_passes=backward_passes, **options)
    return PrivateChunks(row_sum, optimizer, with_key)


def _step_of(state: Tree) -> jax.Array:
    return find_state(state, ReleaseState, "mechanism's state").step


def _fingerprint(mechanism: Mechanism, params: Tree, state: Tree) -> jax.Array:
    """A fingerprint, uint32 (), of what a mechanism adds and costs: it differs for other clip norms."""
    program = jax.make_jaxpr(mechanism.contribute)(*_shapes_of_sums(params, state))
    return jnp.uint32(fingerprint((identity_of_program(program), mechanism.fingerprints)))


def _clip_bounds(mechanism: Mechanism, state: Tree) -> jax.Array:
    """The bounds of this step, float32 (n,), read when the sums are made and again when they are released. A schedule
    that is not a function of the step alone can change in between, and then the sums would be larger than their noise
    covers."""
    return jnp.stack(jax.tree.leaves(mechanism.bound(state)))


def _equal_up_to_rounding(one: jax.Array, other: jax.Array) -> jax.Array:
    """Whether the bounds computed by two programs are equal up to rounding, bool ()."""
    if one.shape != other.shape:
        return jnp.bool_(False)
    return jnp.all(jnp.abs(one - other) <= _ROUNDING * jnp.abs(other))


def _shapes_of_sums(params: Tree, state: Tree) -> tuple[Tree, Tree]:
    return float32_like(params), jax.eval_shape(lambda state: state, state)


def _require_sums(sums):
    if not isinstance(sums, AccumulatedSums):
        raise ValueError(f"sums must be the AccumulatedSums that `add` returned, got {type(sums)}")


def _plus_chunk(sums: AccumulatedSums, one: AccumulatedSums) -> AccumulatedSums:
    """The sums with the chunk `one` added. Its `ordered` says whether it begins where the sums end."""
    ordered = sums.ordered & one.ordered & (sums.step == one.step) & (sums.mechanism == one.mechanism)
    ordered &= _equal_up_to_rounding(sums.clipping, one.clipping)
    if sums.unreleased_drawn is not None and one.unreleased_drawn is not None:
        of_one_batch = one.unreleased_drawn._replace(first_row=sums.unreleased_drawn.first_row)
        ordered &= jnp.all(jnp.stack(sums.unreleased_drawn) == jnp.stack(of_one_batch))
    return sums._replace(
        unreleased_sums=tuple(map(add_pairs, sums.unreleased_sums, one.unreleased_sums)),
        unreleased_count=sums.unreleased_count + one.unreleased_count,
        unreleased=one.unreleased,
        unreleased_rows=sums.unreleased_rows + one.unreleased_rows,
        ordered=ordered,
    )
