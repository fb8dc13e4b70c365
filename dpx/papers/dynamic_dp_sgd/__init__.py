"""Dynamic DP-SGD: noise and clip norm that shrink (Du et al. 2021, arXiv:2111.00173); `claims`: the paper's numbers."""

import jax

from dpx import schedules
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.papers.dynamic_dp_sgd import claims as claims
from dpx.sampling.schemes import Sampling
from dpx.values import require_number, require_whole


@accepts_budget
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

    The paper claims the epsilon of a central limit theorem. That does not hold, because the true composition of all
    steps costs more. dpx computes the true composition, and calibrates to it. (The paper's `noise_multiplier` is `1 /
    dpx.papers.dynamic_dp_sgd.claims.first_mu(...)`. It is too small, and `dpx.epsilon` computes its true cost.)

    clip_norm: C_0, in [2^-40, 1e15], in the units of the gradient. steps: T, at least 1.
    rho_mu: how fast the noise falls. rho_c: how fast the clip norm falls. Both are at least 1; at 1, nothing falls.
    noise_multiplier: a number above 0, the 1 / mu_0 of the paper; or a `dpx.Budget`.
    every: at least 1, the number of steps in a block (an epoch), which keeps the schedules' values at its first step.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.
    """

    def in_blocks(schedule, **numbers):
        step_by_step = schedule(**numbers, steps=steps)
        return schedules.every(lambda block: step_by_step(block * every), steps=every)

    every = require_whole("every", every)
    require_number("clip_norm", clip_norm, minimum=0, exclusive=True)
    return dp_sgd(
        clip_norm=in_blocks(schedules.sensitivity_decay, clip_norm=clip_norm, rho_c=rho_c),
        noise_multiplier=in_blocks(schedules.growing_mu, noise_multiplier=noise_multiplier, rho_mu=rho_mu),
        sampling=sampling,
        key=key,
    )
