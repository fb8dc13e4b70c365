"""Searches for hyperparameters: the bill against the theorems and exact examples, and what the driver keeps secret."""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import dpx
from dpx import keys, tuning
from dpx.accounting import best_of, event_epsilon, selection
from dpx.accounting.pld import renyi
from dpx.accounting.pld.losses import SampledGaussian
from dpx.accounting.selection import SHAPES, BestOf, draw_trial_count, log_inverse_success_probability
from dpx.states.record import set_run_plan

pytestmark = pytest.mark.filterwarnings("ignore:the state has taken no step")  # trials here train nothing
PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "tuning.md").read_text()
SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=50)
MNIST = SelfComposedDpEvent(PoissonSampledDpEvent(8192 / 60000, GaussianDpEvent(4.793)), 293)
PUBLIC = {"trials": 10, "score_on": "public"}


def slope_of(distribution, mean):
    """z -> E K z^(K - 1), the derivative of the generating function, and P(K = 1), in closed form."""
    if distribution == "poisson":
        return lambda z: mean * np.exp(mean * (z - 1)), mean * math.exp(-mean)
    gamma = math.exp(-log_inverse_success_probability(mean, SHAPES[distribution]))
    if distribution == "geometric":
        return lambda z: gamma / (1 - (1 - gamma) * z) ** 2, gamma
    return lambda z: (gamma - 1) / math.log(gamma) / (1 - (1 - gamma) * z), (gamma - 1) / math.log(gamma)


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize(("distribution", "known"), [("logarithmic", 3.66), ("geometric", 4.32), ("poisson", 4.90)])
def test_ten_trials_at_epsilon_two(distribution, known):
    bill = best_of(MNIST, **PUBLIC, distribution=distribution)
    assert bill.epsilon(delta=1e-5) == pytest.approx(known, abs=5e-3)
    reference = RdpAccountant(selection.SEARCH_ORDERS.tolist()).compose(
        RepeatAndSelectDpEvent(MNIST, 10, SHAPES[distribution])
    )
    assert bill.epsilon(delta=1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-8)
    assert bill.delta(epsilon=3.0) == pytest.approx(reference.get_delta(3.0), rel=1e-6)
    assert bill.epsilon(delta=1e-5) == event_epsilon(bill.event, delta=1e-5, accountant="rdp", relation="zero_out")
    assert bill.epsilon(delta=1e-5) < event_epsilon(bill.event, delta=1e-5, relation="replace_one")
    assert event_epsilon(MNIST, delta=1e-5) == pytest.approx(2, abs=1e-3)
    assert event_epsilon(SelfComposedDpEvent(MNIST, 10), delta=1e-5) == pytest.approx(7.42, abs=5e-3)
    with pytest.raises(ValueError, match="no privacy loss distribution"):
        bill.epsilon(delta=1e-5, accountant="pld")


@pytest.mark.parametrize("distribution", SHAPES)
def test_the_bill_is_true_for_the_largest_of_gaussians(distribution):
    """A trial is N(0, s^2) or N(1, s^2), and the best is the largest: P(best <= y) = E P(trial <= y)^K.

    The formulas of the theorems are not used here.
    """
    noise, mean = 3.0, 6.0
    slope, _ = slope_of(distribution, mean)
    y, width = np.linspace(-12 * noise, 12 * noise, 20_001, retstep=True)
    densities = [slope(stats.norm.cdf(y, shift, noise)) * stats.norm.pdf(y, shift, noise) for shift in (0, 1)]
    none = math.exp(-mean) if distribution == "poisson" else 0.0
    pairs = [
        [np.append(density * width, none or 1e-300) for density in order] for order in (densities, densities[::-1])
    ]
    bill = best_of(GaussianDpEvent(noise), trials=mean, score_on="public", distribution=distribution)
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        exact = max(np.maximum(one - math.exp(epsilon) * other, 0).sum() for one, other in pairs)
        assert 0 < exact <= bill.delta(epsilon=epsilon)
    orders = renyi.ORDERS[renyi.ORDERS <= 8]
    divergences = BestOf(SampledGaussian(noise, 1.0), mean, SHAPES[distribution]).renyi(renyi.ORDERS)
    for one, other in pairs:
        moments = np.exp(orders * np.log(one)[:, None] + (1 - orders) * np.log(other)[:, None]).sum(axis=0)
        assert (np.log(moments) / (orders - 1) <= divergences[: len(orders)]).all()


def test_the_closed_form_for_gaussians():
    """rho = 1 / (2 s^2): a rho + ln m / (a - 1) + 2 (2 sqrt(rho ln m) - rho), for a geometric number of mean m."""
    noise, mean = 4.0, 10.0
    orders, rho = np.linspace(1.5, 60, 20_000), 1 / (2 * noise**2)
    expected = orders * rho + math.log(mean) / (orders - 1) + 2 * (2 * math.sqrt(rho * math.log(mean)) - rho)
    expected = np.minimum.accumulate(expected[::-1])[::-1]
    found = BestOf(SampledGaussian(noise, 1.0), mean, 1.0).renyi(orders)
    assert (found >= expected * (1 - 1e-12)).all() and np.allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("distribution", SHAPES)
def test_the_number_of_trials_has_its_distribution(distribution):
    """False alarms: below 1e-4. A number that is off by one moves the mean by many deviations."""
    mean, draws = 2.0, 300
    found = np.array(
        [draw_trial_count(key, mean, SHAPES[distribution]) for key in jax.random.split(jax.random.key(5), draws)]
    )
    slope, once = slope_of(distribution, mean)
    assert slope(1.0) == pytest.approx(mean, rel=1e-9)
    assert abs(found.mean() - mean) < 4 * found.std() / math.sqrt(draws)
    assert abs((found == 1).mean() - once) < 4 * math.sqrt(once * (1 - once) / draws)
    assert found.min() == (0 if distribution == "poisson" else 1) and draw_trial_count(jax.random.key(0), 1.0, 0.0) == 1


def test_a_trial_costs_as_much_as_the_worst_configuration():
    events = [ComposedDpEvent([PoissonSampledDpEvent(0.1, GaussianDpEvent(noise))] * 5) for noise in (2.0, 1.0, 3.0)]
    worst = best_of(events[1], **PUBLIC)
    together = best_of(*events, **PUBLIC)
    assert together.epsilon(delta=1e-5) == worst.epsilon(delta=1e-5) and together.configurations == 3
    crossing = best_of(GaussianDpEvent(4.0), MNIST, **PUBLIC)  # the worst depends on the order
    assert crossing.epsilon(delta=1e-5) >= max(
        best_of(each, **PUBLIC).epsilon(delta=1e-5) for each in (GaussianDpEvent(4.0), MNIST)
    )
    assert together.allows_trial(events[1]) and not best_of(events[0], **PUBLIC).allows_trial(events[1])


def test_a_trial_that_costs_more_at_a_large_order_only_is_not_allowed():
    common, rare = (
        PoissonSampledDpEvent(rate, GaussianDpEvent(noise)) for rate, noise in ((0.1, 300.0), (0.001, 30.0))
    )
    assert not best_of(common, **PUBLIC).allows_trial(rare) and not best_of(rare, **PUBLIC).allows_trial(common)


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize("noise", [GaussianDpEvent(5.0), LaplaceDpEvent(5.0)])
def test_a_private_score_is_billed_in_every_trial(noise):
    bill = best_of(MNIST, trials=10, score_on=noise)
    reference = RdpAccountant(selection.SEARCH_ORDERS.tolist()).compose(
        RepeatAndSelectDpEvent(ComposedDpEvent([MNIST, noise]), 10, 0)
    )
    assert bill.epsilon(delta=1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-8)
    assert bill.epsilon(delta=1e-5) > best_of(MNIST, **PUBLIC).epsilon(delta=1e-5) + 0.01


@pytest.mark.parametrize(
    ("loss", "mean", "shape"), [(1, 1000, 0), (1, 1000, 1), (1, 1000, 0.5), (1, 100, 2), (0.1, 10, 5)]
)
def test_the_winner_of_pure_trials_costs_what_is_published(loss, mean, shape):
    """(2 + shape) epsilon (Papernot and Steinke 2022, Corollary 3), which dp-accounting's tests ask for."""
    search, noise = RepeatAndSelectDpEvent(LaplaceDpEvent(1 / loss), mean, shape), GaussianDpEvent(1 / loss)
    assert event_epsilon(search, delta=1e-10) == pytest.approx((2 + shape) * loss, abs=1e-7)
    both = event_epsilon(ComposedDpEvent([search, noise]), delta=1e-10)  # at orders of the noise, which end earlier
    assert both <= event_epsilon(noise, delta=1e-10, accountant="rdp") + (2 + shape) * loss + 1e-7


@pytest.mark.parametrize(("rho", "mean", "shape"), [(1e-3, 4, 0), (1e-4, 10, 1), (0.1, 100, 1), (20, 10, 0)])
def test_the_winner_of_gaussian_trials_costs_what_is_published(rho, mean, shape):
    """Corollary 4 of the paper, at the best of many orders; rho <= ln(1/gamma)."""
    beyond = np.linspace(0, 40, 20_001)
    tilts = math.sqrt(math.log(mean) / rho) * (1 + beyond**2)
    root = math.sqrt(rho * log_inverse_success_probability(mean, shape))
    log_gamma = log_inverse_success_probability(mean, shape)
    constant = (1 + shape) * (2 * root - rho if rho <= log_gamma else log_gamma)
    grown = rho * (tilts + 1) + math.log(mean) / tilts
    exact = np.min(grown + constant + np.log1p(-1 / (tilts + 1)) - np.log(1e-5 * (tilts + 1)) / tilts)
    bill = event_epsilon(RepeatAndSelectDpEvent(GaussianDpEvent(math.sqrt(0.5 / rho)), mean, shape), delta=1e-5)
    assert exact * (1 - 1e-6) <= bill <= 1.005 * exact


def test_what_has_no_bill_is_refused():
    feedback = dpx.methods.dice_sgd(
        clip_norm=1.0,
        feedback_norm=0.1,
        outer_clip_norm=2.0,
        noise_multiplier=1.0,
        sampling=SAMPLING,
        key=jax.random.key(0),
    )
    for candidate, options, message in (
        ((feedback, 20), {}, "a search over such runs has no known cost"),
        (LaplaceDpEvent(1.0), {"relation": "replace_one"}, "no known Renyi divergence"),
        (UnsupportedDpEvent(), {}, "no known Renyi divergence"),
        (None, {}, "a candidate must be"),
    ):
        with pytest.raises(ValueError, match=message):
            best_of(candidate, **PUBLIC, **options)
    with pytest.raises(ValueError, match="at least one"):
        best_of(**PUBLIC)
    with pytest.raises(ValueError, match="the same neighboring relation"):
        best_of(MNIST, (mechanism({}, jax.random.key(0), dpx.FixedSizeSampling(examples=9, batch_size=3)), 1), **PUBLIC)
    for mean, shape in ((0.5, 0), (math.inf, 0), (2, -1)):
        with pytest.raises(ValueError, match="mean must be finite|shape of a RepeatAndSelectDpEvent"):
            event_epsilon(RepeatAndSelectDpEvent(MNIST, mean, shape), delta=1e-5)
    loud = best_of(GaussianDpEvent(1.0), ComposedDpEvent([GaussianDpEvent(0.0)]), **PUBLIC)
    assert loud.epsilon(delta=1e-5) == best_of(NonPrivateDpEvent(), **PUBLIC).epsilon(delta=1e-5) == math.inf


@pytest.mark.usefixtures("exact_noise")
def test_a_search_composes():
    made, other = mechanism({}, jax.random.key(1)), mechanism({}, jax.random.key(2))
    search = best_of((made, 20), **PUBLIC)
    both = dpx.compose_runs(search, (other, 20), shared_batches=False)
    reference = (
        RdpAccountant(selection.SEARCH_ORDERS.tolist()).compose(search.event).compose(other.event(20)).get_epsilon(1e-5)
    )
    assert both.epsilon(delta=1e-5) == pytest.approx(reference, rel=1e-8)
    assert (
        dpx.compose_runs(both, (mechanism({}, jax.random.key(3)), 20), shared_batches=False).epsilon(delta=1e-5)
        > reference
    )
    for shared, message in ((False, "a key of its own"), (True, "did not share")):
        with pytest.raises(ValueError, match=message):
            dpx.compose_runs(search if shared else both, (other, 20), shared_batches=shared)


# ------------------------------------------------------------------ The driver


def mechanism(configuration, key, sampling=SAMPLING):
    noise = configuration.get("noise", 2.0)
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)


RATES = [{"rate": rate} for rate in (1.0, 2.0, 3.0, 4.0)]


class Searcher:
    """A search whose trials train nothing, and are recorded."""

    def __init__(self, configurations=RATES, score=lambda params: params["rate"], **options):
        self.trials, self.fails_at = [], None
        self.configurations, self.score = configurations, score
        self.options = {"optimizer": mechanism, "steps": 20, "delta": 1e-5, "trials": 6, "score_on": "public"} | options

    def train(self, trial):
        self.trials.append(trial)
        if len(self.trials) == self.fails_at:
            raise KeyboardInterrupt
        params = {"w": jnp.zeros(2)} | {name: jnp.float32(value) for name, value in trial.configuration.items()}
        return params, trial.optimizer.init(params)

    def __call__(self, seed=0, **options):
        self.trials = []
        key = jax.random.key(seed)
        options = {"configurations": self.configurations, "score": self.score} | self.options | options
        return tuning.search(self.train, key=key, **options)

    def drawn(self):
        return [trial.configuration["rate"] for trial in self.trials]


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_the_number_of_trials_and_the_configurations_come_from_the_key():
    search, counts, drawn = Searcher(), [], []
    for seed in range(8):
        found = search(seed)
        counts.append(len(search.trials))
        drawn += search.drawn()
        assert counts[-1] == draw_trial_count(dpx.keys.stream(jax.random.key(seed), "number of trials"), 6, 0)
        assert float(found.params["rate"]) == found.configuration["rate"] == found.score == max(search.drawn())
        noise = {bits(trial.optimizer.key) for trial in search.trials} | {bits(jax.random.key(seed))}
        assert len(noise | {bits(trial.key) for trial in search.trials}) == 2 * counts[-1] + 1
    assert len(set(counts)) > 3 and set(drawn) == {1, 2, 3, 4}
    assert found.epsilon == best_of((mechanism({}, jax.random.key(9)), 20), trials=6, score_on="public").epsilon(
        delta=1e-5
    )


def test_nothing_of_the_other_trials_is_in_the_result():
    """Two searches whose numbers of trials differ, but not the winner, give results that are equal."""
    search, results = Searcher([{"rate": 1.0}]), {}
    for seed in range(4):
        found = search(seed)
        results[len(search.trials)] = str(found._replace(params=None))
    assert len(results) > 1 and len(set(results.values())) == 1


def test_every_configuration_is_billed_drawn_or_not():
    loud = [{"rate": 1.0, "noise": 4.0}, {"rate": 2.0, "noise": 1.0}]
    search = Searcher(loud, trials=1)
    found = {search(seed).epsilon for seed in range(4)}
    event = mechanism(loud[1], jax.random.key(0)).event(20)
    assert found == {best_of(event, trials=1, score_on="public").epsilon(delta=1e-5)}


def test_what_a_trial_changes_in_its_configuration_is_not_in_the_next():
    """Trials were not identically distributed: each had half of the rate of the one before."""
    search, seen = Searcher([{"rate": 1.0, "sizes": [4]}], score=lambda params: 0.0), []

    def train(trial):
        seen.append((trial.configuration["rate"], *trial.configuration["sizes"]))
        trial.configuration["rate"] /= 2
        trial.configuration["sizes"].append(5)
        params = {"w": jnp.zeros(2)}
        return params, trial.optimizer.init(params)

    search.train = train
    for seed in range(3):
        search(seed)
    assert len(seen) > 3 and {*seen} == {(1.0, 4)}


def test_an_interrupted_search_has_the_same_trials_again(tmp_path):
    tmp_path.chmod(0o755)
    search = Searcher(checkpoints=tmp_path, trials=20)
    whole, trials = search(5), search.trials
    assert len(trials) > 2 and [trial.folder.name for trial in trials] == [str(n) for n in range(len(trials))]
    search.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        search(5)
    search.fails_at = None
    again = search(5)
    assert [bits(t.optimizer.key) for t in search.trials] == [bits(t.optimizer.key) for t in trials]
    assert search.drawn() == [t.configuration["rate"] for t in trials] and again.score == whole.score
    assert (tmp_path / "SENSITIVE").exists()
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("SENSITIVE", "search.json")} == {0o600}
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    for change in ({"trials": 5}, {"seed": 4}, {"distribution": "poisson"}):
        with pytest.raises(ValueError, match="one of the same search"):
            search(**({"seed": 3} | change))


def test_a_folder_keeps_each_score_and_its_parameters(tmp_path):
    """On another machine the values are rounded otherwise, which under the same noise would be a second release."""
    values, made = [0.25], []

    def score(params):
        made.append(params)
        return np.array(values)

    search = Searcher(score=score, score_on=tuning.NoisySum(noise_multiplier=3.0), trials=20, checkpoints=tmp_path)
    search.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        search(5)
    assert len(made) == 1 and (tmp_path / "score-0.json").stat().st_mode & 0o777 == 0o600
    search.fails_at = None
    whole, trials = search(5), len(search.trials)
    values[0] = 0.75
    assert search(5).score == whole.score and len(made) == trials
    other = Searcher([{"rate": rate + 0.5} for rate in (1.0, 2.0, 3.0, 4.0)], score, **search.options)
    with pytest.raises(ValueError, match="train must return the same parameters whenever a trial is repeated"):
        other(5)


def test_one_program_has_the_folder_of_a_search(tmp_path):
    """Another one could compute a score a second time."""
    search = Searcher(checkpoints=tmp_path, trials=1)

    def score(params):
        with pytest.raises(ValueError, match="must belong to one program at a time"):
            search(5)
        return 0.5

    assert search(5, score=score).score == 0.5 == search(5).score


def test_ties_and_scores_that_are_no_numbers():
    order = []

    def score(params):
        order.append(float(params["rate"]))
        return math.nan if params["rate"] < 3 else 1.0

    search = Searcher(score=score, trials=20)
    assert search(3).configuration["rate"] == next(rate for rate in order if rate >= 3)
    assert Searcher(score=lambda params: math.nan)(3).score == -math.inf


def test_a_score_on_private_data_has_noise_that_is_billed():
    right = np.array([1.0, 0.0, 500.0, -3.0, np.nan])  # counts 2
    search = Searcher([{"rate": 1.0}], lambda params: right, score_on=tuning.NoisySum(noise_multiplier=3.0), trials=1)
    scores = np.array([search(seed).score for seed in range(12)])
    assert len(set(scores.tolist())) == 12 and search(7).score == scores[7]
    assert abs(scores.mean() - 2) < 4 * 3 / math.sqrt(12) and 1.2 < scores.std() < 5
    event = mechanism({}, jax.random.key(0)).event(20)
    expected = best_of(event, trials=1, score_on=GaussianDpEvent(3.0)).epsilon(delta=1e-5)
    assert search(7).epsilon == expected and "from private data" in search(7).report.tuning
    right[1] = 1.0  # on another machine; with the same noise, the difference would be 1
    differences = np.array([search(seed).score for seed in range(4)]) - scores[:4]
    assert abs(differences.mean() - 1) < 4 * 3 * math.sqrt(2 / 4) and differences.std() > 1.0
    own = Searcher(score=lambda params, key: float(jax.random.laplace(key)), score_on=LaplaceDpEvent(1.0))
    assert own(7).score != own(8).score and own(7).epsilon > Searcher()(7).epsilon + 0.1


def test_a_score_on_private_data_is_released_as_two_numbers(monkeypatch):
    """In one float32, an example would move a sum above 2^24 by 2, and one above 2^25 by 4, where 1 is billed."""
    totals, release = [], keys.release
    monkeypatch.setattr(keys, "release", lambda *given: totals.append(given[2]) or release(*given))
    values = np.random.default_rng(0).random(1000)
    Searcher([{"rate": 1.0}], lambda params: values, score_on=tuning.NoisySum(noise_multiplier=3.0), trials=1)(7)
    for total in totals:
        assert abs(float(total.high[0]) + float(total.low[0]) - math.fsum(values)) < 2**-46 * values.sum()
    assert totals


def test_a_poisson_number_may_be_zero():
    search = Searcher(distribution="poisson", trials=1)
    found = [search(seed) for seed in range(6)]
    empty = [each for each in found if each.configuration is None]
    assert 0 < len(empty) < 6 and len({each.epsilon for each in found}) == 1 and empty[0].report is None


def test_the_report_of_a_search():
    found = Searcher()(3)
    assert found.report.epsilon == {"pld": None, "rdp": found.epsilon}
    for words in ("Included: the run is the best", "logarithmic, 6 expected", "4 configurations", "from public data"):
        assert words in found.report.to_markdown()
    made = mechanism({}, jax.random.key(0))
    once = made.init({"w": jnp.zeros(2)}).after_release(made.noise_multiplier)
    ends = [dpx.privacy_report(made, once, delta=1e-5, tuning=each).ending for each in (None, found.cost)]
    assert "steps taken and no others" in ends[0] and ends[1] == ""  # a search pays for all steps of a trial
    assert "chosen on public data" in dpx.privacy_report(made, 20, delta=1e-5, tuning="public").tuning
    assert "without any run on these data. If not" in dpx.privacy_report(made, 20, delta=1e-5).to_markdown()
    with pytest.raises(ValueError, match="a key of its own"):
        dpx.compose_runs(found.cost, found.cost, shared_batches=False)
    with pytest.raises(ValueError, match="tuning must be"):
        dpx.privacy_report(made, 20, delta=1e-5, tuning="yes")  # type: ignore
    with pytest.raises(ValueError, match="one that the search counted"):
        dpx.privacy_report(made, 21, delta=1e-5, tuning=found.cost)


def test_trials_of_one_key_are_refused():
    """A trial that trains another optimizer than its own would share its noise with the other trials."""
    search = Searcher()

    def train(trial):
        params, state = Searcher.train(search, trial)
        return params, state.with_fields(batch_key=dpx.keys.mark_of_key(jax.random.key(8)))

    search.train = train
    with pytest.raises(ValueError, match="must train its own optimizer, and draw its batches with the key"):
        search()


def test_the_budget_of_a_score_pays_for_no_steps():
    made = mechanism({}, jax.random.key(0))
    bill = best_of((made, 20), trials=3, score_on=GaussianDpEvent(0.1))
    assert bill.allows_trial(made.event(20)) and not bill.allows_trial(made.event(21))


def with_noise(configuration, key, *, noise_multiplier):
    sampling = dpx.PoissonSampling(examples=1000, batch_size=configuration.get("batch_size", 50))
    return mechanism({"noise": noise_multiplier}, key, sampling)


TOTAL = dpx.Budget(epsilon=2.0, delta=1e-5, epochs=1)  # 20 steps of batches of 50
WITHIN = {"optimizer": with_noise, "steps": None, "delta": None, "budget": TOTAL}


@pytest.mark.parametrize("score_on", ["public", tuning.NoisySum(noise_multiplier=20.0)])
def test_a_search_within_a_total_budget(score_on):
    score = {} if score_on == "public" else {"score": lambda params: np.ones(5)}
    search = Searcher(**WITHIN, score_on=score_on, **score)
    found = search()
    trial = search.trials[0].optimizer
    assert 2.0 * (1 - 2e-4) <= found.epsilon <= 2.0 and found.delta == 1e-5
    assert "The target for one example was epsilon 2 at" in str(found.report)
    assert trial.budget.steps == 20 == trial.init({"w": jnp.zeros(2)}).planned_steps
    noise = trial.noise_multiplier
    event = GaussianDpEvent(20.0) if score_on != "public" else score_on

    def cost(noise):
        return best_of((mechanism({"noise": noise}, trial.key), 20), trials=6, score_on=event).epsilon(delta=1e-5)

    assert cost(noise) == found.epsilon == found.report.epsilon["rdp"]
    assert cost(0.999 * noise) > 2.0  # the least
    assert dpx.epsilon(trial, 20, delta=1e-5) < 2.0


def test_configurations_whose_bills_cross_within_a_budget():
    """Small batches for many steps and whole ones for few: the worst depends on the Renyi order."""
    sizes = [{"rate": 1.0, "batch_size": 5}, {"rate": 2.0, "batch_size": 1000}, {"rate": 3.0, "batch_size": 50}]
    search = Searcher(sizes, **WITHIN)
    found = search(7, trials=20)
    assert 2.0 * (1 - 2e-4) <= found.epsilon <= 2.0
    noise = {t.configuration["batch_size"]: t.optimizer.noise_multiplier for t in search.trials}
    steps = {t.configuration["batch_size"]: t.optimizer.budget.steps for t in search.trials}
    assert steps == {5: 200, 50: 20, 1000: 1} and noise[5] < noise[50] < noise[1000]


REFUSED = {
    "a budget beside steps": (WITHIN | {"steps": 20}, "steps and delta must not be given with a budget"),
    "a budget beside a delta": (WITHIN | {"delta": 1e-5}, "steps and delta must not be given with a budget"),
    "a budget that is a number": (WITHIN | {"budget": 2.0}, "budget must be a dpx.Budget, got 2.0"),
    "a budget, and an optimizer without noise": (
        WITHIN | {"optimizer": mechanism},
        "of .configuration, key, noise_multiplier=.* got an unexp",
    ),
    "a budget, and an optimizer of constant noise": (
        WITHIN | {"optimizer": lambda c, key, noise_multiplier: mechanism({"noise": 0.5}, key)},
        "optimizer must use the noise multiplier that it is given",
    ),
    "a budget that the score exceeds": (
        WITHIN | {"score_on": tuning.NoisySum(noise_multiplier=1.0)},
        "epsilon=2 at delta=1e-05. Expect fewer trials.* add more noise to a private score: epsilon=2.0 cannot be met",
    ),
    "a budget by pld": (
        WITHIN | {"budget": dpx.Budget(epsilon=2.0, delta=1e-5, steps=20, accountant="pld")},
        "no privacy loss distribution",
    ),
    "a score of unknown origin": ({"score_on": None}, "score_on must be"),
    "a score that pays for itself": (
        {"score": dpx.statistics.PrivateMetric(lambda params: [True], noise_multiplier=9.0, key=dpx.secret_key())},
        "whose cost the search would not include",
    ),
    "a private score without noise": ({"score_on": "private"}, "a score on private data without noise"),
    "a score whose event is no noise": ({"score_on": ComposedDpEvent([]), "score": max}, "must have noise"),
    "half a trial": ({"trials": 0.5}, "trials must be"),
    "another distribution": ({"distribution": "fixed"}, "distribution must be one of"),
    "a list of distributions": ({"distribution": ["poisson"]}, "distribution must be one of .* got a list"),
    "a number for a folder": ({"checkpoints": 3}, "checkpoints must be a path, got 3"),
    "one key for all trials": (
        {"optimizer": lambda c, key: mechanism(c, jax.random.key(0))},
        "must build its mechanism",
    ),
    "no mechanism": ({"optimizer": lambda c, key: None}, "must come first"),
    "no configuration": ({"configurations": []}, "must be a list of at least one, such as"),
    "no steps": ({"steps": None}, "steps must be given"),
    "no delta": ({"delta": None}, "delta must be given"),
    "a score of several values for one example": (
        {"score_on": tuning.NoisySum(noise_multiplier=1.0), "score": lambda params: np.ones(1001)},
        "at most one value for each of 1000 examples, got 1001",
    ),
    "a score of many numbers": ({"score_on": tuning.NoisySum(noise_multiplier=1.0)}, r"of shape \(n,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Searcher()(**options)


def test_trials_beyond_the_bill_are_refused():
    search = Searcher()
    paid = search.train

    def train(trial, optimizer=None):
        params, optimizer = paid(trial)[0], optimizer or trial.optimizer
        state = optimizer.init(params)
        for _ in range(3):
            _, state = optimizer.update(jax.tree.map(lambda p: p[None], params), state, params, included=None)
        return params, state

    def train_losers_with_less_noise(trial):
        wins = trial.configuration["rate"] == 4.0
        return train(trial, None if wins else mechanism({"noise": 0.5}, trial.optimizer.key))

    search.train = train
    assert search(steps=3).steps == 3
    with pytest.raises(ValueError, match="at most the 2 steps"):
        search(steps=2)
    search.train = lambda trial: (*train(trial)[:1], set_run_plan(train(trial)[1], 5))  # and a callback ended it
    with pytest.raises(ValueError, match="plan and take at most the 4 steps that are paid for, got 5"):
        search(steps=4)
    search.train = train
    noises = iter([*[2.0] * 4, *[0.1] * 20])
    with pytest.raises(ValueError, match="must return the mechanism that is paid for"):
        search(optimizer=lambda configuration, key: mechanism({"noise": next(noises)}, key))
    search.train = train_losers_with_less_noise
    with pytest.raises(ValueError, match="a trial must train trial.optimizer, .*other noise"):
        search(3, steps=3, trials=20)
    assert search.drawn()[-1] < 4.0


# ------------------------------------------------------------------ The page


@pytest.mark.long
def test_the_page(promoting, capsys):
    """docs/tuning.md, with keys whose searches are short."""
    keys = iter(["key = dpx.secret_key(5)", "key=dpx.secret_key(7)", '"key": dpx.secret_key(6)'])
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = re.sub(r'(key = |key=|"key": )dpx.secret_key\(\)', lambda _: next(keys), "".join(blocks))
    with jax.numpy_rank_promotion("allow"):
        exec(code, {})
    first, noisy, second, sentences = capsys.readouterr().out.split("\n", 3)
    assert re.fullmatch(r"\{'learning_rate': .*\} accuracy 0.\d\d, epsilon \d.\d\d, one trial alone: \d.\d\d", first)
    assert re.fullmatch(r"accuracy [01].\d\d", noisy)
    assert [float(number) > 0 for number in second.split()] == [True] * 3
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert sentences.split() == shown.split()


def test_the_prices_on_the_page():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [mean for mean, _ in rows] == ["3", "10", "30"]
    for mean, cells in rows:
        for distribution, cell in zip(SHAPES, cells.split(" | "), strict=True):
            bill = best_of(MNIST, trials=float(mean), score_on="public", distribution=distribution)
            price, most = cell.split(", ")
            assert bill.epsilon(delta=1e-5) == pytest.approx(float(price), abs=5.1e-3)
            gamma = math.exp(-log_inverse_success_probability(float(mean), min(SHAPES[distribution], 1)))
            laws = {"logarithmic": stats.logser(1 - gamma), "geometric": stats.geom(gamma)}
            assert laws.get(distribution, stats.poisson(float(mean))).ppf(0.99) == float(most)


def test_a_ledger_is_paid_before_the_first_trial(tmp_path):
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=10.0, delta=1e-5)
    search, folder = Searcher(), tmp_path / "search"
    search.fails_at = 1
    with pytest.raises(KeyboardInterrupt):
        search(0, ledger=ledger, checkpoints=folder, words="the search")
    (entry,) = ledger.entries
    search.fails_at = None
    found = search(0, ledger=ledger, checkpoints=folder)
    assert ledger.entries == (entry,) and (entry.words, entry.made) == ("the search", True)
    assert ledger.epsilon == pytest.approx(found.epsilon, rel=1e-6)
    winner = dpx.statistics.PrivateMetric(
        lambda params: np.ones(50, bool), noise_multiplier=9.0, key=dpx.secret_key(), words="winner", ledger=ledger
    )
    assert winner(found.params) > 0.3 and ledger.entries[1].words == "winner" and ledger.epsilon > found.epsilon
    for options in ({}, {"checkpoints": tmp_path / "another"}):
        with pytest.raises(ValueError, match="was made with this key"):
            search(0, ledger=ledger, **options)
    assert search.trials == []
    poor = dpx.PrivacyLedger(tmp_path / "poor", epsilon=0.1, delta=1e-5)
    persons = dpx.PrivacyLedger(tmp_path / "persons", epsilon=10.0, delta=1e-5, records=2)
    for other, message in ((poor, "must stay within the budget"), (persons, "must be for the ledger's")):
        with pytest.raises(ValueError, match=message):
            search(1, ledger=other)
    with pytest.raises(ValueError, match="protect the unit of the ledger"):
        search(1, ledger=ledger, unit="user")
    assert search.trials == [] and not poor.entries
