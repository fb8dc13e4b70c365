"""Gradient embedding perturbation: clips the part of a gradient in a public subspace apart from the residual."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Coordinates, Mechanism, in_coordinates
from dpx.mechanism.base import SUM, describe_number_or_schedule
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.papers.random_freeze import random_freeze
from dpx.sampling.data import batch_size
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule
from dpx.values import Tree, explain_misuse, require_number, require_open_fraction, require_whole, unflatten_vectors


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
    """GEP: embedding and residual have separate clip norms C1, C2 and noise (Yu et al. 2021, arXiv:2102.12677).

    noise on the sums:  sigma C1 / sqrt(s) on the embedding,  sigma C2 / sqrt(1 - s) on the residual

    The paper claims the cost of one Gaussian release for both. That holds for the sampling that draws the batches. dpx
    counts both as one Gaussian with noise multiplier sigma: if an example's embedding and residual are divided by their
    noise and multiplied by sigma, their norms are at most sqrt(s) and sqrt(1 - s), or 1 together.

    basis: what `dpx.coordinates.public_subspace` computes from public gradients, (rank, *shape) for each array of the
        parameters. The paper computes a new one at every step, which `optax.tree.set(state, basis=...)` sets.
    embedding_clip_norm, residual_clip_norm: C1 and C2, above 0, in the units of the gradient.
    embedding_share: s in (0, 1), the embedding's share of sigma^-2; 1/2 is the paper's.
    freeze_rate: in [0, 1), the share of coordinates that a random mask freezes, in each gradient before it is split and
        in the release (Zhu and Blaschko 2021, arXiv:2112.00845, Table 1). It costs nothing, because the masks do not
        depend on data. every: at least 1, for how many steps a mask is kept.
    noise_multiplier: sigma, for both releases as one Gaussian; a number, a schedule of the step, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.
    """
    share, every = require_open_fraction("embedding_share", embedding_share), require_whole("every", every)
    above = {"minimum": 0, "exclusive": True}
    embedding_clip_norm = require_number("embedding_clip_norm", embedding_clip_norm, **above)
    residual_clip_norm = require_number("residual_clip_norm", residual_clip_norm, **above)
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
    multiplier = describe_number_or_schedule(mechanism.noise_multiplier)
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


EXACT = jax.lax.Precision.HIGHEST  # full float32 products everywhere, because matrix units round to fewer bits


class GradientSubspaceState(NamedTuple):
    """The public subspace; replace it by `optax.tree.set(state, basis=...)`.

    basis: float32, (rank, *shape) for each parameter array with this shape.
    """

    basis: Tree


@explain_misuse
def gradient_embedding(*, basis: Tree, embedding_scale: float = 1.0, residual_scale: float = 1.0) -> Coordinates:
    """Writes a gradient as coordinates in a public subspace and a residual outside of it, both scaled.

    g -> {"embedding": w / embedding_scale, "residual": (g - V^T w) / residual_scale} for w = V g, and back.

    Gradients near the subspace have a small residual, so clipping it to a small norm removes little; see
    `dpx.methods.gep_sgd`. `decode` restores the whole gradient for any `basis`; if the basis is orthonormal, the
    squared norms of embedding and residual add up to the squared norm of the gradient.

    basis: V, from `public_subspace`: (rank, *shape), real, for each parameter array with this shape. It must depend
        only on public data and released values.
    embedding_scale, residual_scale: above 0, in the units of the gradient, so that the coordinates have no unit.
    Raises ValueError for a scale of 0 or less, and in `init` for a basis that does not fit the parameters.
    Source: gradient embedding perturbation, Yu et al. 2021, https://arxiv.org/abs/2102.12677.
    """
    require_number("embedding_scale", embedding_scale, minimum=0, exclusive=True)
    require_number("residual_scale", residual_scale, minimum=0, exclusive=True)
    rank = batch_size(basis)

    def init(params):
        expected = jax.tree.map(lambda p: (rank, *p.shape), params)
        shapes = jax.tree.map(jnp.shape, basis)
        if expected != shapes:
            raise ValueError(f"basis must have shapes {expected}, like the gradients; got {shapes}")
        return GradientSubspaceState(jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), basis))

    def encode(grad, state):
        products = jax.tree.map(lambda v, g: jnp.tensordot(v, g, g.ndim, precision=EXACT), state.basis, grad)
        embedding = sum(jax.tree.leaves(products), jnp.zeros(rank))
        residual = jax.tree.map(jnp.subtract, grad, _lift_embedding(embedding, state.basis))
        scaled = jax.tree.map(lambda r: r / residual_scale, residual)
        return {"embedding": embedding / embedding_scale, "residual": scaled}

    def decode(released, state, like):
        inside = _lift_embedding(released["embedding"] * embedding_scale, state.basis)
        return jax.tree.map(lambda v, r: v + r * residual_scale, inside, released["residual"]), state

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=f"split into an embedding of rank {rank}, divided by {embedding_scale:.6g}, and the residual, divided by "
        f"{residual_scale:.6g}; norms and noise are in these units",
        undo="add the lifted embedding to the residual, both in the units of the gradient",
    )


@explain_misuse
def public_subspace(public_grads: Tree, *, rank: int, iterations: int, key: jax.Array) -> Tree:
    """Computes an orthonormal basis of the directions in which PUBLIC gradients are largest, by power iteration.

    V <- orthonormalized V G^T G, starting from random rows. This costs no privacy, because all gradients here are
    public. Never pass gradients of the training data: the basis would release them, and no cost would cover that.

    public_grads: G, like the parameters, any real dtype, with the public examples on axis 0 of every array.
    rank: int, at least 1, at most the number of public examples and of coordinates. iterations: int, at least 1.
    key: a scalar PRNG key, whose "public_subspace" stream is used.

    Returns float32 (rank, *shape) for each parameter array. Raises ValueError for other ranks or iterations.
    Source: Yu et al. 2021, https://arxiv.org/abs/2102.12677.
    """
    leaves = jax.tree.leaves(public_grads)
    examples = batch_size(public_grads)
    flat = jnp.concatenate([leaf.reshape(examples, -1).astype(jnp.float32) for leaf in leaves], axis=1)
    rank = require_whole("rank", rank, maximum=min(flat.shape))  # public gradients, coordinates
    iterations = require_whole("iterations", iterations)
    drawn = keys.public_key(keys.stream(key, "public_subspace"))
    basis = jax.random.normal(drawn, (rank, flat.shape[1]), jnp.float32)
    for _ in range(iterations):
        products = jnp.dot(basis, flat.T, precision=EXACT)
        basis = jnp.linalg.qr(jnp.dot(products, flat, precision=EXACT).T)[0].T
    return unflatten_vectors(basis, jax.tree.map(lambda leaf: leaf[0], public_grads))


def _lift_embedding(embedding: jax.Array, basis: Tree) -> Tree:
    """Returns V^T w, float32, in the shapes of the parameters."""
    return jax.tree.map(lambda v: jnp.tensordot(embedding, v, 1, precision=EXACT), basis)
