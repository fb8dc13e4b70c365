"""Finds the record of the releases in an optimizer state, and refuses one without a true cost. Also returns the public
part of a state: everything but its `unreleased` and `unreleased_*` fields."""

import functools
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from dpx.keys.noise import LARGEST_RELEASE
from dpx.states.record import (
    LARGEST_PRECISION,
    LARGEST_WEIGHT,
    REASONS,
    RECORD_VERSION,
    ReleaseState,
    fingerprint,
    noise_order_hash,
)
from dpx.values import Tree, described, require_whole

_TRACED = "state must be known, got one that jax is tracing: read its steps and its cost outside of jit"
TOLERANCE = 1e-5  # relative, between the precisions of a state and its mechanism, because float32 rounds


def release_state(state: Tree) -> ReleaseState:
    """Returns the one ReleaseState in an optimizer state. The mechanism must come first, and nothing may wrap it.

    state: the state of a mechanism, of `dpx.chain` or `optax.chain`, or of `optax.lookahead`, or an object that holds
        one, such as flax's TrainState or nnx.Optimizer. Raises ValueError if it holds none or several, or if a
        transform before the mechanism or a wrapper around it can change how much one example moves the release.
    """
    if isinstance(state, jax.core.Tracer):
        raise ValueError(_TRACED)
    releases = _find_release_states(state, ())
    if not releases and isinstance(state, str | float | list | np.ndarray):
        raise ValueError(
            f"steps_or_state must be a whole number of steps or an optimizer state, got {described(state)}"
        )
    if len(releases) != 1:
        advice = "It is optimizer.init(params) at first; restore a stored state into that structure."
        raise ValueError(f"state must hold exactly one mechanism's state, found {len(releases)}. ({advice})")
    release, holders = releases[0]
    for holder, key in holders:
        _require_unwrapped(holder, key)
    if isinstance(release.step, jax.core.Tracer):
        raise ValueError(_TRACED)
    if jnp.shape(release.step) != ():
        raise ValueError(
            f"state must be of one run, got {jnp.shape(release.step)} runs. Runs of one key share their noise: give "
            "each a key of its own, and compose them with dpx.compose_runs"
        )
    release = release.with_facts_on_host()
    if int(release.version) != RECORD_VERSION:
        raise ValueError(
            f"state must have a record of version {RECORD_VERSION}, which this dpx reads, got {int(release.version)}: "
            "finish the run with the version of dpx that began it, or begin another one with a new key"
        )
    return release


def _find_release_states(node: Tree, holders: tuple) -> list[tuple[ReleaseState, tuple]]:
    """Finds every ReleaseState in `node`, with the nodes that hold it, outermost first, and its key in each of them."""
    if isinstance(node, ReleaseState):
        return [(node, holders)]
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda part: part is not node)
    return [hit for path, part in children if path for hit in _find_release_states(part, (*holders, (node, path[0])))]


def _require_unwrapped(node: Any, key: Any) -> None:
    """Raises ValueError if `node`, which holds the mechanism's state at `key`, wraps it or does not put it first."""
    holder = type(node)
    if hasattr(node, "_fields") and holder.__module__.split(".")[0] == "optax" and not _is_lookahead(node):
        raise ValueError(
            f"the mechanism must not be wrapped: the state is an optax {holder.__name__}, in which raw gradients can "
            "bypass the mechanism, or its noise can change. Wrap nothing around a mechanism; freeze layers with "
            "dpx.coordinates.trainable"
        )
    if holder in (tuple, list) and key.idx != 0:
        raise ValueError(
            "the mechanism must come first in the chain, because a transform before it sees raw gradients and is not "
            f"counted; got it at position {key.idx}. (If this is a tuple of your own, pass the optimizer state alone.)"
        )
    if isinstance(node, Mapping) and any(
        _is_state_of_transform(part) for name, part in node.items() if name != key.key
    ):
        raise ValueError("the mechanism must come first, and optax.named_chain does not keep the order; use dpx.chain")


def _is_state_of_transform(state: Tree) -> bool:
    """Whether `state` may belong to a transformation, because it is empty or contains a type from optax."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node).__module__.startswith("optax"))
    return not nodes or any(type(node).__module__.startswith("optax") for node in nodes)


def _require_count_not_reset(state: Tree, release: ReleaseState) -> None:
    """Raises ValueError if an optax.lookahead may have reset the step count, as its reset_state=True does."""
    for node in jax.tree.leaves(state, is_leaf=_is_lookahead):
        if _is_lookahead(node) and int(release.step) <= int(node.steps_since_sync):
            raise ValueError(
                "the state of an optax.lookahead must count more steps than since its last synchronization, "
                "because otherwise reset_state=True may have reset its count and repeated its noise; got "
                f"{int(release.step)} steps, {int(node.steps_since_sync)} since then"
            )


def _is_lookahead(node: Any) -> bool:
    return type(node).__module__.startswith("optax") and type(node).__name__ == "LookaheadState"


def steps_taken(state: Tree) -> int:
    """Returns how many releases an optimizer state has recorded, as an int.

    Raises ValueError unless the state holds that of exactly one mechanism, which comes first and is not wrapped.

        >>> dpx.accounting.steps_taken(state)  # right after optimizer.init(params)
        0
    """
    return int(release_state(state).step)


class RunFacts(NamedTuple):
    """The facts about a run, read from a number of steps or from an optimizer state.

    steps: int, how many steps the cost covers. made: int, how many were made. planned: whether a plan says that the run
        ends after these steps, or later.
    numbers: int, the most values in one release; None if unknown. in_integers: whether a TPU drew the noise.
    batch_key, unit: ints, the marks of the key that drew the batches and of the privacy unit; 0 if unknown.
    state: the optimizer state; None if a number of steps was given.

    A callback or a person may look at the releases, and then decide to end the run. No proof covers a number of steps
    that is chosen like this, but one covers all steps that the run could make, because the run is a function of their
    releases. So a run costs its whole plan. With a budget, that is the whole budget, because someone could plan fewer
    steps, look, and plan more. Without a plan, nobody knows where the run could have ended: it costs the steps made.
    """

    steps: int
    made: int
    planned: bool = True
    numbers: int | None = None
    in_integers: bool = False
    batch_key: int = 0
    unit: int = 0
    state: Tree = None


def read_run_facts(steps_or_state: Any) -> RunFacts:
    """Reads a number of steps or a state. Raises ValueError for a fractional number, and as `release_state` does."""
    if not isinstance(steps_or_state, bool | int | float | np.generic):
        release = release_state(steps_or_state)
        made, plan = int(release.step), int(release.plan)
        return RunFacts(
            max(made, plan),
            made,
            made < plan or made in (0, plan, int(release.planned_steps)),
            int(release.numbers) or LARGEST_RELEASE,
            int(release.in_integers) > 0,
            int(release.batch_key),
            int(release.unit),
            steps_or_state,
        )
    steps = require_whole("steps", steps_or_state, minimum=0)
    return RunFacts(steps, made=steps)


def next_step_indices(state: Tree, sampling: Any, steps: int | None, *, beyond_budget: bool) -> range:
    """Returns the indices of the next `steps` steps, or of all remaining steps of the budget if `steps` is None.

    Raises ValueError if a step is beyond the budget, or if the state belongs to another sampling.
    """
    release = release_state(state)
    if int(release.sampling) != fingerprint(sampling):
        raise ValueError(f"the state is of a mechanism that counts another sampling than {sampling}")
    first, planned = int(release.step), int(release.planned_steps)
    if steps is None:
        if beyond_budget or not planned:
            raise ValueError("steps must be given to go beyond a budget, or for a mechanism without a dpx.Budget")
        return range(first, max(first, planned))
    if planned and first + steps > planned and not beyond_budget:
        raise ValueError(
            f"the budget is spent{'' if first >= planned else f' before {steps} more steps'}: its noise was calibrated "
            f"for {planned} steps, and {first} were taken. Pass beyond_budget=True to `take`, `batches` or "
            "`draw_ahead` of the sampling to continue with the same mechanism (another budget does not change a run). "
            "dpx.epsilon gives the cost"
        )
    return range(first, first + steps)


def require_state_of_mechanism(state: Tree, mechanism: Any, multipliers: np.ndarray) -> None:
    """Raises ValueError unless `mechanism` made the releases of `state` with these noise multipliers, in this order.

    multipliers: float64 (steps,), one for each release.
    """
    release = release_state(state)
    _require_count_not_reset(state, release)
    advice = "compute the cost of a state by the mechanism that made its releases, rebuilt with the same numbers"
    if problem := int(release.problem):
        raise ValueError(f"the state has no known cost: {list(REASONS.values())[problem - 1]}")
    kinds = ("sampling", "kind of event")
    for found, asked, differs in zip((release.sampling, release.event), mechanism.fingerprints, kinds, strict=True):
        if int(found) != int(asked):
            raise ValueError(f"the state's releases were made by a mechanism with another {differs}: {advice}")
    if int(release.noise_key) not in (0, int(mechanism.noise_key)):
        raise ValueError(
            "the noise of the state's releases was drawn with a key other than the mechanism's, so it may be the noise "
            f"of another run too: {advice} and the same key. (A compiled step keeps the key that it was compiled with.)"
        )
    _require_recorded_multipliers(release, multipliers, advice)


def _require_recorded_multipliers(release: ReleaseState, multipliers: np.ndarray, advice: str) -> None:
    """Raises ValueError unless the record holds these noise multipliers, float64 (steps,), in this order."""
    with np.errstate(divide="ignore"):
        expected = float(np.sum(np.minimum(multipliers**-2.0, LARGEST_PRECISION)))
    precision = float(release.precision[0]) - float(release.precision[1])
    if not abs(precision - expected) <= TOLERANCE * expected:
        raise ValueError(
            f"the state's releases were made with other noise: their noise multipliers have a sum of sigma^-2 of "
            f"{precision:.6g}, the mechanism's first {len(multipliers)} have {expected:.6g}. Either {advice}; or, if "
            "they are the same, its schedule is not a function of the step alone"
        )
    steps = len(multipliers)
    weighted = noise_order_hash(multipliers.astype(np.float32).view(np.uint32), np.arange(steps, dtype=np.int32))
    apart = (int(release.order) - int(weighted.sum(dtype=np.uint64)) + 2**31) % 2**32 - 2**31
    if abs(apart) > LARGEST_WEIGHT * min(steps, 6 * math.sqrt(steps)):
        raise ValueError(
            "the state's releases were made with other noise multipliers than the mechanism's, or in another order, "
            f"although the sum of sigma^-2 is the same. Either {advice}; or, if they are the same, its schedule is not "
            "a function of the step alone"
        )


def publishable_state(state: Tree) -> Tree:
    """Returns `state` with None for its `unreleased` and `unreleased_*` fields, so that it may be shown or shared.

    state: any pytree, or dataclasses and mappings of pytrees. The remaining fields depend on released values only.

    A value becomes None if the name of its field, key or type contains "unreleased" (in any letter case), also in
    flattened states, whose keys are tuples or strings such as ".unreleased_error['w']". An `Unreleased` becomes None
    too. So do functions and optimizers, whose closures may hold a key, and PRNG keys: typed ones, and raw ones, uint32
    (..., 2) or (..., 4), under a name that contains "key" or "rng" (in any letter case). Raises ValueError for a
    container of an unknown type, a pytree registered without the names of its parts, and an array of objects.

        >>> norms = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.1}
        >>> feedback = dpx.methods.dice_sgd(noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(), **norms)
        >>> dpx.publishable_state(feedback.init(params)).unreleased_error is None
        True
    """
    functions = functools.partial | optax.GradientTransformation
    if any(_names_unreleased_value(kind.__name__) for kind in type(state).__mro__) or isinstance(state, functions):
        return None
    if hasattr(state, "_fields"):
        names = state._fields
        return type(state)(*[_publishable_part(name, getattr(state, name)) for name in names])
    if is_dataclass(state) and not isinstance(state, type):
        parts = {field.name: getattr(state, field.name) for field in fields(state)}
        return replace(state, **_publishable_items(parts))
    if isinstance(state, dict):
        return _publishable_items(state)
    if isinstance(state, list | tuple):
        return type(state)(publishable_state(part) for part in state)
    parts, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda part: part is not state)
    if any(path for path, _ in parts):  # another container that jax knows
        return treedef.unflatten([_publishable_container_part(path[0], part, type(state)) for path, part in parts])
    if isinstance(state, Mapping):
        return _publishable_items(state)
    if callable(state):
        return None
    return _publishable_leaf(state)


def _publishable_container_part(key: Any, part: Tree, kind: type) -> Tree:
    """Returns the public part of an element of a container that jax knows. Raises ValueError if it has no name."""
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        raise ValueError(f"state must name its parts: register {kind} with jax.tree_util.register_pytree_with_keys")
    return _publishable_part(key, part)


def _publishable_part(name: Any, part: Tree) -> Tree:
    """Returns the public part of a value that is stored under `name`."""
    if _names_unreleased_value(name):
        return None
    if any(word in str(name).lower() for word in ("key", "rng")):
        part = jax.tree.map(lambda leaf: None if _may_be_raw_keys(leaf) else leaf, part)
    return publishable_state(part)


def _may_be_raw_keys(leaf: Any) -> bool:
    """Whether a leaf has the dtype and shape of raw PRNG keys."""
    return getattr(leaf, "dtype", None) == np.uint32 and jnp.shape(leaf)[-1:] in ((2,), (4,))


def _publishable_leaf(state: Any) -> Any:
    """Returns an array or a number as it is, and None for typed PRNG keys. Raises ValueError for other objects."""
    if isinstance(state, jax.Array) and jnp.issubdtype(state.dtype, jax.dtypes.prng_key):
        return None
    if isinstance(state, np.ndarray | np.generic) and (state.dtype.hasobject or state.dtype.names):
        raise ValueError(f"state must hold arrays of numbers, got one whose elements are {state.dtype.type}")
    if state is None or isinstance(state, jax.Array | np.ndarray | np.generic | int | float | complex | str):
        return state
    raise ValueError(f"state must be NamedTuples, dataclasses, mappings, lists, tuples and arrays, got {type(state)}")


def _publishable_items(items: Mapping) -> dict:
    return {name: _publishable_part(name, part) for name, part in items.items()}


def _names_unreleased_value(name: Any) -> bool:
    """Whether a field, a key, or a flattened path in any notation names an unreleased value."""
    return "unreleased" in str(name).lower()
