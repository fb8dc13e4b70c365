"""A sum over the examples of a batch, with only some of them in memory at a time.

Both the mechanism and `dpx.gradients` import this file, because both sum over examples.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.trees import Tree
from dpx.xla.ordering import compute_after

UNROLLED_MICROBATCHES = 64  # at most; compiling more takes longer than unrolling saves (benchmarks/step.py)
SEGMENT_NUMBERS = 2**24  # float32 numbers of gradients in one segment, 64 MiB (benchmarks/coordinates.py)
LARGEST_SEGMENTS = 8  # at most; each is compiled on its own on a CPU


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

    rows: a pytree of arrays with the examples on axis 0; `function` gets at most `microbatch_size` of them.
    ordered: returns its argument unchanged, but makes this microbatch start after the previous one.
    unroll: compile every microbatch separately, up to 64 of them, instead of a loop, because on a CPU XLA copies the
        inputs of a loop.
    in_loop: from the jaxpr of a microbatch, the function that a loop calls.
    like: arrays, some of which may have the shapes of the sums. A loop begins with them in place of zeros, and drops
        their numbers in its first turn, because XLA would compile a program for the zeros of every shape.
    """
    size = jax.tree.leaves(rows)[0].shape[0]
    if 0 < size <= microbatch_size:
        return function(lambda tree: tree, rows)
    whole, rest = divmod(size, microbatch_size)
    full = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((microbatch_size, *leaf.shape[1:]), leaf.dtype), rows)
    traced, shapes = jax.make_jaxpr(lambda rows: function(lambda tree: tree, rows), return_shape=True)(full)
    sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[0])
    outputs = [jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), shapes[1])]

    def add_microbatch(sums, start, stop):
        some = jax.tree.map(lambda leaf: leaf[start:stop], rows)
        more, output = function(lambda tree: compute_after(sums, tree), some)
        outputs.append(output)
        return jax.tree.map(jnp.add, sums, more)

    if whole <= 1 or (unroll and whole <= UNROLLED_MICROBATCHES):
        for number in range(whole):
            sums = add_microbatch(sums, number * microbatch_size, (number + 1) * microbatch_size)
    else:

        def body(carry, rows):
            begun, sums = carry
            results = in_loop(traced)(*jax.tree.leaves(rows))  # traced once, for the shapes and for the loop
            more, output = jax.tree.unflatten(jax.tree.structure(shapes), results)
            sums = jax.tree.map(lambda total, more: jnp.where(begun, total, 0) + more, sums, more)
            return (jnp.bool_(True), sums), output

        stop, shape = whole * microbatch_size, (whole, microbatch_size)
        head = jax.tree.map(lambda leaf: leaf[:stop].reshape(*shape, *leaf.shape[1:]), rows)
        alike = {(leaf.shape, leaf.dtype): leaf for leaf in jax.tree.leaves(like)}
        sums = jax.tree.map(lambda zeros: alike.get((zeros.shape, zeros.dtype), zeros), sums)
        (_, sums), stacked = jax.lax.scan(body, (jnp.bool_(False), sums), head)
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked))
    if rest:
        sums = add_microbatch(sums, size - rest, size)
    return sums, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def sum_in_segments(function: Callable[[Tree], tuple[Tree, Tree]], rows: Tree) -> tuple[Tree, Tree]:
    """`function(rows) -> (sums, outputs)` over the examples; large batches in up to 8 segments, one after another.

    The segments save memory, because the arrays that `function` computes for each example exist for one segment at a
    time. On several devices there are no segments, because the examples may be sharded over the devices.
    """
    segments = min(LARGEST_SEGMENTS, sum(leaf.size for leaf in jax.tree.leaves(rows)) // SEGMENT_NUMBERS)
    if segments < 2 or jax.device_count() > 1:
        return function(rows)
    size = math.ceil(jax.tree.leaves(rows)[0].shape[0] / segments)

    def with_unrolling(unroll):
        return lambda rows: sum_over_microbatches(lambda o, rows: function(o(rows)), rows, size, unroll=unroll)

    return jax.lax.platform_dependent(rows, cpu=with_unrolling(True), default=with_unrolling(False))
