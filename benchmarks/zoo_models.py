"""Thirty models of ten code bases at tiny sizes, each as its library writes it; nothing here is written for dpx."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

TOKENS, LENGTH, CLASSES = 32, 8, 4


class Animal(NamedTuple):
    """needs: the packages to import. make: () -> (loss of one example, params, rows), where `rows` makes that many
    random examples."""

    needs: tuple[str, ...]
    make: Callable[[], tuple[Callable, Any, Callable[[int], Any]]]


ANIMALS: dict[str, Animal] = {}


def animal(*needs: str):
    """Adds the function that it decorates; its name is that of the first package and of the function."""

    def register(make):
        ANIMALS[f"{needs[0]}: {make.__name__.replace('_', ' ')}"] = Animal(needs, make)
        return make

    return register


def floats(*shape: int) -> Callable[[int], Any]:
    """Examples (x, label)."""

    def rows(count):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(count, *shape)).astype(np.float32)
        return x, rng.integers(0, CLASSES, count, dtype=np.int32)

    return rows


def tokens(count: int) -> Any:
    return np.random.default_rng(0).integers(0, TOKENS, (count, LENGTH + 1), dtype=np.int32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def classifier(apply: Callable) -> Callable:
    """The loss of apply(params, x) -> logits."""
    return lambda params, example: cross_entropy(apply(params, example[0]).reshape(-1)[:CLASSES], example[1])


def language(apply: Callable) -> Callable:
    """The loss of apply(params, tokens) -> logits of the next."""
    return lambda params, row: cross_entropy(apply(params, row[:-1]), row[1:])


def of_linen(module, *shape: int):
    def apply(params, x):
        return module.apply({"params": params}, x)

    return classifier(apply), module.init(jax.random.key(0), jnp.zeros(shape))["params"], floats(*shape)


def of_nnx(module, call: Callable):
    """apply, and the parameters, of an NNX module; call: (module, x) -> result."""
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return lambda params, x: call(nnx.merge(graph, params, rest, copy=True), x), params


def of_haiku(function: Callable, example: Any):
    import haiku as hk

    made = hk.without_apply_rng(hk.transform(function))
    return made.apply, made.init(jax.random.key(0), example)


def of_equinox(module, call: Callable):
    import equinox as eqx

    params, static = eqx.partition(module, eqx.is_inexact_array)
    return lambda params, x: call(eqx.combine(params, static), x), params


def of_keras(layers: Callable, *shape: int, dtype: str = "float32"):
    """layers: (keras, input) -> output."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    given = keras.Input(shape, dtype=dtype)
    model = keras.Model(given, layers(keras.layers, given))
    params, rest = (
        [jnp.asarray(v.value) for v in each] for each in (model.trainable_variables, model.non_trainable_variables)
    )
    return lambda params, x: model.stateless_call(params, rest, x[None])[0][0], params


@animal("flax")
def linen_bidirectional_lstm():
    from flax import linen

    class Tagger(linen.Module):
        @linen.compact
        def __call__(self, x):
            ahead, back = (linen.RNN(linen.OptimizedLSTMCell(16)) for _ in range(2))
            return linen.Dense(CLASSES)(linen.Bidirectional(ahead, back)(x[None])[0].mean(0))

    return of_linen(Tagger(), 6, 8)


@animal("flax")
def linen_autoencoder():
    from flax import linen

    class Autoencoder(linen.Module):
        @linen.compact
        def __call__(self, x):
            for width in (8, 16):
                x = linen.silu(linen.GroupNorm(4)(linen.Conv(width, (3, 3), strides=2)(x[None]))[0])
            for width in (8, 1):
                x = linen.ConvTranspose(width, (3, 3), strides=(2, 2))(linen.silu(x))
            return x

    loss, params, rows = of_linen(Autoencoder(), 8, 8, 1)
    apply = Autoencoder().apply
    return lambda params, example: jnp.mean((apply({"params": params}, example[0]) - example[0]) ** 2), params, rows


@animal("flax")
def linen_weight_norm():
    from flax import linen

    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(CLASSES)(linen.relu(linen.WeightNorm(linen.Dense(32))(x)))

    return of_linen(Normed(), 16)


@animal("flax")
def nnx_cnn_without_batch_norm():
    from flax import nnx

    import dpx

    rngs = nnx.Rngs(0)
    layers = [nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu]
    layers += [nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.relu]
    layers += [lambda x: jnp.mean(x, (1, 2)), nnx.Linear(16, CLASSES, rngs=rngs)]
    module = dpx.flax.replace_batch_norm(nnx.Sequential(*layers))
    apply, params = of_nnx(module, lambda module, x: module(x[None])[0])
    return classifier(apply), params, floats(8, 8, 1)


@animal("flax")
def nnx_attention():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(TOKENS, 16, rngs=rngs)
            self.norm, self.out = nnx.RMSNorm(16, rngs=rngs), nnx.Linear(16, TOKENS, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)

        def __call__(self, x):
            x = self.embed(x)
            return self.out(x + self.attend(self.norm(x), mask=nnx.make_causal_mask(jnp.zeros(LENGTH))))

    apply, params = of_nnx(Block(nnx.Rngs(0)), lambda module, x: module(x))
    return language(apply), params, tokens


@animal("flax")
def nnx_gru():
    from flax import nnx

    rngs = nnx.Rngs(0)
    module = nnx.Sequential(
        nnx.Embed(TOKENS, 16, rngs=rngs),
        nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs)),
        nnx.Linear(16, TOKENS, rngs=rngs),
    )
    apply, params = of_nnx(module, lambda module, x: module(x[None])[0])
    return language(apply), params, tokens


@animal("haiku")
def mlp():
    import haiku as hk

    apply, params = of_haiku(lambda x: hk.nets.MLP([32, 32, CLASSES])(x), jnp.zeros(16))
    return classifier(apply), params, floats(16)


@animal("haiku")
def mobilenet():
    import haiku as hk

    def net(x):
        return hk.nets.MobileNetV1((1, 2, 1), (8, 16, 16), CLASSES, use_bn=False)(x[None], is_training=False)[0]

    apply, params = of_haiku(net, jnp.zeros((16, 16, 3)))
    return classifier(apply), params, floats(16, 16, 3)


@animal("haiku")
def lstm():
    import haiku as hk

    def net(x):
        core = hk.LSTM(16)
        outputs, _ = hk.dynamic_unroll(core, hk.Embed(TOKENS, 16)(x), core.initial_state(None))
        return hk.Linear(TOKENS)(outputs)

    apply, params = of_haiku(net, jnp.zeros(LENGTH, int))
    return language(apply), params, tokens


@animal("equinox")
def perceptron():
    import equinox as eqx

    apply, params = of_equinox(eqx.nn.MLP(16, CLASSES, 32, 2, key=jax.random.key(0)), lambda module, x: module(x))
    return classifier(apply), params, floats(16)


@animal("equinox")
def attention():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    layers = (
        eqx.nn.Embedding(TOKENS, 16, key=keys[0]),
        eqx.nn.LayerNorm(16),
        eqx.nn.MultiheadAttention(2, 16, key=keys[1]),
        eqx.nn.Linear(16, TOKENS, key=keys[2]),
    )

    def call(layers, x):
        embed, norm, attend, out = layers
        x = jax.vmap(embed)(x)
        y = jax.vmap(norm)(x)
        return jax.vmap(out)(x + attend(y, y, y, jnp.tril(jnp.ones((LENGTH, LENGTH), bool))))

    apply, params = of_equinox(layers, call)
    return language(apply), params, tokens


@animal("equinox")
def gru():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0))
    layers = eqx.nn.GRUCell(8, 16, key=keys[0]), eqx.nn.Linear(16, CLASSES, key=keys[1])

    def call(layers, x):
        cell, out = layers
        return out(jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(16), x)[0])

    apply, params = of_equinox(layers, call)
    return classifier(apply), params, floats(6, 8)


@animal("equinox")
def convolution():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Conv2d(1, 8, 3, key=keys[0]), eqx.nn.GroupNorm(4, 8), eqx.nn.Lambda(jax.nn.relu)]
    layers += [eqx.nn.Conv2d(8, 16, 3, stride=2, key=keys[1]), eqx.nn.AdaptiveAvgPool2d(1), eqx.nn.Lambda(jnp.ravel)]
    module = eqx.nn.Sequential([*layers, eqx.nn.Linear(16, CLASSES, key=keys[2])])
    apply, params = of_equinox(module, lambda module, x: module(x))
    return classifier(apply), params, floats(1, 8, 8)


@animal("keras")
def cnn():
    def layers(k, x):
        x = k.MaxPooling2D()(k.Conv2D(8, 3, activation="relu")(x))
        return k.Dense(CLASSES)(k.Flatten()(k.SeparableConv2D(16, 2)(x)))

    apply, params = of_keras(layers, 8, 8, 1)
    return classifier(apply), params, floats(8, 8, 1)


@animal("keras")
def lstm_of_words():
    def layers(k, x):
        return k.Dense(TOKENS)(k.LSTM(16, return_sequences=True)(k.Embedding(TOKENS, 16)(x)))

    apply, params = of_keras(layers, LENGTH, dtype="int32")
    return language(apply), params, tokens


@animal("keras")
def transformer():
    def layers(k, x):
        x = k.Embedding(TOKENS, 16)(x)
        y = k.LayerNormalization()(x)
        x = k.Add()([x, k.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)])
        return k.Dense(TOKENS)(k.Dense(32, "gelu")(k.LayerNormalization()(x)))

    apply, params = of_keras(layers, LENGTH, dtype="int32")
    return language(apply), params, tokens


def of_transformers(name: tuple[str, str], sizes: dict, shape: tuple[int, ...]):
    """A Flax model of Hugging Face, of one layer, and its first result for one example."""
    import transformers

    kind, config = getattr(transformers, f"Flax{name[0]}"), getattr(transformers, f"{name[1]}Config")
    model = kind(config(**sizes), input_shape=(1, *shape), seed=0)
    return lambda params, x: model(x[None], params=params, train=False)[0][0], model.params


BERT = dict(vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


@animal("transformers")
def gpt2():
    sizes = dict(vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    apply, params = of_transformers(("GPT2LMHeadModel", "GPT2"), sizes, (LENGTH,))
    return language(apply), params, tokens


@animal("transformers")
def bert():
    apply, params = of_transformers(("BertForMaskedLM", "Bert"), BERT | {"max_position_embeddings": 8}, (LENGTH,))
    return language(apply), params, tokens


@animal("transformers")
def vit():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    sizes |= dict(image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES)
    apply, params = of_transformers(("ViTForImageClassification", "ViT"), sizes, (8, 8, 1))
    rows = floats(1, 8, 8)
    return classifier(apply), params, rows


@animal("transformers")
def distilbert():
    sizes = dict(vocab_size=TOKENS, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=LENGTH)
    apply, params = of_transformers(("DistilBertForMaskedLM", "DistilBert"), sizes, (LENGTH,))
    return language(apply), params, tokens


@animal("transformers")
def electra():
    sizes = BERT | {"max_position_embeddings": LENGTH, "embedding_size": 8}
    apply, params = of_transformers(("ElectraForMaskedLM", "Electra"), sizes, (LENGTH,))
    return language(apply), params, tokens


def of_tunix(module):
    positions, mask = jnp.arange(LENGTH)[None], jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))
    return of_nnx(module, lambda module, x: module(x[None], positions, None, mask)[0][0])


@animal("tunix")
def qwen3():
    from flax import nnx
    from tunix.models.qwen3 import model

    sizes = dict(num_layers=1, vocab_size=TOKENS, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8)
    config = model.ModelConfig(**sizes, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True)
    apply, params = of_tunix(model.Qwen3(config, rngs=nnx.Rngs(0)))
    return language(apply), params, tokens


@animal("tunix")
def llama3():
    from flax import nnx
    from tunix.models.llama3 import model

    sizes = dict(num_layers=1, vocab_size=TOKENS, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8)
    config = model.ModelConfig(**sizes, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6)
    apply, params = of_tunix(model.Llama3(config, rngs=nnx.Rngs(0)))
    return language(apply), params, tokens


def of_numpyro(made):
    """The negative log-density of a flow with a normal base; made: (init, apply) with (mean, log scale)."""
    init, apply = made
    return apply, init(jax.random.key(0), (8,))[1]


@animal("numpyro")
def masked_autoregressive_flow():
    from numpyro.nn import AutoregressiveNN

    apply, params = of_numpyro(AutoregressiveNN(8, [32, 32]))

    def loss(params, example):
        mean, scale = apply(params, example[0])
        return jnp.sum(0.5 * ((example[0] - mean) * jnp.exp(-scale)) ** 2 + scale)

    return loss, params, floats(8)


@animal("numpyro")
def block_autoregressive_flow():
    from numpyro.nn import BlockNeuralAutoregressiveNN

    apply, params = of_numpyro(BlockNeuralAutoregressiveNN(8, [4, 4]))

    def loss(params, example):
        y, log_determinant = apply(params, example[0])
        return jnp.sum(0.5 * y**2) - jnp.sum(log_determinant)

    return loss, params, floats(8)


@animal("distrax", "haiku")
def real_nvp():
    import distrax
    import haiku as hk

    def net(x):
        layers = []
        for flip in (False, True):
            conditioner = hk.Sequential([hk.nets.MLP([32, 16]), lambda y: jnp.split(y, 2, -1)])
            mask = (jnp.arange(8) % 2 == 0) != flip
            layers.append(
                distrax.MaskedCoupling(
                    mask,
                    conditioner,
                    lambda shift_scale: distrax.ScalarAffine(shift_scale[0], log_scale=shift_scale[1]),
                )
            )
        base = distrax.Independent(distrax.Normal(jnp.zeros(8), jnp.ones(8)), 1)
        return -distrax.Transformed(base, distrax.Chain(layers)).log_prob(x)

    apply, params = of_haiku(net, jnp.zeros(8))
    return lambda params, example: apply(params, example[0]), params, floats(8)


@animal("distrax", "haiku")
def variational_autoencoder():
    import distrax
    import haiku as hk

    def net(x):
        mean, scale = jnp.split(hk.nets.MLP([32, 8])(x), 2)
        posterior = distrax.MultivariateNormalDiag(mean, jnp.exp(scale))
        prior = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        decoded = hk.nets.MLP([32, 16])(posterior.mean() + 0.1 * posterior.stddev())
        return posterior.kl_divergence(prior) - distrax.Normal(decoded, 1.0).log_prob(x).sum()

    apply, params = of_haiku(net, jnp.zeros(16))
    return lambda params, example: apply(params, example[0]), params, floats(16)


def of_jraph(network: Callable):
    """A classifier of graphs with 6 nodes in a ring; network: (jraph, linear) -> function of a graph."""
    import haiku as hk
    import jraph

    def net(x):
        ends = jnp.arange(6)
        edges = dict(senders=ends, receivers=(ends + 1) % 6, edges=jnp.ones((6, 4)))
        counts = dict(n_node=jnp.array([6]), n_edge=jnp.array([6]), globals=jnp.zeros((1, 1)))
        graph = network(jraph, hk)(jraph.GraphsTuple(nodes=x, **edges, **counts))
        return hk.Linear(CLASSES)(graph.nodes.mean(0))

    apply, params = of_haiku(net, jnp.zeros((6, 8)))
    return classifier(apply), params, floats(6, 8)


@animal("jraph", "haiku")
def graph_convolution():
    return of_jraph(lambda jraph, hk: jraph.GraphConvolution(hk.Linear(16), add_self_edges=True))


@animal("jraph", "haiku")
def interaction_network():
    def network(jraph, hk):
        parts = (jraph.concatenated_args(lambda x: hk.nets.MLP([16, 16])(x)) for _ in range(2))
        return jraph.InteractionNetwork(*parts)

    return of_jraph(network)


@animal("e3nn_jax")
def equivariant_network():
    import e3nn_jax as e3nn
    from e3nn_jax import flax as layers
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            given = e3nn.IrrepsArray("4x0e + 4x1o", x)
            hidden = layers.Linear("16x0e + 8x1o")(e3nn.tensor_product(given, given))
            hidden = e3nn.concatenate([e3nn.scalar_activation(hidden.filter("0e")), hidden.filter("1o")])
            return layers.Linear("4x0e")(e3nn.tensor_product(hidden, hidden)).array

    return of_linen(Net(), 16)
