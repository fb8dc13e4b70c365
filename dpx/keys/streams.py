"""One secret key, and the named streams derived from it.

Every random use in dpx has its own stream, because two uses of one stream could be subtracted from each other.
"""

import functools
import secrets
import zlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpx.keys import cipher
from dpx.values import names_arguments, warn_user

SMALL = (
    "the key must be secret, but it looks like one from a seed below 2^32, such as jax.random.key(0). Anyone can try "
    "all of these and subtract the noise: take dpx.secret_key()"
)
_WARNED: set[int] = set()  # the marks of the keys that were warned of


@names_arguments
def secret_key(seed: int | np.integer | bytes | None = None) -> jax.Array:
    """A typed PRNG key, (), from all 128 bits of `seed`. The key and the seed are as secret as the data.

    seed: an int in [0, 2^128), or 16 bytes, the highest first; None takes 128 fresh bits from the operating system. To
        continue the run later, choose the seed yourself (`secrets.randbits(128)`) and keep it.

    A cipher with this 128-bit key draws everything random in dpx (dpx/keys/cipher.py). Other JAX keys are accepted, but
    hold less: `jax.random.key` keeps only the lowest 32 bits of a seed, so that anyone can try them all, and a
    "threefry2x32" key has at most 64 secret bits. Raises ValueError for any other seed.

        >>> import secrets
        >>> seed = secrets.randbits(128)  # keep it as secret as the data, to continue the run later
        >>> dpx.secret_key(seed).shape
        ()
    """
    if seed is None:
        seed = secrets.token_bytes(16)
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and 0 <= seed < 2**128:
        seed = int(seed).to_bytes(16)
    if not isinstance(seed, bytes) or len(seed) != 16:
        kind = type(seed).__name__  # a seed is a secret, even a wrong one
        got = f"another {kind}" if isinstance(seed, int | np.integer | bytes) else f"a {kind}"
        raise ValueError(f"seed must be a whole number in [0, 2^128) or 16 bytes, got {got}")
    return _typed_key(jnp.asarray(np.frombuffer(seed, ">u4").astype(np.uint32)))


def require_key(key: jax.Array) -> jax.Array:
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
    """Whether a key, (), is known and looks like one from a seed below 2^32; others do with probability 2^-32 or less.
    A "threefry4x32" or "philox" key of `jax.random.key` hides its seed, so it looks like any other."""
    if isinstance(key, jax.core.Tracer):
        return False
    data = jax.random.key_data(require_key(key))
    if isinstance(data, jax.core.Tracer):
        return False
    first, second, third, last = [0] * (4 - data.size) + np.ravel(data).tolist()[:4]
    return first == third == 0 and second in (0, last)  # an "rbg" key holds its seed twice


def warn_if_guessable(key: jax.Array) -> jax.Array:
    """`key`, (), with a warning, once for each key, at the user's line if it comes from a seed that can be guessed."""
    if is_small(key) and (mark := int(mark_of_key(key))) not in _WARNED:
        _WARNED.add(mark)
        warn_user(SMALL)
    return key


def stream(key: jax.Array, name: str, step: jax.Array | int | None = None) -> jax.Array:
    """The key, (), for the use called `name`; with a step, int (), the key for that step alone. A 128-bit
    "threefry4x32" key, whatever implementation `key` has. Raises ValueError as `require_key` does."""
    named = fold_in(require_key(key), zlib.crc32(name.encode()))
    return named if step is None else fold_in(named, step)


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """The "threefry4x32" key, (), derived from a key, (), and a number in [0, 2^32), int (). `jax.random.fold_in` would
    share a block of the cipher with `jax.random.bits`. Raises OverflowError for a known number outside this range."""
    word = number.astype(jnp.uint32) if isinstance(number, jax.Array) else np.uint32(int(number))
    return _typed_key(cipher.derive_key(key_words(key), word))


def key_words(key: jax.Array) -> jax.Array:
    """The 128 bits of a key, (), that enter the cipher: uint32 (4,), the highest first.

    A shorter key is padded with zeros, so it stays the same number, which a fresh `secret_key` equals with probability
    2^-64 only. Words beyond four are folded in. Under `jax.vmap`, jax draws only from the first of all "rbg" keys, so
    runs of different keys would share noise; here only the words of each key matter.
    """
    data = jax.random.key_data(key).reshape(-1)
    if data.size < 4:
        data = jnp.concatenate([jnp.zeros(4 - data.size, jnp.uint32), data])
    return functools.reduce(cipher.derive_key, data[4:], data[:4])


def public_key(key: jax.Array) -> jax.Array:
    """A "threefry2x32" key, (), for numbers that anyone may know: half of the words of `key`, (), which must have no
    other use; a "threefry2x32" key is returned as it is.

    It reveals nothing about what `key` was derived from. Its cipher is smaller, so jax.random draws in half of the time
    or less, and XLA compiles a step with a "hadamard" projection in 4 s instead of 21. With jax's threefry4x32 and
    without XLA's optimizations, `jax.random.randint` under `jax.vmap` took 50 s for 20,000 numbers.
    """
    return jax.random.wrap_key_data(key_words(key)[2:], impl="threefry2x32")


def _typed_key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry4x32")


def mark_of_key(key: jax.Array) -> jax.Array:
    """A number in [2^31, 2^32), uint32 (), that differs for two keys with probability 1 - 2^-31, and reveals no more.
    If the key is known, so is the mark, even inside jit: it is a word of the key of the "mark" stream, which draws
    nothing."""
    with jax.ensure_compile_time_eval():
        return key_words(stream(key, "mark"))[0] | jnp.uint32(2**31)
