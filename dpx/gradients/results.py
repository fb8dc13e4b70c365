"""The results of a private step: what is private, and what is not."""

from typing import NamedTuple

from dpx.trees import Tree, outlined


class Unreleased(NamedTuple):
    """Values of each example, with the B examples on axis 0. NOT private: they are for debugging and tuning only.

    They are as sensitive as the data. Rows that are not included have values too. A jitted program skips unused ones.

    losses: (B,), in the loss's dtype. None for `private_updates_from`, which knows no loss.
    norms:  float32 (B,), the norms of the encoded gradients before the clip; for a mechanism with one norm for each
            group, a tree of them. The share of clipped examples, by which a clip norm is tuned, is
            `(unreleased.norms > clip_norm)[batch.included].mean()`.
    aux:    with `has_aux=True`, what the function of one example returns second, (B, ...) in each leaf; otherwise None.
    """

    losses: Tree
    norms: Tree
    aux: Tree

    __repr__ = outlined


class PrivateUpdates(NamedTuple):
    """The result of one private step.

    updates: like the parameters, in their dtypes; private.
    state: the mechanism's next state.
    unreleased: losses, norms and aux of the examples. NOT private.
    """

    updates: Tree
    state: Tree
    unreleased: Unreleased

    __repr__ = outlined
