"""Gradient embedding perturbation, GEP (Yu et al. 2021, arXiv:2102.12677)."""

from dpx.papers.gep_sgd.gradient_embedding import gradient_embedding, public_subspace
from dpx.papers.gep_sgd.method import gep_sgd

__all__ = ["gep_sgd", "gradient_embedding", "public_subspace"]
