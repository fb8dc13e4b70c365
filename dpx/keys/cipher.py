"""The cipher Threefry-4x32 of 20 rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), on JAX arrays.

It permutes the 2^128 blocks, in a way that each of 2^128 keys chooses. Threefry-2x32, the cipher of `jax.random.key`,
has keys and blocks of 64 bits: 2^64 trials find a key, and at the 10^10 numbers of a long run, even an ideal
permutation of 64-bit blocks differs from a random function, because no block comes twice.

No two uses of one key encipher the same block, because they differ in the second or the last word:

    the noise                   (step + 1, place, 0, 0)
    a key of a key, `derive_key`   (number, 1, 0, DERIVED)
    other numbers, `draw_bits`      (place, 1, 0, DRAWN)
    the word of a release       (step + 1, 1, 0, RARE)
    jax's split and fold_in     (0, 0, high, low)
    jax's bits                  (high, low, 0, 0)

jax's own uses of one key share a block: `jax.random.bits` and `jax.random.fold_in` both encipher the block of zeros. So
dpx gives jax.random only keys from which nothing else is drawn.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# How far each round rotates its two words, in bits. The first word of a pair is number 0, the second 1 and 3 in turns.
TURNS = (10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)
ROUNDS = 20
PARITY = np.uint32(0x1BD11BDA)

DERIVED, DRAWN, RARE = 1, 2, 3  # the last word of a block


def threefry4x32(key: Sequence[jax.Array] | jax.Array, block: Sequence[jax.Array]) -> list[jax.Array]:
    """The enciphered blocks, four uint32 arrays. key: four words, uint32 () each. block: four uint32 arrays, one shape.
    Word 0 is the lowest, as in the authors' code (Random123)."""
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
    """The words of a new key, uint32 (4,), from those of a key and a number, uint32 (). use: DERIVED or RARE."""
    lax, place = jax.lax, jax.lax.iota(jnp.uint32, 4)
    every = functools.partial(lax.full_like, place)
    found = threefry4x32([*words], [lax.broadcast(number, (4,)), every(1), every(0), every(use)])
    # One array of four equal columns, from which the selects take one word each, is one program for XLA. Four scalars
    # would be four programs, which take three times as long to compile.
    low = lax.select(lax.lt(place, every(1)), found[0], found[1])
    high = lax.select(lax.lt(place, every(3)), found[2], found[3])
    return lax.select(lax.lt(place, every(2)), low, high)


def draw_bits(words: jax.Array, count: int) -> list[jax.Array]:
    """128 random bits for each of `count` places: four uint32 arrays (count,). words: of the key, uint32 (4,). Unlike
    `jax.random.bits`, they depend on no setting of jax."""
    every = functools.partial(jax.lax.full, (count,), dtype=jnp.uint32)
    return threefry4x32([*words], [jax.lax.iota(jnp.uint32, count), every(1), every(0), every(DRAWN)])
