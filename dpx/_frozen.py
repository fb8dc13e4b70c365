"""Frozen parameters: those whose gradient a mechanism does not read.

The optax transforms behind a mechanism see the other parameters only. Otherwise weight decay would move the frozen
ones, and they would have optimizer state.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from dpx._stages import FROZEN

Tree = Any  # a pytree of arrays


def trained(mechanism: Any, params: Tree) -> Tree:
    """Whether the encoded gradient depends on the gradient of a parameter: bools like `params`, arrays or shapes.

    It is read from the equations of `mechanism.encode`, so it is the same at every step. A mask that changes from step
    to step, such as a random freeze, reads every gradient.
    """
    grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.float32), params)
    closed = jax.make_jaxpr(mechanism.encode)(grad, jax.eval_shape(mechanism.init, params))
    leaves, treedef = jax.tree.flatten(grad)
    return treedef.unflatten(inputs_read(closed.jaxpr)[: len(leaves)])


def inputs_read(jaxpr: Any) -> list[bool]:
    """For every input of a jaxpr, whether an output may depend on it."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if not isinstance(var, core.Literal))
    return [var in needed for var in jaxpr.invars]


def on_trained(mechanism: Any, transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transform` on the parameters that `mechanism` trains; for the others, `update` returns what it is given.

    The released gradient of a frozen parameter is zero, because no coordinate belongs to it.
    """

    def within(params):
        flags = trained(mechanism, params)
        return transform if all(jax.tree.leaves(flags)) else optax.masked(transform, lambda _: flags)

    def update(updates, state, params=None):
        return within(updates).update(updates, state, params)

    return optax.GradientTransformation(lambda params: within(params).init(params), update)


def describe_transforms(stages: tuple[str, ...]) -> str:
    """The stage of the optax transforms behind the stages of a mechanism."""
    return "optax transforms of the trainable layers" if FROZEN in stages else "optax transforms"
