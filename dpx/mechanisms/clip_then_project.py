"""Clip, then project: the clipped sum is projected once a step, instead of every example."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx import keys
from dpx.accounting.projected import projected
from dpx.accounting.releases import count_releases
from dpx.coordinates.projections.projection import ProjectionKind, ProjectionState, projection
from dpx.mechanism import Mechanism, Tree


class ClipThenProjectState(NamedTuple):
    inner: Tree
    projection: ProjectionState


def clip_then_project(
    mechanism: Mechanism,
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    every: int | None = 1,
    key: jax.Array,
) -> Mechanism:
    """`mechanism` with its clipped sum projected before the noise, and lifted after it; see `random_projection`.

    Cheap: one projection a step, and norms, also ghost norms, are those of whole gradients. It goes innermost, around
    `gaussian_mechanism` or `normalized`.

    Guarantee: a projection can lengthen a clipped gradient by its largest stretch, sqrt(d/p), for "countsketch" the
    square root of its fullest bucket, ceil(d/p). The projected sum is divided by that, and the lifted one multiplied,
    so one example still moves it by at most the clip norm: the bill is the mechanism's, the noise grows by the stretch.
    A "gaussian" projection has no largest stretch. Fresh at every step, and so independent of what it projects, its
    random stretch is billed by its distribution (`dpx.accounting.projected`), the noise does not grow; this needs a
    `rank` known before the parameters, and Poisson, shuffled or full batches. Drawn once and reused it is refused:
    sqrt(d/p) + 1 would hold only with a probability that is in no bill.
    key: its "projection of the sum" stream is used.
    """
    coordinates = projection(rank, reduction_rate, kind, every, keys.stream(key, "projection of the sum"), bounded=True)
    ranks = jax.tree.leaves(rank)
    if count_releases(mechanism.event(1)).whole_runs:
        raise ValueError(f"clip_then_project takes a mechanism that releases one clipped sum, got {mechanism}")
    if kind == "gaussian" and every != 1:
        raise ValueError(
            "clip-then-project needs a fresh Gaussian projection at every step (every=1), whose stretch is independent "
            f"of the gradients; got every={every!r}. Project, then clip: in_coordinates"
        )
    if kind == "gaussian" and rank is None:
        raise ValueError(
            "clip-then-project by a Gaussian is billed by its rank, before parameters are known; say rank, "
            f"got reduction_rate={reduction_rate!r}"
        )

    def event(steps):
        return projected(mechanism.event(steps), rank=min(ranks), blocks=len(ranks))

    def init(params):
        state = coordinates.init(params)
        shapes = jax.eval_shape(coordinates.encode, params, state)
        inner = mechanism.init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
        if jax.tree.structure(jax.eval_shape(mechanism.encode, params, inner)) != jax.tree.structure(params):
            raise ValueError(f"clip_then_project goes innermost, inside in_coordinates; got {mechanism}")
        return ClipThenProjectState(inner, state)

    def release(sums, state, params):
        (total,) = sums
        encoded = coordinates.encode(total, state.projection)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), encoded)
        released, inner = mechanism.release((encoded,), state.inner, shapes)
        updates, next_projection = coordinates.decode(released, state.projection, total)
        return optax.tree.cast_like(updates, params), ClipThenProjectState(inner, next_projection)

    costs = {"event": event} if kind == "gaussian" else {}
    noise = next((i for i, stage in enumerate(mechanism.stages) if "noise" in stage), len(mechanism.stages))
    return mechanism.replace(
        init=init,
        encode=lambda grad, state: mechanism.encode(grad, state.inner),
        weigh=lambda norms, state: mechanism.weigh(norms, state.inner),
        release=release,
        stages=(
            *mechanism.stages[:noise],
            f"{coordinates.name} of the sum",
            *mechanism.stages[noise:],
            f"undo {coordinates.name}",
        ),
        **costs,
    )
