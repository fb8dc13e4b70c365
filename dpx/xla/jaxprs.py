"""Walks through the equations of a traced function, also in the loops, branches and functions that it calls."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core


def inner(equation: core.JaxprEqn) -> Iterator[Any]:
    """The jaxprs that an equation calls, closed or not: bodies of loops, branches and functions."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value


def bodies(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The same without the constants that they close over."""
    return (getattr(each, "jaxpr", each) for each in inner(equation))


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """All equations, each before those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for body in inner(equation):
            yield from equations(body)


def constants(jaxpr: Any) -> Iterator[Any]:
    """The arrays that a jaxpr closes over, and those of the jaxprs inside. The text of a jaxpr does not show them."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if isinstance(v, core.Literal) and np.ndim(v.val))
        for body in inner(equation):
            yield from constants(body)


def convolves(jaxpr: Any) -> bool:
    """Whether an equation is a convolution."""
    return any(equation.primitive.name == "conv_general_dilated" for equation in equations(jaxpr))


def inputs_read(jaxpr: Any) -> list[bool]:
    """For every input of a jaxpr, whether an output may depend on it."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if not isinstance(var, core.Literal))
    return [var in needed for var in jaxpr.invars]


def parts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are the same in all iterations, and how many are handed from one to the next."""
    if "num_consts" in params:  # up to jax 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return constants, carried


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
