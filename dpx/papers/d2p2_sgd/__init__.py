"""D2P2-SGD: random projections, automatic clipping and noise that falls (Jiang et al. 2025, arXiv:2509.09485)."""

from dpx.papers.d2p2_sgd.methods import clip_then_project, d2p2_sgd, d2p_sgd, dp2_sgd
from dpx.papers.d2p2_sgd.projections import random_projection

__all__ = ["clip_then_project", "d2p2_sgd", "d2p_sgd", "dp2_sgd", "random_projection"]
