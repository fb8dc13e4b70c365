"""Cyclic Poisson sampling and a fixed order: who takes part when, and what a run costs."""

import dp_accounting
import jax
import numpy as np
import pytest
import scipy.stats
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

import dpx
from dpx import accounting
from dpx.accounting.cost import event_profile, profile_of_run
from dpx.accounting.flat_event import from_event
from dpx.sampling import CyclicPoissonSampling, FixedOrder

KEY = jax.random.key(5)


def drawn(sampling, step, key=KEY):
    indices, included = sampling.draw(key, step)
    return np.sort(indices[included])


def groups_of(sampling, key=KEY):
    return [sampling.examples_of_group(key, number) for number in range(sampling.bands)]


def test_an_example_takes_part_in_the_steps_of_its_group_alone():
    sampling = CyclicPoissonSampling(examples=90, batch_size=15, bands=3)
    groups = groups_of(sampling)
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)), np.arange(90))
    for step in range(60):
        assert set(drawn(sampling, step)) <= set(groups[step % 3].tolist())
    others = groups_of(sampling, jax.random.key(6))
    assert all(set(one.tolist()) != set(other.tolist()) for one, other in zip(groups, others, strict=True))


def test_groups_are_uniform_and_independent():
    """Of all examples, and of each with the next one: chi-square, false alarms of 1e-6."""
    sampling, group = CyclicPoissonSampling(examples=30_000, batch_size=10, bands=5), np.zeros(30_000, int)
    for number, members in enumerate(groups_of(sampling)):
        group[members] = number
    for pairs in (group, 5 * group[:-1] + group[1:]):
        assert scipy.stats.chisquare(np.bincount(pairs)).pvalue > 1e-6
    sizes = [len(members) for members in groups_of(sampling)]
    assert len(set(sizes)) > 1  # hashes, not an equal split


def test_the_coins_of_a_group_have_the_billed_rate_and_are_independent():
    """b q = 1/2 in the group's own steps: chi-square over examples, pairs of neighbors, and steps."""
    sampling = CyclicPoissonSampling(examples=40, batch_size=10, bands=2)
    assert sampling.probability == 0.5
    taken = np.zeros((300, 40))
    for step in range(600):
        taken[step // 2, drawn(sampling, step)] = 1
    counts = taken.sum(axis=0)
    assert scipy.stats.chi2.sf(((counts - 150) ** 2 / 75).sum(), 40) > 1e-6
    for first, second in ((taken[:, :-1], taken[:, 1:]), (taken[:-1], taken[1:])):
        together = (first * second).sum()
        assert 1e-6 < scipy.stats.binom.cdf(together, first.size, 0.25) < 1 - 1e-6
    everyone = CyclicPoissonSampling(examples=40, batch_size=10, bands=4)
    np.testing.assert_array_equal(drawn(everyone, 6), everyone.examples_of_group(KEY, 2))  # at rate 1


def test_one_band_is_poisson_sampling():
    one, poisson = (
        CyclicPoissonSampling(examples=100, batch_size=10, bands=1),
        dpx.PoissonSampling(examples=100, batch_size=10),
    )
    for step in range(5):
        np.testing.assert_array_equal(drawn(one, step), drawn(poisson, step))
    assert one.event(np.array([1.0, 2.0, 1.0])) == poisson.event(np.array([1.0, 2.0, 1.0]))


def test_the_events_of_cyclic_sampling():
    """Of each turn one release at the least noise of its steps, at the rate of a group's coins."""
    sampling = CyclicPoissonSampling(examples=120, batch_size=10, bands=3)

    def release(sigma):
        return PoissonSampledDpEvent(0.25, GaussianDpEvent(sigma))

    assert sampling.event(np.zeros(0)) == dp_accounting.NoOpDpEvent()
    assert sampling.event(np.ones(1)) == sampling.event(np.ones(3)) == release(1.0)
    assert sampling.event(np.ones(4)) == SelfComposedDpEvent(release(1.0), 2)
    falling = np.array([4.0, 3.0, 2.0, 1.0, 2.0, 3.0, 5.0])
    assert sampling.event(falling) == ComposedDpEvent([release(1.0), release(2.0), release(5.0)])
    assert sampling.relation == "zero_out" and sampling.divisor == 10 and sampling.one_key
    run = sampling.event(np.full(9, 2.0))
    assert from_event(run).release_count == (3, 3.0) and from_event(run).largest_shift("zero_out") == 0.5


def cells(sigma, rate, count):
    """Masses of cells of the output of a sampled Gaussian, with and without the example; merged, so from below."""
    edges = np.concatenate([[-np.inf], np.linspace(-4 * sigma, 1 + 4 * sigma, count), [np.inf]])
    without, taken = (np.diff(scipy.stats.norm.cdf((edges - place) / sigma)) for place in (0, 1))
    return (1 - rate) * without + rate * taken, without


def of_group(sigmas, group, count):
    """The laws of the outputs of a group's steps, with and without an example of the group: float64 (outputs,) each."""
    one, other = np.ones(1), np.ones(1)
    for sigma in sigmas[group::2]:
        taken, without = cells(sigma, 0.5, count)
        one, other = np.outer(one, taken).ravel(), np.outer(other, without).ravel()
    return one, other


def delta(one, other, epsilon):
    a = np.exp(epsilon)
    return max(np.maximum(p - a * q, 0).sum() for p, q in ((one, other), (other, one)))


@pytest.mark.parametrize("sigmas", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 0.8, 3.0), (2.0, 1.0, 3.0, 0.8), (1.0, 1.0, 0.7)])
def test_the_bill_is_above_enumerations_with_known_and_with_secret_groups(sigmas):
    """Two bands, rate 1/2: the steps of a known group; or, if the group is secret, the mixture of both groups."""
    sampling = CyclicPoissonSampling(examples=8, batch_size=2, bands=2)
    profile = event_profile(sampling.event(np.array(sigmas)), relation="zero_out")
    (p, q), (r, s) = (of_group(sigmas, group, 24) for group in (0, 1))
    secret = (np.outer(p, s) + np.outer(q, r)) / 2, np.outer(q, s)
    for epsilon in (0.0, 0.5, 1.5):
        bill, known = profile.delta(epsilon), [delta(*of_group(sigmas, group, 240), epsilon) for group in (0, 1)]
        assert max(*known, delta(*secret, epsilon)) <= bill
        if len(set(sigmas)) == 1:
            assert max(known) == pytest.approx(bill, rel=0.02)
    assert 0.2 < delta(*secret, 0.0) / profile.delta(0.0)


def test_what_a_run_costs():
    """As many releases as an example has steps; and more than Poisson sampling of the same batches."""
    cyclic = CyclicPoissonSampling(examples=10_000, batch_size=100, bands=8)
    by_hand = SelfComposedDpEvent(PoissonSampledDpEvent(0.08, GaussianDpEvent(1.5)), 63)
    bill = accounting.event_epsilon(cyclic.event(np.full(500, 1.5)), delta=1e-5)
    assert bill == accounting.event_epsilon(by_hand, delta=1e-5)
    poisson = dpx.PoissonSampling(examples=10_000, batch_size=100).event(np.full(500, 1.5))
    assert bill > accounting.event_epsilon(poisson, delta=1e-5)
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=500)
    made = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=cyclic, key=KEY)
    assert 1.999 < dpx.epsilon(made, 500, delta=1e-5) <= 2.0
    assert dpx.epsilon(made, 500, delta=1e-5, relation="add_or_remove") <= 2.0
    assert dpx.epsilon(made, 496, delta=1e-5) == dpx.epsilon(made, 490, delta=1e-5) < dpx.epsilon(made, 497, delta=1e-5)


def test_a_fixed_order_is_the_same_in_every_epoch():
    sampling = FixedOrder(examples=10, batch_size=4)
    assert [drawn(sampling, step).tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for step in range(7):
        np.testing.assert_array_equal(drawn(sampling, step), drawn(sampling, step + 3, jax.random.key(9)))
        assert len(sampling.draw(KEY, step).indices) == 4
    assert (sampling.steps_per_epoch, sampling.divisor, sampling.pads, sampling.most_rows) == (3, 4, True, 4)
    assert not FixedOrder(examples=8, batch_size=4).pads
    assert len(sampling.draw(KEY, 0, size=6).indices) == 6


def test_the_events_of_a_fixed_order():
    sampling = FixedOrder(examples=10, batch_size=4)
    assert sampling.event(np.zeros(0)) == dp_accounting.NoOpDpEvent()
    assert sampling.event(np.full(4, 2.0)) == SelfComposedDpEvent(GaussianDpEvent(2.0), 2)
    falling = np.array([4.0, 3.0, 2.0, 1.0, 2.0, 3.0, 5.0])
    assert sampling.event(falling) == ComposedDpEvent([GaussianDpEvent(s) for s in (1.0, 2.0, 5.0)])
    four = accounting.event_epsilon(sampling.event(np.full(12, 2.0)), delta=1e-5)
    assert four == pytest.approx(accounting.event_epsilon(GaussianDpEvent(1.0), delta=1e-5))  # s sqrt(k)
    run = sampling.event(np.full(12, 2.0))
    assert from_event(run).release_count.most == 4 and from_event(run).largest_shift("zero_out") == 0.5
    assert profile_of_run(run, relation="zero_out").epsilon(1e-5) > four
    made = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=sampling, key=KEY)
    with pytest.raises(ValueError, match='relation "add_or_remove" does not fit'):
        dpx.epsilon(made, 3, delta=1e-5, relation="add_or_remove")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(examples=10, batch_size=4, bands=3), "bands must be at most examples / batch_size = 2.5"),
        (dict(examples=10, batch_size=4, bands=0), "bands must be a whole number of at least 1, got 0"),
        (dict(examples=10, batch_size=4, bands=1.5), "bands must be a whole number"),
        (dict(examples=10, batch_size=11, bands=1), "batch_size must be in"),
        (dict(examples=2**31, batch_size=4, bands=1), r"examples must be below 2\^31"),
    ],
)
def test_bad_sizes(sizes, words):
    with pytest.raises(ValueError, match=words):
        CyclicPoissonSampling(**sizes)


def test_error_feedback_has_no_bill_for_them():
    numbers = dict(clip_norm=1.0, feedback_norm=1.0, outer_clip_norm=1.1, noise_multiplier=1.0)
    for sampling in (CyclicPoissonSampling(examples=10, batch_size=2, bands=2), FixedOrder(examples=10, batch_size=2)):
        with pytest.raises(ValueError, match="sampling must be one of"):
            dpx.methods.dice_sgd(**numbers, sampling=sampling, key=KEY)
