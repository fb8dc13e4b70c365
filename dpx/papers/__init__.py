"""The papers, one folder or file each, with its methods, coordinates, mechanisms, costs, proofs and claims.

A paper imports the rest of dpx but no other paper, except `gep_sgd`, which freezes coordinates as `random_freeze` does.
Nothing else imports a paper, so you can delete its folder together with its lines in `dpx/methods.py`,
`dpx/coordinates.py`, `dpx/mechanisms.py`, `dpx/strategies.py` and `dpx/catalog.py`.
"""
