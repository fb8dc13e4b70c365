"""Functions that replace `keys.release` and `keys.normals_of_release` while an audit traces a mechanism."""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.keys.noise import STAND_INS
from dpx.sums.rounding import as_pair
from dpx.values import Tree, unflatten_vectors


def replacing_key_functions(**functions: Callable) -> contextlib.AbstractContextManager:
    """Replaces functions of `keys` by name, in this thread inside the context: for traces, never for runs.

    `keys.release_and_noise` then uses that of `release` too. Inside a replacement, the originals are back in place.
    """
    return STAND_INS(STAND_INS.value._replace(**functions))


def drawing_normals_by(draw: Callable) -> contextlib.AbstractContextManager:
    """Replaces `keys.normals_of_release` by `draw(key, step, tree)` inside the context, and makes `keys.release` add it
    to its sum in floating point, without the grid: for a trace, never for a run."""
    return replacing_key_functions(normals_of_release=draw, release=_release_adding_noise(draw))


@functools.lru_cache(64)  # the same object each time, because jax traces again for a new one
def _release_adding_noise(draw: Callable) -> Callable:
    def release(key, step, total, deviation):
        high, low = as_pair(total)
        whole = high if low is None else jax.tree.map(jnp.add, high, low)
        return jax.tree.map(lambda s, n: s + deviation * n, whole, draw(key, step, whole))

    return release


def without_grid(function: Callable) -> Callable:
    """Wraps `function` so that, when traced, releases add the noise in floating point. On the grid, sums that differ
    only by rounding may be one cell apart."""

    def trace_without_grid(*arguments):
        with drawing_normals_by(keys.normals_of_release):
            return function(*arguments)

    return trace_without_grid


def with_quick_noise(function: Callable) -> Callable:
    """Wraps `function` so that `keys.release` adds `quick_noise` without the grid, to compare steps whose noise must be
    the same. The cipher and the normals take two thirds of the time to compile a small step."""

    def trace_with_quick_noise(*arguments):
        with replacing_key_functions(release=_release_adding_noise(quick_noise)):
            return function(*arguments)

    return trace_with_quick_noise


def quick_noise(key: jax.Array, step: jax.Array | int, tree: Tree) -> Tree:
    """Returns float32 values of mean 0 and standard deviation about 1, in the shapes of `tree`. They depend on the key,
    the step and the position, but are far from random."""
    high, *_, low = keys.key_words(key)
    place = jax.lax.iota(jnp.uint32, sum(leaf.size for leaf in jax.tree.leaves(tree)))
    factor = jnp.asarray(step).astype(jnp.uint32) * np.uint32(0x85EBCA6A) | np.uint32(1)
    bits = place * np.uint32(0x9E3779B1) + high + low
    bits = (bits ^ (bits >> np.uint32(15))) * factor
    bits = (bits ^ (bits >> np.uint32(13))) * (low | np.uint32(1))
    uniform = (bits ^ (bits >> np.uint32(16))).astype(jnp.float32) * np.float32(2.0**-31) - np.float32(1)
    return unflatten_vectors(np.float32(3**0.5) * uniform, tree)
