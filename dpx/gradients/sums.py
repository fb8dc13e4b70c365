"""The clipped sum of the rows of a batch, with at most one microbatch of them in memory at a time.

Every builder here returns `sum_rows(params, state, rows, included) -> (sums, (losses, norms, aux))`, with one sum for
each factor of the mechanism, and the values of every row. rows: from `rows.rows_of`. included: bool (B,).
"""

from collections.abc import Callable
from typing import Literal

import jax
from jax.extend import core

from dpx.contributions import sum_contributions
from dpx.gradients import ghost
from dpx.gradients.microbatch_size import choose_microbatch_size, forward_cost, require_platform
from dpx.gradients.rows import of_one_row, shapes_of_one
from dpx.guards import require_real
from dpx.mechanism import Mechanism
from dpx.scalars import require_whole
from dpx.trees import Tree, described
from dpx.xla.convolutions import reordered
from dpx.xla.microbatches import sum_over_microbatches

Clipping = Literal["auto", "ghost", "vmap"]


def sum_gradients(
    loss: Callable,
    mechanism: Mechanism,
    *,
    microbatch_size: int | None,
    clipping: Clipping,
    has_aux: bool,
    platform: str | None = None,
) -> Callable:
    """`sum_rows` for the gradients of a loss of one example, as `private_grad` describes the arguments."""
    check(mechanism, clipping)
    of_row = of_one_row(loss, has_aux=has_aux)
    gradient = jax.value_and_grad(of_row, has_aux=True)

    def plan(traced, params, state):
        return make_plan(traced, mechanism, params, state, clipping)

    return _in_microbatches(mechanism, microbatch_size, of_row, plan, gradient, require_platform(platform))


def sum_updates(
    update: Callable, mechanism: Mechanism, *, microbatch_size: int | None, has_aux: bool, platform: str | None = None
) -> Callable:
    """`sum_rows` for what `update` makes of one unit's data, as `private_update` describes the arguments."""
    check(mechanism, "vmap")
    of_row = of_one_row(update, has_aux=has_aux)

    def plan(traced, params, state):
        del state
        _require_like(params, traced.shapes[0])
        return "an update is no gradient of a loss"

    def without_loss(params, row):
        made, aux = of_row(params, row)
        return (None, aux), made

    return _in_microbatches(mechanism, microbatch_size, of_row, plan, without_loss, require_platform(platform))


def check(mechanism: Mechanism, clipping: str):
    """Raises ValueError for another type of mechanism, and for another `clipping`."""
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must be a dpx Mechanism (chain optimizers with dpx.chain), got {type(mechanism)}")
    if clipping not in ("auto", "ghost", "vmap"):
        raise ValueError(f'clipping must be "auto", "ghost" or "vmap", got {described(clipping)}')


def make_plan(traced, mechanism, params, state, clipping) -> ghost.Plan | str:
    """The plan for ghost norms, or the reason why every parameter needs per-example gradients."""
    if clipping == "vmap":
        return 'clipping="vmap" was asked for'
    return ghost.make_plan(traced, mechanism, params, state, force=clipping == "ghost")


def _in_microbatches(mechanism: Mechanism, microbatch_size, of_row, make_plan, gradient, platform: str) -> Callable:
    """`sum_rows`. of_row: traced for its cost. make_plan: (traced, params, state) -> plan. gradient: of one row."""
    microbatch_size = None if microbatch_size is None else require_whole("microbatch_size", microbatch_size)

    def sum_rows(params, state, rows, included):
        traced = ghost.trace_loss(of_row, params, shapes_of_one(rows))
        plan, cost = make_plan(traced, params, state), forward_cost(traced.closed.jaxpr)
        at_once = microbatch_size or choose_microbatch_size(cost, plan, params, included.shape[0], platform).size

        def microbatch(ordered, rows):
            return _sum_microbatch(plan, gradient, mechanism, ordered(params), state, *rows)

        unroll = platform == "cpu" and not cost.loops
        in_loop = reordered if platform == "cpu" and cost.convolves else core.jaxpr_as_fun
        return sum_over_microbatches(
            microbatch, (rows, included), max(1, at_once), unroll=unroll, in_loop=in_loop, like=params
        )

    return sum_rows


def _sum_microbatch(plan, gradient, mechanism, params, state, rows, included):
    """The sums of the contributions of one microbatch, one for each factor; the losses, norms and aux of its rows."""
    if isinstance(plan, ghost.Plan) and plan.followed:
        return ghost.sum_contributions(plan, mechanism, params, rows, state, included)
    (losses, aux), grads = jax.vmap(gradient, in_axes=(None, 0))(params, rows)
    sums, norms = sum_contributions(mechanism, grads, state, included)
    return sums, (losses, norms, aux)


def _require_like(params: Tree, made: Tree):
    """Raises ValueError unless the update of one unit is real, with the structure and the shapes of the parameters."""
    require_real(made)
    expected, found = [jax.tree.map(lambda leaf: jax.numpy.shape(leaf), tree) for tree in (params, made)]
    if expected != found or jax.tree.structure(params) != jax.tree.structure(made):
        raise ValueError(f"the update of one unit must be like params, of shapes {expected}; got shapes {found}")
