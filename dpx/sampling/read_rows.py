"""Reads some rows of a data set, from arrays or from a source that gives one example at a time.

A row is a function of its number, or of its number, the step and the key of the batches, and of nothing else. Then no
coin of one example moves the row of another, and a step that is made again, after a kill or an exception, has the rows
that it had. Nothing can prove that of a source, so some rows are read again, each alone and the last one first.
"""

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.values import Tree, batch_size, described, refuse_mask, require_arrays

Rows = Callable[[np.ndarray, np.ndarray, int], Tree]  # from indices, int32 (B,), `included`, bool (B,), and a step

AGAIN = 16  # readings, in which a fair coin shows both sides, but with probability 2^-16
FIRST, EVERY = 64, 256  # AGAIN readings a call for the first 64 rows of a source, later one reading for 256 rows
MARKED = 64  # rows of arrays, evenly spaced
_READ: dict[int, list[int]] = {}  # how many rows of a source were read, by its id while it lives


def rows_of(data: Any, examples: int, key: jax.Array) -> Rows:
    """A function from indices, int32 (B,), `included`, bool (B,), and a step to these rows of `data`: a pytree of
    arrays with the B rows on axis 0, which are zeros where a row is not included. So no program sees an example that is
    not drawn.

    data: a pytree of arrays with the examples on axis 0 of each, or a source as `Sampling.take` describes it.
    key: of the batches, ().
    Raises ValueError unless `data` holds this number of examples. The function raises it for unlike items of a source,
    and for rows that are others when they are read again.
    """
    if (length := length_of(data)) != examples:
        hint = "" if unit_of(data) == "example" else ": for users, give the sampling examples=len(users)"
        raise ValueError(f"data must hold the {examples} examples of the sampling, got {length}{hint}")
    if _is_data_source(data):
        read = _checking_repeats(data, _items_of(data, key))
    elif others := [leaf for leaf in jax.tree.leaves(data) if not isinstance(leaf, jax.Array | np.ndarray)]:
        # in files, or made when they are asked for
        read = _checking_repeats(
            others[0], lambda numbers, step: jax.tree.map(lambda leaf: read_rows(leaf, numbers), data)
        )
    else:

        def rows_of_arrays(indices, included, step):
            def of_leaf(leaf):
                if isinstance(leaf, jax.Array):
                    return _taken(leaf, indices, included)
                return _zero_excluded_in_place(read_rows(leaf, indices), included)

            return jax.tree.map(of_leaf, data)

        return rows_of_arrays
    return lambda indices, included, step: jax.tree.map(
        lambda leaf: _zero_excluded_in_place(leaf, included), read(indices, step)
    )


class CheckedData:
    """The examples of a run. rows: of `rows_of`, whose arguments and errors these are. unit: of `unit_of`."""

    def __init__(self, data: Any, examples: int, key: jax.Array):
        self.data, self.examples, self.key = data, examples, key
        self.rows, self.unit = rows_of(data, examples, key), unit_of(data)

    def in_arrays(self) -> bool:
        return all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(self.data))

    @functools.cached_property
    def some_rows(self) -> Tree:
        """MARKED rows of arrays, or item 0 of a source, on axis 0."""
        if _is_data_source(self.data):
            return self.rows(np.zeros(1, np.int32), np.ones(1, bool), 0)
        places = np.unique(np.linspace(0, self.examples - 1, MARKED).astype(np.int32))
        return jax.tree.map(lambda leaf: read_rows(leaf, places), self.data)

    def mark(self) -> int:
        """A mark of some rows, and of who owns the rows of a source, which says nothing to those who do not know `key`.
        Two data sets that differ there have different marks, except with probability 2^-32.

        This tells apart processes that loaded a part each or the rows in another order, and a run that continues with
        other data, which would show the difference without noise.
        """
        rows = jax.tree.leaves(self.some_rows)
        leaves = [np.asarray(jax.random.key_data(leaf) if keys.is_key(leaf) else leaf) for leaf in rows]
        parts = [part for leaf in leaves for part in (f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes())]
        if hasattr(self.data, "identity_of_units"):
            parts += [repr(self.data.identity_of_units()).encode()]
        secret = np.asarray(keys.key_words(keys.stream(self.key, "first example"))).tobytes()
        return int(hashlib.blake2b(b"".join(parts), digest_size=4, key=secret).hexdigest(), 16)


def _checking_repeats(source: Any, read: Callable[[np.ndarray, int], Tree]) -> Callable[[np.ndarray, int], Tree]:
    """`read`, of which some rows are read again. source: by which it is known what was read of it before."""
    count = _READ.get(id(source), [0])
    if id(source) not in _READ:
        with contextlib.suppress(TypeError):  # it has no weak references
            weakref.finalize(source, _READ.pop, id(source), None)
            _READ[id(source)] = count

    def rows(indices, step):
        numbers, inverse = np.unique(indices, return_inverse=True)
        found = read(numbers, step)
        before, count[0] = count[0], count[0] + len(numbers)
        often = AGAIN if before < FIRST else int(before // EVERY < count[0] // EVERY)
        for place in [-1 - turn % len(numbers) for turn in range(often)]:
            alone = read(numbers[[place]], step)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
                if not isinstance(one, jax.Array) and one[place].tobytes() != other[0].tobytes():
                    raise ValueError(
                        "an item of data must be a function of its number alone, but one that was read again "
                        "differed. For random items (augmentation), give the source a method random_item(number, "
                        "rng), and take all its random numbers from rng; or see dpx.augmented"
                    )
        return jax.tree.map(lambda leaf: leaf[inverse], found)

    return rows


def generators_of_items(key: jax.Array, step: int) -> Callable[[int], np.random.Generator]:
    """The random numbers of an item by its number, for one step of a run.

    They are those of numpy's Philox. Its key of 128 bits is that of the "items" stream of `key`, (), and the step, and
    each item has 2^192 blocks of its own. So they do not depend on which items are read, when and where, and they are
    public: the stream draws nothing else, and says nothing of `key` or of its other streams.
    """
    words = np.asarray(keys.key_words(keys.stream(key, "items", step))).astype(">u4").tobytes()
    return lambda number: np.random.Generator(np.random.Philox(key=int.from_bytes(words), counter=number << 192))


def zero_excluded_rows(rows: jax.Array, included: jax.Array | np.ndarray) -> jax.Array:
    """`rows`, (B, ...), but zeros where `included`, bool (B,), is False."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        words = zero_excluded_rows(jax.random.key_data(rows), included)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
    return jnp.where(included.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


_taken = jax.jit(lambda array, indices, included: zero_excluded_rows(array[indices], included))


def _zero_excluded_in_place(rows: Any, included: np.ndarray) -> Any:
    """The same; in place for an array of numpy, which nobody else holds."""
    if isinstance(rows, jax.Array):
        return zero_excluded_rows(rows, included)
    rows[~included] = 0
    return rows


def length_of(data: Any) -> int:
    """How many examples `data` holds, as arrays or as a source. Raises ValueError for anything else."""
    return len(data) if _is_data_source(data) else batch_size(data)


def unit_of(data: Any) -> str:
    """The name of what an item of `data` is: its `privacy_unit`, as of `dpx.UserData`, or "example"."""
    unit = getattr(data, "privacy_unit", "example")
    return unit if isinstance(unit, str) else "example"


def _is_data_source(data: Any) -> bool:
    """Whether `data` is asked for examples one at a time. Raises ValueError unless it is that or holds arrays."""
    iterator = hasattr(data, "__next__")
    if not iterator:
        require_arrays(data)
    if not iterator and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(data)):
        return False
    gives = hasattr(data, "__getitem__") or hasattr(data, "random_item")
    if not iterator and jax.tree_util.all_leaves([data]) and hasattr(data, "__len__") and gives:
        return True
    advice = "convert lists of numbers to arrays, with numpy.asarray"
    if iterator or hasattr(data, "dataset"):
        advice = "give what a loader or an iterator reads, because the sampling draws the batches"
    raise ValueError(
        "data must be a pytree of arrays with the examples on axis 0 of each, or a source with __len__ and "
        f"__getitem__(int); got {type(data)}: {advice}"
    )


def read_rows(array: Any, indices: np.ndarray) -> Any:
    """The rows of one array of jax, of numpy or in a file."""
    if isinstance(array, jax.Array) or type(array) is np.ndarray:
        return array[indices]
    ascending, inverse = np.unique(indices, return_inverse=True)  # because files are read faster in order, or only so
    return np.asarray(array[ascending])[inverse]


def _copied(leaf: Any) -> np.ndarray:
    """An array of its own, because a source may reuse its buffer. (torch's tensors warn of `np.array`.)"""
    refuse_mask(leaf)
    return np.asarray(leaf).copy()


def _items_of(source: Any, key: jax.Array) -> Callable[[np.ndarray, int], Tree]:
    """How the items of a source are read. Reads item 0 at once, because all others must be like it."""
    chance, several = getattr(source, "random_item", None), getattr(source, "__getitems__", None)
    first = source[0] if chance is None else chance(0, generators_of_items(key, 0)(0))
    expected = _describe(jax.tree.map(np.asarray, first))
    kinds = [jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b" for _, dtype in expected[1]]
    if not kinds or not all(kinds):
        raise ValueError(f"an item of data must be a pytree of arrays and numbers, got {described(first)}")

    def read(rows, step):
        numbers = rows.tolist()
        if chance is not None:
            random = generators_of_items(key, step)
            items = (chance(number, random(number)) for number in numbers)
        else:
            items = (source[number] for number in numbers) if several is None else several(numbers)
        items = [jax.tree.map(_copied, item) for item in items]
        if len(items) != len(numbers):
            raise ValueError(f"__getitems__ of data must give {len(numbers)} items, one for each row, got {len(items)}")
        for number, item in zip(numbers, items, strict=True):
            if (found := _describe(item)) != expected:
                raise ValueError(
                    "the items of data must be alike in structure, shapes and dtypes: row 0 has "
                    f"{_in_words(expected)}, row {number} has {_in_words(found)}"
                )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *items)

    return read


def _describe(item: Tree) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    leaves, structure = jax.tree.flatten(item)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _in_words(description: tuple[Any, list]) -> str:
    structure, leaves = description
    return str(jax.tree.unflatten(structure, [f"{dtype}{list(shape)}" for shape, dtype in leaves]))
