"""What is drawn is what is billed: distribution, divisor, shapes, determinism, relation."""

import math
from fractions import Fraction

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

import dpx
from dpx import keys
from dpx.accounting.flat_event import from_event
from dpx.sampling import CyclicPoissonSampling, RandomAllocation, varying
from dpx.sampling import batch as draws
from dpx.sampling.varying import RandomAllocationDpEvent
from dpx.schedules import values_over
from tests.devices import on_eight_devices

KEY = jax.random.key(5)
KEY_OF_128_BITS = 0x243F6A8885A308D313198A2E03707344
SAMPLINGS = [
    dpx.PoissonSampling(examples=100, batch_size=10),
    dpx.FixedSizeSampling(examples=100, batch_size=10),
    dpx.ShuffledEpochs(examples=95, batch_size=10),
    dpx.FullBatch(examples=100),
    RandomAllocation(examples=95, steps_per_epoch=9),
    dpx.PoissonSampling(examples=100, batch_size=10, most_rows=11),
    CyclicPoissonSampling(examples=100, batch_size=10, bands=3),
]


def drawn(sampling, step, key=KEY):
    indices, included = sampling.draw(key, step)
    assert indices.dtype == np.int32 and included.dtype == np.bool_ and indices.shape == included.shape
    assert not indices[~included].any()
    chosen = indices[included]
    assert len(set(chosen)) == len(chosen) and ((0 <= chosen) & (chosen < sampling.examples)).all()
    return chosen


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_a_batch_is_a_function_of_key_and_step(sampling):
    for step in (0, 1, 17):
        np.testing.assert_array_equal(drawn(sampling, step), drawn(sampling, np.int32(step)))
    if not isinstance(sampling, dpx.FullBatch):
        assert list(drawn(sampling, 0)) != list(drawn(sampling, 1))
        assert list(drawn(sampling, 0)) != list(drawn(sampling, 0, jax.random.key(6)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_a_step_is_a_whole_number_that_is_known(sampling):
    for good in (3, np.int64(3), np.array(3), jnp.int32(3), jnp.uint8(3)):
        np.testing.assert_array_equal(drawn(sampling, good), drawn(sampling, 3))
    for wrong in (1.7, 1.0, True, np.True_, jnp.array(True), -1, np.int32(-1), np.float32(2), None, "1", jnp.arange(2)):
        with pytest.raises(ValueError, match="step must be a whole number of at least 0, got"):
            sampling.draw(KEY, wrong)


def test_what_decides_later_draws_cannot_be_changed():
    order = dpx.ShuffledEpochs(examples=8, batch_size=4).examples_at_positions(KEY, 0, 0, 8)
    group = CyclicPoissonSampling(examples=8, batch_size=2, bands=2).examples_of_group(KEY, 0)
    for array in (order, group, dpx.PoissonSampling(examples=2, batch_size=1, weights=[1, 2]).rates):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("sampling", [*SAMPLINGS[:3], *SAMPLINGS[4:]], ids=lambda s: type(s).__name__)
def test_a_sampling_has_a_stream_of_its_own(sampling, monkeypatch):
    """Who knows the noise does not know the batches: no key of a draw comes from the stream that the noise has."""
    by_own_stream = [list(drawn(sampling, step)) for step in range(3)]
    names, stream = set(), keys.stream
    monkeypatch.setattr(keys, "stream", lambda key, name, step=None: names.add(name) or stream(key, name, step))
    draws._cached_permutation.cache_clear()
    varying.allocate_examples.cache_clear()
    assert [list(drawn(sampling, step)) for step in range(3)] == by_own_stream and names == {"sampling"}
    monkeypatch.setattr(keys, "stream", lambda key, name, step=None: stream(key, "noise", step))
    for step in range(3):
        assert list(drawn(sampling, step)) != by_own_stream[step]


@pytest.mark.parametrize("probability", [0.1, 1 / 3, 0.5, 3 * 2.0**-64, 1e-12, 1.6e-19, 2.0**-65, 1 - 2.0**-53])
def test_a_coin_falls_for_exactly_the_words_below_the_threshold(probability, monkeypatch):
    """Of the 2^64 numbers the floor(q 2^64) lowest are heads: chosen ones at that edge, and far from it by some bits.

    So the rate of the coin is at most the billed one, and above 0 where that is at least 2^-64.
    """
    heads = math.floor(Fraction(probability) * 2**64)
    assert heads <= Fraction(probability) * 2**64 < heads + 1 and (heads > 0) == (probability >= 2.0**-64)
    numbers = {0, 1, heads // 2, heads - 1, heads, heads + 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1}
    numbers |= {heads + sign * 2**bits for sign in (-1, 1) for bits in range(0, 64, 4)}
    numbers = sorted({number % 2**64 for number in numbers})
    high, low = (jnp.array(words, jnp.uint32) for words in zip(*(divmod(n, 2**32) for n in numbers), strict=True))
    asked = []

    def drawn(words, count):
        asked.append((words.tolist(), count))
        return [high, low, low, high]

    monkeypatch.setattr(draws.streams, "draw_bits", drawn)
    coins = draws.toss_coins.__wrapped__(KEY, len(numbers), probability)
    assert asked == [(keys.key_words(KEY).tolist(), len(numbers))]
    assert coins.dtype == np.bool_
    assert coins.tolist() == [number < heads for number in numbers]


@pytest.mark.parametrize(
    "sampling",
    [dpx.PoissonSampling(examples=12, batch_size=6), RandomAllocation(examples=12, steps_per_epoch=2)],
    ids=["poisson", "allocated"],
)
def test_the_examples_of_a_batch_are_in_random_rows(sampling):
    """Each of 12 examples is equally often in each of 16 rows: chi-square, with a false alarm of 1e-6."""
    places = np.zeros((12, 16))
    for step in range(400):
        draw = sampling.draw(KEY, step, size=16)
        rows = np.flatnonzero(draw.included)
        places[draw.indices[rows], rows] += 1
    assert scipy.stats.chisquare(places.ravel()).pvalue > 1e-6
    rows = [np.flatnonzero(sampling.draw(KEY, step, size=16).included).tolist() for step in range(2)]
    assert rows[0] != rows[1]


@pytest.mark.parametrize("word", range(4))
def test_an_order_is_that_of_128_bits_of_each_example(word, monkeypatch):
    """Examples that differ in one of the four words alone are in its order, also at the end of a part of the order."""
    words = np.zeros((4, 100), np.uint32)
    words[word] = np.random.default_rng(0).permutation(100) + 2**31
    monkeypatch.setattr(draws, "draw_bits", lambda key_words, count: list(words))
    for count in (1, 10, 99, 100):
        found = draws.random_order(KEY, 100, count)
        assert found.dtype == np.int32 and found.tolist() == np.argsort(words[word])[:count].tolist()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.long_cases("1", "2")
def test_every_order_is_as_likely(count):
    """600 orders of 4 examples, by a test of chi squared of false alarm 1e-6."""
    found = [tuple(draws.random_order(keys.fold_in(KEY, number), 4, count).tolist()) for number in range(600)]
    _, times = np.unique(found, axis=0, return_counts=True)
    assert len(times) == math.perm(4, count)
    assert scipy.stats.chisquare(times).pvalue > 1e-6


def test_batches_depend_on_every_bit_of_the_key_and_on_no_setting():
    """Keys that differ from one in a bit, and programs with other settings of jax, on one device and on 8.

    Each of the 128 bits under one sampling, and four of every word of 32 bits under the others.
    """
    near = [KEY_OF_128_BITS, *(KEY_OF_128_BITS ^ 1 << bit for bit in range(128))]
    for sampling in [*SAMPLINGS[:3], *SAMPLINGS[4:]]:
        some = near if sampling is SAMPLINGS[0] else near[::8]
        batches = {tuple(drawn(sampling, 3, dpx.secret_key(seed)).tolist()) for seed in some}
        assert len(batches) == len(some)
    expected = batches_as_text()
    with jax.enable_x64(True), jax.threefry_partitionable(False), jax.numpy_dtype_promotion("standard"):
        jax.clear_caches()
        draws._cached_permutation.cache_clear()
        varying.allocate_examples.cache_clear()
        assert batches_as_text() == expected
    printed = on_eight_devices("import jax; from tests import test_sampling as t; print(t.batches_as_text())")
    assert printed.strip().splitlines()[-1] == expected


def batches_as_text():
    return repr([drawn(sampling, 3, dpx.secret_key(KEY_OF_128_BITS)).tolist() for sampling in SAMPLINGS])


def test_poisson_coins_are_independent_and_have_the_billed_probability():
    """400 steps: rate of every example, variance of the size, correlation of pairs; false alarm below 1e-4 in all."""
    sampling, steps = SAMPLINGS[0], 400
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
    taken = np.bincount(np.concatenate([drawn(SAMPLINGS[1], step) for step in range(400)]), minlength=100) / 400
    assert np.abs(taken - 0.1).max() < 5 * np.sqrt(0.09 / 400)


def test_an_epoch_takes_every_example_once():
    sampling = SAMPLINGS[2]
    assert sampling.steps_per_epoch == 10
    epochs = [np.concatenate([drawn(sampling, 10 * e + i) for i in range(10)]) for e in range(3)]
    assert all(sorted(epoch) == list(range(95)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    assert len(drawn(sampling, 9)) == 5


class FewRows(dpx.PoissonSampling):
    usual_rows = 64


def test_a_large_poisson_batch_is_never_cut():
    small, free = FewRows(examples=1000, batch_size=100), dpx.PoissonSampling(examples=1000, batch_size=100)
    for step in range(20):
        np.testing.assert_array_equal(np.sort(drawn(small, step)), np.sort(drawn(free, step)))
        assert len(small.draw(KEY, step)[0]) % 8 == 0
    assert {len(free.draw(KEY, step)[0]) for step in range(50)} == {168}  # one shape, one compilation
    with pytest.raises(ValueError, match="size must hold the whole batch"):
        free.draw(KEY, 0, size=50)
    assert len(free.draw(KEY, 0, size=300)[0]) == 300


def test_probability_one_takes_everyone():
    assert len(drawn(dpx.PoissonSampling(examples=7, batch_size=7), 3)) == 7


def test_events():
    sampled, fixed, shuffled, full, _, truncated, _ = SAMPLINGS
    gaussian = dp_accounting.GaussianDpEvent
    assert sampled.event(np.ones(1)) == dp_accounting.PoissonSampledDpEvent(0.1, gaussian(1.0))
    assert sampled.event(np.ones(3)) == dp_accounting.SelfComposedDpEvent(sampled.event(np.ones(1)), 3)
    assert sampled.event(np.zeros(0)) == dp_accounting.NoOpDpEvent()
    assert fixed.event(np.full(1, 3.0)) == dp_accounting.SampledWithoutReplacementDpEvent(100, 10, gaussian(1.5))
    assert full.event(np.array([2.0, 1.0])) == dp_accounting.ComposedDpEvent([gaussian(1.0), gaussian(2.0)])
    # three begun epochs of ten steps, each billed at its smallest multiplier
    multipliers = np.concatenate([np.full(10, 3.0), np.linspace(2, 1, 10), np.full(1, 5.0)])
    assert shuffled.event(multipliers) == dp_accounting.ComposedDpEvent([gaussian(1.0), gaussian(3.0), gaussian(5.0)])
    cut = TruncatedSubsampledGaussianDpEvent
    expected = [cut(100, 0.1, 11, 1.0), dp_accounting.SelfComposedDpEvent(cut(100, 0.1, 11, 2.0), 2)]
    assert truncated.event(np.array([2.0, 1.0, 2.0])) == dp_accounting.ComposedDpEvent(expected)
    assert [s.relation == "zero_out" for s in SAMPLINGS] == [True, False, True, True, True, True, True]
    assert [s.divisor for s in SAMPLINGS] == [10, 10, 10, 100, 95 / 9, 10, 10]


def test_the_events_of_random_allocation():
    """By epochs, each with the noise multipliers of its own steps; the last one may have fewer."""
    sampling = RandomAllocation(examples=20, steps_per_epoch=3)
    multipliers = np.array([2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 1.0, 2.0])

    def epoch(*noise):
        return RandomAllocationDpEvent(noise, 3)

    composed, twice = dp_accounting.ComposedDpEvent, dp_accounting.SelfComposedDpEvent
    expected = [twice(epoch((1.0, 1), (2.0, 2)), 2), epoch((4.0, 3)), epoch((1.0, 1), (2.0, 1))]
    assert sampling.event(multipliers) == composed(expected)
    assert sampling.event(multipliers[:2]) == epoch((1.0, 1), (2.0, 1))
    assert sampling.event(multipliers[:3]) == expected[0].event
    assert sampling.event(multipliers[:0]) == dp_accounting.NoOpDpEvent()
    moved = multipliers[[0, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10]]  # a step of another epoch is another event
    assert sampling.event(moved) != sampling.event(multipliers)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_a_billion_steps_of_one_number_are_an_event_of_that_number(sampling):
    """And at once: the array of a number that does not change takes no memory."""
    for steps in (1, 3, 25):
        assert repr(sampling.event(values_over(1.5, steps))) == repr(sampling.event(np.full(steps, 1.5)))
    if not isinstance(sampling, dpx.ShuffledEpochs | CyclicPoissonSampling):  # whose epochs or turns are counted
        mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.5, sampling=sampling, key=KEY)
        assert from_event(mechanism.event(10**9)).release_count.most == 10**9


def test_a_truncated_batch_is_a_random_subset_of_the_coins():
    """Of 12 examples, coins of 1/2, at most 6 rows: each example and each pair is equally often there; chi-square."""
    free = dpx.PoissonSampling(examples=12, batch_size=6)
    cut = dpx.PoissonSampling(examples=12, batch_size=6, most_rows=6)
    kept, pairs, places, sizes = np.zeros(12), np.zeros((12, 12)), np.zeros(6), []
    for step in range(250):
        heads, draw = drawn(free, step), cut.draw(KEY, step)
        batch = draw.indices[draw.included]
        assert len(draw.indices) == 6 and len(batch) == min(6, len(heads)) and set(batch) <= set(heads)
        sizes.append(len(batch))
        places[draw.included] += 1
        if len(heads) > 6:
            kept[batch] += 1
            pairs[np.ix_(batch, batch)] += 1
    assert scipy.stats.chisquare(kept).pvalue > 1e-6
    assert scipy.stats.chisquare(pairs[np.triu_indices(12, 1)]).pvalue > 1e-6
    assert scipy.stats.chisquare(places).pvalue > 1e-6
    expected = scipy.stats.binom.pmf(np.arange(7), 12, 0.5)
    expected[6] = scipy.stats.binom.sf(5, 12, 0.5)
    found, fitting = np.bincount(sizes, minlength=7)[1:], expected[1:] / expected[1:].sum()
    assert scipy.stats.chisquare(found, found.sum() * fitting).pvalue > 1e-6
    assert cut.participation_probability == pytest.approx(expected @ np.arange(7) / 12)
    assert free.participation_probability == 0.5


@pytest.mark.long
def test_the_kept_examples_do_not_depend_on_their_rows():
    """The subset and the rows have keys of their own: kept in the same order, no row is likelier for any place."""
    cut, table = dpx.PoissonSampling(examples=5, batch_size=3, most_rows=3), np.zeros((3, 3))
    for step in range(700):
        draw = cut.draw(KEY, step)
        if draw.included.all():
            table[np.argsort(np.argsort(draw.indices)), np.arange(3)] += 1
    assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-6


def test_the_subset_has_a_key_of_its_own(monkeypatch):
    """Not that of the coins, which would keep examples by their coins, and not that of the rows."""
    asked, order = [], draws.random_order

    def recorded(key, *rest):
        asked.append(np.asarray(keys.key_words(key)).tobytes())
        return order(key, *rest)

    for module in (draws, varying):
        monkeypatch.setattr(module, "random_order", recorded)
    cut = dpx.PoissonSampling(examples=100, batch_size=10, most_rows=10)
    sizes = [len(drawn(cut, step)) for step in range(9)]
    assert max(sizes) == 10 and len(set(asked)) == len(asked) > 9


def test_all_truncated_batches_have_one_shape():
    cut = dpx.PoissonSampling(examples=1000, batch_size=100, most_rows=110)
    assert {len(cut.draw(KEY, step).indices) for step in range(50)} == {110}
    assert {len(drawn(cut, step)) for step in range(50)} > {110}
    assert len(cut.draw(KEY, 0, size=128).indices) == 128
    with pytest.raises(ValueError, match="size must hold the whole batch"):
        cut.draw(KEY, 0, size=50)
    assert ("most_rows", 110) in cut.identity()
    assert cut.most_rows == 110 and cut.truncates and cut.pads
    free = dpx.PoissonSampling(examples=1000, batch_size=100)
    assert free.identity() != cut.identity()
    assert free.most_rows == math.inf


@pytest.mark.parametrize("most_rows", [99, 1001, 0, -1, 110.0, 110.5, math.nan, True, "110", None])
def test_bad_most_rows(most_rows):
    with pytest.raises(ValueError, match="most_rows must be"):
        dpx.PoissonSampling(examples=1000, batch_size=100, most_rows=most_rows)


@pytest.mark.parametrize(("examples", "steps", "together"), [(95, 9, 2**20), (95, 9, 10), (7, 7, 2**20), (5, 1, 2)])
def test_an_epoch_of_random_allocation_has_every_example_once(examples, steps, together, monkeypatch):
    monkeypatch.setattr(varying, "_TOGETHER", together)
    varying.allocate_examples.cache_clear()
    sampling = RandomAllocation(examples=examples, steps_per_epoch=steps)
    epochs = [[drawn(sampling, epoch * steps + place) for place in range(steps)] for epoch in range(3)]
    varying.allocate_examples.cache_clear()
    for batches in epochs:
        assert sorted(np.concatenate(batches)) == list(range(examples))
    if steps > 1:
        assert sorted(epochs[0][0]) != sorted(epochs[1][0])


def test_the_step_of_an_example_is_uniform_and_independent():
    """Of all examples, of each with the next one, and of each in the next epoch: chi-square, false alarms of 1e-6."""
    sampling, steps = RandomAllocation(examples=30_000, steps_per_epoch=5), np.zeros((2, 30_000), int)
    for number in range(10):
        steps[number // 5, drawn(sampling, number)] = number % 5
    for pairs in (steps[0], steps[1], 5 * steps[0, :-1] + steps[0, 1:], 5 * steps[0] + steps[1]):
        assert scipy.stats.chisquare(np.bincount(pairs)).pvalue > 1e-6


def test_the_step_of_an_example_is_64_bits_of_its_own(monkeypatch):
    """Both words count, and the examples of a part are those of the key of the part."""
    asked = []

    def drawn_words(words, count):
        asked.append(words.tolist())
        number = np.arange(count, dtype=np.uint32)
        return [number + 1, number * 5, number, number]

    monkeypatch.setattr(varying, "_TOGETHER", 4)
    monkeypatch.setattr(varying, "draw_bits", drawn_words)
    words = np.asarray(keys.key_words(draws.step_key(KEY, 2))).tobytes()
    parts = list(varying._steps_of_examples(words, 10, 7))
    assert [first for first, _ in parts] == [0, 4, 8] and [len(own) for _, own in parts] == [4, 4, 2]
    for _, own in parts:
        assert own.tolist() == [((place + 1) * 2**32 + 5 * place) % 7 for place in range(len(own))]
    assert len(set(map(tuple, asked))) == 3


def test_allocated_batches_have_one_shape_that_holds_them():
    sampling = RandomAllocation(examples=5000, steps_per_epoch=50)
    assert len({len(sampling.draw(KEY, step).indices) for step in range(100)}) == 1
    wide = sampling.draw(KEY, 3, size=250)
    assert len(wide.indices) == 250 and sorted(wide.indices[wide.included]) == sorted(drawn(sampling, 3))
    with pytest.raises(ValueError, match="size must hold the whole batch"):
        sampling.draw(KEY, 0, size=50)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(examples=10, steps_per_epoch=11), r"steps_per_epoch must be in \[1, examples = 10\], got 11"),
        (dict(examples=10, steps_per_epoch=0), "steps_per_epoch must be a whole number of at least 1, got 0"),
        (dict(examples=10, steps_per_epoch=2.5), "steps_per_epoch must be a whole number"),
        (dict(examples=0, steps_per_epoch=1), "examples must be a whole number"),
        (dict(examples=2**31, steps_per_epoch=10), r"examples must be below 2\^31"),
    ],
)
def test_bad_sizes_of_random_allocation(sizes, words):
    with pytest.raises(ValueError, match=words):
        RandomAllocation(**sizes)


# take


def mechanism(sampling, noise_multiplier=1.0):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=KEY)


PARAMS = {"w": jnp.zeros(2)}


def next_state(made, state):
    """After a step on an empty batch."""
    return made.release((PARAMS,), state, PARAMS)[1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_take_gives_the_rows_of_the_next_step_that_is_not_paid(sampling):
    made = mechanism(sampling)
    state, data = made.init(PARAMS), {"x": np.arange(sampling.examples) * 10.0, "y": jnp.arange(sampling.examples)}
    for step in range(12):
        batch, (indices, included) = sampling.take(data, KEY, state), sampling.draw(KEY, step)
        assert isinstance(batch, dpx.Batch) and batch.included.dtype == np.bool_
        np.testing.assert_array_equal(batch.included, included)
        np.testing.assert_array_equal(batch.examples["x"], 10 * indices)
        np.testing.assert_array_equal(batch.examples["y"], indices)
        assert batch.included.all() or sampling.pads
        again = sampling.take(data, KEY, state)
        np.testing.assert_array_equal(again.examples["x"], batch.examples["x"])  # nothing was paid in between
        state = next_state(made, state)
    wide = sampling.take(data, KEY, state, size=150)
    assert len(wide.included) == 150 and wide.included.sum() == len(drawn(sampling, 12))


@pytest.mark.parametrize("length", [99, 101, 0])
def test_take_refuses_data_of_another_length(length):
    sampling = SAMPLINGS[0]
    with pytest.raises(ValueError, match=f"data must hold the 100 examples of the sampling, got {length}"):
        sampling.take(np.zeros((length, 3)), KEY, mechanism(sampling).init(PARAMS))
    with pytest.raises(ValueError, match="examples on axis 0"):
        sampling.take((np.zeros(100), np.zeros(length)), KEY, mechanism(sampling).init(PARAMS))


def test_take_refuses_the_state_of_another_sampling():
    for own in SAMPLINGS:
        others = [other for other in SAMPLINGS if other != own]
        if own == SAMPLINGS[0]:
            others += [
                dpx.PoissonSampling(examples=100, batch_size=10.5),
                dpx.PoissonSampling(examples=101, batch_size=10),
            ]
        for other in others:
            with pytest.raises(ValueError, match="counts another sampling than"):
                other.take(np.zeros(other.examples), KEY, mechanism(own).init(PARAMS))


def test_epochs_are_steps_rounded_up():
    """Worked out by hand: 60,000 / 1,024 = 58.6 steps an epoch, and 5 epochs of it are 292.97 steps."""
    poisson = dpx.PoissonSampling(examples=60_000, batch_size=1024)
    assert [poisson.steps(epochs=epochs) for epochs in (1e-9, 1, 5, 1024)] == [1, 59, 293, 60_000]
    assert dpx.FixedSizeSampling(examples=100, batch_size=30).steps(epochs=3) == 10
    assert dpx.ShuffledEpochs(examples=100, batch_size=30).steps(epochs=3) == 12  # 4 batches, the last of 10 examples
    assert dpx.ShuffledEpochs(examples=100, batch_size=30).steps(epochs=2.1) == 9
    assert dpx.FullBatch(examples=100).steps(epochs=3) == 3
    assert RandomAllocation(examples=100, steps_per_epoch=7).steps(epochs=2.1) == 15
    assert dpx.PoissonSampling(examples=30, batch_size=1).steps(epochs=0.1) == 3  # 0.1 * 30 is above 3 in float64
    for epochs in (0, -1.0, math.inf, math.nan, True, "5", None):
        with pytest.raises(ValueError, match="epochs must be a finite number above 0"):
            poisson.steps(epochs=epochs)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.long_cases(
    "CyclicPoisson", "FixedSize", "FullBatch", "PoissonSampling(examples=100, batch_size=10, most_rows"
)
def test_a_budget_of_epochs_is_one_of_steps(sampling):
    shared = dict(epsilon=2.0, delta=1e-5, accountant="rdp")
    steps = sampling.steps(epochs=1.3)
    by_epochs, by_steps = (
        mechanism(sampling, dpx.Budget(**shared, **length)) for length in ({"epochs": 1.3}, {"steps": steps})
    )
    assert by_epochs.budget == by_steps.budget == dpx.Budget(**shared, steps=steps)
    assert by_epochs.noise_multiplier == by_steps.noise_multiplier
    assert by_epochs.init(PARAMS).planned_steps == steps
    attached = mechanism(sampling).replace(budget=dpx.Budget(**shared, epochs=1.3))
    assert attached.budget.steps == attached.init(PARAMS).planned_steps == steps


def test_take_refuses_the_step_beyond_the_budget():
    sampling, data = SAMPLINGS[0], np.zeros(100)
    made = mechanism(sampling, dpx.Budget(epsilon=2.0, delta=1e-5, steps=3))
    made = dpx.chain(made, optax.scale(-1.0))  # the plan is found in the state of what is put around the mechanism too
    state = made.init(PARAMS)
    for _ in range(3):
        sampling.take(data, KEY, state)
        state = next_state(made, state)
    with pytest.raises(ValueError, match="calibrated for 3 steps, and 3 were taken. Pass beyond_budget=True to `take`"):
        sampling.take(data, KEY, state)
    assert dpx.epsilon(made, state, delta=1e-5) <= 2.0
    batch = sampling.take(data, KEY, state, beyond_budget=True)
    np.testing.assert_array_equal(batch.included, sampling.draw(KEY, 3).included)
    assert dpx.epsilon(made, next_state(made, state), delta=1e-5) > 2.0
    unplanned = mechanism(sampling)
    state = unplanned.init(PARAMS)
    for _ in range(5):
        state = next_state(unplanned, state)
    sampling.take(data, KEY, state)  # no budget, no end


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    examples=st.one_of(st.integers(-5, 5), st.floats(allow_nan=True), st.none(), st.sampled_from(["", "5"])),
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
