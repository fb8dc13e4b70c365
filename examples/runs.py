"""Training runs that run only once: each has a folder of its own, and continues there after an interruption."""

import json
import math
import operator
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpx
from examples import records
from examples.config import Config
from examples.loop import plan_of, run
from examples.tasks import TASKS

ONLY_AT_THE_END = 10**6


class NotRun(Exception):
    """The run is not there, and the time to make it is over."""


class Runs:
    """The runs in a folder; asking for one that is not there makes it.

    evaluate_every: of `examples.loop.run`; by default only the end. minutes: after them, no run is started; one that is
        asked for raises `NotRun`. places: data_dir and cache_dir of `examples.loop.run`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        evaluate_every: int | None = ONLY_AT_THE_END,
        minutes: float = math.inf,
        **places: Any,
    ):
        self.folder, self.evaluate_every, self.places = folder, evaluate_every, places
        self.end = time.monotonic() + 60 * minutes

    def folder_of(self, name: str) -> Path:
        return self.folder / name.replace(" + ", "-").replace(" ", "-").replace(",", "").lower()

    def documents(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """The contents of result.json of those runs that are finished."""
        files = [self.folder_of(name) / "result.json" for name in names]
        return [json.loads(file.read_text()) for file in files if file.is_file()]

    def result(self, name: str, config: Config) -> dict[str, Any]:
        folder = self.folder_of(name)
        if finished(folder, config) is None:
            if time.monotonic() >= self.end:
                raise NotRun(folder.name)
            result = run(
                config,
                output_dir=folder,
                resume=(folder / "config.json").is_file(),
                progress=False,
                evaluate_every=self.evaluate_every,
                **self.places,
            )
            value = result.metrics[result.headline]
            print(
                f"{folder.name}: {result.headline} {value:.4f} at epsilon {result.epsilon:.4f}, {result.seconds} s",
                flush=True,
            )
        return json.loads((folder / "result.json").read_text())["result"] | {"output_dir": str(folder)}

    def make_together(self, configs: dict[str, Config]) -> None:
        """The runs of these names at once, whose configurations differ in the seed alone: each reads the data once.

        Full batches only. A run has the noise of `result`, and a folder with result.json alone.
        """
        configs = {name: one for name, one in configs.items() if finished(self.folder_of(name), one) is None}
        if not configs:
            return
        start, (config, *_) = time.perf_counter(), configs.values()
        task = TASKS[config.task].build(config, self.places["data_dir"], self.places["cache_dir"], False)
        sampling = config.sampling_of(task.examples)
        if not isinstance(sampling, dpx.FullBatch):
            raise ValueError(f"sampling must be full for runs that are made together, got {config.sampling!r}")
        steps = config.steps_of(sampling, task.examples)
        plan = plan_of(config, config.mechanism_of(sampling, steps, config.key), sampling, task.examples)

        def optimizer_of(key):
            key = dpx.keys.stream(key, "mechanism")
            return config.mechanism_of(sampling, plan["steps"], key, task.trained)(plan["noise_multiplier"])

        @jax.jit
        def step(key, params, state, batch):
            made = dpx.private_updates(task.loss, optimizer_of(key), microbatch_size=config.microbatch_size)
            updates, state, _ = made(params, batch, state)
            return optax.apply_updates(params, updates), state

        keys = jnp.stack([one.key for one in configs.values()])
        params = jax.vmap(lambda key: task.init(dpx.keys.stream(key, "init")))(keys)
        state = jax.vmap(lambda key, params: optimizer_of(key).init(params))(keys, params)
        batch, together = dpx.Batch(jax.tree.map(jnp.asarray, task.train), None), jax.vmap(step, (0, 0, 0, None))
        for _ in range(plan["steps"]):
            params, state = together(keys, params, state, batch)
        epsilon = dpx.epsilon(optimizer_of(keys[0]), plan["steps"], delta=config.delta, accountant=config.accountant)
        seconds = (time.perf_counter() - start) / len(configs)
        for i, (name, one) in enumerate(configs.items()):
            found = plan | {"epsilon": epsilon, "seconds": round(seconds, 1), "device": jax.devices()[0].device_kind}
            found["accuracy"] = task.evaluate(jax.tree.map(operator.itemgetter(i), params))["test_accuracy"]
            shared = {key: value for key, value in one.as_dict().items() if key != "seed"}
            self.folder_of(name).mkdir(parents=True, exist_ok=True)
            document = {"result": found, "config": shared, "versions": records.versions()}
            records.replace_file(self.folder_of(name) / "result.json", json.dumps(document, indent=2) + "\n")
            print(f"{name}: {found['accuracy']:.4f} at epsilon {epsilon:.4f}", flush=True)

    def heading(self, module: str, seeds: Iterable[int]) -> str:
        """The command, the date, the seeds, and the versions of all runs."""
        versions: dict[str, set[str]] = {}
        for file in self.folder.rglob("result.json"):
            for name, version in json.loads(file.read_text())["versions"].items():
                versions.setdefault(name, set()).add(version)
        found = (f"{name} {' and '.join(sorted(each))}" for name, each in versions.items())
        listed = ", ".join(found) if versions else "no run yet"
        return f"`python -m {module}`, {time.strftime('%Y-%m-%d')}, seeds {', '.join(map(str, seeds))}; {listed}."


def finished(folder: Path, config: Config) -> dict[str, Any] | None:
    """The contents of result.json of the run in `folder`, or None; ValueError if it is a run of other settings."""
    if not (folder / "result.json").is_file():
        return None
    found = json.loads((folder / "result.json").read_text())
    if Config(**found["config"], seed=config.seed) != config:
        raise ValueError(f"{folder} must hold a run of these settings, got another run; take another folder of runs")
    return found


def described(choice: dict[str, Any]) -> str:
    """The choice in words."""
    numbers = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in choice.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in numbers.items()) or "as the network"
