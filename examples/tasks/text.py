"""Classification of texts: letters for an LSTM, or bags of words for a perceptron."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from examples import language_models, text_data
from examples.models import loss_of
from examples.tasks.images import accuracy_of
from examples.tasks.task import Kind, Task, fingerprint

if TYPE_CHECKING:
    from examples.config import Config

MODELS = {"char_lstm": language_models.char_lstm, "bag_mlp": language_models.bag_perceptron}
# length: letters of a text that an LSTM reads. bins: of a bag of words. hidden, embedding: widths.
OPTIONS = {"length": 10, "bins": 4096, "hidden": 64, "embedding": 32}


def build(config: Config, data_dir: str | Path | None, cache_dir: str | Path, progress: bool) -> Task:
    """The configured model on the configured texts."""
    del cache_dir, progress
    texts, options = text_data.load(config.dataset, data_dir), config.task_options

    def encode(part):
        if config.model == "char_lstm":
            return text_data.letters(part, options["length"])
        return text_data.bags(part, options["bins"])

    model = MODELS[config.model](options, len(texts.classes))
    inputs, labels, tests = encode(texts.train_texts), texts.train_labels, encode(texts.test_texts)
    accuracy = accuracy_of(model.apply, tests, texts.test_labels)
    return Task(
        train=(inputs, labels),
        examples=len(labels),
        init=model.init,
        loss=loss_of(model),
        evaluate=lambda params: {"test_accuracy": accuracy(params)},
        fingerprint=fingerprint(inputs, labels),
    )


KIND = Kind(build, MODELS, OPTIONS)
