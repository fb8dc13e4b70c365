"""Where a program runs, which decides how it adds, rounds and draws: its platform, its devices, and their memory.

A step may be traced for another place, such as a TPU or eight devices. A mechanism, a release and a norm depend on the
place, but their signatures, which users write too, do not name it. So it is part of jax's own context of a trace: only
one thread sees it, and jax keeps the traces of a jitted function for two places apart.
"""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.extend import core
from jax.interpreters import batching, mlir

from dpx.xla.matrix_units import MatrixUnit, matrix_unit_of

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
_TRACED_FOR = jax.make_user_context(default_value=None)


@dataclass(frozen=True)
class Place:
    """The platform, devices and memory that a program is traced for.

    platform: one of PLATFORMS
    devices: int, in all processes. With several, XLA may shard every array
    row_devices: int, how many of them the rows of a batch are spread over; None if it may be all
    memory: bytes that microbatches may fill, or None for no limit; "own" means what `device_memory_bytes` finds
    """

    platform: str
    devices: int
    row_devices: int | None = None
    memory: int | None | Literal["own"] = "own"

    @property
    def matrix_unit(self) -> MatrixUnit:
        """The unit that multiplies matrices there."""
        return matrix_unit_of(self.platform)

    @property
    def device_memory_bytes(self) -> int | None:
        """Bytes of memory on the device that holds all examples; None if they may be on several devices, or if the
        program is traced for a platform other than this process's, or on Windows."""
        if self.memory != "own":
            return self.memory
        own = jax.default_backend()
        if self.platform not in (PLATFORMS[1:4] if own == "gpu" else (own,)) or self.devices > 1:
            return None
        stats = jax.local_devices()[0].memory_stats()
        if stats and "bytes_limit" in stats:
            return stats["bytes_limit"]
        known = self.platform == "cpu" and hasattr(os, "sysconf")  # Windows lacks it
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None


def current_place() -> Place:
    """The place that programs are traced for now: `tracing_for_place`'s, or by default all devices of all processes."""
    return _TRACED_FOR.value or Place(jax.default_backend(), jax.device_count())


def tracing_for_place(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which programs are traced for `current_place()` with these fields of `Place` changed. They must then
    run in such a place, unless they are only compiled or compared."""
    place = dataclasses.replace(current_place(), **changes)
    return contextlib.nullcontext() if place == current_place() else _TRACED_FOR(place)


def full_precision() -> contextlib.AbstractContextManager[None]:
    """A context in which matrix units compute float32 products, for programs that are compared with each other: GPU
    kernels that round differ from program to program, by up to 1e-3 of a gradient."""
    rounds = current_place().matrix_unit.rounds_operands
    return jax.default_matmul_precision("highest") if rounds else contextlib.nullcontext()


def enabling_float64(what: str) -> contextlib.AbstractContextManager[None]:
    """Like `jax.enable_x64`, for computations that need IEEE's float64. what: their name, for an error message. Raises
    as `require_ieee_float64` does."""
    require_ieee_float64(what)
    return jax.enable_x64(True)


def require_ieee_float64(what: str) -> None:
    """Raises ValueError for a TPU, whose float64 is a pair of float32 numbers, for which nothing is proved.

    what: the name of what needs float64. A mechanism's `init` checks this, so that a run fails before its first step.
    """
    if current_place().platform == "tpu":
        raise ValueError(f"{what} must be computed in IEEE's float64, which a TPU lacks: train on a CPU or a GPU")


_AWAY_FROM_TPUS = core.Primitive("away_from_tpus")
_AWAY_FROM_TPUS.def_impl(lambda x: x)
_AWAY_FROM_TPUS.def_abstract_eval(lambda x: x)
batching.primitive_batchers[_AWAY_FROM_TPUS] = lambda given, axes: (_AWAY_FROM_TPUS.bind(*given), axes[0])


def _lower_away_from_tpus(context, x):
    if "tpu" in (context.platforms or context.module_context.platforms):
        raise ValueError(
            'a step that is compiled for a TPU must be traced for one: give platform="tpu" to private_updates, because '
            "its noise is drawn in another way there (docs/loops.md#a-program-for-another-platform)"
        )
    return [x]


mlir.register_lowering(_AWAY_FROM_TPUS, _lower_away_from_tpus)


def refuse_to_compile_for_tpu(x: jax.Array) -> jax.Array:
    """Returns `x`. If this is not traced for a TPU, compiling the program for one raises ValueError."""
    return x if current_place().platform == "tpu" else _AWAY_FROM_TPUS.bind(x)


def require_exact_math() -> None:
    """Raises ValueError if the environment makes XLA compile with fast math for a CPU, and the place is one."""
    if current_place().platform == "cpu" and has_fast_math_flag(flags_in_variable("XLA_FLAGS")):
        raise ValueError(
            "XLA_FLAGS must not have xla_cpu_enable_fast_math=true: XLA then removes the second float32 number of a "
            "sum, so an example can move it by more than the cost counts (docs/exact.md). Leave this flag out"
        )


def flags_in_variable(variable: str) -> list[str]:
    """The flags in an environment variable, or in the file that it names."""
    text = os.environ.get(variable, "").strip()
    return (Path(text).read_text() if not text.startswith("-") and os.path.isfile(text) else text).split()


def has_fast_math_flag(flags: list[str]) -> bool:
    """Whether these flags of XLA turn on fast math on a CPU; the last of several counts."""
    on = False
    for flag in flags:
        name, _, value = flag.lstrip("-").partition("=")
        if name == "xla_cpu_enable_fast_math":
            on = value.strip("\"'").lower() not in ("false", "0")
    return on
