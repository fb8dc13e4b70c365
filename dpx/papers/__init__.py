"""The papers, one folder or file each: its methods, its coordinates and mechanisms, the proofs, and what it claims.

A paper stands on the rooms below and on no other paper. The one exception is `gep_sgd`, which freezes coordinates as
`random_freeze` does. Nothing below imports a paper, so a folder can be deleted with its lines in `dpx/methods.py`,
`dpx/coordinates.py`, `dpx/mechanisms/__init__.py`, `dpx/strategies.py` and `dpx/catalog.py`.

Each has the cost of its mechanism too, a `dpx.accounting.Loss`.
"""
