"""The clipped sum of per-example gradients, for a whole batch or one microbatch after another. Only this module sums
raw data, except for `dpx.gradients.ghost`, which computes the same sums without the gradients."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.sums.rounding import (
    FloatPair,
    add_pairs,
    count_blocks,
    is_float_pair,
    may_add_in_float32,
    most_float32_rows,
    most_float32_turns,
    pair_of_trees,
    sizes_of_blocks,
    with_low_part,
)
from dpx.values import Tree
from dpx.xla.matrix_units import FLOAT32, MatrixUnit
from dpx.xla.ordering import compute_after, opaque_false
from dpx.xla.place import current_place

# The largest norm of a gradient that contributes. The squares of larger ones, or their sums, would overflow float32.
LARGEST = 2.0**63
LONG_VECTOR = 2**14  # elements
SMALL_SUMS = 2**16  # elements: smaller sums of blocks are computed all at once, because a loop takes longer to compile
MOST_PARTS, SMALL_PARTS = 16, 2**12  # on a TPU: parts of the rows, and elements of a row; smaller rows are not split
REGISTER = 8  # rows in a TPU's register
AT_ONCE = 2**20  # SMALL_SUMS where a matrix unit rounds: a kernel there takes as long as 10^5 elements do
AT_ONCE_ON_A_GPU = 2**24  # a turn there has five kernels, and each waits until the one before it has ended
UNROLLED_MICROBATCHES = 64  # at most; compiling more takes longer than unrolling saves (benchmarks/step.py)
SEGMENT_NUMBERS = 2**24  # float32 numbers of gradients in one segment, 64 MiB (benchmarks/coordinates.py)
LARGEST_SEGMENTS = 8  # at most; a CPU compiles each separately
EXACT = jax.lax.Precision.HIGHEST  # float32 products, even where the hardware would round them


def sum_contributions(
    mechanism: Any, grads: Tree, state: Tree, included: jax.Array
) -> tuple[tuple[FloatPair, ...], Tree]:
    """Returns sum_i f(|z_i|) z_i for each factor f, over gradients [B, ...], and the norms |z_i|.

    mechanism: a `dpx.Mechanism`. state: its state. included: bool (B,).
    grads: shaped like the parameters, any real dtype, with the B examples on axis 0 of every leaf.

    Returns one `FloatPair` for each factor, shaped like the encoded gradient of one example; and the computed norms,
    float32 (B,) in each leaf, including those of excluded rows. An example contributes zero if it is not included, or
    if its norm is not finite or above LARGEST. Norms, factors and sums are float32, at full precision even where the
    hardware would round products, because a rounded product could exceed the bound.
    """

    def sum_encoded(rows):
        grads, included = rows

        encoded, norms, factors = jax.vmap(mechanism.contribute, (0, None))(grads, state)
        included &= norms_in_range(norms)

        def sum_group(factor, rows):
            factor = zero_excluded(factor, included)
            return jax.tree.map(lambda z: total_of_rows(lambda some: weighted_sum(*some), (factor, z)), rows)

        return tuple(pair_of_trees(jax.tree.map(sum_group, factor, encoded)) for factor in factors), norms

    if mechanism.supports_ghost_norms or mechanism.encode_whole_batch:
        return sum_encoded((grads, included))
    return sum_in_segments(sum_encoded, (grads, included))


def zero_excluded(rows: jax.Array, included: jax.Array) -> jax.Array:
    """Returns `rows`, (B, ...), with zeros where `included`, bool (B,), is False."""
    return jax.lax.select(repeat_to_shape(included, rows.shape), rows, jnp.zeros_like(rows))


def rows_with_excluded_zeroed(factors: jax.Array, rows: Tree) -> Tree:
    """Returns `rows`, (B, ...), with zeros where the factor, float32 (B,), is 0, because an excluded example may hold
    NaN. Call this for the rows of one block, because a loop over blocks would keep such a copy of all rows."""

    def select_rows(rows):
        return zero_excluded(rows, factors != 0) if jnp.issubdtype(rows.dtype, jnp.floating) else rows

    return jax.tree.map(select_rows, rows)


def repeat_to_shape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats `x` along the later axes of `shape`, in one operation where `x[:, None] * y` takes four."""
    return jax.lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def weighted_sum(factors: jax.Array, rows: jax.Array, *, apart: bool = False) -> jax.Array:
    """Returns sum_i f_i z_i, float32 (...). factors: float32 (B,), 0 for excluded rows. rows: float32 (B, ...), for B
    up to `most_float32_rows`; they are added in blocks, as in `dpx.sums.rounding`. apart: whether the rows are
    matrices that XLA has written one after another.

    XLA compiles a separate kernel for each product of a vector and a matrix, but compiles equal sums of vectors only
    once. On a CPU such a sum, a fused reduction, is slower than the product for long vectors, and much slower for
    larger arrays. The vectors of a bias are its layer's cotangents. The sum for the layer's weights also starts with
    the product of these and the factors, written the same way, because XLA compiles equal kernels twice if they differ
    in form.

    On other platforms all sums are reductions, limited by memory bandwidth, because a matrix unit would round the
    products. The sums of all blocks are computed at once there, because they are few compared with the rows.
    """
    on_cpu = current_place().platform == "cpu"
    if not on_cpu or (rows.ndim == 2 and rows.shape[1] <= LONG_VECTOR):

        def sum_block(some):
            return jnp.sum(
                functools.reduce(
                    jnp.add,
                    [scaled_rows(f, rows_with_excluded_zeroed(f, x)) for f, x in _split_for_tpu(*some, apart=apart)],
                ),
                0,
            )

        return sum_in_blocks(sum_block, (factors, rows), math.prod(rows.shape[1:]) if on_cpu else 0)
    rows = rows_with_excluded_zeroed(factors, rows)
    size, devices = len(rows), count_devices_of_rows(len(rows))
    blocks = count_blocks(size, devices)
    if blocks == 1 or devices > 1:
        product = functools.partial(jnp.tensordot, axes=1, precision=EXACT)
        return sum_in_blocks(lambda some: product(*some), (factors, rows), math.prod(rows.shape[1:]))
    # One product with a matrix whose rows hold the factors of each block, because XLA would copy slices. For few blocks
    # this is about as fast as the product with a vector, because both read all rows once.
    block_of = jnp.arange(size) * blocks // size
    in_block = block_of[None, :] == jnp.arange(blocks)[:, None]
    parts = jnp.tensordot(jnp.where(in_block, factors[None], 0), rows, 1, precision=EXACT)
    return jnp.sum(jax.lax.optimization_barrier(parts), 0)


def _split_for_tpu(factors: jax.Array, rows: jax.Array, *, apart: bool = False) -> list[tuple[jax.Array, jax.Array]]:
    """Splits the factors and rows of a block into parts of equal size, which a TPU adds elementwise, because it reads
    several arrays at a time: a sum along the rows alone takes 2.6 times the cycles. Rows that fit into one register may
    lie there side by side, unless they are `apart`; reading one row then takes as long as reading all."""
    large = current_place().platform == "tpu" and math.prod(rows.shape[1:]) >= SMALL_PARTS
    if not large or (len(rows) <= REGISTER and not apart) or (count := math.gcd(len(rows), MOST_PARTS)) == 1:
        return [(factors, rows)]
    return list(zip(*(jax.lax.split(x, [len(x) // count] * count) for x in (factors, rows)), strict=True))


def scaled_rows(factors: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns factors[i] * rows[i], float32 (B, ...), clamped to finite values. factors: float32 (B,). rows: finite,
    (B, ...). In `dpx.gradients.ghost`, rows are inputs or cotangents, and an input whose cotangent is 0 may have any
    size."""
    product = rows.astype(jnp.float32) * repeat_to_shape(factors, rows.shape)
    return jax.lax.clamp(np.finfo(np.float32).min, product, np.finfo(np.float32).max)


def norms_in_range(norms: Tree) -> jax.Array:
    """Which examples may contribute, bool (B,): all their norms, float32 (B,) in each leaf, are at most LARGEST."""
    return functools.reduce(jnp.logical_and, [norm <= LARGEST for norm in jax.tree.leaves(norms)])


def count_devices_of_rows(rows: int) -> int:
    """The number of devices over which the rows may be evenly sharded; 1 if they are not, or if there are too many."""
    place = current_place()
    devices = place.row_devices or place.devices
    even = devices > 1 and rows % devices == 0
    return devices if even and most_float32_rows(devices, place.matrix_unit) >= devices else 1


def total_of_rows(sum_few: Callable[[Tree], Tree], rows: Tree) -> FloatPair:
    """Adds all rows of a tree of arrays (r, ...). sum_few: computes the float32 sum of up to `most_float32_rows` rows.
    More rows are added part by part, with equally many from every device, so that no row moves between devices."""
    size = jax.tree.leaves(rows)[0].shape[0]
    devices = count_devices_of_rows(size)
    most = most_float32_rows(devices, current_place().matrix_unit)
    if size <= most:
        return FloatPair(sum_few(rows))
    each = size // devices
    width = math.ceil(each / math.ceil(each / (most // devices)))
    by_device = jax.tree.map(lambda x: x.reshape(devices, each, *x.shape[1:]), rows)

    def sum_part(some):
        return sum_few(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), some))

    return add_part_by_part(
        sum_part, by_device, width, width, add_pairs, axis=1, begin=lambda sums: with_low_part(FloatPair(sums))
    )


def add_part_by_part(
    sum_part: Callable[[Tree], Any],
    rows: Tree,
    first: int,
    width: int,
    add: Callable[[Any, Any], Any],
    *,
    axis: int = 0,
    begin: Callable[[Any], Any] = lambda total: total,
) -> Any:
    """Adds up `sum_part` of the `first` rows, then of `width` rows at a time in a loop, then of the remaining rows.
    rows: a tree of arrays, split along `axis`. add: (total, sum of a part) -> total. begin: turns the first sum into a
    total."""
    size = jax.tree.leaves(rows)[0].shape[axis]
    turns, left = divmod(size - first, width)

    def of_part(start, count):
        return sum_part(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count, axis), rows))

    def add_part(number, total):
        return add(total, of_part(first + number * width, width))

    total = jax.lax.fori_loop(0, turns, add_part, begin(of_part(0, first)))
    return add(total, of_part(size - left, left)) if left else total


def sum_in_blocks(sum_block: Callable[[Tree], Any], rows: Tree, numbers: int, unit: MatrixUnit = FLOAT32) -> Any:
    """The float32 sum of up to `most_float32_rows` rows. numbers: how many elements the sum has. sum_block: computes
    the float32 sum of up to `MOST_ROWS` rows, in any order, with the additions of `unit`."""
    size = jax.tree.leaves(rows)[0].shape[0]
    devices = count_devices_of_rows(size)
    blocks, small = count_blocks(size, devices, unit), AT_ONCE if unit.rounds_operands else SMALL_SUMS
    if unit.rounds_operands and current_place().platform in ("gpu", "cuda"):
        small = AT_ONCE_ON_A_GPU
    if unit.rounds_operands and 2 * blocks * numbers <= small:
        blocks = count_blocks(size, devices, unit, more=2.0)
    if blocks == 1:
        return sum_block(rows)
    if size % blocks == 0 and (devices > 1 or blocks * numbers <= small):
        parts = jax.vmap(sum_block)(jax.tree.map(lambda x: x.reshape(blocks, -1, *x.shape[1:]), rows))
        return jax.tree.map(lambda part: jnp.sum(part, 0), jax.lax.optimization_barrier(parts))
    # A loop keeps one block's sum in memory at a time. Without it, a step that adds three blocks writes twice the size
    # of the parameters more, and fresh memory takes longer than the additions (benchmarks/step.py).
    first, width = sizes_of_blocks(size, blocks, unit)
    if not current_place().matrix_unit.rounds_operands:
        return add_part_by_part(sum_block, rows, first, width, add_behind_barrier)
    # A matrix unit could start a block's product from the total, but not if the product is then multiplied. That
    # multiplication, by 1 for every element, and the addition form one kernel, which reads and writes the total once.
    one = jnp.where(opaque_false(jax.tree.leaves(rows)[-1]), jnp.float32(2), jnp.float32(1))
    return add_part_by_part(sum_block, rows, first, width, lambda *sums: jax.tree.map(lambda x, y: x + one * y, *sums))


def add_behind_barrier(total: Tree, more: Tree) -> Tree:
    """Adds two trees of float32 arrays; the barrier keeps a matrix product in `more` from adding onto `total`."""
    return jax.tree.map(jnp.add, total, jax.lax.optimization_barrier(more))


def sum_over_microbatches(
    function: Callable,
    rows: Tree,
    microbatch_size: int,
    *,
    unroll: bool = False,
    in_loop: Callable[[core.ClosedJaxpr], Callable] = core.jaxpr_as_fun,
    like: Tree = (),
) -> tuple[Tree, Tree]:
    """Calls `function(ordered, rows) -> (sums, outputs)` for every microbatch. Adds the sums and joins the outputs.

    `FloatPair`s are added in float32 within groups of microbatches. The groups are added as pairs, or in float32 where
    that is exact enough (`dpx.sums.rounding`).

    rows: a pytree of arrays with the examples on axis 0; `function` gets at most `microbatch_size` of them.
    ordered: returns its argument unchanged, but makes this microbatch start after the previous one.
    unroll: whether to compile up to 64 microbatches separately. XLA copies the inputs of a loop on a CPU.
    in_loop: turns the jaxpr of a microbatch into the function that a loop calls.
    like: arrays, some with the shapes of the sums. A loop starts from these and drops their values in its first turn.
    To start from zeros, XLA would compile a program for each shape.
    """
    size = jax.tree.leaves(rows)[0].shape[0]
    if 0 < size <= microbatch_size:
        return function(lambda tree: tree, rows)
    whole, rest = divmod(size, microbatch_size)
    full = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((microbatch_size, *leaf.shape[1:]), leaf.dtype), rows)
    traced, shapes = jax.make_jaxpr(lambda rows: function(lambda tree: tree, rows), return_shape=True)(full)
    outputs = [jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), shapes[1])]
    unit = current_place().matrix_unit
    group = most_float32_turns(microbatch_size, unit)

    def add_microbatch(groups, start):
        """Adds one more microbatch to the last of the `groups` of sums, or starts a new group."""
        some = jax.tree.map(lambda leaf: leaf[start : start + microbatch_size], rows)
        sums, output = function(lambda tree: compute_after([group[1] for group in groups], tree), some)
        outputs.append(output)
        if groups and groups[-1][0] < group:
            count, before = groups[-1]
            return [*groups[:-1], (count + 1, add_behind_barrier(before, sums))]
        return [*_merge_groups(groups), (1, sums)]

    def add_in_loop(sums, rows):
        results = in_loop(traced)(*jax.tree.leaves(rows))  # traced once, for the shapes and for the loop
        more, output = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return add_behind_barrier(sums, more), output

    def add_group(add, sums, rows):
        more, output = _scan_from_zeros(add_in_loop, shapes[0], rows, like)
        return add(sums, more), output

    # Pairs of (number of sums, their sum): one group for all but the last, and the last group.
    groups: list[tuple[float, Tree]] = []
    looped = whole > 1 and not (unroll and whole <= UNROLLED_MICROBATCHES)
    stop = whole * microbatch_size if looped else 0
    if looped:
        # As many in each group as the proof allows, but the same number in each, because the groups are a loop too.
        each = whole if whole <= group else next(n for n in range(group, 0, -1) if whole % n == 0)
        shape = (each, microbatch_size) if each == whole else (whole // each, each, microbatch_size)
        head = jax.tree.map(lambda leaf: leaf[:stop].reshape(*shape, *leaf.shape[1:]), rows)
        if each == whole:
            sums, stacked = _scan_from_zeros(add_in_loop, shapes[0], head, like)
        elif may_add_in_float32(microbatch_size, loops=(each, whole // each), unit=unit):
            sums, stacked = _scan_from_zeros(functools.partial(add_group, add_behind_barrier), shapes[0], head, like)
        else:
            sums, stacked = _scan_from_zeros(
                functools.partial(add_group, _plus_pairs), _with_low_parts(shapes[0]), head, like
            )
        groups = [(whole if each == whole else math.inf, sums)]
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(shape) :]), stacked))
    for start in range(stop, size, microbatch_size):
        groups = add_microbatch(groups, start)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
    sums = _merge_groups(groups)[0][1] if groups else none
    return sums, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _scan_from_zeros(
    add: Callable[[Tree, Tree], tuple[Tree, Tree]], shapes: Tree, rows: Tree, like: Tree
) -> tuple[Tree, Tree]:
    """Repeats `add(sums, rows) -> (sums, output)` from zeros of these shapes. Returns the sums and stacked outputs."""
    alike: dict[tuple, list[tuple]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        alike.setdefault((leaf.shape, leaf.dtype), []).append((path, leaf))

    def parameter_of_sum(path, x):
        """Among parameters of one shape, picks the one that the sum is for: they may be sharded differently."""
        fitting = alike.get((x.shape, x.dtype), [((), jnp.zeros(x.shape, x.dtype))])
        return next((leaf for of, leaf in fitting if path[len(path) - len(of) :] == of), fitting[0][1])

    begin = jax.tree_util.tree_map_with_path(parameter_of_sum, shapes)

    def body(carry, rows):
        begun, sums = carry
        sums, output = add(jax.tree.map(lambda total: jnp.where(begun, total, 0), sums), rows)
        return (jnp.bool_(True), sums), output

    (_, sums), outputs = jax.lax.scan(body, (jnp.bool_(False), begin), rows)
    return sums, outputs


def _merge_groups(groups: list) -> list:
    """Merges all groups into one group, to which no microbatch is added."""
    return groups if len(groups) < 2 else [(math.inf, _plus_pairs(groups[0][1], groups[1][1]))]


def _plus_pairs(sums: Tree, more: Tree) -> Tree:
    """Adds two trees: `FloatPair`s as pairs, other arrays as they are."""

    def add(one, other):
        return add_pairs(with_low_part(one), other) if is_float_pair(one) else one + other

    return jax.tree.map(add, sums, more, is_leaf=is_float_pair)


def _with_low_parts(sums: Tree) -> Tree:
    """Returns the sums, where every `FloatPair` has two float32 numbers for each coordinate."""
    return jax.tree.map(
        lambda one: FloatPair(one.high, one.high) if is_float_pair(one) else one, sums, is_leaf=is_float_pair
    )


def sum_in_segments(function: Callable[[Tree], tuple[Tree, Tree]], rows: Tree) -> tuple[Tree, Tree]:
    """Returns `function(rows) -> (sums, outputs)` of all examples, in up to 8 segments, one after another, if the batch
    is large. This saves memory, because what `function` computes for each example exists for one segment at a time. On
    several devices there are no segments, because the examples may be sharded over them."""
    segments = min(LARGEST_SEGMENTS, sum(leaf.size for leaf in jax.tree.leaves(rows)) // SEGMENT_NUMBERS)
    if segments < 2 or current_place().devices > 1:
        return function(rows)
    size = math.ceil(jax.tree.leaves(rows)[0].shape[0] / segments)

    def with_unrolling(unroll):
        return lambda rows: sum_over_microbatches(lambda o, rows: function(o(rows)), rows, size, unroll=unroll)

    return jax.lax.platform_dependent(rows, cpu=with_unrolling(True), default=with_unrolling(False))
