"""Convolutions in microbatches: the same numbers, and in the order of axes that is fast in a loop on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import dpx
from dpx.gradients.clipped_gradients import hides_convolutions
from dpx.xla.jaxprs import open_jaxprs
from dpx.xla.rewrites import with_reordered_convolutions
from tests.problems import on_a_cpu
from tests.test_dp_sgd import dp_sgd

FAST = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def convolve(data, kernel, orders=("NCHW", "IHWO", "HWCN"), **options):
    return lax.conv_general_dilated(data, kernel, (2, 1), "SAME", dimension_numbers=orders, **options)


@pytest.mark.parametrize("options", [{}, {"rhs_dilation": (1, 2)}, {"feature_group_count": 2}])
def test_any_order_of_axes_has_the_same_result_and_gradients(options):
    data, kernel = normal(3, 4, 6, 5), normal(4 // options.get("feature_group_count", 1), 3, 2, 6)

    def loss(data, kernel):
        return jnp.sum(jax.jit(lambda k: jnp.sin(convolve(data, k, **options)))(kernel))

    closed = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(data, kernel)
    expected = core.jaxpr_as_fun(closed)(data, kernel)
    for ours, theirs in zip(with_reordered_convolutions(closed)(data, kernel), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def orders(jaxpr):
    """The orders of axes of all convolutions."""
    own = [tuple(e.params["dimension_numbers"]) for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    return sum((orders(body) for equation in jaxpr.eqns for body in open_jaxprs(equation)), own)


def small_loss(params, x):
    hidden = jnp.sin(convolve(x[None], params["first"]))
    return jnp.sum(convolve(hidden, params["second"], ("HWCN", "HWIO", "NHWC")))


@on_a_cpu
def test_all_convolutions_of_a_loop_have_the_fast_order():
    params = {"first": normal(2, 3, 3, 2), "second": normal(3, 3, 2, 4)}
    mechanism, batch = dp_sgd(), dpx.Batch(normal(16, 2, 6, 5), None)
    step = dpx.private_updates(small_loss, mechanism, microbatch_size=8)
    found = orders(jax.make_jaxpr(step)(params, batch, mechanism.init(params)).jaxpr)
    assert found and set(found) == {FAST}


def test_a_convolution_in_a_loop_or_under_a_checkpoint_is_hidden():
    kernel, data = normal(1, 3, 3, 1), normal(1, 1, 4, 4)

    def found(function):
        return hides_convolutions(jax.make_jaxpr(function)(data).jaxpr)

    def of_data(data):
        return jnp.sum(convolve(data, kernel))

    assert not found(of_data) and not found(jax.jit(of_data))
    assert found(jax.checkpoint(of_data)) and found(jax.jit(lambda data: jax.lax.map(of_data, data[None])))
