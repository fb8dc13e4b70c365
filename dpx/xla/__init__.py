"""What XLA must be told: the order of computation, forms that it computes faster, and rows that stay apart.

`place.py` states for which devices a program is traced, `matrix_units.py` how they multiply matrices, and `jaxprs.py`
walks through a program's equations. A comment on XLA's behavior stands next to the code that works around it: here, and
in sums/clipped_sum.py, keys/normals.py, gradients/clipped_gradients.py, and rules.py, norms.py and engine.py of
gradients/ghost. Unless it says otherwise, it describes the CPU of jaxlib 0.10.2.
"""
