"""Coordinates: ways of writing one example's gradient. They see neither data nor cost.

trainable           some layers of the parameters
random_freeze       a random mask (Zhu and Blaschko 2021); sparse_updates packs its updates for sending
ranked_freeze       a mask of the coordinates with the largest released gradients (Zhu and Blaschko 2021, Appendix C)
importance_mask     a mask by importance, ranked in a private warm-up (AdaDPIGU, Zhang and Xie 2025)
standardized        centered and scaled by released averages (AdaCliP, Pichapati et al. 2019)
top_fraction        the largest coordinates of each example
gradient_embedding  an embedding in a public subspace, and the residual (Yu et al. 2021)
projections         fewer, random coordinates: five kinds, one a file

To add one: a file here, its import below, and a line in `COORDINATES` of `dpx/catalog.py` (CONTRIBUTING.md).
"""

from dpx.coordinates.gradient_embedding import gradient_embedding, public_subspace
from dpx.coordinates.importance_mask import importance_mask, masked_params
from dpx.coordinates.projections import random_projection
from dpx.coordinates.random_freeze import random_freeze
from dpx.coordinates.ranked_freeze import ranked_freeze
from dpx.coordinates.sparse_updates import SparseUpdates, sparse_density, sparse_pack, sparse_unpack
from dpx.coordinates.standardized import standardized
from dpx.coordinates.top_fraction import top_fraction
from dpx.coordinates.trainable import trainable
from dpx.mechanism import Coordinates

__all__ = [
    "Coordinates",
    "SparseUpdates",
    "gradient_embedding",
    "importance_mask",
    "masked_params",
    "public_subspace",
    "random_freeze",
    "random_projection",
    "ranked_freeze",
    "sparse_density",
    "sparse_pack",
    "sparse_unpack",
    "standardized",
    "top_fraction",
    "trainable",
]
