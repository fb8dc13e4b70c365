"""What is drawn is what is billed: distribution, divisor, shapes, determinism, relation."""

import math

import dp_accounting
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpx

KEY = jax.random.key(5)
SAMPLINGS = [
    dpx.PoissonSampling(examples=100, batch_size=10),
    dpx.FixedSizeSampling(examples=100, batch_size=10),
    dpx.ShuffledEpochs(examples=95, batch_size=10),
    dpx.FullBatch(examples=100),
]


def drawn(sampling, step, key=KEY):
    indices, weights = sampling.draw(key, step)
    assert indices.dtype == np.int32 and weights.dtype == np.float32 and indices.shape == weights.shape
    assert set(weights) <= {0, 1} and not indices[weights == 0].any()
    chosen = indices[weights == 1]
    assert len(set(chosen)) == len(chosen) and ((0 <= chosen) & (chosen < sampling.examples)).all()
    return chosen


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_a_batch_is_a_function_of_key_and_step(sampling):
    for step in (0, 1, 17):
        np.testing.assert_array_equal(drawn(sampling, step), drawn(sampling, np.int32(step)))
    if not isinstance(sampling, dpx.FullBatch):
        assert list(drawn(sampling, 0)) != list(drawn(sampling, 1))
        assert list(drawn(sampling, 0)) != list(drawn(sampling, 0, jax.random.key(6)))


def test_poisson_coins_are_independent_and_have_the_billed_probability():
    """3000 steps: rate of every example, variance of the size, correlation of pairs; false alarm below 1e-4 in all."""
    sampling, steps = SAMPLINGS[0], 3000
    taken = np.zeros((steps, 100))
    for step in range(steps):
        taken[step, drawn(sampling, step)] = 1
    error = np.sqrt(0.1 * 0.9 / steps)
    assert np.abs(taken.mean(0) - 0.1).max() < 5 * error
    assert abs(taken.mean() - 0.1) < 5 * error / 10
    assert abs(taken.sum(1).var() / 9 - 1) < 5 * np.sqrt(2 / steps)
    correlation = np.corrcoef(taken, rowvar=False) - np.eye(100)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(steps)


def test_fixed_size_takes_every_example_equally():
    taken = np.bincount(np.concatenate([drawn(SAMPLINGS[1], step) for step in range(2000)]), minlength=100) / 2000
    assert np.abs(taken - 0.1).max() < 5 * np.sqrt(0.09 / 2000)


def test_an_epoch_takes_every_example_once():
    sampling = SAMPLINGS[2]
    assert sampling.steps_per_epoch == 10
    epochs = [np.concatenate([drawn(sampling, 10 * e + i) for i in range(10)]) for e in range(3)]
    assert all(sorted(epoch) == list(range(95)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    assert len(drawn(sampling, 9)) == 5


def test_a_large_poisson_batch_is_never_cut():
    small = dpx.PoissonSampling(examples=1000, batch_size=100, capacity=64)
    free = dpx.PoissonSampling(examples=1000, batch_size=100)
    for step in range(20):
        np.testing.assert_array_equal(drawn(small, step), drawn(free, step))
        assert len(small.draw(KEY, step)[0]) % 8 == 0
    assert {len(free.draw(KEY, step)[0]) for step in range(200)} == {152}  # one shape, one compilation
    with pytest.raises(ValueError, match="size must hold the whole batch"):
        free.draw(KEY, 0, size=50)
    assert len(free.draw(KEY, 0, size=300)[0]) == 300


def test_probability_one_takes_everyone():
    assert len(drawn(dpx.PoissonSampling(examples=7, batch_size=7), 3)) == 7


def test_events():
    poisson, fixed, shuffled, full = SAMPLINGS
    gaussian = dp_accounting.GaussianDpEvent
    assert poisson.event(np.ones(1)) == dp_accounting.PoissonSampledDpEvent(0.1, gaussian(1.0))
    assert poisson.event(np.ones(3)) == dp_accounting.SelfComposedDpEvent(poisson.event(np.ones(1)), 3)
    assert poisson.event(np.zeros(0)) == dp_accounting.NoOpDpEvent()
    assert fixed.event(np.full(1, 3.0)) == dp_accounting.SampledWithoutReplacementDpEvent(100, 10, gaussian(1.5))
    assert full.event(np.array([2.0, 1.0])) == dp_accounting.ComposedDpEvent([gaussian(1.0), gaussian(2.0)])
    # three begun epochs of ten steps, each billed at its smallest multiplier
    multipliers = np.concatenate([np.full(10, 3.0), np.linspace(2, 1, 10), np.full(1, 5.0)])
    assert shuffled.event(multipliers) == dp_accounting.ComposedDpEvent([gaussian(1.0), gaussian(3.0), gaussian(5.0)])
    assert [s.relation for s in SAMPLINGS] == ["add_or_remove", "replace_one", "zero_out", "zero_out"]
    assert [s.divisor for s in SAMPLINGS] == [10, 10, 10, 100]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    examples=st.one_of(st.integers(-5, 5), st.floats(allow_nan=True), st.none(), st.text(max_size=2)),
    batch_size=st.one_of(st.integers(-5, 10), st.floats(allow_nan=True, allow_infinity=True), st.none()),
)
def test_bad_sizes(examples, batch_size):
    """A record is made for 1 <= examples and 0 < batch_size <= examples; anything else is a ValueError."""
    for make in (dpx.PoissonSampling, dpx.FixedSizeSampling, dpx.ShuffledEpochs):
        whole = isinstance(batch_size, int) or make is dpx.PoissonSampling
        good = (
            isinstance(examples, int)
            and examples >= 1
            and batch_size is not None
            and 0 < batch_size <= examples
            and whole
        )
        if good:
            assert make(examples=examples, batch_size=batch_size).divisor == batch_size
        else:
            with pytest.raises(ValueError, match="examples|batch_size"):
                make(examples=examples, batch_size=batch_size)


def test_bad_capacity():
    for capacity in (0, 8.5, math.nan, True, "8"):
        with pytest.raises(ValueError, match="capacity must be a whole number of at least 1, got"):
            dpx.PoissonSampling(examples=10, batch_size=2, capacity=capacity)  # type: ignore
