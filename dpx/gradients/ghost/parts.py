"""The norms and the clipped sum of a part of a parameter, which may be in slices, and of all parts together.

Slices are computed one after another, each like a whole parameter: the plan's algorithm sees one slice. So only one
slice's arrays are in memory, and a stack of layers compiles like one layer. Where a matrix unit rounds, the norms of
all slices are computed at once if their Gram matrices are small, because many small kernels take longer there. So are
those of gradients in a TPU's memory, and their sums, because it would write each slice again.

Parts and their slices share no element. So the square of a gradient's norm is the sum of the squares of the norms of
its parts, none of which is below the true one (`dpx.sums.norms` adds the squares). Every coordinate of a sum is a
coordinate of the sum of one slice, so the proof in `dpx.sums.float_pair` holds: it allows each coordinate another order
of additions.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import norms
from dpx.gradients.ghost.plan import Choice
from dpx.gradients.ghost.program import View, assemble_parts
from dpx.sums.clipped_sum import AT_ONCE, total_of_rows
from dpx.sums.float_pair import FloatPair, with_low
from dpx.xla.place import current_place


def part_norm(choice: Choice, scale: jax.Array | None, records: Any) -> tuple[Any, jax.Array]:
    """The gradients of a part that are kept, or None, and the norms of the part's per-example gradients, float32 (B,).
    records: as in an `Algorithm`, but with an axis for each of the part's slices before the axis of the B examples, as
    in the kept gradients. scale: float32, of the part's shape, or None."""

    def of_slice(rows):
        scale, records = rows
        return choice.algorithm.norm(choice.uses, scale, records)

    kept, found = _over_slices(of_slice, choice, at_once=_at_once(choice, records))((scale, records))
    return kept, norm_of_all(found.reshape(-1, found.shape[-1]))


def norm_of_all(of_parts: jax.Array) -> jax.Array:
    """The norms, float32 (B,), of gradients from the norms of their p parts, float32 (p, B)."""
    return of_parts[0] if len(of_parts) == 1 else jax.vmap(norms.frobenius, 1)(of_parts)


def part_sum(
    choice: Choice, shape: tuple[int, ...], scale: jax.Array | None, records: Any, factors: jax.Array
) -> FloatPair:
    """sum_i f_i z_i of a part of this shape. records: as in `part_norm`. factors: float32 (B,)."""
    inside = shape[len(choice.view.slices) :]

    def of_slice(rows):
        scale, records = rows

        def of_few(rows):
            return _scaled(choice.algorithm.weighted_sum(choice.uses, inside, *rows), scale)

        return total_of_rows(of_few, (records, factors))

    return _over_slices(of_slice, choice, at_once=_are_kept(records))((scale, records))


def joined_parts(of_views: list[View], totals: list[FloatPair], shape: tuple[int, ...]) -> FloatPair:
    """The sum of a parameter of this shape from the sums of its parts."""
    if any(total.low is not None for total in totals):
        totals = [with_low(total) for total in totals]
    low = [total.low for total in totals if total.low is not None]
    high = assemble_parts(of_views, [total.high for total in totals], shape)
    return FloatPair(high, assemble_parts(of_views, low, shape) if low else None)


def _at_once(choice: Choice, records: Any) -> bool:
    """Whether the norms of all slices are computed at once: of a TPU's gradients, or on a matrix unit, from Gram
    matrices that are small for all slices and examples."""
    if _are_kept(records):
        return True
    if choice.algorithm.keeps_gradients or not (choice.uses.few_positions and current_place().unit.rounds):
        return False
    rows = jax.tree.leaves(records)[0].shape[: len(choice.view.slices) + 1]
    return math.prod(rows) * choice.uses.positions_together**2 <= AT_ONCE


def _are_kept(records: Any) -> bool:
    """Whether these are gradients in the memory of a TPU, which reads those of all slices alike."""
    return isinstance(records, jax.Array) and current_place().platform == "tpu"


def _over_slices(function: Callable, choice: Choice, *, at_once: bool = False) -> Callable:
    """`function` of arrays without the axes of a part's slices, for all of them at once or in a loop."""
    for _ in choice.view.slices:

        def function(rows, inner=function):
            return jax.vmap(inner)(rows) if at_once else jax.lax.map(inner, rows)

    return function


def _scaled(total: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`total` times `scale`. A coordinate of scale 0 becomes 0, because it may have overflowed: no norm counts it. So
    does one of a scale that is not finite: then no norm is finite, and no example contributes."""
    return total if scale is None else jnp.where((scale == 0) | ~jnp.isfinite(scale), 0, total * scale)
