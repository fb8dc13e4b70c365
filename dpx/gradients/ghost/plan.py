"""Chooses from shapes, at trace time, how to compute the norms and the clipped sum of each parameter."""

import math
import re
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.gradients.ghost import algorithms, own_backward, rules, trace
from dpx.gradients.ghost.algorithms import NormAlgorithm, ParameterUses
from dpx.gradients.ghost.kernels import MadeKernelGroup, find_made_kernels, parameter_site_in_kernel
from dpx.gradients.ghost.program import (
    Equation,
    LossProgram,
    ParameterPart,
    ParameterUse,
    ParameterView,
    RearrangeStep,
    ScanStep,
    keeps_places,
    parts_of_parameter,
)
from dpx.mechanism import Mechanism
from dpx.sums.rounding import ETA
from dpx.values import Tree, float32_like
from dpx.xla.jaxprs import identity_of_equation
from dpx.xla.place import current_place

CHEAPER = "cheaper than ghost norms"
IN_PLACE = "InternalMutableArray"  # the effect of `jax.new_ref`, but not of Pallas kernels
# Ghost norms must save at least this much for one example, over all layers, in the unit of `algorithms`, because their
# own kernels cost a CPU about as much for 32 examples (benchmarks/results/zoo.md).
LEAST_SAVED = 2.0**14
FEW_ROWS = 4  # slices of a table count as a lookup if they are less than 1 / FEW_ROWS of it
LEAST_RAISE_SHOWN = 1e-4  # relative to the norm; a smaller raise is not mentioned
_NUMBER = re.compile(r"\d+")
_ROUNDING = (
    f"rounding can lengthen what an example adds to a sum by eta = {ETA:.3g} of the clip norm; epsilon includes it"
)


class LeafOfEncodedGradient(NamedTuple):
    """One leaf of the mechanism's encoded gradient.

    leaf: the index of the only parameter leaf that it depends on, which has the same shape
    scaled: bool, True if `encode` multiplies the elements by factors, False if it returns the gradient unchanged
    """

    leaf: int
    scaled: bool


class NormChoice(NamedTuple):
    """How the norms and the clipped sum of one parameter, or of one part of it, are computed, and why.

    algorithm: computes them. reason: in words, or "" if there is nothing to add
    uses: where the loss uses the part, if `algorithm` needs the inputs and cotangents there
    view: the part's view; `algorithm` computes each of its slices separately
    pieces: if `algorithm` takes the gradients of the backward pass, the view of each part that the loss uses, and the
        equations that slice it; () to differentiate with respect to the whole parameter
    made: the kernels made from the parameter, possibly together with other parameters, as in `kernel_groups`; or None
    saved: the cost that it saves for one example over per-example gradients, in the unit of `algorithms`
    """

    algorithm: NormAlgorithm
    reason: str = ""
    uses: ParameterUses = ParameterUses()
    view: ParameterView = ParameterView()
    pieces: tuple[tuple[ParameterView, tuple[int, ...]], ...] = ()
    made: MadeKernelGroup | None = None
    saved: float = 0.0


class GhostPlan(NamedTuple):
    """How the clipped sum of a batch is computed.

    program: the loss of one example. choices: for each parameter leaf, a choice for each of its disjoint parts.
    encoded: the leaves of the mechanism's encoded gradient. structure: its treedef.
    """

    program: LossProgram
    choices: tuple[tuple[NormChoice, ...], ...]
    encoded: tuple[LeafOfEncodedGradient, ...]
    structure: Any

    @property
    def part_choices(self) -> dict[tuple[int, int], NormChoice]:
        """The choice for every part, by the indices of its parameter leaf and of the part."""
        return {(leaf, number): choice for leaf, each in enumerate(self.choices) for number, choice in enumerate(each)}

    @property
    def sites(self) -> list[rules.Site]:
        return [site for choice in self.part_choices.values() for site in choice.uses.sites]

    @property
    def followed_leaves(self) -> list[int]:
        """The leaves whose norms are computed from inputs and cotangents."""
        return [leaf for leaf, choices in enumerate(self.choices) if any(choice.uses.sites for choice in choices)]

    @property
    def differentiated_leaves(self) -> list[int]:
        """The leaves whose per-example gradients the backward pass computes."""
        return [n for n in range(len(self.choices)) if self.keeps_gradients(n) and n not in self.followed_leaves]

    @property
    def unread_operands(self) -> dict[int, set[int]]:
        """For each equation with a site, by index, the operands that none of its sites reads."""
        followed: dict[int, set[int]] = {}
        for site in self.sites:
            followed.setdefault(site.use.equation, set(site.unread)).intersection_update(site.unread)
        return followed

    def count_captured_elements(self, without: Set[int] = frozenset()) -> int:
        """How many elements are kept for one example: the inputs and cotangents at sites, which XLA cannot fuse away.
        without: leaves whose sites do not count."""
        held: dict[int, int] = {}
        unread, kept = self.unread_operands, {leaf for leaf in range(len(self.choices)) if self.keeps_gradients(leaf)}
        for site in (site for site in self.sites if site.use.leaf not in kept | without):
            equation = self.program.equations[site.use.equation]
            operands = zip(equation.inputs, equation.jaxpr.invars, strict=True)
            seen = [pair for i, pair in enumerate(operands) if i not in unread[site.use.equation]]
            read = {value: v for value, v in seen if isinstance(value, int) and value in self.program.data}
            read[-1 - site.use.equation] = equation.jaxpr.outvars[0]
            held |= {value: math.prod(equation.counts) * v.aval.size for value, v in read.items()}
        return sum(held.values())

    @property
    def product_shapes(self) -> dict[int, dict[int, tuple[jax.ShapeDtypeStruct, ...]]]:
        """The shapes of A and B for each equation with a custom backward pass, by its index, and for each operand."""
        found: dict[int, dict[int, tuple[jax.ShapeDtypeStruct, ...]]] = {}
        for site in self.sites:
            equation = self.program.equations[site.use.equation]
            if equation.name in own_backward.NAMES:
                groups, positions, *columns = site.sizes
                rows = *equation.counts, groups, positions // math.prod(site.use.view.scan_repeats)
                shapes = tuple(jax.ShapeDtypeStruct((*rows, size), jnp.float32) for size in columns)
                found.setdefault(site.use.equation, {})[site.use.operand] = shapes
        return found

    @property
    def kernel_groups(self) -> list[tuple[MadeKernelGroup, bool]]:
        """The groups of kernels that are made from parameters, and whether the gradients of each group are kept."""
        found = {choice.made.leaves: choice for choice in self.part_choices.values() if choice.made}
        return [(choice.made, choice.algorithm.keeps_gradients) for choice in found.values() if choice.made]

    @property
    def scaled_parts(self) -> set[tuple[int, int]]:
        """The parts whose coordinates the mechanism or the loss scales."""
        leaves = {encoded.leaf for encoded in self.encoded if encoded.scaled}
        sloped = {part for part, choice in self.part_choices.items() if any(site.slopes for site in choice.uses.sites)}
        return sloped | {part for part in self.part_choices if part[0] in leaves}

    def keeps_gradients(self, leaf: int) -> bool:
        """Whether a leaf's gradients for all examples of a microbatch are in memory."""
        return any(choice.algorithm.keeps_gradients for choice in self.choices[leaf])

    def program_key(self, choice: NormChoice, shape: tuple[int, ...]) -> tuple | None:
        """Everything on which the programs for the norm and sum of a part of this shape depend; None if unknown."""
        sites = choice.uses.sites
        equations = [self.program.equations[site.use.equation].jaxpr for site in sites]
        if choice.uses.sharing is not None or any(each.primitive.name in own_backward.NAMES for each in equations):
            return None
        operands = [site.use.operand for site in sites]
        rest = [(one.use.view.key_of_moves(), one.sizes, one.record and one.record.inputs is None) for one in sites]
        same = map(identity_of_equation, equations)
        return choice.algorithm, shape, choice.view.slice_counts, *operands, *same, *rest


def make_ghost_plan(
    traced: trace.TracedLoss, mechanism: Mechanism, params: Tree, state: Tree, *, force: bool
) -> GhostPlan | str:
    """Makes the plan for a loss, or says why the mechanism needs whole per-example gradients.

    traced: the loss. params, state: arrays or their shapes. force: bool, True to follow every parameter that can be
    followed, even if per-example gradients are cheaper. Raises ValueError if the loss is not one real number.
    """
    if not mechanism.supports_ghost_norms:
        return "the mechanism mixes the coordinates of a gradient"
    encoding = _leaves_of_encoded_gradient(mechanism, params, state)
    if isinstance(encoding, str):
        return encoding
    if any(IN_PLACE in type(effect).__name__ for effect in traced.closed.jaxpr.effects):
        return "the loss changes an array in place"  # reads of that array are not results of equations
    encoded, structure = encoding
    leaves = jax.tree.leaves(params)
    program = trace.follow_parameters(traced, len(leaves))
    made = {value: equation for equation in program.equations for value in equation.outputs}
    scaled = {encoded_leaf.leaf: encoded_leaf.scaled for encoded_leaf in encoded}

    def choose(leaf: int, uses: tuple[ParameterUse, ...]) -> tuple[NormChoice, ...]:
        if leaf not in scaled:
            return (NormChoice(algorithms.NOT_TRAINED),)
        if not uses:
            return (NormChoice(algorithms.UNUSED, "the loss does not use it"),)
        parts = parts_of_parameter([use.view for use in uses], leaves[leaf].shape)
        small = NormChoice(algorithms.SMALL) if _is_smaller_than_cotangents(leaf, program, leaves[leaf].size) else None
        if isinstance(parts, str):
            return (small or NormChoice(algorithms.GRADIENT, parts),)
        pieces = tuple((part.view, part.ends) for part in parts)
        pieces = pieces if all(ends for _, ends in pieces) else ()
        if small:
            return (small._replace(pieces=pieces),)
        rest = program, made, leaves[leaf].shape
        found = _follow_parts(uses, parts, *rest, scaled=scaled[leaf])
        if isinstance(found, str) and (lookups := _with_slices_as_lookups(uses, program, leaves[leaf].shape)):
            parts = parts_of_parameter([use.view for use in lookups], leaves[leaf].shape)
            rows = "" if isinstance(parts, str) else _follow_parts(lookups, parts, *rest, scaled=scaled[leaf])
            found = found if isinstance(rows, str) else rows
        choices = found if isinstance(found, str) else _cheapest_ghost_norms(found, scaled=scaled[leaf], force=force)
        return (NormChoice(algorithms.GRADIENT, choices, pieces=pieces),) if isinstance(choices, str) else choices

    choices = tuple(choose(leaf, uses) for leaf, uses in enumerate(program.uses))
    choices = _with_made_kernel_choices(choices, program, made, [leaf.shape for leaf in leaves], force=force)
    choices = choices if force else _without_small_savings(choices)
    if not trace.custom_derivatives_usable(program):
        return "a custom derivative closes over values of the loss"
    return GhostPlan(program, choices, encoded, structure)


def _without_small_savings(choices: tuple[tuple[NormChoice, ...], ...]) -> tuple[tuple[NormChoice, ...], ...]:
    """Returns the choices; or per-example gradients for all parameters, if some need them anyway, and ghost norms for
    the rest would save a CPU less than their extra kernels cost."""
    followed = [choice for of_leaf in choices for choice in of_leaf if choice.uses.sites]
    if all(choice.algorithm is not algorithms.GRADIENT for of_leaf in choices for choice in of_leaf):
        return choices
    few = current_place().platform == "cpu" and sum(choice.saved for choice in followed) < LEAST_SAVED
    if not few or any(choice.made for choice in followed):
        return choices
    gradient = (NormChoice(algorithms.GRADIENT, CHEAPER),)
    return tuple(gradient if any(choice.uses.sites for choice in each) else each for each in choices)


def _with_made_kernel_choices(
    choices: tuple[tuple[NormChoice, ...], ...],
    program: LossProgram,
    made: Mapping[Any, Equation],
    shapes: list[tuple[int, ...]],
    *,
    force: bool,
) -> tuple[tuple[NormChoice, ...], ...]:
    """Replaces the choice for each parameter that cannot be followed, if the kernels made from it can."""
    alone = [(leaf, of_leaf[0]) for leaf, of_leaf in enumerate(choices) if of_leaf[0].algorithm is algorithms.GRADIENT]
    found = dict(enumerate(choices))
    for group in find_made_kernels(program, {leaf for leaf, one in alone if one.reason != CHEAPER}, made, shapes):
        choice = NormChoice(algorithms.GRADIENT, CHEAPER)
        if way := group.cheapest_algorithm(shapes, force=force):
            choice = NormChoice(way, "through what the loss makes of it", group.uses, made=group)
        found.update(dict.fromkeys(group.leaves, (choice,)))
    return tuple(found.values())


def _is_smaller_than_cotangents(leaf: int, program: LossProgram, size: int) -> bool:
    """Whether a parameter of this size, such as a bias, a scale or a table of positions, has no more elements than the
    cotangents where it meets data. The backward pass holds these cotangents for each example anyway, and ghost norms
    would read them instead of the gradient, which saves nothing."""
    met = {
        use.equation for kernel in program.kernels if leaf in kernel.leaves for use in kernel.uses if use.equation >= 0
    }
    numbers = 0
    for equation in map(program.equations.__getitem__, met):
        if equation.jaxpr is None or program.data.isdisjoint(equation.outputs):
            return False
        if equation.name in (*rules.MATRICES, "scan"):  # a scan may carry the parameter unchanged
            return False
        avals = [variable.aval for variable in equation.jaxpr.outvars]
        sizes = [aval.size for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)]
        numbers += math.prod(equation.counts) * sum(sizes)
    return size <= numbers


Followed = list[tuple[ParameterView, ParameterUses]]


def _with_slices_as_lookups(
    uses: tuple[ParameterUse, ...], program: LossProgram, shape: tuple[int, ...]
) -> tuple[ParameterUse, ...]:
    """The uses of a parameter, with each slice counted as a lookup whatever the loss does with it, such as the row of
    one token beside rows that the data select. Returns () without slices, or if they hold a large share."""
    found: dict[int, ParameterUse] = {}
    for place, use in enumerate(uses):
        for before, step in enumerate(use.view.steps):
            if isinstance(step, RearrangeStep) and program.equations[step.number].name == "slice":
                use = use._replace(view=ParameterView(use.view.steps[:before]), equation=step.number, operand=0)
                place = ~step.number  # so that all uses of one slice are one lookup
            if not (keeps_places(step) or (isinstance(step, ScanStep) and not step.sliced)):
                break
        found[place] = use
    numbers = sum(math.prod(program.output_shape(~place).shape) for place in found if place < 0)
    return tuple(found.values()) if 0 < FEW_ROWS * numbers <= math.prod(shape) else ()


def _follow_parts(
    uses: tuple[ParameterUse, ...],
    parts: list[ParameterPart],
    program: LossProgram,
    made: Mapping[Any, Equation],
    shape: tuple[int, ...],
    *,
    scaled: bool,
) -> Followed | str:
    """The view and uses of each part of a parameter of this shape, or why it cannot be followed."""
    followed = []
    for part in parts:
        sites, slices = [], math.prod(part.view.slice_counts)
        inside = part.view.shape_at_use(shape)[len(part.view.slice_counts) :]
        for number, rest in zip(part.uses, part.rests, strict=True):
            use = uses[number]._replace(view=rest)
            is_kernel = rest.changes_values or (use.equation >= 0 and rules.is_complex(program.equations[use.equation]))
            site = rules.find_parameter_site(use.as_kernel_use() if is_kernel else use, program, made)
            if isinstance(site, rules.Site) and is_kernel:
                site = parameter_site_in_kernel(site, use, inside, program)
            if isinstance(site, str):
                return site
            sites.append(site)
        if len(sites) == 1:
            followed.append((part.view, ParameterUses(tuple(sites), slices=slices, shape=inside)))
            continue
        sharing = algorithms.find_element_sharing(tuple(sites), inside)
        if isinstance(sharing, str):
            return sharing
        together = ParameterUses(tuple(sites), sharing, slices, inside)
        if any(site.slopes for site in sites) or (scaled and not together.are_one_lookup):
            return f"used {len(sites)} times, and the mechanism{'' if scaled else ' or the loss'} masks or scales it"
        followed.append((part.view, together))
    return followed


def _cheapest_ghost_norms(followed: Followed, *, scaled: bool, force: bool) -> tuple[NormChoice, ...] | str:
    """The cheapest ghost norms for all parts of a parameter, or the reason why per-example gradients are used."""
    choices, ghost, gradient = [], 0.0, 0.0
    for view, uses in followed:
        multiplied = scaled or any(site.slopes for site in uses.sites)
        costs = {way: cost for way in algorithms.GHOST if (cost := way.cost(uses, multiplied)) is not None}
        way = min(costs, key=lambda way: costs[way])
        ghost += uses.slices * costs[way]
        gradient += uses.slices * algorithms.gradient_cost(uses)
        slices = uses.slices if view.slice_counts else len(followed)
        raised = way.increase(uses)
        words = [f"of each of {slices} slices"] * bool(view.steps)
        words += [f"raised by up to {100 * raised:.2f}% against rounding"] * (raised >= LEAST_RAISE_SHOWN)
        saved = uses.slices * (algorithms.gradient_cost(uses) - costs[way])
        choices.append(NormChoice(way, ", ".join(words), uses, view, saved=saved))
    if not force and gradient <= ghost:
        return CHEAPER
    return tuple(choices)


def _leaves_of_encoded_gradient(
    mechanism: Mechanism, params: Tree, state: Tree
) -> tuple[tuple[LeafOfEncodedGradient, ...], Any] | str:
    """The leaves and treedef of the encoded gradient, from the jaxpr of `encode`, or why it has no ghost norms."""
    grad = float32_like(params)
    closed, out = jax.make_jaxpr(mechanism.encode, return_shape=True)(grad, state)
    count = len(jax.tree.leaves(grad))
    depends = {var: {leaf} for leaf, var in enumerate(closed.jaxpr.invars[:count])}
    for equation in closed.jaxpr.eqns:
        of = set().union(*(depends.get(v, set()) for v in equation.invars if not isinstance(v, core.Literal)))
        depends.update(dict.fromkeys(equation.outvars, of))
    encoded = []
    for var, shape in zip(closed.jaxpr.outvars, map(jnp.shape, jax.tree.leaves(out)), strict=True):
        of = set() if isinstance(var, core.Literal) else depends.get(var, set())
        if len(of) != 1:
            return "a coordinate of the mechanism does not depend on exactly one parameter"
        (leaf,) = of
        source: Any = closed.jaxpr.invars[leaf]
        if shape != source.aval.shape:
            return "a coordinate of the mechanism has another shape than its parameter"
        encoded.append(LeafOfEncodedGradient(leaf, scaled=var is not source))
    if len({encoded_leaf.leaf for encoded_leaf in encoded}) != len(encoded):
        return "a parameter has several coordinates in the mechanism"
    return tuple(encoded), jax.tree.structure(out)


class ForwardModePlan(NamedTuple):
    """The plan for a mechanism with `forward`, which needs no gradient norms. leaves: the number of parameters."""

    leaves: int

    @property
    def choices(self) -> tuple[tuple[NormChoice, ...], ...]:
        return ((NormChoice(algorithms.FORWARD),),) * self.leaves

    def keeps_gradients(self, leaf: int) -> bool:
        return False


class NormExplanation(NamedTuple):
    """How `private_updates` computes the norms of every parameter. Print it to see a table.

    Parameters share a line if their methods, reasons and paths are equal except for numbers: `*` stands for the numbers
    that differ, and the line counts the parameters. A line about rounding follows.

    rows: (parameter, method, reason) for every parameter leaf; the reason is "" if there is nothing to add
    microbatches: how many examples are in memory at once, and why; "" if all are
    backward_passes: says that there are two, and why; "" if there is one
    """

    rows: tuple[tuple[str, str, str], ...]
    microbatches: str = ""
    backward_passes: str = ""

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[str]] = {}
        for path, way, why in self.rows:
            alike.setdefault((_NUMBER.sub("*", path), way, why), []).append(path)
        rows = [(_path_pattern(paths), way, why) for (_, way, why), paths in alike.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{name:{widths[0]}}  {way:{widths[1]}}  {why}".rstrip() for name, way, why in rows]
        return "\n".join([*lines, _ROUNDING, *filter(None, [self.backward_passes, self.microbatches])])


def _path_pattern(paths: list[str]) -> str:
    """The common path of `paths`, with `*` for the numbers that differ, followed by the number of paths."""
    if len(paths) == 1:
        return paths[0]
    found = zip(*map(_NUMBER.findall, paths), strict=True)
    numbers = iter(["*" if len(set(each)) > 1 else each[0] for each in found])
    return f"{_NUMBER.sub(lambda _: next(numbers), paths[0])} ({len(paths)})"


Plan = GhostPlan | ForwardModePlan | str  # a string is the reason for per-example gradients


def explain_plan(plan: Plan, params: Tree, microbatches: str, backward_passes: str) -> NormExplanation:
    """Explains the plan in words, or the reason for per-example gradients, and what is in memory at once."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    choices = [(NormChoice(algorithms.GRADIENT, plan),)] * len(paths) if isinstance(plan, str) else plan.choices

    def both(words):
        return "; ".join(dict.fromkeys(filter(None, words)))

    rows = (
        (path, both(choice.algorithm.words for choice in of_leaf), both(choice.reason for choice in of_leaf))
        for path, of_leaf in zip(paths, choices, strict=True)
    )
    return NormExplanation(tuple(rows), microbatches, backward_passes)
