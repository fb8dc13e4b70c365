"""Which values of a program depend on which inputs: marks that spread through its equations."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from dpx.xla.jaxprs import constants_and_carry_of_scan, inner_bodies

Marks = Sequence[int]  # sets of bits, one for each value
Visit = Callable[[core.JaxprEqn, Marks, int], None]


def spread_marks(jaxpr: Any, marks: Marks, visit: Visit, constants: Marks = ()) -> list[int]:
    """The marks of the results of a jaxpr, given the `marks` of its inputs and of its `constants`.

    visit: called as visit(equation, marks of its inputs, control) for every equation, including inner ones, and in a
        loop again whenever a round adds a mark. control: the marks of what decides its course, 0 if nothing.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, marks, strict=True)) | dict(zip(jaxpr.constvars, constants, strict=False))

    def marks_of(variable):
        return 0 if isinstance(variable, core.Literal) else known.get(variable, 0)

    for equation in jaxpr.eqns:
        inputs = [marks_of(v) for v in equation.invars]
        outputs, control = _marks_through(equation, inputs, visit)
        visit(equation, inputs, control)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [marks_of(v) for v in jaxpr.outvars]


def join_marks(marks: Marks) -> int:
    return functools.reduce(operator.or_, marks, 0)


def _marks_through(equation: core.JaxprEqn, inputs: list[int], visit: Visit) -> tuple[list[int], int]:
    """The marks of the results of one equation, and of what decides its course."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        results = [spread_marks(branch, inputs[1:], visit) for branch in params["branches"]]
        return [join_marks([*each, inputs[0]]) for each in zip(*results, strict=True)], inputs[0]
    if name == "while":
        ahead, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outputs = _marks_of_loop(params["body_jaxpr"], inputs[ahead:constants], inputs[constants:], (), visit)
        return outputs, join_marks(spread_marks(params["cond_jaxpr"], [*inputs[:ahead], *outputs], visit))
    if name == "scan":
        constants, count = constants_and_carry_of_scan(params)
        carried = constants + count
        return _marks_of_loop(
            params["jaxpr"], inputs[:constants], inputs[constants:carried], inputs[carried:], visit
        ), 0
    called, outputs = params.get("jaxpr", params.get("call_jaxpr")), [join_marks(inputs)] * len(equation.outvars)
    for body in inner_bodies(equation):
        if len(body.invars) == len(inputs):
            found = spread_marks(body, inputs, visit)
            outputs = found if body is getattr(called, "jaxpr", called) else outputs
    return outputs, 0


def _marks_of_loop(body: Any, constants: Marks, carried: Marks, rest: Marks, visit: Visit) -> list[int]:
    """The marks of the results of a loop after any number of rounds."""
    while True:
        outputs = spread_marks(body, [*constants, *carried, *rest], visit)
        longer = [a | b for a, b in zip(carried, outputs, strict=False)]
        if longer == carried:
            return [*longer, *outputs[len(longer) :]]
        carried = longer
