"""Batches, which say which rows are included, so that padding cannot be forgotten; and helpers that draw one on the
host: checks of sizes, coins and permutations from a key, and padding to fixed shapes."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import scipy.special

from dpx import keys
from dpx.keys import streams
from dpx.sampling.data import batch_size, zero_excluded_rows
from dpx.states.record import DrawRecord, fingerprint, unit_fingerprint
from dpx.values import Tree, described, repr_with_shapes, require_whole, warn_user


class Batch(NamedTuple):
    """A batch of examples, with a mask that says which of them count.

    examples: pytree of arrays, with the B examples on axis 0 of each. A sampling fills padding with zeros.
    included: bool (B,), True for an included row, False for padding; None includes all B rows.
    drawn:    a `DrawRecord`, set by the sampling. A run has no known cost if it uses the batch twice or at another
              step, with another number of included rows, or in a mechanism with another sampling. To change examples,
              call `batch._replace(examples=...)`, which keeps this field. Each new row may depend only on the old row
              in its place: no mixup, no batch statistics. dpx cannot check that.

        >>> padded = dpx.Batch(np.ones((4, 3)), included=np.array([True, True, True, False]))
        >>> padded._replace(examples=2 * padded.examples).examples.shape
        (4, 3)
    """

    examples: Tree
    included: jax.Array | np.ndarray | None
    drawn: DrawRecord | None = None

    __repr__ = repr_with_shapes


def require_batch(batch: Any) -> Batch:
    """Returns `batch`. Raises ValueError unless it is a `Batch` whose arrays have equally many rows."""
    if isinstance(batch, Batch):
        batch_size(batch.examples)
        return batch
    raise ValueError(
        f"batch must be a dpx.Batch, got {type(batch)}. Get one from sampling.take(data, key, state). For a batch of "
        "your own, write dpx.Batch(examples, included) with included: bool (B,), or dpx.Batch(examples, included=None) "
        "if every row counts; its cost assumes that the sampling drew it"
    )


MISSING = object()  # the default of `included`, because None already includes all rows


def included_rows(size: int, included: Any, sampling: Any) -> jax.Array:
    """Returns which of `size` rows are included, bool (size,). None and MISSING mean all of them.

    Raises ValueError for another shape or dtype, for MISSING if the sampling's batches may hold padding, and if all
    rows are included but the sampling never draws `size` examples.
    """
    if included is MISSING and sampling.pads:
        raise ValueError(
            f"included must be given, bool (B,), because batches of {sampling} hold padding: give included="
            "batch.included, of a batch that the sampling drew. dpx.private_updates does it for you"
        )
    if included is None or included is MISSING:
        expected, padded = sampling.divisor, sampling.pads
        if size != expected and (not padded or size > sampling.most_rows):
            raise ValueError(f"a batch of {sampling} has {expected} rows, got {size}; say which are included")
        return jnp.ones(size, bool)
    included = jnp.asarray(included)
    if jnp.shape(included) != (size,):
        raise ValueError(f"included must have shape ({size},), one bool per example; got {jnp.shape(included)}")
    if jnp.result_type(included) != jnp.bool_:
        raise ValueError(f"included must be bool, True for the rows that count; got {jnp.result_type(included)}")
    return included


class Draw(NamedTuple):
    """Which rows of the data one batch holds.

    indices: int32 (size,), positions in the data, 0 for padding. included: bool (size,), False for padding.
    """

    indices: np.ndarray
    included: np.ndarray

    __repr__ = repr_with_shapes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class DrawnBatches:
    """The draws of many steps of one run, for a loop inside jit. `jax.lax.scan` over it yields the draw of each step.

    indices: int32 (steps, size), positions in the data, 0 for padding. included: bool (steps, size), False for padding.
    drawn: `Batch.drawn` of each step, whose fields are uint32 (steps,). examples: int, the size of the data set.
    The draw of one step has the same fields without their first axis.
    """

    indices: Any
    included: Any
    drawn: Any
    examples: int = field(metadata={"static": True})

    __repr__ = repr_with_shapes

    def batch(self, data: Tree) -> Batch:
        """Returns the batch of one step, padded with zeros. data: pytree of arrays with the examples on axis 0 of each.

        Raises ValueError for data of another length, and if this object holds the draws of several steps.
        """
        # Inside jit, an index past the end would silently read the last example.
        if (length := batch_size(data)) != self.examples:
            raise ValueError(f"data must hold the {self.examples} examples of the sampling, got {length}")
        if jnp.ndim(self.indices) != 1:
            raise ValueError(f"draws must be those of one step, (size,); got indices of {jnp.shape(self.indices)}")
        included = jnp.asarray(self.included)
        examples = jax.tree.map(lambda leaf: zero_excluded_rows(jnp.asarray(leaf)[self.indices], included), data)
        return Batch(examples, self.included, self.drawn)


def record_draw(sampling: Any, key: jax.Array, step: int, included: np.ndarray, unit: str) -> DrawRecord:
    """Records how the batch of one step was drawn. included: bool (size,). unit: the name of what a row holds."""
    marks = keys.mark_of_key(key), 0, fingerprint(sampling), unit_fingerprint(unit)
    return DrawRecord(*map(np.uint32, (step, included.sum(), *marks)))


def check_and_store_sizes(sampling: Any, *, whole: bool = False):
    """Stores both sizes as Python numbers, so that equal records print alike. Raises ValueError for invalid sizes."""
    examples, size = require_whole("examples", sampling.examples), sampling.batch_size
    number = int | np.integer if whole else int | float | np.integer | np.floating
    if isinstance(size, bool) or not isinstance(size, number):
        raise ValueError(f"batch_size must be a {'whole ' if whole else ''}number, got {described(size)}")
    if not 0 < size <= examples:
        raise ValueError(f"batch_size must be in (0, examples = {examples}], got {size}")
    if size < 1:
        words = f"if it is a rate, batch_size = rate * examples = {size * examples:g}"
        warn_user(f"batch_size = {size:g} is below 1, so most batches are empty: {words}")
    object.__setattr__(sampling, "examples", examples)
    object.__setattr__(sampling, "batch_size", int(size) if size == int(size) else float(size))


def require_not_traced(key: jax.Array, *others: Any):
    """Raises ValueError if an argument is traced, or if jax is tracing anything at all at this moment."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves([keys.stream(key, "sampling"), *others])):
        raise ValueError(
            "batches are drawn outside of jit, because chance decides their number of rows; but the key, the step or "
            "the state is traced, or the call is inside a traced function. Draw ahead: rows = "
            "sampling.draw_ahead(key, state, steps), then jax.lax.scan(body, carry, rows) with a body that takes "
            "row.batch(data) (docs/loops.md)"
        )


def require_step(key: jax.Array, step: Any) -> int:
    """Returns `step` as an int. Raises ValueError unless it is a whole number >= 0, and if it or `key` is traced."""
    require_not_traced(key, step)
    whole = isinstance(step, jax.Array | np.ndarray) and jnp.shape(step) == () and step.dtype.kind in "iu"
    whole |= isinstance(step, int | np.integer) and not isinstance(step, bool)
    if not whole or step < 0:
        raise ValueError(f"step must be a whole number of at least 0, got {described(step)}")
    return int(step)


def step_key(key: jax.Array, step: int) -> jax.Array:
    return keys.stream(key, "sampling", step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def toss_coins(key: jax.Array, examples: int, probability: float) -> jax.Array:
    """Draws which examples take part, bool (examples,): each with `probability` rounded down to a multiple of 2^-64.

    The cost assumes `probability`, which is at least the rate of the coin. The divisor does not change.
    """
    if probability == 1:
        return jnp.ones(examples, bool)
    high, low, _, _ = streams.draw_bits(keys.key_words(key), examples)
    # Exact, because multiplying by a power of 2 is exact.
    heads_high, heads_low = map(np.uint32, divmod(math.floor(probability * 2**64), 2**32))
    return (high < heads_high) | (high == heads_high) & (low < heads_low)


def toss_coin_per_step(key: jax.Array, steps: int, rate: float) -> jax.Array:
    """Tosses one coin per step, bool (steps,)."""
    return jax.vmap(lambda step: toss_coins(keys.fold_in(key, step), 1, rate)[0])(jnp.arange(steps))


def draw_step_per_epoch(key: jax.Array, steps: int, epoch: int, places: int, size: int = 1) -> jax.Array:
    """Draws a position below `places` in each epoch, and marks its step, bool (steps,). A step has `size` positions."""
    drawn = jax.random.randint(keys.public_key(key), (-(-steps // epoch), 1), 0, places) // size
    return (jnp.arange(epoch)[None] == drawn).reshape(-1)[:steps]


def require_enough_rows(drawn: np.ndarray, size: int):
    """Raises ValueError unless the drawn examples fit into `size` rows."""
    if len(drawn) > size:
        raise ValueError(
            f"size must hold the whole batch of {len(drawn)} examples, got {size}; a cut batch has no known cost"
        )


def padded_row_count(drawn: int, usual: int) -> int:
    """Returns the usual row count or, if more examples were drawn, the next multiple of an eighth of it."""
    return usual if drawn <= usual else round_up(drawn, max(1, usual // 8))


def pad_examples(drawn: np.ndarray, size: int) -> Draw:
    """Puts the drawn examples into arrays of `size` rows. Raises ValueError if there are more than `size`."""
    require_enough_rows(drawn, size)
    indices = np.zeros(size, np.int32)
    indices[: len(drawn)] = drawn
    return Draw(indices, np.arange(size) < len(drawn))


def scatter_examples(drawn: np.ndarray, size: int, key: jax.Array) -> Draw:
    """Puts the drawn examples into uniformly random rows of arrays of `size` rows; `size` must be large enough.

    This keeps the rounding of sums private. If a coin leaves an example out, all other examples are in the same rows
    with the same probability, and its row becomes padding, so only this row differs (`dpx.sums.rounding`). If the
    examples filled the first rows instead, all later ones would move up by one row, which changes the last bits of
    their gradients and of every sum.
    """
    rows = random_order(key, size, len(drawn)) if len(drawn) else np.zeros(0, np.int32)
    indices, included = np.zeros(size, np.int32), np.zeros(size, bool)
    indices[rows], included[rows] = drawn, True
    return Draw(indices, included)


def pad_draw(draw: Draw, size: int) -> Draw:
    """Returns `draw` in arrays of `size` rows, with padding at the end."""
    more = size - len(draw.indices)
    return Draw(np.pad(draw.indices, (0, more)), np.pad(draw.included, (0, more)))


LARGE = 1e-9  # the probability that a batch needs more rows than usual


@functools.lru_cache
def usual_row_count(examples: int, probability: float) -> int:
    """Returns a row count, a multiple of 8 or N, that a Poisson-sampled batch exceeds with probability below 1e-9."""
    mean = examples * probability
    sizes = np.arange(round_up(mean, 8), mean + 10 * math.sqrt(mean) + 80, 8)
    tails = scipy.special.betainc(sizes + 1, np.maximum(examples - sizes, 1), probability)
    exceeded = np.where(sizes < examples, tails, 0.0)
    return min(examples, int(sizes[np.argmax(exceeded < LARGE)]))


def round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


draw_bits = jax.jit(streams.draw_bits, static_argnums=1)


def random_order(key: jax.Array, examples: int, count: int) -> np.ndarray:
    """Returns the first `count` examples of a uniformly random order, int32 (count,).

    Examples are sorted by 128 random bits each. The order is uniform unless two examples draw the same bits, which has
    a probability below N^2 / 2^129: 2^-67 for 2^31 examples, the most that an index can count.
    """
    words = list(map(np.asarray, draw_bits(keys.key_words(key), examples)))
    high = words[0].astype(np.uint64) << np.uint64(32) | words[1]
    candidates = np.flatnonzero(high <= np.partition(high, count - 1)[count - 1])  # faster than sorting all
    sorted_by = words[3][candidates], words[2][candidates], high[candidates]  # the last one sorts first
    return candidates[np.lexsort(sorted_by)][:count].astype(np.int32)


def permutation(key: jax.Array, examples: int) -> np.ndarray:
    """Returns a uniformly random order of the examples, int32 (examples,).

    The last two orders stay in memory, because every step of an epoch needs the same one.
    """
    return _cached_permutation(np.asarray(keys.key_words(key)).tobytes(), examples)


@functools.lru_cache(maxsize=2)
def _cached_permutation(words: bytes, examples: int) -> np.ndarray:
    order = random_order(key_of_words(words), examples, examples)
    order.flags.writeable = False  # callers get views of what the cache holds
    return order


def key_of_words(words: bytes) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(words, np.uint32)), impl="threefry4x32")
