"""What a record is, as plain values: two records are the same if their identities are equal, whatever they print."""

import dataclasses
import hashlib
import json
import zlib
from typing import Any

import attrs
import jax
import numpy as np

from dpx.values import described

_PLAIN = (str, int, float)  # and bool, which is an int


def identity_of(value: Any, *, without: str = "") -> Any:
    """`value` as nested tuples of None, bools, ints, floats and strings.

    A record has the name of its type and its fields, or what its method `identity()` returns. Of an array, it is the
    shape, the dtype and a digest. without: the name of a field that is left out.

    Raises ValueError for other objects, such as functions.
    """
    if type(value) is tuple:  # a program is mostly tuples in tuples
        return tuple([identity_of(part, without=without) for part in value])
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "identity"):
        return value.identity()
    if isinstance(value, bytes):
        return "bytes", hashlib.sha256(value).hexdigest()
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return "array", array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()
    if isinstance(value, tuple | list):
        return tuple(identity_of(part, without=without) for part in value)
    if isinstance(value, type) or not (attrs.has(type(value)) or dataclasses.is_dataclass(value)):
        raise ValueError(f"a record must have a method identity() or be a dataclass, got {described(value)}")
    return identity_by_fields(value, without=without)


def identity_by_fields(record: Any, *, without: str = "") -> tuple:
    """The identity of a dataclass or an event by the name of its type and its fields, but for one that is left out."""
    kind = type(record)
    fields = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(record)
    names = [field.name for field in fields if field.name != without]
    return kind.__name__, *((name, identity_of(getattr(record, name), without=without)) for name in names)


def fingerprint(value: Any, *, without: str = "") -> int:
    """A number in [2^31, 2^32) that differs for values of different identities, except by chance, 2^-31."""
    words = json.dumps(identity_of(value, without=without))
    return zlib.crc32(words.encode()) | 2**31  # neither 0, which is unknown, nor 1
