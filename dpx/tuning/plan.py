"""The plan of a search, which fixes its bill before the first trial; one trial of it, and its score."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx import keys
from dpx.accounting.best_of import Selection, best_of
from dpx.accounting.bill import event_of
from dpx.accounting.budget import Budget
from dpx.accounting.checks import require_delta
from dpx.accounting.compose import same_key
from dpx.mechanism import Mechanism, require_mechanism
from dpx.states.reading import release_state, steps_billed
from dpx.sums.total import ETA, FloatPair
from dpx.trees import Tree, outlined
from dpx.tuning.budget import noises_within, require_noise_multiplier
from dpx.validation import require_floats, require_function, require_number, require_whole


class Trial(NamedTuple):
    """One trial of a search.

    configuration: one of those given. optimizer: built for it, with a key of its own.
    key: for other randomness of the trial, such as the first parameters, ().
    folder: for its checkpoints, or None; as sensitive as the data.
    """

    configuration: Any
    optimizer: Mechanism
    key: jax.Array
    folder: Path | None

    __repr__ = outlined


@dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A score on private data: the sum of one value in [0, 1] for each example, with Gaussian noise that is billed.

    `score(params)` then returns the values, float (n,), such as whether each prediction is right; dpx clips them to
    [0, 1], and NaN counts 0. One value must depend on one example (or user) alone, and each of
    them may have one value, so n is at most the number of examples of the sampling.

    noise_multiplier: float, positive, the standard deviation of the noise on the sum.
    """

    noise_multiplier: float

    def __post_init__(self):
        require_number("noise_multiplier", self.noise_multiplier, minimum=0, exclusive=True)


ScoreOn = Literal["public"] | NoisySum | DpEvent


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What every trial needs, and the bill of all of them.

    build: (configuration, key, noise multiplier) -> mechanism. noises: of each configuration, floats; None where the
    search has no budget. mechanisms, steps: of each configuration, as billed.
    """

    train: Callable[[Trial], Any]
    configurations: list[Any]
    score: Callable
    build: Callable[[Any, jax.Array, float | None], Mechanism]
    key: jax.Array = field(repr=False)
    noises: list[float | None]
    mechanisms: list[Mechanism]
    steps: list[int]
    delta: float
    score_on: ScoreOn
    bill: Selection

    @classmethod
    def of(
        cls, train, configurations, score, optimizer, key, *, trials, score_on, distribution, budget, steps, delta
    ) -> "SearchPlan":
        for name, function in (("train", train), ("score", score), ("optimizer", optimizer)):
            require_function(name, function)
        configurations, key = list(configurations), keys.secret(keys.require(key))
        if not configurations:
            raise ValueError("configurations must hold at least one, got none")
        own, build = _trial_key(key, 0), _builder(optimizer, budget)

        def bill(mechanisms: list[Mechanism], steps: list[int]) -> Selection:
            noise = GaussianDpEvent(score_on.noise_multiplier) if isinstance(score_on, NoisySum) else score_on
            runs = zip(mechanisms, steps, strict=True)
            return best_of(*runs, trials=trials, score_on=noise, distribution=distribution)

        noises: list[float | None] = [None] * len(configurations)
        if budget is not None:
            if steps is not None or delta is not None:
                raise ValueError("steps and delta must not be given beside a budget, which has them")
            noises = [*noises_within(budget, [functools.partial(build, each, own) for each in configurations], bill)]
        built = [build(each, own, noise) for each, noise in zip(configurations, noises, strict=True)]
        if steps is None and any(mechanism.budget is None for mechanism in built):
            raise ValueError("steps must be given, because a mechanism has no dpx.Budget")
        deltas = {mechanism.budget and mechanism.budget.delta for mechanism in built}
        if delta is None and (None in deltas or len(deltas) > 1):
            raise ValueError(f"delta must be given, because the mechanisms' budgets do not agree on one: {deltas}")
        lengths = [m.budget.steps if steps is None and m.budget else require_whole("steps", steps) for m in built]
        return cls(
            train=train,
            configurations=configurations,
            score=score,
            build=build,
            key=key,
            noises=noises,
            mechanisms=built,
            steps=lengths,
            delta=require_delta(deltas.pop() if delta is None else delta),
            score_on=score_on,
            bill=replace(bill(built, lengths), keys=(key,)),
        )

    def run(self, number: int, folder: Path | None) -> tuple[Trial, Tree, Tree]:
        """The trial of a number, its parameters and its state. Raises ValueError if they are not those billed."""
        chosen = _below(len(self.configurations), keys.stream(self.key, "configuration", number))
        mechanism = self.build(self.configurations[chosen], _trial_key(self.key, number), self.noises[chosen])
        most = self.steps[chosen]
        if mechanism.event(most) != self.mechanisms[chosen].event(most):
            raise ValueError("optimizer must return the mechanism that is billed at every call, got another one")
        trial = Trial(
            configuration=self.configurations[chosen],
            optimizer=mechanism,
            key=keys.stream(self.key, "of a trial's own", number),
            folder=None if folder is None else folder / str(number),
        )
        result = self.train(trial)
        if not isinstance(result, tuple) or len(result) < 2:
            raise ValueError(f"train must return the result of dpx.fit, or (params, state), got {type(result)}")
        event_of(mechanism, result[1], None)
        if (steps := steps_billed(result[1])) > most:
            raise ValueError(f"a trial must make and plan at most the {most} steps that are billed, got {steps}")
        if int(stream := release_state(result[1]).batch_key) not in (0, int(keys.mark(mechanism.key))):
            raise ValueError(
                "a trial must train its own optimizer, and draw its batches with the key of that optimizer, as dpx.fit "
                f"does, because trials must be independent; its batches are of the key of mark {stream}"
            )
        return trial, result[0], result[1]

    def scored(self, params: Tree, number: int) -> float:
        """The score, -inf for no number."""
        key = keys.stream(self.key, "score", number)
        if isinstance(self.score_on, NoisySum):
            values = require_floats("the values of score", self.score(params))
            if values.ndim != 1:
                raise ValueError(f"score must return the values of the examples, of shape (n,), got {values.shape}")
            if values.size > (most := self.mechanisms[0].sampling.examples):
                raise ValueError(f"score must return at most one value for each of {most} examples, got {values.size}")
            exact = math.fsum(np.nan_to_num(values, nan=0.0).clip(0, 1).tolist())
            # Of one sum and key there is one release. Another sum of the trial, which another machine has rounded or
            # trained otherwise, has noise of its own: with the same noise, both scores would show by how much the sums
            # differ.
            key = functools.reduce(keys.fold_in, np.frombuffer(np.float64(exact).tobytes(), np.uint32), key)
            high = np.asarray([exact], np.float32)
            # A Python number minus a float32 array would be float32, and so 0 (NEP 50).
            total = FloatPair(high, np.asarray(exact - high.astype(np.float64), np.float32))
            return float(keys.release(key, 0, total, self.score_on.noise_multiplier * (1 + ETA))[0])
        found = self.score(params, key) if isinstance(self.score_on, DpEvent) else self.score(params)
        if np.shape(found) != ():
            raise ValueError(f"score must return one number, got shape {np.shape(found)}")
        return -math.inf if math.isnan(value := float(found)) else value


def _trial_key(key: jax.Array, number: int) -> jax.Array:
    return keys.stream(key, "trial", number)


def _builder(optimizer: Callable, budget: Budget | None) -> Callable[[Any, jax.Array, float | None], Mechanism]:
    """(configuration, key, noise multiplier) -> mechanism, with the budget of the search, which has the steps."""
    if budget is not None:
        require_noise_multiplier(optimizer)

    def build(configuration, key, noise):
        given = {} if budget is None else {"noise_multiplier": noise}
        mechanism = optimizer(configuration, key, **given)
        require_mechanism(mechanism)
        if not same_key(mechanism.key, key):
            raise ValueError("optimizer must build its mechanism with the key it is given: trials need fresh noise")
        return mechanism if budget is None else mechanism.replace(budget=budget)

    return build


def _below(end: int, key: jax.Array) -> int:
    """A uniform int in [0, end)."""
    high, low = np.asarray(jax.random.bits(key, (2,), np.uint32)).tolist()
    return (high << 32 | low) * end >> 64
