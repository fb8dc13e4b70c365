"""Strategies of correlated noise: the matrix C whose inverse correlates the noise of the steps of a run.

A run of T steps releases A (G + C^-1 Z), where the rows of G are the clipped sums, A is the workload (what is wanted of
them: prefix sums, or the parameters after each step), and Z is independent noise whose deviation grows with the
sensitivity of C G. With C = I this is DP-SGD. With a better C, later noise cancels a part of earlier noise, so prefix
sums have less of it, although each step alone has more.

`dpx/papers/correlated_noise/strategy.py`, in numpy and scipy on the host and never traced by jax, has the record
`Strategy`, its families, how far one example moves C G, and the error of a workload with the best banded C for it;
`cost.py` there has the cost of a run.

To add one: a function in `strategy.py` that returns a `Strategy`, and a line in `FAMILIES` of tests/test_strategies.py.
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
