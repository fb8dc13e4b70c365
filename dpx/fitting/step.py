"""One compiled step of a run: gradient, noise and optimizer. It reuses the memory of the parameters it replaces.

Arrays that the functions close over become arguments of the program, not constants. So neither the program nor any
cache of it holds a noise key, and runs with different seeds share one program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from dpx import keys
from dpx.audit.setup import warn_of_loss
from dpx.gradients import Unreleased, private_updates, private_updates_in_chunks
from dpx.gradients.clipped_gradients import with_loss_inspector
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch
from dpx.states.reading import steps_taken
from dpx.values import Tree


class Carry(NamedTuple):
    """What one step passes to the next. params: the parameters. state: the optimizer state."""

    params: Tree
    state: Tree

    @property
    def steps_made(self) -> int:
        """The number of steps made, as counted by the state."""
        return steps_taken(self.state)


class BatchLosses(NamedTuple):
    """What a step learns about its batch. NOT private.

    mean: the mean loss, a float32 scalar. counts: int32 scalars: how many rows are included, how many of them have a
        finite loss, and how many a gradient in range.
    unreleased: the `Unreleased` values, or None. included: bool (B,), or None.
    """

    mean: jax.Array
    counts: tuple[jax.Array, jax.Array, jax.Array]
    unreleased: Unreleased | None
    included: jax.Array | None


def first_carry(params: Tree, optimizer: Mechanism, sharding: Any) -> Carry:
    """Returns the carry before the first step, with copies of the arrays.

    sharding: the batches' sharding. If it has a mesh, all other arrays are replicated over the mesh. This happens after
        `init`, which may combine arrays: outside jit, those on Explicit axes cannot be combined with others.
    """

    def replicated_leaf(tree):
        return jax.tree.map(lambda leaf: replicated(leaf, sharding), tree)

    params = fresh_copy(params)
    if not all(leaf.is_fully_addressable and len(leaf.devices()) == 1 for leaf in jax.tree.leaves(params)):
        params = replicated_leaf(params)
    return replicated_leaf(Carry(params, fresh_copy(optimizer.init(params))))


def fresh_copy(tree: Tree) -> Tree:
    """Copies the arrays of `tree`, without weak types, so that a step may reuse the memory of the copies."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True), tree)


def compiled_step(
    loss: Callable, optimizer: Mechanism, loss_at: Callable, carry: Carry, sharding: Any, options: dict, *, whole: bool
) -> Callable[[Carry, Batch], tuple[Carry, BatchLosses]]:
    """Returns the step for one batch, compiled once. The step deletes the arrays of the carry that it is given.

    carry: the carry before the first step, whose shardings every later one keeps on a mesh. whole: whether to return
        the values of every row.
    """
    gradient = with_loss_inspector(
        private_updates(loss, optimizer, sharding=sharding, **options), _warn_of_loss_once(optimizer)
    )

    def step(carry, batch):
        found = gradient(loss_at(carry.params, carry.state), batch, carry.state)
        total, counts = _sum_of_training_losses(found.unreleased, batch)
        mean = total / batch.included.sum(dtype=jnp.float32).clip(1)
        of_batch = BatchLosses(mean, counts, found.unreleased, batch.included)
        carry = Carry(optax.apply_updates(carry.params, found.updates), found.state)
        return carry, of_batch if whole else of_batch._replace(unreleased=None, included=None)

    shardings = _carry_shardings(carry, sharding), None
    return CompiledByShapes(step, donate_argnums=(0,), out_shardings=shardings, sharding=sharding)


def compiled_step_in_chunks(
    loss: Callable, optimizer: Mechanism, loss_at: Callable, carry: Carry, sharding: Any, options: dict
) -> Callable[[Carry, Iterator[Batch]], tuple[Carry, BatchLosses]]:
    """Like `compiled_step`, for a batch in chunks: compiles a function that adds a chunk and one that releases sums."""
    in_chunks = private_updates_in_chunks(loss, optimizer, sharding=sharding, **options)
    in_chunks = with_loss_inspector(in_chunks, _warn_of_loss_once(optimizer))

    def add_chunk(carry, chunk, sums, total):
        sums = in_chunks.add(loss_at(carry.params, carry.state), chunk, carry.state, sums)
        return sums._replace(unreleased=None), optax.tree.add(total, _sum_of_training_losses(sums.unreleased, chunk))

    def release_sums(carry, sums, total):
        updates, state = in_chunks.release(loss_at(carry.params, carry.state), sums, carry.state)
        total, counts = total
        of_batch = BatchLosses(total / sums.unreleased_count.astype(jnp.float32).clip(1), counts, None, None)
        return Carry(optax.apply_updates(carry.params, updates), state), of_batch

    shardings = _carry_shardings(carry, sharding), None
    add_chunk = CompiledByShapes(add_chunk, donate_argnums=(2, 3), sharding=sharding)
    release_sums = CompiledByShapes(release_sums, donate_argnums=(0,), out_shardings=shardings, sharding=sharding)

    def step(carry, chunks):
        sums, total = None, (jnp.zeros((), jnp.float32), tuple(jnp.zeros((), jnp.int32) for _ in range(3)))
        for chunk in chunks:
            sums, total = add_chunk(carry, chunk, sums, total)
        return release_sums(carry, sums, total)

    return step


def _carry_shardings(carry: Carry, sharding: Any) -> Any:
    """The shardings of the carry on a mesh, which every step keeps; None lets jax choose."""
    return jax.tree.map(lambda leaf: leaf.sharding, carry) if isinstance(sharding, NamedSharding) else None


def _warn_of_loss_once(optimizer: Mechanism) -> Callable:
    """Returns a function that warns about the loss when a step is first traced."""
    looked = []

    def warn_once(*of_loss):
        if not looked:
            looked.append(warn_of_loss(optimizer, *of_loss))

    return warn_once


def _sum_of_training_losses(unreleased: Any, batch: Batch) -> tuple[jax.Array, Any]:
    """The sum of the losses of included rows, a float32 scalar; and `BatchLosses.counts`."""
    losses, rows = unreleased.losses.astype(jnp.float32), batch.included
    counted: Any = rows, jnp.isfinite(losses), unreleased.usable_rows()
    return jnp.sum(losses, where=rows), tuple(jnp.sum(each, where=rows, dtype=jnp.int32) for each in counted)


class CompiledByShapes:
    """A function of pytrees of arrays, compiled once for each set of shapes.

    A call deletes the arrays in the arguments `donate_argnums`. out_shardings: passed to `jax.jit`. sharding: that of
    the batches; if its mesh has no Explicit axes, arrays in the function's closure are replicated over it, once.
    """

    def __init__(
        self, function: Callable, *, donate_argnums: Sequence[int], out_shardings: Any = None, sharding: Any = None
    ):
        self.function, self.donate_argnums, self.out_shardings = function, donate_argnums, out_shardings
        self.sharding = sharding
        self.programs: dict[Any, tuple[Callable, list]] = {}  # programs and the closed-over arrays, by shapes

    def __call__(self, *arguments):
        if cast(Any, jax.config).jax_disable_jit:  # rounding a step differently would reuse its noise in another run
            with jax.disable_jit(False):
                return self(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        shapes = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self.programs:
            self.programs[shapes] = self.compile_for_shapes(arguments)
        program, closed_over = self.programs[shapes]
        return program(closed_over, *arguments)

    def compile_for_shapes(self, arguments: Any) -> tuple[Callable, list]:
        traced, results = jax.make_jaxpr(self.function, return_shape=True)(*arguments)

        def program(closed_over, *arguments):
            leaves = jax.core.eval_jaxpr(traced.jaxpr, closed_over, *jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(results), leaves)

        program.__name__ = self.function.__name__  # for profiles
        donated = tuple(1 + number for number in self.donate_argnums)
        compiled = jax.jit(program, donate_argnums=donated, out_shardings=self.out_shardings)
        closed_over = [jnp.asarray(array) for array in traced.consts]
        # Explicit axes are part of the arrays' types, which must stay as traced.
        if isinstance(self.sharding, NamedSharding) and self.sharding.mesh.explicit_axes:
            return compiled, closed_over
        return compiled, [replicated(array, self.sharding) for array in closed_over]


def replicated(array: jax.Array, sharding: Any) -> jax.Array:
    """Replicates `array` over the mesh of `sharding`, unless there is no mesh or the array is already on it.

    If the mesh spans several processes, a local array must have the same values in each of them.
    """
    if not isinstance(sharding, NamedSharding) or getattr(array.sharding, "mesh", None) == sharding.mesh:
        return array
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    if sharding.is_fully_addressable or not array.is_fully_addressable:
        return jax.device_put(array, everywhere)
    if keys.is_key(array):
        return jax.random.wrap_key_data(
            replicated(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array)
        )
    numbers = np.asarray(array)  # not device_put, which would send them to all processes and print differences
    return jax.make_array_from_callback(numbers.shape, everywhere, lambda index: numbers[index])
