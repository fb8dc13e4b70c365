"""The other ways to clip that the five papers compare with, each at the same epsilon."""

from typing import Any

from examples.papers.ada_dpigu import CNN, DIGITS, RATES_OF_DIGITS, SMOKE, STAND_IN
from examples.papers.experiment import Experiment, Row

LEARNING_RATES = (8.0, 16.0)
ADAPTIVE_SHARE = 0.25  # of these, because the clip norm grows
ADAPTIVE = "adaptive clipping"
ADA_CLIP = {"keep": 1.0, "warmup": 1}  # all coordinates: what is left is the standardization
METHODS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "relu": {"activation": "relu"},
    ADAPTIVE: {
        "method": "adaptive_clipping",
        "method_options": {"initial_clip_norm": 0.1, "indicator_noise": 20.0},
    },
    "AdaClip": {"method": "ada_dpigu", "method_options": ADA_CLIP},
    "clip per layer": {"per_layer": True},
}
TRUTH = (
    "The cost of all of these is sound: it is that of DP-SGD. `DP-SGD` uses tanh, the tempered sigmoid of Papernot et "
    "al. (https://arxiv.org/abs/2007.14191), and one clip norm; the others change one thing. Adaptive clipping "
    "(https://arxiv.org/abs/1905.03871) follows the median norm, whose noisy estimate is part of the cost. AdaClip "
    "(https://arxiv.org/abs/1908.07643) standardizes each coordinate by released averages; the paper divides by an "
    "estimated standard deviation of examples, and dpx by that of releases, which has the same noise everywhere. "
    "Per-layer clipping gives every layer the same share of the clip norm; the sensitivity is the root of the sum of "
    "their squares."
)


def experiment(name: str, title: str, common: dict[str, Any], rates=LEARNING_RATES, **more: Any) -> Experiment:
    def grid(label):
        return tuple({"learning_rate": rate * (ADAPTIVE_SHARE if label == ADAPTIVE else 1.0)} for rate in rates)

    rows = [
        Row(label=label, config=own, claimed=epsilon, grid=grid(label))
        for label, own in METHODS.items()
        for epsilon in (2.0, 4.0)
    ]
    return Experiment(
        name=name, title=title, common=common, rows=tuple(rows), truth=TRUTH, tune_at=2.0, smoke=SMOKE, **more
    )


EXPERIMENTS = (
    experiment("baselines", "ways to clip, Fashion-MNIST", CNN | {"dataset": "fashion_mnist"}),
    experiment(
        "baselines-mnist",
        "ways to clip, MNIST",
        DIGITS,
        RATES_OF_DIGITS,
        stand_in=STAND_IN,
        real={"dataset": "mnist", "batch_size": 1000, "epochs": 40.0, "microbatch_size": 128},
    ),
)
