"""Digits without end: every index is another small deformation of a real digit, made when it is read.

The kinds of deformation are those of Loosli, Canu and Bottou 2007 (https://leon.bottou.org/papers/loosli-canu-bottou-2006,
"InfiniteMNIST"): a smooth random field of displacements, with a small rotation, scaling and shear, and a change of the
stroke's thickness. Numbers and interpolation are ours, so the images are not those of their program. The randomness is
public: index and seed decide an image.
"""

import functools
import math

import numpy as np

SMOOTHNESS = 4.0  # pixels, standard deviation of the Gaussian that smooths the displacements
ELASTIC = 1.0  # pixels, standard deviation of a displacement
LINEAR = 0.09  # standard deviation of each entry of the matrix that rotates, scales and shears
SHIFT = 0.5  # pixels
THICKNESS = 0.5  # largest share of the way to the thickened or the thinned stroke
CHUNK = 512  # images that are made at once
VERSION = 1  # of the images; part of the name under which they are kept


class DeformedImages:
    """An array of images that are made when they are read: uint8 (N, height, width, 1), image i from base i modulo its
    length. It has the attributes by which `dpx.UserData` and the samplings know an array, and takes no memory.

    base: the real images, uint8 (M, height, width, 1). examples: N, at least 1. seed: at least 0.
    The first M images are the base itself. Raises ValueError for other arguments.
    """

    def __init__(self, base: np.ndarray, examples: int, seed: int = 0):
        if base.dtype != np.uint8 or base.ndim != 4 or base.shape[3] != 1 or len(base) == 0:
            raise ValueError(f"base must be uint8 (M, height, width, 1), got {base.dtype} {base.shape}")
        if examples < 1 or seed < 0:
            raise ValueError(f"examples must be at least 1 and seed at least 0, got {examples} and {seed}")
        self.base, self.seed = base, seed
        self.shape, self.dtype, self.ndim = (examples, *base.shape[1:]), np.dtype(np.uint8), 4

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows) -> np.ndarray:
        """The images of an int, a slice or an array of ints, the same whichever way they are asked for."""
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        rows = np.asarray(rows)
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows must be in [0, {len(self)}), got {rows.min()} to {rows.max()}")
        flat = rows.reshape(-1) % len(self)
        images = np.empty((len(flat), *self.shape[1:]), np.uint8)
        for start in range(0, len(flat), CHUNK):
            part = slice(start, start + CHUNK)
            images[part] = self._made(flat[part])
        return images.reshape(*rows.shape, *self.shape[1:])

    def _made(self, rows: np.ndarray) -> np.ndarray:
        images = self.base[rows % len(self.base)]
        new = rows >= len(self.base)
        numbers = [
            np.random.default_rng([self.seed, row]).standard_normal(self._count, np.float32) for row in rows[new]
        ]
        if numbers:
            images[new] = deformed(images[new], np.stack(numbers))
        return images

    @property
    def _count(self) -> int:
        return 2 * math.prod(self.shape[1:3]) + 7


def deformed(images: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The deformed images, uint8 (N, height, width, 1). numbers: standard normal, (N, 2 * height * width + 7)."""
    count, height, width, _ = images.shape
    elastic, linear, shift, thickness = np.split(numbers, np.cumsum([2 * height * width, 4, 2]), axis=1)
    rows, columns = smoother(height), smoother(width)
    field = ELASTIC * (rows @ elastic.reshape(count, 2, height, width) @ columns.T)
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij")).astype(np.float32)
    centered = grid - np.array([height - 1, width - 1], np.float32)[:, None, None] / 2
    field += LINEAR * (linear.reshape(count, 2, 2) @ centered.reshape(2, -1)).reshape(field.shape)
    field += SHIFT * shift[:, :, None, None]
    moved = interpolated(images[..., 0].astype(np.float32), grid[None] + field)
    share = np.clip(thickness[:, :, None] / 2, -1, 1) * THICKNESS
    thicker, thinner = extreme(moved, np.maximum), extreme(moved, np.minimum)
    changed = moved + np.maximum(share, 0) * (thicker - moved) + np.maximum(-share, 0) * (thinner - moved)
    return np.clip(np.rint(changed), 0, 255).astype(np.uint8)[..., None]


@functools.cache
def smoother(size: int) -> np.ndarray:
    """A Gaussian filter over one axis, float32 (size, size); white noise keeps its variance of 1."""
    places = np.arange(size)
    weights = np.exp(-((places[:, None] - places) ** 2) / (2 * SMOOTHNESS**2))
    return (weights / np.sqrt((weights**2).sum(1, keepdims=True))).astype(np.float32)


def interpolated(images: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The images (N, height, width) at places (N, 2, height, width), linear between pixels; black outside."""
    count, height, width = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    y = np.clip(places[:, 0] + 1, 0, height + 0.999)
    x = np.clip(places[:, 1] + 1, 0, width + 0.999)
    top, left = y.astype(np.int32), x.astype(np.int32)
    down, right = y - top, x - left
    flat = padded.reshape(count, -1)
    corner = (top * (width + 2) + left).reshape(count, -1)

    def at(offset):
        return np.take_along_axis(flat, corner + offset, 1).reshape(images.shape)

    upper = at(0) * (1 - right) + at(1) * right
    lower = at(width + 2) * (1 - right) + at(width + 3) * right
    return upper * (1 - down) + lower * down


def extreme(images: np.ndarray, of) -> np.ndarray:
    """The largest, or smallest, of each pixel and its four neighbors."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    across = of(padded[:, 1:-1, :-2], padded[:, 1:-1, 2:])
    down = of(padded[:, :-2, 1:-1], padded[:, 2:, 1:-1])
    return of(images, of(across, down))
