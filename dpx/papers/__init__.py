"""The papers, one folder or file each: its methods, its coordinates and mechanisms, the proofs, and what it claims.

A paper stands on the rooms below and on no other paper, except `gep_sgd`, which freezes coordinates as `random_freeze`
does. Nothing below imports a paper, so you can delete its folder with its lines in `dpx/methods.py`,
`dpx/coordinates.py`, `dpx/mechanisms.py`, `dpx/strategies.py` and `dpx/catalog.py`. The cost of its mechanism,
a `dpx.accounting.PrivacyLoss`, is there too.
"""
