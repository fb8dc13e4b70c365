"""The clipped sum of a batch's rows, with at most one microbatch in memory at a time. A microbatch has as many examples
as fit in memory, or on a CPU in its cache, because a step over the whole batch would write fresh memory, which the
system must zero and the cache cannot hold. On a TPU, fewer are faster if arrays of a batch exceed its fast memory.

With `jax.checkpoint`, one backward pass keeps the inputs and cotangents of all layers. Two passes keep none, but take
1.4 times as long, while microbatches take hardly longer than the whole batch (benchmarks/scans.py). So two passes are
used only if not even one example would fit.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
from jax.extend import core

from dpx.gradients import ghost
from dpx.gradients.ghost.plan import Plan
from dpx.gradients.ghost.program import REMAT
from dpx.gradients.one_example import (
    adding_note,
    explaining_user_data_error,
    function_of_row,
    shapes_of_row,
    value_and_gradient,
    warn_of_constants,
)
from dpx.keys.noise import axes_that_vary
from dpx.mechanism import Mechanism, require_mechanism
from dpx.mechanism.guards import require_real_arrays
from dpx.sums.clipped_sum import sum_contributions, sum_over_microbatches
from dpx.values import Tree, described, require_whole
from dpx.xla.jaxprs import convolves, open_jaxprs
from dpx.xla.place import PLATFORMS, Place, current_place, tracing_for_place
from dpx.xla.rewrites import CALLS, multiplies_matrices, with_fast_products, with_reordered_convolutions
from dpx.xla.rows_apart import gradient_may_mix_rows, with_rows_apart

# For one CPU core. benchmarks/step.py times the steps, benchmarks/memory.py measures their memory.
CACHE_BYTES = 2**25  # bytes that the examples of one microbatch may fill
WHOLE_BATCH = 4  # times CACHE_BYTES: below this, one pass is about as fast as a loop, and compiles faster
EQUATION_NUMBERS_PER_WRITE = 4  # XLA fuses equations, so it writes about one in four of the elements that they define
EXAMPLE_BYTES_PER_SUM_BYTE = 12  # at least, in a microbatch, because every microbatch reads and writes all sums

# The same limits for a loss with convolutions, which are fastest on few examples, because they copy their operands.
CONVOLUTION_BYTES = 2**21
CONVOLUTION_BYTES_PER_SUM_BYTE = 4
CONVOLUTION_EXAMPLES = 8  # at least; with fewer, convolutions are slower

# For a TPU, by the cycles that its compiler estimates (benchmarks/results/accelerators.md).
FAST_BYTES = 2**26  # of an array, so that two fit into the 128 MiB of a v5e's or a v6e's fast memory
EQUATION_BYTES = 2**21  # that it could read in the time of the kernels of an equation and its backward pass


class ForwardCost(NamedTuple):
    """Properties of the equations of one example's loss, which predict its memory and time.

    numbers: int, how many elements the equations define. convolves: bool, whether one of them is a convolution
    stored: int, as `numbers`, but of the bodies of `jax.checkpoint`, which are computed again, only the largest counts
    loops: bool, True if `with_reordered_convolutions` finds all convolutions, so that none is slow in a loop on a CPU
    mixes: bool, True if rows need `xla.rows_apart.with_rows_apart`
    multiplies: bool, True if `xla.rewrites.with_fast_products` may speed up the gradients on a CPU
    equations: int, how many are computed, those of a loop once for each iteration
    arrays: the bytes of each array that depends on the example, outside of loops, which stack theirs in slow memory
    """

    numbers: int
    stored: int
    convolves: bool
    loops: bool
    mixes: bool
    multiplies: bool
    equations: int
    arrays: tuple[int, ...]


def forward_cost(jaxpr: core.Jaxpr, leaves: int) -> ForwardCost:
    """The `ForwardCost` of this loss. leaves: how many of the inputs are parameters."""
    return ForwardCost(
        sum(_count_intermediate_numbers(jaxpr)),
        sum(_count_intermediate_numbers(jaxpr, REMAT)),
        convolves(jaxpr),
        not hides_convolutions(jaxpr),
        gradient_may_mix_rows(jaxpr),
        multiplies_matrices(jaxpr),
        _count_equations(jaxpr),
        tuple(_bytes_outside_loops(jaxpr, set(jaxpr.invars[leaves:]))),
    )


class Microbatches(NamedTuple):
    """How many examples one microbatch holds, and how many backward passes it takes, each with its reason in words; ""
    for the whole batch, and for a number of passes that was requested or is usual."""

    size: int
    reason: str = ""
    passes: int = 1
    why: str = ""

    @property
    def reasons_in_words(self) -> tuple[str, str]:
        """Both reasons, for `ghost.explain_plan`; "" where there is none."""
        at_once = self.reason and f"microbatches of {self.size} examples: {self.reason}"
        return at_once, self.why and f"two backward passes: {self.why}"


def require_platform(platform: str | None) -> str:
    """Returns the platform that a program is compiled for, by default that of `current_place()`. Raises ValueError
    unless it is one of PLATFORMS."""
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)}, or None, got {described(platform)}")
    return platform or current_place().platform


def choose_microbatches(
    cost: ForwardCost,
    plan: Plan,
    params: Tree,
    size: int,
    place: Place,
    *,
    microbatch_size: int | None = None,
    backward_passes: int | None = None,
) -> Microbatches:
    """Chooses how many of a batch's `size` examples one microbatch holds, and how many passes it takes, unless given.

    Takes all examples, unless they do not fit in half of the device's memory, or fewer are known to be faster. More are
    faster on a GPU, on several devices, and for convolutions that are slow in a loop on a CPU.
    """
    written = _written_bytes(cost, plan, params)
    one, two = _held_bytes(written, plan)
    half = (place.device_memory_bytes or math.inf) / 2
    at_least = min(microbatch_size or 1, size)
    passes, why = backward_passes or 1, ""
    if backward_passes is None and two < one and at_least * one > half:
        what = "one example" if at_least == 1 else f"{at_least} examples"
        passes, why = 2, f"one pass over {what} would not fit in half of the device's memory"
    if microbatch_size is not None:
        return Microbatches(microbatch_size, "", passes, why)
    of_example = two if passes == 2 else one
    if of_example * size > half:
        largest = max(1, int(half // of_example))
        reason = f"all {size} would not fit in half of the device's memory"
        return Microbatches(_dividing_microbatch_size(largest, size), reason, passes, why)
    at_once = _microbatch_size_for_cache(cost, written[0], params, size, place)
    where = "the CPU's cache" if place.platform == "cpu" else "the TPU's fast memory"
    return Microbatches(at_once, f"all {size} would not fit in {where}" * (at_once < size), passes, why)


def _written_bytes(cost: ForwardCost, plan: Plan, params: Tree) -> tuple[int, int]:
    """The bytes that one example's equations write, plus its stored gradients, for one pass and for two."""
    leaves = jax.tree.leaves(params)
    kept = {n for n in range(len(leaves)) if isinstance(plan, str) or plan.keeps_gradients(n)}
    nowhere, all_layers = ghost.second_pass_leaves(plan) if isinstance(plan, ghost.GhostPlan) else (set(), False)
    of_passes = (cost.numbers, kept), (cost.stored if all_layers else cost.numbers, kept - nowhere)
    one, two = (n // EQUATION_NUMBERS_PER_WRITE + sum(leaves[leaf].size for leaf in some) for n, some in of_passes)
    return max(1, 4 * one), max(1, 4 * two)


def _held_bytes(written: tuple[int, int], plan: Plan) -> tuple[int, int]:
    """The bytes that a step holds for each example, with one backward pass and with two: what it writes, or what it
    keeps of layers, if that is more. XLA fuses hardly any of a scan's arrays away."""
    if not isinstance(plan, ghost.GhostPlan):
        return written
    without = frozenset(), ghost.second_pass_leaves(plan)[0]
    one, two = (max(n, 4 * plan.count_captured_elements(of)) for n, of in zip(written, without, strict=True))
    return one, two


def _microbatch_size_for_cache(cost: ForwardCost, example_bytes: int, params: Tree, size: int, place: Place) -> int:
    """How many examples at once are fastest: all `size`, or fewer on a TPU or on a CPU, whose cache is small."""
    sum_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    if place.platform == "tpu" and place.devices == 1:
        turn = EQUATION_BYTES * cost.equations + 3 * sum_bytes

        def moved(rows):
            return size * sum(array for array in cost.arrays if array * rows > FAST_BYTES) + turn * size // rows

        return min((rows for rows in range(size, 0, -1) if size % rows == 0), key=moved, default=size)
    if place.platform != "cpu" or place.devices > 1 or not cost.loops:
        return size
    if cost.convolves:
        filled, per_sum_byte, least = CONVOLUTION_BYTES, CONVOLUTION_BYTES_PER_SUM_BYTE, CONVOLUTION_EXAMPLES
    else:
        filled, per_sum_byte, least = CACHE_BYTES, EXAMPLE_BYTES_PER_SUM_BYTE, 1
    if example_bytes * size < WHOLE_BATCH * filled:
        return size
    largest = max(least, max(filled, per_sum_byte * sum_bytes) // example_bytes)
    return _dividing_microbatch_size(largest, size) if largest < size else size


def _dividing_microbatch_size(largest: int, size: int) -> int:
    """At most `largest` of `size` examples, preferably a divisor, because a remainder would be compiled separately."""
    without_rest = [n for n in range(math.ceil(largest / 2), largest + 1) if size % n == 0]
    return max(without_rest, default=math.ceil(size / math.ceil(size / largest)))


def _count_intermediate_numbers(jaxpr, again: tuple[str, ...] = ()) -> tuple[int, int]:
    """How many elements the equations define, except in the bodies of those whose name is in `again`; and how many the
    largest of these bodies defines. The body of a loop counts once for each iteration."""
    total = largest = 0
    for equation in jaxpr.eqns:
        found = [_count_intermediate_numbers(body, again) for body in open_jaxprs(equation)]
        inside, of_body = sum(numbers for numbers, _ in found), max((one for _, one in found), default=0)
        if equation.primitive.name in again:
            inside, of_body = 0, inside + of_body
        total += equation.params.get("length", 1) * inside or sum(v.aval.size for v in equation.outvars)
        largest = max(largest, of_body)
    return total, largest


def _count_equations(jaxpr: core.Jaxpr) -> int:
    """How many equations are computed; the body of a loop counts once for each iteration."""
    return sum(
        equation.params.get("length", 1) * sum(map(_count_equations, open_jaxprs(equation))) or 1
        for equation in jaxpr.eqns
    )


def _bytes_outside_loops(jaxpr: core.Jaxpr, moving: set) -> list[int]:
    """The bytes of each array that depends on the variables `moving`, outside of loops. Adds these to `moving`."""
    found: list[int] = []
    for equation in jaxpr.eqns:
        if moving.isdisjoint(v for v in equation.invars if not isinstance(v, core.Literal)):
            continue
        moving |= set(equation.outvars)
        if not (bodies := list(open_jaxprs(equation))):
            made: list[Any] = [v.aval for v in equation.outvars]
            found += [x.size * x.dtype.itemsize for x in made]
        elif equation.primitive.name not in ("scan", "while"):
            for body in bodies:
                inside = zip(body.invars[::-1], equation.invars[::-1], strict=False)  # a branch has no predicate
                found += _bytes_outside_loops(
                    body, {v for v, outer in inside if not isinstance(outer, core.Literal) and outer in moving}
                )
    return found


def hides_convolutions(jaxpr: core.Jaxpr) -> bool:
    """Whether a jaxpr holds a convolution out of reach: in a loop, a branch, or under `jax.checkpoint`."""

    def holds_convolution(equation):
        inside = hides_convolutions if equation.primitive.name in CALLS else convolves
        return any(map(inside, open_jaxprs(equation)))

    return any(map(holds_convolution, jaxpr.eqns))


Norms = Literal["auto", "ghost", "vmap"]


@dataclass(frozen=True, eq=False)
class RowSum:
    """Computes `(params, state, rows, included) -> (sums, (losses, norms, aux))`, the clipped sum of a batch's rows.

    of_row: (params, row) -> (value, aux), the loss of one example or the update of one unit; see
        `one_example.function_of_row`.
    optimizer: the mechanism that bounds the rows; there is one sum for each of its factors.
    norms, backward_passes: as in `private_updates`; norms is "update" if `of_row` returns an update and not a loss.
    microbatch_size: int, how many rows are in memory at once. If this or `backward_passes` is None, the cost decides.
    platform: what the program is compiled for. devices: how many the rows are spread over; None if unknown.
    inspect_loss: called at tracing with the closed jaxpr of a loss, the parameters and the shapes of one row.
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
        """Returns the sums, and every row's loss, norms and aux. rows: from `rows_with_keys`. included: bool (B,)."""
        if axes := axes_that_vary(jax.tree.leaves(rows)):  # otherwise jax.grad sums over the devices of a shard_map
            params = jax.tree.map(lambda x: jax.lax.pcast(x, (*axes - axes_that_vary([x]),), to="varying"), params)
        with self.tracing_context():
            plan, cost = self.plan_and_cost(params, state, rows)
            at_once = self.microbatches_for(plan, cost, params, included.shape[0])

            def microbatch(ordered, rows):
                return self.sum_microbatch(plan, at_once.passes, cost, ordered(params), state, *rows)

            on_cpu = self.platform == "cpu"
            how = {"unroll": on_cpu and not cost.loops, "like": params}
            how["in_loop"] = with_reordered_convolutions if on_cpu and cost.convolves else core.jaxpr_as_fun
            with self.with_note_on_errors(lambda: shapes_of_row(rows)):
                return sum_over_microbatches(microbatch, (rows, included), max(1, at_once.size), **how)

    def tracing_context(self) -> contextlib.AbstractContextManager[None]:
        return tracing_for_place(platform=self.platform, row_devices=self.devices)

    def with_note_on_errors(self, row: Callable[[], tuple]) -> Any:
        return adding_note("update" if self.norms == "update" else "loss", lambda: row()[0])

    def plan_and_cost(self, params: Tree, state: Tree, rows: tuple) -> tuple[Plan, ForwardCost]:
        """Plans the norms, or says why only per-example gradients work; and estimates a row's cost from shapes."""
        row = shapes_of_row(rows)
        called = "update" if self.norms == "update" else "loss"
        with explaining_user_data_error(called, self.of_row, params, row), self.with_note_on_errors(lambda: row):
            traced = ghost.trace_loss(self.of_row, params, row)
        self.inspect_loss(traced.closed, params, row)
        cost = forward_cost(traced.closed.jaxpr, len(jax.tree.leaves(params)))
        if self.norms == "update":
            _require_update_like_params(params, traced.shapes[0])
            return "an update is not a gradient of a loss", cost
        if self.norms == "vmap":
            return 'norms="vmap" was asked for', cost
        if self.norms == "auto" and self.optimizer.forward is not None:
            return ghost.ForwardModePlan(len(jax.tree.leaves(params))), cost
        return ghost.make_ghost_plan(traced, self.optimizer, params, state, force=self.norms == "ghost"), cost

    def microbatches_for(self, plan: Plan, cost: ForwardCost, params: Tree, size: int) -> Microbatches:
        """Chooses which of `size` rows are in memory at once, at the place of the program."""
        given = {"microbatch_size": self.microbatch_size, "backward_passes": self.backward_passes}
        return choose_microbatches(cost, plan, params, size, current_place(), **given)

    def sum_microbatch(
        self, plan: Plan, passes: int, cost: ForwardCost, params: Tree, state: Tree, rows: tuple, included
    ):
        """The sums of the contributions of one microbatch, and the losses, norms and aux of its rows."""
        apart = with_rows_apart if cost.mixes else lambda function: function
        if isinstance(plan, ghost.GhostPlan) and plan.followed_leaves:
            how = {"backward_passes": passes, "apart": apart}
            return ghost.sum_by_plan(plan, self.optimizer, params, rows, state, included, **how)
        optimizer, of_row = self.optimizer, self.gradient_of_row
        if isinstance(plan, ghost.ForwardModePlan):
            optimizer, of_row = optimizer.replace(encode=lambda encoded, state: encoded), self.forward_gradient(state)
        of_rows = jax.vmap(apart(of_row), (None, 0))
        if cost.multiplies and self.platform == "cpu":
            of_rows = with_fast_products(of_rows)
        (losses, aux), grads = of_rows(params, rows)
        sums, norms = sum_contributions(optimizer, grads, state, included)
        return sums, (losses, norms, aux)

    def forward_gradient(self, state: Tree) -> Callable[[Tree, tuple], tuple[tuple[Tree, Tree], Tree]]:
        """Like `gradient_of_row`, but its second result is the encoded gradient, in the coordinates of this state."""
        forward = self.optimizer.forward
        assert forward is not None  # see `plan`
        return lambda params, row: forward(lambda params: self.of_row(params, row), params, state)

    def gradient_of_row(self, params: Tree, row: tuple) -> tuple[tuple[Tree, Tree], Tree]:
        """Returns ((loss, aux), gradient) for one row; ((None, aux), update) if the row computes its own update."""
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
    """Builds the clipped sum of the gradients of a per-example loss. The arguments are as in `private_updates`."""
    if norms not in ("auto", "ghost", "vmap"):
        raise ValueError(f'norms must be "auto", "ghost" or "vmap", got {described(norms)}')
    if backward_passes not in (None, 1, 2) or (backward_passes == 2 and norms == "vmap"):
        got = described(backward_passes)
        raise ValueError(f'backward_passes must be 1, 2 or None, and not 2 with norms="vmap", got {got}')
    of_row = function_of_row(loss, has_aux=has_aux)
    where = require_platform(platform), count_row_shards(sharding)
    return RowSum(of_row, optimizer, norms, microbatch_size, *where, backward_passes)


def with_loss_inspector(step: Any, inspect_loss: Callable[[Any, Tree, tuple], None]) -> Any:
    return replace(step, row_sum=replace(step.row_sum, inspect_loss=inspect_loss))


def _require_update_like_params(params: Tree, made: Tree):
    """Raises ValueError unless one unit's update is real, with the structure and shapes of the parameters."""
    require_real_arrays(made)
    expected, found = [jax.tree.map(lambda leaf: jax.numpy.shape(leaf), tree) for tree in (params, made)]
    if expected != found or jax.tree.structure(params) != jax.tree.structure(made):
        raise ValueError(f"the update of one unit must be like params, of shapes {expected}; got shapes {found}")


def count_row_shards(sharding: Any) -> int | None:
    """The number of devices that a sharding spreads axis 0 over; None for None. Raises ValueError for another type."""
    if sharding is None:
        return None
    if not isinstance(sharding, jax.sharding.Sharding):
        such = "such as NamedSharding(mesh, PartitionSpec('data'))"
        raise ValueError(f"sharding must be a sharding of the batches, {such}, or None; got {described(sharding)}")
    return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]
