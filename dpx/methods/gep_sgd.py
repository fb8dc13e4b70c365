"""Gradient embedding perturbation: the part of a gradient inside a public subspace, and the rest, clipped apart."""

import math

import jax

from dpx._numbers import ScalarOrSchedule, require_number
from dpx.accounting.budget import calibrated
from dpx.coordinates.gradient_embedding import gradient_embedding
from dpx.mechanism import Mechanism, Tree, in_coordinates
from dpx.mechanisms.gaussian import gaussian_mechanism
from dpx.sampling import Sampling


@calibrated
def gep_sgd(
    basis: Tree,
    *,
    embedding_clip_norm: float,
    residual_clip_norm: float,
    embedding_share: float = 0.5,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """GEP: embedding and residual clipped to norms C1 and C2 and noised apart (Yu et al. 2021, arXiv:2102.12677).

    noise on the sums:  sigma C1 / sqrt(s) on the embedding,  sigma C2 / sqrt(1 - s) on the residual

    What the paper claims: two Gaussian releases, of the embedding and of the residual. What holds: that, of the batches
    that are billed. What dpx bills: both as one Gaussian of noise multiplier sigma: over their noise times sigma, an
    example's embedding and residual have norms of at most sqrt(s) and sqrt(1 - s), together 1.

    basis: of `dpx.public_subspace`, from public gradients; the paper takes a new one every step (`gradient_embedding`).
    embedding_share: s in (0, 1), the share of the precision that the embedding has; 1/2 is the paper's.
    The rest is as in `dpx.dp_sgd`.
    """
    share = require_number("embedding_share", embedding_share, minimum=0, exclusive=True)
    if share >= 1:
        raise ValueError(f"embedding_share must be in (0, 1), got {share}")
    for name, norm in (("embedding_clip_norm", embedding_clip_norm), ("residual_clip_norm", residual_clip_norm)):
        require_number(name, norm, minimum=0, exclusive=True)
    clip_norm = {"embedding": math.sqrt(share), "residual": math.sqrt(1 - share)}
    embedding = gradient_embedding(
        basis,
        embedding_scale=embedding_clip_norm / clip_norm["embedding"],
        residual_scale=residual_clip_norm / clip_norm["residual"],
    )

    return in_coordinates(
        gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        embedding,
    )
