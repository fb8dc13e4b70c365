"""How the tests compile: `make test` compiles quickly, because compiling takes most of its time."""

# As XLA compiles for a user, in a process whose XLA_FLAGS turn the emitters off: they take a third of the time.
EMITTERS = {"xla_cpu_use_fusion_emitters": True}
