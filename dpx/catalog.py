"""The one list of the methods, coordinates, mechanisms and samplings of dpx.

The contract tests, the trainer, the benchmarks and docs/methods.md all read it, so a new method needs only its folder,
its import in `dpx/methods.py`, and a line here. `python -m dpx.catalog > docs/methods.md` writes the table.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpx import coordinates, mechanisms, methods, sampling

GAUSSIAN, INNERMOST = "mechanism/dp_sgd.py", "mechanism/base.py"
CORRELATED, IN_ORDER = "papers/correlated_noise/cost.py", ("ordered", "shuffled", "full")
PAPER = re.compile(r"(?:arXiv:|https://arxiv\.org/abs/)([\d.]+\d(?:v\d+)?)")
FEEDBACK, RECORDS = "papers/dice_sgd/cost.py", "sampling/schemes.py"


class CatalogEntry(NamedTuple):
    """One line of the catalog.

    build:     the public function or class; its docstring and signature describe it.
    arguments: values for arguments that have no default, or in place of their defaults.
    proof:     the file, in dpx/, whose docstrings prove that one example moves the sum by no more than the cost
        assumes.
    samplings: short names of the samplings that a method takes, the usual one first; () for all.
    """

    build: Callable[..., Any]
    arguments: dict[str, Any] = {}
    proof: str = GAUSSIAN
    samplings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def build_parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of `build` in order, with their annotations and defaults."""
        return dict(inspect.signature(self.build, eval_str=True).parameters)

    @property
    def source_file(self) -> str:
        """The path, in dpx/, of the file that defines `build`."""
        return str(Path(sys.modules[self.build.__module__].__file__ or "").relative_to(Path(__file__).parent))

    @property
    def summary(self) -> str:
        """The first line of the docstring, as Markdown in a table."""
        line = (inspect.getdoc(self.build) or "").split("\n")[0].replace("|", "\\|")
        return PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", line)


CLIP = {"clip_norm": 1.0}
SKETCH = {"kind": "countsketch", "reduction_rate": 0.3}
FREEZE = {"freeze_rate": 0.7, "every": 100}

METHODS = (
    CatalogEntry(methods.dp_sgd, CLIP),
    CatalogEntry(methods.dynamic_dp_sgd, CLIP | {"rho_mu": 2.0, "rho_c": 2.0, "steps": 1000}),
    CatalogEntry(methods.d2p_sgd),
    CatalogEntry(methods.dp2_sgd, SKETCH),
    CatalogEntry(methods.d2p2_sgd, SKETCH),
    CatalogEntry(methods.random_freeze_sgd, CLIP | FREEZE),
    CatalogEntry(methods.ranked_freeze_sgd, CLIP | FREEZE),
    CatalogEntry(methods.ada_dpigu, CLIP | {"warmup": 100}),
    CatalogEntry(methods.tp_topk_sgd, CLIP | {"warmup": 100}),
    CatalogEntry(methods.zeroth_order_sgd, CLIP),
    CatalogEntry(methods.ada_fest, CLIP | {"threshold": 2.0, "most_rows": 4}, "papers/sparse_embeddings.py"),
    CatalogEntry(methods.dice_sgd, CLIP | {"feedback_norm": 1.0, "outer_clip_norm": 1.1}, FEEDBACK),
    CatalogEntry(methods.gep_sgd, {"embedding_clip_norm": 1.0, "residual_clip_norm": 0.5}, "papers/gep_sgd.py"),
    CatalogEntry(
        mechanisms.adaptive_clipping,
        {"initial_clip_norm": 1.0, "indicator_noise": 13.0},
        "mechanism/adaptive_clipping.py",
    ),
    CatalogEntry(methods.band_mf_sgd, CLIP | {"bands": 8}, CORRELATED, ("cyclic", *IN_ORDER)),
    CatalogEntry(methods.lambda_cgd, CLIP | {"correlation": 0.9}, CORRELATED, IN_ORDER),
)

COORDINATES = (
    CatalogEntry(coordinates.trainable, {"mask": True}, INNERMOST),
    CatalogEntry(coordinates.random_freeze, FREEZE, INNERMOST),
    CatalogEntry(coordinates.ranked_freeze, FREEZE, INNERMOST),
    CatalogEntry(coordinates.importance_mask, {"keep": 0.6, "warmup": 100}, INNERMOST),
    CatalogEntry(coordinates.standardized, {}, INNERMOST),
    CatalogEntry(coordinates.gradient_embedding, {}, INNERMOST),
    CatalogEntry(coordinates.top_fraction, {"fraction": 0.5}, INNERMOST),
    CatalogEntry(coordinates.random_projection, SKETCH, INNERMOST),
    CatalogEntry(coordinates.random_directions, {"count": 16}, INNERMOST),
    CatalogEntry(coordinates.frequent_rows, {"threshold": 0.1, "most_rows": 4}, INNERMOST),
)

MECHANISMS = (  # mechanisms that wrap another mechanism
    CatalogEntry(mechanisms.normalized),
    CatalogEntry(mechanisms.clip_then_project, SKETCH, "papers/d2p2_sgd/methods.py"),
)

SAMPLINGS = {  # keyed by their short names in the trainer
    "poisson": CatalogEntry(sampling.PoissonSampling, {"batch_size": 256}, "accounting/limited_samples.py"),
    "shuffled": CatalogEntry(sampling.ShuffledEpochs, {"batch_size": 256}, RECORDS),
    "allocated": CatalogEntry(sampling.RandomAllocation, {"steps_per_epoch": 100}, "accounting/allocation.py"),
    "cyclic": CatalogEntry(sampling.CyclicPoissonSampling, {"batch_size": 256, "bands": 8}, "sampling/varying.py"),
    "ordered": CatalogEntry(sampling.FixedOrder, {"batch_size": 256}, RECORDS),
    "fixed": CatalogEntry(sampling.FixedSizeSampling, {"batch_size": 256}, "accounting/limited_samples.py"),
    "full": CatalogEntry(sampling.FullBatch, {}, RECORDS),
}


def methods_page() -> str:
    """Returns the text of docs/methods.md."""
    lines = [
        "# Methods, coordinates, mechanisms, samplings",
        "",
        "`python -m dpx.catalog > docs/methods.md` writes this page from [dpx/catalog.py](../dpx/catalog.py).",
    ]
    tables = {"Methods": METHODS, "Coordinates": COORDINATES, "Mechanisms": MECHANISMS, "Samplings": SAMPLINGS.values()}
    for title, entries in tables.items():
        lines += ["", f"## {title}", "", "| name | in a sentence, and the code that proves the bound |", "|---|---|"]
        for entry in entries:
            files = ", ".join(f"[`{path}`](../dpx/{path})" for path in dict.fromkeys((entry.source_file, entry.proof)))
            lines.append(f"| `{entry.name}` | {entry.summary} Code: {files} |")
    end = "[Add your own](../CONTRIBUTING.md#add-a-method).\n\nNext: [the five papers](papers.md).\n"
    return "\n".join([*lines, "", end])


if __name__ == "__main__":
    print(methods_page(), end="")
