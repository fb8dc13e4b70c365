"""One secret key, and the named streams that are derived from it.

Every random use in dpx names its own stream, because two uses of one stream could be subtracted from each other.
"""

import functools
import secrets
import warnings
import zlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpx.keys import normals

SMALL = (
    "the key must be secret, but it looks like one of a seed below 2^32, such as jax.random.key(0). Anyone can try all "
    "of these and subtract the noise: take dpx.secret_key()"
)


def secret_key(seed: int | None = None) -> jax.Array:
    """A typed PRNG key, (), from all 64 bits of `seed`. The key and the seed are as secret as the data.

    seed: an int in [0, 2^64); None takes 64 fresh bits from the operating system. To continue the run later, take a
        seed yourself (`secrets.randbits(64)`) and keep it.

    `jax.random.key` keeps only the lowest 32 bits of a seed, and anyone can try them all. Below 2^32 both give the same
    key. Raises ValueError for any other seed.
    """
    if seed is None:
        seed = secrets.randbits(64)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        kind = type(seed).__name__  # a seed is a secret, also a wrong one
        raise ValueError(f"seed must be a whole number in [0, 2^64), got {kind if kind != 'int' else 'another int'}")
    words = np.array(divmod(int(seed), 2**32), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def require(key: jax.Array) -> jax.Array:
    """`key` as a typed PRNG key, (). Raises ValueError unless it is one key, of an implementation that is safe here."""
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a jax PRNG key (dpx.secret_key()), got a {type(key).__name__}")
    if not is_key(key):
        if key.dtype != jnp.uint32 or key.shape != jax.random.key_data(jax.random.key(0)).shape:
            raise ValueError(f"key must be a jax PRNG key, got an array {key.dtype}{key.shape}")
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"key must be one key, got keys of shape {key.shape}")
    if str(jax.random.key_impl(key)) == "unsafe_rbg":
        raise ValueError(
            'key must not be of implementation "unsafe_rbg": its fold_in undoes itself, so that keys repeat'
        )
    return key


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys, of any shape."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_small(key: jax.Array) -> bool:
    """Whether a key, (), is known and looks like one of a seed below 2^32; others do with probability 2^-32."""
    if isinstance(key, jax.core.Tracer):
        return False
    data = jax.random.key_data(require(key))
    return not isinstance(data, jax.core.Tracer) and int(np.asarray(data)[0]) == 0


def secret(key: jax.Array) -> jax.Array:
    """`key`, (), with a warning if it is that of a seed that can be guessed."""
    if is_small(key):
        warnings.warn(SMALL, stacklevel=3)
    return key


def stream(key: jax.Array, name: str, step: jax.Array | int | None = None) -> jax.Array:
    """The key, (), for the use called `name`; with a step, int (), the key for that step alone.

    It is a threefry2x32 key, whatever the implementation of `key` is. Raises ValueError as `require` does.
    """
    named = fold_in(_threefry(require(key)), zlib.crc32(name.encode()))
    return named if step is None else fold_in(named, step)


def _threefry(key: jax.Array) -> jax.Array:
    """A threefry2x32 key, (), made from all words of `key`, (), if it is of another implementation.

    Under `jax.vmap`, a key "rbg" draws from the first of all keys alone, so that runs of different keys share noise.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    words = jax.random.key_data(key)
    mixed = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return functools.reduce(fold_in, words[2:], mixed)


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """The key, (), that `jax.random.fold_in` derives from a key, (), and a number in [0, 2^32), int ().

    Raises OverflowError for a known number out of this range.
    """
    word: Any = number if isinstance(number, jax.Array) else np.uint32(int(number))
    return jax.random.fold_in(key, word)


def mark(key: jax.Array) -> jax.Array:
    """A number in [2^31, 2^32), uint32 (), which differs for two keys with probability 1 - 2^-31, and reveals no more.

    If the key is known, so is the mark, also inside of jit. It is made from the words of the "mark" stream, which draws
    nothing, because `jax.random.bits` depends on jax's settings.
    """
    with jax.ensure_compile_time_eval():
        words = jax.random.key_data(stream(key, "mark"))
        return (words[0] + 3 * words[-1]) | jnp.uint32(2**31)


def normal_like(key: jax.Array, step: jax.Array | int, tree):
    """Independent standard normals, float32, in the shapes of `tree`: the noise of every mechanism at one step.

    key: of the mechanism's "noise" stream, (). step: int (), below 2^31. Two steps of one key have independent normals.
    """
    return normals.standard_normals(_threefry(key), step, tree)
