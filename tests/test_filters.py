"""The filter: never below what the worst policy of choosing releases does, on cases small enough to try all of them."""

import contextlib
import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import special

import dpx
from dpx.accounting import gdp
from dpx.accounting.cost import event_profile, profile_of_run
from dpx.accounting.filters import NOTHING, PrivacyFilter, Spent, credit_for_untaken_steps, dominating_mu
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import PureDpEvent
from dpx.accounting.profiles import DeltaProfile

GRID = 0.05  # of privacy losses


class Pair:
    """Two distributions of a discrete outcome, whose losses lie on the grid: the mass of each loss under the first."""

    def __init__(self, masses: dict[int, float]):
        self.masses = masses

    def delta(self, epsilon: float) -> float:
        """In the worse direction."""
        losses = np.array(list(self.masses)) * GRID
        first = np.array(list(self.masses.values()))
        second = first * np.exp(-losses)
        both = [np.maximum(first - math.exp(epsilon) * second, 0).sum(), second - math.exp(epsilon) * first]
        return max(both[0], np.maximum(both[1], 0).sum())

    @property
    def profile(self) -> DeltaProfile:
        return DeltaProfile(self.delta)


def response(size: int) -> Pair:
    """Randomized response of epsilon size * GRID."""
    right = 1 / (1 + math.exp(-size * GRID))
    return Pair({size: right, -size: 1 - right})


def rare(size: int, share: float) -> Pair:
    """Randomized response with a probability, and nothing otherwise."""
    right = share / (1 + math.exp(-size * GRID))
    return Pair({0: 1 - share, size: right, -size: share - right})


def worst(pairs, allowed, state, after, epsilon: float, steps: int) -> float:
    """The largest delta of any policy: which of `pairs` comes next may depend on all losses so far.

    allowed: (state) -> whether releases with this state may be made. after: (state, number of a pair) -> state.
    """

    @functools.cache
    def value(loss: int, state, left: int) -> float:
        best = max(0.0, -math.expm1(epsilon - loss * GRID))  # nothing more is released
        for number, pair in enumerate(pairs):
            later = after(state, number)
            if left and allowed(later):
                best = max(best, sum(mass * value(loss + k, later, left - 1) for k, mass in pair.masses.items()))
        return best

    return value(0, state, steps)


PAIRS = [response(4), response(16), rare(40, 0.02), rare(60, 0.002)]
BUDGETS = [(1.0, 0.05), (1.5, 0.02), (2.0, 0.01), (2.5, 0.003)]


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_no_policy_gets_more_than_the_filter_allows(epsilon, delta):
    """Every pair may come next after every loss, as long as the filter affords it."""
    tried = PrivacyFilter(epsilon, delta)
    most = tried.limits
    coins = most.delta / 4
    charges = [Spent(dominating_mu(pair.profile, coins) ** 2, coins) for pair in PAIRS]

    def after(counts, number):
        return tuple(count + (place == number) for place, count in enumerate(counts))

    def allowed(counts):
        spent = Spent(*(sum(map(math.prod, zip(counts, part, strict=True))) for part in zip(*charges, strict=True)))
        return tried.affords(spent)

    found = worst(PAIRS, allowed, (0,) * len(PAIRS), after, epsilon, 4)
    assert 0 < found <= delta


def test_exact_composition_is_no_filter():
    """A policy that takes only what the composed losses allow, whatever was released, exceeds delta."""
    epsilon, delta = 1.5, 0.02

    def composed(counts):
        total = {0: 1.0}
        for count, pair in zip(counts, PAIRS, strict=True):
            for _ in range(count):
                sums = {}
                for (a, p), (b, q) in itertools.product(total.items(), pair.masses.items()):
                    sums[a + b] = sums.get(a + b, 0.0) + p * q
                total = sums
        return Pair(total)

    def after(counts, number):
        return tuple(count + (place == number) for place, count in enumerate(counts))

    def allowed(counts):
        return composed(counts).delta(epsilon) <= delta

    assert worst(PAIRS, allowed, (0,) * len(PAIRS), after, epsilon, 4) > 1.02 * delta


def sampled(rate: float, sigma: float, steps: int) -> SelfComposedDpEvent:
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)


EVENTS = [GaussianDpEvent(5.0), LaplaceDpEvent(4.0), sampled(0.01, 1.0, 500), sampled(0.2, 4.0, 30)]


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("coins", [1e-6, 1e-3])
def test_a_coin_and_a_gaussian_bound_a_release_at_every_epsilon(event, coins):
    profile = event_profile(event, curve=True)
    mu = dominating_mu(profile, coins)
    epsilons = np.linspace(0, 1.2 * profile.epsilon(coins), 200).tolist()
    bounds = [coins + (1 - coins) * gdp.delta(mu, epsilon=epsilon) for epsilon in epsilons]
    gaps = [bound - profile.delta(epsilon) for bound, epsilon in zip(bounds, epsilons, strict=True)]
    assert min(gaps) >= 0
    assert any(gap < 0.005 * bound for gap, bound in zip(gaps, bounds, strict=True)), "far too much"


def test_gaussians_cost_what_they_are():
    tried = PrivacyFilter(2.0, 1e-5)
    charge = tried.charge(event_profile(GaussianDpEvent(4.0)), NOTHING)
    assert 1 <= charge.precision * 16 < 1.001
    assert charge.delta < 1e-11
    assert tried.epsilon_of(charge) == pytest.approx(gdp.epsilon(0.25, delta=1e-5), rel=1e-3)


def test_a_long_run_costs_about_what_it_would_alone():
    """Of epsilon, 1% is for all that may be chosen later."""
    run = profile_of_run(sampled(0.017, 1.2, 1000), relation="zero_out")
    tried = PrivacyFilter(3.0, 1e-5)
    alone, charged = run.epsilon(1e-5), tried.epsilon_of(tried.charge(run, NOTHING))
    assert alone < charged < 1.01 * alone


def test_the_odometer_holds_wherever_a_reader_stops():
    """Gaussian releases, and the best rule of when to stop, by what was released."""
    tried, steps, grid = PrivacyFilter(2.0, 1e-2), 64, 0.02
    times = np.linspace(0, tried.limits.precision, steps + 1)
    odometer = [tried.odometer(Spent(time, 0.0)) for time in times]
    at_its_time = [gdp.epsilon(math.sqrt(time), delta=1e-2) for time in times]
    assert all(here < bound < 1.7 + 1.3 * here for here, bound in zip(at_its_time[1:], odometer[1:], strict=True))
    losses = grid * np.arange(-200, 801)
    moves = grid * np.arange(-100, 101)
    density = np.exp(-((moves - times[1] / 2) ** 2) / (2 * times[1]))
    density /= density.sum()

    def most(bounds):
        value = np.maximum(-np.expm1(bounds[-1] - losses), 0)
        for bound in bounds[-2::-1]:
            ahead = np.convolve(np.pad(value, 100, mode="edge"), density[::-1], mode="valid")
            value = np.maximum(np.maximum(-np.expm1(bound - losses), 0), ahead)
        return value[200]

    assert 0.002 < most(odometer) <= 0.01 < 0.02 < most(at_its_time)


def test_coins_have_a_share_of_delta():
    tried = PrivacyFilter(1.0, 1e-3)
    assert gdp.delta(math.sqrt(tried.limits.precision), epsilon=1.0) + tried.limits.delta <= 1e-3
    for epsilon, delta in ((0.0, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="must be"):
            PrivacyFilter(epsilon, delta)


def later(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """delta of N(0, 1) against N(mu, 1) at epsilons of any sign."""
    seen = np.exp(epsilons + special.log_ndtr(-mu / 2 - epsilons / mu))
    return special.ndtr(mu / 2 - epsilons / mu) - seen


@pytest.mark.parametrize(("rate", "sigma", "share"), [(0.9, 3.5, 0.7), (0.5, 2.0, 0.3)])
def test_no_policy_gains_by_ending_a_run_early(rate, sigma, share):
    """Three steps are paid for. After each, a policy continues, or ends the run and spends what the refund leaves."""
    epsilon, delta, steps = 1.5, 1e-2, 3
    tried, losses = PrivacyFilter(epsilon, delta), 0.01 * np.arange(-800, 801)
    paid = tried.charge(event_profile(sampled(rate, sigma, steps), curve=True), NOTHING)
    left = [tried.limits.precision - paid.precision]
    for ahead in range(1, steps + 1):
        back = credit_for_untaken_steps(
            from_event(sampled(rate, sigma, ahead)).losses("zero_out"), (tried.limits.delta - paid.delta) / 8
        )
        assert paid.delta + back.delta <= tried.limits.delta
        left.append(left[0] + back.precision)
    noise = np.linspace(-8 * sigma, 1 + 8 * sigma, 20_001)
    without, moved = (np.diff(special.ndtr((noise - mean) / sigma)) for mean in (0, 1))
    rising = np.log1p(rate * np.expm1((2 * noise - 1) / (2 * sigma**2)))
    found = []
    for masses, moves in (((1 - rate) * without + rate * moved, rising[:-1]), (without, -rising[1:])):
        places = np.clip(np.floor(moves / 0.01).astype(int), -800, 800) + 800  # losses are rounded down
        step = np.bincount(places, masses, 1601)
        value = later(math.sqrt(left[0]), epsilon - losses)
        for precision in left[1:]:
            padded = np.concatenate([np.zeros(800), value, np.full(800, value[-1])])
            onward = np.convolve(padded, step[::-1], mode="valid")
            value = np.maximum(later(math.sqrt(precision), epsilon - losses), onward)
        found.append(value[800])
    assert share * delta < max(found) <= delta


@pytest.mark.parametrize(("epsilon", "delta", "planned", "sizes"), [(0.3, 0.1, 5, (3, 4)), (0.25, 0.2, 8, (4, 6))])
def test_no_policy_gets_more_than_a_ledger_allows(epsilon, delta, planned, sizes, tmp_path):
    """One release that is planned, and three that may follow from all that was released before them."""
    ledger, pairs = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=epsilon, delta=delta), [*map(response, sizes)]
    given = {"words": "one", "numbers": 1, "part": None, "marks": ()}
    first = dataclasses.replace(ledger._new_entry((), event=PureDpEvent(planned * GRID), **given), made=True)
    assert first.planned

    @functools.cache
    def entries(chosen):
        """What the ledger then has; nothing where it refuses."""
        before = entries(chosen[:-1]) if chosen else (first,)
        with contextlib.suppress(ValueError):
            if chosen and before:
                return (*before, ledger._new_entry(before, event=PureDpEvent(sizes[chosen[-1]] * GRID), **given))
            return before
        return ()

    def value(loss, chosen):
        best = max(0.0, -math.expm1(epsilon - loss * GRID))
        for number, pair in enumerate(pairs):
            if len(chosen) < 3 and entries((*chosen, number)):
                ahead = ((mass, value(loss + k, (*chosen, number))) for k, mass in pair.masses.items())
                best = max(best, sum(mass * found for mass, found in ahead))
        return best

    assert 0.5 * delta < sum(mass * value(k, ()) for k, mass in response(planned).masses.items()) <= delta
    assert not all(entries(chosen) for chosen in itertools.product(range(2), repeat=3))


def test_the_smaller_cost_of_a_pure_release_is_no_bound():
    """After a fifth of B, either Gaussians up to B or one pure release of the epsilon that is left, by the loss so far:
    each alone meets delta, and whoever chooses does not."""
    epsilon, delta = 1.0, 1e-6
    most = gdp.mu(epsilon=epsilon, delta=delta) ** 2
    mu, rest = math.sqrt(most / 5), math.sqrt(most * 4 / 5)
    left = epsilon - gdp.epsilon(mu, delta=delta)
    z = np.linspace(-9, 12, 40001)
    to_go, weight = epsilon - (mu**2 / 2 + mu * z), np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    chance = special.expit(left)
    pure = sum(p * np.maximum(0, 1 - np.exp(to_go - e)) for p, e in ((chance, left), (1 - chance, -left)))
    gaussian = special.ndtr(rest / 2 - to_go / rest) - np.exp(to_go) * special.ndtr(-rest / 2 - to_go / rest)
    assert weight @ pure < delta and weight @ gaussian == pytest.approx(delta, rel=1e-4)
    assert weight @ np.maximum(pure, gaussian) > 1.6 * delta
    found = dominating_mu(event_profile(PureDpEvent(left), relation="zero_out"), 1e-12)
    assert found == pytest.approx(2 * special.ndtri(chance), rel=2e-4)
