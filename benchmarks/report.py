"""The pages that the benchmarks write to benchmarks/results/, in Markdown: facts about the run, tables, notes."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NOTES = {
    "jax-privacy": "jax_privacy sums clipped gradients by (w * g).sum(0), a reduction that XLA compiles badly for CPUs "
    "(jaxlib 0.10.2: 90 times slower than by tensordot on eight gradients of 1000 x 1000). Where it is many times "
    "slower than `JAX, by hand`, which sums by tensordot, that fault of XLA is the reason, not its method. Its "
    "microbatches are a loop, and convolutions in loops are slow on CPUs.",
    "opacus": "torch and Opacus run eagerly. Their attention is four nn.Linear around scaled_dot_product_attention, "
    "also in the row that is not private: opacus.layers.DPMultiheadAttention is slower. Opacus ghost has norms without "
    "gradients for nn.Linear and nn.Embedding; of other layers it makes every example's gradient and drops it.",
}


def installed(library: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=library)), None) is not None


def heading(module: str, libraries: Iterable[str], *, devices: Iterable[str] = ("cpu",), **facts: Any) -> str:
    """The first paragraph of a page. module: of the command; facts: what else to say, by name, with `_` for a space.

    A library that is not installed is left out.
    """
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    names = ", ".join(processor() if device == "cpu" else device for device in sorted(set(devices)))
    found = [f"{name} {importlib.metadata.version(name)}" for name in libraries if installed(name)]
    versions = ", ".join([f"python {platform.python_version()}", *found])
    said = [f"`{command}`, {datetime.date.today()}, {names}.", f"{versions}."]
    return " ".join(said + [f"{name.replace('_', ' ')}: {value}." for name, value in facts.items()])


def load(core: int) -> dict[str, Any]:
    """Facts for the heading of a page of times. core: that the process is pinned to; -1 for none."""
    return {"pinned_to_one_core": core >= 0, "load_of_the_machine_at_the_start": round(os.getloadavg()[0], 1)}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor()} ({platform.machine()})"


def grid(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table: the names of the columns, and the cells of each row."""
    columns = list(columns)
    head, *lines = ("| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows))
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def table(results: Mapping[str, Any], columns: Iterable[tuple[str, Callable[[Any], str | None]]]) -> str:
    """A line for each problem, a column for each (name, text of the problem's result); "-" for None, "" if all are."""
    columns = [column for column in columns if any(column[1](rows) for rows in results.values())]
    if not columns:
        return ""
    cells = [[case, *(text(rows) or "-" for _, text in columns)] for case, rows in results.items()]
    return grid(["model, batch", *(name for name, _ in columns)], cells)


def write(name: str, *parts: str | Mapping[str, str], notes: Iterable[str] = ()) -> str:
    """Writes NAME.md and returns its text. parts: paragraphs, or tables by title; an empty table is left out."""
    text: list[str] = []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text += [f"{title}:\n\n{body}" for title, body in part.items() if body]
    if notes := "\n".join(f"* {note}" for note in notes):
        text.append(notes)
    RESULTS.mkdir(exist_ok=True)
    page = "\n\n".join(text) + "\n"
    (RESULTS / f"{name}.md").write_text(page)
    return page
