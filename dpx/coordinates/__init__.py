"""Coordinates: ways of writing one example's gradient. They see neither data nor cost.

To add one: a file here that returns a `Coordinates`, a line below, one in `dpx/__init__.py`, and a case in
`tests/mechanisms.py`, which the contract reads.
"""

from dpx.coordinates.gradient_embedding import gradient_embedding as gradient_embedding
from dpx.coordinates.gradient_embedding import public_subspace as public_subspace
from dpx.coordinates.importance_mask import importance_mask as importance_mask
from dpx.coordinates.importance_mask import masked_params as masked_params
from dpx.coordinates.projections import random_projection as random_projection
from dpx.coordinates.random_freeze import random_freeze as random_freeze
from dpx.coordinates.ranked_freeze import ranked_freeze as ranked_freeze
from dpx.coordinates.sparse_updates import SparseUpdates as SparseUpdates
from dpx.coordinates.sparse_updates import sparse_density as sparse_density
from dpx.coordinates.sparse_updates import sparse_pack as sparse_pack
from dpx.coordinates.sparse_updates import sparse_unpack as sparse_unpack
from dpx.coordinates.standardized import standardized as standardized
from dpx.coordinates.top_fraction import top_fraction as top_fraction
from dpx.coordinates.trainable import trainable as trainable
