"""Features that are whitened by the second moments of PUBLIC images, on which few private steps suffice.

Plain gradient descent needs many steps along the directions in which features vary little, and a private run has few
steps. The covariance C of the features of public images is close enough to that of the private ones: a feature vector x
becomes (C + ridge I)^(-1/2) (x - mean), scaled to a fixed norm for each example by itself. Mean and C are functions of
public images alone, so they cost no privacy. For a linear model, the same could be written as fixed coordinates of its
gradient, but features are transformed once and not at every step.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from examples import data, features
from examples.data import Dataset
from examples.patches import CELLS, patches_of
from examples.patches import VERSION as PATCHES_VERSION
from examples.random_images import VERSION as RANDOM_VERSION
from examples.random_images import random_images

RANDOM = "random_images"
PUBLIC = (RANDOM, f"{RANDOM}+mnist5k")
RANDOM_COUNT = 16_000  # public images at least, and as many as two a direction
RIDGE = 0.3
SEED = 0  # of the random images; public
ROWS, BATCH = 2000, 16  # so many images are whitened at once, and get features at once
SHIFTS = ((0, 0), (2, 2))  # of the views, up and left; scattering has a position every 4 pixels
CHARACTERS = data.NIST | {"digits", "kmnist"}  # mirrored, they are other characters
VERSION = 2  # of the numbers, those of scattering included; part of the cache's key


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


def whitening_of(public: np.ndarray, ridge: float = RIDGE) -> Whitening:
    """The whitening by features of public images, (N, d). ridge: relative to the mean variance of a feature.

    The matrix comes from a Cholesky factor. It differs from (C + ridge I)^(-1/2) by a rotation only, which changes
    neither norms nor the distribution of the noise.
    """
    rows = public.astype(np.float32)
    mean = rows.mean(0)
    rows -= mean
    covariance = (rows.T @ rows / np.float32(len(rows))).astype(np.float64)
    covariance[np.diag_indices(len(mean))] += ridge * np.trace(covariance) / len(mean)
    factor = scipy.linalg.cholesky(covariance, lower=True)
    matrix = np.asarray(scipy.linalg.solve_triangular(factor, np.eye(len(mean)), lower=True)).T
    return Whitening(mean, np.ascontiguousarray(matrix, np.float32))


def public_images(name: str, dataset: Dataset, count: int | None = None) -> np.ndarray:
    """The public images of one of `PUBLIC`, of the data set's height, width and channels, uint8.

    count: of the random ones, RANDOM_COUNT if None.
    """
    if name not in PUBLIC:
        raise ValueError(f"whitening must be one of {', '.join(PUBLIC)}; got {name!r}")
    others = name.split("+")[1:]
    if others and {*others, data.family(dataset.name)} <= data.NIST:
        raise ValueError(f"whitening must use images of other people than the private {dataset.name}, got {name}")
    height, width, channels = dataset.train_images.shape[1:]
    found = []
    for other in others:
        images = data.load(other).train_images
        data.require_others(other, images, dataset)
        real = data.as_float(images).repeat(channels, 3)
        resized = jax.image.resize(real, (len(real), height, width, channels), "linear")
        found.append(np.rint(255 * np.asarray(resized)).astype(np.uint8))
    return np.concatenate([random_images(count or RANDOM_COUNT, height, width, channels, seed=SEED), *found])


def views_of(images: jax.Array, shifts: Sequence[tuple[int, int]], *, mirrored: bool) -> jax.Array:
    """(N, height, width, channels), moved up and left with 0 behind, and their mirror images too: (views, N, ...)."""
    shifted = [
        jnp.pad(side, ((0, 0), (0, up), (0, left), (0, 0)))[:, up:, left:]
        for side in (images, images[:, :, ::-1])[: 2 if mirrored else 1]
        for up, left in shifts
    ]
    return jnp.stack(shifted)


def description(
    public: np.ndarray,
    filters: int | None = None,
    *,
    mirrored: bool,
    shifts: Sequence[tuple[int, int]] = SHIFTS,
    progress: bool = True,
) -> Callable[[np.ndarray], np.ndarray]:
    """The patch features, by patches of public images, of images of their shape: uint8 (N, ...) to float16 (N, d).

    They are means over the views of an image, because the label does not depend on the view: what does is noise to the
    model.
    """
    patches = patches_of(features.compute(public, progress=progress, features_of=features.roots_of), filters)

    @jax.jit
    def mean_of_views(images):
        views = views_of(images, shifts, mirrored=mirrored)
        planes = features.roots_of(views.reshape(-1, *images.shape[1:]))
        return patches(planes.astype(jnp.float32)).reshape(*views.shape[:2], -1).mean(0)

    return functools.partial(features.compute, batch_size=BATCH, progress=progress, features_of=mean_of_views)


def with_whitening(
    dataset: Dataset, name: str, cache_dir: str | Path, *, filters: int | None = None, progress: bool = True
) -> Dataset:
    """The data set with whitened patch features for images, float16 (N, 1, 1, d), kept on disk.

    filters: FILTERS if None.
    """
    count = max(RANDOM_COUNT, 2 * CELLS**2 * (filters or 0))

    @functools.cache
    def fitted() -> tuple[Callable[[np.ndarray], np.ndarray], Whitening]:
        public = public_images(name, dataset, count)
        described = description(
            public, filters, mirrored=data.family(dataset.name) not in CHARACTERS, progress=progress
        )
        return described, whitening_of(described(public))

    def whitened(images: np.ndarray) -> np.ndarray:
        described, whitening = fitted()
        return whitening(described(images))

    settings = f"{name}-random{RANDOM_VERSION}-{count}-{SEED}-patches{PATCHES_VERSION}-v{VERSION}-ridge{RIDGE}"
    settings += f"-filters{filters}" if filters else ""
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
