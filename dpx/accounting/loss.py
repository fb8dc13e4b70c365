"""`PrivacyLoss`: everything dpx knows about one kind of release. A new cost is one file with one subclass.

Two are here: `DpAccountingRelease`, whose cost dp-accounting's own accountants compute, and `PureDpEvent`.

Releases with Laplace noise and by the exponential mechanism are examples of pure differential privacy: no set of
outputs is more than e^epsilon times as likely with an example as without. All such pairs of distributions are dominated
by a coin that shows a secret bit with probability p = e^epsilon / (1 + e^epsilon), and the other bit otherwise
(Kairouz, Oh and Viswanath 2015, https://arxiv.org/abs/1311.0776, theorem 3.4). So the privacy loss is epsilon with
probability p, and -epsilon otherwise. Compared with the loss of Laplace noise itself, this costs up to 2% of epsilon
in a composition of 100 releases, and nothing for one. It needs only the largest ratio of two probabilities.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import special

from dpx.accounting.checks import Accountant, Profile, Relation, require_nonnegative
from dpx.accounting.pld.losses import Pmf, StepLoss, dominating_pmf

NEIGHBORS = {
    "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_GRID = 1e-4  # spacing of privacy losses in dp-accounting's PLD; at 1e-3, some long runs cost 1.5 times too much


class ReleaseCount(NamedTuple):
    """The number of noisy releases that an event stands for: at most (int), and on average (float)."""

    most: int
    mean: float


class PrivacyLoss:
    """One kind of release; hashable. An event of dpx is its own `PrivacyLoss`; others hold a dp-accounting `event`.

    fresh: whether its noise is independent of other releases' noise, so that a run may skip the release.
    gaussian: whether it is a Gaussian, on all data or on a Poisson sample.
    costed_by_dpx: whether dpx computes its cost instead of one of dp-accounting's accountants.
    private: whether it adds noise.
    whole_run: whether it is the cost of a whole run (`profile`, `explain`), which composes with nothing else.
    """

    fresh = False
    gaussian = False
    costed_by_dpx = True
    private = True
    whole_run = False

    @property
    def release_count(self) -> ReleaseCount:
        """How many noisy releases this one stands for."""
        return ReleaseCount(1, 1.0)

    @property
    def draws_examples_independently(self) -> bool:
        """Whether each example joins the batch independently, so that adding one does not affect the others."""
        return False

    @property
    def rate(self) -> float | None:
        """The rate of a Poisson sample; None for other releases."""
        return None

    @property
    def name(self) -> str:
        """The name under which a report lists Gaussian releases by `noise_multiplier`; "" for other releases."""
        return ""

    def step_loss(self, relation: Relation) -> StepLoss:
        """The privacy loss of one step if neighbors differ by `relation`. Raises ValueError if it is unknown."""
        raise NotImplementedError

    def profile(self, accountant: Accountant, relation: Relation) -> Profile:
        """The privacy bound of a whole run."""
        raise NotImplementedError

    def pure(self, relation: Relation) -> float:
        """Epsilon at delta 0; inf if there is none."""
        return math.inf

    def explain(self, delta: float, relation: Relation) -> str:
        """How the cost of a whole run is computed, in one sentence for the privacy report."""
        raise NotImplementedError

    def largest_shift(self, relation: Relation) -> float:
        """The most that one example, or all records of a unit, can move a release, in standard deviations of its noise.

        It is inf unless `dpx/accounting/arithmetic.py` proves a bound.
        """
        return math.inf

    def at_rate(self, rate: float) -> DpEvent:
        """The event of this release for an example that takes part at a lower rate."""
        raise ValueError(
            f"the cost of one weight is known only for releases on Poisson samples, got {event_of_release(self)}"
        )

    def in_words(self) -> str:
        """Describes the release as a report lists it."""
        return str(event_of_release(self))


def event_of_release(loss: Any) -> Any:
    """The event of a release: the release itself, or the dp-accounting event that it wraps."""
    return loss if isinstance(loss, DpEvent) else loss.event


def in_deviations(effect: float, noise_multiplier: float) -> float:
    """Converts an effect from clip norms to standard deviations of the noise; inf without noise."""
    return effect / float(noise_multiplier) if noise_multiplier > 0 else math.inf  # float16 would round it down


def as_hashable(value: Any) -> Any:
    """Replaces the lists and arrays in an event, and in the events nested in it, by tuples."""
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


def require_noise_to_matter(name: str, event: Callable[[float], Any]):
    """Raises ValueError if the function `name` makes the same `event` of any noise multiplier, from 0.001 to 1000."""
    at_one = as_hashable(event(1.0))
    for other in 0.5, 1e3, 1e-3:  # the last two for a multiplier that is kept above or below some number
        try:
            if as_hashable(event(other)) != at_one:
                return
        except ValueError:  # a multiplier that the mechanism refuses is one that it reads
            return
    raise ValueError(
        f"{name} must use the noise multiplier that it is given, such as dpx.dp_sgd(noise_multiplier=noise, ...), "
        "and not a number or a dpx.Budget of its own; got the same cost for 0.001, 0.5, 1 and 1000"
    )


@dataclass(frozen=True)
class DpAccountingRelease(PrivacyLoss):
    """A release of a kind unknown to dpx. inner: the `FlatEvent` of what a Poisson sample releases, or None."""

    event: DpEvent
    inner: Any = None
    costed_by_dpx = False

    @property
    def release_count(self) -> ReleaseCount:
        return self.inner.release_count if self.inner else ReleaseCount(1, 1.0)

    def largest_shift(self, relation: Relation) -> float:
        return self.inner.largest_shift(relation) if self.inner else super().largest_shift(relation)

    def step_loss(self, relation: Relation) -> StepLoss:
        if relation == "replace_one":
            raise ValueError(f'{self.event} has no known Renyi divergence under relation "replace_one"')
        return DpAccountingStep(self.event, relation)


@dataclass(frozen=True)
class DpAccountingStep(StepLoss):
    """A release whose Renyi divergences dp-accounting knows, such as Laplace noise."""

    event: DpEvent
    relation: Relation

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(RdpAccountant(orders.tolist(), NEIGHBORS[self.relation]).compose(self.event).rdp)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(f'{self.event} has no known Renyi divergence under relation "{self.relation}"') from error


@dataclass(frozen=True)
class DelegatedProfile:
    """A profile that asks one of dp-accounting's accountants, which has composed the event."""

    accountant: Any

    def epsilon(self, delta: float) -> float:
        return float(self.accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        return float(self.accountant.get_delta(epsilon))


def delegated_profile(event: DpEvent, accountant: Accountant, relation: Relation) -> DelegatedProfile:
    """The profile from dp-accounting. "tightest" uses its PLD accountant, or RDP if that refuses the event."""
    refusals = []
    for name in ("pld", "rdp") if accountant == "tightest" else (accountant,):
        if name == "pld":
            delegate = PLDAccountant(neighboring_relation=NEIGHBORS[relation], value_discretization_interval=_GRID)
        elif relation == "replace_one":
            refusals.append("its Renyi divergences would be those of adding or removing one example")
            continue
        else:
            delegate = RdpAccountant(neighboring_relation=NEIGHBORS[relation])
        try:
            return DelegatedProfile(delegate.compose(event))
        except dp_accounting.UnsupportedEventError as error:
            refusals.append(str(error))
    raise ValueError(f'accountant "{accountant}" knows no cost of {event} under relation "{relation}": {refusals}')


_SMALL = 1e-8  # moments that float64 would round to 8 digits or fewer
_LARGEST = 600.0  # largest epsilon; more counts as no noise, because e^epsilon must be a float64


@attrs.frozen
class PureDpEvent(DpEvent, PrivacyLoss):
    """One epsilon-differentially private release, at delta 0; neighbors differ by a null in place of one example.

    epsilon: float, at least 0; converted to a float, because doubling or negating a small numpy integer may overflow.
        dp-accounting's accountants refuse this event.
    """

    epsilon: float = attrs.field(converter=functools.partial(require_nonnegative, "epsilon of a release"))
    fresh = True
    release_count = ReleaseCount(0, 0.0)  # its bits have this epsilon: it draws no normals whose arithmetic would add

    def largest_shift(self, relation: Relation) -> float:
        return 0.0

    def pure(self, relation: Relation) -> float:
        return self.epsilon * (2 if relation == "replace_one" else 1)

    def step_loss(self, relation: Relation) -> "PureLoss":
        return PureLoss(self.pure(relation))

    def in_words(self) -> str:
        return f"release of epsilon {self.epsilon:.6g} and delta 0"


@dataclass(frozen=True)
class PureLoss(StepLoss):
    """The privacy loss of a `PureDpEvent`, which is symmetric."""

    epsilon: float

    @property
    def is_noiseless(self) -> bool:
        return self.epsilon > _LARGEST

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Returns ln(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1), float64 (orders,)."""
        p, rest = special.log_expit(self.epsilon), special.log_expit(-self.epsilon)
        moments = np.logaddexp(orders * p + (1 - orders) * rest, orders * rest + (1 - orders) * p)
        half = self.epsilon / 2  # float64 rounds small moments to 0; theirs are cosh((2a - 1) half) / cosh(half)
        with np.errstate(over="ignore", invalid="ignore"):
            small = np.log1p(2 * np.sinh(orders * half) * np.sinh((orders - 1) * half) / np.cosh(half))
        moments = np.where(small < _SMALL, small, moments)
        return np.minimum(np.maximum(moments, 0.0) / (orders - 1), self.epsilon)

    def pmfs(self, grid: float, *, tail: float, largest: float) -> tuple[Pmf, ...]:
        last = math.floor(self.epsilon / grid) + 1
        upper = np.zeros(2 * last + 2)
        upper[1], upper[-2] = special.expit(-self.epsilon), special.expit(self.epsilon)
        return (dominating_pmf(upper, upper[::-1], -last, grid),)
