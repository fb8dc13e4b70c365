"""Trainable layers: only the layers that the user chooses are trained."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpx.mechanism.base import Coordinates
from dpx.values import Tree, described, first_words, path_of

PRINTED = 6  # paths in the printed pipeline, and in a message


def trainable(*, mask: Tree | Callable[[str], bool]) -> Coordinates:
    """Trains only the layers where `mask` is True; the others get no gradient, no noise and no update.

    The optax transforms behind it, in `dpx.chain`, see only the trainable layers. So weight decay and momentum do not
    move the others, which have no optimizer state either.

    mask: a pytree prefix of the parameters, with Python bools; or a function that says whether a path is trainable,
        such as `lambda path: "lora" in path` for the path "encoder/layer_0/lora_a/kernel". Use this instead of
        optax.masked, which would let raw per-example gradients of the masked layers through.
    Raises ValueError for values that are not Python bools, if none is True, and (by `init`) if it is not a prefix.
    """
    by_path = callable(mask) and jax.tree_util.all_leaves([mask])
    words = "those whose path the given function accepts"
    if not by_path:
        _require_one_trained(mask)
        kept = [path_of(path) for path, keep in jax.tree_util.tree_leaves_with_path(mask) if keep]
        words = first_words(kept, PRINTED) or "all layers"
    all_kept = not by_path and all(jax.tree.leaves(mask))

    def flags_of(tree: Tree) -> Tree:
        """True where a leaf is trainable, like `tree`."""
        if by_path:
            flags = jax.tree_util.tree_map_with_path(lambda path, _: mask(path_of(path)), tree)
            _require_one_trained(flags)
            return flags
        try:
            return jax.tree.map(lambda keep, part: jax.tree.map(lambda _: keep, part), mask, tree)
        except ValueError as error:
            raise ValueError(f"mask must be a pytree prefix of the parameters: {error}") from error

    def init(params):
        flags_of(params)
        return ()

    def encode(grad, state):
        return jax.tree.map(lambda keep, leaf: leaf if keep else None, flags_of(grad), grad)

    def decode(released, state, like):
        def fill(keep, leaf, shape):
            return leaf if keep else jnp.zeros(shape.shape, shape.dtype)

        return jax.tree.map(fill, flags_of(like), released, like), state

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=f"keep the gradients of the trainable layers: {words}",
        undo="" if all_kept else "zeros for the other layers, which optax transforms do not see",
        supports_ghost_norms=True,
        fixed=True,
        transposed=True,
    )


def _require_one_trained(flags: Tree):
    """Raises ValueError unless all leaves are Python bools, and one is True."""
    found = [(path_of(path), flag) for path, flag in jax.tree_util.tree_leaves_with_path(flags)]
    for path, flag in found:
        if not isinstance(flag, bool):
            raise ValueError(
                f"mask must give Python bools (public constants), got {described(flag)} for {path!r}. It is a tree of "
                "them, or a function of the path such as lambda path: 'head' in path"
            )
    if not any(flag for _, flag in found):
        paths = first_words([path for path, _ in found], PRINTED)
        raise ValueError(f"mask must leave at least one layer trainable, got False for all of: {paths}")
