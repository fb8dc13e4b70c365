"""D2P2-SGD (https://arxiv.org/abs/2509.09485): normalized gradients, noise that falls, and random projections."""

import functools
import math
from typing import Any

import dpx
from examples.config import Config
from examples.methods import read
from examples.papers.experiment import Experiment, Row

CLIP_NORM = 0.1  # of DP-SGD, whose learning rate is divided by it; the others normalize, to 1
LEARNING_RATES = (0.8, 1.6)  # of normalized gradients
FALLING = {"power": 0.25, "every": "2.5%"}  # 40 blocks, the paper's epochs, whatever the length of the run
PUBLISHED_ORDER = "D2P2-SGD, sum projected"


def as_if_projections_were_free(config: Config, rate: float, steps: int) -> float:
    """The noise multiplier that D2P-SGD needs, divided by the most that these projections can lengthen a gradient.

    The paper's accounting for its order leaves that out. Each coordinate of the sketches is the sum of one or two.
    """
    assert config.epsilon is not None
    return _of_d2p_sgd(config.epsilon, config.delta, rate, steps) / math.sqrt(2)


@functools.cache
def _of_d2p_sgd(epsilon: float, delta: float, rate: float, steps: int) -> float:
    sampling = dpx.PoissonSampling(examples=round(1024 / rate), batch_size=1024)
    key, every = dpx.secret_key(0), read(FALLING["every"], steps, steps)  # the key draws nothing

    def make(noise_multiplier):
        given = {"noise_multiplier": noise_multiplier, "sampling": sampling, "key": key}
        return dpx.methods.d2p_sgd(power=FALLING["power"], every=every, **given)

    return dpx.accounting.calibrate(make, steps=steps, epsilon=epsilon, delta=delta)


def methods(reduction: float) -> dict[str, dict[str, Any]]:
    """The method of each label, with its options."""
    projection = {"kind": "countsketch", "reduction_rate": reduction}
    order = {"order": "clip_then_project"}
    return {
        "DP-SGD": {"method": "dp_sgd", "clip_norm": CLIP_NORM},
        "DP2-SGD": {"method": "dp2_sgd", "method_options": projection},
        "D2P-SGD": {"method": "d2p_sgd", "method_options": FALLING},
        PUBLISHED_ORDER: {"method": "d2p2_sgd", "method_options": projection | FALLING | order},
        "D2P2-SGD": {"method": "d2p2_sgd", "method_options": projection | FALLING},
    }


def row(
    method: str, claimed: float, *, ours=False, reduction=0.3, rates=LEARNING_RATES, label="", real=None, **own: Any
) -> Row:
    """A method at an epsilon. ours: the paper has no such row. label: in place of the method's name. real: of `Row`.

    own: changes of the configuration.
    """
    config = methods(reduction)[method]
    scale = config.get("clip_norm", 1.0)
    return Row(
        label=label or method,
        config=config | own,
        claimed=claimed,
        noise=None if ours else as_if_projections_were_free if method == PUBLISHED_ORDER else "true",
        grid=tuple({"learning_rate": rate / scale} for rate in rates),
        real=real or {},
    )


def compared(static: float, falling: float, *, reduction: float = 0.3, rates=LEARNING_RATES) -> list[Row]:
    """The paper's curves at the epsilon of each, and DP-SGD at the epsilon of the noise that falls."""
    own = {"reduction": reduction, "rates": rates}
    return [
        row("DP-SGD", static, **own),
        row("DP2-SGD", static, **own),
        row("DP-SGD", falling, ours=True, **own),
        row("D2P-SGD", falling, **own),
        row(PUBLISHED_ORDER, falling, **own),
        row("D2P2-SGD", falling, **own),
    ]


CNN: dict[str, Any] = dict(
    model="d2p2_cnn", activation="relu", epochs=40.0, batch_size=1024, microbatch_size=256, momentum=0.9, delta=1e-5
)
SMOKE = dict(
    dataset="random:16x16x1x10", model="d2p2_cnn", delta=1e-5, batch_size=16, microbatch_size=None, epochs=0.75
)
TRUTH = (
    "The paper compares methods at one noise multiplier, {noise}, of which the one that falls (by the fourth root of "
    "the epoch) costs {falling} and the one that does not costs {static}; so DP-SGD is also run at the epsilon of the "
    "first. The paper says that a projection of the clipped gradient costs nothing. That is false, because it can "
    "lengthen the gradient. In `D2P2-SGD, sum projected`, the published order, the noise is sqrt(2) times as large to "
    "account for that. The other rows project each example before it is normalized, which costs nothing. Projections "
    "are count-sketches, because the paper's dense Gaussian matrix does not fit into memory."
)
AS_IN_FIGURE_9 = "not stated for this figure, taken as 1.0, which is that of Figure 9"


def figure(
    number: int, dataset: str, static: float, falling: float, noise: str, *, reduction: float = 0.3, **more: Any
) -> Experiment:
    """The paper's comparison on one data set, at the epsilons of its noise for 40 epochs."""
    common = CNN | {"dataset": dataset} | more.pop("common", {})
    named = more.pop("named", dataset)
    return Experiment(
        name=f"d2p2-figure-{number}",
        title=f"projections and noise that falls, {named}, {reduction:.0%} fewer coordinates",
        common=common,
        rows=tuple(compared(static, falling, reduction=reduction)),
        truth=TRUTH.format(noise=noise, static=static, falling=falling),
        smoke=SMOKE,
        over_epochs=True,
        **more,
    )


SHORT = dict(epochs=1.0, batch_size=512, microbatch_size=None)
SHORTEST = SHORT | {"epochs": 0.5, "batch_size": 256}
PAPER_LENGTH = dict(epochs=40.0, batch_size=1024, microbatch_size=256)
SHORTER = (
    "the paper's, but for {epochs} of batches of {batch} in place of 40 epochs of 1,024. The noise of each row is "
    "what its epsilon allows at this length, and falls along the same curve in 40 blocks; --real has the paper's "
    "length."
)
DIGITS = dict(epochs=8.0, batch_size=400, microbatch_size=None)
FASHION: dict[str, Any] = dict(
    common=SHORT,
    named="Fashion-MNIST",
    real=PAPER_LENGTH,
    stand_in=SHORTER.format(epochs="1 epoch", batch=512),
)
SVHN, CIFAR10 = "svhn_cropped", "cifar10"
COMPARISONS = (
    figure(1, SVHN, 0.945, 2.444, "3.05 (its epsilons of 0.95 and 2.45 hold, but are printed the wrong way round)"),
    figure(2, "fashion_mnist", 1.056, 2.743, "3.05 (its epsilons of 1.06 and 2.75 hold)", **FASHION),
    figure(6, CIFAR10, 1.960, 6.599, "2.0", named="CIFAR-10 with ResNet-20", common={"model": "resnet20"}),
    figure(7, CIFAR10, 1.960, 6.599, "2.0", named="CIFAR-10"),
    figure(8, CIFAR10, 1.960, 6.599, "2.0", named="CIFAR-10", reduction=0.1),
    figure(9, CIFAR10, 5.696, 46.01, "1.0", named="CIFAR-10"),
    figure(10, "kmnist", 5.110, 42.84, AS_IN_FIGURE_9),
    figure(11, "emnist", 3.978, 37.92, AS_IN_FIGURE_9, common={"delta": 1e-6}),
    figure(
        12,
        "mnist5k",
        5.110,
        42.84,
        AS_IN_FIGURE_9,
        named="MNIST",
        common=DIGITS,
        real=PAPER_LENGTH | {"dataset": "mnist"},
        stand_in="4,000 of MNIST's training images, which a package ships, and 1,000 others for the test; 8 epochs of "
        "batches of 400 in place of 40 of 1,024, with the noise that costs the same epsilon.",
    ),
)
OTHER_NOISE = {2.0: (1.767, 5.918), 4.0: (0.772, 1.870), 6.0: (0.489, 1.126), 8.0: (0.356, 0.805)}  # static, falling
ONE_RATE = LEARNING_RATES[:1]


def noise_levels() -> Experiment:
    """The comparison at several noise multipliers, Fashion-MNIST."""
    by_label = [compared(*epsilons, rates=ONE_RATE) for epsilons in OTHER_NOISE.values()]
    rows = [by_label[level][method] for method in range(6) for level in range(len(by_label))]
    return Experiment(
        name="d2p2-figure-3",
        title="accuracy and epsilon at several noise multipliers, Fashion-MNIST (Figures 3 and 4)",
        common=CNN | {"dataset": "fashion_mnist"} | SHORTEST,
        rows=tuple(rows),
        truth=TRUTH.format(
            noise=", ".join(map(str, OTHER_NOISE)),
            static=", ".join(str(static) for static, _ in OTHER_NOISE.values()),
            falling=", ".join(str(falling) for _, falling in OTHER_NOISE.values()),
        ),
        real=PAPER_LENGTH,
        stand_in=SHORTER.format(epochs="half an epoch", batch=256),
        smoke=SMOKE,
    )


def parameters() -> Experiment:
    """Batch sizes, and how many coordinates the projection leaves, at a noise multiplier of 3.05."""
    rows = [row("DP-SGD", 2.743, ours=True, rates=ONE_RATE)]
    for batch, falling in {256: 1.248, 512: 1.847}.items():
        sizes = {"batch_size": batch // 4, "real": {"batch_size": batch}}
        rows.append(row("D2P2-SGD", falling, rates=ONE_RATE, label=f"batch {batch}", **sizes))
    for reduction in (0.1, 0.5, 0.7, 0.9, 0.3):
        rows.append(row("D2P2-SGD", 2.743, rates=ONE_RATE, reduction=reduction, label=f"reduction {reduction:g}"))
    return Experiment(
        name="d2p2-figure-5",
        title="batch sizes and reduction rates, Fashion-MNIST",
        common=CNN | {"dataset": "fashion_mnist"} | SHORTEST,
        rows=tuple(rows),
        truth="A smaller batch at the same noise multiplier and number of epochs costs a smaller epsilon: the rows of "
        "several batch sizes are not at one epsilon, and the paper's figure compares them at one noise. The reduction "
        "rate changes no cost. Rows that state a reduction have the largest batch, and rows that state a batch a "
        "reduction of 0.3.",
        real=PAPER_LENGTH,
        stand_in=SHORTER.format(epochs="half an epoch", batch=256) + " The batches are a quarter as large.",
        smoke=SMOKE,
    )


EXPERIMENTS = tuple(
    sorted(
        (
            *COMPARISONS,
            noise_levels(),
            parameters(),
        ),
        key=lambda one: int(one.name.split("-")[-1]),
    )
)
