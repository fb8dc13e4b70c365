"""Gaussian and concentrated differential privacy: exact conversions, and the baselines."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from scipy import integrate, stats

from dpx import accounting
from dpx.accounting import gdp
from dpx.accounting.pld import renyi
from dpx.papers.dynamic_dp_sgd import claims


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0, 30.0])
def test_delta_is_the_hockey_stick_divergence(mu):
    for epsilon in (0.0, 0.5 * mu, 3 * mu):
        cut, grow = epsilon / mu + mu / 2, math.exp(epsilon)

        def excess(x, grow=grow):
            return stats.norm.pdf(x - mu) - grow * stats.norm.pdf(x)

        expected, _ = integrate.quad(excess, cut, cut + 40, epsabs=1e-14)
        assert gdp.delta(mu, epsilon=epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-30])
@pytest.mark.parametrize("mu", [0.1, 1.0, 100.0])
def test_conversions_invert_and_err_safely(mu, delta):
    epsilon = gdp.epsilon(mu, delta=delta)
    assert gdp.delta(mu, epsilon=epsilon) <= delta * (1 + 1e-12)
    assert gdp.delta(mu, epsilon=epsilon) == pytest.approx(delta, rel=1e-9) or epsilon == 0
    if epsilon > 0:
        assert gdp.mu(epsilon=epsilon, delta=delta) == pytest.approx(mu, rel=1e-9)
        assert gdp.delta(gdp.mu(epsilon=epsilon, delta=delta), epsilon=epsilon) <= delta * (1 + 1e-12)


def test_limits():
    assert gdp.epsilon(0.0, delta=1e-5) == 0 and gdp.epsilon(math.inf, delta=1e-5) == math.inf
    assert gdp.epsilon(1e-9, delta=1e-5) == 0
    assert all(mu**2 / 2 < gdp.epsilon(mu, delta=1e-5) < mu**2 for mu in (1e5, 1e6, 2e6, 1e8, 1e20))
    assert gdp.delta(0.0, epsilon=1.0) == 0 and gdp.delta(math.inf, epsilon=1.0) == 1
    assert claims.mu_total([1.0, 0.0], sampling_rate=0.1) == math.inf


def test_central_limit_theorem_of_a_schedule():
    sigmas, rates = np.array([1.0, 2.0, 0.7]), np.array([0.01, 0.02, 0.03])
    expected = math.sqrt(sum(q * q * (math.exp(1 / s**2) - 1) for s, q in zip(sigmas, rates, strict=True)))
    assert claims.mu_total(sigmas, sampling_rate=rates) == pytest.approx(expected, rel=1e-12)
    assert claims.mu_total([1.0], sampling_rate=0.01, counts=[500]) == pytest.approx(
        0.01 * math.sqrt(500 * math.expm1(1))
    )


@pytest.mark.parametrize("growth", [1.0, 1 / 0.7, 1 / 0.1])
def test_mu_0_spends_the_budget_by_the_limit_theorem(growth):
    first = claims.first_mu(epsilon=1.2, delta=1e-5, sampling_rate=0.02, steps=300, growth=growth)
    sigmas = growth ** (-np.arange(1, 301) / 300) / first
    assert gdp.epsilon(claims.mu_total(sigmas, sampling_rate=0.02), delta=1e-5) == pytest.approx(1.2, rel=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(("promised", "rate", "growth", "spent"), [(2, 0.01, 1 / 0.3, 4.7), (0.4, 0.001, 10, 4.4)])
def test_the_limit_theorem_under_reports(promised, rate, growth, spent):
    """Why `gdp` is no guarantee: it promises one epsilon and at least the other is spent."""
    first = claims.first_mu(epsilon=promised, delta=1 / 600_000, sampling_rate=rate, steps=500, growth=growth)
    sigmas = growth ** (-np.arange(1, 501) / 500) / first
    assert accounting.schedule_epsilon(sigmas, sampling_rate=rate, delta=1 / 600_000, buckets=100).lower > spent


def test_zcdp_of_noise_decay():
    sigmas = 10 * np.exp(-0.01 * np.arange(100))
    rho = claims.zcdp_rho(sigmas)
    assert rho == pytest.approx(np.sum(0.5 * sigmas**-2.0))
    assert claims.zcdp_epsilon(rho, 1e-5) == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)))
    # A guarantee: above the exact epsilon of the same unsampled releases.
    assert claims.zcdp_epsilon(rho, 1e-5) > accounting.schedule_epsilon(sigmas, sampling_rate=1.0, delta=1e-5).upper
    assert claims.zcdp_rho([1.0, 0.0]) == math.inf
    assert claims.zcdp_rho([2.0], counts=[8]) == pytest.approx(1.0)


def test_tcdp_of_noise_decay():
    rho, omega = claims.tcdp([10.0, 5.0], 0.01, counts=[3, 2])
    assert rho == pytest.approx(13 * 0.01**2 * (3 * 0.5 / 100 + 2 * 0.5 / 25))
    assert omega == pytest.approx(math.log(100) / (4 * 0.5 / 25))
    # Too little noise, or too high a rate: no amplification is proven, none is taken.
    assert claims.tcdp([1.0], 0.01) == (0.5, math.inf)
    assert claims.tcdp([10.0], 0.5) == (pytest.approx(0.005), math.inf)


@pytest.mark.parametrize("sigma, rate", [(2.3, 0.01), (5.0, 0.05), (20.0, 0.001)])
def test_tcdp_dominates_the_renyi_divergence(sigma, rate):
    rho, omega = claims.tcdp([sigma], rate)
    orders = renyi.ORDERS[renyi.ORDERS < omega]
    true = renyi.gaussian_rdp(np.array([sigma]), np.array([rate]), orders)[0]
    assert len(orders) > 10 and np.all(true <= rho * orders)


def test_tcdp_epsilon_is_the_best_order_below_omega():
    for rho, omega in ((0.01, 3.0), (0.01, 1e4), (0.5, 6.0)):
        orders = 1 + np.geomspace(1e-4, omega - 1, 20_000)
        best = np.min(rho * orders + math.log(1e5) / (orders - 1))
        assert claims.tcdp_epsilon(rho, omega, 1e-5) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gdp.epsilon(-1.0, delta=1e-5),
        lambda: gdp.epsilon(1.0, delta=1.0),
        lambda: gdp.delta(1.0, epsilon=-0.1),
        lambda: gdp.mu(epsilon=1.0, delta=0.0),
        lambda: claims.first_mu(epsilon=0, delta=1e-5, sampling_rate=0.1, steps=10),
        lambda: claims.first_mu(epsilon=1, delta=1e-5, sampling_rate=1.5, steps=10),
        lambda: claims.first_mu(epsilon=1, delta=1e-5, sampling_rate=0.1, steps=0),
        lambda: claims.first_mu(epsilon=1, delta=1e-5, sampling_rate=0.1, steps=10, growth=0.5),
        lambda: claims.mu_total([-1.0], sampling_rate=0.1),
        lambda: claims.zcdp_epsilon(-1.0, 1e-5),
        lambda: claims.zcdp_epsilon(1.0, 2.0),
        lambda: claims.tcdp([1.0], 2.0),
        lambda: claims.tcdp_epsilon(1.0, 1.0, 1e-5),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ValueError, match="must be"):
        call()


@pytest.mark.parametrize(
    ("epsilon", "delta", "exact"),  # by 400 digits of mpmath
    [
        (0.0, 1e-300, 2.5066282746310005e-300),
        (1e-12, 1e-300, 2.770381335579315e-14),
        (1e-12, 1e-18, 2.4256976674160554e-13),
        (1e-8, 1e-40, 8.741696532392119e-10),
        (1e-4, 1e-10, 2.425691522416542e-05),
        (1e6, 1e-18, 1405.4840907205464),
    ],
)
def test_mu_is_exact_and_rounded_down(epsilon, delta, exact):
    assert exact * (1 - 1e-11) <= gdp.mu(epsilon=epsilon, delta=delta) <= exact * (1 + 1e-15)


@pytest.mark.parametrize(
    ("mu", "delta", "least"),  # the exact epsilon, rounded down, by 80 digits of mpmath
    [(1e-12, 1e-300, 3.6195176e-11), (1e-13, 1e-100, 1.9669273e-12), (1e-16, 1e-20, 3.3630153e-16)],
)
def test_a_tiny_mu_has_an_epsilon(mu, delta, least):
    """There, delta is a difference of two numbers that are nearly equal, and its rounding must not make it less."""
    assert least <= gdp.epsilon(mu, delta=delta) <= (1 + 1e-9) * least + 1e-14
    assert delta <= gdp.delta(mu, epsilon=least)
    exact = accounting.event_epsilon(GaussianDpEvent(1 / mu), delta=delta)
    assert exact >= least * (1 - 1e-6)
