"""Named streams of one secret key.

Two random uses that share a stream can be subtracted from each other, so every use in dpx names its own.
"""

import secrets
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax


def secret_key(seed: int | None = None) -> jax.Array:
    """A key of all 64 bits of the seed; without one, of 64 fresh bits of the operating system. As secret as the data.

    `jax.random.key` keeps the lowest 32 bits of a seed, which can be tried one by one; below 2^32 the two are the same.
    To go on with a run, keep its seed (`secrets.randbits(64)`). Raises ValueError for a seed outside [0, 2^64).
    """
    if seed is None:
        seed = secrets.randbits(64)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number in [0, 2^64), got {seed!r}")
    words = np.array(divmod(int(seed), 2**32), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def require(key: jax.Array) -> jax.Array:
    """`key` as a typed PRNG key; ValueError if it is not one key."""
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a jax PRNG key (dpx.secret_key()), got {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.shape != jax.random.key_data(jax.random.key(0)).shape:
            raise ValueError(f"key must be a jax PRNG key, got an array {key.dtype}{key.shape}")
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"key must be one key, got keys of shape {key.shape}")
    if str(jax.random.key_impl(key)) == "unsafe_rbg":
        raise ValueError('key must not be of implementation "unsafe_rbg": its fold_in undoes itself, so keys repeat')
    return key


def stream(key: jax.Array, name: str, step: jax.Array | int | None = None) -> jax.Array:
    """The key of the use called `name`, at one step if a step is given."""
    named = jax.random.fold_in(require(key), zlib.crc32(name.encode()))
    return named if step is None else jax.random.fold_in(named, step)


def mark(key: jax.Array) -> int:
    """16 bits by which two keys can be told apart, and which say nothing else of a key; never 0."""
    return int(jax.random.bits(stream(key, "mark"), (), jnp.uint16)) + 2**16


def normal_like(key: jax.Array, tree):
    """Independent standard normals, float32, in the shape of `tree`: the noise of every mechanism."""
    return optax.tree.random_like(key, tree, jax.random.normal, jnp.float32)
