"""A batch of examples that says which of its rows count, so that padding cannot be forgotten."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

Tree = Any  # a pytree of arrays


class Drawn(NamedTuple):
    """How a batch was drawn, set by the sampling; each uint32 (), or (steps,) in the draws of many steps.

    step:      the number of steps before, for which the batch was drawn.
    rows:      how many of its rows count.
    key:       the mark of the key that drew it (`keys.mark`).
    first_row: 0; for a chunk of a batch, how many rows the chunks before it have.
    sampling:  a fingerprint of the sampling.
    unit:      a fingerprint of the name of what it holds: "example", or the `privacy_unit` of the data.
    """

    step: Any
    rows: Any
    key: Any
    first_row: Any
    sampling: Any
    unit: Any


class Batch(NamedTuple):
    """Examples, and which of them count.

    examples: pytree of arrays, with the B examples on axis 0 of each.
    included: bool (B,), True where the row counts, False for padding; None says that all B rows count.
    drawn:    a `Drawn`, set by the sampling. A run has no bill if it uses the batch twice, at another step, with
              another number of rows that count, or with a mechanism of another sampling. To change the examples, use
              `batch._replace(examples=...)`, which keeps this field. Each new row must depend on its own old row alone:
              no mixup, no statistics of the batch. Nothing can check that.
    """

    examples: Tree
    included: jax.Array | np.ndarray | None
    drawn: Drawn | None = None


def require_batch(batch: Any) -> Batch:
    """`batch` unchanged. Raises ValueError if it does not say which rows count."""
    if isinstance(batch, Batch):
        return batch
    raise ValueError(
        f"batch must be a dpx.Batch, got {type(batch)}. Get one by sampling.take(data, key, state). For a batch of "
        "your own, write dpx.Batch(examples, included) with included: bool (B,), or dpx.Batch(examples, included=None) "
        "if every row counts; it is billed as if the sampling had drawn it, which it must have"
    )


def require_arrays(data: Any):
    """Raises ValueError for objects of pandas, whose rows are read by label, and for sparse matrices."""
    for leaf in jax.tree.leaves(data):
        if hasattr(leaf, "iloc"):
            raise ValueError(
                f"data must hold arrays, whose rows have places, not labels; got {type(leaf)}: .to_numpy()"
            )
        if scipy.sparse.issparse(leaf):
            raise ValueError(
                f"data must hold dense arrays, got {type(leaf)}: .toarray(), or a source that makes its rows dense"
            )


def batch_size(examples: Tree) -> int:
    """The length of axis 0. Raises ValueError unless it is the same in every leaf, which is an array."""
    require_arrays(examples)
    shapes: list[tuple[int, ...]] = [tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(examples)]
    if not shapes or any(len(shape) == 0 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"every leaf must have the examples on axis 0, the same number; got shapes {shapes}")
    return shapes[0][0]


MISSING = object()  # the default of `included`; None already says that all rows count


def inclusion(size: int, included: Any, sampling: Any) -> jax.Array:
    """Which of `size` rows count, bool (size,). None and MISSING mean all of them.

    Raises ValueError for another shape or dtype, for MISSING if the sampling's batches may hold padding, and for all
    rows if the sampling draws no batch of `size` rows.
    """
    if included is MISSING and getattr(sampling, "pads", True):
        raise ValueError(f"included must be given, bool (B,): batches of {sampling} hold padding")
    if included is None or included is MISSING:
        expected, padded = sampling.divisor, getattr(sampling, "pads", True)
        if size != expected and (not padded or size > getattr(sampling, "most_rows", math.inf)):
            raise ValueError(f"a batch of {sampling} has {expected} rows, got {size}; say which are included")
        return jnp.ones(size, bool)
    included = jnp.asarray(included)
    if jnp.shape(included) != (size,):
        raise ValueError(f"included must have shape ({size},), one bool per example; got {jnp.shape(included)}")
    if jnp.result_type(included) != jnp.bool_:
        raise ValueError(f"included must be bool, True for the rows that count; got {jnp.result_type(included)}")
    return included
