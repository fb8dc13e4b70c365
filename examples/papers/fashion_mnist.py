"""Longer runs on Fashion-MNIST, with more trials than the tables have: do the papers' methods gain there?"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from examples.papers import ada_dpigu, d2p2, dice_images, dynamic
from examples.papers.experiment import Experiment, Fields, Row
from examples.papers.random_freeze import frozen

CNN: dict[str, Any] = dict(
    dataset="fashion_mnist", model="adadpigu_cnn_printed", batch_size=2048, clip_norm=0.1, momentum=0.9, delta=1e-5
)
EIGHT_EPOCHS = CNN | dict(epochs=8.0, microbatch_size=256)
SCATTERING = dict(features="scattering", model="linear", epochs=10.0, batch_size=8192, microbatch_size=4400)
LINEAR = CNN | SCATTERING
LINEAR_SMOKE: dict[str, Any] = dict(
    dataset="random:28x28x1x10", features="none", batch_size=16, microbatch_size=None, epochs=0.75, delta=1e-5
)
ON_SCATTERING = "Its settings are those that were best for the linear model on scattering features."


def masked(label: str, config: Fields, published: Mapping[float, float | None]) -> list[Row]:
    return ada_dpigu.of(label, config, published, rates=(4.0, 8.0))


def kept(share: float) -> dict[str, Any]:
    return ada_dpigu.ada(keep=share) | {"microbatch_size": 128}


def freezing(rate: float) -> list[Row]:
    config = {"method": "random_freeze_sgd", "method_options": frozen(rate)}
    return masked(f"random freeze, rate {rate:g}", config, {3.0: None})


ADA_DPIGU = Experiment(
    name="ada-dpigu-fashion-mnist",
    title="the share of the coordinates that is kept, a CNN, eight epochs",
    common=EIGHT_EPOCHS,
    rows=(
        *masked("DP-SGD", {}, {2.0: 79.89, 4.0: 84.90}),
        *masked("keep 0.8", kept(0.8), {2.0: None, 4.0: None}),
        *masked("keep 0.4", kept(0.4), {2.0: None, 4.0: None}),
        *masked("keep 0.6", kept(0.6), {2.0: 86.93, 4.0: 89.92}),
    ),
    truth=ada_dpigu.COST + " The paper's figures are those of its Table 4.",
    tune_at=2.0,
    smoke=ada_dpigu.SMOKE,
)
FREEZE = Experiment(
    name="freeze-fashion-mnist",
    title="random freeze, a CNN, eight epochs",
    common=EIGHT_EPOCHS,
    rows=(*masked("DP-SGD", {}, {3.0: None}), *freezing(0.3), *freezing(0.7)),
    truth="Random freeze has the epsilon of DP-SGD, because its masks depend on no data. The paper has no such runs.",
    smoke=ada_dpigu.SMOKE,
)

NOISE, COST, COST_OF_FALLING = 3.05, 1.056, 2.74


def at_its_noise(label: str, method: str, claimed: float, noise: float | None = NOISE, **options: Any) -> Row:
    """options: of the method. DP-SGD's learning rate is divided by its clip norm, because the others normalize to 1."""
    config: dict[str, Any] = {"method": method, "method_options": options, "learning_rate": 0.8}
    if method == "dp_sgd":
        config |= {"clip_norm": d2p2.CLIP_NORM, "learning_rate": 0.8 / d2p2.CLIP_NORM}
    return Row(label=label, config=config, claimed=claimed, noise=noise)


PROJECTION = {"kind": "countsketch", "reduction_rate": 0.3}
FALLING = {"power": 0.25, "every": "epoch"}
D2P2 = Experiment(
    name="d2p2-fashion-mnist",
    title="projections and noise that falls at the paper's noise, 40 epochs",
    common=d2p2.CNN | {"dataset": "fashion_mnist"},
    rows=(
        at_its_noise("DP-SGD", "dp_sgd", COST),
        at_its_noise("DP-SGD", "dp_sgd", COST_OF_FALLING, None),
        at_its_noise("DP2-SGD, sum projected", "dp2_sgd", COST, order="clip_then_project", **PROJECTION),
        at_its_noise("D2P-SGD", "d2p_sgd", COST_OF_FALLING, **FALLING),
        at_its_noise("D2P2-SGD", "d2p2_sgd", COST_OF_FALLING, **PROJECTION, **FALLING),
    ),
    truth=d2p2.TRUTH.format(noise=NOISE, static=COST, falling=COST_OF_FALLING)
    + " The learning rate, 0.8 on normalized gradients, is the best of 0.2, 0.4 and 0.8 in four epochs of DP-SGD on "
    "seed 100, which had 66.83, 70.40 and 72.14%.",
    smoke=d2p2.SMOKE,
)

EPSILON, C1 = 2.0, 0.1
OUTER, RESETS = (1.05, 1.1, 1.5, 2.0), (1.0, 0.3)  # Cmax / C1, in epochs


def feedback(outer: float, reset: float, learning_rate: float, batch_size: int) -> dict[str, Any]:
    """Of DiceSGD; reset: in epochs of Fashion-MNIST."""
    steps = round(reset * round(60_000 / batch_size))
    options = {"feedback_norm": C1, "outer_clip_norm": C1 * outer, "reset_every": steps}
    return {"learning_rate": learning_rate, "method_options": options}


def with_feedback(name: str, title: str, grids: Sequence[Sequence[Fields]], **more: Any) -> Experiment:
    """grids: the trials of DP-SGD that clips at C1, of DP-SGD that clips at Cmax, and of DiceSGD."""
    labels = {"DP-SGD at C1": "dp_sgd", "DP-SGD at Cmax": "dp_sgd", "DiceSGD": "dice_sgd"}
    rows = [
        Row(label=label, config={"method": method}, claimed=EPSILON, grid=tuple(grid))
        for (label, method), grid in zip(labels.items(), grids, strict=True)
    ]
    smoke = LINEAR_SMOKE | {"model": "linear"}
    return Experiment(name=name, title=title, rows=tuple(rows), baseline="DP-SGD at C1", smoke=smoke, **more)


DICE_TRUTH = dice_images.TRUTH.replace("every ten steps", "once or three times an epoch")
DICE = with_feedback(
    "dice-fashion-mnist",
    "error feedback and DP-SGD at its two clip norms, linear on scattering features",
    (
        [
            {"learning_rate": 8.0 * rate, "momentum": momentum}
            for rate in (1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0)
            for momentum in (0.9, 0.8)
        ],
        [
            {"clip_norm": C1 * outer, "learning_rate": 8.0 * rate}
            for outer, rate in itertools.product(OUTER, (1.0, 2.0, 4.0, 8.0))
        ],
        [
            feedback(outer, reset, 8.0 * rate, SCATTERING["batch_size"])
            for outer, reset, rate in itertools.product(OUTER, RESETS, (2.0, 4.0))
        ],
    ),
    common=LINEAR,
    truth=DICE_TRUTH,
)
DICE_CNN = with_feedback(
    "dice-cnn-fashion-mnist",
    "error feedback and DP-SGD at its two clip norms, a CNN, eight epochs",
    (
        [{"learning_rate": 2.0 * 5.6, "momentum": 0.8}],
        [{"clip_norm": C1 * 1.5, "learning_rate": 2.0 * 4.0}],
        [feedback(1.1, 0.3, 2.0 * 4.0, CNN["batch_size"])],
    ),
    common=EIGHT_EPOCHS,
    truth=f"{DICE_TRUTH} {ON_SCATTERING}",
)

RHOS = (1 / 0.7, 1 / 0.4)
SCHEDULES: dict[str, list[dict[str, float]]] = {  # options of dynamic_dp_sgd, or the clip norm of DP-SGD
    "DP-SGD": [{"clip_norm": 0.1}, {"clip_norm": 0.05}],
    "growing mu": [{"rho_mu": rho, "rho_c": 1.0} for rho in RHOS],
    "sensitivity decay": [{"rho_mu": 1.0, "rho_c": rho} for rho in RHOS],
    "both": [{"rho_mu": rho, "rho_c": rho} for rho in RHOS],
}


def changing(
    published: Mapping[str, Mapping[float, float | None]], trials: Sequence[tuple[float, int]]
) -> tuple[Row, ...]:
    """published: by method and epsilon. trials: pairs of a learning rate and the place of a choice in SCHEDULES."""
    rows = []
    for label, figures in published.items():
        chosen = [(rate, SCHEDULES[label][place]) for rate, place in trials]
        plain = label == "DP-SGD"
        grid = tuple({"learning_rate": rate} | (own if plain else {"method_options": own}) for rate, own in chosen)
        config = {"method": "dp_sgd" if plain else "dynamic_dp_sgd"}
        rows += [
            Row(label=label, config=config, published=figure, claimed=epsilon, grid=grid)
            for epsilon, figure in figures.items()
        ]
    return tuple(rows)


PUBLISHED = {
    row.label: {one.claimed: one.published for one in dynamic.TABLE_1.rows if one.label == row.label}
    for row in dynamic.TABLE_1.rows
    if row.label in SCHEDULES
}
DYNAMIC = Experiment(
    name="dynamic-fashion-mnist",
    title="noise and clip norm that fall, linear on scattering features",
    common=LINEAR | {"delta": 1 / 600_000},
    rows=changing(PUBLISHED, list(itertools.product((8.0 * 0.5, 8.0, 8.0 * 2), (0, 1)))),
    truth=dynamic.TRUTH + " The paper's figures are those of its Table 1, a CNN.",
    smoke=LINEAR_SMOKE,
)
DYNAMIC_CNN = Experiment(
    name="dynamic-cnn-fashion-mnist",
    title="noise and clip norm that fall, a CNN, 12 epochs",
    common=CNN | dict(epochs=12.0, microbatch_size=128, delta=1 / 600_000),
    rows=changing({label: {EPSILON: figures[EPSILON]} for label, figures in PUBLISHED.items()}, [(4.0 * 2, 0)]),
    truth=f"{dynamic.TRUTH} The paper's figures are those of its Table 1. {ON_SCATTERING}",
    smoke=dynamic.SMOKE,
)
EXPERIMENTS = (ADA_DPIGU, FREEZE, D2P2, DICE, DICE_CNN, DYNAMIC, DYNAMIC_CNN)
