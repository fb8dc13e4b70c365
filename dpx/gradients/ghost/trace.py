"""The loss of one example as a list of equations, and the equations that use each parameter.

A view is an equation that only moves the elements of a parameter. Any other equation of a parameter is a use of it. A
parameter is followed through its views to its uses, also into functions that the loss calls, into the parts that it
computes again in the backward pass (`jax.checkpoint`), and into the bodies of its scans. There, a parameter that the
scan takes slice by slice, such as the stacked weights of equal layers, is followed in the slices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core

from dpx.gradients.ghost.views import Moved, Repeats, Slices, View, is_view, spelled_out
from dpx.trees import Tree
from dpx.xla.jaxprs import parts_of_scan

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT = ("checkpoint", "remat", "remat2")  # the names of `jax.checkpoint` in jaxprs


class Constant(NamedTuple):
    value: Any


class Block(NamedTuple):
    """Equations that run one after another: those of the loss, of the body of a scan, or of a checkpoint.

    inputs: numbers of the values that it is given. equations: their numbers. outputs: numbers of values, or constants
    stop: the equations inside, also those in bodies of bodies, have smaller numbers
    """

    inputs: tuple[int, ...]
    equations: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    stop: int


class Equation(NamedTuple):
    """One equation of the jaxpr, in a program whose values are numbered.

    jaxpr: None if the body of a scan, or of a checkpoint, hands on its input. inputs: numbers of the operands, or
    constants. outputs: numbers of the results. body: of a scan or checkpoint that a parameter enters
    counts: how many iterations each of the scans around it has, the outermost first
    """

    jaxpr: core.JaxprEqn | None
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    body: Block | None = None
    counts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "the result of a loop or checkpoint" if self.jaxpr is None else self.jaxpr.primitive.name

    def bind(self, *values):
        if self.jaxpr is None:
            return list(values)
        with self.jaxpr.ctx.manager:
            outputs = self.jaxpr.primitive.bind(*values, **self.jaxpr.primitive.get_bind_params(self.jaxpr.params))
        return outputs if self.jaxpr.primitive.multiple_results else [outputs]


class Use(NamedTuple):
    """Parameter leaf number `leaf` is operand number `operand` of equation number `equation`.

    view: what moves its elements before this use, in order
    equation: -1 if the parameter is the loss itself
    """

    leaf: int
    view: View
    equation: int
    operand: int


class Program(NamedTuple):
    """The loss of one example. Values 0, 1, ... are the leaves of the parameters, then those of the example.

    equations: all of them. block: those outside of all bodies; its outputs are the loss's value, and what the loss
    returns beside it, a tree of structure `aux`. uses: those that the loss's value depends on, for each parameter leaf
    """

    equations: tuple[Equation, ...]
    block: Block
    aux: Any
    uses: tuple[tuple[Use, ...], ...]

    def output(self, equation: int) -> jax.ShapeDtypeStruct:
        """The shape and the dtype of the first output of an equation, with an axis for each scan around it."""
        found = self.equations[equation]
        assert found.jaxpr is not None
        aval: Any = found.jaxpr.outvars[0].aval
        return jax.ShapeDtypeStruct((*found.counts, *aval.shape), aval.dtype)


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
    inputs = tuple(range(len(closed.jaxpr.invars)))
    result, *beside = tracer.walk(closed.jaxpr, [Constant(value) for value in closed.consts], inputs)
    if isinstance(result, int) and result in tracer.views:
        leaf, view = tracer.views[result]
        tracer.uses[leaf].append(Use(leaf, view, -1, 0))
    block = Block(inputs, tuple(tracer.block), (result, *beside), len(tracer.equations))
    live = {-1} | _live(tracer.equations, block, _numbers([result]))[0]
    uses = tuple(tuple(use for use in uses if use.equation in live) for uses in tracer.uses)
    return Program(tuple(tracer.equations), block, jax.tree.structure(aux), uses)


def carried(equation: Equation) -> tuple[int, int]:
    """How many operands of a scan are the same in all iterations, and how many are handed from one to the next; of a
    checkpoint, all and none."""
    assert equation.jaxpr is not None
    return parts_of_scan(equation.jaxpr.params) if equation.name == "scan" else (len(equation.inputs), 0)


def _numbers(values) -> set[int]:
    return {value for value in values if isinstance(value, int)}


def _live(equations: list[Equation], block: Block, wanted: set[int]) -> tuple[set[int], set[int]]:
    """The numbers of the equations of a block that the values `wanted` depend on, and of all these values."""
    needed, live = set(wanted), set()
    for number in reversed(block.equations):
        equation = equations[number]
        if not needed.isdisjoint(equation.outputs):
            live.add(number)
            if equation.body is not None:
                live |= _live_inside(equations, equation, equation.body, needed)
            needed |= _numbers(equation.inputs)
    return live, needed


def _live_inside(equations: list[Equation], equation: Equation, body: Block, needed: set[int]) -> set[int]:
    """The same of the body of an equation, for its results in `needed`, and for what an iteration hands to the next."""
    results = zip(equation.outputs, body.outputs, strict=True)
    wanted = _numbers(inner for outer, inner in results if outer in needed)
    first, count = carried(equation)
    handed = list(zip(body.inputs[first : first + count], body.outputs[:count], strict=True))
    while True:
        live, inside = _live(equations, body, wanted)
        more = wanted | _numbers(after for before, after in handed if before in inside)
        if more == wanted:
            return live
        wanted = more


class _Tracer:
    """Numbers the values of a jaxpr, and collects the views and the uses of the parameters."""

    def __init__(self, *, leaves: int, inputs: int):
        self.equations: list[Equation] = []
        self.views: dict[Any, tuple[int, View]] = {leaf: (leaf, ()) for leaf in range(leaves)}
        self.uses: list[list[Use]] = [[] for _ in range(leaves)]
        self.count = inputs
        self.block: list[int] = []  # the equations of the block that is being walked
        self.counts: tuple[int, ...] = ()  # and the iterations of the scans around it

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
        name = equation.primitive.name
        body = equation.params.get(CALLS.get(name, ""))
        if followed and isinstance(body, core.ClosedJaxpr):
            return self.walk(body.jaxpr, [Constant(value) for value in body.consts], inputs)
        if followed and (parts := spelled_out(equation)):
            return self.walk(parts.jaxpr, [], inputs)
        outputs = self.numbered(len(equation.outvars))
        number = self.append(Equation(equation, tuple(inputs), outputs, counts=self.counts))
        if followed and is_view(equation):
            leaf, view = self.views[inputs[0]]
            self.views[outputs[0]] = leaf, (*view, Moved(equation, number))
        elif followed and (name == "scan" or name in REMAT):
            self.enter(number)
        else:
            for i in followed:
                self.used(inputs[i], number, i)
        return outputs

    def enter(self, number):
        """Walks through the body of a scan, or of a checkpoint, that a parameter enters."""
        equation = self.equations[number]
        params = equation.jaxpr.params
        outside, self.block = (self.block, self.counts), []
        body, (first, count), length = params["jaxpr"], carried(equation), params.get("length")
        if length is not None:
            self.counts = (*self.counts, length)
        arguments = self.numbered(len(equation.inputs))
        for i, value in enumerate(equation.inputs):
            if isinstance(value, int) and value in self.views:
                leaf, view = self.views[value]
                if first <= i < first + count:
                    self.used(value, number, i)
                elif length is None:
                    self.views[arguments[i]] = leaf, view
                else:
                    self.views[arguments[i]] = leaf, (*view, Repeats(length) if i < first else Slices(length))
        constants = [Constant(value) for value in getattr(body, "consts", ())]
        results = self.walk(getattr(body, "jaxpr", body), constants, arguments)
        outputs = tuple(map(self.handed_on, results))
        block = Block(arguments, tuple(self.block), outputs, len(self.equations))
        self.block, self.counts = outside
        self.equations[number] = equation._replace(body=block)

    def handed_on(self, value):
        """A result of a body. If it is a parameter, it is not followed any further, but that is a use."""
        if isinstance(value, Constant) or value not in self.views:
            return value
        outputs = self.numbered(1)
        self.used(value, self.append(Equation(None, (value,), outputs, counts=self.counts)), 0)
        return outputs[0]

    def used(self, value, number, operand):
        leaf, view = self.views[value]
        self.uses[leaf].append(Use(leaf, view, number, operand))

    def append(self, equation: Equation) -> int:
        self.equations.append(equation)
        self.block.append(len(self.equations) - 1)
        return len(self.equations) - 1

    def numbered(self, count) -> tuple[int, ...]:
        """Numbers of new values."""
        self.count += count
        return tuple(range(self.count - count, self.count))
