"""Random projections: a gradient written in fewer, random coordinates.

projection   the coordinates, of the whole gradient or of each group of layers separately
sketch       the record that every kind fills in
gaussian     a matrix of standard normals, the kind of the D2P2-SGD paper
orthonormal  orthonormal columns, in blocks
subset       some of the coordinates
countsketch  coordinates with random signs, added up in buckets
hadamard     rows of a Hadamard transform after random signs

To add one: a file here, and a line in `projection.SKETCHES` and in `projection.ProjectionKind`.
"""

from dpx.papers.d2p2_sgd.projections.projection import ProjectionKind, random_projection

__all__ = ["ProjectionKind", "random_projection"]
