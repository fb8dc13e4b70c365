"""Count-sketch: coordinates with random signs, added up in p buckets (Charikar, Chen and Farach-Colton 2002).

A run is p consecutive coordinates. Coordinate i, in run k = i // p, is added to bucket (i + r_k) mod p, with r_k
uniform. Two coordinates share a bucket with probability at most 1/p, as under a random hash function. But here whole
runs are shifted, which needs no scatter operation.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from dpx.papers.d2p2_sgd.projections.sketch import DRAWS, Segments, Sketch, random_signs, transposed

# benchmarks/coordinates.py times the projection with these.
UNROLLED = 16  # runs with code of their own, at most; more runs are added in a loop, because compiling takes longer
PIECES = 8  # pieces of a long run, so that only an eighth of p numbers of memory is needed beyond bucket p - 1
UNCUT = 1024  # coordinates of the longest run that is one piece, because small pieces cost more time than they save


def project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    size = sum(segment.size for segment in segments)
    runs = math.ceil(size / rank)
    sign_key, offset_key = jax.random.split(key)
    signs = random_signs(sign_key, size)
    with DRAWS:
        offsets = jax.random.randint(offset_key, (runs,), 0, rank)
    if runs > UNROLLED:
        return [_looped(jnp.concatenate(segments) * signs, offsets, rank)]
    # Pieces are added in place, because a batch is large. What reaches beyond bucket p - 1 is added to the first ones.
    longest = min(rank, max(UNCUT, math.ceil(rank / PIECES)))
    # This 0 depends on the example. From a constant 0, XLA would allocate the buckets of all examples too early.
    zero = 0 * next(segment for segment in segments if segment.size)[0]
    total = jnp.full(rank + longest, zero)
    for start, piece in _pieces(segments, rank, longest):
        bucket = ((offsets[start // rank] + start) % rank,)
        signed = piece * signs[start : start + piece.size]
        before = jax.lax.dynamic_slice(total, bucket, piece.shape)
        total = jax.lax.dynamic_update_slice(total, before + signed, bucket)
    return [total.at[:longest].add(total[rank:]).at[rank:].set(0)]


def stretch(sizes: Sequence[int], rank: int) -> float:
    """The square root of the number of coordinates in the fullest bucket."""
    return math.sqrt(math.ceil(sum(sizes) / rank))


def _pieces(segments: Segments, rank: int, longest: int) -> Iterator[tuple[int, jax.Array]]:
    """(start, piece) for each piece: the segments are cut at the ends of runs, and into at most `longest` numbers."""
    start = 0
    for segment in segments:
        done = 0
        while done < segment.size:
            length = min(segment.size - done, longest, rank - start % rank)
            yield start, segment[done : done + length]
            start, done = start + length, done + length


def _looped(signed: jax.Array, offsets: jax.Array, rank: int) -> jax.Array:
    """The buckets, float32 (rank,), of a vector times its signs: one run at a time."""
    runs = jnp.pad(signed, (0, len(offsets) * rank - signed.size)).reshape(-1, rank)

    def add(total, run):
        coordinates, offset = run
        return total + jnp.roll(coordinates, offset), None

    return jax.lax.scan(add, jnp.zeros(rank), (runs, offsets))[0]


COUNTSKETCH = Sketch(project, transposed(project), stretch)
