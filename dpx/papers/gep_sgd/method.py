"""Gradient embedding perturbation: a gradient's part in a public subspace and its residual are clipped separately."""

import math

import jax

from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Mechanism, Tree, in_coordinates
from dpx.mechanisms.dp_sgd import dp_sgd
from dpx.papers.gep_sgd.gradient_embedding import gradient_embedding
from dpx.papers.random_freeze.random_freeze import random_freeze
from dpx.sampling.schemes import Sampling
from dpx.scalars import ScalarOrSchedule
from dpx.stages import SUM, describe
from dpx.validation import require_number, require_open_fraction


@accepts_budget
def gep_sgd(
    *,
    basis: Tree,
    embedding_clip_norm: float,
    residual_clip_norm: float,
    embedding_share: float = 0.5,
    freeze_rate: ScalarOrSchedule = 0.0,
    every: int = 1,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """GEP: embedding and residual have clip norms C1 and C2 and noise of their own (Yu et al. 2021, arXiv:2102.12677).

    noise on the sums:  sigma C1 / sqrt(s) on the embedding,  sigma C2 / sqrt(1 - s) on the residual

    The paper claims one Gaussian release of embedding and residual. That holds for the sampling that draws the batches.
    dpx bills both as one Gaussian of noise multiplier sigma, because an example's embedding and residual, divided by
    their noise and multiplied by sigma, have norms of at most sqrt(s) and sqrt(1 - s), together 1.

    basis: what `dpx.coordinates.public_subspace` computes from public gradients, (rank, *shape) for each array of the
        parameters. The paper computes a new one at every step, for `optax.tree.set(state, basis=...)`.
    embedding_clip_norm, residual_clip_norm: C1 and C2, above 0, in the units of the gradient.
    embedding_share: s in (0, 1), the embedding's share of the precision; 1/2 is the paper's.
    freeze_rate: in [0, 1), the share of coordinates that a random mask freezes, in each gradient before it is split
        and in the release (Zhu and Blaschko 2021, arXiv:2112.00845, Table 1). The bill stays, because the masks depend
        on no data. every: at least 1, the steps that a mask is kept.
    noise_multiplier: sigma, of the two releases as one Gaussian; a number, a schedule of the step, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret PRNG key, (), of this run alone.

    Raises ValueError for numbers outside their domains.
    """
    share = require_open_fraction("embedding_share", embedding_share)
    for name, norm in (("embedding_clip_norm", embedding_clip_norm), ("residual_clip_norm", residual_clip_norm)):
        require_number(name, norm, minimum=0, exclusive=True)
    clip_norm = {"embedding": math.sqrt(share), "residual": math.sqrt(1 - share)}
    embedding_scale = embedding_clip_norm / clip_norm["embedding"]
    residual_scale = residual_clip_norm / clip_norm["residual"]
    freezes = callable(freeze_rate) or freeze_rate != 0
    freeze = (random_freeze(freeze_rate=freeze_rate, every=every, key=key),) if freezes else ()
    mechanism = in_coordinates(
        dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        *freeze,
        gradient_embedding(basis=basis, embedding_scale=embedding_scale, residual_scale=residual_scale),
    )
    multiplier = describe(mechanism.noise_multiplier)
    stages = (
        *(one.name for one in freeze),
        "split into an embedding in the public subspace and the residual",
        f"clip the embedding to norm {embedding_clip_norm:.6g} and the residual to norm {residual_clip_norm:.6g}",
        SUM,
        f"add noise of standard deviation {multiplier} x {embedding_scale:.6g} to the embedding, and {multiplier} x "
        f"{residual_scale:.6g} to the residual",
        f"divide by the expected batch size {sampling.divisor}",
        "add the lifted embedding to the residual",
        *(one.undo for one in freeze),
    )
    return mechanism.replace(stages=stages)
