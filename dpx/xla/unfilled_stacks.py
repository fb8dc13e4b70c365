"""Scans that run backward, and stack into memory that nothing has filled.

A scan stacks into an array of zeros. A TPU's compiler leaves the zeros out where a scan runs forward, but not in the
scan of a backward pass, where they take as long as the products of a layer: 9 % of the cycles of a private step of
GPT-2 small (estimated for a v5e). So such a scan becomes a loop that begins with `jax.lax.empty`. Every turn writes its
own row, and nothing reads the stack before the last one.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from dpx.values import Tree
from dpx.xla.jaxprs import bind_equation, constants_and_carry_of_scan, evaluate


def stacking_unfilled(function: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """`function`, whose outer scans that run backward stack into unfilled memory."""

    def results(equation, operands):
        params = equation.params
        if equation.primitive.name == "scan" and params["reverse"] and _stacks_numbers(equation):
            return _looped(equation, operands)
        return bind_equation(equation, operands, params)

    def of_tree(tree):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(tree)
        found = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(tree), results)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return of_tree


def _stacked(equation: core.JaxprEqn) -> list[Any]:
    return [v.aval for v in equation.outvars[constants_and_carry_of_scan(equation.params)[1] :]]


def _stacks_numbers(equation: core.JaxprEqn) -> bool:
    """Whether a scan stacks anything, and no keys."""
    stacked = _stacked(equation)
    return bool(stacked) and not any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in stacked)


def _looped(equation: core.JaxprEqn, operands: list) -> list[jax.Array]:
    """The results of a scan that runs backward."""
    body, length = core.jaxpr_as_fun(equation.params["jaxpr"]), equation.params["length"]
    constants, carried = constants_and_carry_of_scan(equation.params)
    fixed, begin, rows = operands[:constants], operands[constants:][:carried], operands[constants + carried :]

    def turn(number, state):
        carry, stacks = state
        place = np.int32(length - 1) - number
        row = [jax.lax.dynamic_index_in_dim(x, place, keepdims=False, allow_negative_indices=False) for x in rows]
        found = body(*fixed, *carry, *row)
        put = zip(stacks, found[carried:], strict=True)
        stacks = [jax.lax.dynamic_update_index_in_dim(x, y, place, 0, allow_negative_indices=False) for x, y in put]
        return found[:carried], stacks

    stacks = [jax.lax.empty(aval.shape, aval.dtype) for aval in _stacked(equation)]
    carry, stacks = jax.lax.fori_loop(np.int32(0), np.int32(length), turn, (list(begin), stacks))
    return [*carry, *stacks]
