"""What the accountants refuse: every ValueError names the condition and the value."""

import math
import warnings
from typing import Any, Literal

import numpy as np

Accountant = Literal["tightest", "pld", "rdp"]
Relation = Literal["add_or_remove", "zero_out", "replace_one"]

ACCOUNTANTS = ("tightest", "pld", "rdp")
_LARGEST_DELTA = 0.1
RELATIONS = ("add_or_remove", "zero_out", "replace_one")


def number(name: str, value: Any) -> float:
    """`value` as a float; a traced or data-dependent value is refused."""
    return float(concrete(name, value))


def delta(value: Any) -> float:
    value = number("delta", value)
    if not 0 < value < 1:
        raise ValueError(f"delta must be in (0, 1), got {value}")
    return value


def warn_of_delta(value: Any, sampling: Any) -> float:
    """`delta`, with a warning where it allows what differential privacy is there to exclude."""
    value, examples = delta(value), getattr(sampling, "examples", None)
    if examples is not None and value >= 1 / examples:
        warnings.warn(
            f"delta = {value:g} is at least 1 / examples = 1 / {examples}: to release a random example whole would "
            "count as private; choose a delta far below it",
            UserWarning,
            stacklevel=3,
        )
    elif value > _LARGEST_DELTA:
        warnings.warn(
            f"delta = {value:g} is above {_LARGEST_DELTA}: with that probability nothing is promised; choose one far "
            "below one over the number of examples",
            UserWarning,
            stacklevel=3,
        )
    return value


def epsilon(value: Any, *, positive: bool = False) -> float:
    value = number("epsilon", value)
    if positive and not 0 < value < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {value}")
    if not 0 <= value:
        raise ValueError(f"epsilon must be at least 0, got {value}")
    return value


def accountant(value: Any) -> Accountant:
    if value not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {ACCOUNTANTS}, got {value!r}")
    return value


def relation(value: Any) -> Relation:
    if value not in RELATIONS:
        raise ValueError(f"relation must be one of {RELATIONS}, got {value!r}")
    return value


def buckets(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"buckets must be an integer of at least 1, got {value!r}")
    return int(value)


def steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"steps must be an integer of at least 0, got {value!r}")
    return int(value)


def concrete(name: str, values: Any) -> Any:
    """`values` unless they are being traced by jax: a bill for numbers unknown before the run is no bill."""
    if "jax" in type(values).__module__ and _is_tracer(values):
        raise ValueError(
            f"{name} must be known before the run, got the traced value {values}; "
            "a schedule that depends on the data needs a privacy filter, not this accountant"
        )
    return values


def _is_tracer(value: Any) -> bool:
    from jax.core import Tracer

    return isinstance(value, Tracer)


def schedule(noise_multipliers: Any, sampling_rate: Any, counts: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(noise multipliers, rates, counts) as arrays (T,): float64, float64, int64."""
    for name, values in (
        ("noise_multipliers", noise_multipliers),
        ("sampling_rate", sampling_rate),
        ("counts", counts),
    ):
        if callable(values):
            raise ValueError(
                f"{name} must be an array of numbers, got the function {values!r}; evaluate it at its steps first"
            )
        for value in values if isinstance(values, list | tuple) else (values,):
            concrete(name, value)
    sigmas = np.atleast_1d(np.asarray(noise_multipliers, np.float64))
    if sigmas.ndim != 1:
        raise ValueError(f"noise_multipliers must have shape (T,), got {sigmas.shape}")
    rates = _broadcast("sampling_rate", np.asarray(sampling_rate, np.float64), sigmas)
    repeats = _broadcast("counts", np.asarray(1 if counts is None else counts), sigmas)
    if not np.all(np.isfinite(sigmas) & (sigmas >= 0)):
        wrong = sigmas[~(np.isfinite(sigmas) & (sigmas >= 0))][0]
        raise ValueError(f"noise_multipliers must be finite and at least 0, got {wrong}")
    if not np.all((rates > 0) & (rates <= 1)):
        raise ValueError(f"sampling_rate must be in (0, 1], got {rates[~((rates > 0) & (rates <= 1))][0]}")
    if repeats.dtype.kind not in "iu" or np.any(repeats < 0):
        raise ValueError(f"counts must be integers of at least 0, got {counts!r}")
    return sigmas, rates, repeats.astype(np.int64)


def _broadcast(name: str, values: np.ndarray, like: np.ndarray) -> np.ndarray:
    if values.ndim > 1 or (values.ndim == 1 and values.shape != like.shape):
        raise ValueError(f"{name} must be one number or have shape {like.shape}, got {values.shape}")
    return np.broadcast_to(values, like.shape)
