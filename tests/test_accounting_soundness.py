"""The ends are what they say: against closed forms, dp-accounting and finer buckets. One-sided throughout."""

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent as Gaussian
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import fft, optimize, special, stats

import dpx
from dpx import accounting
from dpx.accounting import profiles
from dpx.accounting.groups import GroupGaussianDpEvent
from dpx.accounting.pld import composition, losses, renyi
from dpx.accounting.pld.losses import bucketed_steps
from dpx.papers.d2p2_sgd.cost import ProjectedGaussianDpEvent
from dpx.papers.dice_sgd.cost import ErrorFeedbackDpEvent

SLACK = 1e-4

pytestmark = pytest.mark.usefixtures("exact_noise")


def reference(sigmas, rates, counts, delta, grid=2e-4):
    """dp-accounting event by event: an upper bound within about 1e-4 of the truth at this grid and few steps."""
    accountant = PLDAccountant(value_discretization_interval=grid)
    for sigma, rate, count in zip(sigmas, rates, counts, strict=True):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), int(count))
    return accountant.get_epsilon(delta)


def one_step_delta(sigma, rate, epsilon, direction):
    """delta of one step by direct integration of the two densities; no shared code."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    zero, one = stats.norm.pdf(x, 0, sigma), stats.norm.pdf(x, 1, sigma)
    pair = (1 - rate) * zero + rate * one, zero
    upper, lower = pair if direction == "remove" else pair[::-1]
    return np.trapezoid(np.maximum(0, upper - math.exp(epsilon) * lower), x)


@pytest.mark.parametrize("sigma, rate", [(1.0, 0.01), (0.5, 0.3), (5.0, 0.9), (0.3, 1e-3)])
def test_one_step_is_exact_in_both_directions(sigma, rate):
    for epsilon in (0.0, 0.005, 0.1, 1.0):
        truth = max(one_step_delta(sigma, rate, epsilon, direction) for direction in ("remove", "add"))
        interval = accounting.schedule_delta([sigma], sampling_rate=rate, epsilon=epsilon)
        assert interval.lower <= truth * (1 + 1e-6) + 1e-12
        assert interval.upper >= truth * (1 - 1e-6) - 1e-12
        assert interval.upper <= truth * 1.01 + 1e-12


@pytest.mark.parametrize("sigma, rate", [(1.0, 1e-7), (1.0, 1e-9), (300.0, 1e-5)])
def test_the_smallest_costs_are_not_rounded_to_nothing(sigma, rate):
    truth = rate * (2 * stats.norm.cdf(0.5 / sigma) - 1)  # delta at epsilon 0 of one step
    for accountant in ("pld", "rdp"):
        assert accounting.schedule_delta([sigma], sampling_rate=rate, epsilon=0.0, accountant=accountant).upper >= truth
    assert renyi.gaussian_rdp(np.array([sigma]), np.array([rate])).min() > 0
    epsilon = accounting.schedule_epsilon([sigma], sampling_rate=rate, delta=truth / 2, accountant="rdp").upper
    assert epsilon > 0


def test_deltas_below_the_smallest_number_are_bounded():
    rdp = renyi.add_or_remove_rdp(np.array([2.0]), np.array([0.01]), np.array([100]))
    low, high = 0.5, 60.0
    while not 0 < renyi.delta(rdp, (low + high) / 2) < 1e-320:
        low, high = ((low + high) / 2, high) if renyi.delta(rdp, (low + high) / 2) else (low, (low + high) / 2)
    assert accounting.schedule_delta([2.0], sampling_rate=0.01, counts=[100], epsilon=(low + high) / 2).upper <= 1e-320


def test_both_directions_dominate():
    """`pmfs` have at least the divergence of the true pair, `dominated_pmfs` at most, at coarse and short grids too."""
    step = losses.SampledGaussian(0.8, 0.2)
    wide = [(1e-3, 1e-15, 50.0), (0.05, 1e-15, 50.0), (0.4, 1e-15, 50.0)]
    for grid, tail, largest in (*wide, (1e-3, 0.1, 50.0), (0.01, 1e-15, 0.6)):
        for index, direction in enumerate(("remove", "add")):
            for rule, sign in ((step.pmfs, 1), (step.dominated_pmfs, -1)):
                pmf = rule(grid, tail=tail, largest=largest)[index]
                loss = grid * (pmf.first + np.arange(len(pmf.probabilities)))
                for epsilon in (-0.15, 0.0, 0.07, 0.5, 2.0):
                    found = pmf.infinity + np.sum(pmf.probabilities * np.maximum(0, -np.expm1(epsilon - loss)))
                    truth = one_step_delta(0.8, 0.2, epsilon, direction)
                    assert sign * (found - truth) >= -1e-9
                    if (grid, tail) == (1e-3, 1e-15):
                        assert found == pytest.approx(truth, abs=2e-5)


steps = st.lists(
    st.tuples(st.floats(0.35, 40.0), st.sampled_from([0.003, 0.02, 0.15, 0.6]), st.integers(1, 12)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking takes minutes
@given(steps, st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_upper_end_never_below_dp_accounting(schedule, delta):
    """Non-monotone, wide, repeated, one step or several, a rate per step; exact buckets and too few of them."""
    sigmas, rates, counts = (np.array(column) for column in zip(*schedule, strict=True))
    truth = reference(sigmas, rates, counts, delta)
    exact = accounting.schedule_epsilon(sigmas, sampling_rate=rates, counts=counts, delta=delta)
    few = accounting.schedule_epsilon(sigmas, sampling_rate=rates, counts=counts, delta=delta, buckets=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "_LARGEST_SIZE", 2**10)
        coarse = accounting.schedule_epsilon(sigmas, sampling_rate=rates, counts=counts, delta=delta)
    for interval in (exact, few, coarse):
        assert interval.lower <= truth + SLACK
        if interval.upper < truth - SLACK:  # at a tiny epsilon, theirs is that much too large on this grid
            assert interval.upper >= reference(sigmas, rates, counts, delta, grid=1e-5) - SLACK
    assert exact.upper <= truth + 1e-3 + 1e-3 * truth
    assert few.lower <= exact.upper and exact.lower <= few.upper


def growing(first, last, steps=400):
    return np.geomspace(first, last, steps)


WIDE = {
    "wide": (growing(30, 0.7), 0.01),
    "wavy": (2 + 1.5 * np.sin(np.arange(400)), 0.02),
    "huge": (growing(1000, 1e5), 0.5),
    "tiny": (growing(0.3, 0.2, 70), 0.01),
    "spike": (np.append(np.full(399, 5.0), 0.5), 0.01),
    "rates": (growing(3, 1), np.linspace(0.001, 0.02, 400)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.long
def test_intervals_nest(name):
    """Many buckets lie within few: both hold the truth, so they must overlap, and widths must shrink."""
    sigmas, rate = WIDE[name]
    widths = []
    narrow = accounting.schedule_epsilon(sigmas, sampling_rate=rate, delta=1e-6, buckets=128)
    for buckets in (4, 32):
        interval = accounting.schedule_epsilon(sigmas, sampling_rate=rate, delta=1e-6, buckets=buckets)
        assert interval.lower <= narrow.upper and narrow.lower <= interval.upper
        assert interval.upper >= narrow.lower - 1e-9
        widths.append(interval.upper - interval.lower)
    assert narrow.lower <= narrow.upper
    assert narrow.upper - narrow.lower <= widths[1] <= widths[0] * (1 + 1e-9)


@pytest.mark.parametrize("sigma, rate", [(0.05, 0.01), (0.1, 0.5), (1e-3, 1.0), (1e4, 0.1)])
def test_one_tiny_or_huge_step_by_root_finding(sigma, rate):
    """remove: delta(eps) = q P1(x > c) - (e^eps - 1 + q) P0(x > c), c where the loss is eps; solved for eps in logs."""

    def log_delta(epsilon):
        cut = sigma**2 * (np.log(np.expm1(epsilon) + rate) - np.log(rate)) + 0.5
        one = np.log(rate) + stats.norm.logsf(cut, 1, sigma)
        zero = np.log(np.expm1(epsilon) + rate) + stats.norm.logsf(cut, 0, sigma)
        return one + np.log(-np.expm1(zero - one)) if zero < one else -np.inf

    delta = 1e-6 if sigma < 100 else 1e-6 * 0.5
    interval = accounting.schedule_epsilon([sigma], sampling_rate=rate, delta=delta)
    if log_delta(1e-12) <= math.log(delta):
        assert interval.lower <= 1e-9
        return
    if sigma < 0.01:  # e^eps overflows: the closed form of the Gaussian is tested elsewhere
        assert interval.upper >= 1 / (2 * sigma**2)
        return
    top = 1e-6
    while log_delta(top) > math.log(delta):
        top *= 2
    truth: Any = optimize.brentq(lambda e: log_delta(e) - math.log(delta), top / 2, top, xtol=1e-12)
    assert interval.lower <= truth + SLACK
    assert interval.upper >= truth - SLACK
    assert interval.upper - interval.lower <= 1e-3 * max(1.0, truth)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.3, 50), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 2**31))
def test_buckets_round_to_the_stated_side(sigmas, buckets, seed):
    generator = np.random.default_rng(seed)
    sigmas = np.array(sigmas)
    rates = generator.choice([0.01, 0.02, 0.5], len(sigmas))
    counts = generator.integers(0, 4, len(sigmas))
    groups = bucketed_steps(sigmas, rates, counts, buckets)
    assert len(groups.counts) <= max(buckets, 1)
    assert groups.counts.sum() == counts.sum()
    assert np.all(groups.smallest_noise <= groups.largest_noise)
    assert np.all(groups.smallest_rate <= groups.largest_rate)
    # Sorted by noise, the rounded-down multiset lies below the true one, and the rounded-up one above; rates likewise.
    true = np.sort(np.repeat(sigmas, counts))
    assert np.all(np.sort(np.repeat(groups.smallest_noise, groups.counts)) <= true)
    assert np.all(np.sort(np.repeat(groups.largest_noise, groups.counts)) >= true)
    true = np.sort(np.repeat(rates, counts))
    assert np.all(np.sort(np.repeat(groups.largest_rate, groups.counts)) >= true)
    assert np.all(np.sort(np.repeat(groups.smallest_rate, groups.counts)) <= true)


def test_delta_and_epsilon_are_inverse():
    sigmas = growing(4, 1, 50)
    interval = accounting.schedule_epsilon(sigmas, sampling_rate=0.02, delta=1e-7)
    assert accounting.schedule_delta(sigmas, sampling_rate=0.02, epsilon=interval.upper).upper == pytest.approx(
        1e-7, rel=1e-2
    )


def test_far_tails_keep_their_digits():
    """delta = 1e-40 of an almost unsampled Gaussian, against the closed form."""
    interval = accounting.schedule_epsilon([4.0], sampling_rate=1 - 1e-9, counts=[10], delta=1e-40)
    truth = accounting.gdp.epsilon(math.sqrt(10) / 4, delta=1e-40)
    assert interval.lower <= truth <= interval.upper + SLACK
    assert interval.upper == pytest.approx(truth, rel=1e-3)


STEP, COUNT = losses.SampledGaussian(4.0, 1 - 1e-9), 10  # almost a Gaussian, whose delta is known


def poor_plan(**changes):
    plan = composition.plan_composition(COUNT * STEP.renyi(renyi.ORDERS), COUNT, delta=1e-30, epsilon=9.0)
    assert plan is not None
    span = plan.size * plan.grid
    return dataclasses.replace(plan, **({"grid": 0.02, "size": math.ceil(span / 0.02) + 8} | changes))


def bounds(plan, epsilon):
    """(from below, the truth, from above)."""
    above, below = (composition.compose_losses({STEP: COUNT}, plan, side=side) for side in ("above", "below"))
    truth = accounting.gdp.delta(math.sqrt(COUNT) / 4, epsilon=epsilon)
    return below[0].delta(epsilon=epsilon), truth, above[0].delta(epsilon=epsilon)


@pytest.mark.parametrize("epsilon", np.linspace(7, 10, 5))
def test_rounding_of_the_transform_is_counted(epsilon):
    """Under a tilt far too small for such deltas the transform is noise: the bounds must give way, not the truth."""
    low, truth, high = bounds(poor_plan(tilt=0.05, size=150_000), epsilon)
    assert low <= truth <= high
    assert 1e-20 < high < 1e-5  # a bound of the noise, nothing else


def in_long_double(losses, plan):
    """The differences upper - lower of `composition.compose_losses(losses, plan)` from equal pmfs, in long double."""
    long = np.longdouble
    ((loss, count),) = losses.items()
    window = plan.grid * np.arange(plan.first_index + plan.size).astype(long)
    for pmf in loss.pmfs(plan.grid, tail=plan.tail / count, largest=plan.largest_loss):
        values = pmf.probabilities * np.exp(
            plan.tilt * plan.grid * (pmf.first + np.arange(len(pmf.probabilities), dtype=long))
        )
        wrapped = np.zeros(plan.size, long)
        np.add.at(wrapped, (pmf.first + np.arange(len(values))) % plan.size, values / values.sum())
        spectrum = fft.rfft(wrapped)
        spectrum = np.abs(spectrum) ** count * np.exp(1j * count * np.arctan2(spectrum.imag, spectrum.real))
        tilted = np.maximum(np.roll(fft.irfft(spectrum, plan.size), -plan.first_index)[-plan.first_index :], 0)
        falling = np.minimum(tilted * np.exp(count * np.log(values.sum()) - plan.tilt * window), 1)[1:]
        weighted = falling * np.exp(-window[1:])
        above, weighted_above = (np.append(np.cumsum(rows[::-1])[::-1], 0) for rows in (falling, weighted))
        yield above - weighted_above * np.exp(window)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="long double is float64 here")
@pytest.mark.parametrize(
    "rate, sigma, count, delta", [(1e-4, 1.0, 100_000, 6e-14), (1e-3, 0.8, 3000, 1e-9), (0.3, 9.0, 500, 1e-6)]
)
def test_the_bound_on_rounding_holds(rate, sigma, count, delta):
    """Also where most of delta is this bound: what float64 lost is at most a fifth of it."""
    steps = {losses.SampledGaussian(sigma, rate): count}
    rdp = losses.total_renyi(steps)
    plan = composition.plan_composition(rdp, count, delta=delta, epsilon=renyi.epsilon(rdp, delta))
    for summed, exact in zip(composition.compose_losses(steps, plan), in_long_double(steps, plan), strict=True):
        lost = exact - (summed._upper - summed._lower)
        assert np.any(lost != 0) and np.all(np.abs(lost) < summed._bounded / 5)


@pytest.mark.parametrize("largest", [2.0, 3.0, 4.0])
def test_losses_beyond_the_window_are_counted(largest):
    low, truth, high = bounds(poor_plan(tilt=3.0, size=int(largest / 0.02 / 0.75)), 0.98 * largest)
    assert low <= truth <= high


@pytest.mark.parametrize("largest", [0.4, 0.8])
def test_losses_that_come_around_the_window_are_no_lower_bound(largest):
    """Most of the probability lies above such a window, and comes around into it, weighted by e^(tilt span)."""
    for epsilon in np.linspace(0.05, 0.9, 5) * largest:
        low, truth, high = bounds(poor_plan(tilt=3.0, size=int(largest / 0.02 / 0.75)), epsilon)
        assert low <= truth <= high


@dataclasses.dataclass(frozen=True)
class Stub(losses.StepLoss):
    """A step of loss 0, but for an infinite one and, in the second direction, one of 3."""

    infinity: float = 0.0
    worse: float = 0.0

    def renyi(self, orders):
        return np.full(len(orders), 5.0)  # of the finite losses

    def pmfs(self, grid, *, tail, largest):
        end = round(3.0 / grid)
        values = np.zeros((2, end + 1))
        values[0, 0] = 1 - self.infinity
        values[1, [0, end]] = 1 - self.infinity - self.worse, self.worse
        return tuple(losses.Pmf(0, row, self.infinity) for row in values)


def test_infinite_losses_and_the_worse_direction_are_billed():
    infinite, worse = (profiles.loss_profile({stub: 2}) for stub in (Stub(infinity=1e-3), Stub(worse=0.2)))
    assert infinite.delta(epsilon=1.0) == pytest.approx(1 - (1 - 1e-3) ** 2, rel=1e-6)
    assert infinite.epsilon(delta=1.9e-3) >= 3.0
    one, both = 2 * 0.2 * 0.8 * -math.expm1(1 - 3.0), 0.04 * -math.expm1(1 - 6.0)
    assert worse.delta(epsilon=1.0) == pytest.approx(one + both, rel=1e-6)
    assert 2.5 < worse.epsilon(delta=0.05) < 6


def test_a_symmetric_step_counts_in_the_second_direction():
    """Also if it comes before the first step that has one."""
    symmetric, other = losses.SampledGaussian(1.0, 0.5, "replace_one"), Stub(worse=0.2)
    first, last = ({one: 2, two: 2} for one, two in ((symmetric, other), (other, symmetric)))
    deltas = [profiles.loss_profile(steps).delta(epsilon=1.0) for steps in (first, last, {other: 2}, {symmetric: 2})]
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-9) and deltas[0] > 1.1 * max(deltas[2:])


def test_the_math_of_the_smallest_divergences_has_a_domain():
    event = dp_accounting.PoissonSampledDpEvent(1e-6, dp_accounting.GaussianDpEvent(1e4))
    for accountant in ("tightest", "pld", "rdp"):
        for epsilon in (0.0, 1e-9, 0.1):
            truth = 1e-6 * (2 * stats.norm.cdf(0.5e-4) - 1) if epsilon == 0 else 0.0
            assert truth <= accounting.event_delta(event, epsilon=epsilon, accountant=accountant) <= 1e-6
    assert renyi.delta(np.full(len(renyi.ORDERS), 1e-18), 0.1) >= 0


def sampled(rate, sigma, count):
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count
    )


@pytest.mark.parametrize(
    ("rate", "sigma", "count"),
    [(0.1, 0.5, 1000), (0.5, 0.5, 100), (0.001, 20.0, 10_000), (1e-4, 1.0, 10), (1e-3, 3.0, 10), (0.5, 1.0, 1000)],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-11])
@pytest.mark.long_cases("1e-05")
def test_epsilon_and_delta_are_inverse_at_large_epsilon_and_at_tiny_delta(rate, sigma, count, delta):
    event = sampled(rate, sigma, count)
    epsilon = accounting.event_epsilon(event, delta=delta)
    found = accounting.event_delta(event, epsilon=epsilon)
    assert 0.5 * delta <= found <= 1.2 * delta  # 452 delta, and 0.002 delta, before plans were made around the answer


def test_large_epsilons_are_those_of_dp_accounting():
    """222.9 and 2231 where a plan around the RDP bill stops."""
    for rate, sigma, count, delta in ((0.1, 0.5, 1000, 1e-11), (0.5, 0.5, 100, 1e-11), (0.1, 0.5, 10_000, 1e-5)):
        event = sampled(rate, sigma, count)
        grid = 1e-2 if count < 10_000 else 5e-2
        theirs = PLDAccountant(value_discretization_interval=grid).compose(event).get_epsilon(delta)
        assert accounting.event_epsilon(event, delta=delta) <= 1.01 * theirs


def test_epsilon_has_no_floor_at_tiny_deltas():
    """RDP's largest order leaves ln(1/delta) / 1023 = .017; an upper bound here is that of one unsampled Gaussian."""
    for rate, sigma, count in ((0.001, 20.0, 1), (1e-4, 300.0, 100), (0.01, 300.0, 10)):
        truth = reference([sigma], [rate], [count], 1e-11, grid=1e-6)
        assert accounting.event_epsilon(sampled(rate, sigma, count), delta=1e-11) <= 1.05 * truth + 1e-5


def test_an_order_without_a_number_is_left_out():
    known = np.linspace(0.5, 5, len(renyi.ORDERS))
    for value in math.nan, math.inf, -1e-17:
        found = profiles.RenyiProfile(np.where(renyi.ORDERS == 6, value, known))
        assert found.epsilon(1e-5) >= profiles.RenyiProfile(known).epsilon(1e-5) > 1
        assert found.delta(1.0) >= profiles.RenyiProfile(known).delta(1.0) > 0.01
    assert profiles.RenyiProfile(known * math.nan).epsilon(1e-5) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_and_rates_at_the_limits_of_float64(accountant):
    """A warning would be an error here."""
    event = dp_accounting.SampledWithoutReplacementDpEvent
    truncated = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent
    for noise in 1e100, 1e154, 1e160, 1.7e308:
        feedback = ErrorFeedbackDpEvent(noise, 0.5, 2.0, 3, 3, dpx.PoissonSampling(examples=100, batch_size=2))
        for each in sampled(0.1, noise, 2), truncated(100, 0.1, 20, noise), ProjectedGaussianDpEvent(noise, 1.0, 8):
            assert 0 <= accounting.event_epsilon(each, delta=1e-9, accountant=accountant) < 0.02
        for each in sampled(0.1, noise, 2), feedback:
            assert 0 <= accounting.event_delta(each, epsilon=0.1, accountant=accountant) < 1e-6
        fixed = [dp_accounting.SelfComposedDpEvent(event(100, size, Gaussian(noise)), 2) for size in (10, 100)]
        for each in sampled(0.1, noise, 2), *fixed:
            assert accounting.event_epsilon(each, delta=1e-9, accountant=accountant, relation="replace_one") < 0.02
    for rate in 5e-324, 1e-310, 2.3e-308:
        mixture = MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [1 - rate, rate])
        for each in GroupGaussianDpEvent(1.0, rate, 4), mixture:
            assert 0 <= accounting.event_epsilon(each, delta=1e-9, accountant=accountant) < 0.1
    assert 0 < accounting.gdp.delta(5e-324, epsilon=0) < 1e-299


@pytest.mark.parametrize("noise, steps", [(1e5, 10**9), (1e7, 10**13), (1e8, 10**15)])
@pytest.mark.parametrize("rank, blocks", [(1, 1), (8, 1), (64, 3), (1000, 1)])
def test_projections_with_tiny_divergences_are_not_free(noise, steps, rank, blocks):
    """ln of a moment near 1 rounded to a negative number, for which dp-accounting returns an epsilon of 0."""
    projected, plain = (
        accounting.event_epsilon(dp_accounting.SelfComposedDpEvent(each, steps), delta=1e-5, accountant="rdp")
        for each in (ProjectedGaussianDpEvent(noise, 1.0, rank, blocks), Gaussian(noise))
    )
    assert projected > 0.999 * plain > 1


def test_error_feedback_with_tiny_divergences_is_not_free():
    """The sum of all releases moves by 2,000 q = 0.002 in 4.5e7 on average: delta at 0 is above 1.7e-11."""
    event = ErrorFeedbackDpEvent(1e6, 0.5, 2.0, 2000, 2000, dpx.PoissonSampling(examples=10**6, batch_size=1))
    assert accounting.event_epsilon(event, delta=1e-13, accountant="rdp") > 1e-11


def test_zero_noise_bills_infinity_and_no_steps_nothing():
    for sigmas, expected in (([1.0, 0.0], math.inf), ([1e-9, 2.0], math.inf)):
        assert accounting.schedule_epsilon(sigmas, sampling_rate=0.1, delta=1e-5).upper == expected
        assert accounting.schedule_epsilon(sigmas, sampling_rate=0.1, delta=1e-5, accountant="rdp").upper == expected
        assert accounting.schedule_delta(sigmas, sampling_rate=0.1, epsilon=3.0).upper == 1.0
    assert accounting.schedule_epsilon([1.0, 0.0], sampling_rate=0.1, delta=1e-5).lower == math.inf
    unused = accounting.schedule_epsilon([1.0, 0.0], sampling_rate=0.1, delta=1e-5, counts=[1, 0])
    assert 0 < unused.upper < 10
    for accountant in ("pld", "rdp"):
        nothing = accounting.schedule_epsilon([1.0], sampling_rate=0.1, delta=1e-5, counts=[0], accountant=accountant)
        assert (nothing.lower, nothing.upper) == (0.0, 0.0)


BAD = {
    "negative noise": dict(noise_multipliers=[1.0, -0.5]),
    "NaN noise": dict(noise_multipliers=[1.0, math.nan]),
    "infinite noise": dict(noise_multipliers=[math.inf]),
    "matrix": dict(noise_multipliers=np.ones((2, 2))),
    "rate 0": dict(sampling_rate=0.0),
    "rate above 1": dict(sampling_rate=1.1),
    "NaN rate": dict(sampling_rate=math.nan),
    "rates of another length": dict(sampling_rate=[0.1, 0.2, 0.3]),
    "counts of another length": dict(counts=[1, 2, 3]),
    "negative count": dict(counts=[1, -1]),
    "fractional count": dict(counts=[1.5, 1.0]),
    "delta 1": dict(delta=1.0),
    "delta 0": dict(delta=0.0),
    "NaN delta": dict(delta=math.nan),
    "accountant": dict(accountant="clt"),
    "relation": dict(relation="swap"),
    "buckets": dict(buckets=0),
    "words": dict(noise_multipliers=["1.0", "2.0"]),
    "a number beyond float64": dict(delta=10**400),
    "function": dict(noise_multipliers=lambda step: 1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    good = dict(noise_multipliers=[1.0, 2.0], sampling_rate=0.1, delta=1e-5)
    with pytest.raises(ValueError, match=r"must|got"):
        accounting.schedule_epsilon(**(good | BAD[name]))


def test_traced_schedules_are_refused():
    import jax
    import jax.numpy as jnp

    def traced(x):
        accounting.schedule_epsilon(x, sampling_rate=0.1, delta=1e-5)
        return x

    with pytest.raises(ValueError, match="known before the run"):
        jax.jit(traced)(jnp.ones(3))
    with pytest.raises(ValueError, match="known before the run"):
        jax.jit(lambda x: traced([x, 1.0])[0])(jnp.ones(()))
    known = accounting.schedule_epsilon(jnp.ones(3), sampling_rate=0.1, delta=1e-5)
    assert known == accounting.schedule_epsilon(np.ones(3), sampling_rate=0.1, delta=1e-5)
    assert float(known) == known.upper


def log_delta_of_one(epsilon, sigma, rate):
    """ln delta of one step with an example removed, in closed form, float64 (n,); epsilon may be negative."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_excess = np.where(epsilon > 30, epsilon, np.log(np.maximum(np.expm1(np.minimum(epsilon, 30)) + rate, 0)))
        cut = sigma**2 * (log_excess - np.log(rate)) + 0.5
        one = np.log(rate) + stats.norm.logsf(cut, 1, sigma)
        zero = log_excess + stats.norm.logsf(cut, 0, sigma)
        return np.where(
            log_excess == -np.inf, np.log(-np.expm1(np.minimum(epsilon, 0))), one + np.log(-np.expm1(zero - one))
        )


def epsilon_of_two(sigma, rate, delta):
    """Of two steps: the mean of delta(epsilon - the loss of the first step), by quadrature in logarithms."""
    x = np.linspace(-12 * sigma, 1 + 40 * sigma, 200_001)
    log_p = np.logaddexp(
        np.log1p(-rate) + stats.norm.logpdf(x, 0, sigma), np.log(rate) + stats.norm.logpdf(x, 1, sigma)
    )
    loss = log_p - stats.norm.logpdf(x, 0, sigma)

    def excess(epsilon):
        logs = log_p + log_delta_of_one(epsilon - loss, sigma, rate)
        return special.logsumexp(logs) + np.log(x[1] - x[0]) - np.log(delta)

    top = 1e-3
    while excess(top) > 0:
        top *= 2
    return optimize.brentq(excess, top / 2, top, xtol=1e-9)


@pytest.mark.parametrize(("sigma", "rate"), [(0.3, 0.01), (0.1, 0.5), (0.05, 0.9), (1.0, 0.01)])
@pytest.mark.parametrize("delta", [1e-5, 1e-18, 1e-100])
@pytest.mark.long_cases("1e-100-0.1", "1e-18", "1e-05", "1e-100-0.05", "1e-100-0.3")
def test_two_steps_at_large_epsilon_and_tiny_delta(sigma, rate, delta):
    """And a sample of fixed size costs at least as much, at twice the noise on the sum."""
    truth = epsilon_of_two(sigma, rate, delta)
    steps = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), 2
    )
    bill = accounting.event_epsilon(steps, delta=delta)
    assert truth * (1 - 1e-6) <= bill <= truth * 1.002 + 1e-4
    assert bill <= accounting.event_epsilon(steps, delta=delta, accountant="rdp") < math.inf
    sample = dp_accounting.SampledWithoutReplacementDpEvent(
        10_000, round(1e4 * rate), dp_accounting.GaussianDpEvent(sigma)
    )
    fixed = dp_accounting.SelfComposedDpEvent(sample, 2)
    assert (
        truth * (1 - 1e-6)
        <= accounting.event_epsilon(fixed, delta=delta, relation="replace_one")
        <= truth * 1.01 + 0.02
    )


@pytest.mark.parametrize("delta", [1e-5, 1e-18])
@pytest.mark.parametrize(
    ("sigma", "steps", "most"), [(0.1, 10, 1.001), (1.0, 400, 1.001), (30.0, 10**6, 1.002), (1e3, 10**9, 1.04)]
)
@pytest.mark.long_cases("1000.0-")
def test_many_steps_at_large_epsilon_and_tiny_delta(sigma, steps, most, delta):
    """Epsilon is 284 to 847 for a Gaussian whose sampling rate is 1 but for 1e-12, against the closed form."""
    event = dp_accounting.PoissonSampledDpEvent(1 - 1e-12, dp_accounting.GaussianDpEvent(sigma))
    bill = accounting.event_epsilon(dp_accounting.SelfComposedDpEvent(event, steps), delta=delta)
    truth = accounting.gdp.epsilon(math.sqrt(steps) / sigma, delta=delta)
    assert truth * (1 - 1e-9) <= bill <= most * truth
