"""What all accountants share: their names, the interface of a profile, and checks of arguments."""

import math
from typing import Any, Literal, Protocol

import jax.core
import numpy as np

from dpx.keys.noise import LARGEST_RELEASE
from dpx.values import as_real, described, require_bool, require_floats, require_open_fraction, require_whole, warn_user

Accountant = Literal["tightest", "pld", "rdp"]
Relation = Literal["add_or_remove", "zero_out", "replace_one"]

ACCOUNTANTS = ("tightest", "pld", "rdp")
RELATIONS = ("add_or_remove", "zero_out", "replace_one")

MOST_RELEASES = 2**53
_LARGEST_USUAL_DELTA = 0.1  # a larger delta warns even if the number of examples is unknown


class Profile(Protocol):
    """An upper bound on the privacy loss of a run: at every epsilon it is (epsilon, delta(epsilon))-private."""

    def epsilon(self, delta: float) -> float:
        """The least epsilon for a delta in (0, 1), or an upper bound on it; inf if there is none."""
        ...

    def delta(self, epsilon: float) -> float:
        """The least delta for an epsilon of at least 0, or an upper bound on it."""
        ...


def require_concrete(name: str, value: Any) -> Any:
    """Returns `value`. Raises ValueError if jax traces it, because a cost needs a known number."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} must be known before the run, got the traced value {value}; "
            "a schedule that depends on the data needs a privacy filter, not this accountant"
        )
    return value


def require_nonnegative(name: str, value: Any) -> float:
    """Returns `value` as a float. Raises ValueError unless it is at least 0; a cost may be infinite."""
    number = as_real(require_concrete(name, value))
    if number is None or not 0 <= number:
        raise ValueError(f"{name} must be at least 0, got {described(value)}")
    return number


def require_epsilon(value: Any) -> float:
    return require_nonnegative("epsilon", value)


def require_positive_epsilon(value: Any) -> float:
    """Returns the epsilon of a budget as a float. Raises ValueError unless it is positive and finite."""
    number = as_real(require_concrete("epsilon", value))
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {described(value)}")
    return number


def require_delta(value: Any, *, zero: bool = False) -> float:
    """Returns `value` as a float. Raises ValueError unless it is in (0, 1). `zero` allows 0 too."""
    if value is None:
        words = "the chance that epsilon fails, far below 1 / the number of people, such as 1e-6"
        raise ValueError(f"delta must be given: {words}")
    if as_real(require_concrete("delta", value)) == 0:
        if not zero:
            raise ValueError(
                "delta must be in (0, 1), got 0, where Gaussian noise has no epsilon: take 1e-6, for example"
            )
        return 0.0
    return require_open_fraction("delta", require_concrete("delta", value))


def warn_of_large_delta(value: Any, sampling: Any) -> None:
    """Warns the user if `delta` is so large that (epsilon, delta) promises little.

    Raises ValueError for a delta outside (0, 1).
    """
    delta, examples = require_delta(value), getattr(sampling, "examples", None)
    if examples is not None and delta >= 1 / examples:
        words = f"at least 1 / examples = 1 / {examples}: to release a random example whole would count as private"
    elif delta > _LARGEST_USUAL_DELTA:
        words = f"above {_LARGEST_USUAL_DELTA}: with that probability nothing is promised"
    else:
        return
    warn_user(f"delta = {delta:g} is {words}; choose one far below 1 / the number of examples")


def require_accountant(value: Any) -> Accountant:
    if value not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {ACCOUNTANTS}, got {described(value)}")
    return value


def require_relation(value: Any) -> Relation:
    if value not in RELATIONS:
        raise ValueError(f"relation must be one of {RELATIONS}, got {described(value)}")
    return value


def require_schedule(multipliers: Any, sampling_rate: Any, counts: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns noise multipliers, sampling rates and counts as arrays (T,): float64, float64 and int64.

    Raises ValueError for other shapes, for functions or traced values, for numbers outside their domains, and for more
    than 2^53 steps.
    """
    given = {"noise_multipliers": multipliers, "sampling_rate": sampling_rate, "counts": counts}
    for name, values in given.items():
        if callable(values):
            raise ValueError(f"{name} must hold numbers, got {described(values)}; evaluate it at its steps first")
        for value in values if isinstance(values, list | tuple) else (values,):
            require_concrete(name, value)
    sigmas = np.atleast_1d(require_floats("noise_multipliers", multipliers))
    if sigmas.ndim != 1:
        raise ValueError(f"noise_multipliers must have shape (T,), got {sigmas.shape}")
    rates = _broadcast("sampling_rate", require_floats("sampling_rate", sampling_rate), sigmas)
    repeats = _broadcast("counts", np.asarray(1 if counts is None else counts), sigmas)
    for sigma in sigmas[~(np.isfinite(sigmas) & (sigmas >= 0))][:1]:
        raise ValueError(f"noise_multipliers must be finite and at least 0, got {sigma}")
    for rate in rates[~((rates > 0) & (rates <= 1))][:1]:
        raise ValueError(f"sampling_rate must be in (0, 1], got {rate}")
    if repeats.dtype.kind not in "iu" or np.any(repeats < 0):
        raise ValueError(f"counts must be integers of at least 0, got {described(counts)}")
    require_countable(repeats.sum(dtype=np.float64))
    return sigmas, rates, repeats.astype(np.int64)


def require_countable(releases: float):
    """Raises ValueError for more releases than float64 counts exactly, because int64 counts might overflow."""
    if not releases <= MOST_RELEASES:
        raise ValueError(f"releases must be at most {MOST_RELEASES}, the most that float64 counts, got {releases:.6g}")


def _broadcast(name: str, values: np.ndarray, like: np.ndarray) -> np.ndarray:
    if values.ndim > 1 or (values.ndim == 1 and values.shape != like.shape):
        raise ValueError(f"{name} must be one number or have shape {like.shape}, got {values.shape}")
    return np.broadcast_to(values, like.shape)


def numbers_per_release(numbers: Any, exact_noise: Any = False) -> int:
    """Checks the arguments, and returns how many elements a release's cost covers: `numbers`, or 0 for exact noise."""
    require_bool("exact_noise", exact_noise)
    if require_whole("numbers", numbers) > LARGEST_RELEASE:
        raise ValueError(f"numbers must be at most {LARGEST_RELEASE}, the most that a release may hold, got {numbers}")
    return 0 if exact_noise else int(numbers)
