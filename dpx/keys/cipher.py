"""The cipher Threefry-4x32 of 20 rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), on JAX arrays.

It is a permutation of the 2^128 blocks for each of 2^128 keys. All random numbers of dpx come from it. The cipher of
`jax.random.key`, Threefry-2x32, has keys and blocks of 64 bits: 2^64 trials find a key, and at the 10^10 numbers of a
long run, even an ideal permutation of 64-bit blocks differs from a random function, because no block comes twice.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# How far each round turns its two words, in bits; the first word of a pair is 0, the other is 1 and 3 in turns.
TURNS = (10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)
ROUNDS = 20
PARITY = np.uint32(0x1BD11BDA)


def threefry4x32(key: Sequence[jax.Array], block: Sequence[jax.Array]) -> list[jax.Array]:
    """The enciphered blocks, four uint32 arrays. key: four words, uint32 () each. block: four uint32 arrays, one shape.

    As in the code of the authors (Random123), word 0 is the lowest.
    """
    lax, shape = jax.lax, block[0].shape  # `jnp` takes longer to trace

    def every(value) -> jax.Array:
        return lax.full(shape, value, jnp.uint32)

    shifts = {bits: every(bits) for pair in TURNS for turn in pair for bits in (turn, 32 - turn)}

    def mixed(low: jax.Array, high: jax.Array, turn: int) -> tuple[jax.Array, jax.Array]:
        low = lax.add(low, high)
        left, right = lax.shift_left(high, shifts[turn]), lax.shift_right_logical(high, shifts[32 - turn])
        return low, lax.bitwise_xor(low, lax.bitwise_or(left, right))

    scalars = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ PARITY]
    added = [every(scalar) for scalar in scalars]
    a, b, c, d = (lax.add(word, one) for word, one in zip(block, added[:4], strict=True))
    for number in range(ROUNDS):
        first, second = TURNS[number % len(TURNS)]
        if number % 2:
            (a, d), (c, b) = mixed(a, d, first), mixed(c, b, second)
        else:
            (a, b), (c, d) = mixed(a, b, first), mixed(c, d, second)
        if number % 4 == 3:
            group = number // 4 + 1
            a, b, c = (lax.add(word, added[(group + place) % 5]) for place, word in enumerate((a, b, c)))
            d = lax.add(d, every(scalars[(group + 3) % 5] + np.uint32(group)))
    return [a, b, c, d]
