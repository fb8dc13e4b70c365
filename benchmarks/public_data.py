"""What public data give a linear model on the embeddings of a public encoder, on two tasks at a true epsilon.

`python -m benchmarks.public_data` writes results/public_data.md. Every way has trials of its learning rate on a fifth
of the training texts; test texts choose nothing. Epsilon does not cover the choice, because the texts are public here.
Sources: public gradients behind the mechanism, DOPE-SGD; curvature of public data, NoiseCurve.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from benchmarks import report
from examples import encoder, features, text_data
from examples.loop import CACHE

LENGTH, EPSILONS, DELTA, SEEDS, TUNING_SEED = 32, (0.5, 2.0), 1e-5, range(5), 100
TASKS = {"movie_snippets": (None, None), "newsgroups": (6000, 2000)}  # most texts to train on and to test on
OWN, OTHERS = 256, 2048  # public texts: labelled ones of the task, and those of the other task
BATCH, EPOCHS, RATES = 1024, 25, (3e-3, 1e-2, 3e-2)  # of Adam
RIDGE = 0.1  # of a covariance, times its mean eigenvalue
START_STEPS, START_DECAY = 200, 1e-2  # of a model of the public texts alone


class Way(NamedTuple):
    """inputs: "", "mean" or "whitened". public: the texts of these. start: from the model of the task's public texts.
    share: of their mean clipped gradient in the update, which has the private one besides."""

    words: str
    inputs: str = ""
    public: str = "own"
    start: bool = False
    share: float = 0.0


WAYS = (
    Way("nothing"),
    Way("the mean of the other task's texts", "mean", "other"),
    Way("the mean of the task's", "mean"),
    Way("the covariance of the other task's", "whitened", "other"),
    Way("the covariance of the task's", "whitened"),
    Way("a start from a model of the task's", start=True),
    Way("their gradient as a fifth of the update", share=0.2),
    Way("their gradient as half of the update", share=0.5),
    Way("the start, and a fifth", start=True, share=0.2),
    Way("the start, and the covariance of the other task's", "whitened", "other", True),
)


class Texts(NamedTuple):
    """Embeddings float32 (N, width) and labels int32 (N,) of the private texts, the public and the test texts."""

    private: tuple[jax.Array, jax.Array]
    public: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]

    def held_out(self) -> "Texts":
        """A fifth of the private texts in place of the test texts."""
        cut = len(self.private[1]) // 5
        (inputs, labels), (first, last) = self.private, (slice(cut), slice(cut, None))
        return self._replace(private=(inputs[last], labels[last]), test=(inputs[first], labels[first]))


@functools.cache
def texts_of(task: str, cache_dir: Path) -> Texts:
    found, folder, parts = text_data.load(task), encoder.folder_of(), []
    pairs = (found.train_texts, found.train_labels), (found.test_texts, found.test_labels)
    for (texts, labels), most in zip(pairs, TASKS[task], strict=True):
        chosen = np.random.default_rng(0).permutation(len(labels))[:most]
        tokens = encoder.tokens_of([texts[at] for at in chosen], folder, LENGTH)
        embed = functools.partial(encoder.states_of, tokens, folder, encoder.sizes_of(folder).layers, pool=True)
        states = features.kept(embed, tokens, task, "benchmarks.public_data", cache_dir)
        parts.append((jnp.asarray(states[:, 0], jnp.float32), jnp.asarray(labels[chosen], jnp.int32)))
    (inputs, labels), test = parts
    return Texts((inputs[OWN:], labels[OWN:]), (inputs[:OWN], labels[:OWN]), test)


def moved(way: Way, texts: Texts, others: jax.Array) -> Texts:
    """The texts with the inputs of the way, of mean square 1. others: embeddings of the other task's texts."""
    if not way.inputs:
        return texts
    public = texts.public[0] if way.public == "own" else others
    mean = public.mean(0)
    values, vectors = jnp.linalg.eigh(jnp.cov(public.T))
    scale = jax.lax.rsqrt(values.clip(0) + RIDGE * values.mean()) if way.inputs == "whitened" else jnp.ones_like(values)

    def move(pair):
        inputs = (pair[0] - mean) @ vectors * scale
        return inputs * jax.lax.rsqrt((inputs**2).mean(1, keepdims=True)), pair[1]

    return texts._replace(private=move(texts.private), public=move(texts.public), test=move(texts.test))


def loss(params, example):
    inputs, label = example
    return optax.softmax_cross_entropy_with_integer_labels(inputs @ params["w"] + params["b"], label)


def right(params, examples) -> jax.Array:
    """The share of the examples that the model labels as they are."""
    inputs, labels = examples
    return ((inputs @ params["w"] + params["b"]).argmax(1) == labels).mean()


def started(texts: Texts) -> Any:
    """The linear model of the public texts alone."""
    optimizer = optax.adamw(1e-2, weight_decay=START_DECAY)

    def body(carry, _):
        grads = jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, texts.public).mean())(carry[0])
        updates, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    params = zeros(texts)
    return jax.lax.scan(body, (params, optimizer.init(params)), length=START_STEPS)[0][0]


def zeros(texts: Texts) -> Any:
    inputs, labels = texts.private
    classes = int(labels.max()) + 1
    return {"w": jnp.zeros((inputs.shape[1], classes)), "b": jnp.zeros(classes)}


def clipped_mean(params, examples) -> Any:
    """The mean of gradients that are clipped to norm 1, as the mechanism clips the private ones."""
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, examples)
    norms = jax.vmap(optax.global_norm)(grads)
    return jax.tree.map(lambda leaf: jnp.tensordot(1 / norms.clip(1), leaf, 1) / len(norms), grads)


@functools.partial(jax.jit, static_argnames=("sampling", "noise_multiplier"))
def accuracies(sampling, noise_multiplier, key, rows, state, params, texts, share, rates) -> jax.Array:
    """Of the test texts, for each rate, after a step for every draw in rows."""
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    step, adam = dpx.private_updates(loss, mechanism), optax.scale_by_adam()

    def of_rate(rate):
        def body(carry, row):
            params, state, of_adam = carry
            updates, state, _ = step(params, row.batch(texts.private), state)
            mixed = jax.tree.map(lambda u, g: (1 - share) * u + share * g, updates, clipped_mean(params, texts.public))
            moves, of_adam = adam.update(mixed, of_adam)
            return (jax.tree.map(lambda p, m: p - rate * m, params, moves), state, of_adam), None

        trained = jax.lax.scan(body, (params, state, adam.init(params)), rows)[0][0]
        return right(trained, texts.test)

    return jax.lax.map(of_rate, rates)


@functools.cache
def prepared(count: int, width: int, classes: int, epsilon: float, seed: int) -> tuple[Any, ...]:
    """What the ways share, with one key and so one noise: sampling, noise multiplier, key, draws and first state."""
    sampling, steps = dpx.PoissonSampling(examples=count, batch_size=BATCH), round(EPOCHS * count / BATCH)
    key, budget = dpx.secret_key(seed), dpx.Budget(epsilon=epsilon, delta=DELTA, steps=steps)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key)
    state = mechanism.init({"w": jnp.zeros((width, classes)), "b": jnp.zeros(classes)})
    rows = sampling.draw_ahead(key, state, steps, size=sampling.usual_rows)
    return sampling, mechanism.noise_multiplier, key, rows, state


def trained(texts: Texts, params: Any, way: Way, epsilon: float, rates: Sequence[float], seed: int) -> list[float]:
    """The accuracy in percent with each rate."""
    run = prepared(len(texts.private[1]), *params["w"].shape, epsilon, seed)
    found = accuracies(*run, params, texts, way.share, jnp.array(rates))
    return [100 * float(one) for one in found]


def line(texts: Texts, params: Any, way: Way, epsilon: float) -> tuple[float, list[float]]:
    """The rate that was best in the trials, and the accuracy of each seed with it."""
    tried = trained(texts.held_out(), params, way, epsilon, RATES, TUNING_SEED)
    rate = RATES[int(np.argmax(tried))]
    return rate, [trained(texts, params, way, epsilon, [rate], seed)[0] for seed in SEEDS]


def cells(found: list[float], plain: list[float]) -> str:
    gains = [one - other for one, other in zip(found, plain, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    against = f", {statistics.mean(gains):+.2f} ± {error:.2f}" if found is not plain else ""
    return f"**{statistics.mean(found):.2f}**{against}"


def table(task: str, cache_dir: Path) -> str:
    texts = texts_of(task, cache_dir)
    (other,) = TASKS.keys() - {task}
    others, rows, plain = texts_of(other, cache_dir).private[0][:OTHERS], [], {}
    for way in WAYS:
        changed = moved(way, texts, others)
        params = started(changed) if way.start else zeros(changed)
        row = [way.words, f"{100 * float(right(params, changed.test)):.2f}" if way.start else ""]
        for epsilon in EPSILONS:
            rate, found = line(changed, params, way, epsilon)
            row += [cells(found, plain.setdefault(epsilon, found)), f"{rate:g}"]
        print(*row, sep=" | ", flush=True)
        rows.append(row)
    columns = itertools.chain(*((f"accuracy at epsilon {epsilon:g}, gain", "rate") for epsilon in EPSILONS))
    return report.grid(["public data give", "the start alone", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    given = parser.parse_args()
    found, tables = {task: texts_of(task, given.cache_dir) for task in TASKS}, {}
    began = time.process_time()
    for task, texts in found.items():
        sizes = f"{len(texts.private[1]):,} private texts, {OWN} public ones, {len(texts.test[1]):,} to test"
        tables[f"{task}, {sizes}"] = table(task, given.cache_dir)
    seeds = ", ".join(map(str, SEEDS))
    libraries = ("jax", "jaxlib", "optax")
    heading = report.heading("benchmarks.public_data", libraries, seeds=seeds)
    seconds = time.process_time() - began
    words = (
        f"A linear model on the embeddings of all-MiniLM-L6-v2, {LENGTH} tokens of a text: {EPOCHS} epochs of Poisson "
        f"batches of {BATCH:,}, Adam, clip norm 1, delta {DELTA:g}, PLD. Each way has trials of the rates "
        f"{', '.join(map(str, RATES))} on a fifth of the private texts, which are kept out, with seed {TUNING_SEED}. "
        f"Gains are those over no public data, seed by seed, with their standard error. A mean or a covariance is that "
        f"of {OWN:,} texts of the task or of {OTHERS:,} of the other task, and moves the embeddings before training. "
        f"Behind the embeddings, the page took {seconds:.0f} seconds of a CPU core."
    )
    print(report.write("public_data", heading, words, tables))


if __name__ == "__main__":
    main()
