"""The idea of dpx: a method chooses how to write gradients, and one Gaussian mechanism does the rest.

    one example:  g --encode--> z ;  n = |z| ;  f = clip_factors(n)   contribution = f * z    (|f * z| <= C)
    the batch:    sum of contributions                             stacked gradients, microbatches
    once a step:  (sum + noise) / B --decode--> private gradient   release                 cost: event(steps)

* The bound is innermost: whatever `encode` does, one example moves the sum by at most C.
* `decode`, and every state it writes, sees released values only, so it is post-processing and costs nothing.
* One pair of schedules (clip norm, noise multiplier) feeds the clip, the noise and the cost, and the number of steps is
  read from the state. So a reported epsilon cannot drift from the run. Next read `dp_sgd.py`.

`Mechanism.stages` is the printed pipeline: it names the computations in order. In dpx, the stage before `SUM` bounds
every example and the stage after it adds the noise, which shows a wrapper where to insert its own stages.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from dpx import keys
from dpx.accounting.arithmetic import finite_precision_cost
from dpx.accounting.budget import Budget
from dpx.accounting.flat_event import from_event
from dpx.mechanism import guards
from dpx.sampling.batch import MISSING, included_rows
from dpx.sampling.data import batch_size
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule, values_over
from dpx.states.reading import require_state_of_mechanism, steps_taken
from dpx.states.record import check_batch, fingerprint, release_and_record_draws, stamp_fingerprints
from dpx.sums.clipped_sum import sum_contributions
from dpx.sums.rounding import ETA
from dpx.values import Tree, described, explain_misuse, float32_like, leaf_path


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Mechanism(optax.GradientTransformationExtraArgs):  # pyrefly: ignore[bad-class-definition]
    """An optax transformation that turns per-example gradients into one private gradient, and knows its cost.

    `init(params) -> state` and `update(grads, state, params, *, included=..., drawn=None) -> (updates, state)`:
    grads:    like `params`, with the B examples on axis 0 of every leaf; any real dtype
    included: bool (B,), False for padding; optional if the sampling never pads
    drawn:    `batch.drawn` of a batch from `sampling.take`, so that dpx notices if a batch is used twice; or None
    updates:  like `params`, in their dtypes; the private gradient

    `private_updates` uses these fields directly (float32 () is a float32 scalar):
    begin:    (params) -> the state before the first release; it holds one ReleaseState
    encode:   (grad, state) -> encoded; one example, float32, without a batch axis
    norm:     (encoded) -> norms; float32 (), or one for each group (a pytree prefix of `encoded`)
    clip_factors: (norms, state) -> tuple of factors, each with the structure of the norms. Each gives a sum over the
              examples, of factor * encoded. The first factor clips
    bound:    (state) -> the largest norm of the first factor * encoded, float32 (); one for each norm
    release:  (sums, state, params) -> (updates, state). `sums` has one `dpx.sums.rounding.FloatPair` or float32 tree
              for each factor. `keys.release` adds noise of 1 + ETA times the stated standard deviation, because sums
              are rounded. `params` are arrays, or their shapes
    event:    (steps) -> DpEvent; the cost of the first `steps` releases, sampling included
    sampling: how the batches must be drawn for `event` to be true
    noise_multiplier: a number or a schedule; `release` adds this noise, and records it in the ReleaseState
    key:      the secret scalar PRNG key of the noise; `dpx.compose_runs` refuses two runs with one key
    stages:   the pipeline in words, printed by `str(mechanism)`; nothing else reads them
    supports_ghost_norms: True if `encode` does nothing but scale coordinates or drop leaves, and `norm` is the 2-norm
              of each group of leaves, so that `dpx.gradients.ghost` can compute the norms without the gradients
    encode_whole_batch: whether each call of `encode` draws large arrays, so that one call for all examples is cheapest
    forward:  (function, params, state) -> ((value, aux), encoded), for function(params) -> (value, aux) of one example.
              Computes the encoded gradient by forward-mode derivatives, without the gradient; or None
    correlated: the `dpx.strategies.Strategy` that correlates the noise over steps, or None. Coordinates around such a
              mechanism must be `fixed`
    budget:   the `dpx.Budget` to which the noise was calibrated, its epochs converted to steps; or None

        >>> mechanism.sampling, mechanism.noise_multiplier, mechanism.budget
        (PoissonSampling(examples=1000, batch_size=50), 1.0, None)
    """

    begin: Callable[[Tree], Tree]
    encode: Callable[[Tree, Tree], Tree]
    norm: Callable[[Tree], Tree]
    clip_factors: Callable[[Tree, Tree], tuple[Tree, ...]]
    bound: Callable[[Tree], Tree]
    release: Callable[[tuple[Tree, ...], Tree, Tree], tuple[Tree, Tree]]
    event: Callable[[int], DpEvent]
    sampling: Sampling
    noise_multiplier: ScalarOrSchedule
    key: jax.Array
    stages: tuple[str, ...]
    supports_ghost_norms: bool
    encode_whole_batch: bool = False
    forward: Callable[[Callable, Tree, Tree], tuple[Tree, Tree]] | None = None
    correlated: Any = None
    budget: Budget | None = None
    noise_key: jax.Array = dataclasses.field(init=False)  # its fingerprint, because a step is traced without the key

    def __new__(cls, **_) -> Self:
        return super().__new__(cls, cls.init, cls.update)  # pyrefly: ignore[bad-argument-type]

    def __post_init__(self):
        budget = None if self.budget is None else self.budget.for_sampling(self.sampling)
        vars(self).update(budget=budget, noise_key=keys.mark_of_key(self.key))

    def __iter__(self) -> Iterator[Callable]:
        return iter((self.init, self.update))  # as optax unpacks a transformation

    __eq__, __hash__ = object.__eq__, object.__hash__  # the methods of a tuple would compare the fields

    def init(self, params: Tree) -> Tree:  # pyrefly: ignore[bad-override]
        """Returns the state before the first step, for these parameters."""
        params = guards.checked_params(params, self)
        return stamp_fingerprints(self.begin(params), self.fingerprints, self.budget)

    def update(self, grads, state, params=None, *, included=MISSING, drawn=None, **extra_args):  # pyrefly: ignore
        """Takes one step from the gradient of each example, and returns (updates, state) as the class describes."""
        guards.require_no_extra_arguments(extra_args)
        guards.require_per_example_gradients(grads, params)
        params = guards.numbers_to_arrays(params)
        rows = included_rows(batch_size(grads), included, self.sampling)
        sums, _ = sum_contributions(self, grads, state, rows)
        return self.check_and_release(sums, state, params, jnp.sum(rows), drawn)

    def replace(self, **changes: Any) -> "Mechanism":
        """Copies the mechanism with some fields replaced. Raises ValueError if the fields contradict each other."""
        guards.require_changes_fit_budget(changes, self.budget)
        if "encode" in changes:
            changes = {"forward": None} | changes
        return dataclasses.replace(self, **changes)  # pyrefly: ignore[bad-specialization]

    def wrap(self, *, begin: Callable, release: Callable, **changes: Any) -> "Mechanism":
        """Builds a mechanism around this one. Its state keeps the state of this one in its field `inner`.

        begin, release, changes: as for `replace`. Functions that are not changed read `inner`.
        """
        within = {name: _apply_to_inner_state(getattr(self, name)) for name in ("encode", "clip_factors", "bound")}
        if self.forward is not None and "encode" not in changes:
            within["forward"] = _apply_to_inner_state(self.forward)
        return self.replace(**(within | {"begin": begin, "release": release} | changes))

    def contribute(self, grad: Tree, state: Tree) -> tuple[Tree, Tree, tuple[Tree, ...]]:
        """Returns (encoded, norms, factors) of one example, which adds factor * encoded to the sum of each factor.
        grad: one example's gradient, shaped like the parameters, with no batch axis. state: that of the mechanism."""
        grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
        encoded = jax.tree.map(lambda z: z.astype(jnp.float32), self.encode(grad, state))  # also with 64 bits on
        encoded = jax.lax.optimization_barrier(encoded)  # norm and sum must read the same values
        norms = self.norm(encoded)
        return encoded, norms, self.clip_factors(norms, state)

    @functools.cached_property
    def fingerprints(self) -> np.ndarray:
        """The fingerprints, uint32 (2,), that sign a state: of its sampling and of a step's event without its noise."""
        return np.array([fingerprint(self.sampling), fingerprint(self.event(1), without="noise_multiplier")], np.uint32)

    def check_and_release(self, sums, state, params, rows, drawn=None, *, ordered=True) -> tuple[Tree, Tree]:
        """Checks a batch and releases its sums. rows: int (), how many rows are included. drawn, ordered: as for
        `states.record.check_batch`. If the batch contradicts the event, `epsilon` will refuse the state."""
        state = check_batch(state, self, sums, rows, drawn, ordered=ordered)
        sums = guards.refuse_shared_noise(self, sums)
        return release_and_record_draws(self.release, sums, state, params, budget=self.budget)

    def event_of_state(self, state: Tree, steps: int) -> DpEvent:
        """Returns the event of the first `steps` releases of a run. Raises ValueError if `state` is of another run."""
        require_state_of_mechanism(state, self, values_over(self.noise_multiplier, steps_taken(state)))
        return self.event(steps)

    def __repr__(self) -> str:
        pipeline, first = "\n  -> ".join(self.stages), from_event(self.event(1))
        added = finite_precision_cost(*first.release_count).epsilon(0.0)  # the least, at the usual deltas
        rounding = f"eta = {ETA:.3g} of the clip norm, by which the noise is larger,\n    and {added:.2g} of epsilon"
        cost = f"cost of the first step: {first.in_one_line()}\n  rounding: {rounding} in the first step"
        return f"Mechanism(\n     {pipeline}\n  drawn by {self.sampling}\n  {cost}\n)"


def _apply_to_inner_state(function: Callable) -> Callable:
    """Wraps a function whose last argument is the state, so that it reads `state.inner`."""
    return lambda *given: function(*given[:-1], given[-1].inner)


class Coordinates(NamedTuple):
    """How one example's gradient is represented when it is clipped and noised; affects neither clip norm nor cost.

    init:   (params) -> state
    encode: (grad, state) -> coordinates of one example's gradient, float32, without a batch axis
    decode: (released, state, like) -> (updates, next state); `like` has the shapes and dtypes that `encode` was given
    name, undo: what `encode` and `decode` do, for the printed pipeline; undo is "" if the release stays as it is
    supports_ghost_norms: True if `encode` does nothing but scale coordinates (as a mask does) or drop leaves
    encode_whole_batch: whether each call of `encode` draws large arrays, so that one call for all examples is cheapest
    check:  (steps) -> None; raises ValueError if a schedule, such as `keep`, leaves its domain in the first `steps`
    fixed:  whether `encode` is the same function at every step
    transposed: whether `encode` is linear and `decode` its transpose
    direction: (number, state, like) -> a direction, shaped like the gradient. The derivative of the loss along it is
            coordinate `number` of the encoded gradient; `number` is int32 (). It is the transpose of `encode` at a unit
            vector; `direction` is None if that is expensive
    """

    init: Callable[[Tree], Tree]
    encode: Callable[[Tree, Tree], Tree]
    decode: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    name: str
    undo: str = ""
    supports_ghost_norms: bool = False
    encode_whole_batch: bool = False
    check: Callable[[int], None] = lambda steps: None
    fixed: bool = False
    transposed: bool = False
    direction: Callable[[jax.Array, Tree, Tree], Tree] | None = None


class InCoordinatesState(NamedTuple):
    """inner: the state of the mechanism. coordinates: the states of the coordinates, outermost first."""

    inner: Tree
    coordinates: tuple[Tree, ...]


@explain_misuse
def in_coordinates(mechanism: Mechanism, *coordinates: Coordinates) -> Mechanism:
    """Applies `mechanism` to gradients represented in `coordinates`, which are applied in order and undone in reverse.

    Bound, noise and cost remain those of `mechanism`. The coordinates of a step depend only on the key and on earlier
    releases. Given those, `encode` maps each example's gradient separately before the mechanism bounds it. So each step
    applies the mechanism to an adaptively chosen function, which the composition theorems allow, and `decode` reads
    only the release. Raises ValueError for arguments of other types.

        >>> dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask={"w": True, "b": False})).stages[0]
        'keep the gradients of the trainable layers: w'
    """
    require_mechanism(mechanism)
    for given in coordinates:
        if not isinstance(given, Coordinates):
            words = "coordinates must be dpx.coordinates.Coordinates; optax transforms belong behind the mechanism"
            raise ValueError(f"{words}, in dpx.chain(mechanism, ...); got {type(given)}")
        guards.require_fixed_coordinates(mechanism, given)

    def begin(params):
        like, states = float32_like(params), []
        for coordinate in coordinates:
            states.append(coordinate.init(params))
            like = jax.eval_shape(coordinate.encode, like, states[-1])
            params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return InCoordinatesState(mechanism.begin(params), tuple(states))

    def encode(grad, state):
        for coordinate, coordinate_state in zip(coordinates, state.coordinates, strict=True):
            grad = coordinate.encode(grad, coordinate_state)
        return mechanism.encode(grad, state.inner)

    def release(sums, state, params):
        written, likes = _coordinates_with_states(coordinates, params, state)
        released, inner = mechanism.release(sums, state.inner, likes.pop())
        states = []
        for coordinate, coordinate_state in reversed(written):
            released, next_state = coordinate.decode(released, coordinate_state, likes.pop())
            states.insert(0, next_state)
        return optax.tree.cast_like(released, params), InCoordinatesState(inner, tuple(states))

    def event(steps):
        for coordinate in coordinates:
            coordinate.check(steps)
        return mechanism.event(steps)

    return mechanism.wrap(
        begin=begin,
        encode=encode,
        forward=_forward_in_coordinates(mechanism, coordinates),
        release=release,
        event=event,
        budget=mechanism.budget,  # the event is the same, apart from the checks of the coordinates
        supports_ghost_norms=mechanism.supports_ghost_norms and all(c.supports_ghost_norms for c in coordinates),
        encode_whole_batch=mechanism.encode_whole_batch or any(c.encode_whole_batch for c in coordinates),
        stages=(*(c.name for c in coordinates), *mechanism.stages, *(c.undo for c in reversed(coordinates) if c.undo)),
    )


def _coordinates_with_states(
    coordinates: tuple[Coordinates, ...], params: Tree, state: InCoordinatesState
) -> tuple[list, list]:
    """Returns pairs of coordinates and their states, and the shapes of the gradient before and after each encoding."""
    likes, written = [float32_like(params)], list(zip(coordinates, state.coordinates, strict=True))
    for coordinate, coordinate_state in written:
        likes.append(jax.eval_shape(coordinate.encode, likes[-1], coordinate_state))
    return written, likes


def _forward_in_coordinates(mechanism: Mechanism, coordinates: tuple[Coordinates, ...]) -> Callable | None:
    """Returns `Mechanism.forward` for a mechanism in coordinates, or None unless all but the last are linear."""
    if not coordinates or coordinates[-1].direction is None or not all(c.transposed for c in coordinates[:-1]):
        return None
    direction_of = coordinates[-1].direction

    def forward(function, params, state):
        ((*before, (_, last)), (*likes, like)) = _coordinates_with_states(coordinates, params, state)

        def along(number):
            direction = direction_of(number, last, likes[-1])
            for (coordinate, coordinate_state), like in reversed(list(zip(before, likes[:-1], strict=True))):
                direction, _ = coordinate.decode(direction, coordinate_state, like)
            return direction

        found, derivatives = derivatives_along(function, params, along, like.size)
        return found, mechanism.encode(derivatives, state.inner)

    return forward


def derivatives_along(function: Callable, params: Tree, along: Callable, count: int) -> tuple[Tree, jax.Array]:
    """Returns (value, aux) = function(params), and the value's derivatives in `count` directions, float32 (count,).

    along: (number) -> a direction, shaped like the parameters. One direction is in memory at a time, and nothing is
    kept for a backward pass, so this takes no more memory than evaluating the function.
    """

    def tangent(param, direction):
        if jnp.issubdtype(param.dtype, jnp.integer):  # a frozen parameter, which has no derivative
            return np.zeros(param.shape, jax.dtypes.float0)
        return direction.astype(param.dtype)

    def next_direction(_, number):
        # Without the barrier, XLA evaluates the function once for all directions, and keeps its intermediate results.
        number, here = jax.lax.optimization_barrier((number, params))
        value, derivative, aux = jax.jvp(function, (here,), (jax.tree.map(tangent, params, along(number)),), True)
        return (value, aux), derivative.astype(jnp.float32)

    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, params))
    return jax.lax.scan(next_direction, none, jnp.arange(count, dtype=jnp.int32))


class ChainState(NamedTuple):
    """inner: the state of the mechanism. transforms: the state of the optax transforms after it."""

    inner: Tree
    transforms: Tree


def chain(mechanism: Mechanism, *transforms: optax.GradientTransformation) -> Mechanism:
    """Composes as `optax.chain(mechanism, *transforms)` does, but into a Mechanism, which `private_updates` needs.

    The transforms see only the released gradient, so any optax optimizer, decay or momentum costs no privacy. They do
    not see parameters whose gradient the mechanism drops at every step (`coordinates.trainable`), so weight decay does
    not move these. Masks that change (`random_freeze`) stop the gradients of a step, but neither decay nor momentum.
    Raises ValueError if `mechanism` is no Mechanism, if there are no transforms, if the result is put into coordinates,
    and if a transform is a mechanism, holds updates back (`optax.MultiSteps`) or needs more than an update.

        >>> optimizer = dpx.chain(mechanism, optax.sgd(0.1, momentum=0.9))
        >>> optimizer.stages[-1]
        'optax transforms'
    """
    require_mechanism(mechanism)
    _require_transforms(transforms)
    after = optax.chain(*transforms)
    guards.try_transform(after)

    def restrict_to_trained_params(params):
        """Returns the transforms, for the trained parameters only. The others get the released gradient, which is 0."""
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
            updates, transformed = restrict_to_trained_params(updates).update(updates, state.transforms, params)
        except (AttributeError, TypeError, ValueError) as error:
            if type(error).__module__.startswith("jax"):
                raise
            guards.refuse_optax_transform(error)
        return updates, ChainState(inner, transformed)

    def begin(params):
        inner = mechanism.begin(params)
        try:
            state = restrict_to_trained_params(params).init(params)
        except Exception as error:
            error.add_note(
                "dpx: an optax transform of dpx.chain raised this for the parameters; a mask must have their types and "
                "names. To train some of them, write dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask))"
            )
            raise
        return ChainState(inner, guards.require_no_held_updates(state))

    return mechanism.wrap(begin=begin, release=release, stages=(*mechanism.stages, "optax transforms"))


def _require_transforms(transforms: tuple[Any, ...]):
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


def require_mechanism(mechanism: Any):
    if not isinstance(mechanism, Mechanism):
        words = "the optimizer must be a dpx Mechanism, which must come first: put optax transforms behind it with"
        kind = ": give its parts one after another" * isinstance(mechanism, list)
        kind += ": call it, because a mechanism is its result" * inspect.isfunction(mechanism)
        kind += ": it holds updates back, so give sampling the larger batch" * isinstance(mechanism, optax.MultiSteps)
        raise ValueError(f"{words} dpx.chain(mechanism, *transforms); got {type(mechanism)}{kind}")


SUM = "sum over the batch"


def insert_stages_around_sum(
    stages: tuple[str, ...], *, before_bound: tuple[str, ...] = (), before_noise: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Inserts stages before the bound and before the noise; if there is no `SUM`, puts all of them first."""
    if SUM not in stages:
        return (*before_bound, *before_noise, *stages)
    bound, noise = max(stages.index(SUM) - 1, 0), stages.index(SUM) + 1
    return (*stages[:bound], *before_bound, *stages[bound:noise], *before_noise, *stages[noise:])


def describe_number_or_schedule(value: ScalarOrSchedule) -> str:
    """Writes a number, or the first value of a schedule, in words."""
    return f"{values_over(value, 1)[0]:.6g} (at step 0 of a schedule)" if callable(value) else f"{value:.6g}"


def describe_share(share: ScalarOrSchedule) -> str:
    return "a scheduled share" if callable(share) else f"a share of {float(share):.4g}"


def describe_period(every: int) -> str:
    return "every step" if every == 1 else f"every {every} steps"


def describe_groups(values: Tree, words: Callable[[Any], str] = describe_number_or_schedule) -> str:
    """Lists the values of groups of layers in words, each after the path of its group; a single value has no path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(values)
    return ", ".join(f"{leaf_path(path)} {words(leaf)}".strip() for path, leaf in paths)
