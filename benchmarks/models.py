"""The benchmarked models: parameters, a loss for one example, and random batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen

from examples import models as examples_models

Tree = Any
CLASSES = 10


class Problem(NamedTuple):
    """params: a pytree; loss: (params, example) -> scalar; batch: (size) -> the same pytree with `size` examples."""

    params: Tree
    loss: Callable[[Tree, Tree], jax.Array]
    batch: Callable[[int], Tree]


class Perceptron(linen.Module):
    widths: tuple[int, ...] = (1000, 1000)

    @linen.compact
    def __call__(self, image):
        hidden = image.reshape(-1)
        for width in self.widths:
            hidden = linen.relu(linen.Dense(width)(hidden))
        return linen.Dense(CLASSES)(hidden)


class Transformer(linen.Module):
    """An encoder with the normalisation first; mean over the sequence, then a linear classifier."""

    vocabulary: int = 1000
    layers: int = 4
    features: int = 128
    heads: int = 4
    length: int = 64

    @linen.compact
    def __call__(self, tokens):
        positions = self.param("positions", linen.initializers.normal(0.02), (self.length, self.features))
        x = linen.Embed(self.vocabulary, self.features)(tokens) + positions
        for _ in range(self.layers):
            x = x + linen.MultiHeadDotProductAttention(self.heads)(linen.LayerNorm()(x))
            hidden = linen.gelu(linen.Dense(4 * self.features)(linen.LayerNorm()(x)))
            x = x + linen.Dense(self.features)(hidden)
        return linen.Dense(CLASSES)(linen.LayerNorm()(x).mean(axis=0))


class ResNet20(linen.Module):
    """He et al. 2016 for CIFAR-10, with GroupNorm in place of BatchNorm."""

    groups: int = 8

    @linen.compact
    def __call__(self, image):
        def norm(x):
            # reduced over (height, width, features of a group) of one example
            return linen.GroupNorm(self.groups)(x[None])[0]

        x = linen.relu(norm(linen.Conv(16, (3, 3), use_bias=False)(image)))
        for features, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                y = linen.relu(norm(linen.Conv(features, (3, 3), strides=stride, use_bias=False)(x)))
                y = norm(linen.Conv(features, (3, 3), use_bias=False)(y))
                if x.shape != y.shape:
                    x = norm(linen.Conv(features, (1, 1), strides=stride, use_bias=False)(x))
                x = linen.relu(x + y)
        return linen.Dense(CLASSES)(x.mean(axis=(0, 1)))


def classification(apply: Callable[[Tree, jax.Array], jax.Array]) -> Callable[[Tree, Tree], jax.Array]:
    def loss(params, example):
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), label)

    return loss


def images(*shape: int) -> Callable[[int], Tree]:
    def batch(size):
        image_key, label_key = jax.random.split(jax.random.key(1))
        return jax.random.normal(image_key, (size, *shape)), jax.random.randint(label_key, (size,), 0, CLASSES)

    return batch


def token_sequences(length: int, vocabulary: int) -> Callable[[int], Tree]:
    def batch(size):
        token_key, label_key = jax.random.split(jax.random.key(1))
        tokens = jax.random.randint(token_key, (size, length), 0, vocabulary)
        return tokens, jax.random.randint(label_key, (size,), 0, CLASSES)

    return batch


def from_module(module: linen.Module, batch: Callable[[int], Tree]) -> Problem:
    def apply(params, x) -> Any:
        return module.apply({"params": params}, x)

    example = jax.tree.map(lambda leaf: leaf[0], batch(1))
    params = jax.jit(module.init)(jax.random.key(0), example[0])["params"]
    return Problem(params, classification(apply), batch)


def from_examples(name: str, *shape: int) -> Problem:
    model = examples_models.build(name, input_shape=shape, classes=CLASSES)
    return Problem(jax.jit(model.init)(jax.random.key(0)), classification(model.apply), images(*shape))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": lambda: from_module(Perceptron(), images(28, 28)),
    "adadpigu_cnn": lambda: from_examples("adadpigu_cnn", 28, 28, 1),
    "end_to_end_cnn": lambda: from_examples("end_to_end_cnn", 32, 32, 3),
    "transformer": lambda: from_module(Transformer(), token_sequences(64, 1000)),
    "resnet20": lambda: from_module(ResNet20(), images(32, 32, 3)),
}


def parameter_count(problem: Problem) -> int:
    return sum(jnp.size(leaf) for leaf in jax.tree.leaves(problem.params))
