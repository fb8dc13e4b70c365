"""AdaDPIGU (Zhang and Xie 2025, arXiv:2507.06525): standardizes the coordinates that a private warm-up finds important.

Also TP-TopK (Zhang and Xie 2026, arXiv:2606.04375), which trains the coordinates with the most energy in the warm-up.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Coordinates, Mechanism, in_coordinates
from dpx.mechanism.base import describe_share
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.mechanism.masks import apply_mask, count_coordinates_in_share, kth_largest, mask_of_largest
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule, require_fractions, require_scalar_or_schedule, value_at, values_over
from dpx.values import (
    Tree,
    as_real,
    described,
    explain_misuse,
    find_only_node,
    require_bool,
    require_number,
    require_whole,
)


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

    The paper claims the epsilon of its second phase, or of both, because it calls the mask independent of the data.
    That does not hold: the scores come from gradients without noise, so the mask releases data at no counted cost, and
    standardizing moves masked coordinates away from 0. dpx charges every step of both phases as one Gaussian release;
    the ranking and the averages read released values only.

    keep: in (0, 1], the share of the coordinates trained after the warm-up; a rising schedule unfreezes the rest.
    warmup: the number of steps of the first phase, at least 1; they cost as much as the others.
    example_keep: in (0, 1], the share of all coordinates that each example keeps in the second phase.
    mean_decay, variance_decay: in [0, 1), decay rates of the averages of released values and of their squared
        deviations. The variance starts at the variance of the noise.
    stability: at least 1e-12, in the units of the gradient; added to the scale.
    relative: divide the scale by its root mean square, so that the clip norm keeps the units of the gradient.
    clip_norm: applies to the standardized gradient in the second phase; a number or a schedule of the step.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains. For the paper's masked loss: `coordinates.zero_frozen_params`.
    """
    warmup = require_whole("warmup", warmup)
    require_fractions("example_keep", example_keep, "(0, 1]")

    noise_deviation = deviation_of_release(clip_norm, noise_multiplier, sampling)
    mechanism = dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    standardization = standardized(
        mean_decay=mean_decay,
        variance_decay=variance_decay,
        initial_variance=float(values_over(noise_deviation, warmup + 1)[warmup]) ** 2,
        stability=stability,
        relative=relative,
    )
    important = importance_mask(keep=keep, warmup=warmup, inner=standardization, noise_floor=noise_deviation)
    if example_keep == 1:
        return in_coordinates(mechanism, important)
    largest_of_each_example = top_fraction(fraction=lambda step: jnp.where(step < warmup, 1.0, example_keep))
    return in_coordinates(mechanism, important, largest_of_each_example)


@accepts_budget
def tp_topk_sgd(
    *,
    keep: ScalarOrSchedule = 0.1,
    warmup: int,
    clip_norm: ScalarOrSchedule,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """TP-TopK: DP-SGD, then only on the strongest coordinates (Zhang and Xie 2026, https://arxiv.org/abs/2606.04375).

    The first `warmup` steps are DP-SGD. The score of a coordinate is the mean of its squared released gradients minus
    the variance of their noise. Every later step is mask -> clip -> sum -> add noise -> divide -> mask, on the
    coordinates with the highest scores.

    The paper's claim holds as written, because the scores read only released values, and it counts both phases.

    keep: in (0, 1], the share of the coordinates trained after the warm-up; a rising schedule unfreezes the rest.
    warmup: the number of steps of the first phase, at least 1; they cost as much as the others.
    clip_norm: applies to the masked gradient; a number or a schedule of the step, which may differ between the phases.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.
    """
    mechanism = dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    floor = deviation_of_release(clip_norm, noise_multiplier, sampling)
    important = importance_mask(keep=keep, warmup=warmup, noise_floor=floor, squares=True)
    return in_coordinates(mechanism, important)


def deviation_of_release(
    clip_norm: ScalarOrSchedule, noise_multiplier: ScalarOrSchedule, sampling: Sampling
) -> Callable[[jax.Array], jax.Array]:
    """Returns the standard deviation of the noise on each coordinate that DP-SGD releases, as a schedule."""
    return lambda step: value_at(noise_multiplier, step) * value_at(clip_norm, step) / sampling.divisor


class ImportanceState(NamedTuple):
    """The scores and the mask, which are functions of released values.

    step: int32 (), the number of releases.
    score: float32, like the parameters; complete after the warm-up.
    mask: bool, like the parameters; True where the coordinate is trained.
    inner: state of the wrapped coordinates; () without any.
    """

    step: jax.Array
    score: Tree
    mask: Tree
    inner: Tree


@explain_misuse
def importance_mask(
    *,
    keep: ScalarOrSchedule,
    warmup: int,
    inner: Coordinates | None = None,
    noise_floor: ScalarOrSchedule = 0.0,
    squares: bool = False,
) -> Coordinates:
    """Keeps the whole gradient for `warmup` steps; then only its highest-scoring coordinates, written in `inner`.

        g -> m inner(m g)  after the warm-up, for a mask m with the floor(keep d) highest scores
        score_j = mean over the warm-up of |released_j| - sqrt(2/pi) noise_floor, or of released_j^2 - noise_floor^2

    Frozen coordinates are released as 0.

    The ranking reads released gradients, so it costs nothing beyond the warm-up steps. `inner` may move frozen
    coordinates away from 0. The mask is applied again after it, because they would otherwise count in the norm.

    keep: in (0, 1], the share of coordinates that are trained. A schedule of the step unfreezes further coordinates in
        the order of the ranking, so it must not fall after the warm-up.
    warmup: int, at least 1, the number of steps before the ranking.
    inner: coordinates of the same shapes as the gradient, such as `standardized`; they start after the warm-up.
    noise_floor: at least 0, the standard deviation of the noise on a coordinate. It shifts all scores equally.
    squares: whether to score by squares, as TP-TopK does. With the right floor, this estimates the squared gradient.
    Raises ValueError for numbers outside their domains; schedules are checked when the cost is computed.
    Source: AdaDPIGU, Zhang and Xie 2025, https://arxiv.org/abs/2507.06525, which scores gradients without noise;
    and TP-TopK, Zhang and Xie 2026, https://arxiv.org/abs/2606.04375.
    """
    require_fractions("keep", keep, "(0, 1]")
    warmup = require_whole("warmup", warmup)
    require_scalar_or_schedule("noise_floor", noise_floor, minimum=0)
    require_bool("squares", squares)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
        return ImportanceState(jnp.zeros((), jnp.int32), zeros, ones, inner.init(params) if inner is not None else ())

    def after_warmup(state, before, after):
        return jax.tree.map(lambda b, a: jnp.where(state.step < warmup, b, a), before, after)

    def encode(grad, state):
        if inner is None:
            return apply_mask(grad, state.mask)
        encoded = apply_mask(inner.encode(apply_mask(grad, state.mask), state.inner), state.mask)
        return after_warmup(state, grad, encoded)

    def decode(released, state, like):
        updates, inner_state = apply_mask(released, state.mask), state.inner
        if inner is not None:
            restored, following = inner.decode(updates, state.inner, like)
            updates = after_warmup(state, released, apply_mask(restored, state.mask))
            inner_state = after_warmup(state, state.inner, following)
        noise = value_at(noise_floor, state.step)
        of, floor = (jnp.square, noise**2) if squares else (jnp.abs, math.sqrt(2 / math.pi) * noise)
        scored = jax.tree.map(lambda s, r: s + (of(r) - floor) / warmup, state.score, released)
        score = after_warmup(state, scored, state.score)
        step = state.step + 1
        kept = count_coordinates_in_share(keep, step, like)
        changes = (step == warmup) | ((step > warmup) & (kept != count_coordinates_in_share(keep, state.step, like)))
        mask = lax.cond(changes, lambda: mask_of_largest(score, kept), lambda: state.mask)
        return updates, ImportanceState(step, score, mask, inner_state)

    name, undo = _describe_importance_mask(keep, warmup, inner)
    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=name,
        undo=undo,
        supports_ghost_norms=inner is None,
        check=lambda steps: _require_valid_keep_schedule(keep, warmup, inner, steps),
    )


def _require_valid_keep_schedule(keep: ScalarOrSchedule, warmup: int, inner: Coordinates | None, steps: int):
    """Raises ValueError if `keep` leaves (0, 1] or falls after the warm-up in the first `steps`, or if `inner` does."""
    require_fractions("keep", keep, "(0, 1]", steps)
    kept = values_over(keep, steps)[warmup:]
    for fallen in np.flatnonzero(np.diff(kept) < 0)[:1]:
        found = f"{kept[fallen + 1]:g} after {kept[fallen]:g} at step {warmup + fallen + 1}"
        raise ValueError(f"keep must not fall after the warm-up, got {found}")
    if inner is not None:
        inner.check(steps)


def _describe_importance_mask(keep: ScalarOrSchedule, warmup: int, inner: Coordinates | None) -> tuple[str, str]:
    """Describes `encode` and `decode` for the printed pipeline."""
    name = f"after {warmup} steps keep the most important coordinates: {describe_share(keep)}"
    if inner is None:
        return name, "mask the released gradient"
    undo = f"; {inner.undo}; mask again" if inner.undo else ""
    return f"{name}; {inner.name}; mask again", f"after {warmup} steps mask the released gradient{undo}"


def zero_frozen_params(params: Tree, state: Tree) -> Tree:
    """Returns `params` with 0 in the coordinates that `importance_mask` has frozen: AdaDPIGU computes its loss there.

    Pass the result to the function from `private_updates`, but add the updates to `params`.
    state: that of the mechanism or of a `dpx.chain` with it. Raises ValueError unless it has one importance mask.
    """
    return apply_mask(params, find_only_node(state, ImportanceState, "importance mask").mask)


class StandardizedState(NamedTuple):
    """Moving averages of released values.

    mean: float32, like the parameters, the average of the released gradient.
    variance: float32, like the parameters, the average of its squared deviation from the mean.
    """

    mean: Tree
    variance: Tree


def standardized(
    *,
    mean_decay: float = 0.9,
    variance_decay: float = 0.999,
    initial_variance: float = 0.0,
    stability: float = 1e-3,
    relative: bool = True,
) -> Coordinates:
    """Standardizes each coordinate by its released mean and scale.

        g -> (g - mean) / scale,  scale = sqrt(variance) + stability;  `decode` undoes this on the released gradient
        mean     <- mean_decay mean + (1 - mean_decay) released
        variance <- variance_decay variance + (1 - variance_decay) (released - mean)^2,  with the mean before its update

    Both averages read only released gradients. A coordinate released as exactly 0 is frozen and keeps its averages. The
    mean is subtracted from every example, so `private_updates` computes per-example gradients instead of ghost norms.

    mean_decay, variance_decay: in [0, 1). initial_variance: at least 0, in the squared units of the gradient.
    stability: added to the scale, at least 1e-12, in the units of the gradient.
    relative: divide the scale by its root mean square, so that the clip norm keeps the units of the gradient. False (as
        published) fits the scale to a batch's mean: every example is clipped, and the scale shrinks to `stability`, so
        gradients are clipped at `stability * clip_norm`.
    Raises ValueError for numbers outside their domains.
    Source: AdaCliP, Pichapati et al. 2019, https://arxiv.org/abs/1908.07643, with the averages of AdaDPIGU,
    https://arxiv.org/abs/2507.06525.
    """
    for name, decay in (("mean_decay", mean_decay), ("variance_decay", variance_decay)):
        if (number := as_real(decay)) is None or not 0 <= number < 1:
            raise ValueError(f"{name} must be in [0, 1), got {described(decay)}")
    require_number("initial_variance", initial_variance, minimum=0)
    require_number("stability", stability, minimum=1e-12)
    require_bool("relative", relative)
    scales = functools.partial(_scale_of_each_coordinate, stability=stability, relative=relative)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return StandardizedState(zeros, jax.tree.map(lambda z: z + initial_variance, zeros))

    def encode(grad, state):
        return jax.tree.map(lambda g, m, s: (g - m) / s, grad, state.mean, scales(state.variance))

    def decode(released, state, like):
        mean, variance = state
        restored = jax.tree.map(lambda r, m, s: r * s + m, released, mean, scales(variance))

        def average(decay, old, new):
            return jax.tree.map(lambda r, o, n: jnp.where(r == 0, o, decay * o + (1 - decay) * n), released, old, new)

        deviation = jax.tree.map(lambda r, m: (r - m) ** 2, restored, mean)
        following = StandardizedState(average(mean_decay, mean, restored), average(variance_decay, variance, deviation))
        return restored, following

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name="standardize by released means and scales, in whose units the clip norm and the noise are",
        undo="undo the standardization",
    )


def _scale_of_each_coordinate(variance: Tree, *, stability: float, relative: bool) -> Tree:
    """Returns the scale of every coordinate, float32, like the parameters."""
    scale = jax.tree.map(lambda v: jnp.sqrt(v) + stability, variance)
    if not relative:
        return scale
    root_mean_square = optax.tree.norm(scale) / math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(scale)))
    return jax.tree.map(lambda s: s / root_mean_square, scale)


class TopFractionState(NamedTuple):
    """step: int32 (), the number of releases. A scheduled fraction is read at this step."""

    step: jax.Array


@explain_misuse
def top_fraction(*, fraction: ScalarOrSchedule) -> Coordinates:
    """Keeps the largest coordinates of each example's gradient, and sets the others to 0.

    Keeps the floor(fraction d) coordinates, at least 1, with the largest absolute values, and any that tie with the
    smallest of these. The selection depends on the raw example, so every coordinate gets noise. `encode` reads each
    example's gradient about 30 times, and `private_updates` computes per-example gradients instead of ghost norms.

    fraction: in (0, 1]; a number or a schedule of the step. Raises ValueError outside (0, 1]; a schedule is checked
        only when the cost is computed. `dpx.methods.ada_dpigu` uses it.
    """
    require_fractions("fraction", fraction, "(0, 1]")

    def encode(grad, state):
        sizes = jax.tree.map(jnp.abs, grad)
        least = kth_largest(sizes, count_coordinates_in_share(fraction, state.step, grad))
        return jax.tree.map(lambda g, size: jnp.where(size < least, 0.0, g), grad, sizes)

    return Coordinates(
        init=lambda params: TopFractionState(jnp.zeros((), jnp.int32)),
        encode=encode,
        decode=lambda released, state, like: (released, TopFractionState(state.step + 1)),
        name=f"keep the largest coordinates of each example: {describe_share(fraction)}",
        check=lambda steps: require_fractions("fraction", fraction, "(0, 1]", steps),
    )
