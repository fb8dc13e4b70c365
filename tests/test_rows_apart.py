"""No row of a batch reaches another row: whatever one row holds, the others keep every bit.

Amplification by sampling and the bound both need it, and it is a claim about kernels: XLA may compute a batch in a form
that adds zeros times a row to another one, and 0 * NaN is NaN.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpx
from dpx.sums.clipped_sum import LARGEST
from dpx.xla.jaxprs import walk_equations
from dpx.xla.place import tracing_for_place
from dpx.xla.rows_apart import gradient_may_mix_rows, with_rows_apart
from tests.devices import on_eight_devices
from tests.test_ghost_hostile import CASES, ONCE

ROWS, SIZE = 4, 6
HOSTILE = (np.nan, np.inf, -np.inf, np.float32(3e38))
NHWC = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)
W = RNG.normal(size=(SIZE, SIZE)).astype(np.float32)
ROW = {
    "x": RNG.normal(size=(ROWS, SIZE, SIZE)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, SIZE, SIZE)).astype(np.float32),
    "c": RNG.normal(size=ROWS).astype(np.float32),  # the cotangent
    "i": RNG.integers(SIZE, size=(ROWS, SIZE)).astype(np.int32),
    "seed": np.arange(ROWS, dtype=np.uint32),
}
RBG = [jax.random.key(7, impl=impl) for impl in ("rbg", "unsafe_rbg")]


def convolution(x, k, **options):
    strides = options.pop("window_strides", (1,) * (x.ndim - 2))
    return lax.conv_general_dilated(x, k, strides, options.pop("padding", "SAME"), **options)


def grouped(x, k):
    return convolution(x, k, feature_group_count=2)


def positive(x):
    return x @ x.T + SIZE * jnp.eye(SIZE)


def slow(r):
    """Two positive numbers, large in the hostile row, whose series need few terms for the other rows and many there."""
    large = jnp.where(r["seed"] == 1, 1e4, 1.0)
    return [large * (1 + abs(r[part][0, 0])) for part in ("x", "y")]


def slow_beta(r):
    a, b = lax.stop_gradient(slow(r))
    return lax.betainc(a, b, 0.999 * a / (a + b) + 1e-5 * r["c"]) ** 2


def steps_of(x):
    """A loop whose length depends on the row."""
    return lax.while_loop(lambda s: (s[0] < 5) & (s[1].sum() < 3), lambda s: (s[0] + 1, s[1] * 2 + x), (0, x))[1]


@jax.custom_vjp
def backward_in_groups(x, y):
    return x


backward_in_groups.defvjp(
    lambda x, y: (x, (x, y)),
    lambda kept, dx: (dx, convolution(kept[0][:, None], kept[1][:, None, :3], batch_group_count=3)[0, :, :3] @ W[:3]),
)


@jax.custom_jvp
def tangent_in_groups(x, k):
    return x * k.sum()


tangent_in_groups.defjvp(
    lambda given, t: (tangent_in_groups(*given), grouped(t[0], given[1]) + grouped(given[0], t[1]))
)


UNARY = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor lgamma log "
)
UNARY += "log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh bessel_i0e bessel_i1e"
BINARY = "add atan2 div max min mul pow rem sub"
VALUES = {
    "unary": lambda r: [getattr(lax, name)(r["x"]) for name in UNARY.split()],
    "binary": lambda r: [getattr(lax, name)(r["x"], r["y"]) for name in BINARY.split()],
    "special": lambda r: [
        lax.igamma(abs(r["x"]), abs(r["y"])),
        lax.igammac(abs(r["x"]), abs(r["y"])),
        lax.betainc(jnp.float32(2), jnp.float32(3), lax.logistic(r["y"])),
        lax.polygamma(1 + abs(jnp.round(r["x"])), r["y"]),
        lax.integer_pow(r["x"], 3),
        lax.clamp(-1.0, r["x"], 1.0),
        lax.reduce_precision(r["x"], 8, 7),
        jnp.where(r["x"] > r["y"], r["x"], r["y"]),
        lax.bitcast_convert_type(r["x"], jnp.int32),
        r["x"].astype(jnp.bfloat16).astype(jnp.float32),
        r["x"].astype(jnp.int32) & 3,
        lax.is_finite(r["x"]),
    ],
    "products": lambda r: [
        r["x"] @ W,
        W @ r["x"],
        r["x"] @ r["y"],
        jnp.einsum("ij,ij->i", r["x"], r["y"]),
        r["x"][0] @ W,
    ],
    "low products": lambda r: [(r["x"].astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)).astype(jnp.float32)],
    "sums": lambda r: [
        *(f(r["x"], 0) for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.cumsum, jnp.cumprod)),
        *(f(r["x"], 0) for f in (lax.cummax, lax.cummin, lax.cumlogsumexp, jax.nn.softmax, jax.nn.logsumexp)),
        lax.associative_scan(jnp.multiply, r["x"]),
        jnp.any(r["x"] > 0, 0),
        jnp.all(r["x"] > 0, 0),
    ],
    "windows": lambda r: [
        lax.reduce_window(r["x"], np.float32(0), lax.add, (3, 3), (1, 2), "SAME"),
        lax.reduce_window(r["x"], np.float32(-np.inf), lax.max, (2, 2), (2, 2), "VALID"),
        lax.reduce_window(r["x"], np.float32(np.inf), lax.min, (2, 2), (1, 1), "SAME"),
    ],
    "order": lambda r: [
        jnp.sort(r["x"]),
        *lax.sort((r["x"], r["y"])),
        lax.top_k(r["x"], 2)[0],
        lax.approx_max_k(r["x"], 2)[0],
        jnp.median(r["x"]),
    ],
    "indices": lambda r: [
        r["x"][r["i"]],
        jnp.take_along_axis(r["x"], r["i"][:, None], 1),
        jnp.asarray(W)[r["i"]] * r["x"],
        *(getattr(r["x"].at[r["i"]], how)(r["y"]) for how in ("set", "add", "subtract")),
        jnp.zeros((SIZE, SIZE)).at[r["x"][0].astype(jnp.int32)].add(r["y"], mode="drop"),
        lax.dynamic_slice(r["x"], (r["i"][0], 0), (2, SIZE)),
        lax.dynamic_update_slice(r["x"], r["y"][:2], (r["i"][0], 0)),
        jax.ops.segment_sum(r["x"], r["i"], SIZE),
    ],
    "moves": lambda r: [
        lax.rev(r["x"], (0,)),
        r["x"].T,
        lax.pad(r["x"], np.float32(0), ((1, 2, 1), (-1, 0, 0))),
        jnp.concatenate([r["x"], r["y"]]),
        jnp.stack([r["x"], r["y"]]),
        jnp.tile(r["x"], 2),
        r["x"][1:3, ::2],
        jnp.split(r["x"], 2)[0],
        r["x"].reshape(4, 9),
    ],
    "fourier": lambda r: [abs(jnp.fft.fft2(r["x"])), jnp.fft.irfft(jnp.fft.rfft(r["x"]) * 2), jnp.fft.fft(r["x"]).imag],
    "linear algebra": lambda r: [
        jnp.linalg.cholesky(positive(r["x"])),
        *jnp.linalg.qr(r["x"]),
        jnp.linalg.eigh(positive(r["x"]))[0],
        jnp.linalg.svd(r["x"], compute_uv=False),
        jnp.linalg.solve(positive(r["x"]), r["y"]),
        jnp.linalg.inv(positive(r["x"])),
        lax.linalg.triangular_solve(positive(r["x"]), r["y"], left_side=True, lower=True),
        lax.linalg.triangular_solve(jnp.asarray(W), r["y"], left_side=True, lower=True),
        lax.linalg.tridiagonal_solve(r["x"][0], 9 + r["x"][1], r["x"][2], r["y"]),
        jax.scipy.sparse.linalg.cg(lambda v: positive(r["x"]) @ v, r["y"][0], maxiter=3)[0],
        jnp.linalg.det(r["x"]),
    ],
    "control": lambda r: [
        lax.scan(lambda h, x: (jnp.tanh(h @ W + x), h), r["x"][0], r["y"])[0],
        lax.cond(r["x"][0, 0] > 0, lambda x: x * 2, lambda x: x @ W, r["x"]),
        lax.switch(r["i"][0], [lambda x: x, jnp.tanh, lambda x: -x], r["x"]),
        jax.checkpoint(lambda x: jnp.tanh(x @ W))(r["x"]),
        lax.map(lambda x: x @ W, r["x"]),
        lax.stop_gradient(r["x"]) * r["y"],
        lax.optimization_barrier(r["x"]) * 2,
        backward_in_groups(r["x"], r["y"]),
    ],
    "random": lambda r: [
        jax.random.normal(jax.random.key(r["seed"]), (3,)) * r["x"][0, :3],
        jax.random.gamma(jax.random.key(r["seed"]), abs(r["x"][0, :3])),
        jax.random.permutation(jax.random.split(jax.random.key(r["seed"]))[0], r["x"]),
        jax.random.categorical(jax.random.fold_in(jax.random.key(r["seed"]), 3), r["x"]),
    ],
    "rbg": lambda r: [
        *(jax.random.normal(jax.random.fold_in(one, r["seed"]), (3,)) * r["x"][0, :3] for one in RBG),
        jax.random.gamma(jax.random.fold_in(RBG[1], r["seed"]), abs(r["x"][0, :3])),
        jax.jit(lambda key: jax.random.bits(jax.random.split(key)[0], (3,)))(jax.random.fold_in(RBG[1], r["seed"])),
        lax.rng_bit_generator(jnp.full(4, r["seed"]), (3,))[1],
    ],
    "convolutions": lambda r: [
        convolution(r["x"][None, ..., None], jnp.asarray(W)[:3, :3, None, None], dimension_numbers=NHWC),
        convolution(r["x"][None, ..., None], r["y"][:3, :3, None, None], dimension_numbers=NHWC),
        convolution(r["x"][None], r["y"][:, None, :3], feature_group_count=SIZE),
        convolution(r["x"][None], jnp.asarray(W)[:, :3, None], feature_group_count=2),
        convolution(r["x"][:, None], r["y"][:, None, :3], batch_group_count=3, rhs_dilation=(2,)),
        convolution(jnp.asarray(W)[:, None], r["y"][:, None, :3], batch_group_count=2, padding=[(1, 0)]),
        tangent_in_groups(r["x"][None], r["y"][:, :3, None]),
        lax.conv_general_dilated_patches(r["x"][None, None], (2, 2), (1, 1), "SAME"),
        lax.conv_transpose(r["x"][None, ..., None], r["y"][:3, :3, None, None], (2, 2), "SAME", dimension_numbers=NHWC),
    ],
    "convolutions in loops": lambda r: [
        lax.scan(lambda x, k: (grouped(x, k), ()), r["x"][None], jnp.stack([r["y"][:, :3, None]] * 2))[0],
        jax.checkpoint(grouped)(r["x"][None], r["y"][:, :3, None]),
        lax.cond(r["c"] > 0, lambda k: grouped(r["x"][None], k), lambda k: r["x"][None], r["y"][:, :3, None]),
    ],
    "not differentiable": lambda r: [
        lax.nextafter(r["x"], r["y"]),
        lax.zeta(1.5 + abs(r["x"]), abs(r["y"])),
        lax.reduce_window(r["x"], np.float32(1), lax.mul, (2, 2), (1, 1), "SAME"),
        *(getattr(r["x"].at[r["i"]], how)(r["y"]) for how in ("multiply", "min", "max")),
        lax.ragged_dot(r["x"][:, :3], r["y"].reshape(2, 3, SIZE), jnp.array([2, 4], jnp.int32) + 0 * r["i"][:2]),
        lax.reduce(r["x"], np.float32(0), lambda a, b: jnp.hypot(a, b), (0,)),
        steps_of(r["x"]),
        jnp.linalg.eigvals(r["x"]).real,
        jax.scipy.linalg.schur(r["x"])[0],
        jax.scipy.linalg.hessenberg(r["x"]),
        lax.linalg.householder_product(r["x"], r["y"][0]),
        lax.linalg.symmetric_product(r["x"], r["y"], symmetrize_output=True),
        lax.linalg.tridiagonal(positive(r["x"]))[1],
        lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(r["x"])[1], SIZE),
        lax.reduce_xor(r["i"], (0,)),
    ],
    "series": lambda r: [
        lax.igamma(slow(r)[0], 0.99 * slow(r)[0]),
        lax.igammac(slow(r)[0], 1.01 * slow(r)[0]),
        jax.random.gamma(jax.random.key(r["seed"]), slow(r)[0]),
        jax.random.poisson(jax.random.key(r["seed"]), slow(r)[0]),
    ],
    "incomplete beta": lambda r: [
        slow_beta(r),
        jax.jit(slow_beta)(r),
        jax.checkpoint(slow_beta)(r),
        lax.scan(lambda total, _: (total + slow_beta(r), ()), 0.0, length=2)[0],
        lax.cond(r["seed"] < 9, slow_beta, lambda r: jnp.float32(0), r),
    ],
}  # fmt: skip
WITHOUT_GRADIENT = "not differentiable"


def of_row(name, row):
    """The values, and their gradient by everything that is float in the row."""
    values = VALUES[name](row)
    if name == WITHOUT_GRADIENT:
        return values

    def loss(floats):
        leaves = jax.tree.leaves(VALUES[name](row | floats))
        real = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return floats["c"] * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in real)

    return values, jax.grad(loss)({part: row[part] for part in ("x", "y", "c")})


def hostile_rows(row: int):
    """The rows, with one that is hostile in what the loss is given, in its cotangent, or in its indices."""
    for part in ("x", "y", "c"):
        for value in HOSTILE:
            changed = ROW[part].copy()
            changed[row] = value
            yield ROW | {part: changed}
    changed = ROW["i"].copy()
    changed[row] = [-1, -(2**31), 2**31 - 1, SIZE, 0, 7]
    yield ROW | {"i": changed}
    yield ROW | {"seed": np.where(np.arange(ROWS) == row, np.uint32(9), ROW["seed"])}


def assert_others_equal(found, expected, row: int):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.delete(np.asarray(leaf), row, 0) for leaf in (one, other))
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.long_cases("control", "indices", "linear algebra", "not differentiable", "random", "series", "special")
def test_no_row_reaches_another_in_any_primitive(name):
    run = jax.jit(jax.vmap(with_rows_apart(functools.partial(of_row, name))))
    expected, row = run(ROW), 0 if name == "rbg" else 1
    for rows in hostile_rows(row):
        assert_others_equal(run(rows), expected, row)


# Primitives that hold no row of their own, by why.
OUTSIDE = {
    "several devices or processes": """all_gather all_gather_invariant all_gather_reduced all_to_all axis_index
        pbroadcast pmax pmin ppermute precv preduced psend psum psum_invariant pvary ragged_all_to_all reduce_scatter
        reshard reduced_vary_cast_p unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p sharding_constraint
        inspect_sharding layout_constraint global_array_to_host_local_array host_local_array_to_global_array""",
    "the user's own, on the host or in a batch": """debug_callback debug_print ffi_call io_callback pure_callback
        custom_vmap_call check""",
    "changed in place": "addupdate freeze get new_ref swap",
    "dpx's own": "away_from_tpus",
    "what jax writes while it traces": """call_hi_primitive call_hi_primitive_linearized custom_lin dce_sink empty
        eq_to eval_jaxpr from_edtype le_to lt_to name remat_opt stage tie to_edtype""",
    "integers, number by number": """clz mulhi population_count shift_left shift_right_arithmetic xor philox2x32
        philox4x32 random_clone random_unwrap random_wrap threefry2x32 threefry4x32""",
    "one kind of GPU": """dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper scaled_dot
        scaled_matmul dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper scaled_matmul_wrapper""",
    "inside of others": "geqp3 geqrf ormqr select_and_gather_add",
}


@pytest.mark.long
def test_the_cases_have_every_primitive_that_can_hold_a_row():
    from jax._src.interpreters import batching

    seen = set()
    for name in VALUES:
        closed = jax.make_jaxpr(functools.partial(of_row, name))(jax.tree.map(lambda leaf: leaf[0], ROW))
        seen |= {equation.primitive.name for equation in walk_equations(closed.jaxpr)}
    outside = {name for names in OUTSIDE.values() for name in names.split()}
    assert {primitive.name for primitive in batching.fancy_primitive_batchers} <= seen | outside


# Convolutions by every path of a private step.
BATCH = 6
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=BATCH)
KEY = dpx.secret_key(2**99 + 2)


def program(seed: int):
    """(loss, params, examples): a random convolution of 1 to 3 axes, whose kernel has a gradient of every path."""
    rng = np.random.default_rng(seed)
    axes, groups = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3], p=[0.2, 0.4, 0.4]))
    few = rng.integers(1, 3, size=2)
    sizes, taps = rng.integers(3, 6, size=axes), rng.integers(1, 4, size=axes)
    two = {name: tuple(map(int, rng.integers(1, 3, size=axes))) for name in ("lhs_dilation", "rhs_dilation")}
    numbers = lax.ConvDimensionNumbers(*(tuple(range(axes + 2)) for _ in range(3)))
    options = two | {"window_strides": tuple(map(int, rng.integers(1, 3, size=axes))), "dimension_numbers": numbers}
    options |= {"padding": [(int(low), 2) for low in rng.integers(0, 3, size=axes)], "feature_group_count": groups}
    shape = (int(groups * few[0]), *map(int, sizes))
    params = {"k": rng.normal(size=(int(groups * few[1]), int(few[0]), *taps)).astype(np.float32)}
    params["w"] = rng.normal(size=(3, 2)).astype(np.float32)
    examples = {
        "x": rng.normal(size=(BATCH, *shape)).astype(np.float32),
        "c": rng.normal(size=BATCH).astype(np.float32),
    }

    def loss(params, row):
        made = convolution(row["x"][None], params["k"], **options)
        return row["c"] * (jnp.sum(jnp.tanh(made) + 0.1 * made) + jnp.sum(jnp.tanh(row["x"].ravel()[:3] @ params["w"])))

    return loss, params, examples


def of_betainc():
    """The same of a function that one row, the hostile one, makes jax iterate 200 times."""
    rng = np.random.default_rng(5)
    params = {"k": rng.normal(size=3).astype(np.float32), "w": rng.normal(size=(3, 2)).astype(np.float32)}
    examples = {"x": rng.normal(size=(BATCH, 3)), "a": rng.uniform(1, 4, size=BATCH), "c": rng.normal(size=BATCH)}
    examples["x"][1], examples["a"][1] = 1e-3, 1e4
    examples = {name: leaf.astype(np.float32) for name, leaf in examples.items()}

    def loss(params, row):
        below = lax.betainc(row["a"], row["a"], lax.logistic(row["x"] @ params["k"]))
        return row["c"] * (below**2 + jnp.sum(jnp.tanh(row["x"] @ params["w"])))

    return loss, params, examples


def penalized(loss):
    return lambda params, row: loss(params, row) + 1e-2 * jnp.sum(params["k"] ** 2)


def twice(loss):
    return lambda params, row: loss(params, row) + loss(jax.tree.map(jnp.tanh, params), row)


def looped(loss):
    def total(params, row):
        return lax.scan(
            lambda sum, scale: (sum + jax.checkpoint(loss)(params, row | {"x": scale * row["x"]}), ()), 0.0, ones
        )[0]

    ones = jnp.ones(2)
    return total


def dp_sgd(**options):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=0.0, sampling=SAMPLING, key=KEY, **options)


def adaptive():
    return dpx.mechanisms.adaptive_clipping(
        initial_clip_norm=1.0, noise_multiplier=1.0, indicator_noise=5.0, sampling=SAMPLING, key=KEY
    )


def projected():
    return dpx.in_coordinates(
        dp_sgd(), dpx.coordinates.random_projection(rank=1, kind="gaussian", key=dpx.secret_key(2**99))
    )


def of_update(loss, mechanism):
    return dpx.private_updates_from(lambda params, row: jax.grad(loss)(params, row), mechanism)


def in_chunks(loss, mechanism):
    chunks = dpx.private_updates_in_chunks(loss, mechanism)

    def step(params, batch, state):
        halves = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in (slice(0, 4), slice(4, BATCH))]
        sums = chunks.add(params, halves[0], state)
        norms = sums.unreleased.norms
        sums = chunks.add(params, halves[1], state, sums)
        updates, state = chunks.release(params, sums, state)
        return updates, state, sums.unreleased._replace(norms=jnp.concatenate([norms, sums.unreleased.norms]))

    return step


def updates(**options):
    return lambda loss, mechanism: dpx.private_updates(loss, mechanism, **options)


PATHS = {
    "by default": (updates(), lambda loss: loss, dp_sgd),
    "vmap": (updates(norms="vmap"), lambda loss: loss, dp_sgd),
    "ghost": (updates(norms="ghost", microbatch_size=4), lambda loss: loss, dp_sgd),
    "penalty": (updates(), penalized, dp_sgd),
    "penalty in microbatches": (updates(microbatch_size=2), penalized, dp_sgd),
    "used twice": (updates(), twice, dp_sgd),
    "in a loop": (updates(norms="vmap"), looped, dp_sgd),
    "two passes": (updates(backward_passes=2), looped, dp_sgd),
    "adaptive clipping": (updates(), penalized, adaptive),
    "projected": (updates(), penalized, projected),
    "an update": (of_update, penalized, dp_sgd),
    "chunks": (in_chunks, penalized, dp_sgd),
}


def assert_rows_apart(build, loss, made, params, examples, sharding=None):
    """A hostile row against a null in its place: the norms of the others, and their sum, keep every bit."""
    step, state = jax.jit(build(loss, made)), made.init(params)
    leaves, structure = jax.tree.flatten(examples)
    row, null = 1, np.arange(BATCH) != 1

    def run(leaves, included):
        batch = dpx.Batch(structure.unflatten(leaves), included)
        found, _, unreleased = step(params, batch if sharding is None else jax.device_put(batch, sharding), state)
        return jax.tree.leaves(found), jax.tree.map(np.asarray, unreleased.norms)

    expected = run(leaves, null)
    for part, value in itertools.product(range(len(leaves)), (np.nan, np.inf, np.float32(3e38))):
        if leaves[part].dtype == np.float32:
            hostile = [leaf.copy() for leaf in leaves]
            hostile[part][row] = value
            for included in (null, np.ones(BATCH, bool)):
                sums, norms = run(hostile, included)
                assert_others_equal(norms, expected[1], row)
                if included is null or not all(norm[row] <= LARGEST for norm in jax.tree.leaves(norms)):
                    assert all(map(np.array_equal, sums, expected[0]))


def assert_apart(made: tuple, path: str, sharding=None):
    (build, change, mechanism), (loss, params, examples) = PATHS[path], made
    assert_rows_apart(build, change(loss), mechanism(), params, examples, sharding)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in ONCE)) for name in CASES])
@pytest.mark.long_cases("used twice")
def test_no_row_reaches_another_in_any_way_to_a_norm(name):
    """In microbatches, the last of which is one row."""
    case, rng = CASES[name], np.random.default_rng(3)

    def random(leaf, *batch):
        drawn = rng.normal if leaf.dtype == np.float32 else functools.partial(rng.integers, 0, 3)
        return drawn(size=(*batch, *leaf.shape)).astype(leaf.dtype)

    params = jax.tree.map(random, case.params)
    examples = jax.tree.map(lambda leaf: random(leaf, BATCH), case.example)
    assert_rows_apart(updates(norms="ghost", microbatch_size=5), case.loss, dp_sgd(), params, examples)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.long_cases("used twice", "projected", "adaptive", "chunks")
def test_no_row_reaches_another_in_a_grouped_convolution(path):
    assert_apart(program(6), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.long_cases("chunks", "used twice", "projected", "in a loop", "adaptive", "penalty in")
def test_no_row_makes_another_iterate(path):
    assert_apart(of_betainc(), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(2, 62))
@pytest.mark.long
def test_no_row_reaches_another_in_random_convolutions(seed, path):
    assert_apart(program(seed), path)


def test_no_row_reaches_another_in_a_convolution_in_float64():
    """It has no groups, but under jax.vmap its rows are groups, of which a CPU makes one convolution with zeros."""
    with jax.enable_x64(True):
        x, k = jnp.asarray(RNG.normal(size=(ROWS, 1, 2, SIZE))), jnp.asarray(RNG.normal(size=(2, 2, 3)))
        assert x.dtype == np.float64 and gradient_may_mix_rows(jax.make_jaxpr(convolution)(x[0], k))
        gradient = jax.grad(lambda k, x: jnp.sum(jnp.tanh(convolution(x, k))))
        run = jax.jit(jax.vmap(with_rows_apart(gradient), (None, 0)))
        expected = run(k, x)
        for value in HOSTILE:
            assert_others_equal(run(k, x.at[1].set(float(value))), expected, 1)


def check_on_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    for path in ("by default", "penalty", "ghost"):
        for made in (program(6), of_betainc()):
            assert_apart(made, path, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


@pytest.mark.long
def test_no_row_reaches_another_on_several_devices():
    on_eight_devices("from tests import test_rows_apart as t; t.check_on_devices()")


def check_kernels_on_devices():
    """Convolutions of one image, whose gradients XLA loses on all devices but the first (jaxlib 0.10.2)."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    k, x = (jnp.asarray(RNG.normal(size=size), jnp.float32) for size in ((3, 3, 2, 2), (8, 1, SIZE, SIZE, 2)))

    def loss(k, x):
        return jnp.sum(jnp.sin(convolution(x, k, dimension_numbers=NHWC)))

    def looped(k, x):
        layer = jax.checkpoint(lambda h, _: (jnp.tanh(convolution(h, k, dimension_numbers=NHWC)), None))
        return jnp.sum(jnp.cos(lax.scan(layer, x, None, length=2)[0]))

    for function in (loss, looped):
        made = dp_sgd()
        step, state = jax.jit(dpx.private_updates(function, made, norms="vmap")), made.init(k)
        batch = dpx.Batch(x, np.ones(8, bool))
        found, expected = step(k, jax.device_put(batch, sharding), state), step(k, batch, state)
        np.testing.assert_allclose(found.unreleased.norms, expected.unreleased.norms, rtol=1e-4)
        np.testing.assert_allclose(found.updates, expected.updates, atol=1e-5)


def test_kernels_have_their_gradients_on_several_devices():
    on_eight_devices("from tests import test_rows_apart as t; t.check_kernels_on_devices()")


def test_only_functions_that_can_mix_rows_are_traced_again():
    plain, grouped = (convolution, functools.partial(convolution, feature_group_count=2))
    x, k = jnp.ones((1, 4, 5)), jnp.ones((2, 2, 3))
    assert not gradient_may_mix_rows(jax.make_jaxpr(plain)(x[:, :2], k))
    assert gradient_may_mix_rows(jax.make_jaxpr(jax.jit(grouped))(x, k))
    assert gradient_may_mix_rows(jax.make_jaxpr(jax.checkpoint(tangent_in_groups))(x, k))
    assert gradient_may_mix_rows(jax.make_jaxpr(lambda x: lax.map(lambda x: lax.betainc(x, x, x), x))(x))
    implementations = *RBG, jax.random.key(7, impl="threefry2x32")
    draws = [gradient_may_mix_rows(jax.make_jaxpr(jax.random.normal)(key)) for key in implementations]
    assert draws == [True, True, False]
    assert not gradient_may_mix_rows(jax.make_jaxpr(lambda x: jax.nn.relu(x) + jax.nn.gelu(x) + jax.nn.softmax(x))(x))


@pytest.mark.parametrize("function", [jnp.linalg.eigvalsh, functools.partial(jnp.linalg.svd, compute_uv=False)])
def test_matrices_are_decomposed_one_by_one_on_a_tpu(function):
    """There, XLA rotates a batch of matrices until all are diagonal."""
    x = jnp.ones((ROWS, SIZE, SIZE))

    def operands():
        closed = jax.make_jaxpr(jax.vmap(with_rows_apart(lambda x: function(x))))(x)
        found = [each for each in walk_equations(closed) if each.primitive.name in ("eigh", "svd")]
        mixes = gradient_may_mix_rows(jax.make_jaxpr(lambda x: function(x))(x[0]))
        return mixes, [each.invars[0].aval.shape for each in found]

    assert operands() == (False, [(ROWS, SIZE, SIZE)])
    with tracing_for_place(platform="tpu"):
        assert operands() == (True, [(SIZE, SIZE)])
