"""User-level privacy: groups the rows of each user, so that a sampling draws users and epsilon protects users.

The cost holds if each person is in only one item, and if an item depends only on its own user's rows. So the padding is
zero, and which rows are kept depends only on how many rows the user has.

# Records with several owners: which to keep, so that nobody owns more than a given number of the kept records

Who owns which record is PUBLIC here ("fixed graph", Ganesh et al. 2025, https://arxiv.org/abs/2503.03622). Neighbors
differ by nulls in place of all records that one person owns, alone or with others; every record keeps its place and its
owners. Then both neighbors keep the same records, and at most k of them are nulls: `dpx.epsilon(..., records=k)`.

If the owners were private too, there would be no guarantee. Removing a person's records makes room for records that did
not fit before, and these displace further records: one record can change what is kept along a chain of any length.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from dpx.sampling.data import batch_size, read_rows
from dpx.states.record import unit_fingerprint
from dpx.values import Tree, explain_misuse, require_whole, warn_user

MISSING = {"", "nan", "NaN", "None", "NaT", "<NA>"}  # how numpy and pandas write a missing string
FEW, SHARE = 10, 0.1  # with more than FEW owners, warns if one has more than this SHARE of all rows
First = Literal["order", "fewest_owners"]


@explain_misuse
class UserData:
    """Turns rows with owners into a source with one item per user, for `sampling.take` and `sampling.batches`.

    A user's item is (examples, included): the arrays of `data` with the user's rows on axis 0, in the order of the
    data, padded with zeros to `most` rows; and bool (most,), False for the padding. `len(user_data)` is the
    number of users, and the `examples` of the sampling. Item i belongs to the i-th of the sorted distinct `users`.
    Rows are read when a batch is drawn, so no padded copy of the data is made.

    data:  pytree of arrays (jax, numpy or a memory map) with the N examples on axis 0 of each.
    users: integers or strings, (N,), the owner of each example: a person, a patient, a household, a device.
    most:  int, the rows of an item. A user with more rows keeps `most` of them, evenly spaced in the order of the data.
           The order of a user's rows must not depend on other users: shuffle each user's rows alone, or not at all.
           None takes the largest row count of any user, which all shapes then make public; your own number reveals
           nothing.
    unit:  a word for what a user is, such as "patient", for the report.

    Raises ValueError if an example does not have one owner, an integer or a string (all rows with a missing owner would
    become one unit), if there are no examples, if `most` is below 1, and if `unit` is empty. With more than 10 owners,
    warns if one has more than a tenth of all rows, because that owner may stand for a missing value.

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
        unit_fingerprint(unit)  # raises ValueError unless it is a name
        self._owners, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
        self.privacy_unit = unit
        if len(counts) > FEW and counts.max() > SHARE * examples:
            warn_user(
                "one owner has more than a tenth of all rows. If it stands for missing owners, such as 'unknown' or 0, "
                "it is one user of many people, whom epsilon does not protect: give each person a number"
            )
        self.most = int(counts.max()) if most is None else require_whole("most", most)
        self._data = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, data)
        self._order = np.argsort(numbers, kind="stable")  # grouped by user, in the order of the data
        self._first, self._counts = np.cumsum(counts) - counts, counts

    def __len__(self) -> int:
        return len(self._counts)

    def __repr__(self) -> str:
        return f"UserData({len(self)} of unit {self.privacy_unit!r}, at most {self.most} rows each)"

    def __getitem__(self, number: int) -> tuple[Tree, np.ndarray]:
        return self.__getitems__([range(len(self))[number]])[0]  # a range raises IndexError past its end

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tree, np.ndarray]]:
        """Returns the items of several users, with all their rows read at once."""
        rows = self._rows_of_users(numbers)
        included = np.arange(self.most) < np.minimum(self._counts[numbers], self.most)[:, None]  # (users, most)

        def padded(leaf):
            found = np.asarray(read_rows(leaf, rows))
            items = np.zeros((*included.shape, *found.shape[1:]), found.dtype)
            items[included] = found
            return items

        examples = jax.tree.map(padded, self._data)
        return [(jax.tree.map(lambda leaf, i=i: leaf[i], examples), mask) for i, mask in enumerate(included)]

    def _rows_of_users(self, numbers: Any) -> np.ndarray:
        """Returns the rows of the data that the items of these users hold, one item after another, int64 (rows,)."""
        counts = self._counts[numbers]
        kept = np.minimum(counts, self.most)
        starts, counts, first, each = (
            np.repeat(x, kept) for x in (np.cumsum(kept) - kept, counts, self._first[numbers], kept)
        )
        return self._order[first + (np.arange(len(first)) - starts) * counts // each]

    def identity_of_units(self) -> tuple:
        """Which rows each item holds and who owns them, as plain values: digests of the owners and their rows."""
        arrays = self._owners, self._order, self._counts
        return "users", len(self), self.most, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)

    @property
    def kept_rows(self) -> Tree:
        """Returns the rows that the items hold, one item after another and without padding: `data` with fewer rows."""
        return jax.tree.map(lambda leaf: np.asarray(read_rows(leaf, self._rows_of_users(slice(None)))), self._data)


def owner_array(users: Any) -> np.ndarray:
    """Returns the owners as a sortable array, (N,). Raises ValueError for other types, and for no owners."""
    # Given a list, numpy would turn a missing owner among strings into the string "nan".
    owners = np.asarray(users, None if hasattr(users, "dtype") else object)
    if owners.ndim != 1 or len(owners) == 0:
        found = "one string: pass the column itself" if isinstance(users, str) else f"shape {owners.shape}"
        raise ValueError(f"users must be the owner of each example, (N,) with N of at least 1; got {found}")
    types = set(map(type, owners.tolist()))
    if owners.dtype.kind in "OT" and any(all(issubclass(t, one) for t in types) for one in ((int, np.integer), str)):
        if any("\0" in owner for owner in owners.tolist() if isinstance(owner, str)):
            raise ValueError("users must be strings without NUL characters, which numpy drops at their ends")
        owners = np.asarray(owners.tolist())
    words = np.char.decode(owners, "latin-1") if owners.dtype.kind == "S" else owners
    if (
        np.ma.is_masked(users)
        or (owners.dtype.kind == "i" and owners.min() < 0)
        or not MISSING.isdisjoint(words.tolist() if words.dtype.kind == "U" else ())
    ):
        raise ValueError(
            "users must hold the owner of every example, but some look missing: a mask, a number below 0, or one of "
            f"{sorted(MISSING)}. All of them would be one user; give each person a number"
        )
    if owners.dtype.kind not in "iuUS":
        found = sorted(t.__name__ for t in types)
        hint = "; drop the rows without an owner" if "float" in found else ""
        hint += ", then use .astype(int)" if found == ["float"] else ""
        raise ValueError(f"users must be all integers or all strings, and none of them missing; got {found}{hint}")
    return owners


@explain_misuse
def records_to_keep(owners: Any, *, most_records: int, first: First = "order") -> np.ndarray:
    """Chooses records to keep, int64 (kept,), sorted, so that nobody owns more than `most_records` of them.

    The choice is greedy: a record is kept if each of its owners has fewer than `most_records` so far, so no other
    record could be added. The choice depends only on the owners, which must be public. If a private label or text
    decides who owns a record, the choice leaks it. Compute the cost of a run with `records=most_records`.

    owners: a sequence with a non-empty collection of integers or strings for each record; or a pair of arrays (owners,
        starts): record i is owned by owners[starts[i]:starts[i + 1]], where starts, int (N + 1,), goes from 0 to the
        number of owners. An owner that is named twice counts once.
    most_records: int, at least 1.
    first: "order" tries the records in their order, which must not depend on private data either. "fewest_owners" tries
        those with the fewest owners first, which keeps more records, but fewer of those with many owners.

    Raises ValueError for a record without an owner (which protects nobody), for missing owners, for starts that do
    not rise from 0 to the number of owners, and for other arguments outside their domains.
    """
    require_whole("most_records", most_records)
    if first not in ("order", "fewest_owners"):
        raise ValueError(f'first must be "order" or "fewest_owners", got {first!r}')
    flat, starts = _flatten_owners(owners)
    _, numbers = np.unique(owner_array(flat), return_inverse=True)
    of_each = [set(numbers[begin:end].tolist()) for begin, end in zip(starts[:-1], starts[1:], strict=True)]
    order = range(len(of_each))
    if first == "fewest_owners":
        order = sorted(order, key=lambda record: len(of_each[record]))  # a stable sort keeps the order of ties
    owned, kept = np.zeros(numbers.max() + 1, np.int64).tolist(), []
    for record in order:
        if all(owned[owner] < most_records for owner in of_each[record]):
            kept.append(record)
            for owner in of_each[record]:
                owned[owner] += 1
    return np.array(sorted(kept), np.int64)


def _flatten_owners(owners: Any) -> tuple[Any, np.ndarray]:
    """Returns all owners in one sequence, and where each record's owners begin, int64 (N + 1,)."""
    if isinstance(owners, tuple) and len(owners) == 2 and all(hasattr(part, "dtype") for part in owners):
        flat, starts = owners[0], np.asarray(owners[1])  # `flat` as it is: np.asarray would drop a mask
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
