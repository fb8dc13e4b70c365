"""Features that are whitened by the second moments of PUBLIC images, on which few private steps suffice.

Plain gradient descent needs many steps along the directions in which features vary little, and a private run has few
steps. The covariance C of the features of public images is close enough to that of the private ones: a feature vector x
becomes (C + ridge I)^(-1/2) (x - mean), scaled to a fixed norm for each example by itself. Mean and C are functions of
public images alone, so they cost no privacy. For a linear model, the same could be written as fixed coordinates of its
gradient, but features are transformed once and not at every step.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import scipy.linalg

from examples import data, features
from examples.data import Dataset
from examples.random_images import VERSION, random_images

RANDOM = "random_images"
PUBLIC = (RANDOM, f"{RANDOM}+mnist5k")
RANDOM_COUNT = 8000
RIDGE = 0.1  # relative to the mean variance of a feature
SEED = 0  # of the random images; public
ROWS = 2000  # features of so many images are transformed at once


class Whitening(NamedTuple):
    """x -> (x - mean) @ matrix, then to the norm sqrt(d). mean: float32 (d,). matrix: float32 (d, d)."""

    mean: np.ndarray
    matrix: np.ndarray

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Features (N, d), any float dtype, to whitened features (N, 1, 1, d), float16."""
        output = np.empty((len(rows), 1, 1, len(self.mean)), np.float16)
        for start in range(0, len(rows), ROWS):
            white = (rows[start : start + ROWS].astype(np.float32) - self.mean) @ self.matrix
            lengths = np.sqrt((white**2).mean(1, keepdims=True))
            output[start : start + ROWS, 0, 0] = white / np.maximum(lengths, np.float32(1e-6))
        return output


def whitening_of(public: np.ndarray) -> Whitening:
    """The whitening by features of public images, (N, d).

    The matrix comes from a Cholesky factor. It differs from (C + ridge I)^(-1/2) by a rotation only, which changes
    neither norms nor the distribution of the noise.
    """
    rows = public.astype(np.float32)
    mean = rows.mean(0)
    rows -= mean
    covariance = (rows.T @ rows / np.float32(len(rows))).astype(np.float64)
    covariance[np.diag_indices(len(mean))] += RIDGE * np.trace(covariance) / len(mean)
    factor = scipy.linalg.cholesky(covariance, lower=True)
    matrix = scipy.linalg.solve_triangular(factor, np.eye(len(mean)), lower=True).T
    return Whitening(mean, np.ascontiguousarray(matrix, np.float32))


def public_images(name: str, dataset: Dataset) -> list[np.ndarray]:
    """The public images of one of `PUBLIC`, of the data set's height, width and channels."""
    if name not in PUBLIC:
        raise ValueError(f"whitening must be one of {', '.join(PUBLIC)}; got {name!r}")
    height, width, channels = dataset.train_images.shape[1:]
    found = [random_images(RANDOM_COUNT, height, width, channels, seed=SEED)]
    for other in name.split("+")[1:]:
        if {other, dataset.name} <= data.NIST:
            raise ValueError(f"whitening must use images of other people than the private {dataset.name}, got {other}")
        real = data.as_float(data.load(other).train_images)
        shape = len(real), height, width, channels
        found.append(np.asarray(jax.image.resize(real.repeat(channels, 3), shape, "linear")))
    return found


def with_whitening(dataset: Dataset, name: str, cache_dir: str | Path, *, progress: bool = True) -> Dataset:
    """The data set with whitened square roots of scattering features for images, (N, 1, 1, d), kept on disk."""

    def roots(images: np.ndarray) -> np.ndarray:
        found = features.compute(images, progress=progress, features_of=features.roots_of)
        return found.reshape(len(images), -1)

    @functools.cache
    def whitening() -> Whitening:
        return whitening_of(np.concatenate([roots(images) for images in public_images(name, dataset)]))

    random = f"{RANDOM}-v{VERSION}-{RANDOM_COUNT}-{SEED}"
    settings = f"whitened-v1-{name}-{random}-ridge{RIDGE}-scattering-v{features.VERSION}"
    parts = {"train_images": dataset.train_images, "test_images": dataset.test_images}
    found = {}
    for part, images in parts.items():
        title = f"{dataset.name}-{part}-whitened-{name}"
        make = functools.partial(lambda images: whitening()(roots(images)), images)
        found[part] = features.kept(make, images, title, settings, Path(cache_dir))
    return replace(dataset, **found)
