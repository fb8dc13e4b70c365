"""Private statistics: what a unit moves, the law of the noise, the intervals, and what a key and a budget allow."""

import decimal
import functools
import gc
import itertools
import math
import types
from fractions import Fraction

import jax
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import privacy_loss_distribution as distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters

import dpx
from dpx import statistics
from dpx.accounting import event_delta, event_epsilon
from dpx.accounting.loss import PureDpEvent, PureLoss
from dpx.ledgers.ledger import LedgerTerms
from dpx.statistics import noise as noises
from dpx.statistics import quantiles, released
from dpx.statistics.noise import Noise, UnitSensitivity
from tests.problems import run_page

KEYS = map(dpx.secret_key, itertools.count(1000))
HOSTILE = np.array(
    [np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0, 5e-324, 1.0, 0.5 + 2**-30, 1 - 2**-53, 7.0, 0.3, 2**-25]
)
TABLE = np.stack([HOSTILE, HOSTILE[::-1], np.roll(HOSTILE, 4)], axis=1)
OWNERS = np.arange(len(HOSTILE)) % 5
BOUNDS = {"low": -0.7, "high": 1.1}


APART = {"noise_multiplier": 1.0, "key": dpx.secret_key(999)}  # the next key of `KEYS` stays for others


def asked(**changes):
    return {"noise_multiplier": 1.0, "key": next(KEYS)} | changes


class Seen(Exception):
    pass


def sums_of(function, data, monkeypatch):
    """The exact sums that a release adds noise to, and what it says that a unit moves."""

    def see(self, records, effect, size):
        seen.append(UnitSensitivity(*effect))
        raise Seen

    def keep(records, sums, effect, *rest, **named):
        kept.append(sums)
        return original(*given, records, sums, effect, *rest, **named)

    seen, kept, given = [], [], []
    request = released.StatisticRequest
    original = request.release_noisy_sums
    with monkeypatch.context() as patched:
        patched.setattr(request, "choose_noise", see)
        own = lambda self, *rest, **named: (given.append(self), keep(*rest, **named))  # noqa: E731
        patched.setattr(request, "release_noisy_sums", own)
        with pytest.raises(Seen):
            function(data)
    return kept[0].reshape(-1), seen[0]


SUMS = {
    "count": lambda data: statistics.release_count(data, **asked()),
    "sum": lambda data: statistics.release_sum(data, low=-0.7, high=1.1, **asked()),
    "mean": lambda data: statistics.release_mean(data, **BOUNDS, **asked()),
    "scale": lambda data: statistics.standardize(data, **BOUNDS, **asked()),
    "complete mean": lambda data: statistics.release_mean(data, **BOUNDS, complete=True, **asked()),
    "histogram": lambda data: statistics.release_histogram(data, edges=[-1, 0, 0.5, 1], **asked()),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", ["one column", "columns", "users"])
def test_a_unit_moves_no_sum_by_more_than_is_stated(name, kind, monkeypatch):
    """Whatever it holds, whether it is nulled or deleted; and some unit moves almost that much."""
    if (name, kind) in {("complete mean", "users"), ("histogram", "columns")}:
        return
    data = TABLE if kind == "columns" else HOSTILE
    owners = OWNERS if kind == "users" else np.arange(len(HOSTILE))

    def sums(kept, values):
        made = dpx.UserData(values[kept], owners[kept], most=3) if kind == "users" else values[kept]
        return sums_of(SUMS[name], made, monkeypatch)

    everyone = np.ones(len(HOSTILE), bool)
    whole, effect = sums(everyone, data)
    largest = 0.0
    for unit in np.unique(owners):
        nulled = data.copy()
        nulled[owners == unit] = np.nan
        for other in (sums(everyone, nulled)[0], sums(owners != unit, data)[0]):
            moved = np.abs(whole - other)
            assert whole.dtype == np.int64 and moved.sum() <= effect.one and (moved > 0).sum() <= effect.moves
            assert math.sqrt((moved.astype(float) ** 2).sum()) <= effect.two
            largest = max(largest, moved.sum())
    assert largest > 0.4 * effect.one
    assert effect.two <= effect.one <= math.sqrt(effect.moves) * effect.two * (1 + 1e-12)


def test_sums_do_not_depend_on_the_order_where_floats_do(monkeypatch):
    rng = np.random.default_rng(0)
    data = (rng.normal(size=2000) * 10.0 ** rng.integers(-8, 8, size=2000)).astype(np.float32)
    orders = [rng.permutation(2000) for _ in range(8)]
    assert len({float(functools.reduce(np.add, data[order])) for order in orders}) > 1
    one = lambda values: statistics.release_sum(values, low=-1e8, high=1e8, **asked())  # noqa: E731
    assert len({int(sums_of(one, data[order], monkeypatch)[0][0]) for order in orders}) == 1


# ------------------------------------------------------------------ the law of the noise


def law_of(scale):
    """The law of the program's Laplace noise: whole numbers, int64 (n,), and their exact probabilities."""
    center, digits = noises.laplace_coin_probabilities(scale)
    size = {0: Fraction(1)}
    for j, digit in enumerate(digits):
        shown = Fraction(digit, 2**128)
        size |= {g + 2**j: p * shown for g, p in size.items()} | {g: p * (1 - shown) for g, p in size.items()}
    there = Fraction(center, 2**128)
    law = {0: 1 - there} | {sign * (1 + g): there * p / 2 for g, p in size.items() for sign in (1, -1)}
    return np.array(list(law), np.int64), list(law.values())


@pytest.mark.parametrize("scale", [0.4, 1.7])
def test_the_coins_make_rounded_laplace_noise(scale):
    """Every probability is that of the exact law up to 2^-121."""
    numbers, law = law_of(scale)
    with decimal.localcontext(prec=80):
        t = decimal.Decimal(scale)
        tail = [(-(decimal.Decimal(k) - decimal.Decimal("0.5")) / t).exp() for k in range(1, abs(numbers).max() + 2)]
        exact = [1 - tail[0] if k == 0 else (tail[abs(k) - 1] - tail[abs(k)]) / 2 for k in numbers.tolist()]
        apart = sum(abs(decimal.Decimal(p.numerator) / p.denominator - q) for p, q in zip(law, exact, strict=True))
        assert apart + tail[-1] < decimal.Decimal(2) ** -121 and sum(law) == 1


@pytest.mark.parametrize(("scale", "moved"), [(0.4, 1), (1.7, 1), (1.7, 3)])
def test_no_output_is_likelier_by_more_than_epsilon(scale, moved):
    """Of all outputs of the program, for all neighboring sums in a range, at delta 0; and some are by almost that."""
    numbers, law = law_of(scale)

    def outputs(total):
        never = np.full((len(numbers), 2), 2**63, np.uint64)
        made = noises.laplace_releases(np.full_like(numbers, total), numbers, never, scale, 0, 6)
        found: dict[float, Fraction] = dict.fromkeys(cells, Fraction(1, 2**40) / len(cells))
        for place, probability in zip(made.tolist(), law, strict=True):
            found[place] += (1 - Fraction(1, 2**40)) * probability
        return found

    first = -math.ceil(64 * scale)
    free = np.stack([np.zeros(20_000, np.uint64), np.arange(20_000, dtype=np.uint64)], axis=1)
    uniform = noises.laplace_releases(np.zeros(20_000, np.int64), np.zeros(20_000, np.int64), free, scale, 0, 6)
    cells = np.unique(uniform).tolist()
    assert cells == list(range(first, 6 - first + 1))
    laws = [outputs(total) for total in range(7)]
    most = math.exp(moved / scale + moved * 2.0**-39)
    ratios = [laws[s][k] / laws[s + moved][k] for s in range(7 - moved) for k in cells]
    ratios += [1 / ratio for ratio in ratios]
    assert 0.999 * math.exp(moved / scale) < max(ratios) <= most


def test_a_uniform_output_comes_from_one_number_in_2_to_the_40():
    edge = np.array([[2**24 - 1, 5], [2**24, 5]], np.uint64)
    made = noises.laplace_releases(np.zeros(2, np.int64), np.zeros(2, np.int64), edge, 16.0, 0, 10)
    assert made[0] == -64 * 16 + 5 and made[1] == 0


def test_laplace_noise_pays_for_its_arithmetic():
    noise = Noise.from_multiplier("laplace", 2.0, UnitSensitivity(2.0**24, 2.0**23, 3))
    assert 2.0**24 / noise.scale + 3 * 2.0**-39 <= 0.5 and noise.scale < 2.0**25 * (1 + 1e-10)
    with pytest.raises(ValueError, match=r"noise_multiplier must be below .* for Laplace noise"):
        Noise.from_multiplier("laplace", 2.0**39, UnitSensitivity(2.0, 2.0, 1))


@pytest.mark.parametrize("deviation", [16.0, 1000.5, 3e6])
def test_gaussian_noise_is_that_of_a_step(deviation):
    """Its bits are those of `dpx.keys.release` for the whole sums, where these fit."""
    sums = np.random.default_rng(1).integers(-(2**23), 2**23, size=16)
    noise = Noise.from_multiplier("gaussian", deviation, UnitSensitivity(1.0, 1.0, 1))
    assert noise.scale >= deviation
    found = noise.noisy_sums(KEY, sums, -(2**23), 2**23)
    assert (found.astype(np.float32) == dpx.keys.release(KEY, 0, sums.astype(np.float32), noise.scale)).all()
    far = 2**59 + sums  # beyond the digits of a float
    again = noise.noisy_sums(KEY, far, 0, 2**60)
    gamma = 2 ** (math.floor(math.log2(noise.scale)) - 4)
    assert (again == (far - far % gamma + noise.noisy_sums(KEY, far % gamma, 0, 2**60).astype(np.int64))).all()


KEY = dpx.secret_key(77)
RUNS = 4096


@pytest.mark.parametrize(("kind", "multiplier"), [("gaussian", 1.0), ("laplace", 1.0), ("laplace", 0.5)])
def test_no_attack_beats_the_stated_epsilon(kind, multiplier):
    """And a strong one shows most of it."""
    effect = UnitSensitivity(1024.0, 1024.0, 1)
    noise = Noise.from_multiplier(kind, multiplier, effect)
    worlds = [noise.noisy_sums(next(KEYS), np.full(RUNS, total), 0, 2**20) for total in (4 * 1024, 5 * 1024)]
    deviation = {"gaussian": multiplier, "laplace": math.sqrt(2) * multiplier}[kind]
    for total, world in zip((4, 5), worlds, strict=True):
        assert abs(world.mean() / 1024 - total) < 5 * deviation / math.sqrt(RUNS)
        assert abs(world.std() / 1024 / deviation - 1) < 0.1
    delta = 1e-2 if kind == "gaussian" else 1e-5
    bound = dpx.audit.lower_bound_from_scores(worlds[1], worlds[0], delta=delta)
    stated = event_epsilon(released.event_of_noise(kind, multiplier), delta=delta)
    assert 0.5 * stated < bound.epsilon <= stated


# ------------------------------------------------------------------ quantiles

SMALL = [counts for counts in itertools.product(range(4), repeat=3) if sum(counts) <= 5]


@pytest.mark.parametrize("epsilon", [0.3, 4.0, 500.0])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_quantiles_have_their_epsilon_on_all_small_data(epsilon, share):
    """For every table of at most five values at three points, and every neighbor: exactly, with delta 0."""
    a, ratios, moved = round(share * quantiles.SHARES), [0.0], [0.0]

    def weights(counts):
        return quantiles.exponential_weights(quantiles.rank_distances(np.array(counts), a), a, epsilon, 1)

    def apart(first, second):
        return [abs(math.log(p) - math.log(q)) for p, q in zip(first, second, strict=True)]

    for counts in SMALL:
        for place in range(3):
            one, other = weights(counts), weights([count + (n == place) for n, count in enumerate(counts)])
            ratios += apart([Fraction(w, sum(one)) for w in one], [Fraction(w, sum(other)) for w in other])
            moved += apart(one, other)
    assert max(ratios) <= epsilon * (1 + 1e-12)
    most = min(epsilon / 2, quantiles._FALL * math.log(2))
    assert 0.999 * most < max(moved) <= most * (1 + 1e-12)


def test_a_unit_of_several_values_has_less_weight_in_a_quantile():
    far = quantiles.rank_distances(np.array([5, 0, 3]), 2**19)
    alone, many = (quantiles.exponential_weights(far, 2**19, epsilon, most) for epsilon, most in ((1.0, 1), (3.0, 3)))
    assert alone == many and far.tolist() == [0, 2**20, 2**20]


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_rank_errors_are_exceeded_as_rarely_as_they_say(share, confidence):
    """Exactly, by the probabilities of all answers, for all small data; and some of them almost as often."""
    a, found, epsilon = round(share * quantiles.SHARES), [], 1.5
    for counts in SMALL[1:]:
        values = np.repeat([0.0, 1.0, 2.0], counts)
        one = statistics.release_quantiles(
            values, [share], low=0, high=2, points=3, **asked(noise_multiplier=1 / epsilon)
        )
        far = quantiles.rank_distances(np.array(counts), a)
        weights = quantiles.exponential_weights(far, a, epsilon, 1)
        (error,) = one.rank_error(confidence)
        off = sum(w for w, u in zip(weights, far.tolist(), strict=True) if u > error * quantiles.SHARES)
        found.append(off / sum(weights))
    assert max(found) <= 1 - confidence and (max(found) > 0.1 * (1 - confidence) or confidence > 0.9)


def test_quantiles_are_near_and_their_rank_error_holds():
    values = np.random.default_rng(2).gamma(2.0, 10.0, size=3001)
    values[::10] = np.nan
    there = np.sort(values[~np.isnan(values)])
    for noise_multiplier in (20.0, 0.5):
        found = statistics.release_quantiles(
            values, [0.1, 0.5, 0.9], low=0, high=200, **asked(noise_multiplier=noise_multiplier)
        )
        ranks = np.searchsorted(there, found.value)
        error = found.rank_error(0.999) + 30  # and the points
        assert (np.abs(ranks - np.array([0.1, 0.5, 0.9]) * len(there)) <= error).all()
        assert found.epsilon(delta=0) == pytest.approx(3 / noise_multiplier)
    ages = np.repeat([37.0, 20.0, 64.0], [500, 50, 50])
    exact = statistics.release_quantiles(ages, [0.25, 0.5], low=0, high=100, points=101, **asked())
    assert exact.value.tolist() == [37.0, 37.0]
    wide = statistics.release_quantiles(ages, [0.5], low=0, high=100, points=2, **asked(noise_multiplier=1e14))
    assert wide.value in (0, 100)  # with distances that no int64 holds


# ------------------------------------------------------------------ the cost


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0])
def test_a_pure_release_costs_what_dp_accounting_says(epsilon):
    pure = DifferentialPrivacyParameters(epsilon, 0.0)
    for others, count in (([], 1), ([], 7), ([GaussianDpEvent(3.0)], 4)):
        theirs = distribution.from_privacy_parameters(pure, value_discretization_interval=2e-5).self_compose(count)
        for other in others:
            noise = distribution.from_gaussian_mechanism(other.noise_multiplier, value_discretization_interval=2e-5)
            theirs = theirs.compose(noise)
        event = ComposedDpEvent([SelfComposedDpEvent(PureDpEvent(epsilon), count), *others])
        for delta in (1e-3, 1e-6):
            own = event_epsilon(event, delta=delta, relation="zero_out")
            assert own == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1.1e-4, abs=1e-4)
    assert event_epsilon(SelfComposedDpEvent(PureDpEvent(epsilon), 3), delta=0) == pytest.approx(3 * epsilon)
    assert event_epsilon(PureDpEvent(epsilon), delta=0, relation="replace_one") == pytest.approx(2 * epsilon)
    assert event_epsilon(ComposedDpEvent([PureDpEvent(epsilon), GaussianDpEvent(1.0)]), delta=0) == math.inf
    for delta in (1e-6, 1e-20):
        assert event_epsilon(PureDpEvent(epsilon), delta=delta) <= epsilon
    assert event_delta(PureDpEvent(epsilon), epsilon=epsilon) == 0
    assert event_delta(PureDpEvent(epsilon), epsilon=0.9 * epsilon) > 1e-4


@pytest.mark.parametrize("kind", [np.uint8, np.int8, Fraction])
def test_a_pure_release_costs_what_its_number_is(kind):
    for epsilon in (3, 100):
        for relation, times in (("zero_out", 1), ("replace_one", 2)):
            asked = {"delta": 1e-9, "relation": relation}
            assert event_epsilon(PureDpEvent(kind(epsilon)), **asked) == pytest.approx(times * epsilon, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0, 30.0])
def test_the_divergences_of_a_pure_release(epsilon):
    p, orders = 1 / (1 + math.exp(-epsilon)), np.array([1.5, 2.0, 8.0])
    q = math.exp(-epsilon) * p
    exact = [math.log(p**a * q ** (1 - a) + q**a * p ** (1 - a)) / (a - 1) for a in orders]
    np.testing.assert_allclose(PureLoss(epsilon).renyi(orders), exact, rtol=1e-9)
    np.testing.assert_allclose(PureLoss(epsilon * 1e-9).renyi(orders), orders * (epsilon * 1e-9) ** 2 / 2, rtol=1e-6)
    assert PureLoss(1e4).is_noiseless and not PureLoss(600.0).is_noiseless


@pytest.mark.parametrize("noise", ["gaussian", "laplace", None])
@pytest.mark.parametrize("steps", [1, 20])
def test_a_budget_is_kept_and_used(noise, steps):
    budget = dpx.Budget(epsilon=0.5, delta=1e-6, steps=steps)
    found = statistics.release_count(np.ones(50), **asked(noise_multiplier=budget, noise=noise))
    cost = event_epsilon(SelfComposedDpEvent(found.event, steps), delta=1e-6)
    assert 0.999 * 0.5 < cost <= 0.5
    if noise is None:
        assert found.noise == ("laplace" if steps == 1 else "gaussian")
    assert found.epsilon(delta=1e-6) <= 0.5 and found.epsilon(delta=0) == (
        1 / found.noise_multiplier if found.noise == "laplace" else math.inf
    )


def test_a_budget_takes_the_other_noise_where_one_has_no_proof():
    users = dpx.UserData(np.zeros((2, 2000)), np.arange(2), most=1000)
    for epsilon, delta, other, kind in ((1.0, 1e-40, "gaussian", "laplace"), (0.002, 1e-6, "laplace", "gaussian")):
        budget = dpx.Budget(epsilon=epsilon, delta=delta, steps=1)
        assert statistics.release_sum(users, low=-1, high=1, **asked(noise_multiplier=budget)).noise == kind
        with pytest.raises(ValueError, match="cannot be met by any noise|noise_multiplier must be in"):
            statistics.release_sum(users, low=-1, high=1, **asked(noise_multiplier=budget, noise=other))


def test_a_ledger_counts_laplace_noise_dearly_so_a_budget_takes_none():
    budget = dpx.Budget(epsilon=0.5, delta=1e-6, steps=1)
    assert statistics.release_count(np.ones(50), **asked(noise_multiplier=budget), ledger=Ledger()).noise == "gaussian"


def test_a_quantile_has_less_than_its_epsilon_where_float64_is_coarse():
    budget = dpx.Budget(epsilon=64.0, delta=1e-6, steps=1)
    found = statistics.release_quantiles(np.arange(50.0), [1.0], low=0, high=50, **asked(noise_multiplier=budget))
    assert 2 / found.scale[0] < 64 and found.epsilon(delta=1e-6) == 64


def test_a_budget_of_three_quantiles_is_for_all_of_them():
    budget = dpx.Budget(epsilon=0.5, delta=1e-6, steps=1)
    found = statistics.release_quantiles(np.arange(50.0), low=0, high=50, **asked(noise_multiplier=budget))
    assert found.event.count == 3 and 0.49 < found.epsilon(delta=1e-6) <= 0.5


# ------------------------------------------------------------------ values and intervals

COLUMNS = 1500  # releases at once: the noise of a column is larger by its effect on all of them


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("rows", [30, 400])
def test_intervals_hold_the_true_values_as_often_as_they_say(noise, rows):
    rng = np.random.default_rng(3)
    column = np.clip(rng.gamma(2.0, 1.0, size=rows), 0, 10)
    column[::7] = np.nan
    data, there = np.repeat(column[:, None], COLUMNS, axis=1), column[~np.isnan(column)]
    given = {"noise": noise, "noise_multiplier": 2.0 / (math.sqrt(COLUMNS) if noise == "gaussian" else COLUMNS)}
    found = {
        len(there): statistics.release_count(data, **asked(**given)),
        there.sum(): statistics.release_sum(data, low=0, high=10, **asked(**given)),
        there.mean(): statistics.release_mean(data, low=0, high=10, **asked(**given)),
        np.where(np.isnan(column), 5, column).mean(): statistics.release_mean(
            data, low=0, high=10, complete=True, **asked(**given)
        ),
    }
    bins = [
        statistics.release_histogram(
            np.tile(np.arange(COLUMNS), 3), categories=np.arange(COLUMNS), **asked(noise=noise)
        )
    ]
    scaling = statistics.standardize(data, low=0, high=10, **asked(**given)).released
    for confidence in (0.5, 0.95):
        slack = 4 * math.sqrt(confidence * (1 - confidence) / COLUMNS)
        for true, one in [*found.items(), *zip([3], bins, strict=True)]:
            low, high = one.interval(confidence)
            share = ((low <= true) & (true <= high)).mean()
            assert (
                confidence - slack <= share <= (confidence + slack if one.words in ("count", "sum", "histogram") else 1)
            )
            assert low.shape == (COLUMNS,) and ((low <= one.value) & (one.value <= high)).mean() > 0.98
        low, high = scaling.interval(confidence)
        for row, true in enumerate((there.mean(), there.std())):
            assert ((low[row] <= true + 1e-6) & (true - 1e-6 <= high[row])).mean() >= confidence - slack


def test_values_are_near_the_exact_ones():
    values = np.array([1.0, np.nan, 3.0, np.inf, -5.0, 2.0] * 500)
    tiny = {"noise_multiplier": 1e-3}
    assert statistics.release_count(values, **asked(noise_multiplier=1 / 64)).value == pytest.approx(2500, abs=0.2)
    assert statistics.release_count(values > 1, **asked(noise_multiplier=1 / 64)).value == pytest.approx(1500, abs=0.2)
    clipped = np.clip(values[~np.isnan(values)], 0, 4)
    assert statistics.release_sum(values, low=0, high=4, **asked(**tiny)).value == pytest.approx(clipped.sum(), abs=0.1)
    mean = statistics.release_mean(values, low=0, high=4, **asked(**tiny))
    assert mean.value == pytest.approx(clipped.mean(), abs=1e-4) and isinstance(mean.value, float)
    scaling = statistics.standardize(values, low=0, high=4, **asked(**tiny))
    assert scaling.mean == pytest.approx(clipped.mean(), abs=1e-4) and scaling.scale == pytest.approx(
        clipped.std(), abs=1e-3
    )
    edges = [-np.inf, 0, 1, 3, np.inf]
    found = statistics.release_histogram(values, edges=edges, **asked(noise_multiplier=1 / 64))
    assert found.value.round().tolist() == [500, 0, 1000, 1000]
    words = np.array(["b", "a", "zz", "b"])
    found = statistics.release_histogram(words, categories=["zz", "b", "none"], **asked(noise_multiplier=1 / 64))
    assert found.value.round().tolist() == [1, 2, 0]
    assert statistics.release_accuracy(values == 1.0, **asked(**tiny)).value == pytest.approx(1 / 6, abs=1e-3)


def test_a_scaling_is_a_function_of_public_numbers():
    table = np.random.default_rng(4).normal(3.0, 2.0, size=(4000, 2))
    table[:, 1] *= 10
    scaling = statistics.standardize(table, low=[-5, -50], high=[11, 110], **asked(noise_multiplier=0.1))
    scaled = np.asarray(jax.jit(scaling)(table))
    assert (
        abs(scaled.mean(axis=0)).max() < 0.02 and abs(scaled.std(axis=0) - 1).max() < 0.4
    )  # of one release at epsilon 0.1
    one = np.asarray(scaling(np.array([np.nan, np.inf])))
    assert one[0] == 0 and one[1] == pytest.approx((110 - scaling.mean[1]) / scaling.scale[1])
    constant = statistics.standardize(np.full((1000, 40), 5.0), low=0, high=10, **asked(noise_multiplier=1.0))
    assert 0.5 < constant.scale.min() and constant.scale.max() <= 5  # the noise, never 0


def test_users_are_the_unit_where_the_data_hold_users():
    values, owners = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), ["a", "b", "a", "a", "b", "a"]
    users = dpx.UserData(values, owners, most=2, unit="patient")
    assert users.kept_rows.tolist() == [1.0, 4.0, 2.0, 5.0]
    found = statistics.release_sum(users, low=0, high=10, **asked(noise_multiplier=1e-4))
    assert found.unit == "patient" and found.value == pytest.approx(12, abs=0.05)
    with pytest.raises(ValueError, match="complete must be False for dpx.UserData"):
        statistics.release_mean(users, low=0, high=1, complete=True, **asked())


OF_USERS = {
    "count": statistics.release_count,
    "sum": functools.partial(statistics.release_sum, low=0, high=9),
    "mean": functools.partial(statistics.release_mean, low=0, high=9),
    "histogram": functools.partial(statistics.release_histogram, edges=[0, 3, 9]),
    "quantiles": functools.partial(statistics.release_quantiles, low=0, high=9, points=10),
    "scale": lambda data, **given: statistics.standardize(data, low=0, high=9, **given).released,
    "accuracy": lambda data, **given: statistics.release_accuracy(
        dpx.UserData(np.arange(6) > 2, [1, 2, 1, 1, 2, 3], most=3, unit=data.privacy_unit), **given
    ),
}


@pytest.mark.parametrize("name", OF_USERS)
def test_every_statistic_is_for_examples_or_for_users(name, tmp_path):
    """The ledger of a unit takes those of its unit alone; and three records of a user move three times as much."""
    values, owners = np.arange(6.0), [1, 2, 1, 1, 2, 3]
    one, three = (dpx.UserData(values, owners, most=most, unit="patient") for most in (1, 3))
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=9.0, delta=1e-5, unit="patient")
    found = OF_USERS[name](three, **asked(ledger=ledger))
    assert found.unit == "patient" and [entry.event for entry in ledger.entries] == [found.event]
    if name != "accuracy":
        with pytest.raises(ValueError, match="protect the unit of the ledger"):
            OF_USERS[name](values, **asked(ledger=ledger))
        alone = OF_USERS[name](one, **asked())
        if name == "quantiles":
            assert found.scale == pytest.approx(3 * alone.scale)
        elif name in ("count", "sum", "histogram"):
            wide, narrow = (np.subtract(*each.interval()[::-1]) for each in (found, alone))
            assert wide == pytest.approx(3 * narrow, rel=1e-4)


def arrays_within(thing, seen):
    """All arrays that an object holds, also in the closures of its functions."""
    if id(thing) not in seen and not isinstance(thing, type | types.ModuleType):
        seen[id(thing)] = thing
        of = isinstance(thing, types.FunctionType)
        for part in [cell.cell_contents for cell in thing.__closure__ or ()] if of else gc.get_referents(thing):
            arrays_within(part, seen)
    return [each for each in seen.values() if isinstance(each, np.ndarray)]


@pytest.mark.parametrize("name", [*SUMS, "quantiles"])
def test_a_release_holds_no_data(name):
    """Anyone may see it, so it may be stored or sent whole, with what its interval is computed from."""
    values = np.linspace(0, 1, 1237)
    calls = SUMS | {"quantiles": lambda data: statistics.release_quantiles(data, low=0, high=1, points=3, **asked())}
    found = arrays_within(calls[name](values), {})
    assert found and all(len(values) not in each.shape for each in found)


# ------------------------------------------------------------------ keys and ledgers


def test_a_key_makes_one_release():
    key, values = next(KEYS), np.arange(20.0)
    first = statistics.release_count(values, **asked(key=key))
    assert statistics.release_count(values, **asked(key=key)).value == first.value
    for other in (
        lambda: statistics.release_count(values[1:], **asked(key=key)),
        lambda: statistics.release_count(values, **asked(key=key, noise_multiplier=2.0)),
        lambda: statistics.release_sum(values, low=0, high=1, **asked(key=key)),
    ):
        with pytest.raises(ValueError, match="key must be used for only one release"):
            other()


def test_other_sums_have_other_noise():
    """So that two releases of one key, such as of two programs, cannot be subtracted."""
    own = [noises.key_of_query(KEY, "count", np.array([total])) for total in (5, 6)]
    zeros = np.zeros(16, np.int64)
    for kind in ("gaussian", "laplace"):
        noise = Noise.from_multiplier(kind, 1.0, UnitSensitivity(1024.0, 1024.0, 1))
        first, second = (noise.noisy_sums(key, zeros, 0, 100) for key in own)
        assert (first != second).mean() > 0.5 and len({*first.tolist()}) > 8
    asked_otherwise = noises.key_of_query(KEY, "sum", np.array([5]))
    assert len({int(dpx.keys.mark_of_key(key)) for key in (*own, asked_otherwise)}) == 3


class Ledger:
    terms = LedgerTerms(epsilon=1.0, delta=1e-5)

    def __init__(self, *, allows=True):
        self.lines, self.allows = [], allows

    def spend(self, event, **line):
        if not self.allows:
            raise ValueError("the budget must allow a release before it is made")
        self.lines.append((event, line))


def test_a_ledger_is_paid_before_the_release(monkeypatch):
    ledger, order = Ledger(), []
    original = Noise.noisy_sums
    monkeypatch.setattr(Noise, "noisy_sums", lambda *given: (order.append(len(ledger.lines)), original(*given))[1])
    key = next(KEYS)
    found = statistics.release_mean(
        np.arange(9.0), low=0, high=9, **asked(key=key), words="mean age", ledger=ledger, part="north"
    )
    ((event, line),) = ledger.lines
    assert order == [1] and event == found.event == GaussianDpEvent(1.0)
    assert line["words"] == "mean age" and line["part"] == "north" and line["unit"] == "example"
    assert line["numbers"] == found.numbers >= 2 and line["key"] is key
    statistics.release_quantiles(np.arange(9.0), low=0, high=9, **asked(), ledger=ledger)
    assert ledger.lines[1][0] == SelfComposedDpEvent(PureDpEvent(1.0), 3)
    refuses = asked(ledger=Ledger(allows=False))
    with pytest.raises(ValueError, match="budget must allow"):
        statistics.release_count(np.ones(3), **refuses)
    assert order == [1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda given: statistics.release_count(np.ones(40), noise="gaussian", **given),
        lambda given: statistics.release_count(np.ones(40), noise="laplace", **given),
        lambda given: statistics.release_quantiles(np.ones(40), low=0, high=9, **given),
    ],
)
def test_a_ledger_of_persons_with_several_records_pays_for_all_of_them(ask, tmp_path):
    """Nulling three records moves a sum, and the distance of a point, three times as far as nulling one."""
    ledgers = [dpx.PrivacyLedger(tmp_path / f"{k}", epsilon=9.0, delta=1e-6, records=k) for k in (1, 3)]
    one = ask(asked(noise_multiplier=10.0, ledger=ledgers[0]))
    three = ask(asked(noise_multiplier=10.0, ledger=ledgers[1]))
    alike = ask(asked(noise_multiplier=10 / 3))
    assert three.event == one.event and ledgers[0].epsilon == pytest.approx(one.epsilon(delta=1e-6))
    assert ledgers[1].epsilon == pytest.approx(alike.epsilon(delta=1e-6))
    assert ledgers[1].epsilon > 2.5 * ledgers[0].epsilon


def test_a_ledger_where_the_number_of_examples_is_private_has_no_statistics(tmp_path):
    """A mean that divides by it, and the range of Laplace noise, show it."""
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=1.0, delta=1e-6, relation="add_or_remove")
    with pytest.raises(ValueError, match="relation of the ledger of a statistic"):
        statistics.release_mean(np.ones(9), low=0, high=1, complete=True, **asked(noise_multiplier=20.0), ledger=ledger)
    assert not ledger.entries


# ------------------------------------------------------------------ metrics


def test_a_private_metric_is_a_release_for_each_model():
    seen = []

    def correct(params):
        seen.append(1)
        return np.arange(200) < params["share"] * 200

    budget = dpx.Budget(epsilon=4.0, delta=1e-5, steps=3)
    metric = statistics.PrivateMetric(correct, noise_multiplier=budget, key=next(KEYS))
    values = [metric({"share": np.float32(share)}) for share in (0.25, 0.5, 0.25, 0.75)]
    assert values[0] == values[2] and len(seen) == 3 and len(metric.released) == 3
    np.testing.assert_allclose(values, [0.25, 0.5, 0.25, 0.75], atol=0.05)
    errors = np.array(values)[[0, 1, 3]] - [0.25, 0.5, 0.75]
    assert len({*errors.round(9).tolist()}) == 3
    assert 0.99 * 4 < metric.epsilon(delta=1e-5) <= 4.0
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 2"):  # its epsilon was 0
        metric.epsilon(delta=2)
    with pytest.raises(ValueError, match="must have a step for each call, steps=4, got 3"):
        metric({"share": np.float32(1.0)})


def test_a_metric_costs_what_its_largest_release_costs():
    metric = statistics.PrivateMetric(lambda width: np.ones((200, width)), noise_multiplier=9.0, key=next(KEYS))
    for width in (1, 4096):
        metric(width)
    wide = statistics.PrivateMetric(lambda width: np.ones((200, 4096)), noise_multiplier=9.0, key=next(KEYS))
    for width in (1, 2):
        wide(width)
    assert metric.epsilon(delta=1e-5) == wide.epsilon(delta=1e-5)


def test_a_metric_of_some_examples_must_not_show_how_many():
    """A release of a precision showed how many predictions are positive: the noise is on a grid that N divides."""
    positive = np.arange(200) < 80
    budget = dpx.Budget(epsilon=40.0, delta=1e-5, steps=2)
    some = statistics.PrivateMetric(lambda share: positive[: int(share)], noise_multiplier=budget, key=next(KEYS))
    some(np.float32(100))
    with pytest.raises(ValueError, match="must have a value for each example at every call"):
        some(np.float32(160))
    assert len(some.released) == 1
    with pytest.raises(ValueError, match="one number for each example, .* leave out the mean"):
        statistics.PrivateMetric(np.mean, noise_multiplier=budget, key=next(KEYS))(positive)
    chosen = {"noise_multiplier": budget, "key": next(KEYS), "complete": False}
    precision = statistics.PrivateMetric(lambda share: np.where(np.arange(200) < share, positive, np.nan), **chosen)
    np.testing.assert_allclose([precision(np.float32(share)) for share in (100, 160)], [0.8, 0.5], atol=0.05)


# ------------------------------------------------------------------ refusals


class Integers:
    """A column of pandas: one missing value makes it an array of floats, in which 2^53 + 1 counts as 2^53."""

    dtype = "Int64"

    def __array__(self, dtype=None, copy=None):
        return np.array([2**53 + 1, np.nan])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: statistics.release_count(np.ones((2, 2, 2)), **asked()), "data must be"),
        (lambda: statistics.release_count(np.zeros(0), **asked()), "N of at least 1"),
        (lambda: statistics.release_count([True] * 9 + [2], **asked()), "whose dtype does not depend on the records"),
        (lambda: statistics.release_histogram([2**53 + 1, math.nan], categories=[1], **asked()), "not depend on"),
        (lambda: statistics.release_histogram(Integers(), categories=[1], **APART), "not depend on"),
        (lambda: statistics.release_histogram(np.array(["a"], object), categories=["a"], **asked()), "to_numpy"),
        (lambda: statistics.release_histogram(np.ma.array(["a"]), categories=["a"], **asked()), "without a mask"),
        (lambda: statistics.release_count(np.array(["a"]), **asked()), "numbers or bools"),
        (lambda: statistics.release_sum(np.array(["a"]), low=0, high=1, **asked()), "must hold numbers"),
        (
            lambda: statistics.release_mean(np.ones(3), low=9, high=0, **asked()),
            "low must be below .* low=9, high=0$",
        ),
        (lambda: statistics.release_mean(np.ones(3), low=-np.inf, high=1, **asked()), "low must be below high"),
        (lambda: statistics.release_mean(np.ones(3), low=-1.7e308, high=1.7e308, **asked()), "finite difference"),
        (lambda: statistics.release_mean(TABLE, low=[0, 1], high=1, **asked()), "one for each column"),
        (lambda: statistics.release_count(np.ones(3), **asked(noise_multiplier=0.0)), "above 0"),
        (lambda: statistics.release_count(np.ones(3), **asked(noise_multiplier=1e-3)), r"must be in \["),
        (lambda: statistics.release_count(np.ones(3), **asked(noise_multiplier=1e30)), r"must be in \["),
        (lambda: statistics.release_count(np.ones(3), **asked(noise="uniform")), "noise must be"),
        (lambda: statistics.release_count(np.ones(3), **asked(key=3)), "key must be a jax PRNG key"),
        (lambda: statistics.release_histogram(np.ones(3), **asked()), "exactly one of edges"),
        (lambda: statistics.release_histogram(np.ones(3), edges=[1, 1], **asked()), "edges must be ascending"),
        (lambda: statistics.release_histogram(np.ones(3), edges=[0, np.nan], **asked()), "edges must be ascending"),
        (lambda: statistics.release_histogram(np.ones(3), categories=["a"], **asked()), "categories must be"),
        (lambda: statistics.release_histogram(np.ones(3), categories=[1, 1], **asked()), "categories must be"),
        (lambda: statistics.release_histogram(np.array([b"a"]), categories=["a"], **asked()), "categories must be"),
        (
            lambda: statistics.release_accuracy(np.arange(9), **asked()),
            r"correct must be bool .* got integers \(int64\)",
        ),
        (lambda: statistics.release_accuracy([3, 7], **APART), "correct must be bool"),
        (
            lambda: statistics.release_accuracy(dpx.UserData(np.arange(9), np.arange(9)), **asked()),
            "correct must be bool",
        ),
        (lambda: statistics.release_quantiles(np.ones(3), [2.0], low=0, high=1, **asked()), r"in \[0, 1\]"),
        (lambda: statistics.release_quantiles(np.ones(3), low=0, high=1, points=1, **asked()), "points must be"),
        (lambda: statistics.release_quantiles(TABLE, low=0, high=1, **asked()), r"shape \(N,\)"),
        (
            lambda: statistics.release_count(
                np.ones(3), **asked(noise_multiplier=dpx.Budget(epsilon=1.0, delta=1e-5, steps=1, records=2))
            ),
            "take dpx.UserData",
        ),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_epsilon_given_as_noise_is_warned_of():
    for noise, cost in (("gaussian", 26.4), ("laplace", 20)):
        given = {"noise": noise, "noise_multiplier": 0.25 if noise == "gaussian" else 0.05}
        with pytest.warns(UserWarning, match=f"gives epsilon = {cost} at .* pass noise_multiplier=dpx.Budget"):
            statistics.release_count(np.ones(9), **asked(**given))


@pytest.mark.long
def test_the_page_on_statistics(capsys):
    names = run_page("docs/statistics.md")
    assert "incomes, [" in capsys.readouterr().out
    assert abs(np.asarray(names["features"]).mean(axis=0)).max() < 0.4  # of one release at epsilon 0.1


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", ["count", "sum", "mean", "complete mean", "scale"])
def test_no_attack_on_a_statistic_beats_its_epsilon(name, noise):
    """Each of 1,500 equal columns is a run of its own, and the attacker knows all other rows."""
    data = np.repeat(np.array([0.2, 0.9, -0.3, 0.5] * 5 + [1.1])[:, None], COLUMNS, axis=1)
    other = data.copy()
    other[-1] = np.nan
    given = {"noise": noise, "noise_multiplier": 0.7 / (math.sqrt(COLUMNS) if noise == "gaussian" else COLUMNS)}
    calls = {
        "count": lambda rows: statistics.release_count(rows, **asked(**given)),
        "sum": lambda rows: statistics.release_sum(rows, **BOUNDS, **asked(**given)),
        "mean": lambda rows: statistics.release_mean(rows, **BOUNDS, **asked(**given)),
        "complete mean": lambda rows: statistics.release_mean(rows, **BOUNDS, complete=True, **asked(**given)),
        "scale": lambda rows: statistics.standardize(rows, **BOUNDS, **asked(**given)).released,
    }
    present, absent = (np.atleast_2d(calls[name](rows).value)[-1] for rows in (data, other))
    if name == "scale":  # one near the middle lowers it
        present, absent = -present, -absent
    delta = 1e-2 if noise == "gaussian" else 1e-5
    bound = dpx.audit.lower_bound_from_scores(present, absent, delta=delta).epsilon
    stated = event_epsilon(released.event_of_noise(noise, 0.7), delta=delta)
    assert (0.4 if name in ("count", "sum") else 0.0) * stated <= bound <= stated


def test_a_ledger_of_statistics_and_a_metric(tmp_path):
    """All of it within one budget, also after a program that made a part of it was run again."""
    path, values = tmp_path / "ledger", np.arange(50.0)
    key, count, metric_key = next(KEYS), next(KEYS), next(KEYS)

    def program():
        ledger = dpx.PrivacyLedger(path, epsilon=1.0, delta=1e-6)
        mean = statistics.release_mean(
            values, low=0, high=50, **asked(key=key, noise_multiplier=20.0), words="mean", ledger=ledger
        )
        statistics.release_count(values, **asked(key=count, noise_multiplier=10.0, noise="laplace"), ledger=ledger)
        metric = statistics.PrivateMetric(
            lambda params: values < params, noise_multiplier=25.0, key=metric_key, ledger=ledger, part="validation"
        )
        return ledger, mean.value, metric(np.float32(9)), metric(np.float32(20))

    (ledger, *first), (again, *second) = program(), program()
    assert first == second and [entry.words for entry in again.entries][0] == "mean" and len(again.entries) == 4
    assert again.entries[1].event == PureDpEvent(0.1) and again.entries[2].part == "validation"
    together = ComposedDpEvent([GaussianDpEvent(20.0), PureDpEvent(0.1), SelfComposedDpEvent(GaussianDpEvent(25.0), 2)])
    exact = event_epsilon(together, delta=1e-6, relation="zero_out")
    assert exact <= again.epsilon < 1.6 * exact and ledger.epsilon == again.epsilon  # chosen as it went
    with pytest.raises(ValueError, match="budget"):
        statistics.release_count(values, **asked(noise_multiplier=1.0), ledger=again)
    assert len(again.entries) == 4
