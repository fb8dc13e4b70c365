"""The bound under hostile rows, on every rule of the ghost norms: any activation, any cotangent, any parameter.

What bounds a contribution must survive the compiler, so all of it is compiled as it runs in training (`FULL`). The norm
of a contribution is taken in float64.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpx
from dpx.gradients.ghost import norms as ghost_norms
from dpx.sums.clipped_sum import LARGEST
from tests.compiling import EMITTERS
from tests.ghost import WAYS, assert_agrees, integers, key, noiseless, normal

FULL = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False, **EMITTERS}
ROUNDING = 1e-6  # of the clip norm
MOST = float(np.finfo(np.float32).max)
VALUES = (0.0, 1e-45, 1e-40, 1e-30, 1.0, 6e4, 1e18, 9e18, 1e19, 1e30, 9e37, MOST, np.inf, -np.inf, np.nan)
RANDOM = 4096  # rows
# A matrix unit rounds 3.4e38 to infinity, and the norms to its own precision. The bounds hold there too.
in_float32 = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="expects numbers that no matrix unit has rounded"
)


class Case(NamedTuple):
    """loss: (params, example) -> scalar. params, example: shapes; floats become hostile, integers random.

    ways: those that norms="ghost" must take for the parameters.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    example: Any
    ways: set[str]


def f32(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def dense(w, example):
    """The cotangent of each output is in the example."""
    x, c = example
    return jnp.sum(c * (x @ w))


def low(dtype):
    """Computed in half precision."""

    def loss(params, example):
        x, c = (leaf.astype(dtype) for leaf in example)
        y = jnp.sin(jnp.tanh(x @ params["in"].astype(dtype)) @ params["out"].astype(dtype)) * c
        return jnp.sum(y.astype(jnp.float32))

    return loss


def logistic(params, example):
    x, label = example
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[label % 2]


def perceptron(params, example):
    """With dropout."""
    x, c, seed = example
    hidden = jax.nn.relu(x @ params["in"] + params["b"])
    hidden = jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, hidden.shape), 2 * hidden, 0)
    return jnp.sum(c * jnp.tanh(hidden @ params["out"]))


def tied(table, example):
    tokens, x, c = example
    hidden = table.at[tokens].get(mode="fill", fill_value=0.0)
    return jnp.sum(c * ((hidden * x) @ table.T))


def lookups(table, example):
    """A row by its index, two by a vector, a block, and a one-hot product."""
    at, c = example
    block = lax.dynamic_slice_in_dim(table, at[1], 3)
    picked = table.at[at[1:3]].get(mode="fill", fill_value=0.0), jax.nn.one_hot(at[3:], len(table)) @ table
    return jnp.sum(c * jnp.concatenate([table[at[0]][None], block, *picked]))


def convolved(stride: int):
    def loss(w, example):
        x, c = example
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(c * lax.conv_general_dilated(x[None], w, (stride, stride), "SAME", dimension_numbers=numbers)[0])

    return loss


def stack(w, example):
    """The input and the cotangent of each layer are in the example."""
    return lax.scan(lambda total, row: (total + dense(row[0], row[1]), None), jnp.float32(0), (w, example))[0]


def slices(w, example):
    return sum(dense(w[i], (example[0][i], example[1][i])) for i in range(len(w)))


def repeated(w, example):
    return lax.scan(lambda total, row: (total + dense(w, row), None), jnp.float32(0), example)[0]


def made(kernel):
    """Of a kernel that is a function of the parameters."""
    return lambda p, example: dense(kernel(p), example)


@jax.custom_vjp
def limited(w, x):
    return x @ w


def limited_backward(saved, dy):
    w, x = saved
    return x.T @ dy / (1 + jnp.linalg.norm(x)), dy @ w.T


limited.defvjp(lambda w, x: (x @ w, (w, x)), limited_backward)


def spectral(p, example):
    x, y, c = example
    return jnp.sum(c * jnp.real(lax.complex(x, y) @ lax.complex(p["a"], p["b"])))


TWO_LAYERS = {"in": f32(6, 5), "b": f32(5), "out": f32(5, 4)}
LOW = {"in": f32(30, 40), "out": f32(40, 6)}, (f32(2, 30), f32(2, 6))
CASES = {
    "logistic": Case(logistic, {"w": f32(20, 2), "b": f32(2)}, (f32(20), i32()), {"outer", "small"}),
    "perceptron": Case(perceptron, TWO_LAYERS, (f32(6), f32(4), i32()), {"outer", "small"}),
    "scale and shift": Case(
        lambda p, e: jnp.sum(e[1] * (e[0] * p["scale"] + p["shift"])),
        {"scale": f32(1, 5), "shift": f32(3, 5)},
        (f32(3, 5), f32(3, 5)),
        {"small"},
    ),
    "places": Case(
        lambda p, e: jnp.sum(e[1] * (e[0] * p["scale"][:3] - p["shift"][:3])),
        {"scale": f32(4, 5), "shift": f32(4, 5)},
        (f32(3, 5), f32(3, 5)),
        {"outer"},
    ),
    "places in every iteration": Case(
        lambda p, e: jnp.sum(lax.scan(lambda h, c: (c * (h * p["a"][:3] + p["b"][:3]), None), e[0], e[1])[0]),
        {"a": f32(12, 5), "b": f32(12, 5)},
        (f32(3, 5), f32(3, 3, 5)),
        {"product"},
    ),
    "weight decay": Case(lambda w, e: dense(w, e) + jnp.sum(w * w), f32(7, 5), (f32(7), f32(5)), {"product"}),
    "outer": Case(dense, f32(7, 5), (f32(7), f32(5)), {"outer"}),
    "gram": Case(dense, f32(30, 40), (f32(2, 30), f32(2, 40)), {"gram"}),
    "product": Case(dense, f32(3, 4), (f32(16, 3), f32(16, 4)), {"product"}),
    "rows": Case(
        lambda table, e: jnp.sum(e[1] * table.at[e[0]].get(mode="fill", fill_value=0.0)),
        f32(5, 3),
        (i32(6), f32(6, 3)),
        {"rows"},
    ),
    "slice": Case(
        lambda w, e: jnp.sum(e[1] * lax.dynamic_slice(w, (e[0], 0), (2, 3))), f32(7, 3), (i32(), f32(2, 3)), {"rows"}
    ),
    "lookups": Case(lookups, f32(7, 3), (i32(4), f32(7, 3)), {"rows"}),
    "lookup times a number": Case(
        lambda w, e: jnp.sum(e[2] * ((jax.nn.one_hot(e[0], len(w)) * e[1][:, None]) @ w)),
        f32(7, 3),
        (i32(2), f32(2), f32(2, 3)),
        {"rows"},
    ),
    "used twice": Case(
        lambda w, e: dense(w, e[:2]) + dense(w, e[2:]), f32(12, 9), (f32(12), f32(9), f32(12), f32(9)), {"shared"}
    ),
    "used on many positions": Case(
        lambda w, e: dense(w, e[:2]) + dense(w, e[2:]),
        f32(3, 2),
        (f32(1, 3), f32(1, 2), f32(256, 3), f32(256, 2)),
        {"recomputed"},
    ),
    "used transposed": Case(
        lambda w, e: jnp.sum(e[0] * (jnp.tanh(e[1] @ w) @ w.T)), f32(12, 9), (f32(12), f32(12)), {"shared"}
    ),
    "tied": Case(tied, f32(5, 8), (i32(2), f32(2, 8), f32(2, 5)), {"shared"}),
    "convolution": Case(convolved(1), f32(3, 3, 2, 3), (f32(5, 5, 2), f32(5, 5, 3)), {"product"}),
    "convolution, few positions": Case(convolved(2), f32(3, 3, 6, 24), (f32(3, 3, 6), f32(2, 2, 24)), {"gram"}),
    "convolution in every iteration": Case(
        lambda w, e: lax.scan(lambda total, row: (total + convolved(1)(w, row), None), jnp.float32(0), e)[0],
        f32(3, 3, 2, 3),
        (f32(2, 5, 5, 2), f32(2, 5, 5, 3)),
        {"product"},
    ),
    "branch": Case(
        lambda w, e: lax.cond(e[0][0] > 0, lambda: dense(w, e), lambda: jnp.sum(jnp.sqrt(e[0]))),
        f32(7, 5),
        (f32(7), f32(5)),
        {"outer"},
    ),
    "stack": Case(stack, f32(3, 7, 5), (f32(3, 7), f32(3, 5)), {"outer"}),
    "stack of few positions": Case(stack, f32(2, 30, 40), (f32(2, 2, 30), f32(2, 2, 40)), {"gram"}),
    "stack of many positions": Case(stack, f32(2, 3, 4), (f32(2, 16, 3), f32(2, 16, 4)), {"product"}),
    "slices": Case(slices, f32(3, 7, 5), (f32(3, 7), f32(3, 5)), {"outer"}),
    "repeated": Case(repeated, f32(30, 40), (f32(2, 30), f32(2, 40)), {"gram"}),
    "kernels side by side": Case(
        made(lambda p: jnp.concatenate([p["a"], 3.0 * p["b"]], 1)),
        {"a": f32(7, 3), "b": f32(7, 2)},
        (f32(7), f32(5)),
        {"outer"},
    ),
    "kernel divided": Case(
        made(lambda w: w / lax.stop_gradient(jnp.sum(w, 1, keepdims=True))),
        f32(30, 40),
        (f32(2, 30), f32(2, 40)),
        {"gram"},
    ),
    "function of a kernel": Case(made(jnp.exp), f32(7, 5), (f32(7), f32(5)), {"outer"}),
    "function of a kernel of many positions": Case(made(jnp.exp), f32(3, 4), (f32(16, 3), f32(16, 4)), {"product"}),
    "kernel normalized": Case(
        made(lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True)), f32(7, 5), (f32(7), f32(5)), {"product"}
    ),
    "kernel normalized, large": Case(
        made(lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True)), f32(72, 72), (f32(72), f32(72)), {"recomputed"}
    ),
    "backward pass of its own": Case(
        lambda w, e: jnp.sum(e[1] * limited(w, e[0])), f32(30, 40), (f32(2, 30), f32(2, 40)), {"gram"}
    ),
    "complex": Case(spectral, {"a": f32(3, 4), "b": f32(3, 4)}, (f32(8, 3), f32(8, 3), f32(8, 4)), {"product"}),
    "bfloat16": Case(low(jnp.bfloat16), *LOW, {"gram"}),
    "float16": Case(low(jnp.float16), *LOW, {"gram"}),
}


@functools.cache
def mechanism(clip_norm: Any = 0.7) -> dpx.Mechanism:
    sampling = dpx.PoissonSampling(examples=100, batch_size=4)
    return noiseless(dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=1.0, sampling=sampling, key=key(0)))


def masked(made: dpx.Mechanism) -> dpx.Mechanism:
    return noiseless(dpx.in_coordinates(made, dpx.coordinates.random_freeze(freeze_rate=0.4, every=1, key=key(3))))


def gradient(loss, made, params, examples, included, clipping, state):
    """The one call of the library in this file. Nothing has noise, so rows may share a key under `jax.vmap`."""
    batch = dpx.Batch(examples, jnp.asarray(included).astype(bool))
    return dpx.private_updates(loss, made, norms=clipping)(params, batch, state)


def norms_of(contributions) -> np.ndarray:
    """The norm of every row."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(contributions)]
    return np.sqrt(sum(np.sum(leaf.reshape(len(leaf), -1) ** 2, axis=1) for leaf in leaves) + np.zeros(1))


def alone(loss, made, params, examples, norms: Any = "ghost") -> np.ndarray:
    """The norm of the contribution of every example, beside parameters of its own."""
    state = jax.jit(made.init)(jax.tree.map(lambda p: jnp.zeros(p.shape[1:]), params))
    return norms_of(of_each(loss, made, norms)(params, examples, state))


@functools.cache
def of_each(loss, made, norms):
    def one(params, example, state):
        batch = jax.tree.map(lambda leaf: leaf[None], example)
        return gradient(loss, made, params, batch, jnp.ones(1), norms, state).updates[0]

    return jax.jit(jax.vmap(one, (0, 0, None)), compiler_options=FULL)


def in_a_batch(loss, made, params, examples, norms: Any = "ghost") -> np.ndarray:
    """The same, of a batch with the same parameters for all."""

    def every(params, examples):  # as arguments, because XLA would evaluate constants in another arithmetic
        def total(included):
            return gradient(loss, made, params, examples, included, norms, made.init(params)).updates[0]

        return lax.map(total, jnp.eye(len(jax.tree.leaves(examples)[0])))

    return norms_of(jax.jit(every, compiler_options=FULL)(params, examples))


def random_rows(like, count: int = RANDOM):
    """Magnitudes log-uniform from denormals to float32's largest: of a leaf, its positions, or every number."""
    rng = np.random.default_rng(1)

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return rng.integers(-9, 10, (count, *leaf.shape), np.int32)
        ones = (1,) * len(leaf.shape)
        kinds = [np.exp2(rng.uniform(-150, 128, (count, *s))) for s in (ones, leaf.shape[:1] + ones[1:], leaf.shape)]
        scales = np.select(list(rng.integers(0, 4, (1, count, *ones)) == np.arange(3).reshape(3, 1, *ones)), kinds, 1.0)
        found = rng.standard_normal((count, *leaf.shape)) * scales
        return np.where(rng.random(found.shape) < 0.1, 0, np.clip(found, -MOST, MOST)).astype(np.float32)

    with np.errstate(under="ignore"):
        return jax.tree.map(one, like)


def hostile_rows(like):
    """Every pair of leaves at every pair of VALUES, in all their elements or in one; the other leaves are ordinary."""
    shapes, treedef = jax.tree.flatten(like)
    floats = [i for i, leaf in enumerate(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    ordinary = [np.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
    for i in floats:
        ordinary[i] = np.array(normal(i, *shapes[i].shape))
    rows = []
    for i, j in [(i, j) for i in floats for j in floats if i <= j]:
        for first, second in [(v, w) for v in VALUES for w in VALUES if i != j or v == w]:
            for where in (..., 0):
                row = [leaf.copy() for leaf in ordinary]
                row[i].reshape(-1)[where], row[j].reshape(-1)[where] = first, second
                rows.append(row)
    return jax.tree.unflatten(treedef, [np.stack(leaves) for leaves in zip(*rows, strict=True)])


@functools.cache
def rows_of(name: str):
    """Parameters and examples of a case, one of each a row; made once, because that takes up to 0.8 s."""
    like = CASES[name].params, CASES[name].example
    return jax.tree.map(lambda *rows: jnp.asarray(np.concatenate(rows)), random_rows(like), hostile_rows(like))


def assert_bounded(found: np.ndarray, clip_norm: float, *, least_share: float = 0.01):
    """That no contribution exceeds the clip norm, and that the rows are not all dropped."""
    assert not np.count_nonzero(~(found <= clip_norm * (1 + ROUNDING))), f"{found.max()} > {clip_norm}"
    assert np.mean(found > 0) >= least_share


VARIANTS: dict[str, Callable[[], dpx.Mechanism]] = {
    "clipped": mechanism,
    "masked": lambda: masked(mechanism()),
    "normalized": lambda: noiseless(dpx.mechanisms.normalized(mechanism(), stability=1e-6)),
}


MADE = (
    "kernels side by side",
    "kernel divided",
    "kernel normalized",
    "function of a kernel",
    "function of a kernel of many positions",
)
ONCE = ("outer", "gram", "product", "rows", "used twice", "tied", "convolution")  # one case of each way
MASKED = (
    *ONCE,
    "kernel normalized",
    "kernel normalized, large",
    "logistic",
    "perceptron",
    "places",
    "slice",
    "stack",
    "slices",
    "kernels side by side",
    "function of a kernel",
)


@pytest.mark.parametrize(
    "name, variant",
    [(name, "clipped") for name in CASES]
    + [(name, "masked") for name in MASKED]
    + [(name, "normalized") for name in (*ONCE, *MADE)],
)
@pytest.mark.long_cases(  # each way to a norm has a case in `make test`
    "branch-",
    "complex-clipped",
    "convolution, few",
    "convolution in every",
    "convolution-masked",
    "float16-clipped",
    "function of a kernel",
    "gram-normalized",
    "kernel divided-normalized",
    "kernel normalized, large-masked",
    "kernel normalized-masked",
    "kernel normalized-normalized",
    "kernels side by side-",
    "logistic-masked",
    "outer-clipped",
    "outer-masked",
    "perceptron-masked",
    "repeated-",
    "slice-",
    "slices-",
    "stack of many",
    "stack-",
    "tied-normalized",
    "used transposed-",
    "used twice-masked",
    "used twice-normalized",
    "kernel normalized, large-",
    "bfloat16-clipped",
    "places-masked",
    "places in every",
    "tied-masked",
    "rows-masked",
    "logistic-",
    "perceptron-",
    "stack of few",
    "kernel divided-clipped",
    "tied-clipped",
    "gram-masked",
    "rows-normalized",
    "convolution-normalized",
)
def test_no_row_exceeds_the_bound(name, variant):
    case, made = CASES[name], VARIANTS[variant]()
    if variant == "clipped":
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), case.example)
        found = {
            way
            for _, way, _ in dpx.explain_norms(case.loss, made, case.params, dpx.Batch(batch, None), norms="ghost").rows
        }
        assert found == {WAYS[way] for way in case.ways}
    assert_bounded(alone(case.loss, made, *rows_of(name)), 0.7)


@pytest.mark.parametrize("name", ["perceptron", "gram", "tied", "bfloat16", "float16"])
@pytest.mark.long_cases("float16", "gram", "tied", "bfloat16")
def test_no_row_exceeds_the_bound_on_stacked_gradients(name):
    case = CASES[name]
    assert_bounded(alone(case.loss, mechanism(), *rows_of(name), norms="vmap"), 0.7)


def test_no_row_exceeds_the_bound_where_leaves_are_dropped():
    made = dpx.in_coordinates(mechanism(), dpx.coordinates.trainable(mask={"in": False, "b": True, "out": True}))
    loss, rows = CASES["perceptron"].loss, rows_of("perceptron")
    assert_bounded(alone(loss, noiseless(made), *rows), 0.7)


@pytest.mark.parametrize("clipping", ["auto", "ghost", "vmap"])
@pytest.mark.long_cases("auto")
def test_the_largest_number_in_the_input_of_a_logistic_regression(clipping):
    params, x = {"w": jnp.zeros((20, 2)), "b": jnp.zeros(2)}, normal(0, 8, 20).at[0, 3].set(MOST)
    found = in_a_batch(logistic, mechanism(), params, (x, integers(1, 2, 8)), clipping)
    assert found[0] == 0 and (found[1:] > 0.69).all()
    assert_bounded(found, 0.7)


def network(params, example):
    """Every rule at once, in a batch."""
    x, tokens, c = example
    y = jnp.tanh(convolved(1)(params["kernel"], (x, jnp.ones((4, 4, 3)))) + 0.0) * x.reshape(2, 16)
    y = jnp.tanh(y[:, :8] @ params["gram"]) @ params["gram"].T + params["bias"]
    y = y + params["table"].at[tokens].get(mode="fill", fill_value=0.0)
    return jnp.sum(c * jnp.tanh(y.reshape(16) @ params["outer"]))


@pytest.mark.parametrize("clipping, variant", [("ghost", "clipped"), ("ghost", "masked"), ("vmap", "clipped")])
@pytest.mark.long_cases("ghost-masked", "vmap-clipped")
def test_no_row_of_a_batch_exceeds_the_bound(clipping, variant):
    shapes = {"kernel": (3, 3, 2, 3), "gram": (8, 8), "bias": (1, 8), "table": (5, 8), "outer": (16, 4)}
    params = {name: 0.3 * normal(number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    params["gram"], params["outer"] = params["gram"].at[0, 0].set(1e15), params["outer"].at[0, 1].set(-1e17)
    rows = jax.tree.map(jnp.asarray, random_rows((f32(4, 4, 2), i32(2), f32(4)), 96))
    assert_bounded(in_a_batch(network, VARIANTS[variant](), params, rows, clipping), 0.7, least_share=0.05)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.long_cases("float16")
def test_half_precision_is_the_same_in_norms_and_sums(dtype):
    """XLA on a CPU may leave out a rounding to half precision where one consumer wants float32 again."""
    params = jax.tree.map(lambda leaf: 0.3 * normal(1, *leaf.shape), LOW[0])
    examples = normal(2, 64, 2, 30), normal(3, 64, 2, 6)
    found = in_a_batch(low(dtype), mechanism(1e-3), params, examples)
    np.testing.assert_allclose(found, 1e-3, rtol=1e-3)
    assert_bounded(found, 1e-3)


SIZES = np.exp2([0.0, 30, 62, 62.9, 63.1, 64, 70, 100, 126.5])


@in_float32
def test_one_rule_on_every_path():
    """A gradient of norm 2^63 or less is clipped, one of a larger norm contributes zero, however its norm is found."""
    examples = jnp.asarray(SIZES, jnp.float32)[:, None] * jnp.array([[0.6, 0.0, 0.8]])
    expected = np.where(SIZES <= LARGEST, 0.7, 0)
    cases = {
        "stacked": lambda clipping: in_a_batch(
            lambda w, x: jnp.sum(w * x), mechanism(), jnp.ones(3), examples, clipping
        ),
        "input": lambda clipping: in_a_batch(
            lambda w, x: jnp.sum(x @ w), mechanism(), jnp.ones((3, 1)), examples, clipping
        ),
        "cotangent": lambda clipping: in_a_batch(
            lambda w, x: jnp.sum(x * (jnp.ones(1) @ w)), mechanism(), jnp.ones((1, 3)), examples, clipping
        ),
        "half of each": lambda clipping: in_a_batch(
            lambda w, x: jnp.sum(jnp.sqrt(x) * (jnp.sqrt(jnp.max(x, keepdims=True)) @ w)),
            mechanism(),
            jnp.ones((1, 3)),
            examples / 0.8 * jnp.array([[0.0, 0.0, 1.0]]),
            clipping,
        ),
    }
    for name, found in cases.items():
        for clipping in ("ghost", "vmap"):
            np.testing.assert_allclose(found(clipping), expected, rtol=1e-5, err_msg=f"{name}, {clipping}")


@in_float32
@pytest.mark.parametrize("positions", [1, 2])
def test_the_ghost_path_also_drops_what_has_a_factor_out_of_range(positions):
    """An input, or a cotangent, above 2^63 whose product is not. Not an input whose cotangent is 0."""
    sizes = jnp.array([2.0**70, 2.0**-70, 1.0])[:, None, None]
    x = (sizes * jnp.broadcast_to(normal(1, 30), (1, positions, 30))).at[2, 0].set(MOST)
    c = (jnp.broadcast_to(normal(2, 40), (1, positions, 40)) / sizes).at[2, 0].set(0.0)
    case = CASES["gram"]
    ghost, vmap = (in_a_batch(case.loss, mechanism(), jnp.zeros((30, 40)), (x, c), path) for path in ("ghost", "vmap"))
    last = 0.7 if positions == 2 else 0.0
    np.testing.assert_allclose(vmap, [0.7, 0.7, last], rtol=1e-5)
    np.testing.assert_allclose(ghost, [0.0, 0.0, last], rtol=1e-5)


def test_gradients_of_a_row_that_cancel_beyond_the_range():
    """They add up to 0, whatever their size, but not when each is first multiplied by a factor above 1."""
    case, made = CASES["rows"], VARIANTS["normalized"]()
    c = np.zeros((3, 6, 3), np.float32)
    c[:, 0] = np.array([[1e18], [1e30], [MOST]])
    c[:, 1] = -c[:, 0]
    examples = jnp.ones((3, 6), jnp.int32), jnp.asarray(c)
    np.testing.assert_array_equal(in_a_batch(case.loss, made, jnp.zeros((5, 3)), examples), 0)


@pytest.mark.parametrize("signs", [[1], [1, -1], [1, -1, 0, 0]])
def test_a_lookup_out_of_range_has_an_infinite_norm(signs):
    c = np.float32(signs)[:, None] * np.nextafter(np.float32(LARGEST), np.float32(np.inf))
    assert not ghost_norms.gradient_rows_of_lookup(jnp.zeros(len(signs), jnp.int32), jnp.asarray(c))[1]


def test_a_row_that_is_read_often_is_added_in_segments():
    """A long sum of one number, which is rounded alike each time, in a table that is multiplied too."""

    def loss(table, example):
        number, tokens, x = example
        return number * jnp.sum(table[tokens]) + jnp.sum(x @ table.T)

    examples = jnp.linspace(1.0, 2.0, 40), jnp.zeros((40, 4096), jnp.int32), jnp.zeros((40, 1, 2))
    assert_bounded(in_a_batch(loss, mechanism(1.0), jnp.zeros((3, 2)), examples), 1.0)


def test_a_scale_out_of_range_makes_no_norm_vanish():
    a, scale = jnp.full((4, 1, 1, 5), 2.0**31), jnp.full((1, 5, 5), 2.0**62.5)
    found = jax.jit(jax.vmap(ghost_norms.outer_norm, (0, 0, None)), compiler_options=FULL)(a, 2 * a, scale)
    assert not (found <= LARGEST).any()


@in_float32
@pytest.mark.parametrize("power", [0, 40, 58, 61, 80, 92])
def test_positions_that_cancel_keep_a_tiny_bound(power):
    """A clip factor times a cotangent that is flushed to 0 at one position of two, whose inputs are huge."""
    clip_norm, share = 2.0**-40, 2.0**-5
    sizes = jnp.exp2(power + jnp.linspace(-1, 1, RANDOM))[:, None, None]
    x = sizes * jnp.ones((1, 2, 30))
    c = jnp.broadcast_to(jnp.array([[[1.0], [share - 1.0]]]), (RANDOM, 2, 40))
    found = alone(dense, mechanism(clip_norm), jnp.zeros((RANDOM, 30, 40)), (x, c))
    assert_bounded(found, clip_norm, least_share=float(power < 63))


@in_float32
def test_a_place_counted_from_the_end_is_counted_once():
    """dynamic_slice adds the length to a negative place: once, also where the sum over the batch is made of it."""
    w, places = normal(1, 7, 3), jnp.arange(-9, 10, dtype=jnp.int32)
    examples = places, normal(2, 19, 2, 3)
    loss = CASES["slice"].loss
    for clip_norm in (1e-3, 1e6):
        assert_agrees(loss, w, examples, norms=("ghost",), made=mechanism(clip_norm))
    step = jax.jit(lambda one: gradient(loss, mechanism(1e6), w, one, jnp.ones(1), "ghost", mechanism(1e6).init(w)))
    for place, c in zip(*examples, strict=True):
        found = step((place[None], c[None])).updates[0]
        np.testing.assert_allclose(found, jax.grad(loss)(w, (place, c)), rtol=1e-6)


@in_float32
def test_a_large_factor_keeps_an_input_finite_whose_cotangent_is_0():
    """The input is smaller than the cotangent, so it is the input that is weighted."""
    x, c = jnp.ones((1, 2, 30)).at[0, 0].set(MOST), jnp.full((1, 2, 40), 1e-6).at[0, 0].set(0.0)
    normalized = dpx.mechanisms.normalized(mechanism(), stability=1e-6)
    ghost, vmap = (
        in_a_batch(CASES["gram"].loss, normalized, jnp.zeros((30, 40)), (x, c), path) for path in ("ghost", "vmap")
    )
    assert 0 < vmap < 0.71
    np.testing.assert_allclose(ghost, vmap, rtol=2e-3)
