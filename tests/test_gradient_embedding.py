"""Gradient embedding perturbation: the subspace, the two noises, their bill, and freeze beside it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import dpx
from tests.mechanisms import PARAMS, POISSON

KEY = jax.random.key(4)
SIZE, RANK = 16, 3


def public_gradients(seed=0, *, rank=RANK, noise=0.0, examples=12):
    """Near a subspace of `rank` dimensions."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(examples, rank)) @ (np.geomspace(9, 3, rank)[:, None] * rng.normal(size=(rank, SIZE)))
    _, unravel = ravel_pytree(PARAMS)
    return jax.vmap(unravel)(jnp.asarray(rows + noise * rng.normal(size=rows.shape), jnp.float32))


def matrix(tree):
    return np.asarray(jax.vmap(lambda row: ravel_pytree(row)[0])(tree), np.float64)


def subspace(**changes):
    return dpx.coordinates.public_subspace(
        public_gradients(), **({"rank": RANK, "iterations": 3, "key": KEY} | changes)
    )


def gep(**changes):
    given = {"embedding_clip_norm": 2.0, "residual_clip_norm": 0.5, "noise_multiplier": 1.3}
    basis = changes.pop("basis", None)
    return dpx.methods.gep_sgd(
        basis=subspace() if basis is None else basis, sampling=POISSON, key=KEY, **(given | changes)
    )


def test_power_iteration_finds_the_largest_directions():
    grads = public_gradients(noise=0.1)
    found = dpx.coordinates.public_subspace(grads, rank=RANK, iterations=8, key=KEY)
    with jax.enable_x64(True):
        again = dpx.coordinates.public_subspace(grads, rank=RANK, iterations=8, key=KEY)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    basis = matrix(found)
    np.testing.assert_allclose(basis @ basis.T, np.eye(RANK), atol=1e-5)
    truth = np.linalg.svd(matrix(grads))[2][:RANK]
    np.testing.assert_allclose(np.linalg.svd(basis @ truth.T, compute_uv=False), 1, atol=1e-4)


def test_gradients_of_the_subspace_have_no_residual_and_all_come_back():
    coordinates = dpx.coordinates.gradient_embedding(basis=subspace(), embedding_scale=3.0, residual_scale=0.2)
    state = coordinates.init(PARAMS)
    inside = jax.tree.map(lambda g: g[0], public_gradients())
    encoded = coordinates.encode(inside, state)
    size = float(optax.tree.norm(inside))
    assert float(optax.tree.norm(encoded["residual"])) * 0.2 < 1e-5 * size
    assert float(optax.tree.norm(encoded["embedding"])) * 3 == pytest.approx(size, rel=1e-5)
    other = jax.tree.map(jnp.cos, inside)
    back, _ = coordinates.decode(coordinates.encode(other, state), state, other)
    np.testing.assert_allclose(ravel_pytree(back)[0], ravel_pytree(other)[0], rtol=1e-5, atol=1e-5)


def test_equals_its_formula():
    """sum of V^T clip(V g, C1) + clip(g - V^T V g, C2), in NumPy."""
    mechanism = gep(noise_multiplier=0.0)
    grads = jax.tree.map(lambda a, b: a / 10 + b, public_gradients(1), public_gradients(2, rank=SIZE))
    updates, _ = mechanism.update(grads, mechanism.init(PARAMS), PARAMS, included=None)
    g, v = matrix(grads), matrix(subspace())
    w = g @ v.T
    r = g - w @ v
    w *= np.minimum(1, 2 / np.linalg.norm(w, axis=1))[:, None]
    r *= np.minimum(1, 0.5 / np.linalg.norm(r, axis=1))[:, None]
    np.testing.assert_allclose(ravel_pytree(updates)[0] * POISSON.divisor, (w @ v + r).sum(0), rtol=1e-4, atol=1e-5)


def test_with_freeze_it_equals_the_formula_of_the_masked_gradients():
    """m (sum of V^T clip(V m g, C1) + clip(m g - V^T V m g, C2)), in NumPy, with the bill of GEP."""
    mechanism = gep(noise_multiplier=0.0, freeze_rate=optax.linear_schedule(0.5, 0.9, 10), every=2)
    state = mechanism.init(PARAMS)
    m = np.asarray(ravel_pytree(optax.tree.get(state, "mask"))[0], np.float64)
    assert m.sum() == SIZE // 2
    grads = jax.tree.map(lambda a, b: a / 10 + b, public_gradients(1), public_gradients(2, rank=SIZE))
    updates, _ = mechanism.update(grads, state, PARAMS, included=None)
    g, v = matrix(grads) * m, matrix(subspace())
    w = g @ v.T
    r = g - w @ v
    w *= np.minimum(1, 2 / np.linalg.norm(w, axis=1))[:, None]
    r *= np.minimum(1, 0.5 / np.linalg.norm(r, axis=1))[:, None]
    expected = m * (w @ v + r).sum(0)
    np.testing.assert_allclose(ravel_pytree(updates)[0] * POISSON.divisor, expected, rtol=1e-4, atol=1e-5)
    frozen = gep(freeze_rate=0.5)
    assert frozen.event(7) == gep().event(7) and "freeze a share of 0.5 of the coordinates" in str(frozen)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_noise_is_billed(share):
    """(C1 / noise)^2 + (C2 / noise)^2 = 1 / sigma^2; each within 5 standard errors, false alarm below 1e-5."""
    basis = subspace()

    def draw(key):
        mechanism = dpx.methods.gep_sgd(
            basis=basis,
            embedding_clip_norm=2.0,
            residual_clip_norm=0.5,
            embedding_share=share,
            noise_multiplier=1.3,
            sampling=POISSON,
            key=key,
        )
        state = mechanism.init(PARAMS)
        zeros = {"embedding": jnp.zeros(RANK), "residual": jax.tree.map(jnp.zeros_like, PARAMS)}
        return ravel_pytree(mechanism.release((zeros,), state, PARAMS)[0])[0] * POISSON.divisor

    noise = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 4000)), np.float64)
    v = matrix(basis)
    outside = np.linalg.svd(v)[2][RANK:]  # orthogonal to the subspace
    residual = 1.3 * 0.5 / math.sqrt(1 - share)
    embedding = math.sqrt((1.3 * 2 / math.sqrt(share)) ** 2 + residual**2)
    for rows, expected in ((v, embedding), (outside, residual)):
        found = np.std(noise @ rows.T)
        assert abs(found / expected - 1) < 5 / math.sqrt(2 * 4000 * len(rows))
    assert gep(embedding_share=share).event(7) == dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=1.3, sampling=POISSON, key=KEY
    ).event(7)


@pytest.mark.long
def test_the_anchor_can_be_exchanged_and_the_rest_frozen():
    freeze = dpx.coordinates.random_freeze(freeze_rate=0.5, every=1, key=KEY)
    mechanism = dpx.in_coordinates(
        dpx.dp_sgd(clip_norm={"embedding": 1.0, "residual": 1.0}, noise_multiplier=1.3, sampling=POISSON, key=KEY),
        freeze,
        dpx.coordinates.gradient_embedding(basis=subspace(), residual_scale=0.5),
    )
    state = mechanism.init(PARAMS)
    update, everyone = jax.jit(mechanism.update), jnp.ones(len(public_gradients()["scale"]), bool)
    updates, _ = update(public_gradients(), state, PARAMS, included=everyone)
    assert np.count_nonzero(ravel_pytree(updates)[0]) == SIZE // 2
    moved = optax.tree.set(state, basis=jax.tree.map(jnp.negative, subspace()))
    again, _ = update(public_gradients(), moved, PARAMS, included=everyone)
    assert not np.allclose(ravel_pytree(again)[0], ravel_pytree(updates)[0])


def test_frozen_layers():
    frozen = dpx.coordinates.trainable(mask={"kernel": True, "bias": False, "scale": True})
    basis = subspace() | {"bias": None}
    mechanism = dpx.in_coordinates(
        dpx.dp_sgd(clip_norm={"embedding": 1.0, "residual": 1.0}, noise_multiplier=1.3, sampling=POISSON, key=KEY),
        frozen,
        dpx.coordinates.gradient_embedding(basis=basis),
    )
    updates, _ = mechanism.update(public_gradients(), mechanism.init(PARAMS), PARAMS, included=None)
    assert not updates["bias"].any() and updates["kernel"].all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: subspace(rank=0), r"rank must be a whole number in \[1, 12\].*got 0"),
        (lambda: subspace(rank=13), "rank must be a whole number in"),
        (lambda: subspace(iterations=0), "iterations must be"),
        (lambda: subspace(key=None), "key must be"),
        (
            lambda: dpx.coordinates.gradient_embedding(basis=subspace()).init({"w": jnp.zeros(3)}),
            "basis must have shapes",
        ),
    ],
)
def test_bad_configuration(make, message):
    with pytest.raises(ValueError, match=message):
        make()
