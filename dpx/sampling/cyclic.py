"""Cyclic Poisson sampling: the examples are in groups, which take turns; the order of plain steps that BandMF needs."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent

from dpx import keys
from dpx.sampling.allocation import allocate_examples
from dpx.sampling.base import VaryingSize
from dpx.sampling.batch import Draw, normalize_sizes, require_step, step_key, toss_coins, toss_every_step
from dpx.sampling.events import compose_releases
from dpx.values import names_arguments, require_whole

_ROWS = 1  # the number of the key of the rows of a step


@names_arguments
@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(VaryingSize):
    """Each example is in one of `bands` groups, which take turns; in its group's steps, a coin decides if it joins.

    examples:   size of the data set, below 2^31; a public number.
    batch_size: the EXPECTED batch size, the divisor. The coins have the rate bands * batch_size / examples.
    bands:      b, int of at least 1, with b * batch_size <= examples. 1 is Poisson sampling.

    Step t uses group t mod b. The group of an example is drawn once for the run, by 64 bits of a cipher of the key and
    of the example alone. So an example takes part at most every b steps, which noise that is correlated over b steps
    needs (https://arxiv.org/abs/2306.08153, theorem 4). All batches of a run must be drawn with one key.

    The cost of T steps with independent noise is that of ceil(T / b) Poisson-sampled Gaussians of this rate, of each b
    steps the one with the least noise. Proof: let the groups of all examples be public. Neighbors differ by a null in
    place of one example, and their sums differ in the steps of its group alone, at most one of each b; there, its coin
    is independent of all that was released. The other steps are post-processing. The groups are independent of each
    other, so it is true for one example more or fewer as well. It costs more than Poisson sampling: use it with plain
    noise to compare.

    Raises ValueError for other sizes.
    """

    batch_size: float
    bands: int = field()
    relation: ClassVar[str] = "zero_out"
    one_key: ClassVar[bool] = True

    def __post_init__(self):
        normalize_sizes(self)
        bands = require_whole("bands", self.bands)
        if self.examples >= 2**31:
            raise ValueError(f"examples must be below 2^31, because an index is an int32; got {self.examples}")
        if bands * self.batch_size > self.examples:
            limit = f"examples / batch_size = {self.examples / self.batch_size:g}"
            raise ValueError(f"bands must be at most {limit}, because the rate of the coins is at most 1; got {bands}")
        object.__setattr__(self, "bands", bands)

    @property
    def probability(self) -> float:
        """The rate of the coins, in the steps of an example's group."""
        return min(1.0, self.bands * self.batch_size / self.examples)

    @property
    def groups(self) -> int:
        return self.bands

    @property
    def divisor(self) -> float:
        return self.batch_size

    def group(self, key: jax.Array, number: int) -> np.ndarray:
        """The examples of one group, int32 (of the group,), rising. key: of the run, (). number: int, below `bands`."""
        words = np.asarray(keys.key_words(step_key(key, 0))).tobytes()
        members, starts = allocate_examples(words, self.examples, self.bands)
        return members[starts[number] : starts[number + 1]]

    def draw(self, key: jax.Array, step: int, *, size: int | None = None) -> Draw:
        step = require_step(key, step)
        own, members = step_key(key, step), self.group(key, step % self.bands)
        drawn = members[np.asarray(toss_coins(own, self.examples, self.probability))[members]]
        return self.scattered(drawn, size, keys.fold_in(own, _ROWS))

    def takes_part(self, key: jax.Array, steps: int) -> jax.Array:
        group = jax.random.randint(keys.public_key(key), (), 0, self.bands)
        return toss_every_step(key, steps, self.probability) & (jnp.arange(steps) % self.bands == group)

    def event(self, multipliers: np.ndarray) -> DpEvent:
        least = np.minimum.reduceat(multipliers, np.arange(0, len(multipliers), self.bands))
        return compose_releases(least, lambda sigma: PoissonSampledDpEvent(self.probability, GaussianDpEvent(sigma)))
