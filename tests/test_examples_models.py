"""The networks have the shapes and the numbers of parameters that the papers print."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from examples import models

COUNTS = {
    ("linear", (28, 28, 1)): 7850,
    ("linear", (7, 7, 81)): 39700,
    ("linear_from_zero", (7, 7, 81)): 39700,
    ("mlp", (8, 8, 1)): 9610,
    ("digits_cnn", (8, 8, 1)): 9258,
    ("adadpigu_cnn", (28, 28, 1)): 26010,
    ("adadpigu_cnn_printed", (28, 28, 1)): 46490,
    ("adadpigu_cifar_cnn", (32, 32, 3)): 74362,
    ("end_to_end_cnn", (32, 32, 3)): 550570,
    ("end_to_end_cnn", (28, 28, 1)): 435306,
    ("scatter_cnn", (7, 7, 81)): 33066,
    ("scatter_cifar_cnn", (8, 8, 243)): 187210,
    ("resnet20", (32, 32, 3)): 272474,
    ("vit_small", (32, 32, 3)): 21669514,
    ("vit_miniature", (32, 32, 3)): 4570,
    ("d2p2_cnn", (32, 32, 3)): 37642,
    ("d2p2_cnn", (28, 28, 1)): 37354,
}


def test_every_model_is_counted():
    assert {name for name, _ in COUNTS} == set(models.MODELS)


@pytest.mark.parametrize(("name", "shape"), COUNTS)
def test_parameter_count_and_logits(name, shape):
    model = models.build(name, input_shape=shape, classes=10)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert models.parameter_count(params) == COUNTS[name, shape]
    assert jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct(shape, jnp.float32)).shape == (10,)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["mlp", "digits_cnn"])
@pytest.mark.long_cases("digits_cnn")
def test_per_example_gradients_and_activations(name):
    images = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))
    outputs = {}
    for activation in models.ACTIVATIONS:
        model = models.build(name, input_shape=(8, 8, 1), classes=4, activation=activation)

        def logits_and_gradients(image, model=model):
            params = model.init(jax.random.key(1))
            return model.apply(params, image), jax.grad(lambda params: model.apply(params, image)[0])(params)

        outputs[activation], grads = jax.jit(jax.vmap(logits_and_gradients))(images)
        grads = map(np.asarray, jax.tree.leaves(grads))
        assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in grads)
    assert not np.allclose(outputs["tanh"], outputs["relu"])


def test_the_seed_decides_the_parameters():
    model = models.build("mlp", input_shape=(2, 2, 1), classes=3)
    first, again, other = (jax.tree.leaves(model.init(jax.random.key(seed))) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
def test_pooling_is_that_of_flax(size):
    image = jnp.asarray(np.random.default_rng(0).random((*size, 3), dtype=np.float32))
    for stride in (1, 2):
        expected = linen.max_pool(image, (2, 2), strides=(stride, stride))
        np.testing.assert_array_equal(models.max_pool(stride)(image), expected)
    windows = linen.pooling.pool(image, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID") / 4
    np.testing.assert_allclose(models.average_pool(image), windows, rtol=1e-6)


def test_bad_names_and_sizes():
    with pytest.raises(ValueError, match="unknown model 'resnet'; known: linear"):
        models.build("resnet", input_shape=(8, 8, 1), classes=10)
    with pytest.raises(ValueError, match="unknown activation 'gelu'"):
        models.build("mlp", input_shape=(8, 8, 1), classes=10, activation="gelu")
    with pytest.raises(ValueError, match=r"\(8, 8, 1\) are too small for the model 'adadpigu_cnn'"):
        models.build("adadpigu_cnn", input_shape=(8, 8, 1), classes=10)
    with pytest.raises(ValueError, match="too small"):
        models.build("end_to_end_cnn", input_shape=(4, 4, 1), classes=10)
