"""`dpx.plan_noise`: the noise of each row is the calibrated noise, and its other columns follow from it."""

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import dpx

ONE = dpx.FullBatch(examples=10)


@pytest.fixture(scope="module")
def planned():
    return dpx.plan_noise(examples=1000, epsilon=2.0, delta=1e-5, epochs=[4, 8.04], batch_sizes=[100, 1000])


def test_the_noise_is_what_calibrate_finds(planned):
    assert [run.steps for run in planned.runs] == [40, 4, 80, 8]
    samplings = dpx.PoissonSampling(examples=1000, batch_size=100), dpx.FullBatch(examples=1000)
    for run, sampling in zip(planned.runs[:2], samplings, strict=True):

        def make(noise, sampling=sampling):
            return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=jax.random.key(0))

        np.testing.assert_allclose(
            dpx.accounting.calibrate(make, steps=run.steps, epsilon=2.0, delta=1e-5), run.noise_multiplier, rtol=2e-4
        )
        assert dpx.epsilon(make(run.noise_multiplier), run.steps, delta=1e-5) <= 2.0 * (1 + 1e-4)


def test_the_columns(planned):
    for run in planned.runs:
        assert run.step_noise == run.noise_multiplier / run.batch_size
        assert run.epochs == run.steps * run.batch_size / 1000
        np.testing.assert_allclose(run.run_noise, run.step_noise / math.sqrt(run.steps))
        np.testing.assert_allclose(run.epoch_noise, run.run_noise * math.sqrt(run.epochs))
    assert planned.runs[1].run_noise < planned.runs[0].run_noise  # whole batches have the least noise
    lines = str(planned).splitlines()
    assert "epsilon 2 at delta 1e-05" in lines[0] and lines.index("") == 2 + len(planned.runs)
    printed = float(lines[2].split()[3])  # rounded up, so that a run with it is within the budget
    assert 0 <= printed - planned.runs[0].noise_multiplier < 1e-4


def test_the_plot_has_a_line_for_each_number_of_epochs(planned):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = planned.plot(axes=figure.add_subplot())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4 epochs", "8 epochs"]
    drawn = [tuple(point) for line in axes.lines for point in line.get_xydata()]
    assert drawn == [(run.batch_size, run.run_noise) for run in planned.runs]


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


def test_the_default_batch_sizes():
    runs = dpx.plan_noise(examples=1100, epsilon=8.0, delta=1e-5, epochs=1).runs
    assert [run.batch_size for run in runs] == [256, 512, 1100]


def test_numbers_of_any_real_type(planned):
    (run,) = dpx.plan_noise(
        examples=1000,
        epsilon=np.float32(2.0),
        delta=Fraction(1, 10**5),
        epochs=np.float32(4),
        batch_sizes=[np.int64(1000)],
    ).runs
    assert run == planned.runs[1]


@pytest.mark.parametrize("refused", [True, np.False_, "2", 2j, np.ones((), bool)])
def test_a_bool_is_no_number(refused):
    for make in (
        lambda: dpx.Budget(epsilon=refused, delta=1e-5, steps=10),
        lambda: dpx.Budget(epsilon=1.0, delta=refused, steps=10),
        lambda: dpx.accounting.gdp.delta(1.0, epsilon=refused),
        lambda: dpx.dp_sgd(clip_norm=refused, noise_multiplier=1.0, sampling=ONE, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()


@pytest.mark.parametrize(
    "changes",
    [
        {"examples": 0},
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"epochs": 0},
        {"epochs": []},
        {"epochs": [1, math.inf]},
        {"epochs": True},
        {"epochs": "3"},
        {"epsilon": True},
        {"epsilon": np.True_},
        {"epsilon": "1"},
        {"epsilon": [1.0, 2.0]},
        {"delta": None},
        {"batch_sizes": [0]},
        {"batch_sizes": [101]},
        {"batch_sizes": []},
        {"accountant": "guess"},
    ],
)
def test_bad_arguments_are_refused(changes):
    with pytest.raises(ValueError, match="must be"):
        dpx.plan_noise(**({"examples": 100, "epsilon": 1.0, "delta": 1e-5} | changes))
