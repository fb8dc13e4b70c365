"""One private step over a batch that does not fit into memory: its chunks are added one by one, then released once.

A clipped sum is a sum over examples, so the sums of the chunks add up to the sum of the batch: one example moves it by
at most C, the noise is added once, and the step is billed once.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpx._guards import require_params
from dpx._states import find_state
from dpx.batches import Batch, Tree, batch_size, inclusion, require_batch
from dpx.gradients.explicit_axes import along_examples, call_with_auto_axes
from dpx.gradients.results import Unreleased
from dpx.gradients.rows import rows_of
from dpx.gradients.sums import Clipping, sum_gradients
from dpx.mechanism import Mechanism
from dpx.states.record import ReleaseState

_OF_THE_BATCH = np.array([0, 1, 2, 4])  # the numbers of `Batch.drawn` that are the same in all chunks


class AccumulatedSums(NamedTuple):
    """The sums of the chunks of one batch so far. They have no noise: never share them.

    unreleased_sums:  one sum for each factor of the mechanism, float32, like the encoded gradient of one example.
    unreleased_count: int32 (), how many rows of the chunks count.
    unreleased_drawn: uint32 (5,), `Batch.drawn` of the first chunk; None for chunks without it.
    unreleased:       losses, norms and aux of the examples of the chunk that was added last. NOT private.
    unreleased_rows:  int32 (), how many rows the chunks have, padding included.
    step:             int32 (), the step of the state that the chunks were added with.
    owner:            uint32 (), a fingerprint of the mechanism that they were added with.
    ordered:          bool (), whether they are chunks of one batch, each added once and in order, at that step.
    """

    unreleased_sums: tuple[Tree, ...]
    unreleased_count: jax.Array
    unreleased_drawn: jax.Array | None
    unreleased: Unreleased | None
    unreleased_rows: jax.Array
    step: jax.Array
    owner: jax.Array
    ordered: jax.Array


@dataclass(frozen=True, eq=False)
class Accumulation:
    """The two functions of a step in chunks, which `accumulate` builds and describes.

    sum_rows: as in `dpx.gradients.sums`. optimizer, with_key: of `accumulate`.
    """

    sum_rows: Callable
    optimizer: Mechanism
    with_key: bool

    def add(self, params: Tree, chunk: Batch, state: Tree, sums: AccumulatedSums | None = None) -> AccumulatedSums:
        """`sums` with one more chunk of the batch; None begins."""
        batch_size(require_batch(chunk).examples)
        require_params(params)
        if sums is not None:
            _require_sums(sums)
            if (sums.unreleased_drawn is None) != (chunk.drawn is None):
                raise ValueError("all chunks of a batch must have `drawn`, or none of them; got some with it")
            sums = sums._replace(unreleased=None)  # of the chunk before

        def place(params_on, chunk_on, state_on, sums_on):
            rows = along_examples(chunk_on.examples)
            one: Any = NamedSharding(rows.mesh, PartitionSpec())
            sums = _place_sums(self.optimizer, params, state, params_on, one)
            return AccumulatedSums(sums, one, one, rows, one, one, one, one)

        return call_with_auto_axes(self._add, (params, chunk, state, sums), place)

    def release(self, params: Tree, sums: AccumulatedSums, state: Tree) -> tuple[Tree, Tree]:
        """(updates, state) of the whole batch: the private updates, like `params`, and the next state."""
        _require_sums(sums)
        require_params(params)
        arguments = params, sums._replace(unreleased=None), state
        return call_with_auto_axes(self._release, arguments, lambda params, sums, state: (params, state))

    def _add(self, params, chunk, state, sums):
        size = batch_size(chunk.examples)
        counts = jnp.ones(size, bool) if chunk.included is None else chunk.included
        included = inclusion(size, counts, self.optimizer.sampling)
        first = jnp.int32(0) if sums is None else sums.unreleased_rows
        rows = rows_of(self.optimizer, state, chunk.examples, with_key=self.with_key, first=first)
        total, of_each = self.sum_rows(params, state, rows, included)
        drawn = None if chunk.drawn is None else jnp.asarray(chunk.drawn).astype(jnp.uint32)
        one = AccumulatedSums(
            unreleased_sums=total,
            unreleased_count=jnp.sum(included, dtype=jnp.int32),
            unreleased_drawn=drawn,
            unreleased=Unreleased(*of_each),
            unreleased_rows=jnp.int32(size),
            step=_step_of(state),
            owner=_owner(self.optimizer),
            ordered=jnp.bool_(True) if drawn is None else drawn[3] == first.astype(jnp.uint32),
        )
        return one if sums is None else _joined(sums, one)

    def _release(self, params, sums, state):
        ordered = sums.ordered & (sums.step == _step_of(state)) & (sums.owner == _owner(self.optimizer))
        total, count, drawn = sums.unreleased_sums, sums.unreleased_count, sums.unreleased_drawn
        return self.optimizer.release_once(total, state, params, count, drawn, ordered=ordered)


def accumulate(
    loss: Callable,
    optimizer: Mechanism,
    *,
    microbatch_size: int | None = None,
    clipping: Clipping = "auto",
    with_key: bool = False,
    has_aux: bool = False,
    platform: str | None = None,
) -> Accumulation:
    """Builds `private_grad` in two functions, for a batch that does not fit into memory and comes in chunks.

        step, sums = dpx.accumulate(loss, optimizer), None
        for chunk in chunks:                                    # of ONE batch
            sums = step.add(params, chunk, state, sums)
        updates, state = step.release(params, sums, state)      # one noise, one step of the bill

    The updates are those of one call of `private_grad` with the whole batch, up to float32 rounding; the keys of the
    examples are the same, because they count the rows of the chunks before. Both functions can be jitted, `add` also
    with donated sums. `sums` is an `AccumulatedSums`, as sensitive as the data.

    loss, optimizer, microbatch_size, clipping, with_key, has_aux, platform: as in `private_grad`.
    chunk: a `dpx.Batch`. With `drawn`, the chunks must be all those of one batch, of the step of the state, each once
        and in order. Otherwise the state has no bill, as after a batch that was used twice. Chunks of your own,
        without `drawn`, are taken as they are. All chunks of a batch are added, and released, with one state.

    Raises ValueError as `private_grad` does; `add` also if only some chunks have `drawn`, and both if `sums` is no
    AccumulatedSums.
    """
    options: Any = {"microbatch_size": microbatch_size, "has_aux": has_aux, "platform": platform}
    sum_rows = sum_gradients(loss, optimizer, clipping=clipping, **options)
    return Accumulation(sum_rows, optimizer, with_key)


def _step_of(state: Tree) -> jax.Array:
    return find_state(state, ReleaseState, "mechanism's state").step


def _owner(mechanism: Mechanism) -> jax.Array:
    """A fingerprint of what a mechanism does and bills, uint32 (): two that clip to other norms have different ones."""
    return jnp.uint32(zlib.crc32(repr((mechanism.stages, mechanism.terms.tolist())).encode()))


def _require_sums(sums):
    if not isinstance(sums, AccumulatedSums):
        raise ValueError(f"sums must be the AccumulatedSums that `add` returned, got {type(sums)}")


def _place_sums(mechanism: Mechanism, params: Tree, state: Tree, params_on: Tree, replicated: NamedSharding) -> Tree:
    """The shardings of the sums: those of the parameters if the encoded gradient is like them, else replicated."""
    like, state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, state))
    encoded = jax.eval_shape(mechanism.encode, like, state)
    factors = jax.eval_shape(lambda encoded, state: mechanism.weigh(mechanism.norm(encoded), state), encoded, state)
    shapes, expected = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (encoded, like)]
    return (params_on,) * len(factors) if shapes == expected else replicated


def _joined(sums: AccumulatedSums, one: AccumulatedSums) -> AccumulatedSums:
    """The sums with one more chunk, whose `ordered` says whether it begins where they end."""
    ordered = sums.ordered & one.ordered & (sums.step == one.step) & (sums.owner == one.owner)
    if sums.unreleased_drawn is not None and one.unreleased_drawn is not None:
        ordered &= jnp.all(sums.unreleased_drawn[_OF_THE_BATCH] == one.unreleased_drawn[_OF_THE_BATCH])
    return AccumulatedSums(
        unreleased_sums=jax.tree.map(jnp.add, sums.unreleased_sums, one.unreleased_sums),
        unreleased_count=sums.unreleased_count + one.unreleased_count,
        unreleased_drawn=sums.unreleased_drawn,
        unreleased=one.unreleased,
        unreleased_rows=sums.unreleased_rows + one.unreleased_rows,
        step=sums.step,
        owner=sums.owner,
        ordered=ordered,
    )
