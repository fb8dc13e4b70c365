"""Random projections as coordinates: of the whole gradient, or of each group of layers separately."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.mechanism import Coordinates, Tree
from dpx.papers.d2p2_sgd.projections.countsketch import COUNTSKETCH
from dpx.papers.d2p2_sgd.projections.gaussian import GAUSSIAN
from dpx.papers.d2p2_sgd.projections.hadamard import HADAMARD
from dpx.papers.d2p2_sgd.projections.orthonormal import ORTHONORMAL
from dpx.papers.d2p2_sgd.projections.sketch import Segments, Sketch
from dpx.papers.d2p2_sgd.projections.subset import SUBSET
from dpx.stages import describe_groups
from dpx.trees import described
from dpx.validation import require_whole

ProjectionKind = Literal["gaussian", "orthonormal", "subset", "countsketch", "hadamard"]

SKETCHES: dict[str, Sketch] = {
    "gaussian": GAUSSIAN,
    "orthonormal": ORTHONORMAL,
    "subset": SUBSET,
    "countsketch": COUNTSKETCH,
    "hadamard": HADAMARD,
}

ROUNDING = 1 + 1e-5  # a largest stretch is multiplied by this, because a projection rounded in float32 may exceed it


class ProjectionState(NamedTuple):
    """step: int32 (), the number of releases. A projection depends on this number and the key alone."""

    step: jax.Array


def random_projection(
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    every: int | None = 1,
    key: jax.Array,
) -> Coordinates:
    """Fewer, random coordinates: a gradient g of d coordinates as z = P g, lifted back by P^T, with E[P^T P] = I.

    In `in_coordinates(mechanism, random_projection(...))` every example is first projected and then bounded. The bound
    holds for any projection, so the bill is the mechanism's. P^T lifts without bias, and the lifted noise has, on
    average, the variance that it has without a projection. `clip_then_project` projects only the clipped sum.

    rank: p, in [1, d]. reduction_rate: in its place, 1 - p/d in [0, 1). A number is for the whole gradient as one
        vector; a pytree prefix of the gradients projects each group (layer) separately.
    kind: the same projection is drawn for all examples of a step:
        "gaussian"     A^T g / sqrt(p), A of standard normals (Achlioptas 2001). Every encode and decode draws these d p
                       numbers in blocks, and stores none. At 550,000 coordinates a step takes hours.
        "orthonormal"  in blocks of 64 coordinates, Haar-random orthonormal columns times sqrt(d/p)
        "subset"       p of the coordinates times sqrt(d/p); it only scales, so ghost norms are supported
        "countsketch"  coordinates with random signs, added up in p buckets; the cheapest that mixes coordinates
        "hadamard"     p rows of H / sqrt(b) after random signs, times sqrt(d/p), d padded to blocks of b <= 4096
    every: the number of steps that a draw is kept; None for one draw for the whole run.
    key: a PRNG key, (); its "projection" stream is used, which differs from the noise's, with the step folded in.

    Raises ValueError for a rank outside [1, d] (above: while tracing), a rate outside [0, 1) or an unknown kind.
    """
    made = projection(rank, reduction_rate, kind, every, keys.stream(key, "projection"), bounded=False)
    return made._replace(name=f"{made.name}; clip norm and noise are those of projected coordinates")


def projection(rank, reduction_rate, kind: str, every: int | None, stream: jax.Array, *, bounded: bool) -> Coordinates:
    """As `random_projection`. bounded: z is divided by the largest stretch, so that no vector is lengthened.

    stream: the PRNG key, (), of the projection itself. The lift multiplies by the largest stretch again.
    """
    every = None if every is None else require_whole("every", every)
    ranks, rank_of, words = _ranks(rank, reduction_rate)
    sketch = _sketch(kind)
    stretch = sketch.stretch if bounded else None

    def each_group(function: Callable, state: ProjectionState, *trees: Tree) -> Tree:
        draw = keys.public(keys.fold_in(stream, 0 if every is None else state.step // every))
        numbers = jax.tree.unflatten(jax.tree.structure(ranks), range(len(jax.tree.leaves(ranks))))

        def of_group(number, rank, *groups):
            return function(jax.random.fold_in(draw, number), rank, *groups)

        return jax.tree.map(of_group, numbers, ranks, *trees)

    def dimensions(configured, leaves) -> tuple[list[int], int, float]:
        """The sizes of a group's layers, its rank, and the divisor of its coordinates."""
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        rank = rank_of(configured, sum(sizes))
        return sizes, rank, ROUNDING * stretch(sizes, rank) if stretch else 1.0

    def encode(grad, state):
        def encode_group(key, configured, group):
            leaves, structure = jax.tree.flatten(group)
            if not leaves:
                return group
            _, rank, divisor = dimensions(configured, leaves)
            coordinates = sketch.project(key, [_at_least_float32(leaf).reshape(-1) for leaf in leaves], rank)
            coordinates = [segment / divisor for segment in coordinates]
            return _like(coordinates, leaves, structure) if sketch.supports_ghost_norms else coordinates

        return each_group(encode_group, state, grad)

    def decode(released, state, like):
        def decode_group(key, configured, group, shapes):
            leaves, structure = jax.tree.flatten(shapes)
            if not leaves:
                return group
            sizes, rank, divisor = dimensions(configured, leaves)
            coordinates = [segment.reshape(-1) * divisor for segment in jax.tree.leaves(group)]
            return _like(sketch.lift(key, coordinates, sizes, rank), leaves, structure)

        return each_group(decode_group, state, released, like), ProjectionState(state.step + 1)

    return Coordinates(
        init=lambda params: ProjectionState(jnp.zeros((), jnp.int32)),
        encode=encode,
        decode=decode,
        name=f"{kind} projection to {words}" + (", divided by its largest stretch" if stretch else ""),
        undo="lift by the transpose of the projection" + (", times its largest stretch" if stretch else ""),
        supports_ghost_norms=sketch.supports_ghost_norms,
        encode_whole_batch=sketch.encode_whole_batch,
        fixed=every is None,
    )


def _sketch(kind: str) -> Sketch:
    if kind not in SKETCHES:
        raise ValueError(f"kind must be one of {', '.join(SKETCHES)}; got {described(kind)}")
    return SKETCHES[kind]


def _ranks(rank, reduction_rate) -> tuple[Tree, Callable[[Any, int], int], str]:
    """The configured numbers; a function (number, d) -> rank; and the ranks in words."""
    if (rank is None) == (reduction_rate is None):
        given = f"rank={described(rank)}, reduction_rate={described(reduction_rate)}"
        raise ValueError(f"say either rank or reduction_rate; got {given}")
    values = reduction_rate if rank is None else rank
    if not jax.tree.leaves(values):
        raise ValueError(f"rank or reduction_rate must hold at least one number, got {described(values)}")
    for value in jax.tree.leaves(values):
        if rank is None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"reduction_rate must be in [0, 1), got {described(value)}")
        else:
            require_whole("rank", value)

    def rank_of(value, size: int) -> int:
        number = max(1, round((1 - value) * size)) if rank is None else int(value)
        if number > size:
            raise ValueError(f"rank must be at most the number of coordinates, {size}; got {number}")
        return number

    if rank is None:
        return values, rank_of, f"{describe_groups(values, lambda rate: f'{1 - rate:.3g}')} of the coordinates"
    label = "rank" if jax.tree_util.all_leaves([values]) else "ranks"
    return values, rank_of, f"{label} {describe_groups(values, str)}"


def _at_least_float32(leaf: jax.Array) -> jax.Array:
    """`leaf` in float32; in float64 as it is (`mechanisms.clip_then_project`)."""
    return leaf if leaf.dtype == np.float64 else leaf.astype(jnp.float32)


def _like(segments: Segments, leaves: list, structure: Any) -> Tree:
    """The segments in the shapes of the leaves, as a tree."""
    return jax.tree.unflatten(structure, [s.reshape(leaf.shape) for s, leaf in zip(segments, leaves, strict=True)])
