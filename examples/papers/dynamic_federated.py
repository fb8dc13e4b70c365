"""Dynamic DP-SGD, Table 4 (https://arxiv.org/abs/2111.00173): federated averaging on digits without end."""

from typing import Any

from examples.papers.dynamic import noise_by_clt
from examples.papers.experiment import Experiment, Row

EPSILONS = (0.1, 0.4, 1.0)
RHOS = (1 / 0.7, 1 / 0.4)
PUBLISHED = {
    250: {
        "DP-SGD": (93.47, 95.71, 96.02),
        "growing mu": (93.75, 95.93, 96.13),
        "sensitivity decay": (94.46, 95.90, 96.40),
        "both": (94.72, 96.00, 96.55),
    },
    500: {
        "DP-SGD": (94.82, 96.55, 96.89),
        "growing mu": (95.65, 96.76, 97.05),
        "sensitivity decay": (95.75, 96.83, 97.06),
        "both": (95.88, 96.95, 97.22),
    },
}


def trials(label: str) -> tuple[dict[str, Any], ...]:
    """Four: two rates, or two clip norms of plain DP-SGD, with two learning rates of the server."""
    rhos = {
        "growing mu": [{"rho_mu": rho, "rho_c": 1.0} for rho in RHOS],
        "sensitivity decay": [{"rho_mu": 1.0, "rho_c": rho} for rho in RHOS],
        "both": [{"rho_mu": rho, "rho_c": rho} for rho in RHOS],
    }
    if label == "DP-SGD":
        choices: list[dict[str, Any]] = [{"clip_norm": 0.5}, {"clip_norm": 0.25}]
    else:
        choices = [{"method_options": one} for one in rhos[label]]
    return tuple(choice | {"learning_rate": rate} for choice in choices for rate in (0.35, 0.7))


def table_4(thousands: int) -> Experiment:
    """The half of the table with so many thousand images. A user has 25 of them, on average."""
    users = 40 * thousands
    rows = [
        Row(
            label=label,
            config={"method": "dp_sgd" if label == "DP-SGD" else "dynamic_dp_sgd"},
            published=published,
            claimed=epsilon,
            noise=noise_by_clt,
            grid=trials(label),
        )
        for label, figures in PUBLISHED[thousands].items()
        for epsilon, published in zip(EPSILONS, figures, strict=True)
    ]
    options = dict(users=users, deformed=1000 * thousands, size_power=0.0, concentration=1.0, most=25)
    return Experiment(
        name="dynamic-table-4" + ("" if thousands == 250 else f"-{thousands}k"),
        title=f"noise and clip norm that fall, federated, {thousands},000 deformed digits",
        common=dict(
            dataset="mnist5k",
            task="users",
            task_options=options,
            delta=1 / (10 * users),
            model="linear",
            epochs=1.0,
            batch_size=users // 100,
            clip_norm=0.5,
            momentum=0.9,
        ),
        rows=tuple(rows),
        truth="Epsilon protects all images of a user. The paper takes it from a central limit theorem for many steps, "
        "which is too small: the column of the true epsilon is the cost of its noise by PLD. The error is the larger, "
        "the fewer steps there are and the smaller the sampling rate is; here they are 100 and 1%.",
        stand_in=f"{thousands},000 deformations of the 4,000 real digits of mnist5k (examples/infinite_mnist.py), "
        f"shared among {users:,} users of equal expected size and unequal taste (25 images each, on average), made "
        "smaller to 14 x 14; tested on 1,000 other real digits. The text of the paper that we have does not say how "
        "many users there are, which network they train, or how: those are ours, and a linear model is far from the "
        "paper's network, so compare the rows with each other, not with the paper's accuracies. A real digit has "
        "deformations among many users, so this epsilon protects a user of the simulation, and not the writer of a "
        "digit.",
        real=dict(dataset="mnist", model="adadpigu_cnn_printed", task_options={"pool": 1}),
        tune_at=0.4,
        smoke=dict(
            dataset="random:28x28x1x10",
            task_options=dict(users=40, deformed=100, pool=4),
            batch_size=10,
            epochs=0.5,
            delta=1e-5,
        ),
    )


EXPERIMENTS = (table_4(250), table_4(500))
