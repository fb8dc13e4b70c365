"""The paper's projection: A^T v / sqrt(p) with A a d x p matrix of standard normals, drawn in blocks of rows."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpx.coordinates.projections.kind import DRAWN_AT_ONCE, EXACT, Kind, Parts, join, split


def project(key: jax.Array, parts: Parts, rank: int) -> Parts:
    vector = join(parts)

    def block(_, number):
        return None, jnp.dot(_rows(key, number, vector.size, rank), vector, precision=EXACT)

    _, coordinates = jax.lax.scan(block, None, jnp.arange(_blocks(vector.size, rank)))
    return [coordinates.reshape(-1)[:rank] / math.sqrt(rank)]


def lift(key: jax.Array, coordinates: Parts, sizes: Sequence[int], rank: int) -> Parts:
    size = sum(sizes)

    def block(total, numbered):
        number, part = numbered
        return total + jnp.dot(part, _rows(key, number, size, rank), precision=EXACT), None

    blocks, height = _blocks(size, rank), _height(size, rank)
    parts = jnp.pad(coordinates[0], (0, blocks * height - rank)).reshape(blocks, height)
    total, _ = jax.lax.scan(block, jnp.zeros(size), (jnp.arange(blocks), parts))
    return split(total / math.sqrt(rank), sizes)


def _height(size: int, rank: int) -> int:
    return max(1, min(rank, DRAWN_AT_ONCE // size))


def _blocks(size: int, rank: int) -> int:
    return -(-rank // _height(size, rank))


def _rows(key: jax.Array, block: jax.Array, size: int, rank: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, block), (_height(size, rank), size))


GAUSSIAN = Kind(project, lift, stretch=None, encode_whole_batch=True)
