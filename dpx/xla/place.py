"""How many devices a program is written for. Norms and noise are computed otherwise if XLA may shard their arrays."""

import contextlib
import functools
import os
import warnings
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


@functools.cache
def warn_of_fast_math() -> None:
    """Warns once in a process, if the environment has XLA compile with fast math."""
    if fast_math(os.environ.get("XLA_FLAGS", "")):
        warnings.warn(
            "XLA_FLAGS has xla_cpu_enable_fast_math=true: XLA then removes the second float32 number of a sum, so an "
            "example can move it by more than is billed (docs/exact.md). Leave this flag out",
            stacklevel=3,
        )


def fast_math(flags: str) -> bool:
    """Whether these XLA_FLAGS turn on fast math on a CPU; of several, the last one counts."""
    on = False
    for flag in flags.split():
        name, _, value = flag.lstrip("-").partition("=")
        if name == "xla_cpu_enable_fast_math":
            on = value.strip("\"'").lower() not in ("false", "0")
    return on
