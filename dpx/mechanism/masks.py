"""Masks of trainable layers, and masks of coordinates with an exact number of ones in the whole tree.

The largest elements are found by bisection on the bits instead of a sort: each of 32 passes counts the elements above a
bound, which fixes one bit of the smallest selected element.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpx.mechanism.base import Coordinates
from dpx.schedules import ScalarOrSchedule, value_at
from dpx.values import Tree, described, explain_misuse, leaf_path, list_first_few

# Added to a share before its product with d is rounded down, because 0.29 * 100 is 28.999... in floating point. Each is
# larger than the rounding error of a share of at most 1 in its precision.
FLOAT32_SLACK, FLOAT64_SLACK = 1e-7, 1e-12


def random_mask(seed: jax.Array, kept: jax.Array, like: Tree) -> Tree:
    """Draws a uniform mask with `kept` ones, bool in the shapes of `like`. seed: uint32 (2,). kept: int32 scalar."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return mask_of_largest(optax.tree.random_like(key, like, jax.random.bits, jnp.uint32), kept)


def apply_mask(tree: Tree, mask: Tree) -> Tree:
    """Multiplies `tree` by a bool `mask`, in the dtypes of `tree`. inf and NaN become NaN where the mask is False, so
    that the norm is not finite and the example contributes zero."""
    return jax.tree.map(lambda x, m: x * m.astype(x.dtype), tree, mask)


def count_coordinates_in_share(share: ScalarOrSchedule, step: jax.Array, like: Tree) -> jax.Array:
    """Returns floor(share d), at least 1, for d coordinates and the share at one step, as an int32 scalar."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    if callable(share):
        number = jnp.floor((value_at(share, step) + FLOAT32_SLACK) * size).astype(jnp.int32)
    else:
        number = jnp.int32(math.floor((plain_number(share) + FLOAT64_SLACK) * size))
    return jnp.clip(number, 1, size)


def complement_of_rate(rate: ScalarOrSchedule) -> ScalarOrSchedule:
    return (lambda step: 1 - value_at(rate, step)) if callable(rate) else 1 - plain_number(rate)


def plain_number(number: Any) -> Any:
    """Converts any number, such as a Fraction or a scalar array, to a float or a NumPy number of its precision."""
    return np.asarray(number)[()] if hasattr(number, "dtype") else float(number)


def mask_of_largest(numbers: Tree, kept: jax.Array) -> Tree:
    """Selects the `kept` largest elements of the whole tree, as bools shaped like `numbers`; ties go to the first ones.
    numbers: uint32 or float32. kept: int32 scalar, at least 1, may be traced."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_order_preserving_bits, numbers))
    starts = np.cumsum([0, *[leaf.size for leaf in leaves]])
    size = int(starts[-1])
    threshold = _kth_largest_word(leaves, kept)
    wanted = kept - _count_true([leaf > threshold for leaf in leaves])  # elements equal to the threshold
    places = [
        jnp.where(leaf == threshold, lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape) + int(start), size)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    last = _bisect_greatest(
        lambda bound: _count_true([place < bound for place in places]) < wanted, bits=size.bit_length()
    )
    return treedef.unflatten([(leaf > threshold) | (place <= last) for leaf, place in zip(leaves, places, strict=True)])


def kth_largest(numbers: Tree, kept: jax.Array) -> jax.Array:
    """Returns the smallest of the `kept` largest elements of nonnegative float32 arrays. kept: int32 scalar."""
    words = [_bit_pattern(leaf) for leaf in jax.tree.leaves(numbers)]
    return lax.bitcast_convert_type(_kth_largest_word(words, kept), jnp.float32)


def _kth_largest_word(words: list[jax.Array], kept: jax.Array) -> jax.Array:
    """Returns the smallest of the `kept` largest words, as a uint32 scalar."""
    return _bisect_greatest(lambda bound: _count_true([word >= bound for word in words]) >= kept, bits=32)


def _bit_pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _order_preserving_bits(x: jax.Array) -> jax.Array:
    """Maps the elements of `x` to uint32 words that sort in the same order."""
    if x.dtype == jnp.uint32:
        return x
    negative = _bit_pattern(x) >> 31 == 1
    return jnp.where(negative, ~_bit_pattern(x), _bit_pattern(x) | jnp.uint32(2**31))


def _bisect_greatest(fits: Callable[[jax.Array], jax.Array], *, bits: int) -> jax.Array:
    """Returns the greatest uint32 below 2^bits that fits. Zero must fit, and if a number fits, so must all below it."""

    def body(i, number):
        larger = number | (jnp.uint32(2 ** (bits - 1)) >> jnp.uint32(i))
        return jnp.where(fits(larger), larger, number)

    return lax.fori_loop(0, bits, body, jnp.uint32(0))


def _count_true(where: list[jax.Array]) -> jax.Array:
    """Counts the True elements, as an int32 scalar. Sums up to 2^24 are exact in float32, which is faster on a CPU."""
    dtypes = [jnp.float32 if w.size < 2**24 else jnp.int32 for w in where]
    return sum((jnp.sum(w, dtype=d).astype(jnp.int32) for w, d in zip(where, dtypes, strict=True)), jnp.int32(0))


PRINTED = 6  # paths in the printed pipeline, and in a message


@explain_misuse
def trainable(*, mask: Tree | Callable[[str], bool]) -> Coordinates:
    """Trains only the layers where `mask` is True; the rest get no gradient, no noise and no update.

    The transforms of a `dpx.chain` around the result see only the trainable layers. So weight decay and momentum do not
    move the frozen layers, which have no optimizer state either.

    mask: a pytree prefix of the parameters, with Python bools; or a function that says whether a path is trainable,
        such as `lambda path: "lora" in path` for the path "encoder/layer_0/lora_a/kernel".
    Raises ValueError if a value is not a Python bool or none is True; `init` raises it if `mask` is not a prefix. Do
    not use optax.masked instead: it lets raw per-example gradients of the masked layers through.
    """
    by_path = callable(mask) and jax.tree_util.all_leaves([mask])
    words = "those whose path the given function accepts"
    if not by_path:
        _require_one_trained(mask)
        kept = [leaf_path(path) for path, keep in jax.tree_util.tree_leaves_with_path(mask) if keep]
        words = list_first_few(kept, PRINTED) or "all layers"
    all_kept = not by_path and all(jax.tree.leaves(mask))

    def trainable_flags(tree: Tree) -> Tree:
        """Returns a tree like `tree`, True where a leaf is trainable."""
        if by_path:
            flags = jax.tree_util.tree_map_with_path(lambda path, _: mask(leaf_path(path)), tree)
            _require_one_trained(flags)
            return flags
        try:
            return jax.tree.map(lambda keep, part: jax.tree.map(lambda _: keep, part), mask, tree)
        except ValueError as error:
            raise ValueError(f"mask must be a pytree prefix of the parameters: {error}") from error

    def init(params):
        trainable_flags(params)
        return ()

    def encode(grad, state):
        return jax.tree.map(lambda keep, leaf: leaf if keep else None, trainable_flags(grad), grad)

    def decode(released, state, like):
        def fill(keep, leaf, shape):
            return leaf if keep else jnp.zeros(shape.shape, shape.dtype)

        return jax.tree.map(fill, trainable_flags(like), released, like), state

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name=f"keep the gradients of the trainable layers: {words}",
        undo="" if all_kept else "zeros for the other layers, which optax transforms do not see",
        supports_ghost_norms=True,
        fixed=True,
        transposed=True,
    )


def _require_one_trained(flags: Tree):
    """Raises ValueError unless all leaves are Python bools and at least one is True."""
    found = [(leaf_path(path), flag) for path, flag in jax.tree_util.tree_leaves_with_path(flags)]
    for path, flag in found:
        if not isinstance(flag, bool):
            raise ValueError(
                f"mask must give Python bools (public constants), got {described(flag)} for {path!r}. It is a tree of "
                "them, or a function of the path such as lambda path: 'head' in path"
            )
    if not any(flag for _, flag in found):
        paths = list_first_few([path for path, _ in found], PRINTED) or described(flags)
        raise ValueError(f"mask must leave at least one layer trainable, got False for all of: {paths}")
