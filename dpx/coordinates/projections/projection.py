"""Random projections as coordinates: of the whole gradient, or of groups of layers apart."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dpx import keys
from dpx._numbers import require_whole
from dpx.coordinates.projections.countsketch import COUNTSKETCH
from dpx.coordinates.projections.gaussian import GAUSSIAN
from dpx.coordinates.projections.hadamard import HADAMARD
from dpx.coordinates.projections.kind import Kind, Parts
from dpx.coordinates.projections.orthonormal import ORTHONORMAL
from dpx.coordinates.projections.subset import SUBSET
from dpx.mechanism import Coordinates, Tree

ProjectionKind = Literal["gaussian", "orthonormal", "subset", "countsketch", "hadamard"]

KINDS: dict[str, Kind] = {
    "gaussian": GAUSSIAN,
    "orthonormal": ORTHONORMAL,
    "subset": SUBSET,
    "countsketch": COUNTSKETCH,
    "hadamard": HADAMARD,
}


class ProjectionState(NamedTuple):
    """The step, int32: with the key, all that a projection depends on."""

    step: jax.Array


def random_projection(
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    every: int | None = 1,
    key: jax.Array,
) -> Coordinates:
    """A gradient g of d coordinates as z = P g, fewer and random ones, and back by P^T: E[P^T P] = I.

    In `in_coordinates(mechanism, random_projection(...))` every example is projected, then bounded: exact for any
    projection, so the bill is the mechanism's. P^T lifts without bias, and the lifted noise has, on average, the
    variance it has without a projection. `clip_then_project` projects the clipped sum instead, once.

    rank: p, at most d. reduction_rate: in its stead, 1 - p/d in [0, 1). An int or number is for the whole gradient as
        one vector; a pytree prefix of the gradients projects each group (layer) apart.
    kind: for one example, under the same draw for all:
        "gaussian"     A^T g / sqrt(p), A of standard normals (Achlioptas 2001): d p of them are drawn, in blocks, by
                       every encode and decode, and none stored. For small d p: at 550,000 coordinates, hours a step.
        "orthonormal"  in blocks of 64 coordinates, Haar-random orthonormal columns times sqrt(d/p)
        "subset"       p of the coordinates times sqrt(d/p); supports_ghost_norms, so it keeps ghost norms
        "countsketch"  coordinates with random signs, added up in p buckets; the cheapest that mixes
        "hadamard"     p rows of H / sqrt(b) after random signs, times sqrt(d/p), d padded to blocks of b <= 4096
    every: for how many steps a draw is kept; None for one draw for ever.
    key: its "projection" stream is used, with the step folded in: never the noise's.

    Raises ValueError for a rank outside [1, d] (above: while tracing), a rate outside [0, 1) or an unknown kind.
    """
    return projection(rank, reduction_rate, kind, every, keys.stream(key, "projection"), bounded=False)


def projection(rank, reduction_rate, kind: str, every: int | None, stream: jax.Array, *, bounded: bool) -> Coordinates:
    """`random_projection`. bounded: z is scaled so that no vector is lengthened, and the lift makes up for it."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    every = None if every is None else require_whole("every", every)
    sizes, rank_of, words = _ranks(rank, reduction_rate)
    found = KINDS[kind]

    def groups(function: Callable, state: ProjectionState, *trees: Tree) -> Tree:
        draw = jax.random.fold_in(stream, 0 if every is None else state.step // every)
        numbers = jax.tree.unflatten(jax.tree.structure(sizes), range(len(jax.tree.leaves(sizes))))
        return jax.tree.map(
            lambda number, size, *parts: function(jax.random.fold_in(draw, number), size, *parts),
            numbers,
            sizes,
            *trees,
        )

    def settings(value, leaves) -> tuple[list[int], int, float]:
        """The sizes of a group's layers, its rank, and what its coordinates are divided by."""
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        rank = rank_of(value, sum(sizes))
        if not bounded or found.stretch is None:
            return sizes, rank, 1.0
        return sizes, rank, (1 + 1e-5) * found.stretch(sizes, rank)  # a little more, for what float32 rounds up

    def encode(grad, state):
        def one(key, value, group):
            leaves, structure = jax.tree.flatten(group)
            if not leaves:
                return group
            _, rank, divisor = settings(value, leaves)
            coordinates = found.project(key, [leaf.reshape(-1).astype(jnp.float32) for leaf in leaves], rank)
            coordinates = [part / divisor for part in coordinates]
            return _like(coordinates, leaves, structure) if found.supports_ghost_norms else coordinates

        return groups(one, state, grad)

    def decode(released, state, like):
        def one(key, value, group, shapes):
            leaves, structure = jax.tree.flatten(shapes)
            if not leaves:
                return group
            sizes, rank, divisor = settings(value, leaves)
            coordinates = [part.reshape(-1) * divisor for part in jax.tree.leaves(group)]
            return _like(found.lift(key, coordinates, sizes, rank), leaves, structure)

        return groups(one, state, released, like), ProjectionState(state.step + 1)

    return Coordinates(
        init=lambda params: ProjectionState(jnp.zeros((), jnp.int32)),
        encode=encode,
        decode=decode,
        name=f"{kind} projection to {words}",
        supports_ghost_norms=found.supports_ghost_norms,
        encode_whole_batch=found.encode_whole_batch,
    )


def _ranks(rank, reduction_rate) -> tuple[Tree, Callable[[Any, int], int], str]:
    """The configured values, how to read a rank from one and a size, and in words."""
    if (rank is None) == (reduction_rate is None):
        raise ValueError(f"say either rank or reduction_rate; got rank={rank!r}, reduction_rate={reduction_rate!r}")
    values = reduction_rate if rank is None else rank
    if not jax.tree.leaves(values):
        raise ValueError(f"rank or reduction_rate must hold at least one number, got {values!r}")
    for value in jax.tree.leaves(values):
        if rank is None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"reduction_rate must be in [0, 1), got {value!r}")
        else:
            require_whole("rank", value)

    def rank_of(value, size: int) -> int:
        number = max(1, round((1 - value) * size)) if rank is None else int(value)
        if number > size:
            raise ValueError(f"rank must be at most the number of coordinates, {size}; got {number}")
        return number

    return values, rank_of, f"{1 - values:.3g} of the coordinates" if isinstance(values, float) else f"rank {values}"


def _like(parts: Parts, leaves: list, structure: Any) -> Tree:
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])
