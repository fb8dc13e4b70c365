"""The cost of several runs on the same data."""

import itertools
from dataclasses import dataclass
from typing import Any

import dp_accounting
import jax
import numpy as np

from dpx import keys
from dpx._numbers import over
from dpx.accounting import checks
from dpx.accounting.bill import billed, steps_in, stream_of
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.events import event_delta, event_epsilon


@dataclass(frozen=True)
class Composition:
    """What several runs cost together; `epsilon` and `delta` are upper bounds, as `dpx.epsilon` and `dpx.delta`."""

    event: dp_accounting.DpEvent
    relation: Relation

    def epsilon(self, delta: float, *, accountant: Accountant = "tightest") -> float:
        return event_epsilon(self.event, delta=checks.delta(delta), accountant=accountant, relation=self.relation)

    def delta(self, epsilon: float, *, accountant: Accountant = "tightest") -> float:
        return event_delta(self.event, epsilon=checks.epsilon(epsilon), accountant=accountant, relation=self.relation)


def compose(*runs: tuple[Any, Any], shared_batches: bool) -> Composition:
    """What `runs` cost together, each a (mechanism, state) or a (mechanism, steps).

        dpx.compose((a, state_a), (b, state_b), shared_batches=False).epsilon(delta=1e-5)

    shared_batches: False, if every run drew its own batches, with a key of its own. Then all their events compose.
        True, if step t of every run saw one and the same batch. Sampling amplifies such releases once, together: a step
        costs one Gaussian of noise multiplier (sum_i sigma_i^-2)^(-1/2) on the sampled batch, at small deltas more than
        both apart (Poisson rate .01, noise multipliers 1, 1000 steps: epsilon 4.48 at delta 1e-5, instead of 2.58).

    Give states rather than steps, because they tell whether runs drew their batches with one key.

    Raises ValueError for two runs with one key, because they share their noise; for states that say otherwise of their
    batches than `shared_batches`; for different neighboring relations; and, with shared batches, for different
    samplings and for mechanisms that are not billed as Gaussian releases of a step.
    """
    if not runs:
        raise ValueError("compose needs at least one (mechanism, steps or state), got none")
    for (one, _), (other, _) in itertools.combinations(runs, 2):
        if _same_key(one.key, other.key):
            raise ValueError(
                "every run must have a key of its own: two of these mechanisms share one, so their noise is the same "
                "and subtracting one release from the other removes it"
            )
    events = [billed(mechanism, spent, None) for mechanism, spent in runs]
    streams = [mark for _, spent in runs if (mark := stream_of(spent))]
    if not shared_batches and len(set(streams)) < len(streams):
        raise ValueError(
            "two of these runs drew their batches with one key, so they saw the same ones: pass shared_batches=True"
        )
    if shared_batches and len(set(streams)) > 1:
        raise ValueError(
            "these runs drew their batches with several keys, so they saw others: pass shared_batches=False"
        )
    (_, relation), *others = events
    if any(other != relation for _, other in others):
        raise ValueError(f"runs must have one neighboring relation, got {sorted({one for _, one in events})}")
    if not shared_batches:
        return Composition(dp_accounting.ComposedDpEvent([event for event, _ in events]), relation)
    return Composition(_on_shared_batches(runs, [event for event, _ in events]), relation)


def _on_shared_batches(runs, events) -> dp_accounting.DpEvent:
    """The event of releases that share the batch of every step.

    Given the batch, a step's releases are Gaussians, each of which may be chosen by those before it; together they are
    dominated by one Gaussian with the sum of their precisions (they compose as Gaussian differential privacy does), and
    so is their mixture over whether the example is in the batch.
    """
    sampling = runs[0][0].sampling
    precision = np.zeros(max(steps_in(spent) for _, spent in runs))
    for (mechanism, spent), event in zip(runs, events, strict=True):
        if repr(mechanism.sampling) != repr(sampling):
            raise ValueError(f"runs with shared batches must have one sampling, got {sampling}, {mechanism.sampling}")
        steps = steps_in(spent)
        multipliers = over(mechanism.noise_multiplier, steps)
        if event != sampling.event(multipliers):
            raise ValueError(f"runs with shared batches must release one Gaussian a step, got {mechanism}")
        with np.errstate(divide="ignore"):
            precision[:steps] += multipliers**-2.0
    with np.errstate(divide="ignore"):
        return sampling.event(precision**-0.5)


def _same_key(one: jax.Array, other: jax.Array) -> bool:
    first, second = (np.asarray(jax.random.key_data(keys.require(key))) for key in (one, other))
    return np.array_equal(first, second)
