"""Parameters of a `jax.custom_vjp` function whose backward pass computes their gradient as one product A^T B.

A custom backward pass may return anything; it need not be the derivative of the function. But if it computes the
gradient of a parameter as one product, possibly rearranged and multiplied by scalars, then this is the gradient of the
example, and ghost norms need only A and B. These leave the pass as gradients with respect to slots, extra arguments of
the equation. All other gradients are those of the pass, so earlier operations see the same cotangents as without dpx.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.gradients.ghost.program import CALLS, STILL
from dpx.xla import jaxprs

NAMES = ("custom_vjp_call", "custom_vjp_call_jaxpr")
_MOVES = ("reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy")  # all are invertible


class GradientProduct(NamedTuple):
    """How a backward pass computes a gradient: A^T B, then `moves`, listed last to first, and scalar factors.

    equation: the product. sizes: (K, T, I, O), as in a `Site`. left, right: map the operands of the product to A and B
    order: permutes the axes of the product to (K, I, O). factors: for each factor, the equation that multiplies or
        divides by it, and the operand index of the scalar, or None for a change of sign
    """

    equation: core.JaxprEqn
    sizes: tuple[int, int, int, int]
    left: Callable[[jax.Array], jax.Array]
    right: Callable[[jax.Array], jax.Array]
    order: tuple[int, ...]
    moves: tuple[core.JaxprEqn, ...]
    factors: tuple[tuple[core.JaxprEqn, int | None], ...]

    def arrange_parameter(self, w: Any) -> Any:
        """Arranges the parameter's elements as (K, I, O)."""
        for move in self.moves:
            if move.primitive.name == "transpose":
                w = w.transpose(tuple(map(int, np.argsort(move.params["permutation"]))))
            else:
                w = w.reshape(_shape(move.invars[0]))
        groups, _, fan_in, fan_out = self.sizes
        return w.transpose(self.order).reshape(groups, fan_in, fan_out)


def find_gradient_product(equation: core.JaxprEqn, operand: int) -> GradientProduct | None:
    """The product by which the backward pass computes an operand's gradient; None if it is not one product."""
    if operand not in (places := _differentiated_operands(equation)):
        return None
    operands = [jax.ShapeDtypeStruct(_shape(variable), _dtype(variable)) for variable in equation.invars]
    dtypes = [_dtype(v) if jnp.issubdtype(_dtype(v), jnp.inexact) else jax.dtypes.float0 for v in equation.outvars]
    cotangents = [jax.ShapeDtypeStruct(_shape(v), dtype) for v, dtype in zip(equation.outvars, dtypes, strict=True)]
    try:
        closed = _pullback_jaxpr(jax.eval_shape(lambda x: _equation_vjp(equation, x)[1], operands), cotangents)
    except Exception:  # it has no derivative: see `trace.custom_derivatives_usable`
        return None
    return _find_product(closed.jaxpr, closed.jaxpr.outvars[places.index(operand)])


def bind_with_slots(equation: Any, operands: list, slots: dict[int, tuple]) -> list[jax.Array]:
    """Evaluates an equation. slots: by operand, zeros of the shapes of A and B; their gradients will be A and B."""

    @jax.custom_vjp
    def call(operands, slots):
        return _bind_in_context(equation, operands)

    def forward(operands, slots):
        return _equation_vjp(equation, operands)

    def backward(pullback, cotangents):
        closed, seen = _pullback_jaxpr(pullback, cotangents), {}

        def results(each, values):
            seen[id(each)] = values
            return jaxprs.bind_equation(each, values, each.params)

        gradients = jaxprs.evaluate_jaxpr(closed.jaxpr, closed.consts, jax.tree.leaves((pullback, cotangents)), results)
        places, found = _differentiated_operands(equation), {}
        for operand in slots:
            product = _find_product(closed.jaxpr, closed.jaxpr.outvars[places.index(operand)])
            assert product is not None  # see `find_gradient_product`
            a, b = (x.astype(jnp.float32) for x in seen[id(product.equation)])
            found[operand] = product.left(a), _times_factors(product.right(b), product, seen)
        gradients = dict(zip(places, gradients, strict=True))
        return [gradients.get(i) for i in range(len(equation.invars))], found

    call.defvjp(forward, backward)
    return call(operands, slots)


def _times_factors(b: jax.Array, product: GradientProduct, seen: dict[int, list]) -> jax.Array:
    for each, operand in product.factors:
        if operand is None:
            b = -b
        else:
            number = jnp.asarray(seen[id(each)][operand]).reshape(-1)[0].astype(jnp.float32)
            b = b / number if each.primitive.name == "div" else b * number
    return b


def _find_product(jaxpr: core.Jaxpr, result: Any) -> GradientProduct | None:
    made = {output: equation for equation in jaxpr.eqns for output in equation.outvars}
    moves: list[core.JaxprEqn] = []
    factors: list[tuple[core.JaxprEqn, int | None]] = []
    summed: set[int] = set()
    while not isinstance(result, core.Literal) and result in made:
        equation = made[result]
        if not all(map(_is_wide_real, (*equation.invars, *equation.outvars))):  # a conversion would change the values
            return None
        name, on = equation.primitive.name, 0
        differ = [_nonconstant_axes(v, made) for v in equation.invars]
        if name in _MOVES and not summed and not equation.params.get("dimensions"):
            moves.append(equation)
        elif name == "reduce_sum" and not summed:  # `jax.vmap` adds the gradients of rows
            summed = set(equation.params["axes"])
        elif name == "neg":
            factors.append((equation, None))
        elif (name == "mul" and not all(differ)) or (name == "div" and not differ[1]):
            on = 0 if not differ[1] else 1
            factors.append((equation, 1 - on))
        elif name in ("dot_general", "mul"):
            return _product_from_equation(equation, differ, summed, tuple(moves), tuple(factors))
        elif not (name in STILL and summed):
            return None
        result = equation.invars[on]
    return None


def _product_from_equation(
    equation: core.JaxprEqn, differ: list[set[int]], summed: set[int], moves, factors
) -> GradientProduct | None:
    """The `GradientProduct` of a dot_general, or of an elementwise mul of arrays that vary along different axes and a
    later sum. differ: the axes along which each operand may vary. summed: the axes of the result that are summed
    later."""
    shapes, shape = [_shape(v) for v in equation.invars], _shape(equation.outvars[0])
    axes = range(len(shape))
    if equation.primitive.name == "dot_general":
        contracted, batch = equation.params["dimension_numbers"]
        if not summed <= set(range(len(batch[0]))):
            return None
        added = [[each[axis] for axis in sorted(summed)] + list(c) for each, c in zip(batch, contracted, strict=True)]
        groups = [[axis for axis in each if axis not in more] for each, more in zip(batch, added, strict=True)]
        free = [
            [axis for axis in range(len(s)) if axis not in (*b, *c)]
            for s, b, c in zip(shapes, groups, added, strict=True)
        ]
        order = tuple(range(len(shape) - len(summed)))
    else:
        if not differ[0] & differ[1] <= summed or any(of <= summed for of in differ):
            return None
        free = [[axis for axis in axes if axis not in summed | differ[1]], sorted(differ[1] - summed)]
        groups, added = [[], []], [sorted(summed)] * 2
        shapes = [[size if axis in (*summed, *of) else 1 for axis, size in enumerate(shape)] for of in free]
        left = [axis for axis in axes if axis not in summed]
        order = tuple(left.index(axis) for axis in (*free[0], *free[1]))

    def size(i, some):
        return math.prod(shapes[i][axis] for axis in some)

    sizes = size(0, groups[0]), size(0, added[0]), size(0, free[0]), size(1, free[1])

    def side(i):
        def of_operand(x):
            for axis in axes if equation.primitive.name == "mul" else ():
                x = x if x.shape[axis] == shapes[i][axis] else lax.slice_in_dim(x, 0, 1, axis=axis)
            x = jnp.broadcast_to(x, shapes[i])
            left = (axis for axis in range(x.ndim) if axis not in (*groups[i], *added[i], *free[i]))
            return x.transpose(*groups[i], *added[i], *free[i], *left).reshape(*sizes[:2], sizes[2 + i])

        return of_operand

    return GradientProduct(equation, sizes, side(0), side(1), order, moves, factors)


def _nonconstant_axes(atom: Any, made: dict) -> set[int]:
    """The axes along which a value may vary."""
    equation = None if isinstance(atom, core.Literal) else made.get(atom)
    if equation is not None and equation.primitive.name == "broadcast_in_dim":
        found = zip(equation.params["broadcast_dimensions"], _shape(equation.invars[0]), strict=True)
        return {axis for axis, size in found if size != 1}
    return {axis for axis, size in enumerate(_shape(atom)) if size != 1}


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dtype(variable: Any) -> np.dtype:
    return variable.aval.dtype


def _is_wide_real(variable: Any) -> bool:
    dtype = _dtype(variable)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _differentiated_operands(equation: core.JaxprEqn) -> list[int]:
    """The operands that get a gradient from the backward pass; closed-over constants do not."""
    first = equation.params.get("num_consts", 0)
    return [i for i, v in enumerate(equation.invars) if i >= first and jnp.issubdtype(_dtype(v), jnp.inexact)]


def _bind_in_context(equation: core.JaxprEqn, operands: list) -> list[jax.Array]:
    with equation.ctx.manager:
        return jaxprs.bind_equation(equation, operands, equation.params)


def _equation_vjp(equation: core.JaxprEqn, operands: list) -> tuple[list[jax.Array], Callable]:
    """Evaluates an equation, and returns its outputs and the pullback to the operands that have gradients."""
    places = _differentiated_operands(equation)

    def outputs(*values):
        given = dict(zip(places, values, strict=True))
        return _bind_in_context(equation, [given.get(i, x) for i, x in enumerate(operands)])

    return jax.vjp(outputs, *(operands[i] for i in places))


def _pullback_jaxpr(pullback: Callable, cotangents: list) -> core.ClosedJaxpr:
    """The jaxpr of a backward pass, with all calls inlined, as a function of the residuals and the cotangents."""

    def results(equation, operands):
        if (body := equation.params.get(CALLS.get(equation.primitive.name, ""))) is not None:
            return jaxprs.evaluate_jaxpr(body.jaxpr, body.consts, operands, results)
        return jaxprs.bind_equation(equation, operands, equation.params)

    closed = jax.make_jaxpr(lambda pullback, cotangents: pullback(cotangents))(pullback, cotangents)
    flat = jax.tree.leaves((pullback, cotangents))
    return jax.make_jaxpr(lambda *flat: jaxprs.evaluate_jaxpr(closed.jaxpr, closed.consts, flat, results))(*flat)
