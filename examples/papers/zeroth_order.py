"""Zeroth-order training (DP-ZO, arXiv:2401.04343) beside DP-SGD on models that are trained from scratch."""

from collections.abc import Mapping
from typing import Any

from examples.papers import ada_dpigu
from examples.papers.experiment import Experiment, Row

DIRECTIONS = (1, 16, 64)
TRUTH = (
    "The cost is that of DP-SGD with the same noise multiplier. Each of the K directions is an evaluation of the loss "
    "with its derivative. The mean of an update is the gradient, and its error the larger, the more parameters there "
    "are for a direction, so that each K has learning rates of its own."
)


def compared(name: str, title: str, rates: Mapping[int, tuple[float, ...]], **common: Any) -> Experiment:
    """rates: the learning rates that are tried, by the number of directions; 0 for DP-SGD."""
    chosen: dict[str, tuple[int, dict[str, Any]]] = {"DP-SGD": (0, {})}
    for count in DIRECTIONS:
        method = {"method": "zeroth_order_sgd", "method_options": {"directions": count}}
        chosen[f"zeroth order, K = {count}"] = count, method
    rows = [
        Row(
            label=label,
            config=config,
            claimed=epsilon,
            grid=tuple({"learning_rate": rate} for rate in rates[count]),
        )
        for label, (count, config) in chosen.items()
        for epsilon in (1.0, 4.0)
    ]
    return Experiment(
        name=name,
        title=title,
        common=ada_dpigu.DIGITS | common,
        rows=tuple(rows),
        truth=TRUTH,
        smoke=ada_dpigu.SMOKE,
    )


EXPERIMENTS = (
    compared(
        "zeroth-order-linear",
        "derivatives along K directions, a linear model of 7,850 parameters, digits",
        {0: (0.5, 1.0, 2.0, 4.0), 1: (0.06, 0.25, 1.0, 4.0), 16: (0.1, 0.3, 1.0, 3.0), 64: (0.2, 0.6, 2.0, 6.0)},
        model="linear_from_zero",
    ),
    compared(
        "zeroth-order-cnn",
        "derivatives along K directions, a CNN of 46,490 parameters, digits",
        {0: (1.0, 2.0, 4.0, 8.0), 1: (0.06, 0.25, 1.0, 4.0), 16: (0.1, 0.4, 1.6, 6.0), 64: (0.25, 1.0, 4.0, 8.0)},
    ),
)
