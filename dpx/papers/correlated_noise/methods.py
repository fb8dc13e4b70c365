"""DP-SGD with correlated noise: BandMF, for batches that are sampled, and lambda-CGD, for a fixed order."""

import functools

import jax

from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism
from dpx.papers.correlated_noise.losses import Workload, optimized
from dpx.papers.correlated_noise.mechanism import correlated_noise
from dpx.papers.correlated_noise.strategy import lambda_cgd as strategy_of
from dpx.sampling.cyclic import CyclicPoissonSampling
from dpx.sampling.schemes import FixedOrder, FullBatch, Sampling, ShuffledEpochs
from dpx.validation import require_whole

_optimized = functools.lru_cache(64)(optimized)  # a budget builds the mechanism for many noise multipliers


@accepts_budget
def band_mf_sgd(
    *,
    bands: int,
    steps: int,
    momentum: float = 0.0,
    learning_rates: tuple[float, ...] = (),
    clip_norm: float,
    noise_multiplier: float,
    sampling: CyclicPoissonSampling | FixedOrder | ShuffledEpochs | FullBatch,
    key: jax.Array,
) -> Mechanism:
    """BandMF: DP-SGD with the best banded noise, on cyclic Poisson samples (arXiv:2306.08153).

    clip -> sum -> add noise C^-1 z -> divide, for the banded Toeplitz C with the least error of the parameters.

    The paper claims, for cyclic Poisson sampling with b groups, the epsilon of one Poisson-sampled Gaussian for each b
    steps, of noise multiplier sigma, if z has the deviation sigma times the norm of a column of C. That holds, and dpx
    bills it, also for the bits of the releases (`dpx.mechanisms.correlated_noise`). The paper's C need not be Toeplitz.

    bands: of C, at least 1, and at most the groups of the sampling; a shorter run has as many as it has steps.
    steps: of the run, which C is the best for. More steps are billed too.
    momentum: of the optimizer behind it, in [0, 1), for which C is the best.
    learning_rates: of each step, floats, not negative, for which C is the best; () if they are constant.
    clip_norm: C, in the units of the gradient; a number.
    noise_multiplier: the standard deviation of z over the clip norm, above 0, or a `dpx.Budget`. The bill is that of
        noise_multiplier over the norm of a column of C.
    sampling: `dpx.sampling.CyclicPoissonSampling` with at least so many bands. A fixed order and full batches cost the
        sensitivity of all participations, as one Gaussian release.
    key: a secret PRNG key, (), of this run alone.

    The state keeps 8 bytes for each parameter and each of the last bands - 1 steps. Raises ValueError for numbers
    outside their domains, and another sampling.
    """
    workload = Workload(momentum=momentum, learning_rates=tuple(learning_rates))
    steps, bands = require_whole("steps", steps), require_whole("bands", bands)
    strategy = _optimized(bands=min(bands, steps), steps=steps, workload=workload)
    return correlated_noise(
        strategy=strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key
    )


@accepts_budget
def lambda_cgd(
    *,
    correlation: float,
    clip_norm: float,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """lambda-CGD: DP-SGD whose noise is z_t - correlation z_(t-1), for a fixed order (arXiv:2601.22334).

    clip -> sum -> add noise -> divide. The noise of a step cancels a part of that of the step before.

    The paper claims the epsilon of one Gaussian release of noise multiplier noise_multiplier / sensitivity for the
    whole run. That holds, and dpx bills it, also for the bits of the releases (`dpx.mechanisms.correlated_noise`).

    correlation: lambda, in [0, 1). 0 is DP-SGD. More cancels more noise, and needs more of it.
    clip_norm: C, in the units of the gradient; a number.
    noise_multiplier: the standard deviation of z over the clip norm, above 0, or a `dpx.Budget`.
    sampling: `dpx.sampling.FixedOrder`, `dpx.ShuffledEpochs` or `dpx.FullBatch`. Samples that are drawn by chance are
        refused, because no amplification is known for a full C.
    key: a secret PRNG key, (), of this run alone.

    The state keeps 8 bytes for each parameter. Raises ValueError for numbers outside their domains, and another
    sampling.
    """
    return correlated_noise(
        strategy=strategy_of(correlation=correlation),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        key=key,
    )
