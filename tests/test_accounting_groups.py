"""A unit of several records: its bill against enumerations, dp-accounting's numbers, and an attack."""

import functools
import itertools
import math
import types

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import optimize, special, stats

import dpx
from dpx.accounting import event_delta, event_epsilon, gdp
from dpx.accounting.budget import _least_noise_in_few_calls, calibrate
from dpx.accounting.cost import profile_of_run
from dpx.accounting.flat_event import from_event
from dpx.accounting.groups import GroupGaussianDpEvent, SeveralRecordsGaussian

KEY = jax.random.key(5)
EPSILONS = (0.0, 0.3, 1.0, 2.5)


def unit(rate, sigma, records, steps=1):
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    return from_event(SelfComposedDpEvent(event, steps)).of_records(records)


EDGES = np.concatenate([[-np.inf], np.linspace(-7, 7, 141), [np.inf]])
CASES = [(2, 0.3, 1.0), (3, 0.2, 1.0), (3, 0.6, 2.0), (2, 0.9, 0.7)]


def cells(values, rate, sigma):
    """The probabilities of cells of the plane: a noisy sum of the vectors whose coins are heads, (cells, cells)."""
    law = np.zeros((len(EDGES) - 1,) * 2)
    for coins in itertools.product((0, 1), repeat=len(values)):
        total = np.sum([value for value, coin in zip(values, coins, strict=True) if coin], axis=0) + np.zeros(2)
        axes = [np.diff(special.ndtr((EDGES - place) / sigma)) for place in total]
        law += rate ** sum(coins) * (1 - rate) ** (len(coins) - sum(coins)) * np.outer(*axes)
    return law


@pytest.mark.parametrize(("records", "rate", "sigma"), CASES)
def test_no_records_cost_more_than_the_bill(records, rate, sigma):
    """Records of norm at most 1 in the plane, all of them nulled, in both directions; some units own fewer."""
    choices = [(0, 0), (1, 0), (-1, 0), (0, 1), (0.6, 0.8)]
    none, worst = cells([], rate, sigma), np.zeros(len(EPSILONS))
    for values in itertools.combinations_with_replacement(choices, records):
        law = cells([np.array(value) for value in values], rate, sigma)
        for one, other in ((law, none), (none, law)):
            found = [np.maximum(one - math.exp(epsilon) * other, 0).sum() for epsilon in EPSILONS]
            worst = np.maximum(worst, found)
    bill = np.array([event_delta(unit(rate, sigma, records), epsilon=epsilon) for epsilon in EPSILONS])
    assert np.all(bill >= worst - 1e-9)
    np.testing.assert_allclose(bill, worst, rtol=0.05, atol=1e-4)  # records of one direction cost all of it


@pytest.mark.parametrize(
    ("records", "rate", "sigma"), [(2, 0.3, 0.5), (5, 0.01, 1.0), (10, 0.5, 8.0), (200, 0.002, 2.0)]
)
@pytest.mark.long_cases("200-")
def test_one_step_costs_the_integrals_of_both_directions(records, rate, sigma):
    """The loss rises with the sum, so the integral of max(P - e^epsilon Q, 0) is one of two tails from a root."""
    numbers = np.arange(records + 1)
    law = stats.binom.pmf(numbers, records, rate)

    def loss(x):
        return special.logsumexp(stats.binom.logpmf(numbers, records, rate) + (numbers * x - numbers**2 / 2) / sigma**2)

    for epsilon in (0.1, 1.0, 3.0):
        x = optimize.brentq(lambda x, epsilon=epsilon: loss(x) - epsilon, -100, 1e3, xtol=1e-13)
        truth = law @ special.ndtr((numbers - x) / sigma) - math.exp(epsilon) * special.ndtr(-x / sigma)
        if loss(-1e4) < -epsilon:
            x = optimize.brentq(lambda x, epsilon=epsilon: loss(x) + epsilon, -1e4, 1e3, xtol=1e-13)
            added = special.ndtr(x / sigma) - math.exp(epsilon) * law @ special.ndtr((x - numbers) / sigma)
            truth = max(truth, added)
        bill = event_delta(unit(rate, sigma, records), epsilon=epsilon)
        assert truth * (1 - 1e-7) - 1e-13 <= bill <= truth * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize(("records", "rate", "sigma", "steps"), [(2, 0.1, 2.0, 20), (5, 0.02, 1.5, 10)])
@pytest.mark.long_cases("5-", "2-0.1-2.0-20")
def test_the_bill_is_that_of_dp_accounting(records, rate, sigma, steps):
    law = stats.binom.pmf(np.arange(records + 1), records, rate)
    mixture = MixtureOfGaussiansDpEvent(sigma, tuple(range(records + 1)), tuple(law))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    oracle = PLDAccountant(relation, value_discretization_interval=1e-3).compose(mixture, steps)
    np.testing.assert_allclose(
        event_epsilon(unit(rate, sigma, records, steps), delta=1e-5), oracle.get_epsilon(1e-5), 3e-3
    )


@pytest.mark.parametrize(("records", "rate", "sigma"), [(3, 0.1, 1.0), (8, 0.3, 4.0), (20, 0.01, 4.0)])
def test_renyi_divergences_are_bounds_and_close(records, rate, sigma):
    orders = np.array([1.1, 2.0, 8.0, 32.0])
    x, step = np.linspace(-40 * sigma, 60 * sigma + 60 * records, 100_001, retstep=True)
    numbers = np.arange(records + 1)
    law = stats.binom.pmf(numbers, records, rate)
    terms = np.log(law) + (np.outer(x, numbers) - numbers**2 / 2) / sigma**2
    loss, none = special.logsumexp(terms, axis=1), stats.norm.logpdf(x, scale=sigma)
    for order, bill in zip(orders, SeveralRecordsGaussian(sigma, rate, records).renyi(orders), strict=True):
        moments = [special.logsumexp(none + power * loss) + math.log(step) for power in (order, 1 - order)]
        truth = max(moments) / (order - 1)
        assert truth * (1 - 1e-6) <= bill
        assert bill <= truth * 1.02 + 1e-6


def test_renyi_divergences_with_much_noise_are_bounds_of_wide_cells():
    """Here a cell of the line is 200 deviations wide."""
    orders = np.array([1.1, 2.0, 8.0, 1024.0])
    bill = SeveralRecordsGaussian(1e5, 0.5, 10).renyi(orders)
    assert np.all(bill >= (1 - 1e-6) * orders * (10 * 0.5 / 1e5) ** 2 / 2) and np.all(bill < 1e-3)


@pytest.mark.parametrize(("start", "power"), [(0.5, 1.0), (0.9, 1.3), (3.0, 2.0)])
def test_slow_bills_are_few_and_within_the_budget(start, power):
    asked = []

    def bill(noise):
        asked.append(noise)
        return noise**-1.3 + 0.1 / noise

    found = _least_noise_in_few_calls(bill, 1.0, 1e-4, start, power)
    assert 1 - 1e-4 <= bill(found) <= 1 and len(asked) <= 8
    assert _least_noise_in_few_calls(lambda noise: math.inf if noise < 2 else 1 / noise, 0.4, 1e-4, 1.0, 1.0) >= 2.5


@pytest.mark.long
def test_a_schedule_has_the_least_noise_for_all_records():
    """With more distinct noises than the first, rough bills of the search have."""
    sampling = dpx.PoissonSampling(examples=40, batch_size=4)

    def made(scale):
        events = functools.partial(np.linspace, 2 * scale, scale)
        return types.SimpleNamespace(sampling=sampling, event=lambda steps: sampling.event(events(steps)))

    noise = calibrate(made, steps=8, epsilon=2.0, delta=1e-3, records=3)
    assert 2.0 * (1 - 1e-4) <= dpx.epsilon(made(noise), 8, delta=1e-3, records=3) <= 2.0


@pytest.mark.parametrize(("records", "rate"), [(7, 0.3), (100, 0.001), (1000, 0.01), (500, 0.9)])
def test_rare_numbers_are_rounded_up(records, rate):
    numbers, law = SeveralRecordsGaussian(1.0, rate, records).shift_probabilities
    for least in {0, 1, 5, 40, 90, records - 1} & set(range(records)):
        assert law[numbers > least].sum() >= stats.binom.sf(least, records, rate)
    assert numbers[-1] == records and law.sum() == pytest.approx(1, abs=1e-8)
    assert law @ numbers == pytest.approx(records * rate, rel=1e-8)


@pytest.mark.parametrize(("records", "rate"), [(200, 0.01), (1000, 0.001), (2000, 0.7)])
def test_probabilities_below_float64_are_bounded_by_their_logarithms(records, rate):
    loss = SeveralRecordsGaussian(1.0, rate, records)
    numbers, logs = loss.shift_probabilities[0].astype(int), loss.log_probabilities
    assert logs.min() < -650
    every = stats.binom.logpmf(np.arange(records + 1), records, rate)
    for last, number, log in zip(numbers, numbers[1:], logs[1:], strict=False):
        truth = special.logsumexp(every[last + 1 : number + 1 if number == last + 1 else None])
        assert truth - 1e-9 <= log <= truth + 6


@pytest.mark.long
def test_a_unit_of_a_thousand_records_has_a_tight_bill():
    """Hundreds of records at once are so rare that only the Renyi divergences see them, and not delta."""
    numbers = np.arange(60)
    law = stats.binom.pmf(numbers, 1000, 0.001)
    mixture = MixtureOfGaussiansDpEvent(5.0, tuple(numbers.tolist()), tuple(law / law.sum()))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    oracle = PLDAccountant(relation, value_discretization_interval=1e-3).compose(mixture, 10)
    assert event_epsilon(unit(0.001, 5.0, 1000, 10), delta=1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.long
def test_fewer_records_and_lower_rates_cost_less():
    bills = [event_epsilon(unit(rate, 3.0, k, 50), delta=1e-5) for k, rate in ((1, 0.1), (2, 0.1), (2, 0.2), (4, 0.2))]
    assert bills == sorted(bills)
    assert event_epsilon(unit(0.1, 3.0, 1, 50), delta=1e-5) == bills[0]  # of one record: the plain bill
    hundred = event_epsilon(unit(0.001, 1.0, 100, 1), delta=1e-5)
    assert event_epsilon(unit(0.001, 1.0, 3, 1), delta=1e-5) < hundred < math.inf


def test_a_full_batch_costs_as_one_record_with_less_noise():
    sampling = dpx.FullBatch(examples=20)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=10.0, sampling=sampling, key=KEY)
    exact = gdp.epsilon(4 * 5**0.5 / 10, delta=1e-5)
    assert exact <= dpx.epsilon(mechanism, 5, delta=1e-5, records=4) <= exact * 1.001
    assert from_event(mechanism.event(5)).largest_shift("zero_out") == 0.1
    assert from_event(from_event(mechanism.event(5)).of_records(4)).largest_shift("zero_out") == pytest.approx(0.4)
    flat = from_event(mechanism.event(5))
    assert from_event(flat.of_records(4)).release_count == flat.release_count
    assert from_event(GroupGaussianDpEvent(10.0, 0.5, 4)).largest_shift("zero_out") == 0.4


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_several_releases_of_one_sample_all_have_their_arithmetic_billed(rate):
    """They are one Gaussian in real numbers, and eight draws of the program's normals."""
    several = SelfComposedDpEvent(PoissonSampledDpEvent(rate, ComposedDpEvent([GaussianDpEvent(4.0)] * 8)), 50)
    group, as_one = from_event(several).of_records(2), unit(rate, 4.0 / math.sqrt(8), 2, 50)
    assert (
        from_event(group).release_count.most
        == from_event(several).release_count.most
        == 8 * from_event(as_one).release_count.most
        == 400
    )
    assert from_event(group).release_count.mean == 400
    exact = [event_epsilon(event, delta=1e-9, relation="zero_out") for event in (group, as_one)]
    bills = [profile_of_run(event, relation="zero_out").epsilon(1e-9) for event in (group, as_one)]
    assert exact[0] == pytest.approx(exact[1], rel=1e-9) and exact[0] < bills[1] < bills[0]
    mixed = ComposedDpEvent([several, SelfComposedDpEvent(GaussianDpEvent(4.0), 3)])
    assert from_event(from_event(mixed).of_records(2)).release_count.most >= from_event(mixed).release_count.most


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_the_shift_of_several_releases_is_that_of_the_one_with_least_noise(rate):
    """What the arithmetic adds far from 0 depends on the release that the records move farthest."""
    event = PoissonSampledDpEvent(rate, ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(50.0)]))
    shifts = [from_event(from_event(event).of_records(records)).largest_shift("zero_out") for records in (1, 4)]
    assert shifts[0] >= 1 and 4 <= shifts[1] <= 4.01
    assert from_event(from_event(event).of_records(4)).release_count.most == 2


def test_an_attack_on_all_records_beats_the_bill_of_one():
    """Sums that nobody else is in: the attacker knows the law, and the likelihood ratio is the best test."""
    records, rate, sigma, steps, runs = 4, 0.25, 3.0, 30, 4000
    rng = np.random.default_rng(0)
    law = stats.binom.pmf(np.arange(records + 1), records, rate)

    def scores(taken):
        sums = taken + sigma * rng.standard_normal((runs, steps))
        terms = np.log(law) + (sums[..., None] * np.arange(records + 1) - np.arange(records + 1) ** 2 / 2) / sigma**2
        return special.logsumexp(terms, axis=2).sum(axis=1)

    within, without = scores(rng.binomial(records, rate, (runs, steps))), scores(0)
    threshold = np.quantile(without, 0.99)
    low = stats.beta.ppf(1e-4, np.sum(within > threshold), runs - np.sum(within > threshold) + 1)
    high = stats.beta.ppf(1 - 1e-4, np.sum(without > threshold) + 1, runs - np.sum(without > threshold))
    found = math.log((low - 1e-3) / high)  # a lower bound of epsilon at a delta of 1e-3
    sampling = dpx.PoissonSampling(examples=16, batch_size=4)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=sigma, sampling=sampling, key=KEY)
    one, all_of_them = (dpx.epsilon(mechanism, steps, delta=1e-3, records=k) for k in (1, records))
    assert one < found < all_of_them < 3 * found
    back = dpx.accounting.delta(mechanism, steps, epsilon=all_of_them, records=records)
    assert back == pytest.approx(1e-3, rel=0.01)


def test_what_has_no_bill_is_refused():
    def mechanism(sampling):
        return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=KEY)

    truncated = dpx.PoissonSampling(examples=40, batch_size=4, most_rows=20)
    for sampling in (truncated, dpx.ShuffledEpochs(examples=40, batch_size=4)):
        with pytest.raises(ValueError, match="records must be 1, because the cost of several is known for"):
            dpx.epsilon(mechanism(sampling), 3, delta=1e-5, records=2)
        assert dpx.epsilon(mechanism(sampling), 3, delta=1e-5, records=1) < math.inf
    poisson = mechanism(dpx.PoissonSampling(examples=40, batch_size=4))
    with pytest.raises(ValueError, match='records must be 1 for relation "replace_one", got 2'):
        dpx.epsilon(poisson, 3, delta=1e-5, records=2, relation="replace_one")
    with pytest.raises(ValueError, match="records must be a whole number of at least 1"):
        dpx.epsilon(poisson, 3, delta=1e-5, records=0)
    with pytest.raises(ValueError, match="must have only Gaussian releases, on all data or on Poisson samples"):
        from_event(dp_accounting.LaplaceDpEvent(1.0)).of_records(2)
    assert from_event(dp_accounting.NonPrivateDpEvent()).of_records(2) == dp_accounting.NonPrivateDpEvent()
    assert event_epsilon(GroupGaussianDpEvent(0.0, 0.5, 2), delta=1e-5) == math.inf
    with pytest.raises(ValueError, match="noise must be finite"):
        event_epsilon(GroupGaussianDpEvent(1.0, 1.0, 2), delta=1e-5)
    with pytest.raises(ValueError, match="does not fit several records"):
        event_epsilon(GroupGaussianDpEvent(1.0, 0.5, 2), delta=1e-5, relation="replace_one")


def test_weights_are_billed_at_the_largest_rate():
    sampling = dpx.PoissonSampling(examples=4, batch_size=1, weights=np.array([1.0, 1.0, 1.0, 3.0]))
    weighted = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=sampling, key=KEY)
    plain = dpx.PoissonSampling(examples=2, batch_size=1)
    largest = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=plain, key=KEY)
    bill = dpx.epsilon(weighted, 3, delta=1e-3, records=2)
    assert bill == dpx.epsilon(largest, 3, delta=1e-3, records=2)
    assert dpx.epsilon(weighted, 3, delta=1e-3, records=2, weight=1.0) < bill
