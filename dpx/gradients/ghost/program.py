"""The loss of one example as a list of equations with numbered values, and where it uses each parameter.

A value is public if it depends only on parameters and constants, so that it is the same for all examples.

A view describes what happens to the elements of a parameter between the parameter and a use of it. Each step of a view
moves the elements, places them among others, applies a function to each of them, or passes them to the iterations of a
scan, whole or slice by slice. A part of a parameter is one slice, such as the weights of one layer in a stack.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.xla import jaxprs
from dpx.xla.jaxprs import identity_of_equation

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT = ("checkpoint", "remat", "remat2")  # the names of `jax.checkpoint` in jaxprs

# Equations of one operand that move elements or drop some, but copy none, so they preserve the norm of a cotangent.
MOVES = {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "rev", "slice"}
MOVES |= {"broadcast_in_dim", "sharding_constraint"}
STILL = ("convert_element_type", "copy")  # leave every element in its place

PLACES = {"concatenate", "stack", "pad"}  # put elements beside others
ELEMENTWISE = set(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp complex conj convert_element_type copy cos cosh "
    "ceil div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow log log1p logistic max min mul neg pow real round "
    "rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh".split()
)

Box = list[range]  # a block of a parameter's elements: the indices along each axis


class RearrangeStep(NamedTuple):
    """A step of a view: equation `number` moves the elements."""

    equation: core.JaxprEqn
    number: int

    @property
    def name(self) -> str:
        return self.equation.primitive.name


class ConcatenateStep(NamedTuple):
    """A step of a view: equation `number` takes the elements as operand `operand` and puts others beside them."""

    equation: core.JaxprEqn
    number: int
    operand: int

    def bind_with_zeros(self, x: jax.Array) -> jax.Array:
        """Evaluates the equation with zeros for all other operands."""
        types: list[Any] = [variable.aval for variable in self.equation.invars]
        operands = [x if i == self.operand else jnp.zeros(each.shape, x.dtype) for i, each in enumerate(types)]
        return self.equation.primitive.bind(*operands, **self.equation.params)


class ElementwiseStep(NamedTuple):
    """A step of a view: `equations`, in this order, apply a function to each element of value `base`."""

    base: int
    equations: tuple[int, ...]


class ScanStep(NamedTuple):
    """A step of a view into `count` iterations of a scan: each gets a slice along axis 0 if `sliced`, otherwise all."""

    count: int
    sliced: bool


class ParameterView(NamedTuple):
    """The steps, in order, that a parameter's elements go through between the parameter and a use of it."""

    steps: tuple["Step", ...] = ()

    @property
    def changes_values(self) -> bool:
        """Whether the use sees anything but the parameter's own elements in some order."""
        return any(isinstance(step, ConcatenateStep | ElementwiseStep) for step in self.steps)

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """For each scan that slices the elements, outermost first, how many slices it takes."""
        return tuple(step.count for step in self.steps if isinstance(step, ScanStep) and step.sliced)

    @property
    def scan_repeats(self) -> tuple[int, ...]:
        """For each scan that sees all elements in every iteration, outermost first, how many iterations it has."""
        return tuple(step.count for step in self.steps if isinstance(step, ScanStep) and not step.sliced)

    @property
    def initial_slice_step_count(self) -> int:
        """How many initial steps of the view only slice or move nothing, counted up to the last slice."""
        end = 0
        for number, step in enumerate(self.steps):
            if not isinstance(step, RearrangeStep) or step.name not in (*STILL, "slice"):
                break
            if step.name == "slice":
                end = number + 1
        return end

    def then(self, step: "Step") -> "ParameterView":
        return ParameterView((*self.steps, step))

    def apply_steps(self, leaf: Any, in_place: Callable[[ElementwiseStep, Any], Any] = lambda step, leaf: leaf) -> Any:
        """Returns `leaf` as the use sees it, in the dtype of `leaf`, with a leading axis for each of `slice_counts`.
        in_place: what to do at an `ElementwiseStep`."""
        for number, step in enumerate(self.steps):
            if isinstance(step, ScanStep):
                if step.sliced:
                    return jax.vmap(ParameterView(self.steps[number + 1 :]).apply_steps)(leaf)
            elif isinstance(step, ElementwiseStep):
                leaf = in_place(step, leaf)
            elif isinstance(step, ConcatenateStep):
                leaf = step.bind_with_zeros(leaf)
            elif step.name == "transpose":  # this keeps a NumPy array a view of the same memory
                leaf = leaf.transpose(step.equation.params["permutation"])
            elif step.name != "convert_element_type":
                leaf = step.equation.primitive.bind(leaf, **step.equation.params)
        return leaf

    def shape_at_use(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a use sees a parameter of this shape, with a leading axis for each of `slice_counts`."""
        return jax.eval_shape(self.apply_steps, jax.ShapeDtypeStruct(shape, jnp.float32)).shape

    def box_of_slices(self, shape: tuple[int, ...]) -> Box:
        """The elements that the leading slices select from a parameter of this shape."""
        found = [range(size) for size in shape]
        for step in self.steps[: self.initial_slice_step_count]:
            if isinstance(step, RearrangeStep) and step.name == "slice":
                params = step.equation.params
                starts, limits = params["start_indices"], params["limit_indices"]
                strides = params["strides"] or (1,) * len(starts)
                of_axes = zip(found, starts, limits, strides, strict=True)
                found = [elements[start:limit:stride] for elements, start, limit, stride in of_axes]
        return found

    def key_of_moves(self) -> tuple:
        """A key that is equal for views that move elements in the same way."""

        def identity_of_step(step: Step) -> Any:
            if isinstance(step, RearrangeStep | ConcatenateStep):
                return identity_of_equation(step.equation), getattr(step, "operand", 0)
            return step if isinstance(step, ScanStep) else None

        return tuple(map(identity_of_step, self.steps))


Step = RearrangeStep | ConcatenateStep | ElementwiseStep | ScanStep


def moves_elements(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name not in MOVES or len(equation.invars) != 1:
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    kinds = [[jnp.issubdtype(aval.dtype, kind) for aval in (before, after)] for kind in (jnp.floating, jnp.inexact)]
    same = kinds[1] == [True, True] and kinds[0][0] == kinds[0][1]
    return same and after.size <= before.size


def is_elementwise(equation: core.JaxprEqn, operands: list[int]) -> bool:
    """Whether an equation has a single result, shaped like these operands, that carries their gradient. A custom
    derivative, such as that of `jax.nn.relu`, may still mix elements: `kernels` checks for that."""
    types: list[Any] = [variable.aval for variable in (*equation.outvars[:1], *equation.invars)]
    same = len(equation.outvars) == 1 and all(types[1 + i].shape == types[0].shape for i in operands)
    return same and equation.primitive.name in (*ELEMENTWISE, "custom_jvp_call") and carries_gradient(equation)


def carries_gradient(equation: core.JaxprEqn) -> bool:
    """Whether any operand can have a nonzero gradient through an equation."""
    avals: list[Any] = [variable.aval for variable in equation.outvars]
    inexact = any(jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact) for aval in avals)
    return inexact and equation.primitive.name != "stop_gradient"


class ParameterPart(NamedTuple):
    """A part of a parameter that overlaps no other part.

    view: from the parameter to the part, up to the last scan that takes slices. uses: the indices of the part's uses.
    rests: the views from the part to each use. ends: the equations that end `view`, if they are slices
    """

    view: ParameterView
    uses: tuple[int, ...]
    rests: tuple[ParameterView, ...]
    ends: tuple[int, ...] = ()


def parts_of_parameter(seen: list[ParameterView], shape: tuple[int, ...]) -> list[ParameterPart] | str:
    """Splits a parameter of this shape into the parts that its uses see, or says why the parts cannot be separated.

    A part is what all scans around a use slice, such as the stacked weights of equal layers. Without a scan, it is what
    the first equations slice, as when a Python loop indexes its layers. Each slice counts as one parameter, because the
    squared norm of a gradient is the sum of the squared norms of its parts.
    """
    found: dict[tuple, ParameterPart] = {}
    for number, view in enumerate(seen):
        loops = [(place, step.sliced) for place, step in enumerate(view.steps) if isinstance(step, ScanStep)]
        slices = [place for place, sliced in loops if sliced]
        if slices and any(not sliced and place < slices[-1] for place, sliced in loops):
            return "used in slices by a scan that another scan repeats"
        if 0 in view.slice_counts:
            return "used in a scan without iterations"
        end = slices[-1] + 1 if slices else view.initial_slice_step_count
        if ParameterView(view.steps[:end]).changes_values:
            return "used in slices by a scan after an equation that computes or places"
        begin, rest = ParameterView(view.steps[:end]), ParameterView(view.steps[end:])
        key = ParameterView(tuple(step for step in begin.steps if not keeps_places(step))).key_of_moves()
        before = found.get(key, ParameterPart(begin, (), ()))
        ends = {step.number for step in begin.steps[-1:] if isinstance(step, RearrangeStep)}
        ends = tuple(sorted(ends.union(before.ends)))
        found[key] = ParameterPart(before.view, (*before.uses, number), (*before.rests, rest), ends)
    sliced = any(part.view.slice_counts for part in found.values())
    if len(found) > 1 or sliced:
        if are_disjoint([part.view.box_of_slices(shape) for part in found.values()]):
            return list(found.values())
        if sliced:
            return f"used {len(seen)} times, in slices by a scan that another use may overlap"
    return [ParameterPart(ParameterView(), tuple(range(len(seen))), tuple(seen))]


def keeps_places(step: Step) -> bool:
    return isinstance(step, RearrangeStep) and step.name in STILL


def are_disjoint(boxes: list[Box]) -> bool:
    """Whether the boxes share no element. Returns False if any box has gaps."""
    if any(elements.step != 1 for box in boxes for elements in box):
        return False

    def apart(one, other):
        return any(a.stop <= b.start or b.stop <= a.start for a, b in zip(one, other, strict=True))

    return all(apart(*pair) for pair in itertools.combinations(boxes, 2))


def assemble_parts(views: list[ParameterView], parts: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Assembles a float32 array of this shape from disjoint parts, with zeros elsewhere."""
    boxes = [view.box_of_slices(shape) for view in views]
    parts = [_part_in_box(*each) for each in zip(views, parts, boxes, strict=True)]
    axes = [axis for axis in range(len(shape)) if any(len(each[axis]) != shape[axis] for each in boxes)]
    if not axes:
        return parts[0]
    if len(axes) == 1:  # a sum of padded parts would compile slowly, and read all of them for every element
        (axis,) = axes
        order = sorted(range(len(boxes)), key=lambda number: boxes[number][axis].start)
        if [place for number in order for place in boxes[number][axis]] == list(range(shape[axis])):
            return jnp.concatenate([parts[number] for number in order], axis)
    whole = jnp.zeros(shape, jnp.float32)
    for each, part in zip(boxes, parts, strict=True):
        whole = lax.dynamic_update_slice(whole, part, [elements.start for elements in each])
    return whole


def _part_in_box(view: ParameterView, part: jax.Array, elements: Box) -> jax.Array:
    rest = view.steps[view.initial_slice_step_count :]
    if all(isinstance(step, ScanStep) or keeps_places(step) for step in rest):
        return part
    inside = jax.ShapeDtypeStruct(tuple(map(len, elements)), jnp.float32)
    (part,) = jax.linear_transpose(ParameterView(rest).apply_steps, inside)(part)
    return part


class Constant(NamedTuple):
    value: Any


class EquationBlock(NamedTuple):
    """Equations that run one after another: those of the whole loss, or of the body of a scan or checkpoint.

    inputs: the indices of the block's arguments. equations: their indices. outputs: indices of values, or constants
    stop: an index above those of all equations in this block, at any depth
    """

    inputs: tuple[int, ...]
    equations: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    stop: int


class Equation(NamedTuple):
    """One equation of the jaxpr, in a program whose values are numbered.

    jaxpr: its JaxprEqn; None for the copy that returns a parameter from the body of a scan or checkpoint. inputs: the
    indices of the operands, or constants. outputs: the indices of the results. body: set for a scan or checkpoint that
    a parameter enters. counts: the numbers of iterations of the scans around it, outermost first
    """

    jaxpr: Any
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    body: EquationBlock | None = None
    counts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "the result of a loop or checkpoint" if self.jaxpr is None else self.jaxpr.primitive.name

    def bind(self, *values):
        if self.jaxpr is None:
            return list(values)
        with self.jaxpr.ctx.manager:
            return jaxprs.bind_equation(self.jaxpr, list(values), self.jaxpr.params)


class ParameterUse(NamedTuple):
    """Equation number `equation` reads parameter leaf `leaf` as operand number `operand`. If the parameter is the loss
    itself, `equation` is -1. view: what happens to the parameter's elements before this use"""

    leaf: int
    view: ParameterView
    equation: int
    operand: int

    def as_kernel_use(self) -> "ParameterUse":
        """Returns this use as one of the kernel that `view` produces. Its view keeps only the `ScanStep`s."""
        return self._replace(view=ParameterView(tuple(step for step in self.view.steps if isinstance(step, ScanStep))))


class MadeKernel(NamedTuple):
    """A parameter, or a public value that the loss makes from parameters, with all uses that have no public result.

    value: its index. leaves: the parameters that get its gradient. uses: their views begin at the value
    """

    value: int
    leaves: frozenset[int]
    uses: tuple[ParameterUse, ...]


class LossProgram(NamedTuple):
    """The loss of one example. Values 0, 1, ... are the leaves of the parameters, then those of the example.

    equations: all equations. block: those outside all bodies; its outputs are the loss's value and its auxiliary
    results, a tree of structure `aux`. uses: for each parameter leaf, the uses that the loss depends on
    public: the origin of each public value, by index: the equation that computes it, None for a parameter, or in a
        body, the same value outside
    kernels: the kernels that the loss depends on
    data: the indices of values that depend on the example
    slices: values in bodies, by index, that are public in each iteration: slices of public values, and whatever is
        computed from them
    """

    equations: tuple[Equation, ...]
    block: EquationBlock
    aux: Any
    uses: tuple[tuple[ParameterUse, ...], ...]
    public: dict[int, "Origin"]
    kernels: tuple[MadeKernel, ...]
    data: frozenset[int] = frozenset()
    slices: dict[int, "PublicOrigin"] = {}

    def original_index(self, value: int | Constant) -> int | Constant:
        """The index of a value where it was computed, because a body gives its arguments new indices."""
        return original_index_of(value, self.public)

    def public_origin(self, value: int) -> "PublicOrigin":
        """The origin of a value that is public, at least within each iteration."""
        return self.slices.get(value) or PublicOrigin(self.public[value], ())

    def unsliced_index(self, value: int | Constant) -> int | Constant:
        """The index of a value where it was computed, before any loop slices it."""
        while isinstance(value, int) and isinstance(origin := self.public_origin(value).origin, OuterValue):
            value = origin.value
        return value

    def output_shape(self, equation: int) -> jax.ShapeDtypeStruct:
        """The shape and dtype of an equation's first output, with a leading axis for each scan around it."""
        found = self.equations[equation]
        aval = found.jaxpr.outvars[0].aval
        return jax.ShapeDtypeStruct((*found.counts, *aval.shape), aval.dtype)


class OuterValue(NamedTuple):
    value: int | Constant


Origin = int | None | OuterValue


def original_index_of(value: Any, public: Mapping[int, Origin]) -> Any:  # see `LossProgram.original_index`
    while isinstance(value, int) and isinstance(origin := public.get(value), OuterValue):
        value = origin.value
    return value


class PublicOrigin(NamedTuple):
    """The origin of a value that is public in each iteration. origin: as in `LossProgram.public`; for a slice, the
    value that the scan slices. loops: the depths of the scans over which the value varies, 0 for the outermost."""

    origin: Origin
    loops: tuple[int, ...]


def count_scan_operands(equation: Equation) -> tuple[int, int]:
    """How many operands of a scan are constant, and how many are carried. A checkpoint counts all as constant."""
    if equation.name != "scan":
        return len(equation.inputs), 0
    return jaxprs.constants_and_carry_of_scan(equation.jaxpr.params)
