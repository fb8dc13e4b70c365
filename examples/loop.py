"""The training loop of every example: private steps within a budget, with evaluations, records and checkpoints."""

import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import dpx
from examples import data, features, models, public, records
from examples.config import Config

CACHE = Path("~/.cache/dpx")
EVALUATION_BATCH = 500
MOST_EVALUATIONS = 40


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
    optimizer, steps = make(plan["noise_multiplier"]), plan["steps"]
    if config.epsilon is not None:  # from here on, no batch is drawn for a step that the budget does not pay
        budget = dpx.Budget(epsilon=config.epsilon, delta=config.delta, steps=steps, accountant=config.accountant)
        optimizer = optimizer.replace(budget=budget)

    if config.features == "scattering":
        dataset = features.with_scattering(dataset, cache_dir, progress=progress)
    model = model_of(config, dataset)

    @functools.cache
    def spent(step: int) -> float:
        return dpx.epsilon(optimizer, step, delta=config.delta, accountant=config.accountant)

    params = model.init(dpx.keys.stream(key, "init"))
    folder.create(config, facts, plan)
    with folder.checkpoints(checkpoint_every) as manager:
        tree = {"params": params, "optimizer_state": optimizer.init(params)}
        first_step, tree = records.restore(manager, tree)
        params, state = tree["params"], tree["optimizer_state"]
        if (paid := dpx.steps_taken(state)) != first_step or first_step > steps:
            raise ValueError(f"checkpoint {first_step} of {steps} planned steps holds a state after {paid} steps")
        folder.keep_metrics(first_step)
        make_step, accuracy_of = step_function(model, optimizer, config), accuracy_function(model, dataset)
        per_epoch = facts["examples"] / sampling.divisor
        interval = evaluate_every or max(round(per_epoch), math.ceil(steps / MOST_EVALUATIONS))
        accuracy, batches = None, dpx.keys.stream(key, "batches")

        bar = tqdm(total=steps, initial=first_step, desc=config.dataset, disable=not progress)
        for step in range(first_step, steps):
            batch = sampling.take((dataset.train_images, dataset.train_labels), batches, state)
            params, state, unreleased_loss = make_step(params, state, batch)
            done = step + 1
            if done % interval == 0 or done == steps:
                accuracy, loss = accuracy_of(seen(params, state, config)), float(unreleased_loss)
                folder.add_metrics(
                    {
                        "step": done,
                        "epoch": done / per_epoch,
                        "epsilon": spent(done),
                        "delta": config.delta,
                        "test_accuracy": accuracy,
                        records.NOT_PRIVATE: loss,
                    }
                )
                bar.set_postfix_str(
                    f"accuracy {accuracy:.2%}, epsilon {spent(done):.3f}, loss {loss:.3f} (not private)"
                )
            if done % checkpoint_every == 0 or done == steps:
                tree = {"params": params, "optimizer_state": state}
                records.save(manager, done, tree, force=done == steps)
            bar.update()
        bar.close()

    accuracy = accuracy_of(seen(params, state, config)) if accuracy is None else accuracy
    result = Result(
        accuracy=accuracy,
        epsilon=dpx.epsilon(optimizer, state, delta=config.delta, accountant=config.accountant),
        delta=config.delta,
        steps=dpx.steps_taken(state),
        noise_multiplier=plan["noise_multiplier"],
        parameters=models.parameter_count(params),
        seconds=round(time.perf_counter() - start_time, 1),
        output_dir=str(folder.path),
    )
    conclude(folder, config, optimizer, state, result)
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


def seen(params, state, config: Config):
    """The parameters that the loss is at."""
    return dpx.coordinates.masked_params(params, state) if config.masked_loss else params


def step_function(model: models.Model, optimizer: dpx.Mechanism, config: Config):
    """(params, state, batch) -> (params, state, mean loss of the batch, NOT private)."""

    gradient = dpx.private_grad(models.loss_of(model), optimizer, microbatch_size=config.microbatch_size)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        images, labels = batch.examples
        floats = batch._replace(examples=(data.as_float(images), labels))
        updates, state, unreleased = gradient(seen(params, state, config), floats, state)
        unreleased_loss = unreleased.losses.sum(where=batch.included) / batch.included.sum(dtype=jnp.float32).clip(1)
        return optax.apply_updates(params, updates), state, unreleased_loss

    return step


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


def conclude(folder, config: Config, optimizer, state, result: Result) -> None:
    """The files to read after a run; all but config.json and the checkpoints may be shared."""
    report = dpx.privacy_report(optimizer, state, delta=config.delta)
    records.write(folder.path / "privacy_report.json", report.to_json() + "\n")
    records.write(folder.path / "privacy_report.md", report.to_markdown() + "\n")
    shared = {name: value for name, value in config.as_dict().items() if name != "seed"}
    summary = {"result": dataclasses.asdict(result), "config": shared, "versions": records.versions()}
    records.write(folder.path / "result.json", json.dumps(summary, indent=2) + "\n")
    folder.plot(f"{config.dataset}, {config.method}: {result.accuracy:.1%} at epsilon {result.epsilon:.2f}")
