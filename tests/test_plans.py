"""Both plans: the noise of each row is the calibrated noise, and each epsilon is that of a mechanism."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import dpx
from dpx.reports import MeasuredRun, fit_scale_law, plan_samplings
from dpx.reports.plan import REFUSED, PlannedSampling, SamplingPlan

KEY = jax.random.key(0)
SIZES = {"examples": 1000, "batch_size": 50}
POISSON = dpx.PoissonSampling(**SIZES)
CUT = dpx.PoissonSampling(**SIZES, most_rows=88)
WEIGHTED = dpx.PoissonSampling(**SIZES, weights=1.0 + np.arange(1000) % 2)
ALLOCATED = dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=20)
CYCLIC = dpx.sampling.CyclicPoissonSampling(**SIZES, bands=8)
ORDERED = dpx.sampling.FixedOrder(**SIZES)


def mechanism(sampling, noise):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=KEY)


@pytest.fixture(scope="module")
def planned():
    return dpx.plan_noise(examples=1000, epsilon=2.0, delta=1e-5, epochs=[4, 8.04], batch_sizes=[100, 1000])


def test_the_noise_is_what_calibrate_finds(planned):
    assert [run.steps for run in planned.runs] == [40, 4, 81, 9]
    samplings = dpx.PoissonSampling(examples=1000, batch_size=100), dpx.FullBatch(examples=1000)
    for run, sampling in zip(planned.runs[:2], samplings, strict=True):
        make = functools.partial(mechanism, sampling)
        found = make(dpx.Budget(epsilon=2.0, delta=1e-5, epochs=run.epochs)).noise_multiplier  # of a run
        np.testing.assert_allclose(found, run.noise_multiplier, rtol=2e-4)
        assert dpx.epsilon(make(run.noise_multiplier), run.steps, delta=1e-5) <= 2.0 * (1 + 1e-4)


@pytest.mark.long
def test_the_columns(planned):
    for run in planned.runs:
        assert run.step_noise == run.noise_multiplier / run.batch_size
        assert run.epochs in (4, 8.04)
        np.testing.assert_allclose(run.noise_of_run, run.step_noise / math.sqrt(run.steps))
        np.testing.assert_allclose(run.epoch_noise, run.noise_of_run * math.sqrt(run.steps * run.batch_size / 1000))
    assert planned.runs[1].noise_of_run < planned.runs[0].noise_of_run  # whole batches have the least noise
    lines = str(planned).splitlines()
    assert "epsilon 2 at delta 1e-05" in lines[0] and lines.index("") == 3 + len(planned.runs)
    printed = float(lines[3].split()[3])  # rounded up, so that a run with it is within the budget
    assert 0 <= printed - planned.runs[0].noise_multiplier < 1e-4


def test_the_plot_has_a_line_for_each_number_of_epochs(planned):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = planned.plot(axes=figure.add_subplot())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4 epochs", "8.04 epochs"]
    drawn = [tuple(point) for line in axes.lines for point in line.get_xydata()]
    assert drawn == [(run.batch_size, run.noise_of_run) for run in planned.runs]
    assert len({line.get_color() for line in axes.lines}) == len({line.get_linestyle() for line in axes.lines}) == 2


@pytest.mark.long
def test_no_label_of_the_plot_overlaps_or_is_cut():
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    axes = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=10).plot(axes=figure.add_subplot())
    figure.draw_without_rendering()
    boxes = [
        label.get_window_extent() for label in sorted(axes.get_xticklabels(), key=lambda label: label.get_position())
    ]
    assert len(boxes) > 5 and all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    for part in (*boxes, axes.yaxis.label.get_window_extent(), axes.title.get_window_extent()):
        assert 0 <= part.x0 and part.x1 <= figure.bbox.x1 and 0 <= part.y0 and part.y1 <= figure.bbox.y1


@pytest.mark.long
def test_the_default_batch_sizes():
    runs = dpx.plan_noise(examples=1100, epsilon=8.0, delta=1e-5, epochs=1).runs
    assert [run.batch_size for run in runs] == [256, 512, 1100]


def test_numbers_of_any_real_type(planned):
    budget = {"epsilon": np.float32(2.0), "delta": Fraction(1, 10**5)}
    (run,) = dpx.plan_noise(examples=np.int64(1000), epochs=np.float32(4), batch_sizes=[np.int64(1000)], **budget).runs
    assert (run,) == dpx.plan_noise(examples=1000, epochs=4, batch_sizes=1000, **budget).runs
    assert run == planned.runs[1]


@pytest.mark.parametrize("refused", [True, np.False_, "2", 2j, np.ones((), bool)])
def test_a_bool_is_no_number(refused):
    for make in (
        lambda: dpx.Budget(epsilon=refused, delta=1e-5, steps=10),
        lambda: dpx.Budget(epsilon=1.0, delta=refused, steps=10),
        lambda: dpx.accounting.gdp.delta(1.0, epsilon=refused),
        lambda: dpx.dp_sgd(clip_norm=refused, noise_multiplier=1.0, sampling=POISSON, key=KEY),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()


WRONG = {
    "examples": [0],
    "epsilon": [0.0, True, np.True_, "1", [1.0, 2.0]],
    "delta": [1.0, None],
    "epochs": [0, [], [1, math.inf], True, "3"],
    "batch_sizes": [[0], [101], []],
    "accountant": ["guess"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_bad_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match="must be (?!.*batch)|got (0|101|none)$"):
        dpx.plan_noise(**({"examples": 100, "epsilon": 1.0, "delta": 1e-5} | {name: value}))


@pytest.fixture(scope="module")
def table():
    return plan_samplings(**SIZES, epochs=2.5, epsilon=2.0, delta=1e-5)


def test_the_noise_meets_the_budget(table):
    assert {type(run.sampling) for run in table.runs} >= {type(s) for s in (POISSON, ALLOCATED, CYCLIC, ORDERED)}
    for run in table.runs:
        assert run.steps == run.sampling.steps(epochs=2.5)
        spent = dpx.epsilon(mechanism(run.sampling, run.noise_multiplier), run.steps, delta=1e-5)
        assert 2.0 * 0.998 <= spent <= 2.0 * (1 + 1e-6), run


def test_all_are_billed_at_the_noise_of_poisson_sampling(table):
    noise = table.runs[0].noise_multiplier
    for run in table.runs:
        spent = dpx.epsilon(mechanism(run.sampling, noise), run.steps, delta=1e-5)
        np.testing.assert_allclose(run.epsilon, spent, rtol=1e-6)
    cut = [run for run in table.runs if getattr(run.sampling, "truncates", False)]
    assert len(cut) == 3
    by_rows = [run.epsilon for run in sorted(cut, key=lambda run: run.rows)]
    assert by_rows == sorted(by_rows, reverse=True) and by_rows[0] > 2 * by_rows[-1] > 2 * table.runs[0].epsilon


def test_printed_epsilons_are_not_below_the_bills(table):
    lines = str(table).splitlines()[2:]
    for run, line in zip(table.runs, lines, strict=False):
        assert line.startswith(type(run.sampling).__name__)
        assert run.epsilon <= float(line.split()[2]) <= 1.002 * run.epsilon, line


def test_rows_are_those_of_the_batches(table):
    for run in table.runs:
        assert run.rows == len(run.sampling.draw(KEY, 0).indices), run


def test_the_least_noise_is_recommended(table):
    def plan(*noises):
        runs = zip((POISSON, ALLOCATED, dpx.FixedSizeSampling(**SIZES)), noises, strict=True)
        rows = tuple(PlannedSampling(sampling, 20, noise, 1.0, 80) for sampling, noise in runs)
        return SamplingPlan(epochs=1.0, epsilon=1.0, delta=1e-5, runs=rows).recommended.sampling

    assert plan(1.0, 0.9, 0.5) == ALLOCATED  # another relation is no alternative
    assert plan(1.0, 0.995, 0.5) == plan(1.0, 1.1, 2.0) == POISSON
    assert str(table).count("Take ") == 1


@pytest.mark.long
def test_the_printed_plan_answers_which_sampling():
    plan = dpx.plan_noise(examples=1000, epsilon=2.0, delta=1e-5, epochs=[4, 8], batch_sizes=[50, 100, 1000])
    small, large = plan.runs[0], plan.runs[1]  # of the first epochs; whole batches are not suggested
    assert plan.suggested == (small if small.noise_of_run <= 1.25 * large.noise_of_run else large)
    sizes = {"examples": 1000, "batch_size": plan.suggested.batch_size}
    assert plan.sampling_plan.runs[0].sampling == dpx.PoissonSampling(**sizes)
    assert str(plan.sampling_plan) in str(plan)
    for words in ("PoissonSampling(most_rows=", "RandomAllocation(steps_per_epoch=", "Take ", "Refused", *REFUSED):
        assert words in str(plan)


@pytest.mark.long
def test_the_epochs_are_those_that_were_asked_for():
    """20 epochs of 60,000 in batches of 1,024 are 1,172 steps, so 20.002 epochs: not 21 that were begun."""
    plan = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=20, batch_sizes=[1024])
    ordered = plan.sampling_plan.runs[-1]
    assert plan.sampling_plan.epochs == 20 and ordered.steps == 20 * ordered.sampling.steps_per_epoch


def test_whole_batches_have_no_alternative():
    plan = plan_samplings(examples=100, batch_size=100, epochs=3, epsilon=2.0, delta=1e-5)
    assert [run.sampling for run in plan.runs] == [dpx.FullBatch(examples=100)]
    assert "Take FullBatch" in str(plan)


def feedback(sampling):
    common = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.1, "noise_multiplier": 2.0, "key": KEY}
    return dpx.methods.dice_sgd(sampling=sampling, **common)


def correlated(sampling):
    strategy = dpx.strategies.lambda_cgd(correlation=0.5)
    common = {"clip_norm": 1.0, "noise_multiplier": 2.0, "key": KEY}
    return dpx.mechanisms.correlated_noise(strategy=strategy, sampling=sampling, **common)


@pytest.mark.parametrize(
    "build",
    [
        lambda: dpx.PoissonSampling(**SIZES, most_rows=88, weights=np.ones(1000)),
        *(lambda sampling=sampling: feedback(sampling) for sampling in (CUT, WEIGHTED, ALLOCATED, CYCLIC, ORDERED)),
        *(lambda s=s: correlated(s) for s in (POISSON, CUT, WEIGHTED, ALLOCATED, dpx.FixedSizeSampling(**SIZES))),
        lambda: dpx.epsilon(mechanism(ALLOCATED, 2.0), 20, delta=1e-5, relation="replace_one"),
    ],
)
def test_the_combinations_that_the_plan_calls_refused_are(build):
    with pytest.raises(ValueError):
        build()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 1001}, "batch_size must be in"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"epochs": 0}, "epochs must be a finite number above 0"),
        ({"accountant": "prv"}, "accountant must be one of"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_bad_arguments_of_the_table(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_samplings(**SIZES | {"epochs": 1.0, "epsilon": 1.0, "delta": 1e-5} | changes)


def loss_of(parameters, steps, noise):
    """Linear in the logarithms; more parameters are better with little noise, and worse with much."""
    return 5 - 0.3 * math.log(steps) + 0.1 * math.log(parameters / 1e5) * math.log(noise / 5e-4)


LEVELS = (3e4, 1.5e5, 8e5), (5, 20, 60, 100), (1e-4, 1e-3, 1e-1)
SMALL_RUNS = [MeasuredRun(*numbers, loss_of(*numbers)) for numbers in itertools.product(*LEVELS)]


@pytest.fixture(scope="module")
def law():
    worse = [run._replace(loss=run.loss + 0.1) for run in SMALL_RUNS]  # of another learning rate
    return fit_scale_law([*reversed(SMALL_RUNS), *worse])


def test_a_scale_law_is_linear_in_the_logarithms(law):
    for numbers in ((1e5, 40, 5e-4), (8e5, 5, 3e-3), (3e4, 100, 1e-4)):
        found = law.loss(parameters=numbers[0], steps=numbers[1], step_noise=numbers[2])
        assert found == pytest.approx(loss_of(*numbers))
    assert law.held_out_error < 1e-12
    middle = [run._replace(loss=run.loss + 0.1 * (run.parameters == 1.5e5)) for run in SMALL_RUNS]
    rows = 12 / (12 + 2 * 9 + 12)  # of the middle size, of what is left out in turn
    assert fit_scale_law(middle).held_out_error == pytest.approx(0.1 * rows**0.5)
    assert math.isnan(fit_scale_law([run for run in SMALL_RUNS if all(map(in_ends, run, LEVELS))]).held_out_error)


def in_ends(number, levels):
    return number in (levels[0], levels[-1])


def test_a_scale_plan_takes_the_least_loss_within_the_compute(law, planned):
    compute = 2e9
    plan = law.plan(planned, parameters=[40_000, 400_000, 10**6], compute=compute)
    within = [(size, run) for size in (40_000, 400_000) for run in planned.runs if run.steps >= 5]
    within = [(size, run) for size, run in within if size * run.batch_size * run.steps <= compute]
    assert len(within) == 4 and plan.beyond == 2  # four steps are beyond, and so is the largest size
    assert {one[:2] for one in plan.runs} == set(within)
    for one in plan.runs:
        assert one.loss == pytest.approx(loss_of(one.parameters, one.run.steps, one.run.step_noise))
    assert plan.best == min(plan.runs, key=lambda one: one.loss) and f"{plan.best.loss:.4f}" in str(plan)
    assert {one.parameters for one in law.plan(planned).runs} == set(LEVELS[0])
    with pytest.raises(ValueError, match=r"a run must be within compute 1 and the measured numbers$"):
        law.plan(planned, compute=1.0)
    with pytest.raises(ValueError, match=r"numbers; parameters must be in the measured \[30000, 800000\], got 10"):
        law.plan(planned, parameters=[10])


def test_a_scale_law_needs_every_combination(law):
    with pytest.raises(ValueError, match="must have a loss for each of the 36 combinations .*, got 35"):
        fit_scale_law(SMALL_RUNS[1:])
    with pytest.raises(ValueError, match="at least two different parameters, got 1"):
        fit_scale_law(SMALL_RUNS[:12])
    with pytest.raises(ValueError, match="at least two different parameters, got 0"):
        fit_scale_law([])
    with pytest.raises(ValueError, match="step_noise must be"):
        fit_scale_law([run._replace(step_noise=0.0) for run in SMALL_RUNS])
    with pytest.raises(ValueError, match=r"step_noise must be in the measured \[0.0001, 0.1\], got 0.2"):
        law.loss(parameters=1e5, steps=50, step_noise=0.2)
