"""Private gradients of a loss, without ever holding more than a microbatch of per-example gradients."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dpx import ghost
from dpx.mechanism import Mechanism, Tree, batch_size, inclusion, sum_contributions

LARGEST_UNROLL = 64  # microbatches; beyond it the compile time outweighs what unrolling gains
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
    """`fn(params, batch, state, *, weights=None) -> PrivateGradient` for `loss(params, example) -> scalar`.

    `example` has no batch axis; `batch` is the same pytree with the examples on axis 0. The numbers are those of
    `mechanism.update` on stacked gradients, to float32. A mechanism built by `dpx.chain` gives the optimizer's updates.

    microbatch_size: how many examples are worked on at once (None: the whole batch). Microbatches are unrolled on CPU,
        where convolutions inside loops are slow, and looped elsewhere.
    clipping: how the norms are had. "vmap" makes every per-example gradient; "ghost" follows every parameter it can
        (`dpx.ghost`); "auto" decides per parameter, while tracing, by an estimate of the cost. `dpx.explain` tells.
    """
    _check(mechanism, clipping)
    if microbatch_size is not None and (not isinstance(microbatch_size, int) or microbatch_size < 1):
        raise ValueError(f"microbatch_size must be a whole number of at least 1, or None; got {microbatch_size!r}")

    def private_gradient(params, batch, state, *, weights=None):
        size = batch_size(batch)
        included = inclusion(size, weights)
        plan = _plan(loss, mechanism, params, batch, state, clipping)

        def microbatch(params, rows):
            examples, rows_included = rows
            if isinstance(plan, ghost.Plan) and plan.follows:
                return ghost.sum_contributions(plan, mechanism, params, examples, state, rows_included)
            losses, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(params, examples)
            return sum_contributions(mechanism, grads, state, rows_included), losses

        sums, losses = _over_microbatches(microbatch, params, (batch, included), size, microbatch_size or max(size, 1))
        updates, state = mechanism.release(sums, state, params)
        return PrivateGradient(updates, state, losses)

    return private_gradient


def explain(
    loss: Callable[[Tree, Tree], jax.Array],
    mechanism: Mechanism,
    params: Tree,
    batch: Tree,
    *,
    clipping: Clipping = "auto",
) -> ghost.Explanation:
    """Which way `private_grad` takes for each parameter, and why; print it. Shapes suffice for `params` and `batch`."""
    _check(mechanism, clipping)
    state = jax.eval_shape(mechanism.init, params)
    return ghost.explain(_plan(loss, mechanism, params, batch, state, clipping), params)


def _check(mechanism, clipping):
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must be a dpx Mechanism (chain optimizers with dpx.chain), got {type(mechanism)}")
    if clipping not in ("auto", "ghost", "vmap"):
        raise ValueError(f'clipping must be "auto", "ghost" or "vmap", got {clipping!r}')


def _plan(loss, mechanism, params, batch, state, clipping) -> ghost.Plan | str:
    if clipping == "vmap":
        return "asked for"
    batch_size(batch)
    rows = jax.eval_shape(lambda batch: batch, batch)
    example = jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), rows)
    return ghost.make_plan(loss, mechanism, params, example, state, force=clipping == "ghost")


def _over_microbatches(function, params, rows, size, microbatch_size):
    """`function(params, rows)` summed (its first output) and concatenated (its second) over slices of the rows."""
    whole, rest = divmod(size, microbatch_size)
    sums, outputs = _nothing(function, params, rows), []

    def part(sums, start, stop):
        # A microbatch waits for the sums before it, so that only one is in memory. Never true, but XLA cannot know; it
        # drops an optimization_barrier before it orders what it runs.
        never = sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(sums) if leaf.size) > jnp.inf
        waiting = jax.tree.map(lambda p: jnp.where(never, jnp.zeros_like(p), p), params)
        more, output = function(waiting, jax.tree.map(lambda leaf: leaf[start:stop], rows))
        outputs.append(output)
        return jax.tree.map(jnp.add, sums, more)

    if size == microbatch_size:
        return function(params, rows)
    if whole <= 1 or (jax.default_backend() == "cpu" and whole <= LARGEST_UNROLL):
        for i in range(whole):
            sums = part(sums, i * microbatch_size, (i + 1) * microbatch_size)
    else:

        def body(sums, rows):
            more, output = function(params, rows)
            return jax.tree.map(jnp.add, sums, more), output

        shape = (whole, microbatch_size)
        head = jax.tree.map(lambda leaf: leaf[: whole * microbatch_size].reshape(*shape, *leaf.shape[1:]), rows)
        sums, stacked = jax.lax.scan(body, sums, head)
        outputs.append(stacked.reshape(-1, *stacked.shape[2:]))
    if rest:
        sums = part(sums, size - rest, size)
    return sums, jnp.concatenate(outputs) if outputs else jnp.zeros(0)


def _nothing(function, params, rows):
    """The sums over no examples."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), rows)
    sums, _ = jax.eval_shape(function, params, one)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)
