"""Random projections: a gradient written in fewer, random coordinates. One kind is one pair of linear maps."""

from dpx.projections.clip_first import clip_then_project as clip_then_project
from dpx.projections.projection import ProjectionKind as ProjectionKind
from dpx.projections.projection import random_projection as random_projection
