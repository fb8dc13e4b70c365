"""Finds the equations of a loss that use each parameter.

An equation that moves the elements of a parameter, places them among others, or applies a function to each of them, is
a step of a view; any other equation that reads a parameter is a use. Parameters are followed through their views to
their uses. This includes functions that the loss calls, branches that the data select, the bodies of scans, and
`jax.checkpoint`, which the backward pass recomputes. If a scan takes a parameter slice by slice, such as the stacked
weights of equal layers, its slices are followed.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.gradients.ghost.program import (
    CALLS,
    PLACES,
    REMAT,
    ConcatenateStep,
    Constant,
    ElementwiseStep,
    Equation,
    EquationBlock,
    LossProgram,
    MadeKernel,
    Origin,
    OuterValue,
    ParameterUse,
    ParameterView,
    PublicOrigin,
    RearrangeStep,
    ScanStep,
    carries_gradient,
    count_scan_operands,
    is_elementwise,
    keeps_places,
    moves_elements,
    original_index_of,
)
from dpx.values import Tree, described
from dpx.xla import jaxprs

CONSTANT, PARAMETER, DATA = 0, 1, 2  # the highest of these that a value in a branch depends on
IN_BRANCHES = ("dot_general", "conv_general_dilated", "gather", "dynamic_slice", "add", "sub", "mul")
INTEGERS: dict[str, Callable] = {  # operations on the indices that an iteration reads
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: np.where(which, cases[-1], cases[0]),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
}


def slices_of_split(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Rewrites an equation that splits its operand as one slice for each part. Returns None for any other equation."""
    if equation.primitive.name not in ("split", "unstack"):
        return None
    aval: Any = equation.invars[0].aval
    axis, sizes = equation.params["axis"], map(int, equation.params.get("sizes", ()))
    ends = list(itertools.accumulate(sizes, initial=0))

    def parts(x):
        if equation.primitive.name == "split":
            return [lax.slice_in_dim(x, start, end, axis=axis) for start, end in itertools.pairwise(ends)]
        return [lax.index_in_dim(x, place, axis, keepdims=False) for place in range(x.shape[axis])]

    return jax.make_jaxpr(parts)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


class KnownIntegers(NamedTuple):
    """Integers known when a loss is traced: those of one value or, if `loop` is set, one scalar for each iteration of
    the scan at that depth, (count,)."""

    numbers: np.ndarray
    loop: int | None = None


class TracedLoss(NamedTuple):
    """The jaxpr of one example's loss, `loss(params, example) -> (value, aux)`, and the shapes of its results."""

    closed: core.ClosedJaxpr
    shapes: tuple[Any, Tree]


def trace_loss(loss: Callable, params: Tree, example: Tree) -> TracedLoss:
    """Traces `loss`. Nothing is computed, so shapes suffice."""
    # A new lambda each time, because JAX caches jaxprs by function, and a cached one may close over old values.
    return TracedLoss(*jax.make_jaxpr(lambda *arguments: loss(*arguments), return_shape=True)(params, example))


def follow_parameters(traced: TracedLoss, leaves: int) -> LossProgram:
    """The program of a loss with this many parameter leaves. Raises ValueError unless its value is a real scalar."""
    closed, (out, aux) = traced
    if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
        raise ValueError(
            f"loss must return one real number for one example (more with has_aux=True), got {described(out)}"
        )
    tracer = _ParameterTracer(leaves=leaves, inputs=len(closed.jaxpr.invars))
    inputs = tuple(range(len(closed.jaxpr.invars)))
    result, *beside = tracer.walk(closed.jaxpr, [Constant(value) for value in closed.consts], inputs)
    if isinstance(result, int):
        tracer.record_use(result, -1, 0)
    block = EquationBlock(inputs, tuple(tracer.block), (result, *beside), len(tracer.equations))
    live = {-1} | _live_equations(tracer.equations, block, _value_indices([result]))[0]

    def live_uses(uses):
        return tuple(use for use in uses if use.equation in live)

    found = ((value, of, live_uses(tracer.kernel_uses.get(value, ()))) for value, of in tracer.kernel_leaves.items())
    kernels = tuple(MadeKernel(*each) for each in found if each[2])
    uses = tuple(map(live_uses, tracer.uses))
    data = _values_depending_on_data(tracer.equations, inputs[leaves:])
    equations, beside = tuple(tracer.equations), jax.tree.structure(aux)
    return LossProgram(equations, block, beside, uses, tracer.public, kernels, data, tracer.slices)


def _values_depending_on_data(equations: list[Equation], example: tuple[int, ...]) -> frozenset[int]:
    found, before = set(example), -1
    while len(found) > before:  # until carries add no more values
        before = len(found)
        for equation in equations:
            read = [isinstance(value, int) and value in found for value in equation.inputs]
            if any(read):
                found.update(equation.outputs)
            if body := equation.body:
                first, count = count_scan_operands(equation)
                carried = [isinstance(value, int) and value in found for value in body.outputs[:count]]
                found.update(itertools.compress(body.inputs, read))
                found.update(itertools.compress(body.inputs[first:], carried))
    return frozenset(found)


def _value_indices(values) -> set[int]:
    return {value for value in values if isinstance(value, int)}


def _live_equations(equations: list[Equation], block: EquationBlock, wanted: set[int]) -> tuple[set[int], set[int]]:
    """Returns the indices of the equations in a block that pass a gradient back from the values in `wanted`, and the
    indices of the values that get one."""
    needed, live = set(wanted), set()
    for number in reversed(block.equations):
        equation = equations[number]
        passes = equation.jaxpr is None or carries_gradient(equation.jaxpr)
        if passes and not needed.isdisjoint(equation.outputs):
            live.add(number)
            if equation.body is not None:
                live |= _live_equations_of_body(equations, equation, equation.body, needed)
            needed |= _value_indices(equation.inputs)
    return live, needed


def _live_equations_of_body(
    equations: list[Equation], equation: Equation, body: EquationBlock, needed: set[int]
) -> set[int]:
    """The live equations of an equation's body, for its results in `needed` and for the carry between iterations."""
    results = zip(equation.outputs, body.outputs, strict=True)
    wanted = _value_indices(inner for outer, inner in results if outer in needed)
    first, count = count_scan_operands(equation)
    carry = list(zip(body.inputs[first : first + count], body.outputs[:count], strict=True))
    while True:
        live, inside = _live_equations(equations, body, wanted)
        more = wanted | _value_indices(after for before, after in carry if before in inside)
        if more == wanted:
            return live
        wanted = more


class _ParameterTracer:
    """Numbers the values of a jaxpr, and collects the views and uses of parameters and of kernels made from them.

    kernels: for each value with a gradient with respect to parameters, the index of its kernel, a public value, and the
    view of the kernel. kernel_leaves: the parameters that a kernel is made from. kernel_uses: the uses of a kernel
    """

    def __init__(self, *, leaves: int, inputs: int):
        self.equations: list[Equation] = []
        self.views: dict[Any, tuple[tuple[int, ParameterView], ...]] = {
            leaf: ((leaf, ParameterView()),) for leaf in range(leaves)
        }
        self.public: dict[int, Origin] = dict.fromkeys(range(leaves))
        self.slices: dict[int, PublicOrigin] = {}
        self.known: dict[int, KnownIntegers] = {}
        self.uses: list[list[ParameterUse]] = [[] for _ in range(leaves)]
        self.kernels: dict[Any, tuple[int, ParameterView]] = {leaf: (leaf, ParameterView()) for leaf in range(leaves)}
        self.kernel_leaves: dict[int, frozenset[int]] = {leaf: frozenset([leaf]) for leaf in range(leaves)}
        self.kernel_uses: dict[int, list[ParameterUse]] = {}
        self.count = inputs
        self.data = set(range(leaves, inputs))
        self.block: list[int] = []  # the equations so far of the block that is being traced
        self.counts: tuple[int, ...] = ()  # the iterations of the scans around this block

    def walk(self, jaxpr, constants, arguments):
        env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            return Constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

        for equation in jaxpr.eqns:
            outputs = self.add_equation(equation, [read(v) for v in equation.invars])
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def add_equation(self, equation, inputs):
        """Appends an equation, or all of its body if it calls a function of a parameter. Returns the outputs."""
        followed, of_kernels = (
            [i for i, value in enumerate(inputs) if isinstance(value, int) and value in seen]
            for seen in (self.views, self.kernels)
        )
        name = equation.primitive.name
        body = equation.params.get(CALLS.get(name, ""))
        if (followed or of_kernels) and isinstance(body, core.ClosedJaxpr):
            return self.walk(body.jaxpr, [Constant(value) for value in body.consts], inputs)
        if (followed or of_kernels) and (parts := slices_of_split(equation)):
            return self.walk(parts.jaxpr, [], inputs)
        if name == "cond" and (followed or of_kernels) and self.data & _value_indices(inputs[:1]):
            kinds = [PARAMETER if i in (*followed, *of_kernels) else CONSTANT for i in range(len(inputs))]
            kinds = [kind if self.is_public(x) or kind else DATA for kind, x in zip(kinds, inputs, strict=True)]
            if every := branches_as_select(equation, kinds):
                return self.walk(every.jaxpr, [Constant(value) for value in every.consts], inputs)
        outputs = self.new_numbers(len(equation.outvars))
        if self.data & _value_indices(inputs):
            self.data.update(outputs)
        number = self.append(Equation(equation, tuple(inputs), outputs, counts=self.counts))
        if all(map(self.is_public, inputs)):
            self.public.update(dict.fromkeys(outputs, number))
        elif all(map(self.same_for_all_examples, inputs)):
            loops = set().union(*map(self.scan_depths_of_variation, inputs))
            self.slices.update(dict.fromkeys(outputs, PublicOrigin(number, tuple(sorted(loops)))))
        if carries_gradient(equation):
            self.record_kernels_or_uses(equation, number, inputs, outputs, of_kernels)
        if (followed or of_kernels) and (name == "scan" or name in REMAT):
            self.walk_body(number)
            return outputs
        if known := self.known_integers_of_result(equation, inputs):
            self.known[outputs[0]] = known
        if seen := self.views_of_result(equation, number, inputs, followed):
            self.views[outputs[0]] = seen
        elif carries_gradient(equation):
            for i in followed:
                for leaf, view in self.views[inputs[i]]:
                    self.uses[leaf].append(ParameterUse(leaf, view, number, i))
        return outputs

    def record_kernels_or_uses(self, equation, number, inputs, outputs, of_kernels):
        """Records the kernels that an equation makes from other kernels or, if it makes none, its uses of them."""
        found = [(i, *self.kernels[inputs[i]]) for i in of_kernels]
        public, varying = self.same_for_all_examples(outputs[0]), self.scan_depths_of_variation(outputs[0])
        loops = tuple(ScanStep(count, sliced=loop in varying) for loop, count in enumerate(self.counts))
        # The backward pass of a custom_vjp may be nonlinear, and would see the sum over iterations, not each of them.
        if public and (all(loop.sliced for loop in loops) or not _has_custom_derivative(equation, "custom_vjp")):
            leaves = frozenset().union(*(self.kernel_leaves[value] for _, value, _ in found))
            for output, variable in zip(outputs, equation.outvars, strict=True):
                if leaves and jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                    self.kernels[output], self.kernel_leaves[output] = (output, ParameterView(loops)), leaves
        elif public or (equation.primitive.name != "scan" and equation.primitive.name not in REMAT):
            for i, value, view in found:
                if moves_elements(equation):
                    self.kernels[outputs[0]] = value, view.then(RearrangeStep(equation, number))
                elif (
                    equation.primitive.name == "dynamic_slice"
                    and i == 0
                    and (rows := self.view_sliced_by_scan(equation, number, inputs, view))
                ):
                    self.kernels[outputs[0]] = value, rows
                else:
                    self.kernel_uses.setdefault(value, []).append(ParameterUse(value, view, number, i))

    def views_of_result(self, equation, number, inputs, followed) -> tuple[tuple[int, ParameterView], ...]:
        """The views that an equation's result has of its `followed` operands; () if the equation is a use."""
        entries = [(i, *entry) for i in followed for entry in self.views[inputs[i]]]
        if moves_elements(equation):
            return tuple((leaf, view.then(RearrangeStep(equation, number))) for _, leaf, view in entries)
        name = equation.primitive.name
        if name == "dynamic_slice" and followed == [0]:
            found = [(leaf, self.view_sliced_by_scan(equation, number, inputs, view)) for _, leaf, view in entries]
            return tuple((leaf, view) for leaf, view in found if view) if all(view for _, view in found) else ()
        if not all(self.is_public(value) or value in self.views for value in inputs):
            return ()
        if name in PLACES and (name != "pad" or followed == [0]):
            return tuple((leaf, view.then(ConcatenateStep(equation, number, i))) for i, leaf, view in entries)
        if not is_elementwise(equation, followed):
            return ()
        merged: dict[tuple, tuple[int, ParameterView, ElementwiseStep]] = {}
        for i, leaf, view in entries:
            *before, last = view.steps or (None,)
            if not isinstance(last, ElementwiseStep):
                # A body may get one outside value as several arguments; the derivative is with respect to them all.
                before, last = view.steps, ElementwiseStep(original_index_of(inputs[i], self.public), ())
            key = leaf, last.base, *before
            same = merged[key][2].equations if key in merged else ()
            together = tuple(sorted({*same, *last.equations, number}))
            merged[key] = leaf, ParameterView(tuple(before)), ElementwiseStep(last.base, together)
        return tuple((leaf, view.then(step)) for leaf, view, step in merged.values())

    def view_sliced_by_scan(self, equation, number, inputs, view: ParameterView) -> ParameterView | None:
        """The view if the iterations of one scan take slices in ascending or descending order; otherwise None."""
        aval, sizes = equation.invars[0].aval, equation.params["slice_sizes"]
        axes = [axis for axis, size in enumerate(sizes) if size < aval.shape[axis]]
        start = self.integers(inputs[1 + axes[0]]) if len(axes) == 1 else None
        if start is None or start.loop is None or not start.numbers.size or sizes[axes[0]] != 1:
            return None
        axis, places = axes[0], np.clip(start.numbers, 0, aval.shape[axes[0]] - 1)
        first, count = int(places.min()), len(places)
        ascending = np.array_equal(places, first + np.arange(count))
        if not ascending and not np.array_equal(places[::-1], first + np.arange(count)):
            return None
        at = [place for place, step in enumerate(view.steps) if isinstance(step, ScanStep)][start.loop]
        inside = view.steps[at + 1 :]
        if any(
            step.sliced if isinstance(step, ScanStep) else not keeps_places(step) for step in (view.steps[at], *inside)
        ):
            return None

        def rows(x):
            x = lax.slice_in_dim(x, first, first + count, axis=axis)
            x = x if ascending else lax.rev(x, (axis,))
            return lax.transpose(x, (axis, *(other for other in range(x.ndim) if other != axis))) if axis else x

        row = jax.ShapeDtypeStruct((*aval.shape[:axis], *aval.shape[axis + 1 :]), aval.dtype)
        whole = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        before, after = (
            tuple(RearrangeStep(each, number) for each in jax.make_jaxpr(function)(x).eqns)
            for function, x in ((rows, whole), (lambda x: lax.expand_dims(x, (axis,)), row))
        )
        return ParameterView((*view.steps[:at], *before, ScanStep(count, sliced=True), *inside, *after))

    def known_integers_of_result(self, equation, inputs) -> KnownIntegers | None:
        """The integers that an equation computes from known ones."""
        if not equation.outvars:  # for example a print
            return None
        name, aval = equation.primitive.name, equation.outvars[0].aval
        if name == "iota" and len(equation.params["shape"]) == 1:
            return KnownIntegers(np.arange(equation.params["shape"][0]).astype(aval.dtype))
        if name not in INTEGERS or jnp.issubdtype(aval.dtype, jnp.inexact) or aval.ndim > 1 or len(inputs) > 3:
            return None
        known = [found for value in inputs if (found := self.integers(value))]
        loops = {found.loop for found in known} - {None}
        if len(known) < len(inputs) or len(loops) > 1 or (loops and aval.ndim):
            return None
        return KnownIntegers(np.asarray(INTEGERS[name](*(found.numbers for found in known))).astype(aval.dtype), *loops)

    def integers(self, value) -> KnownIntegers | None:
        if not isinstance(value, Constant):
            return self.known.get(value)
        whole = not isinstance(value.value, jax.core.Tracer) and jnp.issubdtype(
            jnp.result_type(value.value), jnp.integer
        )
        return KnownIntegers(np.asarray(value.value)) if whole and np.ndim(value.value) <= 1 else None

    def integers_per_iteration(self, equation, body, operand: int) -> KnownIntegers | None:
        """The integers that operand `operand` of a scan has in each iteration."""
        known, (first, count) = self.integers(equation.inputs[operand]), count_scan_operands(equation)
        params, loop = equation.jaxpr.params, len(self.counts) - 1
        if known is None or operand < first or params.get("length") is None:
            return known
        if known.loop is not None:
            return None
        if operand >= first + count:
            return KnownIntegers(known.numbers, loop) if known.numbers.ndim == 1 else None
        jaxpr = getattr(body, "jaxpr", body)
        steps = [each for each in jaxpr.eqns if jaxpr.outvars[operand - first] in each.outvars]
        added = [
            v.val for each in steps if each.primitive.name == "add" for v in each.invars if isinstance(v, core.Literal)
        ]
        if known.numbers.ndim or not added or jaxpr.invars[operand] not in steps[0].invars:
            return None
        passed = np.arange(params["length"])[:: -1 if params["reverse"] else 1]
        return KnownIntegers((known.numbers + added[0] * passed).astype(jaxpr.invars[operand].aval.dtype), loop)

    def is_public(self, value) -> bool:
        return isinstance(value, Constant) or value in self.public

    def same_for_all_examples(self, value) -> bool:
        """Whether a value is the same for all examples; it may differ between iterations."""
        return self.is_public(value) or value in self.slices

    def scan_depths_of_variation(self, value) -> tuple[int, ...]:
        """The depths of the scans over which a value varies, as in `PublicOrigin`."""
        return self.slices[value].loops if isinstance(value, int) and value in self.slices else ()

    def walk_body(self, number):
        """Traces the body of a scan or checkpoint that a parameter enters."""
        equation = self.equations[number]
        params = equation.jaxpr.params
        outside, self.block = (self.block, self.counts), []
        body, (first, count), length = params["jaxpr"], count_scan_operands(equation), params.get("length")
        if length is not None:
            self.counts = (*self.counts, length)
        arguments = self.new_numbers(len(equation.inputs))
        is_public = all(map(self.same_for_all_examples, equation.inputs))
        for i, value in enumerate(equation.inputs):
            if self.data & _value_indices([value]):
                self.data.add(arguments[i])
            if i < first and self.is_public(value):
                self.public[arguments[i]] = OuterValue(value)
            elif self.same_for_all_examples(value) and not first <= i < first + count:
                loop = () if i < first else (len(self.counts) - 1,)
                self.slices[arguments[i]] = PublicOrigin(OuterValue(value), self.scan_depths_of_variation(value) + loop)
            if known := self.integers_per_iteration(equation, body, i):
                self.known[arguments[i]] = known
                if known.loop is not None and first <= i < first + count:
                    self.slices[arguments[i]] = PublicOrigin(OuterValue(Constant(known.numbers)), (known.loop,))
            if isinstance(value, Constant) or not (value in self.views or value in self.kernels):
                continue
            if first <= i < first + count:
                self.record_use(value, number, i)
                continue
            loop = () if length is None else (ScanStep(length, sliced=i >= first),)
            if value in self.views:
                self.views[arguments[i]] = tuple((n, ParameterView(one.steps + loop)) for n, one in self.views[value])
            if value in self.kernels and not is_public:
                made, view = self.kernels[value]
                self.kernels[arguments[i]] = made, ParameterView(view.steps + loop)
        constants = [Constant(value) for value in getattr(body, "consts", ())]
        results = self.walk(getattr(body, "jaxpr", body), constants, arguments)
        outputs = tuple(map(self.index_of_body_result, results))
        block = EquationBlock(arguments, tuple(self.block), outputs, len(self.equations))
        self.block, self.counts = outside
        self.equations[number] = equation._replace(body=block)

    def index_of_body_result(self, value):
        """The index of a body's result. A parameter that is a result is not followed further; this counts as a use."""
        if isinstance(value, Constant) or not (value in self.views or value in self.kernels):
            return value
        outputs = self.new_numbers(1)
        self.record_use(value, self.append(Equation(None, (value,), outputs, counts=self.counts)), 0)
        return outputs[0]

    def record_use(self, value, number, operand):
        for leaf, view in self.views.get(value, ()):
            self.uses[leaf].append(ParameterUse(leaf, view, number, operand))
        outputs = self.equations[number].outputs if number >= 0 else ()
        if value in self.kernels and not any(map(self.same_for_all_examples, outputs)):
            made, view = self.kernels[value]
            self.kernel_uses.setdefault(made, []).append(ParameterUse(made, view, number, operand))

    def append(self, equation: Equation) -> int:
        self.equations.append(equation)
        self.block.append(len(self.equations) - 1)
        return len(self.equations) - 1

    def new_numbers(self, count) -> tuple[int, ...]:
        self.count += count
        return tuple(range(self.count - count, self.count))


def custom_derivatives_usable(program: LossProgram) -> bool:
    """Whether every custom derivative of the program can be used. One that is defined inside the loss and closes over a
    value of the loss cannot be used: JAX traces it later, when that value is a tracer of a finished trace."""
    known = {id(i.value) for equation in program.equations for i in equation.inputs if isinstance(i, Constant)}
    for equation in (program.equations[number] for number in program.block.equations):  # it searches bodies
        if equation.jaxpr is not None and _has_custom_derivative(equation.jaxpr):
            try:
                constants = _derivative_jaxpr(equation).consts
            except jax.errors.UnexpectedTracerError:
                return False
            except Exception:
                continue  # it has no derivative; unless no parameter needs one, the step itself raises this error
            if any(isinstance(value, jax.core.Tracer) and id(value) not in known for value in constants):
                return False
    return True


def _has_custom_derivative(equation: core.JaxprEqn, kind: str = "custom_") -> bool:
    """Whether an equation, or one in a function that it calls, has a custom derivative; `kind` is part of its name."""
    inside = (each for body in jaxprs.open_jaxprs(equation) for each in jaxprs.walk_equations(body))
    return any(kind in each.primitive.name for each in itertools.chain([equation], inside))


def _derivative_jaxpr(equation: Equation) -> core.ClosedJaxpr:
    """The jaxpr of the derivatives of an equation's real results with respect to its real operands."""
    operands = [i.value if isinstance(i, Constant) else None for i in equation.inputs]
    free = [n for n, i in enumerate(equation.inputs) if not isinstance(i, Constant)]
    types = [operand.aval for operand in equation.jaxpr.invars]
    shapes = {n: jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in free}

    def derivative(values):
        def results(real):
            given = [real.get(n, values.get(n, operand)) for n, operand in enumerate(operands)]
            return [y for y in equation.bind(*given) if jnp.issubdtype(y.dtype, jnp.floating)]

        real = {n: x for n, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        outputs, pullback = jax.vjp(results, real)
        return pullback(outputs)

    return jax.make_jaxpr(derivative)(shapes)


class _BranchNotFollowed(Exception):
    """Raised for a branch that cannot be followed."""


def branches_as_select(equation: core.JaxprEqn, kinds: list[int]) -> core.ClosedJaxpr | None:
    """Rewrites a cond on data as `jax.vmap` does: all branches run, and a select picks the results. Returns None if a
    branch cannot be followed. kinds: what each operand depends on.

    A branch that is not taken passes no gradient to its data. Where a parameter meets data there, the data are zeros,
    and no gradient passes either. So a NaN or an infinity in such a branch reaches no record and no gradient.
    """

    def every(index, *operands):
        results = []
        for number, branch in enumerate(equation.params["branches"]):
            taken = index == number
            entering = [
                _gradient_only_if(taken, x) if kind == DATA else x for x, kind in zip(operands, kinds[1:], strict=True)
            ]
            results.append(_run_branch(branch, entering, kinds[1:], taken)[0])
        return [lax.select_n(index, *each) for each in zip(*results, strict=True)]

    types: list[Any] = [variable.aval for variable in equation.invars]
    try:
        return jax.make_jaxpr(every)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types))
    except _BranchNotFollowed:
        return None


def _gradient_only_if(taken: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x`, which gets a gradient only if this branch is taken."""
    return lax.select_n(taken, lax.stop_gradient(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _run_branch(closed: core.ClosedJaxpr, operands: list, kinds: list[int], taken: jax.Array) -> tuple[list, list[int]]:
    """Evaluates a branch, and returns its results and what each depends on."""
    jaxpr, consts = closed.jaxpr, [(value, CONSTANT) for value in closed.consts]
    env: dict[Any, tuple[Any, int]] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, zip(operands, kinds, strict=True), strict=True))

    def read(atoms):
        found = [(atom.val, CONSTANT) if isinstance(atom, core.Literal) else env[atom] for atom in atoms]
        return [value for value, _ in found], [kind for _, kind in found]

    for equation in jaxpr.eqns:
        values, of_values = read(equation.invars)
        body, kind = equation.params.get(CALLS.get(equation.primitive.name, "")), max(of_values, default=CONSTANT)
        if isinstance(body, core.ClosedJaxpr):
            outputs, of_outputs = _run_branch(body, values, of_values, taken)
        else:
            meets = kind == DATA and PARAMETER in of_values
            if equation.effects or (meets and equation.primitive.name not in IN_BRANCHES):
                raise _BranchNotFollowed
            if meets:
                values = [_zero_if_not(taken, x) if k == DATA else x for x, k in zip(values, of_values, strict=True)]
            outputs = Equation(equation, (), ()).bind(*values)
            outputs, of_outputs = [_gradient_only_if(taken, y) if meets else y for y in outputs], [kind] * len(outputs)
        env |= dict(zip(equation.outvars, zip(outputs, of_outputs, strict=True), strict=True))
    return read(jaxpr.outvars)


def _zero_if_not(taken: jax.Array, x: jax.Array) -> jax.Array:
    return lax.select_n(taken, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
