"""A batch worked on a part at a time, with only one part in memory."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

LARGEST_UNROLL = 64  # parts; beyond it the compile time outweighs what unrolling gains


def sum_over_parts(function: Callable, rows: Tree, part_size: int, *, unroll: bool) -> tuple[Tree, Tree]:
    """`function(wait, rows) -> (sums, outputs)`, its sums added and its outputs concatenated over parts of the rows.

    wait: a function that gives back the arrays it is given; what a part makes from them is made after the part before.
    unroll: rather than loop, unless there are too many parts. On a CPU, XLA is slow at convolutions inside a loop, and
        copies what goes into one.
    """
    size = jax.tree.leaves(rows)[0].shape[0]
    if 0 < size <= part_size:
        return function(lambda tree: tree, rows)
    whole, rest = divmod(size, part_size)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), rows)
    sums, nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda rows: function(lambda tree: tree, rows), one),
    )
    outputs = [jax.tree.map(lambda leaf: leaf[:0], nothing)]

    def part(sums, start, stop):
        more, output = function(lambda tree: after(sums, tree), jax.tree.map(lambda leaf: leaf[start:stop], rows))
        outputs.append(output)
        return jax.tree.map(jnp.add, sums, more)

    if whole <= 1 or (unroll and whole <= LARGEST_UNROLL):
        for number in range(whole):
            sums = part(sums, number * part_size, (number + 1) * part_size)
    else:

        def body(sums, rows):
            more, output = function(lambda tree: tree, rows)
            return jax.tree.map(jnp.add, sums, more), output

        head = jax.tree.map(lambda leaf: leaf[: whole * part_size].reshape(whole, part_size, *leaf.shape[1:]), rows)
        sums, stacked = jax.lax.scan(body, sums, head)
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked))
    if rest:
        sums = part(sums, size - rest, size)
    return sums, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def map_parts(function: Callable, rows: Tree, part_size: int, anything: jax.Array) -> Tree:
    """`jax.vmap(function)(rows)`, floats, by a loop over parts of the rows.

    anything: an array of the program's arguments; what it holds does not matter.
    The loop is a branch that is always taken, which XLA cannot know: for what a loop gives it makes room before
    anything else in the program, and for what a branch gives when that is due.
    """
    size = jax.tree.leaves(rows)[0].shape[0]
    part_size = min(part_size, size)
    shapes = jax.eval_shape(jax.vmap(function), rows)

    def nothing(rows):
        return jax.tree.map(lambda out: jnp.full(out.shape, jnp.nan, out.dtype), shapes)

    def loop(rows):
        def body(number, made):
            start = jnp.minimum(number * part_size, size - part_size)  # the last part may overlap the one before
            part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, part_size), rows)

            def put(made, part):
                return jax.lax.dynamic_update_slice_in_dim(made, part, start, 0)

            return jax.tree.map(put, made, jax.vmap(function)(part))

        return jax.lax.fori_loop(0, math.ceil(size / part_size), body, nothing(rows))

    return jax.lax.cond(_never(anything), nothing, loop, rows)


def after(made: Tree, tree: Tree) -> Tree:
    """`tree`, unchanged, but had only once every array of `made` is there.

    By a dependency that is never used, which XLA cannot know; it drops an optimization_barrier before it schedules.
    """
    never = _never(made)
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), tree)


def _never(tree: Tree) -> jax.Array:
    """False, which XLA cannot know before it has the arrays of `tree`."""
    some = [leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(tree) if leaf.size]
    return jnp.greater(sum(some, jnp.float32(0)), jnp.inf)
