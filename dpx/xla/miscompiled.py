"""A fault of XLA for CPUs that mixes rows, which `import dpx` turns off, and which a release refuses to run with.

jaxlib 0.10.2 hands some reductions to the library YNNPACK, which reads the numbers of other rows: in the batch of a
vmapped loss with two sums of products over up to 13 numbers, from a few thousand rows on. Then one example moves the
gradients and norms of others, which no clip bounds (https://github.com/jax-ml/jax/issues/39103, found in release 0.10.2
and mended before 0.12). Nothing of dpx could see it, so the reductions are kept from that library:
`XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce`, which a process must have before its first computation.
"""

import functools
import os

import jax
import jaxlib
import numpy as np

FLAG, OFF = "xla_cpu_experimental_ynn_fusion_type", "-reduce"
WRONG, RIGHT = (0, 10, 2), (0, 12)  # the first version of jaxlib with the fault, and one without it
ROWS, NUMBERS = 4096, 13


def is_suspected_version(version: str = jaxlib.__version__) -> bool:
    return WRONG <= tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < RIGHT


def disable_row_mixing() -> None:
    """Turns the fault off for this process and those that it starts, where XLA has not read its flags yet."""
    flags = os.environ.get("XLA_FLAGS", "")
    if is_suspected_version() and FLAG not in flags and flags.strip()[:1] in ("", "-"):  # else it names a file of flags
        os.environ["XLA_FLAGS"] = f"--{FLAG}={OFF} {flags}".strip()  # first: XLA stops at a word without a dash


@functools.cache
def require_rows_apart() -> None:
    """Raises ValueError if XLA mixes rows on the CPU of this process."""
    if is_suspected_version() and jax.default_backend() == "cpu" and has_row_mixing_fault():
        raise ValueError(
            f"jaxlib {jaxlib.__version__} mixes the rows of a batch on this CPU, so one example would move others "
            "without a bound: import dpx before JAX computes anything, without another "
            f"--{FLAG} in XLA_FLAGS, or install jaxlib 0.12"
        )


def has_row_mixing_fault() -> bool:
    """Whether a row of two sums sees another row, in the least program that is known to have the fault."""

    def sums(b, k, u, v):
        return (u[None] * b).sum(1) + (v[None] * k).sum((1, 2))

    shapes = (ROWS, NUMBERS), (ROWS, 4, NUMBERS), (NUMBERS,), (4, NUMBERS)
    b, k, u, v = (np.ones(shape, np.float32) for shape in shapes)
    b[1:], k[:] = 0, 0
    compiled = jax.jit(sums).lower(b, k, u, v).compile()  # a call could be traced into the step around it
    return bool(np.asarray(compiled(b, k, u, v))[1:].any())
