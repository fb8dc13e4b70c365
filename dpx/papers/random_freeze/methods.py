"""Random freeze and ranked freeze: only some coordinates are trained at a time, and only these get noise."""

import jax

from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism, Tree, in_coordinates
from dpx.mechanisms.dp_sgd import dp_sgd
from dpx.papers.random_freeze.random_freeze import random_freeze
from dpx.papers.random_freeze.ranked_freeze import ranked_freeze
from dpx.sampling.schemes import Sampling
from dpx.scalars import ScalarOrSchedule


@accepts_budget
def random_freeze_sgd(
    *,
    freeze_rate: ScalarOrSchedule,
    every: int,
    posterior: bool = False,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD in which a random share of the coordinates is frozen (Zhu and Blaschko 2021, arXiv:2112.00845).

    mask -> clip -> sum -> add noise -> divide -> mask, with exactly floor((1 - freeze_rate) d) ones in each mask.

    The paper claims the epsilon of DP-SGD. That holds, because the masks depend on no data; but the paper's runs
    shuffle the data and bill Poisson sampling. dpx bills DP-SGD for the sampling that draws the batches.

    freeze_rate: in [0, 1), the share of frozen coordinates; gradual cooling is
        `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    every: at least 1, the number of steps that a mask is kept; those of an epoch in the paper.
    posterior: clip first and mask only the release, so that frozen coordinates count in the norm.
    clip_norm: of an example's masked gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.

    Raises ValueError for numbers outside their domains.

    Momentum that is chained behind this mechanism still moves frozen coordinates, as in the paper.
    """
    return in_coordinates(
        dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        random_freeze(freeze_rate=freeze_rate, every=every, posterior=posterior, key=key),
    )


@accepts_budget
def ranked_freeze_sgd(
    *,
    freeze_rate: ScalarOrSchedule,
    every: int,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD in which the coordinates that moved least in the last period are frozen (arXiv:2112.00845v1, Algorithm 2).

    The paper claims the epsilon of DP-SGD. That holds if the ranking reads the same release as the update, because two
    draws of noise would be two releases. dpx bills one Gaussian release a step, which is used for both.

    freeze_rate: in [0, 1), the share of frozen coordinates; a number or a schedule of the step.
    every: at least 1, the number of steps of a period, after which the coordinates are ranked again.
    clip_norm: of an example's masked gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the standard deviation of the noise on the sum, divided by the clip norm; or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.
    Raises ValueError for numbers outside their domains.
    """
    return in_coordinates(
        dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        ranked_freeze(freeze_rate=freeze_rate, every=every),
    )
