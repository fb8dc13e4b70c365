"""What a run of error feedback costs: one event of all its steps, billed by the least of three bounds.

A participation of an example acts on every later release, so the steps do not compose and dp-accounting's accountants
refuse the event. Proofs: `energy` (participations known, or as if known) and `renyi` (amplified).

The amplified bound is sound but not tight: at rate .02, noise multiplier 1, 1,000 steps and ten participations known,
the bill is .9 % above what enumeration gives.
"""

import math
from typing import Any

import attrs
from dp_accounting import DpEvent

from dpx.accounting import events, renyi
from dpx.accounting.checks import Accountant, Relation
from dpx.accounting.error_feedback import energy as feedback_energy
from dpx.accounting.error_feedback.renyi import AmplifiedProfile
from dpx.accounting.profiles import UNBOUNDED, DeltaProfile, GaussianProfile, Least, Profile, RenyiProfile
from dpx.sampling import FixedSizeSampling, FullBatch, PoissonSampling, Sampling, ShuffledEpochs

SAMPLINGS = (PoissonSampling, FixedSizeSampling, ShuffledEpochs, FullBatch)


@attrs.frozen
class ErrorFeedbackDpEvent(DpEvent):
    """`steps` releases of (sum + fed-back error + noise), of which one example moves the sum by at most 1.

    noise_multiplier: nu, the noise's standard deviation; unit here and below: the clip norm of the sum (C1).
    error_shift: rho, how far one participation moves the error; inf if not bounded.
    feedback_shift: 2 C2 B / C1, how far the fed-back error can move, whatever the error is.
    reset_every: the error is forgotten after so many steps; None: never.
    """

    noise_multiplier: float
    error_shift: float
    feedback_shift: float
    steps: int
    reset_every: int | None
    sampling: Sampling


def profile(event: ErrorFeedbackDpEvent, accountant: Accountant, relation: Relation) -> Profile:
    """The least of the bounds; "rdp" is the amplified bound, or Gaussian privacy, alone."""
    if event.noise_multiplier < renyi.SMALLEST_NOISE:
        return UNBOUNDED
    return Least(*bounds(event, accountant, relation).values())


def explain(event: ErrorFeedbackDpEvent, delta: float, relation: Relation) -> str:
    """Which bound the bill is, in words."""
    if event.noise_multiplier < renyi.SMALLEST_NOISE:
        return "Error feedback without noise has no finite epsilon."
    found = {name: bound.epsilon(delta) for name, bound in bounds(event, "tightest", relation).items()}
    least = min(found, key=lambda name: found[name])
    listed = ", ".join(f"{name}: {value:.6g}" for name, value in found.items())
    return (
        "Error feedback is billed as one event of all its steps, by dpx's own bounds (no privacy loss distribution is "
        f'known; under "pld" stands the least of them). Used: {least}. All: {listed}.'
    )


def bounds(event: ErrorFeedbackDpEvent, accountant: Accountant, relation: Relation) -> dict[str, Profile]:
    """The bounds that are true for the sampling and the relation, by name."""
    sampling, stated = event.sampling, event.sampling.relation
    if relation != stated and (stated == "replace_one" or (stated, relation) == ("zero_out", "add_or_remove")):
        raise ValueError(f'relation {relation!r} does not fit {sampling}, whose event is true for "{stated}"')
    noise = event.noise_multiplier / (2 if relation == "replace_one" else 1)
    reset_every = min(event.steps, event.reset_every or event.steps)
    limits: dict[str, Any] = dict(steps=event.steps, reset_every=reset_every, error_shift=event.error_shift)
    if isinstance(sampling, FullBatch | ShuffledEpochs):
        epoch = sampling.steps_per_epoch if isinstance(sampling, ShuffledEpochs) else 1
        mu = (
            math.sqrt(feedback_energy.fixed(steps_per_epoch=epoch, feedback_shift=event.feedback_shift, **limits))
            / noise
        )
        if accountant == "rdp":
            return {"Gaussian privacy": RenyiProfile(renyi.ORDERS * mu**2 / 2)}
        return {"participations known, Gaussian privacy": GaussianProfile(mu)}
    if not isinstance(sampling, PoissonSampling | FixedSizeSampling):
        raise ValueError(f"error feedback is billed for {_names()} only, got {sampling}")
    rate = sampling.divisor / sampling.examples
    found: dict[str, Profile] = {}
    if accountant != "rdp":
        deltas = feedback_energy.deltas_at_random(
            rate=rate, feedback_shift=event.feedback_shift, noise_multiplier=noise, **limits
        )
        found["random participations as if known, not amplified"] = DeltaProfile(deltas)
    if relation != "replace_one" and rate < 1 and math.isfinite(event.error_shift):
        found["amplified by sampling, Renyi recursion"] = AmplifiedProfile(rate=rate, noise_multiplier=noise, **limits)
    if not found:
        raise ValueError(
            f'accountant "rdp" bills error feedback on {sampling} only at a sampling rate below 1, under relation '
            f'"add_or_remove" or "zero_out" and with a finite outer_clip_norm; got {event}, relation {relation!r}'
        )
    return found


def _names() -> str:
    return ", ".join(sampling.__name__ for sampling in SAMPLINGS)


events.register_whole(ErrorFeedbackDpEvent, profile, explain)
