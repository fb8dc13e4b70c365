"""The D2P2-SGD family: automatic clipping, noise that falls over the epochs, random projections.

Source: Jiang et al. 2025, https://arxiv.org/abs/2509.09485. d2p_sgd's noise falls, dp2_sgd projects, d2p2_sgd does
both.
"""

from typing import Any, Literal

import jax

from dpx import schedules
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism, in_coordinates
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.mechanism.normalized import normalized
from dpx.papers.d2p2_sgd.clip_then_project import clip_then_project
from dpx.papers.d2p2_sgd.projections import ProjectionKind, random_projection
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule
from dpx.values import Tree, described, require_number, require_whole

Order = Literal["project_then_clip", "clip_then_project"]


@accepts_budget
def d2p2_sgd(
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    order: Order = "project_then_clip",
    power: float = 0.25,
    every: int = 1,
    stability: float = 0.01,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """D2P2-SGD: gradients in fresh random coordinates, automatic clipping, noise that falls as an inverse power.

    The paper claims that clipped gradients, projected by A^T / sqrt(p), cost as much as without the projection. That
    does not hold: A lengthens some of them, by any factor with some probability. dpx charges what `order` needs. With
    "project_then_clip", every example is projected first and then normalized, so the cost is that of a Gaussian with
    falling noise. With "clip_then_project", the paper's order, the cost of a "gaussian" projection uses the
    distribution of its stretch; for other kinds, the noise grows by the largest stretch (see
    `dpx.mechanisms.clip_then_project`). The paper's theorem also leaves its constants open; dpx composes all steps.

    The lift is A z / sqrt(p), the paper's A z divided by sqrt(p), so that a learning rate does not depend on p.

    rank: p, the number of random coordinates, in [1, d]; or one for each group of layers, a pytree prefix.
    reduction_rate: instead of the rank, 1 - p/d in [0, 1); the paper uses 0.1 and 0.3.
    kind: of the projection, which is drawn anew at every step: "gaussian" (the paper's, slow for large models),
        "orthonormal", "subset", "countsketch" or "hadamard"; see `dpx.coordinates.random_projection`.
    order: which of the two comes first.
    power: at least 0, how fast the noise falls. every: at least 1, the steps of a block (an epoch) of equal noise.
    stability: at least 1e-6, in the units of the gradient; a gradient g becomes g / (|g| + stability).
    noise_multiplier: of the first block of steps, above 0, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.
    Raises ValueError for an unknown order, and for numbers outside their domains.
    """
    falling = _falling_noise(noise_multiplier, power, every)
    projection = {"rank": rank, "reduction_rate": reduction_rate, "kind": kind}
    return _with_projection(_automatic_clipping(falling, stability, sampling, key), order, projection, key)


@accepts_budget
def dp2_sgd(
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    order: Order = "project_then_clip",
    stability: float = 0.01,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP2-SGD, the projected half of D2P2-SGD: its noise does not fall.

    Claim and cost are as for `dpx.methods.d2p2_sgd`, without the falling noise.

    rank: p, the number of random coordinates, in [1, d]; or one for each group of layers.
    reduction_rate: instead of the rank, 1 - p/d in [0, 1).
    kind: of the projection, which is drawn anew at every step: "gaussian", "orthonormal", "subset", "countsketch" or
        "hadamard". order: whether it comes before or after the clip.
    stability: at least 1e-6, in the units of the gradient; a gradient g becomes g / (|g| + stability).
    noise_multiplier: of the sum of normalized gradients; a number, a schedule of the step, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.
    Raises ValueError for an unknown order, and for numbers outside their domains.
    """
    projection = {"rank": rank, "reduction_rate": reduction_rate, "kind": kind}
    return _with_projection(_automatic_clipping(noise_multiplier, stability, sampling, key), order, projection, key)


@accepts_budget
def d2p_sgd(
    *,
    stability: float = 0.01,
    power: float = 0.25,
    every: int = 1,
    noise_multiplier: float,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """D2P-SGD, the dynamic half of D2P2-SGD: automatic clipping and noise that falls as an inverse power.

    noise multiplier_k = noise_multiplier / k^power,  k = 1, 2, ... counting blocks of `every` steps (an epoch)

    The paper's bound leaves its constants open. dpx composes all Gaussian releases instead, and that bound holds.

    stability: at least 1e-6, in the units of the gradient; a gradient g becomes g / (|g| + stability), of norm below 1.
    power: at least 0; 1/2 in the paper's theorems, 1/4 per epoch in its experiments.
    every: at least 1, the steps of a block (an epoch), in which the noise does not change.
    noise_multiplier: of the first block, above 0, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.
    Raises ValueError for numbers outside their domains.
    """
    return _automatic_clipping(_falling_noise(noise_multiplier, power, every), stability, sampling, key)


def _falling_noise(noise_multiplier: float, power: float, every: int) -> ScalarOrSchedule:
    """The noise multiplier of D2P-SGD, a schedule of the step."""
    require_number("noise_multiplier", noise_multiplier, minimum=0, exclusive=True)
    falling = schedules.inverse_power(init_value=noise_multiplier, power=power)
    return schedules.every(falling, steps=require_whole("every", every))


def _automatic_clipping(
    noise_multiplier: ScalarOrSchedule, stability: float, sampling: Sampling, key: jax.Array
) -> Mechanism:
    """Automatic clipping, which bounds every example by 1, before Gaussian noise."""
    gaussian = dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return normalized(gaussian, stability=stability)


def _with_projection(mechanism: Mechanism, order: Order, projection: dict[str, Any], key: jax.Array) -> Mechanism:
    """`mechanism` with a fresh projection at every step, of each example or of the clipped sum."""
    if order == "project_then_clip":
        return in_coordinates(mechanism, random_projection(**projection, key=key))
    if order == "clip_then_project":
        return clip_then_project(mechanism, **projection)
    raise ValueError(f'order must be "project_then_clip" or "clip_then_project", got {described(order)}')
