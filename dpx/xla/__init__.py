"""What XLA must be told: the order of computation, forms that it computes faster, and rows that stay apart.

`place.py` says for which devices a program is traced, `matrix_units.py` how these multiply matrices, and `jaxprs.py`
walks through its equations. A remark on what XLA does stands where the code avoids it: here, and in
sums/clipped_sum.py, keys/normals.py, gradients/clipped_gradients.py, and rules.py, norms.py and engine.py of
gradients/ghost. Unless it says otherwise, it is about the CPU of jaxlib 0.10.2.
"""
