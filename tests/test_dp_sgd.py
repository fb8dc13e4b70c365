"""DP-SGD against the pseudo-code in NumPy, and against optax's own aggregation at zero noise."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.sums.rounding import ETA, as_pair

SAMPLING = dpx.PoissonSampling(examples=500, batch_size=20)  # not the 16 rows of `model`
KEY = jax.random.key(0)


def model():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), "b": jnp.asarray(rng.normal(size=3), jnp.float32)}
    batch = {
        "x": jnp.asarray(rng.normal(size=(16, 5)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32),
    }
    return params, batch


def loss(params, example):
    return jnp.sum((example["x"] @ params["w"] + params["b"] - example["y"]) ** 2)


GRADIENTS = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


def dp_sgd(**changes):
    return dpx.dp_sgd(**({"clip_norm": 1.5, "noise_multiplier": 0.0, "sampling": SAMPLING, "key": KEY} | changes))


def poisson_gaussians(noise_multiplier, steps):
    one = dp_accounting.PoissonSampledDpEvent(0.04, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(one, steps) if steps > 1 else one


def numpy_dp_sgd(params, batches, clip_norms, learning_rate, divisor):
    """Algorithm 1 of Abadi et al. 2016 without noise, in float64, the gradients of `loss` by hand."""
    w, b = np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64)
    for (x, y), clip in zip(batches, clip_norms, strict=True):
        total_w, total_b = np.zeros_like(w), np.zeros_like(b)
        for i in range(len(x)):
            residual = 2 * (x[i] @ w + b - y[i])
            grad_w, grad_b = np.outer(x[i], residual), residual
            factor = 1 / max(1, np.sqrt((grad_w**2).sum() + (grad_b**2).sum()) / clip)
            total_w += factor * grad_w
            total_b += factor * grad_b
        w, b = w - learning_rate * total_w / divisor, b - learning_rate * total_b / divisor
    return {"w": w, "b": b}


@pytest.mark.parametrize("microbatch_size", [None, 5])
@pytest.mark.parametrize("clip_norm", [1.5, optax.linear_schedule(3.0, 0.3, 4)])
def test_equals_the_pseudo_code(clip_norm, microbatch_size):
    """One of the 16 rows is padding, which the pseudo-code never sees."""
    params, batch = model()
    included = np.arange(16) != 5
    expected = numpy_dp_sgd(
        params,
        [(np.asarray(batch["x"])[included], np.asarray(batch["y"])[included])] * 4,
        [float(clip_norm(t)) if callable(clip_norm) else clip_norm for t in range(4)],
        0.1,
        20,
    )
    optimizer = dpx.chain(dp_sgd(clip_norm=clip_norm), optax.sgd(0.1))
    gradient = jax.jit(dpx.private_updates(loss, optimizer, microbatch_size=microbatch_size))
    state = optimizer.init(params)
    for _ in range(4):
        updates, state, unreleased = gradient(params, dpx.Batch(batch, jnp.asarray(included)), state)
        params = optax.apply_updates(params, updates)
    assert unreleased.losses.shape == (16,)
    for name in params:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-6)


def test_equals_optax_at_zero_noise():
    params, batch = model()
    grads = GRADIENTS(params, batch)
    theirs = optax.contrib.differentially_private_aggregate(1.5, 0.0, key=jax.random.key(1))
    expected, _ = theirs.update(grads, theirs.init(params), params)
    mechanism = dp_sgd()
    updates, _ = mechanism.update(grads, mechanism.init(params), params, included=None)
    for name in params:  # optax divides by the 16 rows
        np.testing.assert_allclose(updates[name] * 20 / 16, expected[name], rtol=1e-6, atol=1e-6)


def test_automatic_clipping_equals_its_formula():
    params, batch = model()
    grads = GRADIENTS(params, batch)
    norms = np.sqrt(sum((np.asarray(g, np.float64).reshape(16, -1) ** 2).sum(1) for g in grads.values()))
    mechanism = dpx.mechanisms.normalized(dp_sgd(clip_norm=1.0), stability=0.05)
    updates, _ = mechanism.update(grads, mechanism.init(params), params, included=None)
    for name in params:
        expected = np.tensordot(1 / (norms + 0.05), np.asarray(grads[name], np.float64), 1) / 20
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("first", [0.0, 1e-15])
def test_numbers_whose_squares_are_lost_stay_within_the_clip_norm(first):
    """A CPU takes squares below 2^-126 for 0, so 10^6 such numbers moved a sum by 118 clip norms."""
    mechanism = dpx.mechanisms.normalized(dp_sgd(clip_norm=2.0**-40), stability=1e-6)
    grad = {"w": jnp.full(10**6, 0.99 * 2.0**-63).at[0].set(first)}
    encoded, _, (factor,) = jax.jit(mechanism.contribute)(grad, mechanism.init(grad))
    assert np.linalg.norm(np.asarray(encoded["w"], np.float64)) * float(factor) <= 2.0**-40 * (1 + 1e-6)


def test_per_layer_clipping_clips_each_layer_and_scales_the_noise_to_the_whole():
    params, batch = model()
    grads = GRADIENTS(params, batch)
    clip_norm = {"w": 3.0, "b": 4.0}
    mechanism = dp_sgd(clip_norm=clip_norm)
    updates, _ = mechanism.update(grads, mechanism.init(params), params, included=None)
    for name in params:
        rows = np.asarray(grads[name], np.float64).reshape(16, -1)
        rows *= np.minimum(1, clip_norm[name] / np.linalg.norm(rows, axis=1))[:, None]
        np.testing.assert_allclose(updates[name].ravel() * 20, rows.sum(0), rtol=1e-5, atol=1e-5)
    noisy = dp_sgd(clip_norm=clip_norm, noise_multiplier=2.0)
    plain = dp_sgd(clip_norm=5.0, noise_multiplier=2.0)  # sqrt(9 + 16)
    assert noisy.event(3) == plain.event(3) == poisson_gaussians(2.0, 3)
    none = jnp.zeros(16, bool)
    by_group, _ = noisy.update(grads, noisy.init(params), params, included=none)
    by_whole, _ = plain.update(grads, plain.init(params), params, included=none)
    for name in params:
        np.testing.assert_allclose(by_group[name], by_whole[name], rtol=1e-6)


@pytest.mark.long
def test_any_optax_optimizer_either_way(promoting):
    params, batch = model()
    mechanism = dp_sgd(noise_multiplier=1.0)

    def either_way(params, batch, transform):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        by_optax, by_dpx = optax.chain(mechanism, transform), dpx.chain(mechanism, transform)
        expected = by_optax.update(grads, by_optax.init(params), params, included=jnp.ones(16, bool))
        gradient = dpx.private_updates(loss, by_dpx, microbatch_size=8)
        return expected, gradient(params, dpx.Batch(batch, None), by_dpx.init(params))[:2]

    transforms = optax.adam(0.1), optax.adamw(0.1), optax.sgd(0.1, momentum=0.9), optax.lion(0.1)
    run = jax.jit(lambda params, batch: [either_way(params, batch, transform) for transform in transforms])
    for (expected, by_optax), (updates, by_dpx) in run(params, batch):
        assert dpx.accounting.steps_taken(by_optax) == dpx.accounting.steps_taken(by_dpx) == 1
        for name in params:
            np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5, atol=1e-6)


def test_calibrated_by_what_may_be_spent():
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=100)
    mechanism = dp_sgd(noise_multiplier=budget)
    assert 1.98 <= dpx.epsilon(mechanism, 100, delta=1e-5) <= 2.0
    assert mechanism.budget == budget and dp_sgd().budget is None
    with pytest.raises(ValueError, match="noise_multiplier"):
        dp_sgd(noise_multiplier=None)
    for wrong, message in (
        ({"epsilon": 0.0}, "epsilon must be .*0"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"delta": 1.0}, "delta must be .*1"),
        ({"delta": 0.0}, "delta"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps"),
        ({"accountant": "clt"}, "accountant"),
    ):
        with pytest.raises(ValueError, match=message):
            dpx.Budget(**({"epsilon": 2.0, "delta": 1e-5, "steps": 100} | wrong))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": -1.0}, "clip_norm must be a finite number at least 9.09495e-13 and at most 1e[+]15, got -1.0"),
        ({"clip_norm": {"w": 1.0, "b": -1.0}}, "clip_norm"),
        ({"clip_norm": {}}, "clip_norm must hold"),
        ({"clip_norm": 1e20}, "clip_norm must be .* got 1e[+]20"),
        ({"noise_multiplier": [1.0, 2.0]}, "noise_multiplier"),
    ],
)
def test_bad_configuration(changes, message):
    with pytest.raises(ValueError, match=message):
        dp_sgd(**changes)


def test_bad_schedules_are_found_by_the_bill():
    with pytest.raises(
        ValueError, match="noise_multiplier must be finite and at least 0 at every step, got -0.5 at step 3"
    ):
        dp_sgd(noise_multiplier=optax.linear_schedule(1.0, -1.0, 4)).event(5)
    with pytest.raises(ValueError, match="clip_norm must be finite"):
        dp_sgd(clip_norm=optax.linear_schedule(1.0, 0.0, 4)).event(5)
    with pytest.raises(ValueError, match="clip_norm must be finite"):
        dp_sgd(clip_norm=optax.linear_schedule(1.0, 1e20, 4)).event(5)


@pytest.mark.parametrize("clip_norm", [2.0**-40, 1e15])
def test_the_clip_norms_at_the_ends_run_and_are_billed(clip_norm):
    mechanism = dp_sgd(clip_norm=clip_norm, noise_multiplier=1.0)
    grads = {"w": jnp.full((2, 3), 1e30), "b": jnp.full((2,), 3.0)}
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    updates, state = jax.jit(mechanism.update)(grads, mechanism.init(params), params, included=jnp.ones(2, bool))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    assert 0 < dpx.epsilon(mechanism, state, delta=1e-5) < np.inf


def test_data_cannot_set_the_noise():
    def train(data):
        return dp_sgd(noise_multiplier=data.mean()).event(1)

    with pytest.raises(ValueError, match="traced"):
        jax.jit(train)(jnp.ones(3))


def test_the_noise_of_many_groups_is_not_below_its_multiple_of_their_norm(monkeypatch):
    # A large clip norm first, so that a float32 sum of squares loses half a unit of each small one.
    groups = {f"{number:04}": 1.0 if number == 0 else 2.0**-12.5 for number in range(2_000)}
    params, found = jax.tree.map(lambda _: jnp.zeros(1), groups), []
    monkeypatch.setattr(dpx.keys, "release", lambda key, step, total, deviation: found.append(deviation) or total.high)
    sampling = dpx.FullBatch(examples=1)
    made = dpx.dp_sgd(clip_norm=groups, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(2**100))
    made.release((as_pair(params),), made.init(params), params)
    exact = np.sqrt(sum(np.float64(np.float32(each)) ** 2 for each in groups.values()))
    assert exact * (1 + ETA) * (1 - 2.0**-22) <= float(found[0]) <= exact * (1 + ETA) * (1 + 2.0**-14)
