"""Random projections: a gradient written in fewer, random coordinates. One kind is one pair of linear maps."""

from dpx.coordinates.projections.projection import ProjectionKind as ProjectionKind
from dpx.coordinates.projections.projection import random_projection as random_projection
