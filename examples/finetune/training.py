"""The loss of a unit, and the run: what `dpx.fit` trains, with which noise, and the files that it leaves."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpx
from examples import records
from examples.finetune import checkpoints, documents, leakage
from examples.finetune.model import is_lora
from examples.finetune.rows import Layout, Rows, rows_of, tokenizer_of
from examples.finetune.writing import write_texts

OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate),
}
TEST_ROWS, AT_ONCE = 1024, 64  # at most; rows that are read together
SAMPLES = 8  # texts at the end of every run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `python -m examples.finetune --help` explains each. epsilon: inf is without noise. seed: secret."""

    base: str
    data: str = "docs"
    text: str = "text"
    user: str | None = None
    layout: Layout = "packed"
    length: int = 128
    most: int = 2
    epsilon: float = 3.0
    delta: float = 1e-5
    steps: int = 60
    batch_size: int = 256
    clip_norm: float = 0.5
    optimizer: str = "adam"
    learning_rate: float = 1e-2
    lora_rank: int = 4
    canaries: int = 0
    units: int = 0
    seed: int = dataclasses.field(repr=False)

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {sorted(OPTIMIZERS)}, got {self.optimizer!r}")
        for name in ("canaries", "units"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def key(self) -> jax.Array:
        return dpx.secret_key(self.seed)


class Job(NamedTuple):
    """What a run needs. users: a source of units. test: public rows. private: the private rows, with the canaries."""

    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Any
    users: dpx.UserData
    private: Rows
    test: Rows
    fingerprint: str


def prepare(settings: Settings) -> Job:
    """The model with the parameters of its checkpoint, and the rows of the data. Reads only."""
    tokenizer = tokenizer_of(settings.base)
    key = dpx.keys.stream(settings.key, "lora")
    graphdef, params = checkpoints.load(settings.base, lora_rank=settings.lora_rank, key=key)
    sizes = nnx.merge(graphdef, params).sizes
    if tokenizer.vocabulary > sizes.vocabulary:
        raise ValueError(f"the tokenizer has {tokenizer.vocabulary} tokens, and the model only {sizes.vocabulary}")
    corpus = documents.load(settings.data, text=settings.text, user=settings.user)
    private, test = corpus.split()
    private = private.some(settings.units) if settings.units else private
    rows, tests = (rows_of(part, tokenizer, length=settings.length, layout=settings.layout) for part in (private, test))
    if settings.canaries:
        rows = leakage.with_canaries(rows, leakage.canaries(settings.canaries), tokenizer, settings.most)
    users = rows.users(settings.most, corpus.unit)
    return Job(graphdef, params, tokenizer, users, rows, tests, corpus.fingerprint)


def token_losses(model: Any, tokens: jax.Array) -> jax.Array:
    """Of rows int32 (rows, length + 1), the loss of every token behind the first, float32 (rows, length)."""
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def counted(tokens: jax.Array, sizes: jax.Array) -> jax.Array:
    """Which of these losses count, bool (rows, length): a row of `sizes` tokens predicts all of them but the first."""
    return jnp.arange(tokens.shape[1] - 1)[None] < sizes[:, None] - 1


def loss_of_rows(model: Any, tokens: jax.Array, sizes: jax.Array) -> jax.Array:
    """The mean loss of the tokens that count; 0 if none does."""
    count = counted(tokens, sizes)
    total = jnp.sum(token_losses(model, tokens), where=count)
    return total / jnp.maximum(count.sum(), 1).astype(jnp.float32)


def loss_of(graphdef: nnx.GraphDef) -> Callable[[Any, Any], jax.Array]:
    """loss(params, unit) over all rows of one unit, so that the unit's whole gradient is clipped as one.

    unit: ((tokens int32 (most, length + 1), sizes int32 (most,)), included bool (most,)), of `dpx.UserData`.
    """

    def loss(params, unit):
        (tokens, sizes), included = unit
        return loss_of_rows(nnx.merge(graphdef, params), tokens, jnp.where(included, sizes, 0))

    return loss


def optimizer_of(settings: Settings, units: int) -> dpx.Mechanism:
    """DP-SGD on the trained parameters, and the transforms behind it."""
    sampling = dpx.PoissonSampling(examples=units, batch_size=settings.batch_size)
    budget = (
        dpx.Budget(epsilon=settings.epsilon, delta=settings.delta, steps=settings.steps) if private(settings) else 0.0
    )
    key = dpx.keys.stream(settings.key, "mechanism")
    mechanism = dpx.dp_sgd(clip_norm=settings.clip_norm, noise_multiplier=budget, sampling=sampling, key=key)
    if settings.lora_rank:
        mechanism = dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask=is_lora))
    return dpx.chain(mechanism, OPTIMIZERS[settings.optimizer](settings.learning_rate))


def private(settings: Settings) -> bool:
    return settings.epsilon < math.inf


def over_devices() -> jax.sharding.NamedSharding:
    """The units of a batch over all devices, one of which is enough. The parameters are on each."""
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axes)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


@functools.partial(jax.jit, static_argnums=0)
def _summed(graphdef, params, tokens: jax.Array, sizes: jax.Array) -> jax.Array:
    """The summed loss of each row, float32 (rows,)."""
    losses = token_losses(nnx.merge(graphdef, params), tokens)
    return jnp.sum(losses, axis=1, where=counted(tokens, sizes))


def row_losses(graphdef: nnx.GraphDef) -> Callable[[Any, Rows], tuple[np.ndarray, np.ndarray]]:
    """(params, rows) -> the summed loss of each row, float64 (rows,), and how many of its tokens count, int (rows,)."""

    def of(params, rows):
        found = []
        for first in range(0, len(rows.tokens), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            tokens, sizes = rows.tokens[part], rows.sizes[part]
            more = AT_ONCE - len(tokens)
            padded = np.pad(tokens, ((0, more), (0, 0))), np.pad(sizes, (0, more))
            found.append(np.asarray(_summed(graphdef, params, *padded), np.float64)[: len(tokens)])
        return np.concatenate(found), np.maximum(rows.sizes - 1, 0)

    return of


def run(
    settings: Settings,
    *,
    output_dir: str | Path,
    resume: bool = False,
    synthesize: int = 0,
    temperature: float = 1.0,
    checkpoint_every: int = 20,
    progress: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """Trains as the settings say, and writes all files; with `resume`, continues an interrupted run, bit for bit.

    synthesize: how many texts are written to synthetic.jsonl. stop_after: steps, to try an interruption.
    Returns the numbers of result.json. Raises ValueError before anything is written, for what does not fit.
    """
    start, folder = time.perf_counter(), records.RunFolder(output_dir, resume=resume)
    folder.require_same("config", settings.as_dict())
    folder.require_same("versions", records.versions())
    job = prepare(settings)
    facts = {"units": len(job.users), "rows": len(job.private.tokens), "sha256": job.fingerprint}
    folder.require_same("data", facts)
    optimizer = optimizer_of(settings, len(job.users))
    folder.create(settings, facts, {"noise_multiplier": optimizer.noise_multiplier, "steps": settings.steps})
    losses = row_losses(job.graphdef)
    spread = slice(None, None, -(-len(job.test.tokens) // TEST_ROWS))  # over all units
    tested = Rows(*(leaf[spread] for leaf in job.test))

    def evaluate(params) -> dict[str, float]:
        totals, counts = losses(params, tested)
        return {"test_loss": totals.sum() / counts.sum()}

    before = evaluate(job.params)["test_loss"]
    fitted = dpx.fit(
        loss_of(job.graphdef),
        optimizer,
        job.params,
        job.users,
        key=dpx.keys.stream(settings.key, "batches"),
        steps=settings.steps if stop_after is None else stop_after,
        delta=settings.delta,
        evaluate=evaluate,
        checkpoints=folder.path / "checkpoints",
        sharding=over_devices(),
        checkpoint_every=checkpoint_every,
        progress=progress,
    )
    result = {
        "base_test_loss": before,
        "test_loss": fitted.history[-1]["test_loss"],
        "epsilon": fitted.epsilon,
        "delta": fitted.delta,
        "steps": fitted.steps,
        "noise_multiplier": optimizer.noise_multiplier,
        "units": len(job.users),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(job.params)),
        "trained": sum(leaf.size for leaf in jax.tree.leaves(_trained(job.params, settings))),
    }
    if settings.canaries:
        result |= leakage.attack(job, fitted.params, losses, settings, fitted.epsilon)
    if fitted.steps == settings.steps:
        write = lambda count, name: write_texts(  # noqa: E731
            job.graphdef,
            fitted.params,
            job.tokenizer,
            count=count,
            length=settings.length,
            key=dpx.keys.stream(settings.key, name),
            temperature=temperature,
        )
        conclude(folder, job, settings, fitted, result, write, synthesize)
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def _trained(params: Any, settings: Settings) -> Any:
    keep = lambda path, leaf: leaf if not settings.lora_rank or is_lora(jax.tree_util.keystr(path)) else None  # noqa: E731
    return jax.tree_util.tree_map_with_path(keep, params)


def conclude(folder, job: Job, settings: Settings, fitted, result: dict, write: Callable, synthesize: int) -> None:
    """The files after a run. Do not share config.json, the checkpoints, metrics.jsonl and unreleased.json."""
    for row in fitted.history:
        folder.add_metrics({("unreleased_training_loss" if k == "unreleased_loss" else k): v for k, v in row.items()})
    if settings.canaries:
        leaks = {name: value for name, value in result.items() if name.startswith(leakage.UNRELEASED)}
        records.replace_file(folder.path / "unreleased.json", json.dumps(leaks, indent=2) + "\n")
    records.replace_file(folder.path / "privacy_report.json", fitted.report.to_json() + "\n")
    records.replace_file(folder.path / "privacy_report.md", fitted.report.to_markdown() + "\n")
    checkpoints.save(folder.path / "model", job.graphdef, fitted.params)
    samples = [f"--- {number}\n{text}" for number, text in enumerate(write(SAMPLES, "samples"), 1)]
    records.replace_file(folder.path / "samples.txt", "\n".join(samples) + "\n")
    if synthesize:
        lines = [json.dumps({"text": text}) for text in write(synthesize, "synthesize")]
        records.replace_file(folder.path / "synthetic.jsonl", "\n".join(lines) + "\n")
    shared = {name: value for name, value in settings.as_dict().items() if name != "seed"}
    public = {name: value for name, value in result.items() if not name.startswith(leakage.UNRELEASED)}
    stored = {"result": public, "config": shared, "versions": records.versions()}
    records.replace_file(folder.path / "result.json", json.dumps(stored, indent=2) + "\n")
