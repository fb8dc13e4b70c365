"""The run of every example: what `dpx.fit` trains, with which noise and for how many steps, and the files it leaves."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax

import dpx
from examples import models, records
from examples.config import Config
from examples.tasks import TASKS

CACHE = Path("~/.cache/dpx")
NO_METRICS = ("step", "epsilon", "unreleased_loss")  # the other numbers of a row of the history


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run. seconds: of this process, so a resumed run counts from its resumption.

    metrics: on public test data, after the last step. headline: the name of the one that tables show. accuracy: the
        metric "test_accuracy", or NaN.
    """

    accuracy: float
    headline: str
    metrics: dict[str, float]
    epsilon: float
    delta: float
    steps: int
    noise_multiplier: float
    parameters: int
    seconds: float
    device: str
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

    Nothing is written before everything has been checked. A resumed run has the batches, the noise, the cost and the
    parameters of a run without the interruption; at most `checkpoint_every` steps are repeated.
    """
    start_time = time.perf_counter()
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    folder = records.RunFolder(output_dir, resume=resume)
    folder.require_same("config", config.as_dict())
    folder.require_same("versions", records.versions())

    task = TASKS[config.task].build(config, data_dir, cache_dir, progress)
    facts = {"examples": task.examples, "sha256": task.fingerprint}
    folder.require_same("data", facts)
    sampling = config.sampling_of(facts["examples"])
    key = config.key
    make = config.mechanism_of(
        sampling,
        config.steps_of(sampling, facts["examples"]),
        dpx.keys.stream(key, "mechanism"),
        task.trained,
        **task.of_the_method(key),
        **({"clip_norm": config.clip_norms_of(jax.eval_shape(task.init, key))} if config.per_layer else {}),
    )
    plan = folder.stored["plan"] if folder.stored else plan_of(config, make, sampling, facts["examples"])
    optimizer = make(plan["noise_multiplier"])
    params = task.init(dpx.keys.stream(key, "init"))
    folder.create(config, facts, plan)

    def record(seen: dpx.fitting.Progress) -> None:
        row = {"step": seen.step, "epoch": seen.step / (facts["examples"] / sampling.divisor)}
        row |= {"epsilon": seen.epsilon, "delta": config.delta} | seen.metrics
        folder.add_metrics(row | {records.NOT_PRIVATE: seen.unreleased_loss})

    fitted = dpx.fit(
        task.loss,
        optimizer,
        params,
        task.train,
        key=dpx.keys.stream(key, "batches"),
        steps=plan["steps"],
        delta=config.delta,
        accountant=config.accountant,
        evaluate=task.evaluate,
        evaluate_every=evaluate_every,
        callbacks=[record],
        checkpoints=folder.path / "checkpoints",
        checkpoint_every=checkpoint_every,
        progress=progress,
        loss_at=dpx.coordinates.zero_frozen_params if config.masked_loss else None,
        microbatch_size=config.microbatch_size,
    )
    metrics = {name: value for name, value in fitted.history[-1].items() if name not in NO_METRICS}
    result = Result(
        accuracy=metrics.get("test_accuracy", math.nan),
        headline=task.headline,
        metrics=metrics,
        epsilon=fitted.epsilon,
        delta=config.delta,
        steps=fitted.steps,
        noise_multiplier=plan["noise_multiplier"],
        parameters=models.parameter_count(fitted.params),
        seconds=round(time.perf_counter() - start_time, 1),
        device=jax.devices()[0].device_kind,
        output_dir=str(folder.path),
    )
    report = dataclasses.replace(fitted.report, dataset=config.dataset)
    if config.epsilon is not None:
        target = dpx.Budget(epsilon=config.epsilon, delta=config.delta, steps=fitted.steps)
        report = dataclasses.replace(report, budget=target)
    conclude(folder, config, report, result)
    return result


def plan_of(config: Config, make, sampling, examples: int) -> dict[str, Any]:
    """The noise multiplier, and how many steps may be made with it."""
    steps = config.steps_of(sampling, examples)
    if config.noise_multiplier is None:
        assert config.epsilon is not None
        noise_multiplier = dpx.accounting.calibrate(
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
    """The most steps, up to `steps`, whose cost is at most the configured epsilon; ValueError if not even one is."""

    def affordable(count: int) -> bool:
        assert config.epsilon is not None
        cost = dpx.epsilon(mechanism, count, delta=config.delta, accountant=config.accountant)
        return cost <= config.epsilon

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


def conclude(folder, config: Config, report: dpx.reports.PrivacyReport, result: Result) -> None:
    """The files to read after a run; all but config.json and the checkpoints may be shared."""
    records.replace_file(folder.path / "privacy_report.json", report.to_json() + "\n")
    records.replace_file(folder.path / "privacy_report.md", report.to_markdown() + "\n")
    records.replace_file(folder.path / "privacy_report.html", report.to_html())
    shared = {name: value for name, value in config.as_dict().items() if name != "seed"}
    numbers = {name: value for name, value in dataclasses.asdict(result).items() if value == value}  # JSON has no NaN
    summary = {"result": numbers, "config": shared, "versions": records.versions()}
    records.replace_file(folder.path / "result.json", json.dumps(summary, indent=2) + "\n")
    name, value = result.headline.replace("_", " "), result.metrics[result.headline]
    said = f"{value:.1%}" if "accuracy" in result.headline else f"{name} {value:.3g}"
    folder.plot(f"{config.dataset}, {config.method}: {said} at epsilon {result.epsilon:.2f}", result.headline)
