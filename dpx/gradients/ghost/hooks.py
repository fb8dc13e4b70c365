"""The norms and the clipped sum of a part of a parameter, possibly in slices, and of all parts together.

Slices are computed one after another, each like a whole parameter: the plan's algorithm sees one slice. So only one
slice's arrays are in memory, and a stack of layers compiles like one layer. There are two exceptions, which compute all
slices at once: norms on a matrix unit that rounds, if their Gram matrices are small, because many small kernels are
slow there; and norms and sums of gradients in a TPU's memory, because a loop would write each slice again.

Parts and their slices share no element. So the squared norm of a gradient is the sum of the squared norms of its parts,
none of which is underestimated (`dpx.sums.norms` adds the squares). Every coordinate of a sum is a coordinate of one
slice's sum, so the proof in `dpx.sums.rounding` holds, which allows each coordinate its own order of additions.

INSIDE A BACKWARD PASS, hooks compute norms and sums for layers in scans or under `jax.checkpoint`. A checkpoint would
return captured arrays in the forward pass and keep them until the end of the pass. So the arrays of its layers are
captured in the backward pass, which recomputes its inputs.

With one backward pass, the inputs and cotangents of all layers are in memory until the last norm is known. With two,
those of a layer in a scan exist only while a pass is at that layer: the first pass computes its norms, and the second
its weighted sum. Both come from a function that returns a layer's output unchanged but has a custom derivative: the
"gradient" with respect to its `slot` is the norms or the sums. If the gradients of all examples are small, the first
pass keeps them too, and no second pass is needed.

The second pass may round its cotangents differently. So it recomputes the norm of every contribution, and shortens
those that are longer than in the first pass. Therefore no example adds more to a part of a parameter than its clip
factor times the norm from which this factor was computed, whatever the second pass computes.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import norms
from dpx.gradients.ghost.algorithms import MOST_UNROUNDED, PRODUCT, TIED, kept_gradients, tied_gradients
from dpx.gradients.ghost.plan import GhostPlan, NormChoice
from dpx.gradients.ghost.program import REMAT, ParameterView, assemble_parts
from dpx.gradients.ghost.weighted_sums import shortening_factors
from dpx.sums.clipped_sum import AT_ONCE, total_of_rows
from dpx.sums.rounding import FloatPair, with_low_part
from dpx.values import Tree
from dpx.xla.place import current_place


def part_norm(choice: NormChoice, scale: jax.Array | None, records: Any) -> tuple[Any, jax.Array]:
    """The kept gradients of a part, or None, and the norms of its per-example gradients, float32 (B,). Before the axis
    of the B examples, records and kept gradients have an axis for each scan that slices the part. records: as in
    `NormAlgorithm`. scale: float32, of the part's shape, or None."""

    def of_slice(rows):
        scale, records = rows
        return choice.algorithm.norm(choice.uses, scale, records)

    kept, found = _map_over_slices(of_slice, choice, at_once=_norms_computed_at_once(choice, records))((scale, records))
    return kept, norm_of_parts(found.reshape(-1, found.shape[-1]))


def norm_of_parts(of_parts: jax.Array) -> jax.Array:
    """Combines the norms of p parts of B gradients, float32 (p, B), into the gradients' norms, float32 (B,)."""
    return of_parts[0] if len(of_parts) == 1 else jax.vmap(norms.frobenius, 1)(of_parts)


def part_sum(
    choice: NormChoice, shape: tuple[int, ...], scale: jax.Array | None, records: Any, factors: jax.Array
) -> FloatPair:
    """Computes sum_i f_i z_i for a part of this shape. records: as in `part_norm`. factors: float32 (B,)."""
    inside = shape[len(choice.view.slice_counts) :]

    def of_slice(rows):
        scale, records = rows

        def of_few(rows):
            return _scaled_sum(choice.algorithm.weighted_sum(choice.uses, inside, *rows), scale)

        return total_of_rows(of_few, (records, factors))

    return _map_over_slices(of_slice, choice, at_once=_are_gradients_on_tpu(records))((scale, records))


def join_part_sums(of_views: list[ParameterView], totals: list[FloatPair], shape: tuple[int, ...]) -> FloatPair:
    """Joins the sums of a parameter's parts into the sum of the whole parameter, of this shape."""
    if any(total.low is not None for total in totals):
        totals = [with_low_part(total) for total in totals]
    low = [total.low for total in totals if total.low is not None]
    high = assemble_parts(of_views, [total.high for total in totals], shape)
    return FloatPair(high, assemble_parts(of_views, low, shape) if low else None)


def _norms_computed_at_once(choice: NormChoice, records: Any) -> bool:
    """Whether the norms of all slices are computed at once: from gradients kept on a TPU, or on a matrix unit that
    rounds, if the Gram matrices of all slices and examples together are small."""
    if _are_gradients_on_tpu(records):
        return True
    rounds = current_place().matrix_unit.rounds_operands
    if choice.algorithm.keeps_gradients or not (choice.uses.has_few_positions and rounds):
        return False
    rows = jax.tree.leaves(records)[0].shape[: len(choice.view.slice_counts) + 1]
    return math.prod(rows) * choice.uses.positions_compared**2 <= AT_ONCE


def _are_gradients_on_tpu(records: Any) -> bool:
    """Whether these are gradients kept in the memory of a TPU, which reads all slices in one array."""
    return isinstance(records, jax.Array) and current_place().platform == "tpu"


def _map_over_slices(function: Callable, choice: NormChoice, *, at_once: bool = False) -> Callable:
    """Maps `function`, which takes the arrays of one slice, over all slices of a part, at once or in a loop."""
    for _ in choice.view.slice_counts:

        def function(rows, inner=function):
            return jax.vmap(inner)(rows) if at_once else jax.lax.map(inner, rows)

    return function


def _scaled_sum(total: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns `total` times `scale`. A coordinate with scale 0 becomes 0: no norm counts it, so it may have overflowed.
    A coordinate with a nonfinite scale becomes 0 too, because then no example contributes."""
    return total if scale is None else jnp.where((scale == 0) | ~jnp.isfinite(scale), 0, total * scale)


class CapturedArrays(NamedTuple):
    """The arrays from which norms and contributions are computed, with the B examples on axis 0.

    gradients: by indices of the leaf and of its part, the per-example gradients that its `NormAlgorithm` keeps, or what
        it computes them from, if that differs from what is captured at the equations
    inputs: by index of a site's equation, all operands of the equation, in their dtypes; None for a parameter
    cotangents: by index of a site's equation, the gradients of the losses with respect to the equation's output

    Before the axis of the examples, arrays of an equation in a scan have an axis for the iterations, and arrays of a
    part in slices have an axis for the slices.
    """

    gradients: dict[tuple[int, int], Any]
    inputs: dict[int, tuple[jax.Array, ...]]
    cotangents: dict[int, jax.Array]

    def captured_arrays(self, leaf: int, part: int, choice: NormChoice):
        """What was captured for one part of a parameter leaf, in the form that `part_norm` reads."""
        if (leaf, part) in self.gradients:
            return self.gradients[leaf, part]

        def examples_after_slices(site):
            repeats = len(site.use.view.scan_repeats)
            axis = len(choice.view.slice_counts)
            record = self.inputs[site.use.equation], self.cotangents[site.use.equation]
            return jax.tree.map(lambda x: jnp.moveaxis(x, axis + repeats, axis), record) if repeats else record

        return [examples_after_slices(site) for site in choice.uses.sites]


def round_captured(captured: CapturedArrays) -> CapturedArrays:
    """Rounds the gradients, and replaced inputs and cotangents, as captured ones are rounded, and puts all behind a
    barrier. Norms and sums must read the same numbers, but XLA might otherwise round for only one of them."""
    unit = current_place().matrix_unit
    gradients = {
        part: unit.round_gradient(x) if isinstance(x, jax.Array) else jax.tree.map(unit.round_to_store, x)
        for part, x in captured.gradients.items()
    }
    captured = captured._replace(gradients=gradients)

    def narrow(x):
        # XLA copies an array with axes of length 1, such as a batch of one image, before loops and other operations.
        return x.reshape([size for axis, size in enumerate(x.shape) if size != 1 or axis in (0, x.ndim - 1)])

    leaves, structure = jax.tree.flatten(captured)
    # A layer's weights and bias share cotangents. If these passed the barrier twice, XLA would compile twice as much.
    distinct = list({id(x): x for x in leaves}.values())
    behind = jax.lax.optimization_barrier([narrow(x) for x in distinct])
    found = {id(x): same.reshape(x.shape) for x, same in zip(distinct, behind, strict=True)}
    return structure.unflatten(found[id(x)] for x in leaves)


def replace_captured(plan: GhostPlan, captured: CapturedArrays, values: Mapping[int, jax.Array]) -> CapturedArrays:
    """Replaces inputs and cotangents as `CaptureReplacements` says, and drops arrays that nothing else reads."""
    gradients, plain = dict(captured.gradients), set()
    made: dict[tuple, Any] = {}

    def record(site, depth, inputs, dy):
        def of_all(function):
            function = functools.partial(function, values=values)
            return functools.reduce(lambda function, _: jax.vmap(function), range(depth), function)(inputs, dy)

        if not site.record:
            return inputs, dy
        key = (site.use.equation, site.use.operand, depth, *site.record.key)
        if site.record.inputs and not (site.record.key and key in made):
            made[key] = of_all(site.record.inputs)
        return made[key] if site.record.inputs else inputs, of_all(site.record.cotangents)

    for part, choice in plan.part_choices.items():
        sites, depth = choice.uses.sites, len(choice.view.slice_counts) + 1
        if any(site.record for site in sites):
            records = zip(sites, captured.captured_arrays(*part, choice), strict=True)
            gradients[part] = [record(site, depth, *each) for site, each in records]
        else:
            plain.update(site.use.equation for site in sites)
    inputs = {equation: x for equation, x in captured.inputs.items() if equation in plain}
    cotangents = {equation: x for equation, x in captured.cotangents.items() if equation in plain}
    return CapturedArrays(gradients, inputs, cotangents)


def compute_tied_gradients(plan: GhostPlan, captured: CapturedArrays) -> CapturedArrays:
    """Returns `captured` with the gradients of tied tables, and drops the arrays that nothing else reads."""
    found, alone = dict(captured.gradients), equations_of_tied_tables(plan)
    for part, choice in plan.part_choices.items():
        if choice.algorithm is TIED:
            of_all = functools.partial(tied_gradients, choice.uses)
            of_all = functools.reduce(lambda function, _: jax.vmap(function), choice.view.slice_counts, of_all)
            found[part] = of_all(captured.captured_arrays(*part, choice))
    inputs = {equation: x for equation, x in captured.inputs.items() if equation not in alone}
    cotangents = {equation: x for equation, x in captured.cotangents.items() if equation not in alone}
    return CapturedArrays(found, inputs, cotangents)


def equations_of_tied_tables(plan: GhostPlan) -> set[int]:
    """The equations whose inputs and cotangents are read only by the gradients of tied tables."""
    by_way: dict[bool, set[int]] = {True: set(), False: set()}
    for choice in plan.part_choices.values():
        by_way[choice.algorithm is TIED].update(site.use.equation for site in choice.uses.sites)
    return by_way[True] - by_way[False]


def convolutions_of_small_data(plan: GhostPlan, size: int) -> set[int]:
    """The convolutions on one TPU whose data for `size` examples is small, and is read only to make patches for kept
    gradients. Making patches rounds the data, and a kernel that rounds it earlier would take as long."""
    of_equation: dict[int, set[tuple]] = {}
    for choice in plan.part_choices.values():
        for site in choice.uses.sites:
            of_equation.setdefault(site.use.equation, set()).add((choice.algorithm, site.expands > 0))

    def few(number: int) -> bool:
        found = plan.program.equations[number]
        return not found.counts and size * found.jaxpr.invars[0].aval.size <= MOST_UNROUNDED

    alone = {number for number, kinds in of_equation.items() if kinds == {(PRODUCT, True)} and few(number)}
    return alone if hooks_take_gradients() else set()


EXAMPLES = "the examples of dpx"  # the name of the examples' axis in a backward pass

Part = tuple[int, int]  # the numbers of a parameter leaf and of its part
CAPTURED = -1  # in place of a leaf's number: the second number is an equation, and the value what is captured there


class BackwardHook(NamedTuple):
    """What is computed at one equation during the backward pass.

    compute: (captured, given) -> found. captured: the inputs and cotangents of all B examples, (B, ...)
    slot: zeros like `found`. given: arrays. Both begin with an axis for each scan around the equation.
    shared: the indices of operands that this equation captures for later equations that read them too
    """

    compute: Callable[[Any, Tree], Tree]
    slot: Tree
    given: Tree
    shared: frozenset[int] = frozenset()

    @property
    def added(self) -> tuple[Tree, Tree]:
        return self.slot, self.given

    def attach_to_output(self, output: jax.Array, operands: tuple, added: tuple[Tree, Tree]) -> tuple[jax.Array, list]:
        """Returns `output` and the shared operands. The gradient of the slot in `added` is the result of `compute`.

        Later equations must read the returned operands. Otherwise nothing would be captured if only a later equation
        has a cotangent. An example is an expert layer that reads the input of a router when only an argmax reads the
        router's output.
        """

        @jax.custom_vjp
        def hook(output, operands, added):
            return output, [x if i in self.shared else None for i, x in enumerate(operands)]

        def forward(output, operands, added):
            return hook(output, operands, added), (operands, added[1])

        def backward(residuals, cotangents):
            (operands, given), (cotangent, of_operands) = residuals, cotangents
            captured = jax.tree.map(lambda x: jax.lax.all_gather(x, EXAMPLES), (operands, cotangent))
            return cotangent, tuple(of_operands), (self.compute(captured, given), None)

        hook.defvjp(forward, backward)
        return hook(output, operands, added)


Hooked = dict[int, dict[Part, NormChoice]]  # by index of an equation, the parts that it uses and their choices


def hooked_equations(plan: GhostPlan, backward_passes: int) -> tuple[Hooked, Hooked]:
    """Returns the equations in bodies whose hooks need one backward pass, and those whose hooks need two. Their
    parameters are all used once, sliced by every scan around, and not scaled.

    One pass is enough if the kept per-example gradients are much smaller than inputs and cotangents, as with low-rank
    adapters. With only one pass, hooks take such gradients on several devices, where memory matters most. On one TPU,
    they take all kept gradients, so it writes no inputs and cotangents. A GPU keeps float32, and would move more data.
    """
    place = current_place()
    all_kept = backward_passes == 1 and hooks_take_gradients()
    found: Hooked = {}
    for part, choice in plan.part_choices.items():
        for site in choice.uses.sites:
            found.setdefault(site.use.equation, {})[part] = choice
    outside, scaled = set(plan.program.block.equations), plan.scaled_parts

    def fits(part: Part, choice: NormChoice) -> bool:
        (site, *others) = choice.uses.sites
        alone = not (others or choice.made or site.use.view.scan_repeats)
        return alone and not site.record and part not in scaled

    def small(choice: NormChoice) -> bool:
        _, positions, fan_in, fan_out = choice.uses.sites[0].sizes
        return choice.algorithm.keeps_gradients and (all_kept or 2 * min(fan_in, fan_out) <= positions)

    once, twice = {}, {}
    for equation, choices in found.items():
        if equation not in outside and all(fits(*each) for each in choices.items()):
            (once if all(map(small, choices.values())) else twice)[equation] = choices
    if backward_passes == 2:
        return once, twice
    return once if place.devices > 1 or all_kept else {}, {}


def second_pass_leaves(plan: GhostPlan) -> tuple[set[int], bool]:
    """The leaves of the layers for which two backward passes keep no inputs, cotangents or gradients, and whether all
    layers in checkpoints then have hooks."""
    once, twice = hooked_equations(plan, 2)
    parts = {part for choices in twice.values() for part in choices}
    leaves = {leaf for leaf, of_leaf in enumerate(plan.choices) if {(leaf, n) for n in range(len(of_leaf))} <= parts}
    return leaves, _rematerialized_sites(plan) <= {*once, *twice}


def hooks_take_gradients() -> bool:
    """Whether hooks take all kept gradients, so that the norms are computed after the backward pass."""
    place = current_place()
    return place.platform == "tpu" and place.devices == 1


def make_norm_hooks(plan: GhostPlan, equations: Hooked, size: int, *, keep: bool) -> dict[int, BackwardHook]:
    """Hooks that compute, for each part, the norms of the gradients of `size` examples, float32 (B,), and return them
    with the gradients that `part_norm` keeps if `keep`, otherwise with None."""

    def compute(choices, captured, given):
        found = {part: part_norm(_choice_for_slice(choice), None, [captured]) for part, choice in choices.items()}
        return {part: (kept if keep else None, norms) for part, (kept, norms) in found.items()}

    return {
        equation: _hook_at_equation(plan, equation, functools.partial(compute, choices), (), size)
        for equation, choices in equations.items()
    }


def make_gradient_hooks(plan: GhostPlan, equations: Hooked, size: int) -> dict[int, BackwardHook]:
    """Hooks that compute the gradients of `size` examples. Norms and sums read only these, so nothing else is rounded.
    XLA writes them where the scan stacks them, and the norms are computed after the scan."""

    def compute(choices, captured, given):
        return {part: kept_gradients(choice.uses, [captured]) for part, choice in choices.items()}

    return {
        equation: _hook_at_equation(plan, equation, functools.partial(compute, choices), (), size, rounds=False)
        for equation, choices in equations.items()
    }


def make_capture_hooks(plan: GhostPlan, hooks: dict[int, BackwardHook], size: int) -> dict[int, BackwardHook]:
    """Hooks that capture the inputs and cotangents of `size` examples at equations in checkpoints that have no hook in
    `hooks`. If several equations read a value, the first captures it."""
    inside = _rematerialized_sites(plan) - set(hooks) - set(plan.product_shapes)
    equations = {equation for equation in inside if _captures_only_reals(plan, equation)}
    places_of = _captured_operands(plan, equations)
    first = {value: place for place, value in reversed(places_of.items())}
    again = {value for (equation, _), value in places_of.items() if first[value][0] != equation}

    def hook(equation: int) -> BackwardHook:
        def compute(captured, given):
            operands, cotangent = captured
            places = first.values()
            own = tuple(x if (equation, i) in places else None for i, x in enumerate(operands))
            return {(CAPTURED, equation): (own, cotangent)}

        shared = frozenset(first[value][1] for value in again if first[value][0] == equation)
        return _hook_at_equation(plan, equation, compute, (), size)._replace(shared=shared)

    return {equation: hook(equation) for equation in equations}


def merge_captured(plan: GhostPlan, once: Hooked, captured: CapturedArrays, found: dict[Part, Any]) -> CapturedArrays:
    """Moves from `found` to `captured` what norms and sums read: what the capture hooks found, and the gradients from
    the hooks at the equations `once`, if those hooks take only gradients."""
    parts_taken = [part for choices in once.values() for part in choices] if hooks_take_gradients() else []
    gradients = {part: found.pop(part) for part in parts_taken}
    by_equation = {part[1]: found.pop(part) for part in list(found) if part[0] == CAPTURED}
    places = _captured_operands(plan, set(by_equation))
    values: dict[Any, jax.Array] = {}
    for (equation, i), value in places.items():
        values.setdefault(value, by_equation[equation][0][i])
    inputs: Any = {
        equation: tuple(values[places[equation, i]] if (equation, i) in places else None for i in range(len(own)))
        for equation, (own, _) in by_equation.items()
    }
    cotangents = {equation: cotangent for equation, (_, cotangent) in by_equation.items()}
    return CapturedArrays(captured.gradients | gradients, captured.inputs | inputs, captured.cotangents | cotangents)


def _rematerialized_sites(plan: GhostPlan) -> set[int]:
    """The equations of sites in bodies that a backward pass recomputes."""
    equations = plan.program.equations
    bodies = [(number, one.body) for number, one in enumerate(equations) if one.body and one.name in REMAT]
    inside = {number for first, body in bodies for number in range(first + 1, body.stop)}
    return {site.use.equation for site in plan.sites if site.use.equation in inside}


def _captures_only_reals(plan: GhostPlan, equation: int) -> bool:
    """Whether everything that is captured at an equation is real."""
    jaxpr = plan.program.equations[equation].jaxpr
    wanted = [v.aval for i, v in enumerate(jaxpr.invars) if i not in plan.unread_operands[equation]]
    return all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in wanted)


def _captured_operands(plan: GhostPlan, equations: set[int]) -> dict[tuple[int, int], Any]:
    """A key for everything captured, by equation and operand, in order: a value's number, or a constant's place."""
    return {
        (equation, i): value if isinstance(value, int) else (equation, i)
        for equation in sorted(equations)
        for i, value in enumerate(plan.program.equations[equation].inputs)
        if i not in plan.unread_operands[equation]
    }


def make_sum_hooks(
    plan: GhostPlan,
    equations: Hooked,
    leaves: list[jax.Array],
    norms: dict[Part, jax.Array],
    factors: dict[int, list[jax.Array]],
) -> dict[int, BackwardHook]:
    """Hooks that compute the sums of each part. norms: by part, of `make_norm_hooks`. factors: by leaf, float32 (B,)"""

    def hook(equation: int, choices: dict[Part, NormChoice]) -> BackwardHook:
        counts = plan.program.equations[equation].counts
        shapes = {
            part: choice.view.shape_at_use(leaves[part[0]].shape)[len(choice.view.slice_counts) :]
            for part, choice in choices.items()
        }

        def compute(captured, given):
            return {part: _shortened_sums(c, shapes[part], [captured], *given[part]) for part, c in choices.items()}

        def repeated(x):
            return jnp.broadcast_to(x, (*counts, *x.shape))

        given = {part: (norms[part], [repeated(f) for f in factors[part[0]]]) for part in choices}
        (size,) = {norms[part].shape[-1] for part in choices}
        return _hook_at_equation(plan, equation, compute, given, size)

    return {equation: hook(equation, choices) for equation, choices in equations.items()}


def _shortened_sums(
    choice: NormChoice, shape: tuple[int, ...], captured: Any, norms: jax.Array, factors: list
) -> list[FloatPair]:
    """The sums of a part's contributions, each shortened to at most its factor times its norm, float32 (B,)."""
    choice = _choice_for_slice(choice)
    kept, found = part_norm(choice, None, captured)
    shorter = shortening_factors(found, norms)
    return [part_sum(choice, shape, None, captured if kept is None else kept, f * shorter) for f in factors]


def _choice_for_slice(choice: NormChoice) -> NormChoice:
    """The choice for one slice of a part, as the body of a scan sees it."""
    return choice._replace(view=ParameterView())


def _hook_at_equation(
    plan: GhostPlan, equation: int, compute: Callable, given: Tree, size: int, *, rounds: bool = True
) -> BackwardHook:
    """A hook at an equation, which calls `compute` for `size` examples. rounds: bool, whether several computations read
    what is captured, and so must read the same rounded numbers."""

    def of_rounded(captured, given, compute=compute):
        captured = jax.tree.map(current_place().matrix_unit.round_to_store, captured)
        return compute(jax.lax.optimization_barrier(captured), given)

    found = plan.program.equations[equation]
    counts, unread = found.counts, plan.unread_operands[equation]

    def shape(variable):
        return jax.ShapeDtypeStruct((size, *variable.aval.shape), variable.aval.dtype)

    operands = tuple(None if i in unread else shape(v) for i, v in enumerate(found.jaxpr.invars))
    of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(counts) :], x.dtype), given)
    compute = of_rounded if rounds else compute
    slot = jax.eval_shape(compute, (operands, shape(found.jaxpr.outvars[0])), of_one)
    return BackwardHook(compute, jax.tree.map(lambda x: jnp.zeros((*counts, *x.shape), x.dtype), slot), given)
