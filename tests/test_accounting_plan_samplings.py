"""Which sampling: `plan_samplings`, whose rows are bills of mechanisms, and what the printed plan says."""

import jax
import numpy as np
import pytest

import dpx
from dpx.reports import plan_samplings
from dpx.reports.plan import REFUSED, PlannedSampling, SamplingPlan

KEY = jax.random.key(0)
SIZES = {"examples": 1000, "batch_size": 50}
POISSON = dpx.PoissonSampling(**SIZES)
CUT = dpx.PoissonSampling(**SIZES, most_rows=88)
WEIGHTED = dpx.PoissonSampling(**SIZES, weights=1.0 + np.arange(1000) % 2)
ALLOCATED = dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=20)
CYCLIC = dpx.sampling.CyclicPoissonSampling(**SIZES, bands=8)
ORDERED = dpx.sampling.FixedOrder(**SIZES)


@pytest.fixture(scope="module")
def planned():
    return plan_samplings(**SIZES, epochs=2.5, epsilon=2.0, delta=1e-5)


def mechanism(sampling, noise):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=KEY)


def test_the_noise_meets_the_budget(planned):
    assert {type(run.sampling) for run in planned.runs} >= {type(s) for s in (POISSON, ALLOCATED, CYCLIC, ORDERED)}
    for run in planned.runs:
        assert run.steps == run.sampling.steps(epochs=2.5)
        spent = dpx.epsilon(mechanism(run.sampling, run.noise_multiplier), run.steps, delta=1e-5)
        assert 2.0 * 0.998 <= spent <= 2.0 * (1 + 1e-6), run


def test_all_are_billed_at_the_noise_of_poisson_sampling(planned):
    noise = planned.runs[0].noise_multiplier
    for run in planned.runs:
        spent = dpx.epsilon(mechanism(run.sampling, noise), run.steps, delta=1e-5)
        np.testing.assert_allclose(run.epsilon, spent, rtol=1e-6)
    cut = [run for run in planned.runs if getattr(run.sampling, "truncates", False)]
    assert len(cut) == 3
    by_rows = [run.epsilon for run in sorted(cut, key=lambda run: run.rows)]
    assert by_rows == sorted(by_rows, reverse=True) and by_rows[0] > 2 * by_rows[-1] > 2 * planned.runs[0].epsilon


def test_printed_epsilons_are_not_below_the_bills(planned):
    lines = str(planned).splitlines()[2:]
    for run, line in zip(planned.runs, lines, strict=False):
        assert line.startswith(type(run.sampling).__name__)
        assert run.epsilon <= float(line.split()[2]) <= 1.002 * run.epsilon, line


def test_rows_are_those_of_the_batches(planned):
    for run in planned.runs:
        assert run.rows == len(run.sampling.draw(KEY, 0).indices), run


def test_the_least_noise_is_recommended(planned):
    def plan(*noises):
        runs = zip((POISSON, ALLOCATED, dpx.FixedSizeSampling(**SIZES)), noises, strict=True)
        rows = tuple(PlannedSampling(sampling, 20, noise, 1.0, 80) for sampling, noise in runs)
        return SamplingPlan(epochs=1.0, epsilon=1.0, delta=1e-5, runs=rows).recommended.sampling

    assert plan(1.0, 0.9, 0.5) == ALLOCATED  # another relation is no alternative
    assert plan(1.0, 0.995, 0.5) == plan(1.0, 1.1, 2.0) == POISSON
    assert str(planned).count("Take ") == 1


@pytest.mark.long
def test_the_printed_plan_answers_which_sampling():
    plan = dpx.plan_noise(examples=1000, epsilon=2.0, delta=1e-5, epochs=[4, 8], batch_sizes=[50, 100, 1000])
    small, large = plan.runs[0], plan.runs[1]  # of the first epochs; whole batches are not suggested
    assert plan.suggested == (small if small.run_noise <= 1.25 * large.run_noise else large)
    assert plan.samplings.runs[0].sampling == dpx.PoissonSampling(examples=1000, batch_size=plan.suggested.batch_size)
    assert str(plan.samplings) in str(plan)
    for words in ("PoissonSampling(most_rows=", "RandomAllocation(steps_per_epoch=", "Take ", "Refused", *REFUSED):
        assert words in str(plan)


def test_the_epochs_are_those_that_were_asked_for():
    """20 epochs of 60,000 in batches of 1,024 are 1,172 steps, so 20.002 epochs: not 21 that were begun."""
    plan = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=20, batch_sizes=[1024])
    ordered = plan.samplings.runs[-1]
    assert plan.samplings.epochs == 20 and ordered.steps == 20 * ordered.sampling.steps_per_epoch


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
def test_bad_arguments(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_samplings(**SIZES | {"epochs": 1.0, "epsilon": 1.0, "delta": 1e-5} | changes)
