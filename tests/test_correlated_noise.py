"""Correlated noise as a mechanism: its covariance over steps, its bill, and what is refused with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpx
from dpx import accounting, coordinates, keys, mechanisms, strategies
from dpx.accounting.correlated import CorrelatedGaussianDpEvent
from dpx.accounting.gdp import epsilon as gaussian_epsilon
from dpx.keys import noise
from dpx.keys.noise import GRID
from dpx.xla.totals import ETA

KEY = keys.secret_key(2**100 + 1)
EPOCHS = dpx.ShuffledEpochs(examples=20, batch_size=5)
PARAMS = {"kernel": jnp.zeros((40, 50)), "bias": jnp.zeros(3)}
LAMBDA, BISR = strategies.lambda_cgd(correlation=0.9), strategies.inverse_square_root(coefficients=4)


ORDER = dpx.sampling.FixedOrder(examples=20, batch_size=5)


def made(strategy=LAMBDA, *, clip_norm=0.5, noise_multiplier=2.0, sampling=ORDER, key=KEY):
    return mechanisms.correlated_noise(
        strategy=strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key
    )


def run(mechanism, steps, params=PARAMS, grads=None):
    """The releases of zero gradients, or of `grads`, by step."""
    size = mechanism.sampling.divisor
    grads = jax.tree.map(lambda p: jnp.zeros((size, *p.shape)), params) if grads is None else grads
    update, state, found = jax.jit(mechanism.update), mechanism.init(params), []
    for _ in range(steps):
        updates, state = update(grads, state, params)
        found.append(updates)
    return found, state


@pytest.mark.parametrize("strategy", [LAMBDA, BISR], ids=["lambda", "bisr"])
def test_the_noise_is_the_weighted_sum_of_the_normals_of_the_steps(strategy):
    deviation = 2.0 * 0.5 * (1 + ETA)
    grid = 2.0 ** (np.floor(np.log2(deviation)) - GRID)
    found, _ = run(made(strategy), 7)
    normals = [keys.normal_like(keys.stream(KEY, "noise"), step, PARAMS) for step in range(7)]
    inverse = strategy.inverse_column(7)
    for step in range(7):
        for name in PARAMS:
            expected = sum(inverse[j] * np.asarray(normals[step - j][name], np.float64) for j in range(step + 1))
            released = np.asarray(found[step][name], np.float64) * 5
            assert np.abs(released - deviation * expected).max() <= grid / 2 + 1e-5
            assert np.allclose(released / grid, np.round(released / grid), atol=1e-3)


def test_the_covariance_over_steps_is_that_of_the_strategy():
    steps, params = 5, {"w": jnp.zeros(40_000)}
    found, _ = run(made(BISR), steps, params)
    rows = np.stack([np.asarray(update["w"], np.float64) for update in found]) * 5 / (2.0 * 0.5 * (1 + ETA))
    expected = BISR.covariance(steps)
    assert np.abs(rows @ rows.T / 40_000 - expected).max() < 5 * np.sqrt(2) * expected.max() / 200
    fresh = np.linalg.solve(np.linalg.cholesky(expected), rows)
    assert np.abs(fresh @ fresh.T / 40_000 - np.eye(steps)).max() < 5 * np.sqrt(2) / 200
    assert abs(stats.kurtosis(fresh.reshape(-1))) < 5 * np.sqrt(24 / fresh.size)


def test_the_identity_is_dp_sgd_bit_for_bit():
    both = dict(clip_norm=0.5, noise_multiplier=2.0, sampling=EPOCHS, key=KEY)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), (5, *p.shape)), PARAMS)
    mine, theirs = mechanisms.correlated_noise(strategy=strategies.identity(), **both), dpx.dp_sgd(**both)
    for one, other in zip(run(mine, 3, grads=grads)[0], run(theirs, 3, grads=grads)[0], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert dpx.epsilon(mine, 8, delta=1e-5) == dpx.epsilon(theirs, 8, delta=1e-5)
    poisson = dpx.PoissonSampling(examples=100, batch_size=5)
    mechanisms.correlated_noise(strategy=strategies.identity(), **both | {"sampling": poisson})


def test_the_sum_is_clipped_and_released_with_the_noise():
    grads = jax.tree.map(lambda p: jnp.full((5, *p.shape), 3.0), PARAMS)
    (with_data, _), (without, _) = run(made(noise_multiplier=1e-3), 2, grads=grads), run(made(noise_multiplier=1e-3), 2)
    for one, other in zip(with_data, without, strict=True):
        assert optax.tree.norm(optax.tree.sub(one, other)) == pytest.approx(0.5, rel=1e-3)


def test_the_noise_is_the_same_by_chunks_and_by_places():
    leaves = [jnp.ones((3, 5)), jnp.zeros(20_000)]
    shapes = noise._places([leaf.shape for leaf in leaves])
    given = keys.words(KEY), jnp.int32(9), jnp.float32(1.3), leaves, None, shapes
    by_chunks, by_places = (noise._release(*given, devices, (1.0, -0.5, 0.2)) for devices in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, by_chunks, by_places)
    alone = noise._release(*given, 1, (1.0,))
    assert not np.allclose(by_chunks[1], alone[1])


@pytest.mark.parametrize("strategy", [LAMBDA, BISR], ids=["lambda", "bisr"])
def test_the_bill_is_that_of_one_gaussian_times_the_sensitivity(strategy):
    for steps in (1, 4, 5, 12):
        moved = strategies.sensitivity(strategy, steps=steps, participations=-(-steps // 4), separation=4)
        event = made(strategy).event(steps)
        assert event == CorrelatedGaussianDpEvent(2.0, moved, steps, strategy.inverse_coefficients)
        exact = gaussian_epsilon(moved / 2.0, delta=1e-5)
        assert accounting.event_epsilon(event, delta=1e-5, relation="zero_out") == pytest.approx(exact, rel=1e-4)
        assert exact <= dpx.epsilon(made(strategy), steps, delta=1e-5) <= exact * 1.001
    assert dpx.epsilon(made(strategy, sampling=EPOCHS), 12, delta=1e-5) > dpx.epsilon(made(strategy), 12, delta=1e-5)


@pytest.mark.parametrize("strategy", [LAMBDA, BISR], ids=["lambda", "bisr"])
def test_the_best_attack_on_a_run_reaches_the_bill_and_not_more(strategy):
    """An example of one direction in every epoch moves the run by the billed number of deviations, in all."""
    steps, mechanism, moved = 10, made(strategy, noise_multiplier=1e-3), []
    for present in (0.0, 1.0):
        update, state, found = jax.jit(mechanism.update), mechanism.init(PARAMS), []
        for step in range(steps):
            size = present * 3.0 if step % 4 == 0 else 0.0
            grads = jax.tree.map(lambda p, size=size: jnp.zeros((5, *p.shape)).at[0].set(size), PARAMS)
            updates, state = update(grads, state, PARAMS)
            found.append(float(updates["kernel"][0, 0]))
        moved.append(np.array(found))
    shift = (moved[1] - moved[0]) * 5 * np.sqrt(optax.tree.size(PARAMS))  # in the direction of the example
    distance = np.sqrt(shift @ np.linalg.solve(strategy.covariance(steps), shift)) / (1e-3 * 0.5)
    event = mechanism.event(steps)
    assert distance == pytest.approx(event.sensitivity / event.noise_multiplier, rel=5e-3)


def test_the_steps_of_shuffled_epochs_and_full_batches_may_be_neighbors():
    full = dpx.sampling.FullBatch(examples=5)
    moved = strategies.sensitivity(LAMBDA, steps=12, participations=12, separation=1)
    assert made(sampling=full).event(12).sensitivity == pytest.approx(moved)
    moved = strategies.shuffled_sensitivity(LAMBDA, steps=12, steps_per_epoch=4)
    assert made(sampling=EPOCHS).event(12).sensitivity == pytest.approx(moved)
    assert made(sampling=EPOCHS).event(12).sensitivity > 1.1 * made().event(12).sensitivity


def test_no_other_relation_is_billed():
    for relation in ("replace_one", "add_or_remove"):
        with pytest.raises(ValueError, match="zero_out|add_or_remove"):
            dpx.epsilon(made(sampling=EPOCHS), 4, delta=1e-5, relation=relation)
        with pytest.raises(ValueError, match='"zero_out" only'):
            accounting.event_epsilon(made().event(4), delta=1e-5, relation=relation)


def test_a_budget_is_met():
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=40)
    mechanism = made(noise_multiplier=budget)
    assert 1.99 < dpx.epsilon(mechanism, 40, delta=1e-5) <= 2.0
    assert mechanism.budget == budget


def test_a_resumed_run_has_the_same_noise_and_bill():
    found, state = run(made(BISR), 6)
    again, third = made(BISR), run(made(BISR), 3)[1]
    grads = jax.tree.map(lambda p: jnp.zeros((5, *p.shape)), PARAMS)
    updates, _ = again.update(grads, third, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, updates, found[3])
    assert dpx.epsilon(again, state, delta=1e-5) == dpx.epsilon(again, 6, delta=1e-5)
    with pytest.raises(ValueError, match="another kind of event"):
        dpx.epsilon(made(LAMBDA), state, delta=1e-5)
    with pytest.raises(ValueError, match="another kind of event"):
        dpx.epsilon(dpx.dp_sgd(clip_norm=0.5, noise_multiplier=2.0, sampling=ORDER, key=KEY), state, delta=1e-5)


def test_what_is_fixed_is_allowed():
    grads = jax.tree.map(lambda p: jnp.ones((5, *p.shape)), PARAMS)
    layers = dpx.in_coordinates(made(), coordinates.trainable(mask={"kernel": True, "bias": False}))
    assert not np.any(run(layers, 2, grads=grads)[0][1]["bias"])
    whole = dpx.chain(mechanisms.normalized(made()), optax.sgd(0.1, momentum=0.9))
    assert dpx.epsilon(whole, 3, delta=1e-5) == dpx.epsilon(made(), 3, delta=1e-5)


def test_the_printed_pipeline_and_the_report_say_that_bits_have_no_proof():
    assert "the bits of a release: no proof" in str(made()) and "(1, -0.9)" in str(made())
    report = dpx.privacy_report(made(), 4, delta=1e-5)
    assert "the bits of a release: no proof" in str(report)
    assert sum("no proof for the bits" in caveat for caveat in report.caveats) == 1
    assert not any(
        "bits" in caveat for caveat in dpx.privacy_report(made(strategies.identity()), 4, delta=1e-5).caveats
    )


def test_the_contract_holds_but_for_the_bits():
    report = dpx.audit.check_contract(made(sampling=EPOCHS))
    found = {line.name: line for line in report.lines}
    assert report.passed and found["bits"].outcome == "not checked", str(report)
    assert "correlated over steps" in found["noise"].words
    assert {"bounded", "adjacent", "resume", "secrecy"} <= {
        line.name for line in report.lines if line.outcome == "pass"
    }


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: made(strategies.banded_half(bands=3)), "banded inverse"),
        (lambda: made((1, -0.5)), "banded inverse"),
        (lambda: made(noise_multiplier=lambda step: 1.0 + step), "got a schedule"),
        (lambda: made(clip_norm=lambda step: 1.0), "got a schedule"),
        (lambda: made(clip_norm={"kernel": 1.0, "bias": 1.0}), "clip_norm must be a finite number"),
        (lambda: made(noise_multiplier=0.0), "above 0"),
        (lambda: made(sampling=dpx.PoissonSampling(examples=20, batch_size=5)), "FixedOrder"),
        (lambda: made(sampling=dpx.sampling.RandomAllocation(examples=20, steps_per_epoch=4)), "FixedOrder"),
        (lambda: made(sampling=dpx.sampling.FixedSizeSampling(examples=20, batch_size=5)), "FixedOrder"),
        (lambda: dpx.in_coordinates(made(), coordinates.random_freeze(freeze_rate=0.5, every=2, key=KEY)), "fixed"),
        (
            lambda: dpx.in_coordinates(
                dpx.chain(mechanisms.normalized(made()), optax.sgd(0.1)),
                coordinates.random_projection(kind="countsketch", reduction_rate=0.5, key=KEY),
            ),
            "fixed",
        ),
        (lambda: dpx.in_coordinates(made(), coordinates.importance_mask(keep=0.5, warmup=2)), "fixed"),
        (
            lambda: mechanisms.clip_then_project(made(), kind="countsketch", reduction_rate=0.5, key=KEY),
            "must not be around correlated noise",
        ),
        (
            lambda: dpx.compose_runs((made(), 4), (made(key=keys.secret_key(3**60)), 4), shared_batches=True),
            "one Gaussian a step",
        ),
        (lambda: dpx.epsilon(made(), 4, delta=1e-5, relation="add_or_remove"), "add_or_remove"),
    ],
)
def test_what_has_no_proof_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
