"""Optax transforms after a mechanism. They never see frozen parameters, because weight decay would move them."""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from dpx.mechanism import Coordinates, Mechanism, guards, require_mechanism
from dpx.values import Tree, described

HOLDING = ("MultiStepsState", "ApplyEvery")  # states of optax transforms that hold updates back


class ChainState(NamedTuple):
    """inner: the state of the mechanism. transforms: the state of the optax transforms after it."""

    inner: Tree
    transforms: Tree


def chain(mechanism: Mechanism, *transforms: optax.GradientTransformation) -> Mechanism:
    """Composes as `optax.chain(mechanism, *transforms)` does, but into a Mechanism, which `private_updates` needs.

    The transforms see only the released gradient, so any optax optimizer, decay or momentum costs no privacy. They do
    not see parameters whose gradient the mechanism drops at every step (`coordinates.trainable`), so weight decay does
    not move these. Masks that change (`random_freeze`) stop the gradients of a step, but neither decay nor momentum.
    Raises ValueError unless `mechanism` is a Mechanism and no transform is one; without transforms; inside coordinates;
    and for transforms that hold updates back (`optax.MultiSteps`) or need more than an update, such as the loss.

        >>> optimizer = dpx.chain(mechanism, optax.sgd(0.1, momentum=0.9))
        >>> optimizer.stages[-1]
        'optax transforms'
    """
    require_mechanism(mechanism)
    require_transforms(transforms)
    after = optax.chain(*transforms)
    _try_transform(after)

    def on_trained(params):
        """Applies the transforms to the trained parameters. The rest get the released gradient, which is zero."""
        flags = guards.trained_mask(mechanism, params)
        return after if all(jax.tree.leaves(flags)) else optax.masked(after, lambda _: flags)

    def release(sums, state, params):
        updates, inner = mechanism.release(sums, state.inner, params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ValueError(
                "dpx.chain must be outside of coordinates and other mechanisms, because optax transforms read "
                "the parameters; write dpx.chain(dpx.in_coordinates(mechanism, coordinates), *transforms)"
            )
        try:
            updates, transformed = on_trained(updates).update(updates, state.transforms, params)
        except (AttributeError, TypeError, ValueError) as error:
            if type(error).__module__.startswith("jax"):
                raise
            _refuse_optax_transform(error)
        return updates, ChainState(inner, transformed)

    return mechanism.wrap(
        begin=lambda params: ChainState(
            mechanism.begin(params), _require_no_held_updates(on_trained(params).init(params))
        ),
        release=release,
        stages=(*mechanism.stages, "optax transforms"),
    )


def require_transforms(transforms: tuple[Any, ...]):
    """Raises ValueError if there are no transforms, or if one is a mechanism, coordinates, or anything else."""
    if not transforms:
        raise ValueError(
            "transforms must be optax transforms, such as optax.sgd(0.1), got none: a mechanism alone returns "
            "a gradient, and optax.apply_updates would increase the loss along it"
        )
    for transform in transforms:
        if isinstance(transform, Mechanism):
            raise ValueError("a chain must have one mechanism, its first part; got a second one among the transforms")
        if isinstance(transform, Coordinates):
            words = f"the coordinates {transform.name!r}; write dpx.in_coordinates(mechanism, coordinates)"
            raise ValueError(f"transforms must be optax transforms, got {words}")
        if not (hasattr(transform, "init") and hasattr(transform, "update")):
            raise ValueError(f"transforms must be optax transforms such as optax.sgd(0.1), got {described(transform)}")


def _require_no_held_updates(state: Tree) -> Tree:
    """Returns `state`. Raises ValueError if its transforms hold updates back."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node).__name__ in HOLDING)
    if any(type(node).__name__ in HOLDING for node in nodes):
        raise ValueError(
            "transforms must not hold updates back, as optax.MultiSteps and apply_every do, because each step in "
            "between has noise and a cost of its own. Give the larger batch to the sampling instead, and say with "
            "microbatch_size or chunk_size how much of it fits in memory"
        )
    return state


def _refuse_optax_transform(error: Exception) -> NoReturn:
    raise ValueError(
        "transforms must compute an update from the released gradient, their state and the parameters alone. Those "
        "that need the loss or its gradient (lbfgs, reduce_on_plateau, polyak_sgd, momo), or parameters in another "
        "form (lookahead), would get private values, or fail: call them yourself, with the released updates and public "
        f"values. Got {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    ) from error


def _try_transform(transform: optax.GradientTransformation):
    """Raises ValueError early, before there are parameters, if `transform` holds updates back or needs more arguments.

    It is tried on one parameter; a failure for any other reason is ignored, because it may work on a real model.
    """
    like = {"parameter": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    try:
        state = jax.eval_shape(transform.init, like)
        jax.eval_shape(transform.update, like, state, like)
    except TypeError as error:
        if "required keyword-only argument" in str(error):
            _refuse_optax_transform(error)
    except Exception:
        return
    else:
        _require_no_held_updates(state)
