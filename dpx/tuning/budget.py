"""The noise of the trials of a search, so that the whole search stays within a budget."""

import inspect
from collections.abc import Callable
from typing import Any

from dpx.accounting.best_of import Selection
from dpx.accounting.budget import Budget
from dpx.accounting.calibration import least_within
from dpx.accounting.loss import hashable
from dpx.mechanism import Mechanism
from dpx.trees import described

_TOLERANCE = 1e-4  # relative, of epsilon


def noises_within(
    budget: Budget, builds: list[Callable[[float], Mechanism]], bill: Callable[[list[Mechanism], list[int]], Selection]
) -> list[float]:
    """The noise multiplier of each configuration, with which a search costs at most the budget, floats.

    builds: of each configuration, noise multiplier -> mechanism, with the budget. bill: (mechanisms, steps) -> bill.

    First the noise of each configuration is found as if it were the only one, because one of small batches needs less
    than one of large batches. A trial is billed at the worst of all configurations at every Renyi order, which may cost
    more than the worst one, so in the end all are scaled up together until the bill of the search is within the budget.

    Raises ValueError for a budget that no noise meets, and for mechanisms that have no bill.
    """

    def cost(mechanisms: list[Mechanism]) -> float:
        steps = [mechanism.budget.steps for mechanism in mechanisms if mechanism.budget is not None]
        return bill(mechanisms, steps).epsilon(delta=budget.delta, accountant=budget.accountant)

    def least(make: Callable[[float], list[Mechanism]]) -> float:
        try:
            return least_within(lambda noise: cost(make(noise)), budget.epsilon, _TOLERANCE, 1.0)
        except ValueError as error:
            raise ValueError(
                f"the search cannot stay within epsilon={budget.epsilon:g} at delta={budget.delta:g}. Expect fewer "
                f"trials, allow a larger epsilon, or add more noise to a private score: {error}"
            ) from error

    at_one = [build(1.0) for build in builds]
    cost(at_one)  # refuses what has no bill
    found: dict[Any, float] = {}  # of configurations that cost the same, such as those of several learning rates
    noises = []
    for build, mechanism in zip(builds, at_one, strict=True):
        alike = hashable(mechanism.event(mechanism.budget.steps if mechanism.budget else 1))
        if alike not in found:
            found[alike] = least(lambda noise, build=build: [build(noise)])
        noises.append(found[alike])
    scale = least(lambda scale: [build(scale * noise) for build, noise in zip(builds, noises, strict=True)])
    return [scale * noise for noise in noises]


def require_noise_multiplier(optimizer: Callable) -> None:
    """Raises ValueError unless it can be called as optimizer(configuration, key, noise_multiplier=...)."""
    try:
        inspect.signature(optimizer).bind(None, None, noise_multiplier=1.0)
    except TypeError as error:
        raise ValueError(
            "in a search with a budget, optimizer must also take noise_multiplier, and give it to the mechanism: "
            f"optimizer(configuration, key, *, noise_multiplier); got {described(optimizer)}"
        ) from error
