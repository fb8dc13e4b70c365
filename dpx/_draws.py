"""How a batch is drawn on the host: checked sizes, coins and permutations from a key, arrays of fixed shapes."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx._numbers import require_whole


class Draw(NamedTuple):
    """indices: int32 (size,), the rows of the data, 0 for padding. included: bool (size,), False for padding."""

    indices: np.ndarray
    included: np.ndarray


def keep_sizes(sampling: Any, *, whole: bool = False):
    """Checks both sizes, and stores them as Python numbers so that equal records print alike."""
    examples, size = require_whole("examples", sampling.examples), sampling.batch_size
    number = int | np.integer if whole else int | float | np.integer | np.floating
    if isinstance(size, bool) or not isinstance(size, number):
        raise ValueError(f"batch_size must be a {'whole ' if whole else ''}number, got {size!r}")
    if not 0 < size <= examples:
        raise ValueError(f"batch_size must be in (0, examples = {examples}], got {size}")
    object.__setattr__(sampling, "examples", examples)
    object.__setattr__(sampling, "batch_size", int(size) if size == int(size) else float(size))


def require_step(step: Any) -> int:
    """`step` as an int. Raises ValueError unless it is a whole number of at least 0 that jax does not trace."""
    whole = isinstance(step, jax.Array | np.ndarray) and jnp.shape(step) == () and step.dtype.kind in "iu"
    whole |= isinstance(step, int | np.integer) and not isinstance(step, bool)
    if isinstance(step, jax.core.Tracer) or not whole or step < 0:
        raise ValueError(f"step must be a whole number of at least 0, known before it is drawn; got {step!r}")
    return int(step)


def step_key(key: jax.Array, step: int) -> jax.Array:
    return keys.stream(key, "sampling", step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def coins(key: jax.Array, examples: int, probability: float) -> jax.Array:
    """bool (examples,): 32 random bits are below a rounded-down threshold, with at most `probability`."""
    if probability == 1:
        return jnp.ones(examples, bool)
    return jax.random.bits(key, (examples,), jnp.uint32) < jnp.uint32(math.floor(probability * 2**32))


def pad(drawn: np.ndarray, size: int) -> Draw:
    """The drawn examples in arrays of `size` rows. Raises ValueError if they are more."""
    if len(drawn) > size:
        raise ValueError(
            f"size must hold the whole batch of {len(drawn)} examples, got {size}; a cut batch is not the billed one"
        )
    indices = np.zeros(size, np.int32)
    indices[: len(drawn)] = drawn
    return Draw(indices, np.arange(size) < len(drawn))


def round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def permutation(key: jax.Array, examples: int) -> np.ndarray:
    """A uniformly random order of the examples, int32 (examples,). The last two are kept for the steps of an epoch."""
    return _permutation(str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key)).tobytes(), examples)


@functools.lru_cache(maxsize=2)
def _permutation(implementation: str, data: bytes, examples: int) -> np.ndarray:
    key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, np.uint32)), impl=implementation)
    return np.asarray(jax.random.permutation(key, examples))
