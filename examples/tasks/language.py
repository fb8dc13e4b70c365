"""Language models that learn to write a target after its source: GPT-2, or a small one of the same architecture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import generation, generation_metrics, language_models, text_data
from examples.models import Model, Tree
from examples.tasks.task import Kind, Task, fingerprint

if TYPE_CHECKING:
    from examples.config import Config

MODELS = ("gpt2_mini", "gpt2")
EVALUATION_BATCH = 64
# checkpoint: folder of "gpt2". vocabulary, width, layers, heads: of "gpt2_mini", whose words are the most frequent of
# public texts. pretrain: its steps on public texts. length: tokens of source and target. lora_rank: 0 trains all
# parameters. examples: private pairs, at most; 0 takes all. generate: test sources that are continued, with `beams`.
OPTIONS = {
    "checkpoint": "~/.cache/dpx/gpt2",
    "vocabulary": 1500,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "pretrain": 1000,
    "length": 40,
    "lora_rank": 0,
    "examples": 0,
    "generate": 0,
    "beams": 1,
}


def build(config: Config, data_dir: str | Path | None, cache_dir: str | Path, progress: bool) -> Task:
    """The configured model on the configured pairs."""
    del progress
    pairs, options = text_data.load_pairs(config.dataset, data_dir), config.task_options
    if config.model == "gpt2":
        tokenizer = text_data.BytePairs(options["checkpoint"])
        model, base = language_models.load_gpt2(options["checkpoint"], lora_rank=options["lora_rank"])
        start = lambda: base  # noqa: E731
    else:
        tokenizer = text_data.Words((text for pair in pairs.public for text in pair), options["vocabulary"])
        sizes = (len(tokenizer.tokens), *(options[name] for name in ("length", "width", "layers", "heads")))
        model = language_models.gpt2(language_models.GPT2Sizes(*sizes, lora_rank=options["lora_rank"]))
        public = text_data.sequences(unrelated(pairs.public), tokenizer, options["length"])
        start = lambda: pretrained(model, public, options, cache_dir)  # noqa: E731
    train = text_data.sequences(pairs.train[: options["examples"] or None], tokenizer, options["length"])
    return Task(
        train=train,
        examples=len(train[0]),
        init=lambda key: with_lora(model.init(key), start()),
        loss=loss_of(model),
        evaluate=evaluation(model, pairs, tokenizer, options),
        fingerprint=fingerprint(*train),
        headline="test_loss",
        trained=language_models.is_lora if options["lora_rank"] else None,
    )


def unrelated(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The targets, each after the source of a random pair: they teach the language, but not the task."""
    order = np.random.default_rng(0).permutation(len(pairs))
    return [(pairs[other][0], target) for other, (_, target) in zip(order, pairs, strict=True)]


def with_lora(fresh: Tree, base: Tree) -> Tree:
    """The base, which is public, with LoRA matrices from the run's own key."""

    def leaf_of(place, new, old):
        return new if language_models.is_lora(jax.tree_util.keystr(place)) else jnp.array(old)

    return jax.tree_util.tree_map_with_path(leaf_of, fresh, base)


def loss_of(model: Model) -> Callable[[Tree, Any], jax.Array]:
    """(params, (tokens (length,), counted (length,))) -> the mean loss of the target's tokens, of one sequence."""

    def loss(params, example):
        tokens, counted = example
        losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens)[:-1], tokens[1:])
        return (losses * counted[1:]).sum() / jnp.maximum(counted.sum(), 1)

    return loss


def evaluation(model: Model, pairs: text_data.Pairs, tokenizer: Any, options: Mapping[str, Any]):
    """(params) -> the test loss of a token, and the metrics of generated text where they are asked for."""
    length = options["length"]
    flat = [(source, target) for source, targets in pairs.test for target in targets]
    tests = text_data.sequences(flat, tokenizer, length)
    loss = loss_of(model)

    @jax.jit
    def total(params, tokens, counted):  # of all tokens
        return (jax.vmap(loss, (None, 0))(params, (tokens, counted)) * counted.sum(1)).sum()

    generate = generation.generator(model.apply, end=tokenizer.end, avoid=tokenizer.unknown, beams=options["beams"])
    asked = pairs.test[: options["generate"]]

    def evaluate(params) -> dict[str, float]:
        parts = [slice(start, start + EVALUATION_BATCH) for start in range(0, len(flat), EVALUATION_BATCH)]
        losses = sum(float(total(params, tests[0][part], tests[1][part])) for part in parts)
        metrics = {"test_loss": losses / float(tests[1].sum())}
        if asked:
            prompts, counted = text_data.sequences([(source, "") for source, _ in asked], tokenizer, length)
            written = generate(params, prompts, counted.argmax(1))
            outputs = [tokenizer.decode(ids) for ids in written]
            metrics |= generation_metrics.score(outputs, [targets for _, targets in asked])
        return metrics

    return evaluate


def pretrained(model: Model, public: tuple[np.ndarray, np.ndarray], options, cache_dir: str | Path) -> Tree:
    """Parameters after training on public sequences without privacy, from a file in `cache_dir` if they are there."""
    names = ("vocabulary", "width", "layers", "heads", "length", "pretrain", "lora_rank")
    words = json.dumps([{name: options[name] for name in names}, fingerprint(*public)])
    file = Path(cache_dir).expanduser() / f"gpt2-mini-{hashlib.sha256(words.encode()).hexdigest()[:16]}.npz"
    fresh = model.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(fresh)
    if file.is_file():
        with np.load(file) as stored:
            return jax.tree.unflatten(structure, [stored[str(number)] for number in range(len(leaves))])
    optimizer, loss = optax.adam(optax.cosine_decay_schedule(3e-3, max(1, options["pretrain"]))), loss_of(model)

    @jax.jit
    def step(params, state, batch):
        mean = lambda params: jax.vmap(loss, (None, 0))(params, batch).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    rng, params, state = np.random.default_rng(0), fresh, optimizer.init(fresh)
    for _ in range(options["pretrain"]):
        rows = rng.integers(0, len(public[0]), 64)
        params, state = step(params, state, tuple(array[rows] for array in public))
    file.parent.mkdir(parents=True, exist_ok=True)
    waiting = file.with_suffix(".part.npz")
    arrays: dict[str, Any] = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(params))}
    np.savez(waiting, **arrays)
    waiting.replace(file)
    return params


KIND = Kind(build, MODELS, OPTIONS)
