"""Public images from random processes: no camera and no data set, so nothing that they teach costs privacy.

Half of them are dead leaves (shapes of random size, place and texture that cover each other; Lee, Mumford and Huang
2001, https://doi.org/10.1023/A:1011109015675), half are a few such shapes on black, many of them symmetric.
"""

import numpy as np

LEAVES = 14  # shapes of an image of dead leaves
PARTS = 6  # shapes of an object on black
VERSION = 1  # of the numbers; part of a cache's key


def random_images(count: int, height: int, width: int, channels: int = 1, *, seed: int = 0) -> np.ndarray:
    """`count` images, uint8 (count, height, width, channels), a function of the arguments: dead leaves, then objects.

    Images of several channels have the same shapes in every channel, with textures of their own. Raises ValueError for
    a size below 1.
    """
    if min(count, height, width, channels) < 1:
        raise ValueError(f"sizes must be at least 1, got {(count, height, width, channels)}")
    leaves, objects = (np.random.default_rng([seed, kind]) for kind in range(2))
    draw = Canvas(height, width, channels)
    parts = dead_leaves(leaves, draw, count - count // 2), objects_on_black(objects, draw, count // 2)
    return np.clip(255 * np.concatenate(parts), 0, 255).astype(np.uint8)


def dead_leaves(rng: np.random.Generator, draw: "Canvas", count: int) -> np.ndarray:
    images = draw.texture(rng, count)
    for _ in range(LEAVES):
        x, y = rng.uniform(-0.1, 1.1, (2, count, 1, 1))
        mask = draw.shape(x, y, **draw.outline(rng, count, 0.05, 0.6))
        images = np.where(mask[..., None], draw.texture(rng, count), images)
    return images


def objects_on_black(rng: np.random.Generator, draw: "Canvas", count: int) -> np.ndarray:
    """The first two parts are always there; a mirrored object has every part at both sides of the middle."""
    images, size = np.zeros((count, *draw.x.shape, draw.channels)), (count, 1, 1)
    mirrored = rng.random(size) < 0.6
    for part in range(PARTS):
        there = rng.random(size) < (1 if part < 2 else 0.5)
        x = np.where(mirrored, rng.uniform(0.5, 0.85, size), rng.uniform(0.2, 0.8, size))
        outline = draw.outline(rng, count, 0.12, 0.45)
        y = rng.uniform(0.15, 0.85, size)
        mask = draw.shape(x, y, **outline)
        mask = there & np.where(mirrored, mask | mask[:, :, ::-1], mask)
        light = np.clip(draw.texture(rng, count) + 0.15, 0, 1) * (rng.random(size) > 0.15)[..., None]
        images = np.where(mask[..., None], light, images)
    return images


class Canvas:
    """Coordinates in [0, 1) of the pixels of an image, and how shapes and textures are drawn on them."""

    def __init__(self, height: int, width: int, channels: int):
        self.y, self.x = (np.mgrid[:height, :width] + 0.5) / np.array([height, width])[:, None, None]
        self.channels = channels

    def outline(self, rng: np.random.Generator, count: int, smallest: float, largest: float) -> dict[str, np.ndarray]:
        """Ellipses, diamonds, stars and rectangles; the probability of a size falls with its third power."""
        size, ends = (count, 1, 1), np.array([smallest, largest]) ** -2
        radius = (ends[0] + rng.random(size) * (ends[1] - ends[0])) ** -0.5
        angle, stretch = rng.uniform(0, np.pi, size), np.exp(rng.uniform(-0.5, 0.5, size))
        return {"radius": radius, "angle": angle, "stretch": stretch, "power": rng.choice([0.7, 1.0, 2.0, 8.0], size)}

    def shape(self, x, y, *, radius, angle, stretch, power) -> np.ndarray:
        """bool (count, height, width), True inside the shape around (x, y)."""
        right, down = self.x - x, self.y - y
        along = (np.cos(angle) * right + np.sin(angle) * down) / (radius * stretch)
        across = (np.cos(angle) * down - np.sin(angle) * right) / (radius / stretch)
        return np.abs(along) ** power + np.abs(across) ** power < 1

    def texture(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """(count, height, width, channels): a level, a grating (some of them hard), a gradient, and white noise."""
        size, (y, x) = (count, 1, 1, self.channels), (self.y[..., None], self.x[..., None])
        frequency, angle = 2 * np.pi * np.exp(rng.uniform(0, np.log(12), size)), rng.uniform(0, 2 * np.pi, size)
        wave = np.sin(frequency * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(0, 2 * np.pi, size))
        wave = np.where(rng.random(size) < 0.3, np.sign(wave), wave)
        contrast = rng.random(size) ** 2 / 2 * (rng.random(size) < 0.6)
        slope_x, slope_y = rng.normal(0, 0.25, (2, *size))
        noise = 0.3 * rng.random(size) ** 3 * rng.normal(size=(count, *self.x.shape, self.channels))
        return rng.random(size) + contrast * wave + slope_x * (x - 0.5) + slope_y * (y - 0.5) + noise
