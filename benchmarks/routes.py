"""Routes to more accuracy from a budget, each against the recipe of `examples.recipes`, with three paired seeds.

`python -m benchmarks.routes` writes results/routes.md. It trains on 50,000 training images of Fashion-MNIST at epsilon
2, and measures accuracy on the other 10,000 training images; the test images are not read. Routes with equal numbers of
steps and features share batches and noise. The training is `simulate`, the recipe's algorithm in NumPy, because it
trains many routes at once: its batches are slices of a permutation in place of Poisson samples. The cost is that of
Poisson samples of 60,000 images with the same noise. One row is `dpx.fit` itself.
"""

import argparse
import functools
import statistics
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from benchmarks import report
from examples import data, features, loop, models, whitening
from examples.random_images import random_images
from examples.tasks import images

EPSILON, DELTA, SEEDS = 2.0, 1e-5, (0, 1, 2)
EXAMPLES, TRAINED = 60_000, 50_000
RATE, EPOCHS, LEARNING_RATE, CLIP_NORM, MOMENTUM = 8192 / EXAMPLES, 20, 20.89, 0.1, 0.7
CLASSES = 10


class Route(NamedTuple):
    """Settings that one program may train at once. learning_rate: times the clip norm divided by 0.1."""

    learning_rate: float = LEARNING_RATE
    clip_norm: float = CLIP_NORM
    momentum: float = MOMENTUM
    smoothing: float = 0.0  # of the labels
    last_rate: float = 1.0  # of the learning rate, which falls linearly
    averaged: str = ""  # "exponential" or "last 30%" of the weights
    noise: float = 1.0  # times the cost's; 0 is not private


class Features(NamedTuple):
    """Patch features of an image, averaged over views and whitened by those of public images.

    count: of public images. patches: False for the square roots of scattering. directions: the leading ones only.
    own: whitened by the covariance of the private images, with noise of so many times what one image adds to it at
        most; None: by that of the public images.
    """

    count: int = whitening.RANDOM_COUNT
    shifts: tuple[tuple[int, int], ...] = whitening.SHIFTS[:1]
    mirrored: bool = False
    patches: bool = True
    ridge: float = whitening.RIDGE
    directions: int | None = None
    own: float | None = None


class Group(NamedTuple):
    """Routes that share features, batches and noise."""

    features: Features
    routes: dict[str, Route]
    epochs: float = EPOCHS
    rate: float = RATE


CEILING = Route(learning_rate=48.0, noise=0.0)
BEST, ONE_VIEW = Features(shifts=whitening.SHIFTS, mirrored=True), Features()
SETTINGS = {
    "the recipe": Route(),
    "the recipe without noise (not private)": CEILING,
    "learning rate 12": Route(learning_rate=12.0),
    "learning rate 16": Route(learning_rate=16.0),
    "learning rate 28": Route(learning_rate=28.0),
    "learning rate from 42 to 0": Route(learning_rate=42.0, last_rate=0.0),
    "clip norm 0.01": Route(clip_norm=0.01),
    "clip norm 1": Route(clip_norm=1.0),
    "no momentum, learning rate 70": Route(learning_rate=70.0, momentum=0.0),
    "momentum 0.5, learning rate 35": Route(learning_rate=35.0, momentum=0.5),
    "momentum 0.9, learning rate 7": Route(learning_rate=6.96, momentum=0.9),
    "labels smoothed by 0.1": Route(smoothing=0.1),
    "exponential mean of the weights, 0.95 a step": Route(averaged="exponential"),
    "mean of the weights of the last 30% of the steps": Route(averaged="last 30%"),
}
OF_FEATURES = {
    "one view": ONE_VIEW,
    "one view, ridge 0.1": Features(ridge=0.1),
    "one view, ridge 1": Features(ridge=1.0),
    "one view, the 2,000 leading directions": Features(directions=2000),
    "one view, 8,000 public images": Features(count=8000),
    "one view, square roots of scattering, no patches": Features(patches=False),
    "one view and its mirror image": Features(mirrored=True),
    "two shifts, no mirror images": Features(shifts=whitening.SHIFTS),
    "one view, covariance of the private images (not private)": Features(own=0.0),
    "one view, the same with a noise multiplier of 10, at no cost": Features(own=10.0),
    "four shifts, and their mirror images": Features(shifts=((0, 0), (0, 2), (2, 0), (2, 2)), mirrored=True),
}
GROUPS = (
    Group(BEST, SETTINGS),
    Group(BEST, {"40 epochs, learning rate 10.5": Route(learning_rate=10.5)}, epochs=2 * EPOCHS),
    Group(BEST, {"batches of 16,384, learning rate 30": Route(learning_rate=30.0)}, rate=2 * RATE),
    *(Group(made, {name: Route(), f"{name}, without noise": CEILING}) for name, made in OF_FEATURES.items()),
)


@functools.cache
def noise_multiplier(steps: int, rate: float) -> float:
    sampling = dpx.PoissonSampling(examples=EXAMPLES, batch_size=round(rate * EXAMPLES))
    return dpx.accounting.calibrate(
        lambda noise: dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=jax.random.key(0)),
        steps=steps,
        epsilon=EPSILON,
        delta=DELTA,
    )


def simulate(group: Group, rows: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """The accuracy, in percent, of every route of a group. rows: float16 (60000, d), all of one norm."""
    routes, dimension = list(group.routes.values()), rows.shape[1]
    batch, steps = round(group.rate * TRAINED), round(group.epochs / group.rate)
    rng, shape = np.random.default_rng(seed), (dimension + 1, len(routes), CLASSES)

    def each(numbers) -> np.ndarray:
        return np.asarray(list(numbers), np.float32)[:, None]

    clip_norms, momenta = each(r.clip_norm for r in routes), each(r.momentum for r in routes)
    noise = each(r.noise for r in routes) * clip_norms * np.float32(noise_multiplier(steps, group.rate))
    smoothing = each(r.smoothing for r in routes)
    weights, momentum, exponential, last = (np.zeros(shape, np.float32) for _ in range(4))
    norm = np.sqrt(np.square(rows[0].astype(np.float32)).sum() + 1)
    order, start = rng.permutation(TRAINED), 0
    for step in range(steps):
        if start + batch > TRAINED:
            order, start = rng.permutation(TRAINED), 0
        chosen = np.sort(order[start : start + batch])
        start += batch
        examples = with_bias(rows[chosen])
        wanted = np.eye(CLASSES, dtype=np.float32)[labels[chosen], None] * (1 - smoothing) + smoothing / CLASSES
        errors = softmax((examples @ weights.reshape(dimension + 1, -1)).reshape(-1, *shape[1:])) - wanted
        norms = np.sqrt(np.square(errors).sum(2, keepdims=True)) * norm
        errors *= np.minimum(1, clip_norms / np.maximum(norms, np.float32(1e-12)))
        sums = (examples.T @ errors.reshape(batch, -1)).reshape(shape)
        sums += noise * rng.standard_normal((shape[0], 1, CLASSES), dtype=np.float32)
        momentum = momenta * momentum + sums / np.float32(batch)
        rates = each(r.learning_rate * CLIP_NORM / r.clip_norm * (1 - (1 - r.last_rate) * step / steps) for r in routes)
        weights -= rates * momentum
        exponential += np.float32(0.05) * (weights - exponential)
        if step >= 0.7 * steps:
            last += weights
    measured = np.stack(
        [{"": weights, "exponential": exponential, "last 30%": last}[r.averaged][:, i] for i, r in enumerate(routes)],
        1,
    )
    logits = with_bias(rows[TRAINED:]) @ measured.reshape(dimension + 1, -1)
    right = logits.reshape(-1, *shape[1:]).argmax(2) == labels[TRAINED:, None]
    return dict(zip(group.routes, (100 * right.mean(0)).tolist(), strict=True))


def with_bias(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows.astype(np.float32), np.ones((len(rows), 1), np.float32)], 1)


def softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.exp(logits - logits.max(-1, keepdims=True))
    return logits / logits.sum(-1, keepdims=True)


@functools.lru_cache(maxsize=1)
def described(
    count: int, shifts, mirrored: bool, patches: bool, data_dir: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Features of `count` public images and of the 60,000 training images, float16 (N, d), not whitened."""
    public = random_images(count, 28, 28, seed=whitening.SEED)
    make = functools.partial(features.compute, features_of=features.roots_of)
    if patches:
        make = whitening.description(public, shifts=shifts, mirrored=mirrored)
    private = data.load("fashion_mnist", data_dir).train_images
    first, second = (make(images).reshape(len(images), -1) for images in (public, private))
    return first, second


def rows_of(made: Features, data_dir: Path | None, cache_dir: Path) -> np.ndarray:
    """The whitened features of the 60,000 training images, float16 (60000, d)."""
    if made == BEST:
        dataset = data.load("fashion_mnist", data_dir)
        return whitening.with_whitening(dataset, whitening.RANDOM, cache_dir).train_images[:, 0, 0]
    public, private = described(made.count, made.shifts, made.mirrored, made.patches, data_dir)
    if made.directions:
        directions = np.linalg.eigh(np.cov(public.T.astype(np.float32)))[1][:, -made.directions :].astype(np.float32)
        public, private = public @ directions, private @ directions
    if made.own is None:
        return whitening.whitening_of(public, made.ridge)(private)[:, 0, 0]
    return own_whitening(public, private, made.own, made.ridge)(private)[:, 0, 0]


def own_whitening(public: np.ndarray, private: np.ndarray, noise: float, ridge: float) -> whitening.Whitening:
    """By the second moments of the private features, (N, d), around the mean of the public ones.

    Each row is clipped to the median norm of the public rows. Directions whose variance is below the largest that the
    noise alone is expected to have get this variance.
    """
    mean = public.mean(0, dtype=np.float32)
    norm = np.median(np.linalg.norm(public - mean, axis=1))
    rows = private - mean
    rows *= np.minimum(1, norm / np.linalg.norm(rows, axis=1, keepdims=True))
    noise, dimension = noise * norm**2 / len(rows), rows.shape[1]
    draws = np.triu(np.random.default_rng(whitening.SEED).standard_normal((dimension, dimension)))
    moments = rows.T @ rows / len(rows) + noise * (draws + np.triu(draws, 1).T)
    variances, directions = np.linalg.eigh(moments)
    least = max(ridge * np.trace(moments) / dimension, 2 * noise * dimension**0.5)
    matrix = directions / np.sqrt(np.maximum(variances, least))
    return whitening.Whitening(mean, np.ascontiguousarray(matrix, np.float32))


def trained(rows: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """The accuracy, in percent, of `dpx.fit` with the recipe."""
    model = models.build("linear_from_zero", input_shape=rows.shape[1:], classes=CLASSES)
    key = jax.random.key(seed)
    sampling = dpx.PoissonSampling(examples=TRAINED, batch_size=round(RATE * TRAINED))
    steps = round(EPOCHS / RATE)
    mechanism = dpx.dp_sgd(
        clip_norm=CLIP_NORM,
        noise_multiplier=noise_multiplier(steps, RATE),
        sampling=sampling,
        key=dpx.keys.stream(key, "mechanism"),
    )
    fitted = dpx.fit(
        images.loss_function(model),
        dpx.chain(mechanism, optax.sgd(LEARNING_RATE, MOMENTUM)),
        model.init(key),
        (rows[:TRAINED], labels[:TRAINED].astype(np.int32)),
        key=dpx.keys.stream(key, "batches"),
        steps=steps,
        delta=DELTA,
        microbatch_size=512,
        progress=False,
    )
    logits = jax.vmap(model.apply, (None, 0))(fitted.params, jnp.asarray(rows[TRAINED:], jnp.float32))
    return 100 * float(np.mean(np.asarray(logits).argmax(1) == labels[TRAINED:]))


def table(found: dict[str, list[float]]) -> str:
    """A line for each route: its accuracies, and the mean and standard error of the paired differences."""
    lines = []
    for name, numbers in found.items():
        gains = [number - other for number, other in zip(numbers, found["the recipe"], strict=False)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        each = ", ".join(f"{number:.2f}" for number in numbers)
        gain = "" if name == "the recipe" else f"{statistics.mean(gains):+.2f} ± {error:.2f}"
        lines.append((name, f"{statistics.mean(numbers):.2f}", each, gain))
    return report.grid(("route", "mean", "each", "minus the recipe"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=loop.CACHE)
    options = parser.parse_args()
    labels, found = data.load("fashion_mnist", options.data_dir).train_labels, {}
    facts = {"seeds": list(SEEDS), "epsilon": EPSILON, "delta": DELTA}
    heading = report.heading("benchmarks.routes", ("numpy", "jax", "jaxlib", "optax"), **facts)

    def write() -> None:
        notes = [
            f"Epsilon {EPSILON:g}, delta {DELTA:g}, PLD, seeds {', '.join(map(str, SEEDS))}; accuracy in percent on "
            "10,000 held-out training images. The last column: mean and standard error of the differences from the "
            "recipe's run of the same seed, which has the same batches and noise if steps and features are as many."
        ]
        report.write("routes", heading, {"Routes": table(found)}, notes=notes)

    for group in GROUPS:
        rows = rows_of(group.features, options.data_dir, options.cache_dir)
        results = [simulate(group, rows, labels, seed) for seed in SEEDS]
        found |= {name: [result[name] for result in results] for name in group.routes}
        write()
    rows = rows_of(BEST, options.data_dir, options.cache_dir)[:, None, None]
    found["the recipe by `dpx.fit`"] = [trained(rows, labels, seed) for seed in SEEDS]
    write()


if __name__ == "__main__":
    main()
