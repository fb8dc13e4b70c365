"""The files of a run, beside its checkpoints. A file is complete, or it does not exist."""

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import dpx
from dpx.fitting.folder import make_folder, replace_file

NOT_PRIVATE = "unreleased_training_loss"  # the one number in the metrics that the privacy cost does not cover


def versions() -> dict[str, str]:
    """The versions of the packages that decide the numbers of a run."""
    return {"dpx": dpx.__version__} | {name: metadata.version(name) for name in ("jax", "jaxlib", "optax", "flax")}


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file with a JSON object in each line, or []. A last line that was cut off is removed."""
    text = file.read_text() if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


class Described(Protocol):
    """The settings of a run: `examples.config.Config`, or another record."""

    def as_dict(self) -> dict[str, Any]: ...


class RunFolder:
    """The folder of one run. Opening it writes nothing."""

    def __init__(self, path: str | Path, *, resume: bool):
        self.path = Path(path).expanduser().absolute()
        self.stored: dict[str, Any] | None = None
        config_file = self.path / "config.json"
        if resume and not config_file.is_file():
            raise ValueError(f"nothing to resume: {config_file} does not exist")
        if resume:
            self.stored = json.loads(config_file.read_text())
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(
                f"output directory {self.path} is not empty; continue its run with --resume, or name another"
            )

    def require_same(self, what: str, values: dict[str, Any]) -> None:
        """ValueError listing the values that differ from those the stored run was started with."""
        if self.stored is None:
            return
        before, now = self.stored[what], json.loads(json.dumps(values))
        names = sorted(name for name in set(before) | set(now) if before.get(name) != now.get(name))
        if names:
            listing = ", ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)
            raise ValueError(f"cannot resume {self.path} with another {what}: {listing}")

    def create(self, config: Described, data: dict[str, Any], plan: dict[str, Any]) -> None:
        make_folder(self.path)
        if self.stored is None:
            self.stored = {
                "secret": "the seed gives away batches and noise; keep this file and the checkpoints to yourself",
                "config": config.as_dict(),
                "data": data,
                "plan": plan,
                "versions": versions(),
            }
            replace_file(self.path / "config.json", json.dumps(self.stored, indent=2) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The rows written so far."""
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Adds the row of a step; those of later steps were written before the run was interrupted."""
        rows = [other for other in self.metrics() if other["step"] < row["step"]] + [row]
        replace_file(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def plot(self, title: str, headline: str) -> None:
        """The headline metric and epsilon against steps."""
        from matplotlib.figure import Figure

        rows = self.metrics()
        steps = [row["step"] for row in rows]
        figure = Figure(figsize=(7, 4), layout="constrained")
        share = "accuracy" in headline
        label = headline.replace("_", " ") + (" (%)" if share else "")
        metric = figure.add_subplot(title=title, xlabel="step", ylabel=label)
        spent = metric.twinx()
        spent.set_ylabel("epsilon spent")
        values = [(100 if share else 1) * row[headline] for row in rows]
        lines = metric.plot(steps, values, "C0.-", label=headline.replace("_", " "))
        lines += spent.plot(steps, [row["epsilon"] for row in rows], "C1.--", label="epsilon")
        spent.set_ylim(bottom=0)
        metric.legend(handles=lines, loc="lower right")
        metric.grid(alpha=0.3)
        figure.savefig(self.path / f"{headline.removeprefix('test_')}_and_epsilon.png", dpi=150)


def rounded_up(epsilon: float) -> str:
    """With three decimals, or three digits where it is small."""
    digits = max(3, 2 - math.floor(math.log10(epsilon))) if 0 < epsilon < math.inf else 3
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}" if epsilon < math.inf else "inf"
