"""How a batch is drawn on the host: coins, subsets and permutations from a key, in arrays of fixed shapes."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpx import keys


class Draw(NamedTuple):
    """indices: int32 (size,), 0 on padded rows. included: bool (size,), False on padded rows."""

    indices: np.ndarray
    included: np.ndarray


def require_step(step: Any) -> int:
    whole = isinstance(step, jax.Array | np.ndarray) and jnp.shape(step) == () and step.dtype.kind in "iu"
    whole |= isinstance(step, int | np.integer) and not isinstance(step, bool)
    if isinstance(step, jax.core.Tracer) or not whole or step < 0:
        raise ValueError(f"step must be a whole number of at least 0, known before it is drawn; got {step!r}")
    return int(step)


def step_key(key: jax.Array, step: int) -> jax.Array:
    return keys.stream(key, "sampling", step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def coins(key: jax.Array, examples: int, probability: float) -> jax.Array:
    """One coin per example: 32 bits under a threshold rounded down, so no likelier than billed."""
    if probability == 1:
        return jnp.ones(examples, bool)
    return jax.random.bits(key, (examples,), jnp.uint32) < jnp.uint32(math.floor(probability * 2**32))


def pad(drawn: np.ndarray, size: int) -> Draw:
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
    """A uniformly random order of the examples, int32 (examples,); the last two are kept, for the steps of an epoch."""
    return _permutation(str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key)).tobytes(), examples)


@functools.lru_cache(maxsize=2)
def _permutation(implementation: str, data: bytes, examples: int) -> np.ndarray:
    key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, np.uint32)), impl=implementation)
    return np.asarray(jax.random.permutation(key, examples))
