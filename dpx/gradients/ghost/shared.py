"""The norm for a parameter that the loss uses several times, such as a tied embedding.

Its gradient is a sum over the uses u, sum_u G_u with G_u = A_u^T B_u. Its norm needs, for every pair of uses,

    <G_u, G_v> = sum_st (a_us . a_vt)(b_us . b_vt).

This holds if both uses see the elements of the parameter in the same order. If one use sees them transposed, A_v and
B_v change places. If the uses see different elements, the product is 0. Other pairs are not followed.
"""

import enum
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.contributions import repeated
from dpx.gradients.ghost.norms import TINY, diagonal, in_range, inner, roundings, total, uncancelled, unit
from dpx.gradients.ghost.rules import Site


class Relation(enum.Enum):
    """How a second group of uses sees the elements that a first one sees."""

    SAME = enum.auto()
    TRANSPOSED = enum.auto()
    DISJOINT = enum.auto()


class UseGroup(NamedTuple):
    """Uses that see the elements of the parameter in the same order. They count as one use with more positions.

    sites: numbers of the uses
    sizes: (K, T, I, O) as in a `Site`; T is the sum over the uses
    lookup: bool, True if the uses look up rows of the parameter
    """

    sites: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    lookup: bool


class Sharing(NamedTuple):
    """How the uses of one parameter see its elements.

    use_groups: the groups of uses. relations: by pair (i, j) of groups, i < j
    """

    use_groups: tuple[UseGroup, ...]
    relations: Mapping[tuple[int, int], Relation]


def find_sharing(sites: tuple[Site, ...], shape: tuple[int, ...]) -> Sharing | str:
    """How the uses of a parameter of this shape see its elements, or the reason why it cannot be followed."""
    with jax.ensure_compile_time_eval():
        elements: Any = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)  # NumPy: views, not copies
        seen = [np.asarray(site.arrange(elements)) for site in sites]
    by_view: list[list[int]] = []
    for number, (site, view) in enumerate(zip(sites, seen, strict=True)):
        kernels, _, fan_in, fan_out = site.sizes
        if view.shape != (kernels, fan_in, fan_out):
            return f"used {len(sites)} times, once at an index that the data chooses"
        alike = (numbers for numbers in by_view if sites[numbers[0]].lookup == site.lookup)
        group = next((numbers for numbers in alike if _equal(seen[numbers[0]], view)), None)
        if group is None:
            by_view.append(group := [])
        group.append(number)
    use_groups, relations = [], {}
    for numbers in by_view:
        kernels, _, fan_in, fan_out = sites[numbers[0]].sizes
        positions = sum(sites[number].sizes[1] for number in numbers)
        lookup = sites[numbers[0]].lookup
        use_groups.append(UseGroup(tuple(numbers), (kernels, positions, fan_in, fan_out), lookup))
    for i, j in itertools.combinations(range(len(use_groups)), 2):
        relation = _relation(seen[use_groups[i].sites[0]], seen[use_groups[j].sites[0]])
        if relation is None:
            return f"used {len(sites)} times, by views that overlap in part"
        relations[i, j] = relation
    return Sharing(tuple(use_groups), relations)


def _relation(first: np.ndarray, second: np.ndarray) -> Relation | None:
    if _equal(first, second):
        return Relation.SAME
    if _equal(first, second.transpose(0, 2, 1)):
        return Relation.TRANSPOSED
    return Relation.DISJOINT if np.intersect1d(first, second).size == 0 else None


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays are equal; two views of the same memory are not read, which is slow for large embeddings."""
    return first.__array_interface__ == second.__array_interface__ or np.array_equal(first, second)


def gram_operations(sharing: Sharing) -> float:
    """Floating-point operations of the Gram matrices of the norm for one example."""
    total = 0.0
    for i, j in itertools.combinations_with_replacement(range(len(sharing.use_groups)), 2):
        first, second = sharing.use_groups[i], sharing.use_groups[j]
        if sharing.relations.get((i, j)) is Relation.DISJOINT:
            continue
        kernels, positions, fan_in, fan_out = first.sizes
        # A lookup multiplies only its B, because comparing or taking indices costs almost nothing.
        width = fan_out if first.lookup or second.lookup else fan_in + fan_out
        total += 2 * kernels * positions * second.sizes[1] * width
    return total


def norm(sharing: Sharing, matrices: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """|sum_u A_u^T B_u| for one example, float32 (), with a bound on its rounding error as in `norms.gram`.

    matrices: A_u and B_u of every use, as a `Site` gives them.
    """
    sides, size = _balanced_sides(sharing, matrices)
    squared, diagonals = jnp.float32(0), jnp.float32(0)
    for i, (a, b) in enumerate(sides):
        for j in range(i, len(sides)):
            relation = Relation.SAME if i == j else sharing.relations[i, j]
            if relation is Relation.DISJOINT:
                continue
            left, right = sides[j] if relation is Relation.SAME else sides[j][::-1]
            grams = _gram(a, left) * _gram(b, right)
            squared += (1 if i == j else 2) * total(grams, 3)
            if i == j:
                diagonals += total(jnp.sqrt(diagonal(grams)), 2)
    longest = max(roundings(b.shape[-1]) + (roundings(a.shape[-1]) if a.ndim > 1 else 0) for a, b in sides)
    positions = sum(group.sizes[1] for group in sharing.use_groups)
    kernels, pairs = max(group.sizes[0] for group in sharing.use_groups), len(sides) ** 2
    rounded, added = longest + 2 * positions + kernels + pairs, positions + len(matrices)
    return size * uncancelled(squared, diagonals**2, roundings=rounded, positions=added)


def _balanced_sides(sharing: Sharing, matrices: list[tuple[jax.Array, jax.Array]]):
    """A and B of every group, rescaled as in `norms.balanced`, and the size, float32 (), that divides all products."""
    measured = []
    for group in sharing.use_groups:
        a = jnp.concatenate([matrices[number][0] for number in group.sites], axis=0 if group.lookup else 1)
        bs = [matrices[number][1] for number in group.sites]
        b = jnp.concatenate(bs, axis=0)[None] if group.lookup else jnp.concatenate(bs, axis=1)
        b, size = unit(jnp.where((a >= 0)[None, :, None], b, 0) if group.lookup else b)
        if group.lookup:
            size_a = jnp.ones_like(size)
        else:
            a, size_a = unit(a)
        measured.append((a, b, in_range(size_a, size)))
    largest = functools.reduce(jnp.maximum, (jnp.max(size, initial=0) for _, _, size in measured), TINY)
    return [(a, b * repeated(size / largest, b.shape)) for a, b, size in measured], largest


def _gram(left: jax.Array, right: jax.Array) -> jax.Array:
    """The inner products, float32 (K, S, T), of the rows of (K, S, n) and (K, T, n).

    Indices, int32 (S,), mean the rows, (1, S, n), of a one-hot matrix; a negative index means a row of zeros.
    """
    if left.ndim == right.ndim == 1:
        return ((left[:, None] == right[None, :]) & (left >= 0)[:, None]).astype(jnp.float32)[None]
    if left.ndim == 1:
        picked = jnp.take(right, left, axis=2, mode="fill", fill_value=0)
        return jnp.where(left >= 0, picked, 0).transpose(0, 2, 1)
    if right.ndim == 1:
        return _gram(right, left).transpose(0, 2, 1)
    return inner(left, right)
