"""Rewrites traced programs into equivalent forms that XLA computes faster.

PRODUCTS of batches of small matrices, on a CPU. The gradient of a layer for one example is a sum over positions, A^T B
with A (positions, inputs) and B (positions, outputs). XLA has a fast kernel for a batch of such products if the
positions are the last axis of the first matrix, and otherwise a plain loop, which takes three times as long for 8
positions of 16 elements. It also folds an explicit transpose back into the product, so a transpose behind a barrier
gives it the fast order.

CONVOLUTIONS in loops, on a CPU. XLA has a fast convolution for one order of axes: (batch, *spatial, features) for the
data and the result, and (*spatial, inputs, outputs) for the kernel. It transposes other convolutions, such as
gradients, into that order, but not in the body of a loop, where the gradients run up to fifty times slower. So
`with_reordered_convolutions` transposes the operands itself. Microbatches of a CNN are then faster than its whole
batch, and compile faster in a loop than without one. It does not reach convolutions under `jax.checkpoint` or in a loop
of the model, whose microbatches are unrolled instead.

SCANS that run backward. A scan stacks into an array of zeros. A TPU's compiler leaves the zeros out where a scan runs
forward, but not in the scan of a backward pass, where they take as long as the products of a layer: 9% of the cycles
of a private step of GPT-2 small (estimated for a v5e). So such a scan becomes a loop that begins with `jax.lax.empty`.
Every turn writes its own row, and nothing reads the stack before the last one.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.values import Tree
from dpx.xla import jaxprs
from dpx.xla.place import current_place

FEWEST, MOST_PER_OUTPUT = 4, 32  # numbers of positions for which the fast kernel saves more than the transpose takes
CALLS = ("jit", "pjit")  # equations whose bodies `with_reordered_convolutions` changes too


def sum_of_outer_products(a: jax.Array, b: jax.Array, precision: Any = None, dtype: Any = None) -> jax.Array:
    """The product A^T B, (..., I, O), of A (..., T, I) and B (..., T, O)."""
    batch, positions = tuple(range(a.ndim - 2)), a.ndim - 2
    fits = batch and FEWEST <= a.shape[-2] <= MOST_PER_OUTPUT * b.shape[-1]
    if fits and a.dtype == jnp.float32 and current_place().platform == "cpu":
        a, axis = lax.optimization_barrier(jnp.swapaxes(a, -1, -2)), positions + 1
    else:
        axis = positions
    numbers = (((axis,), (positions,)), (batch, batch))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)


def with_fast_products(function: Callable) -> Callable:
    """Makes products fast in a `function` of pytrees, such as the gradients of a batch under `jax.vmap`."""
    made: dict[int, tuple] = {}  # for each product: itself, so that no other array gets its id, and how to compute it

    def product_after_transposes(equation, operands, turns: int) -> list[jax.Array]:
        """Computes A^T B, [(..., I, O)]; after one turn B^T A, [(..., O, I)]; and after two the original equation."""
        ((axes, others), (batch, batches)) = equation.params["dimension_numbers"]
        if turns == 2:  # XLA has already transposed the first matrix
            return jaxprs.bind_equation(equation, operands, equation.params)
        a, b = (_merge_position_axes(*of) for of in zip(operands, (batch, batches), (axes, others), strict=True))
        first, second = (a, b) if turns == 0 else (b, a)
        how = equation.params["precision"], equation.params["preferred_element_type"]
        result = sum_of_outer_products(first, second, *how)
        made[id(result)] = result, equation, operands, turns
        return [result]

    def results(equation, operands):
        if _adds_outer_products(equation):
            return product_after_transposes(equation, operands, 0)
        if equation.primitive.name == "transpose" and id(operands[0]) in made:
            _, of, factors, turns = made[id(operands[0])]
            count = operands[0].ndim
            if equation.params["permutation"] == (*range(count - 2), count - 1, count - 2):
                return product_after_transposes(of, factors, turns + 1)
        return None

    return jaxprs.replace_equations(function, _adds_outer_products, results)


def multiplies_matrices(jaxpr: core.Jaxpr) -> bool:
    """Whether the loss of one example multiplies a matrix, so that a gradient may be a sum of outer products."""
    return any(
        equation.primitive.name == "dot_general" and max(getattr(v.aval, "ndim", 0) for v in equation.outvars) > 1
        for equation in jaxprs.walk_equations(jaxpr)
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


def _merge_position_axes(x: jax.Array, batch: tuple[int, ...], positions: tuple[int, ...]) -> jax.Array:
    """Reshapes a batch of matrices, whose positions may be several axes, to (..., T, last axis)."""
    x = x.transpose(*batch, *positions, x.ndim - 1)
    return x.reshape(*x.shape[: len(batch)], -1, x.shape[-1])


def with_reordered_convolutions(closed: core.ClosedJaxpr) -> Callable:
    """Like `jax.extend.core.jaxpr_as_fun`, but with the axes of convolutions in the order that XLA computes fast."""

    def results(equation, operands):
        primitive, params = equation.primitive, equation.params
        if primitive.name == "conv_general_dilated":
            return [_convolution_in_fast_order(*operands, **params)]
        if primitive.name in CALLS and jaxprs.convolves(params["jaxpr"].jaxpr):
            return jax.jit(with_reordered_convolutions(params["jaxpr"]))(*operands)
        return jaxprs.bind_equation(equation, operands, params)

    return lambda *arguments: jaxprs.evaluate_jaxpr(closed.jaxpr, closed.consts, arguments, results)


def _convolution_in_fast_order(data: jax.Array, kernel: jax.Array, *, dimension_numbers, **params) -> jax.Array:
    """Computes `lax.conv_general_dilated_p` of data and a kernel from transposed operands."""
    (batch, features, *spatial), (outputs, inputs, *taps), result = dimension_numbers
    order = result[0], *result[2:], result[1]
    last, middle = data.ndim - 1, tuple(range(1, data.ndim - 1))
    numbers = lax.ConvDimensionNumbers((0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle))
    data, kernel = data.transpose(batch, *spatial, features), kernel.transpose(*taps, inputs, outputs)
    made = lax.conv_general_dilated_p.bind(data, kernel, dimension_numbers=numbers, **params)
    return made.transpose(np.argsort(order))


def with_uninitialized_stacks(function: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """Makes the outer backward scans of `function` stack into uninitialized memory."""

    def results(equation, operands):
        loops = equation.primitive.name == "scan" and equation.params["reverse"] and _stacks_numbers(equation)
        return _run_scan_as_loop(equation, operands) if loops else None

    return jaxprs.replace_equations(function, lambda equation: False, results)


def _stacked_results(equation: core.JaxprEqn) -> list[Any]:
    return [v.aval for v in equation.outvars[jaxprs.constants_and_carry_of_scan(equation.params)[1] :]]


def _stacks_numbers(equation: core.JaxprEqn) -> bool:
    """Whether a scan stacks any results, and no keys."""
    stacked = _stacked_results(equation)
    return bool(stacked) and not any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in stacked)


def _run_scan_as_loop(equation: core.JaxprEqn, operands: list) -> list[jax.Array]:
    """Runs a backward scan as a loop and returns its results."""
    body, length = core.jaxpr_as_fun(equation.params["jaxpr"]), equation.params["length"]
    constants, carried = jaxprs.constants_and_carry_of_scan(equation.params)
    fixed, begin, rows = operands[:constants], operands[constants:][:carried], operands[constants + carried :]

    def turn(number, state):
        carry, stacks = state
        place = np.int32(length - 1) - number
        row = [jax.lax.dynamic_index_in_dim(x, place, keepdims=False, allow_negative_indices=False) for x in rows]
        found = body(*fixed, *carry, *row)
        put = zip(stacks, found[carried:], strict=True)
        stacks = [jax.lax.dynamic_update_index_in_dim(x, y, place, 0, allow_negative_indices=False) for x, y in put]
        return found[:carried], stacks

    stacks = [jax.lax.empty(aval.shape, aval.dtype) for aval in _stacked_results(equation)]
    carry, stacks = jax.lax.fori_loop(np.int32(0), np.int32(length), turn, (list(begin), stacks))
    return [*carry, *stacks]
