"""Dynamic DP-SGD: noise and clip norm that shrink as training goes on."""

import warnings
from typing import Literal

import jax

from dpx import schedules
from dpx.accounting import epsilon as bill
from dpx.accounting import gdp
from dpx.gaussian import gaussian_mechanism
from dpx.mechanism import Mechanism
from dpx.methods.budget import noise_within
from dpx.sampling import PoissonSampling, Sampling


def dynamic_dp_sgd(
    *,
    clip_norm: float,
    rho_mu: float = 1.0,
    rho_c: float = 1.0,
    steps: int,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    calibration: Literal["pld", "rdp", "gdp"] = "pld",
    every: int = 1,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """Dynamic DP-SGD: less noise and a smaller clip norm as training goes on (Du et al. 2021, arXiv:2111.00173).

    noise multiplier_t = noise_multiplier rho_mu^(-t/T),  clip norm_t = clip_norm rho_c^(-t/T),  t = 1..T = steps

    rho_mu: growing-mu, at least 1; 1 keeps the noise multiplier. rho_c: sensitivity decay, at least 1; 1 keeps it.
    noise_multiplier: 1 / mu_0; or say `epsilon` and `delta`, for which it is calibrated on the true composition.
    calibration: "pld" or "rdp" are sound. "gdp" is the paper's central limit theorem, for comparison only: it gives too
        little noise, and warns with the true epsilon.
    every: hold both schedules for blocks of so many steps (an epoch); t is then the block's first step.
    """

    def scheduled(schedule, value, **rho):
        whole = schedule(value, steps=steps, **rho)
        return schedules.hold(lambda block: whole(block * every), every=every)

    def make(noise_multiplier: float) -> Mechanism:
        return gaussian_mechanism(
            clip_norm=scheduled(schedules.sensitivity_decay, clip_norm, rho_c=rho_c),
            noise_multiplier=scheduled(schedules.growing_mu, noise_multiplier, rho_mu=rho_mu),
            sampling=sampling,
            key=key,
        )

    if calibration not in ("pld", "rdp", "gdp"):
        raise ValueError(f'calibration must be "pld", "rdp" or "gdp", got {calibration!r}')
    schedules.require_number("clip_norm", clip_norm, minimum=0, exclusive=True)
    if noise_multiplier is not None or calibration != "gdp":
        accountant = "rdp" if calibration == "rdp" else "pld"
        return make(noise_within(make, noise_multiplier, accountant, epsilon=epsilon, delta=delta, steps=steps))
    if epsilon is None or delta is None or not isinstance(sampling, PoissonSampling) or every != 1:
        raise ValueError(
            'calibration "gdp" needs epsilon, delta, PoissonSampling and every=1; got '
            f"epsilon={epsilon!r}, delta={delta!r}, sampling={sampling!r}, every={every!r}"
        )
    rate = sampling.probability
    mechanism = make(1 / gdp.mu_0(epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, growth=rho_mu))
    true = bill(mechanism, steps, delta=delta)
    warnings.warn(
        f"the noise calibrated by the central limit theorem for epsilon {epsilon:g} truly costs epsilon {true:.4g} "
        f"at delta {delta:g}",
        stacklevel=2,
    )
    return mechanism
