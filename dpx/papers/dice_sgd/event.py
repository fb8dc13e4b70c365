"""The cost of a run of error feedback: one event for all its steps, priced by the least of three bounds.

A participation of an example changes every later release, so the steps do not compose, and dp-accounting's accountants
refuse the event. The proofs are in `energy` (participations known, or as if known) and in `renyi` (amplified).

The amplified bound is sound but not tight: at rate 0.02, noise multiplier 1, 1,000 steps and ten known participations,
the cost is 0.9 % above the result of enumeration.
"""

import math
from typing import Any

import attrs
from dp_accounting import DpEvent

from dpx.accounting.checks import Accountant, Profile, Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount
from dpx.accounting.pld import renyi
from dpx.accounting.profiles import UNBOUNDED, DeltaProfile, ExtremeProfile, GaussianProfile, RenyiProfile
from dpx.papers.dice_sgd import energy as feedback_energy
from dpx.papers.dice_sgd import rounding
from dpx.papers.dice_sgd.renyi import AmplifiedProfile
from dpx.sampling.poisson import PoissonSampling
from dpx.sampling.schemes import FixedSizeSampling, FullBatch, Sampling, ShuffledEpochs
from dpx.values import rounded_up

SAMPLINGS = (PoissonSampling, FixedSizeSampling, ShuffledEpochs, FullBatch)


@attrs.frozen
class ErrorFeedbackDpEvent(DpEvent, PrivacyLoss):
    """`steps` releases of (sum + fed-back error + noise), where one example moves the sum by at most 1 (clip norm C1).

    noise_multiplier: nu, the standard deviation of the noise.
    error_shift: rho, the most that one participation moves the error; inf if there is no bound.
    feedback_shift: 2 C2 B / C1, the most that the fed-back error moves, for any error.
    steps: the number of releases of the run.
    reset_every: the error is set to 0 after this many steps; None if never.
    sampling: the sampling record, which draws the batches.
    """

    noise_multiplier: float
    error_shift: float
    feedback_shift: float
    steps: int
    reset_every: int | None
    sampling: Sampling
    whole_run = True

    @property
    def released(self) -> ReleaseCount:
        return ReleaseCount(self.steps, self.steps)

    def profile(self, accountant: Accountant, relation: Relation) -> Profile:
        """The least of the bounds. The accountant "rdp" uses only the amplified bound, or Gaussian privacy."""
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return UNBOUNDED
        return ExtremeProfile(min, tuple(profiles_by_bound(self, accountant, relation).values()))

    def explain(self, delta: float, relation: Relation) -> str:
        """The bounds of the run in words, and which of them is its cost."""
        if self.noise_multiplier < renyi.SMALLEST_NOISE:
            return "Error feedback without noise has no finite epsilon."
        epsilons = {name: bound.epsilon(delta) for name, bound in profiles_by_bound(self, "tightest", relation).items()}
        least = min(epsilons, key=lambda name: epsilons[name])
        listed = ", ".join(f"{name}: {rounded_up(value, 6)}" for name, value in epsilons.items())
        return (
            "Error feedback is one event of all its steps, by dpx's own bounds. No privacy loss distribution "
            f'is known, so "pld" gives the least of them. Used: {least}. All: {listed}. {_rounding_of_run(self)}'
        )


def _rounding_of_run(event: ErrorFeedbackDpEvent) -> str:
    covered = rounding.proof_covers(
        steps=event.steps,
        reset_every=event.reset_every,
        error_shift=event.error_shift,
        feedback_shift=event.feedback_shift,
        batch_size=event.sampling.divisor,
        examples=event.sampling.examples,
    )
    if covered:
        return "The noise also covers the rounding of the error."
    return (
        "The noise does not cover the rounding of the error in so many steps between resets, so this epsilon is for "
        "real numbers (docs/exact.md)."
    )


def profiles_by_bound(event: ErrorFeedbackDpEvent, accountant: Accountant, relation: Relation) -> dict[str, Profile]:
    """The bounds that hold for the sampling and the relation, by name. Raises ValueError if there is none."""
    sampling, stated = event.sampling, event.sampling.relation
    if not sampling.plain:
        words = "its bounds are proved for coins of one rate"
        raise ValueError(f"error feedback has no known cost for Poisson sampling with most_rows or weights: {words}")
    moves_rows = relation == "add_or_remove" and not isinstance(sampling, PoissonSampling)
    if relation != stated and (stated == "replace_one" or moves_rows):
        raise ValueError(f'relation {relation!r} does not fit {sampling}, whose cost holds for "{stated}"')
    noise = event.noise_multiplier / (2 if relation == "replace_one" else 1)
    reset_every = min(event.steps, event.reset_every or event.steps)
    run: dict[str, Any] = dict(steps=event.steps, reset_every=reset_every, error_shift=event.error_shift)
    if epoch := sampling.known_epoch:
        energy = feedback_energy.energy_of_epochs(steps_per_epoch=epoch, feedback_shift=event.feedback_shift, **run)
        mu = math.sqrt(energy) / noise
        if accountant == "rdp":
            return {"Gaussian privacy": RenyiProfile(renyi.ORDERS * mu**2 / 2)}
        return {"participations known, Gaussian privacy": GaussianProfile(mu)}
    if not isinstance(sampling, PoissonSampling | FixedSizeSampling):
        names = ", ".join(known.__name__ for known in SAMPLINGS)
        raise ValueError(f"error feedback has a known cost only for {names}, got {sampling}")
    rate = sampling.divisor / sampling.examples
    profiles: dict[str, Profile] = {}
    if accountant != "rdp":
        deltas = feedback_energy.delta_of_random_participations(
            rate=rate, feedback_shift=event.feedback_shift, noise_multiplier=noise, **run
        )
        profiles["random participations as if known, not amplified"] = DeltaProfile(deltas)
    if relation != "replace_one" and rate < 1 and math.isfinite(event.error_shift):
        profiles["amplified by sampling, Renyi recursion"] = AmplifiedProfile(rate=rate, noise_multiplier=noise, **run)
    if not profiles:
        raise ValueError(
            f'accountant "rdp" knows the cost of error feedback on {sampling} only at a rate below 1, under relation '
            f'"add_or_remove" or "zero_out" and with a finite outer_clip_norm; got {event}, relation {relation!r}'
        )
    return profiles
