"""The CNN in Flax: fresh parameters, the loss of one example, and the test accuracy."""

import secrets
from typing import Any

import jax
import optax
from flax import linen

from benchmarks.peers.data import test


class CNN(linen.Module):
    @linen.compact
    def __call__(self, image):
        hidden = linen.relu(linen.Conv(16, (3, 3))(image))
        hidden = linen.max_pool(hidden, (2, 2), strides=(2, 2))
        return linen.Dense(10)(hidden.reshape(-1))


model: Any = CNN()
params = model.init(jax.random.key(secrets.randbits(31)), test[0][0])


def loss(params, example):
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)


def accuracy(params):
    logits = jax.vmap(lambda image: model.apply(params, image))(test[0])
    return (logits.argmax(-1) == test[1]).mean()
