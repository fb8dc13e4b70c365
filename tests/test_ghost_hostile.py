"""The bound on the ghost path under hostile rows: any activation, any cotangent, any parameter, on every rule.

Everything here is compiled as it runs in training (`FULL`), because the breaks of the bound came from XLA's own
rewriting. A contribution is the change of the sum by one example; its norm is taken in float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpx
from dpx.ghost.plan import METHODS
from tests.ghost import key, noiseless

FULL = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
CLIP_NORM = 0.7
ROUNDING = 1e-6
MOST = float(np.finfo(np.float32).max)
VALUES = (0.0, 1e-45, 1e-40, 1e-30, 1.0, 6e4, 1e18, 1e19, 1e30, 9e37, MOST, np.inf, -np.inf, np.nan)
RANDOM = 4096


class Case(NamedTuple):
    """loss: (params, example) -> scalar. params, example: of shapes; floats are made hostile, integers random.

    ways: how the followed parameters must be followed.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    example: Any
    ways: set[str]


def f32(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def index(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def logistic(params, example):
    x, label = example
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[label % 2]


def perceptron(params, example):
    """With dropout."""
    x, c, seed = example
    hidden = jax.nn.relu(x @ params["in"] + params["b"])
    hidden = jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, hidden.shape), 2 * hidden, 0)
    return jnp.sum(c * jnp.tanh(hidden @ params["out"]))


def tied(params, example):
    tokens, x, c, d = example
    hidden = jnp.take(params, tokens % 6, axis=0) * d
    return jnp.sum(c * ((hidden + x[None, :]) @ params.T))


def convolution(strides, precision=None):
    def loss(w, example):
        x, c = example
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(c * lax.conv_general_dilated(x[None], w, strides, "SAME", dimension_numbers=numbers)[0])

    return loss


def product_of(dtype):
    def loss(w, example):
        x, c = example
        return jnp.sum((c.astype(dtype) * (x.astype(dtype) @ w.astype(dtype))).astype(jnp.float32))

    return loss


def low(dtype):
    """A small network computed in half precision."""

    def loss(params, example):
        x, c = example
        hidden = jnp.tanh(x.astype(dtype) @ params["in"].astype(dtype))
        y = jnp.sin(hidden @ params["out"].astype(dtype)) * c.astype(dtype)
        return jnp.sum(y.astype(jnp.float32))

    return loss


CASES = {
    "logistic": Case(logistic, {"w": f32(20, 2), "b": f32(2)}, (f32(20), index()), {"outer", "gradient"}),
    "outer": Case(product_of(jnp.float32), f32(7, 5), (f32(7), f32(5)), {"outer"}),
    "gram": Case(product_of(jnp.float32), f32(30, 40), (f32(2, 30), f32(2, 40)), {"gram"}),
    "product": Case(product_of(jnp.float32), f32(3, 4), (f32(16, 3), f32(16, 4)), {"product"}),
    "rows": Case(
        lambda table, e: jnp.sum(e[1] * jnp.take(table, e[0] % 6, axis=0)), f32(5, 3), (index(6), f32(6, 3)), {"rows"}
    ),
    "slice": Case(
        lambda w, e: jnp.sum(e[1] * lax.dynamic_slice(w, (e[0], 0), (2, 3))), f32(7, 3), (index(), f32(2, 3)), {"rows"}
    ),
    "convolution": Case(convolution((1, 1)), f32(3, 3, 2, 3), (f32(5, 5, 2), f32(5, 5, 3)), {"product"}),
    "convolution of few positions": Case(
        convolution((2, 2)), f32(3, 3, 6, 24), (f32(3, 3, 6), f32(2, 2, 24)), {"gram"}
    ),
    "used twice": Case(
        lambda w, e: jnp.sum(e[0] * (e[1] @ w)) + jnp.sum(e[2] * (e[3] @ w)),
        f32(12, 9),
        (f32(9), f32(12), f32(9), f32(12)),
        {"shared"},
    ),
    "used transposed": Case(
        lambda w, e: jnp.sum(e[0] * (jnp.tanh(e[1] @ w) @ w.T)), f32(12, 9), (f32(12), f32(12)), {"shared"}
    ),
    "tied": Case(tied, f32(5, 8), (index(2), f32(8), f32(2, 5), f32(2, 8)), {"shared"}),
    "perceptron": Case(
        perceptron,
        {"in": f32(6, 5), "b": f32(5), "out": f32(5, 4)},
        (f32(6), f32(4), index()),
        {"outer", "gradient"},
    ),
    "float16": Case(
        low(jnp.float16), {"in": f32(30, 40), "out": f32(40, 6)}, (f32(2, 30), f32(2, 6)), {"gram", "product"}
    ),
    "bfloat16": Case(
        low(jnp.bfloat16), {"in": f32(30, 40), "out": f32(40, 6)}, (f32(2, 30), f32(2, 6)), {"gram", "product"}
    ),
    "bfloat16 gram": Case(product_of(jnp.bfloat16), f32(30, 40), (f32(2, 30), f32(2, 40)), {"gram"}),
}


def random_rows(seed: int, like, count: int = RANDOM):
    """Floats of magnitudes log-uniform up to float32's largest: of a row, of its positions or of every number."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(-9, 10, (count, *leaf.shape)), leaf.dtype)
        shape, ones = leaf.shape, (1,) * len(leaf.shape)
        with np.errstate(over="ignore", under="ignore"):
            scales = np.stack(
                [
                    np.broadcast_to(np.exp2(rng.uniform(-150, 128, (count, *s))), (count, *shape))
                    for s in (ones, shape[:1] + ones[1:], shape)
                ]
                + [np.ones((count, *shape))]
            )
            chosen = np.take_along_axis(scales, rng.integers(0, 4, (1, count, *ones)), axis=0)[0]
            found = rng.standard_normal((count, *shape)) * chosen
            found = np.where(rng.random((count, *shape)) < 0.1, 0, np.clip(found, -MOST, MOST))
        return jnp.asarray(found, jnp.float32)

    return jax.tree.map(one, like)


def hostile_rows(like):
    """Every pair of leaves at every pair of values, in all their elements or in one."""
    shapes, treedef = jax.tree.flatten(like)
    floats = [i for i, leaf in enumerate(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    ordinary = [np.asarray(leaf[0]) for leaf in jax.tree.leaves(random_rows(0, like, 1))]
    for i in floats:
        ordinary[i] = np.random.default_rng(i).standard_normal(shapes[i].shape).astype(np.float32)
    rows = []
    for number, i in enumerate(floats):
        for j in floats[number:]:
            for first in VALUES:
                for second in VALUES if j != i else (first,):
                    for whole in (True, False):
                        row = [leaf.copy() for leaf in ordinary]
                        for leaf, value in ((i, first), (j, second)):
                            row[leaf][... if whole else (0,) * row[leaf].ndim] = value
                        rows.append(row)
    return jax.tree.unflatten(treedef, [jnp.asarray(np.stack(leaf)) for leaf in zip(*rows, strict=True)])


def mechanism(*coordinates: dpx.Coordinates, clip_norm: Any = CLIP_NORM) -> dpx.Mechanism:
    sampling = dpx.PoissonSampling(examples=100, batch_size=4)
    made = dpx.gaussian_mechanism(clip_norm=clip_norm, noise_multiplier=1.0, sampling=sampling, key=key(0))
    return noiseless(dpx.in_coordinates(made, *coordinates) if coordinates else made)


def sums(loss, made, params, examples, included, clipping, state=None):
    """The one call of the library: the first sum over the examples."""
    step = dpx.private_grad(loss, made, clipping=clipping)
    state = made.init(params) if state is None else state
    return step(params, examples, state, weights=included.astype(jnp.float32)).updates[0]


def norms(contributions) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(contributions)]
    return np.sqrt(sum(np.sum(leaf**2, axis=1) for leaf in leaves) + np.zeros(1))


def alone(loss, made, params, examples, clipping="ghost") -> np.ndarray:
    """The norm of the contribution of every example, each beside parameters of its own."""
    state = made.init(jax.tree.map(lambda p: jnp.zeros(p.shape[1:]), params))

    def one(params, example):
        batch = jax.tree.map(lambda leaf: leaf[None], example)
        return sums(loss, made, params, batch, jnp.ones(1, bool), clipping, state)

    return norms(jax.jit(jax.vmap(one), compiler_options=FULL)(params, examples))


FREEZE = dpx.random_freeze(0.4, period=1, key=key(3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_example_exceeds_the_bound(name, masked):
    case = CASES[name]
    made = mechanism(FREEZE) if masked else mechanism()
    shown = dpx.explain(case.loss, made, case.params, jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), case.example), clipping="ghost")
    print({way for _, way, _ in shown.rows})
    for rows in (random_rows(1, (case.params, case.example)), hostile_rows((case.params, case.example))):
        found = alone(case.loss, made, *rows)
        print(name, masked, len(found), "above", (~(found <= CLIP_NORM * (1 + ROUNDING))).sum(), np.nanmax(found) / CLIP_NORM - 1, "moved", (found > 0).mean())
