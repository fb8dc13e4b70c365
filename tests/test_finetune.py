"""examples.finetune: rows of one unit each, its decoder, runs, and the table of many runs."""

import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from scipy.special import softmax

import dpx
from examples.finetune import __main__ as command
from examples.finetune import base, checkpoints, documents, table, training
from examples.finetune.model import Architecture, fresh, is_lora, rotated
from examples.finetune.rows import Bytes, rows_of
from examples.finetune.writing import write_texts
from tests.problems import dp_sgd

TINY = Architecture(vocabulary=257, width=8, layers=1, heads=2, kv_heads=1, head_width=4, hidden=8, positions=128)
CORPUS = documents.Corpus(
    name="made up", texts=("one two three four", "five", "six", "", "seven eight nine ten eleven"), units=tuple("abbcd")
)


@pytest.fixture(autouse=True)
def strict(promoting):
    """optax's Adam needs the promotion of dtypes."""


def test_no_row_holds_the_text_of_two_units_and_every_token_is_predicted_once():
    for layout in ("packed", "padded"):
        rows = rows_of(CORPUS, Bytes(), length=7, layout=layout)
        for unit in "abcd":
            own = rows.owners == unit
            texts = [text for text, owner in zip(CORPUS.texts, CORPUS.units, strict=True) if owner == unit]
            streams = [[256, *text.encode()] for text in texts]
            streams[-1].append(256)
            whole = [sum(streams, [])] if layout == "packed" else streams
            predicted = [t for row, size in zip(rows.tokens[own], rows.sizes[own], strict=True) for t in row[1:size]]
            assert predicted == [token for stream in whole for token in stream[1:]]
        assert rows.tokens.dtype == np.int32 and rows.tokens.shape[1] == 8
    assert (rows.owners == "b").sum() == 2 and len(rows.users(2, "document")) == 4
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        rows_of(CORPUS, Bytes(), length=1)
    with pytest.raises(ValueError, match="layout must be 'packed' or 'padded'"):
        rows_of(CORPUS, Bytes(), length=7, layout="mixed")  # pyrefly: ignore


@pytest.fixture(scope="module")
def model():
    return fresh(TINY, jax.random.key(0))


def test_padding_gives_no_gradient(model):
    """Zeros behind a row, rows behind a unit, and what stands there change nothing, and weigh nothing."""
    graphdef, params = model
    users = rows_of(CORPUS, Bytes(), length=7).users(4, "document")
    gradient = jax.jit(jax.grad(training.loss_of(graphdef)))
    (tokens, sizes), included = users[0]
    other = np.where(np.arange(8)[None] < sizes[:, None], tokens, 99)
    assert not included.all() and (other != tokens).any()
    first, second = (gradient(params, ((jnp.asarray(t), jnp.asarray(sizes)), included)) for t in (tokens, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first, second)
    empty = gradient(params, ((jnp.zeros_like(tokens), jnp.zeros_like(sizes)), included))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(empty))
    never = gradient(params, ((jnp.asarray(tokens), jnp.asarray(sizes)), np.zeros_like(included)))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(never))


@pytest.mark.long
def test_a_unit_is_clipped_as_one_and_moves_its_own_part_of_the_sum_only(model):
    """The sum without noise moves by exactly the clipped gradient of the unit that changed."""
    graphdef, params = model
    loss, clip = training.loss_of(graphdef), 0.05
    sampling = dpx.FullBatch(examples=4)
    mechanism = dp_sgd(sampling, 0.0, clip_norm=clip)
    update = jax.jit(dpx.private_updates(loss, mechanism))

    def total(texts):
        corpus = documents.Corpus(name="made up", texts=tuple(texts), units=CORPUS.units)
        users = rows_of(corpus, Bytes(), length=7).users(4, "document")
        batch = sampling.take(users, jax.random.key(1), mechanism.init(params))
        updates = update(params, batch, mechanism.init(params)).updates
        return users, jax.tree.map(lambda leaf: 4 * np.asarray(leaf), updates)

    gradient_of = jax.jit(jax.grad(loss))

    def clipped(users, number):
        gradient = gradient_of(params, jax.tree.map(jnp.asarray, users[number]))
        norm = np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
        assert norm > 2 * clip
        return jax.tree.map(lambda leaf: np.asarray(leaf) * clip / norm, gradient)

    users, before = total(CORPUS.texts)
    changed_users, after = total(["one two three four", "FIVE", "66", "", "seven eight nine ten eleven"])
    moved = jax.tree.map(np.subtract, after, before)
    expected = jax.tree.map(np.subtract, clipped(changed_users, 1), clipped(users, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * clip), moved, expected)


# ------------------------------------------------------------------ documents


def test_texts_are_read_with_their_units(tmp_path, monkeypatch):
    texts = {"ann/b.txt": "second", "ann/a.md": "first", "bob/c.txt": "third", "bob/x.bin": "no text"}
    for name, text in texts.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    files = documents.load(str(tmp_path / "texts"))
    assert files.units == ("ann/a.md", "ann/b.txt", "bob/c.txt") and files.unit == "document"
    users = documents.load(str(tmp_path / "texts"), user="folder")
    assert users.units == ("ann", "ann", "bob") and users.texts == ("first", "second", "third") and users.unit == "user"

    records = [{"words": f"text {number}", "who": "ab"[number % 2]} for number in range(12)]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    each = documents.load(str(file), text="words")
    assert each.texts == tuple(record["words"] for record in records) and len(set(each.units)) == 12
    owned = documents.load(str(file), text="words", user="who")
    assert owned.units == ("a",) * 6 + ("b",) * 6 and owned.texts[1] == "text 2"

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    library = types.SimpleNamespace(load_from_disk=lambda path: {"train": records, "test": []})
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert documents.load(str(tmp_path / "saved"), text="words", user="who").texts == owned.texts
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        documents.load(str(tmp_path / "saved"))
    for options, said in (({}, "has no text in the field 'text'"), ({"text": "words", "user": "me"}, "has no owner")):
        with pytest.raises(ValueError, match=said):
            documents.load(str(file), **options)
    with pytest.raises(FileNotFoundError, match="must be 'docs'"):
        documents.load(str(tmp_path / "none"))


def test_a_unit_goes_to_one_part_by_its_name_alone(tmp_path):
    units = tuple(f"user {number // 2}" for number in range(400))
    corpus = documents.Corpus(name="made up", texts=("x",) * 400, units=units)
    private, test = corpus.split()
    assert not set(private.units) & set(test.units) and 20 < len(test.units) < 70
    fewer = documents.Corpus(name="made up", texts=("x",) * 100, units=units[300:]).split()[1]
    assert set(fewer.units) == set(test.units) & set(units[300:])
    some = private.some(7)
    assert len(set(some.units)) == 7 and len(some.units) == 14 and set(private.some(6).units) < set(some.units)
    (tmp_path / "m.py").write_text('"""Module."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""\n')
    assert sorted(documents.docstrings(tmp_path / "m.py")) == ["A.", "F.", "Module."]
    (tmp_path / "old.py").write_text('print "no"')
    assert list(documents.docstrings(tmp_path / "old.py")) == []


# ------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def files(tmp_path_factory, model):
    """A checkpoint of a tiny model, and a folder of texts."""
    folder = tmp_path_factory.mktemp("finetune")
    checkpoints.save(folder / "base", *model)
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number}.txt").write_text(f"Text {number} says: {number * number}. " * (1 + number % 3))
    return folder


def words_of(files, output, *more):
    words = "--length 16 --most 2 --canaries 3 --batch-size 20 --steps 4 --seed 5 --epsilon 8 --delta 1e-4 --quiet"
    words += f" --lora-rank 2 --checkpoint-every 2 --base {files / 'base'} --data {files / 'texts'}"
    return [*words.split(), "--output-dir", str(output), *more]


def settings_of(files, **change):
    given = command.parser().parse_args(words_of(files, "unused"))
    return training.Settings(**(command.settings_of(given).as_dict() | change))


@pytest.mark.long
def test_the_command_trains_reports_and_writes_texts_and_resumes_bit_for_bit(files, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert command.main(words_of(files, whole, "--synthesize", "3")) == 0
    assert "for one unit of" in capsys.readouterr().out
    result = json.loads((whole / "result.json").read_text())
    assert result["result"]["epsilon"] <= 8 and "seed" not in result["config"] and result["result"]["steps"] == 4
    assert 0 <= result["result"]["exposure"] <= 7 and not [name for name in result["result"] if "unreleased" in name]
    assert 0 <= json.loads((whole / "unreleased.json").read_text())["unreleased_membership_tpr_at_0.01"] <= 1
    report = json.loads((whole / "privacy_report.json").read_text())
    assert report["unit"] == "one document" and report["epsilon"]["pld"] <= 8
    texts = [json.loads(line)["text"] for line in (whole / "synthetic.jsonl").read_text().splitlines()]
    assert len(texts) == 3 and (whole / "samples.txt").read_text().count("--- ") >= 8
    before, model = (load_file(folder / "model.safetensors") for folder in (files / "base", whole / "model"))
    moved = {name.split(".")[-2] for name in before if not np.array_equal(before[name], model[name])}
    assert moved == {"q_proj", "v_proj"} and before.keys() == model.keys()  # what LoRA adapts, and nothing else

    assert command.main(words_of(files, whole)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert command.main(["--output-dir", str(whole), "--resume", "--steps", "5"]) == 2
    assert "steps was 4, now 5" in capsys.readouterr().err

    first = training.run(settings_of(files), output_dir=parts, checkpoint_every=2, stop_after=2)
    assert first["steps"] == 2 and not (parts / "result.json").exists()
    assert command.main(["--output-dir", str(parts), "--resume", "--quiet", "--synthesize", "3"]) == 0
    for name in ("model/model.safetensors", "samples.txt", "synthetic.jsonl", "result.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_misuse_is_refused(files):
    for name, value, said in (
        ("optimizer", "lion", "optimizer must be one of"),
        ("canaries", -1, "canaries must be at least 0, got -1"),
        ("units", -1, "units must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=said):
            settings_of(files, **{name: value})


def test_texts_end_at_the_start_token_and_begin_with_the_prompt(model):
    graphdef, params = model
    write = lambda **change: write_texts(  # noqa: E731
        graphdef, params, Bytes(), **(dict(count=2, length=5, key=jax.random.key(0), prompt="ab") | change)
    )
    assert all(text.startswith("ab") for text in write()) and write() == write()
    for change in ({"count": 0}, {"temperature": 0.0}, {"prompt": "abcdef"}):
        with pytest.raises(ValueError, match="count must be at least 1, temperature above 0"):
            write(**change)


@pytest.mark.long
def test_the_small_base_is_made_once_from_public_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "standard_library", lambda: CORPUS)
    folder = base.small_base(tmp_path, sizes=TINY, steps=2)
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert base.small_base(tmp_path, sizes=TINY, steps=2) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert checkpoints.load(folder)[1] is not None


# ------------------------------------------------------------------ the decoder against plain numpy

WIDTH, LAYERS, HEADS, KV, HEAD, HIDDEN, WORDS, PLACES = 12, 2, 4, 2, 8, 20, 17, 9
TOKENS = np.array([3, 16, 0, 5, 5, 9, 1])


def gated_file(rng, family, *, tied):
    """The arrays and the config of a model in the layout of Llama or Gemma, as transformers writes them."""
    sizes = dict(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    sizes |= dict(num_key_value_heads=KV, head_dim=HEAD, intermediate_size=HIDDEN, max_position_embeddings=PLACES)
    activation = {"llama": "silu", "gemma": "gelu_pytorch_tanh"}[family]
    config = dict(sizes, model_type=family, rope_theta=500.0, rms_norm_eps=1e-3, hidden_act=activation)
    shapes = {"model.embed_tokens": (WORDS, WIDTH), "model.norm": (WIDTH,)} | (
        {} if tied else {"lm_head": (WORDS, WIDTH)}
    )
    for n in range(LAYERS):
        layer = {name: (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
        layer |= {f"self_attn.{name}_proj": (rows * HEAD, WIDTH) for name, rows in (("q", HEADS), ("k", KV), ("v", KV))}
        layer |= {"self_attn.o_proj": (WIDTH, HEADS * HEAD), "mlp.down_proj": (WIDTH, HIDDEN)}
        layer |= {f"mlp.{name}_proj": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    return drawn(rng, {f"{name}.weight": shape for name, shape in shapes.items()}), config | {
        "tie_word_embeddings": tied
    }


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
    mask = np.ones((1, 1, PLACES, PLACES), np.float32)  # which is no parameter
    return drawn(rng, shapes) | {"h.0.attn.bias": mask}, config


def drawn(rng, shapes):
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


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
    one, eps = config["model_type"] == "gemma", config["rms_norm_eps"]
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
            own, shared = slice(h * HEAD, (h + 1) * HEAD), h // (HEADS // KV)
            other = slice(shared * HEAD, (shared + 1) * HEAD)
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
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return x * a[name + ".weight"] + a[name + ".bias"]

    x = a["wte.weight"][TOKENS] + a["wpe.weight"][: len(TOKENS)]
    for n in range(LAYERS):
        q, k, v = np.split(dense(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn"), 3, axis=1)
        heads = [attend(*(part[:, 3 * h : 3 * h + 3] for part in (q, k, v))) for h in range(HEADS)]
        x = x + dense(np.hstack(heads), f"h.{n}.attn.c_proj")
        x = x + dense(gelu(dense(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")), f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ a["wte.weight"].T


def file_of(layout):
    rng = np.random.default_rng(0)
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
@pytest.mark.long_cases("gpt2", "llama untied")
def test_a_loaded_model_computes_what_plain_numpy_does_and_is_saved_as_it_was(layout, tmp_path):
    arrays, config = file_of(layout)
    expected = (gpt2_logits if layout == "gpt2" else gated_logits)(arrays, config)
    folder = written(tmp_path / "first", arrays, config)
    np.testing.assert_allclose(logits_of(folder), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    checkpoints.save(tmp_path / "second", *checkpoints.load(folder))
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == {name for name in arrays if not name.endswith(".attn.bias")}
    assert all(np.array_equal(array, arrays[name]) for name, array in again.items())
    found = json.loads((tmp_path / "second" / "config.json").read_text())
    assert checkpoints.architecture(found) == checkpoints.architecture(config)
    if layout == "llama":  # as newer versions of transformers write it
        newer = {"rope_parameters": {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}}
        assert checkpoints.architecture(config | newer).theta == 500.0


@pytest.mark.long
def test_lora_starts_as_the_base_and_is_saved_within_the_kernels(tmp_path):
    folder = written(tmp_path / "base", *file_of("llama"))
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
    arrays, config = file_of("llama")
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


def test_another_architecture_is_refused_by_name(tmp_path):
    for layout, change, said in (
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
    ):
        arrays, config = file_of(layout)
        config |= {name: value for name, value in change.items() if "." not in name}
        arrays |= {name: value for name, value in change.items() if "." in name}
        kept = {name: value for name, value in arrays.items() if value is not None}
        with pytest.raises(ValueError, match=said):
            checkpoints.load(written(tmp_path, kept, config))
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


def test_sizes_that_do_not_fit_are_refused():
    good = dict(vocabulary=5, width=8, layers=1, heads=4, kv_heads=4, head_width=2, hidden=8, positions=4)
    for change, said in (
        ({"family": "rwkv"}, "family must be one of"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"head_width": 3}, "head_width must be even"),
        ({"family": "gpt2", "kv_heads": 2}, "gpt2 needs kv_heads = heads"),
    ):
        with pytest.raises(ValueError, match=said):
            Architecture(**(good | change))
    graphdef, params = fresh(Architecture(**good), jax.random.key(0))
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        nnx.merge(graphdef, params)(jnp.arange(5))


# ------------------------------------------------------------------ the table of many runs

RESULT = dict(base_test_loss=1.9, test_loss=1.8, delta=1e-5, steps=25, noise_multiplier=0.9, units=140)
RESULT |= dict(parameters=1000, trained=100, exposure=1.5, members=400, others=300)
RESULT |= {"unreleased_membership_" + name: 0.5 for name in ("tpr_at_0.01", "tpr_at_0.001", "area")}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The settings of the runs that were made."""
    seen = []

    def run(settings, **options):
        seen.append(settings)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return RESULT | {"epsilon": settings.epsilon}

    monkeypatch.setattr(table, "run", run)
    monkeypatch.setattr(table, "small_base", lambda *arguments, **options: tmp_path / "base")
    return seen


def test_an_interrupted_table_continues_where_it_was(made, tmp_path, undrawn):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        table.main(["--rows", str(file)])
    assert len(table.rows_in(file)) == 4
    assert table.main(["--rows", str(file)]) == 0
    assert len(table.rows_in(file)) == 54 and len(made) == 5 + 50
    assert table.main(["--rows", str(file)]) == 0 and len(made) == 5 + 50
    finished = made[:4] + made[5:]
    assert len({settings.seed for settings in finished}) == 54  # two runs with one key would share their noise
    page = (tmp_path / "rows.md").read_text()
    assert page.count("\n| DP-") == 18 and "54 of 54 runs" in page and "100 modules" in page
    assert "| DP-Adam, LoRA 4 | 100 | 1.000 | 0.900 | 1.8000 (1.8000 to 1.8000) |" in page
    assert max(map(len, page[: page.index("| |")].splitlines())) <= 120


def test_no_run_is_started_after_the_time_is_over(made, tmp_path, undrawn):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="no run is finished"):
        table.main(["--rows", str(file), "--minutes", "-1"])
    assert not made
    row = RESULT | dict(name="one", optimizer="sgd", rank=0, asked="8.0", seed=2, epsilon=7.9999, date="2026-11-24")
    file.write_text(json.dumps(row | {"versions": {"dpx": "1"}}) + "\n")
    assert table.main(["--rows", str(file), "--page"]) == 0 and not made
    assert "DP-SGD, full | 100 | 8.000 |" in (tmp_path / "rows.md").read_text()
    assert table.EPSILONS[-1] == math.inf
    with pytest.raises(KeyboardInterrupt):
        table.main(["--rows", str(file), "--only", "300 units"])
    assert {(settings.units, settings.lora_rank) for settings in made} == {(300, 0)}


def test_runs_of_two_corpora_are_no_table(tmp_path, undrawn):
    row = RESULT | dict(optimizer="sgd", rank=0, asked="8.0", epsilon=7.9999, date="2026-11-24", versions={"dpx": "1"})
    other = {"units": 150}, {"base_test_loss": 1.8}, {"few": 300, "units": 340}
    pages = [[row | {"name": "one", "seed": 0}, row | change | {"name": "two", "seed": 1}] for change in other]
    assert table.page(pages.pop())
    for rows in pages:
        with pytest.raises(ValueError, match="one base model and one corpus, got 2"):
            table.page(rows)
