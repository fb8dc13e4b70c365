"""Private gradients of a loss, and private updates from any function of one unit's data, in one call or in chunks.

A batch that does not fit into memory comes in chunks, which are added one by one and released once. Their sums add up
to the clipped sum of the batch. So one example moves it by at most C, noise is added once, and the cost is that of one
step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dpx.gradients import ghost
from dpx.gradients.clipped_gradients import Norms, RowSum, count_row_shards, require_platform, sum_gradients
from dpx.gradients.one_example import function_of_row, rows_with_keys
from dpx.mechanism import Mechanism
from dpx.mechanism.guards import checked_params
from dpx.sampling.batch import Batch, included_rows, require_batch
from dpx.sampling.data import batch_size
from dpx.states.record import DrawRecord, ReleaseState, fingerprint
from dpx.sums.clipped_sum import norms_in_range
from dpx.sums.rounding import FloatPair, add_pairs, with_low_part
from dpx.values import (
    Tree,
    explain_misuse,
    find_only_node,
    float32_like,
    repr_with_shapes,
    require_function,
    require_whole,
    warn_user,
)
from dpx.xla.jaxprs import identity_of_program, inputs_read

_ROUNDING = 1e-6  # relative error of a schedule compiled in two programs


class Unreleased(NamedTuple):
    """Values of each example, with the B examples on axis 0. NOT private: for debugging and tuning only.

    They are as sensitive as the data. Excluded rows have values too. A jitted program computes only those that you use.

    losses: (B,), in the loss's dtype. None for `private_updates_from`, which has no loss.
    norms:  float32 (B,), the norms of the encoded gradients before clipping; a tree of them for a mechanism with one
            norm for each group. To tune a clip norm, look at the share of clipped examples,
            `(unreleased.norms > clip_norm)[batch.included].mean()`.
    aux:    with `has_aux=True`, the second result of the per-example function, (B, ...) in each leaf; otherwise None.
    """

    losses: Tree
    norms: Tree
    aux: Tree

    __repr__ = repr_with_shapes

    def usable_rows(self) -> jax.Array:
        """Whether each row's gradient is usable, bool (B,): it has no NaN, and no norm above 2^63."""
        return norms_in_range(self.norms)


class PrivateUpdates(NamedTuple):
    """The result of one private step.

    updates: private, shaped like the parameters, in their dtypes. state: the mechanism's next state.
    unreleased: losses, norms and aux of the examples. NOT private.
    """

    updates: Tree
    state: Tree
    unreleased: Unreleased

    __repr__ = repr_with_shapes


@dataclass(frozen=True, eq=False)
class PrivateStep:
    """Computes `(params, batch, state) -> PrivateUpdates`. row_sum: the clipped sum of the rows of a batch."""

    row_sum: RowSum = field(repr=False)
    optimizer: Mechanism
    with_key: bool

    def __call__(self, params: Tree, batch: Batch, state: Tree) -> PrivateUpdates:
        require_batch(batch)
        params = checked_params(params, self.optimizer)
        find_only_node(state, ReleaseState, "mechanism's state")
        return call_with_auto_axes(self._release, (params, batch, state), self._place)

    def _release(self, params, batch, state):
        examples, included, drawn = batch
        included = included_rows(batch_size(examples), included, self.optimizer.sampling)
        rows = rows_with_keys(self.optimizer, state, examples, with_key=self.with_key)
        sums, of_each = self.row_sum(params, state, rows, included)
        with self.row_sum.tracing_context():  # this decides how noise is drawn
            updates, state = self.optimizer.check_and_release(sums, state, params, jnp.sum(included), drawn)
        return PrivateUpdates(updates, state, Unreleased(*of_each))

    def _place(self, params, batch, state):
        return PrivateUpdates(params, state, sharding_along_examples(batch.examples))


@explain_misuse
def private_updates(
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
) -> PrivateStep:
    """Builds `fn(params, batch, state) -> PrivateUpdates`, the private gradient of `loss(params, example)`.

    loss: returns a real scalar for one example, which has no batch axis.
    optimizer: a `dpx.Mechanism`. If `dpx.chain` built it, the updates come from the optax transforms.
    microbatch_size: int, how many examples are in memory at once. None: all, but fewer if a batch would not fit in half
        of the device's memory, or if that is faster on a CPU or TPU. It affects rounding, so set it if your own loop
        may continue with more or less memory. Microbatches run in a loop; on a CPU, up to 64 are unrolled if the loss
        has convolutions in a loop or under `jax.checkpoint`.
    norms: how the per-example norms are computed. "vmap": from the gradient of every example. "ghost": without it,
        for every parameter where that is possible. "auto": the cheaper of the two for each parameter, estimated from
        shapes. `dpx.explain_norms` prints the choice.
    with_key: the loss is `loss(params, example, key)`. Every row of a batch gets its own scalar PRNG key, from the
        "example" stream of the mechanism's key, the step and its position; microbatches and devices do not change it.
    has_aux: the loss returns (value, aux), aux any pytree of arrays; `unreleased.aux` holds it for every example.
    platform: "cpu", "cuda", "rocm" or "tpu", if the program is compiled for a platform other than JAX's default
        backend, as in `jax.export`. The number of microbatches and their loop depend on it; the result does not.
    sharding: how the batches are sharded, as for `sampling.batches`. Give it if a mesh has more axes than that of the
        examples (tensor parallel): without it, dpx assumes that all devices share the examples, and a step takes more
        memory. The result is the same up to float32 rounding.
    backward_passes: int, 1 or 2. One pass keeps the inputs and cotangents of all layers until the norms are known. With
        two, the second pass recomputes those of scans and `jax.checkpoint`, so that they are never all in memory, as in
        a step without privacy. It takes about 1.5 times as long (docs/devices.md). None: two if one pass over one
        example, or over `microbatch_size` of them, would not fit in half of the device's memory. It affects rounding.

    params: a pytree of real arrays. batch: a `dpx.Batch` with the B examples on axis 0, which may be sharded. state:
    from `optimizer.init(params)`. The updates equal `optimizer.update` on stacked per-example gradients, up to float32
    rounding. The result's `unreleased` values are NOT private. On mesh axes of type Explicit, the updates are sharded
    like the parameters, the state as before, and `unreleased` like the examples. Inside a `jax.shard_map` with
    check_vma=True, only "vmap" works.

    Raises ValueError for another type of optimizer, unknown `norms` or `platform`, a `microbatch_size` below 1, or two
    backward passes with `norms="vmap"`. `fn` raises ValueError if the batch is not a `dpx.Batch` or does not fit the
    sampling, and if the parameters contain complex numbers, Flax modules or batch statistics.
    Ghost norms: https://arxiv.org/abs/1510.01799, https://arxiv.org/abs/2110.05679, https://arxiv.org/abs/2210.00038.

        >>> step = jax.jit(dpx.private_updates(loss, optimizer))
        >>> updates, state, unreleased = step(params, batch, state)
        >>> params = optax.apply_updates(params, updates)
        >>> dpx.epsilon(optimizer, state, delta=1e-5)  # of one step
        1.03...
    """
    options: Any = {"microbatch_size": microbatch_size, "has_aux": has_aux, "platform": platform, "sharding": sharding}
    options["backward_passes"] = backward_passes
    row_sum = sum_gradients(loss, optimizer, norms=norms, **options)
    return PrivateStep(row_sum, optimizer, with_key)


@explain_misuse
def private_updates_from(
    update_of_unit: Callable,
    optimizer: Mechanism,
    *,
    microbatch_size: int | None = None,
    with_key: bool = False,
    has_aux: bool = False,
    platform: str | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> PrivateStep:
    """Builds `fn(params, batch, state) -> PrivateUpdates` from `update_of_unit(params, unit)`, the update of one unit.

    A unit is what the sampling draws and epsilon protects, for example all data of one user. Its update is bounded like
    a gradient, whether it comes from several local steps or is the mean gradient of the user's data. `private_updates`
    is the special case of a gradient.

    update_of_unit: returns a pytree like `params`. The result goes to `optax.apply_updates`, and an optimizer built by
        `dpx.chain` descends along it. So return the direction of a gradient: the old parameters minus the new ones.
    microbatch_size: int, how many units are in memory at once. None: all, or fewer if they do not fit.
    with_key: the function is `update_of_unit(params, unit, key)`, with a scalar PRNG key for each unit. has_aux: it
        returns (update, aux). optimizer, platform, sharding: as for `private_updates`.
    batch: a `dpx.Batch` with the units on axis 0. A unit is a pytree of arrays. If units differ in how many examples
        they have, pad them, and put your own mask into the unit. `unreleased.losses` is None.

    Raises ValueError as `private_updates` does, and `fn` also if an update has another structure or shape than params.

        >>> def update_of_unit(params, unit):  # a step of SGD on the data of one user
        ...     return jax.tree.map(lambda gradient: 0.1 * gradient, jax.grad(loss)(params, unit))
        >>> step = dpx.private_updates_from(update_of_unit, optimizer)
    """
    of_row = function_of_row(update_of_unit, has_aux=has_aux)
    where = require_platform(platform), count_row_shards(sharding)
    row_sum = RowSum(of_row, optimizer, "update", microbatch_size, *where)
    return PrivateStep(row_sum, optimizer, with_key)


@explain_misuse
def explain_norms(
    loss: Callable,
    optimizer: Mechanism,
    params: Tree,
    batch: Batch,
    *,
    norms: Norms = "auto",
    with_key: bool = False,
    has_aux: bool = False,
    platform: str | None = None,
) -> ghost.NormExplanation:
    """A printable table of how `private_updates` computes the norms of each parameter, and why.

    docs/speed.md says what each line means.

    loss: (params, example) -> float scalar, for one example without a batch axis. optimizer: a `dpx.Mechanism`.
    params, batch: as for the step; both may hold `jax.ShapeDtypeStruct`s instead of arrays.
    norms, with_key, has_aux, platform: as for `private_updates`, with the same ValueErrors.

        >>> print(dpx.explain_norms(loss, optimizer, params, batch))
        ['b']  per-example gradients as small as cotangents
        ['w']  norm from |input| |cotangent|
        ...
    """
    row_sum = sum_gradients(loss, optimizer, microbatch_size=None, norms=norms, has_aux=has_aux, platform=platform)
    params, state = checked_params(params, optimizer), jax.eval_shape(optimizer.init, params)
    examples = require_batch(batch).examples
    rows = jax.eval_shape(functools.partial(rows_with_keys, optimizer, with_key=with_key), state, examples)
    with row_sum.tracing_context():
        plan, cost = row_sum.plan_and_cost(params, state, rows)
        at_once = row_sum.microbatches_for(plan, cost, params, batch_size(examples))
    return ghost.explain_plan(plan, params, *at_once.reasons_in_words)


@explain_misuse
def augmented(
    loss: Callable[..., Tree], augment: Callable[[Tree, jax.Array], Tree], *, copies: int
) -> Callable[[Tree, Tree, jax.Array], Tree]:
    """Builds `mean_loss(params, example, key)`, the mean of `loss` over `copies` random views of one example.

    Give it to `private_updates`, `fit`, `check` or `explain` with `with_key=True`. The views of an example are averaged
    BEFORE its gradient is clipped. So the example still counts once, and sensitivity, noise and cost are those of
    `loss`. Ghost norms treat the views like `copies` positions of a sequence, and need no gradient of a view.

    loss: (params, example) -> float scalar, or (value, aux) with has_aux=True; aux is then averaged over the views too.
    augment: (example, key) -> one view: a pytree for `loss`. It must depend only on these two arguments and on public
        constants, never on other examples. The scalar key differs among examples, steps and views. If the loss needs
        random numbers, put a key into the view.
    copies: int, at least 1; the time of a step grows by about this factor (benchmarks/augmented.py). On a CPU, a
        `microbatch_size` whose views fit in the cache of a core, such as 64, can be a fifth faster.

    Raises ValueError for other `copies`, or if `loss` or `augment` is not callable.
    De et al. 2022, https://arxiv.org/abs/2204.13650, section 3.2; Hoffer et al. 2020, https://arxiv.org/abs/1901.09335.

        >>> def mirrored(example, key):
        ...     x, y = example
        ...     return jnp.where(jax.random.bernoulli(key), x, x[::-1]), y
        >>> step = dpx.private_updates(dpx.augmented(loss, mirrored, copies=4), optimizer, with_key=True)
    """
    require_function("loss", loss)
    require_function("augment", augment, "example", "key")
    require_whole("copies", copies)

    def mean_loss(params, example, key):
        def arrays_of_view(key):
            return [leaf for leaf in jax.tree.leaves(augment(example, key)) if isinstance(leaf, jax.Array)]

        if copies > 1 and not inputs_read(jax.make_jaxpr(arrays_of_view)(key).jaxpr)[-1]:
            warn_user(f"augment must use the key that it is given, or all {copies} views of an example are one")
        values = jax.vmap(lambda key: loss(params, augment(example, key)))(jax.random.split(key, copies))
        return jax.tree.map(lambda leaf: leaf.mean(0), values)

    return mean_loss


def call_with_auto_axes(function: Callable[..., Tree], arguments: tuple, place: Callable[..., Tree]) -> Tree:
    """Calls `function(*arguments)`, which need not know that arguments may be sharded over mesh axes of type Explicit.

    Inside, these axes have type Auto, so that XLA partitions the function; its results get the requested sharding.

    place: maps the arguments, with a sharding in place of every array, to the shardings of the results, a pytree
        prefix. Called only if an argument is on a mesh with axes of type Explicit.
    """
    shardings = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, arguments)
    meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings) if sharding.mesh.explicit_axes]
    if not meshes:
        return function(*arguments)
    replicated = NamedSharding(meshes[0], PartitionSpec())
    shardings = jax.tree.map(lambda sharding: replicated if sharding.mesh.empty else sharding, shardings)
    axes, out = meshes[0].explicit_axes, place(*shardings)
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)(*arguments)


def sharding_along_examples(shardings: Tree) -> Any:
    """The sharding of arrays with one row per example. shardings: those of the examples, as in `place`."""
    first = jax.tree.leaves(shardings)[0]
    return NamedSharding(first.mesh, PartitionSpec(*first.spec[:1]))


class AccumulatedSums(NamedTuple):
    """The sums of the chunks of one batch so far. They have no noise: never share them.

    unreleased_sums:  one `FloatPair` for each factor of the mechanism, shaped like the encoded gradient of one example,
                      so that neither the order nor the number of chunks matters.
    unreleased_count: int32 (), how many rows of the chunks count.
    unreleased_drawn: `Batch.drawn` of the first chunk; None for chunks without it.
    unreleased:       losses, norms and aux of the examples in the last chunk. NOT private.
    unreleased_rows:  int32 (), how many rows the chunks have, including padding.
    step:             int32 (), the step of the state under which the chunks were added.
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
        """Adds one more chunk of the batch to `sums`, which is None for the first chunk."""
        require_batch(chunk)
        params = checked_params(params, self.optimizer)
        _step_of_state(state)
        if sums is not None:
            _require_accumulated_sums(sums)
            if (sums.unreleased_drawn is None) != (chunk.drawn is None):
                raise ValueError("all chunks of a batch must have `drawn`, or none of them; got some of each")
            sums = sums._replace(unreleased=None)  # left by the chunk before

        def shardings_of_sums(params_on, chunk_on, state_on, sums_on):
            """Returns the parameters' shardings if the encoded gradient has their structure; otherwise, replicates."""
            rows = sharding_along_examples(chunk_on.examples)
            one: Any = NamedSharding(rows.mesh, PartitionSpec())
            like, of_state = _shapes_of_sums(params, state)
            encoded, _, factors = jax.eval_shape(self.optimizer.contribute, like, of_state)
            shapes, expected = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (encoded, like)]
            sums = (FloatPair(params_on, params_on),) * len(factors) if shapes == expected else one
            return AccumulatedSums(sums, one, one, rows, one, one, one, one, one)

        return call_with_auto_axes(self._add, (params, chunk, state, sums), shardings_of_sums)

    def release(self, params: Tree, sums: AccumulatedSums, state: Tree) -> tuple[Tree, Tree]:
        """Returns (updates, state) for the whole batch: private updates, like `params`, and the next state."""
        _require_accumulated_sums(sums)
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
            unreleased_sums=tuple(map(with_low_part, total)),
            unreleased_count=jnp.sum(included, dtype=jnp.int32),
            unreleased_drawn=drawn,
            unreleased=Unreleased(*of_each),
            unreleased_rows=jnp.int32(size),
            step=_step_of_state(state),
            mechanism=_fingerprint_of_mechanism(self.optimizer, params, state),
            clipping=_clip_bounds(self.optimizer, state),
            ordered=jnp.bool_(True) if drawn is None else drawn.first_row == first.astype(jnp.uint32),
        )
        return one if sums is None else _add_next_chunk(sums, one)

    def _release(self, params, sums, state):
        ordered = sums.ordered & (sums.step == _step_of_state(state))
        ordered &= sums.mechanism == _fingerprint_of_mechanism(self.optimizer, params, state)
        ordered &= _equal_up_to_rounding(sums.clipping, _clip_bounds(self.optimizer, state))
        total, count, drawn = sums.unreleased_sums, sums.unreleased_count, sums.unreleased_drawn
        with self.row_sum.tracing_context():  # as in `PrivateStep`
            return self.optimizer.check_and_release(total, state, params, count, drawn, ordered=ordered)


@explain_misuse
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
    """Builds `private_updates` as two functions, for a batch that does not fit into memory and comes in chunks.

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

    loss: (params, example) -> float scalar, for one example without a batch axis. optimizer: a `dpx.Mechanism`.
    microbatch_size: int, how many examples of a chunk are computed at once; None lets dpx choose.
    norms, with_key, has_aux, platform, backward_passes: as for `private_updates`. sharding: how chunks are sharded.
    chunk: a `dpx.Batch`. If chunks have `drawn`, they must be all chunks of one batch, drawn at the step of the state,
        each once and in order. Otherwise the state has no epsilon, as after a batch that was used twice. Your own
        chunks, without `drawn`, are not checked. Add and release all chunks of a batch with one state.

    Raises ValueError as `private_updates` does, if only some chunks have `drawn`, and if `add` did not make `sums`.
    """
    options: Any = {"microbatch_size": microbatch_size, "has_aux": has_aux, "platform": platform, "sharding": sharding}
    row_sum = sum_gradients(loss, optimizer, norms=norms, backward_passes=backward_passes, **options)
    return PrivateChunks(row_sum, optimizer, with_key)


def _step_of_state(state: Tree) -> jax.Array:
    return find_only_node(state, ReleaseState, "mechanism's state").step


def _fingerprint_of_mechanism(mechanism: Mechanism, params: Tree, state: Tree) -> jax.Array:
    """A fingerprint, uint32 (), of what a mechanism adds and costs; it changes with the clip norm."""
    program = jax.make_jaxpr(mechanism.contribute)(*_shapes_of_sums(params, state))
    return jnp.uint32(fingerprint((identity_of_program(program), mechanism.fingerprints)))


def _clip_bounds(mechanism: Mechanism, state: Tree) -> jax.Array:
    """The bounds of this step, float32 (n,), read when the sums are computed and again when they are released. A
    schedule that depends on more than the step can change in between, and then the sums would be larger than their
    noise covers."""
    return jnp.stack(jax.tree.leaves(mechanism.bound(state)))


def _equal_up_to_rounding(one: jax.Array, other: jax.Array) -> jax.Array:
    """Whether bounds computed by two programs are equal up to rounding, bool ()."""
    if one.shape != other.shape:
        return jnp.bool_(False)
    return jnp.all(jnp.abs(one - other) <= _ROUNDING * jnp.abs(other))


def _shapes_of_sums(params: Tree, state: Tree) -> tuple[Tree, Tree]:
    return float32_like(params), jax.eval_shape(lambda state: state, state)


def _require_accumulated_sums(sums):
    if not isinstance(sums, AccumulatedSums):
        raise ValueError(f"sums must be the AccumulatedSums that `add` returned, got {type(sums)}")


def _add_next_chunk(sums: AccumulatedSums, one: AccumulatedSums) -> AccumulatedSums:
    """Adds the chunk `one` to the sums. The result's `ordered` says whether `one` begins where the sums end."""
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
