"""The cipher, its blocks, and jax's random numbers from keys of 128 bits."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

import dpx
from dpx import keys
from dpx.keys import cipher, noise

SEED = 0x243F6A8885A308D313198A2E03707344
# key, block and result, of the known answers of the authors' code (Random123, kat_vectors); word 0 first
KNOWN = [
    (0, 0, "9c6ca96a e17eae66 fc10ecd4 5256a7d8"),
    (2**128 - 1, 2**128 - 1, "2a881696 57012287 f6c7446e a16a6732"),
    (0xA4093822299F31D0082EFA98EC4E6C89, SEED, "59cd1dbb b8879579 86b5d00c ac8b6d84"),
]


def words_of(number):
    return [jnp.uint32(number >> shift & 2**32 - 1) for shift in (96, 64, 32, 0)]


def enciphered(key, *block):
    """uint32 (4, ...). block: four uint32 arrays or numbers."""
    block = np.broadcast_arrays(*(np.asarray(word, np.uint32) for word in block))
    return np.stack(cipher.threefry4x32([*keys.words(key)], [jnp.asarray(word) for word in block]))


@pytest.mark.parametrize(("key", "block", "result"), KNOWN)
def test_known_answers(key, block, result):
    assert " ".join(f"{int(word):08x}" for word in cipher.threefry4x32(words_of(key), words_of(block))) == result


def test_every_use_of_a_key_has_blocks_of_its_own(monkeypatch):
    """The blocks of the noise of three steps, of derived keys and of drawn numbers, as the cipher is given them.

    Those of jax's split, fold_in and bits, which share some with each other, are other ones.
    """
    key, cipher_of, blocks, found = dpx.secret_key(SEED), cipher.threefry4x32, [], {}
    uses = {
        "noise": lambda: [keys.normal_like(key, step, jnp.zeros(40)) for step in (0, 1, 2**31 - 1)],
        "derived": lambda: [keys.fold_in(key, number) for number in (0, 1, 2, 2**31, 2**32 - 1)],
        "drawn": lambda: cipher.drawn(keys.words(key), 40),
    }

    def record(words, block):
        jax.debug.callback(
            lambda *words: blocks.extend(map(tuple, np.stack(words, -1).reshape(-1, 4).tolist())), *block
        )
        return cipher_of(words, block)

    with monkeypatch.context() as patch:
        patch.setattr(cipher, "threefry4x32", record)
        patch.setattr(noise, "threefry4x32", record)
        jax.clear_caches()
        for name, use in uses.items():
            jax.block_until_ready(use())
            jax.effects_barrier()
            found[name] = set(blocks)
            blocks.clear()
    jax.clear_caches()
    assert len(found["noise"]) >= 60 and len(found["derived"]) == 5 and len(found["drawn"]) == 40
    numbers = np.arange(40)
    np.testing.assert_array_equal(jax.random.key_data(jax.random.split(key, 40)).T, enciphered(key, 0, 0, 0, numbers))
    np.testing.assert_array_equal(keys.words(jax.random.fold_in(key, 7)), enciphered(key, 0, 0, 0, 7))
    bits = enciphered(key, 0, numbers, 0, 0)
    np.testing.assert_array_equal(jax.random.bits(key, (40,), jnp.uint32), np.bitwise_xor.reduce(bits))
    found["jax"] = {(0, 0, 0, n) for n in (*range(40), 2**31, 2**32 - 1)} | {(0, n, 0, 0) for n in range(40)}
    assert len(set().union(*found.values())) == sum(map(len, found.values()))


def test_each_of_128_bits_changes_the_streams_the_mark_and_the_numbers():
    near = [dpx.secret_key(seed) for seed in (SEED, *(SEED ^ 1 << bit for bit in range(128)))]
    for made in (
        lambda key: keys.words(keys.stream(key, "noise")),
        lambda key: keys.words(keys.stream(key, "sampling", 3)),
        keys.mark,
        lambda key: cipher.drawn(keys.words(key), 2)[0],
        lambda key: keys.normal_like(keys.stream(key, "noise"), 0, jnp.zeros(3)),
    ):
        made = made if made is keys.mark else jax.jit(made)  # the mark of a known key is known
        assert len({tuple(np.ravel(made(key)).tolist()) for key in near}) == len(near)


def test_a_stream_has_128_bits():
    """Of 200 derived keys, every bit takes both values, and no word is that of another key."""
    found = np.stack([keys.words(keys.stream(dpx.secret_key(SEED), "noise", step)) for step in range(200)])
    assert np.bitwise_or.reduce(found).tolist() == np.bitwise_or.reduce(~found).tolist() == [2**32 - 1] * 4
    assert len(np.unique(found)) == found.size


def test_a_key_of_more_words_counts_with_all():
    """A user's own implementation of keys may have more than 128 bits."""
    unused: Any = {name: None for name in ("seed", "split", "random_bits", "fold_in")}
    impl = define_prng_impl(key_shape=(3, 2), name="six words", **unused)
    data = np.arange(6, dtype=np.uint32)
    near = [data, *(data ^ (np.arange(6) == place).astype(np.uint32) for place in range(6))]
    marks = {int(keys.mark(jax.random.wrap_key_data(jnp.asarray(d.reshape(3, 2)), impl=impl))) for d in near}
    assert len(marks) == 7


def test_a_public_key_is_half_of_a_derived_one():
    key = keys.stream(dpx.secret_key(SEED), "example", 3)
    public = keys.public(key)
    assert str(jax.random.key_impl(public)) == "threefry2x32" and jax.random.bernoulli(public).shape == ()
    assert jax.random.key_data(public).tolist() == keys.words(key)[2:].tolist()
    assert keys.public(jax.random.key(5)) == jax.random.key(5)


def test_a_shorter_key_is_that_of_its_number():
    words = jnp.array([3, 4], jnp.uint32)
    assert keys.words(jax.random.wrap_key_data(words, impl="threefry2x32")).tolist() == [0, 0, 3, 4]
    assert keys.stream(jax.random.key(5), "noise") == keys.stream(dpx.secret_key(5), "noise")


def test_jax_takes_the_keys():
    key = dpx.secret_key(SEED)
    assert key.shape == () and str(jax.random.key_impl(key)) == "threefry4x32"
    assert jax.random.key_data(key).tolist() == [int(word) for word in words_of(SEED)]
    assert keys.require(key) is key and jax.random.clone(key) == key == pickle.loads(pickle.dumps(key))
    for bits in (8, 16, 32):
        drawn = np.asarray(jax.random.bits(key, (1000, 3), f"uint{bits}"))
        assert np.bitwise_or.reduce(np.ravel(drawn)) == np.bitwise_or.reduce(~np.ravel(drawn)) == 2**bits - 1
    assert sorted(jax.random.permutation(key, 100).tolist()) == list(range(100))
    assert len(set(jax.random.choice(key, 100, (50,), replace=False).tolist())) == 50
    assert abs(np.std(jax.random.normal(key, (10_000,))) - 1) < 0.05
    of_scan = jax.lax.scan(lambda key, _: tuple(jax.random.split(key)), key, length=3)[1]
    assert len(np.unique(jax.random.key_data(of_scan))) == 12


def test_keys_under_vmap_and_jit_have_their_own_numbers():
    def numbers(words):
        key = jax.random.wrap_key_data(words, impl="threefry4x32")
        own = keys.stream(key, "noise", 3)
        return keys.words(own), cipher.drawn(keys.words(own), 5), keys.normal_like(own, 0, jnp.zeros(9))

    words = jnp.stack([jax.random.key_data(dpx.secret_key(SEED + number)) for number in range(3)])
    together = jax.jit(jax.vmap(numbers))(words)
    for row in range(3):
        jax.tree.map(
            lambda found, own, row=row: np.testing.assert_allclose(found[row], own, rtol=1e-6),
            together,
            numbers(words[row]),
        )
    for leaf in jax.tree.leaves(together):
        assert len(np.unique(leaf)) == leaf.size


def test_a_key_survives_a_checkpoint(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    key = dpx.secret_key(SEED)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"key": key})
        checkpointer.wait_until_finished()
        assert checkpointer.restore(tmp_path / "state", {"key": dpx.secret_key(1)})["key"] == key
