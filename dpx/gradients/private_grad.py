"""Private gradients of a loss, without ever holding more than a microbatch of per-example gradients."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from dpx._contributions import sum_contributions
from dpx._guards import require_real
from dpx._microbatching import sum_over_microbatches
from dpx._numbers import require_whole
from dpx._ordering import compute_after
from dpx._states import map_states
from dpx.batches import Batch, Tree, batch_size, inclusion, require_batch
from dpx.gradients import ghost
from dpx.gradients.microbatch_size import choose_microbatch_size, forward_cost
from dpx.mechanism import Mechanism
from dpx.release_state import ReleaseState

Clipping = Literal["auto", "ghost", "vmap"]


class PrivateGradient(NamedTuple):
    """updates: like the parameters, private. state: the mechanism's next one.

    unreleased_losses: (B,), the per-example losses: NOT private, for debugging only.
    """

    updates: Tree
    state: Tree
    unreleased_losses: jax.Array


def private_grad(
    loss: Callable[[Tree, Tree], jax.Array],
    mechanism: Mechanism,
    *,
    microbatch_size: int | None = None,
    clipping: Clipping = "auto",
) -> Callable[..., PrivateGradient]:
    """`fn(params, batch, state) -> PrivateGradient` for `loss(params, example) -> scalar`.

    `example` has no batch axis; `batch` is a `dpx.Batch`, whose `examples` are the same pytree with the examples on
    axis 0. The numbers are those of `mechanism.update` on stacked gradients, to float32. A mechanism built by
    `dpx.chain` gives the optimizer's updates.

    microbatch_size: how many examples are worked on at once. None: the whole batch, or on a CPU, for a model without
        convolutions, as few as stay in its cache if that is faster. Microbatches are looped; with convolutions, which
        are slow inside loops on a CPU, up to 64 are unrolled there.
    clipping: how the per-example norms are computed. "vmap" makes every per-example gradient; "ghost" follows every
        parameter that it can (`dpx.gradients.ghost`); "auto" decides for each parameter, while tracing, by an estimate
        of the cost. `dpx.explain` tells.
        Inside a `jax.shard_map` only "vmap" works with check_vma=True, and all do with False.
    A batch may be sharded over mesh axes of type Auto; for those of type Explicit, wrap the function in
    `jax.sharding.auto_axes(fn, out_sharding=jax.sharding.PartitionSpec())`. ValueError else.
    """
    _check(mechanism, clipping)
    microbatch_size = None if microbatch_size is None else require_whole("microbatch_size", microbatch_size)

    def private_gradient(params, batch, state):
        examples, included, drawn = require_batch(batch)
        size = batch_size(examples)
        _require_auto(examples)
        require_real(params)
        included = inclusion(size, included, mechanism.sampling)
        example = _example_shapes(examples)
        plan = _plan(loss, mechanism, params, example, state, clipping)
        cost = forward_cost(loss, params, example)
        at_once = microbatch_size or choose_microbatch_size(cost, plan, params, size)

        def microbatch(ordered, rows):
            (some_examples, some_included), ordered_params = rows, ordered(params)
            if isinstance(plan, ghost.Plan) and plan.followed:
                return ghost.sum_contributions(plan, mechanism, ordered_params, some_examples, state, some_included)
            losses, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(ordered_params, some_examples)
            return sum_contributions(mechanism, grads, state, some_included), losses

        unroll = cost.convolves and jax.default_backend() == "cpu"
        sums, losses = sum_over_microbatches(microbatch, (examples, included), max(1, at_once), unroll=unroll)
        updates, state = mechanism.release_once(sums, _delay_noise_until(sums, state), params, included, drawn)
        return PrivateGradient(updates, state, losses)

    return private_gradient


def explain(
    loss: Callable[[Tree, Tree], jax.Array],
    mechanism: Mechanism,
    params: Tree,
    batch: Batch,
    *,
    clipping: Clipping = "auto",
) -> ghost.Explanation:
    """Which way `private_grad` takes for each parameter, and why; print it. Shapes suffice for `params` and `batch`."""
    _check(mechanism, clipping)
    state = jax.eval_shape(mechanism.init, params)
    example = _example_shapes(require_batch(batch).examples)
    return ghost.explain(_plan(loss, mechanism, params, example, state, clipping), params)


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


def _example_shapes(examples: Tree) -> Tree:
    """The shapes of one example."""
    batch_size(examples)
    shapes = jax.eval_shape(lambda examples: examples, examples)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=leaf.weak_type), shapes)


def _plan(loss, mechanism, params, example, state, clipping) -> ghost.Plan | str:
    if clipping == "vmap":
        return "asked for"
    return ghost.make_plan(loss, mechanism, params, example, state, force=clipping == "ghost")


def _delay_noise_until(sums, state):
    """`state` with its step counts, and so the noise, held back until no gradient is in memory any more."""
    return map_states(lambda node: compute_after(sums, node), state, ReleaseState)
