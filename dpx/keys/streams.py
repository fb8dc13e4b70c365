"""One secret key, the named streams derived from it, and the cipher that derives them and draws from them.

Every random use in dpx has its own stream, because two uses of one stream could be subtracted from each other.

The cipher is Threefry-4x32 with 20 rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), on JAX arrays.
Each of 2^128 keys permutes the 2^128 blocks differently. Threefry-2x32, the cipher of `jax.random.key`, has keys and
blocks of 64 bits: 2^64 trials find a key, and for the 10^10 numbers of a long run, even an ideal permutation of 64-bit
blocks differs from a random function, because no block repeats.

No two uses of one key encipher the same block, because they differ in the second or the last word:

    the noise                   (step + 1, place, 0, 0)
    a key of a key, `derive_key`   (number, 1, 0, DERIVED)
    other numbers, `draw_bits`      (position, 1, 0, DRAWN)
    the word of a release       (step + 1, 1, 0, RARE)
    jax's split and fold_in     (0, 0, high, low)
    jax's bits                  (high, low, 0, 0)

jax's own uses of one key share a block: `jax.random.bits` and `jax.random.fold_in` both encipher the block of zeros. So
dpx gives jax.random only keys from which nothing else is drawn.
"""

import functools
import secrets
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpx.values import explain_misuse, warn_user

# How far each round rotates its two words, in bits. The first word of a pair is word 0, the second 1 and 3 in turns.
TURNS = (10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)
ROUNDS = 20
PARITY = np.uint32(0x1BD11BDA)

DERIVED, DRAWN, RARE = 1, 2, 3  # the last word of a block


def threefry4x32(key: Sequence[jax.Array] | jax.Array, block: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the enciphered blocks, four uint32 arrays. key: four uint32 scalars. block: four uint32 arrays of one
    shape. Word 0 is the lowest, as in the authors' code (Random123)."""
    lax, shape = jax.lax, block[0].shape  # `jnp` takes longer to trace

    def constant_word(value) -> jax.Array:
        return lax.full(shape, value, jnp.uint32)

    shifts = {bits: constant_word(bits) for pair in TURNS for turn in pair for bits in (turn, 32 - turn)}

    def mix_words(low: jax.Array, high: jax.Array, turn: int) -> tuple[jax.Array, jax.Array]:
        low = lax.add(low, high)
        left, right = lax.shift_left(high, shifts[turn]), lax.shift_right_logical(high, shifts[32 - turn])
        return low, lax.bitwise_xor(low, lax.bitwise_or(left, right))

    scalars = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ PARITY]
    added = [constant_word(scalar) for scalar in scalars]
    a, b, c, d = (lax.add(word, one) for word, one in zip(block, added[:4], strict=True))
    for number in range(ROUNDS):
        first, second = TURNS[number % len(TURNS)]
        if number % 2:
            (a, d), (c, b) = mix_words(a, d, first), mix_words(c, b, second)
        else:
            (a, b), (c, d) = mix_words(a, b, first), mix_words(c, d, second)
        if number % 4 == 3:
            group = number // 4 + 1
            a, b, c = (lax.add(word, added[(group + place) % 5]) for place, word in enumerate((a, b, c)))
            d = lax.add(d, constant_word(scalars[(group + 3) % 5] + np.uint32(group)))
    return [a, b, c, d]


@functools.partial(jax.jit, static_argnums=2)
def derive_key(words: jax.Array, number: jax.Array, use: int = DERIVED) -> jax.Array:
    """Derives a new key, uint32 (4,), from the words of a key and a number, uint32 (). use: DERIVED or RARE."""
    lax, place = jax.lax, jax.lax.iota(jnp.uint32, 4)
    every = functools.partial(lax.full_like, place)
    found = threefry4x32([*words], [lax.broadcast(number, (4,)), every(1), every(0), every(use)])
    # One array of four equal columns, from which each select takes one word, is one program for XLA. Four scalars would
    # be four programs, which take three times as long to compile.
    low = lax.select(lax.lt(place, every(1)), found[0], found[1])
    high = lax.select(lax.lt(place, every(3)), found[2], found[3])
    return lax.select(lax.lt(place, every(2)), low, high)


def draw_bits(words: jax.Array, count: int) -> list[jax.Array]:
    """Draws 128 bits for each of `count` positions: four uint32 arrays (count,). words: the key, uint32 (4,). Unlike
    those of `jax.random.bits`, these bits depend on no setting of jax."""
    every = functools.partial(jax.lax.full, (count,), dtype=jnp.uint32)
    return threefry4x32([*words], [jax.lax.iota(jnp.uint32, count), every(1), every(0), every(DRAWN)])


SMALL = (
    "the key must be secret, but it looks like one from a seed below 2^32, such as jax.random.key(0). Anyone can try "
    "all of these and subtract the noise: take dpx.secret_key(), or dpx.secret_key(seed) with a seed that you keep, "
    "such as secrets.randbits(128)"
)
_WARNED: set[int] = set()  # the marks of the keys that were warned about


@explain_misuse
def secret_key(seed: int | np.integer | bytes | None = None) -> jax.Array:
    """Returns a scalar typed PRNG key from all 128 bits of `seed`. The key and the seed are as secret as the data.

    seed: an int in [0, 2^128), or 16 bytes, highest first; None takes 128 fresh bits from the operating system. To
        continue the run later, choose the seed yourself (`secrets.randbits(128)`) and keep it.

    A cipher with this 128-bit key draws everything random in dpx (`dpx.keys.streams`). Other JAX keys are accepted, but
    hold fewer secret bits: `jax.random.key` keeps only the lowest 32 bits of a seed, so anyone can try them all, and a
    "threefry2x32" key has at most 64. Raises ValueError for any other seed.

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
    """Returns `key` as a scalar typed PRNG key. Raises ValueError unless it is one key, of a safe implementation."""
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a jax PRNG key (dpx.secret_key()), got another {type(key).__name__}")
    if not is_key(key):
        if key.dtype != jnp.uint32 or key.shape != jax.random.key_data(jax.random.key(0)).shape:
            raise ValueError(f"key must be a jax PRNG key, got an array {key.dtype}{key.shape}")
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"key must be one key, got keys of shape {key.shape}")
    if str(jax.random.key_impl(key)) == "unsafe_rbg":
        raise ValueError('key must not be of implementation "unsafe_rbg": its fold_in undoes itself, so keys repeat')
    return key


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys, of any shape."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def has_small_seed(key: jax.Array) -> bool:
    """Whether a scalar key is not traced and looks like one from a seed below 2^32. Others look so with probability at
    most 2^-32. A "threefry4x32" or "philox" key of `jax.random.key` hides its seed, so this returns False."""
    if isinstance(key, jax.core.Tracer):
        return False
    data = jax.random.key_data(require_key(key))
    if isinstance(data, jax.core.Tracer):
        return False
    first, second, third, last = [0] * (4 - data.size) + np.ravel(data).tolist()[:4]
    return first == third == 0 and second in (0, last)  # an "rbg" key holds its seed twice


def warn_if_guessable(key: jax.Array) -> jax.Array:
    """Returns the scalar `key`, and warns once per key, at the user's line, if it comes from a guessable seed."""
    if has_small_seed(key) and (mark := int(mark_of_key(key))) not in _WARNED:
        _WARNED.add(mark)
        warn_user(SMALL)
    return key


def stream(key: jax.Array, name: str, step: jax.Array | int | None = None) -> jax.Array:
    """Derives the scalar key for the use called `name`; with an int `step`, the key for that step alone. It is a
    128-bit "threefry4x32" key, whatever implementation `key` has. Raises ValueError as `require_key` does."""
    named = fold_in(require_key(key), zlib.crc32(name.encode()))
    return named if step is None else fold_in(named, step)


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Derives a scalar "threefry4x32" key from a scalar key and an int in [0, 2^32). `jax.random.fold_in` would share a
    block of the cipher with `jax.random.bits`. Raises OverflowError for a known number outside this range."""
    word = number.astype(jnp.uint32) if isinstance(number, jax.Array) else np.uint32(int(number))
    return _typed_key(derive_key(key_words(key), word))


def key_words(key: jax.Array) -> jax.Array:
    """Returns the 128 bits of a scalar key that enter the cipher: uint32 (4,), highest first.

    A shorter key is padded with leading zeros, so it stays the same number; a fresh `secret_key` equals such a number
    only with probability 2^-64. Words beyond four are folded in. Under `jax.vmap`, jax draws from the first "rbg" key
    alone, so runs with different keys would share noise; dpx reads the words of each key.
    """
    data = jax.random.key_data(key).reshape(-1)
    if data.size < 4:
        data = jnp.concatenate([jnp.zeros(4 - data.size, jnp.uint32), data])
    return functools.reduce(derive_key, data[4:], data[:4])


def public_key(key: jax.Array) -> jax.Array:
    """Returns a scalar "threefry2x32" key for numbers that anyone may know: half of the words of the scalar `key`,
    which must have no other use. A "threefry2x32" key is returned as it is.

    It reveals nothing about what `key` was derived from. Its cipher is smaller, so jax.random draws in at most half the
    time, and XLA compiles a step with a "hadamard" projection in 4 s instead of 21. With jax's threefry4x32 and
    without XLA's optimizations, `jax.random.randint` under `jax.vmap` took 50 s for 20,000 numbers.
    """
    return jax.random.wrap_key_data(key_words(key)[2:], impl="threefry2x32")


def _typed_key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry4x32")


def mark_of_key(key: jax.Array) -> jax.Array:
    """Returns a number in [2^31, 2^32), uint32 (), that differs between two keys with probability 1 - 2^-31 and reveals
    no more: a word of the key of the "mark" stream, which draws nothing. It is not traced if the key is not."""
    with jax.ensure_compile_time_eval():
        return key_words(stream(key, "mark"))[0] | jnp.uint32(2**31)
