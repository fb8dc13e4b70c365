"""Features that are whitened by the second moments of PUBLIC images, on which few private steps suffice.

Plain gradient descent needs many steps along the directions in which features vary little, and a private run has few
steps. The covariance C of the features of public images is close enough to that of the private ones: a feature vector x
becomes (C + ridge I)^(-1/2) (x - mean), scaled to a fixed norm for each example by itself. Mean and C are functions of
public images alone, so they cost no privacy. For a linear model, the same could be written as fixed coordinates of its
gradient, but features are transformed once and not at every step.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import scipy.linalg

from examples import data, features
from examples.data import Dataset
from examples.patches import VERSION as PATCHES_VERSION
from examples.patches import patches_of
from examples.random_images import VERSION as RANDOM_VERSION
from examples.random_images import random_images

RANDOM = "random_images"
PUBLIC = (RANDOM, f"{RANDOM}+mnist5k")
RANDOM_COUNT = 8000
RIDGE = 0.3  # relative to the mean variance of a feature
SEED = 0  # of the random images; public
ROWS, BATCH = 2000, 250  # so many images are whitened at once, and get features at once
VERSION = 1  # of the numbers, those of scattering included; part of the cache's key


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
    matrix = np.asarray(scipy.linalg.solve_triangular(factor, np.eye(len(mean)), lower=True)).T
    return Whitening(mean, np.ascontiguousarray(matrix, np.float32))


def public_images(name: str, dataset: Dataset) -> list[np.ndarray]:
    """The public images of one of `PUBLIC`, of the data set's height, width and channels."""
    if name not in PUBLIC:
        raise ValueError(f"whitening must be one of {', '.join(PUBLIC)}; got {name!r}")
    others = name.split("+")[1:]
    if others and {*others, dataset.name} <= data.NIST:
        raise ValueError(f"whitening must use images of other people than the private {dataset.name}, got {name}")
    height, width, channels = dataset.train_images.shape[1:]
    found = [random_images(RANDOM_COUNT, height, width, channels, seed=SEED)]
    for other in others:
        real = data.as_float(data.load(other).train_images).repeat(channels, 3)
        found.append(np.asarray(jax.image.resize(real, (len(real), height, width, channels), "linear")))
    return found


def with_whitening(dataset: Dataset, name: str, cache_dir: str | Path, *, progress: bool = True) -> Dataset:
    """The data set with whitened patch features for images, float16 (N, 1, 1, d), kept on disk."""

    def roots(images: np.ndarray) -> np.ndarray:
        return features.compute(images, progress=progress, features_of=features.roots_of)

    @functools.cache
    def fitted() -> tuple[Callable[[np.ndarray], np.ndarray], Whitening]:
        planes = np.concatenate([roots(images) for images in public_images(name, dataset)])
        patches = patches_of(planes)
        features_of = jax.jit(lambda planes: patches(planes))

        def described(planes: np.ndarray) -> np.ndarray:
            starts = range(0, len(planes), BATCH)
            return np.concatenate([features_of(planes[start : start + BATCH].astype(np.float32)) for start in starts])

        return described, whitening_of(described(planes))

    def whitened(images: np.ndarray) -> np.ndarray:
        described, whitening = fitted()
        return whitening(described(roots(images)))

    settings = f"{name}-random{RANDOM_VERSION}-{RANDOM_COUNT}-{SEED}-patches{PATCHES_VERSION}-v{VERSION}-ridge{RIDGE}"
    parts = {"train_images": dataset.train_images, "test_images": dataset.test_images}
    found = {
        part: features.kept(
            functools.partial(whitened, images),
            images,
            f"{dataset.name}-{part}-whitened-{name}",
            settings,
            Path(cache_dir),
        )
        for part, images in parts.items()
    }
    return replace(dataset, train_images=found["train_images"], test_images=found["test_images"])
