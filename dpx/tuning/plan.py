"""The plan of a search, which fixes its cost before the first trial; one trial of it, and its score."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.accounting.best_of import Distribution, Selection, best_of
from dpx.accounting.budget import Budget, least_noise_within
from dpx.accounting.checks import require_delta
from dpx.accounting.compose import same_key
from dpx.accounting.cost import cost_of_run
from dpx.accounting.loss import as_hashable
from dpx.mechanism import Mechanism, require_mechanism
from dpx.states.reading import release_state
from dpx.statistics.metrics import PrivateMetric
from dpx.sums.float_pair import ETA, FloatPair
from dpx.values import (
    Tree,
    described,
    repr_with_shapes,
    require_floats,
    require_function,
    require_number,
    require_whole,
)

_TOLERANCE = 1e-4  # relative, of the epsilon of a budget


class Trial(NamedTuple):
    """One trial of a search.

    configuration: one of those given. optimizer: built for it, with its own key. key: for other randomness of the
        trial, such as the first parameters, (). folder: for its checkpoints, or None; as sensitive as the data.
    """

    configuration: Any
    optimizer: Mechanism
    key: jax.Array
    folder: Path | None

    __repr__ = repr_with_shapes


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A score on private data: the sum of one value in [0, 1] for each example, with Gaussian noise that costs privacy.

    `score(params)` then returns the values, float (n,), such as whether each prediction is right; dpx clips them to [0,
    1], and NaN counts 0. Each value must depend on one example (or user) alone, and each of them on at most one value,
    so n is at most the number of examples of the sampling.

    noise_multiplier: float, positive, the standard deviation of the noise on the sum.
    """

    noise_multiplier: float

    def __post_init__(self):
        require_number("noise_multiplier", self.noise_multiplier, minimum=0, exclusive=True)


ScoreOn = Literal["public"] | NoisySum | DpEvent


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The arguments of `search` that decide what it costs, checked."""

    configurations: Sequence[Any]
    score: Callable
    optimizer: Callable[..., Mechanism]
    key: jax.Array = field(repr=False)
    trials: float
    score_on: ScoreOn
    distribution: Distribution
    budget: Budget | None
    steps: int | None
    delta: float | None

    def __post_init__(self):
        if isinstance(require_function("score", self.score), PrivateMetric):
            raise ValueError(
                "score must not be a dpx.statistics.PrivateMetric, whose cost the search would not include: return the "
                "values of the examples, with score_on=dpx.tuning.NoisySum(...), and evaluate the winner"
            )
        require_function("optimizer", self.optimizer)
        keys.require_key(self.key)
        if not self.configurations:
            raise ValueError("configurations must hold at least one, got none")
        if self.budget is None:
            return
        if not isinstance(self.budget, Budget):
            raise ValueError(f"budget must be a dpx.Budget, got {described(self.budget)}")
        if self.steps is not None or self.delta is not None:
            raise ValueError("steps and delta must not be given with a budget, which already has them")
        try:
            inspect.signature(self.optimizer).bind(None, None, noise_multiplier=1.0)
        except TypeError as error:
            raise ValueError(
                "in a search with a budget, optimizer must also take noise_multiplier, and give it to the mechanism: "
                f"optimizer(configuration, key, *, noise_multiplier); got {described(self.optimizer)}"
            ) from error

    def build(self, configuration: Any, key: jax.Array, noise: float | None) -> Mechanism:
        """The mechanism of a trial, with the budget of the search, which has the steps. noise: None without one."""
        given = {} if self.budget is None else {"noise_multiplier": noise}
        mechanism = self.optimizer(configuration, key, **given)
        require_mechanism(mechanism)
        if not same_key(mechanism.key, key):
            raise ValueError("optimizer must build its mechanism with the key it is given: trials need fresh noise")
        return mechanism if self.budget is None else mechanism.replace(budget=self.budget)

    def cost_of(self, mechanisms: list[Mechanism], steps: list[int]) -> Selection:
        """What a search of these configurations costs."""
        noise = self.score_on
        if isinstance(noise, NoisySum):
            noise = GaussianDpEvent(noise.noise_multiplier)
        runs = zip(mechanisms, steps, strict=True)
        return best_of(*runs, trials=self.trials, score_on=noise, distribution=self.distribution)

    def trial_noise_multipliers(self) -> list[float | None]:
        """The noise multiplier of each configuration, with which the search costs at most its budget; None without one.

        First each configuration gets the noise that it would need alone, because small batches need less than large
        ones. A trial costs the worst of all configurations at every Renyi order, which may be more than the worst one,
        so in the end all are scaled up together until the search is within its budget.

        Raises ValueError for a budget that no noise meets, and for mechanisms without a cost.
        """
        budget, own = self.budget, _trial_key(self.key, 0)
        if budget is None:
            return [None] * len(self.configurations)

        def built(configurations: Sequence[Any], noises: Sequence[float]) -> list[Mechanism]:
            return [self.build(each, own, noise) for each, noise in zip(configurations, noises, strict=True)]

        def cost(mechanisms: list[Mechanism]) -> float:
            cost = self.cost_of(mechanisms, [_steps_of(mechanism) for mechanism in mechanisms])
            return cost.epsilon(delta=budget.delta, accountant=budget.accountant)

        def least(make: Callable[[float], list[Mechanism]]) -> float:
            try:
                return least_noise_within(lambda noise: cost(make(noise)), budget.epsilon, _TOLERANCE, 1.0)
            except ValueError as error:
                raise ValueError(
                    f"the search cannot stay within epsilon={budget.epsilon:g} at delta={budget.delta:g}. Expect fewer "
                    f"trials, allow a larger epsilon, or add more noise to a private score: {error}"
                ) from error

        at_one = built(self.configurations, [1.0] * len(self.configurations))
        cost(at_one)  # refuses what has no cost
        found: dict[Any, float] = {}  # for configurations that cost the same, such as several learning rates
        noises = []
        for each, mechanism in zip(self.configurations, at_one, strict=True):
            alike = as_hashable(mechanism.event(_steps_of(mechanism)))
            if alike not in found:
                found[alike] = least(lambda noise, each=each: built([each], [noise]))
            noises.append(found[alike])
        scale = least(lambda scale: built(self.configurations, [scale * noise for noise in noises]))
        return [scale * noise for noise in noises]


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What all trials need, and their cost. noises, mechanisms, steps: of each configuration, as paid for."""

    settings: SearchSettings
    noises: list[float | None]
    mechanisms: list[Mechanism]
    steps: list[int]
    delta: float
    cost: Selection

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> "SearchPlan":
        """Raises ValueError for settings that have no cost, or no noise that meets their budget."""
        noises, own, delta = settings.trial_noise_multipliers(), _trial_key(settings.key, 0), settings.delta
        pairs = zip(settings.configurations, noises, strict=True)
        mechanisms = [settings.build(each, own, noise) for each, noise in pairs]
        if settings.steps is not None:
            steps = [require_whole("steps", settings.steps)] * len(mechanisms)
        elif any(mechanism.budget is None for mechanism in mechanisms):
            raise ValueError("steps must be given, because a mechanism has no dpx.Budget")
        else:
            steps = [_steps_of(mechanism) for mechanism in mechanisms]
        if delta is None:
            deltas = {mechanism.budget and mechanism.budget.delta for mechanism in mechanisms}
            if None in deltas or len(deltas) > 1:
                raise ValueError(f"delta must be given, because the mechanisms' budgets do not agree on one: {deltas}")
            (delta,) = deltas
        cost = replace(settings.cost_of(mechanisms, steps), keys=(settings.key,))
        delta = require_delta(delta)
        return cls(settings=settings, noises=noises, mechanisms=mechanisms, steps=steps, delta=delta, cost=cost)

    def trial(self, number: int, folder: Path | None) -> tuple[Trial, int]:
        """The trial of a number, and the most steps that it may make."""
        key, configurations = self.settings.key, self.settings.configurations
        chosen = _uniform_below(len(configurations), keys.stream(key, "configuration", number))
        mechanism = self.settings.build(configurations[chosen], _trial_key(key, number), self.noises[chosen])
        most = self.steps[chosen]
        if mechanism.event(most) != self.mechanisms[chosen].event(most):
            raise ValueError("optimizer must return the mechanism that is paid for at every call, got another one")
        own = keys.stream(key, "of a trial's own", number)
        return Trial(configurations[chosen], mechanism, own, None if folder is None else folder / str(number)), most

    def run(self, train: Callable[[Trial], Any], number: int, folder: Path | None) -> tuple[Trial, Tree, Tree]:
        """The trial of a number, its parameters and its state. Raises ValueError if they do not match the cost."""
        trial, most = self.trial(number, folder)
        result = train(trial)
        if not isinstance(result, tuple) or len(result) < 2:
            raise ValueError(f"train must return the result of dpx.fit, or (params, state), got {type(result)}")
        if (steps := cost_of_run(trial.optimizer, result[1]).record.steps) > most:
            raise ValueError(f"a trial must plan and take at most the {most} steps that are paid for, got {steps}")
        if int(stream := release_state(result[1]).batch_key) not in (0, int(keys.mark_of_key(trial.optimizer.key))):
            raise ValueError(
                "a trial must train its own optimizer, and draw its batches with the key of that optimizer, as dpx.fit "
                f"does, because trials must be independent; its batches come from the key with mark {stream}"
            )
        return trial, result[0], result[1]

    def scored(self, params: Tree, number: int) -> float:
        """The score; -inf for NaN."""
        score, score_on = self.settings.score, self.settings.score_on
        key = keys.stream(self.settings.key, "score", number)
        if isinstance(score_on, NoisySum):
            return self._noisy(require_floats("the values of score", score(params)), key, score_on.noise_multiplier)
        found = score(params, key) if isinstance(score_on, DpEvent) else score(params)
        if np.shape(found) != ():
            raise ValueError(f"score must return one number, got shape {np.shape(found)}")
        return -math.inf if math.isnan(value := float(found)) else value

    def _noisy(self, values: np.ndarray, key: jax.Array, noise_multiplier: float) -> float:
        """The sum of the values of the examples, with noise."""
        if values.ndim != 1:
            raise ValueError(f"score must return the values of the examples, of shape (n,), got {values.shape}")
        if values.size > (most := self.mechanisms[0].sampling.examples):
            raise ValueError(f"score must return at most one value for each of {most} examples, got {values.size}")
        exact = math.fsum(np.nan_to_num(values, nan=0.0).clip(0, 1).tolist())
        # One sum and key make one release. Another sum of the trial, rounded or trained differently on another machine,
        # gets different noise: with the same noise, two scores would show by how much the sums differ.
        key = functools.reduce(keys.fold_in, np.frombuffer(np.float64(exact).tobytes(), np.uint32), key)
        high = np.asarray([exact], np.float32)
        # A Python number minus a float32 array would be float32, and so 0 (NEP 50).
        total = FloatPair(high, np.asarray(exact - high.astype(np.float64), np.float32))
        return float(keys.release(key, 0, total, noise_multiplier * (1 + ETA))[0])


def _trial_key(key: jax.Array, number: int) -> jax.Array:
    return keys.stream(key, "trial", number)


def _steps_of(mechanism: Mechanism) -> int:
    """The steps of its budget; 1 if the budget of a search is not for steps."""
    return mechanism.budget.steps if mechanism.budget else 1


def _uniform_below(end: int, key: jax.Array) -> int:
    """A uniform int in [0, end)."""
    high, low = np.asarray(jax.random.bits(key, (2,), np.uint32)).tolist()
    return (high << 32 | low) * end >> 64
