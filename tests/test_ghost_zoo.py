"""A zoo of layers: on each, ghost norms give the numbers of per-example gradients, and go the way they should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import dpx
from tests.ghost import (
    WAYS,
    assert_agrees,
    clipped_sums,
    integers,
    key,
    mechanism,
    noiseless,
    normal,
    random_like,
    score,
    ways,
    zoo,
)

SIZE, BF16 = 5, 4e-2
ZOO, row, animal, layer, module = zoo(SIZE)


def tokens(count, *shape):
    return integers(7, count, SIZE, *shape)


def lookup(apply, count=6, width=3, shape=(8,)):
    return lambda table, t: score(apply(table, t)), normal(1, count, width), tokens(count, *shape)


# dense layers


row("dense", "outer small")(lambda: module(linen.Dense(4), 3))
row("dense_on_a_short_sequence", "gram small")(lambda: module(linen.Dense(40), 3, 30))
row("dense_on_a_long_sequence", "product small")(lambda: module(linen.Dense(4), 50, 3))
row("dense_on_a_grid", "gram")(lambda: layer(lambda w, x: jnp.tanh(x) @ w, normal(1, 30, 40), 2, 2, 30))
row("weight_on_the_left", "gram")(lambda: layer(lambda w, x: w @ x, normal(1, 40, 30), 30, 3))
row("weight_transposed", "outer")(lambda: layer(lambda w, x: x @ w.T, normal(1, 4, 3), 3))
row("weight_packed", "product")(
    lambda: layer(lambda w, x: jnp.split(x @ w, 3, axis=-1)[1] ** 2, normal(1, 3, 12), 20, 3)
)
row("weight_sliced", "outer")(lambda: layer(lambda w, x: x @ w[2:5, ::2], normal(1, 6, 8), 3))
row("weight_reshaped_and_reversed", "outer")(
    lambda: layer(lambda w, x: x @ jnp.flip(w.reshape(6, 4), 0)[None, ...][0], normal(1, 2, 3, 4), 6)
)
row("heads", "gram")(lambda: layer(lambda w, x: jnp.einsum("td,dhk->htk", x, w), normal(1, 20, 4, 7), 2, 20))
row("a_weight_per_head", "product")(
    lambda: layer(lambda w, x: jnp.einsum("thd,hde->the", x, w), normal(1, 4, 3, 2), 16, 4, 3)
)
row("a_weight_per_head_without_sequence", "outer")(
    lambda: layer(lambda w, x: jnp.einsum("hd,hed->he", x, w), normal(1, 4, 2, 3), 4, 3)
)


@animal("outer gram product small")
def deep():
    def apply(p, x):
        y = jnp.tanh(x @ p["a"] + p["bias"])
        y = jnp.tanh(y @ p["b"]).mean(axis=0)
        return y @ p["c"]

    params = {"a": normal(1, 3, 120), "b": normal(2, 120, 120), "c": normal(3, 120, 2), "bias": normal(4, 1, 120)}
    return layer(apply, params, 16, 3)


row("attention", "gram small")(lambda: module(linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=32), 4, 24))


@animal("gram rows outer product small")
def transformer():
    from benchmarks.models import Transformer

    made = Transformer(vocabulary=20, layers=1, features=16, heads=2, length=6)
    params = random_like(jax.eval_shape(made.init, key(1), jnp.zeros(6, jnp.int32))["params"])
    return lambda params, t: score(made.apply({"params": params}, t)), params, tokens(20, 6)


# convolutions


row("convolution", "product small")(lambda: module(linen.Conv(4, (3, 3)), 7, 6, 3))
row("convolution_with_few_positions", "gram small")(lambda: module(linen.Conv(40, (3, 3), strides=2), 4, 4, 8))
row("convolution_strided_and_dilated", "product small")(
    lambda: module(linen.Conv(3, (3, 2), strides=(2, 1), kernel_dilation=(1, 2), padding=((1, 0), (2, 1))), 9, 8, 2)
)
row("convolution_valid_that_leaves_pixels_unused", "product small")(
    lambda: module(linen.Conv(2, (2, 2), strides=3, padding="VALID"), 9, 10, 2)
)
row("convolution_grouped", "product small")(lambda: module(linen.Conv(6, (3, 3), feature_group_count=2), 6, 5, 4))
row("convolution_depthwise", "product small")(lambda: module(linen.Conv(8, (3,), feature_group_count=4), 9, 4))
row("convolution_in_one_dimension", "product small")(lambda: module(linen.Conv(3, (4,), padding="CAUSAL"), 12, 2))
row("convolution_in_three_dimensions", "product small")(lambda: module(linen.Conv(2, (2, 3, 2)), 4, 5, 3, 2))
row("convolution_transposed", "product small")(lambda: module(linen.ConvTranspose(3, (3, 3), strides=(2, 2)), 4, 5, 2))
row("convolution_circular", "product small")(lambda: module(linen.Conv(3, (3, 3), padding="CIRCULAR"), 5, 5, 2))
row("convolution_pointwise", "product small")(lambda: module(linen.Conv(3, (1, 1)), 6, 5, 4))


@animal("product")
def convolution_channels_first_on_several_images():
    def apply(w, x):
        return lax.conv_general_dilated(x, w, (1, 2), ((1, 1), (-1, 2)), dimension_numbers=("NCHW", "OIHW", "HWCN"))

    return layer(apply, normal(1, 3, 2, 3, 3), 3, 2, 6, 7)


@animal("product outer small")
def cnn():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.max_pool(linen.relu(linen.Conv(4, (3, 3))(x)), (2, 2), strides=(2, 2))
            x = jnp.tanh(linen.Conv(5, (3, 3))(x)).mean(axis=1)
            return linen.Dense(3)(x.reshape(-1))

    return module(Net(), 8, 8, 2)


# tables


row("embedding", "rows")(lambda: lookup(lambda table, t: jnp.take(table, t, axis=0)))
row("embedding_by_index_from_the_end", "rows")(lambda: lookup(lambda table, t: table[t - 3]))
row("embedding_on_a_grid_of_tokens", "rows")(lambda: lookup(lambda table, t: table[t], shape=(2, 4)))
row("embedding_beyond_the_table_dropped", "rows")(
    lambda: (lambda table, t: score(table.at[t].get(mode="fill", fill_value=0)), normal(1, 4, 3), tokens(6, 9))
)
row("embedding_beyond_the_table_clipped", "rows")(
    lambda: (lambda table, t: score(jnp.take(table, t, axis=0, mode="clip")), normal(1, 4, 3), tokens(7, 9))
)
row("embedding_of_matrices", "rows")(lambda: (lambda w, t: score(w[t]), normal(1, 4, 2, 3), tokens(4, 6)))
row("embedding_of_one_token", "rows")(lambda: lookup(lambda table, t: table[t], shape=()))
row("embedding_of_many_tables", "rows")(
    lambda: (lambda w, t: score(jax.vmap(lambda w, t: w[t])(w, t.reshape(3, 2))), normal(1, 3, 4, 2), tokens(4, 6))
)
row("elements_gathered", "rows")(lambda: (lambda w, t: score(w[t, 1]), normal(1, 4, 2), tokens(4, 6)))
row("columns_gathered", "rows")(lambda: (lambda w, t: score(w[:, t]), normal(1, 2, 4), tokens(4, 6)))
row("one_hot_rows", "rows")(lambda: lookup(lambda table, t: jax.nn.one_hot(t - 1, 6) @ table))
row("one_hot_columns", "rows")(lambda: lookup(lambda table, t: jnp.einsum("vd,tv->dt", table, jax.nn.one_hot(t, 6))))
row("one_hot_times_weights", "rows")(  # some of them 0
    lambda: lookup(lambda table, t: (jax.nn.one_hot(t, 6) * (t - 2).astype(jnp.float32)[:, None]) @ table)
)
row("one_hot_where_a_mask_is", "rows")(
    lambda: lookup(lambda table, t: jnp.where((t > 1)[:, None], jax.nn.one_hot(t, 6) / 3, 0) @ table)
)
row("one_hot_of_two_that_a_mask_chooses", "product")(
    lambda: lookup(
        lambda table, t: jnp.where(jnp.arange(6) > 2, jax.nn.one_hot(t, 6), jax.nn.one_hot(t - 3, 6)) @ table
    )
)
row("one_hot_of_one_place_times_many", "gram")(
    lambda: (
        lambda w, t: score((jax.nn.one_hot(t, 1) * jnp.arange(30, dtype=jnp.float32)[None]) @ w),
        normal(1, 30, 40),
        tokens(2, 2),
    )
)
row("one_hot_by_comparison", "rows")(
    lambda: lookup(lambda table, t: lax.dot((jnp.arange(6)[:, None] == t[None] - 1).T, table))
)
row("one_hot_of_more_than_its_dtype_counts", "product")(
    lambda: lookup(lambda table, t: jax.nn.one_hot(t.astype(jnp.uint8), 300) @ table, 300)
)
row("comparison_with_one_place", "gram")(
    lambda: (
        lambda w, t: score((jnp.broadcast_to(t[:, None], (2, 30)) == jnp.arange(1)[None]).astype(jnp.float32) @ w),
        normal(1, 30, 40),
        tokens(2, 2),
    )
)
row("comparison_with_one_place_repeated", "gram")(
    lambda: (
        lambda w, t: score((t[:, None] == jnp.broadcast_to(jnp.arange(1), (2, 30))).astype(jnp.float32) @ w),
        normal(1, 30, 40),
        tokens(2, 2),
    )
)
row("rows_of_several_ones", "outer")(lambda: lookup(lambda table, t: jax.nn.one_hot(t, 6).sum(0) @ table))
row("one_hot_along_the_other_axis", "product")(
    lambda: (lambda w, t: score(jax.nn.one_hot(t, 4).T @ w), normal(1, 6, 3), tokens(4, 6))
)
row("constant_times_weights", "product")(
    lambda: (lambda w, x: score(normal(9, 2, 6) @ w * x.sum()), normal(1, 6, 3), normal(4, 4, 2))
)


@animal("rows")
def lookups_of_one_table():
    def apply(table, t):
        rows = table[t[0]] * jax.vmap(lambda i: table[i])(t[1:3]).sum(0)
        rows = rows * jnp.take(table, t[2:], axis=0, mode="clip").sum(0) + jax.nn.one_hot(t[3], 6) @ table
        return jnp.stack([always := table[4], always * rows])

    return lookup(apply)


@animal("rows")
def blocks_of_one_table():
    def apply(w, t):
        some = jax.vmap(lambda i: lax.dynamic_slice_in_dim(w, i, 3))(t)
        return some.sum(0).sum(0) * lax.dynamic_slice_in_dim(w, t[0], 2).sum(0) * w[t[1]]

    return lookup(apply)


@animal("shared")
def tied_embedding_of_several_lookups():
    return lookup(lambda table, t: jnp.tanh(table[t[0]] * table[t[1:]].sum(axis=0)) @ table.T)


# normalizations


row("layer_norm", "small")(lambda: module(linen.LayerNorm(), 3, 5))
row("rms_norm", "small")(lambda: module(linen.RMSNorm(), 3, 5))


@animal("small product")
def group_norm():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.GroupNorm(2)(linen.Conv(4, (3, 3), use_bias=False)(x)[None])[0]

    return module(Net(), 6, 6, 2)


# frameworks, precisions, randomness


@animal("outer small")
def nnx_model():
    graph, state = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Param)[:2]
    return layer(lambda state, x: nnx.merge(graph, state)(x), state, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.weight @ x + self.bias


row("dataclass_that_is_the_model", "outer small")(
    lambda: layer(lambda model, x: model(x), Linear(normal(1, 4, 3), normal(2, 4)), 3)
)


@animal("outer")
def dropout_with_a_key_in_each_example():
    def loss(w, example):
        x, dropout_key = example
        kept = jax.random.bernoulli(dropout_key, 0.5, x.shape)
        return score(jnp.where(kept, x, 0) @ w)

    return loss, normal(1, 8, 4), (normal(2, SIZE, 8), jax.random.split(key(3), SIZE))


row("bf16_computation", "outer small", tolerance=BF16)(lambda: module(linen.Dense(4, dtype=jnp.bfloat16), 3))


@animal("gram", tolerance=BF16)
def bf16_parameters():
    w = normal(1, 30, 40).astype(jnp.bfloat16)
    return lambda w, x: score(x @ w), w, normal(2, SIZE, 3, 30).astype(jnp.bfloat16)


row("unused_parameter", "outer unused")(
    lambda: layer(lambda p, x: x @ p["w"], {"w": normal(1, 3, 4), "other": normal(2, 5)}, 3)
)


@animal("outer")
def jit_in_jit():
    inner = jax.jit(lambda w, x: x @ w.T)
    return layer(jax.jit(lambda w, x: jnp.tanh(inner(w.reshape(4, 3), x))), normal(1, 12), 3)


row("vmap_in_the_loss", "product outer")(
    lambda: layer(
        lambda p, x: jax.vmap(lambda row: jnp.tanh(row @ p[0]))(x).sum(axis=0) @ p[1],
        (normal(1, 3, 4), normal(2, 4, 2)),
        20,
        3,
    )
)
row("weight_that_meets_a_constant", "outer")(
    lambda: layer(lambda w, x: jnp.ones(3, jnp.float32) @ w * x, normal(1, 3, 4), 4)
)


# kernels made of parameters


def made(kernel, *positions, width=3, params=None, apply=lambda x, w: jnp.tanh(x @ w)):
    """A dense layer of a kernel that is made of two (3, 4)."""
    params = {"a": normal(1, 3, 4), "b": normal(2, 3, 4)} if params is None else params
    return layer(lambda p, x: apply(x, kernel(p)), params, *positions, width)


MASK = np.tri(3, 4, dtype=np.float32)
row("kernels_side_by_side", "outer")(lambda: made(lambda p: jnp.concatenate([p["a"], p["b"]], 1)))
row("kernels_above_one_another", "product")(
    lambda: made(lambda p: jnp.concatenate([p["a"], p["b"][::-1]]), 20, width=6, apply=lambda x, w: jnp.tanh(x @ w))
)
row("kernels_side_by_side_for_each_head", "product")(
    lambda: made(
        lambda p: jnp.stack([p["a"], p["b"]], 1), 20, apply=lambda x, w: jnp.tanh(jnp.einsum("td,dhk->htk", x, w))
    )
)
row("kernels_in_turn", "outer")(lambda: made(lambda p: jnp.stack([p["a"], p["b"]], -1).reshape(3, 8)))
row("kernel_of_a_stack_made_in_the_loss", "outer product")(lambda: made(lambda p: jnp.stack([p["a"], p["b"]])[0]))
row("kernel_padded", "outer unused")(lambda: made(lambda p: jnp.pad(p["a"], ((0, 0), (1, 2)))[:, :6].T.T))
row("kernel_times_a_number", "product unused")(lambda: made(lambda p: 0.5 * p["a"], 20))
row("kernels_times_numbers_of_their_inputs_and_one", "outer")(
    lambda: made(
        lambda p: (p["a"].T * np.float32([[0.5], [2], [3], [4]]), 0.5 * p["b"].T),
        width=4,
        apply=lambda x, w: jnp.tanh(x @ w[0]) * (x @ w[1]),
    )
)
row("kernel_masked", "outer unused")(lambda: made(lambda p: p["a"] * MASK))
row("kernel_masked_on_a_sequence", "product unused")(lambda: made(lambda p: jnp.tril(p["a"]), 20))
row("kernel_of_two_masked", "product")(lambda: made(lambda p: jnp.where(MASK > 0, p["a"], jnp.exp(p["b"])), 20))
row("kernel_of_a_sum", "product")(lambda: made(lambda p: 0.5 * (p["a"] - p["b"]), 20))
row("kernel_of_a_product", "product")(lambda: made(lambda p: p["a"] * p["b"], 20))
row("kernel_that_is_positive", "outer")(lambda: made(lambda p: jax.nn.softplus(p["a"]) - jax.nn.relu(p["b"])))
row("kernel_divided_by_a_fixed_norm", "product unused")(
    lambda: made(lambda p: p["a"] / jnp.linalg.norm(lax.stop_gradient(p["a"])), 20)
)
row("kernel_divided_by_fixed_norms_of_its_columns", "product unused")(
    lambda: made(lambda p: p["a"] / lax.stop_gradient(jnp.linalg.norm(p["a"], axis=0, keepdims=True)), 20)
)
row("kernel_divided_by_fixed_norms_of_its_rows", "product unused")(
    lambda: made(lambda p: p["a"] / jnp.linalg.norm(lax.stop_gradient(p["a"]), axis=1, keepdims=True), 20)
)
row("kernel_of_two_of_one", "product unused")(lambda: made(lambda p: jnp.exp(p["a"]) * MASK + p["a"] * (1 - MASK), 20))
row("kernel_of_one_given_twice", "outer")(
    lambda: (
        lambda w, x: score(jax.checkpoint(lambda v, w, again, x: x @ (v + w - 3 * again))(jnp.tanh(w), w, w, x)),
        normal(1, 6, 20),
        normal(9, SIZE, 6),
    )
)
row("kernel_rounded_straight_through", "product unused")(
    lambda: made(lambda p: p["a"] + lax.stop_gradient(jnp.round(p["a"] * 4) / 4 - p["a"]), 20)
)
row("kernel_that_is_complex", "product")(
    lambda: made(
        lambda p: p["a"].astype(jnp.complex64) + np.complex64(1j) * p["b"].astype(jnp.complex64),
        20,
        apply=lambda x, w: jnp.abs(x.astype(jnp.complex64) @ w),
    )
)
row("kernel_that_is_complex_and_scaled", "product")(
    lambda: made(
        lambda p: lax.complex(p["a"], p["b"]).T * np.complex64([[0.5j, 2 - 1j, 3]]),
        20,
        width=4,
        apply=lambda x, w: jnp.real(lax.complex(x, 0.5 * x) @ w) ** 2,
    )
)
row("kernel_of_complex_data", "product unused")(
    lambda: made(
        lambda p: p["a"].T,
        20,
        apply=lambda x, w: jnp.abs(lax.dot(w, lax.complex(x, x**2).T, preferred_element_type=jnp.complex64)),
    )
)
row("kernel_that_is_symmetric", "shared")(
    lambda: made(lambda p: p["a"] + p["a"].T, 2, width=4, params={"a": normal(1, 4, 4)})
)


@animal("shared")
def kernel_that_is_a_complex_matrix_of_blocks():
    def kernel(p):
        return jnp.concatenate([jnp.concatenate([p["a"], -p["b"]], 1), jnp.concatenate([p["b"], p["a"]], 1)])

    return made(kernel, 2, width=6)


@animal("product")
def kernel_masked_of_a_convolution():
    mask = np.ones((3, 3, 1, 1), np.float32)
    mask[1, 2:], mask[2:] = 0, 0
    return module(linen.Conv(4, (3, 3), use_bias=False, mask=jnp.asarray(np.broadcast_to(mask, (3, 3, 2, 4)))), 6, 6, 2)


@animal("product")
def kernels_scaled_and_side_by_side_of_a_convolution():
    def apply(p, x):
        kernel = jnp.concatenate([p["a"] * 0.3, p["b"]], -1)
        return lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return layer(apply, {"a": normal(1, 3, 3, 2, 2), "b": normal(2, 3, 3, 2, 3)}, 6, 6, 2)


@animal("product")
def kernel_scaled_of_a_convolution():
    def apply(p, x):
        return lax.conv_general_dilated(x[None], p * 0.3, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return layer(apply, normal(1, 3, 3, 2, 2), 6, 6, 2)


@animal("product small")
def lstm_of_two_directions():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            cells = [linen.RNN(linen.OptimizedLSTMCell(4)) for _ in range(2)]
            return linen.Bidirectional(*cells)(x)

    return module(Net(), 9, 3)


# kernels that are other functions of parameters


def normalized(p, axis=0):
    return p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=axis, keepdims=True)


def direction(inputs, outputs, *stack):
    return {"v": normal(1, *stack, inputs, outputs), "g": normal(2, *stack, 1, outputs)}


row("weight_normalized_by_flax", "product small")(lambda: module(linen.WeightNorm(linen.Dense(4)), 20, 3))
row("weight_normalized_that_is_large", "recomputed")(
    lambda: layer(lambda p, x: jnp.tanh(x @ normalized(p)), direction(70, 72), 2, 70)
)
row("weight_normalized_that_is_used_twice", "product")(
    lambda: layer(lambda p, x: jnp.tanh(x @ normalized(p)) @ normalized(p).T, direction(3, 4), 2, 3)
)
row("weights_normalized_before_their_scan", "product")(
    lambda: layer(
        lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, normalized(p, 1))[0], direction(4, 4, 3), 2, 4
    )
)
row("weight_normalized_in_each_iteration", "product")(
    lambda: layer(
        lambda p, x: lax.scan(lambda h, x: (jnp.tanh(h @ normalized(p) + x), None), jnp.zeros(4), x)[0],
        direction(4, 4),
        6,
        4,
    )
)
row("weight_divided_by_its_spectral_norm", "shared")(
    lambda: layer(lambda w, x: jnp.tanh(x @ (w / (jnp.ones(3) @ w @ jnp.ones(4)))), normal(1, 3, 4), 3)
)


@animal("gradient product")
def weight_normalized_that_meets_data():
    def apply(p, x):
        kernel = normalized(p)
        return (x @ kernel + jnp.sum(jnp.maximum(x[:, None], kernel), 0)) @ (p["u"] / jnp.sum(p["u"]))

    return layer(apply, direction(3, 4) | {"u": normal(3, 4, 2)}, 3)


row("weight_of_a_power_iteration", "product")(
    lambda: layer(
        lambda w, x: x @ lax.fori_loop(0, 3, lambda _, v: v @ w / jnp.linalg.norm(w), jnp.ones((3, 3))),
        normal(1, 3, 3),
        3,
    )
)
row("table_of_normalized_rows", "product")(
    lambda: lookup(lambda table, t: (table / jnp.linalg.norm(table, axis=1, keepdims=True))[t])
)


@animal("product")
def weight_standardized_of_a_convolution():
    def apply(w, x):
        mean, variance = (of(w, (0, 1, 2), keepdims=True) for of in (jnp.mean, jnp.var))
        w = (w - mean) * lax.rsqrt(variance + 1e-5)
        return lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return layer(apply, normal(1, 3, 3, 2, 4), 6, 6, 2)


# parameters used several times


row("tied_weights", "shared")(lambda: layer(lambda w, x: jnp.tanh(x @ w) @ w.T, normal(1, 3, 4), 3))


@animal("recomputed", tolerance=5e-4)
def weight_used_twice_on_many_positions():
    return layer(lambda w, x: jnp.stack([jnp.tanh(x[:150] @ w), jnp.cos(x[150:] @ w)]), normal(1, 6, 5), 300, 6)


@animal("shared")
def tied_weights_of_heads():
    def apply(w, x):
        return jnp.einsum("thk,dhk->td", jnp.tanh(jnp.einsum("td,dhk->thk", x, w)), w)

    return layer(apply, normal(1, 4, 2, 3), 5, 4)


row("tied_embedding", "shared")(lambda: lookup(lambda table, t: jnp.tanh(table[t]) @ table.T))


@animal("shared")
def tied_embedding_beyond_the_table_dropped():
    def apply(table, t):
        return jnp.tanh(table.at[t].get(mode="fill", fill_value=0)).mean(axis=0) @ table.T

    return lambda table, t: score(apply(table, t)), normal(1, 4, 3), tokens(6, 9)


@animal("rows small")
def embedding_of_two_sequences():
    def apply(p, t):
        return jnp.tanh(p[0][t[:3]]).sum(axis=0) * jnp.tanh(p[0][t[3:]] + p[1][None, :]).sum(axis=0)

    return lambda p, t: score(apply(p, t)), (normal(1, 6, 3), normal(2, 3)), tokens(6, 8)


@animal("shared outer")
def recurrent():
    def apply(p, x):
        h = jnp.zeros(4, jnp.float32)
        for row in x:
            h = jnp.tanh(row @ p["in"] + h @ p["over"])
        return h @ p["out"]

    params = {"in": normal(1, 3, 4), "over": normal(2, 4, 4), "out": normal(3, 4, 2)}
    return layer(apply, params, 4, 3)


@animal("shared")
def convolution_of_two_images():
    def apply(w, x):
        one = lax.conv(x[:1], w, (1, 1), "SAME")
        return one * lax.conv(jnp.tanh(x[1:]), w, (2, 1), "SAME").repeat(2, axis=2)

    return layer(apply, normal(1, 3, 2, 3, 2), 2, 2, 4, 5)


row("weight_used_in_slices", "outer")(
    lambda: layer(lambda w, x: jnp.tanh(x @ w[:, :4]) * (x @ w[:, 4:]), normal(1, 3, 8), 3)
)


@animal("shared small")
def gradient_penalty():
    def loss(p, x):
        def value(x):
            return score(jnp.tanh(x @ p["w"] + p["b"]))

        return value(x) + jnp.sum(jax.grad(value)(x) ** 2)

    return loss, {"w": normal(1, 3, 4), "b": normal(2, 4)}, normal(3, SIZE, 3)


row("weight_used_in_slices_that_overlap", "product")(
    lambda: layer(lambda w, x: jnp.tanh(x @ w[:, :4]) * (x @ w[:, 2:6]), normal(1, 3, 8), 3)
)


@animal("shared")
def weight_used_where_the_data_says_and_whole():
    def loss(w, example):
        x, place = example
        return score(jnp.tanh(lax.dynamic_slice(w, (place, jnp.int32(0)), (1, 4))[0]) + x @ w)

    return loss, normal(1, 3, 4), (normal(2, SIZE, 3), integers(3, 3, SIZE))


# what must keep its per-example gradient


@animal("product")
def used_in_a_scan():
    def apply(w, x):
        return lax.scan(lambda h, row: (jnp.tanh(row @ w + h), None), jnp.zeros(4, x.dtype), x)[0]

    return layer(apply, normal(1, 3, 4), 5, 3)


row("stacked_layers_in_a_scan", "outer")(
    lambda: layer(lambda w, x: lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0], normal(1, 3, 4, 4), 4)
)


def class_token(p, x):
    """Beside the data, with a place and a scale of its own; both tables have one shape, and the scale is used twice."""
    y = jnp.concatenate([p["token"], x]) * p["scale"][None] + p["places"]
    return jnp.maximum(y, p["least"]) * p["scale"][None]


CLASS_TOKEN = {"token": (1, 4), "scale": (4,), "places": (4, 4), "least": (4, 4)}
row("class_token", "small")(
    lambda: layer(class_token, {name: normal(i, *shape) for i, (name, shape) in enumerate(CLASS_TOKEN.items())}, 3, 4)
)
row("repeated_before_data", "small")(
    lambda: layer(lambda b, x: x + jnp.broadcast_to(jnp.tanh(b)[:, None], (3, 4)), normal(1, 3), 3, 4)
)
row("kernel_of_running_sums", "product")(lambda: layer(lambda w, x: x @ jnp.cumsum(w, 0), normal(1, 3, 4), 3))
row("used_in_a_branch", "shared")(
    lambda: layer(lambda w, x: lax.cond(x[0] > 0, lambda: x @ w, lambda: -2.0 * (x @ w)), normal(1, 30, 40), 30)
)
row("divides_in_a_branch", "gradient")(
    lambda: layer(lambda w, x: lax.cond(x[0] > 0, lambda: x @ w, lambda: x @ (x[:, None] / w)), normal(1, 3, 4), 3)
)


@animal("outer rows")
def branches_that_only_some_examples_may_take():
    """All numbers are NaN, and their gradients, in the branch of a root and a logarithm, where it is not taken."""

    def loss(p, example):
        x, t = example
        s = jnp.sum(jnp.tanh(x @ p["in"]))

        def root():
            return jnp.sqrt(s) * jnp.tanh((jnp.log(s) * x) @ p["w"]) + p["table"][t]

        return score(lax.switch((s > 0).astype(jnp.int32), [lambda: jax.jit(jnp.dot)(x, p["v"]), root]))

    params = {"in": normal(1, 9, 12), "w": normal(2, 9, 12), "v": normal(3, 9, 12), "table": normal(4, 6, 12)}
    return loss, params, (normal(5, SIZE, 9), tokens(6))


row("used_under_remat", "outer")(
    lambda: layer(
        lambda p, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p[0], x) @ p[1], (normal(1, 3, 4), normal(2, 4, 2)), 3
    )
)


@jax.custom_jvp
def sums(w):
    return jnp.cumsum(w, 0)


sums.defjvp(lambda values, tangents: (sums(*values), sums(*tangents)))


@jax.custom_vjp
def reversed_gradient(w, x):
    return x @ w


reversed_gradient.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda saved, dy: (-3.0 * jnp.outer(saved[1], dy), saved[0] @ dy)
)


row("under_a_custom_derivative", "outer")(lambda: layer(reversed_gradient, normal(1, 3, 4), 3))


def dense_with(of_kernel):
    """A dense layer whose backward pass computes the gradient of its kernel by `of_kernel`: (x, dy) -> like w."""
    dense = jax.custom_vjp(lambda w, x: jnp.round(x) @ w)
    dense.defvjp(lambda w, x: (dense(w, x), (w, x)), lambda saved, dy: (of_kernel(saved[1], dy), dy @ saved[0].T))
    return dense


straight = dense_with(lambda x, dy: x.T @ dy)
swapped = dense_with(lambda x, dy: (dy.T @ x).T)
limited = dense_with(lambda x, dy: -jnp.einsum("ti,to->io", x, dy) / (1 + jnp.linalg.norm(dy)) * 3.0)
decayed = dense_with(lambda x, dy: x.T @ dy + 0.1)


@animal("gram")
def backward_passes_of_their_own():
    def apply(p, x):
        for number, dense in enumerate((straight, swapped, limited)):
            x = jnp.tanh(jax.checkpoint(dense)(p[number], x))
        return x

    return layer(apply, [normal(i, 24, 24) for i in range(3)], 3, 24)


@animal("gradient gram product outer shared")
def backward_passes_of_their_own_in_loops():
    def apply(p, x):
        x = lax.scan(lambda h, w: (jnp.tanh(limited(w, h)), None), x, p["stack"])[0]
        x = lax.scan(lambda h, _: (jnp.tanh(limited(p["same"], h)), None), x, None, length=3)[0]
        x = straight(p["tied"], jnp.tanh(x)) @ p["tied"].T
        x = jax.vmap(reversed_gradient, (None, 0))(p["rows"], x)
        x = jax.vmap(straight, (None, 0))(p["groups"], x[:, None])[:, 0]
        x = straight(p["normal"] / jnp.linalg.norm(p["normal"]), decayed(p["decayed"], x))
        return reversed_gradient(p["last"], jnp.tanh(x).reshape(-1))

    sizes = {"stack": (2, 24, 24), "last": (72, 5)}
    names = "stack same tied rows groups normal decayed last".split()
    return layer(apply, {name: normal(i, *sizes.get(name, (24, 24))) / 3 for i, name in enumerate(names)}, 3, 24)


@animal("gradient")
def products_that_are_no_matrix_products():
    of_kernels = [
        lambda x, dy: (x.T @ dy) * (x.T @ dy),
        lambda x, dy: jnp.cumsum(x.T @ dy, 0),
        lambda x, dy: (x.T @ dy).astype(jnp.int32).astype(jnp.float32),
        lambda x, dy: lax.reshape(x.T @ dy, (4, 24), (1, 0)),
    ]

    def apply(p, x):
        return sum(dense_with(of_kernel)(w, x) for of_kernel, w in zip(of_kernels, p, strict=True))

    return layer(apply, [normal(number, 4, 24) for number in range(4)], 3, 4)


@animal("gradient")
def gradients_of_the_forward_pass():
    """What the forward pass hands to the backward pass is a product, or a number in every place of the gradient."""

    @jax.custom_vjp
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    loss.defvjp(lambda w, x: (loss(w, x), (x.T @ jnp.cos(x @ w), x)), lambda saved, dy: (dy * saved[0], saved[1]))

    @jax.custom_vjp
    def dense(w, x):
        return x @ w

    dense.defvjp(
        lambda w, x: (x @ w, (w, x, jnp.broadcast_to(jnp.sum(x), w.shape))),
        lambda saved, dy: (saved[2] * (saved[1].T @ dy), dy @ saved[0].T),
    )
    return layer(lambda p, x: loss(p[0], x) + dense(p[1], x), [normal(1, 4, 24), normal(2, 4, 24)], 3, 4)


@animal("gram")
def backward_pass_that_closes_over_constants():
    """And the index that it returns has no gradient."""
    constant = normal(7, 1, 24)

    @jax.custom_vjp
    def nearest(codes, x):
        index = jnp.argmax(x @ (codes * constant).T, -1)
        return codes[index], index

    def forward(codes, x):
        y, index = nearest(codes, x)
        return (y, index), (codes, index)

    nearest.defvjp(forward, lambda saved, dy: (jax.nn.one_hot(saved[1], len(saved[0])).T @ dy[0], dy[0] * constant))
    return layer(
        lambda p, x: nearest(p["codes"], x @ p["w"])[0], {"codes": normal(1, 48, 24), "w": normal(2, 24, 24)}, 3, 24
    )


row("weight_normalized", "product")(
    lambda: layer(lambda w, x: x @ (w / jnp.linalg.norm(w, axis=0, keepdims=True)), normal(1, 3, 4), 3)
)
row("weight_through_functions_of_two_orders", "product")(
    lambda: layer(lambda w, x: x @ jnp.tanh(w + w.T), normal(1, 4, 4), 4)
)
row("weight_through_sums_of_its_columns", "product")(lambda: layer(lambda w, x: x @ sums(w), normal(1, 3, 4), 3))
row("weight_times_what_the_data_says", "small")(lambda: layer(lambda w, x: x @ (w * x[0]), normal(1, 3, 4), 3))
row("weight_that_divides", "gradient")(
    lambda: layer(lambda w, x: x @ w / (1 + jnp.sum(w**2, keepdims=True)[0]), normal(1, 3, 4), 3)
)


@animal("product")
def weight_decay_in_the_loss():
    def loss(p, x):
        return score(jnp.tanh(x @ p["a"]) @ p["b"]) + 0.1 * sum(jnp.sum(w**2) for w in p.values())

    return loss, {"a": normal(1, 4, 4), "b": normal(2, 4, 4)}, normal(3, SIZE, 4)


@animal("product")
def scaled_and_shifted_by_functions():
    def apply(p, x):
        scale, shift = (jnp.sqrt(jnp.sum(p[axis] ** 2, axis, keepdims=True)) for axis in (0, 1))
        return shift - x * scale

    return layer(apply, [normal(1, 9, 4), normal(2, 3, 9)], 3, 4)


row("places_of_a_longer_table", "outer")(
    lambda: layer(
        lambda p, x: jnp.tanh(x * p["scale"][:3] + p["more"][:3]) - p["less"][:3],
        {name: normal(i, 5, 4) for i, name in enumerate(("less", "scale", "more"))},
        *(3, 4),
    )
)
row("places_that_are_added_twice", "shared")(
    lambda: layer(lambda table, x: jnp.tanh(x + table[:3]) - table[:3], normal(1, 9, 4), 3, 4)
)
row("weight_as_the_data_of_a_convolution", "gradient")(lambda: layer(lambda w, x: jnp.convolve(w, x), normal(1, 9), 3))
row("weight_broadcast", "product")(lambda: layer(lambda w, x: x @ jnp.broadcast_to(w, (3, 4)), normal(1, 4), 3))
row("parameter_that_is_the_loss", "gradient")(lambda: (lambda w, x: w, jnp.float32(2.0), normal(1, SIZE, 3)))


@pytest.mark.parametrize("name", ZOO)
# The layers, and what else has a path of its own, are in `make test`; all are in `make long`.
@pytest.mark.long_cases(
    *"""
    a_weight_per_head a_weight_per_head_without_sequence convolution_grouped deep gradient_penalty
    kernel_divided_by_a_fixed_norm kernel_of_a_sum places_that_are_added recurrent tied_embedding_of_several
    weight_decay_in_the_loss bf16_computation bf16_parameters cnn columns_gathered
    constant_times_weights convolution_channels_first convolution_circular convolution_depthwise convolution_in_
    convolution_of_two_images convolution_pointwise convolution_strided_and_dilated convolution_transposed
    convolution_valid_ dataclass_that_is_the_model dense_on_a_grid dense_on_a_long dense_on_a_short_sequence
    dropout_with_a_key elements_gathered embedding_beyond embedding_of_ embedding_on_a_grid_of_tokens group_norm
    jit_in_jit kernel_divided_by_fixed_norms_of_its_columns kernel_masked_of_a_conv kernel_masked_on_a_sequence
    kernel_of_a_product kernel_of_a_stack kernel_of_running_sums kernel_of_two_masked kernel_padded
    kernel_rounded_straight_through kernel_scaled_ kernel_that_is_a_complex_matrix kernel_that_is_complex_and
    kernel_that_is_symmetric kernel_times_a_number kernels_above kernels_scaled kernels_side_by_side_for_each_head
    lstm_of_two_directions nnx_model one_hot_columns one_hot_rows rms_norm stacked_layers_in_a_scan
    table_of_normalized_rows tied_embedding_beyond tied_weights_of_heads transformer used_in_a_branch
    backward_passes_of_their_own_in_loops
    used_under_remat vmap_in_the_loss weight_divided_by_its_spectral_norm weight_normalized_by_flax
    weight_normalized_in_each weight_normalized_that_is_large weight_of_a_power_iteration weight_on_the_left
    weight_packed weight_reshaped weight_standardized weight_that_meets_a_constant weight_through_functions
    weight_times_what weight_used_twice_on_many weight_used_where_the_data weights_normalized_before
    """.split()
)
def test_equals_per_example_gradients(name):
    make, expected, tolerance = ZOO[name]
    loss, params, batch = make()
    found = ways(loss, params, batch)
    assert set(found.values()) == expected
    same_program = ways(loss, params, batch, norms="auto") == found
    clipping = ("ghost",) if same_program else ("ghost", "auto")
    sums = assert_agrees(loss, params, batch, norms=clipping, tolerance=tolerance)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sums))


MASKED = ["kernels_side_by_side", "kernel_masked", "kernel_of_a_sum"]
MASKED += ["weight_normalized", "weight_normalized_that_is_large"]


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.long_cases("kernel_of_a_sum", "kernels_side_by_side")
def test_a_mask_reaches_a_function(name):
    loss, params, batch = ZOO[name][0]()
    masked = dpx.coordinates.random_freeze(freeze_rate=0.4, every=1, key=key(5))
    assert_agrees(loss, params, batch, norms=("ghost",), made=noiseless(dpx.in_coordinates(mechanism(), masked)))


@pytest.mark.parametrize("sizes", [(3, 4), (70, 72)])
@pytest.mark.parametrize("kernel", [jnp.sqrt, lambda w: jnp.sqrt(w) / jnp.sum(w)])
def test_slopes_that_are_not_finite_add_nothing(kernel, sizes):
    params, x = jnp.zeros(sizes).at[1, 2].set(-1.0), normal(1, SIZE, sizes[0])
    found = clipped_sums(lambda w, x: score(x @ kernel(w)), params, x, "ghost").updates
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "name", [*(name for name in ZOO if name.startswith("convolution")), "heads", "embedding", "used_in_a_scan"]
)
@pytest.mark.long_cases("convolution", "embedding-float64", "heads-float64", "used_in_a_scan")
def test_with_64_bits(name, dtype):
    with jax.enable_x64(True):
        loss, *arrays = ZOO[name][0]()
        real = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)
        clipping = ("ghost",) if dtype == np.float32 else ("ghost", "auto")
        assert_agrees(loss, *real, norms=clipping, microbatch_size=2 if dtype == np.float64 else None)


def test_a_scaled_kernel_in_float64():
    with jax.enable_x64(True):
        w, x = jnp.asarray(normal(1, 3, 4), np.float64), jnp.asarray(normal(2, SIZE, 2, 3), np.float64)
        assert_agrees(lambda w, x: score(x @ (w * jnp.arange(1.0, 5)[None])), w, x, norms=("ghost",))


def test_what_stop_gradient_keeps_from_the_gradient_is_no_use():
    def loss(w, x):
        return jnp.sum(jnp.sin(x[0] @ w) * jax.lax.stop_gradient(jnp.tanh(x[1] @ w)))

    assert ways(loss, normal(1, 4, 3), normal(2, 5, 2, 4)) == {"": WAYS["outer"]}


def test_enough_animals():
    followed = [name for name, (_, expected, _) in ZOO.items() if not expected <= {WAYS["gradient"], WAYS["small"]}]
    assert len(followed) >= 100 and len(ZOO) - len(followed) >= 8
