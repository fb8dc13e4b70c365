"""Models of text in Flax Linen: a character LSTM, a perceptron on bags of words, and GPT-2 with LoRA.

The parameters of `GPT2` have the names and the shapes of Hugging Face's checkpoint, so `load_gpt2` reads its
safetensors file as it is. All models take one example without a batch axis.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from examples.models import Model, Tree, from_linen
from examples.text_data import LETTERS, PAD

GPT2_MISSING = (
    "{path} is not on this machine. Get it, and tokenizer.json beside it, with a connection: pip install "
    "huggingface_hub && hf download openai-community/gpt2 model.safetensors tokenizer.json --local-dir {folder}"
)


class CharacterLSTM(linen.Module):
    """Letters int32 (length,), PAD behind the last -> logits (classes,), from the state after the last letter."""

    classes: int
    embedding: int
    hidden: int

    @linen.compact
    def __call__(self, letters: jax.Array) -> jax.Array:
        inputs = linen.Embed(len(LETTERS) + 1, self.embedding)(letters)
        states: Any = linen.RNN(linen.OptimizedLSTMCell(self.hidden))(inputs)  # (length, hidden)
        last = jnp.arange(letters.shape[0]) == (letters != PAD).sum() - 1
        return linen.Dense(self.classes)(jnp.where(last[:, None], states, 0).sum(0))


class BagPerceptron(linen.Module):
    """A bag of words, uint8 (bins,) -> logits (classes,). Bags are scaled to norm 1, as texts differ in length."""

    classes: int
    hidden: int

    @linen.compact
    def __call__(self, bag: jax.Array) -> jax.Array:
        words = bag.astype(jnp.float32)
        words = words / jnp.sqrt(jnp.maximum(words.sum(), 1))
        return linen.Dense(self.classes)(jax.nn.relu(linen.Dense(self.hidden)(words)))


def char_lstm(options: Mapping[str, Any], classes: int) -> Model:
    module = CharacterLSTM(classes, options["embedding"], options["hidden"])
    return _of_tokens(module, (options["length"],))


def bag_perceptron(options: Mapping[str, Any], classes: int) -> Model:
    return from_linen(BagPerceptron(classes, options["hidden"]), (options["bins"],))


def _of_tokens(module: linen.Module, shape: tuple[int, ...]) -> Model:
    model = from_linen(module, shape)
    return Model(lambda key: module.init(key, jnp.zeros(shape, jnp.int32))["params"], model.apply)


# ------------------------------------------------------------------ GPT-2


class GPT2Sizes(NamedTuple):
    """The defaults are those of the smallest published model."""

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    lora_rank: int = 0


class Conv1D(linen.Module):
    """A dense layer with the names of the checkpoint, and with `lora_a` and `lora_b` if `rank` is not 0."""

    features: int
    rank: int = 0

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        fan_in, small = inputs.shape[-1], linen.initializers.normal(0.02)
        weight = self.param("weight", small, (fan_in, self.features))
        bias = self.param("bias", linen.initializers.zeros, (self.features,))
        outputs = inputs @ weight + bias[None]
        if self.rank:
            lora_a = self.param("lora_a", linen.initializers.normal(fan_in**-0.5), (fan_in, self.rank))
            lora_b = self.param("lora_b", linen.initializers.zeros, (self.rank, self.features))
            outputs = outputs + inputs @ lora_a @ lora_b
        return outputs


class LayerNorm(linen.Module):
    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        weight = self.param("weight", linen.initializers.ones, inputs.shape[-1:])
        bias = self.param("bias", linen.initializers.zeros, inputs.shape[-1:])
        centered = inputs - inputs.mean(-1, keepdims=True)
        variance = (centered**2).mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(variance + 1e-5) * weight[None] + bias[None]


class Attention(linen.Module):
    heads: int
    rank: int

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        length, width = inputs.shape
        joint = Conv1D(3 * width, self.rank, name="c_attn")(inputs)
        query, key, value = (part.reshape(length, self.heads, -1) for part in jnp.split(joint, 3, axis=-1))
        scores = jnp.einsum("qhd,khd->hqk", query, key) / (width // self.heads) ** 0.5
        seen = jnp.tril(jnp.ones((length, length), bool))
        shares = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("hqk,khd->qhd", shares, value).reshape(length, width)
        return Conv1D(width, name="c_proj")(mixed)


class Perceptron(linen.Module):
    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        width = inputs.shape[-1]
        hidden = jax.nn.gelu(Conv1D(4 * width, name="c_fc")(inputs), approximate=True)
        return Conv1D(width, name="c_proj")(hidden)


class Block(linen.Module):
    heads: int
    rank: int

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        inputs = inputs + Attention(self.heads, self.rank, name="attn")(LayerNorm(name="ln_1")(inputs))
        return inputs + Perceptron(name="mlp")(LayerNorm(name="ln_2")(inputs))


class Table(linen.Module):
    """Rows to look up, by the checkpoint's name."""

    shape: tuple[int, int]

    @linen.compact
    def __call__(self) -> jax.Array:
        return self.param("weight", linen.initializers.normal(0.02), self.shape)


class GPT2(linen.Module):
    """Tokens int32 (length,) -> logits (length, vocabulary) of the next token, by the table of the embeddings."""

    sizes: GPT2Sizes

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        sizes = self.sizes
        words = Table((sizes.vocabulary, sizes.width), name="wte")()
        places = Table((sizes.positions, sizes.width), name="wpe")()
        states = words[tokens] + places[: tokens.shape[0]]
        for number in range(sizes.layers):
            states = Block(sizes.heads, sizes.lora_rank, name=f"h_{number}")(states)
        return LayerNorm(name="ln_f")(states) @ words.T


def gpt2(sizes: GPT2Sizes) -> Model:
    """The model with random parameters."""
    return _of_tokens(GPT2(sizes), (1,))


def load_gpt2(path: str | Path, *, lora_rank: int = 0) -> tuple[Model, Tree]:
    """GPT-2 and its parameters from a checkpoint of Hugging Face: a .safetensors file, or its folder.

    The sizes come from the file, and the number of heads from config.json beside it, or else from heads of 64 numbers,
    as all published models have them. With `lora_rank`, the parameters have LoRA matrices too, `lora_b` of zeros.
    Raises FileNotFoundError, which says how to get the file, and ValueError for other names or shapes.
    """
    path = Path(path).expanduser()
    path = path / "model.safetensors" if path.is_dir() or not path.suffix else path
    if not path.is_file():
        raise FileNotFoundError(GPT2_MISSING.format(path=path, folder=path.parent))
    try:
        load_file = importlib.import_module("safetensors.numpy").load_file
    except ImportError as error:
        raise ValueError("to read a checkpoint: pip install safetensors") from error
    stored = {name.removeprefix("transformer."): array for name, array in load_file(path).items()}
    buffers = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # the causal mask, and the embeddings again
    stored = {name: array for name, array in stored.items() if not name.endswith(buffers)}
    sizes = _sizes_of(stored, path)._replace(lora_rank=lora_rank)
    model = gpt2(sizes)
    params = model.init(jax.random.key(0)) if lora_rank else jax.eval_shape(model.init, jax.random.key(0))
    wanted = {_stored_name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(params)}
    expected = {name: leaf.shape for name, leaf in wanted.items() if "lora" not in name}
    shapes = {name: array.shape for name, array in stored.items()}
    if found := {name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)}:
        listed = ", ".join(
            f"{name}: {shapes.get(name, 'missing')}, needs {expected.get(name, 'none such')}"
            for name in sorted(found)[:3]
        )
        raise ValueError(f"{path}: not a GPT-2 checkpoint: {listed}")

    def leaf_of(place, leaf):
        name = _stored_name(place)
        return leaf if "lora" in name else jnp.asarray(stored[name].astype(np.float32))

    return model, jax.tree_util.tree_map_with_path(leaf_of, params)


def _stored_name(place) -> str:
    """h.0.attn.c_attn.weight for the path of the same parameter here."""
    return ".".join(str(part.key).replace("h_", "h.") for part in place)


def _sizes_of(stored: Mapping[str, np.ndarray], path: Path) -> GPT2Sizes:
    missing = [name for name in ("wte.weight", "wpe.weight") if name not in stored or stored[name].ndim != 2]
    if missing:
        raise ValueError(f"{path}: not a GPT-2 checkpoint: {missing[0]} is missing; it has {sorted(stored)[:3]}")
    (vocabulary, width), positions = stored["wte.weight"].shape, len(stored["wpe.weight"])
    layers = 1 + max((int(name.split(".")[1]) for name in stored if name.startswith("h.")), default=-1)
    beside = path.parent / "config.json"
    heads = json.loads(beside.read_text())["n_head"] if beside.is_file() else max(1, width // 64)
    return GPT2Sizes(vocabulary, positions, width, layers, heads)


def is_lora(path: str) -> bool:
    """Whether `dpx.coordinates.trainable` should train the parameter, in a run with LoRA."""
    return "lora_" in path
