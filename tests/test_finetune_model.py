"""The decoder of examples.finetune against a forward pass in plain numpy, from files that the tests write."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from examples.finetune import checkpoints
from examples.finetune.model import Architecture, fresh, is_lora, rotated

WIDTH, LAYERS, HEADS, KV, HIDDEN, WORDS, PLACES = 12, 2, 4, 2, 20, 17, 9
TOKENS = np.array([3, 16, 0, 5, 5, 9, 1])


def gated_file(rng, family, *, head=8, tied):
    """The arrays and the config of a model in the layout of Llama or Gemma, as transformers writes them."""
    config = dict(
        model_type=family,
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=head,
        intermediate_size=HIDDEN,
        max_position_embeddings=PLACES,
        rope_theta=500.0,
        rms_norm_eps=1e-3,
        tie_word_embeddings=tied,
        hidden_act={"llama": "silu", "gemma": "gelu_pytorch_tanh"}[family],
    )
    shapes = {"model.embed_tokens.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (WORDS, WIDTH)}
    for n in range(LAYERS):
        shapes |= {
            f"model.layers.{n}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, rows in (("q", HEADS * head), ("k", KV * head), ("v", KV * head)):
            shapes[f"model.layers.{n}.self_attn.{name}_proj.weight"] = rows, WIDTH
        shapes[f"model.layers.{n}.self_attn.o_proj.weight"] = WIDTH, HEADS * head
        shapes |= {f"model.layers.{n}.mlp.{name}_proj.weight": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes[f"model.layers.{n}.mlp.down_proj.weight"] = WIDTH, HIDDEN
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}, config


def gpt2_file(rng):
    config = dict(model_type="gpt2", vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=PLACES)
    shapes = {
        "wte.weight": (WORDS, WIDTH),
        "wpe.weight": (PLACES, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for n in range(LAYERS):
        layers = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
        layers |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
        for name, shape in layers.items():
            shapes |= {f"h.{n}.{name}.weight": shape, f"h.{n}.{name}.bias": shape[1:]}
        shapes |= {f"h.{n}.{norm}.{part}": (WIDTH,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    arrays = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {
        "h.0.attn.bias": np.ones((1, 1, PLACES, PLACES), np.float32)
    }, config  # a mask, which is no parameter


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(query, key, value):
    """One head, one query after the other. (length, width) each."""
    scores = query @ key.T / math.sqrt(query.shape[1])
    return np.stack([softmax(scores[t, : t + 1]) @ value[: t + 1] for t in range(len(query))])


def turned(x, theta):
    """Pairs (i, i + half) as complex numbers, multiplied by e^(i angle)."""
    half = x.shape[1] // 2
    pairs = x[:, :half] + 1j * x[:, half:]
    turns = np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half))
    return np.hstack([(pairs * turns).real, (pairs * turns).imag])


def gated_logits(arrays, config):
    one, head, eps = config["model_type"] == "gemma", config["head_dim"], config["rms_norm_eps"]
    a = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * (a[name] + one)

    x = a["model.embed_tokens.weight"][TOKENS] * (math.sqrt(WIDTH) if one else 1)
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        seen = norm(x, layer + "input_layernorm.weight")
        q, k, v = (seen @ a[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for h in range(HEADS):
            own, shared = slice(h * head, (h + 1) * head), h // (HEADS // KV)
            other = slice(shared * head, (shared + 1) * head)
            heads.append(attend(turned(q[:, own], 500.0), turned(k[:, other], 500.0), v[:, other]))
        x = x + np.hstack(heads) @ a[layer + "self_attn.o_proj.weight"].T
        seen = norm(x, layer + "post_attention_layernorm.weight")
        gate = seen @ a[layer + "mlp.gate_proj.weight"].T
        gate = gelu(gate) if one else gate / (1 + np.exp(-gate))
        x = x + (gate * (seen @ a[layer + "mlp.up_proj.weight"].T)) @ a[layer + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ a.get("lm_head.weight", a["model.embed_tokens.weight"]).T


def gpt2_logits(arrays, config):
    a = {name: array.astype(np.float64) for name, array in arrays.items()}

    def dense(x, name):
        return x @ a[name + ".weight"] + a[name + ".bias"]

    def norm(x, name):
        return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * a[name + ".weight"] + a[
            name + ".bias"
        ]

    x = a["wte.weight"][TOKENS] + a["wpe.weight"][: len(TOKENS)]
    for n in range(LAYERS):
        q, k, v = np.split(dense(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn"), 3, axis=1)
        heads = [attend(*(part[:, 3 * h : 3 * h + 3] for part in (q, k, v))) for h in range(HEADS)]
        x = x + dense(np.hstack(heads), f"h.{n}.attn.c_proj")
        x = x + dense(gelu(dense(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")), f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ a["wte.weight"].T


def files(layout, seed=0):
    rng = np.random.default_rng(seed)
    return gpt2_file(rng) if layout == "gpt2" else gated_file(rng, layout.split()[0], tied="untied" not in layout)


def written(folder, arrays, config):
    folder.mkdir(exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of(folder, **options):
    graphdef, params = checkpoints.load(folder, **options)
    return np.asarray(jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, TOKENS))


@pytest.mark.parametrize("layout", ["llama", "llama untied", "gemma", "gpt2"])
def test_a_loaded_model_computes_what_plain_numpy_does(layout, tmp_path):
    arrays, config = files(layout)
    expected = (gpt2_logits if layout == "gpt2" else gated_logits)(arrays, config)
    folder = written(tmp_path, arrays, config)
    np.testing.assert_allclose(logits_of(folder), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    if layout == "llama":  # as newer versions of transformers write it
        newer = {"rope_parameters": {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}}
        assert checkpoints.architecture(config | newer).theta == 500.0


@pytest.mark.parametrize("layout", ["llama untied", "gemma", "gpt2"])
def test_a_saved_model_is_the_file_that_was_loaded(layout, tmp_path):
    arrays, config = files(layout)
    graphdef, params = checkpoints.load(written(tmp_path / "first", arrays, config))
    checkpoints.save(tmp_path / "second", graphdef, params)
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == {name for name in arrays if not name.endswith(".attn.bias")}
    assert all(np.array_equal(array, arrays[name]) for name, array in again.items())
    sizes = [
        checkpoints.architecture(json.loads((tmp_path / f / "config.json").read_text())) for f in ("first", "second")
    ]
    assert sizes[0] == sizes[1]


def test_lora_starts_as_the_base_and_is_saved_within_the_kernels(tmp_path):
    arrays, config = files("llama")
    folder = written(tmp_path / "base", arrays, config)
    graphdef, params = checkpoints.load(folder, lora_rank=2, key=jax.random.key(3))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert sum(map(is_lora, paths)) == 2 * 2 * LAYERS
    np.testing.assert_array_equal(logits_of(folder, lora_rank=2), logits_of(folder))
    moved = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.1 if is_lora(jax.tree_util.keystr(path)) else leaf, params
    )
    checkpoints.save(tmp_path / "merged", graphdef, moved)
    merged = jax.jit(lambda params: nnx.merge(graphdef, params)(TOKENS))(moved)
    np.testing.assert_allclose(logits_of(tmp_path / "merged"), merged, rtol=1e-3, atol=1e-3)


def test_files_in_several_parts_and_bfloat16_are_read(tmp_path):
    arrays, config = files("llama")
    arrays = {name: array.astype(jnp.bfloat16) for name, array in arrays.items()}
    names = sorted(arrays)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: arrays[name] for name in inside}, tmp_path / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = written(tmp_path / "whole", {name: array.astype(np.float32) for name, array in arrays.items()}, config)
    np.testing.assert_array_equal(logits_of(tmp_path), logits_of(whole))


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("llama", {"model.norm.weight": None}, "model.norm.weight: missing, needs"),
        ("llama", {"model.norm.weight": np.ones(5, np.float32)}, r"model.norm.weight: \(5,\), needs \(12,\)"),
        ("gemma", {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}, "needs none of this name"),
        ("gpt2", {"h.1.attn.c_attn.weight": np.ones((36, 12), np.float32)}, r"needs \(12, 36\)"),
        ("llama", {"model_type": "mamba"}, "model_type must be one of"),
        ("llama", {"rope_scaling": {"factor": 8}}, "rope_scaling must not be set"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "by the default rule"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be true"),
        ("gemma", {"hidden_act": "silu"}, "the activation of gemma must be gelu_pytorch_tanh"),
        ("llama", {"num_key_value_heads": 3}, "heads must be a multiple of kv_heads"),
    ],
)
def test_another_architecture_is_refused_by_name(layout, change, said, tmp_path):
    arrays, config = files(layout)
    for name, value in change.items():
        if "." not in name:
            config[name] = value
        elif value is None:
            del arrays[name]
        else:
            arrays[name] = value
    with pytest.raises(ValueError, match=said):
        checkpoints.load(written(tmp_path, arrays, config))
    with pytest.raises(FileNotFoundError, match="config.json is not there"):
        checkpoints.load(tmp_path / "none")


def test_turned_queries_and_keys_see_their_distance_only():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 8)).astype(np.float32)
    same = [np.repeat(x, 6, axis=0) for x in (query, key)]
    scores = np.einsum("qhd,khd->qk", *(rotated(jnp.asarray(x), 10.0) for x in same))
    for distance in range(-5, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5, atol=1e-5)
    assert np.ptp(scores[0]) > 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"family": "rwkv"}, "family must be one of"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"head_width": 3}, "head_width must be even"),
        ({"family": "gpt2", "kv_heads": 2}, "gpt2 needs kv_heads = heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, said):
    good = dict(vocabulary=5, width=8, layers=1, heads=4, kv_heads=4, head_width=2, hidden=8, positions=4)
    with pytest.raises(ValueError, match=said):
        Architecture(**(good | change))
    graphdef, params = fresh(Architecture(**good), jax.random.key(0))
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        nnx.merge(graphdef, params)(jnp.arange(5))
