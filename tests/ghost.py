"""What the tests of the ghost norms share: both ways of clipping side by side."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.gradients.ghost import algorithms
from dpx.sums.rounding import as_pair
from tests.compiling import AS_A_USER
from tests.problems import dp_sgd, poisson

WAYS = {
    name.lower(): each.words for name, each in vars(algorithms).items() if isinstance(each, algorithms.NormAlgorithm)
}
TOLERANCE = 5e-5  # norms from Gram matrices include a bound on their rounding
# Quick to compile, not to run.
QUICK = {} if AS_A_USER else {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def key(number: int) -> jax.Array:
    return jax.random.key(number)


def normal(number: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.asarray(np.random.default_rng(number).standard_normal(shape), np.float32))


def integers(number: int, count: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.asarray(np.random.default_rng(number).integers(0, count, shape), np.int32))


def random_like(shapes):
    """Normal parameters, of 1/2 in size."""
    leaves, treedef = jax.tree.flatten(shapes)
    halves = [0.5 * np.asarray(normal(i, *leaf.shape)) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, [jnp.asarray(half) for half in halves])


def mechanism(clip_norm: Any = 1e-3) -> dpx.Mechanism:
    """Noiseless: the updates are the sums. The default clip norm binds, so that every error of a norm shows."""
    return noiseless(dp_sgd(poisson(100, 4), clip_norm=clip_norm))


def noiseless(made: dpx.Mechanism) -> dpx.Mechanism:
    def release(sums, state, params):
        return tuple(as_pair(total).high for total in sums), state

    return made.replace(release=release, noise_multiplier=0.0)


def compiled(loss, made, params, **options):
    """(examples, included) -> the step by ghost norms, or as `private_updates` is told to take it."""
    step = jax.jit(dpx.private_updates(loss, made, **{"norms": "ghost"} | options), compiler_options=QUICK)
    return lambda examples, included=None: step(params, dpx.Batch(examples, included), made.init(params))


def clipped_sums(loss, params, batch, clipping, *, made=None, included=None, microbatch_size=None):
    step = compiled(loss, made or mechanism(), params, norms=clipping, microbatch_size=microbatch_size)
    return step(batch, included)


def assert_same(found, expected, tolerance=TOLERANCE):
    """Every leaf within `tolerance` of its own norm (or of a thousandth of the whole's, if it almost cancels)."""
    whole = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in jax.tree.leaves(expected)))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype == np.float32
        distance, size = np.linalg.norm(a - b), max(np.linalg.norm(b), 1e-3 * whole)
        # 1e-10 is a ten-millionth of the default clip norm, for sums that cancel to nothing.
        assert distance <= tolerance * size + 1e-10, f"{jax.tree_util.keystr(path)}: {distance / size:.2e} off"


def assert_agrees(loss, params, batch, *, norms=("ghost", "auto"), tolerance=TOLERANCE, **options):
    expected = clipped_sums(loss, params, batch, "vmap", **options)
    for way in norms:
        found = clipped_sums(loss, params, batch, way, **options)
        assert_same(found.updates, expected.updates, tolerance)
        np.testing.assert_allclose(found.unreleased.losses, expected.unreleased.losses, rtol=max(tolerance, 1e-4))
        chex.assert_trees_all_close(found.unreleased.norms, expected.unreleased.norms, rtol=2e-3, atol=1e-6)
    return expected.updates


def ways(loss, params, batch, *, made=None, norms: Any = "ghost") -> dict[str, str]:
    """The way that every parameter takes."""
    return {
        name: way
        for name, way, _ in dpx.explain_norms(
            loss, made or mechanism(), params, dpx.Batch(batch, None), norms=norms
        ).rows
    }


def score(y):
    """A loss that no layer's gradient is trivial under."""
    y = y.astype(jnp.float32).reshape(-1)
    return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32))) + 0.1 * jnp.sum(y**2)


def zoo(size):
    """An empty dict of animals, and four functions that make some, on batches of `size` normal examples."""
    animals = {}

    def row(name, expected, tolerance=TOLERANCE):
        """Adds what it is called with, () -> (loss, params, batch). expected: the ways of `norms="ghost"`."""

        def register(make):
            animals[name or make.__name__] = make, {WAYS[way] for way in expected.split()}, tolerance
            return make

        return register

    def animal(expected, **options):
        """Adds the function that it decorates."""
        return row("", expected, **options)

    def layer(apply, params, *shape):
        """score(apply(params, x)) on examples of a shape."""
        return lambda params, x: score(apply(params, x)), params, normal(99, size, *shape)

    def module(made, *shape):
        params = random_like(jax.eval_shape(made.init, key(1), jnp.zeros(shape, jnp.float32))["params"])
        return layer(lambda params, x: made.apply({"params": params}, x), params, *shape)

    return animals, row, animal, layer, module
