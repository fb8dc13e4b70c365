"""The noisy release of every mechanism: a sum plus normal noise, rounded to a public grid.

For a sum S, with R = deviation / gamma, where gamma is a power of two and R is in [16, 32), and standard normals g,

    y = S / gamma;   k = floor(y) + floor(y - floor(y) + R g + 1/2);   released: gamma k, as float32

For real g, k is round(S / gamma + R g), because floor(n + x) = n + floor(x) for an integer n. So k is a function of
S + deviation * g, the Gaussian mechanism: rounding is post-processing, which costs nothing, and adds at most
gamma^2 / 12 = 3.3e-4 deviation^2 of variance. The computed g differs from a real one by at most the bound of
`normals.py`, which `dpx.accounting.arithmetic` adds to the cost. Without the grid, released floats would show which
sums are possible at all (Mironov 2012, https://doi.org/10.1145/2382196.2382264; docs/exact.md).

gamma comes from the bits of the deviation, because a logarithm may be wrong at powers of two. y and y - floor(y) are
exact, because S has at most 53 bits and gamma is a power of two. Where k has more than 53 bits, it may be rounded,
which is a function of k. It is never -0., whose sign could show that of S, because a sum is -0. only if both of its
terms are, and neither y - floor(y) nor 1/2 is.

Element n of the tree, counted leaf after leaf, gets element n of one stream of noise, which is a function of the key,
the step and n, and of the tree's size if it has fewer than CHUNK_NUMBERS elements. So noise does not depend on how
arrays are computed or sharded. The cipher takes the block (step + 1, index of a pair, index of a stream, 0), and
(step + 1, 1, 0, RARE) for the word that the rarest pairs of the release share (`normals.py`). No two releases of a key
share a block, and no block of a release derives a key, because those blocks end in another word (`streams.py`).
"""

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from dpx.keys import integer_normals
from dpx.keys.normals import normal_from_polar, radius_and_angle
from dpx.keys.streams import RARE, derive_key, threefry4x32
from dpx.keys.streams import key_words as secret_words
from dpx.sums.rounding import FloatPair, as_pair, released_minus_total
from dpx.values import Tree, require_number
from dpx.xla.ordering import opaque_false
from dpx.xla.place import Place, current_place, enabling_float64, refuse_to_compile_for_tpu, require_exact_math
from dpx.xla.rows_apart import require_rows_apart

# 32 KiB; from 2^11 to 2^17 elements, a CPU is about equally fast (benchmarks/results/noise.md).
CHUNK_NUMBERS = 2**13
LARGEST_RELEASE = 2**32  # elements, for which the cost is computed (dpx/accounting/arithmetic.py)
ONE_STREAM = 2**31  # elements, because an index of an array is an int32
LARGEST_LEAF = 2**32 - CHUNK_NUMBERS  # elements, because positions in a leaf are uint32
IN_INTEGERS = 64  # chunks that a TPU computes at once, 2 MiB in all
# Up to this many elements, one TPU copies all leaves into one array: only its loop has kernels to compile, and a block
# gives both normals of a pair, but this takes 2.7 times the memory of the leaves.
FLAT = 2**27
SMALL_LEAF, LEAF_BLOCK = 2**16, 2**19  # elements, for larger trees; the second is for one device
RARE_LANES = 16  # after a chunk's pairs, and only one of them is read: a multiple of a CPU's vector length
REPEATED = 4  # leaves with the shape of an earlier one; sharing programs between fewer takes longer to compile
GRID = 4  # the deviation is 2^4 to 2^5 times gamma

_COUNTED: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("counted", default=None)


class AuditStandIns(NamedTuple):
    """Replaces `release` and `normals_of_release` while an audit traces a mechanism; None keeps the original."""

    release: Callable | None = None
    normals_of_release: Callable | None = None


# Part of jax's own context of a trace: only one thread sees it, and jax keeps the traces of a jitted function with it
# apart. Otherwise a run after an audit could use a stand-in for its noise.
STAND_INS = jax.make_user_context(default_value=AuditStandIns())


class StreamPosition(NamedTuple):
    """Where the noise of a leaf is: from element `start` of stream number `stream` on. The chunks of this stream have
    2 * half elements."""

    stream: int
    start: int
    half: int


def release(key: jax.Array, step: jax.Array | int, total: FloatPair | Tree, deviation: jax.Array | float) -> Tree:
    """Adds normal noise of standard deviation `deviation` to `total`, on a public grid; float32, shaped like `total`.

    key: scalar key of the mechanism's "noise" stream. step: int (), below 2^31; two steps have independent noise.
    total: float32 arrays, or a `FloatPair`. deviation: float32 (), public. Deviations below 2^-126, including 0, add no
        noise; for a Python 0.0 none is drawn either.

    On a CPU, a loop computes one chunk after another, so that each stays in the cache. On a TPU, the chunks are larger
    and computed in integers (`integer_normals.py`). On a GPU, all elements are computed at once. On several devices,
    and on a TPU for 2^27 elements or more, each leaf's noise is computed from the positions of its elements, so that
    XLA can shard it like the leaf.

    Raises ValueError if XLA_FLAGS has fast math, under which no bound of a sum holds; for sums that differ between the
    devices of a `jax.shard_map` with one key (unless it has check_vma=False); for more than 2^32 elements, or 2^32 -
    2^13 in a leaf; and for an XLA that mixes rows (`dpx.xla.rows_apart`).
    """
    if (stand_in := STAND_INS.value.release) is not None:
        with STAND_INS(AuditStandIns()):
            return stand_in(key, step, total, deviation)
    require_exact_math()
    require_rows_apart()
    high, low = as_pair(total)
    leaves, structure = jax.tree.flatten(high)
    lows = None if low is None else structure.flatten_up_to(low)
    places = stream_positions_of_leaves([leaf.shape for leaf in leaves])
    how = places, current_place(), draws_noise(deviation)
    words, deviation = secret_words(key), require_deviation(deviation)
    step = refuse_to_compile_for_tpu(jnp.asarray(step))
    _require_key_per_device(words, leaves)
    with jax.disable_jit(False):  # the loops are written for tracers
        return structure.unflatten(release_leaves(words, step, deviation, leaves, lows, *how))


def _require_key_per_device(words: jax.Array, arrays: Sequence[jax.Array]) -> None:
    if axes_that_vary(arrays) - axes_that_vary([words]):
        raise ValueError(
            "sums that differ between the devices of a jax.shard_map must each have a key of their own, because with "
            "one key they have the same noise. Add them up before the release (jax.lax.psum); fit and private_updates "
            "do so under jax.jit with sharded batches"
        )


def axes_that_vary(arrays: Sequence[jax.Array]) -> set[str]:
    """Returns the axes of a `jax.shard_map` along which any of the arrays differ; none under check_vma=False."""
    types = [getattr(jax.typeof(array), "manual_axis_type", None) for array in arrays]
    return {axis for one in types for axis in getattr(one, "varying", ())}


def untracked_mapped_axes() -> tuple[str, ...]:
    """Returns the axes of a `jax.pmap`, or a `jax.shard_map` with check_vma=False, where jax tracks no differences."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in manual if not axes_that_vary([jax.lax.axis_index(axis)]))


def draws_noise(deviation: jax.Array | float) -> bool:
    """Whether there is noise to draw: False for a deviation that is known to be 0 when the step is traced."""
    return not (isinstance(deviation, float | int) and deviation == 0)


def require_deviation(deviation: jax.Array | float) -> jax.Array:
    if not isinstance(deviation, jax.Array):
        deviation = require_number("deviation", deviation, minimum=0)
    return jnp.asarray(deviation, jnp.float32)


def normals_of_release(key: jax.Array, step: jax.Array | int, tree: Tree) -> Tree:
    """Returns the standard normals that `release` draws for this key and step, float32, like `tree`, for inspection.

    Never add these to a sum yourself, because the bits of the result would reveal the sum: use `release`.
    """
    if (stand_in := STAND_INS.value.normals_of_release) is not None:
        with STAND_INS(AuditStandIns()):
            return stand_in(key, step, tree)
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(jnp.shape(leaf) for leaf in leaves)
    return structure.unflatten(
        _float32_normals(secret_words(key), jnp.asarray(step), stream_positions_of_leaves(shapes), shapes)
    )


def stream_positions_of_leaves(shapes: Sequence[tuple[int, ...]]) -> tuple[StreamPosition, ...]:
    """Returns where leaves of these shapes are: all in one stream, or, if it is too short, each in its own stream."""
    sizes = [math.prod(shape) for shape in shapes]
    if (largest := max(sizes, default=0)) > LARGEST_LEAF:
        raise ValueError(f"a leaf must have at most {LARGEST_LEAF} numbers, got {largest}")
    if (most := report_release_size(shapes)) > LARGEST_RELEASE:
        raise ValueError(f"a release must have at most {LARGEST_RELEASE} numbers, got {most}")
    size = sum(sizes)
    if len(shapes) > 1 and size >= ONE_STREAM:
        return tuple(StreamPosition(number, 0, _half_chunk_size(size)) for number, size in enumerate(sizes))
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return tuple(StreamPosition(0, start, _half_chunk_size(size)) for _, start in zip(sizes, starts, strict=False))


def _half_chunk_size(size: int) -> int:
    return max(1, min(CHUNK_NUMBERS, size + 1) // 2)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def release_leaves(
    words, step, deviation, highs, lows, places: tuple[StreamPosition, ...], place: Place, drawn: bool
) -> list[jax.Array]:
    """Returns the released leaves. words: the key, uint32 (4,). highs, lows: parts of the `FloatPair`, lows or None."""
    highs, shapes = [high.astype(jnp.float32) for high in highs], [high.shape for high in highs]
    size = sum(map(math.prod, shapes))
    as_integers = place.platform == "tpu"

    def of_leaf(high, low, at: StreamPosition) -> jax.Array:
        normals = _draw_leaf_normals(words, step, at, high.shape) if drawn else np.float64(0)
        return round_to_grid(high, low, normals, deviation)

    if as_integers and (place.devices > 1 or not 0 < size < FLAT):
        return _release_leaves_in_integers((words, step, deviation), highs, lows, places, place.devices, drawn)
    if place.devices > 1 or not 0 < size < ONE_STREAM:
        return [of_leaf(*leaf) for leaf in zip(highs, lows or [None] * len(highs), places, strict=True)]

    def in_integers(highs, lows) -> list[jax.Array]:
        chunks = -(-size // (2 * places[0].half))
        rows = -(-chunks // -(-chunks // IN_INTEGERS))  # as few as keep the number of turns
        rows = rows if rows == chunks else -(-rows // 8) * 8  # a TPU's registers have 8 rows
        low = None if lows is None else concatenate_into_rows(lows, places, rows)
        made = _noisy_in_integers(words, step, deviation, concatenate_into_rows(highs, places, rows), low, rows, drawn)
        return split_into_leaves(made, step, places, shapes)

    def by_chunks(highs, lows) -> list[jax.Array]:
        low = None if lows is None else concatenate_into_rows(lows, places)
        made = noisy_in_chunks(words, step, deviation, concatenate_into_rows(highs, places), low, drawn)
        return split_into_leaves(made, step, places, shapes)

    def at_once(highs, lows) -> list[jax.Array]:
        made = of_leaf(_concatenate_leaves(highs), None if lows is None else _concatenate_leaves(lows), places[0])
        return split_into_leaves(made, step, places, shapes)

    if as_integers:
        return in_integers(highs, lows)
    return jax.lax.platform_dependent(highs, lows, cpu=by_chunks, default=at_once)


def _concatenate_leaves(leaves: list[jax.Array], padding: int = 0) -> jax.Array:
    zeros = [jnp.zeros(padding, jnp.float32)] if padding else []
    return jnp.concatenate([*(leaf.reshape(-1) for leaf in leaves), *zeros])


def concatenate_into_rows(leaves: list[jax.Array], places: tuple[StreamPosition, ...], chunks: int = 1) -> jax.Array:
    """Concatenates the leaves, padded with zeros to a multiple of this many chunks, float32 (2 * chunks, half)."""
    size, half = sum(leaf.size for leaf in leaves), places[0].half
    return _concatenate_leaves(leaves, -size % (2 * half * chunks)).reshape(-1, half)


def split_into_leaves(
    made: jax.Array, step, places: tuple[StreamPosition, ...], shapes: list[tuple[int, ...]]
) -> list[jax.Array]:
    """Splits the result of `_concatenate_leaves` or `concatenate_into_rows` into leaves."""
    made, starts = made.reshape(-1), [at.start for at in places]
    if len(shapes) - len(set(shapes)) >= REPEATED:
        # XLA compiles equal kernels once. With constant starts, each leaf has a separate kernel. With starts that are
        # computed, all leaves of one shape share one.
        starts = jax.lax.cond(opaque_false(step), lambda: [0] * len(shapes), lambda: [at.start for at in places])
    parts = zip(starts, shapes, strict=True)
    return [
        jax.lax.dynamic_slice(made, (start,), (math.prod(shape),), allow_negative_indices=False).reshape(shape)
        for start, shape in parts
    ]


def noisy_in_chunks(words, step, deviation, high: jax.Array, low: jax.Array | None, drawn: bool) -> jax.Array:
    """Adds noise to `high + low` on the grid, all float32 (2 * chunks, half). The result takes the memory of `high`."""
    half = high.shape[1]

    def make_chunk(number, made):
        # The lanes after those of the pairs give the rare word. A separate cipher would take .04 s more to compile.
        lane = jax.lax.iota(jnp.uint32, half + RARE_LANES)
        row = jax.lax.broadcasted_iota(jnp.uint32, (2, half), 0)
        # Without the barrier, XLA moves what is the same in every turn out of the loop, into separate kernels, and each
        # takes time to compile.
        varying = number, step, [*words], lane, row
        number_here, step_here, words_here, lane, row = jax.lax.optimization_barrier(varying)

        def draw():
            pair = number_here.astype(jnp.uint32) * np.uint32(half) + lane
            first, pair, stream, last = _cipher_input_blocks(step_here, pair, 0)
            behind = lane >= half
            block = first, jnp.where(behind, 1, pair), stream, jnp.where(behind, RARE, last)
            words = _fuse_into_one_kernel(threefry4x32(words_here, block))
            rare, words = words[0][half], [word[:half] for word in words]
            with jax.enable_x64(True):
                polar = jax.lax.optimization_barrier(radius_and_angle(words, rare))  # once for both numbers of a pair
                radius, theta = (jax.lax.broadcast(x, (2,)) for x in polar)
                return normal_from_polar(radius, theta, row > 0)

        normals = draw() if drawn else np.float64(0)
        high, *more = (
            jax.lax.dynamic_slice(x, (2 * number, 0), (2, half), allow_negative_indices=False) for x in parts(made)
        )
        of_chunk = round_to_grid(high, more[0] if more else None, normals, deviation)
        return jax.lax.dynamic_update_slice(made, of_chunk, (2 * number, 0), allow_negative_indices=False)

    def parts(made):
        return (made,) if low is None else (made, low)

    return jax.lax.fori_loop(0, len(high) // 2, make_chunk, high)


def _noisy_in_integers(words, step, deviation, high: jax.Array, low: jax.Array | None, chunks: int, drawn) -> jax.Array:
    """Does what `noisy_in_chunks` does, in integers. chunks: how many at once, a divisor of the number in `high`."""
    half, rare = high.shape[1], rare_tail_word(words, step)
    # On a TPU, an array in parts of 8 x 128 elements has the memory layout of a flat one, so no leaf is copied.
    parts = (half // 1024, 8, 128) if half % 1024 == 0 else (half,)
    rows = (chunks, 1, *parts)
    firsts, places = jax.lax.iota(jnp.uint32, chunks) * np.uint32(half), jax.lax.iota(jnp.uint32, half).reshape(parts)
    # Outside of the loop, where XLA would otherwise run a kernel for them in every turn.
    firsts, places = jax.lax.optimization_barrier((firsts, places))
    firsts = jax.lax.broadcast_in_dim(firsts, rows, (0,))

    def make_rows(number, made):
        pair = firsts + places[None, None] + number.astype(jnp.uint32) * np.uint32(chunks * half)
        polar = _blocks_and_polar_radii(words, step, deviation, pair, 0, rare) if drawn else None
        for second in (0, 1):
            start = number * chunks, second, *(0 for _ in parts)
            high = jax.lax.dynamic_slice(made, start, rows)
            more = None if low is None else jax.lax.dynamic_slice(low, start, rows)
            of_rows = _round_to_grid_in_integers(deviation, high, more, polar, jnp.full(rows, second == 1))
            made = jax.lax.dynamic_update_slice(made, of_rows, start)
        return made

    high, low = high.reshape(-1, 2, *parts), None if low is None else low.reshape(-1, 2, *parts)
    return jax.lax.fori_loop(0, len(high) // chunks, make_rows, high)


def _release_leaves_in_integers(
    drawing: tuple, highs, lows, places: tuple[StreamPosition, ...], devices: int, drawn: bool
) -> list:
    """Releases each leaf from the positions of its elements: all small leaves at once, and large ones by blocks.

    drawing: the words of the key, the step and the deviation.
    """
    words, step, deviation = drawing
    rare, lows = rare_tail_word(words, step), lows or [None] * len(highs)
    made = list(highs)

    def noisy(high, low, pair, second, stream) -> jax.Array:
        polar = _blocks_and_polar_radii(words, step, deviation, pair, stream, rare) if drawn else None
        return _round_to_grid_in_integers(deviation, high, low, polar, second)

    small = [number for number, high in enumerate(highs) if 0 < high.size < SMALL_LEAF]
    if small:
        each = [_pair_indices_of_leaf(places[n], highs[n].shape) for n in small]
        pair, second = (_concatenate_leaves([pairs[part] for pairs in each]) for part in (0, 1))
        stream = jnp.concatenate([jnp.full(highs[n].size, places[n].stream, jnp.uint32) for n in small])
        high, low = (
            None if leaves[0] is None else _concatenate_leaves([leaves[n] for n in small]) for leaves in (highs, lows)
        )
        ends = np.cumsum([highs[n].size for n in small])[:-1]
        for number, part in zip(small, jnp.split(noisy(high, low, pair, second, stream), ends), strict=True):
            made[number] = part.reshape(highs[number].shape)
    for number, (high, low, at) in enumerate(zip(highs, lows, places, strict=True)):
        if high.size >= SMALL_LEAF:

            def of_block(high, low, first, strides, at=at):
                return noisy(high, low, *_pair_indices_of_leaf(at, high.shape, first, strides), at.stream)

            made[number] = _apply_block_by_block(of_block, high, low, devices)
    return made


def _apply_block_by_block(of_block: Callable, high: jax.Array, low: jax.Array | None, devices: int) -> jax.Array:
    """Applies `of_block(high, low, first, strides)` to one block after another, in the memory of `high`.

    A block is a slice of one axis. If the number of devices divides that axis, it becomes two axes, the first for the
    devices, so that every device has its part of every block. first: the position of a block's first element in the
    leaf, uint32 (). strides: ints, the distance between neighbors along each axis.
    """
    shape, most = high.shape, LEAF_BLOCK * devices
    ways = []
    for axis, size in enumerate(shape[:-1] if len(shape) > 1 else shape):
        view = (*shape[:axis], devices, size // devices, *shape[axis + 1 :]) if size % devices == 0 else shape
        axis = axis + (view is not shape)
        length = max(1, most * view[axis] // high.size)
        ways.append((abs(max(length // 8 * 8, 1) * high.size / view[axis] - most), view, axis, length))
    _, view, axis, length = min(ways, key=lambda way: way[0])
    length = min(view[axis], max(length // 8 * 8, 1))
    strides = [math.prod(view[number + 1 :]) for number in range(len(view))]
    high, low = high.reshape(view), None if low is None else low.reshape(view)

    def make_block(number, made):
        number = jax.lax.optimization_barrier(number)
        first = jnp.minimum(number * length, view[axis] - length)
        before, *more = (
            jax.lax.dynamic_slice_in_dim(x, first, length, axis) for x in ((made,) if low is None else (made, low))
        )
        found = of_block(
            before, more[0] if more else None, first.astype(jnp.uint32) * np.uint32(strides[axis]), strides
        )
        if view[axis] % length:  # the last block overlaps the one before, with the same noise
            fresh = first + jax.lax.broadcasted_iota(jnp.int32, found.shape, axis) >= number * length
            found = jnp.where(fresh, found, before)
        return jax.lax.dynamic_update_slice_in_dim(made, found, first, axis)

    if length == view[axis]:
        return of_block(high, low, np.uint32(0), strides).reshape(shape)
    return jax.lax.fori_loop(0, -(-view[axis] // length), make_block, high).reshape(shape)


def _blocks_and_polar_radii(words, step, deviation, pair: jax.Array, stream: jax.Array | int, rare: jax.Array) -> tuple:
    """Returns the enciphered blocks of these pairs, and their `integer_normals.polar_radius`. The barriers split one
    kernel into three, which are small enough for a TPU's compiler."""
    block = jax.lax.optimization_barrier(threefry4x32(words, _cipher_input_blocks(step, pair, stream)))
    scale = (jax.lax.bitcast_convert_type(deviation, jnp.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    return block, jax.lax.optimization_barrier(integer_normals.polar_radius(block, rare, scale))


def _round_to_grid_in_integers(
    deviation, high: jax.Array, low: jax.Array | None, polar: tuple | None, second: jax.Array
):
    """`round_to_grid` in integers. polar: from `_blocks_and_polar_radii`, or None for no noise. second: bool."""
    noise = None if polar is None else integer_normals.normal_from_polar(polar[1], polar[0], second)
    exponent = (jax.lax.bitcast_convert_type(deviation, jnp.uint32) >> 23).astype(jnp.int32)
    made = integer_normals.round_to_grid(high, low, noise, exponent - np.int32(127 + GRID))
    return jnp.where(exponent == 0, high if low is None else high + low, made)


def _pair_indices_of_leaf(
    at: StreamPosition, shape: tuple[int, ...], first: ArrayLike = 0, strides: Sequence[int] = ()
) -> tuple[jax.Array, jax.Array]:
    """Returns the index of each element's pair, uint32, and whether it is the second of the pair, bool, like the leaf.

    first: for a block, its first element's position in the leaf, uint32 (). strides: those of the leaf's axes.
    """
    lax = jax.lax

    def every(value) -> jax.Array:
        return lax.full(shape, value, jnp.uint32)

    place = every(np.uint32(at.start) + first)
    for axis in range(len(shape)):
        stride = strides[axis] if strides else math.prod(shape[axis + 1 :])
        place = lax.add(place, lax.mul(every(stride), lax.broadcasted_iota(jnp.uint32, shape, axis)))
    chunk, place = lax.div(place, every(2 * at.half)), lax.rem(place, every(2 * at.half))
    second = lax.ge(place, every(at.half))
    return lax.add(lax.mul(chunk, every(at.half)), lax.rem(place, every(at.half))), second


def _draw_leaf_normals(words, step, at: StreamPosition, shape: tuple[int, ...], compact: bool = False) -> jax.Array:
    """Draws the normals of a leaf, float64 (shape). at: its place. compact: compile half as much, for one axis."""
    lax, (pair, second) = jax.lax, _pair_indices_of_leaf(at, shape)
    block, rare = threefry4x32(words, _cipher_input_blocks(step, pair, at.stream)), rare_tail_word(words, step)
    # The barriers keep a CPU from computing the cipher again for each word, and for each use of the radius. With them,
    # a GPU would write every word of it to memory, which is 8 times as much as the normals.
    barrier = lax.optimization_barrier if current_place().platform == "cpu" else lambda arrays: arrays
    block, rare = barrier((_fuse_into_one_kernel(block) if compact else block, rare))
    with jax.enable_x64(True):
        radius, theta = barrier(radius_and_angle(block, rare))
        return normal_from_polar(radius, theta, second)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _float32_normals(
    words, step, places: tuple[StreamPosition, ...], shapes: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    size = sum(map(math.prod, shapes))
    if size >= ONE_STREAM or not size:
        each = zip(places, shapes, strict=True)
        return [_draw_leaf_normals(words, step, at, shape).astype(jnp.float32) for at, shape in each]
    flat = _draw_leaf_normals(words, step, places[0], (size,), True).astype(jnp.float32)  # compiles in half of the time
    ends = [at.start for at in places[1:]] + [size]
    return [flat[at.start : end].reshape(shape) for at, end, shape in zip(places, ends, shapes, strict=True)]


def _cipher_input_blocks(step: jax.Array, pair: jax.Array, stream: jax.Array | int) -> list[jax.Array]:
    """Returns the four words of every pair's block before it is enciphered, uint32 like `pair`."""
    first = jax.lax.broadcast(step.astype(jnp.uint32) + np.uint32(1), pair.shape)
    return [first, pair, jnp.full_like(pair, stream), jnp.zeros_like(pair)]


def rare_tail_word(words, step: jax.Array) -> jax.Array:
    """Returns the word e of `normals.py` for one release, as a uint32 scalar."""
    return derive_key(words, step.astype(jnp.uint32) + np.uint32(1), RARE)[0]


def _fuse_into_one_kernel(arrays: list[jax.Array]) -> list[jax.Array]:
    """Makes a CPU compute these uint32 (n,) arrays in one kernel: as the results of one reduction, of every element
    with itself. Otherwise XLA repeats what they share for each array, which took a quarter of the time.
    """
    doubled = [jax.lax.broadcast_in_dim(x, (len(x), 2), (0,)) for x in arrays]
    zeros = [np.uint32(0)] * len(doubled)
    return jax.lax.reduce(doubled, zeros, lambda a, b: jax.tree.map(jax.lax.bitwise_or, a, b), (1,))


def release_and_noise(
    key: jax.Array, step: jax.Array | int, total: Callable[[Any], FloatPair], parts: Tree, deviation: jax.Array | float
) -> tuple[Tree, FloatPair]:
    """Returns `release` of the `FloatPair` `total(parts)`, and its SECRET noise: what was released minus that total.

    The release is bit for bit what `release` returns. The noise is a pair of float32 numbers.

    key: scalar key of the mechanism's "noise" stream. step: int (), below 2^31; two steps have independent noise.
    total: a function of `parts` alone, the same object at every call, because jax caches its trace. parts: a pytree.
    deviation: as for `release`.

    On a CPU, the total is computed once for both results. Calling `release` and subtracting is slower: XLA computes the
    total twice, and copies its parts to keep them. If noise depends on one earlier step, that took 2.2 times as long as
    independent noise, instead of 1.7 (benchmarks/correlated_steps.py).
    """
    if STAND_INS.value.release is not None:
        given = total(parts)
        released = release(key, step, given, deviation)
        with jax.enable_x64(True):
            return released, released_minus_total(released, given)
    require_exact_math()
    require_rows_apart()
    leaves, structure = jax.tree.flatten(jax.eval_shape(total, parts).high)
    how = total, stream_positions_of_leaves([leaf.shape for leaf in leaves]), current_place(), draws_noise(deviation)
    words, step = secret_words(key), refuse_to_compile_for_tpu(jnp.asarray(step))
    _require_key_per_device(words, jax.tree.leaves(parts))
    with jax.disable_jit(False):
        made = _release_and_noise(words, step, require_deviation(deviation), parts, *how)
    released, high, low = map(structure.unflatten, made)
    return released, FloatPair(high, low)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _release_and_noise(
    words, step, deviation, parts, total, places: tuple[StreamPosition, ...], place: Place, drawn: bool
) -> tuple:
    """Returns the leaves of `release_and_noise` as three lists: the release, and both parts of the noise."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(total, parts).high)]

    def rest(released, highs, lows) -> tuple:
        with enabling_float64("noise that is kept"):
            return released, *released_minus_total(released, FloatPair(highs, lows))

    def by_chunks(parts) -> tuple:
        def made() -> tuple[jax.Array, jax.Array]:
            high, low = (concatenate_into_rows(jax.tree.leaves(numbers), places) for numbers in total(parts))
            return high, low

        # The step is at least 0. XLA cannot recompute the result of a conditional.
        zeros = functools.partial(optax.tree.zeros_like, jax.eval_shape(made))
        high, low = jax.lax.cond(step >= 0, made, zeros)
        released = noisy_in_chunks(words, step, deviation, high, low, drawn)
        return rest(*(split_into_leaves(rows, step, places, shapes) for rows in (released, high, low)))

    def by_leaves(parts) -> tuple:
        highs, lows = (jax.tree.leaves(numbers) for numbers in total(parts))
        return rest(release_leaves(words, step, deviation, highs, lows, places, place, drawn), highs, lows)

    if place.devices > 1 or not 0 < sum(map(math.prod, shapes)) < ONE_STREAM:
        return by_leaves(parts)
    return jax.lax.platform_dependent(parts, cpu=by_chunks, default=by_leaves)


def count_normal_pairs(numbers: int) -> int:
    """Returns how many pairs of normals are drawn for `numbers` elements of one stream.

    Some pairs of the last chunk give one element instead of two, but each counts as a whole pair.
    """
    whole, rest = divmod(numbers, CHUNK_NUMBERS)
    return whole * (CHUNK_NUMBERS // 2) + min(rest, CHUNK_NUMBERS // 2) if whole else (numbers + 1) // 2


def count_numbers_with_cost(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of elements that the cost assumes for these shapes: enough to cover every pair drawn.

    In separate streams, the last chunk of a leaf may draw a pair for each element, so these elements count twice.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if len(sizes) > 1 and sum(sizes) >= ONE_STREAM:
        halves = (divmod(size, CHUNK_NUMBERS) for size in sizes)
        return sum(whole * CHUNK_NUMBERS + min(2 * rest, CHUNK_NUMBERS) for whole, rest in halves)
    return sum(sizes)


@contextlib.contextmanager
def collect_release_sizes() -> Iterator[list[int]]:
    """Yields a list that collects the `count_numbers_with_cost`, ints, of every release traced inside."""
    token = _COUNTED.set(found := [])
    try:
        yield found
    finally:
        _COUNTED.reset(token)


def report_release_size(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns the `count_numbers_with_cost` of a release, and reports it to `collect_release_sizes`."""
    numbers = count_numbers_with_cost(shapes)
    if (found := _COUNTED.get()) is not None:
        found.append(numbers)
    return numbers


def round_to_grid(high: jax.Array, low: jax.Array | None, normals: ArrayLike, deviation: jax.Array) -> jax.Array:
    """Returns gamma k of the module docstring, float32 like `high`. normals: g, float64. deviation: float32 ()."""
    bits = jax.lax.bitcast_convert_type(deviation, jnp.int32)
    exponent = jax.lax.shift_right_logical(bits, np.int32(23)) - np.int32(127 + GRID)
    with jax.enable_x64(True):
        gamma, grid = (_exact_power_of_two(sign * exponent) for sign in (1, -1))
        total = high.astype(jnp.float64)
        total = total if low is None else total + low.astype(jnp.float64)
        y = total * grid
        whole = jnp.floor(y)
        noise = jnp.floor((y - whole) + (deviation.astype(jnp.float64) * grid) * normals + 0.5)  # +0. and never -0.
        return ((whole + noise) * gamma).astype(jnp.float32)


def _exact_power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent exactly, as a float64 scalar. exponent: int32 (), at least -1022."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)
