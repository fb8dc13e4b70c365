"""Adaptive clipping: gradient and indicator share one Gaussian exactly, and the clip norm finds the quantile."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import keys
from dpx.audit.contract.noise import require_standard_normals
from dpx.sums.clipped_sum import sum_contributions
from dpx.sums.rounding import ETA

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=20)
KEY = jax.random.key(5)
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
Z, S = 1.1, 0.9  # noise multiplier, indicator noise
Z_GRADIENT = (Z**-2 - (2 * S) ** -2) ** -0.5


def adaptive(key=KEY, **changes):
    options = dict(initial_clip_norm=0.5, indicator_noise=S, noise_multiplier=Z, sampling=SAMPLING, key=key)
    return dpx.mechanisms.adaptive_clipping(**(options | changes))


def gradients(norms):
    """Random directions of these norms."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(len(norms), 8))
    flat *= (np.asarray(norms) / np.linalg.norm(flat, axis=1))[:, None]
    return {"w": jnp.asarray(flat[:, :6].reshape(-1, 3, 2), jnp.float32), "b": jnp.asarray(flat[:, 6:], jnp.float32)}


def test_a_budget_finds_noise_below_twice_that_of_the_indicator():
    budget = dpx.Budget(epsilon=8.0, delta=1e-5, steps=10)
    assert 7.9 < dpx.epsilon(adaptive(noise_multiplier=budget), 10, delta=1e-5) <= 8.0


def test_the_split_is_exact():
    """An example below, at and above the clip norm: the joint contribution is at most 1 = (a^2 + b^2)^(1/2)."""
    mechanism = adaptive()
    state = mechanism.init(PARAMS)
    share, indicator = Z / Z_GRADIENT, Z / (2 * S)
    assert share**2 + indicator**2 == pytest.approx(1, rel=1e-12)
    for size, expected, side in (
        (0.1, share / 5, 1),
        (0.4999, share * 0.9998, 1),
        (0.5001, share, -1),
        (1e6, share, -1),
    ):
        (sums,), _ = sum_contributions(mechanism, gradients([size]), state, jnp.ones(1, bool))
        assert float(optax.tree.norm(sums.high["gradient"])) == pytest.approx(expected, rel=1e-5)
        assert float(sums.high["indicator"]) == pytest.approx(side * indicator, rel=1e-6)


def test_noise_of_the_gradient_and_of_the_indicator(ungridded):
    """Standard deviations z_g C on the gradient and s on the indicators' sum, independent; false alarm below 1e-4."""
    n, state = 4000, adaptive().init(PARAMS)
    zeros = ({"gradient": PARAMS, "indicator": jnp.zeros(())},)

    def draw(key):
        updates, after = adaptive(key, clip_learning_rate=1.0).release(zeros, state, PARAMS)
        count = (jnp.log(state.clip_norm / after.clip_norm) + 0.5 - 0.5) * SAMPLING.divisor  # C exp(-(b - quantile))
        return jnp.concatenate([updates["w"].ravel(), updates["b"]]) * SAMPLING.divisor, count

    updates, counts = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), n))
    draws = np.column_stack([np.asarray(updates, np.float64) / (Z_GRADIENT * 0.5), np.asarray(counts, np.float64) / S])
    require_standard_normals(draws)
    for wrong in (2 / 3, 3 / 2):
        with pytest.raises(AssertionError):
            require_standard_normals(draws * wrong)


def test_equals_the_pseudo_code(ungridded):
    """Algorithm 1 of Andrew et al. 2021, a step at a time, in NumPy with the same noise."""
    mechanism, quantile, rate = adaptive(quantile=0.3, clip_learning_rate=0.4), 0.3, 0.4
    state, update, clip = mechanism.init(PARAMS), jax.jit(mechanism.update), 0.5
    sizes = np.geomspace(0.05, 5, 16)
    grads = gradients(sizes)
    rows = np.concatenate([np.asarray(grads["b"], np.float64), np.asarray(grads["w"], np.float64).reshape(16, 6)], 1)
    shapes = {"gradient": PARAMS, "indicator": jnp.zeros(())}
    for step in range(5):
        noise = jax.tree.map(lambda n: (1 + ETA) * n, keys.normals_of_release(keys.stream(KEY, "noise"), step, shapes))
        draw = np.concatenate([np.asarray(noise["gradient"][name], np.float64).ravel() for name in ("b", "w")])
        total = (rows * np.minimum(1, clip / sizes)[:, None]).sum(0) + Z_GRADIENT * clip * draw
        below = 0.5 + ((sizes <= clip) - 0.5).sum() / 20 + S * float(noise["indicator"]) / 20
        updates, state = update(grads, state, PARAMS, included=jnp.ones(16, bool))
        found = np.concatenate([np.asarray(updates[name]).ravel() for name in ("b", "w")])
        np.testing.assert_allclose(found, total / 20, rtol=1e-4, atol=1e-6)
        clip *= math.exp(-rate * (below - quantile))
        assert float(state.clip_norm) == pytest.approx(clip, rel=1e-5)


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
@pytest.mark.long_cases("0.25", "0.9")
def test_the_clip_norm_goes_to_the_quantile(quantile):
    sizes = np.linspace(1, 2, 101)
    mechanism = adaptive(
        initial_clip_norm=3.0,
        quantile=quantile,
        indicator_noise=0.5,
        noise_multiplier=0.5,
        sampling=dpx.FullBatch(examples=101),
    )
    grads = gradients(sizes)
    step = jax.jit(
        lambda state: jax.lax.scan(lambda s, _: (mechanism.update(grads, s, PARAMS)[1], s.clip_norm), state, length=150)
    )
    _, norms = step(mechanism.init(PARAMS))
    assert np.median(norms[-50:]) == pytest.approx(1 + quantile, abs=0.03)


def test_small_integers_of_numpy_are_numbers():
    after = []
    for number in (int, np.int8):
        mechanism = adaptive(clip_learning_rate=number(2), indicator_noise=number(100))
        after.append(mechanism.update(gradients([9.0]), mechanism.init(PARAMS), PARAMS, included=jnp.ones(1, bool))[1])
    assert after[0].clip_norm == after[1].clip_norm != 0.5


def test_the_clip_norm_stays_a_number():
    mechanism = adaptive(clip_learning_rate=1e6, quantile=0.5)
    for size, bound in ((1e-15, 2**-40), (1e15, 2**40)):
        update, all_rows = jax.jit(mechanism.update), jnp.ones(40, bool)
        _, state = update(gradients([size] * 40), mechanism.init(PARAMS), PARAMS, included=all_rows)
        assert float(state.clip_norm) == pytest.approx(bound)
        updates, _ = update(gradients([1.0]), state, PARAMS, included=all_rows[:1])
        assert np.isfinite(np.asarray(updates["w"])).all()


@pytest.mark.parametrize("multiplier", [1.8, 1.8 * (1 - 1e-8), 0.0])  # the second is 1.8 as a float32
def test_noise_that_leaves_no_room_is_refused(multiplier):
    with pytest.raises(ValueError, match="must be above 0 and below 2 indicator_noise = 1.8, got .* at step 0"):
        adaptive(noise_multiplier=multiplier)


def test_a_schedule_that_leaves_no_room_is_refused_with_the_bill():
    mechanism = adaptive(noise_multiplier=optax.linear_schedule(1.0, 2.0, 10))
    mechanism.event(8)
    with pytest.raises(ValueError, match="got 1.8 at step 8"):
        mechanism.event(10)


def test_what_an_example_adds_is_float32_with_64_bits_on():
    """A sum in float64 is rounded once to float32, by more than the noise has room for in a batch of 10^6."""
    with jax.enable_x64(True):
        made = adaptive()
        params = {"w": jnp.ones(3)}
        added = made.contribute(params, made.init(params))
        assert params["w"].dtype == np.float64 and {leaf.dtype for leaf in jax.tree.leaves(added)} == {np.dtype("f4")}
