"""The papers' methods: mechanisms, and compositions of a mechanism with coordinates. Each paper has a file or folder.

dp_sgd          DP-SGD (Abadi et al. 2016), which the other papers change: mechanism/dp_sgd.py
dynamic_dp_sgd  noise and clip norm that shrink (Dynamic DP-SGD, Du et al. 2021)
random_freeze   random_freeze_sgd and ranked_freeze_sgd (Zhu and Blaschko 2021)
gep_sgd         gradient embedding perturbation (Yu et al. 2021)
dice_sgd        clipping with error feedback (DiceSGD, Zhang et al. 2023)
ada_dpigu       standardized, important coordinates (AdaDPIGU, Zhang and Xie 2025), and tp_topk_sgd,
                the strongest coordinates of a warm-up (TP-TopK, Zhang and Xie 2026)
d2p2_sgd        random projections and noise that falls (D2P2-SGD, Jiang et al. 2025), with d2p_sgd and dp2_sgd
zeroth_order    zeroth_order_sgd: derivatives along random directions, no gradient (DP-ZO, Tang et al. 2024)
band_mf_sgd     banded noise on cyclic Poisson samples (BandMF, Choquette-Choo et al. 2023), and lambda_cgd, which
                is for a fixed order (lambda-CGD, 2026): correlated_noise
ada_fest        tables whose rows a noisy count chooses (DP-AdaFEST, Ghazi et al. 2023): sparse_embeddings

To add one: write it in `dpx/papers/`, import it below, and list it in `METHODS` of `dpx/catalog.py` (CONTRIBUTING.md).
"""

from dpx.mechanism.dp_sgd import dp_sgd
from dpx.papers.ada_dpigu import ada_dpigu, tp_topk_sgd
from dpx.papers.correlated_noise import band_mf_sgd, lambda_cgd
from dpx.papers.d2p2_sgd import d2p2_sgd, d2p_sgd, dp2_sgd
from dpx.papers.dice_sgd import dice_sgd
from dpx.papers.dynamic_dp_sgd import dynamic_dp_sgd
from dpx.papers.gep_sgd import gep_sgd
from dpx.papers.random_freeze import random_freeze_sgd, ranked_freeze_sgd
from dpx.papers.sparse_embeddings import ada_fest
from dpx.papers.zeroth_order import zeroth_order_sgd

__all__ = [
    "ada_dpigu",
    "ada_fest",
    "band_mf_sgd",
    "d2p2_sgd",
    "d2p_sgd",
    "dice_sgd",
    "dp2_sgd",
    "dp_sgd",
    "dynamic_dp_sgd",
    "gep_sgd",
    "lambda_cgd",
    "random_freeze_sgd",
    "ranked_freeze_sgd",
    "tp_topk_sgd",
    "zeroth_order_sgd",
]
