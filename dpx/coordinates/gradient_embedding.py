"""Gradient embedding: a gradient as its coordinates in a subspace known from public data, and what is left of it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpx import keys
from dpx._numbers import require_number, require_whole
from dpx.batches import Tree, batch_size
from dpx.mechanism import Coordinates

EXACT = jax.lax.Precision.HIGHEST


class EmbeddingState(NamedTuple):
    """basis: [rank, ...] for each array of the parameters. `optax.tree.set(state, basis=...)` exchanges it."""

    basis: Tree


def gradient_embedding(basis: Tree, *, embedding_scale: float = 1.0, residual_scale: float = 1.0) -> Coordinates:
    """g -> {"embedding": w / embedding_scale, "residual": (g - V^T w) / residual_scale} for w = V g, and back.

    Gradients that lie near the subspace have a small residual, which a small clip norm of its own then hardly cuts; see
    `dpx.gep_sgd`. Any `basis` gives the whole gradient back, an orthonormal one splits its norm.

    basis: V, of `public_subspace`: like the parameters with an axis of length `rank` in front. It must know nothing of
        the private data but what was released.
    Gradient embedding perturbation, Yu et al. 2021, https://arxiv.org/abs/2102.12677.
    """
    require_number("embedding_scale", embedding_scale, minimum=0, exclusive=True)
    require_number("residual_scale", residual_scale, minimum=0, exclusive=True)
    rank = batch_size(basis)

    def init(params):
        expected = jax.tree.map(lambda p: (rank, *p.shape), params)
        found = jax.tree.map(jnp.shape, basis)
        if expected != found:
            raise ValueError(f"basis must have shapes {expected}, like the gradients it is for; got {found}")
        return EmbeddingState(jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), basis))

    def encode(grad, state):
        products = jax.tree.map(lambda v, g: jnp.tensordot(v, g, g.ndim, precision=EXACT), state.basis, grad)
        embedding = sum(jax.tree.leaves(products), jnp.zeros(rank))
        residual = jax.tree.map(jnp.subtract, grad, _combined(embedding, state.basis))
        return {
            "embedding": embedding / embedding_scale,
            "residual": jax.tree.map(lambda r: r / residual_scale, residual),
        }

    def decode(released, state, like):
        del like
        inside = _combined(released["embedding"] * embedding_scale, state.basis)
        return jax.tree.map(lambda v, r: v + r * residual_scale, inside, released["residual"]), state

    return Coordinates(init=init, encode=encode, decode=decode, name=f"embedding of rank {rank} and its residual")


def public_subspace(public_grads: Tree, *, rank: int, iterations: int, key: jax.Array) -> Tree:
    """An orthonormal basis of the directions in which PUBLIC gradients are largest, by power iteration.

    V <- orthonormalized V G^T G, from random rows. What it costs in privacy is nothing because nothing here is private:
    gradients of the training data would be a release that no one bills.

    public_grads: G, like the parameters, with the public examples on axis 0. rank: at most their number and that of the
        parameters. Gives [rank, ...] for each array. key: its "public_subspace" stream is used.
    """
    leaves, structure = jax.tree.flatten(public_grads)
    examples = batch_size(public_grads)
    flat = jnp.concatenate([leaf.reshape(examples, -1).astype(jnp.float32) for leaf in leaves], axis=1)
    rank = require_whole("rank", rank, maximum=min(flat.shape))  # public gradients, coordinates
    iterations = require_whole("iterations", iterations)
    basis = jax.random.normal(keys.stream(key, "public_subspace"), (rank, flat.shape[1]))
    for _ in range(iterations):
        products = jnp.dot(basis, flat.T, precision=EXACT)
        basis = jnp.linalg.qr(jnp.dot(products, flat, precision=EXACT).T)[0].T
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + math.prod(leaf.shape[1:]))
    parts = [basis[:, a:b] for a, b in zip(ends, ends[1:], strict=False)]
    shaped = [part.reshape(rank, *leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _combined(embedding: jax.Array, basis: Tree) -> Tree:
    return jax.tree.map(lambda v: jnp.tensordot(embedding, v, 1, precision=EXACT), basis)
