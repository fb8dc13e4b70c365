"""What a kind of random projection is."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST
DRAWN_AT_ONCE = 2**22  # numbers of a dense random matrix that exist at once

Parts = Sequence[jax.Array]  # one vector of d coordinates in pieces, each (size,): the layers of a gradient, flat


class Kind(NamedTuple):
    """A random linear map P of d coordinates to p, with E[P^T P] = I: its transpose lifts without bias.

    What is random depends on the key alone: under `vmap` over vectors it is drawn once for all of them.

    project: (key, parts, rank) -> coordinates, arrays (n,): p numbers, and zeros where that is cheaper
    lift:    (key, coordinates, sizes, rank) -> parts; the transpose
    stretch: (sizes, rank) -> the largest |P v| / |v| under any key; None if there is none
    supports_ghost_norms: whether it only scales coordinates; the coordinates are then parts
    encode_whole_batch: whether `project` draws more than it is given, as it goes: the fewer calls, the better
    """

    project: Callable[[jax.Array, Parts, int], Parts]
    lift: Callable[[jax.Array, Parts, Sequence[int], int], Parts]
    stretch: Callable[[Sequence[int], int], float] | None
    supports_ghost_norms: bool = False
    encode_whole_batch: bool = False


def transposed(project: Callable[[jax.Array, Parts, int], Parts]):
    """The lift of a `project` that makes nothing large for itself."""

    def lift(key: jax.Array, coordinates: Parts, sizes: Sequence[int], rank: int) -> Parts:
        like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        return jax.linear_transpose(lambda parts: project(key, parts, rank), like)(coordinates)[0]

    return lift


def join(parts: Parts) -> jax.Array:
    return jnp.concatenate(parts)


def split(vector: jax.Array, sizes: Sequence[int]) -> Parts:
    return [vector[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def sizes_of(parts: Parts) -> list[int]:
    return [part.size for part in parts]


def random_signs(key: jax.Array, size: int) -> jax.Array:
    return jax.random.rademacher(key, (size,), jnp.float32)
