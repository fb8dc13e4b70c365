"""Branches that the data choose, so that parameters are followed into them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.gradients.ghost.program import CALLS, Equation

CONSTANT, PARAMETER, DATA = 0, 1, 2  # what a value in a branch depends on, at most
IN_BRANCHES = ("dot_general", "conv_general_dilated", "gather", "dynamic_slice", "add", "sub", "mul")


class _NotFollowed(Exception):
    """A branch is not followed."""


def branches_as_select(equation: core.JaxprEqn, kinds: list[int]) -> core.ClosedJaxpr | None:
    """A branch that the data choose, as all branches and a choice of their results, which `jax.vmap` makes of it too;
    None if it is not followed. kinds: of the operands.

    Whatever a branch computes that is not taken, it has no gradient: none passes what enters it, nor what a parameter
    meets, and that is 0 there. So neither a NaN nor an infinity of such a branch reaches a record or a gradient.
    """

    def every(index, *operands):
        results = []
        for number, branch in enumerate(equation.params["branches"]):
            taken = index == number
            entering = [_if_taken(taken, x) if kind == DATA else x for x, kind in zip(operands, kinds[1:], strict=True)]
            results.append(_branch(branch, entering, kinds[1:], taken)[0])
        return [lax.select_n(index, *each) for each in zip(*results, strict=True)]

    types: list[Any] = [variable.aval for variable in equation.invars]
    try:
        return jax.make_jaxpr(every)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types))
    except _NotFollowed:
        return None


def _if_taken(taken: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, with a gradient only if this branch is taken."""
    return lax.select_n(taken, lax.stop_gradient(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _branch(closed: core.ClosedJaxpr, operands: list, kinds: list[int], taken: jax.Array) -> tuple[list, list[int]]:
    """The results of a branch, and their kinds."""
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
            outputs, of_outputs = _branch(body, values, of_values, taken)
        else:
            meets = kind == DATA and PARAMETER in of_values
            if equation.effects or (meets and equation.primitive.name not in IN_BRANCHES):
                raise _NotFollowed
            if meets:
                values = [_zero_if_not(taken, x) if k == DATA else x for x, k in zip(values, of_values, strict=True)]
            outputs = Equation(equation, (), ()).bind(*values)
            outputs, of_outputs = [_if_taken(taken, y) if meets else y for y in outputs], [kind] * len(outputs)
        env |= dict(zip(equation.outvars, zip(outputs, of_outputs, strict=True), strict=True))
    return read(jaxpr.outvars)


def _zero_if_not(taken: jax.Array, x: jax.Array) -> jax.Array:
    return lax.select_n(taken, jnp.zeros_like(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
