"""What XLA needs to be told: the order of computation, sums over microbatches, and fast convolutions in loops; and how
sums and norms are computed so that their rounding is proved small (totals.py, norms.py, doubles.py; flags.py warns of
fast math).

A remark on what XLA does stands where the code avoids it: here, and in contributions.py, keys/normals.py,
gradients/microbatch_size.py, and rules.py, norms.py and engine.py of gradients/ghost. Unless
a remark says otherwise, it is about the CPU backend of jaxlib 0.10.2.
"""
