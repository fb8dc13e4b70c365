"""What a run trains, and how its result is judged: all that `examples.loop` needs to know of data and model."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """Private data, a model on them, and its evaluation on public data.

    train: the private data as `dpx.fit` takes them: arrays with one leading axis, a source, or a `dpx.UserData`.
    examples: how many examples, or users, they are.
    init: (key) -> params. loss: (params, example) -> float32 (), of one example, or of one user.
    evaluate: (params) -> metrics on PUBLIC test data: no cost counts what it reads.
    fingerprint: of the training data, to know them again when a run is resumed (`fingerprint`).
    headline: the metric that tables and plots show; those with "accuracy" in their name are shares.
    trained: (path) -> whether the parameter is trained, as `dpx.coordinates.trainable` takes it; None trains all.
    of_the_method: (key) -> the arguments of the method's builder that come from data, such as public gradients.
    """

    train: Tree
    examples: int
    init: Callable[[jax.Array], Tree]
    loss: Callable[[Tree, Any], jax.Array]
    evaluate: Callable[[Tree], dict[str, float]]
    fingerprint: str
    headline: str = "test_accuracy"
    trained: Callable[[str], bool] | None = None
    of_the_method: Callable[[jax.Array], dict[str, Any]] = field(default=lambda key: {})


class Kind(NamedTuple):
    """One kind of tasks.

    build: (config, data_dir, cache_dir, progress) -> Task; ValueError or FileNotFoundError for data that do not fit.
    models: the names that `Config.model` may have. options: the task's own options, with their defaults.
    """

    build: Callable[..., Task]
    models: Collection[str]
    options: Mapping[str, Any]


def fingerprint(*arrays: np.ndarray) -> str:
    """SHA-256 of the numbers in the arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
