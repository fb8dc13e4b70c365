"""Convolutions that are as fast in a loop on a CPU as outside of one.

XLA has a fast convolution on CPUs for one order of axes: (batch, *spatial, features) for the data and the result, and
(*spatial, inputs, outputs) for the kernel. It transposes other convolutions, such as gradients, into that order, but
not in the body of a loop. There the gradients of convolutions run up to fifty times slower. So `reordered` transposes
the operands itself. With it, microbatches of a CNN are faster than its whole batch, and a loop over them compiles
faster than microbatches without a loop. It does not reach convolutions under `jax.checkpoint` or in a loop of the
model, so microbatches of such models are unrolled.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core

from dpx.xla.jaxprs import convolves

CALLS = ("jit", "pjit")  # the equations whose bodies `reordered` changes too


def reordered(closed: core.ClosedJaxpr) -> Callable:
    """The function of a jaxpr, like `jax.extend.core.jaxpr_as_fun`, but with the axes of convolutions in that order."""
    return lambda *arguments: _evaluate(closed.jaxpr, closed.consts, arguments)


def _evaluate(jaxpr: core.Jaxpr, constants, arguments) -> list[jax.Array]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        with equation.ctx.manager:
            outputs = _results(equation, operands)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: core.JaxprEqn, operands: list) -> list[jax.Array]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "conv_general_dilated":
        return [_convolve(*operands, **params)]
    if primitive.name in CALLS and convolves(params["jaxpr"].jaxpr):
        return jax.jit(reordered(params["jaxpr"]))(*operands)
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _convolve(data: jax.Array, kernel: jax.Array, *, dimension_numbers, **params) -> jax.Array:
    """The convolution `lax.conv_general_dilated_p` of data and a kernel, by transposed operands."""
    (batch, features, *spatial), (outputs, inputs, *taps), result = dimension_numbers
    order = result[0], *result[2:], result[1]
    last, middle = data.ndim - 1, tuple(range(1, data.ndim - 1))
    numbers = lax.ConvDimensionNumbers((0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle))
    data, kernel = data.transpose(batch, *spatial, features), kernel.transpose(*taps, inputs, outputs)
    made = lax.conv_general_dilated_p.bind(data, kernel, dimension_numbers=numbers, **params)
    return made.transpose(np.argsort(order))
