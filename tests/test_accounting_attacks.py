"""Bounds on attacks: above the exact rates of the best attack, and near them."""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import stats

import dpx
from dpx.accounting import best_of, gdp
from dpx.accounting.compose import Composition
from dpx.accounting.cost import event_profile
from dpx.accounting.profiles import DeltaProfile
from dpx.reports import attack_bounds, plot_attack_bounds
from dpx.reports.attacks import _epsilon_delta_grid, attack_bounds_of_profile
from dpx.values import rounded_up
from tests.problems import dp_sgd, poisson

DELTA = 1e-5
MECHANISM = dp_sgd(poisson(1000, 100), 1.5)
RUN = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 50)


def bounds(event, rates=(0.01, 0.001), **options):
    return attack_bounds(Composition(event, "add_or_remove"), delta=DELTA, false_positive_rates=rates, **options)


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize("mu", [0.02, 0.5, 3.0])
def test_gaussians_are_bounded_from_above_and_closely(mu):
    found, rates = bounds(GaussianDpEvent(1 / mu), (0.3, 0.01, 0.001)), np.array([0.3, 0.01, 0.001])
    exact = stats.norm.cdf(mu - stats.norm.isf(rates))
    assert (exact <= found.true_positive_rates).all() and (found.true_positive_rates <= exact * 1.01).all()
    assert found.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-9)
    assert mu * 0.99 <= found.mu <= mu * 1.01


def test_one_sampled_gaussian_against_its_best_test():
    """Of N(0, s^2) against (1 - q) N(0, s^2) + q N(1, s^2), and the other way round: x > t and x < t."""
    rate, noise, t = 0.2, 0.7, np.linspace(-2, 3, 101)
    absent, one = stats.norm.sf(t / noise), stats.norm.sf((t - 1) / noise)
    present = (1 - rate) * absent + rate * one
    for wrong, right in ((absent, present), (1 - present, 1 - absent)):
        found = np.array(
            bounds(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), wrong.tolist()).true_positive_rates
        )
        assert (right <= found * (1 + 1e-9)).all()
        closest = (found / right).min()
    assert closest < 1.01  # the bound is of both directions, so it is close to the larger


def mu_holds(mu, profile):
    epsilons = np.linspace(0, 10, 41).tolist()
    return all(
        profile.delta(epsilon=epsilon) <= (gdp.delta(mu, epsilon=epsilon) + DELTA) * (1 + 1e-6) for epsilon in epsilons
    )


def test_mu_is_the_least_that_holds():
    exact, rates = event_profile(RUN, curve=True), np.geomspace(1e-6, 1, 50)
    found, by_renyi = bounds(RUN, rates), bounds(RUN, rates, accountant="rdp")
    winner = attack_bounds(best_of(RUN, trials=10, score_on="public"), delta=DELTA, false_positive_rates=rates)
    assert mu_holds(found.mu, exact) and not mu_holds(found.mu * 0.99, exact)
    assert found.mu < by_renyi.mu < winner.mu < 4 and found.advantage < by_renyi.advantage < winner.advantage < 1
    for each in (found, by_renyi, winner):
        limits = stats.norm.cdf(each.mu - stats.norm.isf(rates)) + DELTA
        assert (each.true_positive_rates <= limits * (1 + 1e-9)).all()
        assert (np.diff(each.true_positive_rates) >= 0).all()


def test_ends():
    nothing, everything = bounds(NoOpDpEvent()), bounds(GaussianDpEvent(0.0))
    assert nothing[:4] == (0.0, (0.01, 0.001), (0.01, 0.001), 0.0)
    assert everything[:4] == (1.0, (0.01, 0.001), (1.0, 1.0), math.inf)
    leaky = attack_bounds_of_profile(
        DeltaProfile(lambda epsilon: 0.25), DELTA, (0.0, 0.5)
    )  # fails with probability 1/4
    assert leaky.mu == math.inf and leaky.true_positive_rates == pytest.approx((0.25, 0.75))
    assert (
        attack_bounds_of_profile(DeltaProfile(lambda epsilon: 1 / (2 + epsilon)), DELTA, (0.5,)).mu == math.inf
    )  # never below DELTA
    private = DeltaProfile(lambda epsilon: 0.0 if epsilon >= 1 else 1.0)  # pure: the advantage is tanh(1/2)
    pure = attack_bounds_of_profile(private, DELTA, (0.01, 0.9))
    assert pure.advantage == pytest.approx(math.tanh(0.5)) and math.isfinite(pure.mu)
    assert pure.true_positive_rates == pytest.approx((0.01 * math.e, 1 - 0.1 / math.e))
    floored = DeltaProfile(lambda epsilon: max(math.exp(-epsilon / 50), 0.25))
    assert attack_bounds_of_profile(floored, DELTA, (0.0,)).true_positive_rates == pytest.approx((0.25,))
    assert len(_epsilon_delta_grid(floored, DELTA)[0]) < 60  # each of the 37 others may take seconds


def test_a_mechanism_its_report_and_what_is_refused():
    found, report = attack_bounds(MECHANISM, 50, delta=DELTA), dpx.privacy_report(MECHANISM, 50, delta=DELTA)
    assert found == bounds(RUN) == report.attacks
    most = rounded_up(100 * found.true_positive_rates[0], 4)
    for words in (f"above {most}%", f"mu = {rounded_up(found.mu, 4)}", "The advantage of an attack"):
        assert words in report.to_markdown()
    for rates in ((1.5,), (math.nan,)):
        with pytest.raises(ValueError, match="false_positive_rates must be"):
            attack_bounds(MECHANISM, 50, delta=DELTA, false_positive_rates=rates)
    with pytest.raises(ValueError, match="do not pass them again"):
        attack_bounds(Composition(RUN, "add_or_remove"), 50, delta=DELTA)


def test_the_report_draws_the_curve(tmp_path):
    """In one call, as one page that needs nothing else; no point is below the bound."""
    report = dpx.privacy_report(MECHANISM, 50, delta=DELTA, unit="<b>patient")
    wrong, most = zip(*report.attack_curve, strict=True)
    assert most == attack_bounds(MECHANISM, 50, delta=DELTA, false_positive_rates=wrong).true_positive_rates
    page = report.save(tmp_path / "new" / "report.html").read_text()
    assert page == report.to_html() and page.count("http") == 1 and "<b>" not in page  # the name of SVG's elements
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
    points = np.array([point.split(",") for point in line.attrib["points"].split()], float)
    corner, end = points[-1], np.array([80, 390])  # of the rates 1 and 1, and 1e-4 and 1e-4
    drawn = 10.0 ** (4 * (points - corner) / np.abs(end - corner) * [1, -1])
    np.testing.assert_allclose(drawn[:, 0], wrong, rtol=2e-3)
    assert len(points) == 41 and (drawn[:, 1] >= most).all() and (drawn[:, 1] < np.array(most) * 1.01).all()
    rows = report.save(tmp_path / "report.md").read_text()
    assert f"| wrongly names 10% of outsiders | finds at most {rounded_up(100 * most[30], 4)}% |" in rows
    assert json.loads(report.save(str(tmp_path / "report.json")).read_text())["attack_curve"][30] == [0.1, most[30]]
    for name in ("report.pdf", "report", "html"):
        with pytest.raises(ValueError, match=f"path must end in .*{name}'"):
            report.save(name)


def test_the_plot():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    axes = plot_attack_bounds(bounds(RUN, np.geomspace(1e-4, 1, 9)), label="DP-SGD")
    assert plot_attack_bounds(bounds(RUN, [0.1, 1.0]), axes=axes) is axes and axes.get_xscale() == "log"
    assert sorted(line.get_label() for line in axes.lines if line.get_label()[0] != "_") == ["DP-SGD", "guessing"]
    pyplot.close("all")
