"""Second-layer features: how much small patches of scattering coefficients look like those of public images.

A patch is whitened by the covariance of public patches and scaled to norm 1. Its features are its inner products with
the filters, which are public patches, where these are positive. They are averaged over a grid of CELLS x CELLS cells:
Coates and Ng 2011 (https://proceedings.mlr.press/v15/coates11a.html), on scattering coefficients in place of pixels.
Only public images enter, so the features cost no privacy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 2  # scattering positions along a side of a patch
FILTERS, CELLS = 440, 3  # filters of a recipe that takes minutes
COMPONENTS = 200  # of a whitened patch
RIDGE = 0.1  # relative to the mean variance of a coefficient
SAMPLE = 60_000  # public patches at most, for the covariance
BLANK = 0.2  # patches with a smaller norm are not sampled; most of an image can be empty
VERSION = 1  # of the numbers; part of the cache's key


class Patches(NamedTuple):
    """mean: float32 (p,). whiten: float32 (p, COMPONENTS). filters: float32 (COMPONENTS, filters)."""

    mean: np.ndarray
    whiten: np.ndarray
    filters: np.ndarray

    def __call__(self, planes: jax.Array) -> jax.Array:
        """Float32 planes (N, height, width, channels) to (N, cells * filters), float32; a patch has p numbers."""
        patches = cut(planes)
        white = (patches - self.mean[None, None, None]) @ self.whiten
        lengths = jnp.sqrt((white**2).sum(-1, keepdims=True))
        found = jnp.maximum(white / jnp.maximum(lengths, 1e-6) @ self.filters, 0)
        for axis in (1, 2):
            bounds = np.linspace(0, patches.shape[axis], min(CELLS, patches.shape[axis]) + 1).astype(int)
            cells = [
                jax.lax.slice_in_dim(found, *ends, axis=axis).mean(axis, keepdims=True)
                for ends in zip(bounds[:-1], bounds[1:], strict=True)
            ]
            found = jnp.concatenate(cells, axis)
        return found.reshape(len(planes), -1)


def cut(planes):
    """(N, height, width, channels) to all patches, (N, height - SIZE + 1, width - SIZE + 1, SIZE^2 channels)."""
    height, width = (side - SIZE + 1 for side in planes.shape[1:3])
    if min(height, width) < 1:
        raise ValueError(f"scattering features must have {SIZE} positions a side, got {planes.shape[1:3]}")
    shifts = [(down, right) for down in range(SIZE) for right in range(SIZE)]
    return jnp.concatenate([planes[:, d : d + height, r : r + width] for d, r in shifts], 3)


def patches_of(public: np.ndarray, filters: int | None = None, *, seed: int = 0) -> Patches:
    """The patches of public planes, (N, height, width, channels), any float dtype. filters: FILTERS if None."""
    rng = np.random.default_rng(seed)
    each = max(1, (public.shape[1] - SIZE + 1) * (public.shape[2] - SIZE + 1))
    chosen = rng.permutation(len(public))[: -(-2 * SAMPLE // each)]  # as many again, because some are blank
    rows = np.asarray(cut(public[np.sort(chosen)].astype(np.float32))).reshape(-1, SIZE**2 * public.shape[3])
    rows = rows[np.linalg.norm(rows, axis=1) > BLANK]
    rows = rows[rng.permutation(len(rows))[:SAMPLE]]
    mean = rows.mean(0)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    whiten = (vectors / np.sqrt(values + RIDGE * values.mean()))[:, : -COMPONENTS - 1 : -1].astype(np.float32)
    white = (rows[rng.permutation(len(rows))[: filters or FILTERS]] - mean) @ whiten
    found = white / np.maximum(np.linalg.norm(white, axis=1, keepdims=True), 1e-6)
    return Patches(mean, np.ascontiguousarray(whiten), np.ascontiguousarray(found.T))
