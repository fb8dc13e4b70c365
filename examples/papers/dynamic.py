"""Dynamic DP-SGD (https://arxiv.org/abs/2111.00173): noise that falls, and a clip norm that falls, over the run."""

from typing import Any

from dpx.accounting import gdp
from examples.config import Config
from examples.papers.experiment import Experiment, Row

RHOS = (1 / 0.7, 1 / 0.4)
LEARNING_RATES = (0.5, 1.0, 2.0)  # times that of the experiment
METHODS: dict[str, list[dict[str, float]]] = {
    "DP-SGD": [{"clip_norm": 0.1}, {"clip_norm": 0.05}],
    "growing mu": [{"rho_mu": rho, "rho_c": 1.0} for rho in RHOS],
    "sensitivity decay": [{"rho_mu": 1.0, "rho_c": rho} for rho in RHOS],
    "both": [{"rho_mu": rho, "rho_c": rho} for rho in RHOS],
}
TRUTH = (
    "The paper takes epsilon from a central limit theorem for many steps, which is too small: the column of the true "
    "epsilon bills its noise by PLD."
)


def noise_by_clt(config: Config, rate: float, steps: int) -> float:
    """The noise multiplier of the first step, by the paper's central limit theorem."""
    assert config.epsilon is not None
    growth = config.method_options.get("rho_mu", 1.0)
    return 1 / gdp.mu_0(epsilon=config.epsilon, delta=config.delta, sampling_rate=rate, steps=steps, growth=growth)


def rows(published: dict[str, tuple[float, ...]], epsilons: tuple[float, ...], learning_rate: float) -> tuple[Row, ...]:
    """Every method of the paper's tables at every epsilon, with six trials each."""
    made = []
    for label, choices in METHODS.items():
        grid: list[dict[str, Any]] = []
        for choice in choices:
            own = {"method_options": choice} if "rho_mu" in choice else dict(choice)
            grid += [own | {"learning_rate": factor * learning_rate} for factor in LEARNING_RATES]
        for number, epsilon in enumerate(epsilons):
            made.append(
                Row(
                    label=label,
                    config={"method": "dp_sgd" if label == "DP-SGD" else "dynamic_dp_sgd"},
                    published=published[label][number],
                    claimed=epsilon,
                    noise=noise_by_clt,
                    grid=tuple(grid),
                )
            )
    return tuple(made)


TABLE_1 = Experiment(
    name="dynamic-table-1",
    title="noise and clip norm that fall, on Fashion-MNIST with a CNN",
    common=dict(
        dataset="fashion_mnist",
        delta=1 / 600_000,
        model="adadpigu_cnn_printed",
        epochs=12.0,
        batch_size=2048,
        microbatch_size=128,
        clip_norm=0.1,
        momentum=0.9,
    ),
    rows=rows(
        {
            "DP-SGD": (76.77, 80.45, 82.55),
            "growing mu": (77.81, 80.95, 83.10),
            "sensitivity decay": (78.11, 82.83, 83.64),
            "both": (78.50, 83.22, 83.81),
        },
        (0.4, 1.2, 2.0),
        4.0,
    ),
    truth=TRUTH,
    tune_at=2.0,
    smoke=dict(dataset="random:28x28x1x10", batch_size=16, microbatch_size=None, epochs=0.5),
    figure="epsilon",
)
EXPERIMENTS = (TABLE_1,)
