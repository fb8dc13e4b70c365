"""What norms and sums are computed from: the inputs and the cotangents of layers, or gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import views
from dpx.gradients.ghost.plan import Choice


class Records(NamedTuple):
    """The arrays from which the norms and the contributions are computed, with the B examples on axis 0.

    gradients: by number of the parameter leaf and of its part, the per-example gradients that are kept, as `ways.Way`
        says
    inputs: by number of the equation of a site, all operands of the equation, in their dtypes; None for a parameter
    cotangents: by number of the equation of a site, the gradients of the losses with respect to the equation's output

    An equation in a scan has an axis for its iterations before that of the examples, because the scan stacks them so.
    A part in slices has an axis for them, too.
    """

    gradients: dict[tuple[int, int], Any]
    inputs: dict[int, tuple[jax.Array, ...]]
    cotangents: dict[int, jax.Array]

    def of(self, leaf: int, part: int, choice: Choice):
        """The records of one part of a parameter leaf, as `parts` reads them."""
        if (leaf, part) in self.gradients:
            return self.gradients[leaf, part]

        def examples_after_slices(site):
            repeats = len(views.counts(site.use.view, views.Repeats))
            axis = len(views.counts(choice.view, views.Slices))
            record = self.inputs[site.use.equation], self.cotangents[site.use.equation]
            return jax.tree.map(lambda x: jnp.moveaxis(x, axis + repeats, axis), record) if repeats else record

        return [examples_after_slices(site) for site in choice.uses.sites]


def for_all_readers(records: Records) -> Records:
    """`records`, behind a barrier: norms and sums must read the same numbers, but XLA may round for one alone."""

    def narrow(x):
        # XLA copies an array with axes of length 1, such as a batch of one image, before a loop or another operation.
        return x.reshape([size for axis, size in enumerate(x.shape) if size != 1 or axis in (0, x.ndim - 1)])

    leaves, structure = jax.tree.flatten(records)
    # A layer's weights and bias have the same cotangents. If they passed twice, XLA would compile their kernels twice.
    distinct = list({id(x): x for x in leaves}.values())
    behind = jax.lax.optimization_barrier([narrow(x) for x in distinct])
    found = {id(x): same.reshape(x.shape) for x, same in zip(distinct, behind, strict=True)}
    return structure.unflatten(found[id(x)] for x in leaves)
