"""Count-sketch: coordinates with random signs, added up in p buckets (Charikar, Chen and Farach-Colton 2002).

Coordinate i, in run k = i // p of p coordinates, goes to bucket (i + r_k) mod p, r_k uniform. Two coordinates share a
bucket with probability at most 1/p, as under a random hash; but whole runs slide, and nothing is scattered.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from dpx.coordinates.projections.kind import Kind, Parts, join, random_signs, sizes_of, transposed

UNROLLED = 16  # runs; more of them are looped over
PIECES = 8  # of a long run
UNCUT = 1024  # coordinates


def project(key: jax.Array, parts: Parts, rank: int) -> Parts:
    size = sum(sizes_of(parts))
    runs = math.ceil(size / rank)
    sign_key, offset_key = jax.random.split(key)
    signs = random_signs(sign_key, size)
    offsets = jax.random.randint(offset_key, (runs,), 0, rank)
    if runs > UNROLLED:
        return [_looped(join(parts) * signs, offsets, rank)]
    # in place, piece by piece, as a batch of gradients is large; what slides over the end is folded back
    longest = min(rank, max(UNCUT, math.ceil(rank / PIECES)))
    zero = 0 * next(part for part in parts if part.size)[0]  # known to be 0 only with the example: not made before it
    total = jnp.full(rank + longest, zero)
    for start, piece in _pieces(parts, rank, longest):
        bucket = ((offsets[start // rank] + start) % rank,)
        signed = piece * signs[start : start + piece.size]
        before = jax.lax.dynamic_slice(total, bucket, piece.shape)
        total = jax.lax.dynamic_update_slice(total, before + signed, bucket)
    return [total.at[:longest].add(total[rank:]).at[rank:].set(0)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    """The square root of the fullest bucket."""
    return math.sqrt(math.ceil(sum(sizes) / rank))


def _pieces(parts: Parts, rank: int, longest: int) -> Iterator[tuple[int, jax.Array]]:
    """(start, piece): the parts cut where runs end, and into pieces of at most `longest`."""
    start = 0
    for part in parts:
        done = 0
        while done < part.size:
            length = min(part.size - done, longest, rank - start % rank)
            yield start, part[done : done + length]
            start, done = start + length, done + length


def _looped(signed: jax.Array, offsets: jax.Array, rank: int) -> jax.Array:
    runs = jnp.pad(signed, (0, len(offsets) * rank - signed.size)).reshape(-1, rank)

    def add(total, run):
        part, offset = run
        return total + jnp.roll(part, offset), None

    return jax.lax.scan(add, jnp.zeros(rank), (runs, offsets))[0]


COUNTSKETCH = Kind(project, transposed(project), stretch)
