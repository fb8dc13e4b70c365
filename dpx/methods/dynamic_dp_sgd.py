"""Dynamic DP-SGD: noise and clip norm that shrink as training goes on."""

import jax

from dpx import schedules
from dpx._numbers import require_number
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
    """Dynamic DP-SGD: less noise and a smaller clip norm as training goes on (Du et al. 2021, arXiv:2111.00173).

    noise multiplier_t = noise_multiplier rho_mu^(-t/T),  clip norm_t = clip_norm rho_c^(-t/T),  t = 1..T = steps

    What the paper claims: the epsilon of a central limit theorem. What holds: the true composition of all steps, which
    costs more. What dpx bills, and calibrates to: that. (The paper's noise is `1 / dpx.accounting.gdp.mu_0(...)`; it is
    too little, and `dpx.epsilon` says by how much.)

    rho_mu: growing-mu, at least 1; 1 keeps the noise multiplier. rho_c: sensitivity decay, at least 1; 1 keeps it.
    steps: T of the schedules. noise_multiplier: 1 / mu_0, or a `dpx.Budget`.
    every: hold both schedules for blocks of so many steps (an epoch); t is then the block's first step.
    """

    def scheduled(schedule, value, **rho):
        whole = schedule(value, steps=steps, **rho)
        return schedules.every(every, lambda block: whole(block * every))

    require_number("clip_norm", clip_norm, minimum=0, exclusive=True)
    return gaussian_mechanism(
        clip_norm=scheduled(schedules.sensitivity_decay, clip_norm, rho_c=rho_c),
        noise_multiplier=scheduled(schedules.growing_mu, noise_multiplier, rho_mu=rho_mu),
        sampling=sampling,
        key=key,
    )
