"""Users in place of examples: groups the rows of each user, so that a sampling draws users and epsilon protects users.

The cost holds if each person is in one item alone, and if an item depends on the rows of its own user alone. So the
padding is zero, and the user's own number of rows decides which of them are kept.

# Records with several owners each: which of them to keep, so that nobody owns more than some of those that are kept

Who owns which record is PUBLIC here ("fixed graph", Ganesh et al. 2025, https://arxiv.org/abs/2503.03622). Neighbors
differ by a null in place of every record that one person owns, alone or with others; the places and the owners of all
records stay. Then both neighbors keep the same records, of which at most k are nulled: `dpx.epsilon(..., records=k)`.

If owners were private too, no guarantee would follow. Without a person's records, other records fit that did not fit
before, and these displace others again: one record can exchange all that is kept of a chain of any length.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from dpx.sampling.loading import read_rows
from dpx.states.record import unit_mark
from dpx.values import Tree, batch_size, names_arguments, require_whole, warn_user

MISSING = {"", "nan", "NaN", "None", "NaT", "<NA>"}  # as numpy and pandas write a missing string
FEW, SHARE = 10, 0.1  # owners that may differ; the share of all rows that nobody should have
First = Literal["order", "fewest_owners"]


@names_arguments
class UserData:
    """A source with one item for each user, for `sampling.take` and `sampling.batches`, from rows with their owners.

    The item of a user is (examples, included): the arrays of `data` with the user's rows on axis 0, in the order of the
    data, padded with zeros to `most` rows; and bool (most,), False for the padding. `len(user_data)` is the
    number of users, which is the `examples` of the sampling. Item i is that of the i-th of the sorted distinct `users`.
    Rows are read when a batch is drawn, so no padded copy of the data is made.

    data:  pytree of arrays (jax, numpy or a memory map) with the N examples on axis 0 of each.
    users: integers or strings, (N,), the owner of each example: a person, a patient, a household, a device.
    most:  int, the rows of an item. A user with more keeps `most` of them, evenly spaced in the order of the data. The
           order of a user's rows must not depend on other users: shuffle each user alone, or not at all. None: the
           largest count of a user. It becomes public with every shape that is made from it; your own number does not.
    unit:  a word for what a user is, such as "patient", for the report.

    Raises ValueError unless there is one owner for each example, at least one, of integers or of strings (a missing
    owner would make one unit of many people), for a `most` below 1, and for an empty `unit`. Warns if one of more than
    10 owners has more than a tenth of all rows, because it may be a word for a missing owner.

        >>> users = dpx.UserData(np.arange(5.0), ["ann", "bob", "ann", "eve", "ann"], most=2)
        >>> len(users)
        3
        >>> users[1]
        (array([1., 0.]), array([ True, False]))
    """

    def __init__(self, data: Tree, users: Any, *, most: int | None = None, unit: str = "user"):
        owners, examples = owner_array(users), batch_size(data)
        if len(owners) != examples:
            raise ValueError(f"users must hold one owner for each of the {examples} examples, got {len(owners)}")
        unit_mark(unit)  # raises ValueError unless it is a name
        self._owners, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
        self.privacy_unit = unit
        if len(counts) > FEW and counts.max() > SHARE * examples:
            warn_user(
                "one owner has more than a tenth of all rows. If it stands for missing owners, such as 'unknown' or 0, "
                "it is one user of many people, whom epsilon does not protect: give each person a number"
            )
        self.most = int(counts.max()) if most is None else require_whole("most", most)
        self._data = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, data)
        self._order = np.argsort(numbers, kind="stable")  # the rows of user 0 first, and the order of the data in each
        self._first, self._counts = np.cumsum(counts) - counts, counts

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        return f"UserData({len(self)} of unit {self.privacy_unit!r}, at most {self.most} rows each)"

    def __getitem__(self, number: int) -> tuple[Tree, np.ndarray]:
        return self.__getitems__([range(len(self))[number]])[0]  # a range raises IndexError beyond its end

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tree, np.ndarray]]:
        """The items of some users, whose rows are read together."""
        rows = self._rows(numbers)
        included = np.arange(self.most) < np.minimum(self._counts[numbers], self.most)[:, None]  # (users, most)

        def padded(leaf):
            found = np.asarray(read_rows(leaf, rows))
            items = np.zeros((*included.shape, *found.shape[1:]), found.dtype)
            items[included] = found
            return items

        examples = jax.tree.map(padded, self._data)
        return [(jax.tree.map(lambda leaf, i=i: leaf[i], examples), mask) for i, mask in enumerate(included)]

    def _rows(self, numbers: Any) -> np.ndarray:
        """The rows of the data that the items of some users hold, one item after another, int64 (rows,)."""
        counts = self._counts[numbers]
        kept = np.minimum(counts, self.most)
        starts, counts, first, each = (
            np.repeat(x, kept) for x in (np.cumsum(kept) - kept, counts, self._first[numbers], kept)
        )
        return self._order[first + (np.arange(len(first)) - starts) * counts // each]

    def identity_of_units(self) -> tuple:
        """Which rows each item holds and whose they are, as plain values; digests of the owners and their rows."""
        arrays = self._owners, self._order, self._counts
        return "users", len(self), self.most, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)

    @property
    def kept(self) -> Tree:
        """The rows that all users' items hold, item by item and without padding: `data` with fewer rows."""
        return jax.tree.map(lambda leaf: np.asarray(read_rows(leaf, self._rows(slice(None)))), self._data)


def owner_array(users: Any) -> np.ndarray:
    """The owners as an array that can be sorted, (N,). Raises ValueError for other types, and for none."""
    # A list as numpy reads it would turn a missing owner among strings into the string "nan".
    owners = np.asarray(users, None if hasattr(users, "dtype") else object)
    if owners.ndim != 1 or len(owners) == 0:
        found = "one string: pass the column itself" if isinstance(users, str) else f"shape {owners.shape}"
        raise ValueError(f"users must be the owner of each example, (N,) with N of at least 1; got {found}")
    types = set(map(type, owners.tolist()))
    if owners.dtype.kind in "OT" and any(all(issubclass(t, one) for t in types) for one in ((int, np.integer), str)):
        if any("\0" in owner for owner in owners.tolist() if isinstance(owner, str)):
            raise ValueError("users must be strings without NUL characters, which numpy drops at their ends")
        owners = np.asarray(owners.tolist())
    if (
        np.ma.is_masked(users)
        or (owners.dtype.kind == "i" and owners.min() < 0)
        or not MISSING.isdisjoint(owners.tolist() if owners.dtype.kind in "US" else ())
    ):
        raise ValueError(
            "users must hold the owner of every example, but some look missing: a mask, a number below 0, or one of "
            f"{sorted(MISSING)}. All of them would be one user; give each person a number"
        )
    if owners.dtype.kind not in "iuUS":
        found = sorted(t.__name__ for t in types)
        words = ": one that is missing makes a column of numbers one of floats" if "float" in found else ""
        raise ValueError(f"users must be all integers or all strings, and none of them missing; got {found}{words}")
    return owners


@names_arguments
def records_to_keep(owners: Any, *, most_records: int, first: First = "order") -> np.ndarray:
    """The records to keep, int64 (kept,), sorted, so that each owner has at most `most_records` of them.

    Greedy: a record is kept if each of its owners has fewer than `most_records` so far. So no record that
    is left out could be added. The choice depends on the owners alone, which must be public: a label or a text that
    decides about owners makes them private, and the choice then leaks it. Compute its cost with `records=most_records`.

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
    flat, starts = _rows_by_owner(owners)
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


def _rows_by_owner(owners: Any) -> tuple[Any, np.ndarray]:
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
        raise ValueError("owners must hold at least one owner for each record: a record without one protects nobody")
    return flat, starts.astype(np.int64)
