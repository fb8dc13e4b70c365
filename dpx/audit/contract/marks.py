"""Which values of a program depend on raw data, and which on a key: marks that spread through its equations."""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from dpx.xla.jaxprs import parts_of_scan

RAW, KEY = 1, 2  # marks, which are joined by |

Visit = Callable[[Any, int, int], None]


def spread(jaxpr: Any, marks: Sequence[int], visit: Visit, constants: Sequence[int] = ()) -> list[int]:
    """The marks of the results of a jaxpr, of which `marks` are those of the inputs.

    visit: called as visit(equation, mark, control) for every equation, also inside of others: the mark of all its
        inputs together, and of what decides its course (0 without a conditional or a loop).
    constants: the marks of the constants.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, marks, strict=True)) | dict(zip(jaxpr.constvars, constants, strict=False))

    def of(variable):
        return 0 if hasattr(variable, "val") else known.get(variable, 0)

    for equation in jaxpr.eqns:
        inputs = [of(v) for v in equation.invars]
        outputs, control = _through(equation, inputs, visit)
        visit(equation, joined(inputs), control)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def joined(marks: Sequence[int]) -> int:
    return functools.reduce(operator.or_, marks, 0)


def _through(equation: Any, inputs: list[int], visit: Visit) -> tuple[list[int], int]:
    """The marks of the results of one equation, and of what decides its course."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        results = [spread(branch, inputs[1:], visit) for branch in params["branches"]]
        return [joined(each) for each in zip(*results, strict=True)], inputs[0]
    if name == "while":
        ahead, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outputs = _loop(params["body_jaxpr"], inputs[ahead:constants], inputs[constants:], (), visit)
        return outputs, joined(spread(params["cond_jaxpr"], [*inputs[:ahead], *outputs], visit))
    if name == "scan":
        constants, count = parts_of_scan(params)
        carried = constants + count
        return _loop(params["jaxpr"], inputs[:constants], inputs[constants:carried], inputs[carried:], visit), 0
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is None:
        return [joined(inputs)] * len(equation.outvars), 0
    return spread(inner, inputs, visit), 0


def _loop(body: Any, constants: list[int], carried: list[int], rest: Sequence[int], visit: Visit) -> list[int]:
    """The marks of the results of a loop after any number of rounds."""
    while True:
        outputs = spread(body, [*constants, *carried, *rest], visit)
        longer = [a | b for a, b in zip(carried, outputs, strict=False)]
        if longer == carried:
            return outputs
        carried = longer


def printed(jaxpr: Any) -> str:
    """The equations of a jaxpr in words, with those of inner jaxprs in full.

    `str` prints an inner jaxpr once where two equations hold the same object, which depends on the caches of jax.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    names: dict[Any, int] = {}

    def of(variable):
        return (
            str(variable) if hasattr(variable, "val") else f"{names.setdefault(variable, len(names))}:{variable.aval}"
        )

    def parameter(value):
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            return f"{{{printed(value)}; {getattr(value, 'consts', ())}}}"
        return f"({', '.join(map(parameter, value))})" if isinstance(value, tuple | list) else str(value)

    lines = [" ".join(map(of, (*jaxpr.constvars, *jaxpr.invars)))]
    for equation in jaxpr.eqns:
        parameters = [f"{name}={parameter(value)}" for name, value in equation.params.items()]
        lines.append(" ".join([equation.primitive.name, *parameters, *map(of, (*equation.invars, *equation.outvars))]))
    return re.sub(r"0x[0-9a-f]+", "", "\n".join([*lines, " ".join(map(of, jaxpr.outvars))]))
