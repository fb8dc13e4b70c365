"""The loss of one example as a flat list of equations, and the equations that use each parameter.

A view is an equation that only moves the elements of a parameter. Any other equation of a parameter is a use of it. A
parameter is followed through its views to its uses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core

from dpx.trees import Tree
from dpx.xla.jaxprs import bodies

# Equations of one operand that move elements, or drop some, but copy none: a cotangent has one norm on both sides.
VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "rev", "slice"}
VIEWS |= {"broadcast_in_dim", "sharding_constraint"}
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


class Constant(NamedTuple):
    value: Any


class Equation(NamedTuple):
    """One equation of the jaxpr, in a program whose values are numbered.

    inputs: numbers of the operands, or constants. outputs: numbers of the results
    """

    jaxpr: core.JaxprEqn
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]

    def bind(self, *values):
        with self.jaxpr.ctx.manager:
            outputs = self.jaxpr.primitive.bind(*values, **self.jaxpr.primitive.get_bind_params(self.jaxpr.params))
        return outputs if self.jaxpr.primitive.multiple_results else [outputs]


class Use(NamedTuple):
    """Parameter leaf number `leaf` is operand number `operand` of equation number `equation`.

    view: the equations that move its elements before this use, in order
    equation: -1 if the parameter is the loss itself
    """

    leaf: int
    view: tuple[core.JaxprEqn, ...]
    equation: int
    operand: int


class Program(NamedTuple):
    """The loss of one example. Values 0, 1, ... are the leaves of the parameters, then those of the example.

    equations: in the order in which they run. loss: number of the loss's value. aux: the numbers of what the loss
    returns beside it, and their treedef. uses: those that the loss's value depends on, for each parameter leaf
    """

    equations: tuple[Equation, ...]
    loss: int | Constant
    aux: tuple[tuple[int | Constant, ...], Any]
    uses: tuple[tuple[Use, ...], ...]

    def output(self, equation: int) -> Any:
        """The shape and the dtype of the first output of an equation."""
        return self.equations[equation].jaxpr.outvars[0].aval


class Traced(NamedTuple):
    """The jaxpr of a loss of one example, `loss(params, example) -> (value, aux)`, and the shapes of its results."""

    closed: core.ClosedJaxpr
    shapes: tuple[Any, Tree]


def trace_loss(loss: Callable, params: Tree, example: Tree) -> Traced:
    """The jaxpr of `loss`; nothing is computed, so shapes suffice."""
    # A new function, because of the same one JAX may return an old jaxpr, with old values that it closes over.
    return Traced(*jax.make_jaxpr(lambda *arguments: loss(*arguments), return_shape=True)(params, example))


def follow(traced: Traced, leaves: int) -> Program:
    """The program of a loss whose parameters have so many leaves.

    Raises ValueError unless its value is one real number.
    """
    closed, (out, aux) = traced
    if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
        raise ValueError(f"loss must return one real number for one example, got {out}")
    tracer = _Tracer(leaves=leaves, inputs=len(closed.jaxpr.invars))
    result, *beside = tracer.walk(closed.jaxpr, [Constant(value) for value in closed.consts], range(tracer.inputs))
    if isinstance(result, int) and result in tracer.views:
        leaf, view = tracer.views[result]
        tracer.uses[leaf].append(Use(leaf, view, -1, 0))
    live = _live(tracer.equations, result)
    uses = tuple(tuple(use for use in uses if use.equation in live) for uses in tracer.uses)
    return Program(tuple(tracer.equations), result, (tuple(beside), jax.tree.structure(aux)), uses)


def _live(equations: list[Equation], result: int | Constant) -> set[int]:
    """The numbers of the equations that the value `result` depends on, and -1, which is the value itself."""
    needed, live = {result} if isinstance(result, int) else set(), {-1}
    for number in reversed(range(len(equations))):
        if not needed.isdisjoint(equations[number].outputs):
            live.add(number)
            needed.update(value for value in equations[number].inputs if isinstance(value, int))
    return live


def evaluate(program: Program, inputs: list, added: dict[int, jax.Array]) -> tuple[jax.Array, Tree, dict[int, tuple]]:
    """The loss, what it returns beside its value, and the operands of the equations in `added`.

    added: by number of an equation, an array to add to its output; the gradient by that array is the cotangent
    """
    values = dict(enumerate(inputs))
    seen = {}
    for number, equation in enumerate(program.equations):
        operands = [i.value if isinstance(i, Constant) else values[i] for i in equation.inputs]
        outputs = _broadcast_product(equation, operands) or equation.bind(*operands)
        if number in added:
            seen[number] = tuple(operands)
            outputs = [outputs[0] + added[number]]
        values.update(zip(equation.outputs, outputs, strict=True))
    results = program.loss, *program.aux[0]
    read = [number.value if isinstance(number, Constant) else values[number] for number in results]
    return read[0], jax.tree.unflatten(program.aux[1], read[1:]), seen


def _broadcast_product(equation: Equation, operands: list) -> list[jax.Array] | None:
    """The output of a product of arrays of two shapes, computed without the axes of length 1 that both have; else None.

    Its derivative is a product that is summed over the other axes. On a CPU, XLA sums it much faster over axis 1 of
    (B, T, D) than over axis 2 of (B, 1, T, D).
    """
    shapes = [jnp.shape(operand) for operand in operands]
    if equation.jaxpr.primitive.name != "mul" or len(set(shapes)) == 1 or len(set(map(len, shapes))) > 1:
        return None
    if not (unit := [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if set(lengths) == {1}]):
        return None
    (output,) = equation.bind(*(jax.lax.squeeze(operand, unit) for operand in operands))
    return [jax.lax.expand_dims(output, unit)]


def differentiates(program: Program) -> bool:
    """Whether every custom derivative of the program can be used.

    It cannot if it was defined inside the loss and closes over a value of the loss, because JAX traces the derivative
    later, when that value is a tracer of a trace that has ended.
    """
    known = {id(i.value) for equation in program.equations for i in equation.inputs if isinstance(i, Constant)}
    for equation in program.equations:
        if _is_custom(equation.jaxpr):
            try:
                constants = _derivative(equation).consts
            except jax.errors.UnexpectedTracerError:
                return False
            except Exception:
                continue  # it has no derivative: no parameter needs it, or the step itself raises the same error
            if any(isinstance(value, jax.core.Tracer) and id(value) not in known for value in constants):
                return False
    return True


def _is_custom(equation: core.JaxprEqn) -> bool:
    """Whether an equation, or one in a function that it calls, has a custom derivative."""
    inside = (inner for body in bodies(equation) for inner in body.eqns)
    return "custom_" in equation.primitive.name or any(map(_is_custom, inside))


def _derivative(equation: Equation) -> core.ClosedJaxpr:
    """The jaxpr of the derivatives of an equation's real results with respect to its real operands."""
    operands = [i.value if isinstance(i, Constant) else None for i in equation.inputs]
    free = [n for n, i in enumerate(equation.inputs) if not isinstance(i, Constant)]
    types: list[Any] = [operand.aval for operand in equation.jaxpr.invars]
    shapes = {n: jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in free}

    def derivative(values):
        def results(real):
            given = [real.get(n, values.get(n, operand)) for n, operand in enumerate(operands)]
            return [y for y in equation.bind(*given) if jnp.issubdtype(y.dtype, jnp.floating)]

        real = {n: x for n, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        outputs, pullback = jax.vjp(results, real)
        return pullback(outputs)

    return jax.make_jaxpr(derivative)(shapes)


def through(view: tuple[core.JaxprEqn, ...], leaf: jax.Array) -> jax.Array:
    """`leaf` as its use sees it, in its own dtype."""
    for equation in view:
        if equation.primitive.name == "transpose":  # of a NumPy array, the same memory in another order
            leaf = leaf.transpose(equation.params["permutation"])
        elif equation.primitive.name != "convert_element_type":
            leaf = equation.primitive.bind(leaf, **equation.params)
    return leaf


class _Tracer:
    """Numbers the values of a jaxpr, and collects the views and the uses of the parameters."""

    def __init__(self, *, leaves: int, inputs: int):
        self.equations: list[Equation] = []
        self.views: dict[Any, tuple[int, tuple]] = {leaf: (leaf, ()) for leaf in range(leaves)}
        self.uses: list[list[Use]] = [[] for _ in range(leaves)]
        self.inputs, self.count = inputs, inputs

    def walk(self, jaxpr, constants, arguments):
        env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            return Constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

        for equation in jaxpr.eqns:
            env.update(zip(equation.outvars, self.add(equation, [read(v) for v in equation.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def add(self, equation, inputs):
        """Appends one equation, or those of its body if it calls a function of a parameter; returns its outputs."""
        followed = [i for i, value in enumerate(inputs) if isinstance(value, int) and value in self.views]
        body = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if followed and isinstance(body, core.ClosedJaxpr):
            return self.walk(body.jaxpr, [Constant(value) for value in body.consts], inputs)
        outputs = tuple(range(self.count, self.count + len(equation.outvars)))
        self.count += len(outputs)
        if followed and _is_view(equation):
            leaf, view = self.views[inputs[0]]
            self.views[outputs[0]] = leaf, (*view, equation)
        else:
            for i in followed:
                leaf, view = self.views[inputs[i]]
                self.uses[leaf].append(Use(leaf, view, len(self.equations), i))
        self.equations.append(Equation(equation, tuple(inputs), outputs))
        return outputs


def _is_view(equation) -> bool:
    if equation.primitive.name not in VIEWS or len(equation.invars) != 1:
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    real = jnp.issubdtype(before.dtype, jnp.floating) and jnp.issubdtype(after.dtype, jnp.floating)
    return real and after.size <= before.size
