"""The D2P2-SGD family: automatic clipping, noise that falls over the epochs, random projections.

Source: Jiang et al. 2025, https://arxiv.org/abs/2509.09485. In d2p_sgd the noise falls, dp2_sgd projects, and d2p2_sgd
does both.

# Clip, then project: project the clipped sum once a step, instead of every example

A projection can lengthen a clipped gradient by at most its largest stretch: sqrt(d/p), or for "countsketch" the square
root of the size ceil(d/p) of its fullest bucket. The projected sum is divided by that stretch, and the lifted sum is
multiplied by it, so one example still moves the projected sum by at most the clip norm. The cost stays the mechanism's,
and the noise on the lifted gradient grows by the stretch.

A "gaussian" projection has no largest stretch. If it is drawn at every step, it is independent of the sum that it
projects, so the cost uses the distribution of its stretch (`cost.py`), and the noise does not grow. If it were reused,
sqrt(d/p) + 1 would bound its stretch only with a probability that no cost covers, so dpx refuses that. It is drawn with
the mechanism's key. If it had its own key, two runs could share their projections: releases of the first run reveal
them, so the gradients of the second could align with the longest stretch.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx import keys, schedules
from dpx.accounting.budget import accepts_budget
from dpx.accounting.flat_event import from_event
from dpx.mechanism import Mechanism, in_coordinates, require_mechanism
from dpx.mechanism.base import insert_stages_around_sum
from dpx.mechanism.dp_sgd import dp_sgd, normalized
from dpx.papers.d2p2_sgd.cost import event_with_projection
from dpx.papers.d2p2_sgd.projections import ProjectionKind, ProjectionState, projection_coordinates, random_projection
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule
from dpx.sums.rounding import FloatPair, as_float64, as_pair, split_float64
from dpx.values import Tree, described, require_number, require_whole
from dpx.xla.place import enabling_float64, require_ieee_float64

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

    The paper claims that clipped gradients, projected by A^T / sqrt(p), cost no more than without the projection. That
    does not hold: A may lengthen them, by any factor with some probability. The cost in dpx depends on `order`. With
    "project_then_clip", every example is projected first and then normalized, so the cost is that of a Gaussian with
    falling noise. With "clip_then_project", the paper's order, the cost of a "gaussian" projection uses the
    distribution of its stretch; for other kinds, the noise grows by the largest stretch (see
    `dpx.mechanisms.clip_then_project`). The paper's theorem also leaves its constants open; dpx composes all steps.

    The lift is A z / sqrt(p), the paper's A z divided by sqrt(p), so that learning rates do not depend on p.

    rank: p, the number of random coordinates, in [1, d]; or one for each group of layers, a pytree prefix.
    reduction_rate: instead of the rank, 1 - p/d in [0, 1); the paper uses 0.1 and 0.3.
    kind: the kind of projection, drawn anew at every step: "gaussian" (the paper's, slow for large models),
        "orthonormal", "subset", "countsketch" or "hadamard"; see `dpx.coordinates.random_projection`.
    order: whether to project or to clip first.
    power: at least 0, how fast the noise falls. every: at least 1, the steps in a block (an epoch) of equal noise.
    stability: at least 1e-6, in the units of the gradient; a gradient g becomes g / (|g| + stability).
    noise_multiplier: that of the first block of steps, above 0, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for an unknown order, and for numbers outside their domains.
    """
    falling = _falling_noise(noise_multiplier, power, every)
    projection = {"rank": rank, "reduction_rate": reduction_rate, "kind": kind}
    return _add_projection(_automatic_clipping(falling, stability, sampling, key), order, projection, key)


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
    kind: the kind of projection, drawn anew at every step: "gaussian", "orthonormal", "subset", "countsketch" or
        "hadamard". order: whether to project or to clip first.
    stability: at least 1e-6, in the units of the gradient; a gradient g becomes g / (|g| + stability).
    noise_multiplier: the noise on the sum of normalized gradients; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for an unknown order, and for numbers outside their domains.
    """
    projection = {"rank": rank, "reduction_rate": reduction_rate, "kind": kind}
    return _add_projection(_automatic_clipping(noise_multiplier, stability, sampling, key), order, projection, key)


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
    every: at least 1, the steps in a block (an epoch), within which the noise does not change.
    noise_multiplier: that of the first block, above 0, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.
    """
    return _automatic_clipping(_falling_noise(noise_multiplier, power, every), stability, sampling, key)


def _falling_noise(noise_multiplier: float, power: float, every: int) -> ScalarOrSchedule:
    """Returns the noise multiplier of D2P-SGD as a schedule."""
    if callable(noise_multiplier):
        raise ValueError("noise_multiplier must be the first one, a number, because power and every say how it falls")
    require_number("noise_multiplier", noise_multiplier, minimum=0, exclusive=True)
    falling = schedules.inverse_power(init_value=noise_multiplier, power=power)
    return schedules.every(falling, steps=require_whole("every", every))


def _automatic_clipping(
    noise_multiplier: ScalarOrSchedule, stability: float, sampling: Sampling, key: jax.Array
) -> Mechanism:
    """Builds automatic clipping, which bounds every example by 1, with Gaussian noise."""
    gaussian = dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return normalized(gaussian, stability=stability)


def _add_projection(mechanism: Mechanism, order: Order, projection: dict[str, Any], key: jax.Array) -> Mechanism:
    """Adds to `mechanism` a fresh projection at every step, of each example or of the clipped sum."""
    if order == "project_then_clip":
        return in_coordinates(mechanism, random_projection(**projection, key=key))
    if order == "clip_then_project":
        return clip_then_project(mechanism, **projection)
    raise ValueError(f'order must be "project_then_clip" or "clip_then_project", got {described(order)}')


class ClipThenProjectState(NamedTuple):
    """inner: state of the mechanism on projected sums. projection: state of the sum's projection."""

    inner: Tree
    projection: ProjectionState


def clip_then_project(
    mechanism: Mechanism,
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    every: int | None = 1,
) -> Mechanism:
    """Wraps `mechanism` so that its clipped sum is projected before the noise is added, and lifted afterwards.

    Only one vector is projected in a step, and norms, including ghost norms, are those of whole gradients.

    Guarantee: the cost is the mechanism's, because the projected sum is divided by the projection's largest stretch. A
    fresh "gaussian" projection has no largest one, so the cost of every release uses the distribution of its stretch.

    mechanism: `dp_sgd` or `normalized`, without coordinates; put `in_coordinates` around the result. The projections
        are drawn from the stream "projection of the sum" of its key.
    rank: p, the number of random coordinates, in [1, d]; or one for each group of layers, a pytree prefix.
    reduction_rate: instead of the rank, 1 - p/d in [0, 1).
    kind: the kind of projection, as in `dpx.coordinates.random_projection`. "gaussian" requires every=1, Poisson,
        shuffled or full batches, and a `rank`, because its cost must be known before the parameters are.
    every: for how many steps a draw is kept; None keeps one draw for the whole run.
    Raises ValueError for another kind of mechanism, for a "gaussian" of unknown cost, and as `random_projection` does.
    Source: the order of D2P2-SGD, Jiang et al. 2025, https://arxiv.org/abs/2509.09485.
    """
    require_mechanism(mechanism)
    stream = keys.stream(mechanism.key, "projection of the sum")
    coordinates = projection_coordinates(rank, reduction_rate, kind, every, stream, bounded=True)
    if mechanism.correlated is not None:
        raise ValueError("clip_then_project must not wrap correlated noise, because its projections change")
    # A projection that is already in it would use the same stream.
    if not from_event(mechanism.event(1)).all_releases_satisfy(lambda loss: loss.fresh):
        raise ValueError(f"clip_then_project takes a mechanism of one clipped sum, got {described(mechanism)}")
    if kind == "gaussian":
        _require_fresh_ranked_projection(rank, reduction_rate, every)

    def event(steps):
        ranks = jax.tree.leaves(rank)
        return event_with_projection(mechanism.event(steps), rank=min(ranks), blocks=len(ranks))

    def begin(params):
        require_ieee_float64("the projection of a sum")
        state = coordinates.init(params)
        shapes = jax.eval_shape(coordinates.encode, params, state)
        inner = mechanism.begin(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
        if jax.tree.structure(jax.eval_shape(mechanism.encode, params, inner)) != jax.tree.structure(params):
            raise ValueError(f"clip_then_project goes innermost, inside in_coordinates; got {mechanism}")
        return ClipThenProjectState(inner, state)

    def release(sums, state, params):
        total = as_pair(sums[0])
        encoded = _project_sum(coordinates.encode, total, state.projection)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), encoded.high)
        released, inner = mechanism.release((encoded,), state.inner, shapes)
        updates, next_projection = coordinates.decode(released, state.projection, total.high)
        return optax.tree.cast_like(updates, params), ClipThenProjectState(inner, next_projection)

    stages = insert_stages_around_sum(mechanism.stages, before_noise=(f"project the sum: {coordinates.name}",))
    costs = {"event": event} if kind == "gaussian" else {}
    return mechanism.wrap(begin=begin, release=release, stages=(*stages, coordinates.undo), **costs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _project_sum(encode: Callable[[Tree, Tree], Tree], total: FloatPair, state: ProjectionState) -> FloatPair:
    """Projects a sum by `encode` in float64.

    In float32, the rounding error would be relative to the sum, so in a batch of 65,536 an example could move it by
    half a clip norm more. In float64, the error is below 2^-52 n B clip norms if each coordinate sums up n elements.
    """
    with enabling_float64("the projection of a sum"), jax.numpy_dtype_promotion("standard"):
        return split_float64(encode(as_float64(total), state))


@_project_sum.defjvp
def _project_tangent(encode, primals, tangents):
    """Projects the tangent, because a projection is linear, in float32. Only `dpx.audit` uses it, never training."""
    (total, state), (change, _) = primals, tangents
    changed = encode(jax.tree.map(lambda *leaf: sum(leaf), *(part for part in change if part is not None)), state)
    return _project_sum(encode, total, state), FloatPair(changed, jax.tree.map(jnp.zeros_like, changed))


def _require_fresh_ranked_projection(rank: int | Tree | None, reduction_rate: float | Tree | None, every: int | None):
    """Raises ValueError unless a Gaussian projection is drawn afresh at every step, and its rank is given."""
    if every != 1:
        raise ValueError(
            "clip-then-project needs a fresh Gaussian projection at every step (every=1), whose stretch is independent "
            f"of the gradients; got every={described(every)}. Project, then clip: in_coordinates"
        )
    if rank is None:
        raise ValueError(
            "clip-then-project with a Gaussian needs the rank for its cost, before parameters are known; pass rank, "
            f"got reduction_rate={described(reduction_rate)}"
        )
