"""The files that the benchmarks write: facts about the run, then tables, as JSON and as Markdown."""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
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


def facts(module: str, workers: dict[str, dict[str, Any]], options) -> dict[str, Any]:
    """module: of the command; workers: framework -> what its worker says of itself."""
    versions = {library: found for said in workers.values() for library, found in said["versions"].items() if found}
    devices = sorted({said["device"] for said in workers.values()})
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": ", ".join(processor() if device == "cpu" else device for device in devices),
        "pinned to one core": options.core >= 0,
        "load of the machine at the start": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **versions},
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor()} ({platform.machine()})"


def table(results: dict[str, Any], columns: Iterable[tuple[str, Callable[[Any], str | None]]]) -> str:
    """A line for each problem, a column for each (name, text of the problem's result); "-" for None, "" if all are."""
    columns = [column for column in columns if any(column[1](rows) for rows in results.values())]
    if not columns:
        return ""
    lines = ["| model, batch | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for case, rows in results.items():
        lines.append(f"| {case} | " + " | ".join(text(rows) or "-" for _, text in columns) + " |")
    return "\n".join(lines)


def write(name: str, facts: dict[str, Any], results: dict[str, Any], notes: list[str], tables: dict[str, str]):
    RESULTS.mkdir(exist_ok=True)
    found = {"facts": facts, "notes": notes, "results": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    head = [f"`{facts['command']}`, {facts['date']}, {facts['device']}."]
    head += [", ".join(f"{library} {version}" for library, version in facts["versions"].items()) + "."]
    rest = [
        f"{fact}: {value}." for fact, value in facts.items() if fact not in ("command", "date", "device", "versions")
    ]
    text = "\n\n".join([" ".join([*head, *rest]), *(f"{title}:\n\n{body}" for title, body in tables.items() if body)])
    text += "".join(f"\n\n* {note}" for note in notes[:1]) + "".join(f"\n* {note}" for note in notes[1:])
    (RESULTS / f"{name}.md").write_text(text + "\n")
