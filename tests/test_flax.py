"""The code of docs/flax.md runs as it stands and does what the page says; GPT-2's Flax module, as in transformers."""

import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.linen.attention import dot_product_attention_weights

import dpx
from tests.ghost import assert_agrees, integers, key, mechanism, random_like
from tests.problems import as_a_user

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "flax.md").read_text()
NNX, LINEN, BATCH_NORM, HUGGING_FACE, _ = PAGE.split("\n## ")[1:]
FINE_TUNING = (pathlib.Path(__file__).parent.parent / "docs" / "fine_tuning.md").read_text()


def blocks(section, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def lines(text):
    """Without blank lines, and with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def numbers(line):
    return [float(number) for number in re.findall(r"\d+\.?\d*", line)]


@pytest.fixture(scope="module")
def page():
    """The names of the page's first block, in which each test runs the blocks of its section."""
    names = {}
    run(blocks(NNX)[0], names)
    return names


def run(block, names):
    with as_a_user():
        exec(block, names)


@pytest.mark.long
def test_nnx_and_batch_norm(page, capsys):
    """One test, because both sections share the optimizer."""
    _, to_loss, training, stored = blocks(NNX)
    assert len(lines(to_loss + training)) <= 40
    run(to_loss + training, page)
    accuracy, epsilon, steps = numbers(capsys.readouterr().out)
    assert accuracy > 0.5 and epsilon == pytest.approx(3, abs=0.02) and steps == page["budget"].steps
    assert page["first"].steps == 10 and page["result"].epsilon <= 3

    run(stored, page)
    keys = jax.random.split(key(3), 2)
    assert (jax.vmap(page["dropped"], (None, 0))(jnp.ones(40), keys) == 0).sum(axis=1).min() > 5
    assert len(np.unique(jax.vmap(page["dropped"], (None, 0))(jnp.ones(40), keys), axis=0)) == 2
    example = page["data"][0][0], page["data"][1][0]
    assert len({float(page["loss"](page["params"], example, each)) for each in keys}) == 2

    (refused, grouped), (shown,) = blocks(BATCH_NORM), blocks(BATCH_NORM, "text")
    run(refused, page)
    assert capsys.readouterr().out.split() == shown.split()
    run(grouped, page)
    assert page["logits"].shape == (3,)


@pytest.mark.long
def test_linen(page, capsys):
    (model, training), (shown,) = blocks(LINEN), blocks(LINEN, "text")
    assert len(lines(training)) <= 41
    run(model + training, page)
    *table, last = lines(capsys.readouterr().out)
    assert set(lines(shown)) <= set(table) and len(table) < len(jax.tree.leaves(page["result"].params))
    accuracy, epsilon = numbers(last)
    assert accuracy > 0.7 and epsilon == pytest.approx(3, abs=0.02) and page["result"].epsilon <= 3


class Normalized(nnx.Module):
    """BatchNorm in a list, in a module, twice under two names, and without a bias."""

    def __init__(self, rngs):
        shared = nnx.BatchNorm(16, epsilon=1e-3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 16, rngs=rngs), shared])
        self.again = shared
        self.inner = nnx.Sequential(nnx.Linear(16, 9, rngs=rngs), nnx.BatchNorm(9, use_bias=False, rngs=rngs))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.inner(jnp.sin(self.again(x)).mean(axis=(1, 2)))


def test_group_norm_in_place_of_batch_norm():
    """No row changes another, the scales stay, what is shared stays shared, and the given module is as it was."""
    module, x = Normalized(nnx.Rngs(0)), np.random.default_rng(0).normal(size=(4, 2, 3, 3)).astype(np.float32)
    module.again.scale[...] = jnp.arange(16.0)
    made = dpx.flax.replace_batch_norm(module)
    assert not jax.tree.leaves(nnx.state(made, nnx.BatchStat)) and isinstance(module.again, nnx.BatchNorm)
    assert made.again is made.layers[1] and made.inner.layers[1].bias is None and made.again.epsilon == 1e-3
    assert (made.again.num_groups, made.inner.layers[1].num_groups) == (4, 1)  # 9 has no divisor that leaves 4
    assert np.array_equal(made.again.scale[...], np.arange(16.0)) and made.again.scale is not module.again.scale

    other = x.copy()
    other[1:] = np.nan
    with as_a_user():
        np.testing.assert_array_equal(made(x)[0], made(other)[0])
    grouped = np.random.default_rng(1).normal(size=(1, 2, 3, 16)).astype(np.float32)
    parts = grouped.reshape(1, 6, 4, 4)
    expected = (parts - parts.mean((1, 3), keepdims=True)) / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-3)
    with as_a_user():
        found = made.again(grouped)
    np.testing.assert_allclose(found, expected.reshape(1, 2, 3, 16) * np.arange(16.0), atol=1e-4)

    _, params, _ = nnx.split(made, nnx.Param, ...)
    mechanism().init(params)
    assert dpx.flax.replace_batch_norm(nnx.BatchNorm(64, rngs=nnx.Rngs(0)), groups=8).num_groups == 8


def test_a_batch_norm_that_cannot_be_replaced():
    for module, options, words in [
        (linen.BatchNorm(), {}, "module must be an nnx.Module, got BatchNorm"),
        (nnx.BatchNorm(4, axis=1, rngs=nnx.Rngs(0)), {}, "must be on axis -1 for GroupNorm, got axis 1"),
        (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), {"groups": 0}, "groups must be a whole number of at least 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            dpx.flax.replace_batch_norm(module, **options)


# FlaxGPT2LMHeadModule of transformers 4.57.6, without cache, cross attention and padding, and with a batch axis of 1.
VOCABULARY, LENGTH, WIDTH, HEADS, DROPOUT = 32, 8, 16, 2, 0.1


class Conv1D(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        kernel = self.param("kernel", linen.initializers.normal(0.02), (self.features, x.shape[-1]))
        y = jax.lax.dot_general(x, kernel.transpose(), (((x.ndim - 1,), (0,)), ((), ())))
        return y + self.param("bias", linen.initializers.zeros, (self.features,))


class Attention(linen.Module):
    def setup(self):
        self.c_attn, self.c_proj, self.resid_dropout = Conv1D(3 * WIDTH), Conv1D(WIDTH), linen.Dropout(DROPOUT)

    def __call__(self, x, deterministic):
        parts = jnp.split(self.c_attn(x), 3, axis=2)
        query, heads, value = (part.reshape(*part.shape[:2], HEADS, WIDTH // HEADS) for part in parts)
        mask = linen.make_causal_mask(jnp.ones((1, LENGTH), bool), dtype=bool)
        lowest = jnp.full(mask.shape, jnp.finfo(jnp.float32).min)
        rng = None if deterministic else self.make_rng("dropout")
        weights = dot_product_attention_weights(
            query,
            heads,
            bias=jax.lax.select(mask, jnp.zeros(mask.shape), lowest),
            dropout_rng=rng,
            dropout_rate=DROPOUT,
            deterministic=deterministic,
        )
        attended = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(x.shape)
        return self.resid_dropout(self.c_proj(attended), deterministic=deterministic)


class MLP(linen.Module):
    def setup(self):
        self.c_fc, self.c_proj, self.dropout = Conv1D(4 * WIDTH), Conv1D(WIDTH), linen.Dropout(DROPOUT)

    def __call__(self, x, deterministic):
        return self.dropout(self.c_proj(jax.nn.gelu(self.c_fc(x))), deterministic=deterministic)


class Block(linen.Module):
    def setup(self):
        self.ln_1, self.attn = linen.LayerNorm(epsilon=1e-5), Attention()
        self.ln_2, self.mlp = linen.LayerNorm(epsilon=1e-5), MLP()

    def __call__(self, x, deterministic):
        x = self.attn(self.ln_1(x), deterministic) + x
        return x + self.mlp(self.ln_2(x), deterministic)


class Blocks(linen.Module):
    def setup(self):
        self.blocks = [Block(name="0")]

    def __call__(self, x, deterministic):
        return self.blocks[0](x, deterministic)


class Transformer(linen.Module):
    def setup(self):
        self.wte, self.wpe = linen.Embed(VOCABULARY, WIDTH), linen.Embed(LENGTH, WIDTH)
        self.dropout, self.h, self.ln_f = linen.Dropout(DROPOUT), Blocks(), linen.LayerNorm(epsilon=1e-5)

    def __call__(self, tokens, deterministic):
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[None, :], tokens.shape)
        x = self.dropout(self.wte(tokens) + self.wpe(positions), deterministic=deterministic)
        return self.ln_f(self.h(x, deterministic))


class GPT2(linen.Module):
    def setup(self):
        self.transformer, self.lm_head = Transformer(), linen.Dense(VOCABULARY, use_bias=False)

    def __call__(self, tokens, deterministic):
        hidden = self.transformer(tokens, deterministic)
        shared = self.transformer.variables["params"]["wte"]["embedding"].T
        return self.lm_head.apply({"params": {"kernel": shared}}, hidden)


@jax.numpy_rank_promotion("allow")  # as transformers adds its biases
@pytest.mark.long
def test_gpt2():
    """Ghost norms are those of per-example gradients, and each parameter takes the way that the page shows."""
    model, tokens = GPT2(), integers(7, VOCABULARY, 5, LENGTH)
    shapes = jax.eval_shape(lambda: model.init(key(1), tokens[:1], True))["params"]

    def loss(params, example):
        sequence, seed = example
        rngs = {"dropout": jax.random.key(seed)}
        logits = model.apply({"params": params}, sequence[None], False, rngs=rngs)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], sequence[1:]).mean()

    params, batch = random_like(shapes), (tokens, jnp.arange(5))
    assert_agrees(loss, params, batch, norms=("ghost",))
    rows = dpx.explain_norms(loss, mechanism(), params, dpx.Batch(batch, None)).rows
    found = {path: f"{way} {why}".strip() for path, way, why in rows}
    for line in lines(*blocks(HUGGING_FACE, "text")):
        name, way = line.split(" ", 1)
        assert found[name] == way
    large = {way for name, way in found.items() if "kernel" in name or "wte" in name}
    assert large == {"per-example gradients cheaper than ghost norms"}
    small = {way for name, way in found.items() if not ("kernel" in name or "wte" in name)}
    assert small == {"per-example gradients as small as cotangents"} and len(found) == 16


class TransformersModel:
    """As `transformers.FlaxGPT2LMHeadModel`: a model that has parameters, and takes others in a call."""

    def __init__(self, sizes, seed, input_shape):
        init = jax.jit(lambda key: GPT2().init(key, jnp.zeros(input_shape, int), True)["params"])
        self.params = init(key(seed))

    def __call__(self, tokens, params, dropout_rng, train):
        logits = GPT2().apply({"params": params}, tokens, not train, rngs={"dropout": dropout_rng})
        return types.SimpleNamespace(logits=logits)


@pytest.mark.long
def test_the_programs_for_hugging_face(monkeypatch, capsys):
    """That of the page, and LoRA for the same model in docs/fine_tuning.md."""
    library = types.SimpleNamespace(FlaxGPT2LMHeadModel=TransformersModel, GPT2Config=dict)
    monkeypatch.setitem(sys.modules, "transformers", library)
    names = {}
    run("".join(blocks(HUGGING_FACE, "py")), names)
    assert names["result"].steps == 20 and len(capsys.readouterr().out.splitlines()) == 1
    run(*blocks(FINE_TUNING, "py"), names)
    table, result, begun = lines(capsys.readouterr().out), names["result"], names["params"]
    assert {("['base']" in line, "not trained" in line) for line in table} == {(True, True), (False, False)}
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, result.params["base"], begun["base"])))
    ((name, lora),) = result.params["lora"].items()
    assert name == "transformer/h/0/attn/c_attn" and np.abs(lora["lora_b"]).min() > 0
    assert (lora["lora_a"] != begun["lora"][name]["lora_a"]).all() and result.epsilon <= 3
