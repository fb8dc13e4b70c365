"""Two small tasks: digits, and the packages that docstrings are of. Both are public."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples import data, language_models, models, text_data
from examples.finetune.documents import docstrings
from examples.tasks import images

PACKAGES = ("scipy", "jax", "sklearn", "numpy", "matplotlib")
BINS, LENGTHS, OF_EACH = 1024, (60, 300), 1000  # of a bag; characters of a docstring; docstrings of a package


class Problem(NamedTuple):
    """A model and its data. loss: of (params, (input, label)). apply: (params, input) -> logits (classes,)."""

    init: Callable[[jax.Array], Any]
    loss: Callable[..., jax.Array]
    apply: Callable[..., jax.Array]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    def for_trials(self) -> "Problem":
        """With a sixth of the training data, in a fixed order, in place of the test data."""
        order = np.random.default_rng(1).permutation(len(self.train[1]))
        first = len(order) * 5 // 6
        (inputs, labels), kept, held = self.train, order[:first], order[first:]
        return self._replace(train=(inputs[kept], labels[kept]), test=(inputs[held], labels[held]))


def digits(name: str = "mnist5k") -> Problem:
    """A perceptron with 32 hidden units on images of digits; "mnist5k" has 4,000 to train and 1,000 to test."""
    found = data.load(name)
    shape = found.train_images.shape[1:]
    model = models.centred(models.perceptron(32)(shape, found.classes, jnp.tanh))
    train, test = (found.train_images, found.train_labels), (found.test_images, found.test_labels)
    return Problem(
        model.init,
        images.loss_function(model),
        lambda params, image: model.apply(params, data.as_float(image)),
        train,
        test,
    )


def some_docstrings(package: str) -> list[str]:
    """At most OF_EACH beginnings of docstrings, from the files of an installed package in a fixed order."""
    texts, found = {}, importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the docstrings are those of the package {package}: pip install {package}")
    folder = Path(found.origin).parent
    files = sorted(file.relative_to(folder) for file in folder.rglob("*.py") if "test" not in str(file))
    for place in np.random.default_rng(0).permutation(len(files)):
        texts |= {text[: LENGTHS[1]]: 0 for text in docstrings(folder / files[place]) if len(text) >= LENGTHS[0]}
        if len(texts) >= OF_EACH:
            break
    return list(texts)[:OF_EACH]


def docs() -> Problem:
    """A perceptron with 32 hidden units on bags of words: which package is a docstring of?"""
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        texts += (found := some_docstrings(package))
        labels += [label] * len(found)
    parts = text_data.split_fifth("docs", PACKAGES, texts, np.asarray(labels, np.int32))
    model = language_models.bag_perceptron({"bins": BINS, "hidden": 32}, len(PACKAGES))
    train = text_data.bags(parts.train_texts, BINS), parts.train_labels
    test = text_data.bags(parts.test_texts, BINS), parts.test_labels
    return Problem(model.init, models.loss_of(model), model.apply, train, test)


class Task(NamedTuple):
    """problem: its model and data. start: the first learning rate of SGD at epsilon 1, and that of Adam."""

    title: str
    problem: Callable[[], Problem]
    epochs: float
    batch_size: int
    clip_norm: float
    start: tuple[float, float]


TASKS = {
    "mnist": Task("mnist5k, a perceptron of 25,450 parameters", digits, 20.0, 500, 1.0, (0.1, 0.01)),
    "docs": Task("docstrings by package, a perceptron on bags of words", docs, 20.0, 500, 1.0, (0.1, 0.01)),
}
