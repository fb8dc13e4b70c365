"""How the tests compile: quickly, because compiling takes most of their time."""

import jax

SWITCH = jax.__version_info__ < (0, 11)  # jaxlib 0.11.2 does not know the flag any more, and aborts when it is given
FLAGS = "--xla_cpu_use_fusion_emitters=false" if SWITCH else ""  # the emitters take a third of the time
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if SWITCH else {}  # compile options: as XLA compiles for a user
