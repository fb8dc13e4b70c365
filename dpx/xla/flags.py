"""The flags of XLA that a proof assumes."""

import functools
import os
import warnings


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
