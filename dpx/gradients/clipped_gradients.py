"""The clipped sum of the rows of a batch, with at most one microbatch of them in memory at a time."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.extend import core

from dpx.gradients import ghost
from dpx.gradients.microbatch_size import (
    ForwardCost,
    Microbatches,
    Plan,
    choose_microbatches,
    forward_cost,
    require_platform,
)
from dpx.gradients.one_example import (
    adding_note,
    function_of_row,
    refusing_function_of_record,
    shapes_of_row,
    value_and_gradient,
    warn_of_constants,
)
from dpx.keys.noise import axes_that_vary
from dpx.mechanism import Mechanism, require_mechanism
from dpx.mechanism.guards import require_real
from dpx.sums.clipped_sum import sum_contributions
from dpx.sums.microbatches import sum_over_microbatches
from dpx.values import Tree, described, require_whole
from dpx.xla.place import current_place, tracing_for_place
from dpx.xla.rewrites import with_fast_products, with_reordered_convolutions
from dpx.xla.rows_apart import with_rows_apart

Norms = Literal["auto", "ghost", "vmap"]


@dataclass(frozen=True, eq=False)
class RowSum:
    """`(params, state, rows, included) -> (sums, (losses, norms, aux))`, the clipped sum of the rows of a batch.

    of_row: (params, row) -> (value, aux), the loss of one example or the update of one unit; see
    `one_example.function_of_row`.
    optimizer: the mechanism that bounds the rows; one sum for each of its factors.
    norms, backward_passes: as in `private_updates`; norms is "update" if `of_row` returns an update and not a loss.
    microbatch_size: int, how many rows are in memory at once. It and `backward_passes` are None for a choice by cost.
    platform: what the program is compiled for. devices: how many the rows are spread over; None if not known.
    inspect_loss: gets the closed jaxpr of a loss, the parameters and the shapes of one row, when a step is traced.
    """

    of_row: Callable
    optimizer: Mechanism
    norms: Norms | Literal["update"]
    microbatch_size: int | None
    platform: str
    devices: int | None = None
    backward_passes: int | None = None
    inspect_loss: Callable[[Any, Tree, tuple], None] = warn_of_constants

    def __post_init__(self):
        require_mechanism(self.optimizer)
        if self.microbatch_size is not None:
            require_whole("microbatch_size", self.microbatch_size)

    def __call__(self, params: Tree, state: Tree, rows: tuple, included: jax.Array) -> tuple[tuple, tuple]:
        """The sums, and the losses, norms and aux of every row. rows: of `rows_with_keys`. included: bool (B,)."""
        if axes := axes_that_vary(jax.tree.leaves(rows)):  # otherwise jax.grad sums over the devices of a shard_map
            params = jax.tree.map(lambda x: jax.lax.pcast(x, (*axes - axes_that_vary([x]),), to="varying"), params)
        with self.placed():
            plan, cost = self.plan(params, state, rows)
            at_once = self.microbatches_for(plan, cost, params, included.shape[0])

            def microbatch(ordered, rows):
                return self.sum_microbatch(plan, at_once.passes, cost, ordered(params), state, *rows)

            on_cpu = self.platform == "cpu"
            how = {"unroll": on_cpu and not cost.loops, "like": params}
            how["in_loop"] = with_reordered_convolutions if on_cpu and cost.convolves else core.jaxpr_as_fun
            with self.with_note_on_errors(lambda: shapes_of_row(rows)):
                return sum_over_microbatches(microbatch, (rows, included), max(1, at_once.size), **how)

    def placed(self) -> contextlib.AbstractContextManager[None]:
        return tracing_for_place(platform=self.platform, row_devices=self.devices)

    def with_note_on_errors(self, row: Callable[[], tuple]) -> Any:
        return adding_note("update" if self.norms == "update" else "loss", lambda: row()[0])

    def plan(self, params: Tree, state: Tree, rows: tuple) -> tuple[Plan, ForwardCost]:
        """How the norms are computed, or why only by per-example gradients; and a row's cost. All may be shapes."""
        row = shapes_of_row(rows)
        called = "update" if self.norms == "update" else "loss"
        with refusing_function_of_record(called, self.of_row, params, row), self.with_note_on_errors(lambda: row):
            traced = ghost.trace_loss(self.of_row, params, row)
        self.inspect_loss(traced.closed, params, row)
        cost = forward_cost(traced.closed.jaxpr)
        if self.norms == "update":
            _require_like(params, traced.shapes[0])
            return "an update is not a gradient of a loss", cost
        if self.norms == "vmap":
            return 'norms="vmap" was asked for', cost
        if self.norms == "auto" and self.optimizer.forward is not None:
            return ghost.ForwardPlan(len(jax.tree.leaves(params))), cost
        return ghost.make_ghost_plan(traced, self.optimizer, params, state, force=self.norms == "ghost"), cost

    def microbatches_for(self, plan: Plan, cost: ForwardCost, params: Tree, size: int) -> Microbatches:
        """What of `size` rows is in memory at once, at the place of the program."""
        given = {"microbatch_size": self.microbatch_size, "backward_passes": self.backward_passes}
        return choose_microbatches(cost, plan, params, size, current_place(), **given)

    def sum_microbatch(
        self, plan: Plan, passes: int, cost: ForwardCost, params: Tree, state: Tree, rows: tuple, included
    ):
        """The sums of the contributions of one microbatch, and the losses, norms and aux of its rows."""
        apart = with_rows_apart if cost.mixes else lambda function: function
        if isinstance(plan, ghost.GhostPlan) and plan.followed:
            how = {"backward_passes": passes, "apart": apart}
            return ghost.sum_by_plan(plan, self.optimizer, params, rows, state, included, **how)
        optimizer, of_row = self.optimizer, self.gradient
        if isinstance(plan, ghost.ForwardPlan):
            optimizer, of_row = optimizer.replace(encode=lambda encoded, state: encoded), self.derivatives(state)
        of_rows = jax.vmap(apart(of_row), (None, 0))
        if cost.multiplies and self.platform == "cpu":
            of_rows = with_fast_products(of_rows)
        (losses, aux), grads = of_rows(params, rows)
        sums, norms = sum_contributions(optimizer, grads, state, included)
        return sums, (losses, norms, aux)

    def derivatives(self, state: Tree) -> Callable[[Tree, tuple], tuple[tuple[Tree, Tree], Tree]]:
        """As `gradient`, but its second result is the encoded gradient, in the coordinates of this state."""
        forward = self.optimizer.forward
        assert forward is not None  # see `plan`
        return lambda params, row: forward(lambda params: self.of_row(params, row), params, state)

    def gradient(self, params: Tree, row: tuple) -> tuple[tuple[Tree, Tree], Tree]:
        """((loss, aux), gradient) of one row; ((None, aux), update) if it has its own update."""
        if self.norms == "update":
            update, aux = self.of_row(params, row)
            return (None, aux), update
        return value_and_gradient(self.of_row, has_aux=True)(params, row)


def sum_gradients(
    loss: Callable,
    optimizer: Mechanism,
    *,
    microbatch_size: int | None,
    norms: Norms,
    has_aux: bool,
    platform: str | None = None,
    sharding: Any = None,
    backward_passes: int | None = None,
) -> RowSum:
    """The clipped sum of the gradients of a loss of one example. The arguments are as in `private_updates`."""
    if norms not in ("auto", "ghost", "vmap"):
        raise ValueError(f'norms must be "auto", "ghost" or "vmap", got {described(norms)}')
    if backward_passes not in (None, 1, 2) or (backward_passes == 2 and norms == "vmap"):
        got = described(backward_passes)
        raise ValueError(f'backward_passes must be 1, 2 or None, and not 2 with norms="vmap", got {got}')
    of_row = function_of_row(loss, has_aux=has_aux)
    where = require_platform(platform), count_row_shards(sharding)
    return RowSum(of_row, optimizer, norms, microbatch_size, *where, backward_passes)


def with_inspector(step: Any, inspect_loss: Callable[[Any, Tree, tuple], None]) -> Any:
    return replace(step, row_sum=replace(step.row_sum, inspect_loss=inspect_loss))


def _require_like(params: Tree, made: Tree):
    """Raises ValueError unless the update of one unit is real, with the structure and shapes of the parameters."""
    require_real(made)
    expected, found = [jax.tree.map(lambda leaf: jax.numpy.shape(leaf), tree) for tree in (params, made)]
    if expected != found or jax.tree.structure(params) != jax.tree.structure(made):
        raise ValueError(f"the update of one unit must be like params, of shapes {expected}; got shapes {found}")


def count_row_shards(sharding: Any) -> int | None:
    """How many devices a sharding spreads axis 0 over; None for None. Raises ValueError for another type."""
    if sharding is None:
        return None
    if not isinstance(sharding, jax.sharding.Sharding):
        such = "such as NamedSharding(mesh, PartitionSpec('data'))"
        raise ValueError(f"sharding must be a sharding of the batches, {such}, or None; got {described(sharding)}")
    return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]
