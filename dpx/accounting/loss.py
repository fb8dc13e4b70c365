"""A `PrivacyLoss`: all that dpx knows of one kind of release. A new cost is one file, with one subclass."""

import math
from typing import Any, NamedTuple

import attrs
from dp_accounting import DpEvent

from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.pld.losses import StepLoss
from dpx.accounting.profiles import Profile


class ReleaseCount(NamedTuple):
    """How many releases of noisy numbers an event stands for: at most (int), and on average (float)."""

    most: int
    mean: float


class PrivacyLoss:
    """One kind of release, hashable. An event of dpx is a kind itself; others have a field `event`, of dp-accounting.

    fresh: whether its noise is independent of that of other releases, so that a run may skip it.
    gaussian: whether it is a Gaussian, on all data or on a Poisson sample.
    readable: whether dpx computes its cost, and leaves it to none of dp-accounting's accountants.
    private: whether it adds noise.
    whole_run: whether it is the cost of a whole run (`profile`, `explain`), which composes with nothing.
    """

    fresh = False
    gaussian = False
    readable = True
    private = True
    whole_run = False

    @property
    def released(self) -> ReleaseCount:
        """How many releases of noisy numbers it stands for."""
        return ReleaseCount(1, 1.0)

    @property
    def independent(self) -> bool:
        """Whether chance decides about each example of its batch alone, so that another one changes no other's part."""
        return False

    @property
    def rate(self) -> float | None:
        """The rate of the coins of a Poisson sample; None for other releases."""
        return None

    @property
    def name(self) -> str:
        """The name of Gaussian releases that a report lists by their `noise_multiplier`; "" for others."""
        return ""

    def step_loss(self, relation: Relation) -> StepLoss:
        """Its privacy loss. Raises ValueError for a relation under which it is not known."""
        raise NotImplementedError

    def profile(self, accountant: Accountant, relation: Relation) -> Profile:
        """The bound of a whole run."""
        raise NotImplementedError

    def pure(self, relation: Relation) -> float:
        """Its epsilon at delta 0; inf if it has none."""
        return math.inf

    def explain(self, delta: float, relation: Relation) -> str:
        """How the cost of a whole run is computed, in one sentence for the privacy report."""
        raise NotImplementedError

    def largest_shift(self, relation: Relation) -> float:
        """The most that one example, or all records of a unit, move a release, in standard deviations of its noise.

        It is inf where no proof of `arithmetic` says better: see `far` there.
        """
        return math.inf

    def at_rate(self, rate: float) -> DpEvent:
        """The event of the same release for an example that takes part at a lower rate."""
        raise ValueError(
            f"the cost of one weight is known for releases on Poisson samples only, got {event_of_loss(self)}"
        )

    def in_words(self) -> str:
        """The release, as a report lists it."""
        return str(event_of_loss(self))


def event_of_loss(loss: Any) -> Any:
    """The event that a release stands for: the release itself, or the one of dp-accounting that it is of."""
    return loss if isinstance(loss, DpEvent) else loss.event


def in_deviations(effect: float, noise_multiplier: float) -> float:
    """How far an effect, in clip norms, moves a release, in deviations of its noise; inf without noise."""
    return effect / noise_multiplier if noise_multiplier > 0 else math.inf


def as_hashable(value: Any) -> Any:
    """An event with tuples in place of the lists and arrays in it, and in the events in it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(as_hashable(item) for item in value)
    if not isinstance(value, DpEvent) or not attrs.has(type(value)):
        return value
    try:
        hash(value)
        return value
    except TypeError:
        return attrs.evolve(value, **{a.alias: as_hashable(getattr(value, a.name)) for a in attrs.fields(type(value))})
