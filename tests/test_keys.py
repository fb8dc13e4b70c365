"""The secret key holds all the secrecy it can."""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx import keys
from dpx.keys import noise as noise_of
from dpx.keys.cipher import threefry4x32


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
        assert words(keys.fold_in(key, number)) == tuple(map(int, threefry4x32([*keys.words(key)], block)))
    for number in (-1, 2**32):
        with pytest.raises(OverflowError):
            keys.fold_in(key, number)


def test_the_noise_is_normal():
    """The shares of |z| above 1, 2, 3 and 4, within 5 standard errors; false alarm below 1e-5 in all."""
    noise = np.abs(np.asarray(keys.normal_like(jax.random.key(3), 0, jnp.zeros((1000, 1000)))))
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
    draw = jax.jit(keys.normal_like)
    steps = [np.ravel(draw(jax.random.key(3), jnp.int32(step), SHAPES[0])) for step in (0, 1, 2, 8191, 8192, 2**31 - 1)]
    for one, other in itertools.combinations(steps, 2):
        assert np.isin(one, other).sum() < 250


@pytest.mark.parametrize("devices", [1, 8])
def test_each_leaf_of_a_huge_tree_has_a_stream_of_its_own(devices, monkeypatch):
    small = [jnp.zeros((100, 30)), jnp.zeros(3000), jnp.zeros((7, 100))]
    monkeypatch.setattr(noise_of, "ONE_STREAM", 5000)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    jax.clear_caches()
    noise = keys.normal_like(jax.random.key(3), 7, small)
    numbers = np.concatenate([np.ravel(leaf) for leaf in noise])
    assert len(numbers) - len(np.unique(numbers)) < 30 and abs(numbers.std() - 1) < 0.05
    first, second = (np.ravel(keys.normal_like(jax.random.key(3), 7, small[place])) for place in (0, 1))
    assert np.array_equal(np.ravel(noise[0]), first) and not np.isin(noise[1], second).any()


def test_shapes_of_a_tree_of_more_numbers_than_an_index_counts():
    leaves = [jax.ShapeDtypeStruct((2**16, 2**size), jnp.float32) for size in (15, 14)]
    made = jax.eval_shape(keys.normal_like, jax.random.key(3), 7, leaves)
    assert [leaf.shape for leaf in made] == [leaf.shape for leaf in leaves]


def test_no_number_of_the_noise_repeats():
    """Among 32,000 floats of 2^23 values, some 60 pairs are equal by chance; a repeated half chunk would be 8,000."""
    leaves = [np.ravel(leaf) for leaf in keys.normal_like(jax.random.key(3), 0, SHAPES)]
    numbers = np.concatenate(leaves)
    assert len(numbers) - len(np.unique(numbers)) < 120


def test_other_implementations_of_keys_have_noise_too():
    noise = keys.normal_like(jax.random.key(3, impl="rbg"), 0, SHAPES)
    assert abs(np.std(noise[0]) - 1) < 0.05 and not np.array_equal(np.ravel(noise[0])[:7], noise[4])


def test_runs_of_different_keys_have_different_noise_under_vmap():
    """jax draws the numbers of all keys "rbg" from the first one alone: the noise of the second would be the same."""

    def noise(words):
        stream = keys.stream(jax.random.wrap_key_data(words, impl="rbg"), "noise")
        return keys.normal_like(stream, 0, jnp.zeros(100))

    words = jax.random.bits(jax.random.key(3), (3, 4))
    one, other = (jax.vmap(noise)(words[np.array(rows)])[1] for rows in ([0, 1], [0, 2]))
    assert not np.isin(one, other).any()
    np.testing.assert_array_equal(one, noise(words[1]))


@pytest.mark.parametrize("place", range(4))
def test_every_word_of_another_implementation_counts(place):
    words = jnp.arange(4, dtype=jnp.uint32)
    one, other = (jax.random.wrap_key_data(w, impl="rbg") for w in (words, words.at[place].add(2**31)))
    assert keys.stream(one, "noise") != keys.stream(other, "noise") and keys.mark(one) != keys.mark(other)


SETTINGS = {
    "threefry_partitionable": False,
    "enable_x64": True,
    "disable_jit": True,
    "numpy_dtype_promotion": "strict",
}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_mark_of_a_key_is_the_same_under_other_settings(setting, impl):
    """A run that is resumed, or billed, in another program has the same key."""
    key = jax.random.key(3, impl=impl)
    marks = [keys.mark(key)]
    with getattr(jax, setting)(SETTINGS[setting]):
        assert getattr(jax.config, f"jax_{setting}") == SETTINGS[setting]
        jax.clear_caches()
        marks += [keys.mark(key), jax.jit(lambda: keys.mark(key))(), jax.jit(keys.mark)(key)]
    assert len({int(mark) for mark in marks}) == 1


def test_noise_without_any_number():
    assert keys.normal_like(jax.random.key(3), 0, jnp.zeros((0, 2))).shape == (0, 2)


def test_more_numbers_than_are_billed():
    half = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    with pytest.raises(ValueError, match="a release must have at most 4294967296 numbers, got 6442450944"):
        keys.normal_like(jax.random.key(3), 0, [half] * 3)


def test_a_leaf_too_large_for_the_noise():
    with pytest.raises(ValueError, match="a leaf must have at most 4294959104 numbers, got 4294967296"):
        keys.normal_like(jax.random.key(3), 0, jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "secret_key"])
def test_a_key_that_can_be_guessed_warns_once_where_it_is_used(impl):
    sampling = dpx.PoissonSampling(examples=100, batch_size=10)

    def made(key):
        return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=key)

    def of(seed):
        return dpx.secret_key(seed) if impl == "secret_key" else jax.random.key(seed, impl=impl)

    for key in (of(0), of(2**32 - 1)):
        with pytest.warns(UserWarning, match=r"key must be secret.*dpx\.secret_key") as warned:
            made(key)
        assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(dpx.secret_key())
        made(keys.stream(of(0), "mechanism"))
        made(dpx.secret_key(2**32))
        jax.jit(lambda key: made(key).init(jnp.zeros(2)))(jax.random.key(0))
        jax.jit(lambda: made(jax.random.key(0)).init(jnp.zeros(2)))()
