"""The record of the releases that a state has made. The bill reads it, and refuses a record that has no true bill."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent

from dpx._states import map_states

Tree = Any  # a pytree of arrays

LARGEST_PRECISION = 1e30  # of one release, noise_multiplier^-2; a multiplier below 1e-15 counts as 1e-15
REASONS = (
    "its releases were made by mechanisms of different samplings or events",
    "a batch had more rows that count than its sampling draws",
    "the rows that count in a batch are not those that `take` drew. Give the batch unchanged; for several views of one "
    "example, average over them inside the loss",
    "a batch was used at another step than it was drawn for, and releases that share a batch cost more than those of "
    "independent batches. Take a new batch for every step, with the state after the last one",
    "its batches were drawn with more than one key, so they are not those of one permutation an epoch",
    "the chunks of a batch were not added each once, in order, and with the mechanism and the state that the batch was "
    "released with",
    "a batch was drawn by another sampling than the one that is billed. Draw with the `sampling` of the mechanism",
)
SEVERAL_KEYS = np.uint32(1)  # in place of the mark of a key, which is larger
TOLERANCE = 1e-5  # relative, between the precision of a state and that of a mechanism, because float32 rounds


class ReleaseState(NamedTuple):
    """The record of the releases so far; the state of every mechanism holds exactly one. All of it is public.

    step:          int32 (), how many releases were made.
    precision:     float32 (2,), the sum of noise_multiplier^-2 over them, and the amount by which rounding made that
                   sum too large (Kahan's compensation).
    terms:         uint32 (2,), fingerprints of the sampling record, and of the event without its noise multipliers.
                   After a release that cannot be billed, terms[0] is the number of the reason in REASONS, from 1.
    planned_steps: int32 (), the steps of the budget that the noise was calibrated for; 0 without a budget.
    stream:        uint32 (), the mark of the key that draws the batches (`keys.mark`); 0 while it is not known, 1 after
                   batches of several keys.
    """

    step: jax.Array
    precision: jax.Array
    terms: jax.Array
    planned_steps: jax.Array
    stream: jax.Array

    @classmethod
    def empty(cls) -> "ReleaseState":
        """The record before the first release. `Mechanism.init` sets the terms and the planned steps."""
        zero = jnp.zeros((), jnp.int32)
        return cls(zero, jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.uint32), zero, jnp.zeros((), jnp.uint32))

    def after(self, noise_multiplier: jax.Array | float) -> "ReleaseState":
        """The record after one more release with this noise multiplier, float32 ()."""
        total, rounding = self.precision
        term = jnp.minimum(jnp.float32(noise_multiplier) ** -2, LARGEST_PRECISION) - rounding
        longer = total + term
        return self._replace(step=self.step + 1, precision=jnp.stack([longer, (longer - total) - term]))


def signed(state: Tree, terms: np.ndarray, planned_steps: int) -> Tree:
    """A new `state`, with the terms under which its releases will be billed. terms: uint32 (2,), see `terms_of`."""
    planned = jnp.full((), planned_steps, jnp.int32)
    return map_states(lambda node: node._replace(terms=jnp.asarray(terms), planned_steps=planned), state, ReleaseState)


def countersigned(
    state: Tree, terms: np.ndarray, rows: jax.Array, sampling: Any, drawn: jax.Array | None, *, ordered: Any = True
) -> Tree:
    """`state` before a release under `terms`. If they do not hold for that release, no mechanism will bill the state.

    terms: uint32 (2,). rows: int (), how many rows of the batch count. drawn: uint32 (5,), `Batch.drawn`, or None.
    ordered: bool (), whether the sums are of the chunks of one batch, each once and in order, under this state.
    """
    most = int(min(getattr(sampling, "most_rows", math.inf), 2**31 - 1))

    def countersign(node):
        # `jnp.any` would take longer to compile.
        wrong = [jnp.logical_or(*(node.terms != terms)), rows > most, *[False] * 3, jnp.logical_not(ordered)]
        if drawn is not None:
            step, drawn_rows, stream, first_row, drawn_by = jnp.asarray(drawn).astype(jnp.uint32)
            several = (node.stream != 0) & (stream != node.stream)
            other_key = getattr(sampling, "one_key", False) & several
            other_rows = (rows.astype(jnp.uint32) != drawn_rows) | (first_row != 0)
            wrong[2:5] = other_rows, step != node.step.astype(jnp.uint32), other_key
            wrong.append(drawn_by != terms[0])
            node = node._replace(stream=jnp.where(several, SEVERAL_KEYS, stream))
        signature = node.terms
        for reason, holds in enumerate(wrong, start=1):
            signature = jnp.where(holds & (signature > len(REASONS)), jnp.uint32(reason), signature)
        return node._replace(terms=signature)

    return map_states(countersign, state, ReleaseState)


def terms_of(event: DpEvent, sampling: Any) -> np.ndarray:
    """Fingerprints of a sampling record and of the event of one step without its noise multipliers, uint32 (2,)."""
    return np.array([sampling_terms(sampling), _fingerprint(_terms(event))], np.uint32)


def sampling_terms(sampling: Any) -> int:
    return _fingerprint(sampling)


def _fingerprint(value: Any) -> int:
    return zlib.crc32(repr(value).encode()) | 2**31  # never the number of a reason


def _terms(value: Any) -> Any:
    if isinstance(value, DpEvent):
        named = [(field.name, getattr(value, field.name)) for field in attrs.fields(type(value))]
        return type(value).__name__, [(name, _terms(part)) for name, part in named if name != "noise_multiplier"]
    return [_terms(part) for part in value] if isinstance(value, list | tuple) else value


def release_state(state: Tree) -> ReleaseState:
    """The one ReleaseState in an optimizer state in which the mechanism comes first and nothing wraps it.

    state: of a mechanism, of `dpx.chain` or `optax.chain`, of `optax.lookahead`, or an object that holds one, such as
        flax's TrainState or nnx.Optimizer.
    Raises ValueError for none, for several, and where a transform before the mechanism or a wrapper around it can
    change how much one example moves the release.
    """
    releases = _search(state, ())
    if len(releases) != 1:
        raise ValueError(
            f"state must hold exactly one mechanism's state, found {len(releases)}. (Restore a stored state into the "
            "structure of optimizer.init(params).)"
        )
    release, holders = releases[0]
    for holder, key in holders:
        _require_plain(holder, key)
    if isinstance(release.step, jax.core.Tracer):
        raise ValueError("state must be known, got one that jax is tracing: read its steps and its bill outside of jit")
    if jnp.shape(release.step) != ():
        raise ValueError(
            f"state must be of one run, got {jnp.shape(release.step)} runs. Runs of one key share their noise: give "
            "each a key of its own, and bill them together by dpx.compose"
        )
    return release


def _search(node: Tree, holders: tuple) -> list[tuple[ReleaseState, tuple]]:
    """Every ReleaseState in `node`, with the nodes that hold it, the outermost first, and the key in each."""
    if isinstance(node, ReleaseState):
        return [(node, holders)]
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda part: part is not node)
    return [hit for path, part in children if path for hit in _search(part, (*holders, (node, path[0])))]


def _require_plain(node: Any, key: Any) -> None:
    """Raises ValueError if `node`, which holds the mechanism's state at `key`, is of a wrapper or of another chain."""
    holder = type(node)
    if hasattr(node, "_fields") and holder.__module__.split(".")[0] == "optax" and not _is_lookahead(node):
        raise ValueError(
            f"the mechanism must not be wrapped: the state is an optax {holder.__name__}, in which raw gradients can "
            "pass by the mechanism, or its noise can change. Wrap nothing around a mechanism; freeze layers with "
            "dpx.coordinates.trainable"
        )
    if holder in (tuple, list) and key.idx != 0:
        raise ValueError(
            "the mechanism must come first in the chain, because a transform before it sees raw gradients and is not "
            f"billed; got it at position {key.idx}. (If this is a tuple of your own, pass the optimizer state alone.)"
        )
    if isinstance(node, Mapping) and any(_is_transform(part) for name, part in node.items() if name != key.key):
        raise ValueError("the mechanism must come first, and optax.named_chain does not keep the order; use dpx.chain")


def _is_transform(state: Tree) -> bool:
    """Whether `state` may belong to a transformation, because it is empty or of optax."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node).__module__.startswith("optax"))
    return not nodes or any(type(node).__module__.startswith("optax") for node in nodes)


def _require_counted(state: Tree, release: ReleaseState) -> None:
    """Raises ValueError if an optax.lookahead may have reset the step count, as its reset_state=True does."""
    for node in jax.tree.leaves(state, is_leaf=_is_lookahead):
        if _is_lookahead(node) and int(release.step) <= int(node.steps_since_sync):
            raise ValueError(
                "the state of an optax.lookahead must show more steps than since its last synchronization, else "
                "reset_state=True may have set back its count, and repeated its noise; got "
                f"{int(release.step)} steps, {int(node.steps_since_sync)} since then"
            )


def _is_lookahead(node: Any) -> bool:
    return type(node).__module__.startswith("optax") and type(node).__name__ == "LookaheadState"


def steps_taken(state: Tree) -> int:
    """How many releases an optimizer state has made, an int.

    Raises ValueError where the state does not hold exactly one mechanism's, or something wraps the mechanism.
    """
    return int(release_state(state).step)


def next_steps(state: Tree, sampling: Any, steps: int | None, *, beyond_budget: bool) -> range:
    """The numbers of the next `steps` steps; of all that are left of the budget, if `steps` is None.

    Raises ValueError if one of them is beyond the budget, and for the state of another sampling.
    """
    release = release_state(state)
    if int(release.terms[0]) > len(REASONS) and int(release.terms[0]) != sampling_terms(sampling):
        raise ValueError(f"the state is of a mechanism that bills the sampling of another record than {sampling}")
    first, planned = int(release.step), int(release.planned_steps)
    if steps is None:
        if beyond_budget or not planned:
            raise ValueError("steps must be given beyond a budget, and for a mechanism that has no dpx.Budget")
        return range(first, max(first, planned))
    if planned and first + steps > planned and not beyond_budget:
        raise ValueError(
            f"the budget is spent{'' if first >= planned else f' before {steps} more steps'}: its noise was calibrated "
            f"for {planned} steps, and {first} were made. Pass beyond_budget=True to continue with the same mechanism "
            "(another budget does not change a run). dpx.epsilon tells the cost"
        )
    return range(first, first + steps)


def require_paid_by(state: Tree, terms: np.ndarray, multipliers: np.ndarray) -> None:
    """Raises ValueError unless the releases of `state` had these terms and these noise multipliers.

    terms: uint32 (2,), see `terms_of`. multipliers: float64 (steps,), one for each release.
    """
    release = release_state(state)
    _require_counted(state, release)
    advice = "bill a state by the mechanism that made its releases, rebuilt with the same numbers"
    if 1 <= int(release.terms[0]) <= len(REASONS):
        raise ValueError(f"the state has no bill: {REASONS[int(release.terms[0]) - 1]}")
    for paid, asked, differs in zip(release.terms, terms, ("sampling", "kind of event"), strict=True):
        if int(paid) != int(asked):
            raise ValueError(f"the state's releases were made by a mechanism with another {differs}: {advice}")
    with np.errstate(divide="ignore"):
        expected = float(np.sum(np.minimum(multipliers**-2.0, LARGEST_PRECISION)))
    precision = float(release.precision[0]) - float(release.precision[1])
    if not abs(precision - expected) <= TOLERANCE * expected:
        raise ValueError(
            f"the state's releases were made with other noise: their noise multipliers have a sum of sigma^-2 of "
            f"{precision:.6g}, the mechanism's first {len(multipliers)} have {expected:.6g}. Either {advice}; or, if "
            "they are the same, its schedule is no function of the step alone"
        )
