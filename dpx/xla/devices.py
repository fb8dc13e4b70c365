"""How many devices a program is written for. Norms and noise are computed otherwise if XLA may shard their arrays."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_COUNT: ContextVar[int | None] = ContextVar("devices of the program", default=None)


def device_count() -> int:
    """`jax.device_count()`, of all processes; or the number of `traced_for`."""
    return _COUNT.get() or jax.device_count()


@contextlib.contextmanager
def traced_for(devices: int) -> Iterator[None]:
    """While it is open, programs are traced for another number of devices: to compare them, not to run them.

    A function that is jitted once must take `device_count()` as a static argument, because jax keeps its trace.
    """
    token = _COUNT.set(devices)
    try:
        yield
    finally:
        _COUNT.reset(token)
