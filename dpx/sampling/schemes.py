"""Samplings: one frozen record draws the batches and states their cost, so a run costs what its batches cost.

`draw(key, step)` runs on the host, and is a pure function of the key, the step and the record, so a resumed run draws
the same batches. `take`, `batches` and `draw_ahead` (base.py) read the step from the optimizer state, and call it.
The key must stay as secret as the noise key, because amplification by sampling holds only for batches that nobody
knows.

To add one: a frozen dataclass here, or in a file beside this one (poisson.py, allocation.py), with the fields of
`Sampling`, and a line in `dpx/catalog.py`.
"""

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.sampling.base import Sampling as Sampling
from dpx.sampling.batch import (
    Draw,
    draw_epoch_steps,
    normalize_sizes,
    pad_examples,
    permutation,
    random_order,
    require_step,
    step_key,
)
from dpx.sampling.events import compose_releases
from dpx.values import names_arguments, require_whole


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
    at least as much as one on Poisson samples with half the noise multiplier (`accounting/sampled_gaussians.py`).
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
    def known_epoch(self) -> int:
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

    @property
    def known_epoch(self) -> int:
        return 1

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        require_step(key, step)
        return pad_examples(np.arange(self.examples), size or self.examples)

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        return jnp.ones(steps, bool)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        return compose_releases(multipliers, GaussianDpEvent)
