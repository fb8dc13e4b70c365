"""Clip, then project: the clipped sum is projected once a step, instead of every example.

A projection can lengthen a clipped gradient, by at most its largest stretch: sqrt(d/p), or for "countsketch" the square
root of the size ceil(d/p) of its fullest bucket. The projected sum is divided by the stretch, and the lifted sum
multiplied by it, so one example still moves the projected sum by at most the clip norm. The cost stays the mechanism's,
and the noise on the lifted gradient grows by the stretch.

A "gaussian" projection has no largest stretch. Drawn afresh at every step, it is independent of the sum that it
projects, so the cost uses the distribution of its stretch (`projected_event.py`), and the noise does not grow. Drawn
once and reused, it is refused, because sqrt(d/p) + 1 would bound it only with a probability that no cost contains.
So it is drawn with the key of the mechanism. With a key of its own, two runs could share their projections: the second
run would compute its gradients from releases that show them, and so could align them with the longest stretch.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx import keys
from dpx.accounting.ledger import from_event
from dpx.mechanism import Mechanism
from dpx.mechanism.stages import insert_around_sum
from dpx.papers.d2p2_sgd.projected_event import with_projected_event
from dpx.papers.d2p2_sgd.projections import ProjectionKind, ProjectionState, projection
from dpx.sums import doubles
from dpx.sums.float_pair import FloatPair, as_pair
from dpx.values import Tree, described
from dpx.xla.place import float64, require_ieee_float64


class ClipThenProjectState(NamedTuple):
    """inner: state of the mechanism on projected sums. projection: state of the projection of the sum."""

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
    """`mechanism`, but its clipped sum is projected before the noise is added, and lifted afterwards.

    Only one vector is projected in a step, and norms, ghost norms included, are those of whole gradients.

    Guarantee: the cost is the mechanism's, because the projected sum is divided by the projection's largest stretch;
    for a fresh "gaussian", which has none, the cost of every release uses the distribution of its stretch.

    mechanism: `dp_sgd` or `normalized`, without coordinates; put `in_coordinates` around the result. The stream
        "projection of the sum" of its key draws the projections.
    rank: p, the number of random coordinates, in [1, d]; or one for each group of layers, a pytree prefix.
    reduction_rate: instead of the rank, 1 - p/d in [0, 1).
    kind: of the projection, as in `dpx.coordinates.random_projection`. "gaussian" needs every=1, Poisson, shuffled or
        full batches, and a `rank`, because its cost must be known before the parameters are.
    every: the number of steps that a draw is kept; None for one draw for the whole run.
    Raises ValueError for another kind of mechanism, for a "gaussian" without cost, and as `random_projection` does.
    Source: the order of D2P2-SGD, Jiang et al. 2025, https://arxiv.org/abs/2509.09485.
    """
    stream = keys.stream(mechanism.key, "projection of the sum")
    coordinates, ranks = projection(rank, reduction_rate, kind, every, stream, bounded=True), jax.tree.leaves(rank)
    if mechanism.correlated is not None:
        raise ValueError("clip_then_project must not wrap correlated noise, because its projections change")
    # A projection in it has the same stream.
    if not from_event(mechanism.event(1)).holds_for_all(lambda loss: loss.fresh):
        raise ValueError(f"clip_then_project takes a mechanism of one clipped sum, got {described(mechanism)}")
    if kind == "gaussian":
        _require_fresh_ranked_projection(rank, reduction_rate, every)

    def event(steps):
        return with_projected_event(mechanism.event(steps), rank=min(ranks), blocks=len(ranks))

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

    stages = insert_around_sum(mechanism.stages, before_noise=(f"project the sum: {coordinates.name}",))
    costs = {"event": event} if kind == "gaussian" else {}
    return mechanism.wrap(begin=begin, release=release, stages=(*stages, coordinates.undo), **costs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _project_sum(encode: Callable[[Tree, Tree], Tree], total: FloatPair, state: ProjectionState) -> FloatPair:
    """The projection `encode` of a sum, computed in float64.

    In float32, rounding would be relative to the sum, so in a batch of 65,536 an example could move it by half a clip
    norm more. In float64 it stays below 2^-52 n B clip norms, if a coordinate is a sum of n numbers.
    """
    with float64("the projection of a sum"), jax.numpy_dtype_promotion("standard"):
        return doubles.as_float_pair(encode(doubles.as_float64(total), state))


@_project_sum.defjvp
def _project_change(encode, primals, tangents):
    """A projection is linear, so the change is projected, in float32. Only `dpx.audit` asks for it, never training."""
    (total, state), (change, _) = primals, tangents
    changed = encode(jax.tree.map(lambda *leaf: sum(leaf), *(part for part in change if part is not None)), state)
    return _project_sum(encode, total, state), FloatPair(changed, jax.tree.map(jnp.zeros_like, changed))


def _require_fresh_ranked_projection(rank: int | Tree | None, reduction_rate: float | Tree | None, every: int | None):
    """Raises ValueError unless a Gaussian projection is drawn at every step, with a rank."""
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
