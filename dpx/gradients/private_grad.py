"""Private gradients of a loss, with at most one microbatch of per-example gradients in memory at a time."""

import functools
from collections.abc import Callable
from typing import Literal

import jax

from dpx._contributions import sum_contributions
from dpx._guards import require_params, require_real
from dpx._microbatching import sum_over_microbatches
from dpx._numbers import require_whole
from dpx.batches import Batch, Tree, batch_size, inclusion, require_batch
from dpx.gradients import ghost
from dpx.gradients.microbatch_size import choose_microbatch_size, forward_cost
from dpx.gradients.results import PrivateGradient, Unreleased
from dpx.gradients.rows import of_one_row, rows_of, shapes_of_one
from dpx.mechanism import Mechanism

Clipping = Literal["auto", "ghost", "vmap"]


def private_grad(
    loss: Callable,
    mechanism: Mechanism,
    *,
    microbatch_size: int | None = None,
    clipping: Clipping = "auto",
    with_key: bool = False,
    has_aux: bool = False,
) -> Callable[..., PrivateGradient]:
    """Builds `fn(params, batch, state) -> PrivateGradient`, the private gradient of `loss(params, example)`.

    loss: returns one real number, (), for one example, which has no batch axis.
    mechanism: a `dpx.Mechanism`. With one that `dpx.chain` builds, the updates are the optimizer's.
    microbatch_size: int, how many examples are in memory at once. None: all, but on a CPU fewer, if that is faster and
        the loss has no convolution. Microbatches run in a loop; with convolutions, up to 64 are unrolled on a CPU.
    clipping: how the per-example norms are computed. "vmap": from the gradient of every example. "ghost": without it,
        for every parameter where that is possible. "auto": the cheaper of the two for each parameter, by an estimate
        from shapes. `dpx.explain` prints the choice.
    with_key: the loss is `loss(params, example, key)`. Every row of a batch has a PRNG key of its own, (), from the
        "example" stream of the mechanism's key, the step and its position; no microbatch or device changes it.
    has_aux: the loss returns (value, aux), aux any pytree of arrays; `unreleased.aux` has it for every example.

    params: a pytree of real arrays. batch: a `dpx.Batch` with the B examples on axis 0, which may be sharded. state:
    from `mechanism.init(params)`. The updates are those of `mechanism.update` on stacked per-example gradients, up to
    float32 rounding. The result's `unreleased` values are NOT private. Inside a `jax.shard_map` with
    check_vma=True, only "vmap" works.

    Raises ValueError for another type of mechanism, another `clipping`, or a `microbatch_size` below 1. `fn` raises it
    if the batch is not a `dpx.Batch` or does not fit the sampling, for complex parameters, Flax modules or batch
    statistics among the parameters, and for a batch sharded over
    mesh axes of type Explicit: wrap it in `jax.sharding.auto_axes(fn, out_sharding=jax.sharding.PartitionSpec())`.
    Ghost norms: https://arxiv.org/abs/1510.01799, https://arxiv.org/abs/2110.05679, https://arxiv.org/abs/2210.00038.
    """
    _check(mechanism, clipping)
    microbatch_size = None if microbatch_size is None else require_whole("microbatch_size", microbatch_size)
    of_row = of_one_row(loss, has_aux=has_aux)

    def private_gradient(params, batch, state):
        examples, included, drawn = require_batch(batch)
        size = batch_size(examples)
        _require_auto(examples)
        require_real(params)
        require_params(params)
        included = inclusion(size, included, mechanism.sampling)
        rows = rows_of(mechanism, state, examples, with_key=with_key)
        row = shapes_of_one(rows)
        plan = _plan(of_row, mechanism, params, row, state, clipping)
        cost = forward_cost(of_row, params, row)
        at_once = microbatch_size or choose_microbatch_size(cost, plan, params, size)

        def microbatch(ordered, rows):
            return _sum_microbatch(plan, of_row, mechanism, ordered(params), state, *rows)

        unroll = cost.convolves and jax.default_backend() == "cpu"
        sums, of_each = sum_over_microbatches(microbatch, (rows, included), max(1, at_once), unroll=unroll)
        updates, state = mechanism.release_once(sums, state, params, included, drawn)
        return PrivateGradient(updates, state, Unreleased(*of_each))

    return private_gradient


def explain(
    loss: Callable,
    mechanism: Mechanism,
    params: Tree,
    batch: Batch,
    *,
    clipping: Clipping = "auto",
    with_key: bool = False,
    has_aux: bool = False,
) -> ghost.Explanation:
    """A printable table of how `private_grad` computes the norms of each parameter, and why.

    The arguments are those of `private_grad` and of the function that it builds. `params` and `batch` may hold
    `jax.ShapeDtypeStruct`s in place of arrays. Raises ValueError for the arguments that `private_grad` refuses.
    """
    _check(mechanism, clipping)
    state = jax.eval_shape(mechanism.init, params)
    rows = functools.partial(rows_of, mechanism, with_key=with_key)
    row = shapes_of_one(jax.eval_shape(rows, state, require_batch(batch).examples))
    plan = _plan(of_one_row(loss, has_aux=has_aux), mechanism, params, row, state, clipping)
    return ghost.explain(plan, params)


def _sum_microbatch(plan, of_row, mechanism, params, state, rows, included):
    """The sums of the contributions of one microbatch, one for each factor; the losses, norms and aux of its rows."""
    if isinstance(plan, ghost.Plan) and plan.followed:
        return ghost.sum_contributions(plan, mechanism, params, rows, state, included)
    (losses, aux), grads = jax.vmap(jax.value_and_grad(of_row, has_aux=True), in_axes=(None, 0))(params, rows)
    sums, norms = sum_contributions(mechanism, grads, state, included)
    return sums, (losses, norms, aux)


def _check(mechanism, clipping):
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must be a dpx Mechanism (chain optimizers with dpx.chain), got {type(mechanism)}")
    if clipping not in ("auto", "ghost", "vmap"):
        raise ValueError(f'clipping must be "auto", "ghost" or "vmap", got {clipping!r}')


def _require_auto(examples):
    for leaf in map(jax.typeof, jax.tree.leaves(examples)):
        if any(axis is not None for axis in leaf.sharding.spec):
            raise ValueError(
                "the batch must be sharded over mesh axes of type Auto (jax.make_mesh(..., axis_types=...)), or the "
                f"function wrapped in jax.sharding.auto_axes; got {leaf}"
            )


def _plan(of_row, mechanism, params, row, state, clipping) -> ghost.Plan | str:
    """The plan for ghost norms, or the reason why every parameter needs per-example gradients."""
    if clipping == "vmap":
        return 'clipping="vmap" was asked for'
    return ghost.make_plan(of_row, mechanism, params, row, state, force=clipping == "ghost")
