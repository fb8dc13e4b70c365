"""Coordinates: ways to write one example's gradient, independent of the data and the cost.

trainable           some layers of the parameters

From `dpx.papers`:

random_freeze       a random mask (Zhu and Blaschko 2021); sparse_pack packs its updates for sending
ranked_freeze       a mask of the coordinates with the largest released gradients (Zhu and Blaschko 2021, Appendix C)
importance_mask     a mask by importance, ranked in a private warm-up (AdaDPIGU, Zhang and Xie 2025)
standardized        centered and scaled by released averages (AdaCliP, Pichapati et al. 2019)
top_fraction        the largest coordinates of each example
gradient_embedding  an embedding in a public subspace, and the residual (Yu et al. 2021)
random_projection   fewer, random coordinates, of five kinds (D2P2-SGD, Jiang et al. 2025)
random_directions   derivatives along random directions, without a gradient (DP-ZO, Tang et al. 2024)
frequent_rows       the table rows that a noisy count chooses (DP-AdaFEST, Ghazi et al. 2023); row_updates is its step
                    for large tables, and look_up_public_rows trains only the rows of a public list

To add one: write a file in its paper's folder, import it below, and add a line to `COORDINATES` in `dpx/catalog.py`
(CONTRIBUTING.md).
"""

from dpx.mechanism import Coordinates
from dpx.mechanism.masks import trainable
from dpx.papers.ada_dpigu import importance_mask, standardized, top_fraction, zero_frozen_params
from dpx.papers.d2p2_sgd import random_projection
from dpx.papers.gep_sgd import gradient_embedding, public_subspace
from dpx.papers.random_freeze import (
    SparseUpdates,
    random_freeze,
    ranked_freeze,
    sparse_density,
    sparse_pack,
    sparse_unpack,
)
from dpx.papers.sparse_embeddings import RowUpdate, frequent_rows, look_up_public_rows, row_updates
from dpx.papers.zeroth_order import random_directions

__all__ = [
    "Coordinates",
    "RowUpdate",
    "SparseUpdates",
    "frequent_rows",
    "gradient_embedding",
    "importance_mask",
    "look_up_public_rows",
    "public_subspace",
    "random_directions",
    "random_freeze",
    "random_projection",
    "ranked_freeze",
    "row_updates",
    "sparse_density",
    "sparse_pack",
    "sparse_unpack",
    "standardized",
    "top_fraction",
    "trainable",
    "zero_frozen_params",
]
