"""How the tests compile: quickly, because compiling takes most of their time."""

import jax

SWITCH = jax.__version_info__ < (0, 11)  # jaxlib 0.11.2 does not know the flag any more, and aborts when it is given
# The emitters take a third of the time to compile, and splitting a program among threads a seventh.
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if SWITCH else ""
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if SWITCH else {}  # compile options: as XLA compiles for a user
