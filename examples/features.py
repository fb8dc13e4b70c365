"""Scattering features: a fixed, data-independent transform of images, on which a private linear model does well.

The features are those of the second-order scattering transform of Bruna and Mallat (2013,
https://arxiv.org/abs/1203.1513) with J = 2 and 8 angles, and equal `kymatio.numpy.Scattering2D(J=2, shape)`: 81
channels at a quarter of the resolution. Then every example is normalized by itself, over groups of channels, as in
Tramer and Boneh (2021, https://arxiv.org/abs/2011.11660). The features use no statistic of the data set, so they cost
no privacy.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from examples.data import Dataset, as_float

ANGLES = 8
SCALE = 4  # 2^J with J = 2
GROUPS = 27
EPSILON = 1e-5
VERSION = 1  # of the numbers; part of the cache's key


def gabor(height: int, width: int, sigma: float, theta: float, frequency: float, slant: float):
    """A Gaussian envelope times a plane wave, made periodic over (height, width)."""
    rotation = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
    curvature = rotation @ np.diag([1, slant**2]) @ rotation.T / (2 * sigma**2)
    total = np.zeros((height, width), np.complex128)
    for shift_y in range(-2, 3):
        for shift_x in range(-2, 3):
            y, x = np.mgrid[:height, :width] + np.array([shift_y * height, shift_x * width])[:, None, None]
            envelope = curvature[0, 0] * y * y + 2 * curvature[0, 1] * y * x + curvature[1, 1] * x * x
            wave = frequency * (y * np.cos(theta) + x * np.sin(theta))
            total += np.exp(-envelope + 1j * wave)
    return total / (2 * 3.1415 * sigma**2 / slant)


def morlet(height: int, width: int, scale: int, angle: int) -> np.ndarray:
    """Fourier transform of the wavelet of one scale and angle: a Gabor filter corrected to have mean zero."""
    theta = (ANGLES // 2 - 1 - angle) * np.pi / ANGLES
    sigma, slant = 0.8 * 2**scale, 4 / ANGLES
    wave = gabor(height, width, sigma, theta, 3 / 4 * np.pi / 2**scale, slant)
    envelope = gabor(height, width, sigma, theta, 0, slant)
    return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def subsample(spectrum, factor: int):
    """The spectrum of every `factor`-th pixel: the mean of the aliases."""
    *batch, height, width = spectrum.shape
    aliases = spectrum.reshape(*batch, factor, height // factor, factor, width // factor)
    return aliases.mean((-4, -2))


def low_pass(height: int, width: int, resolution: int) -> np.ndarray:
    """The last smoothing as a matrix: (pixels at `resolution`, output pixels), smoothed, subsampled and cropped."""
    phi = np.fft.fft2(gabor(height, width, 0.8 * 2, 0, 0, 1)).real
    if resolution > 1:  # restricted to the low frequencies, then folded
        low_y, low_x = (
            (frequencies >= -0.5 / resolution) & (frequencies < 0.5 / resolution)
            for frequencies in (np.fft.fftfreq(height), np.fft.fftfreq(width))
        )
        phi = resolution**2 * subsample(phi * np.outer(low_y, low_x), resolution)
    height, width = phi.shape
    pixels = np.eye(height * width).reshape(-1, height, width)
    smooth = np.fft.ifft2(subsample(np.fft.fft2(pixels) * phi, SCALE // resolution)).real
    return smooth[:, 1:-1, 1:-1].reshape(height * width, -1).astype(np.float32)


@functools.cache
def scattering(height: int, width: int):
    """The jitted transform of float32 images (N, height, width) to (N, 81, height // 4, width // 4)."""
    padded = (height // SCALE + 2) * SCALE, (width // SCALE + 2) * SCALE
    margins = [((p - s) // 2, (p - s + 1) // 2) for p, s in zip(padded, (height, width), strict=True)]
    if min(height, width) <= max(max(margins)):
        raise ValueError(f"images must be larger than {max(max(margins))} pixels, got {height}x{width}")
    fine, coarse = (
        np.stack([morlet(*padded, scale, angle) for angle in range(ANGLES)]).astype(np.complex64) for scale in (0, 1)
    )
    smooth_full, smooth_half = low_pass(*padded, 1), low_pass(*padded, 2)

    def smooth(pixels, matrix):
        rows = pixels.reshape(pixels.shape[0], -1, matrix.shape[0])
        return rows @ matrix

    @jax.jit
    def transform(images):
        images = jnp.pad(images, ((0, 0), *margins), mode="reflect")
        spectrum = jnp.fft.fft2(images)[:, None]
        first = jnp.abs(jnp.fft.ifft2(spectrum * fine[None]))
        first_coarse = jnp.abs(jnp.fft.ifft2(subsample(spectrum * coarse[None], 2)))
        between = jnp.fft.fft2(first)[:, :, None] * coarse[None, None]
        second = jnp.abs(jnp.fft.ifft2(subsample(between, 2)))
        outputs = [
            smooth(images, smooth_full),
            smooth(first, smooth_full),
            smooth(first_coarse, smooth_half),
            smooth(second, smooth_half),
        ]
        return jnp.concatenate(outputs, 1).reshape(images.shape[0], -1, height // SCALE, width // SCALE)

    return transform


def normalized(features: jax.Array) -> jax.Array:
    """Each example (channels, height, width) to mean 0 and variance 1 over each of the groups of channels."""
    groups = features.reshape(GROUPS, -1)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / jnp.sqrt((centred**2).mean(1, keepdims=True) + EPSILON)).reshape(features.shape)


def scattered(images: jax.Array) -> jax.Array:
    """(N, height, width, channels) to (N, 81 * channels, height // 4, width // 4), float32."""
    count, height, width, channels = images.shape
    planes = jnp.moveaxis(as_float(images), 3, 1).reshape(count * channels, height, width)
    features = scattering(height, width)(planes)
    return features.reshape(count, -1, *features.shape[2:])


@jax.jit
def features_of(images: jax.Array) -> jax.Array:
    """(N, height, width, channels) to normalized features (N, height // 4, width // 4, 81 * channels) in float16."""
    return jnp.moveaxis(jax.vmap(normalized)(scattered(images)), 1, 3).astype(jnp.float16)


@jax.jit
def roots_of(images: jax.Array) -> jax.Array:
    """The same shape: the square roots of the scattering coefficients, which are means of moduli, so at least 0."""
    return jnp.moveaxis(jnp.sqrt(jnp.maximum(scattered(images), 0)), 1, 3).astype(jnp.float16)


def compute(
    images: np.ndarray, *, batch_size: int = 64, progress: bool = True, features_of: Callable = features_of
) -> np.ndarray:
    """`features_of`, or another function of images, batch by batch."""
    shape = jax.eval_shape(features_of, jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)).shape[1:]
    output = np.empty((len(images), *shape), np.float16)
    for start in tqdm(range(0, len(images), batch_size), "scattering", disable=not progress):
        rows = images[start : start + batch_size]
        padding = np.zeros((batch_size - len(rows), *rows.shape[1:]), rows.dtype)
        output[start : start + batch_size] = features_of(np.concatenate([rows, padding]))[: len(rows)]
    return output


def cached(images: np.ndarray, name: str, cache_dir: Path, *, progress: bool = True) -> np.ndarray:
    """`compute`, kept on disk under the name, the settings and a hash of the images."""
    settings = f"scattering-v{VERSION}-J2-L{ANGLES}-groups{GROUPS}-{EPSILON}"
    return kept(lambda: compute(images, progress=progress), images, f"{name}-scattering", settings, cache_dir)


def kept(make: Callable[[], np.ndarray], images: np.ndarray, name: str, settings: str, cache_dir: Path) -> np.ndarray:
    """make(), which is features of the images, kept on disk under the name, the settings and a hash of the images."""
    settings = f"{settings}-{images.dtype}{images.shape}"
    digest = hashlib.sha256(settings.encode() + np.ascontiguousarray(images).data).hexdigest()[:16]
    path = cache_dir.expanduser() / f"{name.replace('/', '-')}-{digest}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError):  # not there, or not whole
        features = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        np.save(file, features)
    os.replace(file.name, path)
    return features


def with_scattering(dataset: Dataset, cache_dir: str | Path, *, progress: bool = True) -> Dataset:
    """The data set with its scattering features for images."""
    parts = {"train_images": dataset.train_images, "test_images": dataset.test_images}
    found = {
        part: cached(images, f"{dataset.name}-{part}", Path(cache_dir), progress=progress)
        for part, images in parts.items()
    }
    return replace(dataset, train_images=found["train_images"], test_images=found["test_images"])
