"""The record of the releases that a state has made: what it counts, and what it checks before each release."""

import math
import zlib
from typing import Any, NamedTuple

import attrs
import jax
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
