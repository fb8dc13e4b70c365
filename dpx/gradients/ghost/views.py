"""Views: what moves the elements of a parameter between the parameter and a use of it; and the parts that are used.

A stacked parameter whose layers a scan takes one after another is used in slices, and so is one that a loop in Python
indexes. Each slice counts as a parameter of its own: the square of the parameter's norm is the sum of the squares of
the norms of its parts, and a coordinate of its sum is a coordinate of one part's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# Equations of one operand that move elements, or drop some, but copy none: a cotangent has one norm on both sides.
VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "rev", "slice"}
VIEWS |= {"broadcast_in_dim", "sharding_constraint"}
STILL = ("convert_element_type", "copy")  # those that move nothing


class Slices(NamedTuple):
    """From here on, a view is of one slice along axis 0 in each of `count` iterations of a scan."""

    count: int


class Repeats(NamedTuple):
    """From here on, a view is of the same elements in each of `count` iterations of a scan."""

    count: int


View = tuple[Any, ...]  # of core.JaxprEqn, Slices and Repeats, in order
Box = list[range]  # the elements of a part that begins with slices, by axis


def is_view(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name not in VIEWS or len(equation.invars) != 1:
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    real = jnp.issubdtype(before.dtype, jnp.floating) and jnp.issubdtype(after.dtype, jnp.floating)
    return real and after.size <= before.size


def through(view: View, leaf: Any) -> Any:
    """`leaf` as its use sees it, in its own dtype; an axis for each `Slices` comes first."""
    for number, step in enumerate(view):
        if isinstance(step, Slices):
            return jax.vmap(lambda each, rest=view[number + 1 :]: through(rest, each))(leaf)
        if isinstance(step, Repeats) or step.primitive.name == "convert_element_type":
            continue
        if step.primitive.name == "transpose":  # of a NumPy array, the same memory in another order
            leaf = leaf.transpose(step.params["permutation"])
        else:
            leaf = step.primitive.bind(leaf, **step.params)
    return leaf


def counts(view: View, kind: type) -> tuple[int, ...]:
    """The numbers of iterations of the `Slices`, or of the `Repeats`, of a view."""
    return tuple(step.count for step in view if isinstance(step, kind))


def written(view: View) -> tuple[str, ...]:
    """A view without the names of its variables; equal for views that move elements in the same way."""

    def write(step):
        if isinstance(step, Slices | Repeats):
            return str(step)
        return f"{step.primitive} {[str(v.aval) for v in (*step.invars, *step.outvars)]} {step.params}"

    return tuple(map(write, view))


class Part(NamedTuple):
    """A part of a parameter, which no other part overlaps.

    view: from the parameter to the part; it ends with the last `Slices`. uses: the numbers of those that are in the
    part. rests: from the part to each of them
    """

    view: View
    uses: tuple[int, ...]
    rests: tuple[View, ...]


def parts(seen: list[View], shape: tuple[int, ...]) -> list[Part] | str:
    """The parts of a parameter of this shape that its uses see, or the reason why they cannot be told apart.

    A part is what all scans around a use slice, or, without one, what the first equations slice.
    """
    found: dict[tuple[str, ...], Part] = {}
    for number, view in enumerate(seen):
        slices = [place for place, step in enumerate(view) if isinstance(step, Slices)]
        repeats = [place for place, step in enumerate(view) if isinstance(step, Repeats)]
        if slices and repeats and repeats[0] < slices[-1]:
            return "used in slices by a scan that another scan repeats"
        if 0 in counts(view, Slices):
            return "used in a scan without iterations"
        end = slices[-1] + 1 if slices else _leading(view)
        key = written(tuple(step for step in view[:end] if not _is_still(step)))
        before = found.get(key, Part(view[:end], (), ()))
        found[key] = Part(before.view, (*before.uses, number), (*before.rests, view[end:]))
    sliced = any(counts(part.view, Slices) for part in found.values())
    if len(found) > 1 or sliced:
        if disjoint([box(part.view, shape) for part in found.values()]):
            return list(found.values())
        if sliced:
            return f"used {len(seen)} times, in slices by a scan that another use may overlap"
    return [Part((), tuple(range(len(seen))), tuple(seen))]


def _is_still(step) -> bool:
    return not isinstance(step, Slices | Repeats) and step.primitive.name in STILL


def _leading(view: View) -> int:
    """How many steps are slices at the start of a view, also between those that move nothing."""
    end = 0
    for number, step in enumerate(view):
        if isinstance(step, Repeats | Slices) or not (_is_still(step) or step.primitive.name == "slice"):
            break
        if step.primitive.name == "slice":
            end = number + 1
    return end


def box(view: View, shape: tuple[int, ...]) -> Box:
    """The elements of a parameter of this shape that a view begins with."""
    found = [range(size) for size in shape]
    for step in view[: _leading(view)]:
        if step.primitive.name == "slice":
            starts, limits = step.params["start_indices"], step.params["limit_indices"]
            strides = step.params["strides"] or (1,) * len(starts)
            of_axes = zip(found, starts, limits, strides, strict=True)
            found = [elements[start:limit:stride] for elements, start, limit, stride in of_axes]
    return found


def disjoint(boxes: list[Box]) -> bool:
    """Whether no two boxes have an element in common; False if a box leaves elements out between others."""
    if any(elements.step != 1 for box in boxes for elements in box):
        return False

    def apart(one, other):
        return any(a.stop <= b.start or b.stop <= a.start for a, b in zip(one, other, strict=True))

    return all(apart(one, other) for number, one in enumerate(boxes) for other in boxes[:number])


def part_shape(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part of a parameter of this shape, with an axis for each `Slices`."""
    return jax.eval_shape(lambda x: through(view, x), jax.ShapeDtypeStruct(shape, jnp.float32)).shape


def joined(views: list[View], parts: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The array, float32, of this shape, of parts that share no element; 0 elsewhere."""
    whole = None
    for view, part in zip(views, parts, strict=True):
        elements, rest = box(view, shape), view[_leading(view) :]
        inside = jax.ShapeDtypeStruct(tuple(map(len, elements)), jnp.float32)
        if not all(isinstance(step, Slices) or _is_still(step) for step in rest):
            (part,) = jax.linear_transpose(lambda x, rest=rest: through(rest, x), inside)(part)
        if inside.shape == shape:
            return part
        whole = jnp.zeros(shape, jnp.float32) if whole is None else whole
        # In place, where a sum of padded parts would read all of them for every element.
        whole = lax.dynamic_update_slice(whole, part, [each.start for each in elements])
    assert whole is not None
    return whole
