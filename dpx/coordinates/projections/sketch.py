"""A sketch: the random linear map behind one kind of projection, and the helpers that all kinds share."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST  # float32 products on every machine: matrix units would round to fewer bits
# Numbers of a dense random matrix that exist at once, 16 MiB of float32, so that large matrices are never stored.
DRAWN_AT_ONCE = 2**22

# One vector of d coordinates in pieces, float32 (size,) each: the layers of a gradient, flat.
Segments = Sequence[jax.Array]


class Sketch(NamedTuple):
    """A random linear map P of d coordinates to p, with E[P^T P] = I: its transpose lifts without bias.

    The draw depends on the key alone: under `vmap` over vectors it is drawn once for all of them.

    project: (key, segments, rank) -> coordinates, float32 (n,) each: p numbers, and zeros where that is cheaper
    lift:    (key, coordinates, sizes, rank) -> segments; the transpose
    stretch: (sizes, rank) -> the largest |P v| / |v| under any key; None if there is none
    supports_ghost_norms: whether it only scales coordinates; the coordinates are then segments
    encode_whole_batch: whether `project` draws more than it is given, so that one call for all examples is best
    """

    project: Callable[[jax.Array, Segments, int], Segments]
    lift: Callable[[jax.Array, Segments, Sequence[int], int], Segments]
    stretch: Callable[[Sequence[int], int], float] | None
    supports_ghost_norms: bool = False
    encode_whole_batch: bool = False


def transposed(project: Callable[[jax.Array, Segments, int], Segments]):
    """The lift of a `project` that stores nothing larger than its argument, by jax's transpose of it."""

    def lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
        like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        return jax.linear_transpose(lambda segments: project(key, segments, rank), like)(coordinates)[0]

    return lift


def join(segments: Segments) -> jax.Array:
    return jnp.concatenate(segments)


def split(vector: jax.Array, sizes: Sequence[int]) -> Segments:
    return [vector[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def sizes_of(segments: Segments) -> list[int]:
    return [segment.size for segment in segments]


def random_signs(key: jax.Array, size: int) -> jax.Array:
    """1 or -1 with equal probability, float32 (size,)."""
    return jax.random.rademacher(key, (size,), jnp.float32)
