"""The loaders: bundled sets, idx files whole and broken, a tensorflow-datasets set that the test makes itself."""

import gzip
import io
import struct

import numpy as np
import pytest
from scipy.io import savemat

from examples import data, local_files


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, arrays, *, prefix="", ending="", test="t10k"):
    folder.mkdir(parents=True, exist_ok=True)
    stems = ("train-images-idx3", "train-labels-idx1", f"{test}-images-idx3", f"{test}-labels-idx1")
    paths = [folder / f"{prefix}{stem}-ubyte{ending}" for stem in stems]
    for path, array in zip(paths, arrays, strict=True):
        content = idx_bytes(array)
        path.write_bytes(gzip.compress(content) if ending == ".gz" else content)
    return paths


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (count, 6, 5), dtype=np.uint8) for count in (12, 7)]
    labels = [np.arange(count, dtype=np.uint8) % 10 for count in (12, 7)]
    return images[0], labels[0], images[1], labels[1]


def test_digits_have_a_fixed_split():
    digits = data.load("digits")
    assert digits.train_images.shape == (1437, 8, 8, 1) and digits.test_images.shape == (360, 8, 8, 1)
    assert digits.train_images.dtype == np.float32 and digits.train_images.max() == 1
    assert digits.train_labels[:8].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    rows = {image.tobytes() for image in digits.train_images} & {image.tobytes() for image in digits.test_images}
    assert not rows
    assert np.bincount(digits.test_labels).min() > 20


def test_mnist5k_is_split_and_has_every_class():
    mnist = data.load("mnist5k")
    assert mnist.train_images.shape == (4000, 28, 28, 1) and mnist.test_images.shape == (1000, 28, 28, 1)
    assert np.bincount(mnist.test_labels, minlength=10).min() > 70


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("subfolder", ["", "fashion_mnist", "fashion-mnist"])
def test_idx_files_are_read(tmp_path, arrays, ending, subfolder):
    write_idx(tmp_path / subfolder, arrays, ending=ending)
    loaded = data.load("fashion_mnist", tmp_path)
    np.testing.assert_array_equal(loaded.train_images[..., 0], arrays[0])
    np.testing.assert_array_equal(loaded.train_labels, arrays[1])
    np.testing.assert_array_equal(loaded.test_images[..., 0], arrays[2])
    np.testing.assert_array_equal(loaded.test_labels, arrays[3])
    assert loaded.train_images.dtype == np.uint8 and loaded.classes == 10


def test_emnist_is_turned_upright(tmp_path, arrays):
    write_idx(tmp_path, arrays, prefix="emnist-balanced-", test="test")
    loaded = data.load("emnist", tmp_path)
    np.testing.assert_array_equal(loaded.train_images[..., 0], arrays[0].swapaxes(1, 2))
    assert loaded.classes == 47


def test_the_usual_places_are_searched(tmp_path, arrays, monkeypatch):
    monkeypatch.setattr(data, "SEARCH", (tmp_path / "nothing", tmp_path))
    write_idx(tmp_path / "fashion-mnist", arrays, ending=".gz")
    assert len(data.load("fashion_mnist").train_images) == 12


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_truncated_file_is_named(tmp_path, arrays, broken, ending):
    path = write_idx(tmp_path, arrays, ending=ending)[broken]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=path.name):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"\0\0\x08\x03", b"not an idx file at all", idx_bytes(np.zeros(3, "u1")) + b"x"]
)
def test_a_file_that_is_not_idx_is_named(tmp_path, arrays, content):
    path = write_idx(tmp_path, arrays)[0]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name):
        data.load("mnist", tmp_path)


def test_a_flipped_byte_in_a_gzipped_file_is_noticed(tmp_path, arrays):
    path = write_idx(tmp_path, arrays, ending=".gz")[2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=path.name):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: (a[0][:5], a[1], a[2], a[3]),
        lambda a: (a[0], a[1], a[2], a[3] + np.uint8(100)),
        lambda a: (a[0][:0], a[1][:0], a[2], a[3]),
        lambda a: (a[1], a[1], a[2], a[3]),
    ],
    ids=["fewer images than labels", "label out of range", "empty", "labels for images"],
)
def test_files_that_do_not_fit_are_refused(tmp_path, arrays, change):
    write_idx(tmp_path, change(arrays))
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


@pytest.mark.parametrize("name", ["fashion_minst", "", "two words", "../digits", "cifar10/none"])
def test_an_unknown_set_lists_the_known(name):
    with pytest.raises(ValueError, match=f"unknown data set '{name}'; known: digits, mnist5k, mnist"):
        data.load(name)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((0, 2, 2, 1), np.uint8), np.zeros(0, np.int32), "empty"),
        (np.full((3, 2, 2, 1), np.nan, np.float32), np.zeros(3, np.int32), "NaN"),
        (np.full((3, 2, 2, 1), 2, np.float32), np.zeros(3, np.int32), r"\[0, 1\]"),
        (np.zeros((3, 2, 2, 1), np.float32), np.full(3, 4, np.int32), r"\[0, 4\)"),
        (np.zeros((3, 2, 2, 1), np.float32), np.full(3, -1, np.int32), r"\[0, 4\)"),
        (np.zeros((3, 2, 2), np.float32), np.zeros(3, np.int32), "height, width, channels"),
        (np.zeros((3, 2, 2, 1), np.float32), np.zeros(2, np.int32), r"\(N,\)"),
        (np.zeros((3, 2, 2, 1), np.float64), np.zeros(3, np.int32), "float64"),
        (np.zeros((3, 2, 2, 1), np.float32), np.zeros(3, np.float32), "integers"),
    ],
)
def test_unfit_data_is_refused(images, labels, said):
    good = dict(test_images=np.zeros((1, 2, 2, 1), np.uint8), test_labels=np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=said):
        data.Dataset(name="toy", classes=4, train_images=images, train_labels=labels, **good)


PREPARED = {"toy": "1.0.0", "cifar10": "3.0.2", "cifar100": "3.0.2", "svhn_cropped": "3.1.0"}  # and their versions


def labels_of(name, number):
    """The labels of the published data sets, beside which cifar100 has those of 20 groups."""
    if name == "cifar100":
        return {"label": 7 * number % 100, "coarse_label": number % 20, "id": f"train_{number}"}
    return {"label": number % 4} | ({"id": f"train_{number}"} if name == "cifar10" else {})


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_tfds_set_is_read(tmp_path, name):
    tfds = pytest.importorskip("tensorflow_datasets")
    from PIL import Image

    side = 8 if name == "toy" else 32
    sizes = {"train": 12, "test": 5} | ({"extra": 3} if name == "svhn_cropped" else {})
    random = np.random.default_rng(0)
    images = {part: random.integers(0, 256, (count, side, side, 3), dtype=np.uint8) for part, count in sizes.items()}

    def png(image):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        file.seek(0)
        return file

    def info(self):  # the features of the published data sets
        features = {"image": tfds.features.Image(shape=(side, side, 3))}
        features["label"] = tfds.features.ClassLabel(num_classes=100 if name == "cifar100" else 10)
        if name == "cifar100":
            features["coarse_label"] = tfds.features.ClassLabel(num_classes=20)
        if name in ("cifar10", "cifar100"):
            features["id"] = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def examples(self, part):
        for number, image in enumerate(images[part]):
            yield number, {"image": png(image)} | labels_of(name, number)

    def splits(self, dl_manager):
        return {part: self._generate_examples(part) for part in images}

    builder = type(
        name.title().replace("_", ""),
        (tfds.core.GeneratorBasedBuilder,),
        {
            "VERSION": tfds.core.Version(PREPARED[name]),
            "name": name,
            "__module__": __name__,
            "_info": info,
            "_split_generators": splits,
            "_generate_examples": examples,
        },
        skip_registration=True,
    )
    builder(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    loaded = data.load(name, tmp_path)
    assert loaded.classes == (100 if name == "cifar100" else 10)
    for part, found, labels in (
        ("train", loaded.train_images, loaded.train_labels),
        ("test", loaded.test_images, loaded.test_labels),
    ):
        numbers = {image.tobytes(): number for number, image in enumerate(images[part])}
        order = [numbers[image.tobytes()] for image in found]
        assert sorted(order) == list(range(sizes[part]))
        assert labels.tolist() == [labels_of(name, number)["label"] for number in order]


def write_cifar(folder, name, random):
    """The binary version, two images a file: images (N, 32, 32, 3) and labels in the order of the files."""
    files, labels = local_files.FILES[name], 2 if name == "cifar100" else 1
    folder.mkdir(parents=True)
    images, classes = [], []
    for file in (*files.train, *files.test):
        own, numbers = random.integers(0, 256, (2, 32, 32, 3), np.uint8), random.integers(0, 10, (2, labels), np.uint8)
        planes = np.stack([own[..., channel].reshape(2, -1) for channel in range(3)], 1).reshape(2, -1)
        (folder / file).write_bytes(np.concatenate([numbers, planes], 1).tobytes())
        images.append(own)
        classes.append(numbers[:, -1])
    return np.concatenate(images), np.concatenate(classes)


@pytest.mark.parametrize(("name", "sub"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar100")])
def test_cifars_binary_files_are_read(tmp_path, name, sub):
    images, classes = write_cifar(tmp_path / sub, name, np.random.default_rng(0))
    loaded = data.load(name, tmp_path)
    np.testing.assert_array_equal(np.concatenate([loaded.train_images, loaded.test_images]), images)
    np.testing.assert_array_equal(np.concatenate([loaded.train_labels, loaded.test_labels]), classes)
    assert len(loaded.test_images) == 2 and loaded.classes == (10 if name == "cifar10" else 100)
    path = tmp_path / sub / local_files.FILES[name].test[0]
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
    rng = np.random.default_rng(0)
    arrays = dict(
        train_features=rng.normal(size=(6, 5)).astype(np.float32),
        train_labels=np.arange(6) % 3,
        test_features=rng.normal(size=(4, 5)).astype(np.float32),
        test_labels=np.arange(4) % 3,
    )
    with pytest.raises(FileNotFoundError, match="toy.npz is not on this machine.(.|\\n)*SimCLR"):
        data.load("features:toy", tmp_path)
    np.savez(tmp_path / "toy.npz", **arrays)
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
        np.savez(tmp_path / "toy.npz", **arrays | change)
        with pytest.raises(ValueError, match=said):
            data.load("features:toy", tmp_path)
    for content in (b"no", (tmp_path / "toy.npz").read_bytes()[:-40]):
        (tmp_path / "toy.npz").write_bytes(content)
        with pytest.raises(ValueError, match="toy.npz: must be a file of numpy.savez"):
            data.load("features:toy", tmp_path)


@pytest.mark.skipif(data.find_idx("fashion_mnist", None) is None, reason="needs Debian's dataset-fashion-mnist")
def test_the_real_fashion_mnist():
    fashion = data.load("fashion_mnist")
    assert fashion.train_images.shape == (60000, 28, 28, 1) and fashion.test_images.shape == (10000, 28, 28, 1)
    assert np.bincount(fashion.train_labels).tolist() == [6000] * 10
