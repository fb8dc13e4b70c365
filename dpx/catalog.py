"""The one list of what dpx has: methods, coordinates, mechanisms around others, and samplings.

The contract tests, the trainer, the benchmarks and docs/methods.md read it, so a line here is all that a new method
needs beside its own file. `python -m dpx.catalog > docs/methods.md` writes the table.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpx import coordinates, mechanisms, methods, sampling

GAUSSIAN = "mechanisms/gaussian.py"
FEEDBACK = "accounting/error_feedback/event.py"


class Entry(NamedTuple):
    """One line of the list.

    build:     the public function or class; its docstring and signature say the rest.
    arguments: a first choice of the arguments that have no default, or a better one than the default.
    proof:     the file, in dpx/, whose docstrings prove that one example moves the sum by no more than is billed.
    """

    build: Callable[..., Any]
    arguments: dict[str, Any] = {}
    proof: str = GAUSSIAN

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments of `build` in their order, with their annotations and defaults."""
        return dict(inspect.signature(self.build, eval_str=True).parameters)

    @property
    def file(self) -> str:
        """Where `build` stands, in dpx/."""
        return str(Path(sys.modules[self.build.__module__].__file__ or "").relative_to(Path(__file__).parent))

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]


CLIP = {"clip_norm": 1.0}
SKETCH = {"kind": "countsketch", "reduction_rate": 0.3}
FREEZE = {"freeze_rate": 0.7, "every": 100}

METHODS = (
    Entry(methods.dp_sgd, CLIP),
    Entry(methods.dynamic_dp_sgd, CLIP | {"rho_mu": 2.0, "rho_c": 2.0, "steps": 1000}),
    Entry(methods.d2p_sgd),
    Entry(methods.dp2_sgd, SKETCH),
    Entry(methods.d2p2_sgd, SKETCH),
    Entry(methods.random_freeze_sgd, CLIP | FREEZE),
    Entry(methods.ranked_freeze_sgd, CLIP | FREEZE),
    Entry(methods.ada_dpigu, CLIP | {"warmup": 100}),
    Entry(methods.dice_sgd, CLIP | {"feedback_norm": 1.0, "outer_clip_norm": 1.1}, FEEDBACK),
    Entry(methods.gep_sgd, {"embedding_clip_norm": 1.0, "residual_clip_norm": 0.5}, "methods/gep_sgd.py"),
    Entry(
        mechanisms.adaptive_clipping,
        {"initial_clip_norm": 1.0, "indicator_noise": 13.0},
        "mechanisms/adaptive_clipping.py",
    ),
)

COORDINATES = (
    Entry(coordinates.trainable, {"mask": True}),
    Entry(coordinates.random_freeze, FREEZE),
    Entry(coordinates.ranked_freeze, FREEZE),
    Entry(coordinates.importance_mask, {"keep": 0.6, "warmup": 100}),
    Entry(coordinates.standardized),
    Entry(coordinates.gradient_embedding),
    Entry(coordinates.top_fraction, {"fraction": 0.5}),
    Entry(coordinates.random_projection, SKETCH),
)

MECHANISMS = (  # the Gaussian one, and what is built on it or wraps another
    Entry(mechanisms.gaussian_mechanism, CLIP),
    Entry(mechanisms.error_feedback_mechanism, CLIP | {"feedback_norm": 1.0, "outer_clip_norm": 1.1}, FEEDBACK),
    Entry(mechanisms.normalized, {}, "mechanisms/normalized.py"),
    Entry(mechanisms.clip_then_project, SKETCH, "mechanisms/clip_then_project.py"),
)

SAMPLINGS = {  # by the short names of the trainer
    "poisson": Entry(sampling.PoissonSampling, {"batch_size": 256}, "sampling.py"),
    "shuffled": Entry(sampling.ShuffledEpochs, {"batch_size": 256}, "sampling.py"),
    "fixed": Entry(sampling.FixedSizeSampling, {"batch_size": 256}, "accounting/fixed_size.py"),
    "full": Entry(sampling.FullBatch, {}, "sampling.py"),
}


def table() -> str:
    """docs/methods.md."""
    lines = [
        "# Methods, coordinates, mechanisms, samplings",
        "",
        "Written by `python -m dpx.catalog > docs/methods.md` from the list in [dpx/catalog.py](../dpx/catalog.py).",
    ]
    for title, entries in (
        ("Methods", METHODS),
        ("Coordinates", COORDINATES),
        ("Mechanisms", MECHANISMS),
        ("Samplings", SAMPLINGS.values()),
    ):
        lines += ["", f"## {title}", "", "| name | in a sentence | code | proof of the bound |", "|---|---|---|---|"]
        for entry in entries:
            code, proof = (f"[{path}](../dpx/{path})" for path in (entry.file, entry.proof))
            lines.append(f"| `{entry.name}` | {entry.summary.replace('|', chr(92) + '|')} | {code} | {proof} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
