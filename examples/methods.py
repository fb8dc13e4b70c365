"""The methods a training run can name. A new one is an entry: a builder and the options that are its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import dpx


class Option(NamedTuple):
    """One number of a method: `--name`, with `_` written as `-`."""

    default: float | int | str
    help: str


class Method(NamedTuple):
    """build: (*, clip_norm, noise_multiplier, sampling, steps, key, **options) -> dpx.Mechanism."""

    build: Callable[..., dpx.Mechanism]
    options: dict[str, Option] = {}


def dp_sgd(*, clip_norm, noise_multiplier, sampling, steps, key) -> dpx.Mechanism:
    del steps
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def dynamic_dp_sgd(*, clip_norm, noise_multiplier, sampling, steps, key, rho_mu, rho_c, hold) -> dpx.Mechanism:
    return dpx.dynamic_dp_sgd(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        rho_mu=rho_mu,
        rho_c=rho_c,
        steps=steps,
        every=steps_held(hold, sampling),
        sampling=sampling,
        key=key,
    )


def d2p_sgd(*, clip_norm, noise_multiplier, sampling, steps, key, power, gamma, hold) -> dpx.Mechanism:
    del clip_norm, steps  # normalisation takes its place
    return dpx.d2p_sgd(
        noise_multiplier=noise_multiplier,
        power=power,
        gamma=gamma,
        every=steps_held(hold, sampling),
        sampling=sampling,
        key=key,
    )


def steps_held(hold: str, sampling) -> int:
    """For how many steps a schedule keeps its value."""
    if hold not in ("step", "epoch"):
        raise ValueError(f"hold must be step or epoch, got {hold!r}")
    return 1 if hold == "step" else max(1, round(sampling.examples / sampling.divisor))


HOLD = Option("step", "schedules change every step, or every epoch")

METHODS: dict[str, Method] = {
    "dp_sgd": Method(dp_sgd),
    "dynamic_dp_sgd": Method(
        dynamic_dp_sgd,
        {
            "rho_mu": Option(2.0, "growing mu: noise multiplier before the first step over that of the last"),
            "rho_c": Option(2.0, "sensitivity decay: clip norm before the first step over that of the last"),
            "hold": HOLD,
        },
    ),
    "d2p_sgd": Method(
        d2p_sgd,
        {
            "power": Option(0.25, "the noise falls as the step (or epoch) to this power"),
            "gamma": Option(0.01, "stability constant of the normalisation g / (|g| + gamma)"),
            "hold": HOLD,
        },
    ),
}


def options_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The method's options with their defaults filled in; ValueError for an option it does not have."""
    known = METHODS[method].options
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"method {method!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}"
        )
    return {name: given.get(name, option.default) for name, option in known.items()}
