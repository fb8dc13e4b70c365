"""Dynamic DP-SGD: noise and clip norm that shrink (Du et al. 2021, arXiv:2111.00173)."""

from dpx.papers.dynamic_dp_sgd import claims
from dpx.papers.dynamic_dp_sgd.method import dynamic_dp_sgd

__all__ = ["claims", "dynamic_dp_sgd"]
