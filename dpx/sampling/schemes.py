"""Samplings: one frozen record draws the batches and states their cost, so a run costs what its batches cost.

`draw(key, step)` runs on the host, and is a pure function of the key, the step and the record, so a resumed run draws
the same batches. `take`, `batches` and `draw_ahead` read the step from the optimizer state, and call it. The key must
stay as secret as the noise key, because amplification by sampling holds only for batches that nobody knows.

To add one: a frozen dataclass here, or in a file beside this one (varying.py), with the fields of
`Sampling`, and a line in `dpx/catalog.py`.
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
    draw_epoch_steps,
    normalize_sizes,
    pad_draw,
    pad_examples,
    permutation,
    random_order,
    record_draw,
    require_not_traced,
    require_step,
    step_key,
)
from dpx.sampling.loading import CheckedData
from dpx.states.reading import next_steps
from dpx.states.record import identity_by_fields
from dpx.values import Tree, names_arguments, require_number, require_whole

_ROUNDING = 1e-12  # relative, of a number of steps: 0.1 epochs of 30 steps are 3 steps, not 4


@dataclass(frozen=True, kw_only=True)
class Sampling(abc.ABC):
    """The fields of a sampling record that mechanisms, accountants and training loops read.

    examples: size of the data set; a public number.
    relation: the neighboring relation under which `event` is true: "zero_out" (one example replaced by a null, which
              keeps its place and does not count), "replace_one" (one exchanged for another) or "add_or_remove" (one
              more or fewer, which is about real sums only: it moves the rows of the others, and so their float sum).
    divisor:  the expected batch size; the private gradient is the noisy sum divided by it. A public constant.
    pads:     whether a batch may hold padding; otherwise every batch has `divisor` rows.
    most_rows: the largest number of rows of a batch that may count; inf where chance decides it.
    usual_rows: int, the rows of a drawn batch, padding included. Where chance makes a batch larger, it has more.
    steps_per_epoch: float, how many steps take as many examples as there are, on average.
    one_key:  whether `event` is true only if all batches of a run are drawn with one key.
    event:    (multipliers) -> DpEvent of len(multipliers) releases with these noise multipliers, float64 (steps,).
    """

    examples: int
    relation: ClassVar[str]
    one_key: ClassVar[bool] = False

    def identity(self) -> tuple:
        """What decides which examples are drawn, as plain values. States remember it."""
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
    def plain(self) -> bool:
        """Whether coins of one rate, or no coins, decide alone."""
        return True

    @property
    def weighted(self) -> bool:
        """Whether the examples have public weights."""
        return False

    @property
    def truncates(self) -> bool:
        """Whether a batch is cut where chance draws more than `most_rows`."""
        return False

    @property
    def own_coins(self) -> bool:
        """Whether each example has coins of its own, or takes part always, as the cost of several records needs."""
        return False

    @property
    def groups(self) -> int:
        """How many groups of examples take turns."""
        return 1

    @property
    def epoch(self) -> int:
        """Of how many steps each holds every example exactly once; 0 where chance decides how often it takes part."""
        return 0

    @property
    def known_epoch(self) -> int:
        """The same if nothing hides the step of an example, so that an epoch costs one release; 0 otherwise."""
        return self.epoch

    @functools.cached_property  # not a property, because that of `RandomAllocation` is a field
    def steps_per_epoch(self) -> float:
        return self.examples / self.divisor

    def steps(self, *, epochs: float) -> int:
        """How many steps `epochs` epochs are, an int: epochs * examples / divisor, rounded up.

        With `ShuffledEpochs`, whose last batch of an epoch may be short, it is epochs * steps_per_epoch, rounded up.
        epochs: float, positive and finite. Raises ValueError for other numbers.
        """
        steps = require_number("epochs", epochs, minimum=0, exclusive=True) * self.steps_per_epoch
        return math.ceil(steps * (1 - _ROUNDING))

    @abc.abstractmethod
    def event(self, multipliers: np.ndarray) -> DpEvent: ...

    @abc.abstractmethod
    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        """The examples that take part in one step, as arrays of a fixed shape for a jitted step.

        key: a PRNG key, (), secret. step: int, the number of steps before this one in the whole run. It never restarts,
            because a step that is drawn twice has the same batch but counts as two independent ones.
        size: rows of the result, at least as many as take part; None takes the record's own size.
        Raises ValueError if step is not a whole number of at least 0, and if size is too small.
        """

    @abc.abstractmethod
    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        """In which of the first `steps` steps of a run one example takes part, bool (steps,); under jit, for audits.

        key: a PRNG key, (), of this example in this run. It has the law of `draw`, not its bits.
        """

    def take(
        self, data: Any, key: jax.Array, state: Tree, *, size: int | None = None, beyond_budget: bool = False
    ) -> Batch:
        """The batch of the next step of a run, a `dpx.Batch` of arrays with `size` rows.

        data: the `examples` examples. Either a pytree of arrays (jax, numpy or a memory map, of which only the drawn
            rows are read) with the examples on axis 0 of each; or a source with `__len__` and `__getitem__(int)`, whose
            items are pytrees of arrays and numbers, alike in structure, shapes and dtypes (`__getitems__(list of int)`
            is called instead where it exists; its items must not share memory that is later overwritten, while an item
            of `__getitem__` is copied at once). grain's data sources and torch's map-style datasets are such sources.
            An item must depend on its index alone: if a repeated step read other values, the difference would show
            without noise. For random items (augmentation), give the source a method `random_item(int, rng)` in place of
            `__getitem__`. `rng`, a `numpy.random.Generator`, depends only on the item, the step and `key`, and reveals
            nothing about the key. For a pandas table, pass its numeric columns,
            `frame[columns].to_numpy(numpy.float32)`; for a sparse matrix, a dense array.
        key: a PRNG key, (), secret, of one run. With `ShuffledEpochs` and `RandomAllocation` it must be the same at
            every step, because a run whose batches come from several orders has no known cost.
        state: of the optimizer. Its step count is read, so this call waits until the state is computed.
        size: rows of the batch, padding included; None takes the size that the sampling chooses.
        beyond_budget: continue after the steps of the `dpx.Budget` that the mechanism was calibrated for.

        Raises ValueError for data of another length or with unlike items, for an item that differs when it is read a
        second time (16 items of the first batches are, and later one in 256), for pandas objects and sparse matrices,
        if the mechanism of the state accounts for another sampling, at the first step beyond the budget, and
        inside jit, where `draw_ahead` works instead.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        (step,) = next_steps(state, self, 1, beyond_budget=beyond_budget)
        examples = CheckedData(data, self.examples, key)
        indices, included = self.draw(key, step, size=size)
        drawn = record_draw(self, key, step, included, examples.unit)
        return Batch(examples.rows(indices, included, step), included, drawn)

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
        """An iterator of the batches of the next steps: those of `take`, loaded while the step before runs.

        Use each batch once, in order, with the state after the step before, because a batch at another step makes the
        state lose its cost. The state is read here only: after an interruption, call this again with the last state.

        data, key, size, beyond_budget: as in `take`. Their items are read in a thread, if `prefetch` is above 0.
        state: of the optimizer, before the first of the steps.
        steps: how many batches; None for all that the `dpx.Budget` of the state has left. If it is spent, they are
            none, without an error, so that a finished run can be resumed.
        chunk_size: rows of a chunk. Each item is then an iterator of `dpx.Batch`es of this size, which together hold
            the batch, and of which the last ends with padding: for batches that exceed the memory
            (`dpx.private_updates_in_chunks`).
        sharding: of axis 0 over devices, such as `NamedSharding(mesh, PartitionSpec("data"))`; padding makes the rows a
            multiple of the devices. Each process of several loads the rows of its own devices alone.
        prefetch: how many batches (or chunks) are loaded ahead, on their devices; 0 loads each when it is asked for.

        Raises ValueError as `take` does, at once also for steps beyond the budget; without `steps`, if the state has no
        budget; for `size` with `chunk_size`; for a sharding of more axes than one; and if several processes have not
        the same key and steps.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        steps = None if steps is None else require_whole("steps", steps)
        run = next_steps(state, self, steps, beyond_budget=beyond_budget)
        how = loading.Loading(chunk_size=chunk_size, sharding=sharding, prefetch=prefetch, size=size)
        return loading.batches(self, data, key, run, how)

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
        """The draws of the next `steps` steps, stacked, for a `jax.lax.scan` over them (docs/loops.md).

        `row.batch(data)` is the batch of a row, inside of jit too, and raises ValueError for data of another length.
        The arguments are those of `batches`; `size` is the number of rows of every draw, and None takes the largest.
        unit: what a row of the data is, in one word; "user" if each row holds all examples of a user.
        The arrays hold 5 bytes for each row of each step. Raises ValueError as `batches` does.
        """
        require_not_traced(keys.warn_if_guessable(key), state)
        run = next_steps(state, self, require_whole("steps", steps), beyond_budget=beyond_budget)
        draws = [self.draw(key, step, size=size) for step in run]
        largest = max(len(indices) for indices, _ in draws)
        indices, included = (
            np.stack(arrays) for arrays in zip(*(pad_draw(draw, largest) for draw in draws), strict=True)
        )
        drawn = [record_draw(self, key, step, rows, unit) for step, rows in zip(run, included, strict=True)]
        return DrawnBatches(indices, included, jax.tree.map(lambda *numbers: np.stack(numbers), *drawn), self.examples)


def is_constant(noise_multipliers: np.ndarray) -> bool:
    """Whether it is one number that numpy repeats, as `values_over` makes it: 10^9 steps need no time or memory."""
    return len(noise_multipliers) > 0 and noise_multipliers.strides == (0,)


def count_multipliers(noise_multipliers: np.ndarray) -> tuple[tuple[float, int], ...]:
    """Noise multipliers, float64 (steps,), as rising pairs (noise multiplier, number of steps)."""
    if is_constant(noise_multipliers):
        return ((float(noise_multipliers[0]), len(noise_multipliers)),)
    values, counts = np.unique(noise_multipliers, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def compose_events(parts: Iterable[tuple[DpEvent, int]]) -> DpEvent:
    """The composition of events, each repeated so often."""
    events = [dp_accounting.SelfComposedDpEvent(event, count) if count > 1 else event for event, count in parts]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def compose_releases(multipliers: np.ndarray, event_of: Callable[[float], DpEvent]) -> DpEvent:
    """The composition of releases, grouped by their noise multipliers, because their order does not change the cost.

    multipliers: float64 (steps,). event_of: (noise multiplier) -> DpEvent.
    """
    return compose_events((event_of(value), count) for value, count in count_multipliers(multipliers))


@dataclass(frozen=True, kw_only=True)
class _WholeSize(Sampling):
    batch_size: int

    def __post_init__(self):
        normalize_sizes(self, whole=True)

    @property
    def divisor(self) -> float:
        return self.batch_size


@names_arguments
@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling(_WholeSize):
    """At every step, a new subset of `batch_size` examples, drawn uniformly without replacement.

    examples: int, size of the data set, a public number. batch_size: int, the rows of every batch, and the divisor.

    Replacing an example moves the sum by twice the clip norm, so the event has half the noise multiplier: a printed
    mechanism shows 1.8 as the standard deviation divided by the clip norm, and 0.9 in its event. A run costs
    at least as much as one on Poisson samples with half the noise multiplier (`accounting/limited_samples.py`).
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
class _Epochs(_WholeSize):
    """Epochs that hold every example once, cut into batches of one size; the last batch of an epoch may be short.

    k begun epochs count as k Gaussian releases, each at the smallest noise multiplier of its epoch. Proof: let the
    orders be public. An example is in one batch of an epoch, so its releases differ in that batch alone.
    """

    relation: ClassVar[str] = "zero_out"

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.examples / self.batch_size)

    @property
    def epoch(self) -> int:
        return self.steps_per_epoch

    @property
    def pads(self) -> bool:
        return self.examples % self.batch_size != 0

    @abc.abstractmethod
    def part(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        """The examples of an epoch from place `start` to `stop`, int (stop - start,). key: of the run, ()."""

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        epoch, position = divmod(require_step(key, step), self.steps_per_epoch)
        start = position * self.batch_size
        stop = min(start + self.batch_size, self.examples)
        return pad_examples(self.part(key, epoch, start, stop), size or self.batch_size)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        starts = np.arange(0, len(multipliers), self.steps_per_epoch)
        return compose_releases(np.minimum.reduceat(multipliers, starts), GaussianDpEvent)


@names_arguments
@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(_Epochs):
    """A new permutation every epoch, cut into batches; the last batch of an epoch may be short.

    examples: int, size of the data set, a public number. batch_size: int, the most rows of a batch, and the divisor.

    An example takes part once an epoch, in a batch that an adversary may know, so no amplification is claimed. An epoch
    counts as one Gaussian release at its smallest noise multiplier (mu = sqrt(epochs) / sigma), even if it is not
    complete. Raises ValueError for the same sizes as `FixedSizeSampling`.

        >>> dpx.ShuffledEpochs(examples=1_000, batch_size=64).steps(epochs=5)
        80
    """

    one_key: ClassVar[bool] = True

    def part(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        return permutation(step_key(key, epoch), self.examples)[start:stop]

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return draw_epoch_steps(key, steps, self.steps_per_epoch, self.examples, self.batch_size)


@names_arguments
@dataclass(frozen=True, kw_only=True)
class FixedOrder(_Epochs):
    """The examples in the order of the data, the same in every epoch; the last batch of an epoch may be short.

    examples: int, size of the data set, a public number. batch_size: int, the most rows of a batch, and the divisor.

    An example takes part in every epoch once, `steps_per_epoch` steps apart, which noise that is correlated over the
    whole run needs. Nothing is left to chance, and the order is public: so is the place of an example, and no
    amplification is claimed. k begun epochs count as k Gaussian releases, each at the smallest noise multiplier of
    its epoch (mu = sqrt(k) / sigma). Neighbors differ by a null, which keeps the place. The order must not depend on
    private data: shuffle the data once, without looking at them. Raises ValueError for the same sizes as
    `FixedSizeSampling`.
    """

    def part(self, key: jax.Array, epoch: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jnp.arange(steps) % self.steps_per_epoch == 0


@names_arguments
@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampling):
    """Every example at every step: the event is that of the Gaussian releases, because nothing is left to chance.

    Raises ValueError unless `examples` is a whole number of at least 1.

        >>> dpx.FullBatch(examples=1_000).steps(epochs=5)
        5
    """

    relation: ClassVar[str] = "zero_out"

    def __post_init__(self):
        object.__setattr__(self, "examples", require_whole("examples", self.examples))

    @property
    def divisor(self) -> float:
        return self.examples

    @property
    def own_coins(self) -> bool:
        return True

    @property
    def epoch(self) -> int:
        return 1

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        require_step(key, step)
        return pad_examples(np.arange(self.examples), size or self.examples)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jnp.ones(steps, bool)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return compose_releases(multipliers, GaussianDpEvent)
