"""Calls a function whose arguments may be sharded over mesh axes of type Explicit, of which it need not know.

Inside, the axes are of type Auto, so that XLA partitions the function. Its results are sharded as asked for.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dpx.trees import Tree, described


def call_with_auto_axes(function: Callable[..., Tree], arguments: tuple, place: Callable[..., Tree]) -> Tree:
    """`function(*arguments)`.

    place: gets the arguments with a sharding in place of every array; returns the shardings of the results, a pytree
        prefix. It is called only if an argument is on a mesh with axes of type Explicit.
    """
    shardings = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, arguments)
    meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings) if sharding.mesh.explicit_axes]
    if not meshes:
        return function(*arguments)
    replicated = NamedSharding(meshes[0], PartitionSpec())
    shardings = jax.tree.map(lambda sharding: replicated if sharding.mesh.empty else sharding, shardings)
    axes, out = meshes[0].explicit_axes, place(*shardings)
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)(*arguments)


def along_examples(shardings: Tree) -> Any:
    """The sharding of arrays with one row for each example. shardings: of the examples, see `place`."""
    first = jax.tree.leaves(shardings)[0]
    return NamedSharding(first.mesh, PartitionSpec(*first.spec[:1]))


def devices_of_rows(sharding: Any) -> int | None:
    """Over how many devices a sharding spreads axis 0; None for None. Raises ValueError for another type."""
    if sharding is None:
        return None
    if not isinstance(sharding, jax.sharding.Sharding):
        such = "such as NamedSharding(mesh, PartitionSpec('data'))"
        raise ValueError(f"sharding must be a sharding of the batches, {such}, or None; got {described(sharding)}")
    return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]
