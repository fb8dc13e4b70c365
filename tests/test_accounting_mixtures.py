"""Mixtures of Gaussians, whose bill is dpx's own; and events with lists, arrays and events in their fields."""

import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import (
    MixtureOfGaussiansDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SingleEpochTreeAggregationDpEvent,
)
from scipy import stats

from dpx.accounting import best_of, event_delta, event_epsilon

MIXTURE = (1.3, [0.0, 0.7, 2.0], [0.5, 0.3, 0.2])


def hockey_stick(epsilon, sigma, shifts, weights):
    """By integration, the larger one of both directions."""
    x = np.linspace(-14 * sigma, max(shifts) + 14 * sigma, 400_001)
    mixed = sum(p * stats.norm.pdf(x, c, sigma) for c, p in zip(shifts, weights, strict=True))
    pair = mixed, stats.norm.pdf(x, 0, sigma)
    return max(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x) for p, q in (pair, pair[::-1]))


@pytest.mark.parametrize("mixture", [MIXTURE, (0.4, [1e-3, 1.0], [0.999, 0.001]), (30.0, [2.0], [1.0])], ids=str)
def test_one_mixture_is_exact(mixture):
    for epsilon in (0.0, 0.05, 1.0):
        truth = hockey_stick(epsilon, *mixture)
        found = event_delta(MixtureOfGaussiansDpEvent(*mixture), epsilon=epsilon)
        assert truth * (1 - 1e-6) - 1e-12 <= found <= truth * 1.01 + 1e-12
        assert found <= event_delta(MixtureOfGaussiansDpEvent(*mixture), epsilon=epsilon, accountant="rdp")


def test_a_mixture_of_two_is_a_poisson_sample_and_scales():
    sampled = event_epsilon(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 20), delta=1e-6)
    for scale in (1.0, 1e-3, 1e6):
        one = MixtureOfGaussiansDpEvent(1.5 * scale, [scale, 0.0, scale], [0.04, 0.9, 0.06])
        assert event_epsilon(SelfComposedDpEvent(one, 20), delta=1e-6) == pytest.approx(sampled, rel=1e-4)
        by_rdp = event_epsilon(SelfComposedDpEvent(one, 20), delta=1e-6, accountant="rdp")
        assert sampled < by_rdp < 1.5 * sampled


@pytest.mark.parametrize(
    "make",
    [
        lambda of: MixtureOfGaussiansDpEvent(1.3, of([0.0, 0.7, 2.0]), of([0.5, 0.3, 0.2])),
        lambda of: ComposedDpEvent(
            [MixtureOfGaussiansDpEvent(100.0, of([0.0, 1.0]), of([0.5, 0.5])), LaplaceDpEvent(9.0)]
        ),
        lambda of: SingleEpochTreeAggregationDpEvent(10.0, of([1, 2])),
        lambda of: GaussianDpEvent(np.sum(of([1.0, 2.0]))),
        lambda of: RepeatAndSelectDpEvent(ComposedDpEvent([SingleEpochTreeAggregationDpEvent(9.0, of([1, 2]))]), 9, 1),
        lambda of: best_of(SingleEpochTreeAggregationDpEvent(9.0, of([1, 2])), trials=9, score_on="public").event,
    ],
)
@pytest.mark.long_cases("<lambda>1")
def test_a_field_may_be_a_list_or_an_array(make):
    bills = [event_epsilon(make(of), delta=1e-5, relation="zero_out") for of in (tuple, list, np.array)]
    assert 0 < bills[0] == bills[1] == bills[2] < math.inf


@pytest.mark.parametrize(
    ("event", "epsilon"),
    [
        (ComposedDpEvent([]), 0.0),
        (PoissonSampledDpEvent(0.0, GaussianDpEvent(0.0)), 0.0),
        (MixtureOfGaussiansDpEvent(0.0, [0.0, 1.0], [1.0, 0.0]), 0.0),
        (GaussianDpEvent(100.0), math.inf),
        (PoissonSampledDpEvent(0.01, GaussianDpEvent(100.0)), math.inf),
        (RandomizedResponseDpEvent(0.1, 3), math.log(10)),
        (GaussianDpEvent(0.0), math.inf),
    ],
    ids=str,
)
def test_a_delta_of_zero(event, epsilon):
    assert event_epsilon(event, delta=0, relation="zero_out") == pytest.approx(epsilon, abs=1e-3)


def test_a_sample_of_nobody_costs_nothing():
    event = SampledWithoutReplacementDpEvent(10, 0, GaussianDpEvent(0.1))
    assert event_epsilon(event, delta=1e-5, relation="replace_one") == 0


@pytest.mark.parametrize(
    "mixture", [(1.0, [1.0], [0.5]), (1.0, [-1.0], [1.0]), (-1.0, [1.0], [1.0]), (1.0, [1.0, 2.0], [1.0])]
)
def test_what_is_no_mixture_is_refused(mixture):
    with pytest.raises(ValueError, match="must be (at least 0, with probabilities that sum to 1|a number at least 0)"):
        event_epsilon(MixtureOfGaussiansDpEvent(*mixture), delta=1e-5)
    with pytest.raises(ValueError, match="does not fit a mixture of Gaussians"):
        event_epsilon(MixtureOfGaussiansDpEvent(*MIXTURE), delta=1e-5, relation="replace_one")


def test_noise_beyond_the_squares_of_float64_is_billed_as_less_noise():
    """At 1e20 shifts, the Renyi divergences of many releases were 0, and at 1e160 nothing was known."""
    for sigma, count in ((1e20, 2**53), (1e160, 3)):
        event = SelfComposedDpEvent(MixtureOfGaussiansDpEvent(sigma, [0.0, 1.0], [0.5, 0.5]), count)
        less = SelfComposedDpEvent(MixtureOfGaussiansDpEvent(1e9, [0.0, 1.0], [0.5, 0.5]), count)
        for accountant in ("rdp", "tightest"):
            found = (event_epsilon(e, delta=1e-5, accountant=accountant) for e in (event, less))
            assert next(found) == next(found)
    assert event_epsilon(event, delta=0) == math.inf
