"""The bill of fresh Gaussian projections of a clipped sum, against quadrature over the stretch."""

import math

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import special, stats

import dpx
from dpx import accounting
from dpx.accounting.cost import profile_of_run
from dpx.accounting.pld.renyi import ORDERS
from dpx.papers.d2p2_sgd.cost import ProjectedGaussian, ProjectedGaussianDpEvent, event_with_projection

Gaussian = dp_accounting.GaussianDpEvent


def stretches(rank, *, norm=1.0, nodes=1500):
    """Nodes and weights of norm * S, S^2 ~ chi^2_rank / rank: Gauss-Legendre, no shared code."""
    low, high = (math.sqrt(stats.chi2.ppf(tail, rank) / rank) for tail in (1e-17, 1 - 1e-15))
    x, w = special.roots_legendre(nodes)
    s = low + (x + 1) / 2 * (high - low)
    return norm * s, w / 2 * (high - low) * stats.chi2.pdf(s * s * rank, rank) * 2 * s * rank


def gaussian_delta(mu, epsilon):
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def sampled_delta(mu, rate, epsilon, direction):
    """delta of (1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), or exchanged, in closed form."""
    if direction == "remove":
        cut = np.log((math.exp(epsilon) - 1 + rate) / rate) / mu + mu / 2
        return rate * stats.norm.sf(cut - mu) - (math.exp(epsilon) - 1 + rate) * stats.norm.sf(cut)
    if math.exp(-epsilon) <= 1 - rate:
        return np.zeros_like(mu)
    cut = np.log((math.exp(-epsilon) - 1 + rate) / rate) / mu + mu / 2
    inside = (1 - rate) * stats.norm.cdf(cut) + rate * stats.norm.cdf(cut - mu)
    return stats.norm.cdf(cut) - math.exp(epsilon) * inside


def test_public_vector():
    """p 10, one step, q 1, sigma 2, delta 1e-5: exactly 2.60584, naively 1.99309."""
    epsilon = accounting.event_epsilon(event_with_projection(Gaussian(2.0), rank=10), delta=1e-5)
    assert 2.60584 - 1e-5 <= epsilon <= 1.01 * 2.60584
    by_rdp = accounting.event_epsilon(event_with_projection(Gaussian(2.0), rank=10), delta=1e-5, accountant="rdp")
    assert epsilon <= by_rdp <= 1.3 * epsilon


@pytest.mark.parametrize("rank, sigma", [(1, 3.0), (10, 1.0), (1000, 1.0)])
@pytest.mark.long_cases("10-", "1-3.0")
def test_one_unsampled_release_is_the_mixture(rank, sigma):
    s, w = stretches(rank)
    for epsilon in (0.1, 1.0, 3.0):
        truth = float(w @ gaussian_delta(s / sigma, epsilon))
        found = accounting.event_delta(event_with_projection(Gaussian(sigma), rank=rank), epsilon=epsilon)
        assert truth * (1 - 1e-6) <= found <= truth * 1.2


def test_one_sampled_release_is_the_mixture_in_both_directions():
    rank, sigma, rate = 6, 0.9, 0.15
    s, w = stretches(rank)
    step = ProjectedGaussian(sigma, rate, rank, 1)
    for grid, tail in ((1e-3, 1e-14), (0.05, 1e-14), (1e-3, 1e-2)):
        for pmf, direction in zip(step.pmfs(grid, tail=tail, largest=60.0), ("remove", "add"), strict=True):
            loss = grid * (pmf.first + np.arange(len(pmf.probabilities)))
            for epsilon in (0.0, 0.1, 0.7, 2.0, 5.0):
                truth = float(w @ sampled_delta(s / sigma, rate, epsilon, direction))
                found = pmf.infinity + pmf.probabilities @ np.maximum(0, -np.expm1(epsilon - loss))
                assert found >= truth - 1e-10
                assert (grid, tail) != (1e-3, 1e-14) or found <= truth * 1.05 + 1e-5


@pytest.mark.parametrize("blocks", [1, 3])
def test_stretches_beyond_the_largest_count_as_infinite_losses(blocks):
    step = ProjectedGaussian(0.9, 0.15, 6, blocks)
    for tail in (1e-2, 1e-4):
        stretches, _, beyond = step._binned_stretch_distribution(tail / 2)
        assert beyond >= stats.chi2.sf(6 * stretches[-1] ** 2, 6) * (1 - 1e-9) > 0
        for pmf in step.pmfs(1e-2, tail=tail, largest=60.0):
            assert pmf.infinity >= beyond
            assert pmf.probabilities.sum() + pmf.infinity >= 1 - 1e-12  # nothing is dropped


@pytest.mark.long
def test_composition_has_the_summed_stretch():
    """Unsampled, five releases are one of stretch sqrt(chi^2_20 / 4)."""
    s, w = stretches(20, norm=math.sqrt(5))
    event = event_with_projection(dp_accounting.SelfComposedDpEvent(Gaussian(3.0), 5), rank=4)
    for epsilon in (0.5, 2.0, 4.0):
        truth = float(w @ gaussian_delta(s / 3.0, epsilon))
        found = accounting.event_delta(event, epsilon=epsilon)
        assert truth * (1 - 1e-6) <= found <= truth * 1.25


def test_several_blocks_are_billed_for_every_mix():
    """Blocks of rank 3 and 300: the bill of the smallest alone is below the truth where delta is large."""
    (small, v), (large, w) = stretches(3, nodes=200), stretches(300, nodes=80)
    several, smallest = (event_with_projection(Gaussian(2.0), rank=3, blocks=blocks) for blocks in (2, 1))
    below = False
    for epsilon in (0.1, 2.0):
        bill, alone = (accounting.event_delta(event, epsilon=epsilon) for event in (several, smallest))
        for share in (0.0, 0.3, 0.7, 1.0):
            s = np.sqrt(share * small[:, None] ** 2 + (1 - share) * large[None] ** 2)
            truth = float(v @ gaussian_delta(s / 2, epsilon) @ w)
            assert bill >= truth
            below |= alone < truth * 0.99
    assert below
    ends, shares, _ = ProjectedGaussian(1.0, 1.0, 3, 2)._binned_stretch_distribution(1e-9)
    for blocks in (1, 2, 5, 100):  # of rank 3, in equal shares
        assert np.all(1 - np.cumsum(shares) >= stats.chi2.sf(3 * blocks * ends**2, 3 * blocks) - 1e-12)


def test_renyi_is_an_upper_bound():
    """Unsampled: -(p/2) ln(1 - a (a - 1) / (p sigma^2)) / (a - 1), infinite from where that has no value."""
    rank, sigma = 50, 2.0
    found = ProjectedGaussian(sigma, 1.0, rank, 1).renyi(ORDERS)
    several = ProjectedGaussian(sigma, 1.0, rank, 7).renyi(ORDERS)
    argument = 1 - ORDERS * (ORDERS - 1) / (rank * sigma**2)
    exact = np.where(argument > 0, -rank / 2 * np.log(np.maximum(argument, 1e-300)) / (ORDERS - 1), np.inf)
    assert np.all(found >= exact * (1 - 1e-9)) and np.all(several >= found * (1 - 1e-9))
    small = ORDERS <= 6
    assert np.all(found[small] <= 1.02 * exact[small])
    rate = 0.2
    sampled = float(ProjectedGaussian(sigma, rate, rank, 1).renyi(ORDERS)[ORDERS == 2].item())
    s, w = stretches(rank)
    second = math.log(float(w @ (1 + rate**2 * np.expm1((s / sigma) ** 2))))
    assert second <= sampled <= 1.02 * second


def test_a_large_rank_costs_hardly_more_than_no_projection():
    plain = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.02, Gaussian(1.54)), 2000)
    naive = accounting.event_epsilon(plain, delta=1e-5)
    for rank, blocks, most in ((385_000, 1, 1.005), (385_000, 9, 1.01), (1000, 1, 1.01)):
        found = accounting.event_epsilon(event_with_projection(plain, rank=rank, blocks=blocks), delta=1e-5)
        assert naive < found < most * naive


@pytest.mark.long
def test_long_schedules_are_rounded_down_to_few():
    sigmas = np.linspace(4, 1, 200)
    plain = dp_accounting.ComposedDpEvent([dp_accounting.PoissonSampledDpEvent(0.02, Gaussian(s)) for s in sigmas])
    event = event_with_projection(plain, rank=10_000)
    assert len(event.events) <= 64 and sum(getattr(one, "count", 1) for one in event.events) == 200
    naive = accounting.event_epsilon(plain, delta=1e-5)
    assert naive < accounting.event_epsilon(event, delta=1e-5) < 1.03 * naive


def test_every_noise_multiplier_is_rounded_down():
    """The j-th smallest of the rounded ones is at most the j-th smallest of the schedule."""
    sigmas = np.linspace(1, 4, 200)
    parts = event_with_projection(dp_accounting.ComposedDpEvent([Gaussian(s) for s in sigmas.tolist()]), rank=5).events
    one = [(part, 1) if isinstance(part, ProjectedGaussianDpEvent) else (part.event, part.count) for part in parts]
    rounded = np.sort(np.repeat([event.noise_multiplier for event, _ in one], [count for _, count in one]))
    assert len(parts) <= 64 and np.all(rounded <= sigmas) and np.all(rounded >= sigmas * 0.9)


def test_no_noise_is_no_privacy():
    for accountant in ("pld", "rdp"):
        assert (
            accounting.event_epsilon(event_with_projection(Gaussian(0.0), rank=5), delta=1e-5, accountant=accountant)
            == math.inf
        )
    assert accounting.event_epsilon(event_with_projection(dp_accounting.NoOpDpEvent(), rank=5), delta=1e-5) == 0
    assert (
        accounting.event_epsilon(event_with_projection(dp_accounting.NonPrivateDpEvent(), rank=5), delta=1e-5)
        == math.inf
    )


def test_what_is_not_billed_is_refused():
    event = ProjectedGaussianDpEvent(1.0, 0.1, 5)
    for accountant in (PLDAccountant(), RdpAccountant()):
        with pytest.raises(dp_accounting.UnsupportedEventError):
            accountant.compose(event)
    with pytest.raises(ValueError, match="replace_one"):
        accounting.event_epsilon(event, delta=1e-5, relation="replace_one")
    for other in (dp_accounting.SampledWithoutReplacementDpEvent(100, 10, Gaussian(1.0)), event):
        with pytest.raises(ValueError, match="has a known cost before"):
            event_with_projection(other, rank=5)


def test_a_mechanism_is_billed_by_its_distribution_of_stretches():
    key = jax.random.key(0)
    base = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=dpx.FullBatch(examples=10), key=key)
    mechanism = dpx.mechanisms.clip_then_project(base, rank=10, kind="gaussian")
    assert dpx.epsilon(mechanism, 1, delta=1e-5) >= 2.60584 - 1e-5 > dpx.epsilon(base, 1, delta=1e-5)
    layers = dpx.mechanisms.clip_then_project(base, rank={"a": 10, "b": 500}, kind="gaussian")
    assert dpx.epsilon(layers, 1, delta=1e-5) > dpx.epsilon(mechanism, 1, delta=1e-5)


@pytest.mark.parametrize("rank", [1, 6, 1000])
def test_large_costs_are_finite(rank):
    """A stretch beyond the shift has a probability below 1e-50, so the noise has the tail of a Gaussian's."""
    release = ProjectedGaussianDpEvent(4.0 if rank < 1000 else 0.5, 0.5, rank, blocks=2)
    stretch = release.largest_shift("zero_out") * release.noise_multiplier
    assert 1 < stretch < 16 and special.gammaincc(rank / 2, rank / 2 * stretch**2) < 1e-50
    event = dp_accounting.SelfComposedDpEvent(release, 400 if rank < 1000 else 5)
    exact, found = accounting.event_epsilon(event, delta=1e-5), profile_of_run(event, relation="zero_out").epsilon(1e-5)
    assert 17 < exact < found < 1.03 * exact
    assert ProjectedGaussianDpEvent(0.0, 0.5, rank).largest_shift("zero_out") == math.inf
