"""The secret key holds all the secrecy it can: its streams, the noise that they draw, and their cipher."""

import itertools
import math
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

import dpx
from dpx import keys
from dpx.keys import noise as noise_of
from dpx.keys import streams
from dpx.keys.streams import threefry4x32
from dpx.xla.place import tracing_for_place


def words(key):
    return tuple(jax.random.key_data(key).tolist())


def test_every_bit_of_the_seed_counts():
    seeds = [0, *(2**bit for bit in range(128)), 2**64 + 1, 2**128 - 1]
    assert len({words(dpx.secret_key(seed)) for seed in seeds}) == len(seeds)
    assert words(dpx.secret_key(2**96 + 2**64 * 2 + 2**32 * 3 + 4)) == (1, 2, 3, 4)
    assert dpx.secret_key(5) == dpx.secret_key(np.uint64(5)) == dpx.secret_key(bytes(15) + b"\5")


def test_a_fresh_key_is_nobody_elses():
    keys = {words(dpx.secret_key()) for _ in range(100)}
    assert len(keys) == 100
    for word in np.array(list(keys), np.uint32).T:
        assert np.bitwise_or.reduce(word) == np.bitwise_or.reduce(~word) == 2**32 - 1  # every bit takes both values


@pytest.mark.parametrize("seed", [-1, np.int8(-1), 2**128, 1.0, True, "5", bytes(15), bytes(17), bytearray(16)])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match=r"seed must be a whole number in \[0, 2\^128\) or 16 bytes, got an?"):
        dpx.secret_key(seed)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_fold_in_enciphers_the_number(impl):
    key = jax.random.key(7, impl=impl)
    for number in (0, 1, jnp.int32(5), 2**31, 2**32 - 1):
        block = [jnp.uint32(word) for word in (int(number), 1, 0, 1)]
        assert words(keys.fold_in(key, number)) == tuple(map(int, threefry4x32([*keys.key_words(key)], block)))
    for number in (-1, 2**32):
        with pytest.raises(OverflowError):
            keys.fold_in(key, number)


def test_the_noise_is_normal():
    """The shares of |z| above 1, 2, 3 and 4, within 5 standard errors; false alarm below 1e-5 in all."""
    noise = np.abs(np.asarray(keys.normals_of_release(jax.random.key(3), 0, jnp.zeros((1000, 1000)))))
    for size, share in ((1, 0.31731), (2, 0.045500), (3, 0.0026998), (4, 6.3342e-5)):
        assert abs((noise > size).mean() - share) < 5 * math.sqrt(share / noise.size)


SHAPES = [jnp.zeros((100, 300)), jnp.zeros(()), jnp.zeros((129, 3, 5)), jnp.zeros((0, 2)), jnp.zeros(7)]


@pytest.mark.parametrize("copies", [4, 5])
def test_leaves_of_one_shape_have_the_noise_of_their_places(copies):
    """Up to 3 leaves that repeat a shape, and more, are cut from the stream by two programs."""
    release = jax.jit(keys.release)
    whole = release(jax.random.key(3), 7, jnp.zeros(copies * 30_000), 1.0)
    leaves = release(jax.random.key(3), 7, [jnp.zeros((300, 100))] * copies, 1.0)
    np.testing.assert_array_equal(np.ravel(leaves), whole)


def test_no_number_of_the_noise_repeats_in_another_step():
    """Of 30,000 floats of 2^23 values, some 110 are by chance in the other step."""
    draw = jax.jit(keys.normals_of_release)
    steps = [np.ravel(draw(jax.random.key(3), jnp.int32(step), SHAPES[0])) for step in (0, 1, 2, 8191, 8192, 2**31 - 1)]
    for one, other in itertools.combinations(steps, 2):
        assert np.isin(one, other).sum() < 250


@pytest.mark.parametrize("devices", [1, 8])
def test_each_leaf_of_a_huge_tree_has_a_stream_of_its_own(devices, monkeypatch):
    small = [jnp.zeros((100, 30)), jnp.zeros(3000), jnp.zeros((7, 100))]
    monkeypatch.setattr(noise_of, "ONE_STREAM", 5000)
    jax.clear_caches()
    with tracing_for_place(devices=devices):
        noise = keys.normals_of_release(jax.random.key(3), 7, small)
    numbers = np.concatenate([np.ravel(leaf) for leaf in noise])
    assert len(numbers) - len(np.unique(numbers)) < 30 and abs(numbers.std() - 1) < 0.05
    first, second = (np.ravel(keys.normals_of_release(jax.random.key(3), 7, small[place])) for place in (0, 1))
    assert np.array_equal(np.ravel(noise[0]), first) and not np.isin(noise[1], second).any()


def test_shapes_of_a_tree_of_more_numbers_than_an_index_counts():
    leaves = [jax.ShapeDtypeStruct((2**16, 2**size), jnp.float32) for size in (15, 14)]
    made = jax.eval_shape(keys.normals_of_release, jax.random.key(3), 7, leaves)
    assert [leaf.shape for leaf in made] == [leaf.shape for leaf in leaves]


def test_no_number_of_the_noise_repeats():
    """Among 32,000 floats of 2^23 values, some 60 pairs are equal by chance; a repeated half chunk would be 8,000."""
    leaves = [np.ravel(leaf) for leaf in keys.normals_of_release(jax.random.key(3), 0, SHAPES)]
    numbers = np.concatenate(leaves)
    assert len(numbers) - len(np.unique(numbers)) < 120


def test_other_implementations_of_keys_have_noise_too():
    noise = keys.normals_of_release(jax.random.key(3, impl="rbg"), 0, SHAPES)
    assert abs(np.std(noise[0]) - 1) < 0.05 and not np.array_equal(np.ravel(noise[0])[:7], noise[4])


def test_runs_of_different_keys_have_different_noise_under_vmap():
    """jax draws the numbers of all keys "rbg" from the first one alone: the noise of the second would be the same."""

    def noise(words):
        stream = keys.stream(jax.random.wrap_key_data(words, impl="rbg"), "noise")
        return keys.normals_of_release(stream, 0, jnp.zeros(100))

    words = jax.random.bits(jax.random.key(3), (3, 4))
    one, other = (jax.vmap(noise)(words[np.array(rows)])[1] for rows in ([0, 1], [0, 2]))
    assert not np.isin(one, other).any()
    np.testing.assert_array_equal(one, noise(words[1]))


@pytest.mark.parametrize("place", range(4))
def test_every_word_of_another_implementation_counts(place):
    words = jnp.arange(4, dtype=jnp.uint32)
    one, other = (jax.random.wrap_key_data(w, impl="rbg") for w in (words, words.at[place].add(2**31)))
    assert keys.stream(one, "noise") != keys.stream(other, "noise") and keys.mark_of_key(one) != keys.mark_of_key(other)


SETTINGS = {"threefry_partitionable": False, "enable_x64": True, "disable_jit": True, "numpy_dtype_promotion": "strict"}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_mark_of_a_key_is_the_same_under_other_settings(setting, impl):
    """A run that is resumed, or billed, in another program has the same key."""
    key = jax.random.key(3, impl=impl)
    marks = [keys.mark_of_key(key)]
    with getattr(jax, setting)(SETTINGS[setting]):
        assert getattr(jax.config, f"jax_{setting}") == SETTINGS[setting]
        jax.clear_caches()
        marks += [keys.mark_of_key(key), jax.jit(lambda: keys.mark_of_key(key))(), jax.jit(keys.mark_of_key)(key)]
    assert len({int(mark) for mark in marks}) == 1


def test_noise_without_any_number():
    assert keys.normals_of_release(jax.random.key(3), 0, jnp.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("columns", "leaves", "words"),
    [(2**15, 3, "a release must have at most 4294967296 numbers, got 6442450944")]
    + [(2**16, 1, "a leaf must have at most 4294959104 numbers, got 4294967296")],
)
def test_more_numbers_than_are_billed_or_have_places(columns, leaves, words):
    with pytest.raises(ValueError, match=words):
        keys.normals_of_release(jax.random.key(3), 0, [jax.ShapeDtypeStruct((2**16, columns), jnp.float32)] * leaves)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "secret_key"])
def test_a_key_that_can_be_guessed_warns_once_where_it_is_used(impl, monkeypatch):
    monkeypatch.setattr(streams, "_WARNED", set())
    sampling = dpx.PoissonSampling(examples=100, batch_size=10)

    def made(key):
        return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=key)

    def of(seed):
        return dpx.secret_key(seed) if impl == "secret_key" else jax.random.key(seed, impl=impl)

    def drawn(key):
        return sampling.draw_ahead(key, made(keys.stream(key, "mechanism")).init(jnp.zeros(2)), 1)

    for key, uses in ((of(0), (made, drawn)), (of(2**32 - 1), (drawn, made))):
        with pytest.warns(UserWarning, match=r"key must be secret.*dpx\.secret_key") as warned:
            uses[0](key)
            assert len(warned) == 1
            uses[1](key)
        assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(dpx.secret_key())
        made(keys.stream(of(0), "mechanism"))
        made(dpx.secret_key(2**32))
        jax.jit(lambda key: made(key).init(jnp.zeros(2)))(jax.random.key(0))
        jax.jit(lambda: made(jax.random.key(0)).init(jnp.zeros(2)))()


# The cipher, its blocks, and jax's random numbers from keys of 128 bits.

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
    return np.stack(streams.threefry4x32([*keys.key_words(key)], [jnp.asarray(word) for word in block]))


@pytest.mark.parametrize(("key", "block", "result"), KNOWN)
def test_known_answers(key, block, result):
    assert " ".join(f"{int(word):08x}" for word in streams.threefry4x32(words_of(key), words_of(block))) == result


def test_every_use_of_a_key_has_blocks_of_its_own(monkeypatch):
    """The blocks of the noise of three steps, of derived keys and of drawn numbers, as the cipher is given them.

    Those of jax's split, fold_in and bits, which share some with each other, are other ones.
    """
    key, cipher_of, blocks, found = dpx.secret_key(SEED), streams.threefry4x32, [], {}
    uses = {
        "noise": lambda: [keys.normals_of_release(key, step, jnp.zeros(40)) for step in (0, 1, 2**31 - 1)],
        "derived": lambda: [keys.fold_in(key, number) for number in (0, 1, 2, 2**31, 2**32 - 1)],
        "drawn": lambda: streams.draw_bits(keys.key_words(key), 40),
    }

    def record(words, block):
        jax.debug.callback(
            lambda *words: blocks.extend(map(tuple, np.stack(words, -1).reshape(-1, 4).tolist())), *block
        )
        return cipher_of(words, block)

    with monkeypatch.context() as patch:
        patch.setattr(streams, "threefry4x32", record)
        patch.setattr(noise_of, "threefry4x32", record)
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
    np.testing.assert_array_equal(keys.key_words(jax.random.fold_in(key, 7)), enciphered(key, 0, 0, 0, 7))
    bits = enciphered(key, 0, numbers, 0, 0)
    np.testing.assert_array_equal(jax.random.bits(key, (40,), jnp.uint32), np.bitwise_xor.reduce(bits))
    found["jax"] = {(0, 0, 0, n) for n in (*range(40), 2**31, 2**32 - 1)} | {(0, n, 0, 0) for n in range(40)}
    assert len(set().union(*found.values())) == sum(map(len, found.values()))


def test_each_of_128_bits_changes_the_streams_the_mark_and_the_numbers():
    near = [dpx.secret_key(seed) for seed in (SEED, *(SEED ^ 1 << bit for bit in range(128)))]
    for made in (
        lambda key: keys.key_words(keys.stream(key, "noise")),
        lambda key: keys.key_words(keys.stream(key, "sampling", 3)),
        keys.mark_of_key,
        lambda key: streams.draw_bits(keys.key_words(key), 2)[0],
        lambda key: keys.normals_of_release(keys.stream(key, "noise"), 0, jnp.zeros(3)),
    ):
        made = made if made is keys.mark_of_key else jax.jit(made)  # the mark of a known key is known
        assert len({tuple(np.ravel(made(key)).tolist()) for key in near}) == len(near)


def test_a_stream_has_128_bits():
    """Of 200 derived keys, every bit takes both values, and no word is that of another key."""
    found = np.stack([keys.key_words(keys.stream(dpx.secret_key(SEED), "noise", step)) for step in range(200)])
    assert np.bitwise_or.reduce(found).tolist() == np.bitwise_or.reduce(~found).tolist() == [2**32 - 1] * 4
    assert len(np.unique(found)) == found.size


def test_a_key_of_more_words_counts_with_all():
    """A user's own implementation of keys may have more than 128 bits."""
    unused: Any = {name: None for name in ("seed", "split", "random_bits", "fold_in")}
    impl = define_prng_impl(key_shape=(3, 2), name="six words", **unused)
    data = np.arange(6, dtype=np.uint32)
    near = [data, *(data ^ (np.arange(6) == place).astype(np.uint32) for place in range(6))]
    marks = {int(keys.mark_of_key(jax.random.wrap_key_data(jnp.asarray(d.reshape(3, 2)), impl=impl))) for d in near}
    assert len(marks) == 7


def test_a_public_key_is_half_of_a_derived_one():
    key = keys.stream(dpx.secret_key(SEED), "example", 3)
    public = keys.public_key(key)
    assert str(jax.random.key_impl(public)) == "threefry2x32" and jax.random.bernoulli(public).shape == ()
    assert jax.random.key_data(public).tolist() == keys.key_words(key)[2:].tolist()
    assert keys.public_key(jax.random.key(5)) == jax.random.key(5)


def test_a_shorter_key_is_that_of_its_number():
    words = jnp.array([3, 4], jnp.uint32)
    assert keys.key_words(jax.random.wrap_key_data(words, impl="threefry2x32")).tolist() == [0, 0, 3, 4]
    assert keys.stream(jax.random.key(5), "noise") == keys.stream(dpx.secret_key(5), "noise")


def test_jax_takes_the_keys():
    key = dpx.secret_key(SEED)
    assert key.shape == () and str(jax.random.key_impl(key)) == "threefry4x32"
    assert jax.random.key_data(key).tolist() == [int(word) for word in words_of(SEED)]
    assert keys.require_key(key) is key and jax.random.clone(key) == key == pickle.loads(pickle.dumps(key))
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
        return (
            keys.key_words(own),
            streams.draw_bits(keys.key_words(own), 5),
            keys.normals_of_release(own, 0, jnp.zeros(9)),
        )

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
