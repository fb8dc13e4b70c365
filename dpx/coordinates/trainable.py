"""Trainable layers: coordinates that are some layers of the parameters, chosen by the user."""

import jax
import jax.numpy as jnp

from dpx._stages import path_of
from dpx.mechanism import Coordinates, Tree


def trainable(mask: Tree) -> Coordinates:
    """Only the layers where `mask` is True: the others give no gradient, get no noise and are not updated.

    mask: a pytree prefix of the parameters, with Python bools. Use this instead of optax.masked, which would let raw
        per-example gradients of the masked layers through.

    Raises ValueError for leaves that are no Python bools, or if none is True.
    """
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, bool):
            raise ValueError(f"mask must hold Python bools (public constants), got {leaf!r}")
    if not any(jax.tree.leaves(mask)):
        raise ValueError(f"mask must leave at least one layer trainable, got {mask!r}")

    def encode(grad, state):
        del state
        return jax.tree.map(lambda keep, layer: layer if keep else None, mask, grad)

    def decode(released, state, like):
        def fill(keep, layer, shapes):
            return layer if keep else jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return jax.tree.map(fill, mask, released, like), state

    leaves, _ = jax.tree_util.tree_flatten_with_path(mask)
    layers = ", ".join(path_of(path) for path, keep in leaves if keep) or "all layers"
    return Coordinates(
        init=lambda params: (),
        encode=encode,
        decode=decode,
        name=f"keep the gradients of the trainable layers: {layers}",
        undo="" if all(jax.tree.leaves(mask)) else "zeros for the other layers",
        supports_ghost_norms=True,
    )
