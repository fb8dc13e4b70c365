"""Data for checking the contract: ordinary and hostile gradients, and losses that have them as gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpx.keys import is_key
from dpx.values import Tree, unflatten_vectors

ROWS = 6  # rows in a batch
RANDOM = 8  # gradients far above any clip norm, whose contributions reveal the clip norm
SWEEP = np.geomspace(1e-3, 1e5, 33)  # dense, so that every size is close to one that is tried
BASIS = 64  # at most this many coordinates are tried alone
SIZES = (0, 1e-30, 1e-6, 0.1, 1, 5e4, 3e38, math.nan, math.inf, -math.inf)
LOW = (np.float16, jnp.bfloat16)
VALUES = (0.5, -1.0, 0.0, 2.0, -0.125, 32.0, 1.0)  # parameter values, exact in 16 bits


def default_params() -> Tree:
    """Default float32 parameters with 0 to 4 axes, two of equal shape, and values of several sizes and signs."""
    shapes = {"kernel": (4, 3), "bias": (3,), "scale": (), "first": (2, 1, 3, 2), "second": (2, 1, 3, 2)}
    return extreme_values_like({name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def extreme_values_like(params: Tree, first: int = 0) -> Tree:
    """Parameters of sizes and signs from VALUES, in the shapes and dtypes of `params`, whose values are not read."""
    leaves, structure = jax.tree.flatten(params)
    numbers = [(np.arange(leaf.size) + place + first).reshape(leaf.shape) for place, leaf in enumerate(leaves)]
    values = [np.array(VALUES)[n % len(VALUES)].astype(p.dtype) for n, p in zip(numbers, leaves, strict=True)]
    return structure.unflatten(values)


def normal_gradients(params: Tree, seed: int, scale: float = 1.0, rows: int = ROWS) -> Tree:
    """Per-example gradients with normal values, float32, like `params` with `rows` examples on axis 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: np.asarray(scale * rng.normal(size=(rows, *p.shape)), np.float32), params)


def loud_gradients(params: Tree) -> Tree:
    """Gradients, float32 (rows, ...): RANDOM far above any clip norm, larger ones, many sizes, single coordinates."""
    ordinary = [normal_gradients(params, 21, 1e6, rows=RANDOM), normal_gradients(params, 22, 1e12, rows=RANDOM)]
    ordinary = joined_rows([*ordinary, *[normal_gradients(params, 23, size, rows=1) for size in SWEEP]])
    size = sum(p.size for p in jax.tree.leaves(params))
    chosen = np.linspace(0, size - 1, min(size, BASIS)).astype(int)
    basis = np.zeros((len(chosen), size), np.float32)
    basis[np.arange(len(chosen)), chosen] = 1e6 * (-1.0) ** np.arange(len(chosen))
    return joined_rows([ordinary, unflatten_vectors(basis, params)])


def hostile_gradients(params: Tree) -> tuple[Tree, Tree, Tree]:
    """Gradients of all sizes, float32 (rows, ...), and two copies with 0 and 1 in place of nonfinite leaves.

    Each of SIZES fills the whole gradient, or one leaf among ordinary values. Every gradient occurs three times: in
    float32, and rounded to float16 and to bfloat16.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda g: g[0], normal_gradients(params, 1, rows=1)))
    rows = []
    for size in SIZES:
        extreme = [np.sign(leaf) * np.float32(size) for leaf in leaves]
        rows += [extreme] + [[*leaves[:n], extreme[n], *leaves[n + 1 :]] for n in range(len(leaves))]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    with np.errstate(over="ignore"):  # 3e38 is infinite in float16
        stacked = [np.concatenate([s, *[s.astype(dtype).astype(np.float32) for dtype in LOW]]) for s in stacked]

    def filled(value):
        finite = [np.isfinite(s).reshape(len(s), -1).all(1).reshape(-1, *[1] * (s.ndim - 1)) for s in stacked]
        return [np.where(rows, s, np.float32(value)) for rows, s in zip(finite, stacked, strict=True)]

    return tuple(structure.unflatten(leaves) for leaves in (stacked, filled(0), filled(1)))


def hostile_examples(examples: Tree) -> Tree:
    """A user's examples, repeated with their floats scaled by sizes from 0 to infinity. Integers stay unchanged."""

    def scaled(leaf, size):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        with np.errstate(all="ignore"):
            return (np.asarray(leaf, np.float32) * np.float32(size)).astype(leaf.dtype)

    return joined_rows(
        [jax.tree.map(lambda leaf, size=size: scaled(leaf, size), examples) for size in (1, *SIZES, 1e6)]
    )


def with_garbage_row(rows: Tree, position: int) -> Tree:
    """Replaces the floats of the row at `position` by NaN, 1e30 or -inf. Integers stay unchanged."""
    value = (math.nan, 1e30, -math.inf)[position % 3]

    def replace_leaf(leaf):
        leaf = np.array(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf[position] = value
        return leaf

    return jax.tree.map(replace_leaf, rows)


def matrix_product_loss(params: Tree, example: Tree) -> jax.Array:
    """A loss whose gradient is in the example, by a product that ghost norms support: A^T B with A the identity."""
    ones, grad = example
    parts = jax.tree.map(lambda p, a, g: jnp.sum((a @ as_matrix(p)) * as_matrix(g)), params, ones, grad)
    return jnp.asarray(sum(jax.tree.leaves(parts)))


def matrix_product_examples(params: Tree, grads: Tree) -> Tree:
    """Converts gradients (B, ...) to examples of `matrix_product_loss`."""
    rows = len(jax.tree.leaves(grads)[0])
    ones = jax.tree.map(lambda p: jnp.eye(as_matrix(p).shape[0]), params)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), ones), grads


def linear_loss(params: Tree, example: Tree) -> jax.Array:
    """A loss whose gradient is the example."""
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g), params, example))))


def as_matrix(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.ndim == 2 else leaf.reshape(1, -1)


def oscillating_values(size: int, height: float, start: float = 0.0) -> np.ndarray:
    """Values of up to this height, different on every coordinate; float32 (size,)."""
    return (height * np.cos(start + np.arange(size))).astype(np.float32)


def zeros_like(tree: Tree) -> Tree:
    """Zeros in the shapes of arrays, or of their ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def joined_rows(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def take_rows(tree: Tree, rows: np.ndarray | slice) -> Tree:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree)


def flattened_leaves(tree: Tree, axes: int = 0) -> np.ndarray:
    """Flattens and joins all leaves along one last axis, float64, after the first `axes` axes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=-1)


def is_wide_float(leaf: jax.Array) -> bool:
    """Whether a leaf holds floats of at least 32 bits, so that rounding does not hide changes."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize >= 4


def keys_as_bits(tree: Tree) -> Tree:
    """Replaces the PRNG keys in a tree by their bits."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def wide_floats(tree: Tree) -> jax.Array:
    """All floats of at least 32 bits in a tree, float32 (o,)."""
    leaves = [leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves(tree) if is_wide_float(leaf)]
    return jnp.concatenate(leaves)


def require_close(found: Tree, expected: Tree, tolerance: float = 1e-6) -> float:
    """Returns the largest difference, relative to the largest value. Integers and bools must be equal.

    16-bit values may differ by rounding. Raises AssertionError if a difference exceeds the tolerance or the structures
    differ.
    """
    _require(jax.tree.structure(found) == jax.tree.structure(expected), "another structure")
    lefts, rights = jax.tree.map(np.asarray, keys_as_bits((jax.tree.leaves(found), jax.tree.leaves(expected))))
    largest = max([_largest_finite(leaf) for leaf in rights if leaf.dtype.kind == "f"], default=0)
    most = 0.0
    for one, other in zip(lefts, rights, strict=True):
        if other.dtype.kind in "biu":
            _require(np.array_equal(one, other), "another whole number")
        elif one.size:
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            one, other, rough = one.astype(np.float64), other.astype(np.float64), other.dtype.itemsize < 4
            allowed = max(tolerance, 2.0**-6) if rough else tolerance
            with np.errstate(invalid="ignore"):  # inf - inf
                difference = np.where(same, 0, np.abs(one - other)).max()
            _require(difference <= allowed * (largest + _largest_finite(other)), f"{difference:.2g} apart")
            most = max(most, float(difference / max(largest, 1e-30)))
    return most


def _largest_finite(leaf: np.ndarray) -> float:
    return float(np.abs(leaf[np.isfinite(leaf)]).max(initial=0))


def _require(holds: bool, words: str):
    """Does what `assert` does, and also under `python -O`."""
    if not holds:
        raise AssertionError(words)
