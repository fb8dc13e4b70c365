"""Convolutions that XLA computes fast in loops on a CPU.

On CPUs, XLA has a fast convolution for one order of axes: (batch, *spatial, features) for the data and the result, and
(*spatial, inputs, outputs) for the kernel. It transposes other convolutions, such as gradients, into that order, but
not in the body of a loop, where the gradients run up to fifty times slower. So `with_reordered_convolutions`
transposes the operands itself. Microbatches of a CNN are then faster than its whole batch, and compile faster in a loop
than without one. It does not reach convolutions under `jax.checkpoint` or in a loop of the model, whose microbatches
are unrolled instead.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core

from dpx.xla.jaxprs import bind_equation, convolves, evaluate

CALLS = ("jit", "pjit")  # equations whose bodies `with_reordered_convolutions` changes too


def with_reordered_convolutions(closed: core.ClosedJaxpr) -> Callable:
    """Like `jax.extend.core.jaxpr_as_fun`, but with the axes of convolutions in the fast order."""

    def results(equation, operands):
        primitive, params = equation.primitive, equation.params
        if primitive.name == "conv_general_dilated":
            return [_xla_convolution(*operands, **params)]
        if primitive.name in CALLS and convolves(params["jaxpr"].jaxpr):
            return jax.jit(with_reordered_convolutions(params["jaxpr"]))(*operands)
        return bind_equation(equation, operands, params)

    return lambda *arguments: evaluate(closed.jaxpr, closed.consts, arguments, results)


def _xla_convolution(data: jax.Array, kernel: jax.Array, *, dimension_numbers, **params) -> jax.Array:
    """The convolution `lax.conv_general_dilated_p` of data and a kernel, by transposed operands."""
    (batch, features, *spatial), (outputs, inputs, *taps), result = dimension_numbers
    order = result[0], *result[2:], result[1]
    last, middle = data.ndim - 1, tuple(range(1, data.ndim - 1))
    numbers = lax.ConvDimensionNumbers((0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle))
    data, kernel = data.transpose(batch, *spatial, features), kernel.transpose(*taps, inputs, outputs)
    made = lax.conv_general_dilated_p.bind(data, kernel, dimension_numbers=numbers, **params)
    return made.transpose(np.argsort(order))
