"""Schedules of the papers' methods: noise multipliers and clip norms that change over the steps of a run.

A schedule is a function of the step, int32 (): the number of earlier releases. A mechanism and its cost read the same
function, so the noise that is paid for is the noise that is added.
"""

import jax.numpy as jnp

from dpx.schedules.scalars import Schedule
from dpx.values import require_number, require_whole


def inverse_power(*, init_value: float, power: float) -> Schedule:
    """init_value / k^power at the k-th step, k = 1, 2, ...: the falling noise multiplier of D2P2-SGD.

    init_value: above 0. power: at least 0; 1/2 in the paper's theorems, 1/4 per epoch (see `every`) in its experiments.

    Raises ValueError outside these domains. Source: Jiang et al. 2025, https://arxiv.org/abs/2509.09485.
    """
    require_number("init_value", init_value, minimum=0, exclusive=True)
    require_number("power", power, minimum=0)
    return lambda step: init_value * (step.astype(jnp.float32) + 1) ** -power


def every(schedule: Schedule, *, steps: int) -> Schedule:
    """`schedule` with one value for each block of `steps` steps, such as an epoch: at step t, its value at t // steps.

    steps: int. Raises ValueError unless it is at least 1.
    """
    steps = require_whole("steps", steps)
    return lambda step: schedule(step // steps)


def growing_mu(*, noise_multiplier: float, rho_mu: float, steps: int) -> Schedule:
    """A noise multiplier that falls over the run: 1/mu_t for mu_t = rho_mu^(t/T) mu_0, t = 1..T.

    noise_multiplier: 1/mu_0, at least 0. steps: T, int, at least 1.
    rho_mu: at least 1; the privacy parameter mu of the last step, mu_T, divided by mu_0.

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
    """init_value * rho^(-t/T) at the t-th of T steps."""
    require_number(name, init_value, minimum=0)
    require_number(rho_name, rho, minimum=1)
    steps = require_whole("steps", steps)
    return lambda step: init_value * rho ** (-(step.astype(jnp.float32) + 1) / steps)
