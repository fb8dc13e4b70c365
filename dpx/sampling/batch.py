"""A batch of examples that says which of its rows count, so that padding cannot be forgotten."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.states.record import DrawRecord
from dpx.values import Tree, batch_size, repr_with_shapes


class Batch(NamedTuple):
    """Examples, and which of them count.

    examples: pytree of arrays, with the B examples on axis 0 of each. A sampling fills padding with zeros.
    included: bool (B,), True where the row counts, False for padding; None says that all B rows count.
    drawn:    a `DrawRecord`, set by the sampling. A run has no known cost if it uses the batch twice, at another step,
              with another number of rows that count, or with a mechanism of another sampling. To change the examples,
              use `batch._replace(examples=...)`, which keeps this field. Each new row must depend on its own old row
              alone: no mixup, no statistics of the batch. Nothing can check that.

        >>> padded = dpx.Batch(np.ones((4, 3)), included=np.array([True, True, True, False]))
        >>> padded._replace(examples=2 * padded.examples).examples.shape
        (4, 3)
    """

    examples: Tree
    included: jax.Array | np.ndarray | None
    drawn: DrawRecord | None = None

    __repr__ = repr_with_shapes


def require_batch(batch: Any) -> Batch:
    """`batch` unchanged. Raises ValueError if it does not say which rows count, or holds no arrays of as many rows."""
    if isinstance(batch, Batch):
        batch_size(batch.examples)
        return batch
    raise ValueError(
        f"batch must be a dpx.Batch, got {type(batch)}. Get one from sampling.take(data, key, state). For a batch of "
        "your own, write dpx.Batch(examples, included) with included: bool (B,), or dpx.Batch(examples, included=None) "
        "if every row counts; its cost assumes that the sampling drew it"
    )


MISSING = object()  # the default of `included`; None already says that all rows count


def included_rows(size: int, included: Any, sampling: Any) -> jax.Array:
    """Which of `size` rows count, bool (size,). None and MISSING mean all of them.

    Raises ValueError for another shape or dtype, for MISSING if the sampling's batches may hold padding, and for all
    rows if the sampling draws no batch of `size` rows.
    """
    if included is MISSING and sampling.pads:
        raise ValueError(f"included must be given, bool (B,): batches of {sampling} hold padding")
    if included is None or included is MISSING:
        expected, padded = sampling.divisor, sampling.pads
        if size != expected and (not padded or size > sampling.most_rows):
            raise ValueError(f"a batch of {sampling} has {expected} rows, got {size}; say which are included")
        return jnp.ones(size, bool)
    included = jnp.asarray(included)
    if jnp.shape(included) != (size,):
        raise ValueError(f"included must have shape ({size},), one bool per example; got {jnp.shape(included)}")
    if jnp.result_type(included) != jnp.bool_:
        raise ValueError(f"included must be bool, True for the rows that count; got {jnp.result_type(included)}")
    return included
