"""The optax transforms behind a mechanism, and which parameters they see.

They do not see frozen parameters, whose gradient the mechanism does not read: weight decay would move them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx.mechanism import Coordinates, Mechanism, require_mechanism
from dpx.stages import FROZEN
from dpx.trees import Tree, described
from dpx.xla.jaxprs import inputs_read


class ChainState(NamedTuple):
    """inner: state of the mechanism. transforms: state of the optax transforms behind it."""

    inner: Tree
    transforms: Tree


def chain(mechanism: Mechanism, *transforms: optax.GradientTransformation) -> Mechanism:
    """`optax.chain(mechanism, *transforms)`, but as a Mechanism, which `private_updates` needs.

    The transforms see the released gradient only, so any optax optimizer, decay or momentum costs no privacy. They see
    no parameter whose gradient the mechanism drops at every step (`coordinates.trainable`), so weight decay does not
    move it. Masks that change (`random_freeze`) stop the gradients of a step, but neither decay nor momentum.
    Raises ValueError if `mechanism` is not a Mechanism, if one of the transforms is one, and inside of coordinates.

        >>> optimizer = dpx.chain(mechanism, optax.sgd(0.1, momentum=0.9))
        >>> optimizer.stages[-1]
        'optax transforms'
    """
    require_mechanism(mechanism)
    require_transforms(transforms)
    after = optax.chain(*transforms)
    words = "optax transforms of the trainable layers" if FROZEN in mechanism.stages else "optax transforms"

    def on_trained(params):
        """The transforms on the trained parameters. For others they return the released gradient, which is zero."""
        flags = trained(mechanism, params)
        return after if all(jax.tree.leaves(flags)) else optax.masked(after, lambda _: flags)

    def release(sums, state, params):
        updates, inner = mechanism.release(sums, state.inner, params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ValueError(
                "dpx.chain must stand outside of coordinates and of other mechanisms, because optax transforms read "
                "the parameters; write dpx.chain(dpx.in_coordinates(mechanism, coordinates), *transforms)"
            )
        updates, transformed = on_trained(updates).update(updates, state.transforms, params)
        return updates, ChainState(inner, transformed)

    return mechanism.replace(
        init=lambda params: ChainState(mechanism.init(params), on_trained(params).init(params)),
        encode=lambda grad, state: mechanism.encode(grad, state.inner),
        weigh=lambda norms, state: mechanism.weigh(norms, state.inner),
        release=release,
        stages=(*mechanism.stages, words),
    )


def require_transforms(transforms: tuple[Any, ...]):
    """Raises ValueError where the transforms behind a mechanism hold a mechanism, coordinates, or no transform."""
    for transform in transforms:
        if isinstance(transform, Mechanism):
            raise ValueError("one mechanism, first in the chain, is billed; got a second one among the transforms")
        if isinstance(transform, Coordinates):
            words = f"the coordinates {transform.name!r}; write dpx.in_coordinates(mechanism, coordinates)"
            raise ValueError(f"transforms must be optax transforms, got {words}")
        if not (hasattr(transform, "init") and hasattr(transform, "update")):
            raise ValueError(f"transforms must be those of optax, such as optax.sgd(0.1), got {described(transform)}")


def trained(mechanism: Any, params: Tree) -> Tree:
    """Whether the encoded gradient depends on the gradient of a parameter: bools like `params`, arrays or shapes.

    It is read from the equations of `mechanism.encode`, so it is the same at every step. A mask that changes from step
    to step, such as a random freeze, reads every gradient.
    """
    grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.float32), params)
    closed = jax.make_jaxpr(mechanism.encode)(grad, jax.eval_shape(mechanism.init, params))
    leaves, treedef = jax.tree.flatten(grad)
    return treedef.unflatten(inputs_read(closed.jaxpr)[: len(leaves)])
