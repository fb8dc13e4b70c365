"""Products of batches of small matrices that XLA computes fast on a CPU.

The gradient of a layer for one example is a sum over positions, A^T B with A (positions, inputs) and B (positions,
outputs). XLA has a fast kernel for a batch of such products if the positions are the last axis of the first matrix, and
otherwise a plain loop, which takes three times as long for 8 positions of 16 numbers. It also folds a transpose that
the program asks for into the product again, so one behind a barrier gives it the fast order.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from dpx.xla.jaxprs import bind_equation, equations, rewritten
from dpx.xla.place import current_place

FEWEST, MOST_PER_OUTPUT = 4, 32  # positions for which the fast kernel saves more than the transpose takes


def sum_of_outer_products(a: jax.Array, b: jax.Array, precision: Any = None, dtype: Any = None) -> jax.Array:
    """A^T B, (..., I, O), of A (..., T, I) and B (..., T, O)."""
    batch, positions = tuple(range(a.ndim - 2)), a.ndim - 2
    fits = batch and FEWEST <= a.shape[-2] <= MOST_PER_OUTPUT * b.shape[-1]
    if fits and a.dtype == jnp.float32 and current_place().platform == "cpu":
        a, axis = lax.optimization_barrier(jnp.swapaxes(a, -1, -2)), positions + 1
    else:
        axis = positions
    numbers = (((axis,), (positions,)), (batch, batch))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)


def with_fast_products(function: Callable) -> Callable:
    """`function` of pytrees of arrays, such as the gradients of a batch under `jax.vmap`, with fast products."""
    made: dict[int, tuple] = {}  # of a product: itself, so that no other array has its id, and how to make it again

    def product(equation, operands, turns: int) -> list[jax.Array]:
        """A^T B as it is, after one turn B^T A, and after two the equation again, [(..., I, O)] or [(..., O, I)]."""
        ((axes, others), (batch, batches)) = equation.params["dimension_numbers"]
        if turns == 2:  # XLA has transposed the first matrix already
            return bind_equation(equation, operands, equation.params)
        a, b = (_in_order(*of) for of in zip(operands, (batch, batches), (axes, others), strict=True))
        first, second = (a, b) if turns == 0 else (b, a)
        how = equation.params["precision"], equation.params["preferred_element_type"]
        result = sum_of_outer_products(first, second, *how)
        made[id(result)] = result, equation, operands, turns
        return [result]

    def results(equation, operands):
        if _adds_outer_products(equation):
            return product(equation, operands, 0)
        if equation.primitive.name == "transpose" and id(operands[0]) in made:
            _, of, factors, turns = made[id(operands[0])]
            count = operands[0].ndim
            if equation.params["permutation"] == (*range(count - 2), count - 1, count - 2):
                return product(of, factors, turns + 1)
        return None

    return rewritten(function, _adds_outer_products, results)


def multiplies_matrices(jaxpr: core.Jaxpr) -> bool:
    """Whether the loss of one example multiplies a matrix, so that a gradient may be a sum of outer products."""
    return any(
        equation.primitive.name == "dot_general" and max(getattr(v.aval, "ndim", 0) for v in equation.outvars) > 1
        for equation in equations(jaxpr)
    )


def _adds_outer_products(equation: core.JaxprEqn) -> bool:
    """Whether an equation is A^T B for a batch of matrices in float32, whose positions may be several axes."""
    if equation.primitive.name != "dot_general" or equation.params["out_sharding"] is not None:
        return False
    ((axes, others), (batch, batches)) = equation.params["dimension_numbers"]

    def has_rows_last(variable: Any, *not_free: tuple[int, ...]) -> bool:
        aval: Any = variable.aval
        others = sorted(itertools.chain(*not_free))
        return aval.dtype == jnp.float32 and others == list(range(aval.ndim - 1))

    of_a, of_b = zip(equation.invars, (batch, batches), (axes, others), strict=True)
    return bool(batch and axes) and has_rows_last(*of_a) and has_rows_last(*of_b)


def _in_order(x: jax.Array, batch: tuple[int, ...], positions: tuple[int, ...]) -> jax.Array:
    """A matrix of a batch, whose positions may be several axes, as (..., T, its last axis)."""
    x = x.transpose(*batch, *positions, x.ndim - 1)
    return x.reshape(*x.shape[: len(batch)], -1, x.shape[-1])
