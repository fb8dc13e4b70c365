"""Rows that hold one unit each, the loss of a unit, documents from files, and runs of examples.finetune."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dpx
from examples.finetune import __main__ as command
from examples.finetune import base, checkpoints, documents, training
from examples.finetune.model import Architecture, fresh
from examples.finetune.rows import Bytes, rows_of
from examples.finetune.writing import write_texts

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


def test_a_unit_is_clipped_as_one_and_moves_its_own_part_of_the_sum_only(model):
    """The sum without noise moves by exactly the clipped gradient of the unit that changed."""
    graphdef, params = model
    loss, clip = training.loss_of(graphdef), 0.05
    sampling = dpx.FullBatch(examples=4)
    mechanism = dpx.dp_sgd(clip_norm=clip, noise_multiplier=0.0, sampling=sampling, key=jax.random.key(0))
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
    for name, text in (
        ("ann/b.txt", "second"),
        ("ann/a.md", "first"),
        ("bob/c.txt", "third"),
        ("bob/x.bin", "no text"),
    ):
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"canaries": -1}, "canaries must be at least 0, got -1"),
        ({"units": -1}, "units must be at least 0, got -1"),
    ],
)
def test_misuse_is_refused(files, change, said):
    with pytest.raises(ValueError, match=said):
        settings_of(files, **change)


def test_texts_end_at_the_start_token_and_begin_with_the_prompt(model):
    graphdef, params = model
    write = lambda **change: write_texts(  # noqa: E731
        graphdef, params, Bytes(), **(dict(count=2, length=5, key=jax.random.key(0), prompt="ab") | change)
    )
    assert all(text.startswith("ab") for text in write()) and write() == write()
    for change in ({"count": 0}, {"temperature": 0.0}, {"prompt": "abcdef"}):
        with pytest.raises(ValueError, match="count must be at least 1, temperature above 0"):
            write(**change)


def test_the_small_base_is_made_once_from_public_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "standard_library", lambda: CORPUS)
    folder = base.small_base(tmp_path, sizes=TINY, steps=2)
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert base.small_base(tmp_path, sizes=TINY, steps=2) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert checkpoints.load(folder)[1] is not None
