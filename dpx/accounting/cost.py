"""The cost, as epsilon and delta, of an event and of a run's steps, whether planned or taken.

An event is flattened, its releases become step losses, and these become a profile. The cost of an event treats its
noise as real numbers, so that it can be compared with other libraries. The cost of every run comes from
`profile_of_run`, which adds the cost of dpx's arithmetic (`arithmetic`).

dpx computes the cost of Gaussian events, on all data, on Poisson samples (truncated or not) and on samples of a fixed
size, and of events that are a `PrivacyLoss`. dp-accounting's own accountants compute all others.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import DpEvent

from dpx.accounting import checks
from dpx.accounting.arithmetic import NormalSamplerError, RunProfile, normal_sampler_error
from dpx.accounting.checks import Accountant, Profile, Relation
from dpx.accounting.flat_event import DISTINCT, from_event
from dpx.accounting.groups import require_zero_out
from dpx.accounting.loss import DelegatedProfile, PrivacyLoss, event_of_release
from dpx.accounting.pld.losses import BUCKETS
from dpx.accounting.profiles import GaussianProfile
from dpx.keys.noise import LARGEST_RELEASE
from dpx.sampling.schemes import Sampling
from dpx.sampling.varying import PoissonSampling
from dpx.states.reading import RunFacts, read_run_facts
from dpx.values import described, explain_misuse, require_whole, warn_user

_UNUSED = (
    "the state has taken no step. If parameters were trained with it, all of their steps had the same noise, which no "
    "cost covers: give each step the state that the last one returned"
)


@explain_misuse
def event_epsilon(
    event: DpEvent,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = BUCKETS,
) -> float:
    """Returns an upper bound on epsilon at `delta` for an event; inf if a release adds no noise.

    The noise is treated as real numbers. `dpx.epsilon` of a run also covers its finite precision, which adds less than
    1e-3 for up to 10,000 Gaussians with noise multipliers of at least 0.5, at epsilon up to 50 and delta from 1e-6.

    event: a dp-accounting event, or a `DpEvent` that is also a `PrivacyLoss`.
    delta: in [0, 1). At 0, epsilon is inf, except for events that cost nothing, that contain only `PureDpEvent`s, or
        for which dp-accounting knows a finite cost.
    accountant: "pld" composes privacy loss distributions, "rdp" Renyi divergences. "tightest" uses "pld" if it is known
        for every release, and "rdp" otherwise; "pld" never costs more than "rdp". All are guarantees.
    relation: how neighboring data sets differ. The noise of a Gaussian event is relative to the effect of adding or
        removing one example, which is also the effect of nulling one ("zero_out"). Replacing one has twice that effect,
        and costs accordingly. For sampling without replacement, the noise is relative to the effect of replacing one,
        and the event holds for no other relation.
    buckets: the largest number of distinct releases that PLD composes, counted separately on Poisson samples, on
        samples of a fixed size and on truncated samples; further ones are merged by rounding their cost up. For epochs
        of random allocation, the limit is a quarter of this number, and at most 24.

    Raises ValueError for an event that does not hold for the relation or whose cost the accountant does not know, and
    for a delta, accountant, relation or number of buckets outside its range.

        >>> from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        >>> dpx.accounting.event_epsilon(SelfComposedDpEvent(GaussianDpEvent(10.0), 50), delta=1e-5)
        2.943...
    """
    delta = checks.require_delta(delta, zero=True)
    exact = event_profile(event, accountant=accountant, relation=relation, buckets=buckets)
    if delta > 0 or isinstance(exact, DelegatedProfile):
        return exact.epsilon(delta)
    return from_event(event).pure(relation)


@explain_misuse
def event_delta(
    event: DpEvent,
    *,
    epsilon: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = BUCKETS,
) -> float:
    """Returns an upper bound on delta at an `epsilon` >= 0. Other arguments and errors are as for `event_epsilon`."""
    epsilon = checks.require_epsilon(epsilon)
    return event_profile(event, accountant=accountant, relation=relation, buckets=buckets).delta(epsilon)


def event_profile(
    event: DpEvent,
    *,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = BUCKETS,
    curve: bool = False,
) -> Profile:
    """The profile of an event, which computes epsilon and delta; see `event_epsilon`.

    curve: True to compute deltas at many epsilons, each to 0.1%; ask for them in rising order of epsilon.
    """
    checks.require_accountant(accountant)
    checks.require_relation(relation)
    require_whole("buckets", buckets)
    if not isinstance(event, DpEvent):
        raise ValueError(f"event must be a DpEvent, such as optimizer.event(steps), got {described(event)}")
    return from_event(event).profile(accountant, relation, buckets=buckets, curve=curve)


def profile_of_run(
    event: DpEvent,
    *,
    relation: Relation,
    accountant: Accountant = "tightest",
    buckets: int = BUCKETS,
    curve: bool = False,
    runs: int = 1,
    numbers: int | NormalSamplerError = LARGEST_RELEASE,
) -> RunProfile:
    """The profile of a run of dpx with this event: `event_profile` plus the cost of its noise's arithmetic.

    The cost of every run comes from this profile. runs: how many runs each release of the event stands for. numbers:
    the most elements in one release, or the `NormalSamplerError` of their sampler; 0 for exact noise.
    """
    exact = event_profile(event, accountant=accountant, relation=relation, buckets=buckets, curve=curve)
    return from_event(event).implemented_profile(exact, relation, runs=runs, numbers=numbers)


def require_reachable_epsilon(run: RunProfile, epsilon: float, delta: float) -> float:
    """The epsilon of a run at `delta`. Raises ValueError if finite-precision noise alone costs more than `epsilon`."""
    shift = 0.0 if math.isfinite(run.shift) else math.inf
    at_best = replace(run, exact=GaussianProfile(0.0), shift=shift)  # with arbitrarily large noise
    if (least := at_best.epsilon(delta)) > epsilon:
        possible = 2 * (at_best.least_reachable_delta(delta) or 0.0)  # for noise of a usual size
        advice = f"Delta must be at least about {possible:.1g} for them" if possible else "Allow a larger epsilon"
        numbers = 2 * run.normals.pairs
        raise ValueError(
            f"epsilon={epsilon} at delta={delta} cannot be met by any noise: computer noise takes finitely many "
            f"values, which alone costs {least:.3g} in {run.releases} releases of {numbers} numbers. "
            f"{advice}, or state fewer `numbers`"
        )
    return run.epsilon(delta)


@explain_misuse
def epsilon(
    optimizer: Any,
    steps_or_state: Any,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    weight: float | None = None,
    records: int | None = None,
    numbers: int | None = None,
) -> float:
    """Returns an upper bound on epsilon at `delta` for the first steps of a run; inf if a step adds no noise.

    optimizer: a `dpx.Mechanism`, possibly followed by optax transforms (`dpx.chain`).
    steps_or_state: a number of steps (int, at least 0); or an optimizer state, for all steps that its run has taken or
        that its `dpx.Budget` or `dpx.fit` planned, unless it was built with `public_stop=True`.
    delta: in (0, 1), ideally far below 1 divided by the number of examples. A larger one warns.
    accountant: "tightest" uses "pld" (privacy loss distributions) if that is known for every release, and otherwise
        "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation of the mechanism's sampling. The event of
        Poisson sampling also holds for replacing an example ("replace_one"), and, like that of random allocation, for
        adding or removing one ("add_or_remove"). The latter costs the same as "zero_out", but only in real arithmetic:
        in a program, a deleted row moves all later ones, and the last bits of their float sum reveal the order of the
        rows. So the released bits are private under "zero_out", where a null keeps the row in place.
    weight: for `PoissonSampling(..., weights=...)`, bounds the cost of examples up to this weight; None covers all.
    records: int, at least 1, the most examples that one person owns; None takes it from the mechanism's `dpx.Budget`,
        or 1 without one. Above 1, the cost is that of nulling all of them together (`dpx/accounting/groups.py`), for
        `PoissonSampling` without `most_rows` and for `FullBatch`.
    numbers: int, at most 2^32, the most elements that a step releases. None takes it from the mechanism's `dpx.Budget`;
        without one, from the state, or 2^32 for a number of steps. It matters for deltas below 1e-12.

    Warns for a state that has taken no step, because all steps that start from it have the same noise.

    Raises ValueError for a state that another mechanism made, for a relation that the event does not hold for, for an
    event whose cost the accountant does not know, for a weight above the largest, for several records with another
    sampling, and for fewer numbers than the state or the budget has.

        >>> sampling = dpx.PoissonSampling(examples=1_000, batch_size=50)
        >>> mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key())
        >>> dpx.epsilon(mechanism, 200, delta=1e-5)
        4.765...
    """
    cost = cost_of_run(optimizer, steps_or_state, relation, records=records, weight=weight, numbers=numbers)
    checks.warn_of_large_delta(delta, optimizer.sampling)
    return cost.profile(accountant).epsilon(delta)


@explain_misuse
def delta(
    optimizer: Any,
    steps_or_state: Any,
    *,
    epsilon: float,
    accountant: Accountant = "tightest",
    relation: Relation | None = None,
    weight: float | None = None,
    records: int | None = None,
    numbers: int | None = None,
) -> float:
    """Returns an upper bound on delta at `epsilon` (at least 0) for the first steps of a run; 1 if one adds no noise.

    optimizer: a `dpx.Mechanism`, possibly followed by optax transforms (`dpx.chain`).
    steps_or_state: a number of steps (int, at least 0), or an optimizer state, as for `dpx.epsilon`.
    accountant: "tightest", "pld" (privacy loss distributions) or "rdp" (Renyi divergences).
    relation: how neighboring data sets differ; None is the relation of the sampling.
    weight, records, numbers: as for `dpx.epsilon`.

    Raises ValueError if `epsilon` is below 0, and as `dpx.epsilon` does.

        >>> dpx.accounting.delta(mechanism, 200, epsilon=4.0)  # and epsilon is 4.77 at delta 1e-5
        9.98...e-05
    """
    epsilon = checks.require_epsilon(epsilon)
    cost = cost_of_run(optimizer, steps_or_state, relation, records=records, weight=weight, numbers=numbers)
    return cost.profile(accountant).delta(epsilon)


class RunCost(NamedTuple):
    """What a run releases and whom it protects, which is all that its profile depends on.

    event: the event of the steps, for a unit that owns `records` records. relation: how neighboring data sets differ.
    numbers: the most elements in one release, or their sampler. record: facts read from its steps or its state.
    """

    event: dp_accounting.DpEvent
    relation: Relation
    records: int
    numbers: int | NormalSamplerError
    record: RunFacts

    @property
    def normal_sampler_error(self) -> NormalSamplerError:
        """The error of the sampler that draws a release's noise, for the cost of its arithmetic."""
        return normal_sampler_error(self.numbers, self.record.in_integers)

    def profile(self, accountant: Accountant = "tightest", **options: Any) -> RunProfile:
        """Calls `profile_of_run`, which takes the options."""
        given = {"accountant": accountant, "relation": self.relation, "numbers": self.normal_sampler_error}
        return profile_of_run(self.event, **given, **options)


def cost_of_run(
    optimizer: Any,
    steps_or_state: Any,
    relation: Relation | None = None,
    *,
    records: int | None = None,
    weight: float | None = None,
    numbers: int | None = None,
    distinct: int = DISTINCT,
) -> RunCost:
    """The cost of a run's steps. The arguments are as for `epsilon`, and `distinct` is as for `event_for_unit`.

    Raises ValueError for a state that another mechanism made, for a relation that the event does not hold for, for
    records or a weight whose cost is unknown, and if the run is known to have more numbers.
    """
    require_event_and_sampling(optimizer)
    record, sampling = read_run_facts(steps_or_state), optimizer.sampling
    if record.state is None:
        event = optimizer.event(record.steps) if record.steps else dp_accounting.NoOpDpEvent()
    elif hasattr(optimizer, "event_of_state"):
        event = optimizer.event_of_state(record.state, record.steps)
        if record.made == 0:  # with a budget, this would look like the cost of a run
            warn_user(_UNUSED)
    else:
        raise ValueError(f"a state must be read by the dpx Mechanism that made its releases, got {type(optimizer)}")
    relation = _relation_of(event, sampling, relation)
    event = event if weight is None else _event_for_weight(event, sampling, weight)
    records = records_per_unit_of_run(optimizer, records)
    event = event_for_unit(event, sampling, relation, records, distinct=distinct)
    known = record.numbers if record.state is not None else getattr(getattr(optimizer, "budget", None), "numbers", None)
    if numbers is not None and known is not None and numbers < known:
        raise ValueError(f"numbers must be at least the {known} of the run, got {described(numbers)}")
    numbers = (known or LARGEST_RELEASE) if numbers is None else checks.numbers_per_release(numbers)
    return RunCost(event, relation, records, numbers, record)


def records_per_unit_of_run(optimizer: Any, records: int | None) -> int:
    """The most records that the protected unit owns: `records`, or those of the mechanism's budget, or 1."""
    budget = getattr(optimizer, "budget", None)
    if records is None:
        return 1 if budget is None else budget.records
    return require_whole("records", records)


def _relation_of(event: dp_accounting.DpEvent, sampling: Sampling, relation: Relation | None) -> Relation:
    """Returns `relation`, or the sampling's if None. Raises ValueError if the event does not hold for it."""
    stated = checks.require_relation(sampling.relation)
    if relation is None or checks.require_relation(relation) == stated:
        return stated
    if stated == "replace_one":
        raise ValueError(f'relation {relation!r} does not fit {sampling}, whose cost holds only for "replace_one"')
    if sampling.has_weights:
        words = 'the weight of another example would change all rates; its event is true only for "zero_out"'
        raise ValueError(f"relation {relation!r} does not fit {sampling}: {words}")
    flat = from_event(event)
    if relation == "add_or_remove" and not (flat.all_drawn_independently or flat.whole_runs):
        words = 'one example more or fewer would change the other batches; its event is true for "zero_out"'
        raise ValueError(f'relation "add_or_remove" does not fit {sampling}: {words}')
    return relation


def _event_for_weight(event: dp_accounting.DpEvent, sampling: Sampling, weight: float) -> dp_accounting.DpEvent:
    """The event of the same releases for an example of this weight, which takes part at a lower rate."""
    if not isinstance(sampling, PoissonSampling):
        words = f"because the examples of {sampling} have no weights"
        raise ValueError(f"weight must be left out, {words}; got {described(weight)}")
    rate, largest = sampling.rate_of_weight(weight), sampling.probability

    def at_lower_rate(loss: PrivacyLoss) -> dp_accounting.DpEvent:
        if not loss.private:
            return event_of_release(loss)
        if loss.rate != largest:
            return PrivacyLoss.at_rate(loss, rate)  # refuses it
        return loss.at_rate(rate) if rate else dp_accounting.NoOpDpEvent()

    return from_event(event).map(at_lower_rate)


def event_for_unit(
    event: dp_accounting.DpEvent, sampling: Sampling, relation: Relation, records: int, *, distinct: int = DISTINCT
) -> dp_accounting.DpEvent:
    """The event of the same releases for a unit that owns this many examples. Raises ValueError if none is known.

    distinct: int, the largest number of distinct noise multipliers that the event keeps for more than one example.
    """
    if records == 1:
        return event
    if not sampling.draws_examples_independently:
        words = "the cost of several is known for PoissonSampling without most_rows and for FullBatch"
        raise ValueError(f"records must be 1, because {words}; got {records} with {sampling}")
    require_zero_out(records, relation)
    return from_event(event).of_records(records, distinct=distinct)


def require_event_and_sampling(optimizer: Any) -> None:
    if not (callable(getattr(optimizer, "event", None)) and hasattr(optimizer, "sampling")):
        raise ValueError(
            "optimizer must be a dpx Mechanism, which has an event and a sampling; from an optax.chain, pass the one "
            f"inside it; a run of dpx.fit has run.report and run.epsilon. Got {type(optimizer)}"
        )
