"""The clipped sum of the rows of a batch: one proof that rounding lets an example add little more than its clip norm.

`float_pair.py` has the proof, its bounds, and pairs of float32 numbers, also in float64; `clipped_sum.py` adds rows in
blocks and parts of a batch, as the proof allows; the norms of `norms.py` are never below the true ones. Nothing else
adds what examples contribute.
"""
