"""Classification of texts: letters for an LSTM, bags of words for a perceptron, or states of a public encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from examples import encoder, language_models, text_data
from examples.models import loss_of
from examples.tasks.images import accuracy_of
from examples.tasks.task import Kind, Task, fingerprint

if TYPE_CHECKING:
    from examples.config import Config

MODELS = ("char_lstm", "bag_mlp", "encoder")
# length: letters that an LSTM reads, or tokens that an encoder reads. bins: of a bag of words. hidden, embedding:
# widths.
# encoder: its folder; "" is all-MiniLM-L6-v2, where its package is installed. blocks: its last ones, of which "all" is
# trained, or "biases", or "lora" with matrices of lora_rank; 0 is a linear probe.
OPTIONS = {"length": 10, "bins": 4096, "hidden": 64, "embedding": 32}
OPTIONS |= {"encoder": "", "blocks": 0, "trained": "all", "lora_rank": 8}


def build(config: Config, data_dir: str | Path | None, cache_dir: str | Path, progress: bool) -> Task:
    """The configured model on the configured texts."""
    del progress
    texts, options = text_data.load(config.dataset, data_dir), config.task_options
    classes, trained = len(texts.classes), None
    if config.model == "encoder":
        encode, model, trained = encoder.adapted(options, classes, config.dataset, cache_dir)
    elif config.model == "char_lstm":
        encode, model = (
            lambda part: text_data.letters(part, options["length"]),
            language_models.char_lstm(options, classes),
        )
    else:
        encode, model = (
            lambda part: text_data.bags(part, options["bins"]),
            language_models.bag_perceptron(options, classes),
        )
    inputs, labels, tests = encode(texts.train_texts), texts.train_labels, encode(texts.test_texts)
    accuracy = accuracy_of(model.apply, tests, texts.test_labels)
    return Task(
        train=(inputs, labels),
        examples=len(labels),
        init=model.init,
        loss=loss_of(model),
        evaluate=lambda params: {"test_accuracy": accuracy(params)},
        fingerprint=fingerprint(inputs, labels),
        trained=trained,
    )


KIND = Kind(build, MODELS, OPTIONS)
