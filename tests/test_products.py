"""Gradients of examples that are sums of outer products, in the order of axes that is fast on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpx
from dpx.xla.rewrites import with_fast_products
from tests.problems import on_a_cpu

ROWS, POSITIONS, INPUTS, OUTPUTS = 4, 6, 5, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, POSITIONS, INPUTS)).astype(np.float32)
W = RNG.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)


def in_scan(w, x):
    return lax.scan(lambda carry, some: (carry + jnp.sum(jnp.tanh(some @ w)), None), 0.0, jnp.stack([x, 2 * x]))[0]


LOSSES = {
    "dense": lambda w, x: jnp.sum(jnp.tanh(x @ w)),
    "transposed": lambda w, x: jnp.sum(jnp.tanh(x @ w.reshape(OUTPUTS, INPUTS).T)),
    "two axes": lambda w, x: jnp.sum(jnp.tanh(x.reshape(2, -1, INPUTS) @ w)),
    "of a function": lambda w, x: jnp.sum(jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x)),
    "of a loop": in_scan,
    "of a branch": lambda w, x: lax.cond(x[0, 0] > 0, lambda: jnp.sum(jnp.tanh(x @ w)), lambda: jnp.sum(w)),
    "rematerialised": lambda w, x: jnp.sum(jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)),
    "read twice": lambda w, x: jnp.sum(jnp.tanh(x @ w)) + jnp.sum((x @ w) ** 2),
}


def gradients(loss):
    return jax.vmap(jax.grad(loss), (None, 0))


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_stay_and_a_hostile_row_reaches_no_other(name):
    slow, fast = gradients(LOSSES[name]), jax.jit(with_fast_products(gradients(LOSSES[name])))
    found = fast(W, X)
    np.testing.assert_allclose(found, slow(W, X), rtol=1e-5, atol=1e-6)
    for hostile in (np.nan, np.inf, np.float32(3e38)):
        beside = fast(W, np.concatenate([np.full_like(X[:1], hostile), X[1:]]))
        np.testing.assert_array_equal(beside[1:], found[1:])


@on_a_cpu
@pytest.mark.parametrize(("name", "moved"), [("dense", True), ("of a loop", True), ("transposed", False)])
def test_only_products_that_xla_does_not_transpose_itself_are_moved(name, moved):
    closed = jax.make_jaxpr(lambda *given: with_fast_products(gradients(LOSSES[name]))(*given)[0])(W, X)
    live = jax.jit(jax.extend.core.jaxpr_as_fun(closed)).lower(W, X).as_text()
    assert ("optimization_barrier" in live) == moved


@on_a_cpu
def test_a_private_step_has_the_fast_order():
    sampling = dpx.FullBatch(examples=ROWS)
    optimizer = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=0.0, sampling=sampling, key=dpx.secret_key(2**100))
    step = dpx.private_updates(LOSSES["dense"], optimizer, norms="vmap")
    batch, state = dpx.Batch(X, np.ones(ROWS, bool)), optimizer.init(W)
    found, expected = step(W, batch, state)[0], np.asarray(gradients(LOSSES["dense"])(W, X))
    factors = np.minimum(1, 1 / np.sqrt((expected**2).sum((1, 2)))) / ROWS
    np.testing.assert_allclose(found, np.tensordot(factors, expected, 1), rtol=1e-3, atol=1e-6)
    transposed = f"tensor<{ROWS}x{INPUTS}x{POSITIONS}xf32>"
    assert "optimization_barrier" in (text := jax.jit(step).lower(W, batch, state).as_text()) and transposed in text
