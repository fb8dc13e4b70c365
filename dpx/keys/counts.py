"""How many numbers and pairs of normals a release draws, which its bill must know."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence

# 32 KiB; from 2^11 to 2^17 numbers, a CPU is about equally fast (benchmarks/results/noise.md).
CHUNK_NUMBERS = 2**13
LARGEST_RELEASE = 2**32  # numbers, for which the bill is made (dpx/accounting/arithmetic.py)
ONE_STREAM = 2**31  # numbers, because an index of an array is an int32

_COUNTED: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("counted", default=None)


def pairs_of(numbers: int) -> int:
    """How many pairs of normals are drawn for `numbers` numbers of one stream, an int.

    Some pairs of the last chunk give one number and not two, but each counts as a whole pair.
    """
    whole, rest = divmod(numbers, CHUNK_NUMBERS)
    return whole * (CHUNK_NUMBERS // 2) + min(rest, CHUNK_NUMBERS // 2) if whole else (numbers + 1) // 2


def numbers_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many numbers a release of leaves of these shapes has for its bill: that of `pairs_of`, for all of its pairs.

    In streams of their own, leaves draw more pairs than they have numbers for, so they count twice as many numbers.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if len(sizes) > 1 and sum(sizes) >= ONE_STREAM:
        halves = (divmod(size, CHUNK_NUMBERS) for size in sizes)
        return sum(whole * CHUNK_NUMBERS + min(2 * rest, CHUNK_NUMBERS) for whole, rest in halves)
    return sum(sizes)


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """A list that gets the `numbers_of` every release that is traced inside, ints."""
    token = _COUNTED.set(found := [])
    try:
        yield found
    finally:
        _COUNTED.reset(token)


def count(shapes: Sequence[tuple[int, ...]]) -> int:
    """The `numbers_of` a release, which `counting` hears of."""
    numbers = numbers_of(shapes)
    if (found := _COUNTED.get()) is not None:
        found.append(numbers)
    return numbers
