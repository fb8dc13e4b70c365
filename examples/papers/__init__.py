"""The experiments of the papers, each a command: `python -m examples.papers` lists them.

`python -m examples.papers dynamic-table-1 --seeds 3` makes the runs that are missing, continues one that was
interrupted, and writes the paper's table beside what we measure at the true epsilon. To add one: an `Experiment` in the
module of its paper, or a new module in `PAPERS`.
"""

from examples.papers.experiment import Experiment, Row

__all__ = ["Experiment", "Row", "experiments"]

PAPERS: tuple[str, ...] = (
    "dynamic",
    "dynamic_text",
    "dynamic_federated",
    "d2p2",
    "ada_dpigu",
    "tp_topk",
    "dice_images",
    "dice_text",
    "random_freeze",
    "zeroth_order",
    "baselines",
    "fashion_mnist",
)


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of the papers."""
    import importlib

    found = [one for paper in PAPERS for one in importlib.import_module(f"examples.papers.{paper}").EXPERIMENTS]
    return {one.name: one for one in found}
