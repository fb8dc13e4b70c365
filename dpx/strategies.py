"""Strategies for correlated noise: matrices C whose inverse correlates the noise over the steps of a run.

A run of T steps releases A (G + C^-1 Z). The rows of G are the clipped sums. A is the workload, what a run computes
from them: prefix sums, or the parameters after each step. Z is independent noise whose standard deviation grows with
the sensitivity of C G. With C = I this is DP-SGD. With a better C, later noise cancels part of earlier noise, so prefix
sums have less noise, although each step has more.

`dpx/papers/correlated_noise/strategy.py` has `Strategy`, families of strategies, how far one example moves C G, the
error of a workload, and the best banded C. It runs in numpy and scipy on the host, and jax never traces it. `cost.py`
beside it has the cost of a run.

To add one: write a function in `strategy.py` that returns a `Strategy`, and list it in tests/test_strategies.py.
"""

from dpx.papers.correlated_noise.cost import cyclic_poisson_event, fixed_order_event
from dpx.papers.correlated_noise.strategy import (
    Strategy,
    Workload,
    WorkloadLoss,
    banded_inverse_square_root,
    banded_square_root,
    column_norm,
    identity,
    lambda_cgd,
    loss,
    mean_loss_lower_bound,
    optimized,
    sensitivity,
    sensitivity_is_exact,
    shuffled_sensitivity,
    square_root_coefficients,
)

__all__ = [
    "Strategy",
    "Workload",
    "WorkloadLoss",
    "banded_inverse_square_root",
    "banded_square_root",
    "column_norm",
    "cyclic_poisson_event",
    "fixed_order_event",
    "identity",
    "lambda_cgd",
    "loss",
    "mean_loss_lower_bound",
    "optimized",
    "sensitivity",
    "sensitivity_is_exact",
    "shuffled_sensitivity",
    "square_root_coefficients",
]
