"""The benchmarked models in JAX: parameters, a loss for one example, and random batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen

from benchmarks import problems
from benchmarks.problems import CLASSES
from examples import models as examples_models

Tree = Any


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


def encoded(x, layers: int, heads: int, mask=None):
    """Transformer layers with the normalization first, on (length, features)."""
    features = x.shape[-1]
    for _ in range(layers):
        x = x + linen.MultiHeadDotProductAttention(heads)(linen.LayerNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(4 * features)(linen.LayerNorm()(x)))
        x = x + linen.Dense(features)(hidden)
    return linen.LayerNorm()(x)


def positions(module: linen.Module, length: int, features: int) -> jax.Array:
    return module.param("positions", linen.initializers.normal(0.02), (length, features))


class Transformer(linen.Module):
    """An encoder; mean over the sequence, then a linear classifier."""

    vocabulary: int = 1000
    layers: int = 4
    features: int = 128
    heads: int = 4
    length: int = 64

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocabulary, self.features)(tokens) + positions(self, self.length, self.features)
        x = encoded(x, self.layers, self.heads)
        return linen.Dense(CLASSES)(x.mean(axis=0))


class VisionTransformer(linen.Module):
    """ViT-S/16 with the mean over the patches in place of a class token."""

    layers: int = 12
    features: int = 384
    heads: int = 6
    patch: int = 16

    @linen.compact
    def __call__(self, image):
        patches = (self.patch, self.patch)
        x = linen.Conv(self.features, patches, strides=patches)(image).reshape(-1, self.features)
        x = x + positions(self, *x.shape)
        x = encoded(x, self.layers, self.heads)
        return linen.Dense(CLASSES)(x.mean(axis=0))


class LanguageModel(linen.Module):
    """GPT-2 small on sequences of 256, its output layer not tied to the embedding."""

    vocabulary: int = 50_257
    layers: int = 12
    features: int = 768
    heads: int = 12

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocabulary, self.features)(tokens)
        x = x + positions(self, *x.shape)
        x = encoded(x, self.layers, self.heads, mask=linen.make_causal_mask(tokens))
        return linen.Dense(self.vocabulary, use_bias=False)(x)


def made(name: str, init: Callable[..., Tree], apply: Callable[[Tree, jax.Array], jax.Array]) -> Problem:
    def loss(params, example):
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), label).mean()

    def batch(size):
        return jax.tree.map(jnp.asarray, problems.draw(name, size))

    params = jax.jit(init)(jax.random.key(0))
    problems.check_count(name, sum(leaf.size for leaf in jax.tree.leaves(params)))
    return Problem(params, loss, batch)


def from_module(name: str, module: linen.Module) -> Problem:
    def apply(params, x) -> Any:
        return module.apply({"params": params}, x)

    x = problems.draw(name, 1)[0][0]
    return made(name, lambda key: module.init(key, x)["params"], apply)


def from_examples(name: str) -> Problem:
    model = examples_models.build(name, input_shape=problems.PROBLEMS[name].shape, classes=CLASSES)
    return made(name, model.init, model.apply)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": lambda: from_module("mlp", Perceptron()),
    "adadpigu_cnn": lambda: from_examples("adadpigu_cnn"),
    "end_to_end_cnn": lambda: from_examples("end_to_end_cnn"),
    "transformer": lambda: from_module("transformer", Transformer()),
    "resnet20": lambda: from_module("resnet20", examples_models.ResNet20(CLASSES)),
    "vit_small": lambda: from_module("vit_small", VisionTransformer()),
    "gpt2_small": lambda: from_module("gpt2_small", LanguageModel()),
}
