"""Zeroth-order training: numbers that forward-mode derivatives give, without gradients, and the memory this takes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from tests.problems import KEY

SAMPLING = dpx.FullBatch(examples=6)
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}
EXAMPLES = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3
BASE = dict(clip_norm=0.5, noise_multiplier=0.0, sampling=SAMPLING, key=KEY)


def loss(params, example):
    x, y = example
    return -jax.nn.log_softmax(jnp.tanh(x @ params["w"]) + params["b"])[y]


def frozen_base(key=KEY) -> dpx.Mechanism:
    mask = {"w": True, "b": True, "base": False}
    layers = dpx.coordinates.trainable(mask=mask), dpx.coordinates.random_directions(count=5, key=key)
    return dpx.in_coordinates(dpx.dp_sgd(**BASE), *layers)


@pytest.mark.parametrize("kind", ["alone", "normalized", "behind frozen layers", "chained"])
@pytest.mark.long_cases("alone", "normalized")
def test_what_is_taken_forward_is_what_gradients_give(kind):
    """Norms, sums and updates, at two steps, whose directions differ."""
    mechanism, params = dpx.methods.zeroth_order_sgd(directions=5, **BASE), PARAMS
    if kind == "normalized":
        mechanism = dpx.mechanisms.normalized(mechanism)
    if kind == "behind frozen layers":
        mechanism, params = frozen_base(), PARAMS | {"base": jnp.arange(4, dtype=jnp.int8)}
    mechanism = dpx.chain(mechanism, optax.identity()) if kind == "chained" else mechanism
    by_gradients = mechanism.replace(encode=mechanism.encode)
    assert mechanism.forward is not None and by_gradients.forward is None
    states, batch, found = [mechanism.init(params)] * 2, dpx.Batch(EXAMPLES, None), []
    for _ in range(2):
        steps = [jax.jit(dpx.private_updates(loss, m)) for m in (mechanism, by_gradients)]
        made = [step(params, batch, state) for step, state in zip(steps, states, strict=True)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *[m.updates for m in made])
        np.testing.assert_allclose(*[m.unreleased.norms for m in made], rtol=1e-5)
        np.testing.assert_allclose(*[m.unreleased.losses for m in made], rtol=1e-6)
        states, found = [m.state for m in made], [*found, made[0].updates["w"]]
    assert not np.allclose(*found, rtol=0.1)


def test_coordinates_that_are_not_linear_in_between_need_the_gradient():
    top = dpx.coordinates.top_fraction(fraction=0.5)
    directions = dpx.coordinates.random_directions(count=5, key=KEY)
    assert dpx.in_coordinates(dpx.dp_sgd(**BASE), top, directions).forward is None
    assert (
        dpx.in_coordinates(dpx.methods.zeroth_order_sgd(**BASE), dpx.coordinates.trainable(mask=True)).forward is None
    )


def test_the_update_is_the_gradient_on_average(steps=3000):
    """Within 5 standard errors: the mean of u u^T over normal directions is 1."""
    mechanism = dpx.methods.zeroth_order_sgd(directions=4, **BASE | {"clip_norm": 1e6})
    step = dpx.private_updates(loss, mechanism)

    def body(state, _):
        updates, state, _ = step(PARAMS, dpx.Batch(EXAMPLES, None), state)
        return state, updates["w"]

    _, found = jax.jit(lambda state: jax.lax.scan(body, state, None, steps))(mechanism.init(PARAMS))
    gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, EXAMPLES)))(PARAMS)["w"]
    error = np.asarray(found).std(0) / math.sqrt(steps)
    np.testing.assert_array_less(np.abs(np.asarray(found).mean(0) - gradient), 5 * error)


def test_a_coordinate_has_the_noise_of_dp_sgd_on_average(steps=3000):
    """Within 5 standard errors, of squares whose variance is above that of a normal number's: without data."""
    mechanism = dpx.methods.zeroth_order_sgd(directions=4, **BASE | {"noise_multiplier": 1.0})
    nothing = jax.tree.map(lambda p: jnp.zeros((6, *p.shape)), PARAMS)

    def body(state, _):
        updates, state = mechanism.update(nothing, state, PARAMS, included=jnp.ones(6, bool))
        return state, jnp.mean(updates["w"] ** 2)

    _, found = jax.jit(lambda state: jax.lax.scan(body, state, None, steps))(mechanism.init(PARAMS))
    expected, found = (1.0 * BASE["clip_norm"] / 6) ** 2, np.asarray(found, np.float64)
    assert abs(found.mean() - expected * 1.003) < 5 * found.std() / math.sqrt(steps)


def test_a_hostile_row_moves_the_sum_by_no_more_than_its_bound():
    mechanism = dpx.methods.zeroth_order_sgd(directions=5, **BASE)
    step, state = jax.jit(dpx.private_updates(loss, mechanism)), mechanism.init(PARAMS)

    def with_row(value):
        rows = np.where(np.arange(6)[:, None] == 2, np.float32(value), EXAMPLES[0])
        return step(PARAMS, dpx.Batch((rows, EXAMPLES[1]), None), state)

    without = np.delete(with_row(0).unreleased.norms, 2)
    for found in map(with_row, (np.nan, np.inf, 3e38)):
        np.testing.assert_array_equal(np.delete(found.unreleased.norms, 2), without)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.updates))


def temporary(layers: int, width: int, batch: int, directions: int, norms: Any = "auto") -> int:
    """Bytes of the temporaries of a compiled step of a deep loss."""
    params = [jnp.zeros((width, width))] * layers

    def deep(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    mechanism = dpx.methods.zeroth_order_sgd(
        directions=directions, **BASE | {"sampling": dpx.FullBatch(examples=batch)}
    )
    arguments = params, dpx.Batch(np.zeros((batch, width), np.float32), None), mechanism.init(params)
    step = jax.jit(dpx.private_updates(deep, mechanism, microbatch_size=batch, norms=norms))
    planned: Any = step.lower(*arguments).compile().memory_analysis()
    return planned.temp_size_in_bytes


@pytest.mark.long
def test_the_memory_is_that_of_inference():
    """A deep loss keeps nothing for a backward pass nor for another direction, and no gradient of an example."""
    numbers = 4 * 12 * 256**2
    assert temporary(12, 256, 32, 4) < 3 * numbers  # a direction, the sum of directions, and what is released
    assert temporary(12, 256, 32, 4, norms="vmap") > 32 * numbers
    assert temporary(12, 32, 2048, 4) < 1.1 * temporary(12, 32, 2048, 1)


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_a_count_that_is_none(count):
    with pytest.raises(ValueError, match="count must be"):
        dpx.methods.zeroth_order_sgd(directions=count, **BASE)
