"""The files of a decoder: safetensors and config.json, in the layouts that Hugging Face gives Llama, Gemma and GPT-2.

`load` checks every name and every shape before it reads a number, so a file of another architecture is refused by the
name of its first difference. `save` writes the same layouts, with the LoRA matrices multiplied into the kernels.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.finetune.model import Architecture, fresh, is_lora

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ACTIVATIONS = {"llama": ("silu",), "gemma": ("gelu_pytorch_tanh",), "gpt2": ("gelu_new",)}
_GATED_NUMBERS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NEEDED: dict[str, tuple[str, ...]] = {  # the numbers that have no default here, as each family calls them
    "llama": _GATED_NUMBERS,
    "gemma": (*_GATED_NUMBERS, "head_dim"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
}
GATED = {  # of a block, by the names here
    "attention_norm": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "hidden_norm": "post_attention_layernorm",
    "hidden/gate": "mlp.gate_proj",
    "hidden/up": "mlp.up_proj",
    "hidden/down": "mlp.down_proj",
}
PLAIN = {
    "attention_norm": "ln_1",
    "attention/query": "attn.c_attn",  # GPT-2 stores queries, keys and values as one kernel, in thirds of its outputs
    "attention/key": "attn.c_attn",
    "attention/value": "attn.c_attn",
    "attention/out": "attn.c_proj",
    "hidden_norm": "ln_2",
    "hidden/up": "mlp.c_fc",
    "hidden/down": "mlp.c_proj",
}
THIRDS = {"attention/query": 0, "attention/key": 1, "attention/value": 2}


class Stored(NamedTuple):
    """Where a parameter is in a file. transposed: whether its axes are exchanged. third: of the last axis, or None."""

    name: str
    transposed: bool = False
    third: int | None = None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the array in the file, for a parameter of `shape`."""
        shape = shape[::-1] if self.transposed else shape
        return shape if self.third is None else (*shape[:-1], 3 * shape[-1])

    def read(self, array: np.ndarray) -> np.ndarray:
        array = array.T if self.transposed else array
        return array if self.third is None else np.split(array, 3, axis=-1)[self.third]


def stored(path: str, family: str) -> Stored:
    """Where the parameter at `path`, such as "blocks/0/attention/query/kernel", is in a file of the family."""
    plain = family == "gpt2"
    if path in (tops := _tops(plain)):
        return tops[path]
    _, number, *middle, leaf = path.split("/")
    part = "/".join(middle)
    block = f"{'h' if plain else 'model.layers'}.{number}.{(PLAIN if plain else GATED)[part]}"
    name = f"{block}.{'bias' if leaf == 'bias' else 'weight'}"
    return Stored(name, leaf == "kernel" and not plain, THIRDS.get(part) if plain else None)


def _tops(plain: bool) -> dict[str, Stored]:
    if plain:
        named = {
            "embedding": "wte.weight",
            "places": "wpe.weight",
            "norm/scale": "ln_f.weight",
            "norm/bias": "ln_f.bias",
        }
    else:
        named = {"embedding": "model.embed_tokens.weight", "norm/scale": "model.norm.weight"}
    return {path: Stored(name) for path, name in named.items()} | {"head/kernel": Stored("lm_head.weight", True)}


def architecture(config: Mapping[str, Any], *, lora_rank: int = 0) -> Architecture:
    """The sizes that a config.json states. Raises ValueError for what this decoder does not compute."""
    family = config.get("model_type")
    if family not in ACTIVATIONS:
        raise ValueError(f"model_type must be one of {sorted(ACTIVATIONS)}, got {family!r}")
    if missing := [name for name in NEEDED[family] if name not in config]:
        raise ValueError(f"a config of {family} must state {missing[0]}")
    activation = config.get("activation_function" if family == "gpt2" else "hidden_activation") or config.get(
        "hidden_act"
    )
    activation = "gelu_pytorch_tanh" if family == "gemma" and activation == "gelu" else activation
    if activation not in (None, *ACTIVATIONS[family]):
        raise ValueError(f"the activation of {family} must be {ACTIVATIONS[family][0]}, got {activation!r}")
    for name in ("rope_scaling", "attention_bias", "mlp_bias", "scale_attn_by_inverse_layer_idx"):
        if config.get(name):
            raise ValueError(f"{name} must not be set, because this decoder does not compute it; got {config[name]!r}")
    positions = config.get("rope_parameters") or {}  # where newer versions of transformers write rope_theta
    if positions.get("rope_type", "default") != "default" or config.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"positions must turn all of a head, by the default rule; got {positions}")
    if not config.get("scale_attn_weights", True):
        raise ValueError("scale_attn_weights must be true, because this decoder scales them; got false")
    if family == "gpt2":
        width, heads = config["n_embd"], config["n_head"]
        return Architecture(
            family=family,
            vocabulary=config["vocab_size"],
            width=width,
            layers=config["n_layer"],
            heads=heads,
            kv_heads=heads,
            head_width=width // heads,
            hidden=config.get("n_inner") or 4 * width,
            positions=config["n_positions"],
            epsilon=config.get("layer_norm_epsilon", 1e-5),
            lora_rank=lora_rank,
        )
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        family=family,
        vocabulary=config["vocab_size"],
        width=width,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or width // heads,
        hidden=config["intermediate_size"],
        positions=config.get("max_position_embeddings", 2048),
        theta=config.get("rope_theta") or positions.get("rope_theta", 10_000.0),
        epsilon=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", family == "gemma"),
        lora_rank=lora_rank,
    )


def load(folder: str | Path, *, lora_rank: int = 0, key: jax.Array | None = None) -> tuple[nnx.GraphDef, nnx.State]:
    """The module without its parameters, and the parameters, float32, of a folder with config.json and safetensors.

    lora_rank: with more than 0, LoRA matrices are added, whose first factor is drawn with `key`; the second is zero.
    Raises FileNotFoundError without the files, ImportError without the package safetensors, and ValueError for a config
    of another architecture, and for names and shapes that are not those of the config.
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder / CONFIG} is not there; a checkpoint is a folder with {CONFIG} and {WEIGHTS}")
    sizes = architecture(json.loads((folder / CONFIG).read_text()), lora_rank=lora_rank)
    key = jax.random.key(0) if key is None else key
    graphdef, shapes = jax.eval_shape(lambda: fresh(sizes, key))
    lora = _matrices(sizes, key)
    arrays = Arrays(folder)
    wanted = {path: stored(path, sizes.family) for path, _ in _leaves(shapes) if not is_lora(path)}
    needed = {wanted[path].name: wanted[path].shape_of(leaf.shape) for path, leaf in _leaves(shapes) if path in wanted}
    ignored = {name for name in arrays.shapes if name not in needed and _redundant(name, sizes)}
    found = {name: shape for name, shape in arrays.shapes.items() if name not in ignored}
    if wrong := sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name)):
        words = [f"{n}: {found.get(n, 'missing')}, needs {needed.get(n, 'none of this name')}" for n in wrong[:3]]
        raise ValueError(f"{folder}: not a checkpoint of its config ({sizes.family}): {'; '.join(words)}")

    def leaf_of(path, leaf):
        path = _path(path)
        value = lora[path] if path in lora else wanted[path].read(arrays.read(wanted[path].name))
        return jnp.asarray(np.asarray(value, np.float32))

    return graphdef, jax.tree_util.tree_map_with_path(leaf_of, shapes)


def save(folder: str | Path, graphdef: nnx.GraphDef, params: nnx.State) -> None:
    """Writes config.json and model.safetensors, with LoRA merged into the kernels. The folder may exist."""
    library: Any = importlib.import_module("safetensors.numpy")
    sizes, leaves = nnx.merge(graphdef, params).sizes, dict(_leaves(params))
    arrays: dict[str, list] = {}
    for path, leaf in leaves.items():
        if is_lora(path):
            continue
        value, before = np.asarray(leaf, np.float32), path.removesuffix("kernel")
        if before + "lora_a" in leaves:
            value = value + np.asarray(leaves[before + "lora_a"]) @ np.asarray(leaves[before + "lora_b"])
        place = stored(path, sizes.family)
        arrays.setdefault(place.name, []).append((place.third or 0, value.T if place.transposed else value))
    joined = {
        name: np.ascontiguousarray(np.concatenate([part for _, part in sorted(parts, key=lambda one: one[0])], axis=-1))
        for name, parts in arrays.items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    library.save_file(joined, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(_config(sizes), indent=2) + "\n")


class Arrays:
    """The arrays of one safetensors file, or of those that an index lists, read one at a time."""

    def __init__(self, folder: Path):
        try:
            self._library: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise ImportError("to read a checkpoint: pip install safetensors") from error
        index = folder / INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS]
        self._files = {}
        for file in names:
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{folder / file} is not there")
            with self._library.safe_open(folder / file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118, because it is not a dict
                    self._files[name.removeprefix("transformer.")] = folder / file, name
        self.shapes = {name: self._shape(name) for name in self._files}

    def _shape(self, name: str) -> tuple[int, ...]:
        file, inside = self._files[name]
        with self._library.safe_open(file, framework="numpy") as opened:
            return tuple(opened.get_slice(inside).get_shape())

    def read(self, name: str) -> np.ndarray:
        file, inside = self._files[name]
        with self._library.safe_open(file, framework="numpy") as opened:
            return opened.get_tensor(inside)


def _leaves(params: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield _path(path), leaf


def _path(path: Any) -> str:
    """Without the ".value" of a variable of NNX."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _matrices(sizes: Architecture, key: jax.Array) -> dict[str, jax.Array]:
    """The LoRA matrices, drawn without the rest of the model."""
    if not sizes.lora_rank:
        return {}
    return dict(jax.jit(lambda: {path: leaf for path, leaf in _leaves(fresh(sizes, key)[1]) if is_lora(path)})())


def _redundant(name: str, sizes: Architecture) -> bool:
    """Whether an array of a file says nothing: GPT-2's causal masks, rotary frequencies, the tied head again."""
    masks = name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
    return masks or (sizes.tied and name == "lm_head.weight")


def _config(sizes: Architecture) -> dict[str, Any]:
    if sizes.family == "gpt2":
        named = dict(n_embd=sizes.width, n_layer=sizes.layers, n_head=sizes.heads, n_positions=sizes.positions)
        named |= dict(n_inner=sizes.hidden, layer_norm_epsilon=sizes.epsilon, activation_function="gelu_new")
        return {"model_type": "gpt2", "vocab_size": sizes.vocabulary} | named
    return {
        "model_type": sizes.family,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "intermediate_size": sizes.hidden,
        "max_position_embeddings": sizes.positions,
        "rope_theta": sizes.theta,
        "rms_norm_eps": sizes.epsilon,
        "tie_word_embeddings": sizes.tied,
        "hidden_act": ACTIVATIONS[sizes.family][0],
    }
