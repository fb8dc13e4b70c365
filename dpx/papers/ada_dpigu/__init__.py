"""AdaDPIGU: standardized, important coordinates (Zhang and Xie 2025, arXiv:2507.06525)."""

from dpx.papers.ada_dpigu.importance_mask import importance_mask, masked_params
from dpx.papers.ada_dpigu.method import ada_dpigu
from dpx.papers.ada_dpigu.standardized import standardized
from dpx.papers.ada_dpigu.top_fraction import top_fraction

__all__ = ["ada_dpigu", "importance_mask", "masked_params", "standardized", "top_fraction"]
