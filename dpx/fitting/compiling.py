"""`jax.jit` for functions with secrets: arrays that they close over are arguments of the program, not constants.

So the program and every cache of it hold no noise key, and the runs of several seeds share one program.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpx import keys
from dpx.gradients.rows import constants_hoisted


class Compiled:
    """A function of pytrees of arrays, compiled once for each set of shapes.

    The arrays of the arguments `donate_argnums` are deleted. out_shardings: of `jax.jit`. look: at the losses inside,
    the first time.
    sharding: of the batches. With one of a mesh of automatic axes, arrays that the function closes over are replicated
        over it, once.
    """

    def __init__(
        self,
        function: Callable,
        *,
        donate_argnums: Sequence[int],
        look: Callable = lambda *of_loss: None,
        out_shardings: Any = None,
        sharding: Any = None,
    ):
        self.function, self.donate_argnums, self.out_shardings = function, donate_argnums, out_shardings
        self.sharding, self.look = sharding, look
        self.programs: dict[Any, tuple[Callable, list]] = {}  # with the arrays that they take first, by shapes

    def __call__(self, *arguments):
        if cast(Any, jax.config).jax_disable_jit:  # other roundings of a step would be another run with its noise
            with jax.disable_jit(False):
                return self(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        shapes = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self.programs:
            self.programs[shapes] = self.compiled(arguments)
        program, closed_over = self.programs[shapes]
        return program(closed_over, *arguments)

    def compiled(self, arguments: Any) -> tuple[Callable, list]:
        with constants_hoisted(self.look if not self.programs else lambda *of_loss: None):  # once
            traced, results = jax.make_jaxpr(self.function, return_shape=True)(*arguments)

        def program(closed_over, *arguments):
            leaves = jax.core.eval_jaxpr(traced.jaxpr, closed_over, *jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(results), leaves)

        program.__name__ = self.function.__name__  # for profiles
        donated = tuple(1 + number for number in self.donate_argnums)
        compiled = jax.jit(program, donate_argnums=donated, out_shardings=self.out_shardings)
        closed_over = [jnp.asarray(array) for array in traced.consts]
        # Explicit axes are in the types of arrays, which must stay those that were traced.
        if isinstance(self.sharding, NamedSharding) and self.sharding.mesh.explicit_axes:
            return compiled, closed_over
        return compiled, [on_mesh(array, self.sharding) for array in closed_over]


def on_mesh(array: jax.Array, sharding: Any) -> jax.Array:
    """`array`, replicated over the mesh of `sharding` if this is of a mesh, and the array does not lie on it.

    Over a mesh of several processes, an array of this process must have the same numbers in each of them.
    """
    if not isinstance(sharding, NamedSharding) or getattr(array.sharding, "mesh", None) == sharding.mesh:
        return array
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    if sharding.is_fully_addressable or not array.is_fully_addressable:
        return jax.device_put(array, everywhere)
    if keys.is_key(array):
        return jax.random.wrap_key_data(on_mesh(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array))
    numbers = np.asarray(array)  # not device_put, which would send them to all processes and print those that differ
    return jax.make_array_from_callback(numbers.shape, everywhere, lambda index: numbers[index])
