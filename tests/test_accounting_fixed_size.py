"""Samples of a fixed size: the profile of `dpx/accounting/limited_samples.py` against data sets that are tried."""

import itertools
import math
from fractions import Fraction

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

import dpx
from dpx import accounting, reports
from dpx.accounting.flat_event import from_event
from dpx.accounting.limited_samples import FixedSizeGaussian

LINE = np.array([[-1.0], [0.0], [1.0]])
PLANE = np.array([[-1.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5], [0.5, -(0.75**0.5)]])


def profile(alphas, s, q):
    """f of `limited_samples.py`, float64 (n,): s is relative to the effect of replacing one example."""

    def above(alpha):
        log = np.log1p((alpha - 1) / q)
        return q * (stats.norm.cdf(0.5 / s - s * log) - np.exp(log) * stats.norm.cdf(-0.5 / s - s * log))

    alphas = np.asarray(alphas, np.float64)
    return np.where(alphas >= 1, above(np.maximum(alphas, 1)), 1 - alphas + alphas * above(1 / np.minimum(alphas, 1)))


def neighbors(values, examples, size, sigma, cells):
    """The outputs on all neighboring data sets with such contributions, as probabilities of cells: (pairs, 2, cells).

    Outputs are rounded to cells, which is post-processing. So no divergence is above the one before rounding.
    """
    reach = size + 7 * sigma
    edges = np.concatenate([[-np.inf], np.linspace(-reach, reach, cells - 1), [np.inf]])

    def output(rows):
        sums = values[list(rows)][list(itertools.combinations(range(examples), size))].sum(axis=1)  # (subsets, d)
        marginals = np.diff(stats.norm.cdf((edges - sums[:, :, None]) / sigma), axis=-1)  # (subsets, d, cells)
        joint = marginals[:, 0]
        for axis in range(1, values.shape[1]):
            joint = (joint[:, :, None] * marginals[:, axis, None, :]).reshape(len(sums), -1)
        return joint.mean(axis=0)

    kinds = range(len(values))
    pairs = []
    for others in itertools.combinations_with_replacement(kinds, examples - 1):
        outputs = [output((kind, *others)) for kind in kinds]
        pairs += [(outputs[a], outputs[b]) for a, b in itertools.permutations(kinds, 2)]
    return np.array(pairs)


@pytest.mark.parametrize(
    ("values", "examples", "size", "sigma", "cells"),
    [(LINE, n, m, sigma, 400) for n in (2, 3, 5) for m in (1, n - 1, n) for sigma in (0.6, 2.5)]
    + [(PLANE, 3, m, sigma, 60) for m in (1, 2) for sigma in (0.8, 2.5)],
)
def test_the_profile_bounds_all_neighbors_and_is_attained(values, examples, size, sigma, cells):
    """At likelihood ratios on both sides of 1. Contributions are in the unit ball, on a line or in a plane."""
    alphas = np.exp(np.linspace(-6, 6, 25))
    pairs = neighbors(values, examples, size, sigma, cells)
    found = np.maximum(pairs[:, 0, :, None] - alphas * pairs[:, 1, :, None], 0).sum(axis=1)  # (pairs, alphas)
    bound = profile(alphas, sigma / 2, size / examples)
    assert np.all(found <= bound + 1e-12)
    if values is LINE:
        assert found.max(axis=0) == pytest.approx(bound, abs=2e-3)


@pytest.mark.parametrize(("s", "q"), [(0.35, 0.01), (0.8, 0.2), (3.0, 0.9), (0.5, 1.0)])
def test_the_pair_has_the_profile(s, q):
    """At coarse and short grids it is above it. Its total probability is 1."""
    step, epsilons = FixedSizeGaussian(s, q), np.array([-2.0, -0.1, -0.003, 0.0, 0.01, 0.5, 3.0])
    truth = profile(np.exp(epsilons), s, q)
    for grid, tail, largest in ((1e-3, 1e-15, 50.0), (0.05, 1e-15, 50.0), (0.4, 1e-15, 50.0), (0.01, 0.05, 0.6)):
        (pmf,) = step.pmfs(grid, tail=tail, largest=largest)
        losses = grid * (pmf.first + np.arange(len(pmf.probabilities)))
        assert pmf.probabilities.sum() + pmf.infinity == pytest.approx(1, abs=1e-12)
        found = pmf.infinity + (pmf.probabilities * np.maximum(0, -np.expm1(epsilons[:, None] - losses))).sum(axis=1)
        assert np.all(found >= truth - 1e-12)
        if grid == 1e-3:
            assert found == pytest.approx(truth, abs=2e-5)


@pytest.mark.parametrize(("s", "q"), [(0.35, 0.01), (0.8, 0.2), (3.0, 0.9), (1.0, 1.0)])
def test_the_renyi_divergences_are_above_those_of_the_pair(s, q):
    """By integration. From order 2 on, at most dp-accounting's, which hold for any mechanism on such samples."""
    orders = np.array([1.1, 1.5, 2.0, 3.0, 8.0])
    x = np.linspace(0.5, 9 + 12 * s, 1_000_001)  # of losses above 0
    log_second, loss = stats.norm.logpdf(x, 0, s), np.log1p(q * np.expm1((x - 0.5) / s**2))
    at_zero = (1 - q) * (2 * stats.norm.cdf(0.5 / s) - 1)
    moments = [
        at_zero + np.trapezoid(np.exp(log_second + order * loss) + np.exp(log_second + (1 - order) * loss), x)
        for order in orders
    ]
    truth = np.log(moments) / (orders - 1)
    bound = FixedSizeGaussian(s, q).renyi(orders)
    theirs = dp_accounting.rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(s)
    theirs.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, int(1000 * q), gaussian))
    assert np.all(bound >= truth * (1 - 1e-6))
    whole = orders >= 2
    assert np.all(bound[whole] <= np.array(theirs.rdp)[whole] * (1 + 1e-9))
    assert np.all(bound[whole] <= 1.8 * truth[whole])


def worst(alphas, steps):
    """The largest divergence of an adversary who chooses neighbors for every step, after seeing earlier outputs.

    steps: arrays (pairs, 2, cells). By recursion from the last step: V(a) = max over pairs of E_P V_later(a Q / P).
    """
    logs = np.linspace(-14, 14, 2801)
    later = np.maximum(0, -np.expm1(logs))
    for pairs in reversed(steps):
        asked = alphas if pairs is steps[0] else np.exp(logs)
        values = np.zeros(len(asked))
        for first, second in pairs:
            kept = (first > 1e-14) & (second > 1e-14)
            ratios = np.log(asked)[:, None] + np.log(second[kept] / first[kept])
            following = np.interp(ratios, logs, later, right=0.0)
            following = np.where(ratios < logs[0], -np.expm1(ratios), following)
            values = np.maximum(values, following @ first[kept])
        later = values
    return later


@pytest.mark.parametrize("sigmas", [(1.5,), (1.5, 2.0), (2.5, 2.0, 3.0)])
def test_no_adaptive_choice_of_neighbors_costs_more_than_the_bill(sigmas):
    sampling = dpx.FixedSizeSampling(examples=3, batch_size=1)
    epsilons = np.array([0.0, 0.2, 0.6, 1.2, 2.0])
    found = worst(np.exp(epsilons), [neighbors(LINE, 3, 1, sigma, 150) for sigma in sigmas])
    event = sampling.event(np.array(sigmas))
    bills = np.array(
        [accounting.event_delta(event, epsilon=epsilon, relation="replace_one") for epsilon in epsilons.tolist()]
    )
    assert np.all(found <= bills + 2e-5)
    assert bills[:3] == pytest.approx(found[:3], rel=1e-3 if len(sigmas) == 1 else 0.08)
    poisson = dpx.PoissonSampling(examples=3, batch_size=1).event(np.array(sigmas))
    false_bills = [accounting.event_delta(poisson, epsilon=epsilon) for epsilon in epsilons.tolist()]
    assert np.all(found > 1.3 * np.array(false_bills))


def fixed(rate, sigma, steps):
    gaussian = dp_accounting.GaussianDpEvent(sigma / 2)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(1000, round(1000 * rate), gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, steps)


@pytest.mark.long
@pytest.mark.parametrize(("steps", "most"), [(1, 1.001), (10, 1.05), (100, 1.12), (1000, 1.24)])
@pytest.mark.long_cases("1-", "100-", "1000-")
def test_bills_are_above_and_near_those_of_two_data_sets(steps, most):
    """One example contributes C and all others -C; it is replaced by one of -C. dp-accounting's PLD of this pair."""
    for rate, sigma in itertools.product((0.001, 0.01, 0.1, 0.5), (0.5, 0.7, 1.0, 2.0, 5.0)):
        bill = accounting.event_epsilon(fixed(rate, sigma, steps), delta=1e-5, relation="replace_one")
        pair = PLDAccountant(value_discretization_interval=0.01 * bill / math.sqrt(steps))
        pair.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma / 2)), steps)
        assert 1 - 1e-3 <= bill / pair.get_epsilon(1e-5) <= most, (rate, sigma)


def test_half_the_noise_of_poisson_samples_is_a_lower_bound():
    """Epsilon is at least 17.67 where that of Poisson samples is 2.37, at one noise multiplier, rate and delta."""
    gaussian = dp_accounting.GaussianDpEvent(0.7)
    poisson = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.01, gaussian), 100)
    assert accounting.event_epsilon(poisson, delta=1e-5) == pytest.approx(2.367, abs=1e-3)
    half = accounting.schedule_epsilon([0.7 / 2], sampling_rate=0.01, counts=[100], delta=1e-5)
    bill = accounting.event_epsilon(fixed(0.01, 0.7, 100), delta=1e-5, relation="replace_one")
    assert 17.67 < half.lower < bill == pytest.approx(18.081, abs=2e-3)
    by_rdp = accounting.event_epsilon(fixed(0.01, 0.7, 100), delta=1e-5, relation="replace_one", accountant="rdp")
    assert bill < by_rdp < 27


@pytest.mark.parametrize(("steps", "exact"), [(600, 16.509), (700, 17.851), (1470, 26.862), (10_000, 97.012)])
def test_large_costs_are_finite(steps, exact):
    """They were infinite above 17, because the tail of the noise of a program was billed e^epsilon times."""
    sampling = dpx.FixedSizeSampling(examples=50_000, batch_size=1024)
    bill = {"examples": 50_000, "batch_size": 1024, "noise_multiplier": 1.1, "steps": steps, "sampling": "fixed"}
    found = accounting.dp_sgd_epsilon(**bill, delta=1e-5)
    alone = accounting.event_epsilon(sampling.event(np.full(steps, 1.1)), delta=1e-5, relation="replace_one")
    assert alone == pytest.approx(exact, abs=1e-3) and alone < found < 1.001 * alone


def test_a_batch_has_the_law_of_its_public_coins():
    """A random subset of the others in random rows, and a coin by which the example takes a random row of them.

    So the two sums differ in one row, by an exchange: at most 2 clip norms.
    """
    examples, size, example = 4, 2, 3
    law = dict.fromkeys(itertools.permutations(range(examples), size), Fraction(0))
    others = list(itertools.permutations(range(example), size))
    for rows, row in itertools.product(others, range(size)):
        public = Fraction(1, len(others) * size)
        law[rows] += public * (1 - Fraction(size, examples))
        law[(*rows[:row], example, *rows[row + 1 :])] += public * Fraction(size, examples)
    assert set(law.values()) == {Fraction(1, 12)}
    event = dpx.FixedSizeSampling(examples=examples, batch_size=size).event(np.array([0.8, 1.6]))
    assert from_event(event).largest_shift("replace_one") == 2 / 0.8


def test_all_examples_are_no_sample():
    event = dpx.FixedSizeSampling(examples=10, batch_size=10).event(np.array([2.0, 3.0, 2.0]))
    mu = 2 * math.sqrt(2 / 4 + 1 / 9)
    for accountant, much in (("tightest", 1e-9), ("pld", 1e-9), ("rdp", 0.3)):
        bill = accounting.event_epsilon(event, delta=1e-5, relation="replace_one", accountant=accountant)
        assert bill == pytest.approx(accounting.gdp.epsilon(mu, delta=1e-5), rel=much)
    near = FixedSizeGaussian(1.5, 1 - 1e-12)
    delta = accounting.gdp.delta(1 / 1.5, epsilon=1.0)
    assert accounting.profiles.loss_profile({near: 1}).delta(epsilon=1.0) == pytest.approx(delta, rel=1e-3)


@pytest.mark.long
def test_schedules_are_rounded_up_to_few_steps():
    sampling = dpx.FixedSizeSampling(examples=1000, batch_size=20)
    event = sampling.event(np.geomspace(4, 1, 200))
    few, many, exact = (
        accounting.event_epsilon(event, delta=1e-6, relation="replace_one", buckets=buckets)
        for buckets in (8, 128, 200)
    )
    assert exact <= many < 1.02 * exact and 1.02 * exact < few < 1.5 * exact
    mixed = dp_accounting.ComposedDpEvent([event, dp_accounting.GaussianDpEvent(4.0)])
    bill = accounting.event_epsilon(mixed, delta=1e-6, relation="replace_one", buckets=128)
    alone = accounting.event_epsilon(dp_accounting.GaussianDpEvent(4.0), delta=1e-6, relation="replace_one")
    assert max(many, alone) < bill < many + alone


def test_curves_calibration_and_shared_batches():
    sampling = dpx.FixedSizeSampling(examples=1000, batch_size=20)

    def mechanism(noise, seed=0):
        return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=jax.random.key(seed))

    met = mechanism(dpx.Budget(steps=300, epsilon=2.0, delta=1e-5))
    assert 1.999 < dpx.epsilon(met, 300, delta=1e-5) <= 2
    attacks = reports.attack_bounds(met, 300, delta=1e-5)
    assert 0 < attacks.advantage < 0.6 and attacks.mu < 1.2
    together, apart = (
        dpx.compose_runs((mechanism(6.0), 300), (mechanism(6.0, 1), 300), shared_batches=shared)
        for shared in (True, False)
    )
    one = mechanism(6.0 / math.sqrt(2))
    spent = dpx.epsilon(one, 300, delta=1e-5)
    assert spent < together.epsilon(delta=1e-5) < 1.001 * spent  # of twice as many noisy numbers
    assert apart.epsilon(delta=1e-5) < together.epsilon(delta=1e-5)
