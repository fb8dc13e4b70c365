"""Other functions in the place of `keys.release` and `keys.normal_like` while an audit traces a mechanism.

jax keeps what it traced for a jitted function. So if a mechanism calls one of its own, such as a jitted release, a run
after the audit would have the stand-in in place of the noise. `_AUDITED` keeps the traces of audits apart. And only
the thread of the audit sees the stand-in, because another one may trace a step meanwhile.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from dpx import keys
from dpx.xla.totals import as_total

_AUDITED = jax.make_user_context(default_value=False)
_ONE_AUDIT = threading.RLock()


@contextlib.contextmanager
def _replaced(name: str, function: Callable) -> Iterator[None]:
    """Inside, `keys.<name>` is `function` in this thread, and as before in all others."""
    with _ONE_AUDIT:
        original, here = getattr(keys, name), threading.get_ident()

        def either(*given, **named):
            return (function if threading.get_ident() == here else original)(*given, **named)

        setattr(keys, name, either)
        try:
            with _AUDITED(True):
                yield
        finally:
            setattr(keys, name, original)


def releasing(release: Callable) -> contextlib.AbstractContextManager[None]:
    """Inside, `keys.release` is `release(key, step, total, deviation)`: for a trace, never for a run."""
    return _replaced("release", release)


@contextlib.contextmanager
def drawing(draw: Callable) -> Iterator[None]:
    """Inside, `keys.normal_like` is `draw(key, step, tree)`, and `keys.release` adds it to its sum in floating point,
    without the grid: for a trace, never for a run.
    """

    def release(key, step, total, deviation):
        high, low = as_total(total)
        whole = high if low is None else jax.tree.map(jnp.add, high, low)
        return jax.tree.map(lambda s, n: s + deviation * n, whole, draw(key, step, whole))

    with _replaced("normal_like", draw), releasing(release):
        yield


def without_grid(function: Callable) -> Callable:
    """`function`, whose releases add the noise in floating point, because two sums that differ by a rounding may be one
    cell apart on the grid. It must be traced anew.
    """

    def traced(*arguments):
        with drawing(keys.normal_like):
            return function(*arguments)

    return traced
