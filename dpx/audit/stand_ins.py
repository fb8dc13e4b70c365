"""Other functions in the place of `keys.release` and `keys.normal_like` while an audit traces a mechanism.

jax keeps what it traced for a jitted function. So if a mechanism calls one of its own, such as a jitted release, a run
after the audit would have the stand-in in place of the noise. `_AUDITED` keeps the traces of audits apart. And only
the thread of the audit sees the stand-in, because another one may trace a step meanwhile.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.sums import doubles
from dpx.sums.total import as_pair
from dpx.trees import Tree, split

_AUDITED = jax.make_user_context(default_value=False)
_ONE_AUDIT = threading.RLock()


@contextlib.contextmanager
def replacing(**functions: Callable) -> Iterator[None]:
    """Inside, `dpx.keys` has these functions in this thread, such as `release`: for a trace, never for a run.

    `release_and_rest` is then made of the given `release`.
    """
    if "release" in functions:
        functions["release_and_rest"] = functools.partial(_with_rest, functions["release"])
    with _ONE_AUDIT:
        originals, here = {name: getattr(keys, name) for name in functions}, threading.get_ident()

        def in_this_thread(name: str) -> Callable:
            def either(*given, **named):
                return (functions if threading.get_ident() == here else originals)[name](*given, **named)

            return either

        vars(keys).update({name: in_this_thread(name) for name in functions})
        try:
            with _AUDITED(True):
                yield
        finally:
            vars(keys).update(originals)


def drawing(draw: Callable) -> contextlib.AbstractContextManager[None]:
    """Inside, `keys.normal_like` is `draw(key, step, tree)`, and `keys.release` adds it to its sum in floating point,
    without the grid: for a trace, never for a run.
    """

    return replacing(normal_like=draw, release=functools.partial(_release, draw))


def _release(draw, key, step, total, deviation):
    high, low = as_pair(total)
    whole = high if low is None else jax.tree.map(jnp.add, high, low)
    return jax.tree.map(lambda s, n: s + deviation * n, whole, draw(key, step, whole))


def _with_rest(release, key, step, total, parts, deviation):
    given = total(parts)
    released = release(key, step, given, deviation)
    with jax.enable_x64(True):
        return released, doubles.less(released, given)


def without_grid(function: Callable) -> Callable:
    """`function`, whose releases add the noise in floating point, because two sums that differ by a rounding may be one
    cell apart on the grid. It must be traced anew.
    """

    def traced(*arguments):
        with drawing(keys.normal_like):
            return function(*arguments)

    return traced


def with_quick_noise(function: Callable) -> Callable:
    """`function` without the grid, and with `quick` in place of the noise of `keys.release`: to compare steps whose
    noise must be the same. Of the time to compile a small step, the cipher and the normals take two thirds.
    """

    def traced(*arguments):
        with replacing(release=functools.partial(_release, quick)):
            return function(*arguments)

    return traced


def quick(key: jax.Array, step: jax.Array | int, tree: Tree) -> Tree:
    """Numbers of mean 0 and about deviation 1, float32, in the shapes of `tree`, which the key, the step and their
    places determine: other ones for another key, step or place, and far from random.
    """
    high, *_, low = keys.words(key)
    place = jax.lax.iota(jnp.uint32, sum(leaf.size for leaf in jax.tree.leaves(tree)))
    factor = jnp.asarray(step).astype(jnp.uint32) * np.uint32(0x85EBCA6A) | np.uint32(1)
    bits = place * np.uint32(0x9E3779B1) + high + low
    bits = (bits ^ (bits >> np.uint32(15))) * factor
    bits = (bits ^ (bits >> np.uint32(13))) * (low | np.uint32(1))
    uniform = (bits ^ (bits >> np.uint32(16))).astype(jnp.float32) * np.float32(2.0**-31) - np.float32(1)
    return split(np.float32(3**0.5) * uniform, tree)
