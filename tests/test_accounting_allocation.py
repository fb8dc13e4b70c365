"""Random allocation: its bill against enumerations, simulations, and numbers of other programs."""

import functools
import math
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import special

from dpx import accounting
from dpx.accounting import allocation
from dpx.accounting.allocation import AllocatedGaussians
from dpx.accounting.arithmetic import RunProfile
from dpx.accounting.cost import event_profile, profile_of_run
from dpx.accounting.flat_event import from_event
from dpx.accounting.pld.losses import SampledGaussian, total_renyi
from dpx.sampling.schemes import steps_by_multiplier
from dpx.sampling.varying import RandomAllocationDpEvent


def only_step(event, relation):
    (step,) = from_event(event).losses(relation)
    return step


def epoch(sigmas, steps=None, epochs=1):
    event = RandomAllocationDpEvent(steps_by_multiplier(np.array(sigmas, float)), steps or len(sigmas))
    return SelfComposedDpEvent(event, epochs) if epochs > 1 else event


def normal(edges):
    """The probabilities of N(0, 1) between edges, to a small relative error."""
    tails = special.ndtr(-np.abs(edges))
    left, right = edges[1:] <= 0, edges[:-1] >= 0
    return np.where(left, np.diff(tails), np.where(right, -np.diff(tails), 1 - tails[1:] - tails[:-1]))


def merged(values, masses, cells=6000):
    """The law with the atoms of each cell merged at their mean: smaller in the convex order."""
    logs = np.log(np.maximum(values, 1e-300))
    places = np.floor((logs - logs.min()) / (np.ptp(logs) + 1e-9) * cells).astype(int)
    merged_masses = np.bincount(places, masses)
    means = np.bincount(places, masses * values)[merged_masses > 0] / merged_masses[merged_masses > 0]
    return means, merged_masses[merged_masses > 0]


def plus(one, other):
    values, masses = np.add.outer(one[0], other[0]).ravel(), np.multiply.outer(one[1], other[1]).ravel()
    return merged(values, masses)


@functools.cache
def ratios(sigmas, steps, cells=1000):
    """A law of S from below: the mean of u in each cell of x is merging outputs, which is post-processing."""
    total = None
    for s in sigmas:
        edges = np.concatenate([[-40], np.linspace(-9.5, 9.5 + 1 / s, cells), [40 + 1 / s]])
        masses = normal(edges)
        kept = masses > 0
        one = normal(edges - 1 / s)[kept] / masses[kept], masses[kept]
        total = one if total is None else plus(total, one)
    return (total[0] + steps - len(sigmas)) / steps, total[1]


def deltas(values, masses, epsilons):
    a = np.exp(epsilons)[:, None]
    return np.stack([np.maximum(values - a, 0) @ masses, np.maximum(1 - a * values, 0) @ masses], axis=1)


def exact(sigmas, epsilons, steps=None):
    """delta of one epoch for removal and addition, float64 (epsilons, 2), from below, to about 1e-4."""
    return deltas(*ratios(tuple(sigmas), steps or len(sigmas)), np.asarray(epsilons, float))


def of_law(ratios, epsilons):
    """delta for removal and addition of a law of the likelihood ratio, float64 (epsilons, 2)."""
    a, values = np.exp(epsilons)[:, None], ratios.values
    removal = np.maximum(values - a, 0) @ ratios.masses + ratios.infinity
    return np.stack([removal, np.maximum(1 - a * values, 0) @ ratios.masses + ratios.zero], axis=1)


def of_pmfs(loss, epsilons, grid=1e-3, tail=1e-15, largest=60.0):
    """The same of privacy losses on a grid."""
    found = []
    for pmf in loss.pmfs(grid, tail=tail, largest=largest):
        assert pmf.probabilities.sum() + pmf.infinity == pytest.approx(1, abs=1e-11)
        losses = grid * (pmf.first + np.arange(len(pmf.probabilities)))
        part = np.maximum(0, -np.expm1(np.asarray(epsilons)[:, None] - losses))
        found.append(part @ pmf.probabilities + pmf.infinity)
    return np.stack(found, axis=1)


EPOCHS = [(s,) * t for t in (2, 3, 4) for s in (0.5, 1.0, 2.0)] + [(1.0, 2.0, 0.7), (3.0, 0.6, 0.6, 1.5)]


@pytest.mark.parametrize("sigmas", EPOCHS)
@pytest.mark.long_cases("sigmas3")
def test_one_epoch_is_billed_closely_and_never_below_the_truth(sigmas):
    """delta within 1%, both directions; the bill is the larger one."""
    epsilons = np.array([0.0, 0.3, 1.0, 2.0])
    truth = exact(sigmas, epsilons)
    law = of_law(allocation._dominating_ratio_law(steps_by_multiplier(np.array(sigmas)), len(sigmas), 20), epsilons)
    assert np.all(law >= truth) and np.all(law <= truth * 1.01 + 1e-12)
    profile = event_profile(epoch(sigmas))
    bills = np.array([profile.delta(epsilon) for epsilon in epsilons.tolist()])
    assert np.all(bills >= truth.max(axis=1))
    assert bills == pytest.approx(truth.max(axis=1), rel=0.01, abs=1e-12)


@pytest.mark.parametrize("sigmas", [(1.0, 1.0), (0.6, 1.0, 2.0)])
def test_the_epsilon_of_one_epoch_is_within_one_percent(sigmas):
    for delta in (1e-2, 1e-5, 1e-8):
        bill = accounting.event_epsilon(epoch(sigmas), delta=delta)
        truth = exact(sigmas, [bill, 0.99 * bill]).max(axis=1)
        assert truth[0] <= delta < truth[1]


@pytest.mark.parametrize(("sigmas", "steps"), [((1.0,), 3), ((1.0, 0.6), 5), ((1.0, 1.0, 1.0), 200), ((0.5, 2.0), 3)])
def test_an_epoch_that_ends_early(sigmas, steps):
    epsilons = np.array([0.0, 0.05, 0.5, 1.5])
    truth = exact(sigmas, epsilons, steps)
    loss = AllocatedGaussians(steps_by_multiplier(np.array(sigmas)), steps)
    assert of_pmfs(loss, epsilons) == pytest.approx(truth, rel=0.01, abs=1e-8)
    assert np.all(of_pmfs(loss, epsilons) >= truth - 1e-15)
    profile = event_profile(epoch(sigmas, steps))
    bills = np.array([profile.delta(epsilon) for epsilon in epsilons.tolist()])
    assert bills == pytest.approx(truth.max(axis=1), rel=0.01, abs=1e-8)
    full = event_profile(epoch((*sigmas, *[1.0] * (steps - len(sigmas))), steps)).delta(0.5)
    assert full > event_profile(epoch(sigmas, steps)).delta(0.5)


def composed(sigmas, epochs, epsilons):
    """delta of several epochs, float64 (epsilons, 2): the ratios are multiplied."""
    values, masses = one = merged(*ratios(sigmas, len(sigmas)), cells=2000)
    for _ in range(epochs - 1):
        values, masses = merged(np.outer(values, one[0]).ravel(), np.outer(masses, one[1]).ravel())
    return deltas(values, masses, epsilons)


def test_the_directions_are_not_mixed():
    """Each direction composes with itself: removal is the first pmf, addition the second, and they differ."""
    epsilons = np.array([1.0, 2.0])
    truth = exact((1.0, 1.0), epsilons)
    assert np.all(truth[:, 0] > 1.1 * truth[:, 1])
    assert of_pmfs(AllocatedGaussians(((1.0, 2),), 2), epsilons) == pytest.approx(truth, rel=2e-3)


def test_published_numbers():
    """Computed by integration elsewhere; of the third, by simulation."""
    for (sigma, steps, epsilon), truth, digits in (
        ((1.0, 2, 1.0), (0.0592065011, 0.0501976624), 1e-4),
        ((2.0, 2, 2.0), (2.88118628e-8, 1.94299560e-9), 1e-3),
        ((1.0, 3, 1.0), (0.03347, 0.02386), 2e-3),
    ):
        assert exact((sigma,) * steps, [epsilon])[0] == pytest.approx(truth, rel=digits)
        bill = accounting.event_delta(epoch((sigma,) * steps), epsilon=epsilon)
        assert truth[0] < bill < 1.004 * truth[0]
    assert accounting.event_delta(epoch((1.0, 1.0)), epsilon=0.0) == pytest.approx(0.29776, rel=1e-3)
    assert accounting.event_delta(epoch((0.5,) * 100), epsilon=0.0) == pytest.approx(0.188, rel=2e-3)
    assert accounting.event_epsilon(epoch((2.0,)), delta=1e-5) == pytest.approx(1.9930914, rel=1e-7)
    assert 1.532 <= accounting.event_epsilon(epoch((2.0,) * 5, epochs=4), delta=1e-5) <= 2.320
    assert allocation.renyi_of_removal(((1.0, 2),), 2, 2) == pytest.approx(0.62011451, abs=5e-9)
    assert allocation.renyi_of_addition(((1.0, 2),), 2, 2) == pytest.approx(0.56904260, abs=5e-9)


def test_a_moment_that_is_zero_on_the_circle_or_no_number():
    """At order 150, f is 0 in float64 at a point of the circle, whose complex logarithm times 7 is no number."""
    noise = ((30.26742382574109, 7),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [allocation.renyi_of_removal(noise, 7, order) for order in (149, 150, 151)]
    assert 0 < found[0] < found[1] < found[2]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert allocation.renyi_of_removal(((math.nan, 7),), 7, 2) == math.inf


def test_poisson_sampling_is_no_bill():
    """Neither curve bounds the other, so a bill by Poisson sampling would be below the truth."""
    for sigma, steps, of_poisson in ((1.0, 2, 0.2726), (0.5, 100, 0.169)):
        poisson = SelfComposedDpEvent(PoissonSampledDpEvent(1 / steps, GaussianDpEvent(sigma)), steps)
        own, other = (event_profile(event) for event in (epoch((sigma,) * steps), poisson))
        assert other.delta(0.0) == pytest.approx(of_poisson, abs=5e-4)
        assert own.delta(0.0) > 1.05 * other.delta(0.0) and own.epsilon(1e-8) < other.epsilon(1e-8)


def test_a_law_keeps_its_mean_and_the_tails_that_it_cuts():
    """With tails of 10% the law still dominates: what is cut goes to 0 and to infinity."""
    epsilons = np.array([-3.0, -0.5, 0.0, 0.3, 1.0, 3.0])
    for sigmas, steps in (((1.0, 1.0), 2), ((0.7,) * 3, 3), ((1.0, 2.0), 4)):
        truth = exact(sigmas, epsilons, steps)
        for decades in (1, 2, 20):
            law = allocation._dominating_ratio_law(steps_by_multiplier(np.array(sigmas)), steps, decades)
            assert law.masses.sum() + law.zero == pytest.approx(1, abs=1e-12)
            assert law.masses @ law.values + law.infinity == pytest.approx(1, abs=1e-12)
            assert np.all(of_law(law, epsilons) >= truth - 1e-12)
    assert law.infinity < 1e-20 < allocation._dominating_ratio_law(((1.0, 2),), 2, 1).infinity


def test_any_grid_and_window_is_above_the_truth(monkeypatch):
    loss, epsilons = AllocatedGaussians(((1.0, 2),), 2), np.array([-1.0, 0.0, 0.1, 1.0])
    truth = exact((1.0, 1.0), epsilons)
    for grid, tail, largest in ((0.3, 1e-15, 60.0), (0.01, 0.05, 60.0), (0.01, 1e-15, 0.4)):
        assert np.all(of_pmfs(loss, epsilons, grid, tail, largest) >= truth - 1e-12)
    monkeypatch.setattr(allocation, "_TAIL_DECADES", 1)  # so that the law itself has tails of 10%
    coarse = of_pmfs(loss, epsilons, tail=0.1)
    assert np.all(coarse >= truth) and [pmf.infinity for pmf in loss.pmfs(1e-3, tail=0.1, largest=60.0)] > [1e-4] * 2


def test_sums_of_two_laws_and_of_one_repeated_are_alike():
    """1000 ratios in a row, or 600 and 400 of other noise that is almost the same."""
    epsilons = np.array([0.0, 0.05, 0.2])
    one = of_law(allocation._dominating_ratio_law(((1.0, 1000),), 1000, 20), epsilons)
    two = of_law(allocation._dominating_ratio_law(((1.0, 600), (1.0 + 1e-9, 400)), 1000, 20), epsilons)
    assert two == pytest.approx(one, rel=0.01)
    law = allocation.law_of_copies(allocation.likelihood_ratio_law(1.0, 1e-20), 1000, 1e-20)
    assert law.masses @ law.values == pytest.approx(1000, rel=1e-11)
    second = law.masses @ (law.values / 1000 - 1) ** 2
    assert 0 <= second / (math.expm1(1) / 1000) - 1 < 2e-3  # the rounding adds this to the variance


def test_a_thousand_steps_against_a_simulation():
    rng, sigma, runs = np.random.default_rng(0), 1.0, 20_000
    z = np.concatenate([rng.standard_normal((1000, 1000), np.float32) for _ in range(runs // 1000)])
    ratios = np.exp(z / sigma - 0.5 / sigma**2).mean(axis=1, dtype=np.float64)
    profile = event_profile(epoch((sigma,) * 1000))
    for epsilon in (0.0, 0.03, 0.06):
        parts = np.maximum(ratios - math.exp(epsilon), 0), np.maximum(1 - math.exp(epsilon) * ratios, 0)
        errors = [5 * part.std() / math.sqrt(runs) for part in parts]
        assert profile.delta(epsilon) >= max(part.mean() - e for part, e in zip(parts, errors, strict=True))
        assert profile.delta(epsilon) <= max(1.01 * part.mean() + e for part, e in zip(parts, errors, strict=True))


ORDERS = np.array([1.3, 2.0, 3.0, 4.0, 4.5])


@pytest.mark.parametrize(("sigmas", "steps"), [((1.0, 1.0), 2), ((0.7, 0.7, 2.0), 3), ((2.0, 1.0), 6)])
def test_renyi_divergences_are_above_the_integrals(sigmas, steps):
    """Equal at whole orders, and chords between them."""
    values, shares = ratios(sigmas, steps, 2200)
    removal, addition = (np.log([shares @ values**p for p in power]) / (ORDERS - 1) for power in (ORDERS, 1 - ORDERS))
    noise, truth = steps_by_multiplier(np.array(sigmas)), np.maximum(removal, addition)
    for place in np.flatnonzero(ORDERS == np.round(ORDERS)):
        order = int(ORDERS[place])
        assert allocation.renyi_of_removal(noise, steps, order) == pytest.approx(removal[place], rel=1e-3)
        assert allocation.renyi_of_addition(noise, steps, order) == pytest.approx(addition[place], rel=1e-3)
    bound = AllocatedGaussians(noise, steps).renyi(ORDERS)
    assert np.all(bound >= truth)
    assert bound[1:4] == pytest.approx(truth[1:4], rel=1e-3) and bound[4] < 1.15 * truth[4]


@pytest.mark.parametrize("steps", [10**5, 10**7, 10**9])
@pytest.mark.parametrize("sigma", [1.0, 4.0, 8.0])
def test_the_rounding_of_many_steps_is_billed(sigma, steps):
    """The exact second moment of S is 1 + (e^(1 / s^2) - 1) / t."""
    exact = math.log1p(math.expm1(sigma**-2) / steps)
    assert allocation.renyi_of_removal(((sigma, steps),), steps, 2) >= exact * (1 - 1e-12)


def test_a_loss_that_overflows_is_not_private():
    """At this noise, a grid point is beyond the largest number; what is not a number is no bill of 0."""
    event = RandomAllocationDpEvent(((0.05, 2),), 2)
    with np.errstate(all="ignore"):
        assert accounting.event_epsilon(event, delta=1e-140) > accounting.event_epsilon(event, delta=1e-100) > 500


def test_renyi_divergences_at_large_orders_and_many_steps():
    """Those of the law are a little larger; no order has more than one Gaussian release."""
    law = allocation._dominating_ratio_law(((2.0, 1000),), 1000, 40)
    for order in (2, 8, 16):
        by_law = [math.log(law.masses @ law.values**power) / (order - 1) for power in (order, 1 - order)]
        found = (
            allocation.renyi_of_removal(((2.0, 1000),), 1000, order),
            allocation.renyi_of_addition(((2.0, 1000),), 1000, order),
        )
        assert found == pytest.approx(by_law, rel=0.01) and found[0] <= by_law[0] and found[1] <= by_law[1]
    orders = np.array([1.5, 256.0, 1024.0, 8192.0])
    for noise in (((0.2, 10),), ((30.0, 10),)):
        bound = AllocatedGaussians(noise, 10).renyi(orders)
        assert np.all(np.isfinite(bound)) and np.all(bound <= np.ceil(orders) / (2 * noise[0][0] ** 2))
        assert np.all(np.diff(bound) >= 0)


@pytest.mark.long
def test_the_accountants_agree():
    for sigma, steps, epochs in ((0.6, 20, 3), (1.0, 100, 10), (4.0, 7, 50)):
        event = epoch((sigma,) * steps, epochs=epochs)
        by = {a: accounting.event_epsilon(event, delta=1e-6, accountant=a) for a in ("pld", "rdp", "tightest")}
        assert by["tightest"] == by["pld"] < by["rdp"] < 1.6 * by["pld"]


def test_little_noise_is_one_gaussian_release():
    event = epoch((0.04,) * 8)
    known = accounting.event_epsilon(GaussianDpEvent(0.04), delta=1e-5)
    assert accounting.event_epsilon(event, delta=1e-5) == pytest.approx(known)
    assert isinstance(only_step(epoch((0.0501,) * 8), "zero_out"), AllocatedGaussians)
    assert accounting.event_epsilon(epoch((0.0, 1.0)), delta=1e-5) == math.inf


def test_noise_that_changes_in_an_epoch_is_rounded_down():
    sigmas = np.geomspace(1.0, 2.0, 40)
    few = allocation.few_multipliers(steps_by_multiplier(sigmas))
    assert len(few) <= 4 and sum(count for _, count in few) == 40
    assert np.all(np.repeat(*zip(*few, strict=True)) <= sigmas)
    assert allocation.few_multipliers(steps_by_multiplier(np.array([1.0, 1.0, 2.0]))) == ((1.0, 2), (2.0, 1))
    bill = accounting.event_epsilon(epoch(sigmas), delta=1e-6)
    least, most = (accounting.event_epsilon(epoch((s,) * 40), delta=1e-6) for s in (2.0, 1.0))
    assert least < bill < most
    assert accounting.event_epsilon(epoch(sigmas[::-1]), delta=1e-6) == bill


def test_epochs_of_many_noises_are_rounded_to_few_that_cost_more():
    sigmas = np.geomspace(2.0, 1.0, 60)
    losses = {AllocatedGaussians(((float(s), 5),), 5): 2 for s in sigmas} | {SampledGaussian(3.0, 0.1): 4}
    few = allocation.round_to_few_epochs(losses, 512)
    assert sum(few.values()) == 124 and 10 < len(few) <= 25 and few[SampledGaussian(3.0, 0.1)] == 4
    orders = np.array([1.5, 2.0, 8.0])
    exact_renyi, rounded_renyi = total_renyi(losses, orders), total_renyi(few, orders)
    assert np.all(exact_renyi <= rounded_renyi) and rounded_renyi == pytest.approx(exact_renyi, rel=0.06)
    mixed = [AllocatedGaussians(((1.0 + i / 100, 2), (2.0, 1)), 9) for i in range(30)]
    rounded = allocation.round_to_few_epochs(dict.fromkeys(mixed, 1), 512)
    assert len(allocation.round_to_few_epochs(dict.fromkeys(mixed, 1), 9)) <= 3
    assert sum(rounded.values()) == 30
    assert all(loss.released_steps == 3 and loss.steps_per_epoch == 9 for loss in rounded)


def test_what_is_not_billed_is_refused():
    with pytest.raises(ValueError, match='"replace_one"'):
        accounting.event_epsilon(epoch((1.0, 1.0)), delta=1e-5, relation="replace_one")
    for noise, steps in (((), 3), (((1.0, 4),), 3), (((math.inf, 1),), 3), (((math.nan, 1),), 3), (((1.0, 0),), 3)):
        with pytest.raises(ValueError, match="noise must be finite"):
            accounting.event_epsilon(RandomAllocationDpEvent(noise, steps), delta=1e-5)
    for relation in ("zero_out", "add_or_remove"):
        assert accounting.event_epsilon(epoch((1.0, 1.0)), delta=1e-5, relation=relation) < 5


def test_it_composes_with_other_events():
    small, usual = (RandomAllocationDpEvent(((9.0, kind(200)), (10.0, kind(100))), 300) for kind in (np.uint8, int))
    assert accounting.event_epsilon(small, delta=1e-5) == accounting.event_epsilon(usual, delta=1e-5)
    together = ComposedDpEvent([epoch((2.0,) * 5), epoch((2.0,) * 3, 5), GaussianDpEvent(4.0)])
    parts = [accounting.event_epsilon(event, delta=1e-6) for event in together.events]
    assert max(parts) < accounting.event_epsilon(together, delta=1e-6) < sum(parts)
    counts = from_event(SelfComposedDpEvent(together, 3)).event_counts
    assert counts[epoch((2.0,) * 5)] == 3 and counts[epoch((2.0,) * 3, 5)] == 3
    assert not isinstance(together.events[0], dp_accounting.NoOpDpEvent)


def test_the_bill_of_a_run_counts_every_release():
    event = ComposedDpEvent([epoch((2.0, 0.5, 2.0), epochs=4), epoch((1.0, 1.0), 3)])
    assert from_event(event).release_count == (14, 14.0)
    assert from_event(event).largest_shift("zero_out") == 2.0
    bill = profile_of_run(event, relation="zero_out")
    assert isinstance(bill, RunProfile) and (bill.releases, bill.shift) == (14, 2.0)
    assert 0 < bill.epsilon(1e-5) - accounting.event_epsilon(event, delta=1e-5, relation="zero_out") < 1e-3
