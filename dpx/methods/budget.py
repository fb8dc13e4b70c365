"""The noise multiplier of a method: said, or found for the epsilon and delta that may be spent."""

from dpx.accounting import calibrate
from dpx.accounting.checks import Accountant
from dpx.accounting.events import flatten


def noise_within(make, noise_multiplier, accountant: Accountant = "pld", *, epsilon, delta, steps):
    """The noise multiplier given, or the one that a given budget calibrates to; by RDP where PLD has no bill."""
    if noise_multiplier is not None and epsilon is None and delta is None:
        return noise_multiplier
    if noise_multiplier is None and epsilon is not None and delta is not None and steps is not None:
        if flatten(make(1.0).event(1)).without_replacement:
            accountant = "rdp"
        return calibrate(make, steps=steps, epsilon=epsilon, delta=delta, accountant=accountant)
    raise ValueError(
        "say either noise_multiplier or all of epsilon, delta and steps; got "
        f"noise_multiplier={noise_multiplier!r}, epsilon={epsilon!r}, delta={delta!r}, steps={steps!r}"
    )
