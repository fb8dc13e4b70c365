"""Small image classifiers for private training, in Flax Linen and in Flax NNX, by name.

`build(name, input_shape=, classes=)` gives a pair of functions: `init(key) -> params` and
`apply(params, image) -> logits` for one image without a batch axis. The parameters are a plain pytree.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

Tree = Any
ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


class Model(NamedTuple):
    """init: (key) -> params; apply: (params, image (height, width, channels)) -> logits (classes,)."""

    init: Callable[[jax.Array], Tree]
    apply: Callable[[Tree, jax.Array], jax.Array]


class Classifier(linen.Module):
    """Convolutions with pooling, then dense layers; `layers` says which (see `conv` and the poolings below)."""

    layers: tuple[Callable[[jax.Array], jax.Array] | tuple, ...]
    hidden: tuple[int, ...]
    classes: int
    activation: Callable[[jax.Array], jax.Array]

    @linen.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        for layer in self.layers:
            if callable(layer):
                image = layer(image)
            else:
                features, size, stride, padding = layer
                convolution = linen.Conv(features, (size, size), strides=stride, padding=padding)
                image = self.activation(convolution(image))
        vector = image.reshape(-1)
        for width in self.hidden:
            vector = self.activation(linen.Dense(width)(vector))
        return linen.Dense(self.classes)(vector)


class ResNet20(linen.Module):
    """He et al. 2016 for CIFAR-10, with GroupNorm in place of BatchNorm, which would mix the examples of a batch."""

    classes: int
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu
    groups: int = 8

    @linen.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        def norm(x):
            # reduced over (height, width, features of a group) of one example
            return linen.GroupNorm(self.groups)(x[None])[0]

        def convolved(x, features, stride=1):
            return linen.Conv(features, (3, 3), strides=stride, padding=1, use_bias=False)(x)

        x = self.activation(norm(convolved(image, 16)))
        for features, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                y = self.activation(norm(convolved(x, features, stride)))
                y = norm(convolved(y, features))
                if x.shape != y.shape:
                    x = norm(linen.Conv(features, (1, 1), strides=stride, use_bias=False)(x))
                x = self.activation(x + y)
        return linen.Dense(self.classes)(x.mean(axis=(0, 1)))


def conv(features: int, size: int = 3, stride: int = 1, padding: int | str = "SAME") -> tuple:
    """A square convolution followed by the activation."""
    return features, size, stride, padding


def max_pool(stride: int) -> Callable[[jax.Array], jax.Array]:
    """Largest of each 2x2 window: by slices, whose gradient is several times faster on CPU than `linen.max_pool`'s."""

    def pool(image: jax.Array) -> jax.Array:
        rows = jnp.maximum(image[:-1:stride], image[1::stride])
        return jnp.maximum(rows[:, :-1:stride], rows[:, 1::stride])

    return pool


def average_pool(image: jax.Array) -> jax.Array:
    """Mean of each 2x2 window, windows side by side."""
    height, width, features = image.shape[0] // 2, image.shape[1] // 2, image.shape[2]
    windows = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, features)
    return windows.mean(axis=(1, 3))


def global_average(image: jax.Array) -> jax.Array:
    return image.mean(axis=(0, 1))


class Perceptron(nnx.Module):
    """Dense layers with the activation between them."""

    def __init__(self, widths: tuple[int, ...], activation: Callable, *, rngs: nnx.Rngs):
        self.depth, self.activation = len(widths) - 1, activation
        for number, (fan_in, fan_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            setattr(self, f"dense_{number}", nnx.Linear(fan_in, fan_out, rngs=rngs))

    def __call__(self, image: jax.Array) -> jax.Array:
        vector = image.reshape(-1)
        for number in range(self.depth):
            vector = getattr(self, f"dense_{number}")(vector if number == 0 else self.activation(vector))
        return vector


def from_linen(module: linen.Module, input_shape: tuple[int, ...]) -> Model:
    """A Linen module as a pair of functions."""
    apply: Callable[..., Any] = module.apply
    return Model(
        init=lambda key: module.init(key, jnp.zeros(input_shape))["params"],
        apply=lambda params, image: apply({"params": params}, image),
    )


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """An NNX module as a pair of functions; its graph is public, its parameters become nested dictionaries."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Model(
        init=lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param)),
        apply=lambda params, image: nnx.merge(graph, params)(image),
    )


def convolutional(*layers, hidden: tuple[int, ...]) -> Callable[..., Model]:
    def builder(input_shape, classes, activation):
        return from_linen(Classifier(layers, hidden, classes, activation), input_shape)

    return builder


def perceptron(*hidden: int) -> Callable[..., Model]:
    def builder(input_shape, classes, activation):
        widths = (math.prod(input_shape), *hidden, classes)
        return from_nnx(lambda rngs: Perceptron(widths, activation, rngs=rngs))

    return builder


def adadpigu(padding: int) -> Callable[..., Model]:
    return convolutional(conv(16, 8, 2, 2), max_pool(1), conv(32, 4, 2, padding), max_pool(1), hidden=(32,))


def resnet20(input_shape, classes, activation) -> Model:
    return from_linen(ResNet20(classes, activation), input_shape)


def vit(size: str) -> Callable[..., Model]:
    """A vision transformer with random parameters, in whose place `examples.tasks.images` puts a checkpoint's."""

    def builder(input_shape, classes, activation):
        from examples.vit import SIZES, vit  # which imports this file

        return vit(classes, None, SIZES[size])

    return builder


def from_zero(build: Callable[..., Model]) -> Callable[..., Model]:
    """The model, but with zeros for its first parameters; for models that are linear in them."""

    def builder(input_shape, classes, activation):
        model = build(input_shape, classes, activation)
        return Model(lambda key: jax.tree.map(jnp.zeros_like, model.init(key)), model.apply)

    return builder


MODELS: dict[str, Callable[..., Model]] = {
    # Linear softmax, on top of fixed features. The noise of random first parameters would stay in it.
    "linear": perceptron(),
    "linear_from_zero": from_zero(perceptron()),
    "mlp": perceptron(128),
    "digits_cnn": convolutional(conv(16), max_pool(2), conv(32), max_pool(2), hidden=(32,)),
    # Table 1 of AdaDPIGU, for 28x28. Its second convolution has padding 0 in the networks it follows (Tramer and Boneh
    # 2021, Table 8: 26,010 parameters) and padding 2 in the table as printed (46,490 parameters).
    "adadpigu_cnn": adadpigu(padding=0),
    "adadpigu_cnn_printed": adadpigu(padding=2),
    # Table 2 of AdaDPIGU, for CIFAR-10.
    "adadpigu_cifar_cnn": convolutional(
        conv(16), max_pool(2), conv(16), max_pool(2), conv(32), max_pool(2), hidden=(128,)
    ),
    # The End-to-end CNN of Papernot et al. (2021), 550,570 parameters on CIFAR-10.
    "end_to_end_cnn": convolutional(
        *(conv(32), conv(32), average_pool, conv(64), conv(64), average_pool),
        *(conv(128), conv(128), average_pool),
        hidden=(128,),
    ),
    # The CNNs on normalized scattering features of Tramer and Boneh (2021): for 7x7x81 (28x28 images; 33,066
    # parameters) and for 8x8x243 (CIFAR-10; 187,210).
    "scatter_cnn": convolutional(conv(16, 3, 2, 1), conv(32, 3, 1, 1), hidden=(32,)),
    "scatter_cifar_cnn": convolutional(conv(64), max_pool(2), conv(64), hidden=()),
    # D2P2-SGD's second network for CIFAR-10.
    "resnet20": resnet20,
    # DiceSGD's network, for which task_options["checkpoint"] is meant, and one of its kind to try a program on.
    "vit_small": vit("vit_small"),
    "vit_miniature": vit("vit_miniature"),
    # Table 4 of D2P2-SGD.
    "d2p2_cnn": convolutional(
        *(conv(16), average_pool, conv(32), average_pool, conv(32), average_pool),
        *(conv(64), global_average),
        hidden=(64,),
    ),
}


def build(name: str, *, input_shape: tuple[int, ...], classes: int, activation: str = "tanh") -> Model:
    """The model called `name` for images of `input_shape`; ValueError if there is none, or if they are too small."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    model = MODELS[name](input_shape, classes, ACTIVATIONS[activation])
    too_small = f"images of shape {input_shape} are too small for the model {name!r}"
    try:
        shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    except ZeroDivisionError as error:  # the fan-in of an initializer
        raise ValueError(too_small) from error
    if any(0 in leaf.shape for leaf in shapes):
        raise ValueError(too_small)
    return model


def centred(model: Model) -> Model:
    """`model` on images moved from [0, 1] to [-1, 1], around which tanh networks train better."""
    return Model(model.init, lambda params, image: model.apply(params, 2 * image - 1))


def loss_of(model: Model) -> Callable[[Tree, tuple[jax.Array, jax.Array]], jax.Array]:
    """(params, (image, label)) -> cross-entropy of one example."""

    def loss(params, example):
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)

    return loss


def parameter_count(params: Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
