"""Image classification: any data set of `examples.data`, as pixels or as fixed features of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from examples import data, features, models, public, vit, whitening
from examples.tasks.task import Kind, Task, fingerprint

if TYPE_CHECKING:
    from examples.config import Config

EVALUATION_BATCH = 500
OPTIONS = {"checkpoint": None}  # a safetensors file with the first parameters, public, of a model of `examples.vit`


def build(config: Config, data_dir: str | Path | None, cache_dir: str | Path, progress: bool) -> Task:
    """The configured model on the configured images."""
    pixels = dataset = data.load(config.dataset, data_dir)
    if config.features == "scattering":
        dataset = features.with_scattering(dataset, cache_dir, progress=progress)
    if config.features == "whitened":
        dataset = whitening.with_whitening(
            dataset, config.whitening, cache_dir, filters=config.filters, progress=progress
        )
    model = model_of(config, dataset)
    accuracy_of = accuracy_function(model, dataset)
    return Task(
        train=(dataset.train_images, dataset.train_labels),
        examples=len(dataset.train_images),
        init=model.init,
        loss=loss_function(model),
        evaluate=lambda params: {"test_accuracy": accuracy_of(params)},
        fingerprint=fingerprint(pixels.train_images, pixels.train_labels),
        of_the_method=lambda key: public.arguments(config, pixels, data_dir, key),
    )


def model_of(config: Config, dataset: data.Dataset) -> models.Model:
    """The configured model for images (or features) of the data set's shape."""
    shape, classes = dataset.train_images.shape[1:], dataset.classes
    model = models.build(config.model, input_shape=shape, classes=classes, activation=config.activation)
    if checkpoint := config.task_options["checkpoint"]:
        if config.model not in vit.SIZES:
            raise ValueError(f"checkpoint must be given with a model of {', '.join(vit.SIZES)}, got {config.model}")
        model = vit.vit(classes, checkpoint, vit.SIZES[config.model])
    return model if dataset.train_images.dtype == np.float16 else models.centred(model)  # float16: features


def loss_function(model: models.Model):
    """loss(params, example) of one image, uint8 or float, and its label."""
    loss = models.loss_of(model)
    return lambda params, example: loss(params, (data.as_float(example[0]), example[1]))


def accuracy_function(model: models.Model, dataset: data.Dataset):
    """(params) -> share of the public test images that are classified rightly."""
    return accuracy_of(
        lambda params, image: model.apply(params, data.as_float(image)), dataset.test_images, dataset.test_labels
    )


def accuracy_of(apply, inputs, labels):
    """(params) -> share of public inputs (N, ...) with their label. apply: (params, input) -> logits (classes,)."""

    @jax.jit
    def correct(params, rows, their_labels):
        return (jax.vmap(apply, (None, 0))(params, rows).argmax(-1) == their_labels).sum()

    def accuracy(params) -> float:
        rights = 0
        for start in range(0, len(inputs), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            rights += int(correct(params, np.asarray(inputs[rows]), labels[rows]))
        return rights / len(inputs)

    return accuracy


KIND = Kind(build, models.MODELS, OPTIONS)
