"""A sketch: the random linear map behind one kind of projection, and the helpers that all kinds share."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST  # float32 products on every machine, because matrix units round to fewer bits
# Numbers of a dense random matrix that are in memory at once, 16 MiB of float32; larger matrices are never stored.
DRAWN_AT_ONCE = 2**22

# Inside, draws are the same where the vectors are float64 (`mechanisms.clip_then_project`).
DRAWS = jax.enable_x64(False)

# One vector of d coordinates in pieces, float32 (size,) each: the flattened layers of a gradient.
Segments = Sequence[jax.Array]


class Sketch(NamedTuple):
    """A random linear map P from d coordinates to p, with E[P^T P] = I, so that its transpose lifts without bias.

    The draw depends on the key alone, so a `vmap` over vectors draws once for all of them.

    project: (key, segments, rank) -> coordinates, float32 (n,) each: p numbers, and zeros where that is cheaper
    lift:    (key, coordinates, sizes, rank) -> segments; the transpose of `project`
    stretch: (sizes, rank) -> the largest |P v| / |v| under any key; None if there is no largest one
    supports_ghost_norms: whether P only scales coordinates; the coordinates then have the shapes of the segments
    encode_whole_batch: whether `project` draws more numbers than it is given, so that one call for all examples is best
    """

    project: Callable[[jax.Array, Segments, int], Segments]
    lift: Callable[[jax.Array, Segments, Sequence[int], int], Segments]
    stretch: Callable[[Sequence[int], int], float] | None
    supports_ghost_norms: bool = False
    encode_whole_batch: bool = False


def transposed(project: Callable[[jax.Array, Segments, int], Segments]):
    """The lift as jax's transpose of `project`, for a `project` that stores nothing larger than its argument."""

    def lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
        like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        return jax.linear_transpose(lambda segments: project(key, segments, rank), like)(coordinates)[0]

    return lift


def split(vector: jax.Array, sizes: Sequence[int]) -> Segments:
    return [vector[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def random_signs(key: jax.Array, size: int) -> jax.Array:
    """1 or -1 with equal probability, float32 (size,)."""
    with DRAWS:
        return jax.random.rademacher(key, (size,), jnp.float32)
