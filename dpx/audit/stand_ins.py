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
from dpx.keys.noise import normal_like
from dpx.xla.totals import as_total

_AUDITED = jax.make_user_context(default_value=False)
_ONE_AUDIT = threading.RLock()


@contextlib.contextmanager
def replacing(**functions: Callable) -> Iterator[None]:
    """Inside, `dpx.keys` has these functions in this thread, such as `release`: for a trace, never for a run."""
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

    def release(key, step, total, deviation, *, weights=(1.0,)):
        high, low = as_total(total)
        whole = high if low is None else jax.tree.map(jnp.add, high, low)
        noise = draw(key, step, whole)
        for back, weight in enumerate(weights[1:], start=1):  # past noise is what it was
            kept = jnp.where(step >= back, weight, 0.0)
            noise = jax.tree.map(lambda n, p: n + kept * p, noise, normal_like(key, step - back, whole))  # noqa: B023
        return jax.tree.map(lambda s, n: s + deviation * n, whole, noise)

    return replacing(normal_like=draw, release=release)


def without_grid(function: Callable) -> Callable:
    """`function`, whose releases add the noise in floating point, because two sums that differ by a rounding may be one
    cell apart on the grid. It must be traced anew.
    """

    def traced(*arguments):
        with drawing(keys.normal_like):
            return function(*arguments)

    return traced
