"""Numbers that change over the steps: what the mechanism runs with and what the bill reads are one closure."""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

Schedule = Callable[[jax.Array], jax.Array]
ScalarOrSchedule = float | Schedule


def at(value: ScalarOrSchedule, step: jax.Array) -> jax.Array:
    """The number at one step, a float32 scalar; compiled also in an eager step, so that it is rounded as in `over`."""
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix floats and ints
        if callable(value):
            value = jax.jit(value if isinstance(value, Hashable) else lambda step, value=value: value(step))(step)
        return jnp.asarray(value).astype(jnp.float32)


def over(value: ScalarOrSchedule, steps: int) -> np.ndarray:
    """The numbers that steps 0 .. steps-1 run with, float64 (steps,): the float32 values of `at`, not rounded anew."""
    if not callable(value):
        return np.full(steps, np.float32(value), np.float64)
    with jax.ensure_compile_time_eval():
        numbers = jax.jit(jax.vmap(lambda step: at(value, step)))(jnp.arange(steps, dtype=jnp.int32))
    if isinstance(numbers, jax.core.Tracer):
        raise ValueError("a schedule must be a function of the step alone; this one depends on traced values (data?)")
    return np.asarray(numbers, np.float64)


def require_scalar_or_schedule(
    name: str, value: ScalarOrSchedule, *, minimum: float, maximum: float = math.inf
) -> ScalarOrSchedule:
    """A schedule as a hashable function, so that jax traces it once; a number checked."""
    if callable(value):
        return value if isinstance(value, Hashable) else lambda step: value(step)
    return require_number(name, value, minimum=minimum, maximum=maximum)


def require_number(
    name: str, value: float, *, minimum: float, maximum: float = math.inf, exclusive: bool = False
) -> float:
    """The number as a float; ValueError unless it is finite and at least (or, exclusive, above) `minimum`."""
    bound = between(minimum, maximum, exclusive=exclusive)
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} must be a number or a function of the step, not a traced value: it could not be billed"
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}") from None
    if not np.isfinite(number) or not minimum <= number <= maximum or (exclusive and number == minimum):
        raise ValueError(f"{name} must be a finite number {bound}, got {number}")
    return number


def require_whole(name: str, value: Any, *, maximum: float = math.inf) -> int:
    """The number as an int; ValueError unless it is a whole number (of Python or numpy) in [1, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= maximum:
        bound = "of at least 1" if maximum == math.inf else f"in [1, {maximum}]"
        raise ValueError(f"{name} must be a whole number {bound}, got {value!r}")
    return int(value)


def between(minimum: float, maximum: float, *, exclusive: bool = False) -> str:
    """The bounds in words."""
    least = f"{'above' if exclusive else 'at least'} {minimum:g}"
    return least if maximum == math.inf else f"{least} and at most {maximum:g}"


def inverse_power(init_value: float, *, power: float) -> Schedule:
    """init_value / k^power at the k-th step, k = 1, 2, ...: the noise of D2P2-SGD.

    Its theorems need power 1/2; its experiments used 1/4 with k counting epochs (`hold` it for the steps of an epoch).
    """
    require_number("init_value", init_value, minimum=0, exclusive=True)
    require_number("power", power, minimum=0)
    return lambda step: init_value * (step.astype(jnp.float32) + 1) ** -power


def hold(schedule: Schedule, *, every: int) -> Schedule:
    """`schedule` counting blocks of `every` steps (an epoch) instead of steps."""
    every = require_whole("every", every)
    return lambda step: schedule(step // every)


def growing_mu(noise_multiplier: float, *, rho_mu: float, steps: int) -> Schedule:
    """The noise multiplier 1/mu_t for mu_t = rho_mu^(t/T) mu_0, t = 1..T: noise that falls as training goes on.

    noise_multiplier: 1/mu_0. rho_mu: at least 1; the privacy parameter of the last step over that before the first.
    Dynamic DP-SGD, Du et al. 2021, https://arxiv.org/abs/2111.00173.
    """
    return _geometric("noise_multiplier", noise_multiplier, "rho_mu", rho_mu, steps)


def sensitivity_decay(clip_norm: float, *, rho_c: float, steps: int) -> Schedule:
    """The clip norm C_t = rho_c^(-t/T) C_0, t = 1..T. rho_c: at least 1. Du et al. 2021."""
    return _geometric("clip_norm", clip_norm, "rho_c", rho_c, steps)


def _geometric(name: str, init_value: float, rho_name: str, rho: float, steps: int) -> Schedule:
    """init_value * rho^(-t/T) at the t-th of T steps."""
    require_number(name, init_value, minimum=0)
    require_number(rho_name, rho, minimum=1)
    steps = require_whole("steps", steps)
    return lambda step: init_value * rho ** (-(step.astype(jnp.float32) + 1) / steps)
