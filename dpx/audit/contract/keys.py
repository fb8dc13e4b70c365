"""The same mechanism with other keys: built again, or by replacing the keys in its program.

The program of an update holds the mechanism's keys as constants. Each is replaced by a function of a new key, equal
ones by equal ones. So keys that were derived from one another when the mechanism was built become independent, and
only a mechanism that is built again shows that its noise shares a key with something else.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.keys import is_key
from dpx.mechanism import Mechanism
from dpx.xla.jaxprs import inputs_read

WithKey = Callable[[jax.Array, tuple], jax.Array]  # (key, arguments) -> an array


def with_other_keys(
    function: Callable, mechanism: Mechanism, rebuild: Callable | None, arguments: tuple
) -> tuple[WithKey, bool]:
    """`function(mechanism, *arguments)`, an array, for the mechanism with another key; and whether it reads the key.

    rebuild: (key) -> the mechanism with this key, or None. arguments: examples of them, pytrees.
    """

    def of_built(key, arguments):
        assert rebuild is not None
        return function(rebuild(key), *arguments)

    run = of_built if rebuild is not None else _replacing(function, mechanism, arguments)
    closed = jax.make_jaxpr(run)(jax.random.key(0), arguments)

    def replay(key, arguments):
        with jax.enable_x64(True):  # else jax.vmap would not follow what the program computes in float64
            return core.jaxpr_as_fun(closed)(key, *jax.tree.leaves(arguments))[0]

    return replay, inputs_read(closed.jaxpr)[0]


def _replacing(function: Callable, mechanism: Mechanism, arguments: tuple) -> WithKey:
    closed = jax.make_jaxpr(lambda *given: function(mechanism, *given))(*arguments)
    words = [np.asarray(jax.random.key_data(leaf)).tobytes() if is_key(leaf) else b"" for leaf in closed.consts]
    marks = [np.uint32(zlib.crc32(of_key)) for of_key in words]

    def run(key, arguments):
        constants = [_other(key, leaf, mark) for leaf, mark in zip(closed.consts, marks, strict=True)]
        given = [_other(key, leaf) for leaf in jax.tree.leaves(arguments)]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, constants))(*given)[0]

    return run


def _other(key: jax.Array, leaf: Any, mark: Any = None) -> Any:
    """`leaf`, or in place of a key another one, made from `key`. mark: of the key, None for a key in the state."""
    if not is_key(leaf):
        return leaf
    if mark is None:
        mark = jax.random.bits(leaf, (), jnp.uint32)
    seed = jax.random.bits(jax.random.fold_in(key, mark), (), jnp.uint32)
    return jax.random.key(seed, impl=str(jax.random.key_impl(leaf)))
