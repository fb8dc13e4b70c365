"""The noise as it is drawn: many draws of one step, under other keys than the mechanism's own.

The program of an update holds the mechanism's keys as constants. Each is replaced by a function of a new key, equal
ones by equal ones, so the draws are those of the same mechanism built with other keys.
"""

import math
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx._public_state import public_state
from dpx.audit import contract_inputs as inputs
from dpx.audit.contract_release import SMALL, Release, Traced
from dpx.audit.contract_report import Broken

if TYPE_CHECKING:
    from dpx.audit.contract_subject import Subject

Tree = Any  # a pytree of arrays
TOGETHER = 500  # draws in memory at once


class Draws:
    """Draws of what a step of an empty batch makes public, which is its noise.

    count: int, of the draws. seed: of their keys.
    """

    def __init__(self, subject: "Subject", count: int, seed: int):
        self.subject, self.count = subject, count
        self.keys = jax.random.split(jax.random.key(seed), count)
        self._found: dict[int, np.ndarray] = {}
        grads = inputs.gradients(subject.params, 0, rows=1)

        def empty_step(state):
            updates, after = subject.mechanism.update(grads, state, subject.params, included=jnp.zeros(1, bool))
            return public_floats((updates, public_state(after)))

        closed = jax.make_jaxpr(empty_step)(subject.state(0))
        self.has_keys = any(map(is_key, (*closed.consts, *jax.tree.leaves(subject.state(0)))))
        self.program = jax.jit(jax.vmap(with_other_keys(closed), (0, None)))

    def __call__(self, step: int) -> np.ndarray:
        """The public floats of empty steps from the state of this step, float64 (count, o)."""
        if step not in self._found:
            state = jax.tree.leaves(self.subject.state(step))
            self._found[step] = np.concatenate(
                [
                    np.asarray(self.program(self.keys[start : start + TOGETHER], state)[0], np.float64)
                    for start in range(0, self.count, TOGETHER)
                ]
            )
        return self._found[step]


def with_other_keys(closed: Any) -> Any:
    """(key, arguments) -> the results of a closed jaxpr, in which every key is replaced by one made from `key`.

    arguments: the flat list of the inputs of the jaxpr, of which keys are replaced too.
    """

    marks = [_mark(leaf) if is_key(leaf) else None for leaf in closed.consts]

    def call(key, arguments):
        constants = [_other(key, leaf, mark) for leaf, mark in zip(closed.consts, marks, strict=True)]
        arguments = [_other(key, leaf) for leaf in arguments]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, constants))(*arguments)

    return call


def _mark(key: jax.Array) -> np.uint32:
    return np.uint32(zlib.crc32(np.asarray(jax.random.key_data(key)).tobytes()))


def _other(key: jax.Array, leaf: Any, mark: Any = None) -> Any:
    if not is_key(leaf):
        return leaf
    if mark is None:  # a key in the state
        mark = jax.random.bits(leaf, (), jnp.uint32)
    seed = jax.random.bits(jax.random.fold_in(key, mark), (), jnp.uint32)
    return jax.random.key(seed, impl=str(jax.random.key_impl(leaf)))


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def public_floats(tree: Tree) -> jax.Array:
    """The floats of a tree, float32 (o,)."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in leaves])


def keys_read(closed: Any) -> bool:
    """Whether the results of a closed jaxpr may depend on a key among its constants."""
    needed = {var for var in closed.jaxpr.outvars if not isinstance(var, core.Literal)}
    for equation in reversed(closed.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if not isinstance(var, core.Literal))
    constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    return any(is_key(value) and var in needed for var, value in constants)


def whitened(traced: Traced, draws: Draws, step: int, release: Release) -> np.ndarray:
    """The draws of a step as standard normals, if the mechanism's noise is what its trace says; float64 (count, r)."""
    rows = release.affine.copy()
    if rows[: release.updates].all():
        rows[release.updates :] = False
    rows &= np.abs(release.noise).max(1, initial=0) > 0
    if not rows.any():
        return np.zeros((draws.count, 0))
    found, state = draws(step), draws.subject.state(step)
    sums, updates = jnp.zeros(traced.numbers), np.arange(len(rows))[rows]

    def empty_step(state, normals):
        return traced.public(sums, normals, state)[0][updates]

    closed = jax.make_jaxpr(empty_step)(state, jnp.zeros(traced.normals))
    if not keys_read(closed):
        offset, noise = release.offset[rows], release.noise[rows]
        left, sizes, _ = np.linalg.svd(noise, full_matrices=False)
        large = sizes > SMALL * sizes[0]
        return (found[:, rows] - offset) @ (left[:, large] / sizes[large])
    run, leaves = with_other_keys(closed), jax.tree.leaves(state)

    def of_key(key):
        def floats(normals):
            found = run(key, [*leaves, normals])[0]
            return found, found

        return jax.jacfwd(floats, has_aux=True)(jnp.zeros(traced.normals))

    noise, offset = jax.jit(lambda keys: jax.lax.map(of_key, keys, batch_size=TOGETHER))(draws.keys)
    left, sizes, _ = np.linalg.svd(np.asarray(noise, np.float64), full_matrices=False)
    rank = int((sizes > SMALL * sizes[:, :1]).sum(1).min())
    change = found[:, rows] - np.asarray(offset, np.float64)
    return np.einsum("no,nor->nr", change, left[:, :, :rank]) / sizes[:, :rank]


def measured(release: Release, traced: Traced, draws: Draws, step: int) -> Release:
    """A release whose noise is known from draws of the updates alone, because it does not come from dpx.

    The noise map is a root of the sample covariance. The sizes that it tells have a relative error of about
    sqrt(2 / count), so the tolerance is 6 times that, and a share for the number of updates.
    """
    found = draws(step)[:, : release.updates]
    if not np.isfinite(found).all():
        raise Broken(f"the noise is not finite at step {step}")
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(found, rowvar=False)))
    large = values > 1e-8 * max(values[-1], 1e-30)
    noise = vectors[:, large] * np.sqrt(values[large])
    _, _, (by_sums, _) = traced.program(
        inputs.waves(traced.numbers, 1.0), np.zeros(0, np.float32), draws.subject.state(step)
    )
    data = np.asarray(by_sums, np.float64)[: release.updates]
    exchange, *_ = np.linalg.lstsq(noise, data, rcond=None)
    uncovered = np.abs(noise @ exchange - data).max(initial=0) / max(np.abs(data).max(initial=0), 1e-30)
    padded = np.zeros((len(release.offset), noise.shape[1]))
    padded[: release.updates] = noise
    tolerance = 6 * math.sqrt(2 / draws.count) + 2 * release.updates / draws.count
    return release._replace(noise=padded, exchange=exchange, uncovered=float(uncovered), tolerance=tolerance)
