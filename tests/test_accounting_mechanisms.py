"""Bills, calibration, reports and curves of mechanisms, by any object with an event and a sampling."""

import dataclasses
import functools
import html
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

import dpx
from dpx import accounting, reports
from dpx.accounting.checks import Accountant
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import ReleaseCount
from dpx.accounting.pld.losses import SampledGaussian
from dpx.accounting.selection import OneOfDpEvent
from dpx.papers.correlated_noise.cost import CyclicBandedDpEvent
from dpx.papers.d2p2_sgd.cost import ProjectedGaussianDpEvent
from dpx.reports import curves
from dpx.reports.report import report_sections
from dpx.values import rounded_up
from tests.devices import printed_by

Gaussian = dp_accounting.GaussianDpEvent


class Stated:
    """A sampling that states its event, and draws nothing."""

    has_weights, truncates, draws_examples_independently, group_count, steps_per_exact_epoch = False, False, False, 1, 0


@dataclass(frozen=True)
class Poisson(Stated):
    rate: float = 0.01
    relation: ClassVar[str] = "zero_out"

    def event(self, sigma):
        return dp_accounting.PoissonSampledDpEvent(self.rate, Gaussian(sigma))


@dataclass(frozen=True)
class Known(Poisson):
    """It states how many examples there are."""

    examples: int = 1000


@dataclass(frozen=True)
class Shuffled(Stated):
    relation: ClassVar[str] = "zero_out"

    def event(self, sigma):
        return Gaussian(sigma)


@dataclass(frozen=True)
class Fixed(Stated):
    examples: int = 1000
    batch: int = 10
    relation: ClassVar[str] = "replace_one"

    def event(self, sigma):
        return dp_accounting.SampledWithoutReplacementDpEvent(self.examples, self.batch, Gaussian(sigma / 2))


@dataclass(frozen=True)
class Mechanism:
    """Noise multiplier `noise * decay^step`."""

    noise: float
    sampling: Poisson | Shuffled | Fixed = Poisson()
    decay: float = 1.0

    def event(self, steps):
        if self.decay == 1:
            return dp_accounting.SelfComposedDpEvent(self.sampling.event(self.noise), steps)
        return dp_accounting.ComposedDpEvent(
            [self.sampling.event(float(sigma)) for sigma in self.noise * self.decay ** np.arange(steps)]
        )


@pytest.mark.usefixtures("exact_noise")
def test_epsilon_and_delta_of_a_mechanism():
    mechanism = Mechanism(1.54, Poisson(0.02))
    assert accounting.epsilon(mechanism, 2000, delta=1e-5) == pytest.approx(2.75301, abs=2e-4)
    assert accounting.epsilon(mechanism, 2000, delta=1e-5, accountant="rdp") == pytest.approx(3.00260, abs=2e-4)
    assert accounting.delta(mechanism, 2000, epsilon=2.75301) == pytest.approx(1e-5, rel=2e-3)
    assert accounting.epsilon(mechanism, 0, delta=1e-5) == 0
    assert accounting.delta(mechanism, 0, epsilon=1.0) == 0
    for accountant in ("pld", "rdp"):
        assert accounting.epsilon(Mechanism(0.0), 3, delta=1e-5, accountant=accountant) == math.inf
        assert accounting.delta(Mechanism(0.0), 3, epsilon=1.0, accountant=accountant) == 1


@pytest.mark.long
def test_many_distinct_steps_take_the_fast_path():
    mechanism = Mechanism(3.0, decay=0.9999)
    exact = accounting.schedule_epsilon(3.0 * 0.9999 ** np.arange(3000), sampling_rate=0.01, delta=1e-6, buckets=128)
    epsilon = accounting.epsilon(mechanism, 3000, delta=1e-6)
    assert exact.lower <= epsilon <= exact.upper


def test_fewer_buckets_bill_more():
    event = Mechanism(3.0, decay=0.98).event(100)
    exact, few = (accounting.event_epsilon(event, delta=1e-6, buckets=buckets) for buckets in (100, 3))
    assert exact * 1.01 < few < exact * 2


@pytest.mark.usefixtures("exact_noise")
def test_releases_of_nested_trees_are_counted():
    one = Poisson().event(1.5)
    tree = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.NoOpDpEvent(),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(one, 2), Gaussian(20.0)]), 7
            ),
            dp_accounting.PoissonSampledDpEvent(0.0, Gaussian(1.0)),
            one,
        ]
    )
    expected = accounting.schedule_epsilon([1.5, 20.0], sampling_rate=[0.01, 1.0], counts=[15, 7], delta=1e-5)
    assert accounting.event_epsilon(tree, delta=1e-5) == pytest.approx(expected.upper, rel=1e-9)
    assert accounting.event_epsilon(dp_accounting.NonPrivateDpEvent(), delta=1e-5) == math.inf


def test_several_releases_of_one_poisson_sample_are_one():
    """As dp-accounting composes them by RDP (its PLD refuses), and above what independent samples would cost."""
    inner = dp_accounting.ComposedDpEvent([Gaussian(2.0), dp_accounting.SelfComposedDpEvent(Gaussian(3.0), 2)])
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.05, inner), 30)
    by_rdp = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert accounting.event_epsilon(event, delta=1e-5, accountant="rdp") == pytest.approx(by_rdp, rel=1e-9)
    assert from_event(event).all_drawn_independently
    independent = dp_accounting.ComposedDpEvent([Poisson(0.05).event(s) for s in (2.0, 3.0, 3.0)] * 30)
    for relation in ("add_or_remove", "zero_out", "replace_one"):
        bill, less = (accounting.event_epsilon(one, delta=1e-5, relation=relation) for one in (event, independent))
        assert bill > less


def test_two_releases_of_one_poisson_sample_by_integration_over_the_plane():
    rate, sigmas = 0.2, (1.5, 2.0)
    event = dp_accounting.PoissonSampledDpEvent(
        rate, dp_accounting.ComposedDpEvent([Gaussian(sigma) for sigma in sigmas])
    )
    x, y = (np.linspace(-12, 13, 1501)[:, None], np.linspace(-15, 16, 1501))
    area = float((x[1, 0] - x[0, 0]) * (y[1] - y[0]))
    without, taken, other = (
        stats.norm.pdf(x, at, sigmas[0]) * stats.norm.pdf(y, at, sigmas[1]) * area for at in (0, 1, -1)
    )
    sampled, replaced = ((1 - rate) * without + rate * one for one in (taken, other))
    for epsilon in (0.05, 0.3, 0.6):
        grow = math.exp(epsilon)
        for relation, pairs in (
            ("add_or_remove", [(sampled, without), (without, sampled)]),
            ("replace_one", [(sampled, replaced)]),
        ):
            truth = max(np.maximum(0, upper - grow * lower).sum() for upper, lower in pairs)
            found = accounting.event_delta(event, epsilon=epsilon, relation=relation)
            assert found == pytest.approx(truth, rel=1e-3, abs=1e-9)


def test_poisson_samples_without_noise_and_without_releases():
    for inner in (Gaussian(0.0), dp_accounting.NonPrivateDpEvent()):
        composed = dp_accounting.ComposedDpEvent([Gaussian(2.0), inner])
        event = dp_accounting.PoissonSampledDpEvent(0.05, composed)
        assert accounting.event_epsilon(event, delta=1e-5) == math.inf
        assert accounting.event_delta(event, epsilon=5.0) == 1.0
    nothing = dp_accounting.ComposedDpEvent([dp_accounting.NoOpDpEvent()])
    assert accounting.event_epsilon(dp_accounting.PoissonSampledDpEvent(0.05, nothing), delta=1e-5) == 0
    never = dp_accounting.PoissonSampledDpEvent(0.0, dp_accounting.ComposedDpEvent([Gaussian(0.0), Gaussian(1.0)]))
    assert accounting.event_epsilon(never, delta=1e-5) == 0
    other = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.LaplaceDpEvent(1.0))
    assert not from_event(other).all_drawn_independently
    assert 0 < accounting.event_epsilon(other, delta=1e-5) < 1


@pytest.mark.parametrize("count", [1.99, 2.0, -3, math.nan, True])
def test_a_release_is_repeated_a_whole_number_of_times(count):
    """1.99 releases cost as much as one, and 5 and -3 together as two."""
    release = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    repeated = dp_accounting.SelfComposedDpEvent(release, count)
    for event in (repeated, dp_accounting.ComposedDpEvent([release, repeated])):
        with pytest.raises(ValueError, match="count of a SelfComposedDpEvent must be a whole number of at least 0"):
            accounting.event_epsilon(event, delta=1e-5)
    often = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1e9), np.int64(2**32))
    for _ in range(2):  # beyond 2^63, where int64 would begin again
        often = dp_accounting.SelfComposedDpEvent(often, np.int64(2**32))
    assert from_event(often).losses("zero_out").popitem()[1] == 2**96


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.dp_event.ZCDpEvent(math.nan),  # its epsilon was 0
        dp_accounting.dp_event.SingleEpochTreeAggregationDpEvent(math.nan, 100),
        CyclicBandedDpEvent(math.nan, 0.1, 3, (1.0,)),
        CyclicBandedDpEvent(2.0, -0.1, 3, (1.0,)),
        ProjectedGaussianDpEvent(2.0, 1.5, 200),
    ],
)
def test_events_with_numbers_out_of_range_are_refused(event):
    for refused in (event, dp_accounting.PoissonSampledDpEvent(0.1, event)):
        with pytest.raises(ValueError, match=r"of a \w+ must be a number at least 0.*, got (nan|-0.1|1.5)"):
            accounting.event_epsilon(refused, delta=1e-5, relation="zero_out")


def test_numbers_of_few_digits_cost_as_floats_do():
    """float16 and float32 arithmetic rounds shares of delta, and merged noise multipliers, up."""
    full, sampled = Mechanism(20.0, Shuffled()), Mechanism(4.0, Known())
    for ask in (
        lambda delta: accounting.epsilon(full, 100, delta=delta),
        lambda delta: accounting.epsilon(full, 100, delta=delta, accountant="rdp"),
        lambda delta: accounting.max_steps(full, epsilon=1.0, delta=delta),
        lambda delta: curves.epsilon_over_steps(full, 100, delta=delta, points=2).epsilon[-1],
        lambda delta: accounting.epsilon(sampled, 100, delta=delta),
        lambda delta: accounting.dp_sgd_epsilon(
            examples=1000, batch_size=10, noise_multiplier=4.0, steps=100, delta=delta
        ),
    ):
        for delta in (np.float16(1e-5), np.float32(1e-6)):
            assert ask(delta) == ask(float(delta))
    merged = [dp_accounting.SelfComposedDpEvent(Gaussian(noise), 3) for noise in (np.float16(1999), 1999.0)]
    less, bill = (accounting.event_epsilon(dp_accounting.PoissonSampledDpEvent(0.5, e), delta=1e-5) for e in merged)
    assert less == bill > 0
    several = [
        accounting.schedule_epsilon([40.0], sampling_rate=0.01, delta=1e-5, records=n) for n in (np.uint8(200), 200)
    ]
    assert several[0] == several[1]
    budget = dpx.Budget(epsilon=np.float16(1), delta=np.float32(1e-5), steps=3, numbers=np.int32(7))
    assert [type(value) for value in (budget.epsilon, budget.delta, budget.numbers)] == [float, float, int]
    assert accounting.event_epsilon(Gaussian(1e200), delta=0) == math.inf
    tiny, (shifts, chances) = np.float16(6e-8), np.array([[0, 6e-8], [0.75, 0.25]], np.float16)  # whose product is 0
    assert accounting.event_epsilon(MixtureOfGaussiansDpEvent(tiny, shifts, chances), delta=1e-5) > 1
    few = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, Gaussian(np.float16(0.9)))
    assert float(from_event(few).largest_shift("replace_one")) == 1 / float(np.float16(0.9))


@pytest.mark.parametrize("collect", [iter, set])
def test_events_that_are_not_found_at_every_reading_are_refused(collect):
    """A score that is read once would be free in the search, and the second epsilon of a run 0."""
    releases = [dp_accounting.GaussianDpEvent(2.0)] * 3
    event, chosen = dp_accounting.ComposedDpEvent(collect(releases)), OneOfDpEvent(collect(releases))
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, event)
    for refused in (event, sampled, dp_accounting.ComposedDpEvent([event]), chosen):
        with pytest.raises(ValueError, match="events of a .* must be in a list, a tuple or an array"):
            accounting.event_epsilon(refused, delta=1e-5)
    with pytest.raises(ValueError, match="events of a ComposedDpEvent must be in a list, a tuple or an array"):
        accounting.best_of(dp_accounting.GaussianDpEvent(5.0), trials=5, score_on=event)


@pytest.mark.parametrize("counts", [[2**62] * 4, [2**53, 2], np.array([2**63 + 1], np.uint64)])
@pytest.mark.long_cases("counts0", "counts1")
def test_more_releases_than_float64_counts_are_refused(counts):
    """2^64 of them wrapped around to none, whose epsilon is 0."""
    noise = [1e9] * len(counts)
    for accountant in ("pld", "rdp"):
        with pytest.raises(ValueError, match="releases must be at most 9007199254740992"):
            accounting.schedule_epsilon(noise, counts=counts, sampling_rate=0.1, delta=1e-5, accountant=accountant)
    release = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1e9))
    event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(release, int(count)) for count in counts])
    with pytest.raises(ValueError, match="releases must be at most 9007199254740992"):
        accounting.event_epsilon(event, delta=1e-5)
    assert accounting.schedule_epsilon(1e9, counts=2**53, sampling_rate=0.1, delta=1e-5, exact_noise=True).upper > 0.02


def test_other_events_go_to_dp_accounting():
    assert accounting.event_epsilon(dp_accounting.LaplaceDpEvent(2.0), delta=1e-9) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="knows no cost of"):
        accounting.event_epsilon(dp_accounting.UnsupportedDpEvent(), delta=1e-5)
    with pytest.raises(ValueError, match="knows no cost of"):
        accounting.event_epsilon(dp_accounting.ZCDpEvent(0.1), delta=1e-5, accountant="pld")
    with pytest.raises(ValueError, match="knows no cost of"):
        accounting.event_epsilon(
            dp_accounting.LaplaceDpEvent(2.0), delta=1e-5, accountant="rdp", relation="replace_one"
        )
    by_rdp = accounting.event_epsilon(dp_accounting.ZCDpEvent(0.1), delta=1e-5, accountant="rdp")
    assert 0 < by_rdp < 0.1 + 2 * math.sqrt(0.1 * math.log(1e5))
    assert accounting.event_epsilon(dp_accounting.ZCDpEvent(0.1), delta=1e-5) == by_rdp


@pytest.mark.usefixtures("exact_noise")
def test_relations():
    poisson, shuffled, fixed = Mechanism(1.5), Mechanism(3.0, Shuffled()), Mechanism(4.0, Fixed())
    own = accounting.epsilon(poisson, 100, delta=1e-5)
    assert accounting.epsilon(poisson, 100, delta=1e-5, relation="add_or_remove") == own
    assert accounting.epsilon(poisson, 100, delta=1e-5, relation="replace_one") > 1.5 * own
    for accountant in ("pld", "rdp"):
        with pytest.raises(ValueError, match="would change"):
            accounting.epsilon(shuffled, 2, delta=1e-5, relation="add_or_remove", accountant=accountant)
    doubled = accounting.epsilon(shuffled, 2, delta=1e-5, relation="replace_one")
    assert doubled == pytest.approx(accounting.gdp.epsilon(2 * math.sqrt(2) / 3, delta=1e-5))
    for accountant in ("tightest", "rdp"):
        with pytest.raises(ValueError, match="replace_one"):
            accounting.epsilon(fixed, 10, delta=1e-5, relation="add_or_remove", accountant=accountant)


def test_the_tightest_is_the_least_that_is_valid():
    for mechanism in (Mechanism(1.5), Mechanism(4.0, Fixed())):
        by_pld, by_rdp = (accounting.epsilon(mechanism, 10, delta=1e-5, accountant=name) for name in ("pld", "rdp"))
        assert accounting.epsilon(mechanism, 10, delta=1e-5) == by_pld < by_rdp
    # A release without a privacy loss distribution: all are billed by RDP.
    best = accounting.best_of(Poisson().event(2.0), trials=3, score_on=Gaussian(20.0), relation="add_or_remove")
    mixed = dp_accounting.ComposedDpEvent([best.event, Gaussian(6.0)])
    found = accounting.event_epsilon(mixed, delta=1e-5)
    assert 0 < found == accounting.event_epsilon(mixed, delta=1e-5, accountant="rdp")
    with pytest.raises(ValueError, match="no privacy loss distribution"):
        accounting.event_epsilon(mixed, delta=1e-5, accountant="pld")
    noise = accounting.calibrate(lambda x: Mechanism(x, Fixed()), steps=20, epsilon=1.0, delta=1e-5)
    assert 0.999 <= accounting.epsilon(Mechanism(noise, Fixed()), 20, delta=1e-5) <= 1


@pytest.mark.parametrize("relation", ["add_or_remove", "zero_out"])
def test_samples_of_a_fixed_size_are_billed_for_replacing_an_example_only(relation):
    with pytest.raises(ValueError, match='a known cost only under relation "replace_one"'):
        accounting.event_epsilon(Mechanism(4.0, Fixed()).event(10), delta=1e-5, relation=relation)


def test_replacing_an_example_costs_twice_the_sensitivity_by_rdp_too():
    """dp-accounting's RDP of a Gaussian does not double under REPLACE_ONE: it would under-report."""
    for mechanism in (Mechanism(1.5), Mechanism(3.0, Shuffled())):
        by_pld, by_rdp = (
            accounting.epsilon(mechanism, 10, delta=1e-5, relation="replace_one", accountant=name)
            for name in ("pld", "rdp")
        )
        once = accounting.epsilon(mechanism, 10, delta=1e-5, relation="zero_out", accountant="rdp")
        assert max(by_pld, 1.2 * once) <= by_rdp
    halved = accounting.epsilon(Mechanism(1.5, Shuffled()), 10, delta=1e-5, relation="zero_out", accountant="rdp")
    assert by_rdp == pytest.approx(halved, rel=1e-9)


def test_a_new_cost_is_one_class():
    class TwiceDpEvent(dp_accounting.DpEvent, accounting.PrivacyLoss):
        """Two unsampled releases with noise 4."""

        @property
        def release_count(self):
            return ReleaseCount(2, 2.0)

        def step_loss(self, relation):
            if relation == "replace_one":
                raise ValueError(f"relation must not be replace_one for {self}")
            return SampledGaussian(4 / math.sqrt(2), 1.0, relation)

        def __eq__(self, other):
            return isinstance(other, TwiceDpEvent)

        def __hash__(self):
            return 1

    tree = dp_accounting.ComposedDpEvent([TwiceDpEvent(), TwiceDpEvent(), Poisson().event(2.0)])
    for accountant in ("pld", "rdp"):
        same = dp_accounting.ComposedDpEvent([*[Gaussian(4.0)] * 4, Poisson().event(2.0)])
        expected = accounting.event_epsilon(same, delta=1e-5, accountant=accountant)
        assert accounting.event_epsilon(tree, delta=1e-5, accountant=accountant) == pytest.approx(expected, rel=1e-3)
    ledger = from_event(tree)
    assert ledger.release_count == (5, 5.0) and ledger.largest_shift("zero_out") == math.inf and not ledger.all_gaussian
    assert (ledger + ledger).losses("zero_out") == {loss: 2 * n for loss, n in ledger.losses("zero_out").items()}
    assert any(line.startswith("2 x ") for line in ledger.words())
    with pytest.raises(ValueError, match="must not be"):
        accounting.event_epsilon(tree, delta=1e-5, relation="replace_one")


CASES: dict[str, tuple[Any, int, Accountant]] = {
    "constant": (lambda x: Mechanism(x, Poisson(0.02)), 500, "pld"),
    "schedule": (lambda x: Mechanism(x, decay=0.95), 40, "pld"),
    "unsampled": (lambda x: Mechanism(x, Shuffled()), 3, "pld"),
    "rdp": (lambda x: Mechanism(x, decay=0.97), 80, "rdp"),
    "without replacement": (lambda x: Mechanism(x, Fixed()), 20, "pld"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("epsilon", [0.3, 4.0])
@pytest.mark.long_cases("4.0", "0.3-schedule")
def test_calibrated_noise_is_the_least_on_the_safe_side(name, epsilon):
    make, steps, accountant = CASES[name]
    noise = accounting.calibrate(make, steps=steps, epsilon=epsilon, delta=1e-5, accountant=accountant)
    spent = accounting.epsilon(make(noise), steps, delta=1e-5, accountant=accountant)
    assert epsilon * (1 - 2e-4) <= spent <= epsilon
    assert accounting.epsilon(make(noise * 0.998), steps, delta=1e-5, accountant=accountant) > epsilon


def test_calibrating_a_mechanism_under_another_relation():
    make = CASES["constant"][0]
    noise = accounting.calibrate(make, steps=200, epsilon=2.0, delta=1e-5, relation="replace_one")
    assert accounting.epsilon(make(noise), 200, delta=1e-5, relation="replace_one") <= 2.0
    assert noise > accounting.calibrate(make, steps=200, epsilon=2.0, delta=1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.long_cases("pld")
def test_steps_that_are_never_taken_do_not_matter(accountant):
    options = {"epsilon": 1.0, "delta": 1e-5, "accountant": accountant}
    used = accounting.calibrate_schedule([1.0], sampling_rate=0.01, counts=[100], **options)
    assert accounting.calibrate_schedule([0.0, 0.0, 1.0], sampling_rate=0.01, counts=[0, 0, 100], **options) == used


def test_the_scale_of_a_schedule_does_not_depend_on_its_units():
    small = accounting.calibrate_schedule([3e-4, 1e-4], sampling_rate=0.1, counts=[50, 50], epsilon=1, delta=1e-5)
    large = accounting.calibrate_schedule([3e4, 1e4], sampling_rate=0.1, counts=[50, 50], epsilon=1, delta=1e-5)
    assert small.scale == pytest.approx(large.scale * 1e8, rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        dict(epsilon=0.0),
        dict(epsilon=-1.0),
        dict(epsilon=math.inf),
        dict(epsilon=math.nan),
        dict(delta=0.0),
        dict(delta=1.0),
        dict(steps=0),
        dict(steps=2.5),
        dict(accountant="clt"),
        dict(tolerance=0.0),
    ],
)
def test_bad_budgets_are_refused(change):
    with pytest.raises(ValueError, match="must be"):
        accounting.calibrate(**(dict(make=Mechanism, steps=10, epsilon=1.0, delta=1e-5) | change))
    if "steps" not in change:
        with pytest.raises(ValueError, match="must be"):
            accounting.calibrate_schedule([1.0], sampling_rate=0.1, **(dict(epsilon=1.0, delta=1e-5) | change))


@pytest.mark.parametrize(
    "batch_size, records, budget",
    [
        (0.01791159466370403, 1, dict(epsilon=0.07671538497399666, delta=2.195547183705983e-06, steps=13)),
        (0.2860877085065363, 3, dict(epsilon=0.21171977642272063, delta=1.9171121613296497e-05, steps=21)),
    ],
)
@pytest.mark.filterwarnings("ignore:batch_size .* is below 1:UserWarning")
def test_costs_that_rounding_alone_tells_apart_do_not_stop_a_search(batch_size, records, budget):
    sampling = dpx.PoissonSampling(examples=1000, batch_size=batch_size)
    given = dpx.Budget(**budget, accountant="rdp", records=records)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=given, sampling=sampling, key=dpx.secret_key())
    found = dpx.epsilon(mechanism, budget["steps"], delta=budget["delta"], accountant="rdp")
    assert 0.9 * budget["epsilon"] < found <= budget["epsilon"]


def test_unreachable_budgets_are_refused():
    with pytest.raises(ValueError, match="cannot be met"):
        accounting.calibrate(lambda x: Mechanism(min(x, 2.0)), steps=1000, epsilon=0.1, delta=1e-5)
    with pytest.raises(ValueError, match="shape must be positive"):
        accounting.calibrate_schedule([1.0, 0.0], sampling_rate=0.1, epsilon=1.0, delta=1e-5)


def test_a_budget_below_the_rounding_says_so():
    sampling = dpx.PoissonSampling(examples=1000, batch_size=50)
    build = functools.partial(dpx.dp_sgd, clip_norm=1.0, sampling=sampling, key=dpx.secret_key())
    with pytest.raises(ValueError, match=r"cannot be met by any noise: .* which alone costs 0.0\d+ in 10000 releases"):
        build(noise_multiplier=dpx.Budget(epsilon=1e-4, delta=1e-5, steps=10_000))


def test_a_budget_that_no_noise_uses_up_warns():
    """With less noise, an example moves a release by more deviations than the noise of a program has."""
    sampling = dpx.FullBatch(examples=10**4)
    build = functools.partial(dpx.dp_sgd, clip_norm=1.0, sampling=sampling, key=dpx.secret_key())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        most = [
            build(noise_multiplier=dpx.Budget(epsilon=e, delta=1e-5, steps=1)).noise_multiplier for e in (5, 15, 25)
        ]
    assert most[0] > most[1] > most[2] > 0.2
    with pytest.warns(
        UserWarning,
        match=r"epsilon=1000000.0 cannot be used up: the least noise with a known cost is noise_multiplier=\d",
    ):
        least = build(noise_multiplier=dpx.Budget(epsilon=1e6, delta=1e-5, steps=1))
    assert least.noise_multiplier < most[2] and dpx.epsilon(least, 1, delta=1e-5) < 1000
    assert dpx.epsilon(build(noise_multiplier=0.99 * least.noise_multiplier), 1, delta=1e-5) == math.inf


def test_report(tmp_path, monkeypatch):
    mechanism = Mechanism(3.0, decay=0.999)
    report = reports.privacy_report(mechanism, 200, delta=1e-6)
    assert report.epsilon["pld"] == accounting.epsilon(mechanism, 200, delta=1e-6)
    assert report.epsilon["rdp"] == accounting.epsilon(mechanism, 200, delta=1e-6, accountant="rdp")
    read = json.loads(report.to_json())
    assert read["steps"] == 200 and read["relation"] == "zero_out" and read["unit"] == "one example"
    assert {"python", "jax", "optax", "dp-accounting", "numpy", "dpx"} <= set(read["versions"])
    assert len(read["events"]) == 1 and "200 distinct" in read["events"][0]
    markdown = report.to_markdown()
    for words in (
        "finitely many values",
        "hyperparameters",
        "not private",
        "secret",
        "nulling one example",
        "sizes of the batches",
        "cipher",
        "Poisson(rate=0.01)",
    ):
        assert words in markdown
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = report.write("~/new", name="bill")
    assert [*paths] == [tmp_path / "new" / "bill.json", tmp_path / "new" / "bill.md"]
    assert json.loads(paths[0].read_text()) == read


def test_report_of_no_noise_is_valid_json():
    report = reports.privacy_report(Mechanism(0.0), 5, delta=1e-6, unit="one patient")
    read = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["epsilon"] == {"pld": "inf", "rdp": "inf"}
    assert "NO guarantee for one patient" in report.to_markdown() and "kept" not in str(report)
    assert "An attacker may be certain whether one patient took part" in " ".join(str(report).split())


@pytest.mark.parametrize("noise", [0.6, 3.0, 50.0])
def test_a_report_begins_with_a_bet(noise):
    """How often an attacker is right at most, in a box before all else; specialists' sections are folded."""
    report = reports.privacy_report(Mechanism(noise), 50, delta=1e-6, unit="patient")
    first, page = report_sections(report)[0], report.to_html()
    (right,) = re.findall(r"is right at most (\d+) times", first.sentences[0])
    assert 50 + 50 * report.attacks.advantage <= int(right) < 51 + 50 * report.attacks.advantage
    of_two = re.findall(r"right at most (\d+) times in 100", first.sentences[1])
    assert [2 * int(right) - 51 <= int(two) <= 2 * int(right) - 50 for two in of_two] == [True] * len(of_two)
    assert bool(of_two) == (report.attacks.advantage <= 0.48)
    assert first.form == "box" and ("who is protected", "one patient") in first.rows
    assert page.index('<div class="box">') < page.index(first.sentences[0]) < page.index("</div>") < page.index("<svg")
    folded = re.findall(r"<details>\n?<summary>(.*?)</summary>", page)
    assert folded == ["How much is spent", "In the words of the code", "Mechanism"]
    assert page.count("<details>") == page.count("</details>") == 3


def test_all_forms_of_a_report_hold_the_same_facts():
    """Plain words first, each number with its unit; every sentence and number is in the text, Markdown and HTML."""
    for sampling in (Poisson(0.01), Fixed(), Shuffled()):
        report = reports.privacy_report(Mechanism(3.0, sampling), 9, delta=1e-6, unit="patient", name="a|b *c* <i>")
        sections = report_sections(report)
        plain = [section for section in sections if section.title != "In the words of the code"]
        assert sections.index(plain[-2]) == len(plain) - 2  # the code words stand below
        sentences = [sentence for section in plain for sentence in section.sentences]
        assert all("patient" in sentence for sentence in sentences if re.search(r"\d", sentence))
        forms = str(report), re.sub(r"\\(.)", r"\1", report.to_markdown()), html.unescape(report.to_html())
        facts = [words for section in sections for words in (section.title, *section.sentences, *sum(section.rows, ()))]
        for form in forms:
            for words in (*facts, "a|b *c* <i>", report.date, report.mechanism):
                assert " ".join(words.split()) in " ".join(form.split())
        assert "<i>" not in report.to_html() and "| a\\|b \\*c\\* \\<i> |" in report.to_markdown()
        assert max(map(len, str(report).split("Mechanism\n")[0].splitlines())) <= 100
        assert report._repr_markdown_() == report.to_markdown() and len(repr(report)) < 120
    with pytest.raises(ValueError, match="name must be"):
        dataclasses.replace(report, name="two\nlines")


@pytest.mark.parametrize(
    ("target", "delta", "verdict"),
    [
        (9.0, 1e-6, "the run kept it"),
        (9.0, 1e-7, "the run kept it"),
        (0.01, 1e-6, "spent MORE"),
        (9.0, 1e-5, "cannot be compared"),
        (None, 1e-6, "No epsilon was set"),
    ],
)
def test_a_report_holds_what_was_spent_against_the_target(target, delta, verdict):
    """Epsilon is at most so much at the budget's delta, 1e-6; a larger delta of the report would say less."""
    budget = target and dpx.Budget(epsilon=target, delta=1e-6, steps=9)
    report = dataclasses.replace(reports.privacy_report(Mechanism(3.0), 9, delta=delta), budget=budget)
    assert verdict in " ".join(str(report).split())
    assert json.loads(report.to_json())["budget"] == (budget and dataclasses.asdict(budget))


def test_printed_bounds_hold():
    for value in (0.0, 1.99998703, 7.39000001, 1e-5 / 3, 123456.1, 0.1):
        for digits in (3, 6):
            assert value <= float(rounded_up(value, digits)) <= value * (1 + 2 * 10 ** (1 - digits))
    assert (
        rounded_up(math.inf, 3) == "inf"
        and rounded_up(2.0, 6) == "2"
        and rounded_up(1e-5, 6) == "1e-05"
        and rounded_up(0.1, 6) == "0.1"
    )


def test_a_printed_delta_is_not_below_the_one_that_is_billed():
    report = reports.privacy_report(Mechanism(3.0), 9, delta=1.0000049e-5)
    assert "at delta 1.00001e-05" in " ".join(str(report).split())
    assert "delta 1e-05" not in str(report) + " ".join(report.attacks.sentences())


class Selected(Mechanism):
    """The best of several releases, which has no privacy loss distribution."""

    def event(self, steps):
        return accounting.best_of(Gaussian(self.noise), trials=steps, score_on="public", relation="zero_out").event


def test_report_says_which_accountant_does_not_apply():
    report = reports.privacy_report(Selected(4.0, Shuffled()), 5, delta=1e-6)
    assert report.epsilon["pld"] is None and report.epsilon["rdp"] is not None
    assert "does not apply" in report.to_markdown()
    report = reports.privacy_report(Mechanism(4.0, Fixed()), 5, delta=1e-6)
    assert report.epsilon["pld"] < report.epsilon["rdp"]
    assert "does not apply" not in report.to_markdown() and "exchanging one example" in report.to_markdown()


@pytest.mark.parametrize("accountant", ["tightest", "rdp"])
@pytest.mark.parametrize(
    ("mechanism", "epsilon"), [(Mechanism(1.1), 1.5), (Mechanism(3.0, Shuffled()), 4.0), (Mechanism(2.0, Fixed()), 2.0)]
)
def test_max_steps_are_the_most_within_the_budget(mechanism, epsilon, accountant):
    most = accounting.max_steps(mechanism, epsilon=epsilon, delta=1e-5, accountant=accountant)
    assert most >= 1 and accounting.epsilon(mechanism, most, delta=1e-5, accountant=accountant) <= epsilon
    assert accounting.epsilon(mechanism, most + 1, delta=1e-5, accountant=accountant) > epsilon


class Ending(Mechanism):
    """A schedule of 60 steps."""

    def event(self, steps):
        if steps > 60:
            raise ValueError(f"the schedule must not be asked beyond step 60, got {steps}")
        return super().event(steps)


def test_max_steps_of_no_step_of_an_ending_schedule_and_of_a_bill_that_does_not_grow():
    assert accounting.max_steps(Mechanism(0.0), epsilon=1.0, delta=1e-5) == 0
    assert accounting.max_steps(Mechanism(0.5, Shuffled()), epsilon=1.0, delta=1e-5) == 0
    within = accounting.max_steps(Mechanism(1.5), epsilon=0.2, delta=1e-5)
    assert 32 < within < 60
    assert accounting.max_steps(Ending(1.5), epsilon=0.2, delta=1e-5) == within
    assert accounting.max_steps(Ending(1.5), epsilon=5.0, delta=1e-5) == 60
    with pytest.raises(ValueError, match="must limit the steps"):
        accounting.max_steps(Mechanism(1e9, Shuffled()), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="would change"):
        accounting.max_steps(Mechanism(3.0, Shuffled()), epsilon=1.0, delta=1e-5, relation="add_or_remove")
    with pytest.raises(ValueError, match="must be positive"):
        accounting.max_steps(Mechanism(1.0), epsilon=0.0, delta=1e-5)


@pytest.mark.long
def test_a_large_delta_warns():
    known = Mechanism(4.0, Known())
    for ask in (
        lambda delta: accounting.epsilon(known, 1, delta=delta),
        lambda delta: reports.privacy_report(known, 1, delta=delta),
        lambda delta: accounting.max_steps(known, epsilon=0.5, delta=delta),
        lambda delta: accounting.calibrate(lambda x: Mechanism(x, Known()), steps=1, epsilon=1.0, delta=delta),
    ):
        ask(0.9e-3)  # warnings are errors here
        with pytest.warns(UserWarning, match="0.001 is at least 1 / examples = 1 / 1000"):
            ask(1e-3)
    with pytest.warns(UserWarning, match="0.2 is above 0.1"):
        accounting.epsilon(Mechanism(4.0), 1, delta=0.2)


@pytest.mark.long
def test_epsilon_over_steps_rises_and_ends_at_the_bill():
    mechanism = Mechanism(2.0, decay=0.995)
    curve = curves.epsilon_over_steps(mechanism, 150, delta=1e-5, points=8)
    assert len(curve.steps) == 8 and curve.steps[0] == 1 and curve.steps[-1] == 150
    assert np.all(np.diff(curve.epsilon) > 0)
    assert curve.epsilon[-1] == pytest.approx(accounting.epsilon(mechanism, 150, delta=1e-5), rel=0.02)


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize(
    ("mechanism", "steps", "accountant"),
    [
        (Mechanism(1.1), 10_000, "tightest"),  # 60,000 examples, 600 a batch
        (Mechanism(1.2), 400, "rdp"),
        (Mechanism(2.0, Poisson(1e-3)), 100, "pld"),
        (Mechanism(2.0, decay=0.97), 30, "pld"),
    ],
)
@pytest.mark.long_cases("mechanism2-100-pld", "mechanism0", "mechanism3")
def test_delta_over_epsilon_is_smooth_and_that_of_single_bills(mechanism, steps, accountant):
    epsilons = np.linspace(0, 4, 33)[::-1]
    curve = curves.delta_over_epsilon(mechanism, steps, epsilons=epsilons, accountant=accountant)
    single = [accounting.delta(mechanism, steps, epsilon=value, accountant=accountant) for value in epsilons[::4]]
    np.testing.assert_allclose(curve.delta[::4], single, rtol=3e-3, atol=1e-300)
    np.testing.assert_array_equal(curve.epsilon, epsilons)
    logs = np.log(curve.delta[::-1])
    assert np.all(np.diff(logs) < 0)
    if accountant != "rdp" and steps == 10_000:
        np.testing.assert_allclose(curve.delta[::-1][[0, 4, 8]], [0.424, 0.287, 0.173], atol=1e-3)
        assert np.all(np.diff(logs, 2) < 1e-3)  # log-concave: no step between two compositions


def test_trade_off_of_a_gaussian_has_a_closed_form():
    curve = curves.trade_off(Mechanism(2.0, Shuffled()), 1)
    exact = stats.norm.cdf(stats.norm.ppf(1 - curve.type_one) - 0.5)
    assert np.all(curve.type_two <= exact + 1e-9)
    np.testing.assert_allclose(curve.type_two, exact, atol=5e-4)
    near = curves.trade_off(Mechanism(2.0, Poisson(1 - 1e-9)), 1)  # composed, of almost the same mechanism
    assert np.all(near.type_two <= exact + 1e-7)
    np.testing.assert_allclose(near.type_two, exact, atol=1e-3)
    composed = curves.trade_off(Mechanism(2.0, Poisson(0.02)), 200)
    assert np.all(composed.type_two <= 1 - composed.type_one + 1e-9)
    assert composed.type_two[0] > 0.99 and composed.type_two[-1] == 0


def test_plots_draw_the_curves():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    mechanism = Mechanism(2.0, Shuffled())
    over = curves.epsilon_over_steps(mechanism, 5, delta=1e-5)
    axes = curves.plot_epsilon_over_steps(over, label="true")
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), over.epsilon)
    more = curves.epsilon_over_steps(Mechanism(0.5, Shuffled()), 5, delta=1e-5)
    assert curves.plot_epsilon_over_steps(more, axes=axes) is axes and len(axes.lines) == 2
    assert axes.get_ylim()[1] > more.epsilon.max() and "1e-05" in axes.get_ylabel()  # a second curve is seen
    curves.plot_delta_over_epsilon(curves.delta_over_epsilon(mechanism, 5, epsilons=[0.0, 1.0]))
    axes = curves.plot_trade_off(curves.trade_off(mechanism, 5))
    assert len(curves.plot_trade_off(curves.trade_off(mechanism, 9), axes=axes).lines) == 3  # guessing is drawn once
    pyplot.close("all")


SIZES = {"examples": 40, "batch_size": 10}
AT_ONCE = {
    "shuffled": dpx.ShuffledEpochs(**SIZES),
    "fixed order": dpx.sampling.FixedOrder(**SIZES),
    "turns of groups": dpx.sampling.CyclicPoissonSampling(**SIZES, bands=4),
}


@pytest.mark.parametrize(
    ("name", "points", "stairs"),
    [("shuffled", 40, 7), ("shuffled", 4, 3), ("shuffled", 2, 2), ("fixed order", 40, 7), ("turns of groups", 40, 7)],
)
def test_an_epoch_that_is_billed_at_once_is_a_stair(name, points, stairs):
    """The curve that is drawn is the bill after every single step; with few points it is above the bill."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    sampling = AT_ONCE[name]
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=sampling, key=dpx.secret_key())
    curve = curves.epsilon_over_steps(mechanism, 26, delta=1e-5, points=points)
    assert len(curve.steps) <= points and curve.steps[0] == 1 and curve.steps[-1] == 26
    (line,) = curves.plot_epsilon_over_steps(curve, axes=figure.add_subplot()).lines
    assert line.get_drawstyle() == "steps-pre"  # so the height at a step is that of the next point
    drawn = curve.epsilon[np.searchsorted(curve.steps, np.arange(1, 27))]
    billed = np.array([accounting.epsilon(mechanism, step, delta=1e-5) for step in range(1, 27)])
    if points == 40:
        np.testing.assert_allclose(drawn, billed)
    assert np.all(drawn >= billed - 1e-9) and len(set(drawn.tolist())) == stairs
    smooth = curves.epsilon_over_steps(Mechanism(2.0), 5, delta=1e-5)
    assert not smooth.by_epoch and curve.by_epoch


def test_importing_the_accountants_does_not_import_matplotlib():
    printed_by("import dpx.accounting, sys; assert 'matplotlib' not in sys.modules")
