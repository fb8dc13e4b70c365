"""Correlated noise: strategies, their sensitivity against all patterns of participation, their errors, the best."""

import itertools
import math

import numpy as np
import pytest
from scipy import linalg, optimize

from benchmarks import correlated_noise
from dpx import strategies
from dpx.papers.correlated_noise.strategy import log_workload_loss, squared_errors, workload_objective
from dpx.strategies import Strategy, Workload

FAMILIES = {
    "identity": strategies.identity(),
    "lambda": strategies.lambda_cgd(correlation=0.9),
    "bisr 2": strategies.banded_inverse_square_root(coefficients=2),
    "bisr 4": strategies.banded_inverse_square_root(coefficients=4),
    "bsr 3": strategies.banded_square_root(bands=3),
    "bsr 4, momentum": strategies.banded_square_root(bands=4, momentum=0.9),
    "optimized 3": strategies.optimized(bands=3, steps=10),
}
HOSTILE = {
    "negative": Strategy(coefficients=(1, -0.5)),
    "gap": Strategy(coefficients=(1, 0, 1)),
    "rising": Strategy(coefficients=(1, 1.5, 0.2)),
    "mixed": Strategy(coefficients=(1, -0.3, 0.8, -0.1)),
    "full, mixed": Strategy(inverse_coefficients=(1, 0.6)),
    "full, oscillating": Strategy(inverse_coefficients=(1, -0.2, 0.7)),
}


def matrix(column):
    return linalg.toeplitz(column, np.zeros(len(column)))


def patterns(steps, separation, most):
    """All sets of steps that are at least `separation` apart, of at most `most` steps."""
    for size in range(1, most + 1):
        for chosen in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def by_brute_force(strategy, steps, most, separation):
    """(a lower bound, an upper bound) of the sensitivity: equal up to signs of g, and equation (1) of the module."""
    gram = matrix(strategy.column(steps)).T @ matrix(strategy.column(steps))
    low = high = 0.0
    for chosen in patterns(steps, separation, most):
        part = gram[np.ix_(chosen, chosen)]
        low, high = max(low, part.sum()), max(high, np.abs(part).sum())
    return math.sqrt(low), math.sqrt(high)


def cases():
    return [(steps, most, b) for steps in range(1, 11) for b in range(1, 5) for most in (1, 2, 3, 10)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sensitivity_of_every_family_equals_brute_force(name):
    for steps, most, separation in cases():
        found = strategies.sensitivity(FAMILIES[name], steps=steps, participations=most, separation=separation)
        assert strategies.sensitivity_is_exact(FAMILIES[name], steps=steps)
        assert [found, found] == pytest.approx(by_brute_force(FAMILIES[name], steps, most, separation), rel=1e-12)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_sensitivity_is_never_below_brute_force(name):
    for steps, most, separation in cases():
        found = strategies.sensitivity(HOSTILE[name], steps=steps, participations=most, separation=separation)
        low, high = by_brute_force(HOSTILE[name], steps, most, separation)
        assert found >= high * (1 - 1e-12) and high >= low


def test_random_strategies_are_never_below_brute_force():
    random = np.random.default_rng(0)
    for _ in range(60):
        kind = random.choice(["coefficients", "inverse_coefficients"])
        strategy = Strategy(**{kind: (1, *random.normal(size=random.integers(1, 4)))})
        steps, most, separation = random.integers(1, 10), random.integers(1, 5), random.integers(1, 5)
        found = strategies.sensitivity(strategy, steps=steps, participations=most, separation=separation)
        assert found >= by_brute_force(strategy, steps, most, separation)[1] * (1 - 1e-12)


@pytest.mark.parametrize("name", FAMILIES | HOSTILE)
def test_shuffled_epochs_are_never_below_brute_force(name):
    strategy = (FAMILIES | HOSTILE)[name]
    for steps, length in itertools.product(range(1, 10), range(1, 5)):
        gram = matrix(strategy.column(steps)).T @ matrix(strategy.column(steps))
        epochs = [range(first, min(first + length, steps)) for first in range(0, steps, length)]
        largest = max(np.abs(gram[np.ix_(chosen, chosen)]).sum() for chosen in itertools.product(*epochs))
        found = strategies.shuffled_sensitivity(strategy, steps=steps, steps_per_epoch=length)
        assert found >= math.sqrt(largest) * (1 - 1e-12)
        if length == 1 and strategies.sensitivity_is_exact(strategy, steps=steps):
            assert found == pytest.approx(math.sqrt(largest))


def test_sensitivities_of_the_literature():
    def found(c, **options):
        return strategies.sensitivity(Strategy(coefficients=c), **options)

    assert found((1, 0.7, 0.2), steps=6, participations=2, separation=2) == pytest.approx(1.8601075237738274, rel=1e-14)
    assert found((1, 0.8, 0.4, 0.1), steps=7, participations=3, separation=2) == pytest.approx(2.7092434368288134)
    assert found((1, 0.5), steps=8, participations=2, separation=1) == pytest.approx(1.8708286933869707, rel=1e-14)


def test_the_formula_of_decreasing_coefficients_would_be_too_small_elsewhere():
    for c, formula, truth in (((1, -0.5), 1.2247, 1.8708), ((1, 0, 1), 2.0, 2.4495)):
        strategy = Strategy(coefficients=c)
        column = strategy.column(6)
        moved = column + np.concatenate([[0], column[:-1]])
        assert np.linalg.norm(moved) == pytest.approx(formula, abs=5e-5)
        assert by_brute_force(strategy, 6, 2, 1)[1] == pytest.approx(truth, abs=5e-5)
        assert strategies.sensitivity(strategy, steps=6, participations=2) == pytest.approx(truth, abs=5e-5)
        assert not strategies.sensitivity_is_exact(strategy, steps=6)


def test_columns_that_do_not_overlap_cost_the_root_of_their_number():
    strategy = Strategy(coefficients=(1, -0.7, 0.9))
    found = strategies.sensitivity(strategy, steps=100, participations=5, separation=3)
    assert found == pytest.approx(math.sqrt(5) * strategies.column_norm(strategy, steps=100))
    assert strategies.column_norm(strategy, steps=100) == pytest.approx(math.sqrt(1 + 0.49 + 0.81))
    assert strategies.column_norm(strategy, steps=2) == pytest.approx(math.sqrt(1.49))


def test_a_banded_inverse_has_a_full_strategy():
    strategy = strategies.lambda_cgd(correlation=0.9)
    assert strategies.column_norm(strategy, steps=1000) == pytest.approx((1 - 0.81) ** -0.5)
    assert strategy.bands is None and strategy.column(4) == pytest.approx([1, 0.9, 0.81, 0.729])
    with pytest.raises(ValueError, match="at most 8 bands"):
        strategies.cyclic_poisson_event(strategy, examples=100, batch_size=10, groups=8, steps=9, noise_multiplier=1)


@pytest.mark.parametrize("name", FAMILIES | HOSTILE)
def test_the_noise_of_a_mechanism_has_the_covariance(name):
    strategy, steps = (FAMILIES | HOSTILE)[name], 9
    inverse = np.linalg.inv(matrix(strategy.column(steps)))
    assert strategy.covariance(steps) == pytest.approx(inverse @ inverse.T, rel=1e-9, abs=1e-12)


@pytest.mark.long
def test_the_table_of_mean_losses():
    rows = {
        strategies.identity(): (22.371857, 1, 90.531762),
        strategies.banded_inverse_square_root(coefficients=2): (12.955050, 1.154701, 52.345009),
        strategies.banded_inverse_square_root(coefficients=4): (9.004362, 1.273736, 36.232594),
        strategies.banded_inverse_square_root(coefficients=64): (3.425562, 1.601360, 12.342653),
        strategies.lambda_cgd(correlation=0.9): (5.617173, 2.294157, 21.749773),
    }
    for strategy, (mean, sensitivity, repeated) in rows.items():
        once = strategies.loss(strategy, steps=1000)
        assert (once.mean, once.sensitivity) == pytest.approx((mean, sensitivity), abs=6e-7)
        assert strategies.loss(strategy, steps=2048, participations=8, separation=256).mean == pytest.approx(
            repeated, abs=6e-7
        )


def test_lower_bounds_and_largest_losses_of_one_participation():
    assert strategies.mean_loss_lower_bound(2) == pytest.approx(1.11803399, abs=5e-9)
    assert strategies.mean_loss_lower_bound(10) == pytest.approx(1.49793307, abs=5e-9)
    singular = np.linalg.svd(np.tri(10), compute_uv=False)
    assert strategies.mean_loss_lower_bound(10) == pytest.approx(singular.sum() / 10)
    exact = {1: 1, 2: 1.25, 3: 1.390625, 4: 1.48828125, 5: 1.56304931640625, 100: 2.53135211}
    for steps, value in exact.items():
        found = strategies.loss(strategies.banded_square_root(bands=steps), steps=steps).largest
        assert found == pytest.approx(value, abs=5e-9)


def test_the_coefficients_of_the_families():
    assert strategies.square_root_coefficients(5) == pytest.approx([math.comb(2 * j, j) / 4**j for j in range(5)])
    inverse = strategies.banded_inverse_square_root(coefficients=5).inverse_coefficients
    assert inverse == pytest.approx((1, -1 / 2, -1 / 8, -1 / 16, -5 / 128))
    assert strategies.banded_inverse_square_root(coefficients=2) == strategies.lambda_cgd(correlation=0.5)
    assert (
        strategies.banded_inverse_square_root(coefficients=1)
        == strategies.identity()
        == strategies.banded_square_root(bands=1)
    )
    assert strategies.lambda_cgd(correlation=0) == strategies.identity()
    root = matrix(strategies.banded_square_root(bands=6, momentum=0.9).column(6))
    assert root @ root == pytest.approx(np.tri(6) @ matrix(0.9 ** np.arange(6)))


def workload_matrix(workload, steps):
    rates = workload.rates(steps)
    return np.tri(steps) @ np.diag(rates) @ matrix(workload.momentum ** np.arange(steps))


WORKLOADS = {
    "prefix": Workload(),
    "momentum": Workload(momentum=0.9),
    "rates": Workload(learning_rates=tuple(np.linspace(1, 0.1, 12))),
    "both": Workload(momentum=0.8, learning_rates=tuple(np.cos(np.arange(12) / 8))),
    "constant": Workload(momentum=0.8, learning_rates=(0.3,) * 12),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_errors_are_the_rows_of_the_workload_times_the_inverse(name):
    for strategy in (FAMILIES | HOSTILE).values():
        rows = workload_matrix(WORKLOADS[name], 12) @ np.linalg.inv(matrix(strategy.column(12)))
        expected = np.square(rows).sum(1)
        assert squared_errors(strategy, WORKLOADS[name], 12) == pytest.approx(expected, rel=1e-9)
        found = strategies.loss(strategy, steps=12, workload=WORKLOADS[name], participations=3, separation=4)
        by = strategies.sensitivity(strategy, steps=12, participations=3, separation=4)
        assert found == pytest.approx((by, by * math.sqrt(expected.mean()), by * math.sqrt(expected.max())), rel=1e-9)


@pytest.mark.parametrize("name, error", [*((name, "mean") for name in WORKLOADS), ("momentum", "largest")])
def test_the_gradients_of_the_optimizer_are_exact(name, error):
    denominator, quadratic = workload_objective(WORKLOADS[name], 12, error)
    c = np.array([1, 0.6, -0.2, 0.3])

    def value(rest):
        return log_workload_loss(np.concatenate([[1], rest]), denominator, quadratic, 12)[0]

    errors = squared_errors(Strategy(coefficients=c), WORKLOADS[name], 12)
    expected = math.log(c @ c) + math.log(errors.mean() if error == "mean" else errors.max())
    assert value(c[1:]) == pytest.approx(expected + math.log(1 if name != "constant" else 0.3**-2))
    numeric = optimize.approx_fprime(c[1:], value, 1e-7)
    assert log_workload_loss(c, denominator, quadratic, 12)[1] == pytest.approx(numeric, abs=1e-5)


def test_the_optimized_strategy_is_an_optimum():
    for steps, bands in ((10, 2), (10, 4), (2344, 2), (732, 8)):
        best = strategies.optimized(bands=bands, steps=steps)
        least = strategies.loss(best, steps=steps).mean

        def mean(rest, steps=steps):
            return strategies.loss(Strategy(coefficients=(1, *rest)), steps=steps).mean

        for place in range(bands - 1):
            for move in (-0.02, 0.02):
                moved = np.array(best.coefficients[1:])
                moved[place] += move
                assert mean(moved) > least
        assert least < strategies.loss(strategies.banded_square_root(bands=bands), steps=steps).mean
    found = optimize.minimize(
        lambda rest: strategies.loss(Strategy(coefficients=(1, *rest)), steps=10).mean, [0.3, 0.2], method="Nelder-Mead"
    )
    assert strategies.loss(strategies.optimized(bands=3, steps=10), steps=10).mean == pytest.approx(found.fun, rel=1e-6)


def test_more_bands_are_better_and_none_beats_the_lower_bound():
    means = [strategies.loss(strategies.optimized(bands=bands, steps=64), steps=64).mean for bands in (1, 2, 4, 8, 64)]
    assert means == sorted(means, reverse=True) and means[0] == pytest.approx(math.sqrt(65 / 2))
    assert strategies.mean_loss_lower_bound(64) <= means[-1] <= 1.07 * strategies.mean_loss_lower_bound(64)


def test_each_error_and_workload_has_a_strategy_of_its_own():
    rates = Workload(momentum=0.9, learning_rates=tuple(np.linspace(1, 0.01, 64)))
    for workload, error in (
        (Workload(), "mean"),
        (Workload(), "largest"),
        (rates, "mean"),
        (Workload(momentum=0.9), "mean"),
    ):
        best = strategies.optimized(bands=6, steps=64, workload=workload, error=error)

        def value(strategy, workload=workload, error=error):
            return getattr(strategies.loss(strategy, steps=64, workload=workload), error)

        others = [strategies.optimized(bands=6, steps=64), strategies.banded_square_root(bands=6)]
        others += [strategies.optimized(bands=6, steps=64, error="largest"), strategies.identity()]
        assert all(value(best) <= value(other) * (1 + 1e-9) for other in others)


def test_long_runs_are_possible():
    steps, repeated = 10**5, {"participations": 10, "separation": 10**4}
    for strategy in (
        strategies.optimized(bands=4, steps=steps),
        strategies.banded_inverse_square_root(coefficients=16),
    ):
        assert 0 < strategies.loss(strategy, steps=steps, **repeated).mean < 0.6 * math.sqrt(10 * steps / 2)
        assert strategies.sensitivity(strategy, steps=steps, participations=steps) > 1


def test_events_are_those_of_the_papers():
    strategy = strategies.banded_square_root(bands=8)
    event = strategies.cyclic_poisson_event(
        strategy, examples=60_000, batch_size=256, groups=8, steps=2345, noise_multiplier=0.7
    )
    assert event.count == 294 and event.event.sampling_probability == pytest.approx(8 * 256 / 60_000)
    assert event.event.event.noise_multiplier == 0.7
    assert strategies.fixed_order_event(noise_multiplier=2.0).noise_multiplier == 2


@pytest.mark.long
@pytest.mark.parametrize("case", [(256, 8.0, 8), (256, 8.0, 48), (2048, 8.0, 8), (256, 1.0, 0), (256, 8.0, 0)], ids=str)
def test_the_benchmark_reproduces_stated_ratios(case):
    assert correlated_noise.again(*case) == pytest.approx(correlated_noise.STATED[case], rel=0.02)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Strategy(coefficients=(2, 1)), "begin with 1"),
        (lambda: Strategy(coefficients=()), "begin with 1"),
        (lambda: Strategy(coefficients=(1, math.nan)), "finite"),
        (lambda: Strategy(inverse_coefficients=(1, 0.5, 0)), "must not end with 0"),
        (lambda: Strategy(coefficients="no"), "must be numbers"),
        (lambda: Strategy(coefficients=(1, 0.5), inverse_coefficients=(1, 0.5)), "not both"),
        (lambda: Strategy(inverse_coefficients=(1, -3)).column(1000), "overflows"),
        (lambda: strategies.sensitivity(Strategy(), steps=0), "steps"),
        (lambda: strategies.sensitivity(Strategy(), steps=4, participations=0), "participations"),
        (lambda: strategies.sensitivity(Strategy(), steps=4, separation=0), "separation"),
        (lambda: strategies.lambda_cgd(correlation=1), "below 1"),
        (lambda: strategies.lambda_cgd(correlation=-0.1), "at least 0"),
        (lambda: Workload(momentum=1), "below 1"),
        (lambda: Workload(learning_rates=(1, -1)), "at least 0"),
        (lambda: strategies.loss(Strategy(), steps=3, workload=Workload(learning_rates=(1.0,))), "must be 3 numbers"),
        (lambda: strategies.optimized(bands=5, steps=4), "at least 5"),
        (lambda: strategies.optimized(bands=2, steps=4, error="worst"), '"mean" or "largest"'),
        (
            lambda: strategies.optimized(
                bands=2, steps=3, error="largest", workload=Workload(learning_rates=(1.0, 2.0, 3.0))
            ),
            'must be "mean"',
        ),
        (
            lambda: strategies.cyclic_poisson_event(
                Strategy(), examples=100, batch_size=51, groups=2, steps=4, noise_multiplier=1
            ),
            "bands must be at most examples / batch_size",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
