"""Whether the custom derivatives of a loss can be used outside of it."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core

from dpx.gradients.ghost.trace import Constant, Equation, Program
from dpx.xla.jaxprs import bodies


def differentiates(program: Program) -> bool:
    """Whether every custom derivative of the program can be used.

    It cannot if it was defined inside the loss and closes over a value of the loss, because JAX traces the derivative
    later, when that value is a tracer of a trace that has ended.
    """
    known = {id(i.value) for equation in program.equations for i in equation.inputs if isinstance(i, Constant)}
    for equation in (program.equations[number] for number in program.block.equations):  # with those in their bodies
        if equation.jaxpr is not None and _is_custom(equation.jaxpr):
            try:
                constants = _derivative(equation).consts
            except jax.errors.UnexpectedTracerError:
                return False
            except Exception:
                continue  # it has no derivative: no parameter needs it, or the step itself raises the same error
            if any(isinstance(value, jax.core.Tracer) and id(value) not in known for value in constants):
                return False
    return True


def _is_custom(equation: core.JaxprEqn) -> bool:
    """Whether an equation, or one in a function that it calls, has a custom derivative."""
    inside = (inner for body in bodies(equation) for inner in body.eqns)
    return "custom_" in equation.primitive.name or any(map(_is_custom, inside))


def _derivative(equation: Equation) -> core.ClosedJaxpr:
    """The jaxpr of the derivatives of an equation's real results with respect to its real operands."""
    operands = [i.value if isinstance(i, Constant) else None for i in equation.inputs]
    free = [n for n, i in enumerate(equation.inputs) if not isinstance(i, Constant)]
    assert equation.jaxpr is not None
    types: list[Any] = [operand.aval for operand in equation.jaxpr.invars]
    shapes = {n: jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in free}

    def derivative(values):
        def results(real):
            given = [real.get(n, values.get(n, operand)) for n, operand in enumerate(operands)]
            return [y for y in equation.bind(*given) if jnp.issubdtype(y.dtype, jnp.floating)]

        real = {n: x for n, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        outputs, pullback = jax.vjp(results, real)
        return pullback(outputs)

    return jax.make_jaxpr(derivative)(shapes)
