"""The secret key holds all the secrecy it can."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import dpx
from dpx import _normals, keys


def words(key):
    return tuple(jax.random.key_data(key).tolist())


def test_every_bit_of_the_seed_counts():
    seeds = [0, *(2**bit for bit in range(64)), 2**64 - 1]
    assert len({words(dpx.secret_key(seed)) for seed in seeds}) == len(seeds)
    assert dpx.secret_key(5) == dpx.secret_key(np.uint64(5)) == jax.random.key(5, impl="threefry2x32")


def test_a_fresh_key_is_nobody_elses():
    keys = {words(dpx.secret_key()) for _ in range(100)}
    assert len(keys) == 100
    for word in np.array(list(keys), np.uint32).T:
        assert np.bitwise_or.reduce(word) == np.bitwise_or.reduce(~word) == 2**32 - 1  # every bit takes both values


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "5"])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match=r"seed must be a whole number in \[0, 2\^64\), got"):
        dpx.secret_key(seed)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_fold_in_is_that_of_jax(impl):
    key = jax.random.key(7, impl=impl)
    for number in (0, 1, np.int32(5), jnp.int32(5), 2**31, 2**32 - 1):
        assert keys.fold_in(key, number) == jax.random.fold_in(key, number)
    for number in (-1, 2**32):
        with pytest.raises(OverflowError):
            keys.fold_in(key, number)


def test_the_noise_is_normal():
    """The shares of |z| above 1, 2, 3 and 4, within 5 standard errors; false alarm below 1e-5 in all."""
    noise = np.abs(np.asarray(keys.normal_like(jax.random.key(3), jnp.zeros((1000, 1000)))))
    for size, share in ((1, 0.31731), (2, 0.045500), (3, 0.0026998), (4, 6.3342e-5)):
        assert abs((noise > size).mean() - share) < 5 * math.sqrt(share / noise.size)


def test_every_normal_is_exact():
    """Of the 2^23 uniform numbers, every 61st, and the 4,000 next to either end."""
    places = np.r_[0:4000, 4000 : 2**23 - 4000 : 61, 2**23 - 4000 : 2**23]
    found = np.asarray(_normals._normal(jnp.asarray(places.astype(np.uint32) << 9)))
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    uniform = np.maximum(lowest, (places * 2.0**-23).astype(np.float32) * (1 - lowest) + lowest)
    np.testing.assert_allclose(found, math.sqrt(2) * scipy.special.erfinv(uniform.astype(float)), rtol=4e-7)


SHAPES = [jnp.zeros((100, 300)), jnp.zeros(()), jnp.zeros((129, 3, 5)), jnp.zeros((0, 2)), jnp.zeros(7)]


@pytest.mark.parametrize("leaves", [slice(0, 5), slice(1, 2), slice(1, 5)], ids=["chunks", "one number", "one chunk"])
def test_the_noise_of_sharded_leaves_is_the_same(leaves, monkeypatch):
    noise = keys.normal_like(jax.random.key(3), SHAPES[leaves])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    chex.assert_trees_all_close(noise, keys.normal_like(jax.random.key(3), SHAPES[leaves]), rtol=1e-6)


def test_no_number_of_the_noise_repeats():
    """Among 32,000 floats of 2^23 values, some 60 pairs are equal by chance; a repeated half chunk would be 8,000."""
    leaves = [np.ravel(leaf) for leaf in keys.normal_like(jax.random.key(3), SHAPES)]
    numbers = np.concatenate(leaves)
    assert len(numbers) - len(np.unique(numbers)) < 120


def test_other_implementations_of_keys_have_noise_too():
    noise = keys.normal_like(jax.random.key(3, impl="rbg"), SHAPES)
    assert abs(np.std(noise[0]) - 1) < 0.05 and not np.array_equal(np.ravel(noise[0])[:7], noise[4])


def test_noise_without_any_number():
    assert keys.normal_like(jax.random.key(3), jnp.zeros((0, 2))).shape == (0, 2)


def test_a_leaf_too_large_for_the_noise():
    with pytest.raises(ValueError, match="a leaf must have at most 4294950912 numbers, got 4294967296"):
        keys.normal_like(jax.random.key(3), jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32))
