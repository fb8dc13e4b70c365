"""Numbers and schedules: their values at one step or at many steps, and the checks of schedules."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dpx.values import require_number

Schedule = Callable[[jax.Array], jax.Array]
ScalarOrSchedule = float | Schedule


def value_at(value: ScalarOrSchedule, step: jax.Array) -> jax.Array:
    """The value at one step, float32 (). Always compiled, also outside of jit, to be rounded as in `values_over`."""
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix floats and ints
        if callable(value):
            value = jax.jit(value if isinstance(value, Hashable) else lambda step, value=value: value(step))(step)
        return jnp.asarray(value).astype(jnp.float32)


def values_over(value: ScalarOrSchedule, steps: int) -> np.ndarray:
    """The values at steps 0 .. steps-1, float64 (steps,): exactly the float32 numbers of `value_at`, which the steps
    use.

    A constant takes no memory: numpy repeats one value with stride 0. Raises ValueError for a schedule whose values
    depend on more than the step.
    """
    if not callable(value):
        return np.broadcast_to(np.float64(np.float32(value)), (steps,))
    length = 2 ** max(4, (steps - 1).bit_length())  # so that many numbers of steps share one program
    at_each = _at_each if isinstance(value, Hashable) else _at_each.__wrapped__
    with jax.ensure_compile_time_eval():
        numbers = at_each(value)(np.minimum(np.arange(length, dtype=np.int32), max(steps - 1, 0)))
    if isinstance(numbers, jax.core.Tracer):
        raise ValueError("a schedule must be a function of the step alone; this one depends on traced values (data?)")
    return np.asarray(numbers, np.float64)[:steps]


@functools.lru_cache(maxsize=64)
def _at_each(schedule: Schedule) -> Callable[[np.ndarray], jax.Array]:
    """The values of `value_at` at an array of steps, int32 (n,), compiled once for each n."""
    return jax.jit(jax.vmap(lambda step: value_at(schedule, step)))


def require_scalar_or_schedule(
    name: str, value: ScalarOrSchedule, *, minimum: float, maximum: float = math.inf
) -> ScalarOrSchedule:
    """Returns a number as it is, and wraps a schedule so that jax caches it and its constants are frozen. Raises
    ValueError for a number as `require_number` does, and for a function that depends on more than the step."""
    if callable(value):
        return _with_fixed_constants(name, value)
    return require_number(name, value, minimum=minimum, maximum=maximum)


def _with_fixed_constants(name: str, schedule: Schedule) -> Schedule:
    """`schedule` as it is now, with copies of the NumPy arrays that it reads: a function that no other schedule equals.

    Clip, noise and cost are compiled at different times, and jax keeps what it compiled for a function. So an array, a
    variable or a list that changes in between would make them disagree. Raises ValueError unless the value is a real
    number, (), and for what can still change: a callback into Python, or a reference that is read.
    """
    needed = f"{name} must be a number, or a function of the step, int32 (), that jax traces to a real number, ()"
    try:
        with jax.numpy_dtype_promotion("standard"):
            traced = jax.make_jaxpr(lambda step: schedule(step))(jnp.int32(0))
    except ValueError:
        raise  # it already says why, for example that a Budget is not a number
    except Exception as error:
        raise ValueError(f"{needed}; got one that raises {type(error).__name__}") from error
    values, numbers = traced.out_avals, (jnp.integer, jnp.floating)
    if len(values) != 1 or values[0].shape or not any(jnp.issubdtype(values[0].dtype, kind) for kind in numbers):
        raise ValueError(f"{needed}; got one with the values {[str(value) for value in values]}")
    if traced.effects or not _CHANGING.isdisjoint(_primitives(traced.jaxpr)):
        raise ValueError(f"{needed}; got one that calls Python or reads a reference, whose value may change")
    numbers_at = jax.extend.core.jaxpr_as_fun(_copy_constants(traced))
    # Float32 at once, because XLA rounds a bfloat16 that is the result of a program, but not one inside a program.
    return lambda step: jnp.asarray(numbers_at(jnp.asarray(step, jnp.int32))[0]).astype(jnp.float32)


_CHANGING = {"pure_callback", "rng_uniform"}  # primitives without effects whose value differs at every call


def _primitives(jaxpr: Any) -> set[str]:
    inside = (_primitives(inner) for inner in jax.extend.core.subjaxprs(jaxpr))
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*inside)


def _copy_constants(value: Any) -> Any:
    """A parameter or an operand of an equation, with copies of the NumPy arrays in it."""
    if isinstance(value, jax.extend.core.ClosedJaxpr) and value.jaxpr is not value:
        constants = [_copy_constants(constant) for constant in value.consts]
        return jax.extend.core.ClosedJaxpr(_copy_constants(value.jaxpr), constants)
    if isinstance(value, jax.extend.core.Jaxpr):
        changed = {"eqns": _copy_constants(value.eqns), "outvars": _copy_constants(value.outvars)}
        if value is getattr(value, "jaxpr", None):  # from jax 0.11 on, a jaxpr has its constants
            changed["consts"] = _copy_constants(value.consts)
        return value.replace(**changed)
    if isinstance(value, jax.extend.core.JaxprEqn):
        params = {name: _copy_constants(one) for name, one in value.params.items()}
        return value.replace(invars=_copy_constants(value.invars), params=params)
    if isinstance(value, jax.extend.core.Literal):
        return jax.extend.core.Literal(_copy_constants(value.val), value.aval)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_copy_constants(one) for one in value)
    return value.copy() if isinstance(value, np.ndarray) else value  # keeps jax's own subclass, and so the dtype


def require_fraction(name: str, value: ScalarOrSchedule, interval: Literal["(0, 1]", "[0, 1)"], steps: int = 0):
    """Raises ValueError if the number, or the schedule at one of the first `steps`, is outside the interval."""
    if callable(value):
        numbers = values_over(value, steps)
    else:
        numbers = np.asarray([require_number(name, value, minimum=0)])
    inside = (numbers > 0) & (numbers <= 1) if interval == "(0, 1]" else (numbers >= 0) & (numbers < 1)
    for step in np.flatnonzero(~inside)[:1]:
        where = f" at step {step}" if callable(value) else ""
        raise ValueError(f"{name} must be in {interval}, got {numbers[step]:g}{where}")
