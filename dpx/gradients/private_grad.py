"""Private gradients of a loss; at most one microbatch of per-example gradients is in memory at a time."""

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
    """One release.

    updates: like the parameters, in their dtypes; private.
    state: the mechanism's next state.
    unreleased_losses: (B,), in the loss's dtype, the losses of the examples. NOT private: for debugging only.
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
    """Builds `fn(params, batch, state) -> PrivateGradient`, the private gradient of `loss(params, example)`.

    loss: gives one real number for one example, which has no batch axis.
    mechanism: a `dpx.Mechanism`. One that `dpx.chain` builds gives the optimizer's updates.
    microbatch_size: how many examples are in memory at once. None: all; on a CPU fewer, if that is faster, unless the
        loss convolves. Microbatches run in a loop; if the loss convolves, up to 64 are unrolled on a CPU.
    clipping: how the per-example norms are computed. "vmap": from the gradient of every example. "ghost": without it,
        for every parameter where that is possible. "auto": the cheaper of the two for each parameter, by an estimate
        from shapes. `dpx.explain` prints the choice.

    params: a pytree of real arrays. batch: a `dpx.Batch` with the B examples on axis 0, which may be sharded. state:
    from `mechanism.init(params)`. The updates are those of `mechanism.update` on stacked per-example gradients, up to
    float32 rounding. Inside a `jax.shard_map` with check_vma=True, only "vmap" works.

    Raises ValueError for a mechanism that is none, another `clipping`, or a `microbatch_size` below 1. `fn` raises it
    for a batch that is none or does not fit the sampling, for complex parameters, and for a batch sharded over mesh
    axes of type Explicit: wrap it in `jax.sharding.auto_axes(fn, out_sharding=jax.sharding.PartitionSpec())`.
    Ghost norms: https://arxiv.org/abs/1510.01799, https://arxiv.org/abs/2110.05679, https://arxiv.org/abs/2210.00038.
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
            return _sum_microbatch(plan, loss, mechanism, ordered(params), state, *rows)

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
    """How `private_grad` computes the norms of each parameter, and why; print it.

    Takes the arguments of `private_grad` and of the function that it builds. `params` and `batch` may hold
    `jax.ShapeDtypeStruct`s in place of arrays. Raises ValueError for the arguments that `private_grad` refuses.
    """
    _check(mechanism, clipping)
    state = jax.eval_shape(mechanism.init, params)
    example = _example_shapes(require_batch(batch).examples)
    return ghost.explain(_plan(loss, mechanism, params, example, state, clipping), params)


def _sum_microbatch(plan, loss, mechanism, params, state, examples, included):
    """The sums of the contributions, one for each factor, and the losses (B,) of one microbatch."""
    if isinstance(plan, ghost.Plan) and plan.followed:
        return ghost.sum_contributions(plan, mechanism, params, examples, state, included)
    losses, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(params, examples)
    return sum_contributions(mechanism, grads, state, included), losses


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
    """The shapes and dtypes of one example."""
    batch_size(examples)
    shapes = jax.eval_shape(lambda examples: examples, examples)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=leaf.weak_type), shapes)


def _plan(loss, mechanism, params, example, state, clipping) -> ghost.Plan | str:
    """The plan for ghost norms, or why every parameter keeps its per-example gradients."""
    if clipping == "vmap":
        return 'clipping="vmap" was asked for'
    return ghost.make_plan(loss, mechanism, params, example, state, force=clipping == "ghost")


def _delay_noise_until(sums, state):
    """`state`, unchanged, but its step counts, and so the noise, are computed when the gradients are freed."""
    return map_states(lambda node: compute_after(sums, node), state, ReleaseState)
