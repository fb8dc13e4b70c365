"""Subset: p of the d coordinates, drawn uniformly at random, times sqrt(d/p)."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.masks import largest
from dpx.papers.d2p2_sgd.projections.sketch import DRAWS, Segments, Sketch, split


def chosen(key: jax.Array, sizes: Sequence[int], count: int) -> Segments:
    """A uniformly random subset of exactly `count` coordinates: bool (size,) for each segment."""
    with DRAWS:
        bits = split(jax.random.bits(key, (sum(sizes),), jnp.uint32), sizes)
        return largest(bits, jnp.int32(count))


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    sizes = [segment.size for segment in segments]
    scale = stretch(sizes, rank)
    kept = chosen(key, sizes, rank)
    return [segment * jnp.where(mask, scale, 0) for segment, mask in zip(segments, kept, strict=True)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(sizes) / rank)


# The projection is its own transpose.
SUBSET = Sketch(project, lambda key, kept, sizes, rank: project(key, kept, rank), stretch, supports_ghost_norms=True)
