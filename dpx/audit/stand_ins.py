"""Other functions in the place of `keys.release` and `keys.normal_like` while an audit traces a mechanism.

jax keeps what it traced for a jitted function. So if a mechanism calls one of its own, such as a jitted release, a run
after the audit would have the stand-in in place of the noise. `_AUDITED` keeps the traces of audits apart.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from dpx import keys
from dpx.xla.totals import as_total

_AUDITED = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def releasing(release: Callable) -> Iterator[None]:
    """Inside, `keys.release` is `release(key, step, total, deviation)`: for a trace, never for a run."""
    original = keys.release
    keys.release = release
    try:
        with _AUDITED(True):
            yield
    finally:
        keys.release = original


@contextlib.contextmanager
def drawing(draw: Callable) -> Iterator[None]:
    """Inside, `keys.normal_like` is `draw(key, step, tree)`, and `keys.release` adds it to its sum in floating point,
    without the grid: for a trace, never for a run.
    """

    def release(key, step, total, deviation):
        high, low = as_total(total)
        whole = high if low is None else jax.tree.map(jnp.add, high, low)
        return jax.tree.map(lambda s, n: s + deviation * n, whole, draw(key, step, whole))

    original = keys.normal_like
    keys.normal_like = draw
    try:
        with releasing(release):
            yield
    finally:
        keys.normal_like = original


def without_grid(function: Callable) -> Callable:
    """`function`, whose releases add the noise in floating point, because two sums that differ by a rounding may be one
    cell apart on the grid. It must be traced anew.
    """

    def traced(*arguments):
        with drawing(keys.normal_like):
            return function(*arguments)

    return traced
