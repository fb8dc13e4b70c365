"""The results of `fit`, and what its callbacks are given."""

from typing import Any, NamedTuple

from dpx.accounting.report import PrivacyReport
from dpx.gradients import Unreleased
from dpx.trees import Tree, outlined


class Progress(NamedTuple):
    """A run after some of its steps. All but the `unreleased` fields is covered by epsilon.

    step: int, how many steps were made. epsilon: float, spent by them.
    params: like the parameters, copies which a callback may keep. state: of the optimizer, copied too.
    metrics: what `evaluate` returned, floats by name; {} without `evaluate`.
    unreleased_loss: float, the mean loss of the last batch. NOT private.
    unreleased: losses, norms and aux of the last batch, padding included. NOT private. None with `chunk_size`.
    unreleased_included: bool (B,), which rows of the last batch count. NOT private. None with `chunk_size`.
    """

    step: int
    epsilon: float
    params: Tree
    state: Tree
    metrics: dict[str, float]
    unreleased_loss: float
    unreleased: Unreleased | None
    unreleased_included: Any

    __repr__ = outlined


class FitResult(NamedTuple):
    """A finished run.

    params: like the parameters, private at (epsilon, delta). state: of the optimizer; share `dpx.public_state(state)`.
    steps: int, how many the state has made. epsilon: float, an upper bound for these steps at `delta`.
    report: the `dpx.privacy_report` of the state. history: one dict for each evaluation, with "step", "epsilon", the
        metrics by their names, and "unreleased_loss", which is NOT private.
    """

    params: Tree
    state: Tree
    steps: int
    epsilon: float
    delta: float
    report: PrivacyReport
    history: list[dict[str, Any]]

    __repr__ = outlined
