"""Random and ranked freeze: only some coordinates are trained (Zhu and Blaschko 2021, arXiv:2112.00845)."""

from dpx.papers.random_freeze.methods import random_freeze_sgd, ranked_freeze_sgd
from dpx.papers.random_freeze.random_freeze import random_freeze
from dpx.papers.random_freeze.ranked_freeze import ranked_freeze
from dpx.papers.random_freeze.sparse_updates import SparseUpdates, sparse_density, sparse_pack, sparse_unpack

__all__ = [
    "SparseUpdates",
    "random_freeze",
    "random_freeze_sgd",
    "ranked_freeze",
    "ranked_freeze_sgd",
    "sparse_density",
    "sparse_pack",
    "sparse_unpack",
]
