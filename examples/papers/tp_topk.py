"""TP-TopK (https://arxiv.org/abs/2606.04375) beside the methods that choose coordinates otherwise, and DP-SGD."""

from collections.abc import Mapping
from typing import Any

from examples.papers import ada_dpigu
from examples.papers.experiment import Experiment, Row
from examples.papers.random_freeze import frozen


def tp_topk(keep: float) -> dict[str, Any]:
    """A tenth of the run is its warm-up, as AdaDPIGU's."""
    return {"method": "tp_topk_sgd", "method_options": {"keep": keep, "warmup": "10%"}}


METHODS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "AdaDPIGU, keep 0.6": ada_dpigu.ada(),
    "ranked freeze, rate 0.7": {"method": "ranked_freeze_sgd", "method_options": frozen(0.7)},
    "TP-TopK, keep 0.6": tp_topk(0.6),
    "TP-TopK, keep 0.3": tp_topk(0.3),
    "TP-TopK, keep 0.1": tp_topk(0.1),
}
TRUTH = (
    "TP-TopK has the epsilon of DP-SGD: its scores read releases, and its warm-up is paid for. So do AdaDPIGU, as "
    "dpx counts it, and ranked freeze. All rows have the same noise. The share that ranked freeze leaves out grows "
    "from 0 to 0.7 over the run; the warm-up of the others is a tenth of the run."
)


def compared(
    name: str, what: str, common: dict[str, Any], rates: Mapping[float, tuple[float, ...]], **more: Any
) -> Experiment:
    """Every method, each with its own trials of the learning rate. rates: those that are tried at each epsilon."""
    rows = [
        Row(label=label, config=config, claimed=epsilon, grid=tuple({"learning_rate": rate} for rate in each))
        for label, config in METHODS.items()
        for epsilon, each in rates.items()
    ]
    title = f"which coordinates are trained, {what}"
    common, smoke = ada_dpigu.DIGITS | common, ada_dpigu.SMOKE
    return Experiment(name=name, title=title, common=common, rows=tuple(rows), truth=TRUTH, smoke=smoke, **more)


EXPERIMENTS = (
    compared(
        "tp-topk-fashion-mnist",
        "a linear model of 7,850 parameters, four epochs, Fashion-MNIST",
        {"dataset": "fashion_mnist", "model": "linear", "batch_size": 2048, "epochs": 4.0},
        {1.0: (4.0, 8.0), 4.0: (8.0, 16.0)},
    ),
    compared(
        "tp-topk-mnist5k",
        "a perceptron of 101,770 parameters, eight epochs, digits",
        {"model": "mlp"},
        dict.fromkeys((1.0, 4.0), (2.0, 4.0, 8.0, 16.0)),
    ),
)
