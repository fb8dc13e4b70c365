"""The loss of one example as a list of equations whose values are numbered, and the uses of its parameters there.

A value is public if it depends on parameters and constants only, and so is the same for all examples.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from dpx.gradients.ghost.views import ScanStep, View
from dpx.xla import jaxprs

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMAT = ("checkpoint", "remat", "remat2")  # the names of `jax.checkpoint` in jaxprs


class Constant(NamedTuple):
    value: Any


class EquationBlock(NamedTuple):
    """Equations that run one after another: all of the loss, or those in the body of a scan or of a checkpoint.

    inputs: numbers of the values that it is given. equations: their numbers. outputs: numbers of values, or constants
    stop: equations inside it, at any depth, have smaller numbers
    """

    inputs: tuple[int, ...]
    equations: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    stop: int


class Equation(NamedTuple):
    """One equation of the jaxpr, in a program whose values are numbered.

    jaxpr: None if the body of a scan, or of a checkpoint, hands on its input. inputs: numbers of the operands, or
    constants. outputs: numbers of the results. body: of a scan or checkpoint that a parameter enters
    counts: the numbers of iterations of the scans around it, the outermost first
    """

    jaxpr: core.JaxprEqn | None
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
            outputs = self.jaxpr.primitive.bind(*values, **self.jaxpr.primitive.get_bind_params(self.jaxpr.params))
        return outputs if self.jaxpr.primitive.multiple_results else [outputs]


class Use(NamedTuple):
    """Parameter leaf number `leaf` is operand number `operand` of equation number `equation`, which is -1 if the
    parameter is the loss itself. view: what moves its elements before this use, in order"""

    leaf: int
    view: View
    equation: int
    operand: int

    def of_kernel(self) -> "Use":
        """The use of the kernel that `view` makes, which loops alone see."""
        return self._replace(view=View(tuple(step for step in self.view.steps if isinstance(step, ScanStep))))


class MadeKernel(NamedTuple):
    """A public value that the loss makes of parameters, or a parameter, and all uses of it that are not public.

    value: its number. leaves: of the parameters that it has a gradient by. uses: their views begin at the value
    """

    value: int
    leaves: frozenset[int]
    uses: tuple[Use, ...]


class Program(NamedTuple):
    """The loss of one example. Values 0, 1, ... are the leaves of the parameters, then those of the example.

    equations: all of them. block: those outside of all bodies; its outputs are the loss's value, and what the loss
    returns beside it, a tree of structure `aux`. uses: for each parameter leaf, those that the loss depends on
    public: by number of a public value, where it comes from: an equation, by number, or None for a parameter; in a
        body, the same value outside
    kernels: those that the loss depends on
    data: the numbers of values that depend on the example
    slices: by number, the values in bodies that are public in each iteration: slices of public values, and what is
        computed of these
    """

    equations: tuple[Equation, ...]
    block: EquationBlock
    aux: Any
    uses: tuple[tuple[Use, ...], ...]
    public: dict[int, "Origin"]
    kernels: tuple[MadeKernel, ...]
    data: frozenset[int] = frozenset()
    slices: dict[int, "Slice"] = {}

    def source(self, value: int | Constant) -> int | Constant:
        """The number of a value where it was computed; that of another one where a body has it from outside."""
        return source_of(value, self.public)

    def slice(self, value: int) -> "Slice":
        """Where a value comes from that is public, perhaps in each iteration alone."""
        return self.slices.get(value) or Slice(self.public[value], ())

    def whole(self, value: int | Constant) -> int | Constant:
        """The number of a value where it was computed, before loops slice it."""
        while isinstance(value, int) and isinstance(origin := self.slice(value).origin, SameValue):
            value = origin.value
        return value

    def output(self, equation: int) -> jax.ShapeDtypeStruct:
        """The shape and the dtype of the first output of an equation, with an axis for each scan around it."""
        found = self.equations[equation]
        assert found.jaxpr is not None
        aval: Any = found.jaxpr.outvars[0].aval
        return jax.ShapeDtypeStruct((*found.counts, *aval.shape), aval.dtype)


class SameValue(NamedTuple):
    value: int | Constant


Origin = int | None | SameValue


def source_of(value: Any, public: Mapping[int, Origin]) -> Any:  # see `Program.source`
    while isinstance(value, int) and isinstance(origin := public.get(value), SameValue):
        value = origin.value
    return value


class Slice(NamedTuple):
    """A value that is public in each iteration. origin: as of a public value; that of a slice is what the scan slices.
    loops: the depths of the scans around it in whose iterations it differs; that of the outermost scan is 0."""

    origin: Origin
    loops: tuple[int, ...]


def count_scan_operands(equation: Equation) -> tuple[int, int]:
    """How many operands of a scan stay the same, and how many iterations hand on; of a checkpoint, all and none."""
    assert equation.jaxpr is not None
    return (
        jaxprs.constants_and_carry_of_scan(equation.jaxpr.params)
        if equation.name == "scan"
        else (len(equation.inputs), 0)
    )
