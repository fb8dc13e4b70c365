"""A large frozen base is an argument of the program, and one that is closed over is named in words."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.fitting.step import compiled_step, first_carry
from tests.test_dp_sgd import dp_sgd

LAYERS, WIDTH, RANK, BATCH = 8, 1024, 4, 4


def loss_of(base, lora, x):
    def layer(x, weights):
        kernel, a, b = weights
        return jnp.tanh(x @ kernel + x @ a @ b), None

    return jnp.sum(jax.lax.scan(layer, x, (base, lora["a"], lora["b"]))[0])


def shapes():
    sizes = {"base": (LAYERS, WIDTH, WIDTH), "a": (LAYERS, WIDTH, RANK), "b": (LAYERS, RANK, WIDTH)}
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


def test_lora_on_a_large_base_is_lowered_from_shapes(promoting):
    """32 MiB of base, of which the program holds nothing; its moments are those of the trained matrices."""
    frozen = dpx.in_coordinates(dp_sgd(), dpx.coordinates.trainable(mask=lambda path: path != "base"))
    optimizer, params = dpx.chain(frozen, optax.adam(0.1)), shapes()
    step = dpx.private_updates(lambda params, x: loss_of(params["base"], params, x), optimizer)
    state = jax.eval_shape(optimizer.init, params)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.transforms))
    assert moments == 1 + 2 * 2 * LAYERS * WIDTH * RANK
    batch = dpx.Batch(jax.ShapeDtypeStruct((BATCH, 3, WIDTH), jnp.float32), np.ones(BATCH, bool))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = jax.jit(lambda params, x, state: step(params, batch._replace(examples=x), state)[:2]).lower(
            params, batch.examples, state
        )
    assert len(lowered.as_text()) < 2**20


@pytest.fixture(scope="module")
def closed_over():
    base, lora = np.zeros((5, WIDTH, WIDTH), np.float32), {"a": jnp.zeros((5, WIDTH, 1)), "b": jnp.zeros((5, 1, WIDTH))}
    return base, lora, lambda lora, x: loss_of(jnp.asarray(base), lora, x)


def test_a_base_that_is_closed_over_is_named(closed_over):
    base, lora, loss = closed_over
    optimizer = dp_sgd()
    batch, state = dpx.Batch(jnp.ones((2, 1, WIDTH)), np.ones(2, bool)), optimizer.init(lora)
    step = dpx.private_updates(loss, optimizer)
    with pytest.warns(UserWarning, match="closes over 20 MiB of arrays.*dpx.coordinates.trainable"):
        jax.eval_shape(step, lora, batch, state)
    inside = dpx.private_updates(lambda lora, x: loss_of(lora["base"], lora, x), optimizer)
    of_argument = lambda base, lora: dpx.private_updates(lambda lora, x: loss_of(base, lora, x), optimizer)(  # noqa: E731
        lora, batch, state
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(of_argument, base, lora)  # an argument of the outer program
        jax.eval_shape(inside, lora | {"base": base}, batch, optimizer.init(lora | {"base": jnp.asarray(base)}))


def test_check_setup_says_what_to_do(closed_over):
    from dpx.audit.setup import static_findings

    _, lora, loss = closed_over
    closed = static_findings.trace_or_finding(loss, lora, jnp.ones((1, WIDTH)))
    found = static_findings.find_closed_over_arrays(closed, jnp.ones((1, WIDTH)), 2, 1000)
    assert found.severity == "note" and "dpx.coordinates.trainable" in found.words


def test_fit_makes_it_an_argument(closed_over):
    _, lora, loss = closed_over
    optimizer = dp_sgd()
    carry, batch = first_carry(lora, optimizer, None), dpx.Batch(jnp.ones((2, 1, WIDTH)), jnp.ones(2, bool))
    step = compiled_step(loss, optimizer, lambda params, state: params, carry, None, {}, whole=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, hoisted = step.compile_for_shapes((carry, batch))
    assert max(array.nbytes for array in hoisted if hasattr(array, "nbytes")) == 5 * WIDTH * WIDTH * 4
