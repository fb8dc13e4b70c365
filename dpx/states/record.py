"""The record of the releases that a state has made, and the checks before each release.

Samplings and events are stored as fingerprints of their identities. An identity consists of plain values: two objects
are the same if their identities are equal, however they print.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from dpx.keys.noise import collect_release_sizes, count_normal_pairs, count_numbers_with_cost, untracked_mapped_axes
from dpx.keys.streams import key_words
from dpx.values import Tree, described, map_nodes_of_type
from dpx.xla.place import current_place

RECORD_VERSION = 2  # raise it when the form or meaning of a record changes, so stored states are refused by version
LARGEST_PRECISION = 1e30  # of one release, noise_multiplier^-2; multipliers below 1e-15 count as 1e-15
SEVERAL_KEYS = np.uint32(1)  # replaces the fingerprint of a key, which is always larger
LARGEST_WEIGHT = 255  # the largest weight in `noise_order_hash`
# Why a run has no cost. The record stores a reason's position in this list, counted from 1.
REASONS = {
    "mechanism": "its releases were made by mechanisms of different samplings or events",
    "most rows": "a batch had more rows that count than its sampling draws",
    "rows": "the rows that count in a batch are not those that `take` drew. Give the batch unchanged; for several "
    "views of one example, average over them inside the loss",
    "step": "a batch was used at another step than it was drawn for, and releases that share a batch cost more than "
    "those of independent batches. Take a new batch for every step, with the state after the last one",
    "batch key": "its batches were drawn with more than one key, so they are not those of one permutation an epoch",
    "chunks": "the chunks of a batch were not added each once, in order, and with the mechanism, the clip norm and the "
    "state that the batch was released with",
    "sampling": "a batch was drawn by another sampling than that of the mechanism. Draw with the `sampling` of the "
    "mechanism",
    "noise key": "its noise was drawn with more than one key, so it may be the noise of another run too. A compiled "
    "step keeps the key that it was compiled with: compile a step for every mechanism",
    "unit": "its batches hold units of different kinds, such as examples and users, so no one unit is protected",
    "devices": "runs under jax.vmap, or the devices of a jax.pmap or of a jax.shard_map with check_vma=False, released "
    "several sums with one noise. Give each a key of its own, or make one sum of a sharded batch under jax.jit",
}


class DrawRecord(NamedTuple):
    """How a sampling says it drew a batch. Fields are uint32 (), or (steps,) for the draws of many steps.

    step:      how many steps came before the one for which the batch was drawn.
    rows:      how many of its rows are included.
    key:       the fingerprint of the key that drew it (`keys.mark_of_key`).
    first_row: 0; for a chunk of a batch, how many rows the chunks before it have.
    sampling:  a fingerprint of the sampling.
    unit:      a fingerprint of the name of what a row holds: "example", or the `privacy_unit` of the data.
    """

    step: Any
    rows: Any
    key: Any
    first_row: Any
    sampling: Any
    unit: Any


# The fields of a record, in order. `version` stays first, so that a later dpx finds it.
FACTS = (
    *("version", "sampling", "event", "planned_steps", "plan", "numbers", "in_integers"),
    *("order", "noise_key", "batch_key", "unit", "problem"),
)


class ReleaseState(NamedTuple):
    """The record of the releases so far; the state of every mechanism holds exactly one. Every part of it is public.

    step:      int32 (), how many releases were made.
    precision: float32 (2,), the sum of noise_multiplier^-2 over the releases, and the amount by which rounding made
               that sum too large (Kahan's compensation).
    facts:     uint32 (12,), the fields named in FACTS. With one array per field, the step of a small MLP took 1.3 times
               as long, because passing an array in and out takes about 2 us.

    version:         RECORD_VERSION.
    sampling, event: fingerprints of the sampling record, and of the event without its noise multipliers.
    planned_steps:   the steps of the budget that the noise was calibrated for; 0 without a budget.
    plan:            the planned steps of the run, all of which are charged (`reading.RunFacts`); 0 without a plan,
                     or if public information alone decides where the run ends.
    numbers:         the most values in one release that the cost accounts for; 0 means 2^32.
    in_integers:     1 after a release whose noise was drawn in integers, as on a TPU; otherwise 0.
    order:           the sum of `noise_order_hash` over the releases, which depends on the order of the multipliers.
    noise_key:       the fingerprint of the noise key (`keys.mark_of_key`); 0 before the first release.
    batch_key:       the fingerprint of the batches' key; 0 if unknown, 1 if there were several keys.
    unit:            the fingerprint of the privacy unit of the rows (`unit_fingerprint`); 0 if unknown.
    problem:         0, or why the cost is not true: the position of the reason in REASONS, from 1.
    """

    step: jax.Array
    precision: jax.Array
    facts: Any

    @classmethod
    def empty_record(cls, params: Tree = None) -> "ReleaseState":
        """Returns the record before the first release. `Mechanism.init` sets the fingerprints and the planned steps.

        params: pytree shaped like what a release will hold. If it is None, the cost assumes 2^32 values. Every array
            has its own buffer, because a jitted step that donates the state cannot donate one buffer twice.
        """
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        known = {"version": RECORD_VERSION, "numbers": _stored_count(count_numbers_with_cost(shapes)) if shapes else 0}
        with jax.ensure_compile_time_eval():  # so that the facts are known inside of jit too
            facts = jnp.array([known.get(name, 0) for name in FACTS], jnp.uint32)
        return cls(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.float32), facts)

    def __getattr__(self, name: str) -> Any:
        """Returns a field in FACTS, uint32 with the axes of `step`."""
        if name not in FACTS:
            raise AttributeError(f"a ReleaseState has no {name!r}: a state must be of the same optimizer")
        place = FACTS.index(name)
        if isinstance(self.facts, np.ndarray):
            return self.facts[..., place]
        return jax.lax.index_in_dim(self.facts, place, axis=-1, keepdims=False)

    def with_facts_on_host(self) -> "ReleaseState":
        """Returns the record with its facts in NumPy, so that reading a fact runs no program."""
        return self._replace(facts=np.asarray(self.facts))

    def with_fields(self, **changed: Any) -> "ReleaseState":
        """Returns the record with new values for some fields in FACTS: uint32s or ints, with the axes of `step`."""
        facts, given = self.facts, {FACTS.index(name): fact for name, fact in changed.items()}
        if any(isinstance(each, jax.core.Tracer) for each in (facts, *changed.values())):
            for place, fact in given.items():  # `jnp.where` has twice as many equations
                here = np.broadcast_to(np.arange(len(FACTS)) == place, facts.shape)
                fact = jax.lax.broadcast_in_dim(jnp.asarray(fact, jnp.uint32), facts.shape, range(facts.ndim - 1))
                facts = jax.lax.select(here, fact, facts)
            return self._replace(facts=facts)
        facts = np.array(facts)
        for place, fact in given.items():
            facts[..., place] = fact
        if getattr(self.facts, "committed", False):  # arrays on a mesh stay there, because the step is compiled for it
            return self._replace(facts=jax.device_put(facts, self.facts.sharding))
        return self._replace(facts=jnp.array(facts))

    def after_release(self, noise_multiplier: jax.Array | float) -> "ReleaseState":
        """Returns the record after one more release, with this float32 scalar noise multiplier."""
        multiplier = jnp.asarray(noise_multiplier, jnp.float32)
        total, rounding = self.precision
        term = jnp.minimum(multiplier**-2, LARGEST_PRECISION) - rounding
        longer = total + term
        hashed = noise_order_hash(jax.lax.bitcast_convert_type(multiplier, jnp.uint32), self.step)
        in_integers = {"in_integers": 1} if current_place().platform == "tpu" else {}
        return self._replace(step=self.step + 1, precision=jnp.stack([longer, (longer - total) - term])).with_fields(
            order=self.order + hashed, **in_integers
        )


def noise_order_hash(bits: Any, step: Any) -> Any:
    """Returns what a release adds to `ReleaseState.order`, modulo 2^32: its noise multiplier times the step's weight.

    bits: uint32 (...), the bits of the float32 noise multiplier. They grow roughly like its logarithm, by 2^23 for a
        factor of 2. The last 6 are dropped: a relative change of 2^-18, or 64 roundings, moves the rest by at most 1.
    step: int32 (...). Both are arrays of numpy or of jax.

    The weight of a step, from -255 to -128 or from 128 to 255, is a hash of the step. So the same multipliers in
    another order have another sum. If all multipliers agree up to rounding, the sums of T steps differ by at most
    255 T, and by at most 255 sqrt(36 T) except with probability 1e-7 (Hoeffding's inequality).
    """
    mixed = step.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
    mixed = mixed ^ (mixed >> 13)
    term = ((mixed & np.uint32(127)) + np.uint32(128)) * (bits >> 6)
    negative = (mixed >> 30 & np.uint32(1)) * np.uint32(2**32 - 1)  # no bits, or all
    return (term ^ negative) - negative


def stamp_fingerprints(state: Tree, fingerprints: np.ndarray, budget: Any) -> Tree:
    """Returns a new `state` with the `fingerprints`, uint32 (2,), of what its releases will cost.

    budget: the `dpx.Budget` that plans the run, or None. Raises ValueError if releases exceed its `numbers`.
    """
    steps, numbers = (0, None) if budget is None else (budget.steps, budget.numbers)
    stamp = {"sampling": fingerprints[0], "event": fingerprints[1], "planned_steps": steps}

    def stamp_record(node: ReleaseState) -> ReleaseState:
        if numbers is None:
            return node.with_fields(**stamp)
        if not isinstance(node.facts, jax.core.Tracer):
            _require_numbers_within_budget(int(node.with_facts_on_host().numbers), numbers)
        return node.with_fields(**stamp, numbers=_stored_count(numbers))

    state = map_nodes_of_type(stamp_record, state, ReleaseState)
    return set_run_plan(state, 0 if budget is None or budget.public_stop else steps)


def set_run_plan(state: Tree, steps: int) -> Tree:
    """Sets the plan of a run to `steps`; 0 means no plan."""
    return map_nodes_of_type(lambda node: node.with_fields(plan=steps), state, ReleaseState)


def _require_numbers_within_budget(own: int, numbers: int) -> None:
    """Raises ValueError if a release has more values than the budget allows."""
    if own > numbers:
        raise ValueError(
            f"a release must have at most the {numbers} numbers of the dpx.Budget, for which its noise was found, got "
            f"{own} of these parameters: give a Budget with numbers={own}, or with none"
        )


def release_and_record_draws(release: Callable, *given: Any, budget: Any) -> tuple[Tree, Tree]:
    """Returns the updates and state from `release(*given)`. Raises the state's count of values if more were drawn.

    Values that an earlier trace drew are not seen. So if fewer are counted than the state knows, or none, 2^32 are
    recorded. budget and errors: as for `stamp_fingerprints`.
    """
    with collect_release_sizes() as drawn:
        updates, state = release(*given)
    several = [2 * count_normal_pairs(one) for one in drawn] if len(drawn) > 1 else drawn  # each draws whole pairs
    numbers = min(sum(several), 2**32)
    stated = budget is not None and budget.numbers is not None
    if stated:
        _require_numbers_within_budget(numbers, budget.numbers)
    own, one, most = np.uint32((numbers - 1) % 2**32), np.uint32(1), np.uint32(2**32 - 1)

    def of_release(node: ReleaseState) -> ReleaseState:
        known = node.numbers - one  # 0, which means 2^32, becomes the largest
        return node.with_fields(numbers=jnp.where((own < known) & (not stated), most, jnp.maximum(known, own)) + one)

    return updates, map_nodes_of_type(of_release, state, ReleaseState)


def _stored_count(numbers: int) -> np.uint32:
    """Returns a number of values in the form in which it is stored: 0 means 2^32 or more."""
    return np.uint32(min(numbers, 2**32) % 2**32)


def check_batch(
    state: Tree, mechanism: Any, sums: Tree, rows: jax.Array, drawn: DrawRecord | None, *, ordered: Any = True
) -> Tree:
    """Checks a batch against what the mechanism's cost assumes. If it does not fit, marks the state as having no cost.

    sums: the sums of the batch. rows: int (), how many of its rows are included. ordered: bool (), whether the sums
        come from the chunks of one batch, each added once and in order, under this state.
    """
    sampling, own, noise_key = mechanism.sampling, mechanism.fingerprints, mechanism.noise_key
    most = int(min(sampling.most_rows, 2**31 - 1))

    def check(node):
        # `jnp.any` would take longer to compile.
        wrong = {
            "mechanism": (node.sampling != own[0]) | (node.event != own[1]),
            "most rows": rows > most,
            "noise key": _marks_differ(node.noise_key, noise_key),
        }
        if ordered is not True:
            wrong["chunks"] = jnp.logical_not(ordered)
        noise = jnp.append(key_words(mechanism.key), node.step.astype(jnp.uint32))
        wrong["devices"] = _shares_noise(noise)
        if axes := untracked_mapped_axes():
            wrong["devices"] |= _noise_is_repeated(axes, noise, sums)
        found = {"noise_key": noise_key}
        if drawn is not None:
            of_batch = DrawRecord(*(jnp.asarray(number).astype(jnp.uint32) for number in drawn))
            several = _marks_differ(node.batch_key, of_batch.key)
            if sampling.one_key:
                wrong["batch key"] = several
            wrong |= {
                "rows": (rows.astype(jnp.uint32) != of_batch.rows) | (of_batch.first_row != 0),
                "step": of_batch.step != node.step.astype(jnp.uint32),
                "sampling": of_batch.sampling != own[0],
                "unit": _marks_differ(node.unit, of_batch.unit),
            }
            batch_key = jax.lax.select(several, jnp.uint32(SEVERAL_KEYS), of_batch.key)
            found |= {"batch_key": batch_key, "unit": of_batch.unit}
        problem = jnp.uint32(0)
        for place, reason in reversed(list(enumerate(REASONS, start=1))):
            if reason in wrong:
                problem = jax.lax.select(wrong[reason], jnp.uint32(place), problem)  # `jnp.where` takes longer to trace
        known = node.problem
        return node.with_fields(**found, problem=jax.lax.select(known == 0, problem, known))

    return map_nodes_of_type(check, state, ReleaseState)


@jax.custom_batching.custom_vmap
def _shares_noise(noise: jax.Array) -> jax.Array:
    """Whether another run under `jax.vmap` has the same noise, bool (...). noise: uint32 (..., n), which identifies it.

    If a branch depends on the data of the runs, every run gets a copy of one key, so this shows only at run time."""
    return jnp.zeros(noise.shape[:-1], bool)


@_shares_noise.def_vmap
def _share_noise_of_runs(count, _, noise):
    rows = noise.reshape(-1, noise.shape[-1])
    order = jnp.lexsort(rows.T)  # with many runs, as in an audit
    same = jnp.all(rows[order[1:]] == rows[order[:-1]], 1)
    found = jnp.zeros(len(rows), bool).at[order].set(jnp.pad(same, (0, 1)) | jnp.pad(same, (1, 0)))
    return found.reshape(noise.shape[:-1]) | _shares_noise(noise), True  # again, for a `jax.vmap` around this one


def _noise_is_repeated(axes: tuple[str, ...], noise: jax.Array, sums: Tree) -> jax.Array:
    """Whether another device along these axes has the same noise for different sums, bool (). noise: as above."""

    def checksum(x):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).reshape(-1)
        return jnp.sum(bits * (2 * jax.lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)

    own = jnp.stack([*noise, *map(checksum, jax.tree.leaves(sums))])
    same = jax.lax.all_gather(own, axes).reshape(-1, own.size) == own[None]
    return jnp.any(jnp.all(same[:, : len(noise)], 1) & ~jnp.all(same, 1))


def _marks_differ(known: jax.Array, mark: Any) -> jax.Array:
    """Whether a fingerprint, uint32 (), contradicts the known one, which is 0 while there is none."""
    return (known != 0) & (known != mark)


def unit_fingerprint(unit: str) -> int:
    """Returns a fingerprint, in [2^31, 2^32), of the name of the privacy unit, such as "example" or "user".

    Raises ValueError unless it is a nonempty string, because a fingerprint of a secret, such as a key, would be public.
    """
    if not isinstance(unit, str) or not unit:
        raise ValueError(f'unit must be the name of what epsilon protects, such as "user", got {described(unit)}')
    return fingerprint(unit)


_PLAIN = (str, int, float)  # and bool, which is an int


def identity_of(value: Any, *, without: str = "") -> Any:
    """Returns the identity of `value`: nested tuples of None, bools, ints, floats and strings.

    A record becomes the name of its type and its fields, or what its method `identity()` returns. An array becomes its
    shape, dtype and digest. without: the name of a field to leave out.

    Raises ValueError for other objects, such as functions.
    """
    if type(value) is tuple:  # a program consists mostly of nested tuples
        return tuple([identity_of(part, without=without) for part in value])
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "identity"):
        return value.identity()
    if isinstance(value, bytes):
        return "bytes", hashlib.sha256(value).hexdigest()
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return "array", array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()
    if isinstance(value, tuple | list):
        return tuple(identity_of(part, without=without) for part in value)
    if isinstance(value, type) or not (attrs.has(type(value)) or dataclasses.is_dataclass(value)):
        raise ValueError(f"a record must have a method identity() or be a dataclass, got {described(value)}")
    return identity_by_fields(value, without=without)


def identity_by_fields(record: Any, *, without: str = "") -> tuple:
    """Returns the identity of a dataclass or an event: its type's name, and its fields except the one left out."""
    kind = type(record)
    fields = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(record)
    names = [field.name for field in fields if field.name != without]
    return kind.__name__, *((name, identity_of(getattr(record, name), without=without)) for name in names)


def fingerprint(value: Any, *, without: str = "") -> int:
    """Returns a number in [2^31, 2^32) that differs between two identities, except with probability 2^-31."""
    words = json.dumps(identity_of(value, without=without))
    return zlib.crc32(words.encode()) | 2**31  # neither 0, which is unknown, nor 1
