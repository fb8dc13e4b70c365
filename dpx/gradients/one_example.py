"""Rows of a batch as a per-example function sees them: the example, and its own key if the function wants one.

A key comes from the "example" stream of the mechanism's key, with the step and the row's position in the batch folded
in. So microbatches, chunks of a batch and devices do not change it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dpx import keys
from dpx.mechanism import Mechanism
from dpx.sampling.data import batch_size
from dpx.states.record import ReleaseState
from dpx.values import MOST_SHAPES, Tree, described, find_only_node, leaf_path, warn_user
from dpx.xla import jaxprs

LARGE_CONSTANTS = 2**24  # bytes
INSTEAD = "pass them as parameters that dpx.coordinates.trainable freezes: docs/fine_tuning.md#a-large-base"

USERS = "An item of dpx.UserData is (examples, included), with all rows of one user on axis 0"
OF_USERS = "docs/loops.md#users-instead-of-examples"
WHERE = (
    "It must take (params, example), or (params, example, key) if with_key=True, where the example has no batch axis: "
    "docs/loops.md#by-hand"
)
BATCH_NORM = (
    "the model keeps running averages (BatchNorm), which a private step cannot update: use GroupNorm, or for nnx "
    "dpx.flax.replace_batch_norm(model): docs/flax.md#batchnorm"
)
NO_PARAMS = "Linen's apply takes all variables: model.apply({'params': params}, x)"
STORED_KEYS = (
    "The nnx module keeps its random numbers: merge it with copy=True and call nnx.reseed(module, dropout=key): "
    "docs/flax.md#nnx"
)
TRACED = (
    "jax traces the loss before it knows the numbers: compute with jax.numpy in place of numpy, float(), int() and "
    ".item(), and with jnp.where in place of a Python if"
)
LABELS = "Labels must be integers: labels.astype(int)"


def rows_with_keys(
    mechanism: Mechanism, state: Tree, examples: Tree, *, with_key: bool, first: jax.Array | int = 0
) -> tuple:
    """Returns (examples,), or (examples, keys) with one PRNG key for each of the B examples, (B,). first: int (), the
    position of the first row in the whole batch, if the examples are a chunk. Refuses a state that no mechanism
    made."""
    size, step = batch_size(examples), find_only_node(state, ReleaseState, "mechanism's state").step
    if not with_key:
        return (examples,)
    # Anyone may know what the loss draws, because an example's contribution is bounded whatever the loss draws.
    key = keys.public_key(keys.stream(mechanism.key, "example", step))
    positions = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(first).astype(jnp.uint32)
    return examples, jax.vmap(jax.random.fold_in, (None, 0))(key, positions)


def shapes_of_row(rows: tuple) -> tuple:
    shapes = jax.eval_shape(lambda rows: rows, rows)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=leaf.weak_type), shapes)


def example_in_words(example: Tree) -> str:
    """Describes the shapes and dtypes of one example, for a note on an error in the user's function."""
    leaves = jax.tree_util.tree_leaves_with_path(example)
    shapes = [f"{leaf_path(path)} {leaf.dtype}{list(leaf.shape)}".strip() for path, leaf in leaves]
    words = ", ".join(shapes[:MOST_SHAPES]) + ", ..." * (len(shapes) > MOST_SHAPES)
    return words + (f". {USERS}: see {OF_USERS}" if looks_like_user_data(example) else "")


def looks_like_user_data(example: Tree) -> bool:
    """Whether an example has the form of an item of `dpx.UserData`."""
    mask = example[1] if isinstance(example, tuple) and len(example) == 2 else None
    return getattr(getattr(mask, "dtype", None), "kind", "") == "b"


@contextlib.contextmanager
def explaining_user_data_error(called: str, of_row: Callable, params: Tree, row: tuple) -> Iterator[None]:
    """Replaces an error by a ValueError if the function takes one record but `row` holds all records of a user."""
    try:
        yield
    except Exception as error:
        example, *key = row
        if looks_like_user_data(example):
            record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), example[0])
            takes_record = False
            with contextlib.suppress(Exception):
                takes_record = bool(jax.tree.leaves(jax.eval_shape(of_row, params, (record, *key))))
            if takes_record:
                words = (
                    f"the {called} must take all rows of one user, but it takes one row, and dpx.UserData were given"
                )
                raise ValueError(f"{words}. {USERS}: average over those that are included, {OF_USERS}") from error
        raise


def function_of_row(function: Callable, *, has_aux: bool) -> Callable[..., tuple[Tree, Tree]]:
    """Turns `function(params, example)` or (params, example, key) into (params, row) -> (result, aux); aux may be None.
    Raises ValueError if it is not a function, and at tracing if `has_aux` is True and the result is not a pair."""
    if not callable(function):
        raise ValueError(f"the loss or the update must be a function of (params, example), got {described(function)}")

    def of_row(params, row):
        result = function(params, *row)
        if not has_aux:
            return result, None
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(f"with has_aux=True, the function must return (value, aux), got {described(result)}")
        return result

    return of_row


def value_and_gradient(function: Callable, *, has_aux: bool = False) -> Callable:
    """Like `jax.value_and_grad`, but the gradient of integers, which only frozen parameters may be, is float32 0."""
    both = jax.value_and_grad(function, has_aux=has_aux, allow_int=True)

    def with_zeros(params, *arguments):
        value, grad = both(params, *arguments)
        return value, jax.tree.map(lambda g: jnp.zeros(g.shape) if g.dtype == jax.dtypes.float0 else g, grad)

    return with_zeros


@contextlib.contextmanager
def adding_note(called: str, example: Callable[[], Tree]) -> Iterator[None]:
    """Adds the shapes of an `example` and the likely cause to an error of the user's function, named `called`."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith("dpx: the ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"dpx: the {called} was called with one example: {example_in_words(example())}")
            error.add_note(_likely_cause(error, example()))
        raise


def is_batch_norm_error(error: Exception) -> bool:
    """Whether this error says that Flax (nnx or Linen) will not change the running averages of a BatchNorm."""
    return any(word in str(error) for word in ("BatchStat", "batch_stats"))


def _likely_cause(error: Exception, example: Tree) -> str:
    if is_batch_norm_error(error):
        return BATCH_NORM
    if "Cannot mutate Rng" in str(error):
        return STORED_KEYS
    if type(error).__name__ in ("ScopeCollectionNotFound", "ApplyScopeInvalidVariablesTypeError"):  # of Flax
        return NO_PARAMS
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return TRACED
    scalars = [leaf for leaf in jax.tree.leaves(example) if leaf.shape == ()]
    if "integer" in str(error) and any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in scalars):
        return LABELS
    return WHERE


def warn_of_constants(closed: Any, params: Tree, row: tuple) -> None:
    """Warns if the loss closes over large arrays, because the program of a step would hold them as constants. closed:
    the closed jaxpr of the loss, in which arguments of an outer `jax.jit` are not constants."""
    del params, row
    found = [array for array in jaxprs.closure_arrays(closed) if not isinstance(array, jax.core.Tracer)]
    size = sum(getattr(array, "nbytes", 0) for array in found)
    if size >= LARGE_CONSTANTS:
        words = f"the loss closes over {size / 2**20:.0f} MiB of arrays, which become constants of every program of it"
        warn_user(f"{words}: it compiles slowly and is as large as they are. Instead, {INSTEAD}")
