"""Computes the clipped sum of a batch, with a proof that rounding lets an example add barely more than its clip norm.

`rounding.py` holds the proof, its bounds, and sums as pairs of float32 numbers; `clipped_sum.py` adds rows in blocks
and microbatches, as the proof allows; `norms.py` computes norms that are never below the true ones. No other code adds
what examples contribute.
"""
