"""Checks the data that a caller gives, and reads their rows, from arrays or from a source of one example at a time.

A row may depend only on its index or, for random items, also on the step and the key of the batches. Then the coins of
one example cannot change the row of another, and a step that is repeated after a kill or an exception reads the same
rows. dpx cannot prove this of a source, so it reads some rows again, one at a time and starting with the last.
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
import scipy.sparse

from dpx import keys
from dpx.values import MOST_SHAPES, Tree, described, leaf_path, list_first_few

AGAIN = 16  # repeated readings: a random item flipped by a fair coin escapes them with probability 2^-16
FIRST, EVERY = 64, 256  # AGAIN readings per call for the first 64 rows of a source, then one reading per 256 rows
MARKED, MARKED_ITEMS = 64, 8  # how many rows of arrays, or items of a source, a fingerprint reads, evenly spaced
NO_NUMBERS = frozenset("OSUTMm")  # kinds of numpy dtypes: objects, strings and dates
_READ: dict[int, list[int]] = {}  # source id -> number of rows read so far, while the source is alive


class CheckedData:
    """The examples of a run: a pytree of arrays with the examples on axis 0 of each, or a source of one example at a
    time, as `Sampling.take` describes it. key: scalar key of the batches. unit: from `unit_of`.

    Raises ValueError unless `data` holds `examples` examples.
    """

    def __init__(self, data: Any, examples: int, key: jax.Array):
        self.data, self.examples, self.key, self.unit = data, examples, key, unit_of(data)
        self._from_source = _is_data_source(data)
        length = len(data) if self._from_source else batch_size(data)
        if length != examples:
            users = ": for users, give the sampling examples=len(users)"
            hint = advice_to_stack(data) if self.unit == "example" else users
            raise ValueError(f"data must hold the {examples} examples of the sampling, got {length}{hint}")
        others = [leaf for leaf in jax.tree.leaves(data) if not isinstance(leaf, jax.Array | np.ndarray)]
        self._read = None
        if self._from_source:
            self._read = _with_repeated_reads(data, _item_reader(data, key))
        elif others:  # arrays in files, or computed when they are indexed
            self._read = _with_repeated_reads(
                others[0], lambda numbers, step: jax.tree.map(lambda leaf: read_rows(leaf, numbers), data)
            )

    def read_included_rows(self, indices: np.ndarray, included: np.ndarray, step: int) -> Tree:
        """Returns B rows, on axis 0, with zeros in those that are not included, so that no program sees an example that
        was not drawn. indices: int32 (B,). included: bool (B,).

        Raises ValueError if the items of a source differ in structure, shape or dtype, or if a row differs when it is
        read again.
        """
        if self._read is not None:
            return jax.tree.map(lambda leaf: _zero_excluded_in_place(leaf, included), self._read(indices, step))

        def of_leaf(leaf):
            if isinstance(leaf, jax.Array):
                return _taken(leaf, indices, included)
            return _zero_excluded_in_place(read_rows(leaf, indices), included)

        return jax.tree.map(of_leaf, self.data)

    @functools.cached_property
    def some_rows(self) -> Tree:
        """Returns MARKED rows of arrays, or MARKED_ITEMS items of a source, which may be slow to read, on axis 0."""
        many = MARKED_ITEMS if self._from_source else MARKED
        places = np.unique(np.linspace(0, self.examples - 1, many).astype(np.int32))
        if self._from_source:
            return self.read_included_rows(places, np.ones(len(places), bool), 0)
        return jax.tree.map(lambda leaf: read_rows(leaf, places), self.data)

    def keyed_hash(self) -> int:
        """Hashes some rows, and who owns the rows of a source, with `key`, without which the hash reveals nothing. Two
        data sets that differ in these have different hashes, except with probability 2^-32.

        The hash detects processes that loaded different parts of the data or another order, and a run that continues
        with other data, which would reveal the difference without noise.
        """
        rows = jax.tree.leaves(self.some_rows)
        leaves = [np.asarray(jax.random.key_data(leaf) if keys.is_key(leaf) else leaf) for leaf in rows]
        parts = [part for leaf in leaves for part in (f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes())]
        if hasattr(self.data, "identity_of_units"):
            parts += [repr(self.data.identity_of_units()).encode()]
        secret = np.asarray(keys.key_words(keys.stream(self.key, "first example"))).tobytes()
        return int(hashlib.blake2b(b"".join(parts), digest_size=4, key=secret).hexdigest(), 16)


def _with_repeated_reads(source: Any, read: Callable[[np.ndarray, int], Tree]) -> Callable[[np.ndarray, int], Tree]:
    """Wraps `read` so that it reads some rows again, and compares. source: the object whose reads it counts."""
    count = _READ.get(id(source), [0])
    if id(source) not in _READ:
        with contextlib.suppress(TypeError):  # raised if it does not support weak references
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
    """Returns a function from an item's index to its random generator, for one step of a run.

    The generator is numpy's Philox, with the 128-bit key of the "items" stream of the scalar `key` at this step; each
    item has its own 2^192 blocks. So the random numbers do not depend on which items are read, when or where. They may
    be public, because nothing else uses the stream, and it reveals nothing about `key` or its other streams.
    """
    words = np.asarray(keys.key_words(keys.stream(key, "items", step))).astype(">u4").tobytes()
    return lambda number: np.random.Generator(np.random.Philox(key=int.from_bytes(words), counter=number << 192))


def zero_excluded_rows(rows: jax.Array, included: jax.Array | np.ndarray) -> jax.Array:
    """Returns `rows`, (B, ...), with zeros in the rows where `included`, bool (B,), is False."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        words = zero_excluded_rows(jax.random.key_data(rows), included)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
    return jnp.where(included.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


_taken = jax.jit(lambda array, indices, included: zero_excluded_rows(array[indices], included))


def _zero_excluded_in_place(rows: Any, included: np.ndarray) -> Any:
    """Like `zero_excluded_rows`, but changes a numpy array in place, so the caller must hold the only reference."""
    if isinstance(rows, jax.Array):
        return zero_excluded_rows(rows, included)
    rows[~included] = 0
    return rows


def length_of(data: Any) -> int:
    """Returns how many examples `data`, arrays or a source, holds. Raises ValueError for anything else."""
    return len(data) if _is_data_source(data) else batch_size(data)


def unit_of(data: Any) -> str:
    """Names what one item of `data` is: its `privacy_unit`, which `dpx.UserData` has, or "example"."""
    unit = getattr(data, "privacy_unit", "example")
    return unit if isinstance(unit, str) else "example"


def _is_data_source(data: Any) -> bool:
    """Whether `data` is a source, read one item at a time. Raises ValueError unless it is one or holds arrays."""
    if hasattr(data, "included") and hasattr(data, "examples"):
        raise ValueError("data must be all examples, because the sampling draws the batches, got a dpx.Batch")
    iterator = hasattr(data, "__next__")
    if not iterator:
        require_plain_arrays(data)
    if not iterator and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(data)):
        return False
    gives = hasattr(data, "__getitem__") or hasattr(data, "random_item")
    one = jax.tree_util.all_leaves([data]) and not isinstance(data, str | bytes)
    if not iterator and one and hasattr(data, "__len__") and gives:
        return True
    advice = "convert lists of numbers to arrays, with numpy.asarray"
    if iterator or hasattr(data, "dataset") or (one and hasattr(data, "__iter__")):
        advice = "give what a loader or an iterator reads, because the sampling draws the batches"
    raise ValueError(
        "data must be a pytree of arrays with the examples on axis 0 of each, or a source with __len__ and "
        f"__getitem__(int); got {type(data)}: {advice}"
    )


def read_rows(array: Any, indices: np.ndarray) -> Any:
    """Reads rows of one array: a jax or numpy array, or one in a file."""
    if isinstance(array, jax.Array) or type(array) is np.ndarray:
        return array[indices]
    ascending, inverse = np.unique(indices, return_inverse=True)  # files read faster in order, or only then
    return np.asarray(array[ascending])[inverse]


def _copied_array(leaf: Any) -> np.ndarray:
    """Returns a copy, because a source may reuse its buffer. (`np.array` would warn about torch's tensors.)"""
    refuse_mask(leaf)
    return np.asarray(leaf).copy()


def _item_reader(source: Any, key: jax.Array) -> Callable[[np.ndarray, int], Tree]:
    """Returns a function that reads a source's items. Reads item 0 at once, because all others must be alike."""
    chance, several = getattr(source, "random_item", None), getattr(source, "__getitems__", None)
    first = source[0] if chance is None else chance(0, generators_of_items(key, 0)(0))
    expected = _item_structure(jax.tree.map(np.asarray, first))
    kinds = [jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b" for _, dtype in expected[1]]
    if not kinds or not all(kinds):
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(first)]
        odd = list_first_few([path for path, good in zip(paths, kinds, strict=True) if not good])
        found = f", with no numbers in {odd}: encode words as numbers, or leave them out" * (odd != "")
        raise ValueError(f"an item of data must be a pytree of arrays and numbers, got {type(first)}{found}")

    def read(rows, step):
        numbers = rows.tolist()
        if chance is not None:
            random = generators_of_items(key, step)
            items = (chance(number, random(number)) for number in numbers)
        else:
            items = (source[number] for number in numbers) if several is None else several(numbers)
        items = [jax.tree.map(_copied_array, item) for item in items]
        if len(items) != len(numbers):
            raise ValueError(f"__getitems__ of data must give {len(numbers)} items, one for each row, got {len(items)}")
        for number, item in zip(numbers, items, strict=True):
            if (found := _item_structure(item)) != expected:
                raise ValueError(
                    "the items of data must be alike in structure, shapes and dtypes: row 0 has "
                    f"{_structure_in_words(expected)}, row {number} has {_structure_in_words(found)}"
                )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *items)

    return read


def _item_structure(item: Tree) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    leaves, structure = jax.tree.flatten(item)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _structure_in_words(description: tuple[Any, list]) -> str:
    structure, leaves = description
    return str(jax.tree.unflatten(structure, [f"{dtype}{list(shape)}" for shape, dtype in leaves]))


def batch_size(examples: Tree) -> int:
    """Returns the length of axis 0. Raises ValueError unless all leaves are arrays that agree on it."""
    require_plain_arrays(examples)
    leaves = jax.tree_util.tree_leaves_with_path(examples)
    shapes: list[tuple[int, ...]] = [tuple(getattr(leaf, "shape", ())) for _, leaf in leaves]
    if not shapes or any(len(shape) == 0 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        named = [f"{leaf_path(path)} {list(shape)}".strip() for (path, _), shape in zip(leaves, shapes, strict=True)]
        found = f"shapes {list_first_few(named, MOST_SHAPES)}" if shapes else "no array"
        advice = advice_to_stack(examples) or ". Are these parameters, in the place of data?" * any(shapes)
        if not all(hasattr(leaf, "shape") for _, leaf in leaves):
            advice = ": convert lists of numbers to arrays, with numpy.asarray"
        raise ValueError(f"every leaf must have the same number of examples on axis 0; got {found}{advice}")
    return shapes[0][0]


def advice_to_stack(data: Any) -> str:
    """Says how to stack a list of examples, which jax would read as one pytree; "" for anything else."""
    if not isinstance(data, list) or len(data) < 2 or len({jax.tree.structure(one) for one in data}) > 1:
        return ""
    return ": stack a list of examples, by jax.tree.map(lambda *rows: numpy.stack(rows), *data)"


def require_plain_arrays(data: Any):
    """Raises ValueError for pandas objects (indexed by label), sparse matrices, masked arrays and strings."""
    try:
        leaves = jax.tree.leaves(data)
    except ValueError:
        raise ValueError(
            "the keys of a dict must be of one type, such as all strings, because JAX sorts them: rename the keys, or "
            "convert the data to NumPy arrays"
        ) from None
    for leaf in leaves:
        if hasattr(leaf, "iloc") or type(leaf).__module__.split(".")[0] == "pandas":
            such = "frame[columns]" if len(np.shape(leaf)) > 1 else "series"
            raise ValueError(
                f"data must hold arrays, not a table with labeled rows, got {type(leaf)}. Give the columns of "
                f"numbers, such as {such}.to_numpy(numpy.float32), with a number in place of each word"
            )
        if scipy.sparse.issparse(leaf):
            raise ValueError(f"data must hold dense arrays, got {type(leaf)}: .toarray(), or a source of dense rows")
        refuse_mask(leaf)
        dtype = getattr(leaf, "dtype", None)
        if getattr(dtype, "kind", "") in NO_NUMBERS or getattr(dtype, "names", None):
            advice = "give .astype(numpy.float32) of the columns of numbers, with a number for each word or date"
            raise ValueError(f"every array must hold numbers, got {described(leaf)}: {advice}")


def refuse_mask(leaf: Any):
    """Raises ValueError for a masked array, because NumPy and JAX drop the mask, and count what it hides."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"data must hold arrays without a mask, got {described(leaf)}: its mask would be lost, and what it hides "
            "would count. Give array.filled(numpy.nan) to a statistic, and leave such rows out of training"
        )
