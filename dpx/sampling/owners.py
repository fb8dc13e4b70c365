"""Records with several owners each: which of them to keep, so that nobody owns more than some of those that are kept.

Who owns which record is PUBLIC here ("fixed graph", Ganesh et al. 2025, https://arxiv.org/abs/2503.03622). Neighbors
differ by a null in place of every record that one person owns, alone or with others; the places and the owners of all
records stay. Then both neighbors keep the same records, of which at most k are nulled: `dpx.epsilon(..., records=k)`.

If owners were private too, no bill would follow. Without a person's records, other records fit that did not fit before,
and these displace others again: one record can exchange all that is kept of a chain of any length.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dpx.sampling.users import owner_array
from dpx.validation import require_whole

First = Literal["order", "fewest_owners"]


def records_to_keep(owners: Any, *, most_records: int, first: First = "order") -> np.ndarray:
    """The records to keep, int64 (kept,), rising, so that each owner has at most `most_records` of them.

    Greedy: each record is kept if all of its owners have fewer than `most_records` kept ones by then. So no record that
    is left out could be added. The choice depends on the owners alone, which must be public: a label or a text that
    decides about owners makes them private, and the choice then leaks it. Bill with `records=most_records`.

    owners: a sequence with the owners of each record, each a collection of integers or of strings, which is not empty;
        or a pair of arrays (owners, starts): the owners of record i are owners[starts[i]:starts[i + 1]], with starts
        int, (N + 1,), from 0 to the number of owners. An owner that is named twice counts once.
    most_records: int, at least 1.
    first: "order" tries the records in their order, which must not depend on private data either; "fewest_owners" those
        with the fewest owners before the others, which keeps more records, and fewer of those with many owners.

    Raises ValueError for a record without an owner (nobody would be protected there), for missing owners, for starts
    that do not rise from 0 to the number of owners, and for other arguments outside of their domains.
    """
    require_whole("most_records", most_records)
    if first not in ("order", "fewest_owners"):
        raise ValueError(f'first must be "order" or "fewest_owners", got {first!r}')
    flat, starts = _rows(owners)
    _, numbers = np.unique(owner_array(flat), return_inverse=True)
    of_each = [set(numbers[begin:end].tolist()) for begin, end in zip(starts[:-1], starts[1:], strict=True)]
    order = range(len(of_each))
    if first == "fewest_owners":
        order = sorted(order, key=lambda record: len(of_each[record]))  # stable: equal ones in their order
    owned, kept = np.zeros(numbers.max() + 1, np.int64).tolist(), []
    for record in order:
        if all(owned[owner] < most_records for owner in of_each[record]):
            kept.append(record)
            for owner in of_each[record]:
                owned[owner] += 1
    return np.array(sorted(kept), np.int64)


def _rows(owners: Any) -> tuple[Any, np.ndarray]:
    """All owners in one sequence, and where those of each record begin, int64 (N + 1,)."""
    if isinstance(owners, tuple) and len(owners) == 2 and all(hasattr(part, "dtype") for part in owners):
        flat, starts = owners[0], np.asarray(owners[1])  # not as a plain array, which would lose a mask
        rising = (
            starts.dtype.kind in "iu" and starts.ndim == 1 and len(starts) > 1 and np.all(starts[1:] >= starts[:-1])
        )
        if not rising or starts[0] != 0 or starts[-1] != len(flat):
            raise ValueError(f"starts must be integers that rise from 0 to the number of owners, {len(flat)}")
    else:
        if isinstance(owners, str) or not isinstance(owners, Sequence) or any(isinstance(one, str) for one in owners):
            raise ValueError("owners must be a collection of owners for each record, in a list")
        flat = [owner for one in owners for owner in one]
        starts = np.cumsum([0, *map(len, owners)])
    if len(starts) < 2 or np.any(starts[1:] == starts[:-1]):
        raise ValueError("owners must hold at least one owner for each record: nobody is protected by one without")
    return flat, starts.astype(np.int64)
