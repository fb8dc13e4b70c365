"""Truncated Poisson sampling: its bill against enumerations, and against numbers of dp-accounting."""

import itertools
import math

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import special, stats

import dpx
from dpx import accounting
from dpx.accounting.cost import event_profile, profile_of_run
from dpx.accounting.flat_event import from_event, without_truncation
from dpx.accounting.limited_samples import FixedSizeGaussian, TruncatedSampleGaussian, bucketed_truncated_losses
from dpx.accounting.pld.losses import SampledGaussian, total_renyi
from dpx.papers.d2p2_sgd.cost import event_with_projection

KEY = jax.random.key(7)


def only_step(event, relation):
    (step,) = from_event(event).losses(relation)
    return step


def event(examples, rate, most, sigma, steps=1):
    one = TruncatedSubsampledGaussianDpEvent(examples, rate, most, sigma)
    return SelfComposedDpEvent(one, steps) if steps > 1 else one


def poisson(rate, sigma, steps=1):
    one = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    return SelfComposedDpEvent(one, steps) if steps > 1 else one


def sums(values, rate, most):
    """The law of the sum of a truncated sample of these contributions: a dict of probabilities."""
    law = {}
    for coins in itertools.product((0, 1), repeat=len(values)):
        heads = np.flatnonzero(coins)
        subsets = list(itertools.combinations(heads, min(len(heads), most)))
        probability = rate ** len(heads) * (1 - rate) ** (len(values) - len(heads)) / len(subsets)
        for subset in subsets:
            total = sum(values[place] for place in subset)
            law[total] = law.get(total, 0.0) + probability
    return law


EDGES = np.concatenate([[-np.inf], np.linspace(-12, 12, 3000), [np.inf]])


def masses(values, rate, most, sigma):
    """The probabilities of cells of the output, which is post-processing of it: float64 (cells,)."""
    law = sums(values, rate, most)
    return sum(p * np.diff(special.ndtr((EDGES - total) / sigma)) for total, p in law.items())


def delta(one, other, epsilon):
    """A lower bound of delta, in the worse direction."""
    a = math.exp(epsilon)
    return max(np.maximum(p - a * q, 0).sum() for p, q in ((one, other), (other, one)))


EPSILONS = (0.0, 0.3, 1.0, 2.0)
CASES = [(3, 0.5, 1, 1.0), (4, 0.3, 2, 0.7), (4, 0.6, 2, 1.0), (4, 0.6, 1, 2.0), (4, 0.4, 3, 0.5)]


@pytest.mark.parametrize(("examples", "rate", "most", "sigma"), CASES)
def test_no_data_cost_more_than_the_bill(examples, rate, most, sigma):
    """All contributions in {-1, 0, 1}: an example is nulled in its place, replaced, or not there."""
    worst = {relation: np.zeros(len(EPSILONS)) for relation in ("zero_out", "replace_one", "add_or_remove")}
    for others in itertools.combinations_with_replacement((-1, 0, 1), examples - 1):
        full = {own: masses((own, *others), rate, most, sigma) for own in (-1, 0, 1)}
        pairs = [("zero_out", full[1], full[0]), ("replace_one", full[1], full[-1])]
        pairs.append(("add_or_remove", full[1], masses(others, rate, most, sigma)))
        for relation, one, other in pairs:
            worst[relation] = np.maximum(worst[relation], [delta(one, other, epsilon) for epsilon in EPSILONS])
    for relation, truth in worst.items():
        profile = event_profile(event(examples, rate, most, sigma), relation=relation)
        bill = np.array([profile.delta(epsilon) for epsilon in EPSILONS])
        assert np.all(bill >= truth - 1e-9), relation
        assert np.all(bill[:2] < 3 * truth[:2])


def test_poisson_sampling_is_no_bill():
    """One row of three examples: the others contribute -1, and are displaced by the example's +1."""
    truth = delta(masses((1, -1, -1), 0.5, 1, 1.0), masses((0, -1, -1), 0.5, 1, 1.0), 1.0)
    removed = delta(masses((1, -1, -1), 0.5, 1, 1.0), masses((-1, -1), 0.5, 1, 1.0), 1.0)
    bills = [accounting.event_delta(e, epsilon=1.0) for e in (event(3, 0.5, 1, 1.0), poisson(0.5, 1.0))]
    assert bills[0] >= removed > truth and removed > 1.05 * accounting.event_delta(poisson(1 / 3, 1.0), epsilon=1.0)
    assert bills[0] > bills[1]


@pytest.mark.parametrize("examples, batch, more", [(93_400_000, 62e6, 9), (40_000_000, 20e6, 10), (10**9, 1e7, 100)])
def test_the_tail_of_a_large_batch(examples, batch, more):
    """The probability of a full batch, by another function: `scipy.special.bdtrc` has .39 of .499 in the first case."""
    event = TruncatedSubsampledGaussianDpEvent(examples, batch / examples, int(batch) + more, 2.0)
    loss, others = only_step(event, "zero_out"), stats.binom(examples - 1, batch / examples)
    assert others.sf(int(batch) + more - 1) <= loss.full <= others.sf(int(batch) + more - 1) * (1 + 1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_batch_that_is_never_cut_costs_as_poisson(accountant):
    """For 1,083 rows, a full batch has a probability of 1e-309, and one that is cut rounds to 0."""
    limits = 1082, 1083, 1084, math.inf
    samplings = [dpx.PoissonSampling(examples=60_000, batch_size=256, most_rows=most) for most in limits]
    profiles = [event_profile(each.event(np.ones(1)), accountant=accountant, relation="zero_out") for each in samplings]
    bounds = [profile.epsilon(1e-5) for profile in profiles]
    assert bounds[0] > 0.05
    np.testing.assert_allclose(bounds, bounds[0], rtol=1e-9)


def test_a_sample_that_is_always_full_has_a_cost():
    event = TruncatedSubsampledGaussianDpEvent(100, 0.99, 10, 1.0)
    assert 1 < event_profile(event, accountant="rdp", relation="zero_out").epsilon(1e-5) < 30


def test_two_steps_are_billed_above_two_steps_of_the_worst_data():
    one, other = (masses((own, -1, -1), 0.5, 1, 1.0).reshape(-1) for own in (1, 0))
    merged = [np.add.reduceat(p, np.arange(0, len(p), 6)) for p in (one, other)]
    truth = [delta(*(np.outer(p, p) for p in merged), epsilon) for epsilon in EPSILONS]
    profile = event_profile(event(3, 0.5, 1, 1.0, steps=2), relation="zero_out")
    assert np.all([profile.delta(epsilon) for epsilon in EPSILONS] >= np.array(truth))


PUBLISHED = {256: 16.79, 288: 7.71, 304: 5.40, 320: 2.56, 336: 1.902}  # epsilon by most_rows


@pytest.mark.long
def test_published_numbers():
    """N 60,000, B 256, noise .8, 2,344 steps. dp-accounting has a pair that costs a little more than ours."""
    rate, relation = 256 / 60_000, dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    least = accounting.event_epsilon(poisson(rate, 0.8, 2344), delta=1e-5, relation="zero_out")
    assert least == pytest.approx(1.897, abs=5e-4)
    for most, number in PUBLISHED.items():
        run = event(60_000, rate, most, 0.8, 2344)
        peer = PLDAccountant(neighboring_relation=relation, value_discretization_interval=1e-3).compose(run)
        assert peer.get_epsilon(1e-5) == pytest.approx(number, abs=5e-3)
        bill = accounting.event_epsilon(run, delta=1e-5, relation="zero_out")
        assert 0.995 * number < bill <= peer.get_epsilon(1e-5) and bill > least


@pytest.mark.long
def test_what_dp_accounting_says_of_one_step():
    for examples, rate, most, sigma in CASES[:2]:
        relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        peer = PLDAccountant(neighboring_relation=relation, value_discretization_interval=1e-3)
        peer = peer.compose(event(examples, rate, most, sigma))
        for epsilon in (0.3, 1.0):
            bill = accounting.event_delta(event(examples, rate, most, sigma), epsilon=epsilon, relation="zero_out")
            assert 0.4 * peer.get_delta(epsilon) < bill <= peer.get_delta(epsilon) * 1.001


def test_the_cases_of_a_step():
    """Four examples, two rows: full is two or three heads of three, where it takes part with q 2/3 and q 2/4."""
    loss = only_step(event(4, 0.5, 2, 1.0), "zero_out")
    assert isinstance(loss, TruncatedSampleGaussian)
    assert (loss.rate, loss.full) == pytest.approx((0.5, 4 / 8))
    assert loss.rate_if_full == pytest.approx(0.5 * (3 / 8 * 2 / 3 + 1 / 8 * 2 / 4) / (4 / 8))
    assert only_step(event(10, 0.5, 10, 1.0), "zero_out") == SampledGaussian(1.0, 0.5, "zero_out")
    assert only_step(event(10**6, 1e-3, 10**5, 1.0), "zero_out") == SampledGaussian(1.0, 1e-3, "zero_out")
    assert only_step(event(10, 1.0, 4, 1.0), "zero_out") == FixedSizeGaussian(0.5, 0.4)
    assert accounting.event_epsilon(event(10, 0.5, 2, 0.0), delta=1e-5) == math.inf
    for wrong in ((10, 0.0, 2, 1.0), (10, 0.5, 0, 1.0), (10, 0.5, 11, 1.0), (10, 0.5, 2, math.nan), (10, 1.5, 2, 1.0)):
        with pytest.raises(ValueError, match="noise must be finite|must be a number at least 0"):
            accounting.event_epsilon(event(*wrong), delta=1e-5)


@pytest.mark.parametrize(("others", "rate", "most"), [(3, 0.5, 2), (4, 0.3, 2), (4, 0.7, 3), (5, 0.2, 1)])
def test_a_full_batch_has_the_law_of_public_coins(others, rate, most):
    """A subset U of the others, j of U, and the example's coin, by which it takes the place of j; by enumeration."""
    drawn, imitated, me = {}, {}, others
    for coins in itertools.product((0, 1), repeat=others + 1):
        heads = [place for place in range(others + 1) if coins[place]]
        if sum(coins[:others]) >= most:
            subsets = list(itertools.combinations(heads, most))
            probability = rate ** len(heads) * (1 - rate) ** (others + 1 - len(heads)) / len(subsets)
            for subset in subsets:
                drawn[subset] = drawn.get(subset, 0.0) + probability
    loss = only_step(event(others + 1, rate, most, 1.0), "zero_out")
    subsets = list(itertools.combinations(range(others), most))
    for subset, displaced in itertools.product(subsets, range(most)):
        probability = loss.full / len(subsets) / most
        exchanged = (*(other for place, other in enumerate(subset) if place != displaced), me)
        for batch, share in ((subset, 1 - loss.rate_if_full), (exchanged, loss.rate_if_full)):
            imitated[batch] = imitated.get(batch, 0.0) + probability * share
    assert drawn == pytest.approx(imitated, rel=1e-8) and len(drawn) == math.comb(others + 1, most)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_the_divergences_are_those_of_the_privacy_losses_at_least(relation):
    orders = np.array([4.25, 2.0, 3.0, 4.0, 8.0, 16.0])
    loss = only_step(event(40, 0.3, 14, 1.5), relation)
    bound, grid = loss.renyi(orders), 2e-3
    for pmf in loss.pmfs(grid, tail=1e-60, largest=200.0):
        assert pmf.probabilities.sum() + pmf.infinity == pytest.approx(1, abs=1e-11)
        losses = grid * (pmf.first + np.arange(len(pmf.probabilities)))
        moments = np.array([np.log(pmf.probabilities @ np.exp((a - 1) * losses)) / (a - 1) for a in orders])
        assert np.all(moments <= bound * 1.001) and np.all(bound[1:] < 6 * moments[1:])


def test_the_tail_that_is_cut_is_billed():
    loss = TruncatedSampleGaussian(0.5, 0.3, 0.4, 0.2, "zero_out")
    (exchanged,) = FixedSizeGaussian(0.25, 0.2).pmfs(1e-2, tail=1e-9, largest=2.0)
    for pmf in loss.pmfs(1e-2, tail=1e-9, largest=2.0):
        assert pmf.infinity > 0.399 * exchanged.infinity > 0.01


@pytest.mark.long
def test_a_schedule_is_rounded_to_few_steps_that_cost_more():
    sigmas = np.geomspace(2.0, 0.8, 200)
    runs = [event(1000, 0.05, 64, float(sigma)) for sigma in sigmas]
    losses = {only_step(run, "zero_out"): 2 for run in runs} | {SampledGaussian(3.0, 0.1): 4}
    losses[only_step(event(1000, 0.05, 70, 2.0), "zero_out")] = 5
    few = bucketed_truncated_losses(losses, 64)
    assert sum(few.values()) == 409 and few[SampledGaussian(3.0, 0.1)] == 4 and len(few) <= 66
    orders = np.array([1.5, 2.0, 8.0])
    exact, rounded = total_renyi(losses, orders), total_renyi(few, orders)
    assert np.all(exact <= rounded) and rounded == pytest.approx(exact, rel=0.1)
    bill = accounting.event_epsilon(ComposedDpEvent(runs), delta=1e-6)
    least, most = (accounting.event_epsilon(event(1000, 0.05, 64, s, 200), delta=1e-6) for s in (2.0, 0.8))
    assert least < bill < most


def test_a_run_of_truncated_batches_is_billed_and_calibrated():
    """The arithmetic of the noise counts that one example displaces another."""
    run = event(60_000, 256 / 60_000, 320, 0.8, 2344)
    assert (
        from_event(run).release_count == (2344, 2344.0)
        and from_event(run).largest_shift("zero_out") == from_event(run).largest_shift("replace_one") == 2.5
    )
    bill = profile_of_run(run, relation="zero_out")
    assert 0 < bill.epsilon(1e-5) - accounting.event_epsilon(run, delta=1e-5, relation="zero_out") < 2e-3
    full = event(60_000, 256 / 60_000, 256, 0.8, 2344)  # at so large an epsilon, a bill without a shift is inf
    assert profile_of_run(full, relation="zero_out").epsilon(1e-5) < accounting.event_epsilon(full, delta=1e-5) + 0.01
    sampling = dpx.PoissonSampling(examples=60_000, batch_size=256, most_rows=336)
    made = dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=dpx.Budget(epsilon=2.0, delta=1e-5, steps=3000), sampling=sampling, key=KEY
    )
    assert 1.999 < dpx.epsilon(made, 3000, delta=1e-5) <= 2.0
    assert dpx.epsilon(made, 3000, delta=1e-5, accountant="rdp") > 2.0
    assert dpx.epsilon(made, 3000, delta=1e-5, relation="replace_one") > 2.0
    with pytest.raises(ValueError, match='relation "add_or_remove" does not fit'):
        dpx.epsilon(made, 3000, delta=1e-5, relation="add_or_remove")
    assert without_truncation(made.event(3)) == dpx.PoissonSampling(examples=60_000, batch_size=256).event(
        np.full(3, made.event(1).noise_multiplier)
    )


def test_error_feedback_and_projections_have_no_bill_for_truncated_batches():
    sampling = dpx.PoissonSampling(examples=1000, batch_size=50, most_rows=64)
    numbers = dict(clip_norm=1.0, feedback_norm=1.0, outer_clip_norm=1.1, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="sampling must have no most_rows and no weights"):
        dpx.methods.dice_sgd(**numbers, sampling=sampling, key=KEY)
    plain = dpx.PoissonSampling(examples=1000, batch_size=50)
    run = dpx.methods.dice_sgd(**numbers, sampling=plain, key=KEY).event(5)
    run = type(run)(run.noise_multiplier, run.error_shift, run.feedback_shift, 5, None, sampling)
    with pytest.raises(
        ValueError, match="error feedback has no known cost for Poisson sampling with most_rows or weights"
    ):
        accounting.event_epsilon(run, delta=1e-5, relation="zero_out")
    with pytest.raises(ValueError, match="a fresh projection has a known cost before"):
        event_with_projection(sampling.event(np.ones(3)), rank=3)
