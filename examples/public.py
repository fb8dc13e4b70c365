"""Public images, for methods that need gradients of data that are not private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import dpx
from examples import data, models
from examples.methods import METHODS

if TYPE_CHECKING:
    from examples.config import Config

ITERATIONS = 5  # of the power method


def arguments(config: Config, dataset: data.Dataset, data_dir, key: jax.Array) -> dict[str, Any]:
    """The arguments of the method's builder beside its options: none, or "basis", a subspace of public gradients.

    The gradients are those of the initial parameters at the first images of the data set that `public`
    names, brought to the private images' size and given labels at random.
    """
    if "basis" not in METHODS[config.method].build_parameters:
        return {}
    name, count, rank = config.public, config.public_examples, config.public_rank
    if name == config.dataset or {data.family(name), data.family(config.dataset)} <= data.NIST:
        raise ValueError(f"public must be a data set of other people than the private {config.dataset}, got {name}")
    if config.features != "none":
        raise ValueError(f"features must be none with method {config.method}, got {config.features!r}")
    public, shape = data.load(name, data_dir).train_images, dataset.train_images.shape[1:]
    if public.shape[3] != shape[2]:
        raise ValueError(
            f"public images must have {shape[2]} channels as the private ones, {name} has {public.shape[3]}"
        )
    if not 1 <= count <= len(public):
        raise ValueError(f"public_examples must be in [1, {len(public)}] for {name}, got {count}")
    data.require_others(name, public[:count], dataset)
    images = jax.image.resize(data.as_float(np.asarray(public[:count])), (count, *shape), "linear")
    labels = jax.random.randint(dpx.keys.stream(key, "public labels"), (count,), 0, dataset.classes)
    built = models.build(config.model, input_shape=shape, classes=dataset.classes, activation=config.activation)
    model = models.centred(built)
    gradient = jax.jit(jax.vmap(jax.grad(models.loss_of(model)), (None, 0)))
    grads = gradient(model.init(dpx.keys.stream(key, "init")), (images, labels))
    return {"basis": dpx.coordinates.public_subspace(grads, rank=rank, iterations=ITERATIONS, key=key)}
