"""Dynamic DP-SGD: noise and clip norm that shrink over the steps of training."""

import jax

from dpx import schedules
from dpx._numbers import require_number, require_whole
from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism
from dpx.mechanisms.gaussian import gaussian_mechanism
from dpx.sampling import Sampling


@calibrated
def dynamic_dp_sgd(
    *,
    clip_norm: float,
    rho_mu: float = 1.0,
    rho_c: float = 1.0,
    steps: int,
    noise_multiplier: float,
    every: int = 1,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """Dynamic DP-SGD: less noise and a smaller clip norm at every step (Du et al. 2021, arXiv:2111.00173).

    noise multiplier_t = noise_multiplier rho_mu^(-t/T),  clip norm_t = clip_norm rho_c^(-t/T),  t = 1..T = steps

    What the paper claims: the epsilon of a central limit theorem. What holds: the true composition of all steps, which
    costs more. What dpx bills, and calibrates to: that. (The paper's noise is `1 / dpx.accounting.gdp.mu_0(...)`; it is
    too little, and `dpx.epsilon` says by how much.)

    clip_norm: C_0, in [2^-40, 1e15], in the units of the gradient. steps: T, at least 1.
    rho_mu: growing-mu, at least 1, where 1 keeps the noise multiplier. rho_c: sensitivity decay, at least 1, where 1
        keeps the clip norm.
    noise_multiplier: 1 / mu_0, or a `dpx.Budget`.
    every: at least 1, the steps of a block (an epoch) that keeps both schedules at its first step's value.
    The rest is as in `dpx.dp_sgd`. Raises ValueError for numbers outside their domains.
    """

    def in_blocks(schedule, value, **rho):
        step_by_step = schedule(value, steps=steps, **rho)
        return schedules.every(every, lambda block: step_by_step(block * every))

    every = require_whole("every", every)
    require_number("clip_norm", clip_norm, minimum=0, exclusive=True)
    return gaussian_mechanism(
        clip_norm=in_blocks(schedules.sensitivity_decay, clip_norm, rho_c=rho_c),
        noise_multiplier=in_blocks(schedules.growing_mu, noise_multiplier, rho_mu=rho_mu),
        sampling=sampling,
        key=key,
    )
