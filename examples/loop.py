"""The run of every example: what `dpx.fit` trains, with which noise and for how many steps, and the files it leaves."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dpx
from examples import data, features, models, public, records, whitening
from examples.config import Config

CACHE = Path("~/.cache/dpx")
EVALUATION_BATCH = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run. seconds: of this process, so a resumed run counts from its resumption."""

    accuracy: float
    epsilon: float
    delta: float
    steps: int
    noise_multiplier: float
    parameters: int
    seconds: float
    output_dir: str


def run(
    config: Config,
    *,
    output_dir: str | Path,
    resume: bool = False,
    data_dir: str | Path | None = None,
    cache_dir: str | Path = CACHE,
    checkpoint_every: int = 100,
    evaluate_every: int | None = None,
    progress: bool = True,
) -> Result:
    """Train as `config` says and write everything into `output_dir`; with `resume`, continue an interrupted run.

    Nothing is written before everything has been checked. A resumed run has the batches, the noise, the bill and the
    parameters of a run without the interruption; at most `checkpoint_every` steps are repeated.
    """
    start_time = time.perf_counter()
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    folder = records.RunFolder(output_dir, resume=resume)
    folder.require_same("config", config.as_dict())
    folder.require_same("versions", records.versions())

    dataset = data.load(config.dataset, data_dir)
    facts = {"examples": len(dataset.train_images), "sha256": records.fingerprint(dataset)}
    folder.require_same("data", facts)
    sampling = config.sampling_of(facts["examples"])
    key = config.key
    make = config.mechanism_of(
        sampling,
        config.steps_of(sampling, facts["examples"]),
        dpx.keys.stream(key, "mechanism"),
        **public.arguments(config, dataset, data_dir, key),
    )
    plan = folder.stored["plan"] if folder.stored else plan_of(config, make, sampling, facts["examples"])
    optimizer = make(plan["noise_multiplier"])
    if config.features == "scattering":
        dataset = features.with_scattering(dataset, cache_dir, progress=progress)
    if config.features == "whitened":
        dataset = whitening.with_whitening(dataset, config.whitening, cache_dir, progress=progress)
    model = model_of(config, dataset)
    params, accuracy_of = model.init(dpx.keys.stream(key, "init")), accuracy_function(model, dataset)
    folder.create(config, facts, plan)

    def record(seen: dpx.fitting.Progress) -> None:
        row = {"step": seen.step, "epoch": seen.step / (facts["examples"] / sampling.divisor)}
        row |= {"epsilon": seen.epsilon, "delta": config.delta} | seen.metrics
        folder.add_metrics(row | {records.NOT_PRIVATE: seen.unreleased_loss})

    fitted = dpx.fit(
        loss_function(model),
        params,
        (dataset.train_images, dataset.train_labels),
        optimizer,
        key=dpx.keys.stream(key, "batches"),
        steps=plan["steps"],
        delta=config.delta,
        accountant=config.accountant,
        evaluate=lambda params: {"test_accuracy": accuracy_of(params)},
        evaluate_every=evaluate_every,
        callbacks=[record],
        checkpoints=folder.path / "checkpoints",
        checkpoint_every=checkpoint_every,
        progress=progress,
        loss_at=dpx.coordinates.masked_params if config.masked_loss else None,
        microbatch_size=config.microbatch_size,
    )
    result = Result(
        accuracy=fitted.history[-1]["test_accuracy"],
        epsilon=fitted.epsilon,
        delta=config.delta,
        steps=fitted.steps,
        noise_multiplier=plan["noise_multiplier"],
        parameters=models.parameter_count(fitted.params),
        seconds=round(time.perf_counter() - start_time, 1),
        output_dir=str(folder.path),
    )
    conclude(folder, config, fitted.report, result)
    return result


def plan_of(config: Config, make, sampling, examples: int) -> dict[str, Any]:
    """The noise multiplier, and how many steps may be made with it."""
    steps = config.steps_of(sampling, examples)
    if config.noise_multiplier is None:
        assert config.epsilon is not None
        noise_multiplier = dpx.calibrate(
            make,
            steps=steps,
            epsilon=config.epsilon,
            delta=config.delta,
            accountant=config.accountant,
        )
        return {"noise_multiplier": noise_multiplier, "steps": steps}
    if config.epsilon is not None:
        steps = affordable_steps(make(config.noise_multiplier), steps, config)
    return {"noise_multiplier": config.noise_multiplier, "steps": steps}


def affordable_steps(mechanism: dpx.Mechanism, steps: int, config: Config) -> int:
    """The most steps, up to `steps`, whose bill is at most the configured epsilon; ValueError if not even one is."""

    def affordable(count: int) -> bool:
        assert config.epsilon is not None
        bill = dpx.epsilon(mechanism, count, delta=config.delta, accountant=config.accountant)
        return bill <= config.epsilon

    if affordable(steps):
        return steps
    fits, overspends = 0, steps
    while overspends - fits > 1:
        middle = (fits + overspends) // 2
        fits, overspends = (middle, overspends) if affordable(middle) else (fits, middle)
    if fits == 0:
        raise ValueError(
            f"epsilon {config.epsilon} does not pay for one step at noise_multiplier {config.noise_multiplier}"
        )
    return fits


def model_of(config: Config, dataset: data.Dataset) -> models.Model:
    """The configured model for images (or features) of the data set's shape."""
    shape, classes = dataset.train_images.shape[1:], dataset.classes
    model = models.build(config.model, input_shape=shape, classes=classes, activation=config.activation)
    return models.centred(model) if config.features == "none" else model


def loss_function(model: models.Model):
    """loss(params, example) of one image, uint8 or float, and its label."""
    loss = models.loss_of(model)
    return lambda params, example: loss(params, (data.as_float(example[0]), example[1]))


def accuracy_function(model: models.Model, dataset: data.Dataset):
    """(params) -> share of the public test images that are classified rightly."""

    @jax.jit
    def correct(params, images, labels):
        logits = jax.vmap(model.apply, (None, 0))(params, data.as_float(images))
        return (logits.argmax(-1) == labels).sum()

    def accuracy(params) -> float:
        rights = 0
        for start in range(0, len(dataset.test_images), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            rights += int(correct(params, np.asarray(dataset.test_images[rows]), dataset.test_labels[rows]))
        return rights / len(dataset.test_images)

    return accuracy


def conclude(folder, config: Config, report: dpx.accounting.PrivacyReport, result: Result) -> None:
    """The files to read after a run; all but config.json and the checkpoints may be shared."""
    records.write(folder.path / "privacy_report.json", report.to_json() + "\n")
    records.write(folder.path / "privacy_report.md", report.to_markdown() + "\n")
    shared = {name: value for name, value in config.as_dict().items() if name != "seed"}
    summary = {"result": dataclasses.asdict(result), "config": shared, "versions": records.versions()}
    records.write(folder.path / "result.json", json.dumps(summary, indent=2) + "\n")
    folder.plot(f"{config.dataset}, {config.method}: {result.accuracy:.1%} at epsilon {result.epsilon:.2f}")
