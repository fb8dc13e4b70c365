"""Published and recomputed numbers, dp-accounting itself, and a simulation that shares no code."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant
from scipy import stats

from dpx import accounting
from dpx.accounting import gdp
from dpx.accounting.pld import renyi
from dpx.papers.dynamic_dp_sgd import claims

pytestmark = pytest.mark.usefixtures("exact_noise")

ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
NULLED = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def gaussian(rate, sigma):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))


def dynamic():
    """Dynamic DP-SGD, epsilon 2, delta 1/600000, q .01, T 500, rho_mu 1/.3."""
    first = claims.first_mu(epsilon=2, delta=1 / 600_000, sampling_rate=0.01, steps=500, growth=1 / 0.3)
    return 1 / (first * (1 / 0.3) ** (np.arange(1, 501) / 500))


EPOCHS = np.repeat(3.05 * np.arange(1, 41) ** -0.25, 72)

# That of Dynamic DP-SGD is in tests/test_schedules.py. Noise multipliers, rate, counts, delta, PLD, RDP, tolerance
VECTORS = {
    "random freeze": (1.54, 0.02, 2000, 1e-5, 2.75301, 3.00260, 2e-4),
    "AdaDPIGU": (2.49, 1 / 60, 12000, 1e-5, 3.2350, 3.5071, 2e-4),
    "D2P2": (EPOCHS, 1024 / 73257, None, 1e-5, 2.45784, 2.68613, 2e-4),
    "three phases": ([1, 2, 0.8], [0.01, 0.02, 0.005], [500, 1000, 300], 1e-6, 2.38268, 2.92477, 2e-4),
}


@pytest.mark.parametrize("name", VECTORS)
def test_public_vectors(name):
    sigmas, rate, counts, delta, pld, rdp, tolerance = VECTORS[name]
    interval = accounting.schedule_epsilon(sigmas, sampling_rate=rate, counts=counts, delta=delta, buckets=512)
    assert interval.upper == pytest.approx(pld, abs=tolerance)
    assert interval.lower <= pld + tolerance
    by_rdp = accounting.schedule_epsilon(sigmas, sampling_rate=rate, counts=counts, delta=delta, accountant="rdp")
    assert by_rdp.upper == pytest.approx(rdp, abs=tolerance)


def test_old_rdp_conversion_of_ada_dpigu():
    orders = np.arange(20, 320) / 10
    rdp = renyi.add_or_remove_rdp(np.array([2.49]), np.array([1 / 60]), np.array([12000]), orders)
    assert np.min(rdp + np.log(1e5) / (orders - 1)) == pytest.approx(3.9909, abs=5e-4)


def test_dynamic_dp_sgd_by_the_central_limit_theorem():
    sigmas = dynamic()
    assert gdp.mu(epsilon=2, delta=1 / 600_000) == pytest.approx(0.45878426, abs=1e-6)
    assert claims.mu_total(sigmas, sampling_rate=0.01) == pytest.approx(0.45878426, abs=1e-6)
    assert 1 / sigmas[0] / (1 / 0.3) ** (1 / 500) == pytest.approx(0.54503058, abs=1e-6)
    assert (sigmas[0], sigmas[-1]) == pytest.approx((1.830347, 0.550428), abs=1e-6)


@pytest.mark.parametrize("rate, sigma", [(0.01, 1.0), (0.3, 2.5), (1e-4, 0.3), (0.9, 5.0), (1.0, 3.0)])
def test_rdp_is_that_of_dp_accounting(rate, sigma):
    ours = renyi.gaussian_rdp(np.array([sigma]), np.array([rate]))[0]
    accountant = RdpAccountant()
    accountant.compose(gaussian(rate, sigma))
    np.testing.assert_allclose(ours, accountant.rdp, rtol=1e-9, atol=1e-10)
    assert len(ours) == len(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)


def test_rdp_of_a_schedule_is_that_of_dp_accounting():
    sigmas, rates = np.linspace(3, 0.8, 12), np.linspace(0.01, 0.2, 12)
    accountant = RdpAccountant()
    for sigma, rate in zip(sigmas, rates, strict=True):
        accountant.compose(gaussian(rate, sigma), 7)
    ours = accounting.schedule_epsilon(sigmas, sampling_rate=rates, counts=np.full(12, 7), delta=1e-5, accountant="rdp")
    assert ours.upper == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("relation", ["add_or_remove", "zero_out", "replace_one"])
def test_pld_is_that_of_dp_accounting(relation):
    neighbors = {"replace_one": REPLACE_ONE, "zero_out": NULLED}.get(relation, ADD_OR_REMOVE)
    accountant = PLDAccountant(neighbors, 1e-4)
    for sigma, rate, count in ((1.2, 0.02, 300), (2.0, 0.1, 50), (4.0, 1.0, 2)):
        accountant.compose(gaussian(rate, sigma), count)
    schedule = {"sampling_rate": [0.02, 0.1, 1.0], "counts": [300, 50, 2], "relation": relation}
    interval = accounting.schedule_epsilon([1.2, 2.0, 4.0], delta=1e-5, **schedule)
    assert interval.upper == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-4)
    deltas = accounting.schedule_delta([1.2, 2.0, 4.0], epsilon=2.0, **schedule)
    assert deltas.upper == pytest.approx(accountant.get_delta(2.0), rel=3e-4)


@pytest.mark.parametrize(("rate", "sigma", "count"), [(0.01, 1.0, 1000), (0.3, 5.0, 50), (1.0, 4.0, 3), (1e-3, 0.6, 9)])
def test_nulling_an_example_costs_what_adding_or_removing_one_costs(rate, sigma, count):
    """To the last digit, by dp-accounting and by dpx: the pair of a Gaussian and its mixture is the same."""
    event = dp_accounting.SelfComposedDpEvent(gaussian(rate, sigma), count)
    for make in (lambda relation: PLDAccountant(relation, 1e-3), lambda relation: RdpAccountant(None, relation)):
        nulled, removed = (make(relation).compose(event) for relation in (NULLED, ADD_OR_REMOVE))
        assert nulled.get_epsilon(1e-5) == removed.get_epsilon(1e-5) > 0
        assert nulled.get_delta(0.1) == removed.get_delta(0.1) > 0
    for accountant in ("pld", "rdp"):
        nulled, removed = (
            accounting.event_epsilon(event, delta=1e-5, accountant=accountant, relation=relation)
            for relation in ("zero_out", "add_or_remove")
        )
        assert nulled == removed > 0


def test_unsampled_schedule_has_a_closed_form():
    sigmas, counts = np.array([5.0, 20.0, 3.0, 8.0]), np.array([3, 100, 1, 7])
    mu = np.sqrt(np.sum(counts / sigmas**2))
    interval = accounting.schedule_epsilon(sigmas, sampling_rate=1.0, counts=counts, delta=1e-6)
    delta = stats.norm.cdf(mu / 2 - interval.upper / mu) - np.exp(interval.upper) * stats.norm.cdf(
        -mu / 2 - interval.upper / mu
    )
    assert delta == pytest.approx(1e-6, rel=1e-9)
    assert interval.upper - interval.lower < 1e-4
    # Through the composition too: a rate just below 1 must agree.
    near = accounting.schedule_epsilon(sigmas, sampling_rate=1 - 1e-12, counts=counts, delta=1e-6)
    assert near.lower - 1e-4 <= interval.upper <= near.upper + 1e-4
    assert near.upper == pytest.approx(interval.upper, abs=1e-3)
