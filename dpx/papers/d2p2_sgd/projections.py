"""Random projections: write a gradient in fewer, random coordinates, as a whole or for each group of layers.

To add a kind, write a `LinearSketch`, and add its name to `SKETCHES` and `ProjectionKind`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import hadamard

from dpx import keys
from dpx.mechanism import Coordinates
from dpx.mechanism.base import describe_groups
from dpx.mechanism.masks import mask_of_largest
from dpx.values import Tree, as_real, described, explain_misuse, require_whole

EXACT = jax.lax.Precision.HIGHEST  # full float32 products everywhere, because matrix units round to fewer bits
# How many elements of a dense random matrix are in memory at once: 16 MiB of float32. Larger ones are never stored.
DRAWN_AT_ONCE = 2**22

# Keeps the draws the same if the vectors are float64 (`clip_then_project`). Every use makes a new context, because one
# object keeps the setting to restore, and several threads may be in it.
in_32_bits = functools.partial(jax.enable_x64, False)

# One vector of d coordinates in pieces, each float32 (size,): the flattened layers of a gradient.
Segments = Sequence[jax.Array]


class LinearSketch(NamedTuple):
    """A random linear map P from d coordinates to p, with E[P^T P] = I, so that its transpose lifts without bias.

    The draw depends only on the key, so a `vmap` over vectors draws once for all of them.

    project: (key, segments, rank) -> coordinates, each float32 (n,): p values, plus zeros if padding is cheaper
    lift:    (key, coordinates, sizes, rank) -> segments; the transpose of `project`
    stretch: (sizes, rank) -> the largest |P v| / |v| under any key; None if it is unbounded
    supports_ghost_norms: whether P only scales coordinates; the coordinates then have the shapes of the segments
    encode_whole_batch: whether `project` draws more numbers than its input has, so that one call should do all examples
    """

    project: Callable[[jax.Array, Segments, int], Segments]
    lift: Callable[[jax.Array, Segments, Sequence[int], int], Segments]
    stretch: Callable[[Sequence[int], int], float] | None
    supports_ghost_norms: bool = False
    encode_whole_batch: bool = False


def lift_by_transpose(project: Callable[[jax.Array, Segments, int], Segments]):
    """Returns jax's transpose of `project` as the lift, for a `project` that stores nothing larger than its input."""

    def lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
        like = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        return jax.linear_transpose(lambda segments: project(key, segments, rank), like)(coordinates)[0]

    return lift


def split_vector(vector: jax.Array, sizes: Sequence[int]) -> Segments:
    return [vector[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def random_signs(key: jax.Array, size: int) -> jax.Array:
    """Draws 1 or -1 with equal probability, float32 (size,)."""
    with in_32_bits():
        return jax.random.rademacher(key, (size,), jnp.float32)


def random_subset(key: jax.Array, sizes: Sequence[int], count: int) -> Segments:
    """Draws a uniformly random subset of exactly `count` coordinates: bool (size,) for each segment."""
    with in_32_bits():
        bits = split_vector(jax.random.bits(key, (sum(sizes),), jnp.uint32), sizes)
        return mask_of_largest(bits, jnp.int32(count))


def _random_subset_project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    """Keeps p of the d coordinates, drawn uniformly at random, times sqrt(d/p)."""
    sizes = [segment.size for segment in segments]
    scale = _random_subset_stretch(sizes, rank)
    kept = random_subset(key, sizes, rank)
    return [segment * jnp.where(mask, scale, 0) for segment, mask in zip(segments, kept, strict=True)]


def _random_subset_stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(sizes) / rank)


# The projection is its own transpose.
SUBSET = LinearSketch(
    _random_subset_project,
    lambda key, kept, sizes, rank: _random_subset_project(key, kept, rank),
    _random_subset_stretch,
    supports_ghost_norms=True,
)

# benchmarks/coordinates.py times the projection with these.
UNROLLED = 16  # the most runs that are unrolled; more are added in a loop, because unrolling takes longer to compile
PIECES = 8  # pieces of a long run, so that only p / 8 more elements of memory are needed beyond bucket p - 1
UNCUT = 1024  # the longest run that is not cut into pieces, because small pieces cost more time than they save


def _countsketch_project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    """Adds up coordinates with random signs in p buckets (Charikar, Chen and Farach-Colton 2002).

    A run is p consecutive coordinates. Coordinate i, in run k = i // p, is added to bucket (i + r_k) mod p, with r_k
    uniform. Two coordinates share a bucket with probability at most 1/p, as under a random hash function. Shifting
    whole runs needs no scatter operation.
    """
    size = sum(segment.size for segment in segments)
    runs = math.ceil(size / rank)
    sign_key, offset_key = jax.random.split(key)
    signs = random_signs(sign_key, size)
    with in_32_bits():
        offsets = jax.random.randint(offset_key, (runs,), 0, rank)
    if runs > UNROLLED:
        return [_bucket_sums_by_run(jnp.concatenate(segments) * signs, offsets, rank)]
    # Pieces are added in place, because a batch is large. What passes bucket p - 1 wraps around to the first buckets.
    longest = min(rank, max(UNCUT, math.ceil(rank / PIECES)))
    # This 0 depends on the example: with a constant 0, XLA would allocate the buckets of all examples too early.
    zero = 0 * next(segment for segment in segments if segment.size)[0]
    total = jnp.full(rank + longest, zero)
    for start, piece in _cut_segments_into_pieces(segments, rank, longest):
        bucket = ((offsets[start // rank] + start) % rank,)
        signed = piece * signs[start : start + piece.size]
        before = jax.lax.dynamic_slice(total, bucket, piece.shape)
        total = jax.lax.dynamic_update_slice(total, before + signed, bucket)
    return [total.at[:longest].add(total[rank:]).at[rank:].set(0)]


def _countsketch_stretch(sizes: Sequence[int], rank: int) -> float:
    """Returns the square root of the number of coordinates in the fullest bucket."""
    return math.sqrt(math.ceil(sum(sizes) / rank))


def _cut_segments_into_pieces(segments: Segments, rank: int, longest: int) -> Iterator[tuple[int, jax.Array]]:
    """Yields (start, piece): cuts the segments at the ends of runs, and into pieces of at most `longest` elements."""
    start = 0
    for segment in segments:
        done = 0
        while done < segment.size:
            length = min(segment.size - done, longest, rank - start % rank)
            yield start, segment[done : done + length]
            start, done = start + length, done + length


def _bucket_sums_by_run(signed: jax.Array, offsets: jax.Array, rank: int) -> jax.Array:
    """Adds a vector, already multiplied by its signs, to float32 (rank,) buckets, `rank` coordinates at a time."""
    runs = jnp.pad(signed, (0, len(offsets) * rank - signed.size)).reshape(-1, rank)

    def add(total, run):
        coordinates, offset = run
        return total + jnp.roll(coordinates, offset), None

    return jax.lax.scan(add, jnp.zeros(rank), (runs, offsets))[0]


COUNTSKETCH = LinearSketch(_countsketch_project, lift_by_transpose(_countsketch_project), _countsketch_stretch)


def _gaussian_project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    """Returns A^T v / sqrt(p), where A is a d x p matrix of standard normals, drawn in blocks of rows of A^T."""
    vector = jnp.concatenate(segments)

    def block(_, number):
        return None, jnp.dot(_draw_gaussian_rows(key, number, vector.size, rank), vector, precision=EXACT)

    _, coordinates = jax.lax.scan(block, None, jnp.arange(_number_of_blocks(vector.size, rank)))
    return [coordinates.reshape(-1)[:rank] / math.sqrt(rank)]


def _gaussian_lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
    size = sum(sizes)

    def block(total, numbered):
        number, chunk = numbered
        return total + jnp.dot(chunk, _draw_gaussian_rows(key, number, size, rank), precision=EXACT), None

    blocks, height = _number_of_blocks(size, rank), _rows_drawn_at_once(size, rank)
    chunks = jnp.pad(coordinates[0], (0, blocks * height - rank)).reshape(blocks, height)
    total, _ = jax.lax.scan(block, jnp.zeros(size), (jnp.arange(blocks), chunks))
    return split_vector(total / math.sqrt(rank), sizes)


def _rows_drawn_at_once(size: int, rank: int) -> int:
    """Returns how many rows of A^T, each with d = `size` elements, are drawn at once."""
    return max(1, min(rank, DRAWN_AT_ONCE // size))


def _number_of_blocks(size: int, rank: int) -> int:
    return -(-rank // _rows_drawn_at_once(size, rank))


def _draw_gaussian_rows(key: jax.Array, block: jax.Array, size: int, rank: int) -> jax.Array:
    """Draws one block of rows of A^T, float32 (height, size)."""
    with in_32_bits():
        return jax.random.normal(jax.random.fold_in(key, block), (_rows_drawn_at_once(size, rank), size))


GAUSSIAN = LinearSketch(_gaussian_project, _gaussian_lift, stretch=None, encode_whole_batch=True)
HADAMARD_BLOCK = 2**12  # the most coordinates in a block, a power of 2: the transform's two factors are then 64 x 64


def hadamard_transform(blocks: jax.Array) -> jax.Array:
    """Computes the unscaled Walsh-Hadamard transform of every row of float32 (n, 2^k), as two matrix products.

    H = H_a (x) H_c is a Kronecker product with a c = 2^k. Two products are faster than k passes of additions.
    """
    rows, size = blocks.shape
    order = size.bit_length() - 1
    left, right = (jnp.asarray(hadamard(2**half), blocks.dtype) for half in (order // 2, order - order // 2))
    grid = blocks.reshape(rows, len(left), len(right))
    grid = jnp.einsum("nac,cd->nad", grid, right, precision=EXACT)
    return jnp.einsum("nad,ab->nbd", grid, left, precision=EXACT).reshape(rows, size)


def _hadamard_project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    """Applies random signs and H / sqrt(b) in blocks of b, and keeps p results: the subsampled randomized transform."""
    sizes = [segment.size for segment in segments]
    padded = [_padded_size(size) for size in sizes]
    sign_key, row_key = jax.random.split(key)
    signs = split_vector(random_signs(sign_key, sum(sizes)), sizes)
    kept = random_subset(row_key, padded, rank)
    return [
        _hadamard_transform_segment(*each, scale=math.sqrt(sum(padded) / rank))
        for each in zip(segments, signs, kept, strict=True)
    ]


def _hadamard_stretch(sizes: Sequence[int], rank: int) -> float:
    return math.sqrt(sum(map(_padded_size, sizes)) / rank)


def _hadamard_transform_segment(segment: jax.Array, signs: jax.Array, kept: jax.Array, *, scale: float) -> jax.Array:
    """Returns a segment's transform times `scale`, float32 (padded size,), with zeros for results that are not kept.

    segment, signs: float32 (size,). kept: bool (padded size,).
    """
    block = _hadamard_block_size(segment.size)
    signed = jnp.pad(segment * signs, (0, kept.size - segment.size)).reshape(-1, block)
    return hadamard_transform(signed).reshape(-1) * jnp.where(kept, scale / math.sqrt(block), 0)


def _hadamard_block_size(size: int) -> int:
    """Returns a segment's block size: the smallest power of 2 not below its size, but at most HADAMARD_BLOCK."""
    return min(HADAMARD_BLOCK, 1 << (size - 1).bit_length())


def _padded_size(size: int) -> int:
    return _hadamard_block_size(size) * math.ceil(size / _hadamard_block_size(size))


HADAMARD = LinearSketch(_hadamard_project, lift_by_transpose(_hadamard_project), _hadamard_stretch)
ORTHONORMAL_BLOCK = 64  # the fewest coordinates in a block; d / p if that is more, so that every block has a column


class CoordinateBlocks(NamedTuple):
    """How d coordinates are cut into blocks, and the columns of each block's Q.

    count: the number of blocks. size: the number of coordinates in each.
    columns: the number of columns of the first `wide` blocks; the other blocks have one column fewer.
    together: the number of blocks in a chunk, drawn at once. chunks: the number of chunks; the last one is filled up.
    """

    count: int
    size: int
    columns: int
    wide: int
    together: int
    chunks: int


def cut_into_blocks(size: int, rank: int) -> CoordinateBlocks:
    count = math.ceil(size / max(ORTHONORMAL_BLOCK, math.ceil(size / rank)))
    block, columns = math.ceil(size / count), math.ceil(rank / count)
    together = max(1, min(count, DRAWN_AT_ONCE // (block * columns)))
    return CoordinateBlocks(count, block, columns, rank - (columns - 1) * count, together, math.ceil(count / together))


def _orthonormal_project(key: jax.Array, segments: Segments, rank: int) -> Segments:
    """Returns Q^T v in blocks of about 64 coordinates; each block has its own Haar-random Q, by QR of Gaussians."""
    vector = jnp.concatenate(segments)
    blocks = cut_into_blocks(vector.size, rank)
    padding = blocks.chunks * blocks.together * blocks.size - vector.size
    chunks = jnp.pad(vector, (0, padding)).reshape(blocks.chunks, blocks.together, blocks.size)
    return [_multiply_each_chunk("bsc,bs->bc", key, blocks, chunks)]


def _orthonormal_lift(key: jax.Array, coordinates: Segments, sizes: Sequence[int], rank: int) -> Segments:
    blocks = cut_into_blocks(sum(sizes), rank)
    chunks = coordinates[0].reshape(blocks.chunks, blocks.together, blocks.columns)
    return split_vector(_multiply_each_chunk("bsc,bc->bs", key, blocks, chunks), sizes)


def _orthonormal_stretch(sizes: Sequence[int], rank: int) -> float:
    """Returns sqrt(size / columns) for blocks with the fewest columns, where P is this times an orthonormal map."""
    blocks = cut_into_blocks(sum(sizes), rank)
    return math.sqrt(blocks.size / (blocks.columns if blocks.wide == blocks.count else blocks.columns - 1))


def _multiply_each_chunk(product: str, key: jax.Array, blocks: CoordinateBlocks, chunks: jax.Array) -> jax.Array:
    """Computes the einsum `product` of every chunk's matrices with `chunks`, float32 (chunks, together, n).

    Returns float32 (m,), the concatenated results of all blocks.
    """

    def chunk(_, numbered):
        number, vectors = numbered
        return None, jnp.einsum(product, _orthonormal_blocks(key, blocks, number), vectors, precision=EXACT)

    return jax.lax.scan(chunk, None, (jnp.arange(blocks.chunks), chunks))[1].reshape(-1)


def _orthonormal_blocks(key: jax.Array, blocks: CoordinateBlocks, chunk: jax.Array) -> jax.Array:
    """Draws Q sqrt(size / columns) for each block of a chunk, float32 (together, size, columns), padded with zeros."""
    shape = blocks.together, blocks.size, blocks.columns
    with in_32_bits():
        q, _ = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, chunk), shape))
    fewer = blocks.columns - 1
    wide = jnp.full(blocks.columns, math.sqrt(blocks.size / blocks.columns))
    narrow = jnp.where(jnp.arange(blocks.columns) < fewer, math.sqrt(blocks.size / max(fewer, 1)), 0)
    numbers = chunk * blocks.together + jnp.arange(blocks.together)
    return q * jnp.where((numbers < blocks.wide)[:, None], wide[None], narrow[None])[:, None]


ORTHONORMAL = LinearSketch(_orthonormal_project, _orthonormal_lift, _orthonormal_stretch, encode_whole_batch=True)


ProjectionKind = Literal["gaussian", "orthonormal", "subset", "countsketch", "hadamard"]

SKETCHES: dict[str, LinearSketch] = {
    "gaussian": GAUSSIAN,
    "orthonormal": ORTHONORMAL,
    "subset": SUBSET,
    "countsketch": COUNTSKETCH,
    "hadamard": HADAMARD,
}

ROUNDING = 1 + 1e-5  # multiplies the largest stretch, which a projection that is rounded to float32 may exceed


class ProjectionState(NamedTuple):
    """step: int32 (), the number of releases. A projection depends only on this number and the key."""

    step: jax.Array


@explain_misuse
def random_projection(
    *,
    rank: int | Tree | None = None,
    reduction_rate: float | Tree | None = None,
    kind: ProjectionKind,
    every: int | None = 1,
    key: jax.Array,
) -> Coordinates:
    """Writes a gradient g of d coordinates as fewer, random ones, z = P g, lifted back by P^T, with E[P^T P] = I.

    In `in_coordinates(mechanism, random_projection(...))` every example is projected first and then bounded. The bound
    holds for any projection, so the cost is the mechanism's. P^T lifts without bias, and the variance of the lifted
    noise is, on average, as large as without a projection. `clip_then_project` projects only the clipped sum.

    rank: p, in [1, d]. reduction_rate: 1 - p/d in [0, 1), instead. A number projects the whole gradient as one
        vector; a pytree prefix of the gradients projects each group (layer) separately.
    kind: all examples of a step share one projection. "gaussian": A^T g / sqrt(p), where A has standard normal elements
        (Achlioptas 2001); every encode and decode draws these d p elements in blocks, and stores none, so a step with
        550,000 coordinates takes hours. "orthonormal": in blocks of 64 coordinates, Haar-random orthonormal columns
        times sqrt(d/p). "subset": p of the coordinates times sqrt(d/p), which ghost norms support.
        "countsketch": adds up coordinates with random signs in p buckets; the cheapest that mixes coordinates.
        "hadamard": random signs, then blocks of b <= 4096 (d is padded) times a Hadamard matrix / sqrt(b), then p
        of the results times sqrt(d/p).
    every: for how many steps a draw is kept; None keeps one draw for the whole run.
    key: a scalar PRNG key, whose "projection" stream (not the noise's) is used, with the step folded in.
    Raises ValueError for a rank outside [1, d] (above d: while tracing), a rate outside [0, 1) or an unknown kind.
    """
    made = projection_coordinates(rank, reduction_rate, kind, every, keys.stream(key, "projection"), bounded=False)
    return made._replace(name=f"{made.name}; clip norm and noise are those of projected coordinates")


def projection_coordinates(
    rank, reduction_rate, kind: str, every: int | None, stream: jax.Array, *, bounded: bool
) -> Coordinates:
    """Does what `random_projection` does, but takes the stream that is derived from the key.

    bounded: whether `encode` divides z by the most that P lengthens any vector, and `decode` multiplies by that again.
    """
    every = None if every is None else require_whole("every", every)
    ranks, rank_of, words = _read_rank_arguments(rank, reduction_rate)
    if kind not in SKETCHES:
        raise ValueError(f"kind must be one of {', '.join(SKETCHES)}; got {described(kind)}")
    sketch = SKETCHES[kind]
    stretch = sketch.stretch if bounded else None

    def each_group(function: Callable, state: ProjectionState, *trees: Tree) -> Tree:
        draw = keys.public_key(keys.fold_in(stream, 0 if every is None else state.step // every))
        numbers = jax.tree.unflatten(jax.tree.structure(ranks), range(len(jax.tree.leaves(ranks))))

        def of_group(number, rank, *groups):
            return function(jax.random.fold_in(draw, number), rank, *groups)

        return jax.tree.map(of_group, numbers, ranks, *trees)

    def projection_sizes_of_group(configured, leaves) -> tuple[list[int], int, float]:
        """Returns the sizes of a group's layers, its rank, and the divisor of its coordinates."""
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        rank = rank_of(configured, sum(sizes))
        return sizes, rank, ROUNDING * stretch(sizes, rank) if stretch else 1.0

    def encode(grad, state):
        def project_group(key, configured, group):
            leaves, structure = jax.tree.flatten(group)
            if not leaves:
                return group
            _, rank, divisor = projection_sizes_of_group(configured, leaves)
            coordinates = sketch.project(key, [_at_least_float32(leaf).reshape(-1) for leaf in leaves], rank)
            coordinates = [segment / divisor for segment in coordinates]
            return _segments_as_tree(coordinates, leaves, structure) if sketch.supports_ghost_norms else coordinates

        return each_group(project_group, state, grad)

    def decode(released, state, like):
        def decode_group(key, configured, group, shapes):
            leaves, structure = jax.tree.flatten(shapes)
            if not leaves:
                return group
            sizes, rank, divisor = projection_sizes_of_group(configured, leaves)
            coordinates = [segment.reshape(-1) * divisor for segment in jax.tree.leaves(group)]
            return _segments_as_tree(sketch.lift(key, coordinates, sizes, rank), leaves, structure)

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


def _read_rank_arguments(rank, reduction_rate) -> tuple[Tree, Callable[[Any, int], int], str]:
    """Returns the configured numbers, a function (number, d) -> rank, and the ranks in words."""
    if (rank is None) == (reduction_rate is None):
        given = f"rank={described(rank)}, reduction_rate={described(reduction_rate)}"
        raise ValueError(f"pass either rank or reduction_rate; got {given}")
    values = reduction_rate if rank is None else rank
    if not jax.tree.leaves(values):
        raise ValueError(f"rank or reduction_rate must hold at least one number, got {described(values)}")
    for value in jax.tree.leaves(values):
        if rank is None:
            if (number := as_real(value)) is None or not 0 <= number < 1:
                raise ValueError(f"reduction_rate must be in [0, 1), got {described(value)}")
        else:
            require_whole("rank", value)

    def rank_of(value, size: int) -> int:
        number = max(1, round((1 - float(value)) * size)) if rank is None else int(value)
        if number > size:
            raise ValueError(f"rank must be at most the number of coordinates, {size}; got {number}")
        return number

    if rank is None:
        return values, rank_of, f"{describe_groups(values, lambda rate: f'{1 - rate:.3g}')} of the coordinates"
    label = "rank" if jax.tree_util.all_leaves([values]) else "ranks"
    return values, rank_of, f"{label} {describe_groups(values, str)}"


def _at_least_float32(leaf: jax.Array) -> jax.Array:
    """Converts `leaf` to float32, but leaves float64 as it is (`clip_then_project`)."""
    return leaf if leaf.dtype == np.float64 else leaf.astype(jnp.float32)


def _segments_as_tree(segments: Segments, leaves: list, structure: Any) -> Tree:
    """Returns the segments as a tree, in the shapes of the leaves."""
    return jax.tree.unflatten(structure, [s.reshape(leaf.shape) for s, leaf in zip(segments, leaves, strict=True)])
