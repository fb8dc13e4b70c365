"""What is asked of a bill: epsilon at a delta, delta at an epsilon, or delta at many."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpx.accounting import gdp, renyi
from dpx.accounting.composition import Composed

_LARGEST = 1e8  # an epsilon beyond it counts as infinite


class Target(Protocol):
    """Each method gives a number, or an array for many targets.

    gaussian: the exact answer for mu-GDP;  read: from a composed privacy loss
    renyi: an upper bound from RDP (orders,), which may fail with probability `missing`
    profile: from an upper bound of delta as a function of epsilon
    delegated: from one of dp-accounting's accountants;  unbounded: the answer when a step adds no noise
    around: the (epsilon, delta) that a composition should resolve, given RDP
    """

    @property
    def unbounded(self) -> Any: ...
    def gaussian(self, mu: float) -> Any: ...
    def renyi(self, rdp: np.ndarray, *, missing: float = 0.0) -> Any: ...
    def profile(self, delta_of: Callable[[float], float]) -> Any: ...
    def read(self, composed: Composed) -> Any: ...
    def delegated(self, accountant: Any) -> Any: ...
    def around(self, rdp: np.ndarray) -> tuple[float, float]: ...


@dataclass(frozen=True)
class EpsilonAt:
    delta: float
    unbounded: float = math.inf

    def gaussian(self, mu: float) -> float:
        return gdp.epsilon(mu, self.delta)

    def renyi(self, rdp: np.ndarray, *, missing: float = 0.0) -> float:
        if missing >= self.delta:
            return math.inf
        return renyi.epsilon(rdp, self.delta - missing)[0] - math.log1p(-missing)

    def profile(self, delta_of: Callable[[float], float]) -> float:
        low, high = 0.0, 1.0
        if delta_of(low) <= self.delta:
            return low
        while delta_of(high) > self.delta:
            low, high = high, 2 * high
            if high > _LARGEST:
                return math.inf
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if delta_of(middle) <= self.delta else (middle, high)
        return high

    def read(self, composed: Composed) -> float:
        return composed.epsilon(self.delta)

    def delegated(self, accountant: Any) -> float:
        return float(accountant.get_epsilon(self.delta))

    def around(self, rdp: np.ndarray) -> tuple[float, float]:
        return self.renyi(rdp), self.delta


@dataclass(frozen=True)
class DeltaAt:
    epsilon: float
    unbounded: float = 1.0

    def gaussian(self, mu: float) -> float:
        return gdp.delta(mu, self.epsilon)

    def renyi(self, rdp: np.ndarray, *, missing: float = 0.0) -> float:
        return renyi.delta(rdp, max(0.0, self.epsilon + math.log1p(-missing)))[0] + missing

    def profile(self, delta_of: Callable[[float], float]) -> float:
        return delta_of(self.epsilon)

    def read(self, composed: Composed) -> float:
        return composed.delta(self.epsilon)

    def delegated(self, accountant: Any) -> float:
        return float(accountant.get_delta(self.epsilon))

    def around(self, rdp: np.ndarray) -> tuple[float, float]:
        return self.epsilon, self.renyi(rdp)


@dataclass(frozen=True)
class DeltasAt:
    """One composition, resolved where delta is 1e-10, for all."""

    epsilons: tuple[float, ...]

    @property
    def unbounded(self) -> np.ndarray:
        return np.ones(len(self.epsilons))

    def _each(self, method: str, argument: Any) -> np.ndarray:
        return np.array([getattr(DeltaAt(epsilon), method)(argument) for epsilon in self.epsilons])

    def gaussian(self, mu: float) -> np.ndarray:
        return self._each("gaussian", mu)

    def renyi(self, rdp: np.ndarray, *, missing: float = 0.0) -> np.ndarray:
        return np.array([DeltaAt(epsilon).renyi(rdp, missing=missing) for epsilon in self.epsilons])

    def profile(self, delta_of: Callable[[float], float]) -> np.ndarray:
        return np.array([delta_of(epsilon) for epsilon in self.epsilons])

    def read(self, composed: Composed) -> np.ndarray:
        return self._each("read", composed)

    def delegated(self, accountant: Any) -> np.ndarray:
        return self._each("delegated", accountant)

    def around(self, rdp: np.ndarray) -> tuple[float, float]:
        return renyi.epsilon(rdp, 1e-10)[0], 1e-10
