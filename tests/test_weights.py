"""Public weights: rates, coins, the divisor, and the bills of all examples and of those of one weight."""

import math

import numpy as np
import pytest
import scipy.stats
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

import dpx
from dpx.sampling import varying as by_coins
from dpx.sampling.batch import step_key, toss_coins
from tests.problems import KEY, dp_sgd, poisson


def drawn(sampling, step):
    indices, included = sampling.draw(KEY, step)
    return np.sort(indices[included])


def test_rates_are_proportional_and_capped():
    sampling = poisson(4, 1, weights=[1, 1, 2, 4])
    assert sampling.rates == pytest.approx([0.125, 0.125, 0.25, 0.5])
    assert (sampling.divisor, sampling.probability, sampling.steps_per_epoch) == (1.0, 0.5, 4.0)
    with pytest.warns(UserWarning, match="1 weights give a rate of 1"):
        capped = poisson(4, 3, weights=[1, 1, 2, 4])
    assert capped.rates == pytest.approx([0.375, 0.375, 0.75, 1.0])
    assert capped.divisor == 2.5 and capped.event(np.ones(1)) == PoissonSampledDpEvent(1.0, GaussianDpEvent(1.0))
    assert dpx.epsilon(dp_sgd(capped), 1, delta=1e-5) == pytest.approx(
        dpx.epsilon(dp_sgd(dpx.FullBatch(examples=4)), 1, delta=1e-5)
    )


def test_equal_weights_are_the_coins_of_one_rate():
    plain = poisson(1000, 50)
    equal = poisson(1000, 50, weights=np.full(1000, 3.0))
    for step in range(5):
        np.testing.assert_array_equal(drawn(equal, step), drawn(plain, step))
    assert equal.divisor == pytest.approx(50) and not equal.unweighted_and_unlimited and plain.unweighted_and_unlimited
    assert equal.event(np.ones(2)) == plain.event(np.ones(2))


def test_every_example_takes_part_at_its_own_rate_independently():
    """Counts of examples and of pairs over 300 steps: chi-square, false alarms of 1e-6."""
    sampling = poisson(8, 2, weights=[0, 1, 2, 3, 4, 5, 1, 4])
    taken = np.zeros((300, 8))
    for step in range(300):
        taken[step, drawn(sampling, step)] = 1
    assert taken[:, 0].sum() == 0
    counts, expected = taken[:, 1:].sum(axis=0), 300 * sampling.rates[1:]
    statistic = ((counts - expected) ** 2 / (expected * (1 - sampling.rates[1:]))).sum()
    assert scipy.stats.chi2.sf(statistic, 7) > 1e-6
    first, second = np.triu_indices(7, 1)
    rates = sampling.rates[1:][first] * sampling.rates[1:][second]
    pairs = (taken[:, 1:][:, first] * taken[:, 1:][:, second]).sum(axis=0)
    assert np.all(scipy.stats.binom.cdf(pairs, 300, rates) > 1e-7)
    assert np.all(scipy.stats.binom.sf(pairs - 1, 300, rates) > 1e-7)


def test_a_coin_is_64_bits_rounded_down():
    rates = np.array([0.0, 2.0**-64, 1.5 * 2.0**-64, 2.0**-32, 0.3, 1 - 2.0**-53, 1.0])
    heads = by_coins.coin_thresholds(rates)
    limits = [int(high) << 32 | int(low) for high, low in zip(heads.high, heads.low, strict=True)]
    assert limits[:6] == [math.floor(rate * 2**64) for rate in rates[:6].tolist()]
    assert heads.always.tolist() == [False] * 6 + [True]
    key = step_key(KEY, 3)
    for rate in (0.3, 1e-3, 0.999):
        np.testing.assert_array_equal(
            by_coins.toss_weighted_coins(key, by_coins.coin_thresholds(np.full(500, rate))), toss_coins(key, 500, rate)
        )


def test_the_bill_is_that_of_the_largest_rate_or_of_one_weight():
    sampling = poisson(1000, 20, weights=np.where(np.arange(1000) < 100, 5.0, 1.0))
    largest, lowest = 100 / 1400, 20 / 1400
    assert sampling.event(np.ones(3)) == SelfComposedDpEvent(PoissonSampledDpEvent(largest, GaussianDpEvent(1.0)), 3)
    mechanism = dp_sgd(sampling)

    def of_rate(rate):
        return dpx.epsilon(dp_sgd(poisson(1000, 1000 * rate)), 50, delta=1e-5)

    assert dpx.epsilon(mechanism, 50, delta=1e-5) == pytest.approx(of_rate(largest))
    assert dpx.epsilon(mechanism, 50, delta=1e-5, weight=5) == pytest.approx(of_rate(largest))
    assert dpx.epsilon(mechanism, 50, delta=1e-5, weight=1.0) == pytest.approx(of_rate(lowest), rel=1e-4)
    assert of_rate(lowest) < 0.8 * of_rate(largest)
    assert dpx.epsilon(mechanism, 50, delta=1e-5, weight=0) == 0
    same = dp_sgd(poisson(1000, 20, weights=np.where(np.arange(1000) < 100, 100.0, 20.0)))
    for weight in (np.int8(100), np.uint8(100)):  # 20 times as much is -48 or 208 in such numbers
        assert dpx.epsilon(same, 50, delta=1e-5, weight=weight) == pytest.approx(of_rate(largest))
    low, high = (dpx.accounting.delta(mechanism, 50, epsilon=1.0, weight=weight) for weight in (1, 5))
    assert low < high == dpx.accounting.delta(mechanism, 50, epsilon=1.0)
    state = mechanism.init({"w": np.zeros(2, np.float32)})
    with pytest.warns(UserWarning, match="the state has taken no step"):
        assert dpx.epsilon(mechanism, state, delta=1e-5, weight=1.0) == 0
    projected = dpx.mechanisms.clip_then_project(mechanism, rank=4, kind="gaussian")
    assert dpx.epsilon(projected, 5, delta=1e-5, weight=1) < dpx.epsilon(projected, 5, delta=1e-5, weight=5)


def test_a_weight_that_is_not_there_is_refused():
    weighted = dp_sgd(poisson(3, 1, weights=[1, 2, 3]))
    plain = dp_sgd(poisson(3, 1))
    for mechanism, weight, words in (
        (weighted, 3.1, "weight must be at most the largest one, 3.0"),
        (weighted, -1.0, "weight must be"),
        (weighted, math.nan, "weight must be"),
        (plain, 1.0, "have no weights"),
        (dp_sgd(dpx.FullBatch(examples=3)), 1.0, "have no weights"),
    ):
        with pytest.raises(ValueError, match=words):
            dpx.epsilon(mechanism, 2, delta=1e-5, weight=weight)
    for relation in ("replace_one", "add_or_remove"):
        with pytest.raises(ValueError, match="would change all rates"):
            dpx.epsilon(weighted, 2, delta=1e-5, relation=relation)


def test_records_of_equal_weights_are_equal():
    every = [1, 2, 3], np.array([1.0, 2.0, 3.0]), [1, 3, 2]
    one, same, other = (poisson(3, 1, weights=values) for values in every)
    assert one == same != other and hash(one) == hash(same)
    assert one.identity() == same.identity() != other.identity()
    assert repr(one) == repr(same) and "weights=<3 from 1 to 3, " in repr(one)
    values = np.array([1.0, 2.0, 3.0])
    mine = poisson(3, 1, weights=values)
    values[0] = 9.0
    assert mine == one
    with pytest.raises(ValueError, match="read-only"):
        mine.weights.values[0] = 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], r"one number for each of the 3 examples, got \(2,\)"),
        (2.0, "one number for each"),
        ([1, -1, 2], "finite and at least 0, got 1 others"),
        ([1, math.nan, 2], "finite and at least 0"),
        ([1, math.inf, 2], "finite and at least 0"),
        ([0, 0, 0], "positive sum"),
        (["a", "b", "c"], "weights must hold numbers"),
    ],
)
def test_bad_weights(values, words):
    with pytest.raises(ValueError, match=words):
        poisson(3, 1, weights=values)


def test_weights_and_a_limit_have_no_bill_together():
    with pytest.raises(ValueError, match="weights must be left out with most_rows"):
        poisson(3, 1, weights=[1, 2, 3], most_rows=2)
    with pytest.raises(ValueError, match="no most_rows and no weights"):
        norms = dict(clip_norm=1.0, feedback_norm=1.0, outer_clip_norm=1.1)
        dpx.methods.dice_sgd(**norms, noise_multiplier=1.0, sampling=poisson(3, 1, weights=[1, 2, 3]), key=KEY)
