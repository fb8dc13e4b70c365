"""A wrong argument in words for an exception: numbers and strings as they are, but no element of an array or a key.

Someone who calls a function with its arguments in a wrong order passes data, or the key, where a number belongs.
"""

from typing import Any

import numpy as np

LONGEST = 100  # characters of a string


def described(value: Any) -> str:
    """`value` for a message that may go into a log: its type, its shape and dtype, and no content of any container."""
    if value is None or isinstance(value, bool | int | float | complex | np.bool_ | np.number):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:LONGEST])
    if isinstance(value, type):
        return f"the type {value.__name__}"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list | dict | set | frozenset | bytes | bytearray):
        return f"a {kind} of length {len(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    return f"a {kind}"
