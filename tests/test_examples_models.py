"""The networks of examples/: their sizes, their checkpoints against an oracle, and what a text model writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import linen
from safetensors.numpy import load_file, save_file

import dpx
from examples import generation, generation_metrics, language_models, models, text_data, vit
from examples.config import Config
from examples.tasks import TASKS
from tests.problems import dp_sgd

COUNTS = {
    ("linear", (28, 28, 1)): 7850,
    ("linear", (7, 7, 81)): 39700,
    ("linear_from_zero", (7, 7, 81)): 39700,
    ("mlp", (8, 8, 1)): 9610,
    ("digits_cnn", (8, 8, 1)): 9258,
    ("adadpigu_cnn", (28, 28, 1)): 26010,
    ("adadpigu_cnn_printed", (28, 28, 1)): 46490,
    ("adadpigu_cifar_cnn", (32, 32, 3)): 74362,
    ("end_to_end_cnn", (32, 32, 3)): 550570,
    ("end_to_end_cnn", (28, 28, 1)): 435306,
    ("scatter_cnn", (7, 7, 81)): 33066,
    ("scatter_cifar_cnn", (8, 8, 243)): 187210,
    ("resnet20", (32, 32, 3)): 272474,
    ("vit_small", (32, 32, 3)): 21669514,
    ("vit_miniature", (32, 32, 3)): 4570,
    ("d2p2_cnn", (32, 32, 3)): 37642,
    ("d2p2_cnn", (28, 28, 1)): 37354,
}


@pytest.mark.parametrize(("name", "shape"), COUNTS)
@pytest.mark.long_cases("adadpigu_cifar", "adadpigu_cnn_printed", "d2p2", "end_to_end", "resnet20", "scatter", "vit_")
def test_parameter_count_and_logits(name, shape):
    """The numbers of parameters that the papers print."""
    assert {name for name, _ in COUNTS} == set(models.MODELS)
    model = models.build(name, input_shape=shape, classes=10)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert models.parameter_count(params) == COUNTS[name, shape]
    assert jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct(shape, jnp.float32)).shape == (10,)


@pytest.mark.parametrize("name", ["mlp", "digits_cnn"])
@pytest.mark.long_cases("digits_cnn")
def test_per_example_gradients_and_activations(name):
    images = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))
    outputs = {}
    for activation in models.ACTIVATIONS:
        model = models.build(name, input_shape=(8, 8, 1), classes=4, activation=activation)

        def logits_and_gradients(image, model=model):
            params = model.init(jax.random.key(1))
            return model.apply(params, image), jax.grad(lambda params: model.apply(params, image)[0])(params)

        outputs[activation], grads = jax.jit(jax.vmap(logits_and_gradients))(images)
        grads = map(np.asarray, jax.tree.leaves(grads))
        assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in grads)
    assert not np.allclose(outputs["tanh"], outputs["relu"])


def test_the_seed_decides_the_parameters():
    model = models.build("mlp", input_shape=(2, 2, 1), classes=3)
    first, again, other = (jax.tree.leaves(model.init(jax.random.key(seed))) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again)) and not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
def test_pooling_is_that_of_flax(size):
    image = jnp.asarray(np.random.default_rng(0).random((*size, 3), dtype=np.float32))
    for stride in (1, 2):
        expected = linen.max_pool(image, (2, 2), strides=(stride, stride))
        np.testing.assert_array_equal(models.max_pool(stride)(image), expected)
    windows = linen.pooling.pool(image, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID") / 4
    np.testing.assert_allclose(models.average_pool(image), windows, rtol=1e-6)


def test_bad_names_and_sizes():
    for name, size, change, said in (
        ("resnet", 8, {}, "unknown model 'resnet'; known: linear"),
        ("mlp", 8, {"activation": "gelu"}, "unknown activation 'gelu'"),
        ("adadpigu_cnn", 8, {}, r"\(8, 8, 1\) are too small for the model 'adadpigu_cnn'"),
        ("end_to_end_cnn", 4, {}, "too small"),
    ):
        with pytest.raises(ValueError, match=said):
            models.build(name, input_shape=(size, size, 1), classes=10, **change)


# ------------------------------------------------------------------ ViT-small

TINY = vit.Sizes(layers=2, features=12, heads=3, patch=4, side=8)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = vit.shapes_of(TINY, 5)
    return {name: np.asarray(rng.normal(0.1, 0.3, shape), np.float32) for name, shape in shapes.items()}


def oracle(params, image):
    """The network in NumPy, head by head."""

    def dense(name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def normalized(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    kernel = params["patch_embed.proj.weight"]
    x = [params["cls_token"][0, 0]]
    for row in (0, 4):
        for column in (0, 4):
            patch = image[row : row + 4, column : column + 4].transpose(2, 0, 1)
            x.append((kernel * patch).sum((1, 2, 3)) + params["patch_embed.proj.bias"])
    x = np.stack(x) + params["pos_embed"][0]
    for layer in range(2):
        query, keys, values = np.split(dense(f"blocks.{layer}.attn.qkv", normalized(f"blocks.{layer}.norm1", x)), 3, 1)
        heads = []
        for head in range(3):
            own = slice(4 * head, 4 * head + 4)
            heads.append(scipy.special.softmax(query[:, own] @ keys[:, own].T / 2, axis=1) @ values[:, own])
        x = x + dense(f"blocks.{layer}.attn.proj", np.concatenate(heads, 1))
        hidden = dense(f"blocks.{layer}.mlp.fc1", normalized(f"blocks.{layer}.norm2", x))
        x = x + dense(f"blocks.{layer}.mlp.fc2", hidden * scipy.special.ndtr(hidden))
    return dense("head", normalized("norm", x))[0]


def test_loaded_parameters_give_the_oracles_logits(params, tmp_path):
    shapes = vit.shapes_of(vit.SMALL, 1000)
    assert sum(np.prod(shape) for shape in shapes.values()) == 22_050_664  # as timm counts them
    assert len(shapes) == 152 and shapes["pos_embed"] == (1, 197, 384)
    file = tmp_path / "model.safetensors"
    save_file(params, file)
    model, image = vit.vit(5, file, TINY), np.random.default_rng(1).uniform(-1, 1, (8, 8, 3)).astype(np.float32)
    loaded = model.init(jax.random.key(0))
    np.testing.assert_allclose(jax.jit(model.apply)(loaded, image), oracle(params, image), rtol=2e-4, atol=2e-4)
    other = vit.load_vit(file, 7, TINY)  # another number of classes gets a new head
    assert other["head.weight"].shape == (7, 12) and not other["head.weight"].any()
    np.testing.assert_array_equal(other["norm.bias"], params["norm.bias"])


def test_bad_checkpoints_are_refused(params, tmp_path):
    with pytest.raises(FileNotFoundError, match="huggingface-cli download timm/vit_small"):
        vit.load_vit(tmp_path / "none.safetensors", 5)
    for model, error, said in (
        ("mlp", ValueError, "must be given with a model of vit_small"),
        ("vit_miniature", FileNotFoundError, "none"),
    ):
        options = {"checkpoint": str(tmp_path / "none")}
        config = Config(dataset="random:8x8x3x5", model=model, task_options=options, epsilon=1.0, seed=0)
        with pytest.raises(error, match=said):
            TASKS["images"].build(config, None, tmp_path, False)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not one at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        vit.load_vit(path, 5, TINY)
    for change, said in (
        ({"norm.bias": None}, "missing: norm.bias"),
        ({"dist_token": np.zeros((1, 1, 12), np.float32)}, "not ViT-small's: dist_token"),
        ({"pos_embed": np.zeros((1, 6, 12), np.float32)}, r"pos_embed must have shape \(1, 5, 12\), got \(1, 6, 12\)"),
        ({"norm.weight": np.full(12, np.nan, np.float32)}, "norm.weight must hold finite"),
        ({"norm.weight": np.ones(12, np.int32)}, "norm.weight must hold finite floating point numbers, got int32"),
    ):
        save_file({name: leaf for name, leaf in (params | change).items() if leaf is not None}, path)
        with pytest.raises(ValueError, match=said):
            vit.load_vit(path, 5, TINY)


@pytest.mark.long
def test_every_parameter_is_trained_on_images_of_another_size():
    model, image = vit.vit(4, None, TINY), jax.ShapeDtypeStruct((6, 6, 3), jnp.float32)
    shapes, label = jax.eval_shape(model.init, jax.random.key(1)), jax.ShapeDtypeStruct((), jnp.int32)
    optimizer = dp_sgd(dpx.FullBatch(examples=2))
    batch = dpx.Batch(jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), (image, label)), None)
    step = dpx.private_updates(models.loss_of(model), optimizer, norms="ghost")
    updates, _, _ = jax.eval_shape(step, shapes, batch, jax.eval_shape(optimizer.init, shapes))
    assert {name: leaf.shape for name, leaf in updates.items()} == vit.shapes_of(TINY, 4)


# ------------------------------------------------------------------ GPT-2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The names and shapes of Hugging Face's GPT-2, with numbers drawn in the order of the names."""
    folder, rng = tmp_path_factory.mktemp("gpt2"), np.random.default_rng(0)
    shapes = {"wte.weight": (11, 8), "wpe.weight": (8, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    for layer in ("h.0.", "h.1."):
        for part, fan_in, fan_out in (("attn.c_attn", 8, 24), ("attn.c_proj", 8, 8), ("mlp.c_fc", 8, 32)):
            shapes |= {f"{layer}{part}.weight": (fan_in, fan_out), f"{layer}{part}.bias": (fan_out,)}
        shapes |= {f"{layer}mlp.c_proj.weight": (32, 8), f"{layer}mlp.c_proj.bias": (8,)}
        shapes |= {f"{layer}ln_{n}.{kind}": (8,) for n in (1, 2) for kind in ("weight", "bias")}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in sorted(name for name in shapes if not name.endswith("c_attn.bias")):
        arrays[name] = rng.normal(0, 0.3, shapes[name]).astype(np.float32)
    stored = {f"transformer.{name}": array for name, array in arrays.items()}
    stored["transformer.h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)  # the causal mask, in old files
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"n_head": 2}))
    return folder


@pytest.mark.long
def test_gpt2_gives_the_logits_of_transformers(checkpoint):
    model, params = language_models.load_gpt2(checkpoint)
    logits = jax.jit(model.apply)(params, np.array([1, 7, 3, 0, 10]))
    last = [0.0596674, -0.1816849, 0.4968551, -0.4952898, -0.9133398, 0.3855578, 0.2860351, 0.6028985, 0.4757746]
    np.testing.assert_allclose(logits[-1], [*last, 0.4664382, -0.3776467], atol=1e-5)  # transformers 4, in torch
    np.testing.assert_allclose(logits[:, 2], [0.6835289, 0.1627277, 0.6992664, 0.8473243, 0.4968551], atol=1e-5)
    _, with_lora = language_models.load_gpt2(checkpoint, lora_rank=2)
    added = {"lora_a": (8, 2), "lora_b": (2, 24)}
    assert {name: with_lora["h_0"]["attn"]["c_attn"][name].shape for name in added} == added
    np.testing.assert_array_equal(with_lora["h_1"]["mlp"]["c_fc"]["weight"], params["h_1"]["mlp"]["c_fc"]["weight"])


def test_other_checkpoints_are_refused(checkpoint, tmp_path):
    for name, array, said in (
        ("h.1.ln_1.bias", np.zeros(9, np.float32), r"h.1.ln_1.bias: \(9,\), needs \(8,\)"),
        ("h.0.extra", np.zeros(1, np.float32), "h.0.extra: .*needs none such"),
        ("wte.weight", None, "wte.weight is missing"),
        ("h.0.mlp.c_fc.bias", None, "h.0.mlp.c_fc.bias: missing"),
    ):
        stored = load_file(checkpoint / "model.safetensors") | {f"transformer.{name}": array}
        kept = {key: value for key, value in stored.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            language_models.load_gpt2(tmp_path)
    with pytest.raises(FileNotFoundError, match="hf download openai-community/gpt2 model.safetensors tokenizer.json"):
        language_models.load_gpt2(tmp_path / "none")
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="tokenizer.json is not on this machine"):
        text_data.BytePairs(tmp_path)


def language(folder, examples, **sizes):
    sizes = dict(vocabulary=8, width=4, layers=1, heads=2, length=8) | sizes
    options = dict(noise_multiplier=1.0, task="language", model="gpt2_mini", task_options=sizes)
    return TASKS["language"].build(Config(dataset=f"random:{examples}", seed=1, **options), None, folder, False)


@pytest.mark.long
def test_private_texts_choose_no_number_before_training(tmp_path, monkeypatch, promoting):
    """Vocabulary and first parameters of the small GPT-2 come from public pairs, and a text is encoded by itself."""
    public = [("red", "a red thing"), ("blue", "a blue thing")]

    def begun(train):
        pairs = text_data.Pairs(name="made", public=public, train=train, test=[("red", ["a red thing"])])
        monkeypatch.setattr(text_data, "load_pairs", lambda name, data_dir: pairs)
        task = language(tmp_path, 3, pretrain=1)
        return task.init(jax.random.key(0)), task.train[0][0]

    private = [("blue", "a blue secret"), ("red", "a red thing")]
    (params, tokens), (others, same) = map(begun, (private, private[:1]))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, others)) and (tokens == same).all()


@pytest.mark.long
def test_lora_trains_nothing_else(tmp_path, promoting, undrawn):
    task = language(tmp_path, 12, vocabulary=12, pretrain=0, length=12, lora_rank=2)
    params = task.init(jax.random.key(0))
    assert list(tmp_path.glob("gpt2-mini-*.npz"))  # the public part is trained on once
    again = task.init(jax.random.key(1))
    moved = jax.tree_util.tree_map_with_path(lambda path, a, b: bool((a != b).any()), params, again)
    flags = {jax.tree_util.keystr(path): flag for path, flag in jax.tree_util.tree_leaves_with_path(moved)}
    assert {path for path, flag in flags.items() if flag} == {"['h_0']['attn']['c_attn']['lora_a']"}
    assert task.trained is language_models.is_lora and task.examples == 12
    # Padding counts nothing: the loss of a short target is not changed by the tokens behind its end.
    tokens, counted = (array[0] for array in task.train)
    other = np.where((np.arange(12) > counted.nonzero()[0].max()), 5, tokens)
    loss = jax.jit(task.loss)
    assert (other != tokens).any() and loss(params, (tokens, counted)) == loss(params, (other, counted))


# ------------------------------------------------------------------ generation and its metrics


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_beams_find_the_likeliest_continuation(beams):
    """A first token of 0.6 leads to two of 0.5, one of 0.4 to one of 0.9: greedy takes the first, beams the second."""
    end, rows = 0, np.full((5, 5), 1e-6)
    rows[1, 2], rows[1, 3] = 0.6, 0.4
    rows[2, 0], rows[2, 4] = 0.4, 0.5
    rows[3, 0], rows[4, 0] = 0.9, 0.5
    logits = jnp.log(jnp.asarray(rows, jnp.float32))
    generate = generation.generator(lambda params, tokens: logits[tokens] + params, end=end, beams=beams, penalty=0)
    prompts = np.array([[4, 1, 0, 0, 0, 0], [2, 4, 1, 0, 0, 0]], np.int32)
    written = generate(np.float32(0), prompts, np.array([2, 3]))
    assert written == [[2, 4] if beams == 1 else [3]] * 2
    if beams == 1:
        avoiding = generation.generator(lambda params, tokens: logits[tokens] + params, end=end, avoid=2)
        assert avoiding(np.float32(0), prompts, np.array([2, 3])) == [[3]] * 2


def words(*texts):
    return [text.split() for text in texts]


def test_metrics_by_hand():
    metrics = generation_metrics
    output, reference = words("a b c d"), [words("a c d e f")]
    # Subsequence "a c d": precision 3/4, recall 3/5; the F-measure has beta 1.2.
    assert metrics.rouge_l(output, reference) == pytest.approx(2.44 * 0.45 / (0.6 + 1.44 * 0.75))
    # tf-idf of both references' words is ln 2: half of the first output's words fit, and it has no pair that fits.
    outputs, references = words("a x", "c d"), [words("a b"), words("c d")]
    assert metrics.cider(outputs, references) == pytest.approx(10 * (0.5 + 0 + 1 + 1) / (4 * 2))
    assert metrics.cider(words("a b z", "c d"), references) < metrics.cider(words("a b", "c d"), references) == 5
    pytest.importorskip("nltk")
    assert metrics.bleu(words("a b c d e"), [words("a b c d f")]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)
    # Words are 2 bits each among four; of a pair whose first word has come, the second is no news.
    assert metrics.nist(words("a b", "c d"), references) == pytest.approx(2)
    # 3 of 4 words in 2 runs: harmonic mean 3/4, penalty 1/2 (2/3)^3. "runs" and "run" have one stem.
    assert metrics.meteor(words("a b c d"), [words("a c d e")]) == pytest.approx(0.75 * (1 - 0.5 * (2 / 3) ** 3))
    assert metrics.meteor(words("he runs"), [words("he run")]) == metrics.meteor(words("he run"), [words("he run")])
    assert set(metrics.score(["", "A b."], [["a"], ["a b ."]])) == {"bleu", "nist", "meteor", "rouge_l", "cider"}
    with pytest.raises(ValueError, match="each output needs references"):
        metrics.score(["a"], [[]])
