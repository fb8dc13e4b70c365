"""Exactly k of the whole tree, uniformly; random and ranked freeze against the papers' pseudo-code; packed updates."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import dpx
from dpx import keys
from dpx.mechanism.masks import count_coordinates_in_share, mask_of_largest, random_mask
from dpx.sums.rounding import ETA
from tests.problems import squared_error as loss

SAMPLING = dpx.PoissonSampling(examples=100, batch_size=5)
KEY = jax.random.key(3)
LIKE = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(()), "c": jnp.zeros(3, jnp.bfloat16)}
SIZE = 10


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def test_the_largest_are_numpys_with_ties_in_order():
    rng = np.random.default_rng(0)
    jitted = jax.jit(jax.vmap(lambda numbers, k: ravel_pytree(mask_of_largest(numbers, k))[0], (None, 0)))
    words = rng.integers(0, 2**32, SIZE, np.uint32)
    words[[2, 7]] = words[5]
    for numbers in (
        rng.normal(size=SIZE).astype(np.float32),
        rng.integers(-2, 3, SIZE).astype(np.float32),
        np.zeros(SIZE, np.float32),
        np.float32([0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1, 1]),
        words,
        np.full(SIZE, 2**32 - 1, np.uint32),
    ):
        tree = {
            "a": jnp.asarray(numbers[:6].reshape(2, 3)),
            "b": jnp.asarray(numbers[6]),
            "c": jnp.asarray(numbers[7:]),
        }
        found = np.asarray(jitted(tree, jnp.arange(1, SIZE + 1)))
        signed = numbers.astype(np.float64) + np.where(np.signbit(numbers) & (numbers == 0), -1e-300, 0)
        order = np.argsort(-signed, kind="stable")
        for k, mask in enumerate(found, 1):
            assert set(np.flatnonzero(mask)) == set(order[:k])


def assert_uniform(masks: np.ndarray, k: int):
    """Every coordinate, and every pair, is kept as often as in a uniform k-subset: 5 standard errors, 5.7e-7 each."""
    draws, d = masks.shape
    assert (masks.sum(1) == k).all()
    together = masks.T @ masks / draws
    single, pair = k / d, k * (k - 1) / (d * (d - 1))
    expected = np.where(np.eye(d, dtype=bool), single, pair)
    np.testing.assert_array_less(np.abs(together - expected), 5 * np.sqrt(expected * (1 - expected) / draws))


def test_random_masks_are_uniform_subsets():
    """False alarm below 1e-4: 55 frequencies."""
    seeds = jax.random.bits(jax.random.key(0), (20_000, 2), jnp.uint32)
    draw = jax.jit(jax.vmap(lambda seed: ravel_pytree(random_mask(seed, jnp.int32(4), LIKE))[0]))
    masks = np.asarray(draw(seeds), np.float64)
    assert_uniform(masks, 4)
    rolled = np.stack([np.roll([1.0] * 4 + [0.0] * 6, i % SIZE) for i in range(20_000)])  # pairs are wrong
    with pytest.raises(AssertionError):
        assert_uniform(rolled, 4)


@pytest.mark.parametrize("size", [1, 7, 10, 1000, 550_570, 4_000_003])
@pytest.mark.parametrize(("part", "whole"), [(1, 10), (3, 10), (3, 5), (7, 10), (1, 3), (999, 1000), (1, 1)])
def test_the_count_is_the_floor(part, whole, size):
    like, share, floor = jax.ShapeDtypeStruct((size,), jnp.float32), part / whole, part * size // whole
    assert int(count_coordinates_in_share(share, jnp.int32(0), like)) == max(floor, 1)
    assert int(count_coordinates_in_share(1 - (1 - share), jnp.int32(0), like)) == max(floor, 1)
    if size < 2**20:
        assert int(count_coordinates_in_share(lambda step: jnp.float32(share), jnp.int32(0), like)) == max(floor, 1)


def masks_of(coordinates, like, steps):
    """The masks of the first steps, flat (steps, d), and the states."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)

    def step(state, _):
        return coordinates.decode(zeros, state, like)[1], state

    _, states = jax.jit(lambda: jax.lax.scan(step, coordinates.init(like), length=steps))()
    masks = [np.asarray(leaf, np.float64).reshape(steps, -1) for leaf in jax.tree.leaves(states.mask)]
    return np.concatenate(masks, axis=1), states


@pytest.mark.long
def test_gradual_cooling_keeps_exactly_the_floor_of_the_whole_tree():
    every, cooling = 3, optax.linear_schedule(0.0, 0.7, 12)
    coordinates = dpx.coordinates.random_freeze(freeze_rate=cooling, every=every, key=KEY)
    masks, states = masks_of(coordinates, LIKE, 21)
    rates = [0.7 * min(e * every / 12, 1) for e in range(7)]
    kept = np.repeat([math.floor((1 - r) * SIZE + 1e-6) for r in rates], every)
    assert masks.sum(1).tolist() == kept.tolist() == states.kept.tolist()
    for start in range(0, 21, every):
        assert (masks[start : start + every] == masks[start]).all()
    assert (masks[15] != masks[18]).any()  # drawn anew though the rate stands still
    again, _ = masks_of(dpx.coordinates.random_freeze(freeze_rate=cooling, every=every, key=KEY), LIKE, 7)
    assert (again == masks[:7]).all()
    other, _ = masks_of(
        dpx.coordinates.random_freeze(freeze_rate=cooling, every=every, key=jax.random.key(4)), LIKE, 21
    )
    assert (other != masks).any()
    every, _ = masks_of(dpx.coordinates.random_freeze(freeze_rate=0.5, every=1, key=KEY), LIKE, 20)
    assert (every.sum(1) == 5).all() and len({tuple(mask) for mask in every}) > 15


# The papers' pseudo-code


def problem():
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.asarray(rng.normal(size=2), jnp.float32)}
    batch = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    return params, batch


def example_gradients(theta: np.ndarray, batch) -> np.ndarray:
    """Of `loss`, by hand; (examples, 8), in the order of the tree: b, then w."""
    b, w = theta[:2], theta[2:].reshape(3, 2)
    x, y = (np.asarray(part, np.float64) for part in batch)
    residual = 2 * (x @ w + b - y)
    return np.concatenate([residual, (x[:, :, None] * residual[:, None, :]).reshape(len(x), -1)], axis=1)


def noise_at(step: int) -> np.ndarray:
    return (1 + ETA) * flat(keys.normals_of_release(keys.stream(KEY, "noise"), step, problem()[0]))


def pseudo_code(epochs, steps, rate, cooling, clip, sigma, momentum, lr, *, masks=None, posterior=False):
    """Algorithm 1 (with the masks that were drawn) or, without masks, Algorithm 2 of arXiv:2112.00845v1, appendix C.

    One difference: the noise added to the ranking is that of the update, not a second draw.
    """
    params, batch = problem()
    w, v, size, step = flat(params), np.zeros(8), len(batch[0]), 0
    ranked = np.zeros(8)
    for e in range(epochs):
        frozen = 8 - math.floor((1 - rate * min(e / cooling, 1)) * 8 + 1e-6)
        if masks is not None:
            m = masks[step]
        else:
            m = np.ones(8)
            if e > 0:
                m[np.argsort(np.abs(ranked), kind="stable")[:frozen]] = 0
        ranked = np.zeros(8)
        for _ in range(steps):
            g = example_gradients(w, batch)
            g = g if posterior else m * g
            g = g * np.minimum(1, clip / np.linalg.norm(g, axis=1))[:, None]
            g = m * g
            noise = sigma * clip * noise_at(step)
            ranked = ranked + (g.sum(0) + noise) / size
            v = momentum * v + (g.sum(0) + m * noise) / size
            w = w - lr * v
            step += 1
    return w


@pytest.mark.parametrize("kind", ["random", "posterior", "ranked"])
@pytest.mark.long_cases("posterior")
def test_freeze_equals_the_pseudo_code(kind, ungridded):
    epochs, steps, rate, cooling, clip, sigma, momentum, lr = 4, 3, 0.7, 2, 1.2, 0.8, 0.9, 0.05
    options = dict(every=steps, clip_norm=clip, noise_multiplier=sigma, sampling=SAMPLING, key=KEY)
    schedule = optax.linear_schedule(0.0, rate, cooling * steps)
    if kind == "ranked":
        mechanism = dpx.methods.ranked_freeze_sgd(freeze_rate=schedule, **options)
    else:
        mechanism = dpx.methods.random_freeze_sgd(freeze_rate=schedule, posterior=kind == "posterior", **options)
    optimizer = dpx.chain(mechanism, optax.sgd(lr, momentum=momentum))
    (params, batch), masks = problem(), []
    state, gradient = jax.jit(optimizer.init)(params), jax.jit(dpx.private_updates(loss, optimizer))
    for _ in range(epochs * steps):
        masks.append(flat(state.inner.coordinates[0].mask))
        updates, state, _ = gradient(params, dpx.Batch(batch, None), state)
        params = optax.apply_updates(params, updates)
    if kind != "ranked":
        assert [int(mask.sum()) for mask in masks] == [8] * 3 + [5] * 3 + [2] * 6
    expected = pseudo_code(
        *(epochs, steps, rate, cooling, clip, sigma, momentum, lr),
        masks=None if kind == "ranked" else masks,
        posterior=kind == "posterior",
    )
    np.testing.assert_allclose(flat(params), expected, rtol=2e-5, atol=2e-6)
    frozen = masks[-1] == 0
    assert frozen.sum() == 6 and (flat(updates)[frozen] != 0).all()  # momentum keeps moving frozen coordinates


def test_frozen_coordinates_count_nothing_in_the_norm():
    mechanism = dpx.methods.random_freeze_sgd(
        freeze_rate=0.5, every=1, clip_norm=1.0, noise_multiplier=0.0, sampling=dpx.FullBatch(examples=1), key=KEY
    )
    state = jax.jit(mechanism.init)(LIKE)
    mask = state.coordinates[0].mask
    grads = jax.tree.map(lambda m: jnp.where(m, 0.3, 1e6)[None], mask)
    updates, _ = jax.jit(mechanism.update)(grads, state, jax.tree.map(lambda g: g[0], grads))
    np.testing.assert_allclose(flat(updates), 0.3 * flat(mask), rtol=1e-6)


def test_masks_and_noise_have_streams_of_their_own(monkeypatch):
    names, stream = [], keys.stream
    monkeypatch.setattr(keys, "stream", lambda key, name, step=None: names.append(name) or stream(key, name, step))
    dpx.methods.random_freeze_sgd(
        freeze_rate=0.5, every=1, clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY
    )
    assert sorted(names) == ["noise", "random_freeze"]


# Packed updates


@pytest.mark.long
def test_packed_updates_come_back_exactly():
    coordinates = dpx.coordinates.random_freeze(freeze_rate=optax.linear_schedule(0.3, 0.7, 4), every=2, key=KEY)
    mechanism = dpx.in_coordinates(
        dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY), coordinates
    )
    optimizer = dpx.chain(mechanism, optax.scale(-0.1))
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape), p.dtype), LIKE)
    state = jax.jit(optimizer.init)(LIKE)
    update = jax.jit(optimizer.update)
    pack = jax.jit(lambda updates, state: dpx.coordinates.sparse_pack(updates, state, size=7))
    unpack = jax.jit(lambda packed: dpx.coordinates.sparse_unpack(packed, LIKE))
    for step in range(6):
        updates, after = update(grads, state, LIKE, included=jnp.ones(4, bool))
        packed = pack(updates, state)
        assert packed.values.shape == (7,) and packed.values.dtype == jnp.float32 and packed.seed.shape == (2,)
        back = unpack(packed)
        for name in LIKE:
            assert back[name].dtype == LIKE[name].dtype
            np.testing.assert_array_equal(np.asarray(back[name], np.float32), np.asarray(updates[name], np.float32))
        kept = [7, 7, 5, 5, 3, 3][step]
        assert int(packed.kept) == kept and float(dpx.coordinates.sparse_density(state)) == pytest.approx(kept / SIZE)
        state = after
    with pytest.raises(ValueError, match="size must be at least the 3"):
        dpx.coordinates.sparse_pack(updates, state, size=2)
    with pytest.raises(ValueError, match="exactly one random freeze, found 0"):
        dpx.coordinates.sparse_pack(updates, mechanism.init(LIKE).inner, size=9)


@pytest.mark.parametrize(
    ("rate", "cooling", "epochs", "dense", "published"),
    [
        (0.7, 40, 40, 40, 0.65),
        (0.6, 80, 80, 80, 0.7),
        (0.4, 200, 200, 200, 0.8),
        (0.9, 40, 60, 40, 0.6),
        (0.9, 80, 100, 80, 0.58),
    ],
)
def test_total_densities_are_those_of_the_paper(rate, cooling, epochs, dense, published):
    """Tables 2 and 9: everything sent, over what dense training of `dense` epochs sends."""
    schedule, like = optax.linear_schedule(0.0, rate, cooling), jax.ShapeDtypeStruct((550_570,), jnp.float32)
    kept = jax.vmap(lambda e: count_coordinates_in_share(lambda s: 1 - schedule(s), e, like))(jnp.arange(epochs))
    assert float(np.sum(np.asarray(kept, np.float64))) / (dense * 550_570) == pytest.approx(published, abs=0.015)


# What is refused


def test_schedules_that_leave_0_1_are_refused_with_the_bill():
    mechanism = dpx.methods.random_freeze_sgd(
        freeze_rate=optax.linear_schedule(0.0, 1.2, 12),
        **dict(every=1, clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY),
    )
    mechanism.event(10)
    with pytest.raises(ValueError, match=r"freeze_rate must be in \[0, 1\), got 1 at step 10"):
        mechanism.event(11)


def test_random_freeze_needs_a_key():
    with pytest.raises(TypeError, match="key"):
        dpx.coordinates.random_freeze(freeze_rate=0.5, every=1)  # type: ignore
