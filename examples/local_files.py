"""CIFAR-10, CIFAR-100 and SVHN from the files that their authors publish, and features in a file of NumPy."""

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIDE = 32
PIXELS = 3 * SIDE * SIDE
Arrays = list[np.ndarray]  # training images, training labels, test images, test labels


@dataclass(frozen=True, kw_only=True)
class Files:
    """A data set in files. folder: as its authors' archive calls it. advice: where they are."""

    classes: int
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    part: Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]]
    advice: str

    def read(self, paths: Sequence[Path]) -> Arrays:
        """Images uint8 (N, 32, 32, 3) and labels int32 (N,), of the training files and of the test files."""
        split = len(self.train)
        return [*self.part(paths[:split]), *self.part(paths[split:])]


def find(name: str, roots: Sequence[Path]) -> list[Path] | None:
    """The training and then the test files of `name`, all in one folder of `roots`; None if they are not there."""
    if name not in FILES:
        return None
    files = FILES[name]
    for folder in (root / sub for root in roots for sub in (name, files.folder, ".")):
        paths = [folder / file for file in (*files.train, *files.test)]
        if all(path.is_file() for path in paths):
            return paths
    return None


def cifar(labels: int) -> Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]]:
    """Reads the binary version: `labels` bytes, the last of which is the class, then 32 x 32 reds, greens and blues."""

    def read(paths):
        rows = []
        for path in paths:
            data = np.fromfile(path, np.uint8)
            if len(data) == 0 or len(data) % (labels + PIXELS):
                raise ValueError(f"{path}: must hold rows of {labels + PIXELS} bytes, got {len(data)} bytes")
            rows.append(data.reshape(-1, labels + PIXELS))
        rows = np.concatenate(rows)
        images = rows[:, labels:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), rows[:, labels - 1].astype(np.int32)

    return read


def svhn(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Reads cropped digits in MATLAB's format, in which the digit 0 has the label 10."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    (path,) = paths
    try:
        found = loadmat(path)
        images, labels = found["X"], found["y"]
    except (ValueError, KeyError, TypeError, NotImplementedError, OSError, MatReadError) as error:
        raise ValueError(f"{path}: must be a MATLAB file with X and y: {error}") from error
    if images.dtype != np.uint8 or images.shape[:3] != (SIDE, SIDE, 3) or labels.size != images.shape[-1]:
        raise ValueError(
            f"{path}: X must be uint8 (32, 32, 3, N) and y (N, 1), got {images.dtype} {images.shape} and {labels.shape}"
        )
    return np.ascontiguousarray(np.moveaxis(images, 3, 0)), labels.reshape(-1).astype(np.int32) % 10


CIFAR = "the binary version from https://www.cs.toronto.edu/~kriz/cifar.html"
FILES = {
    "cifar10": Files(
        classes=10,
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        part=cifar(labels=1),
        advice=CIFAR,
    ),
    "cifar100": Files(  # two labels: one of 20 groups, and one of 100 classes
        classes=100,
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        part=cifar(labels=2),
        advice=CIFAR,
    ),
    "svhn_cropped": Files(
        classes=10,
        folder="svhn",
        train=("train_32x32.mat",),
        test=("test_32x32.mat",),
        part=svhn,
        advice="the cropped digits from http://ufldl.stanford.edu/housenumbers/",
    ),
}

FEATURE_ARRAYS = ("train_features", "train_labels", "test_features", "test_labels")
GET_FEATURES = """{file} is not on this machine. With the images, and a network trained on PUBLIC images, make it:
  numpy.savez("{file}", train_features=..., train_labels=..., test_features=..., test_labels=...)
with features (N, D) of floating point numbers and labels (N,) of integers, and name its folder with --data-dir. The
paper's are those of SimCLR v2 before its last layer, D = 4096; https://github.com/ftramer/Handcrafted-DP makes them."""


def read_features(path: Path) -> tuple[int, Arrays]:
    """The number of classes, and features as float16 (N, 1, 1, D) beside labels int32 (N,). Checks what GET_FEATURES
    asks for, and raises ValueError for a file that is not so."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in FEATURE_ARRAYS}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: must be a file of numpy.savez with {', '.join(FEATURE_ARRAYS)}: {error}") from error
    arrays = []
    for part in ("train", "test"):
        features, labels = found[f"{part}_features"], found[f"{part}_labels"]
        if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating) or labels.shape != features.shape[:1]:
            raise ValueError(
                f"{path}: {part}_features must be floating point (N, D) with {part}_labels (N,), "
                f"got {features.dtype} {features.shape} and {labels.shape}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.size == 0 or labels.min() < 0:
            raise ValueError(f"{path}: {part}_labels must be integers of at least 0, got {labels.dtype}")
        with np.errstate(over="ignore"):
            halves = features.astype(np.float16)[:, None, None]
        if not np.isfinite(halves).all():
            raise ValueError(f"{path}: {part}_features must be finite and below 65504 in absolute value")
        arrays += [halves, labels.astype(np.int32)]
    return 1 + max(int(arrays[1].max()), int(arrays[3].max())), arrays
