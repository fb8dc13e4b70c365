"""p of the d coordinates, uniformly at random."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.coordinates._selection import largest
from dpx.coordinates.projections.kind import Kind, Parts, sizes_of, split


def chosen(key: jax.Array, sizes: Sequence[int], count: int) -> Parts:
    """A uniformly random subset of exactly `count` coordinates, bool parts."""
    bits = split(jax.random.bits(key, (sum(sizes),), jnp.uint32), sizes)
    return largest(bits, jnp.int32(count))


def project(key: jax.Array, parts: Parts, rank: int) -> Parts:
    sizes = sizes_of(parts)
    scale = stretch(sizes, rank)
    kept = chosen(key, sizes, rank)
    return [part * jnp.where(where, scale, 0) for part, where in zip(parts, kept, strict=True)]


def lift(key: jax.Array, coordinates: Parts, sizes: Sequence[int], rank: int) -> Parts:
    return project(key, coordinates, rank)


def stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(sizes) / rank)


SUBSET = Kind(project, lift, stretch, supports_ghost_norms=True)
