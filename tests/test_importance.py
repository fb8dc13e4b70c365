"""AdaDPIGU against its pseudo-code in the sound order; its parts: scores, ranking, standardization, top fractions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import keys
from dpx.sums.rounding import ETA
from tests.ghost import noiseless
from tests.test_masks import KEY, LIKE, SAMPLING, SIZE, example_gradients, flat, loss, noise_at, problem

WARMUP, CLIP, SIGMA, KEEP, OWN = 3, 1.2, 0.8, 0.6, 0.4
BASE = dict(clip_norm=CLIP, noise_multiplier=SIGMA, sampling=SAMPLING, key=KEY)


def pseudo_code(steps, lr, gamma_1, gamma_2, mu, *, relative, own, masked_loss):
    """Algorithms 1 and 2 of arXiv:2507.06525 in the sound order, with the noise of `noise_at`, in NumPy.

    Different from the paper: scores of released gradients, the mask again after standardizing and after restoring, the
    averages of frozen coordinates kept.
    """
    params, batch = problem()
    theta, size, d = flat(params), SAMPLING.divisor, 8
    scores, m, alpha = np.zeros(d), np.ones(d), np.zeros(d)
    beta = np.full(d, (SIGMA * CLIP / size) ** 2)
    for t in range(steps):
        noise = SIGMA * CLIP * noise_at(t)
        if t < WARMUP:
            g = example_gradients(theta, batch)
            g = g * np.minimum(1, CLIP / np.linalg.norm(g, axis=1))[:, None]
            update = (g.sum(0) + noise) / size
            scores += (np.abs(update) - math.sqrt(2 / math.pi) * SIGMA * CLIP / size) / WARMUP
        else:
            m = np.zeros(d)
            m[np.argsort(-scores, kind="stable")[: math.floor(KEEP * d)]] = 1
            s = np.sqrt(beta) + mu
            s = s / np.sqrt(np.mean(s**2)) if relative else s
            g = m * example_gradients(m * theta if masked_loss else theta, batch)
            z = m * (g - alpha) / s
            if own < 1:
                least = -np.sort(-np.abs(z), axis=1)[:, math.floor(own * d) - 1]
                z = np.where(np.abs(z) >= least[:, None], z, 0)
            z = z * np.minimum(1, CLIP / np.linalg.norm(z, axis=1))[:, None]
            restored = m * (z.sum(0) + noise) / size * s + alpha
            beta = np.where(m == 1, gamma_2 * beta + (1 - gamma_2) * (restored - alpha) ** 2, beta)
            alpha = np.where(m == 1, gamma_1 * alpha + (1 - gamma_1) * restored, alpha)
            update = m * restored
        theta = theta - lr * update
    return theta, m, scores, alpha, beta


@pytest.mark.parametrize(
    ("relative", "own", "masked_loss"), [(True, 1.0, False), (False, 1.0, True), (True, OWN, False), (False, OWN, True)]
)
@pytest.mark.long_cases("False-1.0", "True-0.4")
def test_ada_dpigu_equals_the_pseudo_code(relative, own, masked_loss, ungridded):
    steps, lr, averages = 8, 0.05, dict(mean_decay=0.7, variance_decay=0.6, stability=0.1, relative=relative)
    mechanism = dpx.methods.ada_dpigu(keep=KEEP, warmup=WARMUP, example_keep=own, **averages, **BASE)
    optimizer = dpx.chain(mechanism, optax.sgd(lr))
    params, batch = problem()
    state = jax.jit(optimizer.init)(params)
    gradient = dpx.private_updates(loss, optimizer)

    @jax.jit
    def step(params, state):
        at = dpx.coordinates.zero_frozen_params(params, state) if masked_loss else params
        updates, state, _ = gradient(at, dpx.Batch(batch, None), state)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    theta, m, scores, alpha, beta = pseudo_code(
        steps, lr, 0.7, 0.6, 0.1, relative=relative, own=own, masked_loss=masked_loss
    )
    important = state.inner.coordinates[0]
    np.testing.assert_array_equal(flat(important.mask), m)
    np.testing.assert_allclose(flat(important.score), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(important.inner.mean), alpha, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flat(important.inner.variance), beta, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(flat(params), theta, rtol=2e-5, atol=2e-6)


def test_tp_topk_equals_its_pseudo_code(ungridded, steps=6, lr=0.05):
    """Algorithm 1 of arXiv:2606.04375, with two clip norms, in NumPy."""
    clip_norm = optax.piecewise_constant_schedule(CLIP, {WARMUP: 0.5})
    mechanism = dpx.methods.tp_topk_sgd(keep=KEEP, warmup=WARMUP, **BASE | {"clip_norm": clip_norm})
    params, batch = problem()
    state, gradient = mechanism.init(params), jax.jit(dpx.private_updates(loss, mechanism))
    theta, scores, mask = flat(params), np.zeros(8), np.ones(8)
    for step in range(steps):
        clip = CLIP if step < WARMUP else CLIP / 2
        g = mask * example_gradients(theta, batch)
        g = g * np.minimum(1, clip / np.linalg.norm(g, axis=1))[:, None]
        update = mask * (g.sum(0) + SIGMA * clip * noise_at(step)) / SAMPLING.divisor
        if step < WARMUP:
            scores += (update**2 - (SIGMA * clip / SAMPLING.divisor) ** 2) / WARMUP
        if step == WARMUP - 1:
            mask = np.isin(np.arange(8), np.argsort(-scores, kind="stable")[: math.floor(KEEP * 8)])
        theta = theta - lr * update
        updates, state, _ = gradient(params, dpx.Batch(batch, None), state)
        params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
    np.testing.assert_array_equal(flat(state.coordinates[0].mask), mask)
    np.testing.assert_allclose(flat(state.coordinates[0].score), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(params), theta, rtol=2e-5, atol=2e-6)


def test_both_phases_are_billed():
    mechanism = dpx.methods.ada_dpigu(warmup=10, **BASE)
    assert dpx.epsilon(mechanism, 40, delta=1e-5) == dpx.epsilon(dpx.dp_sgd(**BASE), 40, delta=1e-5)
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=40)
    within = dpx.methods.ada_dpigu(warmup=10, keep=0.5, **BASE | {"noise_multiplier": budget})
    assert 1.999 <= dpx.epsilon(within, 40, delta=1e-5) <= 2.0


# Scores and the ranking


def decoded(coordinates, released):
    """The states along releases (steps, ...) and the updates."""

    def step(state, one):
        updates, after = coordinates.decode(one, state, LIKE)
        return after, (state, updates)

    _, (states, updates) = jax.jit(lambda releases: jax.lax.scan(step, coordinates.init(LIKE), releases))(released)
    return states, updates


def releases(steps, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=(steps, *x.shape)), jnp.float32), LIKE)


def rows(tree) -> np.ndarray:
    return np.concatenate(
        [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)], axis=1
    )


def test_scores_of_pure_noise_are_zero():
    """Mean of |N(0, s^2)| less its known value, within 5 standard errors: false alarm below 1e-5 in all."""
    steps = 4000
    states, _ = decoded(
        dpx.coordinates.importance_mask(keep=0.5, warmup=steps, noise_floor=0.3), releases(steps + 1, scale=0.3)
    )
    error = 0.3 * math.sqrt((1 - 2 / math.pi) / steps)
    np.testing.assert_array_less(np.abs(rows(states.score)[-1]), 5 * error)
    states, _ = decoded(dpx.coordinates.importance_mask(keep=0.5, warmup=steps), releases(steps + 1, scale=0.3))
    assert (rows(states.score)[-1] > 50 * error).all()


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_the_score_of_tp_topk_is_the_squared_gradient(shift, steps=4000):
    """Its mean of squares less the variance of the noise, within 5 standard errors; the noise halves on the way."""
    deviation = np.where(np.arange(steps + 1) < steps // 2, 0.4, 0.2).astype(np.float32)
    given = jax.tree.map(lambda x: shift + x * deviation.reshape(-1, *[1] * (x.ndim - 1)), releases(steps + 1))
    floor = optax.piecewise_constant_schedule(0.4, {steps // 2: 0.5})
    mask = dpx.coordinates.importance_mask(keep=0.5, warmup=steps, noise_floor=floor, squares=True)
    found = rows(decoded(mask, given)[0].score)[-1]
    error = math.sqrt((2 * deviation**4 + 4 * shift**2 * deviation**2).mean() / steps)
    np.testing.assert_array_less(np.abs(found - shift**2), 5 * error)


def test_unfreezing_goes_down_the_ranking():
    keep = optax.linear_schedule(0.3, 1.0, 7, transition_begin=4)
    given = releases(14)
    states, updates = decoded(dpx.coordinates.importance_mask(keep=keep, warmup=4), given)
    masks, order = rows(states.mask), np.argsort(-np.abs(rows(given)[:4]).mean(0), kind="stable")
    assert masks[:4].all() and not masks[4].all()
    for step in range(4, 14):
        kept = min(math.floor(10 * (0.3 + 0.1 * (step - 4)) + 1e-6), 10)
        assert set(np.flatnonzero(masks[step])) == set(order[:kept])
    np.testing.assert_allclose(rows(updates), masks * rows(given), rtol=1e-6)
    assert (rows(states.score)[4:] == rows(states.score)[4]).all()


def test_what_is_frozen_stays_so_whatever_the_inner_coordinates_do():
    moved = dpx.coordinates.Coordinates(
        init=lambda params: (),
        encode=lambda grad, state: jax.tree.map(lambda g: g + 1, grad),
        decode=lambda released, state, like: (jax.tree.map(lambda r: r - 1, released), state),
        name="move",
    )
    coordinates = dpx.coordinates.importance_mask(keep=0.5, warmup=1, inner=moved)
    given = jax.tree.map(lambda x: x[0], releases(1))
    _, state = coordinates.decode(given, coordinates.init(LIKE), LIKE)
    mask = flat(state.mask)
    np.testing.assert_allclose(flat(coordinates.encode(given, state)), mask * (flat(given) + 1), rtol=1e-6)
    np.testing.assert_allclose(flat(coordinates.decode(given, state, LIKE)[0]), mask * (flat(given) - 1), rtol=1e-6)


def test_zero_frozen_params():
    mechanism = dpx.methods.ada_dpigu(warmup=1, keep=0.5, **BASE)
    params, _ = problem()
    state = mechanism.init(params)
    np.testing.assert_array_equal(flat(dpx.coordinates.zero_frozen_params(params, state)), flat(params))
    grads = jax.tree.map(lambda p: p[None], params)
    _, state = jax.jit(mechanism.update)(grads, state, params, included=jnp.ones(1, bool))
    mask = flat(state.coordinates[0].mask)
    np.testing.assert_allclose(flat(dpx.coordinates.zero_frozen_params(params, state)), mask * flat(params))
    assert mask.sum() == 4
    with pytest.raises(ValueError, match="exactly one importance mask, found 0"):
        dpx.coordinates.zero_frozen_params(params, dpx.dp_sgd(**BASE).init(params))


# Standardization


def test_standardizing_changes_nothing_where_the_clip_does_not_bind():
    """Without noise, on a full batch, the update is the mean gradient whatever the averages are."""
    options = dict(clip_norm=1e4, noise_multiplier=0.0, sampling=dpx.FullBatch(examples=5), key=KEY)
    for relative in (True, False):
        standardized = dpx.coordinates.standardized(
            variance_decay=0.5, initial_variance=0.4, stability=0.1, relative=relative
        )
        mechanism = dpx.in_coordinates(dpx.dp_sgd(**options), standardized)
        assert not mechanism.supports_ghost_norms
        params = jax.tree.map(lambda p: p.astype(jnp.float32), LIKE)
        state, update = mechanism.init(params), jax.jit(mechanism.update)
        for step in range(4):
            grads = jax.tree.map(lambda x: x.astype(jnp.float32), releases(5, seed=step))
            updates, state = update(grads, state, params)
            np.testing.assert_allclose(flat(updates), rows(grads).mean(0), rtol=2e-4, atol=2e-5)
        assert np.ptp(flat(state.coordinates[0].variance)) > 0.01


def test_frozen_coordinates_keep_their_averages():
    coordinates = dpx.coordinates.standardized(initial_variance=1.0)
    given = releases(3)
    given["a"] = given["a"].at[:, 0].set(0)
    states, _ = decoded(coordinates, given)
    moved = np.array([False] * 3 + [True] * 7)
    assert (rows(states.mean)[-1] != 0).tolist() == moved.tolist()
    assert (rows(states.variance)[-1] != 1).tolist() == moved.tolist()


@pytest.mark.long
def test_the_published_scale_shrinks_to_the_stability():
    """The documented reason for `relative`: where every example is clipped, a release is a fraction of the scale."""
    grads = jax.tree.map(lambda x: x.astype(jnp.float32), releases(50, scale=10.0))

    def scale_after(steps, *, relative):
        mechanism = dpx.in_coordinates(
            dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=dpx.FullBatch(examples=50), key=KEY),
            dpx.coordinates.standardized(variance_decay=0.9, initial_variance=1.0, stability=1e-3, relative=relative),
        )

        def step(state, _):
            return mechanism.update(grads, state, LIKE)[1], None

        state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=steps))(mechanism.init(LIKE))
        return np.sqrt(flat(state.coordinates[0].variance))

    assert np.median(scale_after(300, relative=False)) < 1e-3
    assert np.median(scale_after(300, relative=True)) > 5e-3


# The largest of each example


def test_top_fraction_keeps_the_largest_of_each_example():
    made = noiseless(
        dpx.in_coordinates(dpx.dp_sgd(**BASE | {"clip_norm": 1e6}), dpx.coordinates.top_fraction(fraction=0.35))
    )
    grads = jax.tree.map(lambda x: x.astype(jnp.float32), releases(4))
    state = made.init(LIKE)
    update = jax.jit(made.update)

    def one(grad):
        return update(jax.tree.map(lambda x: x[None], grad), state, LIKE, included=jnp.ones(1, bool))[0]

    for i, grad in enumerate(rows(grads)):
        ((found,),) = [one(jax.tree.map(lambda x, i=i: x[i], grads))]
        expected = np.where(np.abs(grad) >= np.sort(np.abs(grad))[-3], grad, 0)
        np.testing.assert_allclose(flat(found), expected, rtol=1e-6)
    broken = grads | {"b": grads["b"].at[1].set(jnp.nan)}
    (whole,), _ = update(broken, state, LIKE, included=jnp.ones(4, bool))
    (without,), _ = update(broken, state, LIKE, included=jnp.array([True, False, True, True]))
    np.testing.assert_array_equal(flat(whole), flat(without))
    assert np.isfinite(flat(whole)).all()


# What is refused


def test_schedules_of_keep_are_refused_with_the_bill():
    rising = dpx.methods.ada_dpigu(warmup=2, keep=optax.linear_schedule(0.5, 1.3, 8), **BASE)
    rising.event(5)
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\], got 1.1 at step 6"):
        rising.event(8)
    falling = dpx.methods.ada_dpigu(warmup=2, keep=optax.linear_schedule(1.0, 0.6, 2, transition_begin=4), **BASE)
    falling.event(5)
    with pytest.raises(ValueError, match="keep must not fall after the warm-up, got 0.8 after 1 at step 5"):
        falling.event(6)
    in_the_warmup = dpx.methods.ada_dpigu(warmup=7, keep=optax.linear_schedule(1.0, 0.6, 2, transition_begin=4), **BASE)
    in_the_warmup.event(9)
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got -0.5 at step 1"):
        own = dpx.coordinates.top_fraction(fraction=optax.linear_schedule(1.0, -0.5, 1))
        dpx.in_coordinates(dpx.dp_sgd(**BASE), own).event(2)


def test_the_noise_is_the_mechanisms_own(ungridded):
    """The oracles take their noise from the "noise" stream with the step folded in, and from no other draw."""
    mechanism = dpx.methods.ada_dpigu(warmup=1, **BASE)
    params, _ = problem()
    zeros = (jax.tree.map(jnp.zeros_like, params),)
    updates, _ = mechanism.release(zeros, mechanism.init(params), params)
    expected = keys.normals_of_release(keys.stream(KEY, "noise"), 0, params)
    np.testing.assert_allclose(flat(updates), (1 + ETA) * SIGMA * CLIP * flat(expected) / 5, rtol=1e-5)
    assert SIZE == 10
