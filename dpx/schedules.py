"""Schedules: noise multipliers and clip norms that change over the steps of a run; any optax schedule may be one.

A schedule is a function of the step, a scalar int32 that counts earlier releases. A mechanism and its cost read the
same function, so the cost is that of the noise that is added. The last four schedules belong to papers' methods.
"""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dpx.values import require_function, require_number, require_whole

__all__ = ["every", "growing_mu", "inverse_power", "sensitivity_decay"]

Schedule = Callable[[jax.Array], jax.Array]
ScalarOrSchedule = float | Schedule


def value_at(value: ScalarOrSchedule, step: jax.Array) -> jax.Array:
    """Returns the value at one step, a float32 scalar. Always compiled, so that it rounds as `values_over` does."""
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix floats and ints
        if callable(value):
            value = jax.jit(value if isinstance(value, Hashable) else lambda step, value=value: value(step))(step)
        return jnp.asarray(value).astype(jnp.float32)


def values_over(value: ScalarOrSchedule, steps: int) -> np.ndarray:
    """Returns the values at steps 0 .. steps-1, float64 (steps,): exactly the float32 values that the steps use.

    A constant takes no memory: numpy repeats one value with stride 0. Raises ValueError for a schedule whose values
    depend on more than the step.
    """
    steps = require_whole("steps", steps, minimum=0)
    if not callable(value):
        return np.broadcast_to(np.float64(np.float32(value)), (steps,))
    length = 2 ** max(4, (steps - 1).bit_length())  # so that runs of similar length share one program
    at_each = _compile_over_steps if isinstance(value, Hashable) else _compile_over_steps.__wrapped__
    with jax.ensure_compile_time_eval():
        numbers = at_each(value)(np.minimum(np.arange(length, dtype=np.int32), max(steps - 1, 0)))
    if isinstance(numbers, jax.core.Tracer):
        raise ValueError("a schedule must be a function of the step alone; this one depends on traced values (data?)")
    return np.asarray(numbers, np.float64)[:steps]


@functools.lru_cache(maxsize=64)
def _compile_over_steps(schedule: Schedule) -> Callable[[np.ndarray], jax.Array]:
    """Returns `value_at` for an array of steps, int32 (n,), compiled once for each n."""
    return jax.jit(jax.vmap(lambda step: value_at(schedule, step)))


def require_scalar_or_schedule(
    name: str, value: ScalarOrSchedule, *, minimum: float, maximum: float = math.inf
) -> ScalarOrSchedule:
    """Returns a number as it is, and wraps a schedule so that jax caches it and its constants are frozen. For a number,
    raises ValueError as `require_number` does; for a function, if it depends on more than the step."""
    if callable(value):
        return _with_fixed_constants(name, value)
    return require_number(name, value, minimum=minimum, maximum=maximum)


def _with_fixed_constants(name: str, schedule: Schedule) -> Schedule:
    """Freezes `schedule` as it is now, with copies of the NumPy arrays that it reads, as a new function.

    Clip, noise and cost are compiled at different times, and jax caches what it compiles for a function. So an array, a
    variable or a list that changes in between would make them disagree. Raises ValueError unless the value is a real
    scalar, and if it can still change, by a callback into Python or a mutable reference.
    """
    needed = f"{name} must be a number, or a function of the step, int32 (), that jax traces to a real number, ()"
    try:
        with jax.numpy_dtype_promotion("standard"):
            traced = jax.make_jaxpr(lambda step: schedule(step))(jnp.int32(0))
    except ValueError:
        raise  # its message already says why, for example that a Budget is not a number
    except Exception as error:
        branches = isinstance(error, jax.errors.TracerBoolConversionError)
        words = ": for a Python if, take jnp.where" if branches else ""
        raise ValueError(f"{needed}; got one that raises {type(error).__name__}{words}") from error
    values, numbers = traced.out_avals, (jnp.integer, jnp.floating)
    if len(values) != 1 or values[0].shape or not any(jnp.issubdtype(values[0].dtype, kind) for kind in numbers):
        raise ValueError(f"{needed}; got one with the values {[str(value) for value in values]}")
    if traced.effects or not _CHANGING.isdisjoint(_primitives_and_types(traced.jaxpr)):
        raise ValueError(
            f"{needed}; got one that may change: it calls Python, reads a reference or draws from a key of kind rbg"
        )
    numbers_at = jax.extend.core.jaxpr_as_fun(_copy_constants(traced))
    # Converted to float32 here, because XLA rounds a bfloat16 that a program returns, but not one within a program.
    return lambda step: jnp.asarray(numbers_at(jnp.asarray(step, jnp.int32))[0]).astype(jnp.float32)


# Primitives without effects, and types of keys, whose values differ from call to call, or under jax.vmap.
_CHANGING = {"pure_callback", "rng_uniform", "rng_bit_generator", "custom_vmap_call", "key<rbg>", "key<urbg>"}


def _primitives_and_types(jaxpr: Any) -> set[str]:
    """Returns the names of all primitives in a jaxpr, and of the types of their operands and results."""
    found = {equation.primitive.name for equation in jaxpr.eqns}
    of_values = (getattr(v.aval, "dtype", "") for equation in jaxpr.eqns for v in (*equation.invars, *equation.outvars))
    return found.union(map(str, of_values), *map(_primitives_and_types, jax.extend.core.subjaxprs(jaxpr)))


def _copy_constants(value: Any) -> Any:
    """Copies the NumPy arrays in a parameter or an operand of an equation."""
    if isinstance(value, jax.extend.core.ClosedJaxpr) and value.jaxpr is not value:
        constants = [_copy_constants(constant) for constant in value.consts]
        return jax.extend.core.ClosedJaxpr(_copy_constants(value.jaxpr), constants)
    if isinstance(value, jax.extend.core.Jaxpr):
        changed = {"eqns": _copy_constants(value.eqns), "outvars": _copy_constants(value.outvars)}
        if value is getattr(value, "jaxpr", None):  # since jax 0.11, a jaxpr holds its constants
            changed["consts"] = _copy_constants(value.consts)
        return value.replace(**changed)
    if isinstance(value, jax.extend.core.JaxprEqn):
        params = {name: _copy_constants(one) for name, one in value.params.items()}
        return value.replace(invars=_copy_constants(value.invars), params=params)
    if isinstance(value, jax.extend.core.Literal):
        return jax.extend.core.Literal(_copy_constants(value.val), value.aval)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_copy_constants(one) for one in value)
    return value.copy() if isinstance(value, np.ndarray) else value  # preserves jax's subclass, and so the dtype


def require_fractions(name: str, value: ScalarOrSchedule, interval: Literal["(0, 1]", "[0, 1)"], steps: int = 0):
    """Raises ValueError if the number, or the schedule at any of the first `steps`, is outside the interval."""
    numbers = values_over(value, steps) if callable(value) else np.array([require_number(name, value, minimum=0)])
    inside = (numbers > 0) & (numbers <= 1) if interval == "(0, 1]" else (numbers >= 0) & (numbers < 1)
    for step in np.flatnonzero(~inside)[:1]:
        where = f" at step {step}" if callable(value) else ""
        raise ValueError(f"{name} must be in {interval}, got {numbers[step]:g}{where}")


def inverse_power(*, init_value: float, power: float) -> Schedule:
    """Returns init_value / k^power at the k-th step, k = 1, 2, ...: the falling noise multiplier of D2P2-SGD.

    init_value: the first, above 0. power: at least 0; 1/2 in the paper's theorems, 1/4 per epoch (`every`) in its runs.

    Raises ValueError outside these domains. Source: Jiang et al. 2025, https://arxiv.org/abs/2509.09485.
    """
    require_number("init_value", init_value, minimum=0, exclusive=True)
    require_number("power", power, minimum=0)
    return lambda step: init_value * (jnp.asarray(step, jnp.float32) + 1) ** -power


def every(schedule: Schedule, *, steps: int) -> Schedule:
    """Holds `schedule` constant over blocks of `steps` steps, such as epochs: `schedule(t // steps)` at step t.

    steps: int. Raises ValueError unless it is at least 1.
    """
    steps, schedule = require_whole("steps", steps), require_function("schedule", schedule, "step")
    return lambda step: schedule(step // steps)


def growing_mu(*, noise_multiplier: float, rho_mu: float, steps: int) -> Schedule:
    """A noise multiplier that falls over the run: 1/mu_t for mu_t = rho_mu^(t/T) mu_0, t = 1..T.

    noise_multiplier: 1/mu_0, at least 0. steps: T, int, at least 1.
    rho_mu: mu_T / mu_0, at least 1, where mu_T is the privacy parameter of the last step.

    Raises ValueError outside these domains. Source: Dynamic DP-SGD, Du et al. 2021, https://arxiv.org/abs/2111.00173.
    """
    return _geometric_decay("noise_multiplier", noise_multiplier, "rho_mu", rho_mu, steps)


def sensitivity_decay(*, clip_norm: float, rho_c: float, steps: int) -> Schedule:
    """A clip norm that falls over the run: C_t = rho_c^(-t/T) C_0, t = 1..T.

    clip_norm: C_0, at least 0, in the units of the gradient. steps: T, int, at least 1. rho_c: at least 1.

    Raises ValueError outside these domains. Source: Dynamic DP-SGD, Du et al. 2021, https://arxiv.org/abs/2111.00173.
    """
    return _geometric_decay("clip_norm", clip_norm, "rho_c", rho_c, steps)


def _geometric_decay(name: str, init_value: float, rho_name: str, rho: float, steps: int) -> Schedule:
    """Returns init_value * rho^(-t/T) at the t-th of T steps."""
    require_number(name, init_value, minimum=0)
    require_number(rho_name, rho, minimum=1)
    steps = require_whole("steps", steps)
    return lambda step: init_value * rho ** (-(jnp.asarray(step, jnp.float32) + 1) / steps)
