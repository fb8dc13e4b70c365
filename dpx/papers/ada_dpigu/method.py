"""AdaDPIGU: ranks the coordinates in a private warm-up, then trains only the important ones, standardized."""

import jax
import jax.numpy as jnp

from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism, in_coordinates
from dpx.mechanisms.dp_sgd import dp_sgd
from dpx.papers.ada_dpigu.importance_mask import importance_mask
from dpx.papers.ada_dpigu.standardized import standardized
from dpx.papers.ada_dpigu.top_fraction import top_fraction
from dpx.sampling.schemes import Sampling
from dpx.scalars import ScalarOrSchedule, at, over, require_fraction
from dpx.validation import require_whole


@accepts_budget
def ada_dpigu(
    *,
    keep: ScalarOrSchedule = 0.6,
    warmup: int,
    example_keep: float = 1.0,
    mean_decay: float = 0.9,
    variance_decay: float = 0.999,
    stability: float = 1e-8,
    relative: bool = True,
    clip_norm: ScalarOrSchedule,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """AdaDPIGU: DP-SGD on standardized, important coordinates (Zhang and Xie 2025, https://arxiv.org/abs/2507.06525).

    The first `warmup` steps are DP-SGD. Their releases rank the coordinates once. Every later step is
    mask -> standardize -> mask -> largest of each example -> clip -> sum -> add noise -> divide -> restore -> mask.

    The paper claims the epsilon of its second phase, or of both, with a mask that it calls independent of the data.
    That does not hold: its scores come from gradients without noise, so its mask is an unbilled release of data, and
    its standardization moves masked coordinates. dpx bills every step of both phases, each as one Gaussian release; the
    ranking and the averages read released values only.

    keep: in (0, 1], the share of the coordinates trained after the warm-up; a rising schedule unfreezes the rest.
    warmup: the number of steps of the first phase, at least 1, which are billed with the others.
    example_keep: in (0, 1], the share of all coordinates that each example keeps of its own, in the second phase.
    mean_decay, variance_decay: in [0, 1), of the averages of released values and of their squared deviations. The
        variance starts as that of the noise.
    stability: at least 1e-12, in the units of the gradient, which is added to the scale.
    relative: divide the scale by its root mean square, so that the clip norm keeps the units of the gradient.
    clip_norm: in the second phase, of the standardized gradient; a number or a schedule of the step.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.

    Raises ValueError for numbers outside their domains. `dpx.coordinates.masked_params` is for the paper's masked loss.
    """
    warmup = require_whole("warmup", warmup)
    require_fraction("example_keep", example_keep, "(0, 1]")

    def noise_deviation(step):
        """The standard deviation of the noise on a released coordinate, before standardization."""
        return at(noise_multiplier, step) * at(clip_norm, step) / sampling.divisor

    mechanism = dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    standardization = standardized(
        mean_decay=mean_decay,
        variance_decay=variance_decay,
        initial_variance=float(over(noise_deviation, warmup + 1)[warmup]) ** 2,
        stability=stability,
        relative=relative,
    )
    important = importance_mask(keep=keep, warmup=warmup, inner=standardization, noise_floor=noise_deviation)
    if example_keep == 1:
        return in_coordinates(mechanism, important)
    largest_of_each_example = top_fraction(fraction=lambda step: jnp.where(step < warmup, 1.0, example_keep))
    return in_coordinates(mechanism, important, largest_of_each_example)
