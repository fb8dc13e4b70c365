"""One number for one run: `dp_sgd_epsilon`, `schedule_epsilon`, the curves and `dpx.epsilon` say the same."""

import jax
import numpy as np
import optax
import pytest

import dpx
from dpx import accounting, reports
from dpx.schedules import values_over

RUN = dict(examples=1000, batch_size=30, delta=1e-5)
RECORDS = {"poisson": dpx.PoissonSampling, "fixed": dpx.FixedSizeSampling, "shuffled": dpx.ShuffledEpochs}
FALLING = optax.linear_schedule(3.0, 1.0, 200)


def epsilon_of(sampling, noise, epochs):
    record = RECORDS[sampling](examples=1000, batch_size=30)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=record, key=jax.random.key(0))
    return dpx.epsilon(mechanism, record.steps(epochs=epochs), delta=1e-5)


@pytest.mark.parametrize("sampling", RECORDS)
@pytest.mark.parametrize("noise", [1.25, 0.75])  # float32 numbers, which dpx adds unrounded
def test_the_numbers_of_a_run_say_what_its_mechanism_says(sampling, noise):
    found = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=noise, epochs=2.5, sampling=sampling)
    assert found == epsilon_of(sampling, noise, 2.5) > 0.1


@pytest.mark.usefixtures("exact_noise")
def test_epochs_are_steps_and_shuffling_is_one_release_an_epoch():
    poisson = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=1.25, epochs=2.5)
    assert poisson == accounting.dp_sgd_epsilon(**RUN, noise_multiplier=1.25, steps=84)  # 83.3
    assert accounting.dp_sgd_epsilon(**RUN, noise_multiplier=1.25, steps=0) == 0
    assert accounting.dp_sgd_epsilon(**RUN, noise_multiplier=0.0, steps=1) == np.inf
    shuffled = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=1.25, epochs=2.5, sampling="shuffled")
    assert shuffled == pytest.approx(accounting.gdp.epsilon(3**0.5 / 1.25, delta=1e-5), rel=1e-9)
    own = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=[1.0, 2.0], sampling="shuffled")
    assert own == pytest.approx(accounting.gdp.epsilon(1.25**0.5, delta=1e-5), rel=1e-9)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.long_cases("fixed")
def test_schedules(sampling):
    given = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=FALLING, steps=100, sampling=sampling)
    each = accounting.dp_sgd_epsilon(**RUN, noise_multiplier=values_over(FALLING, 100), sampling=sampling)
    assert given == each == epsilon_of(sampling, FALLING, 3)


def test_one_number_for_one_run():
    """More distinct steps than the 64 buckets of which one of the functions made the others' number larger."""
    record = dpx.PoissonSampling(examples=1000, batch_size=100)
    noise = optax.linear_schedule(3.0, 1.0, 80)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=record, key=jax.random.key(0))
    spent = dpx.epsilon(mechanism, 80, delta=1e-6)
    interval = accounting.schedule_epsilon(values_over(noise, 80), sampling_rate=0.1, delta=1e-6)
    by_numbers = accounting.dp_sgd_epsilon(examples=1000, batch_size=100, noise_multiplier=noise, steps=80, delta=1e-6)
    assert interval.upper == by_numbers == spent >= interval.lower
    curve = reports.curves.epsilon_over_steps(mechanism, 80, delta=1e-6, points=3)
    assert curve.epsilon[-1] == spent and (np.diff(curve.epsilon) >= 0).all()
    few = accounting.schedule_epsilon(values_over(noise, 80), sampling_rate=0.1, delta=1e-6, buckets=64)
    assert few.lower < interval.lower < spent < few.upper


REFUSED = {
    "sampling must be one of": dict(sampling="full", epochs=1),
    "sampling must be one of .* got a list of length 1": dict(sampling=["poisson"], epochs=1),
    "exactly one of steps, epochs and an array": dict(epochs=1, steps=3),
    "exactly one of steps, epochs .* got steps None, epochs None and 1.0": dict(),
    "exactly one of steps, epochs .* and a list of length 2": dict(steps=2, noise_multiplier=[1.0, 2.0]),
    'sampling "shuffled" needs epochs': dict(sampling="shuffled", steps=3),
    "the smallest of each epoch": dict(sampling="shuffled", epochs=3, noise_multiplier=FALLING),
    "epochs must be a finite number above 0": dict(epochs=0),
    "steps must be a whole number of at least 0": dict(steps=2.5),
    "noise_multiplier must be a finite number at least 0, got -1.0": dict(steps=2, noise_multiplier=-1.0),
    "noise_multipliers must be finite and at least 0, got -1.0": dict(noise_multiplier=[1.0, -1.0]),
    "batch_size must be in": dict(steps=2, batch_size=2000),
    "batch_size must be a whole number": dict(steps=2, batch_size=2.5, sampling="fixed"),
    "delta must be in": dict(steps=2, delta=1.0),
    "where Gaussian noise has no epsilon": dict(steps=2, delta=0.0),
    "accountant must be one of": dict(steps=2, accountant="guess"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said):
    with pytest.raises(ValueError, match=said):
        accounting.dp_sgd_epsilon(**RUN | {"noise_multiplier": 1.0} | REFUSED[said])
    with pytest.warns(UserWarning, match="delta"):
        accounting.dp_sgd_epsilon(**RUN | {"delta": 0.01}, noise_multiplier=1.0, steps=1)
