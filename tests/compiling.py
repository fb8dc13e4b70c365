"""How the tests compile: quickly, because compiling takes most of their time; `make nightly` as a user does."""

import functools
import gc
import os
import zlib
from typing import Any

import jax

AS_A_USER = "DPX_TESTS_AS_A_USER" in os.environ  # jax and XLA as they come: `make nightly`
# jaxlib 0.11.2 aborts when it is given the flags below, and a later jax may lack the functions that are replaced.
KNOWN = jax.__version_info__ < (0, 11)
SWITCH = KNOWN and not AS_A_USER
# The emitters take a third of the time to compile, splitting a program among threads a seventh, and preparing that a
# twentieth.
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if SWITCH else ""
FLAGS += " --xla_llvm_force_inline_before_split=false" if SWITCH else ""
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if SWITCH else {}  # compile options: as XLA compiles for a user


def begin(devices: int = 1) -> None:
    """In a process that a test starts, in which jax has not computed anything yet: it compiles as the tests do."""
    from dpx.xla.rows_apart import disable_row_mixing

    os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    disable_row_mixing()  # as `import dpx` does, which the server did before
    jax.config.update("jax_platforms", "cpu")
    hurry()


def hurry() -> None:
    """From now on, this process traces and lowers quickly.

    Tracing makes many objects, and few of them are garbage. With Python's thresholds, a seventh of the time of the
    tests is the search for it.
    """
    if AS_A_USER:
        return
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no equation says where it was written, which takes time
    gc.set_threshold(100_000, 20, 20)
    gc.freeze()
    _share_contexts()


def _share_contexts() -> None:
    """One MLIR context for all programs, and one MLIR function for all equal operations of all programs.

    A new context takes 4 ms and 1 MB, and jax keeps it as long as the program. jax writes each operation of a program
    as a function, which it copies to where the operation stands. That takes a seventh of the time of the tests. For
    each shape of `jnp.asarray`, jax compiles a program that returns its argument; here none is compiled.
    """
    if SWITCH:
        from jax._src.interpreters import mlir
        from jax._src.lax import lax

        lax.stage_p.def_impl(jax.device_put)
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
        mlir._cached_lowering_miss = _shared(mlir._cached_lowering_miss)


def keep_programs() -> None:
    """The last MOST_KEPT programs that this process compiled or read stay in memory, where equal ones are found again.

    jax keeps a compiled program as long as its function, and then on the disk alone: reading one takes 2 ms. To write
    one took 10 ms, of which a quarter was its compression, and is a twentieth at the lowest level. With
    COMPILED_STAYS_IN_MEMORY, none is written: in 14 files, writing took 14 s, and to compile again in each of them what
    another one had compiled would take 8 s. Processes that a test starts do not call this, and share what they write.
    """
    if SWITCH:
        from jax._src import compilation_cache as disk

        disk.compress_executable = functools.partial(zlib.compress, level=1)
        disk.decompress_executable = zlib.decompress
        read, write = disk.get_executable_and_time, disk.put_executable_and_time
        in_memory = "COMPILED_STAYS_IN_MEMORY" in os.environ

        def found(key, options, backend, devices):
            kept = KEPT.get(key)
            if kept is None or kept.local_devices() != [*devices]:
                kept, seconds = read(key, options, backend, devices)
                if kept is None:
                    return kept, seconds
            _keep(key, kept)
            return kept, 0

        def written(key, name, program, *arguments):
            _keep(key, program)
            if not in_memory:
                write(key, name, program, *arguments)

        disk.get_executable_and_time, disk.put_executable_and_time = found, written


KEPT: dict[str, Any] = {}  # programs by jax's keys of them; the last one used is at the end
MOST_KEPT = 1000


def _keep(key: str, program: Any) -> None:
    KEPT.pop(key, None)
    KEPT[key] = program
    if len(KEPT) > MOST_KEPT:
        del KEPT[next(iter(KEPT))]


def _shared(lower: Any) -> Any:
    """`lower(context, equation, key, ...)`, of which programs on one device share the results."""
    found: dict[Any, Any] = {}

    def lowered(context, equation, key, *arguments, **parameters):
        one_device = getattr(context.axis_context, "num_devices", 0) == 1 and not context.shape_poly_state.dim_vars
        if not one_device or not all(map(_is_plain, parameters.values())):
            return lower(context, equation, key, *arguments, **parameters)
        shared = key, context.lowering_parameters
        if shared in found:
            context.lowering_cache[key] = found[shared]
        else:
            entry = lower(context, equation, key, *arguments, **parameters)
            if not (entry.inline and not entry.const_args and _stands_alone(entry.func)):
                return entry
            found[shared] = entry
        return found[shared]

    return lowered


def _is_plain(parameter: Any) -> bool:
    """Whether a parameter of an operation holds no function and no program."""
    if isinstance(parameter, tuple):
        return all(map(_is_plain, parameter))
    return not (callable(parameter) or hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"))


def _stands_alone(function: Any) -> bool:
    """Whether a function calls no other, of its module or of the host."""
    from jaxlib.mlir import ir

    names: list[str] = []

    def visit(operation):
        names.append(operation.name)
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    plain = {name for name in names if name.startswith(("stablehlo.", "chlo."))} - {"stablehlo.custom_call"}
    return set(names) <= plain | {"func.func", "func.return"}
