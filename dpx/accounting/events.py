"""The cost of dp-accounting's events: an event is read as a ledger, its releases as step losses, these as a profile.

The cost of an event is computed as if its noise were made of real numbers, so that the numbers can be compared with
those of other libraries. `profile_of_run` adds what the arithmetic of dpx adds (`arithmetic`), and all costs of runs
come from it.

dpx computes the cost of Gaussian events, Poisson-sampled (also truncated) and fixed-size-sampled Gaussian events, and
the events that are a `PrivacyLoss`. dp-accounting's own accountants do so for all other events.
"""

import math
from dataclasses import replace

from dp_accounting import DpEvent

from dpx.accounting import checks
from dpx.accounting.arithmetic import NormalSamplerError, RunProfile
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.delegated import DelegatedProfile
from dpx.accounting.ledger import from_event
from dpx.accounting.pld.buckets import BUCKETS
from dpx.accounting.profiles import GaussianProfile, Profile
from dpx.keys.noise import LARGEST_RELEASE
from dpx.values import require_whole


def event_epsilon(
    event: DpEvent,
    *,
    delta: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = BUCKETS,
) -> float:
    """An upper bound on epsilon at `delta` for an event; inf if a release adds no noise.

    The noise counts as exact. The cost of a run of dpx, such as `dpx.epsilon`, is larger by what the arithmetic of its
    noise adds: below 1e-3 for up to 10,000 Gaussians at a delta of at least 1e-6 (`dpx/accounting/arithmetic.py`).

    event: a dp-accounting event, or one of a type that is a `PrivacyLoss`.
    delta: in [0, 1). At 0, epsilon is inf, except for events that cost nothing, for those of `PureDpEvent` only, and
        for some whose cost dp-accounting knows.
    accountant: "pld" composes privacy loss distributions, "rdp" Renyi divergences. "tightest" is "pld" where it is
        known for every release, else "rdp"; "pld" is at most "rdp". All are guarantees.
    relation: how neighboring data sets differ. The noise of a Gaussian event is relative to the effect of adding or
        removing one example, which is also the effect of nulling one ("zero_out"). Replacing one has twice that effect,
        and is counted accordingly. The noise of an event of sampling without replacement is relative to the effect of
        replacing one, and it holds for no other relation.
    buckets: the most distinct releases that PLD composes, counted separately on Poisson samples, on samples of a fixed
        size and on truncated samples; more are rounded up in cost to this many. For epochs of random allocation, it is
        a quarter of this number, and at most 24.

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
    return 0.0 if exact.delta(0.0) == 0 else from_event(event).pure(relation)


def event_delta(
    event: DpEvent,
    *,
    epsilon: float,
    accountant: Accountant = "tightest",
    relation: Relation = "add_or_remove",
    buckets: int = BUCKETS,
) -> float:
    """An upper bound on delta at `epsilon` (at least 0) for an event; arguments and errors as for `event_epsilon`."""
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

    curve: True if deltas at many epsilons will be computed, each to 0.1 %; compute them at rising epsilons.
    """
    checks.require_accountant(accountant)
    checks.require_relation(relation)
    require_whole("buckets", buckets)
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
    """The profile of a run of dpx with this event: that of `event_profile`, and what the arithmetic of its noise adds.

    Every cost of a run is one of this profile. runs: how many runs each release of the event stands for. numbers: the
    most of one release, or the `NormalSamplerError` that draw them; 0 for exact noise.
    """
    exact = event_profile(event, accountant=accountant, relation=relation, buckets=buckets, curve=curve)
    return from_event(event).implemented(exact, relation, runs=runs, numbers=numbers)


def require_reachable_epsilon(run: RunProfile, epsilon: float, delta: float) -> float:
    """The epsilon of a run at `delta`. Raises ValueError if no noise makes it `epsilon`, because of the arithmetic."""
    shift = 0.0 if math.isfinite(run.shift) else math.inf
    at_best = replace(run, exact=GaussianProfile(0.0), shift=shift)  # of noise that is as large as one likes
    if (least := at_best.epsilon(delta)) > epsilon:
        possible = 2 * (at_best.least_delta(delta) or 0.0)  # for noise of a usual size
        advice = f"Delta must be at least about {possible:.1g} for them" if possible else "Allow a larger epsilon"
        numbers = 2 * run.normal_sampler.pairs
        raise ValueError(
            f"epsilon={epsilon} at delta={delta} cannot be met by any noise: that of a program takes finitely many "
            f"values, which alone costs {least:.3g} in {run.releases} releases of {numbers} numbers. "
            f"{advice}, or state fewer `numbers`"
        )
    return run.epsilon(delta)
