"""Views: what moves the elements of a parameter between the parameter and a use of it; and the parts that are used.

A stacked parameter whose layers a scan takes one after another is used in slices, and so is one that a loop in Python
indexes. Each slice counts as a parameter of its own: the square of the parameter's norm is the sum of the squares of
the norms of its parts, and a coordinate of its sum is a coordinate of one part's.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# Equations of one operand that move elements, or drop some, but copy none: a cotangent has one norm on both sides.
VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type", "copy", "rev", "slice"}
VIEWS |= {"broadcast_in_dim", "sharding_constraint"}
STILL = ("convert_element_type", "copy")  # those that move nothing


class Moved(NamedTuple):
    """A step of a view: equation number `number` moves the elements."""

    equation: core.JaxprEqn
    number: int

    @property
    def name(self) -> str:
        return self.equation.primitive.name


class Slices(NamedTuple):
    """From here on, a view is of one slice along axis 0 in each of `count` iterations of a scan."""

    count: int


class Repeats(NamedTuple):
    """From here on, a view is of the same elements in each of `count` iterations of a scan."""

    count: int


View = tuple[Moved | Slices | Repeats, ...]  # in order
Box = list[range]  # the elements of a part that begins with slices, by axis


def is_view(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name not in VIEWS or len(equation.invars) != 1:
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    real = jnp.issubdtype(before.dtype, jnp.floating) and jnp.issubdtype(after.dtype, jnp.floating)
    return real and after.size <= before.size


def spelled_out(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """An equation that cuts its operand into parts, as one view for each part; None for any other equation."""
    if equation.primitive.name not in ("split", "unstack"):
        return None
    aval: Any = equation.invars[0].aval
    axis, sizes = equation.params["axis"], map(int, equation.params.get("sizes", ()))
    ends = list(itertools.accumulate(sizes, initial=0))

    def parts(x):
        if equation.primitive.name == "split":
            return [lax.slice_in_dim(x, start, end, axis=axis) for start, end in itertools.pairwise(ends)]
        return [lax.index_in_dim(x, place, axis, keepdims=False) for place in range(x.shape[axis])]

    return jax.make_jaxpr(parts)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def through(view: View, leaf: Any) -> Any:
    """`leaf` as its use sees it, in its own dtype; an axis for each `Slices` comes first."""
    for number, step in enumerate(view):
        if isinstance(step, Slices):
            return jax.vmap(lambda each, rest=view[number + 1 :]: through(rest, each))(leaf)
        if isinstance(step, Repeats) or step.name == "convert_element_type":
            continue
        if step.name == "transpose":  # of a NumPy array, the same memory in another order
            leaf = leaf.transpose(step.equation.params["permutation"])
        else:
            leaf = step.equation.primitive.bind(leaf, **step.equation.params)
    return leaf


def counts(view: View, kind: type) -> tuple[int, ...]:
    """The numbers of iterations of the `Slices`, or of the `Repeats`, of a view."""
    return tuple(step.count for step in view if isinstance(step, kind))


def written(view: View) -> tuple[str, ...]:
    """A view without the names of its variables; equal for views that move elements in the same way."""
    return tuple(equation_written(step.equation) if isinstance(step, Moved) else str(step) for step in view)


def equation_written(equation: core.JaxprEqn) -> str:
    """An equation without the names of its variables."""
    types = [str(v.aval) for v in (*equation.invars, *equation.outvars)]
    return f"{equation.primitive} {types} {equation.params}"


class Part(NamedTuple):
    """A part of a parameter, which no other part overlaps.

    view: from the parameter to the part; it ends with the last `Slices`. uses: the numbers of those that are in the
    part. rests: from the part to each of them. ends: the equations that end the view, if it is of slices by equations
    """

    view: View
    uses: tuple[int, ...]
    rests: tuple[View, ...]
    ends: tuple[int, ...] = ()


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
        ends = {step.number for step in view[max(end - 1, 0) : end] if isinstance(step, Moved)}
        ends = tuple(sorted(ends.union(before.ends)))
        found[key] = Part(before.view, (*before.uses, number), (*before.rests, view[end:]), ends)
    sliced = any(counts(part.view, Slices) for part in found.values())
    if len(found) > 1 or sliced:
        if disjoint([box(part.view, shape) for part in found.values()]):
            return list(found.values())
        if sliced:
            return f"used {len(seen)} times, in slices by a scan that another use may overlap"
    return [Part((), tuple(range(len(seen))), tuple(seen))]


def _is_still(step) -> bool:
    return isinstance(step, Moved) and step.name in STILL


def _leading(view: View) -> int:
    """How many steps are slices at the start of a view, also between those that move nothing."""
    end = 0
    for number, step in enumerate(view):
        if not isinstance(step, Moved) or step.name not in (*STILL, "slice"):
            break
        if step.name == "slice":
            end = number + 1
    return end


def box(view: View, shape: tuple[int, ...]) -> Box:
    """The elements of a parameter of this shape that a view begins with."""
    found = [range(size) for size in shape]
    for step in view[: _leading(view)]:
        if isinstance(step, Moved) and step.name == "slice":
            params = step.equation.params
            starts, limits = params["start_indices"], params["limit_indices"]
            strides = params["strides"] or (1,) * len(starts)
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
    boxes = [box(view, shape) for view in views]
    parts = [_in_box(*each) for each in zip(views, parts, boxes, strict=True)]
    axes = [axis for axis in range(len(shape)) if any(len(each[axis]) != shape[axis] for each in boxes)]
    if not axes:
        return parts[0]
    if len(axes) == 1:  # a sum of padded parts would compile for long, and read all of them for every element
        (axis,) = axes
        order = sorted(range(len(boxes)), key=lambda number: boxes[number][axis].start)
        if [place for number in order for place in boxes[number][axis]] == list(range(shape[axis])):
            return jnp.concatenate([parts[number] for number in order], axis)
    whole = jnp.zeros(shape, jnp.float32)
    for each, part in zip(boxes, parts, strict=True):
        whole = lax.dynamic_update_slice(whole, part, [elements.start for elements in each])
    return whole


def _in_box(view: View, part: jax.Array, elements: Box) -> jax.Array:
    """A part in the order of the parameter."""
    rest = view[_leading(view) :]
    if all(isinstance(step, Slices) or _is_still(step) for step in rest):
        return part
    inside = jax.ShapeDtypeStruct(tuple(map(len, elements)), jnp.float32)
    (part,) = jax.linear_transpose(lambda x: through(rest, x), inside)(part)
    return part
