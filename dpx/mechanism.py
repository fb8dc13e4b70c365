"""The idea of dpx: a method is a way of writing gradients, wrapped around one Gaussian mechanism.

    one example:  g --encode--> z ;  n = |z| ;  w = weigh(n)       contribution = w * z    (|w * z| <= C)
    the batch:    sum of contributions                             stacked gradients, microbatches
    once a step:  (sum + noise) / B --decode--> private gradient   release                 cost: event(steps)

* The bound is innermost: whatever `encode` does, one example moves the sum by at most C.
* `decode`, and every state it writes, sees released values only, so it is free post-processing.
* One pair of schedules (clip norm, noise multiplier) feeds the clip, the noise and the bill, and the billed step count
  is read from the state, so a reported epsilon cannot drift from what ran.

Start reading at `Mechanism`. `gaussian.py` makes the one everything is built on, `gradients.py` feeds it from a loss.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from dpx.parts import sum_over_parts
from dpx.sampling import Sampling

Tree = Any  # a pytree of arrays

ENCODED, PARTS = 2**24, 8  # numbers of gradients that are encoded at once, if that takes no more parts
LARGEST = 2.0**63  # norm of a gradient that contributes: the squares of larger ones, or sums of them, leave float32


class Mechanism(optax.GradientTransformationExtraArgs):
    """An optax transformation from per-example gradients to one private gradient, which knows its cost.

    As an optax transformation, `update(grads, state, params=None, *, weights=None)` takes gradients with the examples
    on axis 0 of every leaf and weights of shape (B,): 1, or 0 for padding. `private_grad` uses the parts directly:

    init:     (params) -> state
    encode:   (grad, state) -> encoded; one example, float32, no batch axis
    norm:     (encoded) -> norms; a scalar, or one per group (a pytree prefix of `encoded`)
    weigh:    (norms, state) -> tuple of weights, each with the structure of the norms
    release:  (sums, state, params) -> (updates, state); one sum per weight, float32. Adds the noise and decodes. The
              updates have the shapes and dtypes of `params` (arrays, or ShapeDtypeStructs where no arrays are known)
    event:    (steps) -> DpEvent; what the first `steps` releases cost, sampling included
    sampling: how the batches must be drawn for `event` to be true
    elementwise: whether `encode` only scales coordinates or drops leaves and `norm` is the 2-norm of each group of
              leaves, so that norms can be had without gradients (`dpx.ghost`)
    streamed: whether `encode` draws something large as it goes, so that the whole batch is encoded at once
    stages:   the pipeline in words, printed by `str(mechanism)`
    """

    encode: Callable[[Tree, Tree], Tree]
    norm: Callable[[Tree], Tree]
    weigh: Callable[[Tree, Tree], tuple[Tree, ...]]
    release: Callable[[tuple[Tree, ...], Tree, Tree], tuple[Tree, Tree]]
    event: Callable[[int], DpEvent]
    sampling: Sampling
    elementwise: bool
    streamed: bool
    stages: tuple[str, ...]

    def __new__(
        cls, *, init, encode, norm, weigh, release, event, sampling, elementwise, stages, streamed=False
    ) -> Self:
        def update(grads, state, params=None, *, weights=None, **extra_args):
            del extra_args
            one = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)
            sums = sum_contributions(self, grads, state, weights)
            return release(sums, state, one if params is None else params)

        self = super().__new__(cls, init, update)  # pyright: ignore[reportArgumentType]
        self.encode, self.norm, self.weigh, self.release = encode, norm, weigh, release
        self.event, self.sampling, self.stages = event, sampling, stages
        self.elementwise, self.streamed = elementwise, streamed
        return self

    def replace(self, **changes) -> "Mechanism":
        """A copy with some parts exchanged."""
        names = "init encode norm weigh release event sampling elementwise streamed stages".split()
        return Mechanism(**({name: getattr(self, name) for name in names} | changes))

    def __repr__(self) -> str:
        pipeline = "\n  -> ".join(self.stages)
        return f"Mechanism(\n     {pipeline}\n  drawn by {self.sampling}\n  bill of one step: {self.event(1)}\n)"

    __str__ = __repr__


class ReleaseState(NamedTuple):
    """The state of every mechanism holds exactly one: how many releases were made, int32."""

    step: jax.Array


def steps_taken(state: Tree) -> int:
    """How many releases an optimizer state has paid for: the step count of the one mechanism in it."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ReleaseState))
    found = [node for node in nodes if isinstance(node, ReleaseState)]
    if len(found) != 1:
        raise ValueError(f"state must hold exactly one mechanism's state, found {len(found)}")
    return int(found[0].step)


def sum_contributions(mechanism: Mechanism, grads: Tree, state: Tree, weights: jax.Array | None) -> tuple[Tree, ...]:
    """sum_i w(|z_i|) z_i for each weight, over gradients [B, ...]; the one place where raw data is summed.

    An example of weight 0, or one with a norm that is not finite or above LARGEST, contributes zero. Norms, weights and
    sums are float32, at full precision where the hardware would round products (a rounded product could exceed the
    bound).
    """
    size, included = batch_size(grads), inclusion(batch_size(grads), weights)
    require_real(grads)
    parts = min(PARTS, sum(leaf.size for leaf in jax.tree.leaves(grads)) // ENCODED)
    spread = jax.device_count() > 1  # perhaps over the axis that would be cut
    if mechanism.elementwise or mechanism.streamed or spread or parts < 2:
        return _sum_encoded(mechanism, grads, state, included)

    def part(wait, rows):
        grads, included = rows
        return _sum_encoded(mechanism, wait(grads), state, included), ()

    unroll = jax.default_backend() == "cpu"
    sums, _ = sum_over_parts(part, (grads, included), math.ceil(size / parts), unroll=unroll)
    return sums


def _sum_encoded(mechanism: Mechanism, grads: Tree, state: Tree, included: jax.Array) -> tuple[Tree, ...]:
    """`sum_contributions` with every encoded gradient in memory."""

    def one(grad: Tree):
        encoded = mechanism.encode(jax.tree.map(lambda g: g.astype(jnp.float32), grad), state)
        norms = mechanism.norm(encoded)
        return encoded, norms, mechanism.weigh(norms, state)

    encoded, norms, factors = jax.vmap(one)(grads)
    included &= in_range(norms)

    def select(rows):
        return jnp.where(included.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    encoded = jax.tree.map(select, encoded)

    def weighted_sum(factor, rows):
        factor = select(factor)
        return jax.tree.map(lambda z: jnp.tensordot(factor, z, 1, precision=jax.lax.Precision.HIGHEST), rows)

    return tuple(jax.tree.map(weighted_sum, factor, encoded) for factor in factors)


def in_range(norms: Tree) -> jax.Array:
    """Which examples may contribute: those whose every norm, (B,) a leaf, is at most LARGEST; NaN is not."""
    return functools.reduce(jnp.logical_and, [norm <= LARGEST for norm in jax.tree.leaves(norms)])


def batch_size(batch: Tree) -> int:
    """The length of axis 0, the same for every leaf."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes or any(len(shape) == 0 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"every leaf must have the examples on axis 0, the same number; got shapes {shapes}")
    return shapes[0][0]


def require_real(tree: Tree):
    for dtype in map(jnp.result_type, jax.tree.leaves(tree)):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"gradients must be real, got {dtype}: keep real and imaginary parts apart")


def inclusion(size: int, weights: jax.Array | None) -> jax.Array:
    """Which of the rows count, bool (size,). A weight is 1 or 0: anything positive counts once, nothing counts more."""
    if weights is None:
        return jnp.ones(size, bool)
    if jnp.shape(weights) != (size,):
        raise ValueError(f"weights must have shape ({size},), one per example; got {jnp.shape(weights)}")
    return jnp.asarray(weights).astype(jnp.float32) > 0


class Coordinates(NamedTuple):
    """How to write one example's gradient; sees neither data nor cost.

    init:   (params) -> state
    encode: (grad, state) -> coordinates of one example's gradient
    decode: (released, state, like) -> (updates, next state); `like` has the shapes and dtypes that `encode` was given
    name:   for the printed pipeline
    elementwise: whether `encode` only scales coordinates (a mask) or drops leaves
    streamed: whether `encode` draws something large as it goes, so that the whole batch is encoded at once
    check:  (steps) -> None; raises ValueError if a schedule leaves its domain in the first `steps`
    """

    init: Callable[[Tree], Tree]
    encode: Callable[[Tree, Tree], Tree]
    decode: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    name: str
    elementwise: bool = False
    streamed: bool = False
    check: Callable[[int], None] = lambda steps: None


class InCoordinatesState(NamedTuple):
    inner: Tree
    coordinates: tuple[Tree, ...]


def in_coordinates(mechanism: Mechanism, *coordinates: Coordinates) -> Mechanism:
    """`mechanism` on gradients written in `coordinates`, applied in order and undone in reverse.

    The bound and the noise stay the inner mechanism's, and so does the bill.
    """

    def shapes(params, states):
        """What each encode is given, and what the inner mechanism is given."""
        likes = [jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)]
        for coordinate, state in zip(coordinates, states, strict=True):
            likes.append(jax.eval_shape(coordinate.encode, likes[-1], state))
        return likes

    def init(params):
        states = []
        for coordinate in coordinates:
            states.append(coordinate.init(params))
            like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
            encoded = jax.eval_shape(coordinate.encode, like, states[-1])
            params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), encoded)
        return InCoordinatesState(mechanism.init(params), tuple(states))

    def encode(grad, state):
        for coordinate, coordinate_state in zip(coordinates, state.coordinates, strict=True):
            grad = coordinate.encode(grad, coordinate_state)
        return mechanism.encode(grad, state.inner)

    def release(sums, state, params):
        *likes, innermost = shapes(params, state.coordinates)
        released, inner = mechanism.release(sums, state.inner, innermost)
        states = []
        for coordinate, coordinate_state, like in reversed(
            list(zip(coordinates, state.coordinates, likes, strict=True))
        ):
            released, next_state = coordinate.decode(released, coordinate_state, like)
            states.insert(0, next_state)
        return optax.tree.cast_like(released, params), InCoordinatesState(inner, tuple(states))

    def event(steps):
        for coordinate in coordinates:
            coordinate.check(steps)
        return mechanism.event(steps)

    names = tuple(coordinate.name for coordinate in coordinates)
    return mechanism.replace(
        init=init,
        encode=encode,
        weigh=lambda norms, state: mechanism.weigh(norms, state.inner),
        release=release,
        event=event,
        elementwise=mechanism.elementwise and all(coordinate.elementwise for coordinate in coordinates),
        streamed=mechanism.streamed or any(coordinate.streamed for coordinate in coordinates),
        stages=names + mechanism.stages + tuple(f"undo {name}" for name in reversed(names)),
    )


class ChainState(NamedTuple):
    inner: Tree
    transforms: Tree


def chain(mechanism: Mechanism, *transforms: optax.GradientTransformation) -> Mechanism:
    """`optax.chain(mechanism, *transforms)` that stays a Mechanism, for `private_grad`.

    The transforms see the released gradient only: any optax optimizer, decay or momentum is free post-processing.
    """
    if any(isinstance(transform, Mechanism) for transform in transforms):
        raise ValueError("one mechanism, first in the chain, is billed; got a second one among the transforms")
    after = optax.chain(*transforms)

    def release(sums, state, params):
        updates, inner = mechanism.release(sums, state.inner, params)
        known = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        updates, transformed = after.update(updates, state.transforms, params if known else None)
        return updates, ChainState(inner, transformed)

    return mechanism.replace(
        init=lambda params: ChainState(mechanism.init(params), after.init(params)),
        encode=lambda grad, state: mechanism.encode(grad, state.inner),
        weigh=lambda norms, state: mechanism.weigh(norms, state.inner),
        release=release,
        stages=(*mechanism.stages, "optax transforms"),
    )


def public(state: Tree) -> Tree:
    """`state` without its `unreleased_*` fields (replaced by None): what may be shown or shared.

    What remains is a function of the released values alone. Raises ValueError for a container it does not know.
    """
    if hasattr(state, "_fields"):
        return type(state)(
            *[None if name.startswith("unreleased_") else public(getattr(state, name)) for name in state._fields]
        )
    if is_dataclass(state) and not isinstance(state, type):
        names = [field.name for field in fields(state)]
        return replace(
            state,
            **{name: None if name.startswith("unreleased_") else public(getattr(state, name)) for name in names},
        )
    if isinstance(state, Mapping):
        return {name: None if str(name).startswith("unreleased_") else public(part) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(public(part) for part in state)
    if state is None or isinstance(state, jax.Array | np.ndarray | np.generic | int | float | complex | str):
        return state
    raise ValueError(f"state must be NamedTuples, dataclasses, mappings, lists, tuples and arrays, got {type(state)}")
