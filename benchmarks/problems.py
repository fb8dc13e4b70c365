"""The problems that every framework gets: batches, and the number of parameters of each model."""

from typing import NamedTuple

import numpy as np

CLASSES = 10


class Problem(NamedTuple):
    """shape: of one input, images channels last. vocabulary: 0 for images. next_token: predict that, and no class."""

    parameters: int
    shape: tuple[int, ...]
    vocabulary: int = 0
    next_token: bool = False


ON_A_CPU = {
    "mlp": Problem(1_796_010, (28, 28, 1)),
    "adadpigu_cnn": Problem(26_010, (28, 28, 1)),
    "end_to_end_cnn": Problem(550_570, (32, 32, 3)),
    "transformer": Problem(930_826, (64,), vocabulary=1000),
    "resnet20": Problem(272_474, (32, 32, 3)),
}
FOR_A_GPU = {
    "vit_small": Problem(21_668_746, (224, 224, 3)),
    "gpt2_small": Problem(162_447_360, (256,), vocabulary=50_257, next_token=True),
}
PROBLEMS = ON_A_CPU | FOR_A_GPU


def draw(model: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, the same in every process."""
    problem, rng = PROBLEMS[model], np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, size, np.int32)
    if not problem.vocabulary:
        return rng.standard_normal((size, *problem.shape), np.float32), labels
    (length,) = problem.shape
    tokens = rng.integers(0, problem.vocabulary, (size, length + 1), np.int32)
    return tokens[:, :-1], tokens[:, 1:] if problem.next_token else labels


def check_count(model: str, found: int):
    if found != PROBLEMS[model].parameters:
        raise ValueError(f"{model} must have {PROBLEMS[model].parameters} parameters, has {found}")
