"""Strategies of correlated noise: the matrix C whose inverse correlates the noise of the steps of a run.

A run of T steps releases A (G + C^-1 Z), where the rows of G are the clipped sums, A is the workload (what is wanted of
them: their prefix sums, or the parameters after each step), and Z is independent noise of a deviation that grows with
the sensitivity of C G. With C = I this is DP-SGD. With a better C, later noise cancels a part of earlier noise, so the
prefix sums have less of it, although each step alone has more.

* `strategy.py`: the record `Strategy`, its C, its C^-1, and what a mechanism needs to make the noise step by step.
* `families.py`: identity, lambda-CGD, BISR, BSR and banded FHU. `optimization.py`: the best banded C for a workload.
* `sensitivities.py`: by how much one example moves C G. `losses.py`: the error of a workload.
* `events.py`: the events of a run of correlated noise.

All of it is numpy and scipy on the host: nothing here is traced by jax.

To add one: a function in `families.py` that returns a `Strategy`, and a line in `FAMILIES` of tests/test_strategies.py.
"""

from dpx.strategies.events import cyclic_poisson_event, fixed_order_event
from dpx.strategies.families import (
    banded_half,
    banded_square_root,
    half_coefficients,
    identity,
    inverse_square_root,
    lambda_cgd,
)
from dpx.strategies.losses import Loss, Workload, least_mean_loss, loss
from dpx.strategies.optimization import optimized
from dpx.strategies.sensitivities import column_norm, sensitivity, sensitivity_is_exact, shuffled_sensitivity
from dpx.strategies.strategy import Strategy

__all__ = [
    "Loss",
    "Strategy",
    "Workload",
    "banded_half",
    "banded_square_root",
    "column_norm",
    "cyclic_poisson_event",
    "fixed_order_event",
    "half_coefficients",
    "identity",
    "inverse_square_root",
    "lambda_cgd",
    "least_mean_loss",
    "loss",
    "optimized",
    "sensitivity",
    "sensitivity_is_exact",
    "shuffled_sensitivity",
]
