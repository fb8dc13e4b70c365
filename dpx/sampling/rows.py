"""Reads some rows of a data set, from arrays or from a source that gives one example at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.trees import Tree, batch_size, described, require_arrays


def rows_of(data: Any, examples: int) -> Callable[[np.ndarray, np.ndarray], Tree]:
    """A function from indices, int32 (B,), and `included`, bool (B,), to these rows of `data`: a pytree of arrays with
    the B rows on axis 0, which are zeros where a row is not included. So no program sees an example that is not drawn.

    data: a pytree of arrays with the examples on axis 0 of each, or a source with `__len__` and `__getitem__(int)`.
    Raises ValueError unless `data` holds this number of examples. The function raises it for unlike items of a source.
    """
    if (length := length_of(data)) != examples:
        raise ValueError(f"data must hold the {examples} examples of the sampling, got {length}")
    if _is_source(data):
        items = _items_of(data)
        return lambda indices, included: jax.tree.map(lambda leaf: _blanked(leaf, included), items(indices))

    def rows(indices, included):
        def of_leaf(leaf):
            if isinstance(leaf, jax.Array):
                return _taken(leaf, indices, included)
            return _blanked(read_rows(leaf, indices), included)

        return jax.tree.map(of_leaf, data)

    return rows


def zeros_excluded(rows: jax.Array, included: jax.Array) -> jax.Array:
    """`rows`, (B, ...), but zeros where `included`, bool (B,), is False."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        words = zeros_excluded(jax.random.key_data(rows), included)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
    return jnp.where(included.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


_taken = jax.jit(lambda array, indices, included: zeros_excluded(array[indices], included))


def _blanked(rows: np.ndarray, included: np.ndarray) -> np.ndarray:
    """The same in place, for rows that nobody else holds."""
    rows[~included] = 0
    return rows


def length_of(data: Any) -> int:
    """How many examples `data` holds, as arrays or as a source. Raises ValueError for anything else."""
    return len(data) if _is_source(data) else batch_size(data)


def unit_of(data: Any) -> str:
    """The name of what an item of `data` is: its `privacy_unit`, as of `dpx.UserData`, or "example"."""
    unit = getattr(data, "privacy_unit", "example")
    return unit if isinstance(unit, str) else "example"


def _is_source(data: Any) -> bool:
    """Whether `data` is asked for examples one at a time. Raises ValueError unless it is that or holds arrays."""
    iterator = hasattr(data, "__next__")
    if not iterator:
        require_arrays(data)
    if not iterator and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(data)):
        return False
    if not iterator and jax.tree_util.all_leaves([data]) and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return True
    raise ValueError(
        "data must be a pytree of arrays with the examples on axis 0 of each, or a source with __len__ and "
        f"__getitem__(int); got {type(data)}: convert lists of numbers to arrays, with numpy.asarray"
    )


def read_rows(array: Any, indices: np.ndarray) -> Any:
    """The rows of one array of jax, of numpy or in a file."""
    if isinstance(array, jax.Array) or type(array) is np.ndarray:
        return array[indices]
    ascending, inverse = np.unique(indices, return_inverse=True)  # because files are read faster in order, or only so
    return np.asarray(array[ascending])[inverse]


def _copied(leaf: Any) -> np.ndarray:
    """An array of its own, because a source may reuse its buffer. (torch's tensors warn of `np.array`.)"""
    return np.asarray(leaf).copy()


def _items_of(source: Any) -> Callable[[np.ndarray], Tree]:
    """`rows_of` for a source. Reads item 0 at once, because all others must be like it."""
    first = jax.tree.map(np.asarray, source[0])
    expected = _describe(first)
    numbers = [jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b" for _, dtype in expected[1]]
    if not numbers or not all(numbers):
        raise ValueError(f"an item of data must be a pytree of arrays and numbers, got {described(source[0])}")

    def rows(indices):
        wanted, inverse = np.unique(indices, return_inverse=True)
        numbers = wanted.tolist()
        several = getattr(source, "__getitems__", None)
        items = (source[number] for number in numbers) if several is None else several(numbers)
        items = [jax.tree.map(_copied, item) for item in items]
        if len(items) != len(numbers):
            raise ValueError(f"__getitems__ of data must give one item a row for {len(numbers)} rows, got {len(items)}")
        for number, item in zip(numbers, items, strict=True):
            if (found := _describe(item)) != expected:
                raise ValueError(
                    "the items of data must be alike in structure, shapes and dtypes: row 0 has "
                    f"{_in_words(expected)}, row {number} has {_in_words(found)}"
                )
        return jax.tree.map(lambda *leaves: np.stack(leaves)[inverse], *items)

    return rows


def _describe(item: Tree) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    leaves, structure = jax.tree.flatten(item)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _in_words(description: tuple[Any, list]) -> str:
    structure, leaves = description
    return str(jax.tree.unflatten(structure, [f"{dtype}{list(shape)}" for shape, dtype in leaves]))
