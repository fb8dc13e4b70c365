"""A sum over the examples of a batch, with only some of them in memory at a time."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.sums.float_pair import FloatPair, add_pairs, is_float_pair, may_add_in_float32, most_float32_turns, with_low
from dpx.values import Tree
from dpx.xla.ordering import compute_after
from dpx.xla.place import current_place

UNROLLED_MICROBATCHES = 64  # at most; compiling more takes longer than unrolling saves (benchmarks/step.py)
SEGMENT_NUMBERS = 2**24  # float32 numbers of gradients in one segment, 64 MiB (benchmarks/coordinates.py)
LARGEST_SEGMENTS = 8  # at most; a CPU compiles each separately


def sum_over_microbatches(
    function: Callable,
    rows: Tree,
    microbatch_size: int,
    *,
    unroll: bool = False,
    in_loop: Callable[[core.ClosedJaxpr], Callable] = core.jaxpr_as_fun,
    like: Tree = (),
) -> tuple[Tree, Tree]:
    """Calls `function(ordered, rows) -> (sums, outputs)` for every microbatch; adds the sums, concatenates the outputs.

    `FloatPair`s are added in float32 within groups of microbatches, and the groups as pairs, or in float32 too where
    that is exact enough: see `dpx.sums.float_pair`.

    rows: a pytree of arrays with the examples on axis 0; `function` gets at most `microbatch_size` of them.
    ordered: returns its argument unchanged, but makes this microbatch start after the previous one.
    unroll: compile up to 64 microbatches separately instead of in a loop, whose inputs XLA copies on a CPU.
    in_loop: makes, from the jaxpr of a microbatch, the function that a loop calls.
    like: arrays, some with the shapes of the sums. A loop starts from them instead of from zeros, for which XLA would
        compile a program of each shape, and drops their numbers in its first turn.
    """
    size = jax.tree.leaves(rows)[0].shape[0]
    if 0 < size <= microbatch_size:
        return function(lambda tree: tree, rows)
    whole, rest = divmod(size, microbatch_size)
    full = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((microbatch_size, *leaf.shape[1:]), leaf.dtype), rows)
    traced, shapes = jax.make_jaxpr(lambda rows: function(lambda tree: tree, rows), return_shape=True)(full)
    outputs = [jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), shapes[1])]
    unit = current_place().unit
    group = most_float32_turns(microbatch_size, unit)

    def add_microbatch(groups, start):
        """`groups` of sums, with one more microbatch in the last of them, or in a new one."""
        some = jax.tree.map(lambda leaf: leaf[start : start + microbatch_size], rows)
        sums, output = function(lambda tree: compute_after([group[1] for group in groups], tree), some)
        outputs.append(output)
        if groups and groups[-1][0] < group:
            count, before = groups[-1]
            return [*groups[:-1], (count + 1, _add_after(before, sums))]
        return [*_sum_of_groups(groups), (1, sums)]

    def add_in_loop(sums, rows):
        results = in_loop(traced)(*jax.tree.leaves(rows))  # traced once, for the shapes and for the loop
        more, output = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return _add_after(sums, more), output

    def add_group(add, sums, rows):
        more, output = _sum_in_loop(add_in_loop, shapes[0], rows, like)
        return add(sums, more), output

    # (how many sums, their sum): the last group, and one for all before it
    groups: list[tuple[float, Tree]] = []
    looped = whole > 1 and not (unroll and whole <= UNROLLED_MICROBATCHES)
    stop = whole * microbatch_size if looped else 0
    if looped:
        # As many in each group as the proof allows, but equally many in all, because the groups are a loop too.
        each = whole if whole <= group else next(n for n in range(group, 0, -1) if whole % n == 0)
        shape = (each, microbatch_size) if each == whole else (whole // each, each, microbatch_size)
        head = jax.tree.map(lambda leaf: leaf[:stop].reshape(*shape, *leaf.shape[1:]), rows)
        if each == whole:
            sums, stacked = _sum_in_loop(add_in_loop, shapes[0], head, like)
        elif may_add_in_float32(microbatch_size, loops=(each, whole // each), unit=unit):
            sums, stacked = _sum_in_loop(functools.partial(add_group, _add_after), shapes[0], head, like)
        else:
            sums, stacked = _sum_in_loop(functools.partial(add_group, _plus_pairs), _with_low(shapes[0]), head, like)
        groups = [(whole if each == whole else math.inf, sums)]
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(shape) :]), stacked))
    for start in range(stop, size, microbatch_size):
        groups = add_microbatch(groups, start)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
    sums = _sum_of_groups(groups)[0][1] if groups else none
    return sums, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _sum_in_loop(
    add: Callable[[Tree, Tree], tuple[Tree, Tree]], shapes: Tree, rows: Tree, like: Tree
) -> tuple[Tree, Tree]:
    """The sums, of these shapes, and the stacked outputs of `add(sums, rows) -> (sums, output)`, in a loop from 0."""
    alike: dict[tuple, list[tuple]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        alike.setdefault((leaf.shape, leaf.dtype), []).append((path, leaf))

    def first(path, x):
        """Of two parameters of one shape, the one that is summed, because they may be sharded differently."""
        fitting = alike.get((x.shape, x.dtype), [((), jnp.zeros(x.shape, x.dtype))])
        return next((leaf for of, leaf in fitting if path[len(path) - len(of) :] == of), fitting[0][1])

    begin = jax.tree_util.tree_map_with_path(first, shapes)

    def body(carry, rows):
        begun, sums = carry
        sums, output = add(jax.tree.map(lambda total: jnp.where(begun, total, 0), sums), rows)
        return (jnp.bool_(True), sums), output

    (_, sums), outputs = jax.lax.scan(body, (jnp.bool_(False), begin), rows)
    return sums, outputs


def _sum_of_groups(groups: list) -> list:
    """The sum of all groups, as one group to which no microbatch is added."""
    return groups if len(groups) < 2 else [(math.inf, _plus_pairs(groups[0][1], groups[1][1]))]


def _add_after(sums: Tree, more: Tree) -> Tree:
    """The sum of two. The barrier keeps matrix products from starting with the sum so far."""
    return jax.tree.map(jnp.add, sums, jax.lax.optimization_barrier(more))


def _plus_pairs(sums: Tree, more: Tree) -> Tree:
    """The sum of two: `FloatPair`s as two float32 numbers, other arrays as they are."""

    def add(one, other):
        return add_pairs(with_low(one), other) if is_float_pair(one) else one + other

    return jax.tree.map(add, sums, more, is_leaf=is_float_pair)


def _with_low(sums: Tree) -> Tree:
    """The sums, with two numbers for each coordinate of every `FloatPair`."""
    return jax.tree.map(
        lambda one: FloatPair(one.high, one.high) if is_float_pair(one) else one, sums, is_leaf=is_float_pair
    )


def sum_in_segments(function: Callable[[Tree], tuple[Tree, Tree]], rows: Tree) -> tuple[Tree, Tree]:
    """`function(rows) -> (sums, outputs)` over the examples; large batches in up to 8 segments, one after another. This
    saves memory, because what `function` computes for each example exists for one segment at a time. On several devices
    there are no segments, because the examples may be sharded over them."""
    segments = min(LARGEST_SEGMENTS, sum(leaf.size for leaf in jax.tree.leaves(rows)) // SEGMENT_NUMBERS)
    if segments < 2 or current_place().devices > 1:
        return function(rows)
    size = math.ceil(jax.tree.leaves(rows)[0].shape[0] / segments)

    def with_unrolling(unroll):
        return lambda rows: sum_over_microbatches(lambda o, rows: function(o(rows)), rows, size, unroll=unroll)

    return jax.lax.platform_dependent(rows, cpu=with_unrolling(True), default=with_unrolling(False))
