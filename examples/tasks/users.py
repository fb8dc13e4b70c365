"""Federated averaging: users of unequal size and taste make local steps, and epsilon protects all images of a user.

At every step, each user takes part with the same probability, makes some local steps of gradient descent on their own
images, and sends the change of the model. The mechanism bounds the change as it bounds a gradient: McMahan et al. 2018,
https://arxiv.org/abs/1710.06963.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from examples import data, features, models
from examples.infinite_mnist import CHUNK, VERSION, DeformedImages
from examples.tasks.images import accuracy_function
from examples.tasks.task import Kind, Task, fingerprint

if TYPE_CHECKING:
    from examples.config import Config

Tree = Any
OPTIONS = {
    "users": 700,  # the most that there may be: one without images takes no part
    "size_power": 0.5,  # the size of user i is proportional to i^-power
    "concentration": 0.5,  # of the Dirichlet distribution of a user's labels
    "most": 16,  # images of a user that take part
    "pool": 2,  # images are made smaller by this factor
    "local_steps": 5,
    "local_learning_rate": 0.5,
    "deformed": 0,  # so many images, deformed from those of the data set; 0: the data set's own
}


def build(config: Config, data_dir: str | Path | None, cache_dir: str | Path, progress: bool) -> Task:
    """The configured model on images that are split among users."""
    given = config.task_options
    for name, default in OPTIONS.items():
        whole = isinstance(default, int)
        least = 0 if name in ("size_power", "deformed") else 1 if whole else 1e-9
        if not least <= given[name] < float("inf") or (whole and int(given[name]) != given[name]):
            kind = "whole" if whole else "finite"
            raise ValueError(f"{name} must be a {kind} number of at least {least:g}, got {given[name]}")
    if config.features != "none":
        raise ValueError(f"features must be none with task users, got {config.features!r}")
    dataset = data.load(config.dataset, data_dir)
    if dataset.train_images.shape[1] % given["pool"] or dataset.train_images.shape[2] % given["pool"]:
        shape = dataset.train_images.shape[1:3]
        raise ValueError(f"pool must divide the images' height and width {shape}, got {given['pool']}")
    images, labels = examples_of(dataset, given, Path(cache_dir))
    owners = split(labels, given)
    users = dpx.UserData((images, labels), owners, most=given["most"])
    small = data.Dataset(
        name=dataset.name,
        classes=dataset.classes,
        train_images=images[:1],
        train_labels=labels[:1],
        test_images=pooled(dataset.test_images, given["pool"]),
        test_labels=dataset.test_labels,
    )
    shape, classes = images.shape[1:], dataset.classes
    model = models.build(config.model, input_shape=shape, classes=classes, activation=config.activation)
    accuracy_of = accuracy_function(model, small)
    return Task(
        train=users,
        examples=len(users),
        init=model.init,
        loss=federated_loss(model, given["local_steps"], given["local_learning_rate"]),
        evaluate=lambda params: {"test_accuracy": accuracy_of(params)},
        fingerprint=fingerprint(images, labels, owners),
    )


def federated_loss(model: models.Model, steps: int, learning_rate: float):
    """loss(params, user), the mean over the user's images, whose gradient is the user's update, params minus moved.

    The gradient of sum(params * update) is the update, if the update itself is not differentiated.
    """

    def loss(params, user):
        def local_step(moved, _):
            value, grads = jax.value_and_grad(mean_loss)(moved, user, model)
            return jax.tree.map(lambda p, g: p - learning_rate * g, moved, grads), value

        start = jax.lax.stop_gradient(params)
        moved, values = jax.lax.scan(local_step, start, length=steps)
        product = optax.tree.vdot(params, jax.lax.stop_gradient(jax.tree.map(jnp.subtract, start, moved)))
        return jax.lax.stop_gradient(values[0] - product) + product

    return loss


def mean_loss(params: Tree, user: Tree, model: models.Model) -> jax.Array:
    """Over the images of one user, without padding."""
    (images, labels), included = user
    logits = jax.vmap(model.apply, (None, 0))(params, data.as_float(images))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses, where=included) / jnp.sum(included, dtype=jnp.float32)


def examples_of(dataset: data.Dataset, given: dict[str, Any], cache_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, height, width, channels), made smaller, and labels int32 (N,). Deformed ones are kept on disk."""
    count, pool, labels = given["deformed"], given["pool"], labels_of(dataset, given)
    if not count:
        return pooled(dataset.train_images, pool), labels
    endless = DeformedImages(np.asarray(dataset.train_images), count)

    def make() -> np.ndarray:
        small = [pooled(endless[start : start + CHUNK], pool) for start in range(0, count, CHUNK)]
        return np.concatenate(small)

    settings = f"deformed-v{VERSION}-{count}-pool{pool}"
    images = features.kept(make, endless.base, f"{dataset.name}-deformed", settings, cache_dir)
    return images, labels


def labels_of(dataset: data.Dataset, given: dict[str, Any]) -> np.ndarray:
    """The labels of all users' images, int32 (N,)."""
    count = given["deformed"] or len(dataset.train_labels)
    return dataset.train_labels[np.arange(count) % len(dataset.train_labels)]


def pooled(images: np.ndarray, pool: int) -> np.ndarray:
    """The means of windows of `pool` x `pool` pixels, in the dtype of the images."""
    if pool == 1:
        return images
    count, height, width, channels = images.shape
    windows = images.reshape(count, height // pool, pool, width // pool, pool, channels)
    means = windows.mean(axis=(2, 4), dtype=np.float32)
    return np.rint(means).astype(np.uint8) if images.dtype == np.uint8 else means


def split(labels: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """The owner of each image, int (N,), in [0, users): sizes by a power law, and every user prefers some labels.

    An image goes to a user with a probability that is proportional to the user's size and taste for its label. A user
    who gets no image takes no part. The split is made up, so its seed is fixed and public.
    """
    rng = np.random.default_rng(0)
    users, classes = given["users"], labels.max() + 1
    sizes = np.arange(1, users + 1) ** -float(given["size_power"])
    tastes = sizes[:, None] * rng.dirichlet(np.full(classes, given["concentration"]), users)
    owners = np.empty(len(labels), np.int64)
    for label in range(classes):
        own = np.flatnonzero(labels == label)
        owners[own] = rng.choice(users, len(own), p=tastes[:, label] / tastes[:, label].sum())
    return owners


KIND = Kind(build, models.MODELS, OPTIONS)
