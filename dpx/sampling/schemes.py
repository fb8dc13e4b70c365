"""Samplings: one frozen record draws the batches and states their cost, so the two cannot disagree.

`draw(key, step)` runs on the host, and is a pure function of the key, the step and the record, so a resumed run draws
the same batches. `take`, `batches` and `draw_ahead` read the step from the optimizer state, and call it. The key must
stay as secret as the noise key, because amplification by sampling holds only for batches that nobody knows.
"""

import abc
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.sampling import loading
from dpx.sampling.batch import (
    Batch,
    Draw,
    DrawnBatches,
    check_and_store_sizes,
    draw_step_per_epoch,
    pad_draw,
    pad_examples,
    permutation,
    random_order,
    record_draw,
    require_not_traced,
    require_step,
    step_key,
)
from dpx.sampling.data import CheckedData
from dpx.states.reading import next_step_indices
from dpx.states.record import identity_by_fields
from dpx.values import Tree, described, explain_misuse, require_number, require_whole

_ROUNDING = 1e-12  # relative tolerance of a number of steps: 0.1 epochs of 30 steps are 3 steps, not 4


@dataclass(frozen=True, kw_only=True)
class Sampling(abc.ABC):
    """A sampling, as mechanisms, accountants and training loops see it.

    examples: size of the data set; a public number.
    relation: the neighboring relation under which `event` is true: "zero_out" (one example replaced by a null, which
              keeps its place and does not count), "replace_one" (one exchanged for another) or "add_or_remove" (one
              more or fewer; it covers real sums only, because it moves the other rows, and so changes their float sum).
    divisor:  the expected batch size, a public constant. The private gradient is the noisy sum divided by it.
    pads:     whether a batch may hold padding; otherwise every batch has `divisor` rows.
    most_rows: the most rows of a batch that can count; inf if the size is random and has no limit.
    usual_rows: int, the rows of a drawn batch, padding included. A batch that does not fit has more.
    steps_per_epoch: float, how many steps it takes, on average, to draw as many examples as there are.
    one_key:  whether `event` is true only if all batches of a run are drawn with one key.
    event:    (multipliers) -> DpEvent of len(multipliers) releases with these noise multipliers, float64 (steps,).
    """

    examples: int
    relation: ClassVar[str]
    one_key: ClassVar[bool] = False

    def __init_subclass__(cls):
        super().__init_subclass__()
        if event := vars(cls).get("event"):
            checked = functools.wraps(event)(lambda self, multipliers: event(self, require_multipliers(multipliers)))
            cls.event = checked  # pyrefly: ignore[bad-assignment]

    def identity(self) -> tuple:
        """Everything that decides which examples are drawn, as plain values. Optimizer states remember it."""
        return identity_by_fields(self)

    @property
    @abc.abstractmethod
    def divisor(self) -> float: ...

    @property
    def pads(self) -> bool:
        return False

    @property
    def most_rows(self) -> float:
        return self.divisor

    @property
    def usual_rows(self) -> int:
        return math.ceil(self.divisor)

    @property
    def unweighted_and_unlimited(self) -> bool:
        """Whether all examples take part at the same rate, and no limit on the rows drops any."""
        return True

    @property
    def has_weights(self) -> bool:
        """Whether the examples have public weights."""
        return False

    @property
    def truncates(self) -> bool:
        """Whether a batch is cut if more than `most_rows` examples are drawn."""
        return False

    @property
    def draws_examples_independently(self) -> bool:
        """Whether each step tosses a coin for each example, or takes all; the cost of several records requires this."""
        return False

    @property
    def group_count(self) -> int:
        """The number of groups of examples that take turns, one group at each step."""
        return 1

    @property
    def steps_per_exact_epoch(self) -> int:
        """The number of steps that hold every example exactly once; 0 if chance decides how often one takes part."""
        return 0

    @property
    def steps_per_public_epoch(self) -> int:
        """The `steps_per_exact_epoch` if an example's step is not secret, so that an epoch costs one release, or 0."""
        return self.steps_per_exact_epoch

    @functools.cached_property  # not a property, because `RandomAllocation` makes it a field
    def steps_per_epoch(self) -> float:
        return self.examples / self.divisor

    def steps(self, *, epochs: float) -> int:
        """Returns the number of steps in `epochs` epochs, an int: epochs * examples / divisor, rounded up.

        `ShuffledEpochs`, where an epoch's last batch may be short, returns epochs * steps_per_epoch, rounded up.
        epochs: float. Raises ValueError unless it is positive and finite.
        """
        steps = require_number("epochs", epochs, minimum=0, exclusive=True) * self.steps_per_epoch
        return math.ceil(steps * (1 - _ROUNDING))

    @abc.abstractmethod
    def event(self, multipliers: np.ndarray) -> DpEvent: ...

    @abc.abstractmethod
    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        """Draws the examples that take part in one step, as arrays of a fixed shape for a jitted step.

        key: a secret scalar PRNG key. step: int, the number of earlier steps in the whole run. The step never restarts,
            because a step that is drawn twice has the same batch, but the cost assumes two independent ones.
        size: rows of the result, at least as many as take part; None takes the sampling's own size.
        Raises ValueError if step is not a whole number of at least 0, and if size is too small.
        """

    @abc.abstractmethod
    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        """Draws which of the first `steps` steps one example takes part in, bool (steps,), also inside jit; for audits.

        key: a scalar PRNG key for this example in this run. The distribution is that of `draw`, but not the outcome.
        """

    def take(
        self, data: Any, key: jax.Array, state: Tree, *, size: int | None = None, beyond_budget: bool = False
    ) -> Batch:
        """Returns the batch of a run's next step, a `dpx.Batch` of arrays with `size` rows.

        data: the `examples` examples. Either a pytree of arrays with the examples on axis 0 of each (jax, numpy or a
            memory map, from which only the drawn rows are read); or a source with `__len__` and `__getitem__(int)`,
            such as grain's data sources and torch's map-style datasets. Its items are pytrees of arrays and numbers
            with the same structure, shapes and dtypes. If it has `__getitems__(list of int)`, that is called instead,
            and its items must not share memory that is later overwritten (an item of `__getitem__` is copied at once).
            An item must depend on its index alone: if a repeated step read other values, the difference would show
            without noise. For random items (augmentation), give the source a method `random_item(int, rng)` in place of
            `__getitem__`. `rng`, a `numpy.random.Generator`, depends only on the item, the step and `key`, and reveals
            nothing about the key. For a pandas table, pass its numeric columns,
            `frame[columns].to_numpy(numpy.float32)`; for a sparse matrix, a dense array.
        key: a secret scalar PRNG key for one run. With `ShuffledEpochs` and `RandomAllocation` it must be the same at
            every step, because a run whose batches come from several orders has no known cost.
        state: the optimizer state. This call reads its step count, and so waits until the state is computed.
        size: rows of the batch, padding included; None lets the sampling choose.
        beyond_budget: whether to continue after the steps of the `dpx.Budget` that calibrated the mechanism.

        Raises ValueError for data of another length or with items that differ in structure, for an item that differs
        when it is read again (dpx rereads 16 per call at first, later one in 256), for pandas objects and sparse
        matrices, if the state's mechanism accounts for another sampling, at the first step beyond the budget, and
        inside jit, where `draw_ahead` works instead.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        (step,) = next_step_indices(state, self, 1, beyond_budget=beyond_budget)
        examples = CheckedData(data, self.examples, key)
        indices, included = self.draw(key, step, size=size)
        drawn = record_draw(self, key, step, included, examples.unit)
        return Batch(examples.read_included_rows(indices, included, step), included, drawn)

    def batches(
        self,
        data: Any,
        key: jax.Array,
        state: Tree,
        *,
        steps: int | None = None,
        chunk_size: int | None = None,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 2,
        size: int | None = None,
        beyond_budget: bool = False,
    ) -> Iterator[Any]:
        """Returns an iterator over the batches of the next steps: those of `take`, but loaded while earlier steps run.

        Use each batch once, in order, with the state after the previous step: after a batch at another step, the state
        has no known cost. The state is read only in this call; after an interruption, call again with the last state.

        data, key, size, beyond_budget: as in `take`. A thread reads the data if `prefetch` is above 0.
        state: the optimizer state before the first of the steps.
        steps: how many batches; None for all that the state's `dpx.Budget` has left. If none are left, the iterator is
            empty, without an error, so that a finished run can be resumed.
        chunk_size: rows of a chunk. Each item is then an iterator of `dpx.Batch`es of this size, which together hold
            the batch; the last one ends with padding. Use it for batches that do not fit in memory
            (`dpx.private_updates_in_chunks`).
        sharding: how axis 0 is spread over devices, such as `NamedSharding(mesh, PartitionSpec("data"))`. Padding makes
            the rows a multiple of the number of devices. Each process loads only the rows for its own devices.
        prefetch: how many batches (or chunks) are loaded ahead, onto their devices; 0 loads each when you ask for it.

        Raises ValueError as `take` does, at once if `steps` exceeds the budget; if `steps` is None and the state has no
        budget; for `size` with `chunk_size`; for a sharding of axes other than 0; and if several processes do not
        have the same key and steps.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        steps = None if steps is None else require_whole("steps", steps)
        run = next_step_indices(state, self, steps, beyond_budget=beyond_budget)
        how = loading.LoadingSettings(chunk_size=chunk_size, sharding=sharding, prefetch=prefetch, size=size)
        return loading.load_batches(self, data, key, run, how)

    def draw_ahead(
        self,
        key: jax.Array,
        state: Tree,
        steps: int,
        *,
        size: int | None = None,
        unit: str = "example",
        beyond_budget: bool = False,
    ) -> DrawnBatches:
        """Draws the next `steps` steps and stacks the draws, for a `jax.lax.scan` over them (docs/loops.md).

        `draw.batch(data)` is the batch of one step, also inside jit, and raises ValueError for data of another length.
        The arguments are those of `batches`; `size` is the number of rows of every draw, and None takes the largest.
        unit: one word for what a row of the data is; "user" if each row holds all examples of a user.
        The arrays take 5 bytes for each row of each step. Raises ValueError as `batches` does.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        run = next_step_indices(state, self, require_whole("steps", steps), beyond_budget=beyond_budget)
        draws = [self.draw(key, step, size=size) for step in run]
        largest = max(len(indices) for indices, _ in draws)
        indices, included = (
            np.stack(arrays) for arrays in zip(*(pad_draw(draw, largest) for draw in draws), strict=True)
        )
        drawn = [record_draw(self, key, step, rows, unit) for step, rows in zip(run, included, strict=True)]
        return DrawnBatches(indices, included, jax.tree.map(lambda *numbers: np.stack(numbers), *drawn), self.examples)


def require_multipliers(value: Any) -> np.ndarray:
    """Returns noise multipliers as float64 (steps,). Raises ValueError for other shapes, and below 0."""
    found = np.asarray(value)
    some = found[:1] if found.ndim == 1 and found.strides == (0,) else found
    if found.ndim != 1 or found.dtype.kind not in "fiu" or not np.all(some >= 0):
        raise ValueError(
            "multipliers must be numbers of at least 0, float (steps,), one noise multiplier for each step, such as "
            f"np.full(100, 1.3), got {described(value)}"
        )
    return found if found.dtype == np.float64 else found.astype(np.float64)


def is_constant(noise_multipliers: np.ndarray) -> bool:
    """Whether numpy repeats one number, as in arrays from `values_over`: then 10^9 steps take no time or memory."""
    return len(noise_multipliers) > 0 and noise_multipliers.strides == (0,)


def steps_by_multiplier(noise_multipliers: np.ndarray) -> tuple[tuple[float, int], ...]:
    """Returns rising pairs (noise multiplier, number of its steps). noise_multipliers: float64 (steps,)."""
    if is_constant(noise_multipliers):
        return ((float(noise_multipliers[0]), len(noise_multipliers)),)
    values, counts = np.unique(noise_multipliers, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def compose_events(parts: Iterable[tuple[DpEvent, int]]) -> DpEvent:
    """Composes pairs (event, number of times it repeats) into one event."""
    events = [dp_accounting.SelfComposedDpEvent(event, count) if count > 1 else event for event, count in parts]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def compose_releases(multipliers: np.ndarray, event_of: Callable[[float], DpEvent]) -> DpEvent:
    """Composes releases, grouped by noise multiplier, because their order does not change the cost.

    multipliers: float64 (steps,). event_of: (noise multiplier) -> DpEvent.
    """
    return compose_events((event_of(value), count) for value, count in steps_by_multiplier(multipliers))


@dataclass(frozen=True, kw_only=True)
class _IntegerSizeSampling(Sampling):
    batch_size: int

    def __post_init__(self):
        check_and_store_sizes(self, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling(_IntegerSizeSampling):
    """Every step draws a new subset of `batch_size` examples, uniformly and without replacement.

    examples: int, size of the data set, a public number. batch_size: int, the rows of every batch, and the divisor.

    Replacing an example moves the sum by up to twice the clip norm, so the event has half the noise multiplier: 0.9 for
    a mechanism with 1.8 (its standard deviation divided by the clip norm). A run costs at least as much as the same run
    on Poisson samples with half the noise multiplier (`accounting/limited_samples.py`).
    Raises ValueError unless both sizes are whole numbers with 1 <= batch_size <= examples.

        >>> rows, included = dpx.FixedSizeSampling(examples=1_000, batch_size=50).draw(key, 0)
        >>> rows.shape, bool(included.all())
        ((50,), True)
    """

    relation: ClassVar[str] = "replace_one"

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        own = step_key(key, require_step(key, step))
        return pad_examples(random_order(own, self.examples, self.batch_size), size or self.batch_size)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jax.random.randint(keys.public_key(key), (steps,), 0, self.examples) < self.batch_size

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return compose_releases(
            multipliers,
            lambda sigma: dp_accounting.SampledWithoutReplacementDpEvent(
                self.examples, self.batch_size, GaussianDpEvent(sigma / 2)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _EpochSampling(_IntegerSizeSampling):
    """Epochs that hold every example once, cut into batches of one size; the last batch of an epoch may be short.

    A run that has begun k epochs costs k Gaussian releases, each at the smallest noise multiplier of its epoch. Proof:
    let the orders be public. An example is in one batch of each epoch, so it changes only that release of the epoch.
    """

    relation: ClassVar[str] = "zero_out"

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    @property
    def steps_per_exact_epoch(self) -> int:
        return self.steps_per_epoch

    @property
    def pads(self) -> bool:
        return self.examples % self.batch_size != 0

    @abc.abstractmethod
    def examples_at_positions(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns an epoch's examples at positions [start, stop), int (stop - start,). key: scalar key of the run."""

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        epoch, position = divmod(require_step(key, step), self.steps_per_epoch)
        start = position * self.batch_size
        stop = min(start + self.batch_size, self.examples)
        return pad_examples(self.examples_at_positions(key, epoch, start, stop), size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        starts = np.arange(0, len(multipliers), self.steps_per_epoch)
        return compose_releases(np.minimum.reduceat(multipliers, starts), GaussianDpEvent)


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(_EpochSampling):
    """Every epoch is a new permutation, cut into batches; the last batch of an epoch may be short.

    examples: int, size of the data set, a public number. batch_size: int, the most rows of a batch, and the divisor.

    An example takes part once an epoch, in a batch that an adversary may know, so no amplification is claimed. Even an
    incomplete epoch costs one Gaussian release at its smallest noise multiplier (mu = sqrt(epochs) / sigma). Raises
    ValueError for the same sizes as `FixedSizeSampling`.

        >>> dpx.ShuffledEpochs(examples=1_000, batch_size=64).steps(epochs=5)
        80
    """

    one_key: ClassVar[bool] = True

    def examples_at_positions(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        return permutation(step_key(key, epoch), self.examples)[start:stop]

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return draw_step_per_epoch(key, steps, self.steps_per_epoch, self.examples, self.batch_size)


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class FixedOrder(_EpochSampling):
    """Takes the examples in the order of the data, the same in every epoch; an epoch's last batch may be short.

    examples: int, size of the data set, a public number. batch_size: int, the most rows of a batch, and the divisor.

    An example takes part once in every epoch, always `steps_per_epoch` steps apart, as noise that is correlated over
    the whole run requires. Nothing is random: everyone knows when an example takes part, so no amplification is
    claimed. A run that has begun k epochs costs k Gaussian releases, each at the smallest noise multiplier of its epoch
    (mu = sqrt(k) / sigma). Neighbors differ by a null in the place of one example. The order must not depend on
    private data; shuffle once, without looking at them. Raises ValueError for the same sizes as `FixedSizeSampling`.
    """

    def examples_at_positions(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jnp.arange(steps) % self.steps_per_epoch == 0


@explain_misuse
@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampling):
    """Every example takes part in every step, so each release costs as much as without sampling.

    Raises ValueError unless `examples` is a whole number of at least 1.

        >>> dpx.FullBatch(examples=1_000).steps(epochs=5)
        5
    """

    relation: ClassVar[str] = "zero_out"
    draws_examples_independently, steps_per_exact_epoch = True, 1

    def __post_init__(self):
        object.__setattr__(self, "examples", require_whole("examples", self.examples))

    @property
    def divisor(self) -> float:
        return self.examples

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        require_step(key, step)
        return pad_examples(np.arange(self.examples), size or self.examples)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jnp.ones(steps, bool)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return compose_releases(multipliers, GaussianDpEvent)
