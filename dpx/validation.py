"""Checks of arguments that are numbers or functions. Every ValueError states the condition and the value.

Mechanisms, pytrees, accountants and samplings are checked where they are defined.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np

from dpx.trees import described


def require_number(
    name: str, value: float, *, minimum: float, maximum: float = math.inf, exclusive: bool = False
) -> float:
    """`value` as a float. Raises ValueError unless it is finite, untraced and in [minimum, maximum] (above minimum, if
    exclusive)."""
    bound = range_in_words(minimum, maximum, exclusive=exclusive)
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a number or a function of the step, not a traced value")
    number = as_real(value)
    if number is None:
        raise ValueError(f"{name} must be a finite number {bound}, got {described(value)}")
    if not np.isfinite(number) or not minimum <= number <= maximum or (exclusive and number == minimum):
        raise ValueError(f"{name} must be a finite number {bound}, got {number}")
    return number


def range_in_words(minimum: float, maximum: float, *, exclusive: bool = False) -> str:
    least = f"{'above' if exclusive else 'at least'} {minimum:g}"
    return least if maximum == math.inf else f"{least} and at most {maximum:g}"


def as_real(value: Any) -> float | None:
    """A number of any real type (Python, numpy or jax) as a float; None for a bool, a string and anything else."""
    if isinstance(value, bool | str | bytes) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def require_open_fraction(name: str, value: Any) -> float:
    """`value` as a float. Raises ValueError unless it is in (0, 1)."""
    number = as_real(value)
    if number is None or not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), got {described(value)}")
    return number


def require_floats(name: str, value: Any) -> np.ndarray:
    """`value` as an array of float64. Raises ValueError for other types, without showing an element."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must hold numbers, got {described(value)}") from None


def require_whole(name: str, value: Any, *, minimum: int = 1, maximum: float = math.inf) -> int:
    """`value` as an int. Raises ValueError unless it is a whole number (of Python or numpy) in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not minimum <= value <= maximum:
        bound = f"of at least {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum}]"
        raise ValueError(f"{name} must be a whole number {bound}, got {described(value)}")
    return int(value)


def require_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {described(value)}")
    return value


def require_function(name: str, value: Any) -> Callable:
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {described(value)}")
    return value


def require_text(name: str, value: Any):
    if not (isinstance(value, str) and value.strip() and value.isprintable()):
        raise ValueError(f"{name} must be one line of printable text, got {described(value)}")
