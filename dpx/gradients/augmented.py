"""Augmentation multiplicity: the mean loss of several random views of one example."""

from collections.abc import Callable

import jax

from dpx.trees import Tree
from dpx.validation import require_function, require_whole


def augmented(
    loss: Callable[..., Tree], augment: Callable[[Tree, jax.Array], Tree], *, copies: int
) -> Callable[[Tree, Tree, jax.Array], Tree]:
    """Builds `mean_loss(params, example, key)`, the mean of `loss` over `copies` random views of one example.

    Give it to `private_updates`, `fit`, `check` or `explain` with `with_key=True`. The views of an example are averaged
    BEFORE its gradient is clipped. So the example still enters once, and the sensitivity, the noise and the bill are
    those of `loss`. Ghost norms see `copies` positions in place of one, and need no gradient of a view.

    loss: (params, example) -> float (), or (value, aux) with has_aux=True; then aux is the mean over the views too.
    augment: (example, key) -> one view: a pytree for `loss`. It must be a function of these two arguments and public
        constants, and must not look at other examples. The key, (), differs among examples, steps and views. A loss
        with random numbers of its own gets them from a view that holds a key.
    copies: int, at least 1; the time of a step grows by about this factor (benchmarks/augmented.py). On a CPU, a
        `microbatch_size` whose views fit in the cache of a core, such as 64, can be a fifth faster.

    Raises ValueError for other `copies` and if `loss` or `augment` is not callable.
    De et al. 2022, https://arxiv.org/abs/2204.13650, section 3.2; Hoffer et al. 2020, https://arxiv.org/abs/1901.09335.

        >>> def mirrored(example, key):
        ...     x, y = example
        ...     return jnp.where(jax.random.bernoulli(key), x, x[::-1]), y
        >>> step = dpx.private_updates(dpx.augmented(loss, mirrored, copies=4), optimizer, with_key=True)
    """
    require_function("loss", loss)
    require_function("augment", augment)
    require_whole("copies", copies)

    def mean_loss(params, example, key):
        values = jax.vmap(lambda key: loss(params, augment(example, key)))(jax.random.split(key, copies))
        return jax.tree.map(lambda leaf: leaf.mean(0), values)

    return mean_loss
