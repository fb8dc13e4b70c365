"""The comparison of optimizers: every formula does what it says, and a killed command continues."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from examples.optimizers import __main__ as command
from examples.optimizers import problems, transforms
from examples.optimizers.__main__ import Cell, Trainer
from examples.optimizers.problems import Task
from examples.optimizers.transforms import GAMMA, KAPPA, OPTIMIZERS

KEY = dpx.secret_key(2**100)


@pytest.fixture(autouse=True)
def promotion_as_in_optax():
    """optax's Adam adds integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def released(steps: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((steps, 3)).astype(np.float32)


def along(transform: optax.GradientTransformation, grads: np.ndarray) -> np.ndarray:
    """The updates of some steps, (steps, 3)."""
    params = jnp.zeros(3)
    state, found = transform.init(params), []
    for grad in grads:
        update, state = transform.update(jnp.asarray(grad), state, params)
        params = params + update
        found.append(update)
    return np.stack(found)


def test_without_noise_is_adam_where_there_is_none():
    grads = released()
    ours = along(transforms.without_noise(1e-16, 1.0), grads)
    np.testing.assert_allclose(-0.1 * ours, along(optax.adam(0.1), grads), rtol=1e-5)


def test_the_variance_of_the_noise_is_taken_out():
    grads = np.full((3, 3), 2.0, np.float32)  # v is 4 at every step
    np.testing.assert_allclose(along(transforms.without_noise(3.0, 0.1), grads), 2.0, rtol=1e-3)  # 2 / sqrt(4 - 3)
    np.testing.assert_allclose(along(transforms.without_noise(9.0, 0.25), grads), 2 / 1.5, rtol=1e-5)  # the floor


def test_the_low_pass_filter():
    ones, signs = np.ones((50, 3), np.float32), np.resize([1.0, -1.0], (200, 1)) * np.ones(3, np.float32)
    np.testing.assert_allclose(along(transforms.low_pass(), ones), 1.0, rtol=1e-5)
    assert np.abs(along(transforms.low_pass(), signs)[-1]).max() < 1e-6  # the highest frequency is removed
    grads = released()
    expected = [grads[0], (0.9 * 0.05 * grads[0] + 0.05 * (grads[0] + grads[1])) / (0.9 * 0.05 + 0.1)]
    np.testing.assert_allclose(along(transforms.low_pass(), grads)[:2], expected, rtol=1e-5)


def test_scales_are_those_of_earlier_releases():
    coordinates = transforms.scaled(stability=0.5)
    state = coordinates.init(jnp.zeros(3))
    grads = released()
    np.testing.assert_allclose(coordinates.encode(jnp.asarray(grads[0]), state), grads[0], rtol=1e-6)
    restored, state = coordinates.decode(jnp.asarray(grads[0]), state, None)
    np.testing.assert_allclose(restored, grads[0], rtol=1e-6)
    scale = np.abs(grads[0]) + 0.5
    scale /= np.sqrt(np.mean(scale**2))
    np.testing.assert_allclose(coordinates.encode(jnp.asarray(grads[1]), state), grads[1] / scale, rtol=1e-5)


def test_disk_follows_its_formula():
    def loss(params, example):
        return jnp.sum(jnp.sin(params * example))

    sampling = dpx.PoissonSampling(examples=2, batch_size=2)
    mechanism = dpx.dp_sgd(clip_norm=0.3, noise_multiplier=0.0, sampling=sampling, key=KEY)
    optimizer = dpx.chain(dpx.in_coordinates(mechanism, transforms.SUMMED), transforms.disk(optax.sgd(0.1)))
    examples, x = released(2), jnp.asarray([1.0, -2.0, 0.5])
    step = dpx.private_updates(transforms.both_points(loss), optimizer)
    params = {"at": x, "ahead": x}
    state = optimizer.init(params)
    share, move, m = (1 - KAPPA) / (KAPPA * GAMMA), jnp.zeros(3), jnp.zeros(3)
    for _ in range(4):
        batch = dpx.Batch(jnp.asarray(examples), jnp.ones(2, bool))
        found = step(params, batch, state)
        params, state = optax.apply_updates(params, found.updates), found.state
        total = jnp.zeros(3)
        for example in examples:
            grad = share * jax.grad(loss)(x + GAMMA * move, example) + (1 - share) * jax.grad(loss)(x, example)
            total += grad * jnp.minimum(1, 0.3 / jnp.linalg.norm(grad))
        m = (1 - KAPPA) * m + KAPPA * total / 2
        move = -0.1 * m
        x = x + move
        np.testing.assert_allclose(params["at"], x, rtol=1e-5)
        np.testing.assert_allclose(params["ahead"], x + GAMMA * move, rtol=1e-5)


@pytest.mark.parametrize("coordinates", [transforms.SUMMED, transforms.scaled(1e-3)])
@pytest.mark.long_cases("coordinates1")
def test_the_contract_holds_in_the_new_coordinates(coordinates):
    sampling = dpx.PoissonSampling(examples=40, batch_size=8)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=KEY)
    params = {"at": jnp.ones(4), "ahead": jnp.ones(4)}
    mechanism = dpx.in_coordinates(mechanism, coordinates)
    lines = ["bounded", "adjacent", "secrecy"]  # no noise: both points are given one
    dpx.audit.check_contract(mechanism, params=params, lines=lines, draws=500).require()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    task = Task("pixels", lambda: problems.digits("random:4x4x1x2"), 1.0, 8, 1.0, (0.1, 0.01))
    monkeypatch.setitem(problems.TASKS, "mnist", task)
    return tmp_path / "runs.jsonl"


@pytest.mark.long
def test_a_killed_command_continues(tiny, capsys, monkeypatch):
    monkeypatch.setattr(command, "MOST_TRIALS", 2)
    words = ["--tasks", "mnist", "--optimizers", "disk-sgd", "--epsilons", "3", "--seeds", "0"]
    words += ["--runs", str(tiny), "--results", str(tiny.with_suffix(".md"))]
    assert command.main(words) == 0
    lines = tiny.read_text().splitlines()
    assert len(lines) in (3, 4) and f"{100 * json.loads(lines[-1])['accuracy']:.2f}" in capsys.readouterr().out
    assert 2.9 < json.loads(lines[-1])["spent"] <= 3.0
    tiny.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    assert command.main(words) == 0
    again = [json.loads(line) for line in tiny.read_text().splitlines()]
    assert capsys.readouterr().out.count("s of CPU") == 1 and len(again) == len(lines)
    assert again[-1]["accuracy"] == json.loads(lines[-1])["accuracy"]
    assert "| DiSK, SGD | 3 | **" in tiny.with_suffix(".md").read_text()


@pytest.mark.parametrize(("best", "trials"), [(0, 3), (1, 3), (-1, 4), (2, 4), (9, 5), (-9, 5)])
def test_trials_climb_to_the_best_rate(tiny, monkeypatch, best, trials):
    tried = []

    def run(self, cell, seed, factor, own):
        tried.append((factor, own))
        assert seed == command.TUNING_SEED
        return {"accuracy": -abs(math.log2(factor) - best) - own}

    monkeypatch.setattr(Trainer, "run", run)
    factor, own = Trainer(tiny).chosen(Cell("mnist", "adam-bc", 1.0))
    assert len(tried) == 2 * trials and own == OPTIMIZERS["adam-bc"].own[0]
    assert factor == 2.0 ** min(max(best, -3), 4)
