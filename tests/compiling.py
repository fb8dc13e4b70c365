"""How the tests compile: quickly, because compiling takes most of their time."""

import functools

import jax

SWITCH = jax.__version_info__ < (0, 11)  # jaxlib 0.11.2 does not know the flag any more, and aborts when it is given
# The emitters take a third of the time to compile, and splitting a program among threads a seventh.
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if SWITCH else ""
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if SWITCH else {}  # compile options: as XLA compiles for a user


def share_contexts() -> None:
    """One MLIR context for all programs. A new one takes 4 ms and 1 MB, and jax keeps it as long as the program."""
    if SWITCH:  # other versions of jax may not have this function of its own
        from jax._src.interpreters import mlir

        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
