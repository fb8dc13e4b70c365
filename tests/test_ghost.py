"""The privacy contract on the ghost path: bounds, padding, broken examples, masks, groups, several factors."""

from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import dpx
from dpx.gradients.ghost import algorithms, engine, make_ghost_plan, norms, plan, trace_loss
from tests.conftest import LEAST_SAVED
from tests.ghost import (
    QUICK,
    WAYS,
    assert_agrees,
    assert_same,
    clipped_sums,
    compiled,
    integers,
    key,
    mechanism,
    noiseless,
    normal,
    score,
    ways,
)

SIZE = 6
FEW = settings(max_examples=3, deadline=None, derandomize=True, database=None)


def convolve(x, kernel, strides=(1, 1)):
    return lax.conv_general_dilated(x[None], kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]


def network(params, example):
    """A parameter of every kind: a kernel, a table, a matrix on a sequence and on a vector, a scale, a bias."""
    x, tokens = example
    y = convolve(x, params["kernel"], (1, 2))
    y = jnp.tanh(y).reshape(-1, 4) @ params["sequence"]
    y = jnp.concatenate([y, params["table"][tokens]]) * params["scale"][None, :]
    return score(jnp.tanh(y).mean(axis=0) @ params["vector"] + params["bias"])


def problem(size=SIZE):
    params = {
        "kernel": normal(1, 3, 2, 2, 4),
        "sequence": normal(2, 4, 3),
        "table": normal(3, 5, 3),
        "scale": normal(4, 3),
        "vector": normal(5, 3, 2),
        "bias": normal(6, 2),
    }
    return params, (normal(7, size, 6, 4, 2), integers(8, 5, size, 4))


def inner(**options):
    sampling = dpx.PoissonSampling(examples=100, batch_size=4)
    return dpx.dp_sgd(noise_multiplier=1.0, sampling=sampling, key=key(0), **options)


def scaled(scale_of) -> dpx.coordinates.Coordinates:
    """Every coordinate times a fixed number."""

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        return jax.tree.unflatten(treedef, [scale_of(i, leaf.shape) for i, leaf in enumerate(leaves)])

    return dpx.coordinates.Coordinates(
        init=init,
        encode=lambda grad, state: jax.tree.map(jnp.multiply, grad, state),
        decode=lambda released, state, like: (released, state),
        name="scale",
        supports_ghost_norms=True,
    )


def mask(i, shape):
    return integers(i, 2, *shape).astype(jnp.float32)


def two_factors(made: dpx.Mechanism) -> dpx.Mechanism:
    """The sums of DiceSGD: the same examples under two bounds."""
    return made.replace(
        clip_factors=lambda n, state: (1e-3 / jnp.maximum(n, 1e-3), 3.0 / jnp.maximum(n, 3.0)),
        release=noiseless(made).release,
    )


MECHANISMS = {
    "clipped": lambda: mechanism(),
    "mostly unclipped": lambda: mechanism(100.0),
    "groups": lambda: mechanism(dict.fromkeys(("bias", "kernel", "scale", "sequence", "table", "vector"), 1e-2)),
    "normalized": lambda: noiseless(dpx.mechanisms.normalized(inner(clip_norm=1.0))),
    "two factors": lambda: two_factors(inner(clip_norm=1.0)),
    "mask": lambda: noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(mask))),
    "scale": lambda: noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(lambda i, s: normal(i, *s)))),
    "frozen": lambda: noiseless(
        dpx.in_coordinates(
            inner(clip_norm=1e-3),
            dpx.coordinates.trainable(mask={name: name in ("kernel", "vector") for name in problem()[0]}),
        )
    ),
    "frozen and masked": lambda: noiseless(
        dpx.in_coordinates(
            inner(clip_norm=1e-3),
            dpx.coordinates.trainable(mask={name: name != "table" for name in problem()[0]}),
            scaled(mask),
        )
    ),
}


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.long_cases("clipped", "groups", "mostly", "normalized", "frozen and")
def test_every_mechanism_gives_the_same_sums(name):
    params, batch = problem()
    sums = assert_agrees(network, params, batch, made=MECHANISMS[name](), norms=("ghost",))
    assert len(sums) == (2 if name == "two factors" else 1)


def test_the_ways_of_the_network():
    params, batch = problem()
    found = ways(network, params, batch)
    expected = dict(bias="small", kernel="product", scale="small", sequence="product", table="rows", vector="outer")
    assert found == {f"['{name}']": WAYS[method] for name, method in expected.items()}
    frozen = ways(network, params, batch, made=MECHANISMS["frozen"]())
    assert [name for name, way in frozen.items() if way == WAYS["not_trained"]] == [
        "['bias']",
        "['scale']",
        "['sequence']",
        "['table']",
    ]


def test_frozen_parameters_cost_nothing():
    params, batch = problem()
    made = MECHANISMS["frozen"]()
    step = dpx.private_updates(network, made, norms="ghost")
    text = str(jax.make_jaxpr(step)(params, dpx.Batch(batch, None), made.init(params)))
    assert "scatter" not in text  # the table's gradient


def test_broken_and_padded_examples_add_nothing():
    params, (x, tokens) = problem()
    good = clipped_sums(network, params, (x[2:5], tokens[2:5]), "ghost")
    included = jnp.array([True, False, True, True, True, False])
    step = compiled(network, mechanism(), params)
    for broken in (np.nan, np.inf, -np.inf):
        padded = x.at[0].set(broken).at[5].set(jnp.nan)
        assert_same(step((padded, tokens), included).updates, good.updates)


def test_broken_and_padded_examples_add_nothing_where_examples_are_added_one_by_one():
    params, x = {"w": normal(1, 64, 48)}, normal(2, 5, 2, 64)

    def loss(params, x):
        return score(jnp.tanh(x @ params["w"]))

    assert ways(loss, params, x) == {"['w']": WAYS["gram"]}
    good = clipped_sums(loss, params, x[:3], "ghost")
    included = jnp.array([True, True, True, True, False])
    found = clipped_sums(loss, params, x.at[3].set(jnp.inf).at[4].set(jnp.nan), "ghost", included=included)
    assert_same(found.updates, good.updates)


def normalized(size):
    """A loss of a layer whose kernel has columns of norm g, its parameters, and a batch."""

    def loss(p, x):
        return score(jnp.tanh(x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True))))

    return loss, {"v": normal(1, size, size), "g": normal(2, 1, size)}, normal(3, 5, 2, size)


@pytest.mark.parametrize(("size", "way"), [(4, "product"), (72, "recomputed")])
def test_a_broken_example_changes_no_other_where_a_kernel_is_made(size, way):
    loss, params, x = normalized(size)
    assert set(ways(loss, params, x).values()) == {WAYS[way]}
    included, step = jnp.array([True, True, False, True, True]), compiled(loss, mechanism(), params)
    alone = step(x.at[4].set(0), included)
    for broken in (np.nan, np.inf, 3e38):
        beside = step(x.at[4].set(broken).at[2].set(np.nan), included)
        chex.assert_trees_all_equal(alone.updates, beside.updates)
        for pair in zip(*(jax.tree.leaves(found.unreleased.norms) for found in (alone, beside)), strict=True):
            np.testing.assert_array_equal(*(norm[np.array([0, 1, 3])] for norm in pair))


def test_a_sum_adds_no_more_than_was_measured_where_a_kernel_is_made(monkeypatch):
    """As if the loop of the sum had rounded to twice the gradient that the loop of the norms found."""
    loss, params, x = normalized(72)
    expected, measure = clipped_sums(loss, params, x, "ghost"), engine.kernels.measure_gradients

    def half(*arguments, keep):
        (records, found), norms = measure(*arguments, keep=keep)
        return (records, [norm / 2 for norm in found]), norms

    monkeypatch.setattr(engine.kernels, "measure_gradients", half)
    found = clipped_sums(loss, params, x, "ghost")
    assert_same(found.updates, jax.tree.map(lambda x: x / 2, expected.updates))


def test_an_activation_that_overflows_where_its_gradient_vanishes():
    """0 * inf must not reach the sums, and the example counts as nothing."""

    def loss(w, x):
        return score(jnp.where(x > 1e30, 0.0, x) @ w["a"]) + 0.0 * jnp.sum(x @ w["b"])

    params, x = {"a": normal(1, 3, 4), "b": normal(2, 3, 4)}, normal(3, 4, 3)
    good = clipped_sums(loss, params, x[1:], "ghost").updates
    found = clipped_sums(loss, params, x.at[0, 0].set(jnp.inf), "ghost").updates
    assert_same(found, good)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.long_cases("1")
def test_small_batches(size):
    params, batch = problem(size)
    found = clipped_sums(network, params, batch, "ghost")
    assert found.unreleased.losses.shape == (size,)
    if size:
        assert_agrees(network, params, batch, norms=("ghost",))
    else:
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(found.updates))


@pytest.mark.parametrize("microbatch_size", [2, 4])
@pytest.mark.long_cases("4")
def test_microbatches(microbatch_size):
    params, batch = problem()
    included = jnp.array([True, False, True, True, True, False])
    whole = clipped_sums(network, params, batch, "vmap", included=included)
    summed = clipped_sums(network, params, batch, "ghost", included=included, microbatch_size=microbatch_size)
    assert_same(summed.updates, whole.updates)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_strided_dilated_grouped_and_padded_convolution(devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)  # with several, all patches are taken at once

    def loss(kernel, images):
        options: Any = {"padding": [(2, 0), (1, 3)], "rhs_dilation": (2, 3), "feature_group_count": 2}
        return score(
            lax.conv_general_dilated(images, kernel, (2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
        )

    assert_agrees(loss, normal(1, 3, 2, 2, 6), normal(2, SIZE, 2, 9, 8, 4), norms=("ghost",))


@pytest.mark.parametrize(("features", "images", "wanted"), [(16, 16, 32), (17, 1, 17), (4, 17, 4)])
def test_the_convolution_of_few_features_gets_more(features, images, wanted):
    """So that XLA takes its fast convolution on a CPU."""
    made, kernel, x = mechanism(), normal(1, 3, 3, 2, features), normal(2, 2, images, 5, 5, 2)

    def loss(kernel, x):
        return score(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    step = dpx.private_updates(loss, made, norms="ghost", microbatch_size=2)
    program = str(jax.make_jaxpr(step)(kernel, dpx.Batch(x, None), made.init(kernel)))
    assert f":f32[2,3,3,{wanted}] = conv_general_dilated" in program


def test_a_depthwise_convolution_takes_no_gradients_of_the_backward_pass():
    """`jax.vmap` would make a convolution of many groups of it, which is several times slower on a CPU."""

    def loss(kernel, x):
        return score(
            lax.conv_general_dilated(
                x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
            )
        )

    found = ways(loss, normal(1, 3, 3, 1, 8), normal(2, 4, 16, 16, 8), norms="auto")
    assert set(found.values()) == {WAYS["product"]}


@pytest.mark.parametrize("width, expected", [(16, "gradient"), (64, "gram")])
def test_a_small_kernel_over_positions_takes_its_gradients(width, expected):
    """They stay in the cache, and a norm from Gram matrices has many small operations."""
    found = ways(lambda w, x: score(jnp.tanh(x @ w)), normal(1, width, width), normal(2, 4, 8, width), norms="auto")
    assert set(found.values()) == {WAYS[expected]}


@pytest.mark.long
def test_a_deep_convolutional_network_takes_no_more_memory_than_its_gradients():
    """The products are made as the backward pass frees what they are made of."""
    params, batch = [jnp.zeros((3, 3, 16, 16))] * 6, jnp.zeros((128, 16, 16, 16))

    def loss(params, x):
        for kernel in params:
            x = jax.nn.relu(convolve(x, kernel))
        return jnp.sum(x)

    def held(clipping):
        made = mechanism()
        gradient = jax.jit(dpx.private_updates(loss, made, norms=clipping, microbatch_size=128))
        memory: Any = gradient.lower(params, dpx.Batch(batch, None), made.init(params)).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert held("ghost") < 1.05 * held("vmap")


@pytest.mark.parametrize("power, other", [(-22, 18), (-18, 18), (0, 0), (18, -18), (18, -22)])
@pytest.mark.parametrize("positions", [1, 4])
def test_the_bound_holds_where_squares_vanish_or_overflow(power, other, positions):
    """Tiny activations times huge gradients: |a|^2 is 0 in float32 although |a||b| is not."""

    def loss(w, x):
        return 10.0**other * jnp.sum((x * 10.0**power) @ w)

    w, x = normal(1, 40, 30), normal(2, 1, positions, 40)
    (total,) = clipped_sums(loss, w, x, "ghost", made=mechanism(1e-3)).updates
    assert 1e-3 * (1 - 1e-4) <= jnp.linalg.norm(total) <= 1e-3 * (1 + 1e-6)


def test_the_bound_holds_where_the_gram_matrices_cancel():
    """Positions that add up to almost nothing: the norm must not be underestimated."""
    half = normal(1, 20, 8, 50)
    x = jnp.concatenate([half, -half + 1e-4 * normal(2, 20, 8, 50)], axis=1)
    clip_norm = 1e-4

    def loss(w, x):
        return jnp.sum(x @ w)

    assert ways(loss, normal(3, 50, 40), x, norms="ghost") == {"": WAYS["gram"]}
    made = mechanism(clip_norm)
    step = dpx.private_updates(loss, made, norms="ghost")
    w = normal(3, 50, 40)
    (totals,) = jax.jit(jax.vmap(lambda one: step(w, dpx.Batch(one[None], None), made.init(w)).updates))(x)
    for total in totals:
        assert jnp.linalg.norm(total) <= clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("positions", [40, 600])
def test_the_bound_holds_where_uses_cancel(positions):
    """By Gram matrices, and by a gradient that is computed, in segments, and thrown away."""
    x, delta, w = normal(1, 8, positions, 30), normal(2, 8, positions, 30), normal(3, 30, 20)

    def loss(w, x):
        return jnp.sum(x[0] @ w) + jnp.sum(x[1] @ w)

    for size in (1e-3, 1e-5, 0.0):
        batch = jnp.stack([x, -x + size * delta], 1)
        assert ways(loss, w, batch) == {"": WAYS["shared" if positions < 100 else "recomputed"]}
        made = mechanism(1e-4)
        step = dpx.private_updates(loss, made, norms="ghost")
        (totals,) = jax.jit(jax.vmap(lambda one: step(w, dpx.Batch(one[None], None), made.init(w)).updates))(batch)  # noqa: B023
        assert (np.linalg.norm(np.asarray(totals, np.float64), axis=(1, 2)) <= 1e-4 * (1 + 1e-6)).all()


def tied(params, tokens):
    """A table that is looked up and multiplied with, as in a language model."""
    x = params["table"][tokens[:-1]]
    x = x + jnp.tanh(x @ params["w"])
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["table"].T), tokens[1:, None], 1).mean()


@pytest.mark.parametrize(
    "positions, width, rows, most",
    [(64, 768, 300, 1e-4), (192, 300, 1100, 3e-4), (512, 32, 64, 1e-3), (2048, 16, 32, 1e-3)],
)
@pytest.mark.long_cases("192-300-1100", "512-32-64")
def test_rounding_raises_no_norm_by_more_than_a_thousandth(positions, width, rows, most):
    params = {"table": 0.02 * normal(1, rows, width), "w": width**-0.5 * normal(2, width, width)}
    tokens = integers(3, rows, 1, positions + 1)
    found = clipped_sums(tied, params, tokens, "ghost").unreleased.norms[0]
    true = optax.tree.norm(jax.jit(jax.grad(tied), compiler_options=QUICK)(params, tokens[0]))
    assert true * (1 - 1e-5) <= found <= true * (1 + most)


@pytest.mark.parametrize("positions, told", [(8, ""), (200, "0.07"), (300, "0.02")])
def test_what_rounding_may_raise_is_told(positions, told):
    x = (
        jax.ShapeDtypeStruct((2, positions // 2, 100), np.float32),
        jax.ShapeDtypeStruct((2, positions // 2, 100), np.float32),
    )
    w = jax.ShapeDtypeStruct((100, 100), np.float32)
    (row,) = dpx.explain_norms(
        lambda w, x: score(x[0] @ w) + score(x[1] @ w), mechanism(), w, dpx.Batch(x, None), norms="ghost"
    ).rows
    assert row[2] == (f"raised by up to {told}% against rounding" if told else "")


def test_a_sum_of_positions_is_off_by_less_than_is_stated():
    """Terms of one sign whose sums are all rounded down, in any order of segments."""
    for positions in (2, 200, 600, 3000):
        a = jnp.full((1, positions, 3), np.float32(1 + 2.0**-12 + 2.0**-23))
        found = norms.einsum_by_segments("kti,kto->kio", a, a)
        error = np.linalg.norm(np.float64(found) - positions * np.float64(a[0, 0, 0]) ** 2)
        assert error <= norms.sum_error(positions) * 3 * np.sqrt(positions) * np.float64(a[0, 0, 0]) ** 2


SATURATED = normal(1, 1, 2, 64).at[0, 0].set(1e30)
MASKED = normal(1, 1, 4, 64).at[0, 2:].set(9.96921e36), jnp.array([[1.0, 1, 0, 0]])
AGAINST = jnp.stack([jnp.full(64, 1e12), jnp.full(64, 1e-13)])[None], jnp.array([[1e-13, 1e12]])
SIZES = {  # loss(w, example), w, one example, way
    "saturated": (lambda w, x: jnp.sum(jnp.tanh(x @ w)), normal(0, 64, 64), SATURATED, "gram"),
    "masked": (lambda w, e: jnp.sum(e[1][:, None] * jnp.sin(e[0] @ w)), normal(0, 64, 64), MASKED, "gram"),
    "against": (lambda w, e: jnp.sum(e[1][:, None] * (e[0] @ w)), normal(0, 64, 64), AGAINST, "gram"),
    "heads": (
        lambda w, x: jnp.sum(jnp.einsum("hd,hde->he", x, w)[1:]),
        normal(0, 4, 8, 8),
        normal(1, 1, 4, 8).at[0, 0].set(1e30),
        "outer",
    ),
    "shared": (
        lambda w, x: jnp.sum(jnp.tanh(x[0] @ w)) + jnp.sum(jnp.tanh(x[1] @ w)),
        normal(0, 64, 64),
        SATURATED,
        "shared",
    ),
    "tied": (  # a token that is looked up, and a missing one (-1) of a huge cotangent
        lambda w, e: (
            jnp.sum(e[1][:, None] * w.at[e[0]].get(mode="fill", fill_value=0.0, wrap_negative_indices=False))
            + jnp.sum(jnp.tanh(w @ jnp.ones(4)))
        ),
        normal(0, 6, 4),
        (jnp.array([[2, -1]]), jnp.array([[1.0, 1e30]])),
        "shared",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_bound_holds_where_positions_differ_in_size(name):
    """Each position has its own size: what is huge and without a gradient must not hide the others."""
    loss, w, example, way = SIZES[name]
    w = 0.1 * w
    assert ways(loss, w, example, norms="ghost") == {"": WAYS[way]}
    sums = [clipped_sums(loss, w, example, clipping, made=mechanism(1e-3)).updates for clipping in ("ghost", "vmap")]
    assert np.linalg.norm(sums[0][0]) == pytest.approx(1e-3, rel=5e-5)
    assert_same(*sums)


@pytest.mark.parametrize("value", [1e30, 3e38])
@pytest.mark.parametrize("huge", ["input", "output"])
@pytest.mark.long_cases("output-1e+30", "input-1e+30")
def test_the_bound_holds_where_what_is_huge_is_frozen(huge, value):
    """It neither hides what is trained nor, where the sum over the batch overflows, reaches it."""
    mask = jnp.ones((64, 3)).at[(0, slice(None)) if huge == "input" else (slice(None), 0)].set(0.0)
    freeze = dpx.coordinates.Coordinates(
        init=lambda params: mask,
        encode=lambda grad, state: grad * state,
        decode=lambda released, state, like: (released, state),
        name="freeze",
        supports_ghost_norms=True,
    )
    tight, loose = (noiseless(dpx.in_coordinates(inner(clip_norm=norm), freeze)) for norm in (1e-3, 1e3))
    x = jnp.tile(jnp.clip(normal(1, 1, 64), -1, 1).at[0, 0].set(value if huge == "input" else 1.0), (4, 1))
    size = jnp.array([1.0 if huge == "input" else value, 1.0, 1.0])

    def loss(w, x):
        return jnp.sum(size * (x @ w))

    w = jnp.ones((64, 3))
    assert ways(loss, w, x, made=tight) == {"": WAYS["outer"]}
    (total,) = clipped_sums(loss, w, x, "ghost", made=tight).updates
    assert np.linalg.norm(total) == pytest.approx(4e-3, rel=1e-4)
    assert_agrees(loss, w, x, made=loose, norms=("ghost",))


@pytest.mark.parametrize("fan_in", [256, 4096, 65536])
@pytest.mark.long_cases("256", "65536")
def test_the_bound_holds_where_long_sums_cancel(fan_in):
    """Rounding grows with the length of a sum, most where its terms are all alike."""
    made, w = mechanism(1e-3), jnp.zeros((fan_in, 16))

    def loss(w, x):
        return jnp.sum(x @ w)

    step = jax.jit(dpx.private_updates(loss, made, norms="ghost"))
    half = (jnp.arange(fan_in) < fan_in // 2).astype(jnp.float32)
    for base in (jnp.full(fan_in, 0.6).at[0].set(1.0), normal(1, fan_in)):
        for delta in np.geomspace(1e-4, 3e-2, 40):
            x = jnp.stack([base, -base * (1 + delta * half)])[None]
            assert ways(loss, w, x, norms="ghost") == {"": WAYS["gram"]}
            assert jnp.linalg.norm(step(w, dpx.Batch(x, None), made.init(w)).updates[0]) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("fan_in", [4096, 65536])
def test_the_bound_holds_where_small_terms_are_rounded_away(fan_in):
    """1, and then squares of half a unit in its last place: a sum in order loses all of them."""
    made, w = mechanism(1e-3), jnp.zeros((fan_in, 8))
    x = jnp.zeros((1, 2, fan_in)).at[:, 0].set(np.sqrt(0.49 * 2.0**-23)).at[:, 0, 0].set(1).at[:, 1, 1].set(1e-6)

    def loss(w, x):
        return jnp.sum(x @ w)

    assert ways(loss, w, x, norms="ghost") == {"": WAYS["gram"]}
    (total,) = clipped_sums(loss, w, x, "ghost", made=made).updates
    assert np.linalg.norm(np.asarray(total, np.float64)) <= 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize("clipping", ["ghost", "vmap"])
def test_what_a_loss_closes_over_changes(clipping):
    """As in JAX, a step that is traced again reads the new value."""
    teacher, w, x = {"value": 1.0}, jnp.ones((3, 2)), normal(1, SIZE, 4, 3)
    made = mechanism(1e3)
    step = dpx.private_updates(lambda w, x: teacher["value"] * jnp.sum(x @ w), made, norms=clipping)

    def updates():
        return jax.jit(lambda batch: step(w, batch, made.init(w)).updates[0])(dpx.Batch(x, None))

    before, teacher["value"] = updates(), 2.0
    chex.assert_trees_all_close(updates(), 2 * before, rtol=1e-6)


@pytest.mark.parametrize("positions", [2, 64])
def test_the_bound_holds_where_the_gradients_of_a_row_cancel(positions):
    rng = np.random.default_rng(0)
    c = (1e6 * rng.standard_normal((100, positions))).astype(np.float32)
    running = np.zeros(100, np.float32)
    for column in c.T[:-1]:
        running += column
    c[:, -1] = -running + np.spacing(running) * rng.integers(0, 3, 100)
    tokens, made, table = jnp.zeros((100, positions), jnp.int32), mechanism(1.2345e-3), jnp.zeros((5, 8))

    def loss(table, example):
        tokens, c = example
        return jnp.sum(c[:, None] * table[tokens])

    step = dpx.private_updates(loss, made, norms="ghost")
    one = jax.vmap(
        lambda *one: step(table, dpx.Batch(jax.tree.map(lambda x: x[None], one), None), made.init(table)).updates[0]
    )
    assert jnp.linalg.norm(jax.jit(one)(tokens, jnp.asarray(c)).reshape(100, -1), axis=1).max() <= 1.2345e-3 * (
        1 + 1e-5
    )


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.uint8, jnp.int8])
def test_rows_are_found_in_the_dtype_of_the_indices(mode, dtype):
    """Cotangents that would cancel in a wrong common row."""
    # With int8 indices into more than 127 rows, XLA writes outside of the gradient, without dpx too.
    table, largest = normal(0, 100 if dtype == jnp.int8 else 200, 8), jnp.iinfo(dtype).max
    example = jnp.array([[largest, 0, 3]], dtype), jnp.array([[1.0, -1.0, 0.1]])

    def loss(table, example):
        tokens, c = example
        return jnp.sum(c[:, None] * jnp.take(table, tokens, axis=0, mode=mode, fill_value=0))

    assert_agrees(loss, table, example, norms=("ghost",))


def test_custom_derivatives_that_close_over_the_loss_fall_back():
    params = {"a": 0.1 * normal(0, 64, 64), "b": normal(1, 64, 3)}
    batch = normal(2, 3, 2, 64), jnp.array([0.7, 0.1, 0.2])

    def reversal(params, example):
        x, strength = example

        @jax.custom_vjp
        def reverse(h):
            return h

        reverse.defvjp(lambda h: (h, None), lambda _, g: (-strength * g,))
        return jnp.sum(reverse(jnp.tanh(x @ params["a"])) @ params["b"])

    def constant(params, example):
        temperature = jnp.exp(-1.0)

        @jax.custom_jvp
        def squash(h):
            return jnp.tanh(h / temperature)

        @squash.defjvp
        def _(primals, tangents):
            y = squash(*primals)
            return y, (1 - y**2) * tangents[0] / temperature

        return jnp.sum(squash(example[0] @ params["a"]) @ params["b"])

    for loss in (reversal, constant):
        assert set(ways(loss, params, batch).values()) == {WAYS["gradient"]}
        assert_agrees(loss, params, batch)

    @jax.jit
    def traced(x, outside):
        def ordinary(params, example):  # closes over a traced value itself
            return jnp.sum(jax.nn.relu(example[0] @ params["a"] * outside) @ params["b"])

        assert WAYS["gradient"] not in ways(ordinary, params, (x, batch[1])).values()
        return 0

    traced(batch[0], jnp.exp(-1.0))


def test_arrays_that_the_loss_changes_in_place_fall_back():
    def loss(params, x):
        total, kernel = jax.new_ref(jnp.zeros(4)), jax.new_ref(params["a"])
        kernel[0] = 2 * kernel[1]

        def add(carry, row):
            total[...] += row @ params["b"]
            return carry, None

        lax.scan(add, 0, x @ kernel[...])
        return score(total[...] @ params["c"])

    params = {"a": normal(1, 3, 3), "b": normal(2, 3, 4), "c": normal(3, 4, 5)}
    assert_agrees(loss, params, normal(4, 4, 2, 3), norms=("ghost",))


def test_nothing_to_follow():
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}

    def empty(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"])) + jnp.sum(params["b"] ** 2)

    def no_layers(params, x):
        return jnp.sum(jax.lax.fori_loop(0, 0, lambda _, h: h @ params["w"] @ params["w"].T, x) ** 2)

    def no_layers_by_index(params, x):
        columns = params["w"].T
        return jnp.sum(jax.lax.fori_loop(0, 0, lambda i, h: h * jax.lax.dynamic_index_in_dim(columns, i), x) ** 2)

    def no_positions(params, x):
        return jnp.sum(x @ params["w"]) + jnp.sum(x[:0, :1] - params["b"][None])

    assert_agrees(empty, params, jnp.zeros((1, 0, 3)))
    for loss in (no_layers, no_layers_by_index, no_positions):
        assert_agrees(loss, params, normal(3, 2, 5, 3))
    off = jnp.zeros(())
    found = clipped_sums(lambda params, x: off, params, jnp.zeros((1, 3)), "ghost")
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(found.updates))
    with pytest.raises(ValueError, match="gradients must be real, got complex64"):
        clipped_sums(lambda p, x: jnp.abs(p["w"]).sum(), {"w": jnp.ones(3, jnp.complex64)}, jnp.zeros((1, 3)), "ghost")


def test_a_weakly_typed_batch_keeps_the_dtype_of_the_parameters():
    x = jnp.broadcast_to(jnp.asarray(0.37), (4, 2))
    params = {"w": normal(1, 2, 32).astype(jnp.bfloat16), "s": normal(2, 32).astype(jnp.bfloat16)}
    seen = []

    def loss(params, x):
        y = jnp.sin(3 * (x @ params["w"]) * params["s"])
        seen.append(y.dtype)
        return jnp.sum(y.astype(jnp.float32))

    assert x.weak_type
    with jax.numpy_dtype_promotion("standard"):
        clipped_sums(loss, params, x, "ghost")
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}


def test_norms_are_never_underestimated_by_gram_matrices():
    a, b = normal(1, 200, 2, 6, 30), normal(2, 200, 2, 6, 20)
    exact = np.einsum("nkti,nkto->nkio", np.float64(a), np.float64(b))
    exact = np.sqrt((exact**2).sum(axis=(1, 2, 3)))
    found = jax.jit(jax.vmap(norms.gram_norm), compiler_options=QUICK)(a, b)
    assert (found >= exact * (1 - 1e-6)).all() and (found <= exact * (1 + 3e-5)).all()


def test_coordinates_that_mix_fall_back():
    turn = dpx.coordinates.Coordinates(
        init=lambda params: (),
        encode=lambda grad, state: jax.tree.map(lambda g: g[::-1], grad),
        decode=lambda released, state, like: (jax.tree.map(lambda r: r[::-1], released), state),
        name="turn",
    )
    made = noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), turn))
    params, batch = problem()
    assert set(ways(network, params, batch, made=made).values()) == {WAYS["gradient"]}
    assert_agrees(network, params, batch, made=made, norms=("ghost",))


def test_a_wrong_claim_to_support_ghost_norms_falls_back():
    swap = dpx.coordinates.Coordinates(
        init=lambda params: (),
        encode=lambda grad, state: (grad[0] + grad[1], grad[1]),
        decode=lambda released, state, like: (released, state),
        name="sum",
        supports_ghost_norms=True,
    )
    made = noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), swap))
    params = normal(1, 3, 4), normal(2, 3, 4)
    batch = dpx.Batch(normal(3, 2, 3), None)
    found = dpx.explain_norms(lambda p, x: score((x @ p[0]) @ p[1].T), made, params, batch, norms="ghost")
    assert {why for *_, why in found.rows} == {"a coordinate of the mechanism does not depend on exactly one parameter"}


def test_explain_needs_shapes_only_and_prints_a_table():
    params, batch = problem()
    shapes = jax.eval_shape(lambda: (params, dpx.Batch(batch, None)))
    text = str(dpx.explain_norms(network, mechanism(), *shapes))
    assert len(text.splitlines()) == len(params) + 1 and "as small as cotangents" in text
    assert "asked for" in str(dpx.explain_norms(network, mechanism(), params, dpx.Batch(batch, None), norms="vmap"))


@pytest.mark.parametrize(("width", "way"), [(4, "per-example gradients"), (64, "norm from |input| |cotangent|")])
def test_ghost_norms_that_save_little_are_left_to_a_tpu(monkeypatch, width, way):
    """Their own kernels cost a CPU more. 4 x 32 numbers save 3,000 operations for an example, 64 x 32 save 47,000."""
    monkeypatch.setattr(plan, "LEAST_SAVED", LEAST_SAVED)
    params, examples = {"a": normal(1, width, 32), "b": normal(3, 2)}, dpx.Batch(normal(2, 5, width), None)

    def loss(p, x):
        return score(x @ p["a"]) + jnp.sum(jnp.sin(p["b"]))

    for platform, expected in (("cpu", way), ("tpu", "norm from |input| |cotangent|")):
        found = dpx.explain_norms(loss, mechanism(), params, examples, platform=platform)
        assert [row[1] for row in found.rows] == [expected, "per-example gradients"]
    assert [
        row[1] for row in dpx.explain_norms(lambda w, x: score(x @ w), mechanism(), params["a"], examples).rows
    ] == ["norm from |input| |cotangent|"]


def test_explain_folds_parameters_that_differ_in_numbers_only():
    """One line for those that agree in way and reason; every parameter is counted once, and the rows stay."""

    def loss(params, x):
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w1"]) * layer["scale"]
        return jnp.sum(jnp.sin(params["layers"][3]["w1"])) + jnp.sum(x @ params["w2"])

    params = {"layers": [{"w1": normal(1, 3, 3), "scale": normal(2, 3)} for _ in range(12)], "w2": normal(3, 3, 2)}
    found = dpx.explain_norms(loss, mechanism(), params, dpx.Batch(normal(4, 5, 3), None))
    assert len(found.rows) == 25
    lines = {line.split("  ")[0]: line for line in str(found).splitlines() if not line.startswith("rounding")}
    folded = "['layers'][*]['w1'] (11)", "['layers'][3]['w1']", "['layers'][*]['scale'] (12)", "['w2']"
    assert set(lines) == set(folded)


def test_what_cannot_be_is_refused():
    params, batch = problem()
    with pytest.raises(ValueError, match="norms must be"):
        dpx.private_updates(network, mechanism(), norms="fast")
    with pytest.raises(ValueError, match="loss must return one real number"):
        dpx.explain_norms(lambda params, example: example[0], mechanism(), params, dpx.Batch(batch, None))


def axes(draw, count):
    return draw(st.permutations(range(count)))


@given(data=st.data())
@FEW
def test_any_dot_general(data):
    """Contracted, batch and free axes anywhere, of any number, on either side, for data with the examples anywhere."""
    draw = data.draw
    sizes = st.integers(1, 3)
    batch, contracted = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    free_x, free_w = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    x_shape, w_shape = [*batch, *contracted, *free_x], [*batch, *contracted, *free_w]
    x_axes, w_axes = axes(draw, len(x_shape)), axes(draw, len(w_shape))
    shared, n = len(batch), len(batch) + len(contracted)
    x_dims = [x_axes.index(i) for i in range(n)]
    w_dims = [w_axes.index(i) for i in range(n)]
    left = draw(st.booleans())

    def loss(w, x):
        operands, dims = ((w, x), (w_dims, x_dims)) if left else ((x, w), (x_dims, w_dims))
        numbers = tuple(d[shared:] for d in dims), tuple(d[:shared] for d in dims)
        return score(lax.dot_general(*operands, numbers))

    w, x = normal(1, *w_shape).transpose(w_axes), normal(2, SIZE, *x_shape).transpose(0, *(a + 1 for a in x_axes))
    assert set(ways(loss, w, x).values()) != {WAYS["gradient"]}
    assert_agrees(loss, w, x, norms=("ghost",))


@given(data=st.data())
@FEW
def test_any_convolution(data):
    """Any strides, dilations, padding, groups, layouts, in up to three dimensions, on one device and on several."""
    draw = data.draw
    rank, devices = draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups, features_in, features_out = *(draw(st.integers(1, 2)) for _ in range(2)), draw(st.sampled_from([1, 2, 17]))
    taps, stride, dilation, spread, spatial = each(1, 3), each(1, 3), each(1, 2), each(1, 2), each(5, 7)
    padding = tuple((draw(st.integers(-1, 2)), draw(st.integers(0, 2))) for _ in range(rank))
    letters = "HWD"[:rank]
    layouts = tuple("".join(draw(st.permutations(names + letters))) for names in ("NC", "OI", "NC"))
    sizes = dict(zip(letters, spatial, strict=True)) | {"N": draw(st.integers(1, 2)), "C": groups * features_in}
    kernel = dict(zip(letters, taps, strict=True)) | {"O": groups * features_out, "I": features_in}

    def loss(w, x):
        y = lax.conv_general_dilated(
            x, w, stride, padding, spread, dilation, dimension_numbers=layouts, feature_group_count=groups
        )
        return score(y)

    w = normal(1, *(kernel[name] for name in layouts[1]))
    x = normal(2, SIZE, *(sizes[name] for name in layouts[0]))
    for scale in (None, mask):
        made = (
            mechanism()
            if scale is None
            else noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(lambda i, shape: normal(i, *shape))))
        )
        with mock.patch.object(jax, "device_count", lambda: devices):
            assert set(ways(loss, w, x).values()) != {WAYS["gradient"]}
            assert_agrees(loss, w, x, norms=("ghost",), made=made)


@given(count=st.integers(1, 5), width=st.integers(1, 3), shape=st.lists(st.integers(1, 4), max_size=2))
@FEW
def test_any_embedding(count, width, shape):
    def loss(table, tokens):
        return score(table[tokens])

    tokens = integers(1, count, SIZE, *shape)
    table = normal(2, count, width)
    made = noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(lambda i, shape: normal(i, *shape))))
    assert ways(loss, table, tokens) == {"": WAYS["rows"]}
    for chosen in (mechanism(), made):
        assert_agrees(loss, table, tokens, norms=("ghost",), made=chosen)


@pytest.mark.parametrize(
    ("scale", "data"),
    [((1, 1, 3), (1, 5, 3)), ((1, 5, 1), (1, 5, 3)), ((1, 5, 3), (1, 1, 3)), ((1, 1, 1), (1, 5, 1)), ((1, 1), (1, 1))],
)
def test_products_with_axes_of_length_one(scale, data):
    """They are computed without these axes, which changes neither the loss nor a gradient."""
    params = {"kernel": normal(1, data[-1], 4), "scale": normal(2, *scale)}

    def loss(params, x):
        return score(jnp.tanh(jnp.sin(x) * params["scale"]) @ params["kernel"])

    assert_agrees(loss, params, normal(3, SIZE, *data), norms=("ghost",))


def test_tied_weights_under_a_mask_are_computed():
    made = noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(mask)))
    w, x = normal(1, 3, 4), normal(2, SIZE, 3)

    def loss(w, x):
        return score(jnp.tanh(x @ w) @ w.T)

    assert set(ways(loss, w, x, made=made).values()) == {WAYS["product"]}
    assert_agrees(loss, w, x, norms=("ghost",), made=made)


def test_lookups_under_a_mask_are_followed():
    made = noiseless(dpx.in_coordinates(inner(clip_norm=1e-3), scaled(mask)))
    table, tokens = normal(1, 5, 4), integers(2, 5, SIZE, 3)

    def loss(table, t):
        return score(table[t[0]] * jnp.tanh(table[t]).sum(axis=0))

    assert set(ways(loss, table, tokens, made=made).values()) == {WAYS["rows"]}
    assert_agrees(loss, table, tokens, norms=("ghost",), made=made)


@pytest.mark.parametrize("examples", [200, 900])
def test_blocks_that_read_few_rows_add_up_to_the_sum(examples):
    """A table of many rows, of which some are read in all blocks, one in none, and some are dropped."""
    table, c = normal(1, 5000, 3), normal(3, examples, 4, 3)
    tokens = integers(2, 5000, examples, 4).at[::3, 0].set(17).at[::5, 1].set(17).at[::7].set(-6000)

    def loss(table, example):
        tokens, c = example
        return jnp.sum(c * table.at[tokens].get(mode="fill", fill_value=0))

    made, included = mechanism(1.0), jnp.arange(examples) % 11 > 0
    (found,) = clipped_sums(loss, table, (tokens, c), "ghost", made=made, included=included).updates
    grads = np.zeros((examples, 5000, 3))
    np.add.at(grads, (np.arange(examples)[:, None], np.maximum(tokens, 0)), np.where(tokens[..., None] >= 0, c, 0))
    factors = np.asarray(included) / np.maximum(np.linalg.norm(grads.reshape(examples, -1), axis=1), 1)
    np.testing.assert_allclose(found, np.tensordot(factors, grads, 1), atol=1e-4)


def test_a_large_table_is_planned_without_its_memory():
    """Its views are compared as views, without the numbers of its elements."""
    table, tokens = jax.ShapeDtypeStruct((2**27, 32), jnp.float32), integers(2, 5, SIZE, 3)

    def loss(table, t):
        return score(table[t[0]] * jnp.tanh(table[t]).sum(axis=0))

    with mock.patch.object(algorithms._ElementsByUse, "numbers", property(lambda self: 1 / 0)):
        state = jax.eval_shape(mechanism().init, table)
        traced = trace_loss(lambda table, t: (loss(table, t), None), table, tokens[0])
        plan = make_ghost_plan(traced, mechanism(), table, state, force=True)
    assert plan.choices[0][0].algorithm is algorithms.ROWS


def test_uses_that_cancel_keep_the_bound():
    """Two uses whose gradients add up to almost nothing: the norm must not be underestimated."""
    clip_norm, w = 1e-4, normal(3, 50, 40)

    def loss(w, x):
        return jnp.sum(x @ w) - jnp.sum((x * (1 + 1e-5)) @ w)

    x, made = normal(1, 20, 8, 50), mechanism(clip_norm)
    assert set(ways(loss, w, x).values()) == {WAYS["shared"]}
    step = dpx.private_updates(loss, made, norms="ghost")
    (totals,) = jax.jit(jax.vmap(lambda one: step(w, dpx.Batch(one[None], None), made.init(w)).updates))(x)
    for total in totals:
        assert jnp.linalg.norm(total) <= clip_norm * (1 + 1e-6)


def test_parameters_that_are_not_used_keep_their_shapes():
    params = {"unused": jnp.ones(()), "head": jnp.ones((2, 3)), "w": normal(8, 3)}
    assert_agrees(lambda p, x: score(x @ p["w"]), params, normal(9, SIZE, 3))


PRODUCTS = {
    "two parameters": lambda p: p["a"] @ p["b"],
    "a parameter and itself": lambda p: p["a"] @ p["a"].T,
    "a parameter and one that is used elsewhere": lambda p: (p["a"] @ p["b"]) * jnp.sum(p["b"] ** 2),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_parameters(product):
    params = {"a": normal(1, 3, 2), "b": normal(2, 2, 4)}
    assert_agrees(lambda p, x: score(x @ PRODUCTS[product](p)), params, normal(9, SIZE, 3))
