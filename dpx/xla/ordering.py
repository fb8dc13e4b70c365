"""Controls the order of computation: an array is computed only after others, so that both need not be in memory at
once, or only once for all its readers.

XLA orders a program by its data dependencies alone, and drops an optimization_barrier before it does. So
`compute_after` adds a dependency: it selects between the array and zeros by a predicate that needs the other arrays.
That predicate, `x > inf` for a float32 x, is False for every value, including infinities and NaN, so no value can
change."""

import functools

import jax
import jax.numpy as jnp

from dpx.values import Tree


def compute_after(first: Tree, tree: Tree) -> Tree:
    """Returns `tree` unchanged, but computed only after every array of `first`."""
    never = opaque_false(first)
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), tree)


def compute_after_each(made: list[Tree], array: jax.Array) -> jax.Array:
    """Computes `array` after each tree separately, because XLA shards arrays alike if they are read together."""
    return functools.reduce(lambda array, first: compute_after(first, array), made, array)


@jax.custom_vjp
def with_cotangent_computed_once(x: jax.Array) -> jax.Array:
    """Returns `x`, float (...), whose cotangent is unchanged, but computed once for all operations that read it. XLA
    would compute a sum again for each reader, and keep both terms until the last one, but it does not repeat a
    division, which here is by 1 for every element."""
    return x


def _pass_cotangent_on(_, cotangent: jax.Array) -> tuple[jax.Array]:
    one = jnp.ones_like(cotangent)
    return (cotangent / jnp.where(cotangent > jnp.inf, one + one, one),)


with_cotangent_computed_once.defvjp(lambda x: (x, None), _pass_cotangent_on)


def opaque_false(tree: Tree) -> jax.Array:
    """Returns False, bool (), computed from the elements of `tree`, if any, so that XLA cannot make it a constant."""
    by_rank: dict[int, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        if leaf.size:
            some = jax.lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).astype(jnp.float32)
            by_rank.setdefault(leaf.ndim, []).append(some)
    # No reshapes before the maxima: XLA would make a chain of scalar operations of them and move the reshapes over one
    # operation in each of up to 25 passes over the program, so a step of GPT-2 small compiled much longer.
    largest = [functools.reduce(jnp.maximum, some).reshape(()) for some in by_rank.values()]
    return functools.reduce(jnp.maximum, largest, jnp.float32(0)) > jnp.inf
