"""The secret key holds all the secrecy it can."""

import jax
import numpy as np
import pytest

import dpx


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
